"""performs faults on a run that lives: real signals, real deaths, by a schedule that can be had again.

The words are those of ``elastic/sim/faults.py``.  A *hand* on every node, an actor of its own, sends the signals; what can only be done
inside of a process the worker does to itself (``Worker.suffer``).  What was done to whom, when, at which step and in which state is
written beside the run, in ``chaos/`` of its folder.  The head and this process's node are never struck as nodes: without Ray's own store
there is no cluster to recover in.

A fault at a ``point`` its worker is told of, and performs on itself where it next comes there; what never comes there is never struck.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import cluster
from actors.coordinator import View
from actors.launch import attach
from elastic.ids import NodeId, WorkerId
from elastic.job import Job
from elastic.sim.faults import VICTIM, Fault, Kind
from elastic.train.counters import Counters, segment
from storage.checkpoints import Checkpoints
from storage.objects import ObjectStore

POLL_S = 0.005
CALL_S = 10.0
SUFFER_S = 2.0
BEAT_S = 0.05
"""Of a slowed process: it stands still for a part of each."""
SIGNALS = (Kind.SIGKILL, Kind.SIGTERM, Kind.SIGSEGV, Kind.SIGABRT, Kind.SIGSTOP)
SUFFERED = (Kind.EXCEPTION, Kind.EXIT, Kind.HELD_GIL, Kind.MEMORY_HOG, Kind.CLOCK_SKEW)
HARMLESS = (*SIGNALS, *SUFFERED, Kind.SLOW, Kind.NODE_KILL, Kind.NODE_FREEZE, Kind.KEEPER_KILL, Kind.STORE_LOSS, Kind.COORDINATOR_KILL)
"""To what is stored: no bit of the bucket is changed."""
PERFORMED = (*HARMLESS, Kind.BUCKET_DAMAGE)
"""What this module can do by itself."""


class Hand:
    """On one node: what is to be done to processes there.  It outlives what it stops, to set it going again."""

    def __init__(self) -> None:
        self._thaws: list[tuple[threading.Timer, list[int]]] = []

    def stands(self, run: str, worker: str) -> tuple[int, int, int]:
        """(pid, generation, step completed) of a worker here; FileNotFoundError if it has gone."""
        counters = Counters(segment(run, worker), create=False)
        found = (counters["pid"], counters["generation"], counters["step"])
        counters.close()
        return found

    def signal(self, pid: int, name: str, thaw_after_s: float | None = None) -> None:
        """ProcessLookupError if there is no such process any more."""
        process = os.pidfd_open(pid)
        signal.pidfd_send_signal(process, signal.Signals[name])
        if thaw_after_s is not None:
            self._thaw([process], thaw_after_s)

    def slow(self, pid: int, times: float, duration_s: float) -> None:
        """It works for one part in ``times`` of the duration."""
        threading.Thread(target=_slow, args=(os.pidfd_open(pid), times, duration_s), daemon=True).start()

    def power_off(self) -> None:
        """Every process of this node dies, this one last."""
        others = _others()
        _send(others, signal.SIGSTOP)  # all stand still first: none sees another one die
        _send(others, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def freeze(self, duration_s: float) -> None:
        """Every process of this node but this one stands still."""
        frozen = _others()
        _send(frozen, signal.SIGSTOP)
        self._thaw(frozen, duration_s)

    def _thaw(self, processes: list[int], after_s: float) -> None:
        timer = threading.Timer(after_s, _send, (processes, signal.SIGCONT))
        timer.daemon = True
        timer.start()
        self._thaws.append((timer, processes))

    def rest(self) -> None:
        """Returns when all that it has stopped goes on again, or has ended."""
        for timer, processes in self._thaws:
            while timer.is_alive() and len(select.select(processes, [], [], 0)[0]) < len(processes):
                timer.join(POLL_S)


def _send(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        try:
            signal.pidfd_send_signal(process, number)
        except ProcessLookupError:
            continue


def _slow(process: int, times: float, duration_s: float) -> None:
    until = time.monotonic() + duration_s
    while time.monotonic() < until:
        _send([process], signal.SIGSTOP)
        time.sleep(BEAT_S * (1 - 1 / times))
        _send([process], signal.SIGCONT)
        time.sleep(BEAT_S / times)


def _others() -> list[int]:
    """Handles of the processes of this node, its raylet first; not this one's."""
    found = []
    for pid in _tree(os.getppid()):
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):  # it has gone meanwhile
                found.append(os.pidfd_open(pid))
    return found


