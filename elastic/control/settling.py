"""What becomes of a world that has ended, and of a run without one.

Nothing is aborted before every member has answered the fence or is certainly out.  Then the outcome of the broken step is decided,
once, from all evidence, and what each survivor holds is known without asking again.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic.control import membership, saving, stock
from elastic.control.actions import Exit, Fence, Kill, Settle
from elastic.control.forming import form
from elastic.control.health import silent
from elastic.control.outcome import Settlement, newest, settle
from elastic.control.seating import candidates
from elastic.control.states import Failed, Finished, Finishing, RunState, Stopped, Stopping, Waiting
from elastic.control.stepping import expecting, finish
from elastic.control.stopping import stands_still, stop, unblock
from elastic.control.turn import Turn, count, names
from elastic.ids import WorkerId

LONGER = 1.5
"""Times ``silence_s`` after its last beat a node that does not answer the fence either, as others have, is waited for no more."""


def waiting(turn: Turn, state: Waiting) -> None:
    run, rules = turn.run, turn.rules
    there = candidates(run, rules)
    begun = run.seats or run.unread  # by another coordinator, perhaps, whose journal could not be read
    fresh = not frozenset(run.seats).intersection(there)  # survivors go on at once; a new world may wait for those on their way
    if _finished(turn):
        end(turn, Finished(), f"finished: step {run.saved[-1].step} is in the bucket")
    elif run.stop:
        end(turn, *_stopped(turn))
    elif not begun and (split := [refusal.why for refusal in run.refused.values() if refusal.shared]):
        end(turn, Failed(split[0]), "nothing has run yet, so nothing is run")
    elif turn.now >= run.blind_until and not (fresh and (expecting(turn, there) or _looking(turn, state))):
        form(turn)
    if not isinstance(turn.run.state, Waiting):
        return
    if turn.now - max(state.since, run.blind_until) >= rules.wait_s:
        end(turn, Failed(f"waited {rules.wait_s:g} s for workers: {_have(turn, there)}"))
    elif not begun and _only_refused_are_left(turn, state):
        end(turn, Failed(f"no room for workers that may be members: {_have(turn, there)}"))


def _looking(turn: Turn, state: Waiting) -> bool:
    """Is a node that was found neither in order nor refused yet?  The first world does not begin before all have been looked at."""
    run = turn.run
    open_ = [node for node, checked in run.nodes.items() if not checked and node not in run.refused]
    return bool(open_) and turn.now - state.since < turn.rules.form_s


def _only_refused_are_left(turn: Turn, state: Waiting) -> bool:
    """Has it been so from the start that there is room for nobody but on nodes that are refused?  A run that has begun waits on."""
    run = turn.run
    left_out = max((worker.joined_at for worker in run.workers.values()), default=0.0)
    latest = max((refusal.at for refusal in run.refused.values()), default=left_out)
    nothing_to_come = not run.starting and run.slots == 0 and turn.now - max(state.since, latest, left_out) >= turn.rules.refused_s
    return nothing_to_come and bool(run.refused or len(candidates(run, turn.rules)) < len(run.workers))


def _have(turn: Turn, there: Sequence[WorkerId]) -> str:
    run = turn.run
    refused = [refusal.why for refusal in run.refused.values()]
    others = [f"{worker} on node {known.node[:8]} is {known.kind}" for worker, known in run.workers.items() if worker not in there]
    have = f"{count(len(there), 'worker')} of at least {turn.rules.min_workers}"
    return "; ".join((have, *refused, *others))


def finishing(turn: Turn, state: Finishing) -> None:
    run = turn.run
    if _finished(turn) and run.untold:
        stop(turn, f"the last checkpoint is in the bucket; what step {run.untold[0]} consumed is still to be told")
    elif _finished(turn):
        end(turn, Finished(), f"finished at step {run.version.step}")
    elif saving.find(run.saves, run.version) is None:
        stop(turn, "the last checkpoint cannot become complete")
    elif turn.now >= state.deadline:
        stop(turn, f"nothing of the last checkpoint arrived for {turn.rules.stop_s:g} s")


def stopping(turn: Turn, state: Stopping) -> None:
    if state.planned and turn.run.version.step >= turn.rules.target_step:
        return finish(turn, state.plan)
    if state.planned and state.pending:
        stalled = stands_still(turn, state.plan)
        return unblock(turn, stalled) if stalled else None
    if state.pending and turn.now >= state.deadline:
        state = _expel_the_silent(turn, state)
    elif state.pending:
        state = _expel_silent_nodes(turn, state)
    if state.pending or not _certain(turn, state) or _awaits_save(turn, state):
        return
    _settle(turn, state)
    _next(turn, state)


def _certain(turn: Turn, state: Stopping) -> bool:
    """Can the generation commit no more, nor one that nobody knows of?  Where nobody can be reached, only once every lease has run out."""
    return turn.now >= turn.run.blind_until and (bool(state.answers or state.lost) or turn.now >= turn.run.lease_until)


def _expel_the_silent(turn: Turn, state: Stopping) -> Stopping:
    silent, generation = state.pending, state.plan.generation
    if not _certain(turn, state):
        turn.amend(deadline=turn.now + turn.rules.fence_s)
        turn.do(Fence(generation, silent))
        turn.say(f"nobody of generation {generation} answers: ask again until the leases have run out")
    else:
        why = f"no answer to the fence of generation {generation} within {turn.rules.fence_s:g} s"
        membership.expel(turn, silent, why, examine=True)
        stock.ask(turn)
        turn.amend(pending=(), expelled=(*state.expelled, *silent))
        turn.say(f"{why}: expel {names(silent)}")
    assert isinstance(turn.run.state, Stopping)
    return turn.run.state


def _expel_silent_nodes(turn: Turn, state: Stopping) -> Stopping:
    """All that is there, once nobody else's answer to the fence is waited for: neither their keepers nor the members are heard."""
    run, silence_s = turn.run, turn.rules.silence_s
    gone = silent(run.watch, state.plan.nodes, turn.now, LONGER * silence_s, silence_s)
    if not _certain(turn, state) or any(run.workers[worker].node not in gone for worker in state.pending):
        return state
    answered = frozenset(answer.worker for answer in state.answers)
    there = tuple(worker for worker, known in run.workers.items() if known.node in gone and worker not in answered)
    why = f"nothing was heard from node {', '.join(node[:8] for node in gone)} for {LONGER * silence_s:g} s, nor an answer to the fence"
    membership.expel(turn, there, why)
    turn.amend(pending=(), expelled=(*state.expelled, *state.pending))
    turn.say(f"{why}: expel {names(there)}")
    assert isinstance(turn.run.state, Stopping)
    return turn.run.state


