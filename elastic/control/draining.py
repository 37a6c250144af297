"""Draining decides what a notice does: a machine *will* be taken, or *may* be taken.

A node that will be taken gets no new worker, no store and no copies of other nodes from now on.  Its members
step on, since their time is paid, until the last boundary that leaves :data:`HAND_OVERS` times the measured
time of a re-form before the deadline.  There the world pauses, and the next world forms without the node:
nothing is lost.  If the members that stay do not hold the whole state together, each member's copy of that
boundary is complete before it stops, and the next world reads what it lacks from the keepers of the nodes
that leave.  Without such copies the state is saved at that boundary.  Workers that can take the seats of
those that leave are not kept waiting: the world pauses as soon as there are enough of them.

With too little time for all of this, the world does what it can: it pauses at the next boundary, or the
machine is gone before and it is treated as a crash.  Several nodes leave in one pause, unless waiting for the
later one brings more than a second pause costs.

A node that may be taken only gets nothing new.  An advice expires; nobody leaves because of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic.control import copy_inventory, edges, membership
from elastic.control.decision import Decision, names
from elastic.control.evolve import evolve
from elastic.control.run import Announced, Forming, Running, RunState, Stopping
from elastic.control.seating import candidates, newest_source
from elastic.ids import NodeId, WorkerId
from elastic.plan.placement import cell_of
from elastic.plan.transfer import Holding, covered
from elastic.protocol.actions import LetGo, Pause
from elastic.protocol.events import NodeAdvised, NodeDraining, NodeStays
from elastic.protocol.plan import Plan

HAND_OVERS = 2
"""Number of re-forms for which there is still time before the deadline when the members of a node stop."""
BOUNDARIES = 2
"""Number of steps from asking for a pause to its boundary: the step under way, and the one whose commit has
the request.
"""
UNKNOWN_S = 10.0
"""Seconds that a re-form counts as long as the run has not measured one."""
SAME_S = 1.0
"""Seconds by which two deadlines of one notice may differ: a source may count from the time at which it is
asked.
"""
OVERDUE_S = 60.0
"""Seconds after its deadline at which a machine that is still there counts as not taken; a notice that is
older when it is heard is left over from before.
"""
TAKEN = "its node is taken"
"""Reason why a worker on a node that leaves cannot take part any more."""


# ---- what is heard


def noticed(decision: Decision, event: NodeDraining | NodeAdvised) -> None:
    """Notes that the node's machine will or may be taken; a known notice that is repeated changes nothing."""
    run = decision.run
    if event.node not in run.cluster.nodes:
        return decision.refuse(f"node {event.node[:8]} is not part of the run")
    advice = isinstance(event, NodeAdvised)
    at = event.until if isinstance(event, NodeAdvised) else event.deadline
    if at < decision.now - OVERDUE_S:
        return decision.refuse(f"the deadline of {event.source} for node {event.node[:8]} is long over")
    before = run.cluster.notices.get(event.node, ())
    known = next((each for each in before if (each.source, each.advice) == (event.source, advice)), None)
    if known is not None and abs(known.at - at) <= SAME_S:
        return decision.refuse(f"the notice of {event.source} for node {event.node[:8]} is known")
    others = tuple(each for each in before if each.source != event.source)
    decision.open("cluster", "notices")[event.node] = (*others, Announced(event.source, at, advice))
    left_s, words = max(at - decision.now, 0.0), f": {event.text}" if event.text else ""
    if advice:
        decision.say(f"node {event.node[:8]} may be taken ({event.source}{words}); it gets nothing new")
    else:
        decision.say(f"node {event.node[:8]} will be taken in {left_s:.0f} s ({event.source}{words})")
        needs_s = at - leaves_at(decision.run, event.node, 0.0)
        if left_s < needs_s and run.plan is not None and event.node in run.plan.nodes:
            decision.say(
                f"leaving it takes up to {needs_s:.0f} s: the next boundary is tried; if the machine is gone "
                "before, that is a crash"
            )
    if isinstance(run.state, Running):
        copy_inventory.pair(decision, run.state.plan)


