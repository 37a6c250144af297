"""R9, R10: real partitions.  Two workers on two hosts, the coordinator on a third; each is a network
namespace (tests/support/hosts.py).

A worker that is cut off commits nothing and is gone when the network is back; the others train on, or wait,
and the bits are the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from actors import cluster
from actors.living import attach
from actors.view import View
from elastic.control.takeover import UNREAD
from elastic.job import Job
from elastic.report.story import Sentence
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from storage.checkpoints import Checkpoints
from tests.benchmarks.storm import SHARDS
from tests.support.chaos import (
    REDONE,
    Trial,
    Witness,
    assert_bytes,
    assert_nothing_left,
    exported_hash,
    formed,
    samples,
    trial,
)
from tests.support.hosts import Hosts
from tests.support.toys import LIGHT, toy_job
from tests.support.warm import SOCKET, Warm

STEPS = 44
SAMPLES = 16 * STEPS
LEASE_S = 12
DEADLINES = {"grow_debounce_s": 5, "stall_s": 3, "fence_s": 3, "form_s": 60, "lease_s": LEASE_S}

pytestmark = [
    pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="no /dev/net/tun, of which hosts are made"),
]


@pytest.fixture(scope="module")
def hosts(forks: Warm) -> Iterator[Hosts]:
    ray.shutdown()  # of the modules before
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SOCKET, forks.path)  # of the head
        with Hosts(2) as hosts:
            yield hosts


@pytest.fixture(scope="module", autouse=True)
def local_cluster(hosts: Hosts) -> Iterator[None]:
    """Replaces the cluster of the other modules: ``hosts`` has connected to its own."""
    yield


def job_of(bucket: Path, name: str, **changes: Any) -> Job:
    """Returns a job that is slow enough to be cut and mended on its way, and as fast as it can be once
    ``calm`` exists.
    """
    # slow enough for a worker to be asked for twice
    args = {"samples": SAMPLES, "pace_s": 0.8, "calm": str(bucket / "calm")}
    values: dict[str, Any] = {
        "name": name,
        "steps": STEPS,
        "data": {"dataset": "tests.support.toys:Paced", "args": args},
        "workers": {"min": 1, "max": 2},
        "checkpoint": {"save_every": 10},
        "deadlines": DEADLINES,
    }
    return toy_job(bucket, **(LIGHT | values | changes))


@pytest.fixture(autouse=True)
def all_are_there(hosts: Hosts) -> Iterator[None]:
    yield
    hosts.rejoin()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the undisturbed run."""
    job = job_of(tmp_path_factory.mktemp("reference"), "local")
    (Path(job.bucket) / "calm").touch()
    assert run_local(job, lambda line: None)[0] == "Finished"
    return exported_hash(job)


def told(chaos: Trial) -> list[str]:
    return [line.text for line in chaos.lines if isinstance(line, Sentence)]


def assert_same(chaos: Trial, reference: str) -> None:
    """Checks that the run finished with the same bits, counted each sample once, learned, and left nothing."""
    assert chaos.result.state == "Finished", (chaos.result, told(chaos))
    assert chaos.hash == reference
    assert sorted(i for _, ids in samples(chaos.ledger) for part in ids for i in part) == list(range(SAMPLES))
    assert chaos.losses[-1] <= 0.8 * chaos.losses[0]
    assert_nothing_left(chaos)


