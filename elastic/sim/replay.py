"""Replays a spot trace at measured costs: what a run would have done on these machines, in seconds of this
machine for days of the trace.

Time jumps from one event to the next.  Between events a world steps: its steps are counted in closed form,
and no beat is sent.  :class:`Replay` knows the truth, which is the same for both ways to decide: machines,
workers, the world that steps, and the book of what was done and what could have been.

* :class:`Protocol` lets ``elastic.control.machine.advance`` decide everything, and answers its actions after
  the measured times (up to :data:`PROTOCOL` machines).
* ``policy.Policy`` leaves out the messages between coordinator and members: for worlds of thousands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf

from elastic.control import growth
from elastic.control.evolve import evolve
from elastic.control.machine import advance
from elastic.control.rules import Rules
from elastic.control.run import Forming, Running, RunState, Stopping, Waiting
from elastic.control.seating import candidates
from elastic.ids import Cell, NodeId, Version, WorkerId
from elastic.plan.placement import cell_of
from elastic.plan.transfer import LIVE, Holding
from elastic.protocol import lineage
from elastic.protocol.actions import (
    Action,
    CommitManifest,
    ConnectAhead,
    Fence,
    Form,
    Go,
    Kill,
    ListCopies,
    Pair,
    Pause,
    StartWorkers,
    Upload,
)
from elastic.protocol.builds import Build
from elastic.protocol.commit_record import GO_ON, HAND_OVER, PAUSE, SAVE_AND_PAUSE, Outcome
from elastic.protocol.events import (
    Capacity,
    ConnectedAhead,
    Event,
    Fenced,
    Here,
    Joined,
    KeeperLost,
    KeeperUp,
    Kept,
    Lost,
    NodeDraining,
    NodeFound,
    Ready,
    Saved,
    ShardSaved,
    StartFailed,
    StepDone,
    Tick,
    Together,
)
from elastic.protocol.plan import Plan
from elastic.sim.clock import Clock
from elastic.sim.costs import Costs
from elastic.sim.trace import Row
from storage.slices import Tensor

PROTOCOL = 256
"""Number of machines up to which the whole protocol is replayed."""
AVERAGED = 40
"""Number of equal steps after which their recent time is that of each of them."""
PRECISE_S = 0.01
"""Precision of the time from which on growth pays."""
TICK_S = 1.0
"""Time between two looks at the run while a notice is open."""
SOON_S = 1e-6
"""A time at which something becomes due is passed by as much, so that rounding does not leave it out."""
NEVER_S = 1e12
"""Deadlines that never come here: a replay has no silent worker and no run that gives up."""
CLASSES = (Tensor("state", "parameter", "F32", (2**24,)),)
KIND, SOURCE = "gpu", "trace"


def rules_of(costs: Costs, machines: int) -> Rules:
    """Returns the rules of a replay with one worker on each of up to ``machines``."""
    layout = costs.layout
    return Rules(
        min_workers=layout.min_parts * (layout.replicas or 1),
        max_workers=machines,
        layout=layout,
        target_step=10**12,
        save_every=costs.save_every,
        form_s=NEVER_S,
        fence_s=NEVER_S,
        stall_s=NEVER_S,
        stop_s=1.5 * costs.save_s,
        wait_s=NEVER_S,
        max_fruitless=10**9,
        copy_every=1,
        buddy_every=1,
        microbatches=costs.microbatches,
        may_wait=True,
    )


# ---- the book


@dataclass
class Interruption:
    """One change of worlds, or several that follow each other without a step."""

    at: float
    kind: str
    """The kind is "loss" of machines without a notice, "leave" of machines with one, or "growth"."""
    tier: str = ""
    """The place from which the state of the next world came."""
    pause_s: float = 0.0
    """Time without steps."""
    lost_steps: int = 0
    """Number of committed steps that were given up, and done again."""
    broken: float = 0.0
    """Part of the step under way that was lost."""
    cost: float = 0.0
    """Number of steps that the machines present could have done meanwhile, less those that they did."""


@dataclass
class Book:
    """The book has the steps that the machines could have done, and where they were lost."""

    costs: Costs
    now: float = 0.0
    present: int = 0
    """Number of machines whose workers could step."""
    up: int = 0
    """Number of machines, those that start up included."""
    ideal: float = 0.0
    paid: float = 0.0
    idle: float = 0.0
    """Number of steps that workers outside of the world could have added while it stepped."""
    incidents: list[Interruption] = field(default_factory=list)
    opened: Interruption | None = None
    opened_lost: float = 0.0

    def until(self, now: float, world_s: float | None) -> None:
        """Goes on to ``now``; a world that has stepped meanwhile took ``world_s`` for a step."""
        took_s, self.now = now - self.now, now
        if self.present:
            self.ideal += took_s / self.costs.step_s(self.present)
            if world_s is not None:
                self.idle += took_s / self.costs.step_s(self.present) - took_s / world_s
        if self.up:
            self.paid += took_s / self.costs.step_s(self.up)


@dataclass
class World:
    """A world that steps, or that has stepped and is about to end."""

    generation: int
    ranks: Mapping[WorkerId, int]
    """Its members, by world rank."""
    base: int
    """The step at which it began."""
    begun_at: float
    step_s: float
    ends_at: float = inf
    """The time at which it stops stepping: a member is gone, or it is at its boundary."""
    boundary: int = 0
    """The step after which it pauses; 0 if it does not."""

    def done(self, now: float) -> float:
        """Returns the number of steps done, with the part of the step under way."""
        return self.base + max(min(now, self.ends_at) - self.begun_at, 0.0) / self.step_s

    def committed(self, now: float) -> int:
        return int(self.done(now) + 1e-6)

    def at(self, step: int) -> float:
        """Returns the time at which ``step`` is committed."""
        return self.begun_at + (step - self.base) * self.step_s

    def steps(self, now: float) -> bool:
        return now < self.ends_at


@dataclass
class Machine:
    """A machine of the trace; one that comes back under its name is another one."""

    node: NodeId
    host: str
    up_at: float
    goes_at: float
    start_s: float
    """Time from its coming until its worker could step."""
    worker: WorkerId | None = None
    """Its worker, from when it is asked for until it is gone."""
    could_step: bool = False
    """True once its worker has joined, also if the worker is gone since."""


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.  Steps and times count from the first committed step."""

    costs: Costs
    seconds: float
    """Time from the first committed step until the end of the trace."""
    start_s: float
    """Time from the first machine's coming to the first committed step."""
    steps: int
    ideal: float
    paid: float
    idle: float
    incidents: tuple[Interruption, ...]
    machines: int
    """The largest number of machines."""
    boot_s: float
    """Machine-seconds of start-up."""
    up_s: float
    """Machine-seconds in which machines were there."""

    @property
    def goodput(self) -> float:
        """The part of what the machines present could do that was done."""
        return self.steps / self.ideal if self.ideal else 0.0

    @property
    def goodput_paid(self) -> float:
        """The part of what all machines could do, their start-up included, that was done."""
        return self.steps / self.paid if self.paid else 0.0

    @property
    def lost_steps(self) -> int:
        return sum(each.lost_steps for each in self.incidents)

    @property
    def tiers(self) -> Counter[str]:
        return Counter(each.tier for each in self.incidents if each.tier)

    @property
    def accounted(self) -> float:
        """The steps that incidents and idle workers have cost, as a part of all that were lost."""
        lost = self.ideal - self.steps
        return (sum(each.cost for each in self.incidents) + self.idle) / lost if lost else 1.0


