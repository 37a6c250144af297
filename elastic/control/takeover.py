"""Takeover: a coordinator continues the run of an earlier one.

It reads the run from the journal and decides nothing again.  A recorded decision may not have been performed,
so its actions are performed once more; performing one twice does no harm.  What was told to the dead
coordinator may not have been recorded, so the workers repeat it. So no world ends because a coordinator dies.

The journal itself may end too early, when its disk and the keepers are gone.  Then a worker that is or was in
a later generation proves that generation, which is fenced.  Its plan says what was committed before it.  The
holdings of its members, and of workers that it left out, say where the run stands.  A member of that
generation whose answer is in the journal is asked again, because the generation may have been settled since.
A still later generation may be cut off together with its coordinator, so that nobody can report it.  So no
world begins until its leases have run out, and the next generation gets a number that it cannot have.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from elastic.control import copy_inventory, edges, membership, saves, stopping
from elastic.control.decision import Decision, count, names
from elastic.control.liveness import Start, Watch
from elastic.control.run import NEVER, Finishing, Forming, Running, Saves, Saving, Stopping, Waiting
from elastic.ids import WorkerId
from elastic.protocol.actions import Fence, Form, Go, Kill, Pause
from elastic.protocol.events import (
    Attached,
    Beat,
    Capacity,
    Evaluated,
    Event,
    Kept,
    Recovered,
    Renewed,
    StartFailed,
    Starting,
    Stumbled,
    Tick,
)

MAX_DEATHS = 3
"""Number of coordinators that may die of the same event, or before they made any progress, before the run
gives up.
"""
STOOD_S = 1.0
"""Delay in seconds above which deadlines are moved; a shorter one makes no difference to them."""
UNREAD = 100
"""Number of ids skipped for each earlier coordinator if journals may be unread; no such coordinator uses
more.
"""


def recovered(decision: Decision, event: Recovered) -> None:
    run = decision.run
    if event.incarnation <= run.incarnation:
        return decision.refuse(
            f"coordinator {event.incarnation} is not newer than coordinator {run.incarnation}"
        )
    decision.know(incarnation=event.incarnation)
    decision.know("takeover", startups=run.takeover.startups + 1)
    decision.know("cluster", slots=0)
    decision.know("copies", alone=())  # nodes without a buddy are reported anew
    decision.durable = True
    decision.say(f"coordinator {event.incarnation} takes over at step {run.step}")
    _forgive_the_silence(decision)
    _settle_again(decision, frozenset(event.workers))
    _forget_who_is_gone(decision, event)
    if not event.whole:
        _expect_the_unread(decision)
    _say_again(decision)
    if decision.run.history.last is not None or decision.run.saves.pending:
        saves.tell(decision)
    if decision.run.takeover.startups > MAX_DEATHS:
        give_up(decision, f"{MAX_DEATHS} coordinators in a row died before the run made progress")


def _later(save: Saving, by_s: float) -> Saving:
    refused_at = None if save.refused_at is None else save.refused_at + by_s
    return replace(save, ask_at=save.ask_at + by_s, heard_at=save.heard_at + by_s, refused_at=refused_at)


def stood(decision: Decision, event: Tick) -> None:
    """Moves all deadlines by ``event.stood_s``: during that time nobody was asked anything, and nobody was
    heard.
    """
    run, later_s = decision.run, event.stood_s
    if later_s <= STOOD_S:
        return
    decision.say(
        f"the coordinator waited {later_s:.1f} s until its decision was stored in the journal; "
        "deadlines are moved"
    )
    # leases that were granted meanwhile are not known yet
    granted_until = decision.now + decision.rules.lease_over_s if run.grants_lease(run.generation) else 0.0
    decision.know(
        "watch",
        moved_at=run.watch.moved_at + later_s,
        stepped_at=run.watch.stepped_at + later_s,
        uploaded_at=run.watch.uploaded_at + later_s,
        lease_until=max(run.watch.lease_until, granted_until),
        starts={worker: replace(known, at=known.at + later_s) for worker, known in run.watch.starts.items()},
    )
    decision.know(saves=Saves(tuple(_later(each, later_s) for each in run.saves.pending)))
    decision.know(
        "members", starting={worker: asked_at + later_s for worker, asked_at in run.members.starting.items()}
    )
    decision.know("copies", answers_until=run.copies.answers_until + later_s)
    match run.state:
        case Waiting(since, until):
            decision.amend(since=since + later_s, until=until + later_s if until else 0.0)
        case Forming() as state:
            times = {
                name: getattr(state, name) + later_s for name in ("deadline", "here_at", "ready_at", "since")
            }
            decision.amend(**times)
        case Running(connect_until=until):
            decision.amend(connect_until=until + later_s)
        case Stopping() | Finishing() as state:
            decision.amend(deadline=state.deadline + later_s)


def _forgive_the_silence(decision: Decision) -> None:
    """Restarts all deadlines: without a coordinator nobody was heard, and the dead one may have granted
    leases that are not in the journal.
    """
    run, now, rules = decision.run, decision.now, decision.rules
    lease_until = (
        now + rules.coordinator_lease_over_s + rules.lease_over_s
        if run.plan is not None
        else run.watch.lease_until
    )
    starts = {worker: Start(now, "has not answered this coordinator yet") for worker in run.members.starting}
    watch = Watch(
        moved_at=now,
        stepped_at=now,
        step_s=run.watch.step_s,
        lease_until=lease_until,
        reform_s=run.watch.reform_s,
        hand_over_s=run.watch.hand_over_s,
        validate_s=run.watch.validate_s,
        join_s=run.watch.join_s,
        start_s=run.watch.start_s,
        starts=starts,
    )
    if run.cluster.let_go:
        decision.know("cluster", let_go=())  # the order may not have been given
    # the keepers know which parts are uploaded
    again = tuple(replace(each, reported=(), refused=(), ask_at=0.0).heard(now) for each in run.saves.pending)
    decision.know(watch=watch, saves=Saves(again))
    match run.state:
        case Forming():
            ready_at = now if any(run.state.there.values()) else NEVER
            decision.amend(
                deadline=now + rules.form_s,
                here_at=now if run.state.there else NEVER,
                ready_at=ready_at,
                since=now,
            )
        case Stopping(planned=False):
            decision.amend(deadline=now + rules.fence_s)
        case Finishing():
            decision.amend(deadline=now + rules.stop_s)
        case Stopping(pending=()):
            decision.amend(deadline=now + rules.stop_s)


def _forget_who_is_gone(decision: Decision, event: Recovered) -> None:
    """Removes workers and keepers that do not exist any more, and kills workers that the journal does not
    know.

    The decision to start or expel such a worker was never recorded, or was not performed yet.
    """
    run = decision.run
    found = frozenset(event.workers)
    for worker in [worker for worker in run.members.starting if worker not in found]:
        membership.start_failed(decision, StartFailed(worker, "its actor does not exist any more"))
    gone, nodes = tuple(worker for worker in run.workers if worker not in found), frozenset(event.keepers)
    membership.remove(decision, gone)
    # if the node lives, the process has certainly ended; otherwise the node may only look dead
    for certain in (True, False):
        if lost := tuple(worker for worker in gone if (run.workers[worker].node in nodes) is certain):
            stopping.members_lost(decision, lost, f"lost (not found): {names(lost)}", certain=certain)
    for keeper in [keeper for keeper in run.cluster.keepers if keeper not in event.keepers]:
        membership.keeper_lost(decision, keeper)
    writers = {node: None for save in decision.run.saves.pending for node in save.nodes}
    saves.without_keepers(decision, [node for node in writers if node not in nodes])
    strangers = tuple(
        worker for worker in event.workers if worker not in run.workers and worker not in run.members.starting
    )
    if strangers:
        decision.do(Kill(strangers, "nobody waits for them"))
    decision.know(
        "members",
        next_worker=max(
            [run.members.next_worker, *(membership.number_of(worker) + 1 for worker in strangers)]
        ),
    )


def _expect_the_unread(decision: Decision) -> None:
    """Prepares for unreachable coordinators that may still act: no world runs beside their worlds, and none
    gets a number that they may have used.
    """
    run = decision.run
    # ``UNREAD`` ids for each coordinator, because earlier ones may have missed as many
    blind_until, skipped = decision.now + decision.rules.lease_over_s, UNREAD * run.incarnation
    decision.know("takeover", blind_until=blind_until, unread=run.next_generation - 1 + skipped)
    decision.know("members", next_worker=run.members.next_worker + skipped)
    why = "the journal of an earlier coordinator may be incomplete, and its workers may still act"
    match run.state:
        case Forming() | Running() | Finishing():
            edges.stop(decision, why)
        case Stopping(planned=True):
            stopping.give_up_the_boundary(decision)
    decision.say(f"{why}: no world is formed for {decision.rules.lease_over_s:g} s")


def _settle_again(decision: Decision, there: Collection[WorkerId]) -> None:
    """Repeats the latest settlement before anything else: a member's answer about a later generation must
    include the step that the member applies because of this settlement.
    """
    settled = decision.run.history.settled
    if settled is not None and (members := tuple(each for each in settled.members if each in there)):
        decision.do(replace(settled, members=members))


def _say_again(decision: Decision) -> None:
    """Repeats the last decision; a member that has heard it already ignores it."""
    match state := decision.run.state:
        case Forming(plan=plan):
            decision.do(Form(plan))
        case Running(plan=plan) | Finishing(plan=plan):
            copy_inventory.pair(decision, plan)
            decision.do(Go(plan.generation, plan.members))
        case Stopping(plan=plan, planned=True, hand_over=hand_over):
            decision.do(Go(plan.generation, plan.members))
            decision.do(Pause(plan.generation, plan.members, state.save, hand_over))
            if not state.pending:  # its boundary is reached, and only the keepers know what was handed over
                copy_inventory.ask(decision)
        case Stopping(plan=plan, pending=pending):
            if pending and not any(isinstance(action, Fence) for action in decision.actions):
                decision.do(Fence(plan.generation, pending))
            copy_inventory.ask(decision)
        case Waiting():
            copy_inventory.ask(decision)


def attached(decision: Decision, event: Attached) -> None:
    run, plan = decision.run, event.plan
    if event.worker not in run.workers:
        return decision.refuse(f"{event.worker} does not belong to this run")
    if plan is None:
        return
    if plan.generation > run.generation:
        edges.stop_unread(decision, plan)
    elif plan.generation == run.generation and event.stepping and isinstance(run.state, Forming):
        edges.go(decision, plan)
    elif decision.now < run.takeover.blind_until and isinstance(run.state, Stopping):
        if plan.generation == run.generation and event.worker in run.state.pending:
            # a worker within reach only now has not been asked yet
            decision.do(Fence(plan.generation, (event.worker,)))
        elif plan.generation == run.generation:
            stopping.ask_again(decision, run.state, event.worker)
        # a later generation left the worker out, perhaps unfenced
        elif event.worker not in run.state.plan.ranks:
            decision.do(Fence(plan.generation, (event.worker,)))


# ---- what coordinators die of


def note_progress(decision: Decision, event: Event) -> None:
    """Notes that this coordinator has made progress since its start."""
    idle = Recovered | Attached | Stumbled | Tick | Beat | Renewed | Capacity | Kept | Evaluated | Starting
    if decision.run.takeover.startups and not isinstance(event, idle):
        decision.know("takeover", startups=0)


def stumbled(decision: Decision, event: Stumbled) -> None:
    decision.know("takeover", stumbles=(*decision.run.takeover.stumbles, event.what))
    times = decision.run.takeover.stumbles.count(event.what)
    decision.say(f"the coordinator could not handle an event ({event.what})")
    if times >= MAX_DEATHS:
        give_up(decision, f"{count(times, 'coordinator')} failed at the same event: {event.what}")


def give_up(decision: Decision, why: str) -> None:
    """Makes the workers save and stop.  If even that is impossible, the coordinator ends everything at once."""
    if not decision.run.gave_up:
        decision.know(gave_up=why, stop=decision.run.stop or why)
        decision.say(why)
