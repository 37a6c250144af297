"""Performs a schedule of faults on the simulated cluster: each fault at its time, or after it, when its state
or point is reached.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from elastic.protocol.faults import FATAL, LASTING, SHARED_KINDS, Fault, Kind, Point
from elastic.sim.cluster import Node
from elastic.sim.network import Way
from elastic.sim.worker import Worker

if TYPE_CHECKING:
    from elastic.sim.simulation import Simulation

MISSING_S = 20.0
"""Longest time in seconds for which a fault counts as not recovered from, if no new commit comes before."""
CUTS = {
    Kind.PARTITION: (Way.TO, Way.FROM),
    Kind.PARTITION_TO: (Way.TO,),
    Kind.PARTITION_FROM: (Way.FROM,),
    Kind.PEER_PARTITION: (Way.PEER,),
}


class Strikes:
    """Performs the faults of one run.

    ``calm_at`` is the time at which all faults that have struck so far are over.  The counters have what the
    schedule really covered.
    """

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.clock = sim, sim.clock
        self.calm_at = sim.scenario.sour_s
        self.disturbed_until = sim.scenario.sour_s
        """The time at which all faults but notices that have struck so far are over."""
        self.struck: Counter[tuple[str, str]] = Counter()
        """Number of times that each kind struck in each state, by (kind, state)."""
        self.overlaps: Counter[tuple[str, str]] = Counter()
        """Number of times that the second kind struck before the first was recovered from, by (first,
        second).
        """
        self._open: dict[Kind, float] = {}
        """Kinds that have struck and are not recovered from, each with the time from which on it counts as
        recovered from.
        """
        self._in_state: dict[str, list[Fault]] = {}
        self._at_point: list[Fault] = []
        for fault in sim.scenario.faults:
            self.clock.after(fault.at, self._due, fault)

    def _due(self, fault: Fault) -> None:
        if fault.point is not None:
            self._at_point.append(fault)
        elif fault.state and fault.state != self.sim.state_name:
            self._in_state.setdefault(fault.state, []).append(fault)
        else:
            self.strike(fault)

    def entered(self, state: str) -> None:
        """Strikes with the faults that have waited for ``state``, which the run has just entered."""
        if self._in_state:
            for fault in self._in_state.pop(state, ()):
                self.clock.after(0.0, self.strike, fault)

    def recovered(self) -> None:
        """Notes a new commit: all faults but those that strike everybody (``SHARED_KINDS``) are recovered
        from.
        """
        now = self.clock.now
        self._open = {
            kind: until for kind, until in self._open.items() if until > now and kind in SHARED_KINDS
        }

    def passes(self, worker: Worker, point: Point) -> Kind | None:
        """Returns the kind of the fault that strikes ``worker`` as it passes ``point``, or None."""
        fault = next((each for each in self._at_point if each.point is point), None)
        if fault is None:
            return None
        self._at_point.remove(fault)
        self._note(fault, worker.name)
        self._hurt(fault, worker, point)
        return fault.kind

    def _note(self, fault: Fault, victim: str) -> None:
        sim, now = self.sim, self.clock.now
        ends = now + (fault.duration_s or 0.0)
        open_until = ends if fault.kind in LASTING and fault.kind in SHARED_KINDS else now + MISSING_S
        self.calm_at = max(self.calm_at, ends)
        if fault.kind is not Kind.NODE_NOTICE:
            self.disturbed_until = max(self.disturbed_until, ends)
        self.struck[fault.kind, sim.state_name] += 1
        for kind, until in self._open.items():
            if until > now:
                self.overlaps[kind, fault.kind] += 1
        self._open[fault.kind] = max(self._open.get(fault.kind, 0.0), open_until)
        sim.tell(
            f"fault: {fault.kind} of {victim or 'all'}"
            + (f" at {fault.point}" if fault.point else "")
            + f" in {sim.state_name}"
        )

    def strike(self, fault: Fault) -> None:
        """Performs a fault now.  Nothing happens if it has no victim."""
        cluster, sim, kind, ends = (
            self.sim.cluster,
            self.sim,
            fault.kind,
            self.clock.now + (fault.duration_s or 0.0),
        )
        match kind:
            case (
                Kind.DELAY
                | Kind.LOSS
                | Kind.DUPLICATE
                | Kind.KILL_LOST
                | Kind.BUCKET_DOWN
                | Kind.START_FAILURE
            ):
                self._note(fault, "")
                sim.network.worsen(kind, fault.amount, ends)
            case Kind.BUCKET_DAMAGE:
                if cluster.bucket.manifests:
                    self._note(fault, "")
                    cluster.bucket.damaged.add(max(cluster.bucket.manifests))
            case Kind.DROUGHT:
                self._note(fault, "")
                cluster.take_places(number := min(fault.target, sim.scenario.slots - cluster.taken))
                self.clock.after(fault.duration_s or 0.0, cluster.take_places, -number)
            case Kind.NODE_ADD | Kind.NODE_MISFIT:
                self._note(fault, "")
                cluster.add_node() if kind is Kind.NODE_ADD else cluster.add_misfit()
            case Kind.STORE_LOSS:
                self._note(fault, "")
                cluster.next_store_sick_until = ends
            case (
                Kind.COORDINATOR_KILL
                | Kind.COORDINATOR_FREEZE
                | Kind.COORDINATOR_CUT
                | Kind.COORDINATOR_CLOCK
                | Kind.DISK_LOSS
            ):
                self._note(fault, "")
                sim.coordinators.suffer(kind, fault.duration_s or 0.0, fault.amount)
            case Kind.NODE_KILL | Kind.NODE_NOTICE | Kind.NODE_FREEZE | Kind.KEEPER_KILL:
                self._nodes(fault)
            case _ if kind in CUTS:
                self._nodes(fault)
            case _:
                for worker in self._workers(fault.target):
                    self._note(fault, worker.name)
                    self._hurt(fault, worker, None)

    # -- victims
    # --------------------------------------------------------------------------------------------------

    def _workers(self, target: int) -> list[Worker]:
        there = self.sim.cluster.running  # in the order in which they were started
        return list(there) if target < 0 else [there[target % len(there)]] if there else []

    def _nodes(self, fault: Fault) -> None:
        cluster = self.sim.cluster
        there = [node for node in cluster.nodes.values() if not node.declared_dead]
        if fault.target < 0:
            seats = {worker.node for worker in cluster.running if worker.world is not None}
            victims = [node for node in there if node.name in seats]
        else:
            victims = [there[fault.target % len(there)]] if there else []
        for node in victims:
            self._note(fault, node.name)
            self._strike_node(fault, node)
        if fault.target < 0 and victims and fault.kind in CUTS:
            cluster.add_node()  # the run needs a node on which it can go on

    def _strike_node(self, fault: Fault, node: Node) -> None:
        cluster, duration_s = self.sim.cluster, fault.duration_s or 0.0
        match fault.kind:
            case Kind.NODE_KILL:
                cluster.node_dies(node)
                if fault.duration_s is not None:
                    self.clock.after(fault.duration_s, cluster.add_node, node.host)
            case Kind.NODE_NOTICE:
                cluster.notices.give(node, duration_s, fault.amount)
            case Kind.NODE_FREEZE:
                cluster.node_freezes(node, duration_s)
            case Kind.KEEPER_KILL if node.keeper:
                cluster.keeper_dies(node, duration_s)
            case Kind.KEEPER_KILL:
                pass
            case kind:
                for way in CUTS[kind]:
                    self.sim.network.cut(way, node.name, self.clock.now + duration_s)
                if kind in (Kind.PARTITION, Kind.PARTITION_FROM):
                    cluster.silent(node, duration_s)
                elif kind is Kind.PEER_PARTITION:
                    for worker in cluster.on(node.name):
                        if worker.world is not None and cluster.peers_cut(worker.world.plan.members):
                            worker.world.falls_apart()

    def _hurt(self, fault: Fault, worker: Worker, point: Point | None) -> None:
        match fault.kind:
            case Kind.MEMORY_HOG:
                self.clock.after(0.5 + self.sim.rng.random(), self.sim.cluster.die, worker, fault.kind)
            case kind if kind in FATAL:
                self.sim.cluster.die(worker, kind)
            case Kind.SIGSTOP | Kind.HELD_GIL:
                worker.freeze(fault.duration_s)
            case Kind.SLOW:
                worker.slow(fault.amount, self.clock.now + (fault.duration_s or 0.0))
            case Kind.CLOCK_SKEW:
                worker.skew(fault.amount)
            case Kind.DEVICE_ASSERT:
                worker.raises(point, "device")
            case Kind.EXCEPTION:
                worker.raises(point)
            case kind:
                raise NotImplementedError(f"the simulator cannot perform {kind.value!r} on a worker")