def stays(decision: Decision, event: NodeStays) -> None:
    """Forgets a notice that was withdrawn; members that have not left yet stay."""
    before = decision.run.cluster.notices.get(event.node, ())
    after = tuple(each for each in before if each.source != event.source)
    if after == before:
        return decision.refuse(f"{event.source} has announced nothing for node {event.node[:8]}")
    decision.say(f"node {event.node[:8]} is not taken after all ({event.source})")
    _set(decision, event.node, after)
    if isinstance(decision.run.state, Running):
        copy_inventory.pair(decision, decision.run.state.plan)


def gone(decision: Decision, node: NodeId) -> None:
    """Forgets all notices for a node that is gone."""
    if node in decision.run.cluster.notices:
        _set(decision, node, ())


def _set(decision: Decision, node: NodeId, notices: tuple[Announced, ...]) -> None:
    """Replaces the notices of a node.  If none of them takes the node, its workers may take part again."""
    known = decision.open("cluster", "notices")
    known[node] = notices
    if not notices:
        del known[node]
    if any(not each.advice for each in notices):
        return
    cluster = decision.run.cluster
    decision.know(
        "cluster",
        leaving=tuple(each for each in cluster.leaving if each != node),
        let_go=tuple(each for each in cluster.let_go if each != node),
    )
    for worker, known_as in decision.run.workers.items():
        if known_as.node == node and known_as.unfit == TAKEN:
            decision.open("members", "workers")[worker] = evolve(known_as, unfit="")


def joined(decision: Decision, worker: WorkerId) -> None:
    """Ends a worker that has just joined on a node that will be taken: it would leave again at once."""
    node = decision.run.workers[worker].node
    if decision.run.cluster.deadline(node) is not None:
        membership.expel(decision, (worker,), TAKEN)
        decision.say(f"{worker} is ended, since node {node[:8]} will be taken")


# ---- what is done


def go_on(decision: Decision) -> None:
    """Lets nodes leave whose time has come, and tells the keepers of nodes that have left."""
    for node, notices in list(decision.run.cluster.notices.items()):
        over = [each for each in notices if decision.due(each.at + (0.0 if each.advice else OVERDUE_S))]
        if not over:
            continue
        _set(decision, node, tuple(each for each in notices if each not in over))
        for each in over:
            was = "the advice has expired" if each.advice else "its machine was not taken at the deadline"
            decision.say(f"node {node[:8]} may take part again: {was} ({each.source})")
    doomed = [
        node for node in decision.run.cluster.notices if decision.run.cluster.deadline(node) is not None
    ]
    leaving = decision.run.cluster.leaving
    if new := [node for node in _due(decision, doomed) if node not in leaving]:
        _take_out(decision, new)
    _leave(decision)
    _let_go(decision, doomed)


def awaited(run: RunState, now: float) -> bool:
    """Returns whether growth waits for a node that leaves soon: its members leave and newcomers come in one
    pause.
    """
    plan = run.plan
    return plan is not None and any(
        not _brings_a_pause(run, plan, node, now)
        for node in run.cluster.notices
        if node in plan.nodes and run.cluster.deadline(node) is not None
    )


def _due(decision: Decision, doomed: Iterable[NodeId]) -> list[NodeId]:
    """Returns the nodes whose workers are to be in no later world."""
    run, now, plan = decision.run, decision.now, decision.run.plan
    if plan is None or run.enough:
        return [node for node in doomed if now >= leaves_at(run, node, 0.0)]
    inside = [node for node in doomed if node in plan.nodes]
    outside = [node for node in doomed if node not in plan.nodes]
    late = [node for node in inside if now >= leaves_at(run, node, decision.rules.stop_s)]
    soon = [node for node in inside if node in late or not _brings_a_pause(run, plan, node, now)]
    full = inside if len(plan.members) >= decision.rules.max_workers else soon
    if full and _replaced(decision, plan, full):
        return [*outside, *full]
    return [*outside, *(soon if late else ())]


def leaves_at(run: RunState, node: NodeId, stop_s: float) -> float:
    """Returns the time at which the members of a node that will be taken ask for their last boundary.

    If no member stays, the state has to reach the bucket, for which a stop has ``stop_s``.
    """
    deadline, plan = run.cluster.deadline(node), run.plan
    assert deadline is not None
    alone = plan is not None and all(run.cluster.deadline(each) is not None for each in plan.nodes)
    after_s = HAND_OVERS * (run.watch.reform_s or UNKNOWN_S)
    return deadline - max(after_s, stop_s if alone else 0.0) - BOUNDARIES * run.watch.step_s