class Cut:
    """A trial calls this at every look: it slows the run down at step 10, cuts the network at step 12, mends
    it when ``enough`` says so, lets hosts that were given up join again, and then lets the run go on."""

    look_s = 0.05
    with_coordinator = False
    """True if the coordinator's host is cut off, False if another host is."""
    coordinator = 0
    """Pid of the coordinator when the network was cut."""

    def __init__(
        self, hosts: Hosts, calm: Path, cut: Callable[[int], None], enough: Callable[[View], bool]
    ) -> None:
        self.hosts, self.file, self.cut, self.enough = hosts, calm, cut, enough
        self.file.touch()
        self.phase, self.at, self.name = "calm", 0, ""
        self.nodes = {host: hosts.node(host) for host in range(1, hosts.number)}
        self.homes: dict[int, str] = {}
        """The worker of each host when the network was cut."""
        self.victim = 0
        """The host of a worker, but not of the coordinator, which Ray may have put anywhere."""
        self.then: dict[str, dict[str, int]] = {}
        """The counters of each worker when the network was cut; ``before_mending`` has them just before it
        was mended.
        """
        self.before_mending: dict[str, dict[str, int]] = {}
        self.alive: set[str] = set()
        """Workers whose processes lived at that moment, according to the kernel."""
        self.clocks: set[str] = set()
        """Time namespaces of the workers and of this process."""

    def __call__(self, witness: Witness, view: View) -> bool:
        getattr(self, self.phase)(witness, view)
        return self.phase == "over"

    def calm(self, witness: Witness, view: View) -> None:
        self.name = view.token.rpartition("-")[0].rpartition("-")[0]
        if view.step >= 10:
            self.file.unlink(missing_ok=True)
        if view.step >= 12 and len(view.workers) == 2 and view.workers.keys() <= witness.seen.keys():
            self.homes = {
                host: worker
                for worker, node in view.workers.items()
                for host, each in self.nodes.items()
                if each == node
            }
            home = cluster.node_of(attach(self.name))
            self.clocks = {
                os.readlink(f"/proc/{pid}/ns/time")
                for pid in ("self", *(witness.seen[worker].process.pid for worker in view.workers))
            }
            self.victim = next(host for host in (2, 1) if (self.nodes[host] == home) is self.with_coordinator)
            self.coordinator = view.pid
            self.cut(self.victim)
            self.at, self.then, self.phase = view.step, counters(witness), "dark"

    def dark(self, witness: Witness, view: View) -> None:
        if self.enough(view):
            self.before_mending = counters(witness)
            self.alive = {worker for worker, seen in witness.seen.items() if seen.process.running}
            self.hosts.mend()
            self.hosts.thaw()
            self.phase = "mended"

    def mended(self, witness: Witness, view: View) -> None:
        """Lets hosts that were given up join again, and lets the run go on once it has grown or is about to
        grow.
        """
        for host in range(1, self.hosts.number):
            if self.hosts.left(host):
                self.hosts.join(host)
        if view.generation > 1 and view.state in ("Stopping", "Running") and len(view.workers) == 2:
            self.file.touch()
            self.phase = "over"


def counters(witness: Witness) -> dict[str, dict[str, int]]:
    return {worker: seen.counts() for worker, seen in witness.seen.items()}


