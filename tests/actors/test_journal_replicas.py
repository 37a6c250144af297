"""The coordinator acts on a durable record only after a majority of the keepers or the bucket has it, and
only while no other coordinator has followed it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.journal_replicas import JournalReplicas
from elastic.control.decision import Transition
from elastic.control.run import RunState
from elastic.ids import NodeId
from elastic.journal import codec
from elastic.protocol.authority import Authority
from elastic.protocol.events import Tick
from elastic.runs.run import Run
from storage.errors import Deposed, Unavailable
from storage.objects import Data, ObjectStore
from tests.control.play import but
from tests.support.journals import records
from tests.support.patience import PATIENCE_S
from tests.support.shelf import Shelf
from tests.support.stores import Forwarding
from tests.support.toys import toy_job

IN_BUCKET = (
    "the newest decisions of the run are now in the bucket, since too few keeper"
    "s (1 of 3) had stored them in time; the run goes on"
)


class Store(Forwarding):
    """A store that is down while ``up`` is False."""

    up = True

    def put_if_absent(self, key: str, data: Data) -> None:
        if not self.up:
            raise Unavailable(self.full_name(key), "503 slow down")
        super().put_if_absent(key, data)


class Desk:
    """The journal of a coordinator with three keepers."""

    def __init__(self, folder: Path, lease_s: float = 600.0) -> None:
        job = toy_job(f"memory://{folder.name}", name="copies")
        opened = ObjectStore.open(job.bucket)
        self.run = Run(job, Store(opened))
        incarnation, asked_at = self.run.claim("here", "one", "a"), time.monotonic()
        shelf = ray.remote(num_cpus=0)(Shelf)
        self.keepers: dict[NodeId, Any] = {NodeId(name): shelf.remote() for name in "abc"}
        ray.get([keeper.attach.remote(1) for keeper in self.keepers.values()])  # they are up
        self.known = but(RunState.begin(1, 0.0), "cluster", keepers=tuple(self.keepers))
        self.journal = self.run.journal(folder / "journal", codec.snapshot(self.known))
        authority = Authority(incarnation, lease_s, asked_at, self.known.cluster.keepers, self.known)
        self.replicas = JournalReplicas(authority, self.run, self.journal, self.keepers)
        self.said: list[str] = []

    def lose(self, *names: str) -> None:
        for name in names:
            ray.kill(self.keepers.pop(NodeId(name)))

    def decide(self, **changes: Any) -> list[str]:
        """Appends a durable record.  Returns what is said until the coordinator may act on it; the last
        sentence says where it is.
        """
        self.said = []
        self._append(durable=True, **changes)
        self.replicas.secure(self.said.append)
        assert self.replicas.safe is self.known
        return self.said

    def mention(self) -> None:
        """Appends a record that need not be durable.  Afterwards the keepers have answered, but their answers
        are unheard.

        It only asks the keepers, because ``send`` would also hear an answer that comes while it asks, as may
        happen on a busy machine.
        """
        self._append(durable=False)
        self.replicas._request()
        asked = list(self.replicas._calls)
        assert asked and len(ray.wait(asked, num_returns=len(asked), timeout=PATIENCE_S)[0]) == len(asked)

    def _append(self, *, durable: bool, **changes: Any) -> None:
        before = self.known
        self.known = but(
            but(before, "members", next_worker=before.members.next_worker + 1), "cluster", **changes
        )
        record = codec.record(self.journal.next, 0.0, Tick(), before, Transition(self.known, (), "", durable))
        self.journal.append(record, lambda: codec.snapshot(self.known), durable=durable)
        self.replicas.note(self.known)

    @property
    def shipped(self) -> int:
        """Number of records in the bucket."""
        return len(records(self.run.store, "copies"))


def test_a_majority_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody waits for the bucket then, even if somebody has claimed the run: whoever takes over asks the
    keepers first.

    ``COPY_S`` is raised because on a slow machine a late keeper would be missing in the majority.
    """
    monkeypatch.setattr("elastic.protocol.authority.COPY_S", PATIENCE_S)
    desk = Desk(tmp_path)
    assert desk.decide() == []
    desk.lose("c")
    desk.run.store.up = False  # type: ignore[attr-defined]
    assert desk.decide() == [] and desk.shipped == 0
    desk.run.store.up = True  # type: ignore[attr-defined]
    desk.run.claim("elsewhere", "one", "b")
    assert desk.decide() == []
    ray.get([keeper.attach.remote(2) for keeper in desk.keepers.values()])
    with pytest.raises(Deposed):
        desk.decide()


@pytest.mark.parametrize("names", ["a", "abc"])
def test_whose_answer_to_an_earlier_question_is_just_there_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: str
) -> None:
    monkeypatch.setattr("elastic.protocol.authority.COPY_S", PATIENCE_S)
    desk = Desk(tmp_path)
    desk.decide(keepers=tuple(NodeId(name) for name in names))
    shipped = desk.shipped
    for _ in range(3):
        desk.mention()
        assert desk.decide() == [] and desk.shipped == shipped


def test_where_there_is_no_majority_the_bucket_has_it(tmp_path: Path) -> None:
    """A majority of every list of keepers since the newest safe record is needed: another coordinator may
    still hear keepers given up.
    """
    desk = Desk(tmp_path)
    desk.lose("b", "c")
    assert desk.decide()[-1:] == [IN_BUCKET] and desk.shipped == 1
    assert desk.decide(keepers=(NodeId("a"),))[-1:] == [IN_BUCKET.replace("1 of 3", "1 of 1")]
    assert desk.decide() == [] and desk.shipped == 2, "from now on it is a majority of one"
    desk.decide(keepers=(NodeId("a"), NodeId("b"), NodeId("c")))
    desk.run.claim("elsewhere", "one", "b")
    with pytest.raises(Deposed):
        desk.decide()


def test_keepers_alone_are_not_enough_for_whom_neither_head_nor_bucket_has_answered_for_long(
    tmp_path: Path,
) -> None:
    """The coordinator may be cut off together with all keepers, and followed by another."""
    desk = Desk(tmp_path, lease_s=0.0)
    assert not desk.replicas.holds
    assert (
        desk.decide()[-1].startswith("the newest decisions of the run are now in the bucket, since too few")
        and desk.shipped == 1
    )
    desk.run.claim("elsewhere", "one", "b")
    with pytest.raises(Deposed):
        desk.decide()
    for incarnation, latest in ((1, False), (2, True)):
        long_ago = Authority(
            incarnation, 600.0, time.monotonic() - 600.0, desk.known.cluster.keepers, desk.known
        )
        replicas = JournalReplicas(long_ago, desk.run, desk.journal, desk.keepers)
        assert not replicas.holds
        replicas.ask_bucket()
        assert replicas.holds is latest and bool(long_ago.deposed) is not latest


def test_with_neither_it_stands_still_until_one_of_them_is_there(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    store: Any = desk.run.store
    desk.lose("b", "c")
    store.up = False
    deciding = threading.Thread(target=desk.decide)
    deciding.start()
    deadline = time.monotonic() + PATIENCE_S
    while not desk.said:
        assert time.monotonic() < deadline
        deciding.join(0.05)
    assert desk.said == [
        (
            "the journal can be written neither to a majority of the keepers nor to the bucket: the run "
            "carries out no decision until one of them works again"
        )
    ]
    assert deciding.is_alive() and desk.shipped == 0
    store.up = True
    deciding.join(PATIENCE_S)
    assert desk.said[-1:] == [IN_BUCKET] and desk.shipped == 1
