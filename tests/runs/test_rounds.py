"""The requests of a round of deletions, and what it sees that others have done since the round before."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.ids import Version
from elastic.plan.layout import Layout
from elastic.protocol.actions import Retain
from elastic.runs import branches
from elastic.runs.retention import Retention
from elastic.runs.run import Run
from storage.objects import PARTIAL
from tests.runs.test_retention import STATE, Saved
from tests.storage.states import write
from tests.support.stores import Forwarding
from tests.support.toys import toy_job


class Counted(Forwarding):
    """Counts the requests."""

    requests = 0

    def __getattribute__(self, name: str) -> object:
        if name in ("put", "put_if_absent", "get", "size", "children", "list", "delete"):
            self.requests += 1
        return super().__getattribute__(name)


def requests_of_rounds(checkpoints: int, **keep: object) -> list[int]:
    """Returns the requests of two rounds, each after a save, in a run that has had so many ``checkpoints``
    and a round before.
    """
    saved = Saved(
        range(1, checkpoints + 1),
        checkpoint={"keep_last": checkpoints, "save_every": 1, **keep},
        validation={"every": 1 if "keep_best" in keep else 0},
    )
    store, found = Counted(saved.run.store), list[int]()
    saved.run = Run(saved.run.job, store)  # which knows what it has committed, as that of a coordinator does
    saved.run.checkpoints.expect(Version(step, 1) for step in range(1, checkpoints + 1))
    rounds = Retention(saved.run, saved.claim, pytest.fail)
    for step in range(checkpoints + 1, checkpoints + 4):
        store.requests = 0
        rounds.round(saved.asked())
        found.append(store.requests)
        saved.save(Version(step, 1), ((1, step),))
    assert len(saved.good()) >= checkpoints
    for key in saved.run.store.list():
        saved.run.store.delete(key)
    return found[1:]


KEEPS = {
    "last": {},
    "every": {"keep_last": 2, "keep_every": 1},
    "younger": {"keep_last": 2, "keep_younger": "1h"},
    "best": {"keep_last": 2, "keep_best": True},
}


@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_a_round_asks_no_more_of_a_bucket_in_which_a_thousand_checkpoints_are_kept(
    keep: dict[str, object],
) -> None:
    """It asked for each of them five times after each save.  The control: a round that knows nothing yet
    looks at all of them.
    """
    few, many = requests_of_rounds(10, **keep), requests_of_rounds(1000, **keep)
    assert max(few) <= 36 and all(after <= before + 2 for before, after in zip(few, many, strict=True)), (
        few,
        many,
    )


def test_a_round_sees_what_other_processes_have_done_since_the_one_before() -> None:
    """Each has its own cause, and is done behind the back of an owner that has looked at all checkpoints
    before.
    """
    saved = Saved(range(1, 11), checkpoint={"keep_last": 2, "keep_every": 3})
    rounds, job = Retention(saved.run, saved.claim, pytest.fail), saved.run.job
    for _ in range(2):
        rounds.round(saved.asked())
    assert saved.steps() == [3, 6, 9, 10]
    saved.save(Version(11, 1), ((1, 11),))
    other = Run(job, saved.run.store).checkpoints
    other.mark(Version(3, 1), "another process")
    other.quarantine(Version(10, 1), "another run has read it")
    rounds.round(saved.asked())
    assert saved.good() == [6, 9, 11] and saved.steps() == [6, 9, 10, 11], (
        "what is marked is removed, and 9 takes the place of 10"
    )
    other.unmark(Version(10, 1))
    for step in (12, 13):
        saved.save(Version(step, 1), ((1, step),))
    branches.begin(saved.run.branches, job.replace(steps=99), job, Version(11, 1), 0.0)
    rounds.round(saved.asked())
    assert saved.good() == [6, 9, 11, 12, 13], "11 is what the branch goes on from"
    other.remove(Version(10, 1))
    claim = Run(job, saved.run.store).claim("elsewhere")
    saved.save(Version(14, 1), ((1, 14),))
    assert not rounds.round(saved.asked()) and 13 in saved.good(), "it was replaced"
    assert not Retention(saved.run, claim, pytest.fail).round(saved.asked())
    assert saved.good() == [6, 9, 11, 12, 13, 14], "12 is the first at or after a multiple of 3"


def test_what_a_killed_writer_has_left_half_written_is_removed_by_a_round(tmp_path: Path) -> None:
    """No listing of objects shows it.  The control is what one that lives is writing."""
    run = Run.open(toy_job(tmp_path, checkpoint={"keep_last": 2}))
    for step in (2, 5):
        run.commit(
            Version(step, 1), write(run.checkpoints, Version(step, 1), STATE, 1), ((1, step),), Layout()
        )
    parts = [Path(run.job.bucket, run.checkpoints.folder(Version(step, 1)), f"{PARTIAL}0") for step in (3, 6)]
    for part in parts:
        part.parent.mkdir(parents=True)
        part.write_bytes(b"half")
    rounds = Retention(run, run.claim("local"), pytest.fail)
    for _ in range(3):
        rounds.round(Retain((Version(5, 1),), ((1, 5),), None, ()))
    assert [part.exists() for part in parts] == [False, True]
