"""How a world is brought to an end.

A stop is *planned* when the members agree on a boundary in a commit: nothing is lost.  Otherwise it is a fence, an outcome, and
only then an abort.  Same state, same answers: a planned stop that meets a loss becomes the other kind.
"""

from __future__ import annotations

from elastic.control import checkpoints, membership, stock
from elastic.control.actions import Fence, Pause
from elastic.control.events import Broken, StopRequested
from elastic.control.health import Stall, silence, stall
from elastic.control.states import NEVER, Finishing, JobFailure, Running, Stopping, Waiting
from elastic.control.turn import Turn, count, names
from elastic.ids import NodeId, WorkerId
from elastic.plan.plan import Plan


def pause(turn: Turn, cause: str, *, save: bool) -> None:
    """A planned stop."""
    plan = turn.plan
    turn.to(Stopping(plan, cause, True, plan.members, NEVER, save=save))
    turn.do(Pause(plan.generation, plan.members, save))
    turn.say(f"{cause}: generation {plan.generation} pauses at the next boundary")


def stop(turn: Turn, cause: str, *, expelled: tuple[WorkerId, ...] = (), job_error: str = "") -> None:
    """An unplanned stop: fence first."""
    plan = turn.plan
    pending = tuple(worker for worker in plan.members if worker in turn.run.workers)
    present = turn.run.workers.keys() | frozenset(expelled)
    lost = tuple(worker for worker in plan.members if worker not in present)
    deadline = turn.now + turn.rules.fence_s
    turn.to(Stopping(plan, cause, False, pending, deadline, lost=lost, expelled=expelled, job_error=job_error))
    if pending:
        turn.do(Fence(plan.generation, pending))
    turn.say(f"{cause}: stop generation {plan.generation} of {count(len(plan.members), 'worker')}")
    stock.ask(turn)


def expel(turn: Turn, workers: tuple[WorkerId, ...], cause: str) -> None:
    """End ``workers``, who stand still, and with them the generation."""
    membership.expel(turn, workers, cause, examine=True)
    stop(turn, f"{cause}: expel {names(workers)}", expelled=workers)


def give_up_the_boundary(turn: Turn) -> None:
    """The members cannot agree on it any more: the stop is no longer a planned one."""
    turn.amend(planned=False, deadline=turn.now + turn.rules.fence_s)
    state = turn.run.state
    if isinstance(state, Stopping) and state.pending:
        turn.do(Fence(state.plan.generation, state.pending))
        stock.ask(turn)
        turn.say(f"generation {state.plan.generation} stops at once")


def members_lost(turn: Turn, workers: tuple[WorkerId, ...], sentence: str, *, certain: bool = True) -> None:
    """``workers`` are gone, and no part of the run any more.  Where that is not certain, they count as expelled: they may act on leases."""
    state, plan = turn.run.state, turn.run.plan
    gone = frozenset(workers).intersection(plan.members) if plan is not None else frozenset()
    members = tuple(worker for worker in workers if worker in gone)
    if not members or isinstance(state, Finishing):
        turn.say(sentence)
    elif isinstance(state, Stopping):
        pending = tuple(each for each in state.pending if each not in gone)
        if certain:
            turn.amend(pending=pending, lost=(*state.lost, *members))
        else:
            turn.amend(pending=pending, expelled=(*state.expelled, *members))
        turn.say(sentence)
        if state.planned and pending:
            give_up_the_boundary(turn)
    else:
        stop(turn, sentence, expelled=() if certain else members)


def stands_still(turn: Turn, plan: Plan) -> Stall | None:
    """The world of ``plan``: and why, as far as that is known."""
    watch, rules = turn.run.watch, turn.rules
    return silence(watch, plan.nodes, turn.now, rules.silence_s) or stall(watch, plan.members, turn.now, rules.stall_s)


def unblock(turn: Turn, stalled: Stall) -> None:
    """The world stands still.  If it is known because of whom, without that one; else the fence will tell."""
    state = turn.run.state
    culprit = (stalled.culprit,) if stalled.culprit else ()
    if not isinstance(state, Stopping):
        return expel(turn, culprit, stalled.sentence) if culprit else stop(turn, stalled.sentence)
    membership.expel(turn, culprit, stalled.sentence, examine=True)
    pending = tuple(worker for worker in state.pending if worker not in culprit)
    turn.amend(pending=pending, expelled=(*state.expelled, *culprit))
    turn.say(stalled.sentence)
    give_up_the_boundary(turn)


def broken(turn: Turn, event: Broken) -> None:
    """A member stands still.  It still has to answer the fence: what it saw of the last commit counts."""
    state = turn.run.state
    job_error = _note_failure(turn, event) if event.cause in ("job", "device") else ""
    what = event.signature if event.cause == "device" else event.detail.strip().rpartition("\n")[2]
    if event.cause == "device":
        membership.unfit(turn, event.worker, what)
    if event.cause == "damaged" and event.version is not None:
        checkpoints.damaged(turn, event.version, f"{event.worker}: {event.detail}")
    if event.cause == "copy":
        stock.unreadable(turn, NodeId(event.signature))
    cause = f"{event.worker} cannot go on ({event.cause}: {what})"
    if isinstance(state, Stopping):
        turn.amend(job_error=state.job_error or job_error)
        turn.say(cause)
        if state.planned:
            give_up_the_boundary(turn)
    else:
        stop(turn, cause, job_error=job_error)


def _note_failure(turn: Turn, event: Broken) -> str:
    """The user's own words when the job is at fault: the same error came back at the same step, on another worker.

    A device's error may be the job's too: an index out of range breaks one device after the other.  The members move up by one seat, so
    that the microbatch is run by another one next time.  A single worker tries twice.
    """
    run, members = turn.run, turn.plan.members
    same = [each for each in run.failures if (each.signature, each.step) == (event.signature, event.step)]
    again = any(each.generation < event.generation and (each.worker != event.worker or len(members) == 1) for each in same)
    if not any(each.generation == event.generation for each in run.failures):
        turn.know(seats=(*run.seats[1:], *run.seats[:1]))
    failure = JobFailure(event.signature, event.step, event.worker, event.generation)
    turn.know(failures=(*run.failures, *((failure,) if failure not in run.failures else ())))
    return event.detail or event.signature if again else ""


def stop_requested(turn: Turn, event: StopRequested) -> None:
    """A clean stop with a save, at the next occasion; a run that waits or steps goes on to say so itself."""
    turn.know(stop=event.reason or "asked for")
    state = turn.run.state
    if isinstance(state, Stopping) and state.planned and state.pending and not state.save:
        turn.amend(save=True)
        turn.do(Pause(state.plan.generation, state.plan.members, save=True))
    if not isinstance(state, Waiting | Running):
        turn.say(f"stop asked for ({event.reason})")
