"""The probe finds out whether all processes see the same bucket (U11)."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.probe import COORDINATOR, Probe
from storage.objects import ObjectStore

pytestmark = pytest.mark.fast


def test_two_who_share_a_bucket_see_each_other(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "bucket")
    here, there = (
        Probe(ObjectStore.open(str(tmp_path / name)), "run", "run-0001-abcdef") for name in ("bucket", "link")
    )
    here.leave(COORDINATOR)
    there.leave("n2")
    assert there.sees(COORDINATOR) and here.sees("n2")
    here.remove("n2")
    there.remove(COORDINATOR)
    assert not there.sees(COORDINATOR) and ObjectStore.open(str(tmp_path / "bucket")).list() == []


def test_folders_of_the_same_name_on_two_disks_are_two_places(tmp_path: Path) -> None:
    """A sign that an earlier life of the run has left does not count either, nor does an object that somebody
    else has put there.
    """
    here, there = (ObjectStore.open(str(tmp_path / disk / "bucket")) for disk in ("a", "b"))
    Probe(here, "run", "run-0002-abcdef").leave(COORDINATOR)
    Probe(there, "run", "run-0001-abcdef").leave(COORDINATOR)
    later = Probe(there, "run", "run-0002-abcdef")
    assert not later.sees(COORDINATOR)
    there.put(later.key(COORDINATOR), b"something else")
    assert not later.sees(COORDINATOR)


def test_all_signs_of_one_life_are_removed_and_no_others(tmp_path: Path) -> None:
    """A keeper that was ended left its sign; another life of the run, and another run, keep theirs."""
    store = ObjectStore.open(str(tmp_path))
    this, other_life, other_run = (
        Probe(store, "run", "one"),
        Probe(store, "run", "two"),
        Probe(store, "run2", "one"),
    )
    for probe in (this, other_life, other_run):
        probe.leave(COORDINATOR)
        probe.leave("node")
    other_life.remove_earlier()
    assert not this.sees(COORDINATOR) and other_life.sees(COORDINATOR) and other_run.sees(COORDINATOR), (
        "a new life removes the others' signs"
    )
    this.leave(COORDINATOR)
    this.remove_all()
    assert not this.sees(COORDINATOR) and not this.sees("node")
    assert all(probe.sees(who) for probe in (other_life, other_run) for who in (COORDINATOR, "node"))