def _awaits_save(turn: Turn, state: Stopping) -> bool:
    on_its_way = saving.find(turn.run.saves, turn.run.version) is not None
    return state.planned and state.save and on_its_way and turn.now < state.deadline


def _settle(turn: Turn, state: Stopping) -> None:
    run, plan = turn.run, state.plan
    answers = [answer for answer in state.answers if answer.worker in run.workers]
    settlement = settle(plan, answers, newest((run.last,), plan.generation))
    survivors = tuple(answer.worker for answer in answers)
    membership.hold(turn, settlement.holdings)
    if survivors:
        turn.do(Settle(plan.generation, survivors, settlement.outcome))
        turn.know(settled=Settle(plan.generation, survivors, settlement.outcome))
    _say_outcome(turn, settlement, {answer.prepared for answer in answers if answer.prepared})
    unusable = tuple(worker for worker in survivors if run.workers[worker].unfit)
    membership.expel(turn, unusable, "its process is unusable")
    turn.know(silent=0 if survivors else plan.generation)
    if run.version.generation != plan.generation or (not state.planned and _as_far_as_another(run, plan.generation)):
        turn.know(fruitless=run.fruitless + 1)


def _as_far_as_another(run: RunState, generation: int) -> bool:
    """Has it done again all that was given up, and come no further than the one that did it first?"""
    return run.version.step >= run.furthest.step and run.furthest.generation != generation


def _say_outcome(turn: Turn, settlement: Settlement, prepared: set[int]) -> None:
    if settlement.outcome is not None:
        turn.say(f"step {settlement.outcome.step} was committed: it is applied by {names(settlement.applied_by)} too")
    elif prepared:
        turn.say(f"nobody saw step {max(prepared)} committed: it is dropped")


def _next(turn: Turn, state: Stopping) -> None:
    run, rules = turn.run, turn.rules
    if state.job_error:
        step = run.failures[-1].step
        who = names(tuple(dict.fromkeys(failure.worker for failure in run.failures if failure.step == step)))
        end(turn, Failed(f"job error: {run.failures[-1].signature} at step {step}, again on {who}", state.job_error))
    elif _finished(turn):
        end(turn, Finished(), f"finished at step {run.saved[-1].step}")
    elif run.stop:
        end(turn, *_stopped(turn))
    elif run.fruitless > rules.max_fruitless:
        budget = f"{run.fruitless} generations in a row ended without a commit of a new step, {rules.max_fruitless} may"
        end(turn, Failed(f"{budget}; the last one: {state.cause}"))
    else:
        form(turn)


def _finished(turn: Turn) -> bool:
    return bool(turn.run.saved) and turn.run.saved[-1].step >= turn.rules.target_step


def _stopped(turn: Turn) -> tuple[Stopped | Failed, str]:
    run = turn.run
    saved = run.saved[-1].step if run.saved else 0
    unsaved = f"; steps {saved + 1}–{run.version.step} are not saved" if run.version.step > saved else ""
    if run.gave_up:
        return Failed(run.gave_up), f"gave up ({run.gave_up}), resumes from step {saved}{unsaved}"
    return Stopped(f"{run.stop}"), f"stopped ({run.stop}), resumes from step {saved}{unsaved}"


def end(turn: Turn, state: Finished | Stopped | Failed, sentence: str = "") -> None:
    """The run is over for everybody."""
    turn.to(state)
    turn.durable = True
    turn.say(sentence or getattr(state, "reason", ""))
    if turn.run.workers:
        turn.do(Exit(tuple(turn.run.workers)))
    if turn.run.starting:
        turn.do(Kill(tuple(turn.run.starting), "the run is over"))
