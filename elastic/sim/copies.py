"""Judges copies in host memory from outside.  Six rules must hold:

* A version that was complete everywhere stays until another version is complete everywhere.
* The answer of a keeper is true at the time when it is given.
* A world begins from the newest version that is held anywhere, unless the answer of a keeper that holds it
  came too late.
* No copy that is still needed is freed.
* A slot has room for the copy that is made in it, and the copy is of its worker's cell.
* A node gets no more of the state than it has room for, unless all members share one state, or the world has
  as few replicas as the layout rule asks for, or the rule fixes the number of shards.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from elastic.ids import Cell, NodeId, Version
from elastic.plan.placement import cell_of, largest_cells
from elastic.plan.transfer import Holding
from elastic.protocol.actions import Action, Form, ListCopies, Release
from elastic.protocol.copy_schedule import Copy
from elastic.protocol.events import Event, KeeperLost, Kept, Recovered
from elastic.protocol.plan import Plan
from elastic.sim.memory import Memory, Slot, held_at, whole
from elastic.sim.truth import covers, rows_in
from elastic.sim.violation import Violation

if TYPE_CHECKING:
    from elastic.control.run import RunState
    from elastic.sim.simulation import Simulation
    from elastic.sim.worker import Worker


class CopiesOracle:
    """Judges every copy, and every answer of a keeper.

    ``asked`` has the time at which keepers were asked for their copies, by the generation asked about.
    ``heard`` has their answers as the coordinator heard them.
    """

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.asked: dict[int, float] = {}
        self.heard: dict[int, dict[NodeId, tuple[Holding, ...]]] = defaultdict(dict)

    # -- workers and keepers --------------------------------------------------------------------------------

    def begun(self, worker: Worker, copy: Copy, plan: Plan) -> None:
        """Judges the beginning of a copy of ``worker`` in the world of ``plan``, which has slots of the size of
        its largest cells.
        """
        rows, cell = self.sim.scenario.rows, cell_of(plan.layout, plan.world_rank(worker.name))
        if copy.cell != cell:
            raise Violation(f"{worker.name} holds {cell!r} and copies {copy.cell!r}")
        room, needed = (
            max(rows_in(cell, rows) for cell in largest_cells(plan.layout)),
            rows_in(copy.cell, rows),
        )
        if needed > room:
            raise Violation(
                f"a copy of {copy.cell!r} has {needed} rows, and the slots of {worker.name} have room for {room}"
            )

    def overwritten(self, worker: Worker, old: Slot) -> None:
        """Judges the beginning of a copy of ``worker`` that takes the place of ``old``."""
        world = worker.world
        assert world is not None
        known = next(
            (each for _, each in sorted(world.outcomes.items(), reverse=True) if each.copied_through >= 0),
            None,
        )
        if known is None:
            if (
                old.complete
                and old.copy.version == world.plan.protected
                and not self._elsewhere(worker.memory, world.plan.protected)
            ):
                raise Violation(
                    f"{worker.name} overwrites {old.copy.version}, which generation {world.plan.generation} "
                    "was to protect"
                )
            return
        for name in world.plan.members:
            member = self.sim.cluster.workers[name]
            copies = member.memory.copies
            # if so, ``worker`` thawed in a world that is over
            moved_on = copies is not None and copies.plan.generation > world.plan.generation
            if member.alive and not moved_on and not self._has(member, world.plan, known.copied_through):
                raise Violation(
                    f"step {known.copied_through} was copied everywhere, and {name} has no complete copy "
                    "any more"
                )

    def _elsewhere(self, memory: Memory, version: Version | None) -> bool:
        return any(
            slot is not None and slot.complete and slot.copy.version == version for slot in memory.slots
        )

    def _has(self, member: Worker, plan: Plan, step: int) -> bool:
        version = plan.version if step == plan.version.step else Version(step, plan.generation)
        return self._elsewhere(member.memory, version)

    def answers(self, node: NodeId, held: tuple[Holding, ...]) -> None:
        """Judges a keeper's answer, which lists its complete copies."""
        shelf = self.sim.cluster.nodes[node].shelf
        for each in held:
            worker = self.sim.cluster.workers[each.worker]
            slots = [
                *worker.memory.slots,
                *shelf.left.get(each.worker, ()),
                *shelf.guests.get(each.worker, ()),
            ]
            headers = [slot.copy for slot in slots if slot is not None and slot.complete]
            if (each.version, each.cell) not in headers:
                raise Violation(
                    f"the keeper of {node} says to hold {each}, and there is no such copy, or it is torn"
                )

    # -- the coordinator --------------------------------------------------------------------

    def note(self, before: RunState, event: Event, refused: bool) -> None:
        match event:
            case Recovered():
                self.forget()  # the journal's answers remain
                self.heard[before.copies.asked] = {
                    node: host.kept for node, host in before.copies.hosts.items() if host.kept
                }
            case KeeperLost():
                for said in self.heard.values():
                    said.pop(event.node, None)
            case Kept() if not refused:
                self.heard[event.generation][event.node] = event.held

    def forget(self) -> None:
        """Forgets the answers to a coordinator that is gone."""
        self.asked.clear()
        self.heard.clear()

    def judge(self, before: RunState, action: Action) -> None:
        match action:
            case ListCopies() if action.generation not in self.asked or set(action.keepers) >= set(
                before.cluster.keepers
            ):
                self.asked[action.generation] = self.sim.coordinators.acting.counts_from
            case Release():
                self._judge_release(before, action)
            case Form():
                self._judge_room(action.plan)

    def _judge_room(self, plan: Plan) -> None:
        """Checks that nodes have room for their parts of the state under ``plan``.  With fewer replicas the
        parts are smaller.
        """
        parts, rule = plan.layout.world // plan.layout.replicas, self.sim.rules.layout
        there = [
            (node, count, room)
            for node, count in Counter(plan.nodes).items()
            if (room := self.sim.scenario.room_of(node))
        ]
        self.sim.oracle.occasions["members of a node must share a state"] += any(
            count > room for _, count, room in there
        )
        crowded = [node for node, count, room in there if count / parts > room]
        if crowded and plan.layout.replicas > (rule.replicas or 1) and rule.shards is None:
            raise Violation(
                f"{crowded[0]} gets more of the state than it has room for, and {plan.layout} is not the "
                "most that can share it"
            )

    def _judge_release(self, before: RunState, release: Release) -> None:
        plan = before.plan
        assert plan is not None
        for version in (release.copied, release.buddied):
            if version.generation != plan.generation:
                raise Violation(
                    f"copies older than {version} are freed, but it is not of generation {plan.generation}"
                )
        members = [member for name in plan.members if (member := self.sim.cluster.workers[name]).alive]
        own = [
            {copy.version for copy in whole(member.memory.slots) if copy is not None} for member in members
        ]
        newest = max(set.intersection(*own), default=Version(0, 0)) if own else release.copied
        if newest < release.copied:
            raise Violation(
                f"copies older than {release.copied} are freed, and the newest that is complete everywhere "
                f"is {newest}"
            )
        for member in members if plan.buddy_every else ():
            if member.memory.buddied is None or member.memory.buddied.version < release.buddied:
                raise Violation(
                    f"copies older than {release.buddied} are freed, and no buddy has it of {member.name}"
                )

    def reported(self, generation: int) -> int:
        """Returns the newest step of ``generation`` that a reported copy proves to be committed; 0 without
        any.
        """
        held = [holding for kept in self.heard[generation].values() for holding in kept]
        return max((each.version.step for each in held if each.version.generation == generation), default=0)

    def known(self, before: RunState, keepers: tuple[NodeId, ...]) -> set[tuple[Version, Cell]]:
        """Returns the copies that ``keepers`` hold and have reported in time.

        For a keeper that still has time to answer, these are all copies that it holds.
        """
        cluster, generation, held = self.sim.cluster, before.generation, set[tuple[Version, Cell]]()
        if not self.sim.rules.copy_every or not before.members.seats:
            return held
        in_time = (
            self.sim.coordinators.acting.now
            < self.asked.get(generation, float("inf")) + self.sim.rules.fence_s
        )
        for node in keepers:
            truth, said = held_at(cluster, node), self.heard[generation].get(node)
            self.sim.oracle.occasions["a keeper's answer does not come in time"] += (
                said is None and not in_time
            )
            if said is not None:
                truth = tuple(each for each in truth if each in said)
            elif not in_time:
                continue
            held |= {(each.version, each.cell) for each in truth}
        return held

    def judge_plan(self, before: RunState, after: RunState, plan: Plan) -> None:
        """Judges the copies of a plan.

        All are of the plan's version.  Each of their keepers is there, has said that it holds the copy, and
        is named with its address.  The newest version that keepers hold completely is protected.
        """
        if mixed := {each.version for each in plan.holders} - {plan.version}:
            raise Violation(
                f"generation {plan.generation} starts from {plan.version}, and its holders hold "
                f"{sorted(mixed)}"
            )
        kept = [each for each in plan.holders if each.keeper]
        if kept and plan.tier in ("init", "live"):
            raise Violation(f"tier {plan.tier}, and {kept[0]} is a copy")
        if lost := {each.keeper for each in kept} - set(after.cluster.keepers):
            raise Violation(
                f"generation {plan.generation} takes copies from {sorted(lost)}, and no such keeper is there"
            )
        if wrong := [each for each in kept if each not in self.heard[before.generation].get(each.keeper, ())]:
            raise Violation(f"generation {plan.generation}: nobody has said {wrong[0]}")
        cells: dict[Version, set[Cell]] = defaultdict(set)
        for node, said in self.heard[before.generation].items():
            for each in (
                set(said) & set(held_at(self.sim.cluster, node)) if node in after.cluster.keepers else ()
            ):
                cells[each.version].add(each.cell)
        whole_there = [
            v
            for v, found in cells.items()
            if v <= plan.version and covers(frozenset(found), self.sim.scenario.rows)
        ]
        newest = max(
            (version for version in whole_there if self.sim.oracle.on_lineage(version)), default=None
        )
        if newest is not None and (plan.protected is None or plan.protected < newest):
            raise Violation(
                f"generation {plan.generation} protects {plan.protected}, and keepers have all of {newest}"
            )
        addresses = {
            node: self.sim.cluster.introduction(node).address for node in {each.keeper for each in kept}
        }
        if addresses != dict(plan.hosts):
            raise Violation(
                f"generation {plan.generation} takes copies from {addresses}, and is told of {plan.hosts}"
            )
        if plan.tier == "host":
            homes = {name: worker.node for name, worker in self.sim.cluster.workers.items()}
            self.sim.oracle.occasions["a copy at a buddy is used"] += any(
                each.keeper != homes[each.worker] for each in kept
            )
            self.sim.oracle.occasions["a world starts from copies alone"] += len(kept) == len(plan.holders)
