"""Computes from the events what must be true, row by row and step by step.  It shares no code with the
machine that it judges.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from elastic.ids import Cell, NodeId, Version
from elastic.plan.layout import Layout
from elastic.plan.placement import cell_of
from elastic.plan.routes import Routes
from elastic.protocol.commit_record import ENDS
from elastic.protocol.events import Fenced
from elastic.protocol.plan import Plan
from elastic.sim.violation import Violation

if TYPE_CHECKING:
    from elastic.sim.oracle import Oracle
    from elastic.sim.simulation import Simulation
    from elastic.sim.worker import Worker

Place = tuple[str, int, int]
HEALS, JOINS, NO_KEEPER = "a member that heals is lost", "a worker joins", "a keeper is lost"
BLOWS = (HEALS, JOINS, NO_KEEPER)
"""The events that a world of every two axes must meet."""


@lru_cache(maxsize=4096)
def covers(cells: frozenset[Cell], rows: tuple[int, ...]) -> bool:
    """Returns whether ``cells`` together hold every row, looked at one by one."""
    places = [places_of(cell) for cell in cells]
    return bool(places) and all(
        any(_holds(place, row, length, number, len(rows)) for place in places)
        for number, length in enumerate(rows)
        for row in range(length)
    )


def _holds(place: Sequence[Place], row: int, length: int, number: int, tensors: int) -> bool:
    """Returns whether a member at ``place`` holds a row of tensor ``number``.  Each stage of a pipeline has
    its tensors; any other axis cuts the rows that the axes after it leave, by torch's chunk rule.
    """
    for axis, index, count in reversed(place):
        size = -(-length // count)
        if index != (number * count // tensors if axis == "pp" else row // size):
            return False
        if axis != "pp":
            row, length = row - index * size, min(size, length - index * size)
    return True


def places_of(cell: Cell) -> list[Place]:
    """Returns (axis, index of the part, number of parts) for each axis that cuts the state."""
    parts = [part.replace("/", " ").split() for part in cell.split(";") if part]
    return [(axis, int(index), int(count)) for axis, index, count in parts]


def parts_of(cell: Cell) -> int:
    """Returns the number of parts into which the world of ``cell`` cuts the state."""
    return math.prod(count for _, _, count in places_of(cell))


@lru_cache(maxsize=4096)
def rows_in(cell: Cell, rows: tuple[int, ...]) -> int:
    """Returns the number of rows that a member in ``cell`` holds, looked at one by one."""
    place = places_of(cell)
    return sum(
        _holds(place, row, length, number, len(rows))
        for number, length in enumerate(rows)
        for row in range(length)
    )


def axes_of(layout: Layout, experts: int) -> tuple[str, ...]:
    """Returns the axes along which a world has several members, and the expert axis if it spreads experts."""
    several = [axis for axis, degree in layout.degrees if degree > 1]
    return tuple(sorted([*several, *(["ep"] if experts > 1 else [])]))


def base_of(plan: Plan, step: int) -> Version:
    """Returns the version to which the world of ``plan`` applies ``step``."""
    return plan.version if step == plan.version.step + 1 else Version(step - 1, plan.generation)


def expanded(lineage: tuple[tuple[int, int], ...]) -> list[int]:
    """Returns the generation of each step of a lineage.  A lineage has (generation, last step) for each
    generation.
    """
    generations: list[int] = []
    for generation, last_step in lineage:
        generations += [generation] * (last_step - len(generations))
    return generations


LOST = ("a coordinator takes over without what was written last", "a superseded coordinator acts on")
"""The occasions on which a coordinator was told things that its follower cannot know."""
LATE_S = 1.0
"""Longest time in seconds from the arrival of the message that ends a world to the decision about it.  A
coordinator's wait counts from the arrival, the oracle's from the decision.
"""


def a_budget_is_spent(seen: Oracle) -> bool:
    """Returns whether the run may fail, by what the oracle saw: coordinators that died, errors of the job,
    generations without progress, a long wait for workers, a refused last save, or replicas or gradients that
    differ again and again.

    A short wait is enough if there are nodes that see another bucket and no world was ordered, or nodes on
    which no world forms, or workers are wrong, and no step was committed.  A coordinator that took over needs it for itself, since it
    knows of no free places at first.
    """
    raised = [worker for _, worker in seen.sim.cluster.errors_raised]
    alone = seen.plan is not None and len(seen.plan.members) == 1
    if seen.startups > 3 or max(seen.stumbles.values(), default=0) >= 3:
        return True
    again = len(raised) > 1 and (alone or len(set(raised)) > 1)
    reached = [
        (max(seen.evidence[generation], default=0), generation not in seen.headless)
        for generation in sorted(seen.plans)
    ]
    waited_s = 0.0 if seen.waiting_since is None else seen.sim.clock.now - seen.waiting_since
    rules, misfits, misset = seen.sim.rules, seen.sim.cluster.misfits, seen.sim.scenario.misset
    enough_s = rules.refused_s if misfits and not seen.begun else rules.wait_s
    if (misset or seen.sim.scenario.liars) and not any(step for step, _ in reached):
        enough_s = min(enough_s, rules.refused_s - LATE_S)
    if seen.sim.clock.now - seen.took_over_at < rules.refused_s - LATE_S:
        enough_s = rules.wait_s
    return (
        seen.refused
        or seen.sim.flips.disputes >= 3
        or seen.sim.liars.disputes >= 3
        or again
        or fruitless_at_the_end(reached) > rules.max_fruitless
        or waited_s >= enough_s
    )


def fruitless_at_the_end(generations: Iterable[tuple[int, bool]]) -> int:
    """Returns how many of the last generations made no progress.

    Each generation has the greatest step that it committed (0 for none), and whether this step is certain.
    """
    fruitless = furthest = 0
    for reached, sure in generations:
        if reached > furthest and sure:
            fruitless = 0
        elif reached in (0, furthest) or not sure:
            fruitless += 1
        furthest = max(furthest, reached)
    return fruitless


# ---- checks at the moment of an event


def check_start(worker: Worker) -> None:
    """Checks that ``worker``, which begins to step, holds no garbage."""
    if worker.held & worker.garbage:
        raise Violation(f"{worker.name} steps on garbage of a collective that was aborted")


def check_answer(worker: Worker, answer: Fenced) -> None:
    """Checks that a fence answer names exactly what ``worker`` holds, at a moment when no update can change
    it.
    """
    if worker.member.applying:
        raise Violation(
            f"{worker.name} answers the fence of generation {answer.generation} in the midst of an update"
        )
    claimed = {(each.version, each.cell) for each in answer.held}
    if claimed != worker.held:
        raise Violation(
            f"{worker.name} answers that it holds {sorted(claimed)}, and holds {sorted(worker.held)}"
        )


def check_plan(worker: Worker, plan: Plan) -> None:
    """Checks that ``worker`` holds what the plan says it holds."""
    for holding in plan.holders:
        slot = (holding.version, holding.cell)
        if holding.worker == worker.name and not holding.keeper and slot not in worker.held:
            raise Violation(
                f"generation {plan.generation}: {worker.name} is said to hold {slot}, and holds "
                f"{sorted(worker.held)}"
            )


def check_manifest(version: Version, cells: frozenset[Cell], rows: tuple[int, ...]) -> None:
    """Checks that the cells of a manifest are a complete state."""
    if not covers(cells, rows):
        raise Violation(f"manifest of {version} with cells {sorted(cells)} only")


def check_layout(layout: Layout, experts: int) -> None:
    """Checks that the experts can be spread over the shards of each replica."""
    degree = dict(layout.degrees)
    shards = degree.get("dp_shard", 1) * degree.get("cp", 1)
    if shards % experts:
        raise Violation(f"a world of {layout}, and experts over {experts} members")


@lru_cache(maxsize=1024)
def check_routes(routes: Callable[..., Routes], layout: Layout, nodes: tuple[NodeId, ...]) -> None:
    """Checks the ways by which the members of a world on ``nodes`` sum gradients and get what was updated.

    Each piece of a gradient comes by one handler to its owner, from all members that compute the same part of
    the model and from nobody else.  What an owner has updated goes only to members that hold the same part of
    the state.  There are no routes yet for members that run one microbatch together and hold the same part of
    the model.
    """
    if dict(layout.degrees).get("cp", 1) > 1:
        return
    world = range(layout.world)
    cells = [cell_of(layout, rank) for rank in world]
    parts = [[place for place in places_of(cell) if place[0] != "dp_shard"] for cell in cells]
    of = [routes(layout, nodes, rank) for rank in world]
    for rank, its in enumerate(of):
        group = {other for other in world if parts[other] == parts[rank]}
        if set(its.group) != group:
            raise Violation(
                f"a gradient of rank {rank} of {layout} goes to ranks {sorted(its.group)}, not to {sorted(group)}"
            )
        pieces = Counter[int]()
        for handler, owners in its.handled.items():
            pieces.update(owners)
            if nodes[handler] != nodes[rank] or of[handler].handled[handler] != owners:
                raise Violation(f"rank {handler} of {layout} does not handle what rank {rank} sends to it")
        if pieces != Counter(group):
            raise Violation(
                f"rank {rank} of {layout} sends its pieces to the owners {sorted(pieces.elements())}"
            )
        if strangers := {other for other in {*its.reached, *its.near} if cells[other] != cells[rank]}:
            raise Violation(
                f"ranks {sorted(strangers)} of {layout} get the part of rank {rank}, and hold another"
            )


def check_last_step(sim: Simulation, step: int, generations: list[int]) -> int:
    """Returns the last step of a finished run, whose state names ``step`` (0: the target step).

    Checks that loops ended the run at ``step``, that no commit ended the run before, and that the step was
    committed.
    """
    ends, occasions = sim.scenario.ends_at or 0, sim.oracle.occasions
    occasions["a loop ends the run"] += bool(step)
    if step not in (0, ends):
        raise Violation(f"finished at step {step}, which no loop made the last one")
    by, unknown = (
        generations[ends - 1] if 0 < ends < len(generations) else 0,
        any(occasions[each] for each in LOST) or sim.scenario.resumes,
    )
    if (
        by
        and not step
        and not unknown
        and sim.worlds[by].outcomes[ends].boundary == ENDS
        and (ends, by) in sim.oracle.told
    ):
        raise Violation(f"step {ends} of generation {by} ends the run, which goes on")
    last = Version(step or sim.rules.target_step, generations[-1])
    if last not in sim.oracle.parent:
        raise Violation(f"finished at {last}, which nobody committed")
    return last.step
