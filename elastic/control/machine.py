"""The state machine of a run: failure, growth and a user's stop all go through it.

    advance(run, event, now, rules, heard_until) -> Transition(run, actions, reason)

Facts and the time go in.  The new knowledge of the run, the actions in their order, and the sentence that
explains them come out.  There is no clock, no randomness and no I/O, so the same code runs in production, in
the simulator and in tests.

Each call has two halves.  First the event is *taken*: knowledge grows.  Then the run *goes on*: it does what
knowledge and time now permit. So it does not matter in which order facts arrive, or how often an event is
repeated.
"""

from __future__ import annotations

from math import inf
from typing import assert_never

from elastic.control import (
    admission,
    ahead,
    commits,
    copy_inventory,
    corruption,
    draining,
    edges,
    evicting,
    finishing,
    forming,
    lemons,
    membership,
    running,
    saves,
    stopping,
    takeover,
    waiting,
    wrong_gradients,
)
from elastic.control.decision import Decision, Transition, names
from elastic.control.liveness import heard, observe
from elastic.control.rules import Rules
from elastic.control.run import Finishing, Forming, Running, RunState, Stopping, Waiting
from elastic.protocol.actions import Exit
from elastic.protocol.events import (
    Attached,
    Beat,
    Broken,
    Capacity,
    ConnectedAhead,
    Ends,
    Evaluated,
    Event,
    Fact,
    Fenced,
    Here,
    Joined,
    KeeperLost,
    KeeperUp,
    Kept,
    Lost,
    NodeAdvised,
    NodeDraining,
    NodeFound,
    NodeRefused,
    NodeStays,
    Ready,
    Recovered,
    Renewed,
    Saved,
    SaveFailed,
    ShardSaved,
    StartFailed,
    Starting,
    StepDone,
    StopRequested,
    Stumbled,
    Tick,
    parts,
)

__all__ = ["Transition", "advance"]


def advance(run: RunState, event: Event, now: float, rules: Rules, heard_until: float = inf) -> Transition:
    """Returns the run after ``event``, and the actions to perform.  ``now`` is in seconds of any clock that
    never goes back.

    ``heard_until`` is the time before which nothing has arrived that waits behind ``event``.  New deadlines
    count from ``now``, but a deadline is over only at ``heard_until``: a coordinator that is slow must not
    give up members whose answers it has not read yet.
    """
    decision = Decision(run, now, rules, heard_until)
    for each in parts(event):
        _hear(decision, each)
    if decision.taken:
        _go_on(decision)
    return decision.done()


def _hear(decision: Decision, event: Fact) -> None:
    """Takes the event if it counts; otherwise notes why it does not."""
    run, refusals = decision.run, len(decision.refusals)
    if why := admission.refusal(run, event, decision.now):
        decision.refuse(why)
        if run.over and isinstance(event, Joined):
            decision.do(Exit((event.worker,)))
        if run.over and isinstance(event, Recovered):
            decision.do(Exit(event.workers))
    else:
        _take(decision, event)
    if len(decision.refusals) == refusals:
        decision.taken.append(event)
        takeover.note_progress(decision, event)


def _take(decision: Decision, event: Fact) -> None:
    """Adds what ``event`` says to the knowledge of the run."""
    match event:
        case Joined():
            # workers say it again to each new coordinator, also those that are members
            known = event.worker in decision.run.workers
            admission.joined(decision, event)
            if not known and event.worker in decision.run.workers:
                draining.joined(decision, event.worker)
        case Lost():
            _lost(decision, event)
        case Starting():
            membership.starting(decision, event)
        case StartFailed():
            _start_failed(decision, event)
        case NodeFound():
            admission.node_found(decision, event.node)
        case NodeRefused():
            admission.node_refused(decision, event)
        case KeeperUp():
            _keeper_up(decision, event)
        case KeeperLost():
            _keeper_lost(decision, event)
        case NodeDraining() | NodeAdvised():
            draining.noticed(decision, event)
        case NodeStays():
            draining.stays(decision, event)
        case Kept():
            copy_inventory.kept(decision, event)
        case Capacity():
            membership.capacity(decision, event)
        case Here():
            forming.here(decision, event)
        case Ready():
            forming.ready(decision, event)
        case ConnectedAhead():
            ahead.connected(decision, event)
        case StepDone():
            commits.step_done(decision, event)
            wrong_gradients.agree(decision, (event.outcome,))
        case Ends():
            commits.ends(decision, event)
        case Renewed():
            _renewed(decision, event)
        case Beat():
            _beat(decision, event)
        case Broken(cause="differs"):
            wrong_gradients.differ(decision, event)
        case Broken():
            stopping.broken(decision, event)
        case Fenced():
            stopping.fenced(decision, event)
            wrong_gradients.agree(decision, event.outcomes)
        case ShardSaved():
            saves.shard_saved(decision, event)
        case Saved():
            saves.saved(decision, event)
        case SaveFailed():
            saves.save_failed(decision, event)
        case Evaluated():
            commits.evaluated(decision, event)
        case StopRequested():
            stopping.stop_requested(decision, event)
        case Recovered():
            takeover.recovered(decision, event)
        case Attached():
            takeover.attached(decision, event)
        case Stumbled():
            takeover.stumbled(decision, event)
        case Tick():
            takeover.stood(decision, event)
        case _:
            assert_never(event)