def _tree(root: int) -> list[int]:
    """``root`` and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


@dataclass(frozen=True)
class Strike:
    """A fault that was performed, or (``failed``: why) could not be.

    ``at``: wall clock, of a fault at a point when its worker was told; ``victim``: several are joined by commas; ``generation``, ``step``:
    where the (last) victim was then.
    """

    number: int
    at: float
    fault: Mapping[str, Any]
    victim: str
    pid: int
    state: str
    generation: int
    step: int
    failed: str = ""

    def __str__(self) -> str:
        pid = f" (pid {self.pid})" if self.pid else ""
        where = f"at step {self.step} of generation {self.generation}, {self.state}"
        due = f", due where it next comes to {self.fault['point']}," if "point" in self.fault else ""
        return f"chaos {self.number}: {self.fault['kind']} of {self.victim}{pid}{due} {where}" + (f": {self.failed}" if self.failed else "")


class Chaos:
    """``faults`` on the run of ``job``, which lives in the cluster of this process.  ``at`` counts from here.

    Raises ValueError for what cannot be performed, or not so.
    """

    def __init__(self, job: Job, faults: Sequence[Fault], tell: Callable[[Strike], None] = lambda _: None) -> None:
        self.job, self.tell = job, tell
        unknown = sorted({fault.kind for fault in faults} - {*PERFORMED})
        if unknown:
            raise ValueError(f"{', '.join(unknown)} cannot be performed here; what can be: {', '.join(sorted(PERFORMED))}")
        for fault in faults:
            _check_point(fault)
        self.pending = sorted(faults, key=lambda fault: fault.at)
        self.strikes: list[Strike] = []
        self.began = time.monotonic()
        self._hands: dict[NodeId, Any] = {}
        self._raised_at = 0
        self._store = ObjectStore.open(job.bucket)
        self._key = f"{job.name}/chaos/{time.time():.0f}.jsonl"

    @property
    def record(self) -> str:
        """Where it is written what was done."""
        return self._store.full_name(self._key)

    @property
    def performed(self) -> list[Strike]:
        return [strike for strike in self.strikes if not strike.failed]

    def run(self, until: Callable[[Chaos], bool] = lambda chaos: not chaos.pending) -> list[Strike]:
        """Strike until nothing is left to be done, or the run is over; what was done."""
        while not until(self) and self.look():
            time.sleep(POLL_S)
        return self.strikes

    def look(self) -> bool:
        """Perform what is due.  False when there is no run any more."""
        coordinator = attach(self.job.name)
        if coordinator is None:
            return False
        try:
            view: View = ray.get(coordinator.view.remote(10**9), timeout=CALL_S)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return True  # it may be on its way back
        if not view.over:
            self.heed(view)
        return not view.over

    def heed(self, view: View) -> None:
        """Perform the first fault that is due where the run stands so."""
        now = time.monotonic() - self.began
        due = (fault for fault in self.pending if fault.at <= now and fault.state in ("", view.state) and self._ready(fault, view))
        fault = next(due, None)
        if fault is not None:
            self.pending.remove(fault)
            self._strike(fault, view)

    def _ready(self, fault: Fault, view: View) -> bool:
        """Is there anybody to be struck?  The same exception at the same step twice would be the job's own error."""
        if fault.kind is Kind.EXCEPTION and view.step <= self._raised_at:
            return False
        return VICTIM[fault.kind] != "worker" or bool(view.workers)

    def _strike(self, fault: Fault, view: View) -> None:
        victim, pid, failed = "", 0, ""
        generation, step = view.generation, view.step
        try:
            if VICTIM[fault.kind] == "worker":
                for worker in self._workers(fault, view):
                    hand = self._hand(NodeId(view.workers[worker]))
                    pid, generation, step = ray.get(hand.stands.remote(view.token, worker), timeout=CALL_S)
                    self._at_worker(fault, view, worker, hand, pid)
                    victim = f"{victim},{worker}" if victim else worker
            else:
                victim, pid = self._elsewhere(fault, view)
        except (ray.exceptions.RayError, OSError, LookupError, ValueError) as error:  # the last: Ray knows no such actor any more
            failed = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
        if not victim:
            failed = failed or "there was nobody"
        strike = Strike(len(self.strikes) + 1, time.time(), _plain(fault), victim, pid, view.state, generation, step, failed)
        self.strikes.append(strike)
        self._store.put(self._key, "".join(json.dumps(asdict(each)) + "\n" for each in self.strikes).encode())
        self.tell(strike)

    def _at_worker(self, fault: Fault, view: View, worker: str, hand: Any, pid: int) -> None:
        if fault.kind in SIGNALS and not fault.point:
            ray.get(hand.signal.remote(pid, str(fault.kind), fault.duration_s), timeout=CALL_S)
        elif fault.kind is Kind.SLOW:
            ray.get(hand.slow.remote(pid, fault.amount, fault.duration_s), timeout=CALL_S)
        else:
            actor = ray.get_actor(f"{view.token}/{worker}", namespace=cluster.NAMESPACE)
            told = actor.suffer.remote(str(fault.kind), str(fault.point or ""), fault.duration_s or 0.0, fault.amount)
            ray.get(told, timeout=SUFFER_S)
            self._raised_at = view.step + 1 if fault.kind is Kind.EXCEPTION else self._raised_at

    def _elsewhere(self, fault: Fault, view: View) -> tuple[str, int]:
        """A node, a keeper, a store, the coordinator, the bucket."""
        if fault.kind is Kind.BUCKET_DAMAGE:
            return self._damage(), 0
        if fault.kind is Kind.COORDINATOR_KILL:
            coordinator = attach(self.job.name)
            return "the coordinator", self._end(coordinator)
        if fault.kind in (Kind.STORE_LOSS, Kind.KEEPER_KILL):
            return self._at_keepers(fault, view)
        nodes = [node for node in cluster.nodes() if node not in self._spared()]
        if not nodes:
            return "", 0
        node = nodes[fault.target % len(nodes)]
        hand = self._hand(node)
        if fault.kind is Kind.NODE_FREEZE:
            ray.get(hand.freeze.remote(fault.duration_s or CALL_S), timeout=CALL_S)
        else:
            ray.wait([hand.power_off.remote()], timeout=CALL_S)
            del self._hands[node]
        return f"node {node[:8]}", 0

    def _at_keepers(self, fault: Fault, view: View) -> tuple[str, int]:
        keepers = cluster.named(f"{view.token}/keeper-")
        if fault.kind is Kind.STORE_LOSS:
            ray.get([each.close_store.remote(view.incarnation, view.generation) for each in keepers.values()], timeout=CALL_S)
            return f"the store of generation {view.generation}", 0
        if not keepers:
            return "", 0
        home = sorted(keepers)[fault.target % len(keepers)]
        return f"the keeper of node {home[:8]}", self._end(keepers[home])

    def _damage(self) -> str:
        """One bit of the newest checkpoint is another."""
        checkpoints = Checkpoints(self._store, self.job.name)
        version = checkpoints.latest_good()
        if version is None:
            return ""
        key = f"{checkpoints.folder(version)}/{checkpoints.manifest(version).files[0].name}"
        data = bytearray(self._store.get(key))
        data[-1] ^= 1
        self._store.put(key, data)
        return f"the checkpoint of {version}"

    def _end(self, actor: Any) -> int:
        """SIGKILL to the process of an actor; its pid."""
        pid, node = (cluster.pid_of(actor), cluster.node_of(actor)) if actor is not None else (None, None)
        if pid is None or node is None:
            raise LookupError("Ray does not say where it is")
        ray.get(self._hand(node).signal.remote(pid, "SIGKILL"), timeout=CALL_S)
        return pid

    def _workers(self, fault: Fault, view: View) -> list[WorkerId]:
        names = sorted(view.workers)
        return names if fault.target < 0 else [names[fault.target % len(names)]]

    def _spared(self) -> set[NodeId | None]:
        """Without the head there is no cluster, without this process no chaos; the coordinator dies by a fault of its own kind."""
        heads = {NodeId(each["NodeID"]) for each in ray.nodes() if "node:__internal_head__" in each["Resources"]}
        coordinator = attach(self.job.name)
        return {*heads, cluster.here(), cluster.node_of(coordinator) if coordinator is not None else None}

    def _hand(self, node: NodeId) -> Any:
        if node not in self._hands:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 4, "scheduling_strategy": strategy}
            self._hands[node] = ray.remote(Hand).options(**options).remote()
        return self._hands[node]

    def close(self) -> None:
        """The hands let go, once what they have stopped goes on: who lets go before leaves it so."""
        longest_s = max((strike.fault.get("duration_s", 0.0) for strike in self.strikes), default=0.0)
        resting = [hand.rest.remote() for hand in self._hands.values()]
        ray.wait(resting, num_returns=len(resting), timeout=longest_s + CALL_S) if resting else None
        for hand in self._hands.values():
            ray.kill(hand)


def _check_point(fault: Fault) -> None:
    if fault.point and fault.kind not in (*SIGNALS, *SUFFERED):
        raise ValueError(
            f"point = '{fault.point}' of kind = '{fault.kind}': only what a worker does to itself strikes at a point of its work; "
            f"leave point out, or take one of {', '.join((*SIGNALS, *SUFFERED))}"
        )
    if fault.point and fault.kind is Kind.SIGSTOP and fault.duration_s is not None:
        raise ValueError(
            f"duration_s = {fault.duration_s:g} of kind = 'SIGSTOP' at point = '{fault.point}': nobody sees when a worker stops itself, "
            f"so nobody can thaw it; leave out point or duration_s"
        )


def _plain(fault: Fault) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, str) else value for name, value in asdict(fault).items() if value not in (None, "")}
