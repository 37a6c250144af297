"""The coordinator learns from Ray that an actor is gone; if Ray's answer is uncertain, the next answer
decides.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors import perform, relay
from actors.perform import NODE_DIED, UNREACHED, ActorGroup
from actors.relay import Orders
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.protocol.actions import CommitManifest, Save, Upload
from elastic.protocol.events import Event, KeeperLost, Lost, NodeRefused, Saved, SaveFailed
from elastic.runs.receipts import Parts, SavedShard
from elastic.runs.run import Run
from storage.errors import BadFormat
from storage.objects import Data, ObjectStore
from tests.storage.states import TENSORS, state_of, write
from tests.support.patience import PATIENCE_S
from tests.support.stores import Forwarding
from tests.support.toys import toy_job

pytestmark = pytest.mark.fast
AWAY = ray.exceptions.ActorUnavailableError("the connection broke", None)
DEAD = ray.exceptions.RayActorError(error_msg="it was killed")
NODE = ray.exceptions.RayActorError(error_msg="The actor's node has died")


class Call:
    """The result of ``remote()``, whose future ends with ``error``."""

    def __init__(self, error: BaseException | None) -> None:
        self.end: Future[Any] = Future()
        self.end.set_exception(error) if error else self.end.set_result(None)

    def future(self) -> Future[Any]:
        return self.end


class Actor:
    """Each call to ``lives`` ends with the next of ``errors``, the last of them again and again."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors, self.lives = list(errors), self

    def remote(self) -> Call:
        return Call(self.errors.pop(0) if len(self.errors) > 1 else self.errors[0])


@pytest.mark.parametrize(
    ("errors", "reason", "certain"),
    [
        ((DEAD,), "its process died", True),
        ((AWAY, AWAY, DEAD), "its process died", True),
        ((AWAY, NODE), NODE_DIED, False),
        ((AWAY,), UNREACHED, False),
    ],
)
def test_an_actor_out_of_reach_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, errors: tuple[BaseException, ...], reason: str, certain: bool
) -> None:
    """Only an actor that is certainly dead need not be waited for: behind a cut an actor may live on, and
    commit.
    """
    told: Future[Lost] = Future()
    monkeypatch.setattr(perform, "REACH_S", 0.001)
    these = ActorGroup.__new__(ActorGroup)
    these._lives, these._closing, these.post = set(), False, told.set_result  # type: ignore[assignment]
    these.joined, these.workers = {}, {}
    actor = Actor(*errors)
    these._when_done(actor.remote(), actor, lambda error: these._ended(WorkerId("w1"), error))
    assert told.result(PATIENCE_S) == Lost(WorkerId("w1"), reason, certain)
    assert these._lives == set(), "calls that have ended are forgotten, however many actors a run has"


def test_a_keeper_that_cannot_be_made_refuses_its_node_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing about a bucket that all nodes would have to share.  The control: a keeper that died
    refuses nothing.
    """
    told, node = queue.SimpleQueue[Event](), NodeId("n1")
    monkeypatch.setattr(perform.cluster, "node_name", lambda _: "node n1 (here)")
    these = ActorGroup.__new__(ActorGroup)
    these._closing, these.post, these.keepers, these._looks = False, told.put, {}, ThreadPoolExecutor(1)
    these.orders = Orders(1, {}, {}, {}, 10.0)
    unmade = ray.exceptions.RayActorError(
        error_msg="ModuleNotFoundError: No module named 'blake3'", actor_init_failed=True
    )
    these._keeper_ready(node, unmade)
    these._keeper_ready(node, DEAD)
    why = "node n1 (here) cannot start a keeper: ModuleNotFoundError: No module named 'blake3'"
    heard = [told.get(timeout=PATIENCE_S) for _ in range(2)]
    assert sorted(heard, key=str) == [
        KeeperLost(node, "its process died"),
        NodeRefused(node, why, shared=False),
    ]


def test_a_worker_that_has_certainly_ended_is_forgotten() -> None:
    """A run of months on machines that come and go has many workers; what is kept of each would grow without
    end.
    """
    these = ActorGroup.__new__(ActorGroup)
    these.workers, these.joined, these.keepers, these._guests = {}, {}, {}, defaultdict(set)
    one, other, node = WorkerId("w1"), WorkerId("w2"), NodeId("n1")
    for worker in (one, other):
        these.workers[worker] = Actor(DEAD)
        these.welcome(worker, node)
    these.forget(one)
    these.forget(WorkerId("w3"))
    assert [*these.workers] == [*these.joined] == [*these._guests[node]] == [other]


def test_orders_are_kept_for_longer_than_it_takes_to_give_up_a_keeper() -> None:
    """The last orders through a keeper that cannot be reached are sent again only once it counts as lost."""
    assert relay.LOST_S > 2 * perform.REACHES * perform.REACH_S


class Keeper:
    """Each call to ``upload`` ends with the next of ``ends``."""

    def __init__(self, *ends: BaseException | None) -> None:
        self.ends, self.upload = list(ends), self
        self.heard: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def remote(self, *said: Any) -> Call:
        self.heard.put(said)
        return Call(self.ends.pop(0))


@pytest.mark.parametrize(("ends", "calls"), [((AWAY, AWAY, None), 3), ((None,), 1), ((AWAY, DEAD), 2)])
def test_a_keeper_that_was_out_of_reach_is_told_its_saves_again(
    monkeypatch: pytest.MonkeyPatch, ends: tuple[BaseException | None, ...], calls: int
) -> None:
    """A planned stop asks for its saves once and waits.  The control: a call that arrived, or met a dead
    keeper, is not repeated.
    """
    monkeypatch.setattr(perform, "REACH_S", 0.001)
    keeper, nodes = Keeper(*ends, None), (NodeId("n1"), NodeId("n2"))
    these = ActorGroup.__new__(ActorGroup)
    these._closing, these._uploads, these.incarnation, these.keepers = False, 0, 1, {nodes[0]: keeper}
    own, other = (Save(Version(5, 1), 1, Layout(1, 1), (WorkerId("w1"),), (node,)) for node in nodes)
    these.perform(Upload(nodes, (own, other), 1, Version(5, 1)))
    heard = [keeper.heard.get(timeout=PATIENCE_S) for _ in range(calls)]
    assert heard == [(1, 1, (own,), 1, Version(5, 1))] * calls
    with pytest.raises(queue.Empty):
        keeper.heard.get(timeout=0.1)


class Slow(Forwarding):
    """A store that answers a HEAD only once it is let go, and counts what is written."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.go, self.asked, self.written = threading.Event(), threading.Event(), 0

    def size(self, key: str) -> int:
        self.asked.set()
        assert self.go.wait(PATIENCE_S)
        return super().size(key)

    def put_if_absent(self, key: str, data: Data) -> None:
        self.written += 1
        super().put_if_absent(key, data)


