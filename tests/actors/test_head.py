"""R6, R7: Ray's head goes down and comes back, with what it knows in RocksDB (``RAY_gcs_storage``, alpha in
Ray 2.60; no Redis).

Meanwhile the world steps on, and a coordinator that dies then is started again as soon as the head is back.
A coordinator whose node loses its power is started again on another node, which has the journal only from the
bucket and the keepers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from actors import cluster
from actors.processes import make_log_folder
from actors.view import View
from elastic.report.story import Sentence
from elastic.runs.run import Run
from tests.actors.test_failover import GATE, STEPS, job_of, take_overs, undisturbed
from tests.support.chaos import Witness, assert_nothing_left, assert_survived, formed, samples, trial
from tests.support.clusters import TUNED
from tests.support.commands import ROOT
from tests.support.nodes import Joined, Node, joined
from tests.support.patience import PATIENCE_S
from tests.support.processes import Ended, Watched

__all__ = ["undisturbed"]
pytestmark = pytest.mark.full
DOWN_STEPS = 5
AHEAD = """
import time
wall, wall_ns = time.time, time.time_ns
time.time = lambda: wall() + {ahead_s}
time.time_ns = lambda: wall_ns() + {ahead_s} * 10**9
"""
"""``sitecustomize.py`` of a node with another clock: a machine has one wall clock, so Python is told another
time.
"""


@pytest.fixture(scope="module", autouse=True)
def local_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Starts a cluster whose head keeps what it knows on disk."""
    ray.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        for name, value in TUNED.items():
            patch.setenv(name, value)
        patch.setenv("RAY_gcs_storage", "rocksdb")
        patch.setenv("RAY_gcs_storage_path", str(tmp_path_factory.mktemp("gcs")))
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
        cluster.connect("local")
        yield
        ray.shutdown()


class HeadDown:
    """Kills the head's store, ``DOWN_STEPS`` later the coordinator, and after ``DOWN_STEPS`` more brings the
    store back.
    """

    def __init__(self, bucket: Path) -> None:
        self.bucket, self.ends = bucket, list[Ended]()
        self.committed: list[int] = []

    def __call__(self, witness: Witness, view: View) -> bool:
        if view.incarnation > 1:
            (self.bucket / "gate").touch()
            return True
        if view.state == "Running" and view.step >= 5:
            head: Any = ray._private.worker._global_node
            (gcs,) = head.all_processes["gcs_server"]
            known = psutil.Process(gcs.process.pid)
            command, environment = (
                [*known.cmdline(), f"--gcs_server_port={head.gcs_address.rpartition(':')[2]}"],
                known.environ(),
            )
            with Watched(gcs.process.pid) as down, Watched(view.pid) as coordinator:
                head.kill_gcs_server(check_alive=False)
                self.ends.append(down.wait(PATIENCE_S))
                self._let_them_step(witness)
                coordinator.kill()
                self.ends.append(coordinator.wait(PATIENCE_S))
                self._let_them_step(witness)
            # not by Ray, which runs Python between fork and exec: with this process's threads that hung
            # forever, in two series of twelve
            again = subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            head.all_processes["gcs_server"] = [gcs._replace(process=again)]  # so that Ray ends it
        return False

    def _let_them_step(self, witness: Witness) -> None:
        deadline = time.monotonic() + PATIENCE_S
        before = {worker: seen.counters["step"] for worker, seen in witness.seen.items()}
        while (
            min(seen.counters["step"] - before[worker] for worker, seen in witness.seen.items()) < DOWN_STEPS
        ):
            assert time.monotonic() < deadline, "they do not step without a head"
            time.sleep(0.01)
        self.committed.append(DOWN_STEPS)


def test_the_head_restarts_and_the_coordinator_dies_meanwhile(tmp_path: Path, undisturbed: Any) -> None:
    act = HeadDown(tmp_path)
    chaos = trial(job_of(tmp_path, "head"), act)
    assert len(act.committed) == 2 and 5 + 2 * DOWN_STEPS < GATE < STEPS
    assert act.ends[1].signal is signal.SIGKILL
    assert take_overs(chaos.job) == ["Running"]
    assert_survived(chaos, undisturbed, worlds=(2,), tiers=("init",))


