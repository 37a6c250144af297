"""The one state machine of a run: for failure, growth and a user's stop alike.

    advance(run, event, now, rules) -> Transition(run, actions, reason)

Facts and the time go in; the run as it is now known, what to do in this order, and the sentence saying why come out.  No clock, no
randomness, no I/O: the same code runs in production, in the simulator and in tests.

Each call has two halves.  The event is *taken*: knowledge grows.  Then the run *goes on*: it does what knowledge and time now
permit.  So nothing depends on which event it was that completed the picture, or on how often one is repeated.
"""

from __future__ import annotations

from elastic.control import checkpoints, forming, membership, recovery, settling, stepping, stock, stopping
from elastic.control.actions import Exit
from elastic.control.events import (
    Attached,
    Beat,
    Broken,
    Capacity,
    Event,
    Fenced,
    Here,
    Joined,
    KeeperLost,
    KeeperUp,
    Kept,
    Lost,
    NodeFound,
    NodeRefused,
    Ready,
    Recovered,
    Renewed,
    Saved,
    SaveFailed,
    ShardSaved,
    StartFailed,
    StepDone,
    StopRequested,
    Stumbled,
    Tick,
)
from elastic.control.health import heard, observe
from elastic.control.refusals import refusal
from elastic.control.rules import Rules
from elastic.control.states import Finishing, Forming, Running, RunState, Stopping, Waiting
from elastic.control.turn import Transition, Turn

__all__ = ["Transition", "advance"]


def advance(run: RunState, event: Event, now: float, rules: Rules) -> Transition:
    """The only place where the run changes state.  ``now``: seconds of any clock that only grows."""
    turn = Turn(run, now, rules)
    if why := refusal(run, event, now):
        turn.refuse(why)
        if run.over and isinstance(event, Joined):
            turn.do(Exit((event.worker,)))
        if run.over and isinstance(event, Recovered):
            turn.do(Exit(event.workers))
    else:
        _take(turn, event)
        if not turn.refused:
            recovery.note_progress(turn, event)
            _go_on(turn)
    return turn.done()


def _take(turn: Turn, event: Event) -> None:
    """What ``event`` tells."""
    match event:
        case Joined():
            membership.joined(turn, event)
        case Lost():
            _lost(turn, event)
        case StartFailed():
            membership.start_failed(turn, event)
        case NodeFound():
            membership.node_found(turn, event.node)
        case NodeRefused():
            membership.node_refused(turn, event)
        case KeeperUp():
            _keeper_up(turn, event)
        case KeeperLost():
            _keeper_lost(turn, event)
        case Kept():
            stock.kept(turn, event)
        case Capacity():
            membership.capacity(turn, event)
        case Here():
            forming.here(turn, event)
        case Ready():
            forming.ready(turn, event)
        case StepDone():
            stepping.step_done(turn, event)
        case Renewed():
            _renewed(turn, event)
        case Beat():
            _beat(turn, event)
        case Broken():
            stopping.broken(turn, event)
        case Fenced():
            stepping.fenced(turn, event)
        case ShardSaved():
            checkpoints.shard_saved(turn, event)
        case Saved():
            checkpoints.saved(turn, event)
        case SaveFailed():
            checkpoints.save_failed(turn, event)
        case StopRequested():
            stopping.stop_requested(turn, event)
        case Recovered():
            recovery.recovered(turn, event)
        case Attached():
            recovery.attached(turn, event)
        case Stumbled():
            recovery.stumbled(turn, event)
        case Tick():
            recovery.stood(turn, event)


def _go_on(turn: Turn) -> None:
    """What knowledge and time now permit."""
    if turn.run.saves:
        checkpoints.ask_for_manifests(turn)
    match turn.run.state:
        case Waiting() as state:
            settling.waiting(turn, state)
        case Forming() as state:
            forming.forming(turn, state)
        case Running() as state:
            stepping.running(turn, state)
        case Stopping() as state:
            settling.stopping(turn, state)
        case Finishing() as state:
            settling.finishing(turn, state)
    if not turn.run.over:
        membership.start_workers(turn)


def _lost(turn: Turn, event: Lost) -> None:
    run, state = turn.run, turn.run.state
    if event.worker in run.starting:
        return membership.start_failed(turn, StartFailed(event.worker, event.reason))
    expelled = isinstance(state, Stopping) and event.worker in state.expelled
    if event.worker not in run.workers and not expelled:
        return turn.refuse(f"{event.worker} is no worker of the run any more")
    membership.remove(turn, (event.worker,))
    stopping.members_lost(turn, (event.worker,), f"{event.worker} is lost ({event.reason})", certain=event.certain)


def _keeper_up(turn: Turn, event: KeeperUp) -> None:
    new = event.node not in turn.run.keepers
    membership.keeper_up(turn, event)
    state = turn.run.state
    if new:
        stock.ask_again(turn, event.node)
        if isinstance(state, Running):
            stock.pair(turn, state.plan)


def _keeper_lost(turn: Turn, event: KeeperLost) -> None:
    membership.keeper_lost(turn, event.node, with_its_node=event.with_its_node)
    turn.say(f"the keeper of node {event.node[:8]} is lost ({event.reason})")
    state = turn.run.state
    if isinstance(state, Forming) and state.plan.store_node == event.node:
        stopping.stop(turn, "it hosts the store of the world that forms")
    elif isinstance(state, Forming) and any(event.node == node for node, _ in state.plan.hosts):
        stopping.stop(turn, "the world that forms takes copies from it")
    elif isinstance(state, Running):
        stock.pair(turn, state.plan)


def _renewed(turn: Turn, event: Renewed) -> None:
    """It was granted, so it counts, even if the generation was fenced between the grant and this."""
    turn.know(lease_until=max(turn.run.lease_until, turn.now + turn.rules.lease_over_s))


def _beat(turn: Turn, event: Beat) -> None:
    if event.node in turn.run.keepers:
        turn.know(watch=heard(turn.run.watch, event.node, turn.now, turn.rules.silence_s))
    plan = turn.run.plan
    if plan is not None:
        progress = [each for each in event.progress if each.generation == plan.generation and each.worker in plan.members]
        if progress:
            turn.know(watch=observe(turn.run.watch, progress, turn.now))
