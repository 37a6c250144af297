"""What becomes of a world that has ended, and of a run without one.

Nothing is aborted before every member has answered the fence or is certainly out.  Then the outcome of the broken step is decided,
once, from all evidence, and what each survivor holds is known without asking again.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic.control import copy_inventory, membership, saving
from elastic.control.decision import Decision, count, names
from elastic.control.forming import form
from elastic.control.liveness import silent
from elastic.control.outcome import Settlement, newest, settle
from elastic.control.running import expecting, finish
from elastic.control.seating import candidates
from elastic.control.states import Failed, Finished, Finishing, RunState, Stopped, Stopping, Waiting
from elastic.control.stopping import stands_still, stop, unblock
from elastic.ids import WorkerId
from elastic.protocol.actions import Exit, Fence, Kill, Settle

LONGER = 1.5
"""Times ``silence_s`` after its last beat a node that does not answer the fence either, as others have, is waited for no more."""


def waiting(decision: Decision, state: Waiting) -> None:
    run, rules = decision.run, decision.rules
    there = candidates(run, rules)
    begun = run.seats or run.unread  # by another coordinator, perhaps, whose journal could not be read
    fresh = not frozenset(run.seats).intersection(there)  # survivors go on at once; a new world may wait for those on their way
    if _finished(decision):
        end(decision, Finished(), f"finished: step {run.saved[-1].step} is in the bucket")
    elif run.stop:
        end(decision, *_stopped(decision))
    elif not begun and (split := [refusal.why for refusal in run.refused.values() if refusal.shared]):
        end(decision, Failed(split[0]), "nothing has run yet, so nothing is run")
    elif decision.now >= run.blind_until and not (fresh and (expecting(decision, there) or _looking(decision, state))):
        form(decision)
    if not isinstance(decision.run.state, Waiting):
        return
    if decision.now - max(state.since, run.blind_until) >= rules.wait_s:
        end(decision, Failed(f"waited {rules.wait_s:g} s for workers: {_have(decision, there)}"))
    elif not begun and _only_refused_are_left(decision, state):
        end(decision, Failed(f"no room for workers that may be members: {_have(decision, there)}"))


def _looking(decision: Decision, state: Waiting) -> bool:
    """Is a node that was found neither in order nor refused yet?  The first world does not begin before all have been looked at."""
    run = decision.run
    open_ = [node for node, checked in run.nodes.items() if not checked and node not in run.refused]
    return bool(open_) and decision.now - state.since < decision.rules.form_s


def _only_refused_are_left(decision: Decision, state: Waiting) -> bool:
    """Has it been so from the start that there is room for nobody but on nodes that are refused?  A run that has begun waits on."""
    run = decision.run
    left_out = max((worker.joined_at for worker in run.workers.values()), default=0.0)
    latest = max((refusal.at for refusal in run.refused.values()), default=left_out)
    nothing_to_come = not run.starting and run.slots == 0 and decision.now - max(state.since, latest, left_out) >= decision.rules.refused_s
    return nothing_to_come and bool(run.refused or len(candidates(run, decision.rules)) < len(run.workers))


def _have(decision: Decision, there: Sequence[WorkerId]) -> str:
    run = decision.run
    refused = [refusal.why for refusal in run.refused.values()]
    others = [f"{worker} on node {known.node[:8]} is {known.kind}" for worker, known in run.workers.items() if worker not in there]
    have = f"{count(len(there), 'worker')} of at least {decision.rules.min_workers}"
    return "; ".join((have, *refused, *others))


def finishing(decision: Decision, state: Finishing) -> None:
    run = decision.run
    if _finished(decision) and run.untold:
        stop(decision, f"the last checkpoint is in the bucket; what step {run.untold[0]} consumed is still to be told")
    elif _finished(decision):
        end(decision, Finished(), f"finished at step {run.version.step}")
    elif saving.find(run.saves, run.version) is None:
        stop(decision, "the last checkpoint cannot become complete")
    elif decision.now >= state.deadline:
        stop(decision, f"nothing of the last checkpoint arrived for {decision.rules.stop_s:g} s")


def stopping(decision: Decision, state: Stopping) -> None:
    if state.planned and decision.run.version.step >= decision.rules.target_step:
        return finish(decision, state.plan)
    if state.planned and state.pending:
        stalled = stands_still(decision, state.plan)
        return unblock(decision, stalled) if stalled else None
    if state.pending and decision.now >= state.deadline:
        state = _expel_the_silent(decision, state)
    elif state.pending:
        state = _expel_silent_nodes(decision, state)
    if state.pending or not _certain(decision, state) or _awaits_save(decision, state):
        return
    _settle(decision, state)
    _next(decision, state)


def _certain(decision: Decision, state: Stopping) -> bool:
    """Can the generation commit no more, nor one that nobody knows of?  Where nobody can be reached, only once every lease has run out."""
    return decision.now >= decision.run.blind_until and (bool(state.answers or state.lost) or decision.now >= decision.run.lease_until)


def _expel_the_silent(decision: Decision, state: Stopping) -> Stopping:
    silent, generation = state.pending, state.plan.generation
    if not _certain(decision, state):
        decision.amend(deadline=decision.now + decision.rules.fence_s)
        decision.do(Fence(generation, silent))
        decision.say(f"nobody of generation {generation} answers: ask again until the leases have run out")
    else:
        why = f"no answer to the fence of generation {generation} within {decision.rules.fence_s:g} s"
        membership.expel(decision, silent, why, examine=True)
        copy_inventory.ask(decision)
        decision.amend(pending=(), expelled=(*state.expelled, *silent))
        decision.say(f"{why}: expel {names(silent)}")
    assert isinstance(decision.run.state, Stopping)
    return decision.run.state


def _expel_silent_nodes(decision: Decision, state: Stopping) -> Stopping:
    """All that is there, once nobody else's answer to the fence is waited for: neither their keepers nor the members are heard."""
    run, silence_s = decision.run, decision.rules.silence_s
    gone = silent(run.watch, state.plan.nodes, decision.now, LONGER * silence_s, silence_s)
    elsewhere = [worker for worker in state.pending if worker not in run.workers or run.workers[worker].node not in gone]
    if elsewhere or not _certain(decision, state):  # one whose joining was never read of is asked too, and its node is not known yet
        return state
    answered = frozenset(answer.worker for answer in state.answers)
    there = tuple(worker for worker, known in run.workers.items() if known.node in gone and worker not in answered)
    why = f"nothing was heard from node {', '.join(node[:8] for node in gone)} for {LONGER * silence_s:g} s, nor an answer to the fence"
    membership.expel(decision, there, why)
    decision.amend(pending=(), expelled=(*state.expelled, *state.pending))
    decision.say(f"{why}: expel {names(there)}")
    assert isinstance(decision.run.state, Stopping)
    return decision.run.state


