"""The next world connects beside the steps of the present one, so its pause has no rendezvous.

Making and connecting the groups of a world takes longer the more members it has, and needs none of their
state.  So as soon as it is known which workers the next world will have, because newcomers are welcome, a slow
worker leaves or a machine will be taken, all of them are asked to connect that world ahead.  Growth and an
eviction pause the present world once they have, or once it is certain that they will not; a machine that will
be taken never waits for them.  If the next world has exactly these members in these seats, it takes their groups.
Otherwise it connects in its pause, as a world after a fault does.  Nothing is computed or applied in groups ahead,
so they need no fence.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.control.decision import Decision
from elastic.control.evolve import evolve
from elastic.control.run import Running, RunState, State, Stopping
from elastic.control.seating import make_plan, staying
from elastic.ids import WorkerId
from elastic.plan.placement import cell_of
from elastic.plan.transfer import Holding
from elastic.protocol.actions import ConnectAhead
from elastic.protocol.events import ConnectedAhead
from elastic.protocol.plan import Plan

ATTEMPTS = 8
"""Number of worlds that one world connects ahead: each costs its members memory of their devices for a time,
and newcomers may come one after the other.
"""


def begin(decision: Decision) -> None:
    """Asks the members of the next world to connect it, unless they were asked."""
    run, state = decision.run, decision.run.state
    assert isinstance(state, Running)
    there = _expected(decision)
    known = state.expected == there and (state.ahead is None or state.ahead.incarnation == run.incarnation)
    if known or state.attempts >= ATTEMPTS:
        return
    plan = _supposed(decision, state.plan, there)
    if plan is not None and (plan.layout, plan.members) == (state.plan.layout, state.plan.members):
        plan = None
    attempt = state.attempts + (plan is not None)
    ahead = replace(plan, ahead=attempt, holders=(), hosts=(), lineage=()) if plan is not None else None
    decision.amend(
        ahead=ahead,
        expected=there,
        attempts=attempt,
        connected={},
        connect_until=decision.now + decision.rules.form_s,
    )
    if ahead is not None:
        decision.do(ConnectAhead(ahead))


def is_awaited(decision: Decision) -> bool:
    """Returns whether a pause for newcomers, or for a slow worker, waits because the next world still connects
    ahead.
    """
    begin(decision)
    state = decision.run.state
    assert isinstance(state, Running)
    if state.ahead is None or state.expected != _expected(decision):
        return False
    return len(state.connected) < len(state.ahead.members) and not decision.due(state.connect_until)


def connected(decision: Decision, event: ConnectedAhead) -> None:
    state = decision.run.state
    ahead = state.ahead if isinstance(state, Running) else None
    told = (event.incarnation, event.generation, event.attempt)
    asked = ahead is not None and (ahead.incarnation, ahead.generation, ahead.ahead) == told
    if ahead is None or not asked or event.worker not in ahead.ranks:
        return decision.refuse(f"nobody waits for what {event.worker} has connected ahead")
    if event.why:
        decision.amend(ahead=None)
        return decision.say(f"{event.worker} connects no world ahead, so its pause is longer: {event.why}")
    decision.open("state", "connected")[event.worker] = True


def met(run: RunState, state: Running) -> Plan | None:
    """Returns the plan of the world that all its members have connected ahead; None without one."""
    ahead = state.ahead
    if ahead is None or len(state.connected) < len(ahead.members) or ahead.incarnation != run.incarnation:
        return None
    return ahead


def taken_up(state: State, plan: Plan, run: RunState) -> Plan:
    """Returns the plan of the next world; with the groups that its members have connected ahead, if they are
    those of just this world, and no member may have lost them since.
    """
    ahead = state.ahead if isinstance(state, Stopping) and state.planned else None
    if ahead is None or ahead.store_node not in run.cluster.keepers:
        return plan
    if ahead.store_node in run.cluster.notices and plan.store_node not in run.cluster.notices:
        return plan
    same = all(
        getattr(ahead, each) == getattr(plan, each)
        for each in ("incarnation", "generation", "layout", "members", "nodes")
    )
    return replace(plan, ahead=ahead.ahead, store_node=ahead.store_node) if same else plan


def _expected(decision: Decision) -> tuple[WorkerId, ...]:
    """Returns the workers that the next world may have."""
    return staying(decision.run, decision.rules, decision.run.stragglers.leaving)


def _supposed(decision: Decision, plan: Plan, there: tuple[WorkerId, ...]) -> Plan | None:
    """Returns the plan that would follow if the world of ``plan`` paused now: its members hold what they have
    committed.
    """
    run = decision.run
    workers = {each: run.workers[each] for each in there}
    for member, rank in plan.ranks.items():
        if member in workers:
            held = Holding(member, run.version, cell_of(plan.layout, rank))
            workers[member] = evolve(workers[member], holdings=(held,))
    return make_plan(evolve(run, members=evolve(run.members, workers=workers)), decision.rules)
