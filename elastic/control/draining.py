"""Draining decides what a notice does: a machine *will* be taken, or *may* be taken.

A node that will be taken gets no new worker, no store and no copies of other nodes from now on.  Its members
step on, since their time is paid, until the last boundary that leaves :data:`HAND_OVERS` times the measured
time of a hand-over and a re-form before the deadline; a validation that is due before a boundary counts with
its measured time.  There the world pauses, and the next world forms without the node: nothing is lost.  If the members
that stay do not hold the whole state together, each member's copy of that boundary is complete before it
stops, and the next world reads what it lacks from the keepers of the nodes that leave.  Without such copies
the state is saved at that boundary.  Newcomers with which a world without these nodes has shorter steps are
not kept waiting: the world pauses at once, and they come as the others leave.

With too little time for all of this, the world does what it can: it pauses at the next boundary, or the
machine is gone before and it is treated as a crash.  Several nodes leave in one pause, unless waiting for the
later one brings more than a second pause costs.

A node that may be taken only gets nothing new, and where another node has room, a spare is started for each of
its workers: if a notice follows, the spare has joined before the world pauses.  An advice expires, and with it
the spare that it brought; no member leaves because of it.

A straggler that is evicted (``evicting.py``) leaves in the same way, once the next world has connected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from math import inf

from elastic.control import ahead, copy_inventory, edges, evicting, membership
from elastic.control.decision import Decision, names
from elastic.control.evolve import Same
from elastic.control.liveness import Watch
from elastic.control.run import Announced, Forming, Running, RunState, Stopping
from elastic.control.seating import candidates, have_all, layout_of, newest_source, staying
from elastic.ids import NodeId, WorkerId
from elastic.plan.transfer import LIVE, covered
from elastic.plan.wager import slower
from elastic.protocol.actions import LetGo, Pause
from elastic.protocol.events import NodeAdvised, NodeDraining, NodeStays
from elastic.protocol.plan import Plan

HAND_OVERS = 2
"""Number of hand-overs and re-forms for which there is still time before the deadline when the members of a node stop."""
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
    run, node, source = decision.run, event.node, event.source
    if node not in run.cluster.nodes:
        return decision.refuse(f"node {node[:8]} is not part of the run")
    advice = isinstance(event, NodeAdvised)
    at = event.until if isinstance(event, NodeAdvised) else event.deadline
    if at < decision.now - OVERDUE_S:
        return decision.refuse(f"the deadline of {source} for node {node[:8]} is long over")
    before = run.cluster.notices.get(node, ())
    known = next((each for each in before if (each.source, each.advice) == (source, advice)), None)
    if known is not None and abs(known.at - at) <= SAME_S:
        return decision.refuse(f"the notice of {source} for node {node[:8]} is known")
    left_s, words = max(at - decision.now, 0.0), f": {event.text}" if event.text else ""
    if advice:
        decision.say(f"node {node[:8]} may be taken ({source}{words}); it gets nothing new")
    else:
        decision.say(f"node {node[:8]} will be taken in {left_s:.0f} s ({source}{words})")
    decision.know("cluster", slots=0)  # perhaps they were there; the next ``Capacity`` tells
    others = tuple(each for each in before if each.source != source)
    _set(decision, node, (*others, Announced(source, at, advice)))
    if not advice and run.plan is not None and node in run.plan.nodes:
        needs_s = at - _leaves_at(decision, node)
        if left_s < needs_s:
            decision.say(
                f"leaving it takes up to {needs_s:.0f} s: the next boundary is tried; if the machine is gone "
                "before, that is a crash"
            )


def stays(decision: Decision, event: NodeStays) -> None:
    """Forgets a notice that was withdrawn; members that have not left yet stay."""
    before = decision.run.cluster.notices.get(event.node, ())
    after = tuple(each for each in before if each.source != event.source)
    if after == before:
        return decision.refuse(f"{event.source} has announced nothing for node {event.node[:8]}")
    decision.say(f"node {event.node[:8]} is not taken after all ({event.source})")
    _set(decision, event.node, after)


def gone(decision: Decision, node: NodeId) -> None:
    """Forgets all notices for a node that is gone."""
    if node in decision.run.cluster.notices:
        _set(decision, node, ())


def _set(decision: Decision, node: NodeId, notices: tuple[Announced, ...]) -> None:
    """Replaces the notices of a node.  If it stays longer than was known, it need not leave yet."""
    before = decision.run.cluster.deadline(node)
    known = decision.open("cluster", "notices")
    known[node] = notices
    if not notices:
        del known[node]
    cluster = decision.run.cluster
    after = cluster.deadline(node)
    if before is not None and (after is None or after > before + SAME_S):
        decision.know(
            "cluster",
            leaving=tuple(each for each in cluster.leaving if each != node),
            let_go=tuple(each for each in cluster.let_go if each != node),
        )


def joined(decision: Decision, worker: WorkerId) -> None:
    """Ends a worker that has just joined on a node that will be taken: it would leave again at once."""
    node = decision.run.workers[worker].node
    if decision.run.cluster.deadline(node) is not None:
        membership.expel(decision, (worker,), TAKEN)
        decision.say(f"{worker} is ended, since node {node[:8]} will be taken")


# ---- what is done


def go_on(decision: Decision) -> None:
    """Lets nodes leave whose time has come, and tells the keepers of nodes that have left."""
    run, plan = decision.run, decision.run.plan
    doomed, leaving = run.cluster.deadlines, frozenset(run.cluster.leaving)
    seats = Counter(plan.nodes) if plan is not None and doomed else Counter[NodeId]()
    waiting = [node for node in doomed if node not in leaving]
    if due := _due(decision, waiting, seats):
        decision.know("cluster", leaving=(*run.cluster.leaving, *due))
    if run.cluster.leaving or due:
        _end_outsiders(decision, plan.ranks if plan is not None else ())
    if decision.run.cluster.leaving or run.stragglers.leaving:
        _leave(decision)
    inside = any(node in seats for node in waiting)
    if isinstance(decision.run.state, Running) and inside and not run.enough:
        ahead.begin(decision)
    _let_go(decision, [node for node in doomed if node not in seats])


def forget_what_is_over(decision: Decision) -> None:
    """Forgets advice that has expired, and notices of machines that were not taken."""
    for node, notices in list(decision.run.cluster.notices.items()):
        over = [each for each in notices if decision.due(each.at + (0.0 if each.advice else OVERDUE_S))]
        if not over:
            continue
        _set(decision, node, tuple(each for each in notices if each not in over))
        for each in over:
            was = "the advice has expired" if each.advice else "its machine was not taken at the deadline"
            decision.say(f"node {node[:8]} may take part again: {was} ({each.source})")


def awaited(decision: Decision) -> bool:
    """Returns whether growth waits for a node that leaves soon: its members leave and newcomers come in one
    pause.
    """
    run, plan = decision.run, decision.run.plan
    if plan is None or not run.cluster.notices:
        return False
    seats = Counter(plan.nodes)
    return any(
        not _brings_a_pause(decision, plan, node, seats[node])
        for node in run.cluster.deadlines
        if node in seats
    )


def let_leave(decision: Decision, survivors: Sequence[WorkerId]) -> None:
    """Ends those of ``survivors``, members of the world that has just ended, that leave and that nobody needs.

    Members on nodes that leave and are needed stay: the next world lets them leave again, with what it needs of
    them.  A slow member that is needed stays a straggler.
    """
    slow = decision.run.stragglers.leaving
    # others may have been lost since it was to leave
    going = () if slow and not evicting.forms_without(decision, slow) else _may_go(decision, survivors)
    if slow:
        decision.know("stragglers", leaving=())
        going = going or _may_go(decision, survivors)
    workers, leaving = decision.run.workers, frozenset(decision.run.cluster.leaving)
    evicted = tuple(each for each in going if workers[each].node not in leaving)
    taken = tuple(each for each in going if workers[each].node in leaving)
    membership.expel(decision, evicted, evicting.SLOW)
    membership.expel(decision, taken, TAKEN)


def _may_go(decision: Decision, survivors: Sequence[WorkerId]) -> tuple[WorkerId, ...]:
    """Returns those of ``survivors`` that leave and without which a world can form and has the newest version,
    too.
    """
    run = decision.run
    going = _leavers(run, {each: run.workers[each].node for each in survivors})
    if not going:
        return ()
    everyone, gone = [each for each, known in run.workers.items() if not known.unfit], frozenset(going)
    rest, kept = [each for each in everyone if each not in gone], copy_inventory.listed(run)
    newest = newest_source(run, everyone, kept).version
    if newest_source(run, rest).version == newest:
        return going
    # copies in a machine that is taken help only a world that forms at once
    stay = tuple(each for each in candidates(run, decision.rules) if each not in gone)
    forms = layout_of(run, stay, decision.rules) is not None
    return going if forms and newest_source(run, rest, kept).version == newest else ()


def awaits_copies(decision: Decision, state: Stopping) -> bool:
    """Returns whether a boundary was handed over and the keepers have not listed its copies yet: they show
    whether the members that leave can go.
    """
    leave = decision.run.cluster.leaving or decision.run.stragglers.leaving
    handed_over = state.planned and state.hand_over and bool(leave)
    return handed_over and bool(copy_inventory.unheard(decision))


def _due(decision: Decision, doomed: Sequence[NodeId], seats: Mapping[NodeId, int]) -> list[NodeId]:
    """Returns the nodes of ``doomed`` whose workers are to be in no later world."""
    run, now, plan = decision.run, decision.now, decision.run.plan
    if plan is None or run.enough or not doomed:
        return [node for node in doomed if now >= _leaves_at(decision, node)]
    deadlines = run.cluster.deadlines
    inside = {node: deadlines[node] for node in doomed if node in seats}
    outside = [node for node in doomed if node not in seats]
    if not inside:
        return outside
    # a stop has ``stop_s`` for a save
    going = frozenset(
        member for member, node in zip(plan.members, plan.nodes, strict=False) if node in inside
    )
    save_s = decision.rules.stop_s if _needs(decision, plan, going)[0] else 0.0
    # several hundred nodes may be announced, and each event looks for the one that is to leave next
    by_deadline = sorted(inside, key=inside.__getitem__)
    late = set(takewhile(lambda node: now >= _leaves_at(decision, node, save_s), by_deadline))
    more = len(run.workers) > len(plan.members)
    if not late and not more:
        return outside
    soon = [node for node in inside if node in late or not _brings_a_pause(decision, plan, node, seats[node])]
    full = [*inside] if len(plan.members) >= decision.rules.max_workers else soon
    if full and more and _faster(decision, plan, full, seats):
        return [*outside, *full]
    return [*outside, *(soon if late else ())]


def _leaves_at(decision: Decision, node: NodeId, save_s: float = 0.0) -> float:
    """Returns the time at which the members of a node that will be taken ask for their last boundary.  After
    it the state has ``save_s`` to reach the bucket.
    """
    run = decision.run
    deadline = run.cluster.deadline(node)
    assert deadline is not None
    after_s = max(HAND_OVERS * (_pause_s(decision) + run.watch.hand_over_s), save_s)
    return asked_at(run.watch, run.step, decision.rules.validates_every, deadline - after_s, decision.now)


def asked_at(watch: Watch, step: int, every: int, until: float, now: float) -> float:
    """Returns the time at which to ask for a pause whose boundary is the last commit before ``until``, by the
    measured times of a step and of the validation after every ``every`` steps.

    ``step`` is the newest commit.  A pause that is asked for in one step has the commit of that step or of the
    next one as its boundary.  If the second commit from now is too late, the time returned is over.
    """
    step_s, validate_s = watch.step_s, watch.validate_s if every else 0.0
    if not step_s:
        return until

    def took_s(after: int) -> float:
        """Returns the seconds from the commit of the step ``after`` to the next commit."""
        return step_s + (validate_s if every and after and after % every == 0 else 0.0)

    last, at = step + BOUNDARIES, max(watch.stepped_at + took_s(step), now) + took_s(step + 1)
    if at > until:
        return now - (at - until)
    ahead = -last % every if validate_s else inf  # steps before the next validation
    if until - at < ahead * step_s:
        more = int((until - at) / step_s)
        unused_s = until - at - more * step_s
    else:
        rounds, unused_s = divmod(until - at - ahead * step_s, every * step_s + validate_s)
        more = int(ahead + rounds * every)
        if steps := max(int((unused_s - validate_s) / step_s), 0):
            more, unused_s = more + steps, unused_s - validate_s - steps * step_s
    last += more
    begins = until - unused_s - took_s(last - 1) - took_s(last - 2)
    # before a validation that does not fit any more, half a step is time enough for the request
    return begins + (unused_s if unused_s <= step_s else step_s / 2)


def _pause_s(decision: Decision) -> float:
    """Returns the time of the pause in which members leave: that of a world with newcomers, if some will join."""
    run, rules, plan = decision.run, decision.rules, decision.run.plan
    watch = run.watch
    if plan is None or len(run.workers) <= len(plan.members) or watch.join_s <= watch.reform_s:
        return watch.reform_s or UNKNOWN_S
    there, shared = staying(run, rules), rules.microbatches * rules.layout.group
    stay, after = _members_among(Same(there), Same(plan)), min(len(there), rules.max_workers)
    joins = stay < after and (not stay or slower(stay, after, shared) > 0)
    return watch.join_s if joins else watch.reform_s or UNKNOWN_S


@lru_cache(maxsize=8)
def _members_among(there: Same, given: Same) -> int:
    """Returns the number of members of a plan among workers.  Each announced node asks, at each event."""
    return sum(worker in given.value.ranks for worker in there.value)


def _brings_a_pause(decision: Decision, plan: Plan, node: NodeId, members: int) -> bool:
    """Returns whether the time that the ``members`` of ``node`` have left brings more than a pause of its own
    costs.
    """
    left_s = _leaves_at(decision, node) - decision.now
    return left_s * members > (decision.run.watch.reform_s or UNKNOWN_S) * len(plan.members)


def _faster(decision: Decision, plan: Plan, nodes: Collection[NodeId], seats: Mapping[NodeId, int]) -> bool:
    """Returns whether a world without ``nodes``, but with all newcomers, has shorter steps than the present one."""
    run, rules = decision.run, decision.rules
    there = staying(run, rules)
    new = len(there) - _members_among(Same(there), Same(plan))
    after = min(len(plan.members) - sum(seats[node] for node in nodes) + new, rules.max_workers)
    return after > 0 and slower(len(plan.members), after, rules.microbatches * rules.layout.group) > 0


def _end_outsiders(decision: Decision, members: Collection[WorkerId]) -> None:
    """Ends workers on nodes that leave if they are no ``members`` and hold no state: the next world would seat them,
    and stop again.
    """
    leaving = frozenset(decision.run.cluster.leaving)
    outside = tuple(
        worker
        for worker, known in decision.run.workers.items()
        if known.node in leaving and worker not in members and not known.holdings
    )
    membership.expel(decision, outside, TAKEN)


def _leave(decision: Decision) -> None:
    """Ends the present world if it has members that leave: at the next boundary, or at once if it does not step
    yet and the next world can form, and can have its state, without them.  A stop that was asked for does both.
    Slow members step on until the next world has connected.
    """
    run, plan = decision.run, decision.run.plan
    if plan is None or run.enough or run.stop:
        return
    where = dict(zip(plan.members, plan.nodes, strict=False))
    members = _leavers(run, where)
    if not members:
        return
    leaving = frozenset(run.cluster.leaving)
    taken = tuple(each for each in members if where[each] in leaving)
    slow = tuple(each for each in members if each not in taken)
    causes = ((taken, "before the machine is taken"), (slow, f"because {evicting.SLOW}"))
    cause = " and ".join(
        f"{names(who)} leave{'s' if len(who) == 1 else ''} {why}" for who, why in causes if who
    )
    match run.state:
        case Running() if not taken and ahead.is_awaited(decision):
            return
        case Running():
            save, hand_over = _needs(decision, plan, members)
            how = "; the state is saved" if save else "; their copies are handed over" if hand_over else ""
            edges.pause(decision, f"{cause}{how}", save=save, hand_over=hand_over)
        case Forming():
            rest = [each for each in plan.holders if each.keeper != LIVE or each.worker not in members]
            has_all = plan.tier in ("init", "bucket") or covered(rest, run.members.classes)
            # or else the next world would have the same members, and stop again
            if has_all and evicting.forms_without(decision, members):
                edges.stop(decision, cause, noticed=True)
        case Stopping(planned=True, pending=pending, save=save, hand_over=hand_over) if pending:
            more = _needs(decision, plan, members)
            if (wanted := (save or more[0], hand_over or more[1])) != (save, hand_over):
                decision.amend(save=wanted[0], hand_over=wanted[1])
                decision.do(Pause(plan.generation, plan.members, *wanted))
                decision.say(cause)


def _leavers(run: RunState, where: Mapping[WorkerId, NodeId]) -> tuple[WorkerId, ...]:
    """Returns those workers of ``where``, which has the node of each, that are to be in no later world."""
    nodes, slow = frozenset(run.cluster.leaving), frozenset(run.stragglers.leaving)
    return tuple(worker for worker, node in where.items() if node in nodes or worker in slow)


def _needs(decision: Decision, plan: Plan, going: Collection[WorkerId]) -> tuple[bool, bool]:
    """Returns whether the state must be saved at the boundary, and whether it must be handed over, for the
    next world to have all of it without the members ``going``.

    A copy in a machine that is taken helps only a world that forms at once, and only if copies are made.
    """
    run = decision.run
    if have_all(run, plan, going):
        return False, False
    copied = plan.copy_every and not copy_inventory.overdue(run)
    stay = any(member not in going and member in run.workers for member in plan.members)
    forms = stay and evicting.forms_without(decision, going)
    return (False, True) if copied and forms else (True, False)


def _let_go(decision: Decision, outside: Iterable[NodeId]) -> None:
    """Tells the keepers of nodes that have left, once the run needs nothing there: a world steps without
    them, its copies are complete elsewhere, and no save waits for their parts.
    """
    run, state = decision.run, decision.run.state
    if not isinstance(state, Running) or (state.plan.copy_every and not copy_inventory.is_safe(run)):
        return
    let_go = frozenset(run.cluster.let_go)
    if not (free := tuple(node for node in outside if node not in let_go)):
        return
    needed = frozenset[NodeId]().union(*(save.needed for save in run.saves.pending))
    if free := tuple(node for node in free if node not in needed):
        decision.know("cluster", let_go=(*run.cluster.let_go, *free))
        decision.do(LetGo(free))
        decision.say(f"the run needs nothing more on node {', '.join(node[:8] for node in free)}")