def _awaits_save(decision: Decision, state: Stopping) -> bool:
    on_its_way = saving.find(decision.run.saves, decision.run.version) is not None
    return state.planned and state.save and on_its_way and decision.now < state.deadline


def _settle(decision: Decision, state: Stopping) -> None:
    run, plan = decision.run, state.plan
    answers = [answer for answer in state.answers if answer.worker in run.workers]
    settlement = settle(plan, answers, newest((run.last,), plan.generation))
    survivors = tuple(answer.worker for answer in answers)
    membership.hold(decision, settlement.holdings)
    if survivors:
        decision.do(Settle(plan.generation, survivors, settlement.outcome))
        decision.know(settled=Settle(plan.generation, survivors, settlement.outcome))
    _say_outcome(decision, settlement, {answer.prepared for answer in answers if answer.prepared})
    unusable = tuple(worker for worker in survivors if run.workers[worker].unfit)
    membership.expel(decision, unusable, "its process is unusable")
    decision.know(silent=0 if survivors else plan.generation)
    if run.version.generation != plan.generation or (not state.planned and _as_far_as_another(run, plan.generation)):
        decision.know(fruitless=run.fruitless + 1)


def _as_far_as_another(run: RunState, generation: int) -> bool:
    """Has it done again all that was given up, and come no further than the one that did it first?"""
    return run.version.step >= run.furthest.step and run.furthest.generation != generation


def _say_outcome(decision: Decision, settlement: Settlement, prepared: set[int]) -> None:
    if settlement.outcome is not None:
        decision.say(f"step {settlement.outcome.step} was committed: it is applied by {names(settlement.applied_by)} too")
    elif prepared:
        decision.say(f"nobody saw step {max(prepared)} committed: it is dropped")


def _next(decision: Decision, state: Stopping) -> None:
    run, rules = decision.run, decision.rules
    if state.job_error:
        step = run.failures[-1].step
        who = names(tuple(dict.fromkeys(failure.worker for failure in run.failures if failure.step == step)))
        end(decision, Failed(f"job error: {run.failures[-1].signature} at step {step}, again on {who}", state.job_error))
    elif _finished(decision):
        end(decision, Finished(), f"finished at step {run.saved[-1].step}")
    elif run.stop:
        end(decision, *_stopped(decision))
    elif run.fruitless > rules.max_fruitless:
        budget = f"{run.fruitless} generations in a row ended without a commit of a new step, {rules.max_fruitless} may"
        end(decision, Failed(f"{budget}; the last one: {state.cause}"))
    else:
        form(decision)


def _finished(decision: Decision) -> bool:
    return bool(decision.run.saved) and decision.run.saved[-1].step >= decision.rules.target_step


def _stopped(decision: Decision) -> tuple[Stopped | Failed, str]:
    run = decision.run
    saved = run.saved[-1].step if run.saved else 0
    unsaved = f"; steps {saved + 1}–{run.version.step} are not saved" if run.version.step > saved else ""
    if run.gave_up:
        return Failed(run.gave_up), f"gave up ({run.gave_up}), resumes from step {saved}{unsaved}"
    return Stopped(f"{run.stop}"), f"stopped ({run.stop}), resumes from step {saved}{unsaved}"


def end(decision: Decision, state: Finished | Stopped | Failed, sentence: str = "") -> None:
    """The run is over for everybody."""
    decision.to(state)
    decision.durable = True
    decision.say(sentence or getattr(state, "reason", ""))
    if decision.run.workers:
        decision.do(Exit(tuple(decision.run.workers)))
    if decision.run.starting:
        decision.do(Kill(tuple(decision.run.starting), "the run is over"))
