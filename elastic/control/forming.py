"""Forming: the plan is sent; each member answers ``Here`` before any collective, and ``Ready`` once it can
step.

One absent member makes the group formation of *every* member time out.  So a member that is not ready is not
to blame, but a member that did not answer ``Here`` is.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic.control import edges, stopping
from elastic.control.decision import Decision, names
from elastic.control.liveness import seen_of
from elastic.control.run import Forming
from elastic.ids import NodeId, WorkerId
from elastic.protocol.events import HEALS, INITIALISES, Here, Progress, Ready

SLOW_BYTES_S = 50e6
"""Speed in bytes a second below which a member's healing is reported: about half of what 1 Gbit/s brings, the
slowest network in use.
"""
TELLING_BYTES = 64 * 2**20
"""Number of bytes below which the speed of healing is not judged: so few bytes take almost no time on any
network.
"""

LAST = 10
"""Multiple of ``form_s`` within which all members must be ready once the first one is."""
LATER = 8
"""The deadline of a world that makes progress is moved only by ``form_s`` / ``LATER`` or more, so that not
every beat is recorded.
"""


def here(decision: Decision, event: Here) -> None:
    state = decision.run.state
    if isinstance(state, Forming) and event.worker not in state.there:
        _note(decision, state, event.worker, ready=False)


def ready(decision: Decision, event: Ready) -> None:
    state = decision.run.state
    if isinstance(state, Forming) and not state.there.get(event.worker, False):
        if why := slow_network(event):
            decision.say(why)
        _note(decision, state, event.worker, ready=True)


def _note(decision: Decision, state: Forming, worker: WorkerId, *, ready: bool) -> None:
    if decision.now < state.here_at:
        decision.amend(here_at=decision.now)
    if ready and decision.now < state.ready_at:
        decision.amend(ready_at=decision.now)
    decision.open("state", "there")[worker] = ready


def get_further(decision: Decision, moved_at: float, node: NodeId, progress: Iterable[Progress]) -> None:
    """Gives the world ``form_s`` from now on if a member that initialises or heals has made progress: only
    standing still is limited.  Once one member is ready, the others get at most ``LAST`` times ``form_s``, so
    that none holds up the others for hours.

    ``moved_at`` is the time at which a member last moved, with the new ``progress`` counted; the run still
    has the earlier watch.
    """
    state, at_it = (
        decision.run.state,
        {each.worker: each.operation for each in progress if each.operation in (INITIALISES, HEALS)},
    )
    if not isinstance(state, Forming) or not at_it or moved_at < decision.now:
        return
    first = state.plan.members[0]
    before = decision.run.watch.counters.get(node, {}).get(first)
    if at_it.get(first) == INITIALISES and (before is None or before.operation != INITIALISES):
        decision.say(f"{first} initialises the model, as all other workers do")
    deadline = min(decision.now, state.ready_at + (LAST - 1) * decision.rules.form_s) + decision.rules.form_s
    if deadline - state.deadline >= decision.rules.form_s / LATER:
        decision.amend(deadline=deadline)


def slow_network(event: Ready) -> str:
    """Returns a sentence if state came so slowly that it probably took another network than the one that was
    meant; "" otherwise.
    """
    if event.heal_bytes < TELLING_BYTES or event.heal_s * SLOW_BYTES_S < event.heal_bytes:
        return ""
    mb, mb_s = event.heal_bytes / 1e6, event.heal_bytes / 1e6 / event.heal_s
    return (
        f"{event.worker} got {mb:,.0f} MB at {mb_s:.1f} MB/s over interface "
        f"{event.interface or '(chosen by the libraries)'}: if its node has a faster interface, set "
        "network.interface to its name"
    )


def go_on(decision: Decision, state: Forming) -> None:
    run, plan, there = decision.run, state.plan, len(state.there)
    if there == len(plan.members) and all(state.there.values()):
        edges.go(decision, plan)
    elif run.stop and (plan.tier == "init" or plan.version in run.history.saved):
        edges.stop(decision, f"a stop was asked for ({run.stop}), and there is nothing to save")
    elif there < len(plan.members) and decision.due(state.here_at + decision.rules.leave_s):
        _expel_the_absent(decision, state, f"within {decision.rules.leave_s:g} s after the other workers")
    elif decision.due(state.deadline) and there < len(plan.members):
        _expel_the_absent(decision, state, f"within {decision.rules.form_s:g} s")
    elif decision.due(state.deadline) and (slow := _initialising(decision, state)):
        _expel_the_slow(decision, state, slow)
    elif decision.due(state.deadline):
        _blame_the_store(decision, state)


def _expel_the_absent(decision: Decision, state: Forming, within: str) -> None:
    """Expels the members that did not answer ``Here``.  A member that has left its older world answers at
    once.
    """
    absent = tuple(worker for worker in state.plan.members if worker not in state.there)
    stopping.expel(decision, absent, f"{names(absent)} did not take the plan {within}")


def _not_ready(state: Forming) -> tuple[WorkerId, ...]:
    return tuple(worker for worker in state.plan.members if not state.there.get(worker, False))


def _initialising(decision: Decision, state: Forming) -> tuple[WorkerId, ...]:
    """Returns the members that still initialise.  Each does so by itself, so no member waits there for
    another.
    """
    seen = seen_of(decision.run.watch)
    return tuple(each for each in _not_ready(state) if each in seen and seen[each].operation == INITIALISES)


def _expel_the_slow(decision: Decision, state: Forming, slow: tuple[WorkerId, ...]) -> None:
    """Expels the members whose initialisation stands still.  If all members stand still, stops the
    world and expels nobody, because other workers would do no better.
    """
    cause = f"the initialisation in {names(slow)} made no progress for {decision.rules.form_s:g} s"
    if len(slow) < len(state.plan.members):
        stopping.expel(decision, slow, cause)
    else:
        edges.stop(
            decision, f"{cause}; if a single operation of init_weights() takes longer, raise deadlines.form_s"
        )


def _blame_the_store(decision: Decision, state: Forming) -> None:
    """Blames the store, since all members were there.

    A stuck member makes the others look stuck too, so no member is killed the first time.
    """
    plan, again = state.plan, bool(decision.run.cluster.blamed)
    decision.know("cluster", blamed=(*decision.run.cluster.blamed, plan.store_node))
    stuck = _not_ready(state)
    cause = (
        f"all {len(plan.members)} were there, but {names(stuck)} did not get ready within "
        f"{decision.rules.form_s:g} s"
    )
    if again and any(state.there.values()):
        stopping.expel(decision, stuck, cause)
    else:
        edges.stop(
            decision, f"{cause}; probably the network is at fault, or the store on node {plan.store_node}"
        )