@pytest.mark.must_run_in_ci
@pytest.mark.parametrize(
    "changes", [{}, pytest.param(SHARDS, marks=pytest.mark.full)], ids=["replicas", "shards"]
)
@pytest.mark.parametrize("way", ["cut", pytest.param("frozen", marks=pytest.mark.full)])
def test_the_side_without_the_coordinator_commits_nothing_and_ends(
    tmp_path: Path, hosts: Hosts, reference: str, way: str, changes: dict[str, Any]
) -> None:
    """R9, R10: a worker and its host are cut off, or frozen; the other worker trains on beside the
    coordinator.  The first one is a zombie until the network is back, or until it thaws; then it ends before
    it has applied, saved or said anything more."""
    lose = hosts.cut if way == "cut" else hosts.freeze
    script = Cut(
        hosts, tmp_path / "calm", lose, lambda view: view.generation == 2 and view.step >= script.at + 3
    )
    chaos = trial(job_of(tmp_path, way, **changes), script)
    assert_same(chaos, reference)
    assert len(script.clocks) == 3, "no two hosts have the same monotonic clock"
    zombie, other = (chaos.witness.seen[script.homes[host]] for host in (script.victim, 3 - script.victim))
    worlds = formed(Run.open(chaos.job).records())
    tier, redone = ("host", worlds[1].redone) if changes else ("live", 0)
    assert [(len(each.members), each.tier, each.redone) for each in worlds] == [
        (2, "init", 0),
        (1, tier, redone),
        (2, "live", 0),
    ]
    assert redone <= REDONE["host"](chaos.job)
    assert worlds[1].members == (other.worker,) and zombie.worker not in worlds[2].members
    # it lived behind the cut, and neither there nor afterwards did it apply more than what was on its way
    # when the cut came
    assert zombie.worker in script.alive and zombie.ended is not None
    assert zombie.final["updates_applied"] <= script.then[zombie.worker]["updates_applied"] + 1
    assert zombie.final["generation"] == 1
    assert other.final["updates_applied"] == STEPS + redone and other.final["generation"] == 3
    # nothing counts of what it wrote: no manifest of generation 1 is later than the cut
    saved = Checkpoints(Run.open(chaos.job).store, chaos.job.name).versions()
    assert all(each.version.step <= script.at + 1 for each in saved if each.version.generation == 1)
    assert_bytes(chaos.witness, worlds)


@pytest.mark.full
@pytest.mark.parametrize("silence_s", [2, 1000], ids=["beats", "control"])
def test_a_node_that_falls_silent_is_found_by_its_beats(
    tmp_path: Path, hosts: Hosts, reference: str, silence_s: int
) -> None:
    """R2, H4: nobody can know whether a silent node is dead.  A world that stands still waits 2 s for its
    beats and 1 s for its answers to the fence, instead of 60 s and 30 s.  The control does not listen to
    beats, and waits until Ray gives the node up."""
    script = Cut(
        hosts,
        tmp_path / "calm",
        hosts.freeze,
        lambda view: view.generation == 2 and view.step >= script.at + 3,
    )
    deadlines = DEADLINES | {"stall_s": 60, "fence_s": 30, "silence_s": silence_s}
    chaos = trial(job_of(tmp_path, f"silent-{silence_s}", deadlines=deadlines), script)
    assert_same(chaos, reference)
    records = Run.open(chaos.job).records()
    forms = [record["at"] for record in records for action in record["actions"] if action["$"] == "Form"]
    last = max(
        record["at"] for record in records if record["event"]["$"] == "StepDone" and record["at"] < forms[1]
    )
    by_beats = [text for text in told(chaos) if "nothing was heard from node" in text]
    assert bool(by_beats) == (silence_s == 2), told(chaos)
    assert forms[1] - last < 8 or silence_s > 2, forms[1] - last
    assert [len(each.members) for each in formed(records)] == [2, 1, 2]


@pytest.mark.full
def test_two_workers_that_reach_the_coordinator_but_not_each_other(
    tmp_path: Path, hosts: Hosts, reference: str
) -> None:
    """R10: nobody is to blame, nobody is killed; a world forms again when they reach each other again."""

    def cut(host: int) -> None:
        hosts.cut(host, others=(3 - host,))

    script = Cut(hosts, tmp_path / "calm", cut, lambda view: view.generation >= 2 and view.state == "Forming")
    chaos = trial(job_of(tmp_path, "peers"), script)
    assert_same(chaos, reference)
    assert sorted(chaos.witness.seen) == ["w1", "w2"] and not chaos.witness.killed()
    assert {seen.final["updates_applied"] for seen in chaos.witness.seen.values()} == {STEPS}
    assert any("no member is blamed" in text for text in told(chaos)), told(chaos)


