"""Rounds of deletions of a run whose bucket is full."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from elastic.ids import Version
from elastic.plan.retention import Keep
from elastic.protocol.actions import Retain
from elastic.runs import forks
from elastic.runs.branches import Origin
from elastic.runs.retention import Retention, collect, mark, remove
from elastic.runs.run import Run
from storage.checkpoints import MANIFEST
from storage.checkpoints.manifest import DELETED
from storage.errors import Exists, Full
from storage.objects import Data, ObjectStore
from tests.runs.test_retention import STATE, Saved
from tests.storage.states import write
from tests.support.stores import Forwarding

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


@pytest.mark.parametrize("good", [True, False], ids=["", "no good checkpoint of its own"])
def test_what_a_dead_generation_has_begun_makes_room_although_the_run_has_not_passed_it(good: bool) -> None:
    """A run that is killed in each of its saves fills the bucket with parts.  The controls are no parts, or
    not those of the dead.
    """
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
    assert {each.version for each in saved.run.checkpoints.versions()} == left, (
        "and they are gone in the next round"
    )


class Brimful(Forwarding):
    """Takes no byte of a note, and writes down what is read and deleted.  ``meanwhile`` happens before the
    first empty note is there.

    If it ``counts``, it takes no new object either, until it is emptier than it was.
    """

    def __init__(
        self, store: ObjectStore, meanwhile: Callable[[], object] = lambda: None, *, counts: bool = False
    ) -> None:
        super().__init__(store)
        self.meanwhile, self.calls, self.most = (
            meanwhile,
            list[str](),
            len(store.list()) if counts else sys.maxsize,
        )

    def put_if_absent(self, key: str, data: Data) -> None:
        if key.endswith(DELETED):
            if len(self.store.list()) >= self.most or (data and self.most == sys.maxsize):
                raise Full(key, "no space left")
            self.meanwhile()
            self.meanwhile = lambda: None
        super().put_if_absent(key, data)

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        self.calls.append(f"get {key}")
        return super().get(key, start, stop)

    def delete(self, key: str) -> None:
        self.calls.append(f"delete {key}")
        super().delete(key)


def test_a_bucket_without_room_for_a_mark_is_freed_all_the_same() -> None:
    """Nor is anything read but of what is new before the first byte is free, and the leavings of a killed
    writer go too.
    """
    saved, said = Saved(range(1, 41), checkpoint={"keep_last": 39, "save_every": 1}), list[str]()
    store = Brimful(saved.run.store)
    run = Run(saved.run.job, store)
    rounds = Retention(run, saved.claim, said.append)
    rounds.round(saved.asked())
    write(run.checkpoints, Version(1, 0), STATE, 1)
    for step in (41, 42):
        saved.save(Version(step, 1), ((1, step),))
    store.calls.clear()
    assert rounds.round(replace(saved.asked(), at_once=True)) and not said
    assert saved.good() == list(range(4, 43)) == saved.steps()
    first = next(n for n, call in enumerate(store.calls) if call.startswith("delete"))
    assert (
        len({call for call in store.calls[:first] if call.startswith("get") and "/steps/" in call}) <= 12
    ), store.calls[:first]


@pytest.mark.parametrize("by", ["claim", "fork"])
def test_a_full_bucket_deletes_nothing_that_somebody_began_to_need_meanwhile(by: str) -> None:
    """Somebody claims the run, or forks it, while the empty mark is written, and has looked at the checkpoint
    before.
    """
    saved = Saved(range(1, 5))
    claims = partial(saved.run.claim, "elsewhere")
    forked = partial(forks.refer, saved.run.store, Origin(saved.run.job.name, Version(2, 1)), "fork")
    run = Run(saved.run.job, Brimful(saved.run.store, forked if by == "fork" else claims))
    if by == "fork":
        mark(run, Version(2, 1), "asked", saved.claim)
        assert not remove(run, Version(2, 1), saved.claim)
    else:
        with pytest.raises(Exists):
            mark(run, Version(2, 1), "asked", saved.claim)
        assert saved.good() == [1, 2, 3, 4]
    assert run.checkpoints.verify(Version(2, 1)).good


@pytest.mark.parametrize("parts", [True, False])
def test_no_manifest_goes_before_its_mark_is_there(parts: bool) -> None:
    """Parts that no save completed need no mark, and make room for the marks of others.  Without them all
    stays.
    """
    saved, said = Saved(range(1, 5), checkpoint={"keep_last": 2}), list[str]()
    if parts:
        write(saved.run.checkpoints, Version(3, 0), STATE, 1)
    store = Brimful(saved.run.store, counts=True)
    run = Run(saved.run.job, store)
    assert Retention(run, saved.claim, said.append).round(replace(saved.asked(), at_once=True)) is parts
    assert saved.good() == saved.steps() == ([3, 4] if parts else [1, 2, 3, 4])
    assert not any("g0" in key for key in store.list())
    assert parts or (len(said) == 1 and "no space left" in said[0])
    assert parts or not any(call.startswith("delete") and call.endswith(MANIFEST) for call in store.calls)


GC, RM = "gc --checkpoint.keep-last 2` deletes all but the newest 2", "rm --step 5` deletes the oldest"


@pytest.mark.parametrize(
    ("last", "saves", "fix"), [(2, 2, RM), (0, 3, GC), (3, 3, GC), (3, 2, RM), (2, 1, "ls` lists")]
)
def test_a_full_bucket_of_which_nothing_may_go_names_the_command_that_frees_space(
    last: int, saves: int, fix: str
) -> None:
    """The control: nothing is said where the bucket is not full."""
    saved, said = Saved(range(5, 5 + saves), checkpoint={"keep_last": last}), list[str]()
    rounds = Retention(saved.run, saved.claim, said.append)
    assert not rounds.round(saved.asked()) and not said
    for _ in range(2):
        assert not rounds.round(replace(saved.asked(), at_once=True))
    assert len(said) == 1 and f"`elastic checkpoint {fix}" in said[0]
    assert f"checkpoint.keep_last = {last} and the other rules keep {saves} checkpoint" in said[0]