# ---- the truth


class Replay(ABC):
    """The machines of a trace and the world on them.  A subclass decides."""

    def __init__(
        self, rows: Sequence[Row], costs: Costs, lead_s: float, seconds: float, rules: Rules | None = None
    ) -> None:
        self.costs, self.lead_s, self.clock = costs, lead_s, Clock()
        self.rules = rules or rules_of(costs, most_machines(rows))
        self.book, self.machines = Book(costs), dict[str, Machine]()
        self.by_node: dict[NodeId, Machine] = {}
        self.world: World | None = None
        self.done_steps = 0
        """The newest committed step that no world has given up, while none steps."""
        self.first: int | None = None
        """The first committed step, from which on everything counts."""
        self.first_at = self.boot_s = self.up_s = 0.0
        self.over = False
        self._machines = self.most = 0
        begun_s = rows[0].at
        gone = removals(rows)
        self.times = [row.at - begun_s for row in rows]
        for (at, _), group in groupby(
            zip(rows, gone, strict=True), lambda each: (each[0].at - begun_s, each[0].comes)
        ):
            if at < seconds:
                self.clock.after(at, self._rows, [(row, goes_at - begun_s) for row, goes_at in group])
        self.seconds = seconds
        self.clock.after(seconds, self._end)

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def next_row_at(self) -> float:
        """The time at which the next machine comes or goes."""
        after = bisect_right(self.times, self.now)
        return self.times[after] if after < len(self.times) else self.seconds

    def pays_at(self, run: RunState, members: Sequence[WorkerId], newcomers: Sequence[WorkerId]) -> float:
        """Returns the time, before the next machine comes or goes, from which on it pays to take some of the
        newcomers in; infinity if there is none.
        """
        early, late = self.now, self.next_row_at
        if not newcomers or not growth.judge(run, members, newcomers, late, self.rules).welcome:
            return inf
        if growth.judge(run, members, newcomers, early, self.rules).welcome:
            return early
        while late - early > PRECISE_S:
            middle = (early + late) / 2
            if growth.judge(run, members, newcomers, middle, self.rules).welcome:
                late = middle
            else:
                early = middle
        return late

    def replayed(self) -> Replayed:
        while not self.over:
            self.clock.step()
        book, begun = self.book, self.first is not None
        if book.opened is not None:
            self._close("")
        first = self.first if self.first is not None else self.committed
        return Replayed(
            self.costs,
            seconds=self.seconds - self.first_at if begun else 0.0,
            start_s=self.first_at if begun else self.seconds,
            steps=self.committed - first,
            ideal=book.ideal - first if begun else 0.0,
            paid=book.paid - first if begun else 0.0,
            idle=book.idle,
            incidents=tuple(book.incidents),
            machines=self.most,
            boot_s=self.boot_s,
            up_s=self.up_s,
        )

    @property
    def committed(self) -> int:
        """The newest committed step."""
        return self.done_steps if self.world is None else self.world.committed(self.now)

    def _end(self) -> None:
        self._book()
        for machine in self.machines.values():
            self._count(machine)
        self.over = True

    # -- the machines

    def _rows(self, rows: list[tuple[Row, float]]) -> None:
        """Lets machines come or go together; each row has the time at which its machine goes."""
        self._book()
        if not rows[0][0].comes:
            return self._removed([self.machines.pop(row.node) for row, _ in rows])
        new = list[Machine]()
        for row, goes_at in rows:
            start_s = self.costs.start_of(self._machines)
            self._machines += 1
            machine = Machine(NodeId(f"n{self._machines}"), row.node, self.now, goes_at, start_s)
            self.machines[row.node] = self.by_node[machine.node] = machine
            new.append(machine)
            if self.lead_s and goes_at < inf:
                self.clock.after(max(goes_at - self.lead_s - self.now, 0.0), self._warn, machine)
        self.book.up += len(new)
        self.most = max(self.most, self.book.up)
        self.come(new)

    def _removed(self, machines: list[Machine]) -> None:
        for machine in machines:
            self._count(machine)
            self.book.present -= machine.could_step
        self.book.up -= len(machines)
        # before the machines count as gone, their world stepped with them
        if self.world is not None and any(self.is_member(each.worker) for each in machines):
            self.halt("loss")
        self.go_away(machines)

    def is_member(self, worker: WorkerId | None) -> bool:
        return self.world is not None and worker in self.world.ranks

    def _count(self, machine: Machine) -> None:
        up_s = self.now - machine.up_at
        self.up_s += up_s
        self.boot_s += min(machine.start_s, up_s)

    def is_up(self, machine: Machine) -> bool:
        return self.machines.get(machine.host) is machine

    def _warn(self, machine: Machine) -> None:
        if self.is_up(machine):
            self.noticed(machine)

    def could_step(self, machines: Sequence[Machine]) -> None:
        """Counts machines as present: their workers could step from now on."""
        self._book()
        for machine in machines:
            machine.could_step = True
        self.book.present += len(machines)

    @abstractmethod
    def come(self, machines: list[Machine]) -> None:
        """Tells that machines have come."""

    @abstractmethod
    def go_away(self, machines: list[Machine]) -> None:
        """Tells that machines are gone; nobody knows it yet."""

    @abstractmethod
    def noticed(self, machine: Machine) -> None:
        """Tells that a machine will be taken ``lead_s`` from now."""

    # -- the world

    def _book(self) -> None:
        world = self.world
        self.book.until(self.now, world.step_s if world is not None and world.steps(self.book.now) else None)

    def _lost(self) -> float:
        done = self.done_steps if self.world is None else self.world.done(self.now)
        return self.book.ideal - done

    def halt(self, kind: str) -> None:
        """Ends the stepping of the present world, because of an incident."""
        world = self.world
        if world is None or not world.steps(self.now):
            return
        self._book()
        self._open(kind)
        world.ends_at = self.now
        assert self.book.opened is not None
        self.book.opened.broken += world.done(self.now) - world.committed(self.now)

    def _open(self, kind: str) -> None:
        if self.book.opened is None:
            self.book.opened, self.book.opened_lost = Interruption(self.now, kind), self._lost()

    def _close(self, tier: str) -> None:
        found, book = self.book.opened, self.book
        assert found is not None
        found.tier, found.pause_s, book.opened = tier, self.now - found.at, None
        found.cost = self._lost() - book.opened_lost
        book.incidents.append(found)

    def planned(self, version: int) -> None:
        """Notes that the next world begins at step ``version``; the steps after it are given up."""
        self._book()
        if self.world is not None:
            self.done_steps, self.world = self.world.committed(self.now), None
        if self.book.opened is not None:
            self.book.opened.lost_steps += self.done_steps - version
        self.done_steps = version

    def go(self, plan: Plan) -> None:
        """Lets a world step from now on."""
        self._book()
        if self.book.opened is not None:
            self._close(plan.tier)
        step_s = self.costs.step_s(len(plan.members))
        self.world = world = World(plan.generation, plan.ranks, self.done_steps, self.now, step_s)
        if self.first is None:
            self.clock.after(step_s, self._first, world)

    def _first(self, world: World) -> None:
        """Begins to count, with the first committed step."""
        if self.first is None and self.world is world and world.committed(self.now) > world.base:
            self._book()
            self.first, self.first_at = world.committed(self.now), self.now
            # what could have been done begins equal to what was done
            self.book.ideal = self.book.paid = float(self.first)
            self.book.idle, self.book.incidents = 0.0, []

    def prepare_s(self, tier: str, *, newcomers: bool, moved: bool, connected: bool) -> float:
        """Returns the time from a plan until its members step; ``connected`` says that they connected ahead."""
        costs = self.costs
        if tier == "bucket":
            return costs.bucket_s
        saved_s = costs.ahead_s if connected else 0.0
        if newcomers and tier != "init":
            return costs.join_s - saved_s
        return costs.reform_s - saved_s + (costs.heal_s if moved and tier != "init" else 0.0)

    def pause_at(self, world: World) -> float:
        """Returns the time of the boundary after the step under way, which has the request to pause."""
        if not world.boundary:
            world.boundary = int(world.done(self.now) + 1e-6) + 1
        return world.at(world.boundary)


