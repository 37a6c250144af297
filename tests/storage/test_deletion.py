"""L7: a deletion that is torn anywhere never leaves what looks like a checkpoint, and the next round ends it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest

from storage.checkpoints import Checkpoints
from storage.checkpoints.manifest import DELETED, MANIFEST
from storage.errors import Unavailable
from storage.objects import Data, ObjectStore
from storage.objects.port import PARTIAL
from storage.slices import Version
from tests.storage.killed_deletion import BEFORE, BEGUN, NEWEST, OLD, prepare
from tests.storage.test_killed import boundaries
from tests.support.stores import Forwarding

_numbers = itertools.count()


@pytest.fixture
def checkpoints() -> Checkpoints:
    return Checkpoints(ObjectStore.open(f"memory://deletion-{next(_numbers)}"), "run")


class Breaks(Forwarding):
    """Fails at the write or deletion ``at``, and at all after it: before it is done, or (``after``) when it
    is done.
    """

    def __init__(self, store: ObjectStore, at: int, after: bool) -> None:
        super().__init__(store)
        self.left, self.after = at, after

    def put_if_absent(self, key: str, data: Data) -> None:
        self._strike(lambda: super(Breaks, self).put_if_absent(key, data), key)

    def delete(self, key: str) -> None:
        self._strike(lambda: super(Breaks, self).delete(key), key)

    def _strike(self, call: object, key: str) -> None:
        self.left -= 1
        if self.left > 0 or (self.left == 0 and self.after):
            call()  # type: ignore[operator]
        if self.left <= 0:
            raise Unavailable(key, "the test says so")


def delete(checkpoints: Checkpoints, *versions: Version) -> None:
    """Removes what is marked, then marks and removes ``versions``."""
    for each in checkpoints.versions():
        if each.deleted:
            checkpoints.remove(each.version)
    for version in versions:
        checkpoints.mark(version, "a test")
        checkpoints.remove(version)


def sound(checkpoints: Checkpoints) -> None:
    """Checks that everything that looks like a checkpoint is a whole one, and that the kept ones do."""
    good = {each.version for each in checkpoints.versions() if each.good}
    assert {BEFORE, NEWEST} <= good <= {OLD, BEFORE, NEWEST}
    assert all(checkpoints.verify(version).good for version in good)
    assert checkpoints.latest_good() == NEWEST


def break_off(checkpoints: Checkpoints, calls: Iterable[int], *, after: bool) -> int:
    """Breaks a deletion off at each of ``calls``, until one is not reached, and ends it by another round.
    Returns the last.
    """
    store = checkpoints.store
    prepare(checkpoints)
    whole = {key: store.get(key) for key in store.list()}
    kept = {
        key
        for key in whole
        if any(key.startswith(f"{checkpoints.folder(version)}/") for version in (BEFORE, NEWEST))
    }
    for at in calls:
        for key in whole.keys() - set(store.list()):
            store.put(key, whole[key])
        broken = Breaks(store, at, after)
        try:
            delete(Checkpoints(broken, "run"), OLD, BEGUN)
        except Unavailable:
            sound(checkpoints)
            delete(
                checkpoints,
                *(each.version for each in checkpoints.versions() if each.version in (OLD, BEGUN)),
            )
        sound(checkpoints)
        assert set(store.list()) == kept, f"call {at}"
        if broken.left > 0:
            break
    return at


@pytest.mark.parametrize("after", [False, True])
def test_l7_a_deletion_that_breaks_off_at_each_call_is_ended_by_the_next(
    checkpoints: Checkpoints, after: bool
) -> None:
    assert break_off(checkpoints, itertools.count(1), after=after) > 10, (
        "the control: there were that many calls to break"
    )


@pytest.mark.parametrize("wrong", ["shards first", "no note"])
def test_a_deletion_in_another_order_would_be_noticed(checkpoints: Checkpoints, wrong: str) -> None:
    """The control: the shards go before the manifest, or there is no note that would go last."""
    prepare(checkpoints)
    folder = checkpoints.folder(OLD)
    shard = next(key for key in checkpoints.store.list(f"{folder}/") if key.endswith(".safetensors"))
    checkpoints.store.delete(shard if wrong == "shards first" else f"{folder}/{MANIFEST}")
    if wrong == "shards first":
        with pytest.raises(AssertionError):
            sound(checkpoints)
    else:
        delete(checkpoints)
        assert checkpoints.store.exists(shard), "nobody would see that its deletion has begun"


def test_what_is_marked_is_not_good_and_what_is_not_marked_is_not_removed(checkpoints: Checkpoints) -> None:
    prepare(checkpoints)
    checkpoints.remove(OLD)
    assert checkpoints.verify(OLD).good, "it has no note"
    checkpoints.mark(OLD, "a test")
    checkpoints.mark(OLD, "said twice")
    (found,) = checkpoints.at(OLD.step)
    assert found.deleted and not found.good and not found.damaged and found.manifest is not None
    assert checkpoints.verify(OLD).good, "whoever reads it still can"
    checkpoints.remove(OLD)
    checkpoints.remove(OLD)
    assert not checkpoints.at(OLD.step) and not checkpoints.store.exists(
        f"{checkpoints.folder(OLD)}/{DELETED}"
    )


def test_a_late_part_of_a_dead_writer_is_seen_and_collected(checkpoints: Checkpoints) -> None:
    prepare(checkpoints)
    delete(checkpoints, OLD)
    checkpoints.store.put_if_absent(f"{checkpoints.folder(OLD)}/late.safetensors", b"late")
    (found,) = checkpoints.at(OLD.step)
    assert found.manifest is None and not found.good
    delete(checkpoints, OLD)
    assert not checkpoints.at(OLD.step)


def test_l7_killed_at_every_boundary_of_a_deletion(tmp_path: Path) -> None:
    *killed, undisturbed = boundaries("killed_deletion.py", tmp_path)
    assert len(killed) >= 12
    for boundary in (*killed, undisturbed):
        checkpoints = Checkpoints(ObjectStore.open(str(tmp_path / str(boundary))), "run")
        sound(checkpoints)
        delete(
            checkpoints, *(each.version for each in checkpoints.versions() if each.version in (OLD, BEGUN))
        )
        sound(checkpoints)
        left = sorted(path.name for path in (tmp_path / str(boundary) / "run" / "steps").iterdir())
        assert left == [f"{version.step:012d}" for version in (BEFORE, NEWEST)], (
            "no folder and no partial file is left"
        )
    sound(Checkpoints(ObjectStore.open(str(tmp_path / str(undisturbed))), "run"))


def test_what_a_dead_writer_left_half_written_goes_with_its_folder(tmp_path: Path) -> None:
    """A file that was never renamed is no object, so nobody lists it; it takes room all the same."""
    checkpoints = Checkpoints(ObjectStore.open(str(tmp_path)), "run")
    prepare(checkpoints)
    for version in (OLD, NEWEST):
        (tmp_path / checkpoints.folder(version) / f"{PARTIAL}0123").write_bytes(b"half")
    delete(checkpoints, OLD)
    assert not (tmp_path / checkpoints.folder(OLD)).parent.exists()
    checkpoints.store.tidy(f"{checkpoints.folder(NEWEST)}/")
    assert checkpoints.verify(NEWEST).good, "the control: objects stay"