def _brings_a_pause(run: RunState, plan: Plan, node: NodeId, now: float) -> bool:
    """Returns whether the time that the members of ``node`` have left brings more than a pause of its own
    costs.
    """
    left_s = leaves_at(run, node, 0.0) - now
    return left_s * plan.nodes.count(node) > (run.watch.reform_s or UNKNOWN_S) * len(plan.members)


def _replaced(decision: Decision, plan: Plan, inside: Iterable[NodeId]) -> bool:
    """Returns whether workers are there for the seats of all members that leave."""
    run, those = decision.run, frozenset(inside)
    there = candidates(run, decision.rules)
    new = sum(
        worker not in plan.ranks and run.cluster.deadline(run.workers[worker].node) is None
        for worker in there
    )
    return new >= sum(node in those for node in plan.nodes)


def _take_out(decision: Decision, nodes: list[NodeId]) -> None:
    """Takes the workers of ``nodes`` out: spares at once, members when their world ends."""
    run, plan = decision.run, decision.run.plan
    decision.know("cluster", leaving=(*run.cluster.leaving, *nodes))
    there = [worker for worker, known in run.workers.items() if known.node in nodes]
    members = [worker for worker in there if plan is not None and worker in plan.ranks]
    membership.expel(decision, tuple(worker for worker in there if worker not in members), TAKEN)
    for worker in members:
        membership.unfit(decision, worker, TAKEN)


def _leave(decision: Decision) -> None:
    """Ends the present world if it has members on nodes that leave: at the next boundary, or at once if it
    does not step yet and the next world can have its state without them.
    """
    run, plan = decision.run, decision.run.plan
    if plan is None or run.enough or not run.cluster.leaving:
        return
    members = tuple(
        member for member, node in zip(plan.members, plan.nodes, strict=False) if node in run.cluster.leaving
    )
    if not members:
        return
    cause = f"{names(members)} leave{'s' if len(members) == 1 else ''} before the machine is taken"
    match run.state:
        case Running():
            save, hand_over = _needs(decision, plan)
            how = "; the state is saved" if save else "; their copies are handed over" if hand_over else ""
            edges.pause(decision, f"{cause}{how}", save=save, hand_over=hand_over)
        case Forming():
            stay = tuple(each for each in plan.members if each in run.workers and each not in members)
            if newest_source(run, stay, copy_inventory.listed(run)).version == plan.version:
                edges.stop(decision, cause)
        case Stopping(planned=True, pending=pending, save=save, hand_over=hand_over) if pending:
            more = _needs(decision, plan)
            if (wanted := (save or more[0], hand_over or more[1])) != (save, hand_over):
                decision.amend(save=wanted[0], hand_over=wanted[1])
                decision.do(Pause(plan.generation, plan.members, *wanted))
                decision.say(cause)


def _needs(decision: Decision, plan: Plan) -> tuple[bool, bool]:
    """Returns whether the state must be saved at the boundary, and whether it must be handed over, for the
    next world to have all of it without the workers that leave.
    """
    run = decision.run
    stay = [
        Holding(member, plan.version, cell_of(plan.layout, rank))
        for rank, member in enumerate(plan.members)
        if member in run.workers and not run.workers[member].unfit
    ]
    if len(stay) == 0:
        return True, False
    if covered(stay, run.members.classes):
        return False, False
    return not plan.copy_every, bool(plan.copy_every)


def _let_go(decision: Decision, doomed: Iterable[NodeId]) -> None:
    """Tells the keepers of nodes that have left, once the run needs nothing there: a world steps without
    them, and no save waits for their parts.
    """
    run, state = decision.run, decision.run.state
    if not isinstance(state, Running):
        return
    free = tuple(
        node
        for node in doomed
        if node not in run.cluster.let_go
        and node not in state.plan.nodes
        and not any(save.needs(node) for save in run.saves.pending)
    )
    if free:
        decision.know("cluster", let_go=(*run.cluster.let_go, *free))
        decision.do(LetGo(free))
        decision.say(f"the run needs nothing more on node {', '.join(node[:8] for node in free)}")
