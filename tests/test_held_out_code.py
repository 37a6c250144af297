"""L10: no weight depends on the code of the held-out data, so it is free to change; all other code is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.cli import main
from actors.launch import launch
from elastic.errors import JobError
from elastic.runs import asked
from elastic.runs.code import noted
from elastic.runs.metrics import rows_of
from elastic.runs.resume import best_of
from elastic.runs.run import Run
from elastic.train.alone.revisit import evaluate_here, rerun_here
from tests import test_sources
from tests.support.chaos import exported_hash
from tests.support.job_file import to_toml
from tests.test_sources import GELU, RELU, edit, job_of, trained

HELD_OUT = """
from .samples import Waves


class Kept(Waves):
    def read(self, ids):
        return super().read([1000 + i for i in ids])

    def fingerprint(self):
        return "kept"
"""
VALIDATION = {"every": 3, "dataset": "mine.held_out:Kept"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields the folder of the code, with held-out data in a file of their own."""
    for folder in test_sources.code.__wrapped__(tmp_path, monkeypatch):  # type: ignore[attr-defined]
        (folder / "mine/held_out.py").write_text(HELD_OUT)
        yield folder


def test_l10_held_out_data_in_a_file_of_their_own_lock_nobody_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """L10: nothing has changed, and `evaluate`, `rerun` and `owed --pay` find what the run has recorded, to
    the bit.

    The control: a file on which the weights depend has changed.
    """
    job = job_of(tmp_path, validation=VALIDATION)
    trained(job)
    run, path = Run.find(job), tmp_path / "job.toml"
    told = {int(row["step"]): row for row in rows_of(run)}
    assert rerun_here(job, 4).now.loss == told[4]["loss"]
    assert {step: evaluate_here(job, step)[1].mean for step in (3, 6)} == {
        step: told[step]["validation_loss"] for step in (3, 6)
    }
    spares: dict[str, Any] = {"validation": VALIDATION | {"by": "spares"}, "workers": {"spares": 1}}
    # as if spares had been to measure it, and did not come to step 3
    asked.begin(Run(job.replace(**spares), run.store), 0, 2)
    run.store.delete(min(run.store.list(f"{job.name}/validations/")))
    path.write_text(to_toml(job))
    edit(folder / "mine/layers.py", RELU, GELU)
    assert main(["owed", str(path), "--pay"]) == 1
    assert "validation of step 3 failed: the code of the run 'run'" in (
        said := " ".join(capsys.readouterr().out.split())
    )
    assert "mine/layers.py (changed); undo" in said, "and nothing else"
    edit(folder / "mine/layers.py", GELU, RELU)
    assert main(["owed", str(path), "--pay"]) == 0
    assert "validation after step 3: loss" in (said := capsys.readouterr().out) and "run owes nothing" in said
    assert (best := best_of(run)) is not None and best.loss == min(
        told[step]["validation_loss"] for step in (3, 6)
    )


@pytest.mark.parametrize("now", ["gone", "changed", "another"])
def test_l10_the_code_of_held_out_data_is_free(folder: Path, tmp_path: Path, now: str) -> None:
    """L10: a run and its fork go on without a word, with the weights of one that never validated.

    The control: a file on which the weights depend has changed, and only that is named.
    """
    trained(whole := job_of(tmp_path / "whole"))
    job = job_of(tmp_path, validation=VALIDATION)
    trained(job, stop=3)
    if now == "changed":
        edit(folder / "mine/held_out.py", "1000", "2000")
    if now == "another":
        (folder / "mine/other.py").write_text(HELD_OUT)
    validation = {"gone": {}, "changed": VALIDATION, "another": VALIDATION | {"dataset": "mine.other:Kept"}}[
        now
    ]
    job = job.replace(validation=validation)
    edit(folder / "mine/layers.py", RELU, GELU)
    for refused in (
        lambda: trained(job),
        lambda: launch(job.replace(name="fork"), local=True, resume="run@3"),
    ):
        with pytest.raises(JobError, match=r"has changed since step 3: mine/layers\.py \(changed\); undo"):
            refused()
    edit(folder / "mine/layers.py", GELU, RELU)
    fork = job.replace(name="fork")
    assert launch(fork, local=True, resume="run@3").state == "Finished"
    assert not [text for text in trained(job) if text.startswith("code ")]
    assert exported_hash(job) == exported_hash(fork) == exported_hash(whole)
    assert len(noted(Run.find(job).store, "run")) == 1