@pytest.mark.full
@pytest.mark.parametrize("way", ["to", "off"])
def test_one_way(tmp_path: Path, hosts: Hosts, reference: str, way: str) -> None:
    """R10: a host hears and is not heard, or is heard and does not hear."""

    def cut(host: int) -> None:
        hosts.cut(host, to=way == "to", off=way == "off")

    script = Cut(
        hosts, tmp_path / "calm", cut, lambda view: view.generation >= 2 and view.step >= script.at + 3
    )
    chaos = trial(job_of(tmp_path, f"one-way-{way}"), script)
    assert_same(chaos, reference)
    zombie = chaos.witness.seen[script.homes[script.victim]]
    assert zombie.final["updates_applied"] <= script.then[zombie.worker]["updates_applied"] + 1


@pytest.mark.full
def test_the_coordinator_is_cut_off_from_all(tmp_path: Path, hosts: Hosts, reference: str) -> None:
    """R10: two workers step on alone until their leases are over, and not beyond; what they did alone is done
    again from the bucket.
    """
    began: list[float] = []

    def cut(host: int) -> None:
        hosts.cut(0)
        began.append(time.monotonic())

    script = Cut(hosts, tmp_path / "calm", cut, lambda view: time.monotonic() > began[0] + 1.5 * LEASE_S)
    chaos = trial(job_of(tmp_path, "headless"), script)
    assert_same(chaos, reference)
    alone = {
        worker: script.before_mending[worker]["updates_applied"] - script.then[worker]["updates_applied"]
        for worker in script.then
    }
    assert all(steps > 0 for steps in alone.values()), alone
    for worker in script.then:
        assert (
            chaos.witness.seen[worker].final["updates_applied"]
            == script.before_mending[worker]["updates_applied"]
        )


@pytest.mark.full
def test_the_coordinator_is_cut_off_with_a_worker(
    tmp_path: Path, hosts: Hosts, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R6, R10: two coordinators, each with a worker that hears it alone.  The first one no longer finds a
    majority of the keepers, and learns from the bucket that another one has followed it; it begins nothing,
    grants no lease, and ends."""
    monkeypatch.setattr(cluster, "on_this_node", lambda: {"ray.io/node-id": hosts.node(1)})
    stepped: list[float] = []
    gone: list[float] = []

    def look(view: View) -> bool:
        """Returns True once the world of the second coordinator steps and the first coordinator is gone, or
        has had ``LEASE_S`` to go.
        """
        now = time.monotonic()
        if view.incarnation == 2 and view.generation >= 2 and view.step >= script.at + 6:
            stepped.append(now)
        if stepped and not psutil.pid_exists(script.coordinator):
            gone.append(now)
        return bool(gone) or (bool(stepped) and now > stepped[0] + LEASE_S)

    script = Cut(hosts, tmp_path / "calm", hosts.cut, look)
    script.with_coordinator = True
    patience = {
        "stall_s": 60,
        "silence_s": 60,
    }  # or the first one, which the bucket still knows, goes on with its worker before the head gives it up
    chaos = trial(job_of(tmp_path, "two-coordinators", deadlines=DEADLINES | patience), script)
    assert_same(chaos, reference)
    assert gone, "while it was still cut off"
    zombie, other = (chaos.witness.seen[script.homes[host]] for host in (script.victim, 3 - script.victim))
    records = Run.open(chaos.job).records()
    assert [record["event"]["incarnation"] for record in records if record["event"]["$"] == "Recovered"] == [
        2
    ]
    assert all(each.generation < UNREAD for each in formed(records)), "it has read all that there was"
    assert zombie.ended is not None and other.final["updates_applied"] == STEPS


@pytest.mark.full
def test_loss_and_delay_are_survived_without_a_word(tmp_path: Path, hosts: Hosts, reference: str) -> None:
    """R10: one packet of fifty is lost and each takes 10 ms; late is not dead."""
    hosts.weather(loss=0.02, delay_s=0.01)
    (tmp_path / "calm").touch()
    try:
        chaos = trial(job_of(tmp_path, "weather"))
    finally:
        hosts.mend()
    assert_same(chaos, reference)
    assert [len(each.members) for each in formed(Run.open(chaos.job).records())] == [2]
