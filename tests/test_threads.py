"""An error on a background thread is heard of: the work goes on, or the process ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors import cluster, coordinator
from actors.coordinator import Coordinator
from actors.perform import ActorGroup
from elastic.control.inbox import Inbox
from elastic.ids import NodeId
from elastic.protocol.events import NodeFound
from elastic.threads import keep_going
from storage.errors import Unavailable
from tests.support.patience import PATIENCE_S

ENDS = (
    "import threading; from elastic.threads import go_or_end; go_or_end(lambda: {}, 'lease'); "
    "threading.Event().wait({})"
)


def test_work_that_fails_begins_anew_and_each_place_is_named_once() -> None:
    turns, said = 0, list[str]()

    def work() -> None:
        nonlocal turns
        turns += 1
        if turns < 3:
            raise KeyError("first")
        if turns == 3:
            raise ValueError("second")

    keep_going(work, "watch", said.append).join(PATIENCE_S)
    assert turns == 4 and len(said) == 2
    assert (
        "the thread 'watch' failed (KeyError at test_threads.py:" in said[0]
        and 'raise ValueError("second")' in said[1]
    )


def test_work_goes_on_if_nobody_hears_that_it_failed(capsys: pytest.CaptureFixture[str]) -> None:
    turns = iter([RuntimeError("the work"), None])

    def work() -> None:
        if error := next(turns):
            raise error

    def say(sentence: str) -> None:
        raise ConnectionError

    keep_going(work, "beat", say).join(PATIENCE_S)
    assert next(turns, "over") == "over" and "RuntimeError: the work" in capsys.readouterr().out


@pytest.mark.parametrize(("work", "code"), [("[][0]", 1), ("None", 0)], ids=["fails", "control"])
def test_a_process_ends_with_a_thread_without_which_it_is_of_no_use(work: str, code: int) -> None:
    command = [sys.executable, "-c", ENDS.format(work, PATIENCE_S if code else 0)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == code and ("IndexError: list index out of range" in done.stdout) == bool(code)


def test_a_coordinator_watches_the_cluster_on_after_an_error_that_is_not_ray_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's tables, which are private, once lack a field: the node that comes later is found, and the story
    tells what happened.
    """
    answers: list[Any] = [KeyError("NodeID"), KeyError("NodeID"), (NodeId("n1"),)]
    said, kept = list[str](), threading.Event()

    def nodes() -> tuple[NodeId, ...]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return tuple(answer)

    monkeypatch.setattr(coordinator, "CLUSTER_S", 0.01)
    monkeypatch.setattr(cluster, "nodes", nodes)
    one: Any = Coordinator.__new__(Coordinator)
    one.over, one.clock, one.inbox = threading.Event(), lambda: 0.0, Inbox(lambda: 0.0)
    one.replicas = SimpleNamespace(ask_head=lambda actor: None)
    one.group = SimpleNamespace(coordinator=None, keepers={}, keep=lambda node: kept.set())
    one.story = SimpleNamespace(say=lambda now, sentence: said.append(sentence))
    one.exported, one.errands = (
        SimpleNamespace(run=lambda state, steps, now: None),
        SimpleNamespace(begin=lambda: None),
    )
    one.state, one.demand = None, SimpleNamespace(begin=lambda: None)
    one.job = SimpleNamespace(steps=1, notices=SimpleNamespace(sources=()))
    one._begin_to_watch()
    assert kept.wait(PATIENCE_S)
    one.over.set()
    event, _ = one.inbox.take(0.0)
    assert event == NodeFound(NodeId("n1")) and len(said) >= 1 and "KeyError: 'NodeID'" in said[0]


def test_a_node_whose_last_keeper_is_not_quite_gone_costs_the_other_nodes_nothing() -> None:
    """Its name is still taken.  The other node gets its keeper in the same round, and this one in a later
    round.
    """
    refusals = [ray.exceptions.ActorAlreadyExistsError("keeper-n1")]

    def keep(node: NodeId) -> None:
        if node == "n1" and refusals:
            raise refusals.pop()
        one.group.keepers[node] = None

    one: Any = Coordinator.__new__(Coordinator)
    one.inbox, one.group = Inbox(lambda: 0.0), SimpleNamespace(keepers={}, keep=keep)
    one._keep((NodeId("n1"), NodeId("n2")))
    assert [*one.group.keepers] == ["n2"]
    one._keep((NodeId("n1"), NodeId("n2")))
    assert [*one.group.keepers] == ["n2", "n1"]


def test_what_fails_on_a_pool_is_in_the_story() -> None:
    """Nobody asks for the result of these calls."""
    said = list[str]()
    group: Any = ActorGroup.__new__(ActorGroup)
    group.tell = said.append

    def refuses() -> None:
        raise Unavailable("the bucket", "it does not answer")

    def breaks() -> None:
        raise TypeError("wrong")

    with ThreadPoolExecutor(1) as pool:
        for work in (refuses, breaks, lambda: None):
            group._do(pool, work)
    assert len(said) == 2 and said[0].startswith("refuses failed: ") and "TypeError: wrong" in said[1]