def test_a_manifest_that_is_asked_for_again_while_it_is_written_is_written_once() -> None:
    """It is made of the packed receipts that the keepers sent.  The control: asked for afterwards, it is
    found in its place.
    """
    store, told, version = (
        Slow(ObjectStore.open("memory://perform")),
        queue.SimpleQueue[Event](),
        Version(5, 1),
    )
    these = ActorGroup.__new__(ActorGroup)
    these.run, these.parts, these.post, these.ship = (
        Run(toy_job("memory://perform"), store),
        Parts(),
        told.put,
        lambda timeout_s: True,
    )
    these._committing, these._pool = set(), ThreadPoolExecutor(4)
    for number, receipt in enumerate(write(these.run.checkpoints, version, state_of(TENSORS, seed=1), 2)):
        these.parts.add(version, WorkerId(f"w{number}"), SavedShard(1, Layout(1, 2), receipt.packed()))
    store.written, asked = 0, CommitManifest(version, ((1, 5),))
    these.perform(asked)
    assert store.asked.wait(PATIENCE_S)
    these.perform(asked)
    store.go.set()
    digest = these.run.checkpoints.manifest(version).digest if told.get(timeout=PATIENCE_S) else ""
    assert told.empty() and store.written == 2, "the index and the manifest"
    these._pool.shutdown()
    these._pool = ThreadPoolExecutor(1)
    these.perform(asked)
    assert told.get(timeout=PATIENCE_S) == Saved(version, digest) and store.written > 2
    these._pool.shutdown()
    assert these.run.checkpoints.verify(version).good


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (RuntimeError("can't start new thread"), True),
        (MemoryError(), True),
        (OSError("disk full"), True),
        (BadFormat("a"), False),
    ],
)
def test_whatever_keeps_a_manifest_from_being_written_is_reported(error: Exception, again: bool) -> None:
    """R11: an error that nobody expected was told to nobody, and the run waited for its manifest for ever."""
    told: Future[SaveFailed] = Future()

    def commit(*_: Any) -> None:
        raise error

    these = ActorGroup.__new__(ActorGroup)
    these.post = told.set_result  # type: ignore[assignment]
    these.ship = lambda _: True  # type: ignore[assignment, method-assign]
    parts, run = SimpleNamespace(of=commit), SimpleNamespace(checkpoints=SimpleNamespace(manifest=commit))
    these._committing, these._pool = set(), ThreadPoolExecutor(1)
    these.parts, these.run = parts, run  # type: ignore[assignment]
    these.perform(CommitManifest(Version(6, 1), ((1, 6),), 1))
    failed = told.result(PATIENCE_S)
    assert (failed.again, failed.manifest, failed.version) == (again, True, Version(6, 1))
    assert failed.reason.startswith(f"{type(error).__name__}: ")
    these._pool.shutdown()
    assert these._committing == set()
