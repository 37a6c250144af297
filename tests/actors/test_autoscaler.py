"""R3: a cluster that grows by itself grows for a run, and shrinks when the run is over.

The autoscaler is Ray's own, of version 2; its cloud starts raylets on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from actors import cluster, launch
from actors.coordinator import Coordinator
from actors.living import attach
from actors.view import View
from elastic.ids import NodeId
from elastic.job import Job
from tests.support.autoscaler import growing
from tests.support.clusters import TUNED, Nodes
from tests.support.patience import PATIENCE_S, until
from tests.support.processes import frozen, kill_all, wait_gone
from tests.support.toys import toy_job
from tests.support.warm import SOCKET, Warm

MOST = 2
"""Nodes with room for one worker that the autoscaler may start."""


@pytest.fixture(scope="module", autouse=True)
def local_cluster(forks: Warm) -> Iterator[None]:
    """No cluster but that of :func:`nodes`, to which a command that has an address connects."""
    ray.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SOCKET, forks.path)
        for name, value in TUNED.items():
            patch.setenv(name, value)
        yield
    ray.shutdown()


@pytest.fixture(scope="module")
def nodes(local_cluster: None, forks: Warm) -> Iterator[Nodes]:
    with growing(forks, MOST) as nodes:
        yield nodes
        ray.shutdown()


def job_of(bucket: Path, name: str, **changes: Any) -> Job:
    values = {"workers": {"min": 1, "max": 1}, "deadlines": {"grow_debounce_s": 0.5}}
    return toy_job(bucket, name=name, **(values | changes))


def others() -> set[NodeId]:
    """Returns the living nodes but the head."""
    return {*cluster.nodes()} - {NodeId(FAKE_HEAD_NODE_ID)}


@pytest.mark.full  # a cluster of its own; the requests themselves are in test_demand.py
def test_a_node_appears_for_the_run_and_goes_with_it(tmp_path: Path, nodes: Nodes) -> None:
    """The head has no room for a worker.  A request that is not taken back would keep the node."""
    lines, seen = list[str](), set[str]()
    result = launch.launch(
        job_of(tmp_path, "grows"),
        address=nodes.address,
        show=lambda line: lines.append(str(line)),
        look=lambda view: seen.update(view.workers.values()),
    )
    assert result.state == "Finished", "\n".join(lines)
    assert any("its autoscaler is asked for more nodes" in line for line in lines), lines
    assert len(seen) == 1
    until(lambda: not others(), what="the node of a run that is over stays")


class Mute(Coordinator):
    """A coordinator that tells the autoscaler nothing."""

    def _begin_to_watch(self) -> None:
        self.demand.begin = lambda: None  # type: ignore[method-assign]
        super()._begin_to_watch()


@pytest.mark.full
def test_without_the_request_no_node_appears(
    tmp_path: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control.  The autoscaler looks every second, and a node was there after 15 s."""
    monkeypatch.setattr(launch, "Coordinator", Mute)
    waits = {"grow_debounce_s": 0.5, "wait_s": 30}
    result = launch.launch(job_of(tmp_path, "mute", deadlines=waits), address=nodes.address)
    assert result.state == "Failed" and "waited 30 s for workers" in result.reason
    assert not others()


@pytest.mark.full
def test_another_node_comes_for_one_that_is_killed(tmp_path: Path, nodes: Nodes) -> None:
    """Four workers are wanted where two nodes can be had: the autoscaler refuses four, and gets a request of
    fewer.  Then a node dies.  A run that is stopped takes its request back, too.
    """
    killed = set[str]()

    def look(view: View) -> None:
        there = set(view.workers.values())
        if view.state == "Running" and len(there - killed) == MOST:
            if killed:
                attach("returns").stop.remote("another node is there")
            else:
                killed.add(min(there))
                tree = frozen(int((nodes.folder / "0" / min(there)).read_text()))
                kill_all(tree)
                wait_gone(tree, PATIENCE_S)

    job = job_of(tmp_path, "returns", workers={"min": 1, "max": 2 * MOST}, steps=100_000)
    result = launch.launch(job, address=nodes.address, show=print, look=look)
    assert result.state == "Stopped" and "another node is there" in result.reason
    until(lambda: not others(), what="the nodes of a run that is over stay")
