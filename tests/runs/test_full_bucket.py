"""Rounds of deletions of a run whose bucket is full."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.ids import Version
from elastic.plan.retention import Keep
from elastic.protocol.actions import Retain
from elastic.runs.retention import Retention, collect
from tests.runs.test_retention import STATE, Saved
from tests.storage.states import write

PARTS = {"of the first": (4, 1), "of the second": (4, 2), "on its way": (5, 3), "of a later one": (6, 4)}
"""Versions of which a save has written a part: those of the first two generations are dead."""


def test_a_save_without_room_has_all_that_may_go_removed_at_once() -> None:
    """The control: another round only removes what the one before has marked."""
    for at_once in (True, False):
        saved, said = Saved(range(1, 4), checkpoint={"keep_last": 2}), list[str]()
        rounds = Retention(saved.run, saved.claim, said.append)
        rounds.round(saved.asked())
        for step in range(4, 7):
            saved.save(Version(step, 1), ((1, step),))
        assert rounds.round(replace(saved.asked(), at_once=at_once)) and saved.good() == [5, 6]
        assert saved.steps() == ([5, 6] if at_once else [2, 3, 4, 5, 6]) and not said


@pytest.mark.parametrize("good", [True, False], ids=["", "no good one"])
def test_what_a_dead_generation_has_begun_makes_room_although_the_run_has_not_passed_it(good: bool) -> None:
    """A run that is killed in each of its saves fills the bucket with parts.  The controls are no parts, or not those of the dead."""
    saved, parts = Saved(range(1, 3)), {name: Version(*each) for name, each in PARTS.items()}
    saved.save(Version(3, 2), ((1, 2), (2, 3)))
    for version in parts.values():
        write(saved.run.checkpoints, version, STATE, 1)
    for step in () if good else (1, 2):
        saved.run.checkpoints.quarantine(Version(step, 1), "all are damaged")
    asked = Retain((Version(2, 1),) if good else (), ((1, 2), (3, 5)), None, (parts["on its way"],))
    collect(saved.run, Keep(), asked, saved.claim)
    left = {each.version for each in saved.run.checkpoints.versions() if not each.deleted}
    assert left == {Version(1, 1), Version(2, 1), Version(3, 2), parts["on its way"], parts["of a later one"]}
    collect(saved.run, Keep(), asked, saved.claim)
    assert {each.version for each in saved.run.checkpoints.versions()} == left, "and they are gone in the next round"


GC, RM = "gc --checkpoint.keep-last 2` deletes all but the newest 2", "rm --step 5` deletes the oldest"


@pytest.mark.parametrize(("last", "saves", "fix"), [(2, 2, RM), (0, 3, GC), (3, 3, GC), (3, 2, RM), (2, 1, "ls` lists")])
def test_a_full_bucket_of_which_nothing_may_go_names_the_command_that_frees_space(last: int, saves: int, fix: str) -> None:
    """The control: nothing is said where the bucket is not full."""
    saved, said = Saved(range(5, 5 + saves), checkpoint={"keep_last": last}), list[str]()
    rounds = Retention(saved.run, saved.claim, said.append)
    assert not rounds.round(saved.asked()) and not said
    assert not rounds.round(replace(saved.asked(), at_once=True))
    assert len(said) == 1 and f"`elastic checkpoint {fix}" in said[0]
    assert f"checkpoint.keep_last = {last} and the other rules keep {saves} checkpoint" in said[0]
