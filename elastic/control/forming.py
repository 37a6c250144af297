"""How a world comes to be: a plan, then ``Here`` from each member (no collective yet), then ``Ready`` from each.

One absent member lets *every* member's group formation time out, so whoever is not ready is not to blame: whoever is not here is.
"""

from __future__ import annotations

from elastic.control import checkpoints, lineage, membership, stock
from elastic.control.actions import Form, Go
from elastic.control.events import Here, Ready
from elastic.control.health import Watch
from elastic.control.seating import candidates, layout_of, make_plan
from elastic.control.states import Forming, Running, Waiting
from elastic.control.stepping import finish
from elastic.control.stopping import expel, stop
from elastic.control.turn import Turn, count, names
from elastic.ids import WorkerId
from elastic.plan.plan import Plan

SLOW_BYTES_S = 50e6
"""Half of what the slowest network in use brings, 1 Gbit/s."""
TELLING_BYTES = 64 * 2**20
"""Less takes no time anywhere."""


def form(turn: Turn) -> None:
    """Begin the next generation with whoever is there, or wait."""
    run, plan = turn.run, make_plan(turn.run, turn.rules)
    if plan is None:
        if not isinstance(run.state, Waiting):
            turn.to(Waiting(turn.now))
            turn.say(f"wait: {_shortage(turn)}")
        return
    if keepers := stock.awaited(turn, plan):
        if not isinstance(run.state, Waiting):
            turn.to(Waiting(turn.now))
            turn.say(f"wait: what {count(len(keepers), 'keeper')} of {len(run.keepers)} hold may be newer than step {plan.version.step}")
        return
    given_up = lineage.abandoned(run.lineage, plan.version)
    turn.know(
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
    if not lineage.contains(run.lineage, plan.version):
        turn.know(fruitless=0)
    kinds = sorted({run.workers[member].kind for member in plan.members})
    if len(kinds) > 1:
        turn.know(mixed=(*run.mixed, plan.generation))
    turn.to(Forming(plan, turn.now + turn.rules.form_s))
    turn.do(Form(plan))
    turn.say(_announcement(plan, given_up))
    if len(kinds) > 1:
        turn.say(f"its steps are marked as mixed: the members are {' and '.join(kinds)}")
    membership.refuse_other_kinds(turn)


def _announcement(plan: Plan, given_up: tuple[tuple[int, int, int], ...]) -> str:
    text = f"form generation {plan.generation} of {names(plan.members)} ({plan.layout}) at step {plan.version.step} ({plan.tier})"
    for generation, first, last in given_up:
        text += f", abandons step{f' {first}' if first == last else f's {first}–{last}'} of generation {generation}"
    return text


def _shortage(turn: Turn) -> str:
    there, low = len(candidates(turn.run, turn.rules)), turn.rules.min_workers
    if layout_of(there, turn.rules) is not None:
        return "no keeper is there to host the store"
    return f"{count(there, 'worker')} {'is' if there == 1 else 'are'} too few for any layout (at least {low})"


def here(turn: Turn, event: Here) -> None:
    state = turn.run.state
    if isinstance(state, Forming) and event.worker not in state.here:
        turn.amend(here=(*state.here, event.worker), here_at=min(state.here_at, turn.now))


def slow_network(event: Ready) -> str:
    """A sentence where state came so slowly that it was hardly over the network that was meant."""
    if event.heal_bytes < TELLING_BYTES or event.heal_s * SLOW_BYTES_S < event.heal_bytes:
        return ""
    mb, mb_s = event.heal_bytes / 1e6, event.heal_bytes / 1e6 / event.heal_s
    return (
        f"{event.worker} got {mb:,.0f} MB at {mb_s:.1f} MB/s over interface {event.interface or '(chosen by the libraries)'}: "
        f"if its node has a quicker one, name it as network.interface"
    )


def ready(turn: Turn, event: Ready) -> None:
    state = turn.run.state
    if isinstance(state, Forming) and event.worker not in state.ready:
        if why := slow_network(event):
            turn.say(why)
        here = state.here if event.worker in state.here else (*state.here, event.worker)
        turn.amend(here=here, ready=(*state.ready, event.worker), here_at=min(state.here_at, turn.now))


def forming(turn: Turn, state: Forming) -> None:
    plan, there = state.plan, len(state.here)
    if len(state.ready) == len(plan.members):
        go(turn, plan)
    elif turn.run.stop and (plan.tier == "init" or plan.version in turn.run.saved):
        stop(turn, f"stop asked for ({turn.run.stop}) with nothing to save")
    elif there < len(plan.members) and turn.now >= state.here_at + turn.rules.leave_s:
        expel(turn, _absent(state), f"{names(_absent(state))} did not take the plan within {turn.rules.leave_s:g} s of the others")
    elif turn.now >= state.deadline and there < len(plan.members):
        expel(turn, _absent(state), f"{names(_absent(state))} did not take the plan within {turn.rules.form_s:g} s")
    elif turn.now >= state.deadline:
        _blame_the_store(turn, state)


def _absent(state: Forming) -> tuple[WorkerId, ...]:
    """To take a plan is the work of a moment, once the world before is left."""
    arrived = frozenset(state.here)
    return tuple(worker for worker in state.plan.members if worker not in arrived)


def _blame_the_store(turn: Turn, state: Forming) -> None:
    """All were there: a stuck one makes the others look stuck, so nobody is killed the first time."""
    plan, again = state.plan, bool(turn.run.blamed)
    turn.know(blamed=(*turn.run.blamed, plan.store_node))
    ready = frozenset(state.ready)
    stuck = tuple(worker for worker in plan.members if worker not in ready)
    cause = f"all {len(plan.members)} were there, but {names(stuck)} did not get ready within {turn.rules.form_s:g} s"
    if again and state.ready:
        expel(turn, stuck, cause)
    else:
        stop(turn, f"{cause}; blame the store on {plan.store_node} or the network")


def go(turn: Turn, plan: Plan) -> None:
    """All members are at the plan's version.  What each holds from now on, its answer to the fence will say."""
    membership.hold(turn, {worker: () for worker in plan.members})
    watch = Watch(moved_at=turn.now, stepped_at=turn.now, beats=turn.run.watch.beats)
    if isinstance(turn.run.state, Forming):
        took_s = turn.now - (turn.run.state.deadline - turn.rules.form_s)
        turn.know(reform_s=(turn.run.reform_s + took_s) / 2 if turn.run.reform_s else took_s)
    turn.know(watch=watch, blamed=(), lease_until=turn.now + turn.rules.lease_over_s)
    stock.pair(turn, plan)
    turn.do(Go(plan.generation, plan.members))
    turn.say(f"generation {plan.generation} runs")
    if plan.version.step >= turn.rules.target_step:
        checkpoints.begin_again(turn, plan)
        finish(turn, plan)
    else:
        turn.to(Running(plan, turn.now))
