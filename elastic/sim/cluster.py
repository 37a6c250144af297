"""Models nodes, their keepers, the workers' processes and the bucket, on which the coordinator's actions
act.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any

from elastic.control.run import RunState
from elastic.ids import Cell, NodeId, Version, WorkerId
from elastic.protocol.actions import Retain, Upload
from elastic.protocol.authority import Replica
from elastic.protocol.builds import Build
from elastic.protocol.events import (
    Beat,
    Capacity,
    KeeperLost,
    KeeperUp,
    Kept,
    Lost,
    NodeFound,
    NodeRefused,
    Saved,
    SaveFailed,
    ShardSaved,
    StartFailed,
)
from elastic.protocol.faults import Kind
from elastic.protocol.plan import Plan
from elastic.sim.memory import Shelf, held_at
from elastic.sim.network import Way
from elastic.sim.notices import Announcements, Word
from elastic.sim.sour import Lemons
from elastic.sim.truth import HEALS, check_manifest, covers
from elastic.sim.uploads import Uploads
from elastic.sim.worker import Phase, Worker

if TYPE_CHECKING:
    from elastic.sim.simulation import Simulation

BEAT_S, CAPACITY_S = 0.8, 5.0
"""Times in seconds from one beat of a keeper to the next, and from one report of free places to the next."""
DECLARED_DEAD_S = 8.0
"""Time in seconds after which the cluster's health checks declare a silent node dead, with all its
processes.
"""
UNPINNED_S = 4.5
"""Longest time in seconds until the kernel has released the pinned memory of a dead process."""


@dataclass
class Node:
    """A node.

    ``keeper`` is True while its keeper runs.  ``declared_dead`` is True once the cluster has declared the
    node dead; a living node then ends itself when it hears this.
    """

    name: NodeId
    host: str
    """Name of the machine, which may come back as a new node with a new name."""
    keeper: bool = True
    frozen_until: float = 0.0
    alive: bool = True
    declared_dead: bool = False
    replica: Replica = field(default_factory=lambda: Replica([]))
    """The coordinator that its keeper obeys, and the keeper's part of the journal."""
    shelf: Shelf = field(default_factory=Shelf)
    buddy: NodeId = NodeId("")  # noqa: RUF009 - a plain string
    words: dict[str, Word] = field(default_factory=dict)
    """The newest word of each source of notices."""
    uploads: Uploads = field(init=False)


class Bucket:
    """Object storage: its shards, the versions with a manifest, and the damaged versions."""

    def __init__(self) -> None:
        self.shards: dict[Version, dict[int, set[Cell]]] = {}
        """The shards of each version, by the generation that wrote them: the layouts of generations
        differ.
        """
        self.manifests: set[Version] = set()
        self.damaged: set[Version] = set()

    def written(self, version: Version, cell: Cell, generation: int) -> None:
        self.shards.setdefault(version, {}).setdefault(generation, set()).add(cell)

    def by(self, version: Version, generation: int) -> frozenset[Cell]:
        """Returns the shards of ``version`` that ``generation`` wrote.  A ``generation`` of 0 means the
        generation that committed the version.
        """
        return frozenset(self.shards.get(version, {}).get(generation or version.generation, ()))


