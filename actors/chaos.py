"""Chaos performs faults on a running job: real signals and real deaths, by a schedule that can be repeated.

The faults are those of ``elastic/protocol/faults.py``.  An actor on every node, its *hand*, sends the
signals.  A fault that must happen inside a process is performed by the worker on itself (``Worker.suffer``).
Each strike is recorded in ``chaos/`` of the run's folder: the fault, its victim, the time, the step and the
state of the run.  Three nodes are never struck as a whole: the head node, because without Ray's own store no
cluster is left to recover in; the node of this process; and the coordinator's node, because the coordinator's
death is a fault of its own.

A fault at a ``point`` is sent to its worker, which performs it when it next comes to that point.  If the
worker never comes there, nothing happens.
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
from functools import partial
from pathlib import Path
from typing import Any

import ray

from actors import cluster
from actors.living import attach
from actors.view import View
from elastic.ids import NodeId, WorkerId
from elastic.job import Job
from elastic.protocol.faults import VICTIM, Fault, Kind
from elastic.threads import later
from elastic.train.gauges.counters import Counters, segment
from storage.checkpoints import Checkpoints
from storage.objects import ObjectStore

POLL_S = 0.005
"""Seconds between two looks for a fault that is due."""
CALL_S = 10.0
"""Seconds that a hand, a keeper or the coordinator may take for an answer."""
SUFFER_S = 2.0
"""Seconds that a worker may take to accept a fault that it performs on itself."""
BEAT_S = 0.05
"""Seconds of one period of a slowed process, which stands still for a part of it."""
SOURCE = "chaos"
"""Name of the source of the notices that chaos gives."""
SIGNALS = (Kind.SIGKILL, Kind.SIGTERM, Kind.SIGSEGV, Kind.SIGABRT, Kind.SIGSTOP)
SUFFERED = (Kind.EXCEPTION, Kind.EXIT, Kind.HELD_GIL, Kind.MEMORY_HOG, Kind.CLOCK_SKEW)
HARMLESS = (
    *SIGNALS,
    *SUFFERED,
    Kind.SLOW,
    Kind.NODE_KILL,
    Kind.NODE_NOTICE,
    Kind.NODE_FREEZE,
    Kind.KEEPER_KILL,
    Kind.STORE_LOSS,
    Kind.COORDINATOR_KILL,
)
"""Faults that change nothing in the bucket."""
PERFORMED = (*HARMLESS, Kind.BUCKET_DAMAGE)
"""Faults that this module can perform."""


class Hand:
    """Strikes the processes of one node.  It outlives the processes that it stops, so that it can continue
    them.
    """

    def __init__(self) -> None:
        self._thaws: list[tuple[threading.Timer, list[int]]] = []
        self._notices: list[threading.Timer] = []

    def stands(self, run: str, worker: str) -> tuple[int, int, int]:
        """Returns (pid, generation, last completed step) of a worker on this node.  Raises FileNotFoundError
        if the worker is gone.
        """
        counters = Counters(segment(run, worker), create=False)
        found = (counters["pid"], counters["generation"], counters["step"])
        counters.close()
        return found

    def signal(self, pid: int, name: str, thaw_after_s: float | None = None) -> None:
        """Sends a signal, and SIGCONT ``thaw_after_s`` later if that is given.  Raises ProcessLookupError if
        the process is gone.
        """
        process = os.pidfd_open(pid)
        signal.pidfd_send_signal(process, signal.Signals[name])
        if thaw_after_s is not None:
            self._thaw([process], thaw_after_s)

    def slow(self, pid: int, times: float, duration_s: float) -> None:
        """Slows the process down for ``duration_s``: it runs for ``1 / times`` of that time."""
        threading.Thread(target=_slow, args=(os.pidfd_open(pid), times, duration_s), daemon=True).start()

    def power_off(self) -> None:
        """Kills every process of this node, this one last."""
        kill_below(os.getppid(), spared=os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)

    def take(self, after_s: float) -> None:
        """Powers this node off in ``after_s`` seconds, as its notice says."""
        self._notices.append(later(after_s, self.power_off))

    def spare(self, keeper: Any, after_s: float) -> None:
        """Withdraws the notice that this node's ``keeper`` has announced, in ``after_s`` seconds."""
        self._notices.append(later(after_s, partial(keeper.announce.remote, SOURCE, None)))

    def freeze(self, duration_s: float) -> None:
        """Stops every process of this node except this one."""
        self._thaw(_stopped(os.getppid(), os.getpid()), duration_s)

    def _thaw(self, processes: list[int], after_s: float) -> None:
        self._thaws.append((later(after_s, partial(_send, processes, signal.SIGCONT)), processes))

    def rest(self) -> None:
        """Returns once every process that this hand stopped runs again or has ended, and no notice stands."""
        for notice in self._notices:
            notice.join()
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


