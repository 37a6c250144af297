"""A coordinator takes over what another has left: fold, look who is there, say again what may not have been heard, go on.

The run is folded from the journal, never decided again.  Whatever the journal says was decided, and perhaps not performed, is done once
more: every action is safe to do twice.  Whatever was told to the dead one, and perhaps not recorded, the workers tell once more.  So
nothing ends because of a coordinator's death: a world that steps is still that world.

Where the journal itself ends too early (its disk and the keepers are gone), whoever is in a later generation, or was in it last, proves
it: that generation is fenced, its plan says what was committed before it, and what its members hold, and those that it left out, where
the run stands.  An answer that the journal has of one of the same generation is asked for again: it may have been settled since.  There
may be a later generation of which nobody can say anything, cut off together with its coordinator: until its leases have run out none is
begun, and the next one gets a number that it cannot have.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from elastic.control import checkpoints, copy_inventory, membership, stopping
from elastic.control.decision import Decision, count, names
from elastic.control.forming import go
from elastic.control.liveness import Watch
from elastic.control.states import NEVER, Finishing, Forming, Running, Stopping, Waiting
from elastic.ids import WorkerId
from elastic.protocol import lineage
from elastic.protocol.actions import Fence, Form, Go, Kill, Pause
from elastic.protocol.events import Attached, Beat, Capacity, Event, Kept, Recovered, Renewed, StartFailed, Stumbled, Tick
from elastic.protocol.plan import Plan

MAX_DEATHS = 3
"""Of coordinators by one and the same event, or before anything came of their start."""
STOOD_S = 1.0
"""A delay that counts."""
UNREAD = 100
"""More generations, and workers, than a coordinator begins where no later one finds a trace of it."""


def recovered(decision: Decision, event: Recovered) -> None:
    run = decision.run
    if event.incarnation <= run.incarnation:
        return decision.refuse(f"incarnation {event.incarnation} comes after {run.incarnation} in name only")
    decision.know(incarnation=event.incarnation, startups=run.startups + 1, slots=0)
    decision.durable = True
    decision.say(f"coordinator {event.incarnation} takes over at step {run.step}")
    _forgive_the_silence(decision)
    _settle_again(decision, frozenset(event.workers))
    _forget_who_is_gone(decision, event)
    if not event.whole:
        _expect_the_unread(decision)
    _say_again(decision)
    checkpoints.tell(decision)
    if decision.run.startups > MAX_DEATHS:
        give_up(decision, f"{MAX_DEATHS} coordinators in a row died before anything came of their start")


def stood(decision: Decision, event: Tick) -> None:
    """Nobody was asked anything meanwhile, and nobody was heard: whatever is waited for, it is waited for so much longer."""
    run, later_s = decision.run, event.stood_s
    if later_s <= STOOD_S:
        return
    decision.say(f"stood still for {later_s:.1f} s: nobody else would have known what was decided")
    watch = replace(run.watch, moved_at=run.watch.moved_at + later_s, stepped_at=run.watch.stepped_at + later_s)
    starting = {worker: asked_at + later_s for worker, asked_at in run.starting.items()}
    granted = (
        decision.now + decision.rules.lease_over_s if run.grants_lease(run.generation) else 0.0
    )  # what was granted meanwhile is not heard yet
    decision.know(watch=watch, starting=starting, stock_until=run.stock_until + later_s, lease_until=max(run.lease_until, granted))
    match run.state:
        case Waiting(since):
            decision.amend(since=since + later_s)
        case Forming() as state:
            decision.amend(deadline=state.deadline + later_s, here_at=state.here_at + later_s)
        case Stopping() | Finishing() as state:
            decision.amend(deadline=state.deadline + later_s)


def _forgive_the_silence(decision: Decision) -> None:
    """While there was no coordinator nothing was heard of anybody, and leases were granted of which nobody knows any more."""
    run, now, rules = decision.run, decision.now, decision.rules
    watch = Watch(moved_at=now, stepped_at=now, step_s=run.watch.step_s)
    saves = tuple(replace(each, reported=(), ask_at=0.0) for each in run.saves)  # the keepers have what a manifest is made of
    lease_until = now + rules.mandate_over_s + rules.lease_over_s if run.plan is not None else run.lease_until
    decision.know(watch=watch, saves=saves, lease_until=lease_until)
    match run.state:
        case Forming():
            decision.amend(deadline=now + rules.form_s, here_at=now if run.state.here else NEVER)
        case Stopping(planned=False):
            decision.amend(deadline=now + rules.fence_s)
        case Finishing():
            decision.amend(deadline=now + rules.stop_s)
        case Stopping(pending=()):
            decision.amend(deadline=now + rules.stop_s)


def _forget_who_is_gone(decision: Decision, event: Recovered) -> None:
    """And end those of whom nobody knows: started or sent away by decisions that were never recorded, or not yet performed."""
    run = decision.run
    found = frozenset(event.workers)
    for worker in [worker for worker in run.starting if worker not in found]:
        membership.start_failed(decision, StartFailed(worker, "there is no such actor"))
    gone, nodes = tuple(worker for worker in run.workers if worker not in found), frozenset(event.keepers)
    membership.remove(decision, gone)
    for certain in (True, False):  # its node lives, so it is its process that has ended; a node may only be taken for dead
        if lost := tuple(worker for worker in gone if (run.workers[worker].node in nodes) is certain):
            stopping.members_lost(decision, lost, f"lost (not found): {names(lost)}", certain=certain)
    for keeper in [keeper for keeper in run.keepers if keeper not in event.keepers]:
        membership.keeper_lost(decision, keeper)
    strangers = tuple(worker for worker in event.workers if worker not in run.workers and worker not in run.starting)
    if strangers:
        decision.do(Kill(strangers, "nobody waits for them"))
    decision.know(next_worker=max([run.next_worker, *(membership.number_of(worker) + 1 for worker in strangers)]))


def _expect_the_unread(decision: Decision) -> None:
    """Others may have gone on, where nobody can be reached: no world goes on beside theirs, and none is begun under a number of theirs."""
    run = decision.run
    blind_until, skipped = decision.now + decision.rules.lease_over_s, UNREAD * run.incarnation  # others before it may have read no more
    decision.know(blind_until=blind_until, unread=max(run.generation, run.unread) + skipped, next_worker=run.next_worker + skipped)
    why = "what other coordinators began may be nowhere to be read"
    match run.state:
        case Forming() | Running() | Finishing():
            stopping.stop(decision, why)
        case Stopping(planned=True):
            stopping.give_up_the_boundary(decision)
    decision.say(f"{why}: no world is begun for {decision.rules.lease_over_s:g} s")


def _settle_again(decision: Decision, there: Collection[WorkerId]) -> None:
    """Before anything is asked about a later generation: what a member applies now belongs to its answer."""
    settled = decision.run.settled
    if settled is not None and (members := tuple(each for each in settled.members if each in there)):
        decision.do(replace(settled, members=members))


def _say_again(decision: Decision) -> None:
    """What was decided last; a member that has heard it already passes it over."""
    match state := decision.run.state:
        case Forming(plan=plan):
            decision.do(Form(plan))
        case Running(plan=plan) | Finishing(plan=plan):
            copy_inventory.pair(decision, plan)
            decision.do(Go(plan.generation, plan.members))
        case Stopping(plan=plan, planned=True):
            decision.do(Go(plan.generation, plan.members))
            decision.do(Pause(plan.generation, plan.members, state.save))
        case Stopping(plan=plan, pending=pending):
            if pending and not any(isinstance(action, Fence) for action in decision.actions):
                decision.do(Fence(plan.generation, pending))
            copy_inventory.ask(decision)
        case Waiting():
            copy_inventory.ask(decision)


def attached(decision: Decision, event: Attached) -> None:
    run, plan = decision.run, event.plan
    if event.worker not in run.workers:
        return decision.refuse(f"{event.worker} is no worker of the run")
    if plan is not None and plan.generation > run.generation:
        _catch_up(decision, plan)
    elif plan is not None and plan.generation == run.generation and event.stepping and isinstance(run.state, Forming):
        go(decision, plan)
    elif plan is not None and plan.generation == run.generation and decision.now < run.blind_until and isinstance(run.state, Stopping):
        _ask_again(decision, run.state, event.worker)


def _ask_again(decision: Decision, state: Stopping, worker: WorkerId) -> None:
    """It may have applied the step that it had prepared when it answered."""
    answers = tuple(answer for answer in state.answers if answer.worker != worker)
    if answers != state.answers:
        decision.amend(answers=answers, pending=(*state.pending, worker), deadline=decision.now + decision.rules.fence_s)
        decision.do(Fence(state.plan.generation, (worker,)))


def _catch_up(decision: Decision, plan: Plan) -> None:
    """The journal ends before ``plan`` was made."""
    run = decision.run
    cause = f"the journal ends in generation {run.generation}, but generation {plan.generation} was begun"
    found = {*run.workers, *run.starting}  # one that is said to start was found too, and will say that it has joined before it answers
    pending = tuple(worker for worker in plan.members if worker in found)
    unheard = tuple(worker for worker in plan.members if worker not in pending)
    state = Stopping(plan, cause, False, pending, decision.now + decision.rules.fence_s, expelled=unheard)
    saved = tuple(each for each in run.saved if lineage.contains(plan.lineage, each))  # it gave the others up: one was damaged, say
    decision.know(generation=plan.generation, lineage=plan.lineage, saved=saved, seats=plan.members, last=None, saves=())
    decision.know(lease_until=decision.now + decision.rules.lease_over_s)
    if isinstance(run.state, Stopping):
        decision.know(state=state)
    else:
        decision.to(state)
    decision.do(Fence(plan.generation, pending))
    checkpoints.tell(decision)
    copy_inventory.ask(decision)
    decision.say(f"{cause}: stop it with {names(pending)}")


# ---- what coordinators die of


def note_progress(decision: Decision, event: Event) -> None:
    """Something came of this coordinator's start."""
    if decision.run.startups and not isinstance(event, Recovered | Attached | Stumbled | Tick | Beat | Renewed | Capacity | Kept):
        decision.know(startups=0)


def stumbled(decision: Decision, event: Stumbled) -> None:
    decision.know(stumbles=(*decision.run.stumbles, event.what))
    times = decision.run.stumbles.count(event.what)
    decision.say(f"the coordinator could not handle an event ({event.what})")
    if times >= MAX_DEATHS:
        give_up(decision, f"{count(times, 'coordinator')} failed at the same event: {event.what}")


def give_up(decision: Decision, why: str) -> None:
    """Let the workers save and stop.  Where there is no way to do even that, the coordinator ends everything as it is."""
    if not decision.run.gave_up:
        decision.know(gave_up=why, stop=decision.run.stop or why)
        decision.say(why)
