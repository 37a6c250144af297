"""Many real workers on one machine: 64 without torch, whose protocol alone is tested, and 16 with torch and
gloo.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from actors import cluster, launch, living
from actors.view import View
from elastic.journal import codec
from elastic.report.ledger import ledger
from elastic.runs.run import Run
from tests.support.chaos import Witness, alone, assert_nothing_left, formed, samples, trial
from tests.support.clusters import TUNED
from tests.support.commands import ROOT
from tests.support.hollow import HollowCoordinator, state_at
from tests.support.nodes import Joined, Node, joined
from tests.support.toys import toy_job

pytestmark = pytest.mark.full
NODES = 4
"""Number of nodes beside the head."""


@pytest.fixture(scope="module", autouse=True)
def local_cluster() -> Iterator[None]:
    """Replaces the cluster of the other modules, whose head has the same CPUs, and shuts it down."""
    ray.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TUNED.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(ROOT))
        cluster.connect("local")
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def nodes(local_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Joined]:
    with joined(
        tmp_path_factory.mktemp("nodes"), *(Node(f"n{number}", 14) for number in range(NODES))
    ) as found:
        yield found


class Storm:
    """Kills a worker, then the coordinator and three workers at the same time, then a whole node; then it
    asks for a stop.
    """

    def __init__(self, nodes: Joined) -> None:
        self.nodes, self.done, self.last = nodes, 0, 0
        self.victims: set[str] = set()

    def __call__(self, witness: Witness, view: View) -> bool:
        if (
            view.state != "Running"
            or view.step < self.last + 5
            or not view.workers.keys() <= witness.seen.keys()
        ):
            return False
        self.done, self.last = self.done + 1, view.step
        members = sorted(view.workers, key=lambda worker: int(worker[1:]))
        if self.done == 1:
            self._kill(witness, members[5:6])
        elif self.done == 2:
            os.kill(view.pid, signal.SIGKILL)
            self._kill(witness, members[20:23])
        elif self.done == 3:
            gone = self.nodes["n1"]
            self.victims |= {worker for worker, node in view.workers.items() if node == gone}
            self.nodes.cut_power("n1")
        else:
            coordinator = living.attach(witness.job_name)
            assert coordinator is not None
            coordinator.stop.remote("enough was seen")
            return True
        return False

    def _kill(self, witness: Witness, workers: list[str]) -> None:
        self.victims |= set(workers)
        for worker in workers:
            witness.seen[worker].process.kill()


def test_sixty_four_workers_without_torch(
    tmp_path: Path, nodes: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N1, N3, R2, R6: killed, fenced, failed over.  Nobody is given up but those who were killed; each step
    counts once; every member ends with the state of an undisturbed run."""
    monkeypatch.setattr(launch, "Coordinator", HollowCoordinator)
    job = toy_job(
        tmp_path,
        name="many",
        steps=10_000,
        global_batch=128,
        workers={"min": 32, "max": 64},
        copies={"copy_every": 0},
        checkpoint={"save_every": 100_000},
        data={"dataset": "tests.support.toys:Sums", "args": {"samples": 1_280_000}},
        deadlines={
            "grow_debounce_s": 20,
            "form_s": 240,
            "fence_s": 10,
            "stop_s": 5,
            "lease_s": 60,
            "wait_s": 600,
        },
    )
    storm = Storm(nodes)
    chaos = trial(job, storm, hash_it=False)
    assert chaos.result.state == "Stopped", chaos.result
    run = Run.open(job)
    records = run.records()
    worlds = formed(records)
    assert len(worlds[0].members) == 64, worlds[0]
    assert storm.done == 4 and len(storm.victims) > 10
    killed = {
        worker
        for record in records
        for action in record["actions"]
        if action["$"] == "Kill"
        for worker in action["workers"]
    }
    told = [part for record in records for part in codec.parts_of(record["event"])]
    # one that only starts may die with its node, too
    came = {part["worker"] for part in told if part["$"] == "Joined"}
    assert killed & came <= storm.victims, f"given up although alive: {sorted(killed & came - storm.victims)}"
    assert "Recovered" in {part["$"] for part in told}
    assert "Together" in {record["event"]["$"] for record in records}, "nothing was ever decided together"
    steps = ledger(run.segments())
    assert sorted(steps) == list(range(1, max(steps) + 1)) and max(steps) >= 20
    assert sorted(i for _, ids in samples(steps) for part in ids for i in part) == list(
        range(job.global_batch * max(steps))
    )
    for worker in worlds[-1].members:
        seen = chaos.witness.seen[worker]
        assert seen.ended is not None and seen.ended.exit_code == 0, (worker, seen.ended)
        step, _, state = (tmp_path / "hollow" / worker).read_text().split()
        assert state == state_at(int(step)) and int(step) == max(steps), worker
    assert_nothing_left(chaos)
    print([(len(each.members), each.tier, each.redone) for each in worlds])


def test_sixteen_workers_with_torch_and_gloo(tmp_path: Path, nodes: Joined) -> None:
    """R1, B1: four shards of four replicas lose three workers and the coordinator, and end with the bits of
    one process.
    """
    steps, data = 16, {"dataset": "tests.support.toys:Sums", "args": {"samples": 64 * 16, "read_s": 0.01}}
    expected = alone(toy_job(tmp_path / "local", name="local", steps=steps, global_batch=64, data=data))
    job = toy_job(
        tmp_path,
        name="sixteen",
        steps=steps,
        global_batch=64,
        data=data,
        parallel={"dp_shard": 4},
        workers={"min": 8, "max": 16},
        deadlines={"grow_debounce_s": 20, "form_s": 240},
    )
    struck: list[int] = []

    def strike(witness: Witness, view: View) -> bool:
        if (
            view.state != "Running"
            or view.step < (4, 9)[len(struck)]
            or not view.workers.keys() <= witness.seen.keys()
        ):
            return False
        if struck:
            os.kill(view.pid, signal.SIGKILL)
        else:
            for worker in sorted(view.workers)[:3]:
                witness.seen[worker].process.kill()
        struck.append(view.step)
        return len(struck) == 2

    chaos = trial(job, strike)
    assert (chaos.result.state, chaos.hash, chaos.losses) == ("Finished", expected.hash, expected.losses)
    worlds = formed(Run.open(job).records())
    assert len(worlds[0].members) == 16 and len(chaos.witness.killed()) == 3 and len(struck) == 2, worlds
    assert samples(chaos.ledger) == samples(expected.ledger)
    assert_nothing_left(chaos)
