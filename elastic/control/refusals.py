"""Worlds are numbered: what carries an older number, or comes from somebody whose word counts no more, is refused."""

from __future__ import annotations

from elastic.control.states import RunState, Stopping
from elastic.protocol.events import Broken, Event, Fenced, Here, Ready, Renewed, StepDone

OfAGeneration = Here | Ready | StepDone | Renewed | Broken | Fenced


def refusal(run: RunState, event: Event, now: float) -> str | None:
    """Why ``event`` changes nothing; None when it is to be heard."""
    if run.over:
        return f"the run is over ({type(run.state).__name__})"
    if not isinstance(event, OfAGeneration) or (isinstance(event, Fenced) and _left_out(run, event, now)):
        return None
    return _out_of_date(run, event)


def _left_out(run: RunState, event: Fenced, now: float) -> bool:
    """Whether this is the answer of one who is in no later generation than an older one, to a coordinator that has not read why.

    It was expelled, say, by one that was cut off before it was killed.  It applies nothing any more: what it holds counts.
    """
    if now >= run.blind_until or not isinstance(run.state, Stopping) or event.generation >= run.generation:
        return False
    return event.worker in run.workers and event.worker not in run.state.plan.members


def _out_of_date(run: RunState, event: OfAGeneration) -> str | None:
    what = f"{type(event).__name__} of {event.worker}"
    if event.generation != run.generation:
        return f"{what} is of generation {event.generation}, the run is at {run.generation}"
    if run.plan is None:
        return f"{what}: generation {event.generation} is settled"
    if event.worker not in run.plan.members:
        return f"{what}, which is no member of generation {event.generation}"
    if event.worker not in run.workers and not _evidence_of_the_dead(run, event):
        return f"{what}, which is lost or expelled"
    return None


def _evidence_of_the_dead(run: RunState, event: OfAGeneration) -> bool:
    """A commit that was reported before the reporter died is a fact; one who is expelled may still live and say more."""
    return isinstance(event, StepDone | Fenced) and isinstance(run.state, Stopping) and event.worker not in run.state.expelled
