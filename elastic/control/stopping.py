"""How a world is brought to an end.

A stop is *planned* when the members agree on a boundary in a commit: nothing is lost.  Otherwise it is a fence, an outcome, and
only then an abort.  Same state, same answers: a planned stop that meets a loss becomes the other kind.
"""

from __future__ import annotations

from elastic.control import checkpoints, copy_inventory, membership
from elastic.control.decision import Decision, count, names
from elastic.control.liveness import Stall, silence, stall
from elastic.control.states import NEVER, Finishing, JobFailure, Running, Stopping, Waiting
from elastic.ids import NodeId, WorkerId
from elastic.protocol.actions import Fence, Pause
from elastic.protocol.events import Broken, StopRequested
from elastic.protocol.plan import Plan


def pause(decision: Decision, cause: str, *, save: bool) -> None:
    """A planned stop."""
    plan = decision.plan
    decision.to(Stopping(plan, cause, True, plan.members, NEVER, save=save))
    decision.do(Pause(plan.generation, plan.members, save))
    decision.say(f"{cause}: generation {plan.generation} pauses at the next boundary")


def stop(decision: Decision, cause: str, *, expelled: tuple[WorkerId, ...] = (), job_error: str = "") -> None:
    """An unplanned stop: fence first."""
    plan = decision.plan
    pending = tuple(worker for worker in plan.members if worker in decision.run.workers)
    present = decision.run.workers.keys() | frozenset(expelled)
    lost = tuple(worker for worker in plan.members if worker not in present)
    deadline = decision.now + decision.rules.fence_s
    decision.to(Stopping(plan, cause, False, pending, deadline, lost=lost, expelled=expelled, job_error=job_error))
    if pending:
        decision.do(Fence(plan.generation, pending))
    decision.say(f"{cause}: stop generation {plan.generation} of {count(len(plan.members), 'worker')}")
    copy_inventory.ask(decision)


def expel(decision: Decision, workers: tuple[WorkerId, ...], cause: str) -> None:
    """End ``workers``, who stand still, and with them the generation."""
    membership.expel(decision, workers, cause, examine=True)
    stop(decision, f"{cause}: expel {names(workers)}", expelled=workers)


def give_up_the_boundary(decision: Decision) -> None:
    """The members cannot agree on it any more: the stop is no longer a planned one."""
    decision.amend(planned=False, deadline=decision.now + decision.rules.fence_s)
    state = decision.run.state
    if isinstance(state, Stopping) and state.pending:
        decision.do(Fence(state.plan.generation, state.pending))
        copy_inventory.ask(decision)
        decision.say(f"generation {state.plan.generation} stops at once")


def members_lost(decision: Decision, workers: tuple[WorkerId, ...], sentence: str, *, certain: bool = True) -> None:
    """``workers`` are gone, and no part of the run any more.  Where that is not certain, they count as expelled: they may act on leases."""
    state, plan = decision.run.state, decision.run.plan
    gone = frozenset(workers).intersection(plan.members) if plan is not None else frozenset()
    members = tuple(worker for worker in workers if worker in gone)
    if not members or isinstance(state, Finishing):
        decision.say(sentence)
    elif isinstance(state, Stopping):
        pending = tuple(each for each in state.pending if each not in gone)
        if certain:
            decision.amend(pending=pending, lost=(*state.lost, *members))
        else:
            decision.amend(pending=pending, expelled=(*state.expelled, *members))
        decision.say(sentence)
        if state.planned and pending:
            give_up_the_boundary(decision)
    else:
        stop(decision, sentence, expelled=() if certain else members)


def stands_still(decision: Decision, plan: Plan) -> Stall | None:
    """The world of ``plan``: and why, as far as that is known."""
    watch, rules = decision.run.watch, decision.rules
    return silence(watch, plan.nodes, decision.now, rules.silence_s) or stall(watch, plan.members, decision.now, rules.stall_s)


def unblock(decision: Decision, stalled: Stall) -> None:
    """The world stands still.  If it is known because of whom, without that one; else the fence will tell."""
    state = decision.run.state
    culprit = (stalled.culprit,) if stalled.culprit else ()
    if not isinstance(state, Stopping):
        return expel(decision, culprit, stalled.sentence) if culprit else stop(decision, stalled.sentence)
    membership.expel(decision, culprit, stalled.sentence, examine=True)
    pending = tuple(worker for worker in state.pending if worker not in culprit)
    decision.amend(pending=pending, expelled=(*state.expelled, *culprit))
    decision.say(stalled.sentence)
    give_up_the_boundary(decision)


def broken(decision: Decision, event: Broken) -> None:
    """A member stands still.  It still has to answer the fence: what it saw of the last commit counts."""
    state = decision.run.state
    job_error = _note_failure(decision, event) if event.cause in ("job", "device") else ""
    what = event.signature if event.cause == "device" else event.detail.strip().rpartition("\n")[2]
    if event.cause == "device":
        membership.unfit(decision, event.worker, what)
    if event.cause == "damaged" and event.version is not None:
        checkpoints.damaged(decision, event.version, f"{event.worker}: {event.detail}")
    if event.cause == "copy":
        copy_inventory.unreadable(decision, NodeId(event.signature))
    cause = f"{event.worker} cannot go on ({event.cause}: {what})"
    if isinstance(state, Stopping):
        decision.amend(job_error=state.job_error or job_error)
        decision.say(cause)
        if state.planned:
            give_up_the_boundary(decision)
    else:
        stop(decision, cause, job_error=job_error)


def _note_failure(decision: Decision, event: Broken) -> str:
    """The user's own words when the job is at fault: the same error came back at the same step, on another worker.

    A device's error may be the job's too: an index out of range breaks one device after the other.  The members move up by one seat, so
    that the microbatch is run by another one next time.  A single worker tries twice.
    """
    run, members = decision.run, decision.plan.members
    same = [each for each in run.failures if (each.signature, each.step) == (event.signature, event.step)]
    again = any(each.generation < event.generation and (each.worker != event.worker or len(members) == 1) for each in same)
    if not any(each.generation == event.generation for each in run.failures):
        decision.know(seats=(*run.seats[1:], *run.seats[:1]))
    failure = JobFailure(event.signature, event.step, event.worker, event.generation)
    decision.know(failures=(*run.failures, *((failure,) if failure not in run.failures else ())))
    return event.detail or event.signature if again else ""


def stop_requested(decision: Decision, event: StopRequested) -> None:
    """A clean stop with a save, at the next occasion; a run that waits or steps goes on to say so itself."""
    decision.know(stop=event.reason or "asked for")
    state = decision.run.state
    if isinstance(state, Stopping) and state.planned and state.pending and not state.save:
        decision.amend(save=True)
        decision.do(Pause(state.plan.generation, state.plan.members, save=True))
    if not isinstance(state, Waiting | Running):
        decision.say(f"stop asked for ({event.reason})")
