"""Seating decides the members of the next generation, their order, and the state from which they begin.

Replicas lie within nodes if they can, and survivors keep their cells if that allows it: see
``plan/seats.py``.  The state is the newest version on the lineage that is complete in the bucket, or in what
the chosen members and the keepers' copies hold together.  Versions are never mixed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import ceil

from elastic.control import copy_inventory
from elastic.control.evolve import Same
from elastic.control.rules import Rules
from elastic.control.run import Members, RunState, Worker
from elastic.ids import Cell, NodeId, Version, WorkerId
from elastic.plan.layout import Layout, choose
from elastic.plan.placement import cell_of, number_of_cells, padding
from elastic.plan.seats import seat
from elastic.plan.transfer import LIVE, Holding, covered, newest_covered
from elastic.plan.wager import slower
from elastic.protocol.commit_record import Score
from elastic.protocol.plan import Plan
from storage.slices import Tensor

PADDING = 0.05
"""Largest share of the state that may be padding if the coordinator chooses the shard degree; padding costs
memory and traffic for nothing.
"""


@dataclass(frozen=True)
class Source:
    """A version and the place it comes from: see :class:`~elastic.protocol.plan.Plan`."""

    version: Version
    tier: str
    holders: tuple[Holding, ...]


def candidates(run: RunState, rules: Rules) -> tuple[WorkerId, ...]:
    """Returns the workers that can be members; those of the last world come first, in their order."""
    return _candidates(Same(run.members), Same(run.cluster.nodes), rules.reproducible)


@lru_cache(maxsize=8)
def _candidates(known: Same, approved: Same, reproducible: bool) -> tuple[WorkerId, ...]:
    members: Members = known.value
    kind = _kind_of(members) if reproducible else ""
    fit = {worker: None for worker, each in members.workers.items() if _fit(each, kind, approved.value)}
    seated = dict.fromkeys(worker for worker in members.seats if worker in fit)
    return (*seated, *(worker for worker in fit if worker not in seated))


def _kind_of(members: Members) -> str:
    """Returns the kind that all members must have.

    It is the first world's kind.  Before there was a world, it is the most common kind; of equally common
    ones, the one that came first.
    """
    kinds = (
        Counter(worker.kind for worker in members.workers.values() if not worker.unfit)
        if not members.kind
        else Counter[str]()
    )
    return members.kind or max(kinds, key=kinds.__getitem__, default="")


def _fit(worker: Worker, kind: str, approved: Mapping[NodeId, bool]) -> bool:
    return not worker.unfit and kind in ("", worker.kind) and approved.get(worker.node, True)


def staying(run: RunState, rules: Rules, without: Collection[WorkerId] = ()) -> tuple[WorkerId, ...]:
    """Returns the workers that can be members, on machines that will not be taken; none of ``without``.

    While a notice is open every event asks, so the result is cached until something about the workers changes.
    """
    there, doomed = candidates(run, rules), run.cluster.deadlines
    if not doomed and not without:
        return there
    return _staying(Same(run.members), Same(there), Same(doomed), frozenset(without))


@lru_cache(maxsize=8)
def _staying(known: Same, there: Same, doomed: Same, without: frozenset[WorkerId]) -> tuple[WorkerId, ...]:
    workers, taken = known.value.workers, doomed.value
    return tuple(each for each in there.value if each not in without and workers[each].node not in taken)


def needed(run: RunState, rules: Rules) -> tuple[WorkerId, ...]:
    """Returns the candidates for a world that follows another one, without newcomers that bring nothing.

    A step has as many rounds as the busiest member has microbatches, so some newcomers would not shorten it.
    A pause in which newcomers join takes longer, and each member that is lost ends the world, so these stay
    spares.
    """
    return _needed(Same(run.members), Same(candidates(run, rules)), rules)


@lru_cache(maxsize=8)
def _needed(known: Same, given: Same, rules: Rules) -> tuple[WorkerId, ...]:
    members: Members = known.value
    there: tuple[WorkerId, ...] = given.value
    shared = rules.microbatches * rules.layout.group
    stay = len(frozenset(there).intersection(members.seats))
    if not shared or not stay or stay >= min(len(there), rules.max_workers):
        return there
    layout, whole = _layout_of(members, there[:stay], rules), _layout_of(members, there, rules)
    spared = not any(members.workers[worker].holdings for worker in there[stay:])
    if layout is None or whole is None or not spared or slower(layout.world, whole.world, shared) > 0:
        return there
    return there[:stay]


def have_all(run: RunState, plan: Plan, without: Collection[WorkerId]) -> bool:
    """Returns whether the members of ``plan`` that are still there hold the whole state together, also without
    those of ``without``.
    """
    return _have_all(Same(run.members), Same(plan), frozenset(without))


@lru_cache(maxsize=8)
def _have_all(known: Same, given: Same, without: frozenset[WorkerId]) -> bool:
    members: Members = known.value
    plan: Plan = given.value
    held = [
        Holding(member, plan.version, cell_of(plan.layout, rank))
        for rank, member in enumerate(plan.members)
        if member not in without and member in members.workers
    ]
    return covered(held, members.classes)


def layout_of(run: RunState, workers: tuple[WorkerId, ...], rules: Rules) -> Layout | None:
    """Returns the layout of ``workers``, or None if they are too few.

    A world with spares calls this at every event, so the result is cached until something about the workers
    changes.
    """
    return _world_of(Same(run.members), Same(workers), rules)[0]


@lru_cache(maxsize=8)
def _world_of(known: Same, workers: Same, rules: Rules) -> tuple[Layout | None, tuple[WorkerId, ...]]:
    """Returns the layout of ``workers``, and those of them whose devices have room for it.

    A device with little memory needs many shards.  Its worker waits if there are too few workers for so many
    shards, or if the world is as large without it.
    """
    members, there = known.value, workers.value
    best, fitting = _layout_of(members, there, rules), there
    for level in sorted({members.workers[worker].least_shard for worker in there}, reverse=True)[1:]:
        some = tuple(worker for worker in there if members.workers[worker].least_shard <= level)
        layout = _layout_of(members, some, rules)
        if layout is not None and (best is None or layout.world >= best.world):
            best, fitting = layout, some
    return best, fitting


def _layout_of(members: Members, there: tuple[WorkerId, ...], rules: Rules) -> Layout | None:
    if len(there) < rules.min_workers:
        return None
    nodes = Counter(members.workers[worker].node for worker in there)
    fits = cache(lambda shards: padding(members.classes, members.class_bytes, shards) <= PADDING)
    number = min(len(there), rules.max_workers)
    copied = min(_least_copied(members, there, nodes), rules.layout.most_parts(number))
    rule = rules.layout.at_least(max(least_shard(members, there), copied))
    layout = choose(number, rule, tuple(nodes.values()), least=rules.min_workers, fits=fits)
    return layout if layout is not None and layout.world >= rules.min_workers else None


def least_shard(members: Members, workers: Sequence[WorkerId]) -> int:
    """Returns the smallest number of members of a replica at which every worker's part of the state fits its
    device.
    """
    return max((members.workers[worker].least_shard for worker in workers), default=1)


def _may_gather_once(members: Members, seated: Sequence[WorkerId], layout: Layout) -> bool:
    """Returns whether every member's device has room for whole weights to compute with: the weights are then
    gathered once a step, not for each microbatch.
    """
    return layout.shards > 1 and all(
        0 < members.workers[worker].least_whole <= number_of_cells(layout) for worker in seated
    )


def _least_copied(members: Members, workers: Sequence[WorkerId], nodes: Mapping[NodeId, int]) -> int:
    """Returns the smallest number of members of a replica at which every node has room for the copies of its
    workers.
    """
    room = {members.workers[worker].node: members.workers[worker].states for worker in workers}
    return max((ceil(number / room[node]) for node, number in nodes.items() if room[node]), default=1)


def make_plan(run: RunState, rules: Rules) -> Plan | None:
    """Returns the plan of the next generation; None if there are too few workers, or no keeper to host its
    store.
    """
    layout, there = _world_of(Same(run.members), Same(needed(run, rules)), rules)
    if layout is None or not run.cluster.keepers:
        return None
    kept = copy_inventory.listed(run)
    layout, seated = _without_loss(run, rules, layout, there, kept)
    members = _passed_on(run, seated)
    source = newest_source(run, members, kept)
    store = _store_node(run, members)
    nodes = tuple(run.workers[member].node for member in members)
    paired = rules.buddy_every and set(nodes) <= copy_inventory.buddies_of(run, rules, nodes).keys()
    copied, buddied = copy_inventory.complete_before(run, source.version)
    named = {holding.keeper for holding in source.holders} - {LIVE}
    return Plan(
        run.incarnation,
        run.next_generation,
        layout,
        members,
        source.version,
        source.tier,
        source.holders,
        store_node=store,
        nodes=nodes,
        hosts=tuple((keeper, run.copies.hosts[keeper].address) for keeper in sorted(named)),
        copy_every=rules.copy_every,
        buddy_every=rules.buddy_every if paired else 0,
        protected=newest_covered(kept, run.members.classes) or copied,
        buddied=buddied,
        zero=2 if _may_gather_once(run.members, members, layout) else None,
        lineage=copy_inventory.line_of(run, source.version),
        ends=run.enough,
        best=(best := _best(run, source.version) if rules.patience else None),
        worse=sum(each < source.version and run.history.contains(each) for each in run.worse or ())
        if best is not None
        else 0,
    )


def _best(run: RunState, version: Version) -> Score | None:
    """Returns the validation by which patience is measured; None unless it was made up to ``version``, on the
    lineage, and on the present held-out samples.
    """
    best = run.mark or run.history.best
    known = (
        best is not None
        and best.held_out == run.members.reference.held_out
        and run.history.contains(best.version)
    )
    return best if known and best is not None and best.version.step <= version.step else None


def held_by(run: RunState, members: Sequence[WorkerId]) -> list[Holding]:
    """Returns all holdings of ``members`` with whose versions a world may begin."""
    on_line = cache(run.history.may_begin)
    held: list[Holding] = []
    for member in sorted(members):
        alive = [each for each in run.workers[member].holdings if on_line(each.version)]
        held += sorted(set(alive), key=lambda each: (each.version, each.cell)) if len(alive) > 1 else alive
    return held


def newest_source(run: RunState, members: Sequence[WorkerId], kept: Sequence[Holding] = ()) -> Source:
    """Returns the newest version that ``members`` can begin from, with the copies ``kept`` or the bucket, and
    its nearest source.
    """
    held = held_by(run, members)
    live = newest_covered(held, run.members.classes)
    host = newest_covered([*held, *kept], run.members.classes) if kept else live
    stored = next(filter(run.history.may_begin, reversed(run.history.saved)), None)
    version = max((each for each in (live, host, stored) if each is not None), default=None)
    if version is None:
        return Source(Version(0, 0), "init", ())
    tier = "live" if version == live else "host" if version == host else "bucket"
    holders = held if tier == "live" else [*held, *kept]
    return Source(version, tier, tuple(each for each in holders if each.version == version))


def _seated(
    run: RunState, there: tuple[WorkerId, ...], layout: Layout, kept: Sequence[Holding]
) -> tuple[WorkerId, ...]:
    """Returns the members by world rank.  The nodes decide who is left out, unless the newest version is
    incomplete without them: state is moved so that a tensor group lies in one node, but no step is given up
    for that.
    """
    nodes = {worker: run.workers[worker].node for worker in there}
    best = newest_source(run, there, kept)
    members = seat(there, nodes, layout, best.holders)
    if len(members) == len(there):
        return members
    found = newest_source(run, members, kept)
    if (found.version, found.tier) == (best.version, best.tier):
        return members
    return seat(_choose_members(run, there, layout.world, kept), nodes, layout, best.holders)


def _without_loss(
    run: RunState, rules: Rules, layout: Layout, there: tuple[WorkerId, ...], kept: Sequence[Holding]
) -> tuple[Layout, tuple[WorkerId, ...]]:
    """Returns ``layout`` and its members, or the layout with the most shards and its members if only that one
    keeps the newest version.

    A spare gives nobody its state, so ``layout`` loses the newest version if it has fewer seats than that
    version has holders, or shards too large for a holder's device.  The layout with the most shards is taken
    only if it has no fewer members: otherwise growth would end its world at once.
    """
    members, everyone = _seated(run, there, layout, kept), candidates(run, rules)
    newest = newest_source(run, everyone, kept).version
    if newest_source(run, members, kept).version == newest:
        return layout, members
    parts = rules.layout.most_parts(min(len(everyone), rules.max_workers))
    fitting = tuple(worker for worker in everyone if run.workers[worker].least_shard <= parts)
    widest = _layout_of(run.members, fitting, replace(rules, layout=rules.layout.at_least(parts)))
    if widest is None or widest.world < layout.world:
        return layout, members
    seated = _seated(run, fitting, widest, kept)
    return (widest, seated) if newest_source(run, seated, kept).version == newest else (layout, members)


def _passed_on(run: RunState, members: tuple[WorkerId, ...]) -> tuple[WorkerId, ...]:
    """Returns the members.  If one would keep the seat in which the user's code failed, all members of its
    node have moved up by one seat.

    Another worker then runs the microbatch that failed, and its error tells whether the job is at fault.  If
    the node has no other member, all members move.
    """
    failed = {each.worker for each in run.history.failures if each.generation == run.generation}
    before = run.plan.members if run.plan is not None else run.members.seats
    first = next(
        (each for each, at in zip(before, members, strict=False) if each == at and each in failed), None
    )
    if first is None:
        return members
    there = [
        rank for rank, member in enumerate(members) if run.workers[member].node == run.workers[first].node
    ]
    moving = there if len(there) > 1 else range(len(members))
    seats = list(members)
    for rank, after in zip(moving, (*moving[1:], *moving[:1]), strict=True):
        seats[rank] = members[after]
    return tuple(seats)


def _choose_members(
    run: RunState, there: tuple[WorkerId, ...], world: int, kept: Sequence[Holding] = ()
) -> tuple[WorkerId, ...]:
    """Returns ``world`` of the workers in ``there``.

    It leaves out those that hold least, the last ones first, but keeps every worker without which the newest
    version is incomplete.  Copies count if the version needs them, or if nobody can be left out without them.
    """
    members = list(there)
    while len(members) > world:
        held = held_by(run, members)
        newest, both = newest_covered(held, run.members.classes), [*held, *kept]
        if kept and newest != (with_copies := newest_covered(both, run.members.classes)):
            held, newest = both, with_copies
        own: dict[WorkerId, list[Cell]] = {worker: [] for worker in members}
        for each in held:
            if each.version == newest and each.keeper == LIVE:
                own[each.worker].append(each.cell)
        ranked = sorted(reversed(members), key=lambda worker: len(own[worker]))
        surplus, left_out = len(members) - world, set[WorkerId]()
        for sources in (held, both) if kept else (held,):
            copies = Counter(each.cell for each in sources if each.version == newest)
            for worker in () if left_out else ranked:
                if len(left_out) < surplus and (
                    newest is None or _spared(copies, own[worker], newest, run.members.classes)
                ):
                    left_out.add(worker)
                    copies.subtract(own[worker])
        left_out = left_out or {ranked[0]}
        members = [worker for worker in members if worker not in left_out]
    return tuple(members)


def _spared(
    copies: Counter[Cell], own: Sequence[Cell], version: Version, classes: tuple[Tensor, ...]
) -> bool:
    """Returns whether ``version`` stays complete without one worker's cells ``own``; ``copies`` counts the
    holders of each cell.
    """
    if all(copies[cell] > 1 for cell in own):
        return True
    left = [cell for cell in copies if copies[cell] > own.count(cell)]
    return covered([Holding(WorkerId(""), version, cell) for cell in left], classes)


def _store_node(run: RunState, members: tuple[WorkerId, ...]) -> NodeId:
    """Returns the node whose keeper hosts the store: one that will stay, or else only may be taken, and was
    blamed least, and among these a member's node if possible.
    """
    keepers = frozenset(run.cluster.keepers)
    near = dict.fromkeys(node for member in members if (node := run.workers[member].node) in keepers)
    cluster = run.cluster
    return min(
        (*near, *cluster.keepers),
        key=lambda node: (
            cluster.deadline(node) is not None,
            node in cluster.notices,
            cluster.blamed.count(node),
        ),
    )
