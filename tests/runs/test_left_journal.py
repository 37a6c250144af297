"""L2, L5: no row and no validation is lost when a run leaves its journal: it goes on in one process, is
forked, or goes back.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.ids import Version
from elastic.job import Job
from elastic.protocol.commit_record import Validated
from elastic.protocol.events import StepDone
from elastic.report.metrics import Row
from elastic.report.story import Line, Scored, StepLine
from elastic.runs import resume, validations
from elastic.runs.metrics import origin_rows, rows_of, stored, with_origin
from elastic.runs.run import Run
from elastic.train.alone import local
from elastic.train.alone.local import run_local
from elastic.train.validation import validate
from storage import journal
from storage.errors import Damaged
from tests.control.play import stepping
from tests.runs.test_forks import FAST, job_of, told, trained
from tests.runs.test_metrics import Written
from tests.support.sinks import rows_in

pytestmark = pytest.mark.fast
VALIDATED = {step: 3.0 + step / 7 for step in (2, 4, 6)}


def to_step(job: Job, last: int) -> None:
    """Trains until Ctrl-C comes at step ``last``."""

    def show(line: Line) -> None:
        if isinstance(line, StepLine) and line.step == last:
            raise KeyboardInterrupt

    assert run_local(job, show)[::2] == ("Stopped", last)


def of_cluster(folder: Path, *, knows: int = 6, **settings: Any) -> tuple[Run, list[Row]]:
    """Returns a run that was killed with a checkpoint at step 6, whose rows after step 2 only its journal
    has, and the rows.

    The journal ends with the commit of step 6, and with the save of step ``knows``.
    """
    job = job_of(folder / "bucket", steps=12, validation={"every": 2, "args": {"samples": 16}}, **settings)
    to_step(job, 6)  # its checkpoints are real
    run = Run.open(job)
    for name in ("metrics", "validations"):
        shutil.rmtree(folder / "bucket" / job.name / name)
    play = Written(stepping(1, save_every=2, target_step=12), run, folder / "journal")
    for step in range(1, 7):
        told = VALIDATED.get(step - 1)
        commit = replace(play.commit(step), validated=None if told is None else Validated(4 * told, 4))
        play.tell(StepDone(play.plan.members[0], 1, commit))
        if step % 2 == 0 and step <= knows:
            play.save(Version(step, 1), "w1")
    play.ship()
    return run, [dict(row) for row in rows_of(run)]


def told_of(rows: list[Row]) -> list[tuple[int, int, float, float | None]]:
    return [
        (int(row["step"]), int(row["generation"]), row["loss"], row.get("validation_loss")) for row in rows
    ]


def measured(run: Run) -> dict[int, float]:
    return {
        version.step: loss.mean for version, (_, loss) in validations.stored(run.store, run.job.name).items()
    }


@pytest.mark.full
@pytest.mark.parametrize("knows", [6, 2], ids=("stopped", "killed before the journal had the last saves"))
def test_l2_what_only_the_journal_has_is_there_when_the_run_goes_on_in_one_process(
    tmp_path: Path, knows: int
) -> None:
    """L2: in the rows, in the validations, in a sink, and for the best.  The row of step 6 waited for its
    validation, which comes now.

    The control: a process that stores nothing of the journal's loses these steps.
    """
    sinks = {"metrics": {"sinks": {"tests.support.sinks:Table": {"path": str(tmp_path / "table")}}}}
    run, before = of_cluster(tmp_path, knows=knows, **sinks)
    assert [row["step"] for row in before] == [*range(1, 7)] and [
        *stored(run.store, "run", ((1, 6),))
    ] == [] == [*measured(run)]
    shutil.copytree(tmp_path / "bucket", tmp_path / "other")

    lines: list[Line] = []
    assert run_local(run.job, lines.append)[0] == "Finished"
    rows = list(rows_of(run))
    assert [row["step"] for row in rows] == [*range(1, 13)] and {row["final"] for row in rows} == {1}
    assert told_of(rows)[:5] == told_of(before)[:5] and told_of(rows)[5][:3] == told_of(before)[5][:3]
    own = {line.step: line.loss for line in lines if isinstance(line, Scored)}
    assert sorted(own) == [6, 8, 10, 12]
    expected = {step: loss for step, loss in VALIDATED.items() if step < 6} | own
    assert (
        {step: found for step, _, _, found in told_of(rows) if found is not None} == expected == measured(run)
    )
    best = resume.best_of(run)
    assert best is not None and (best.version.step, best.loss) == min(
        expected.items(), key=lambda each: each[1]
    )
    assert [step for step, _ in rows_in(tmp_path / "table")] == [*range(1, 13)]


def test_l2_the_control_of_a_process_that_does_not_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = of_cluster(tmp_path)
    monkeypatch.setattr(local, "store_journaled", lambda *args: None)
    to_step(run.job, 7)
    assert [row["step"] for row in stored(run.store, "run", run.state().history.lineage)] == [7]


def test_l2_steps_that_are_done_again_are_not_taken_from_the_journal(tmp_path: Path) -> None:
    """L2: the checkpoint of step 6 is damaged.  Steps 5 and 6 count as they were done again."""
    run, before = of_cluster(tmp_path)
    run.checkpoints.quarantine(Version(6, 1), "the test")
    lines: list[Line] = []
    assert run_local(run.job, lines.append)[0] == "Finished"
    rows = list(rows_of(run))
    assert told_of(rows)[:3] == told_of(before)[:3] and told_of(rows)[3][:3] == told_of(before)[3][:3]
    assert [row["step"] for row in rows] == [*range(1, 13)] and {row["generation"] for row in rows[4:]} == {
        rows[-1]["generation"]
    } != {1}
    assert {row["step"]: row["loss"] for row in rows[4:]} == {
        line.step: line.loss for line in lines if isinstance(line, StepLine)
    }


def test_l5_a_validation_that_ctrl_c_ends_is_made_and_noted_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L5: a stop saves, and so the row is stored without it.  The judge is a run that nobody has stopped."""
    jobs = [
        job_of(tmp_path / name, validation={"every": 2, "args": {"samples": 16}}) for name in ("judge", "run")
    ]
    trained(jobs[0])

    def ctrl_c(*args: Any) -> Validated:
        if args[-1] == 4:
            raise KeyboardInterrupt
        return validate(*args)

    with monkeypatch.context() as patched:
        patched.setattr(local, "validate", ctrl_c)
        assert run_local(jobs[1], lambda line: None)[::2] == ("Stopped", 4)
    runs = [Run.find(job) for job in jobs]
    assert [*measured(runs[1])] == [2], "the control"
    trained(jobs[1])
    expected, found = ({row["step"]: row.get("validation_loss") for row in rows_of(run)} for run in runs)
    assert [step for step, loss in expected.items() if loss] == [2, 4, 6] and found == expected
    assert measured(runs[0]) == measured(runs[1])
    best = [resume.best_of(run) for run in runs]
    assert None not in best and best[0].loss == best[1].loss  # type: ignore[union-attr]