def removals(rows: Sequence[Row]) -> list[float]:
    """Returns, for each row, the time at which its machine goes."""
    goes: dict[str, float] = {}
    found = list[float]()
    for row in reversed(rows):
        found.append(row.at if not row.comes else goes.pop(row.node, inf))
        if not row.comes:
            goes[row.node] = row.at
    return found[::-1]


def most_machines(rows: Iterable[Row]) -> int:
    """Returns the largest number of machines that are there at one time."""
    there = most = 0
    for row in rows:
        there += 1 if row.comes else -1
        most = max(most, there)
    return most


# ---- decided by the whole protocol


class Protocol(Replay):
    """``advance`` decides.  Its actions are answered after the measured times."""

    def __init__(
        self, rows: Sequence[Row], costs: Costs, lead_s: float, seconds: float, rules: Rules | None = None
    ) -> None:
        super().__init__(rows, costs, lead_s, seconds, rules)
        self.run = RunState.begin(1, 0.0)
        self.begun: Plan | None = None
        """The plan of ``world``."""
        self.homes: dict[WorkerId, Machine] = {}
        self.ended: set[WorkerId] = set()
        """The workers that have ended, whether or not the coordinator knows it."""
        self.free: dict[NodeId, Machine] = {}
        """The machines without a worker."""
        self.held: dict[WorkerId, Holding] = {}
        """The part of the state that each worker holds while no world steps."""
        self.shelf: dict[NodeId, tuple[Holding, ...]] = {}
        """The copies that the keeper of each node has complete."""
        self.buddies: dict[NodeId, NodeId] = {}
        self.uploads: set[tuple[WorkerId, Version]] = set()
        self.wake_at = inf
        self.looked = 0
        """The last generation whose growth was looked at after it began."""

    def tell(self, *events: Event) -> None:
        """Tells the coordinator all steps up to now, and then the events."""
        self._tell_steps()
        for event in events:
            self._advance(event, self.now)
        if (at := min(self._due(), default=inf)) < self.wake_at:
            self.wake_at = at
            self.clock.after(at - self.now, self._wake, at)

    def _wake(self, at: float) -> None:
        if at == self.wake_at:
            self.wake_at = inf
            self.tell(Tick())

    def _advance(self, event: Event, at: float) -> None:
        done = advance(self.run, event, at, self.rules)
        self.run = done.run
        for action in done.actions:
            self._perform(action)

    def _due(self) -> Iterable[float]:
        """Yields the times at which the run may do something by itself."""
        run, state, now = self.run, self.run.state, self.now
        if run.cluster.slots and run.members.start_after > now:
            yield run.members.start_after + SOON_S
        if any(node not in run.cluster.leaving for node in run.cluster.notices):
            yield now + TICK_S
        if isinstance(state, Stopping) and now < state.deadline < self.seconds:
            yield state.deadline + SOON_S
        plan = state.plan if isinstance(state, Running) else None
        if isinstance(state, Waiting) or (plan is not None and len(run.workers) > len(plan.members)):
            newest = run.workers[next(reversed(run.workers))].joined_at if run.workers else -inf
            quiet_at = newest + self.rules.grow_debounce_s + SOON_S
            if isinstance(state, Waiting) and state.until > now:
                yield state.until + SOON_S
            if run.members.starting and quiet_at > now:
                yield quiet_at
            elif plan is not None:
                at = self.pays_at(run, plan.members, self._newcomers(plan))
                if at > now or self.looked != plan.generation:
                    self.looked = plan.generation
                    yield max(at, now + SOON_S)

    def _newcomers(self, plan: Plan) -> list[WorkerId]:
        return [each for each in candidates(self.run, self.rules) if each not in plan.ranks]

    # -- steps

    def _tell_steps(self) -> None:
        """Tells the last commit up to now; those before it are one jump."""
        world, plan = self.world, self.begun
        if world is None or plan is None or self.run.generation != world.generation or self.run.plan is None:
            return
        last = world.committed(self.now)
        last = min(last, world.boundary - 1) if world.boundary else last
        told = max(self.run.step, world.base)
        if last - 1 > told:
            self._skip_to(world, last - 1)
        if last > told:
            self._advance(self._commit(plan, last), world.at(last))
        self._note_saved(world)

    def _skip_to(self, world: World, step: int) -> None:
        """Lets the coordinator know of a commit as if it had been told all steps up to it."""
        version, history, at = Version(step, world.generation), self.run.history, world.at(step)
        line = lineage.extended(history.lineage, version)
        history = evolve(history, lineage=line, untold=(), furthest=max(history.furthest, version))
        watch = evolve(self.run.watch, moved_at=at, stepped_at=at, step_s=self._recent_s(world, step))
        self.run = evolve(self.run, history=evolve(history, fruitless=0, failures=()), watch=watch)

    def _recent_s(self, world: World, step: int) -> float:
        """Returns the recent time of a step: the average in which the last step counts one half."""
        known_s, steps = self.run.watch.step_s, step - max(self.run.step, world.base)
        for _ in range(min(steps, AVERAGED)):
            known_s = (
                (known_s + min(max(world.step_s, known_s / 2), 2 * known_s)) / 2 if known_s else world.step_s
            )
        return known_s

    def _note_saved(self, world: World) -> None:
        """Lets the coordinator know of the newest save that is due and has reached the bucket."""
        every = self.costs.save_every
        since_s = self.now - self.costs.save_s
        step = (
            min(world.committed(since_s), self.run.step) // every * every if since_s > world.begun_at else 0
        )
        version = Version(step, world.generation)
        if step > world.base and version not in self.run.history.saved:
            self.run = evolve(self.run, history=evolve(self.run.history, saved=(version,)))

    def _commit(self, plan: Plan, step: int, boundary: int = GO_ON) -> StepDone:
        copied = step - 1 if step - 1 > plan.version.step else -1
        done = Outcome(
            step,
            plan.generation,
            1.0,
            (1.0,),
            (1,),
            ((0,),),
            True,
            boundary,
            copied_through=copied,
            buddied_through=copied,
            saves=boundary == SAVE_AND_PAUSE,
        )
        return StepDone(plan.members[0], plan.generation, done)

    def _version(self, world: World) -> Version:
        """Returns the version that all members of a world hold that has ended."""
        assert self.begun is not None
        step = world.committed(self.now)
        return self.begun.version if step == world.base else Version(step, world.generation)

    def halt(self, kind: str) -> None:
        world = self.world
        if world is None or not world.steps(self.now):
            return
        super().halt(kind)
        self._shelve(world, world.committed(self.now - self.costs.copy_s))

    def _shelve(self, world: World, step: int) -> None:
        """Notes the copies of ``step``, unless those of an earlier world are still the newest."""
        plan = self.begun
        if plan is None or step <= world.base:
            return
        version, shelf = Version(step, world.generation), dict[NodeId, list[Holding]]()
        for rank, (member, node) in enumerate(zip(plan.members, plan.nodes, strict=True)):
            for keeper in dict.fromkeys((node, self.buddies.get(node, node))):
                if keeper:
                    copy = Holding(member, version, cell_of(plan.layout, rank), keeper)
                    shelf.setdefault(keeper, []).append(copy)
        self.shelf = {node: tuple(copies) for node, copies in shelf.items()}

    # -- machines

    def come(self, machines: list[Machine]) -> None:
        for each in machines:
            self.tell(NodeFound(each.node), KeeperUp(each.node, f"{each.node}:1"))
        self._offer(machines)

    def _offer(self, machines: list[Machine]) -> None:
        self.free |= {each.node: each for each in machines}
        self.tell(Capacity(len(self._free())))

    def _free(self) -> list[Machine]:
        notices = self.run.cluster.notices
        return [each for node, each in self.free.items() if node not in notices and self.is_up(each)]

    def go_away(self, machines: list[Machine]) -> None:
        for each in machines:
            self.free.pop(each.node, None)
            if each.worker is not None:
                self.ended.add(each.worker)
        self.clock.after(self.costs.detect_s, self._gone, machines)

    def _gone(self, machines: list[Machine]) -> None:
        why, workers, starting = "its machine is gone", self.run.workers, self.run.members.starting
        lost = [each.worker for each in machines if each.worker is not None]
        for each in lost:
            if each in workers:
                self.tell(Lost(each, why))
            elif each in starting:
                self.tell(StartFailed(each, why))
        self._keepers_gone(machines)
        for machine in machines:
            del self.by_node[machine.node]
            if machine.worker is not None:
                self.held.pop(machine.worker, None)
                del self.homes[machine.worker]

    def _keepers_gone(self, machines: list[Machine]) -> None:
        for each in machines:
            self.tell(KeeperLost(each.node, "its machine is gone", with_its_node=True))

    def noticed(self, machine: Machine) -> None:
        self.tell(NodeDraining(machine.node, machine.goes_at, SOURCE))

    def _lives(self, worker: WorkerId) -> bool:
        home = self.homes.get(worker)
        return home is not None and home.worker == worker and self.is_up(home)

    def _join(self, workers: list[WorkerId]) -> None:
        homes = [(each, self.homes[each]) for each in workers if self._lives(each)]
        if homes:
            self.could_step([home for _, home in homes])
            self.tell(
                Together(
                    tuple(
                        Joined(each, home.node, KIND, CLASSES, Build(host=home.host)) for each, home in homes
                    )
                )
            )

    # -- actions

    def _perform(self, action: Action) -> None:
        match action:
            case StartWorkers():
                self._start(action)
            case Form():
                self._form(action.plan)
            case ConnectAhead(plan):
                self.clock.after(self.costs.ahead_s, self._connect_ahead, plan)
            case Go():
                assert self.run.plan is not None
                self._go(self.run.plan)
            case Pause():
                self._pause(action)
            case Fence():
                self.clock.after(self.costs.decide_s, self._answer, action)
            case Kill():
                for worker in action.workers:
                    if (home := self.homes.get(worker)) is not None and home.worker == worker:
                        home.worker = None
                    self.ended.add(worker)
            case ListCopies():
                self.clock.after(self.costs.decide_s, self._list, action)
            case Pair():
                self.buddies = {node: buddy for node, buddy, _ in action.buddies}
            case Upload():
                self._upload(action)
            case CommitManifest():
                self.clock.after(0.0, self.tell, Saved(action.version, ""))
            case _:
                pass

    def _start(self, action: StartWorkers) -> None:
        free = [each for each in self._free() if each.node not in action.avoid]
        by_time: dict[float, list[WorkerId]] = {}
        for worker, machine in zip(action.workers, free, strict=False):
            machine.worker, self.homes[worker] = worker, machine
            del self.free[machine.node]
            by_time.setdefault(max(machine.up_at + machine.start_s, self.now), []).append(worker)
        for at, workers in by_time.items():
            self.clock.after(at - self.now, self._join, workers)
        for worker in action.workers[len(free) :]:
            self.clock.after(0.0, self.tell, StartFailed(worker, "there is no room for it"))

    def _form(self, plan: Plan) -> None:
        if (world := self.world) is not None:
            self._note_held(world)
        self.planned(plan.version.step)
        need = [cell_of(plan.layout, rank) for rank in range(len(plan.members))]
        newcomers = any(member not in self.held for member in plan.members)
        moved = any(
            not self._has(member, plan, cell) for member, cell in zip(plan.members, need, strict=True)
        )
        after_s = self.prepare_s(plan.tier, newcomers=newcomers, moved=moved, connected=bool(plan.ahead))
        self.clock.after(after_s, self._ready, plan)

    def _connect_ahead(self, plan: Plan) -> None:
        """Tells which members have connected the next world beside the steps."""
        there = tuple(filter(self._lives, plan.members))
        told = tuple(ConnectedAhead(each, plan.generation, plan.ahead, plan.incarnation) for each in there)
        if told:
            self.tell(Together(told))

    def _has(self, member: WorkerId, plan: Plan, cell: Cell) -> bool:
        known = self.held.get(member)
        return known is not None and (known.version, known.cell) == (plan.version, cell)

    def _note_held(self, world: World) -> None:
        assert self.begun is not None
        version = self._version(world)
        for member, rank in world.ranks.items():
            self.held[member] = Holding(member, version, cell_of(self.begun.layout, rank), LIVE)

    def _ready(self, plan: Plan) -> None:
        state = self.run.state
        if isinstance(state, Forming) and state.plan is plan and self.ended.isdisjoint(plan.ranks):
            here = [Here(member, plan.generation) for member in plan.members]
            ready = [Ready(member, plan.generation) for member in plan.members]
            self.tell(Together((*here, *ready)))

    def _go(self, plan: Plan) -> None:
        self.begun = plan
        for rank, member in enumerate(plan.members):
            self.held[member] = Holding(member, plan.version, cell_of(plan.layout, rank), LIVE)
        self.go(plan)

    def _pause(self, action: Pause) -> None:
        world = self.world
        if world is not None and world.generation == action.generation and not world.boundary:
            self.clock.after(self.pause_at(world) - self.now, self._at_boundary, world)

    def _at_boundary(self, world: World) -> None:
        state, plan = self.run.state, self.begun
        if self.world is not world or not world.steps(self.now) or not isinstance(state, Stopping):
            return
        assert plan is not None
        self.halt("leave" if self._leaves(plan) else "growth")
        if state.hand_over:
            self._shelve(world, world.boundary)
        boundary = SAVE_AND_PAUSE if state.save else HAND_OVER if state.hand_over else PAUSE
        self.tell(self._commit(plan, world.boundary, boundary))
        self.tell(self._fenced(plan.generation, plan.members))

    def _leaves(self, plan: Plan) -> bool:
        return any(node in self.run.cluster.leaving for node in plan.nodes)

    def _answer(self, action: Fence) -> None:
        if there := tuple(filter(self._lives, action.members)):
            self.tell(self._fenced(action.generation, there))

    def _fenced(self, generation: int, members: Sequence[WorkerId]) -> Together:
        if self.world is not None and self.world.generation == generation:
            self._note_held(self.world)
        return Together(
            tuple(
                Fenced(each, generation, (self.held[each],) if each in self.held else (), None)
                for each in members
            )
        )

    def _list(self, action: ListCopies) -> None:
        for node in action.keepers:
            if (machine := self.by_node.get(node)) is not None and self.is_up(machine):
                self.tell(Kept(node, action.generation, self.shelf.get(node, ())))

    def _upload(self, action: Upload) -> None:
        for save in action.saves:
            for member in save.members:
                if (member, save.version) not in self.uploads:
                    self.uploads.add((member, save.version))
                    event = ShardSaved(member, save.version, save.by)
                    self.clock.after(self.costs.save_s, self.tell, event)
