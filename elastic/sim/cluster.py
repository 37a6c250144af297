"""Nodes, their keepers, the workers' processes, the bucket, and whatever strikes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.control.events import Beat, Capacity, KeeperLost, KeeperUp, Lost, NodeFound, NodeRefused, StartFailed
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.plan import Plan
from elastic.sim.faults import DELICATE_POINTS, FATAL, Kind, Point
from elastic.sim.oracle import covers
from elastic.sim.worker import Worker

if TYPE_CHECKING:
    from elastic.sim.simulation import Simulation

BEAT_S, CAPACITY_S = 3.0, 5.0


class Bucket:
    """Object storage: which shards are in, which versions have a manifest, which of those cannot be read."""

    def __init__(self) -> None:
        self.shards: dict[Version, set[tuple[int, int]]] = {}
        self.manifests: set[Version] = set()
        self.damaged: set[Version] = set()


class Cluster:
    """``workers``: every process ever started.  A node that dies is replaced by one with a new name."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.rng, self.clock, self.network = sim, sim.rng, sim.clock, sim.network
        self.weather = sim.scenario.weather
        self.bucket = Bucket()
        self.workers: dict[WorkerId, Worker] = {}
        self.running: list[Worker] = []
        self.zombies: set[WorkerId] = set()
        self.keepers: dict[NodeId, bool] = {}
        self.misfits: set[NodeId] = set()
        self.sick_stores: dict[int, bool] = {}
        self.slots = sim.scenario.slots
        self.errors_raised: list[tuple[int, WorkerId]] = []
        self._numbers = 0
        for _ in range(sim.scenario.nodes):
            self.add_node()
        self.clock.after(0.05, self._offer)
        if self.weather.event_rate:
            self.clock.after(self.weather.since_s + self.rng.expovariate(self.weather.event_rate), self._strike_somewhere)

    def number(self) -> int:
        """Never the same twice."""
        self._numbers += 1
        return self._numbers

    # -- nodes and keepers ----------------------------------------------------------------------------------------

    def add_node(self) -> None:
        node = NodeId(f"n{self.number()}")
        if self.network.rough and self.rng.random() < self.weather.misfit_chance:
            self.misfits.add(node)
            self.look_at_misfits()
            node = NodeId(f"n{self.number()}")
        self.clock.after(0.0, self.found, node)
        self._keeper_up(node)
        self.clock.after(0.1 + BEAT_S * self.rng.random(), self._beat, node)

    def found(self, node: NodeId) -> None:
        self.sim.coordinator.receive(NodeFound(node))

    def look_at_misfits(self) -> None:
        """Their keepers find another bucket; until they have said so, workers may be started there."""
        for node in sorted(self.misfits):
            self.clock.after(0.0, self.found, node)
            self.network.send_surely(node, self.sim_receives, NodeRefused(node, f"node {node} sees another bucket"))

    def sim_receives(self, event: NodeRefused) -> None:
        self.sim.coordinator.receive(event)

    def _keeper_up(self, node: NodeId) -> None:
        self.keepers[node] = True
        self.network.send_surely(node, self.sim.coordinator.receive, KeeperUp(node))

    def _beat(self, node: NodeId) -> None:
        if node not in self.keepers:
            return
        if self.keepers[node]:
            seen = tuple(w.progress for w in self.running if w.node == node and w.alive and w.progress is not None)
            self.network.send(node, self.sim.coordinator.receive, Beat(node, seen))
        self.clock.after(BEAT_S, self._beat, node)

    def _keeper_dies(self, node: NodeId) -> None:
        self.keepers[node] = False
        self.network.send_surely(node, self.sim.coordinator.receive, KeeperLost(node, "its process died"))
        self.clock.after(2.0 + 4.0 * self.rng.random(), self._keeper_returns, node)

    def _keeper_returns(self, node: NodeId) -> None:
        if node in self.keepers:
            self._keeper_up(node)

    def _node_dies(self, node: NodeId) -> None:
        for worker in self.running[:]:
            if worker.node == node:
                self.die(worker, Kind.SIGKILL)
        del self.keepers[node]
        self.network.cut_until.pop(node, None)
        self.network.send_surely(node, self.sim.coordinator.receive, KeeperLost(node, "its node died"))
        self.clock.after(1.0 + 4.0 * self.rng.random(), self.add_node)

    def store_answers(self, plan: Plan) -> bool:
        """The generation's store: it dies with its keeper, and may be out of the members' reach."""
        if plan.generation not in self.sick_stores:
            self.sick_stores[plan.generation] = self.network.rough and self.rng.random() < self.weather.store_failure_chance
        return self.keepers.get(plan.store_node, False) and not self.sick_stores[plan.generation]

    # -- processes ------------------------------------------------------------------------------------------------

    def start(self, names: tuple[WorkerId, ...], avoid: tuple[NodeId, ...]) -> None:
        for name in names:
            if self.free <= 0 or not self.keepers or (self.network.rough and self.rng.random() < self.weather.start_failure_chance):
                self.clock.after(0.5 + self.rng.random(), self.sim.coordinator.receive, StartFailed(name, "no room"))
                continue
            nodes = [*self.keepers, *sorted(self.misfits - set(avoid))]
            node = min(nodes, key=lambda n: (self.network.cut(n), sum(w.node == n for w in self.running)))
            worker = self.workers[name] = Worker(self.sim, name, node)
            self.running.append(worker)
            self.clock.after(0.5 + 1.5 * self.rng.random(), worker.receive, worker.join)

    @property
    def free(self) -> int:
        return self.slots - sum(w.name not in self.zombies for w in self.running)

    def _offer(self) -> None:
        self.sim.coordinator.receive(Capacity(max(0, self.free)))
        self.clock.after(CAPACITY_S, self._offer)

    def die(self, worker: Worker, kind: Kind) -> None:
        if not worker.alive:
            return
        worker.alive = False
        self.running.remove(worker)
        self.zombies.discard(worker.name)
        if worker.world is not None:
            worker.world.gone(worker)
        word = Lost if worker.joined else StartFailed
        gone = word(worker.name, f"its process ended: {kind}")
        self.clock.after(0.02 + (0.1 if self.rng.random() < 0.7 else 2.0) * self.rng.random(), self._reap, worker, gone)

    def _reap(self, worker: Worker, gone: Lost | StartFailed) -> None:
        self.network.send_surely(worker.node, self.sim.coordinator.receive, gone)

    def kill(self, names: tuple[WorkerId, ...]) -> None:
        """A wish.  One that does not come true leaves a zombie, which takes nobody's place."""
        for name in names:
            worker = self.workers.get(name)
            if worker is None or not worker.alive:
                continue
            cut = self.network.cut(worker.node)
            if cut or (self.network.rough and self.rng.random() < self.weather.kill_lost_chance):
                self.zombies.add(name)
            else:
                self.clock.after(0.05 + 0.5 * self.rng.random(), self.die, worker, Kind.SIGKILL)

    def exit(self, names: tuple[WorkerId, ...]) -> None:
        for name in names:
            if name in self.workers:
                self.clock.after(0.1, self.die, self.workers[name], Kind.EXIT)

    # -- state ----------------------------------------------------------------------------------------------------

    def supply(self, worker: Worker, plan: Plan) -> str:
        """Whether ``worker`` gets its shard of the plan's version: "ok", "gone" or "damaged"."""
        if plan.version == Version(0, 0):
            return "ok"
        if (plan.version, *worker.shard) in worker.held:
            return "ok"
        holders = [self.workers[name] for name in {h.worker for h in plan.holders}]
        near = frozenset(slot[1:] for w in holders if w.alive for slot in w.held if slot[0] == plan.version)
        if covers(near, self.sim.scenario.rows):
            return "ok"
        if plan.version not in self.bucket.manifests:
            return "gone"
        if self.network.rough and self.rng.random() < self.weather.damage_chance:
            self.bucket.damaged.add(plan.version)
        return "damaged" if plan.version in self.bucket.damaged else "ok"

    def commit_manifest(self, version: Version) -> bool:
        """True when it is in; False when the store refused."""
        if self.save_fails():
            return False
        self.sim.oracle.manifest(version, frozenset(self.bucket.shards.get(version, ())))
        self.bucket.manifests.add(version)
        return True

    def save_fails(self) -> bool:
        return self.network.rough and self.rng.random() < self.weather.save_failure_chance

    # -- faults ---------------------------------------------------------------------------------------------------

    def strike(self, worker: Worker, point: Point) -> Kind | None:
        """Perhaps a fault, as ``worker`` passes ``point``: which."""
        chance = self.weather.point_chance * (3 if point in DELICATE_POINTS else 1)
        if not self.network.rough or self.rng.random() >= chance or point not in self.weather.points:
            return None
        if self.rng.random() < self.weather.aftershock_chance:
            self.clock.after(0.2 * self.rng.random(), self._strike_a_worker, self.rng.random() < 0.7)
        kind = self.rng.choice(self.weather.kinds)
        self.sim.tell(f"fault: {kind} of {worker.name} at {point}")
        if kind in FATAL:
            self.die(worker, kind)
        elif kind is Kind.SIGSTOP:
            worker.freeze(self.rng.expovariate(0.1) if self.rng.random() < 0.6 else None)
        else:
            worker.raises(point)
        return kind

    def user_error(self, worker: Worker, step: int) -> bool:
        """Whether the user's code raises: it does on the worker that has the microbatch of the bad sample."""
        scenario, world = self.sim.scenario, worker.world
        assert world is not None
        if scenario.error_step != step or (scenario.error_once and self.errors_raised):
            return False
        if world.plan.world_rank(worker.name) != step % len(world.plan.members):
            return False
        self.errors_raised.append((step, worker.name))
        self.sim.tell(f"fault: the user's code raises in {worker.name} at step {step}")
        return True

    def _strike_a_worker(self, kill: bool) -> None:
        if self.running and kill:
            self.die(self.rng.choice(self.running), Kind.SIGKILL)
        elif self.running:
            self.rng.choice(self.running).freeze(self.rng.expovariate(0.1))

    def _strike_somewhere(self) -> None:
        if not self.network.rough:
            return
        self.calamity(self.rng.choice(self.weather.calamities))
        if self.rng.random() < self.weather.aftershock_chance:
            self.clock.after(self.rng.random(), self._strike_a_worker, self.rng.random() < 0.7)
        self.clock.after(self.rng.expovariate(self.weather.event_rate), self._strike_somewhere)

    def calamity(self, kind: str) -> None:
        """Something strikes that is no worker's own doing."""
        rng, node = self.rng, self.rng.choice(sorted(self.keepers))
        self.sim.tell(f"fault: {kind}, {node}")
        match kind:
            case "kill" | "freeze":
                self._strike_a_worker(kind == "kill")
            case "node" if len(self.keepers) > 1:
                self._node_dies(node)
            case "keeper" if self.keepers[node]:
                self._keeper_dies(node)
            case "cut":
                self._cut({node})
            case "isolate":  # a whole world at once, and nobody but it
                self._cut({worker.node for worker in self.running if worker.world is not None})
                self.add_node()
            case "drought":
                self.slots = rng.randint(0, self.slots)
                self.clock.after(5.0 + 10.0 * rng.random(), self._rain)

    def _cut(self, nodes: set[NodeId]) -> None:
        """No word between those nodes and the coordinator; their workers still reach their peers."""
        until_s = min(self.clock.now + 2.0 + self.rng.expovariate(0.08), self.weather.until_s)
        for node in nodes:
            self.network.cut_until[node] = max(until_s, self.network.cut_until.get(node, 0.0))

    def _rain(self) -> None:
        self.slots = self.sim.scenario.slots