def kill_below(root: int, spared: int = 0) -> None:
    """Kills the process ``root``, the raylet of a node, and all processes below it, except ``spared``.  All of
    them stand still first, so that none sees another one die.
    """
    _send(_stopped(root, spared), signal.SIGKILL)


def _stopped(root: int, spared: int) -> list[int]:
    """Stops the processes of a node, its raylet first, and returns their handles."""
    found = []
    for pid in _tree(root):
        if pid != spared:
            with contextlib.suppress(ProcessLookupError):  # it has gone meanwhile
                found.append(os.pidfd_open(pid))
                _send(found[-1:], signal.SIGSTOP)
    return found


def _tree(root: int) -> list[int]:
    """Returns ``root`` and all its descendants."""
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
    """A fault that was performed, or that could not be (``failed`` says why).

    ``at`` is the time by the wall clock; for a fault at a point, the time at which the worker was told.
    Several victims are joined by commas.  ``generation`` and ``step`` say where the (last) victim was.
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
        where = f"at step {self.step} of generation {self.generation}, {self.state}"
        if not self.victim:
            return f"chaos {self.number}: {self.fault['kind']} was not performed {where}: {self.failed}"
        pid = f" (pid {self.pid})" if self.pid else ""
        due = f", due where it next comes to {self.fault['point']}," if "point" in self.fault else ""
        return f"chaos {self.number}: {self.fault['kind']} of {self.victim}{pid}{due} {where}" + (
            f": {self.failed}" if self.failed else ""
        )


class Chaos:
    """Performs ``faults`` on the run of ``job`` in the cluster of this process.  Their times ``at`` are
    seconds from now.

    Raises ValueError for a fault that cannot be performed, or not as asked.
    """

    def __init__(
        self, job: Job, faults: Sequence[Fault], tell: Callable[[Strike], None] = lambda _: None
    ) -> None:
        self.job, self.tell = job, tell
        unknown = sorted({fault.kind for fault in faults} - {*PERFORMED})
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)} cannot be performed here; use one of {', '.join(sorted(PERFORMED))}"
            )
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
        """The name of the object that records the strikes."""
        return self._store.full_name(self._key)

    @property
    def performed(self) -> list[Strike]:
        return [strike for strike in self.strikes if not strike.failed]

    def run(self, until: Callable[[Chaos], bool] = lambda chaos: not chaos.pending) -> list[Strike]:
        """Performs due faults until ``until(self)`` is true (by default: none is left) or the run is over.

        Returns what was performed or failed.
        """
        while not until(self) and self.look():
            time.sleep(POLL_S)
        return self.strikes

    def look(self) -> bool:
        """Performs the faults that are due.  Returns False if the run does not exist any more."""
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
        """Performs the first fault that is due in the present state of the run."""
        now = time.monotonic() - self.began
        due = (
            fault
            for fault in self.pending
            if fault.at <= now and fault.state in ("", view.state) and self._ready(fault, view)
        )
        fault = next(due, None)
        if fault is not None:
            self.pending.remove(fault)
            self._strike(fault, view)

    def _ready(self, fault: Fault, view: View) -> bool:
        """Returns whether there is a victim.

        An exception also waits for a new step, because the same exception twice at one step would count as
        the job's own error.
        """
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
        # ValueError: Ray does not know the actor any more
        except (ray.exceptions.RayError, OSError, LookupError, ValueError) as error:
            failed = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
        if not victim:
            failed = failed or "there was no process that this fault could strike"
        strike = Strike(
            len(self.strikes) + 1,
            time.time(),
            _plain(fault),
            victim,
            pid,
            view.state,
            generation,
            step,
            failed,
        )
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
            told = actor.suffer.remote(
                str(fault.kind), str(fault.point or ""), fault.duration_s or 0.0, fault.amount
            )
            ray.get(told, timeout=SUFFER_S)
            self._raised_at = view.step + 1 if fault.kind is Kind.EXCEPTION else self._raised_at

    def _elsewhere(self, fault: Fault, view: View) -> tuple[str, int]:
        """Strikes a node, a keeper, a store, the coordinator or the bucket, and returns the victim and its
        pid.
        """
        if fault.kind is Kind.BUCKET_DAMAGE:
            return self._damage(), 0
        if fault.kind is Kind.COORDINATOR_KILL:
            coordinator = attach(self.job.name)
            return "the coordinator", self._end(coordinator)
        if fault.kind in (Kind.STORE_LOSS, Kind.KEEPER_KILL):
            return self._at_keepers(fault, view)
        if fault.kind is Kind.NODE_NOTICE:
            return self._announce(fault, view), 0
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

    def _announce(self, fault: Fault, view: View) -> str:
        """Lets a keeper announce that its node is taken; its hand takes the node, or withdraws that."""
        spared = self._spared()
        homes = {node: keeper for node, keeper in keepers_of(view.token).items() if node not in spared}
        if not homes:
            return ""
        node, lead_s = [*homes][fault.target % len(homes)], fault.duration_s or CALL_S
        hand, keeper = self._hand(node), homes[node]
        ray.get(keeper.announce.remote(SOURCE, lead_s), timeout=CALL_S)
        if 0.0 < fault.amount <= 1.0:
            ray.get(hand.spare.remote(keeper, fault.amount * lead_s), timeout=CALL_S)
        else:
            ray.get(hand.take.remote(lead_s), timeout=CALL_S)
        return f"node {node[:8]}"

    def _at_keepers(self, fault: Fault, view: View) -> tuple[str, int]:
        keepers = cluster.named(f"{view.token}/keeper-")
        if fault.kind is Kind.STORE_LOSS:
            ray.get(
                [each.close_store.remote(view.incarnation, view.generation) for each in keepers.values()],
                timeout=CALL_S,
            )
            return f"the store of generation {view.generation}", 0
        if not keepers:
            return "", 0
        home = sorted(keepers)[fault.target % len(keepers)]
        return f"the keeper of node {home[:8]}", self._end(keepers[home])

    def _damage(self) -> str:
        """Flips one bit of the newest checkpoint."""
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
        """Sends SIGKILL to the process of an actor and returns its pid."""
        pid, node = (cluster.pid_of(actor), cluster.node_of(actor)) if actor is not None else (None, None)
        if pid is None or node is None:
            raise LookupError("Ray does not say on which node the process is")
        ray.get(self._hand(node).signal.remote(pid, "SIGKILL"), timeout=CALL_S)
        return pid

    def _workers(self, fault: Fault, view: View) -> list[WorkerId]:
        names = sorted(view.workers)
        return names if fault.target < 0 else [names[fault.target % len(names)]]

    def _spared(self) -> set[NodeId | None]:
        """Returns the nodes that are never struck: the head node, this process's node, and the coordinator's,
        which has its own kind of fault.
        """
        heads = {
            NodeId(each["NodeID"]) for each in ray.nodes() if "node:__internal_head__" in each["Resources"]
        }
        coordinator = attach(self.job.name)
        return {*heads, cluster.here(), cluster.node_of(coordinator) if coordinator is not None else None}

    def _hand(self, node: NodeId) -> Any:
        if node not in self._hands:
            options = {
                "num_cpus": 0,
                "max_restarts": 0,
                "max_concurrency": 4,
                "scheduling_strategy": cluster.only_on(node),
            }
            self._hands[node] = ray.remote(Hand).options(**options).remote()
        return self._hands[node]

    def close(self) -> None:
        """Ends the hands, once the processes that they stopped run again."""
        longest_s = max((strike.fault.get("duration_s", 0.0) for strike in self.strikes), default=0.0)
        resting = [hand.rest.remote() for hand in self._hands.values()]
        ray.wait(resting, num_returns=len(resting), timeout=longest_s + CALL_S) if resting else None
        for hand in self._hands.values():
            ray.kill(hand)


def keepers_of(token: str) -> dict[NodeId, Any]:
    """Returns the living keepers of a life of a run, by their nodes."""
    keepers = cluster.named(f"{token}/keeper-")
    return {
        node: keeper
        for node in cluster.nodes()
        for home, keeper in keepers.items()
        if node.startswith(home)  # a keeper's name has the beginning of its node's
    }


def _check_point(fault: Fault) -> None:
    if fault.point and fault.kind not in (*SIGNALS, *SUFFERED):
        raise ValueError(
            f"point = '{fault.point}' of kind = '{fault.kind}': only a fault that a worker performs itself "
            "can strike at a point of its work; leave point out, or take one of "
            f"{', '.join((*SIGNALS, *SUFFERED))}"
        )
    if fault.point and fault.kind is Kind.SIGSTOP and fault.duration_s is not None:
        raise ValueError(
            f"duration_s = {fault.duration_s:g} of kind = 'SIGSTOP' at point = '{fault.point}': a "
            "worker that has stopped itself cannot wake itself, and no other process knows when to "
            "wake it; leave out point or duration_s"
        )


def _plain(fault: Fault) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, str) else value
        for name, value in asdict(fault).items()
        if value not in (None, "")
    }
