"""What is found out about a job's data before any worker starts, and what a run remembers of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.data.prepare import prepare
from elastic.errors import ModelError
from elastic.job import Job
from elastic.train.setup import preflight
from tests.data.texts import write_texts

TEXT = "It was the best of times, it was the worst of times. " * 40


def job_on(root: Path, data: str | Path, **changes: Any) -> Job:
    model = {"vocab": 257, "dim": 16, "layers": 1, "heads": 2}
    args = {"path": str(data), "seq_len": 8}
    values = {"name": "run", "bucket": str(root / "bucket"), "model_args": model, "data": {"args": args}}
    return Job(**(values | changes))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "text", {"a.txt": TEXT})


def test_a_model_with_too_small_a_vocabulary_is_refused(tmp_path: Path, text: Path) -> None:
    prepare(text, str(tmp_path / "data"), bpe=270)
    sentence = r"^model_args\.vocab = 257 is smaller than the vocabulary of the dataset, 270; set it to 270 or more$"
    with pytest.raises(ModelError, match=sentence):
        preflight(job_on(tmp_path, tmp_path / "data"))
    assert not (tmp_path / "bucket").exists(), "refused before the run begins"
    preflight(job_on(tmp_path, tmp_path / "data", model_args={"vocab": 270, "dim": 16, "layers": 1, "heads": 2}))
