"""How a world comes to be: a plan, then ``Here`` from each member (no collective yet), then ``Ready`` from each.

One absent member lets *every* member's group formation time out, so whoever is not ready is not to blame: whoever is not here is.
"""

from __future__ import annotations

from elastic.control import checkpoints, copy_inventory, membership
from elastic.control.decision import Decision, count, names
from elastic.control.liveness import Watch
from elastic.control.running import finish
from elastic.control.seating import candidates, layout_of, make_plan
from elastic.control.states import Forming, Running, Waiting
from elastic.control.stopping import expel, stop
from elastic.ids import WorkerId
from elastic.protocol import lineage
from elastic.protocol.actions import Form, Go
from elastic.protocol.events import Here, Ready
from elastic.protocol.plan import Plan

SLOW_BYTES_S = 50e6
"""Half of what the slowest network in use brings, 1 Gbit/s."""
TELLING_BYTES = 64 * 2**20
"""Less takes no time anywhere."""


def form(decision: Decision) -> None:
    """Begin the next generation with whoever is there, or wait."""
    run, plan = decision.run, make_plan(decision.run, decision.rules)
    if plan is None:
        if not isinstance(run.state, Waiting):
            decision.to(Waiting(decision.now))
            decision.say(f"wait: {_shortage(decision)}")
        return
    if keepers := copy_inventory.awaited(decision, plan):
        if not isinstance(run.state, Waiting):
            decision.to(Waiting(decision.now))
            decision.say(
                f"wait: what {count(len(keepers), 'keeper')} of {len(run.keepers)} hold may be newer than step {plan.version.step}"
            )
        return
    given_up = lineage.abandoned(run.lineage, plan.version)
    decision.know(
        generation=plan.generation,
        lineage=plan.lineage,
        saves=tuple(each for each in run.saves if lineage.contains(plan.lineage, each.version)),
        last=None if given_up else run.last,
        untold=(),
        seats=plan.members,
        kind=run.workers[plan.members[0]].kind,
        lease_until=0.0,
        copied=None,
        buddied=None,
        protected=(plan.protected, plan.buddied),
        silent=0,
    )
    if any(each.nodes for each in run.saves):
        checkpoints.tell(decision)
    if not lineage.contains(run.lineage, plan.version):
        decision.know(fruitless=0)
    kinds = sorted({run.workers[member].kind for member in plan.members})
    if len(kinds) > 1:
        decision.know(mixed=(*run.mixed, plan.generation))
    decision.to(Forming(plan, decision.now + decision.rules.form_s))
    decision.do(Form(plan))
    decision.say(_announcement(plan, given_up))
    if len(kinds) > 1:
        decision.say(f"its steps are marked as mixed: the members are {' and '.join(kinds)}")
    membership.refuse_other_kinds(decision)


def _announcement(plan: Plan, given_up: tuple[tuple[int, int, int], ...]) -> str:
    text = f"form generation {plan.generation} of {names(plan.members)} ({plan.layout}) at step {plan.version.step} ({plan.tier})"
    for generation, first, last in given_up:
        text += f", abandons step{f' {first}' if first == last else f's {first}–{last}'} of generation {generation}"
    return text


def _shortage(decision: Decision) -> str:
    there, low = len(candidates(decision.run, decision.rules)), decision.rules.min_workers
    if layout_of(there, decision.rules) is not None:
        return "no keeper is there to host the store"
    return f"{count(there, 'worker')} {'is' if there == 1 else 'are'} too few for any layout (at least {low})"


def here(decision: Decision, event: Here) -> None:
    state = decision.run.state
    if isinstance(state, Forming) and event.worker not in state.here:
        decision.amend(here=(*state.here, event.worker), here_at=min(state.here_at, decision.now))


def slow_network(event: Ready) -> str:
    """A sentence where state came so slowly that it was hardly over the network that was meant."""
    if event.heal_bytes < TELLING_BYTES or event.heal_s * SLOW_BYTES_S < event.heal_bytes:
        return ""
    mb, mb_s = event.heal_bytes / 1e6, event.heal_bytes / 1e6 / event.heal_s
    return (
        f"{event.worker} got {mb:,.0f} MB at {mb_s:.1f} MB/s over interface {event.interface or '(chosen by the libraries)'}: "
        f"if its node has a quicker one, name it as network.interface"
    )


def ready(decision: Decision, event: Ready) -> None:
    state = decision.run.state
    if isinstance(state, Forming) and event.worker not in state.ready:
        if why := slow_network(event):
            decision.say(why)
        here = state.here if event.worker in state.here else (*state.here, event.worker)
        decision.amend(here=here, ready=(*state.ready, event.worker), here_at=min(state.here_at, decision.now))


def forming(decision: Decision, state: Forming) -> None:
    plan, there = state.plan, len(state.here)
    if len(state.ready) == len(plan.members):
        go(decision, plan)
    elif decision.run.stop and (plan.tier == "init" or plan.version in decision.run.saved):
        stop(decision, f"stop asked for ({decision.run.stop}) with nothing to save")
    elif there < len(plan.members) and decision.now >= state.here_at + decision.rules.leave_s:
        expel(decision, _absent(state), f"{names(_absent(state))} did not take the plan within {decision.rules.leave_s:g} s of the others")
    elif decision.now >= state.deadline and there < len(plan.members):
        expel(decision, _absent(state), f"{names(_absent(state))} did not take the plan within {decision.rules.form_s:g} s")
    elif decision.now >= state.deadline:
        _blame_the_store(decision, state)


def _absent(state: Forming) -> tuple[WorkerId, ...]:
    """To take a plan is the work of a moment, once the world before is left."""
    arrived = frozenset(state.here)
    return tuple(worker for worker in state.plan.members if worker not in arrived)


def _blame_the_store(decision: Decision, state: Forming) -> None:
    """All were there: a stuck one makes the others look stuck, so nobody is killed the first time."""
    plan, again = state.plan, bool(decision.run.blamed)
    decision.know(blamed=(*decision.run.blamed, plan.store_node))
    ready = frozenset(state.ready)
    stuck = tuple(worker for worker in plan.members if worker not in ready)
    cause = f"all {len(plan.members)} were there, but {names(stuck)} did not get ready within {decision.rules.form_s:g} s"
    if again and state.ready:
        expel(decision, stuck, cause)
    else:
        stop(decision, f"{cause}; blame the store on {plan.store_node} or the network")


def go(decision: Decision, plan: Plan) -> None:
    """All members are at the plan's version.  What each holds from now on, its answer to the fence will say."""
    membership.hold(decision, {worker: () for worker in plan.members})
    watch = Watch(moved_at=decision.now, stepped_at=decision.now, beats=decision.run.watch.beats)
    if isinstance(decision.run.state, Forming):
        took_s = decision.now - (decision.run.state.deadline - decision.rules.form_s)
        decision.know(reform_s=(decision.run.reform_s + took_s) / 2 if decision.run.reform_s else took_s)
    decision.know(watch=watch, blamed=(), lease_until=decision.now + decision.rules.lease_over_s)
    copy_inventory.pair(decision, plan)
    decision.do(Go(plan.generation, plan.members))
    decision.say(f"generation {plan.generation} runs")
    if plan.version.step >= decision.rules.target_step:
        checkpoints.begin_again(decision, plan)
        finish(decision, plan)
    else:
        decision.to(Running(plan, decision.now))