class PowerCut:
    """Cuts the power of the coordinator's node, and opens the gate once another coordinator has taken over."""

    def __init__(self, bucket: Path, nodes: Joined) -> None:
        self.bucket, self.nodes, self.ends = bucket, nodes, list[Ended]()

    def __call__(self, witness: Witness, view: View) -> bool:
        if not self.ends and view.state == "Running" and view.step >= 5:
            self.ends = self.nodes.cut_power("first")
        if view.incarnation < 2:
            return False
        (self.bucket / "gate").touch()
        return True


@pytest.mark.parametrize("ahead_s", [-3600, 0, 3600])
def test_the_node_of_the_coordinator_dies(
    tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    """R6: also if its clock was an hour behind that of the next coordinator, or ahead of it
    (``coordinator_clock``).
    """
    own_disk = make_log_folder("power").parent
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(AHEAD.format(ahead_s=ahead_s))
    first = Node(
        "first", 0, empty=(own_disk,), environment={"PYTHONPATH": f"{tmp_path / 'clock'}{os.pathsep}{ROOT}"}
    )
    with joined(tmp_path, first, Node("second", 0)) as nodes:
        monkeypatch.setattr(cluster, "on_this_node", lambda: {"ray.io/node-id": nodes["first"]})
        act = PowerCut(tmp_path, nodes)
        chaos = trial(job_of(tmp_path, "power"), act)
        assert {end.signal for end in act.ends} == {signal.SIGKILL}
        assert take_overs(chaos.job) == ["Running"], "it was where the power was cut"
        records = Run.open(chaos.job).records()
        (recovered,) = (
            number for number, record in enumerate(records) if record["event"]["$"] == "Recovered"
        )
        assert abs(records[recovered - 1]["at"] - records[recovered]["at"] - ahead_s) < 60, (
            "each had its own clock"
        )
        assert (chaos.result.state, chaos.hash) == ("Finished", undisturbed.hash)
        assert [len(each.members) for each in formed(records)] == [2], "no worker was there, so no world ends"
        assert samples(chaos.ledger) == samples(undisturbed.ledger)
        assert chaos.witness.total("microbatches_run") == STEPS * chaos.job.microbatches
        assert_nothing_left(chaos)


class FrozenKeeper:
    """Freezes the keeper of a node without workers until the second world runs."""

    def __init__(self, bucket: Path) -> None:
        self.bucket, self.pid = bucket, 0

    def __call__(self, witness: Witness, view: View) -> bool:
        if not self.pid and view.state == "Running" and view.step >= 3:
            homes = {node for node in view.workers.values()}
            (keeper,) = (
                k
                for name, k in cluster.named(f"{view.token}/keeper-").items()
                if not any(h.startswith(name) for h in homes)
            )
            pid = cluster.pid_of(keeper)
            assert pid is not None
            self.pid = pid
            os.kill(pid, signal.SIGSTOP)
        if view.generation < 2 or view.state != "Running":
            return False
        os.kill(self.pid, signal.SIGCONT)
        (self.bucket / "gate").touch()
        return True


def test_a_keeper_that_does_not_answer_is_not_waited_for_for_ever(tmp_path: Path, undisturbed: Any) -> None:
    """There is no majority without the keeper: the run goes on once the journal is in the bucket, and says
    so.
    """
    with joined(tmp_path, Node("second", 0)):
        act = FrozenKeeper(tmp_path)
        job = job_of(tmp_path, "no-majority", faults=[{"point": "backward", "step": 12, "world_rank": 1}])
        chaos = trial(job, act)
        told = [str(line.text) for line in chaos.lines if isinstance(line, Sentence)]
        assert (
            "the newest decisions of the run are now in the bucket, since too few keepers (1 of 2) had stored "
            "them in time; the run goes on" in told
        )
        assert (chaos.result.state, chaos.hash) == ("Finished", undisturbed.hash)
        assert samples(chaos.ledger) == samples(undisturbed.ledger)
        assert_nothing_left(chaos)
