"""The best of the validations of a run whose held-out samples changed: losses on other samples do not count."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.cli import checkpoint_commands
from actors.cli.branch_commands import described
from actors.cli.facts import facts_of
from elastic.ids import Version
from elastic.job import Job
from elastic.journal import codec
from elastic.plan.layout import Layout
from elastic.plan.retention import Keep
from elastic.protocol.actions import Retain
from elastic.protocol.builds import Build
from elastic.protocol.commit_record import Validated
from elastic.protocol.events import StepDone
from elastic.report.best import Loss, best
from elastic.report.page.plots import best_validation
from elastic.runs import owed
from elastic.runs.descent import runs_of
from elastic.runs.metrics import Following, rows_of
from elastic.runs.owed import Debt
from elastic.runs.resume import best_of, start_of
from elastic.runs.retention import judge, look
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from storage.journal import Journal
from tests.control.play import but, stepping
from tests.runs.test_metrics import Written
from tests.storage.states import TENSORS, state_of, write
from tests.support.toys import TINY, toy_job

pytestmark = pytest.mark.fast

RULES: dict[str, Any] = {"save_every": 2, "keep_last": 2, "keep_best": True}


def trained(
    folder: Path, steps: int, lr: float = 1e-9, checkpoint: Mapping[str, Any] = RULES, **held_out: Any
) -> Job:
    """Trains in this process, so slowly that only the samples decide which loss is the lowest."""
    validation = {"every": 2, "args": {"samples": 16, **held_out}}
    job = toy_job(folder, steps=steps, optim={"lr": lr}, validation=validation, checkpoint=checkpoint, **TINY)
    run = Run.look(job, branch=True)
    run.branch(7.0)
    assert run_local(job, lambda _: None)[0] == "Finished"
    return job


def test_the_best_is_taken_among_losses_on_the_newest_samples_only(tmp_path: Path) -> None:
    """The judge is the list of all losses.  The control: in one of the two orders the lowest of all is on the
    older samples.
    """
    misled = 0
    for name, first in (("a", False), ("b", True)):
        job = trained(tmp_path / name, 4, masked=first)
        job = trained(tmp_path / name, 10, masked=not first)
        run = Run.find(job)
        losses = {
            int(row["step"]): row["validation_loss"] for row in rows_of(run) if "validation_loss" in row
        }
        expected = min((step for step in losses if step > 4), key=lambda step: (losses[step], step))
        misled += min(losses, key=losses.__getitem__) <= 4
        found = best_of(run)
        assert list(losses) == [2, 4, 6, 8, 10] and found is not None
        assert (found.version.step, found.loss, found.others) == (expected, losses[expected], 2)
        kept = {
            version.step: names
            for version, names in look(run, job.keep()).verdict.kept.items()
            if "best" in names
        }
        assert kept.keys() == {expected}, "the others may go"
        start = start_of(job.replace(name="other"), "toy@best")
        assert start.origin is not None and start.origin.version.step == expected
        assert start.said == "; 2 validations on other held-out samples not counted"
        (told,) = runs_of(job.bucket)
        assert (
            f"best validation {losses[expected]:.4g} at step {expected} (2 validations on other held-out"
            in described(told, 0.0)
        )
        shown = best_validation(facts_of(run, Keep(), 0.0).columns)
        assert shown is not None and (shown.version.step, shown.loss, shown.others) == (
            expected,
            losses[expected],
            2,
        )
    assert misled == 1


def test_a_journal_says_on_which_samples_its_coordinator_validated(tmp_path: Path) -> None:
    """The next coordinator was started with other samples.  The control: it was started with the same."""
    for others, expected in (("others", Version(4, 1)), ("some", Version(2, 1))):
        run, story, place = (
            Run.open(toy_job(tmp_path / others, steps=100, validation={"every": 2})),
            stepping(1, save_every=50),
            0,
        )
        for held_out, steps in (("some", (1, 2, 3)), (others, (4, 5))):
            story.run = but(story.run, "members", reference=Build(held_out=held_out))
            told = Written(story, run, tmp_path / f"{others}-{place}")
            told.journal = Journal(
                run.store,
                "toy",
                tmp_path / f"{others}-{place}",
                place,
                codec.snapshot(told.run),
                segment_s=1e6,
            )
            for step in steps:
                loss = Validated(float(step), 1) if step in (3, 5) else None  # that of the step before
                told.tell(StepDone(told.plan.members[0], 1, replace(told.commit(step), validated=loss)))
            told.ship()
            story, place = told, told.journal.next
        following = Following(run)
        following.read()
        rows = [row for row in following.rows.surviving() if "validation_loss" in row]
        chosen = best(
            {Version(row["step"], 1): Loss(row["validation_loss"], row["validation_data"]) for row in rows}
        )
        assert [(row["step"], row["validation_loss"]) for row in rows] == [(2, 3.0), (4, 5.0)]
        assert chosen is not None and chosen.version == expected


def test_a_coordinator_that_knows_only_the_older_samples_keeps_nothing_for_them(tmp_path: Path) -> None:
    """A spare has validated the newer checkpoints on other samples.  The control: on the same ones the older
    is the best.
    """
    for number, newer in enumerate(("others", "some")):
        run = Run.open(
            toy_job(
                f"memory://best-{tmp_path.name}-{number}",
                steps=100,
                checkpoint=RULES,
                validation={"every": 10},
            )
        )
        versions = [Version(step, 1) for step in (10, 20, 30, 32, 34)]
        for version in versions:
            run.commit(
                version,
                write(run.checkpoints, version, state_of(TENSORS[:1], seed=1), 1),
                ((1, version.step),),
                Layout(),
            )
        for version, loss, held_out in zip(versions, (1.0, 3.0, 5.0), ("some", newer, newer), strict=False):
            owed.note_done(run, Debt(version, owed.VALIDATION), owed.validated(Validated(loss, 1), held_out))
        asked = Retain((versions[-1],), ((1, 34),), versions[0], ())
        kept = judge(run, Keep(2, best=True), asked, run.checkpoints.versions(), 0.0).kept
        assert [version.step for version, names in kept.items() if "best" in names] == [
            20 if newer == "others" else 10
        ]


def test_gc_keeps_the_best_of_a_run_without_a_journal_as_its_own_loop_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge is the list of losses in the rows.

    The control: without ``keep_best`` the best goes.
    """
    monkeypatch.setattr(checkpoint_commands, "say", lambda *text: None)
    there = lambda: [each.version.step for each in run.checkpoints.versions()]  # noqa: E731
    job = trained(tmp_path, 8, lr=100.0, checkpoint={**RULES, "keep_last": 9})
    run = Run.find(job)
    losses = {int(row["step"]): row["validation_loss"] for row in rows_of(run) if "validation_loss" in row}
    assert not run.store.list("toy/journal/") and there() == list(losses) == [2, 4, 6, 8]
    expected = min(losses, key=lambda step: (losses[step], step))
    assert expected < 6, "the control: no other rule keeps it"
    for keep_best, left in ((True, [expected, 6, 8]), (False, [6, 8])):
        rules = {**RULES, "keep_best": keep_best}
        checkpoint_commands.gc(job.replace(checkpoint=rules), dry_run=False, force=False)
        assert there() == left


def test_the_rule_is_that_of_a_list_that_is_walked_by_hand() -> None:
    """All short lists of (loss, data), compared with a rule that is written in another way.  A loss whose
    data nobody noted counts.
    """
    for losses in itertools.product(((1.0, 1), (2.0, 1), (1.0, 2), (math.nan, 2), (1.5, 0)), repeat=4):
        found = {Version(step, 1): Loss(*each) for step, each in enumerate(losses, 1)}
        newest = [data for _, data in losses if data][-1:]
        counted = [
            (loss, step) for step, (loss, data) in enumerate(losses, 1) if not data or [data] == newest
        ]
        numbers = sorted(each for each in counted if each[0] == each[0])
        chosen = best(found)
        assert (chosen and (chosen.loss, chosen.version.step)) == (numbers[0] if numbers else None)
        assert chosen is None or chosen.others == 4 - len(counted)