def _start_failed(decision: Decision, event: StartFailed) -> None:
    asked = event.worker in decision.run.members.starting
    membership.start_failed(decision, event)
    if asked and event.misset is not None:
        admission.replaced(
            decision, event.misset, (event.worker,), f"{event.worker} did not start: {event.reason}"
        )


def _go_on(decision: Decision) -> None:
    """Lets the run do what knowledge and time now permit: compare replicas, ask for manifests, act in its
    present state, start workers.
    """
    if decision.run.cluster.notices:
        draining.forget_what_is_over(decision)
    copy_inventory.pair_again(decision)
    if decision.run.saves.pending:
        corruption.compare(decision)
        saves.ask_for_manifests(decision)
        saves.give_up_the_silent(decision)
    if decision.run.stragglers.workers:
        evicting.go_on(decision)
    if decision.run.cluster.notices or decision.run.stragglers.leaving:
        draining.go_on(decision)
    if decision.run.cluster.lemons:
        lemons.go_on(decision)
    match decision.run.state:
        case Waiting() as state:
            waiting.go_on(decision, state)
        case Forming() as state:
            forming.go_on(decision, state)
        case Running() as state:
            running.go_on(decision, state)
        case Stopping() as state:
            stopping.go_on(decision, state)
        case Finishing() as state:
            finishing.go_on(decision, state)
    if not decision.run.over:
        membership.start_workers(decision)


def _lost(decision: Decision, event: Lost) -> None:
    run, state = decision.run, decision.run.state
    if event.worker in run.members.starting:
        return membership.start_failed(decision, StartFailed(event.worker, event.reason, node=event.node))
    expelled = isinstance(state, Stopping) and event.worker in state.expelled
    if event.worker not in run.workers and not (expelled and event.certain):
        return decision.refuse(f"{event.worker} is no longer a worker of the run")
    known = "is lost" if event.worker in run.workers else "has ended"  # it was lost or expelled before
    membership.remove(decision, (event.worker,))
    stopping.members_lost(
        decision, (event.worker,), f"{event.worker} {known} ({event.reason})", certain=event.certain
    )
    if event.worker in run.workers:
        lemons.failed(decision, run.workers[event.worker].node, f"{event.worker} was lost")


def _keeper_up(decision: Decision, event: KeeperUp) -> None:
    new = event.node not in decision.run.cluster.keepers
    membership.keeper_up(decision, event)
    if new:
        copy_inventory.ask_again(decision, event.node)
        if decision.run.history.last is not None or decision.run.saves.pending:
            saves.tell(decision)  # its workers may wait for saves that are over


def _keeper_lost(decision: Decision, event: KeeperLost) -> None:
    dead, there = event.with_its_node, membership.workers_on(decision.run, event.node)
    if dead and not there and not membership.is_known(decision.run, event.node):
        return decision.refuse(f"node {event.node[:8]} is gone already")
    membership.keeper_lost(decision, event.node, with_its_node=dead)
    decision.say(f"the keeper of node {event.node[:8]} is lost ({event.reason})")
    if dead:
        draining.gone(decision, event.node)
        lemons.gone(decision, event.node)
        admission.gone(decision, event.node)
    if dead and there:  # nobody hears of each by itself, and another one may be in the next world
        membership.expel(decision, there, event.reason)
        stopping.members_lost(
            decision,
            there,
            f"{names(there)} {'is' if len(there) == 1 else 'are'} lost with it",
            certain=False,
        )
    state = decision.run.state
    if isinstance(state, Forming) and state.plan.store_node == event.node:
        edges.stop(decision, "this keeper hosts the store of the world that is forming")
    elif isinstance(state, Forming) and any(event.node == node for node, _ in state.plan.hosts):
        edges.stop(decision, "the world that is forming reads copies from this keeper")


def _renewed(decision: Decision, event: Renewed) -> None:
    """Notes that a lease was granted; it counts even if the generation was fenced since."""
    lease_until = max(decision.run.watch.lease_until, decision.now + decision.rules.lease_over_s)
    decision.know("watch", lease_until=lease_until)


def _beat(decision: Decision, event: Beat) -> None:
    run, now, watch = decision.run, decision.now, decision.run.watch
    # the first test is faster, and nearly always true
    if event.node in run.copies.hosts or event.node in run.cluster.keepers:
        decision.open("watch", "beats")[event.node] = heard(watch, event.node, now, decision.rules.silence_s)
    plan = run.plan
    progress = [
        each
        for each in event.progress
        if plan and each.generation == plan.generation and each.worker in plan.ranks
    ]
    if progress:
        seen, moved_at = observe(watch, event.node, progress, now)
        forming.get_further(decision, moved_at, event.node, progress)
        decision.open("watch", "counters")[event.node] = seen
        decision.know("watch", moved_at=moved_at)
    if event.uploading:
        decision.know("watch", uploaded_at=now)
