"""A run in this process, without a coordinator: what it keeps while it goes on."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from elastic.protocol.commit_record import Outcome
from elastic.protocol.member import Member
from elastic.report.story import Line, StepLine
from elastic.train.local import run_local
from tests.support.toys import toy_job

SMALL = {"vocab": 29, "dim": 8, "layers": 1, "heads": 1}


@pytest.mark.fast
@pytest.mark.parametrize("drops", [True, False], ids=["", "control"])
def test_a_long_run_keeps_no_more_commits_than_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drops: bool) -> None:
    """Python's garbage collector counts the commits that are alive after steps 2 and 6.  In the control none is ever dropped."""
    if not drops:
        monkeypatch.setattr(Member, "recorded", lambda member, generation, step: None)
    alive = dict[int, int]()

    def show(line: Line) -> None:
        if isinstance(line, StepLine) and line.step in (2, 6):
            gc.collect()
            alive[line.step] = sum(type(each) is Outcome for each in gc.get_objects())

    run_local(toy_job(tmp_path, steps=7, model_args=SMALL), show)
    assert alive[2] >= 1
    assert alive[6] - alive[2] == (0 if drops else 4)
