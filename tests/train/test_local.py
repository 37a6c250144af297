"""A run in this process, without a coordinator: what it keeps while it goes on."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from elastic.engine.optim.base import Hyper, Part, Rule
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


SIGNALS = [0]


def update(parts: Sequence[Part], grads: Sequence[Tensor], hyper: Hyper) -> None:
    """SGD; after the first of the tensors the process gets as many signals as ``SIGNALS`` says."""
    for part, grad in zip(parts, grads, strict=True):
        part.values.sub_(hyper.lr * grad)
        while SIGNALS[0]:
            SIGNALS[0] -= 1
            os.kill(os.getpid(), signal.SIGINT)


STRUCK = Rule((), update)


@pytest.fixture
def heard() -> Iterator[None]:
    """Lets SIGINT raise KeyboardInterrupt: a process in the background of a script ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("signals", [1, 2], ids=["once", "control"])
def test_a_signal_in_the_middle_of_an_update_costs_no_step(tmp_path: Path, signals: int) -> None:
    """The control: a second signal is handled at once, and half an update is not saved.  A resume shows what was."""
    job = toy_job(tmp_path, steps=4, model_args=SMALL, optim={"lr": 0.1, "kind": "tests.train.test_local:STRUCK"})
    shown: list[Line] = []

    def show(line: Line) -> None:
        shown.append(line)
        if isinstance(line, StepLine) and line.step == 2 and len(shown) < 10:
            SIGNALS[0] = signals

    state, reason, step = run_local(job, show)
    assert state == "Stopped"
    half = "Ctrl-C in the middle of an update; the last save counts"
    assert (step, reason) == ((3, "Ctrl-C; saved at step 3") if signals == 1 else (2, half))
    shown.clear()
    assert run_local(job, shown.append)[0] == "Finished"
    assert [line.step for line in shown if isinstance(line, StepLine)] == ([4] if signals == 1 else [1, 2, 3, 4])
