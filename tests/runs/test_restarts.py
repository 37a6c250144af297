"""R23: no loop without progress: what counts as a restart in vain, and how many there may be."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.control.machine import Transition
from elastic.control.run import Failed, RunState, State, Stopped
from elastic.errors import NoProgress
from elastic.ids import Version
from elastic.journal import codec
from elastic.plan.layout import Layout
from elastic.protocol.events import Tick
from elastic.runs import restarts, resume
from elastic.runs.run import Run
from tests.storage.states import TENSORS, state_of, write
from tests.support.patience import PATIENCE_S
from tests.support.toys import toy_job

_numbers = itertools.count()


class Starts:
    """A run that is started again and again, as a coordinator does it, in a bucket of its own."""

    def __init__(self, folder: Path, most: int = 3) -> None:
        self.run = Run.open(toy_job(f"memory://restarts-{next(_numbers)}", watch={"max_restarts": most}))
        self.folder, self.lives = folder, 0

    def start(
        self,
        end: State | None = None,
        *,
        reaches: int = 0,
        fruitless: int = 0,
        saves: int = 0,
        again: bool = False,
    ) -> None:
        """Starts it.  It commits step ``reaches``, saves step ``saves``, and ends as ``end``; without ``end``
        nobody hears of it again.
        """
        restarts.check(self.run, again=again)
        self.lives += 1
        incarnation = self.run.claim("host:1", f"life {self.lives}", **restarts.begins(self.run))
        if saves:
            version = Version(saves, self.lives)
            parts = write(self.run.checkpoints, version, state_of(TENSORS[:2], seed=1), 1)
            self.run.commit(version, parts, ((self.lives, saves),), Layout())
        if end is not None:
            state = RunState.begin(incarnation, 0.0, generation=incarnation)
            lineage = ((incarnation, reaches),) if reaches else ()
            state = replace(
                state, state=end, history=replace(state.history, lineage=lineage, fruitless=fruitless)
            )
            before = codec.snapshot(RunState.begin(incarnation, 0.0, generation=incarnation))
            journal = self.run.journal(self.folder / str(incarnation), before)
            record = codec.record(
                journal.next, 0.0, Tick(), codec.fold(before, ()), Transition(state, (), ())
            )
            journal.append(record, lambda: codec.snapshot(state), durable=True)
            assert journal.ship(PATIENCE_S)
            journal.close()
            assert self.run.end() == end


def test_r23_three_restarts_without_a_later_durable_step_are_the_last(tmp_path: Path) -> None:
    """R23: steps that were committed and not saved are no progress.  With ``--again`` they count anew."""
    starts = Starts(tmp_path)
    for _ in range(4):
        starts.start()
    with pytest.raises(
        NoProgress,
        match=(
            r"started 4 times in a row and saved no step after step "
            r"0.*max_restarts = 3.*--again"
        ),
    ) as caught:
        starts.start()
    assert caught.value.exit_code == 4
    starts.start(again=True)
    for _ in range(3):
        starts.start()
    with pytest.raises(NoProgress):
        starts.start()


def test_r23_a_step_that_is_saved_counts_anew(tmp_path: Path) -> None:
    """The control: a run that saves something each time may be restarted for ever; and any run, if the
    setting says so.
    """
    starts, endless = Starts(tmp_path), Starts(tmp_path, most=0)
    for step in range(1, 10):
        starts.start(saves=step)
        endless.start()
    for _ in range(4):
        starts.start()
    with pytest.raises(NoProgress, match="saved no step after step 9"):
        starts.start()


@pytest.mark.parametrize(
    ("end", "more", "counts"),
    [
        (Failed("6 generations in a row committed no new step"), {"fruitless": 6}, True),
        (Failed("no worker came back"), {"reaches": 5}, True),
        (Failed("too few workers for 600 s"), {}, False),
        (Failed("job error: ValueError at step 3", "a traceback"), {"reaches": 2, "fruitless": 2}, False),
        (Stopped("asked for"), {}, False),
    ],
)
def test_r23_what_counts(tmp_path: Path, end: State, more: dict[str, int], counts: bool) -> None:
    """R23: a person mends a fault of the job and starts again; a run that waits for machines costs nothing,
    and may wait.
    """
    starts = Starts(tmp_path)
    for _ in range(4):
        starts.start(end, **more)
    assert restarts.in_vain(starts.run) == (4 if counts else 0)


def test_r23_a_takeover_is_no_restart_and_older_claims_do_not_count(tmp_path: Path) -> None:
    starts = Starts(tmp_path)
    for _ in range(4):
        starts.run.claim("host:1", "a life of an earlier release")
    assert restarts.in_vain(starts.run) == 0
    starts.start()
    for _ in range(9):
        starts.run.claim("host:1", "life 1", **restarts.goes_on(starts.run))
    assert restarts.in_vain(starts.run) == 1
    starts.run.claim("local")
    assert restarts.in_vain(starts.run) == 0


def test_r23_a_rollback_counts_restarts_anew(tmp_path: Path) -> None:
    """R23: its durable step is an older one, which is no restart in vain.  The control: without it the next
    start is refused.
    """
    starts = Starts(tmp_path)
    starts.start(saves=4)
    starts.start(saves=8)
    for _ in range(4):
        starts.start()
    with pytest.raises(NoProgress):
        restarts.check(starts.run, again=False)
    slower = starts.run.job.replace(optim=starts.run.job.optim.model_copy(update={"lr": 1e-4}))
    resume.rewind(Run.look(slower, branch=True), 0.0, Version(4, 1))
    starts.run = Run.look(slower)
    for _ in range(4):
        starts.start()
    with pytest.raises(NoProgress, match="saved no step after step 4"):
        starts.start()