class Cluster:
    """The cluster.

    ``workers`` has every process that was ever started, and ``running`` the living ones.  ``zombies`` are
    processes that live on after an order to kill them.
    """

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.rng, self.clock, self.network = sim, sim.rng, sim.clock, sim.network
        self.bucket = Bucket()
        self.workers: dict[WorkerId, Worker] = {}
        self.running: list[Worker] = []
        self.zombies: set[WorkerId] = set()
        self.nodes: dict[NodeId, Node] = {}
        self.misfits: set[NodeId] = set()
        self.given_up: set[NodeId] = set()
        """Nodes that were declared dead."""
        self.notices = Announcements(self)
        self.lemons = Lemons(sim)
        self.sick_stores: set[int] = set()
        self.next_store_sick_until = 0.0
        self.taken = 0
        """Number of places for workers that a drought has taken from the run."""
        self.errors_raised: list[tuple[int, WorkerId]] = []
        self.unpins = Random(sim.seed + 7)
        self.pinned = self.unpins.random() < 0.5
        """True if workers hold much pinned memory.  The keeper then sees a worker's death at once, but the
        worker's process ends only seconds later.
        """
        self._numbers = 0
        for _ in range(sim.scenario.nodes):
            self.add_node()
        self.clock.after(0.05, self._offer)

    def number(self) -> int:
        """Returns a new number at each call."""
        self._numbers += 1
        return self._numbers

    # -- nodes and keepers
    # ----------------------------------------------------------------------------------------

    def add_node(self, host: str = "") -> None:
        name = NodeId(f"n{self.number()}")
        node = Node(name, host or name)
        node.uploads = Uploads(self, node)
        self.nodes[node.name] = node
        self.clock.after(0.0, self.found, node.name)
        self.keeper_up(node)
        self.clock.after(0.1 + BEAT_S * self.rng.random(), self._beat, node)

    def build_of(self, node: NodeId) -> Build:
        return Build(self.nodes[node].host if node in self.nodes else node)

    def add_misfit(self) -> None:
        """Adds a node whose keeper finds another bucket.  Workers may be started on this node until the
        keeper has reported the other bucket.
        """
        self.misfits.add(NodeId(f"n{self.number()}"))
        self.look_at_misfits()

    def found(self, node: NodeId) -> None:
        self.sim.tell_coordinator(NodeFound(node))

    def look_at_misfits(self) -> None:
        for node in sorted(self.misfits):
            self.clock.after(0.0, self.found, node)
            self.say_surely(node, NodeRefused(node, f"node {node} sees another bucket"))

    def say_surely(
        self,
        node: NodeId,
        event: KeeperUp | KeeperLost | NodeRefused | Lost | StartFailed | ShardSaved | SaveFailed,
    ) -> None:
        """Sends an event of the node, or about the node, repeatedly until the present coordinator has heard
        it.
        """
        self.network.send_surely(Way.FROM, node, self.sim.tell_coordinator, event)

    def keeper_up(self, node: Node) -> None:
        if node.alive and not node.declared_dead:
            node.keeper, node.replica = True, Replica([], heeds=self.sim.coordinators.present.incarnation)
            self.introduce(node.name)

    def introduce(self, node: NodeId) -> None:
        """Lets the keeper of ``node`` tell the present coordinator its address, and then the notices."""
        at = self.network.send_surely(Way.FROM, node, self.sim.tell_coordinator, self.introduction(node))
        self.notices.say_all(node, not_before=at)

    def introduction(self, node: NodeId) -> KeeperUp:
        return KeeperUp(node, f"{node}:7")

    def keeper_dies(self, node: Node, down_s: float) -> None:
        node.keeper = False
        node.shelf, node.buddy, node.uploads = Shelf(), NodeId(""), Uploads(self, node)
        self.say_surely(node.name, KeeperLost(node.name, "its process died"))
        self.clock.after(down_s, self.keeper_up, node)

    def _beat(self, node: Node) -> None:
        if not node.alive:
            return
        if node.keeper and node.frozen_until <= self.clock.now:
            seen = tuple(w.progress for w in self.running if w.node == node.name and w.progress is not None)
            self.network.send(
                Way.FROM, node.name, self.sim.tell_coordinator, Beat(node.name, seen, node.uploads.uploading)
            )
        self.clock.after(BEAT_S, self._beat, node)

    def on(self, node: NodeId) -> list[Worker]:
        return [worker for worker in self.running if worker.node == node]

    def node_dies(self, node: Node, why: str = "its node died") -> None:
        node.alive = False
        self.nodes.pop(node.name, None)
        for worker in self.on(node.name):
            self.die(worker, why)
        self.clock.after(
            0.05 + 0.5 * self.rng.random(),
            self.sim.tell_coordinator,
            KeeperLost(node.name, why, with_its_node=True),
        )

    def node_freezes(self, node: Node, duration_s: float) -> None:
        node.frozen_until = max(node.frozen_until, self.clock.now + duration_s)
        for worker in self.on(node.name):
            worker.freeze(duration_s)
        self.silent(node, duration_s)

    def silent(self, node: Node, duration_s: float) -> None:
        """Handles a silence of ``duration_s`` seconds of a frozen or cut-off node.

        If the silence is longer than ``DECLARED_DEAD_S`` and another node is left, the cluster declares the
        living node dead.  The node ends itself when it hears this.
        """
        if duration_s > DECLARED_DEAD_S and len([n for n in self.nodes.values() if not n.declared_dead]) > 1:
            self.clock.after(DECLARED_DEAD_S, self._declare_dead, node, self.clock.now + duration_s)

    def _declare_dead(self, node: Node, until: float) -> None:
        if not node.alive or node.declared_dead:
            return
        node.declared_dead = True
        self.given_up.add(node.name)
        self.sim.oracle.occasions["a living node is declared dead"] += 1
        self.sim.tell(f"node {node.name} is declared dead, and lives")
        self.sim.tell_coordinator(KeeperLost(node.name, "its node died", with_its_node=True))
        for worker in self.on(node.name):
            word = (
                Lost(worker.name, "its node died", certain=False)
                if worker.joined
                else StartFailed(worker.name, "its node died")
            )
            self.sim.tell_coordinator(word)
        self.clock.after(
            until - self.clock.now + 2.0 * self.rng.random(), self.node_dies, node, "it was declared dead"
        )
        self.clock.after(1.0 + 4.0 * self.rng.random(), self.add_node)

    def shelf(self, node: NodeId) -> Shelf | None:
        """Returns the memory of the node's keeper, or None if the keeper does not run."""
        there = self.nodes.get(node)
        return (
            there.shelf
            if there is not None and there.keeper and there.frozen_until <= self.clock.now
            else None
        )

    def order(self, incarnation: int, nodes: Iterable[NodeId], call: Callable[..., None], *args: Any) -> None:
        """Sends a coordinator's order to keepers.  A keeper that obeys a later incarnation refuses the
        order.
        """
        for node in nodes:
            self.network.send(Way.TO, node, self._obey, incarnation, node, call, *args)

    def order_surely(
        self, incarnation: int, nodes: Iterable[NodeId], call: Callable[..., None], *args: Any
    ) -> None:
        """Sends an order like :meth:`order`, but surely: it is repeated until it arrives, and a frozen node
        handles it when it goes on.
        """
        for node in nodes:
            self.network.send_surely(Way.TO, node, self._obey_at_last, incarnation, node, call, *args)

    def _obey_at_last(self, incarnation: int, name: NodeId, call: Callable[..., None], *args: Any) -> None:
        node = self.nodes.get(name)
        if node is not None and node.frozen_until > self.clock.now:
            self.clock.after(
                node.frozen_until - self.clock.now, self._obey_at_last, incarnation, name, call, *args
            )
        else:
            self._obey(incarnation, name, call, *args)

    def _obey(self, incarnation: int, name: NodeId, call: Callable[..., None], *args: Any) -> None:
        node = self.nodes.get(name)
        if node is not None and self.shelf(name) is not None and node.replica.heed(incarnation):
            call(node, *args)

    def list_copies(self, node: Node, generation: int) -> None:
        held = held_at(self, node.name)
        self.sim.oracle.copies.answers(node.name, held)
        self.network.send(Way.FROM, node.name, self.sim.tell_coordinator, Kept(node.name, generation, held))

    def release(self, node: Node, copied: Version, buddied: Version) -> None:
        self.sim.oracle.occasions["copies of the dead are released"] += bool(
            node.shelf.release(copied, buddied)
        )

    def upload(self, node: Node, number: tuple[int, int], action: Upload) -> None:
        node.uploads.obey(number, action.saves, action.generation, action.version)

    def pair(self, node: Node, buddy: NodeId) -> None:
        node.buddy = buddy

    def store_answers(self, plan: Plan) -> bool:
        """Returns whether the store of the plan's generation answers.  A store dies with its keeper, and can
        be out of reach of its members.
        """
        node = self.nodes.get(plan.store_node)
        if self.clock.now < self.next_store_sick_until:
            self.sick_stores.add(plan.generation)
        well = node is not None and node.keeper and node.frozen_until <= self.clock.now
        return well and plan.generation not in self.sick_stores

    def peers_cut(self, members: tuple[WorkerId, ...]) -> bool:
        """Returns whether some members cannot reach the others."""
        nodes = {self.workers[member].node for member in members}
        return len(nodes) > 1 and any(self.network.cut_s(Way.PEER, node) for node in nodes)

    # -- processes
    # ------------------------------------------------------------------------------------------------

    def start(self, names: tuple[WorkerId, ...], avoid: tuple[NodeId, ...]) -> None:
        for name in names:
            # a new coordinator repeats orders: it does not know which were performed
            if name in self.workers:
                continue
            places = [
                n.name
                for n in self.nodes.values()
                if not n.declared_dead and n.frozen_until <= self.clock.now
            ]
            places = [
                place
                for place in places
                if place not in avoid
                or (place not in self.sim.scenario.misset and not self.nodes[place].words)
            ]
            if self.sim.scenario.lemons:
                places = [place for place in places if place not in avoid and self._free_on(place)]
            if self.free <= 0 or not places or self.network.happens(Kind.START_FAILURE):
                self.clock.after(
                    0.5 + self.rng.random(), self.sim.tell_coordinator, StartFailed(name, "no room")
                )
                continue
            nodes = [*places, *sorted(self.misfits - set(avoid))]
            node = min(nodes, key=lambda n: (self.network.cut_s(Way.TO, n) > 0, len(self.on(n))))
            worker = self.workers[name] = Worker(self.sim, name, node)
            self.running.append(worker)
            chance = Random(f"start of {name} {self.sim.seed}")
            parts = chance.randint(2, 4) if chance.random() < self.sim.scenario.slow_starts else 0
            self.clock.after(0.5 + 1.5 * self.rng.random(), worker.receive, worker.begin, parts)
            self.lemons.started(worker)

    @property
    def free(self) -> int:
        """Number of free places for workers.  A zombie takes none."""
        scenario = self.sim.scenario
        slots = scenario.slots if not scenario.per_node else scenario.per_node * len(self.nodes)
        return slots - self.taken - sum(w.name not in self.zombies for w in self.running)

    def _free_on(self, node: NodeId) -> int:
        return self.sim.scenario.per_node - sum(w.name not in self.zombies for w in self.on(node))

    def _free_for(self, run: RunState) -> int:
        """Returns the free places as the product counts them: those on closed nodes are none."""
        if not self.sim.scenario.lemons:
            return self.free
        closed = run.cluster.closed(few=len(run.workers) < self.sim.rules.min_workers)
        there = [name for name, node in self.nodes.items() if not node.declared_dead and name not in closed]
        return min(self.free, sum(map(self._free_on, there)))

    def take_places(self, number: int) -> None:
        self.taken = max(0, self.taken + number)

    def _offer(self) -> None:
        self.sim.tell_coordinator(
            Capacity(
                max(0, self._free_for(self.sim.coordinators.acting.run)),
                tuple(w.name for w in self.running if not w.joined),
            )
        )
        self.clock.after(CAPACITY_S, self._offer)

    def die(self, worker: Worker, why: str) -> None:
        if not worker.alive:
            return
        worker.alive = False
        self.running.remove(worker)
        self.zombies.discard(worker.name)
        if worker.world is not None:
            if worker.phase is Phase.HEALING:
                self.sim.oracle.meets(worker.world.plan, HEALS)
            worker.world.gone(worker)
        if (node := self.nodes.get(worker.node)) is not None and node.keeper:
            node.shelf.left[worker.name] = worker.memory.slots
            self.sim.oracle.occasions["a copy is torn by death"] += any(
                slot and not slot.complete for slot in worker.memory.slots
            )
        if worker.node in self.given_up:  # nobody watches a node that was declared dead
            return
        word = Lost if worker.joined else StartFailed
        gone = word(worker.name, f"its process ended: {why}")
        if isinstance(gone, StartFailed) and self.sim.scenario.lemons:
            gone = replace(gone, node=worker.node)
        after_s = 0.02 + (0.1 if self.rng.random() < 0.7 else 2.0) * self.rng.random()
        if self.pinned and worker.joined:
            after_s += UNPINNED_S * self.unpins.random()
            dying = Lost(worker.name, f"its process dies: {why}", certain=False)
            self.clock.after(0.05 * self.unpins.random(), self._seen_dying, worker.node, dying)
        self.clock.after(after_s, self.say_surely, worker.node, gone)

    def _seen_dying(self, name: NodeId, word: Lost) -> None:
        """Makes the keeper, if it runs, report early and once that a worker is dying."""
        node = self.nodes.get(name)
        if node is not None and node.keeper and node.frozen_until <= self.clock.now:
            self.sim.oracle.occasions["a death is seen early"] += 1
            self.network.send(Way.FROM, name, self.sim.tell_coordinator, word)

    def kill(self, names: tuple[WorkerId, ...]) -> None:
        """Tries to kill processes.  A process that the kill does not reach lives on as a zombie, which takes
        no place.
        """
        for name in names:
            worker = self.workers.get(name)
            if worker is None or not worker.alive:
                continue
            node = self.nodes.get(worker.node)
            unreachable = self.network.cut_s(Way.TO, worker.node) > 0 or (
                node is not None and node.frozen_until > self.clock.now
            )
            if unreachable or self.network.happens(Kind.KILL_LOST):
                self.zombies.add(name)
            else:
                self.clock.after(0.05 + 0.5 * self.rng.random(), self.die, worker, "SIGKILL")

    def exit(self, names: tuple[WorkerId, ...]) -> None:
        for name in names:
            if name in self.workers:
                self.clock.after(0.1, self.die, self.workers[name], "exit")

    # -- state
    # ----------------------------------------------------------------------------------------------------

    def supply(self, worker: Worker, plan: Plan) -> str:
        """Returns the result of fetching the worker's shard of the plan's version: "ok", "gone", "down" or
        "damaged".
        """
        if plan.version == Version(0, 0):
            return "ok"
        if (plan.version, worker.cell) in worker.held:
            return "ok"
        holders = [self.workers[h.worker] for h in plan.holders if not h.keeper]
        near = frozenset(slot[1] for w in holders if w.alive for slot in w.held if slot[0] == plan.version)
        near |= frozenset(h.cell for h in plan.holders if h.keeper and h in held_at(self, h.keeper))
        if not self.peers_cut(plan.members) and covers(near, self.sim.scenario.rows):
            return "ok"
        if plan.version not in self.bucket.manifests:
            return "gone"
        if self.bucket_fails():
            return "down"
        return "damaged" if plan.version in self.bucket.damaged else "ok"

    def bucket_fails(self) -> bool:
        """Draws whether one call to the bucket fails."""
        return self.network.happens(Kind.BUCKET_DOWN)

    def commit_manifest(self, version: Version, by: int, reported: bool, reached: bool) -> Saved | SaveFailed:
        """Writes the manifest of ``version``, unless the bucket has it.  The bucket must be ``reached``, and
        the coordinator must have the receipts of all parts that generation ``by`` wrote (``reported``).
        """
        if not reached or self.bucket_fails():
            return SaveFailed(version, "store unavailable", by, again=True, manifest=True)
        if version not in self.bucket.manifests:
            if not reported:
                self.sim.oracle.occasions["a manifest is asked for that can never be written"] += 1
                return SaveFailed(version, "receipts are missing", by, again=False, manifest=True)
            check_manifest(version, self.bucket.by(version, by), self.sim.scenario.rows)
            self.sim.flips.judge_manifest(version, by)
            self.bucket.manifests.add(version)
        return Saved(version, f"digest of {version}")

    def retain(self, action: Retain) -> None:
        """Deletes at once the checkpoints that no rule keeps; the product deletes in two rounds."""
        kept = {*action.saved, *action.spared}
        gone = {
            version
            for version in self.bucket.manifests
            if version < max(action.saved) and version not in kept
        }
        self.bucket.manifests -= gone
        self.sim.oracle.counting -= gone
        self.sim.oracle.occasions["checkpoints are deleted"] += bool(gone)

    def user_error(self, worker: Worker, step: int) -> bool:
        """Returns whether the user's code raises.  It raises on the worker that has the microbatch of the bad
        sample.
        """
        scenario, world = self.sim.scenario, worker.world
        assert world is not None
        if scenario.error_step != step or (scenario.error_once and self.errors_raised):
            return False
        if world.plan.world_rank(worker.name) != step % len(world.plan.members):
            return False
        self.errors_raised.append((step, worker.name))
        self.sim.tell(f"the user's code raises in {worker.name} at step {step}")
        return True
