"""R19: a command beside its run, which lives on another machine.

The cluster is begun by ``ray start``.  Its head is at 127.0.0.2, from which no process of this machine connects: so it is elsewhere, as
far as addresses tell, and this machine is a node of its cluster.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from elastic.job import Job
from elastic.runs.run import Run
from tests.actors.test_one_owner import command, slow_job, until_it_says
from tests.support.clusters import Nodes
from tests.support.patience import PATIENCE_S


@pytest.fixture(scope="module", autouse=True)
def local_cluster(no_cluster_is_left: None) -> Iterator[None]:
    """Replaces the cluster of the other modules: this process is part of none, as a command is when it begins."""
    ray.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        yield
    ray.shutdown()


@pytest.fixture(scope="module")
def nodes(local_cluster: None) -> Iterator[Nodes]:
    with Nodes(Path(sys.executable), head_cpus=8, head_ip="127.0.0.2") as nodes:
        nodes.add(0, "--node-ip-address=127.0.0.3").says("Ray runtime started")
        yield nodes


def test_a_command_on_another_node_of_its_cluster_attaches_to_the_run(nodes: Nodes, tmp_path: Path) -> None:
    """It names no address.  It began a cluster of its own there, and the run a second time; the one that lived lost what it had not saved.

    The control: for a run that does not live it begins one.
    """
    path = slow_job(tmp_path, "beside")
    first = command(path, "train", "--address", nodes.address)
    second = None
    try:
        until_it_says(first, "step     3")
        second = command(path, "train")
        until_it_says(second, "attached to beside, which runs on this cluster already", never="a Ray cluster starts on this machine")
        stop = command(path, "stop")
        stop.communicate(timeout=PATIENCE_S)
        for each in (first, second):
            text, _ = each.communicate(timeout=PATIENCE_S)
            assert each.returncode == 3, text
    finally:
        for each in filter(None, (first, second)):
            each.kill()
    assert Run.find(Job.load(path)).latest_claim() == 1, "one coordinator, ever"
    third = command(path, "train")
    try:
        until_it_says(third, "a Ray cluster starts on this machine")
        third.send_signal(signal.SIGINT)
        third.communicate(timeout=PATIENCE_S)
    finally:
        third.kill()
