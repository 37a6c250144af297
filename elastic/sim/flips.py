"""Models bits that flip without a sign, and judges what the run makes of them.

The bits of a state are a number, 0 if they are as they should be.  A flip gives a worker's state a number of
its own.  Wrong weights compute wrong gradients, which all members apply: after the next commit nobody's state
is as it should be, and the state in which the flip was still differs from the others.  Healing, copies and
checkpoints carry the number on.

Four rules must hold:

* No checkpoint is made of replicas with different bits.
* Once all parts of a save are told and replicas differ, no world begins with a state after the newest
  checkpoint.
* Who differs from most replicas then, three or more, is no member any more.
* Nobody is called wrong whose state does not come from a flip, unless most of the replicas that are compared
  come from one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING

from elastic.ids import Cell, Version, WorkerId
from elastic.plan.placement import cell_of, number_of_cells
from elastic.protocol.actions import Save
from elastic.protocol.events import Event, Recovered, ShardSaved, parts
from elastic.protocol.plan import Plan
from elastic.sim.memory import Slot
from elastic.sim.violation import Violation

if TYPE_CHECKING:
    from elastic.control.run import RunState
    from elastic.sim.simulation import Simulation
    from elastic.sim.worker import Worker

CALLED = "held other bits"
"""Words with which the run calls workers wrong."""


def mixed(numbers: Iterable[int]) -> int:
    """Returns the number of bits that come of others: 0 if those are as they should be."""
    found = tuple(numbers)
    return hash(found) if any(found) else 0


def replicas_of(worker: WorkerId, step: int, run: RunState) -> set[WorkerId]:
    """Returns the workers whose states of ``step`` are compared with that of ``worker``, itself included: they have
    the same cell in the save of the step, or in a dispute about it.  The present world may have other members.
    """
    seats = [
        (member, str(cell_of(save.layout, rank)))
        for save in run.saves.pending
        if save.version.step == step
        for rank, member in enumerate(save.members)
    ]
    if (dispute := run.history.dispute) is not None and dispute.step == step:
        seats += [(vote.worker, vote.about) for vote in dispute.votes]
    cells = {cell for each, cell in seats if each == worker}
    return {each for each, cell in seats if cell in cells}


class Flips:
    """The bits of all states of one run, and the judge of these rules."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self._bits: dict[tuple[WorkerId, Version, Cell], int] = {}
        """The wrong bits in the memory of workers."""
        self._gradients: dict[tuple[int, int], dict[WorkerId, int]] = defaultdict(dict)
        """The bits with which each member computed, by generation and step."""
        self._written: dict[tuple[Version, int], dict[Cell, list[int]]] = defaultdict(
            lambda: defaultdict(list)
        )
        """The bits of the copies from which each save was written, by cell."""
        self.flipped: set[WorkerId] = set()
        """The workers in whose state a bit flipped, or that had it from one of them."""
        self._told: dict[tuple[Version, int], dict[WorkerId, str]] = defaultdict(dict)
        self.disputes = 0
        """Number of saves of which a coordinator was told that replicas differ."""
        self._asked: set[Version] = set()
        """The versions whose manifests were asked for."""
        self.since: int | None = None
        """The step of such a save, until the next world is ordered."""
        self._wrong: set[WorkerId] = set()
        """The workers that most replicas have outvoted."""
        for at, target in sim.scenario.flips:
            sim.clock.after(at, self._flip, target)

    @property
    def some(self) -> bool:
        """True if bits flip in this run at all."""
        return bool(self.sim.scenario.flips)

    # -- the bits

    def _flip(self, target: int) -> None:
        there = [worker for worker in self.sim.cluster.running if worker.held]
        if not there:
            return
        worker = there[target % len(there)]
        self.sim.tell(f"fault: a bit flips in the state of {worker.name}")
        self.sim.oracle.occasions["a bit flips"] += 1
        self.flipped.add(worker.name)
        self.sim.strikes.disturbed_until = inf  # any later save may show it
        for version, cell in worker.held:
            key = worker.name, version, cell
            self._bits[key] = mixed((self._bits.get(key, 0), 1 + len(self._bits), target + 1))

    def of(self, worker: WorkerId, version: Version, cell: Cell) -> int:
        """Returns the bits of the state that ``worker`` holds."""
        return self._bits.get((worker, version, cell), 0)

    def contributes(self, worker: Worker, step: int) -> None:
        """Notes with which bits ``worker`` computed its gradient of ``step``."""
        assert worker.world is not None and worker.version is not None
        found = self.of(worker.name, worker.version, worker.cell)
        self._gradients[worker.world.generation, step][worker.name] = found

    def updated(self, worker: Worker, base: Version, new: Version) -> None:
        """Notes that ``worker`` has applied the gradient of all members to ``base``."""
        gradient = mixed(bits for _, bits in sorted(self._gradients[new.generation, new.step].items()))
        if found := mixed((self.of(worker.name, base, worker.cell), gradient)):
            self._bits[worker.name, new, worker.cell] = found

    def healed(self, worker: Worker, plan: Plan) -> None:
        """Notes that ``worker`` has got its shard of the plan's version from the first of its holders, or from
        the bucket.
        """
        key = worker.name, plan.version, worker.cell
        if not self.some or (plan.version, worker.cell) in worker.held:
            return
        sources: dict[Cell, int] = {}
        for holding in plan.holders if plan.tier in ("live", "host") else ():
            if holding.version == plan.version and holding.cell not in sources:
                found = self._held(holding.worker, holding.keeper, plan.version, holding.cell)
                if found and holding.worker in self.flipped:
                    self.flipped.add(worker.name)
                sources[holding.cell] = found
        if plan.tier == "bucket":
            sources = {cell: mixed(found) for cell, found in self._manifest(plan.version).items()}
        same = sources.get(worker.cell)
        self._bits[key] = same if same is not None else mixed(sources[cell] for cell in sorted(sources))

    def _held(self, worker: WorkerId, keeper: str, version: Version, cell: Cell) -> int:
        if not keeper:
            return self.of(worker, version, cell)
        slots = [slot for slot in self._slots(worker, keeper) if slot.copy == (version, cell)]
        return slots[0].bits if slots else 0

    def _slots(self, name: WorkerId, keeper: str) -> list[Slot]:
        cluster = self.sim.cluster
        shelf = next((node.shelf for node in cluster.nodes.values() if node.name == keeper), None)
        worker = cluster.workers[name]
        at_home = worker.memory.slots if worker.node == keeper else []
        there = [
            *at_home,
            *(shelf.left.get(name, []) if shelf else ()),
            *(shelf.guests.get(name, []) if shelf else ()),
        ]
        return [slot for slot in there if slot is not None and slot.complete]

    def _manifest(self, version: Version) -> dict[Cell, list[int]]:
        return next((found for (of, _), found in self._written.items() if of == version), {})

    def written(self, save: Save, cell: Cell, bits: int) -> None:
        """Notes that a part of a save was written from a copy with these bits."""
        self._written[save.version, save.by][cell].append(bits)

    def digest(self, save: Save, bits: int) -> str:
        """Returns what a keeper tells of a copy with these bits."""
        alone = number_of_cells(save.layout) == save.layout.world
        return "" if alone or not self.some else f"{bits:x}"

    # -- the judge

    def judge_manifest(self, version: Version, by: int) -> None:
        """Checks a manifest that is written now."""
        for cell, found in self._written[version, by or version.generation].items():
            if len({*found}) > 1:
                raise Violation(f"the manifest of {version} is of replicas that differ in {cell!r}")

    def hears(self, before: RunState, event: Event, after: RunState) -> None:
        """Notes what the coordinator is told of the parts of saves."""
        for each in parts(event) if self.some else ():
            if isinstance(each, Recovered) and after.history.trusted is None:
                self.since, self._wrong = None, set()
            if isinstance(each, ShardSaved) and (known := before.saves.find(each.version)) is not None:
                told = self._told[each.version, each.by]
                told[each.worker] = each.digest
                if {*told} == {*known.members} and not known.asked and before.history.may_begin(each.version):
                    seats = {each: cell_of(known.layout, rank) for rank, each in enumerate(known.members)}
                    self._compare(
                        each.version, {worker: (seats[worker], digest) for worker, digest in told.items()}
                    )

    def _compare(self, version: Version, told: dict[WorkerId, tuple[Cell, str]]) -> None:
        said: dict[Cell, Counter[str]] = defaultdict(Counter)
        for cell, digest in told.values():
            said[cell][digest] += 1
        if all(len(found) == 1 for found in said.values()):
            return
        self.since, self.disputes = version.step, self.disputes + 1
        self.sim.oracle.occasions["replicas differ at a save"] += 1
        for worker, (cell, digest) in told.items():
            if 2 * max(said[cell].values()) > said[cell].total() and said[cell][digest] == 1:
                self._wrong.add(worker)

    def judge_reason(self, before: RunState, reason: str) -> None:
        """Checks whom the run calls wrong."""
        for part in reason.split("; ") if self.some and CALLED in reason else ():
            if CALLED in part:
                who, _, after = part.partition(CALLED)
                named, step = {word.strip(",") for word in who.split()}, int(after.split()[2])
                self.sim.oracle.occasions["a worker is called wrong"] += 1
                for sound in sorted(
                    {each for each in self.sim.cluster.workers if each in named} - self.flipped
                ):
                    replicas = replicas_of(sound, step, before)
                    if 2 * len(replicas & self.flipped) <= len(replicas):
                        raise Violation(f"{sound} is called wrong, and no bit of it flipped")

    def judge_asking(self, version: Version) -> None:
        """Checks an order to write a manifest."""
        self._asked.add(version)
        if self.since is not None and version.step > self.since:
            raise Violation(
                f"the manifest of {version} is asked for, and replicas of an earlier state differed"
            )

    def trusted(self, versions: Iterable[Version]) -> list[Version]:
        """Returns those checkpoints among ``versions`` with which a world may begin."""
        return [each for each in versions if self.since is None or each.step < self.since]

    def judge_plan(self, plan: Plan, counting: set[Version]) -> None:
        """Checks the state and the members with which a world begins."""
        newest = max((version.step for version in self.trusted(counting | self._asked)), default=0)
        if self.since is not None and plan.version.step > newest:
            raise Violation(
                f"generation {plan.generation} begins with {plan.version}, and replicas of the state differed"
            )
        if there := self._wrong.intersection(plan.members):
            raise Violation(f"{min(there)} held other bits than most replicas, and is a member again")
        self.since = None