def test_l5_what_is_validated_again_counts_as_it_was_first(tmp_path: Path) -> None:
    """L5: each start validates its first state.  On other samples that is another number, of which one alone
    would count by chance.
    """
    job = job_of(tmp_path, validation={"every": 2, "args": {"samples": 16}})
    trained(job)
    first = measured(Run.find(job))
    lines = trained(job_of(tmp_path, steps=8, validation={"every": 2, "args": {"samples": 8}}), branch=True)
    again = {line.step: line.loss for line in lines if isinstance(line, Scored)}
    assert measured(Run.find(job)) == again | first and again[6] != first[6]


def test_l2_a_fork_has_the_rows_that_only_its_origins_journal_has(tmp_path: Path) -> None:
    """L2: also once the origin has gone back and on under another branch, and a fork of the fork.

    The controls: the rows of steps after the fork's beginning are the fork's, and what `stored` finds begins
    there.
    """
    run, before = of_cluster(tmp_path)
    trained(
        fork := job_of(tmp_path / "bucket", "fork", 8, validation={"every": 4, "args": {"samples": 16}}),
        resume="run@4",
    )
    expected = told_of(before)[:4]
    assert told_of(list(origin_rows(Run.find(fork)))) == expected and expected[3][3] == VALIDATED[4], (
        "a later commit told it"
    )
    rows = list(with_origin(Run.find(fork)))
    assert [row["step"] for row in rows] == [*range(1, 9)] and {row["final"] for row in rows} == {1}
    assert [row["step"] for row in stored(run.store, "fork", Run.find(fork).state().history.lineage)] == [
        *range(5, 9)
    ]

    lines = trained(
        last := job_of(tmp_path / "bucket", "last", 8, validation=run.job.validation), resume="fork@6"
    )
    own = next(line.loss for line in lines if isinstance(line, Scored) and line.step == 6)
    assert told_of(list(with_origin(Run.find(last))))[:6] == [
        *told_of(rows)[:5],
        (*told_of(rows)[5][:3], own),
    ], "it validates where it begins"
    trained(run.job.replace(steps=6, **FAST), resume=2)
    assert [row["generation"] > 1 for row in rows_of(Run.find(run.job))] == [False] * 2 + [True] * 4
    assert told_of(list(origin_rows(Run.find(fork)))) == expected


def test_l2_the_rows_before_a_step_to_which_a_run_goes_back_are_stored(tmp_path: Path) -> None:
    """L2: they are in its journal alone, up to there and beyond."""
    run, before = of_cluster(tmp_path)
    resume.rewind(Run.look(run.job.replace(**FAST), branch=True), 0.0, Version(4, 1))
    assert told_of(list(stored(run.store, "run", ((1, 4),))))[:3] == told_of(before)[:3]
    assert [row["step"] for row in stored(run.store, "run", ((1, 4), (3, 8)))] == [*range(1, 5)]
    assert [row["step"] for row in rows_of(Run.find(run.job))] == [*range(1, 5)]


def test_a_journal_that_cannot_be_read_stops_neither_the_run_nor_a_way_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old object is damaged.  What is lost is told; the control are the tests above."""
    run, _ = of_cluster(tmp_path)

    def since(*args: Any) -> Any:
        raise Damaged("an object", "records from 1 on", "none")

    monkeypatch.setattr(journal, "since", since)
    said: list[Line] = []
    assert run_local(run.job, said.append)[0] == "Finished"
    assert (
        "the journal cannot be read, so metrics of earlier steps that are only in the journal are "
        "lost: an object"
    ) in told(said)
    resume.rewind(Run.look(run.job.replace(**FAST), branch=True), 0.0, Version(4, 1))
    assert Run.find(run.job).newest() == Version(4, 1)
