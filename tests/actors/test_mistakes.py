"""L9: a user's mistake ends a run on a cluster as it ends a local one (``tests/train/test_mistakes.py``)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from actors.cli import main
from tests.support.commands import assert_no_actor_left
from tests.train.test_mistakes import MISTAKES, written

TRIED = ("loss is detached", "loss asks for another name", "read returns a list", "read returns floats", "read raises", "model raises")


@pytest.mark.full  # the short run has the mean in test_errors.py
@pytest.mark.parametrize("mistake", TRIED)
def test_l9_a_mistake_ends_a_run_on_a_cluster_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    monkeypatch.chdir(tmp_path)
    parts, said = MISTAKES[mistake]
    assert main(["train", written(tmp_path, parts)]) == 1
    shown = capsys.readouterr().out
    last = [line for line in shown.splitlines() if line.startswith("Failed at step 0 of 4: ")]
    assert len(last) == 1 and re.search(said, last[0]), shown
    assert "Traceback" not in shown and "form generation" not in shown, shown
    assert_no_actor_left("wrong")
