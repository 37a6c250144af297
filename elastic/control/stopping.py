"""Stopping: how a world is ended, and how its last step is decided.

A stop is *planned* when the members agree on a boundary in a commit: nothing is lost.  Otherwise the members
are fenced, then the outcome of the broken step is decided, and only then is anything aborted.  Members answer
both kinds in the same way, so a planned stop becomes an unplanned one when a member is lost.

Nothing is aborted before every member has answered or is certainly gone.  Then the outcome is decided once,
from all evidence.  What each survivor holds is known from its answer.
"""

from __future__ import annotations

from elastic.control import admission, commits, copy_inventory, edges, lemons, membership, saves
from elastic.control.commits import Settlement, newest, settle
from elastic.control.decision import Decision, names
from elastic.control.draining import awaits_copies, let_leave
from elastic.control.liveness import Stall, averaged, silence, silent, stall
from elastic.control.run import (
    Answer,
    Failed,
    Finishing,
    Forming,
    JobFailure,
    Running,
    RunState,
    Stopping,
    Waiting,
)
from elastic.ids import NodeId, WorkerId
from elastic.plan.placement import data_groups
from elastic.protocol.actions import Fence, Pause, Settle
from elastic.protocol.commit_record import SAVE_AND_PAUSE
from elastic.protocol.events import Broken, Fenced, StopRequested
from elastic.protocol.plan import Plan

LONGER = 1.5
"""Factor of ``silence_s``: a node without a beat for that long is given up if only its answers to the fence
are missing.
"""

SAYS = (": its library says: ", "; the library says: ", "(setup: ")
"""Parts of the cause of a stop that show that it already has a library's message."""

# ---- why a world stops


def stop_requested(decision: Decision, event: StopRequested) -> None:
    """Notes that a clean stop with a save is wanted.  A waiting or running world begins it when the run goes
    on, and says so then.
    """
    decision.know(stop=event.reason or "asked for")
    state = decision.run.state
    if isinstance(state, Stopping) and state.planned and state.pending and not state.save:
        decision.amend(save=True)
        decision.do(Pause(state.plan.generation, state.plan.members, save=True))
    if not isinstance(state, Waiting | Running):
        decision.say(f"stop asked for ({event.reason})")


def broken(decision: Decision, event: Broken) -> None:
    """Notes that a member stands still.  The member must still answer the fence, because the last commit that
    it saw counts.
    """
    state = decision.run.state
    blamed = _blamed(decision, event) if event.cause == "setup" else None
    job_error = _note_failure(decision, event) if event.cause in ("job", "device") or blamed == () else ""
    what = event.signature if event.cause == "device" else event.detail.strip().rpartition("\n")[2]
    if event.cause == "device":
        membership.unfit(decision, event.worker, what)
        lemons.failed(
            decision, decision.run.workers[event.worker].node, f"the device of {event.worker} failed"
        )
    if event.cause == "damaged" and event.version is not None:
        saves.damaged(decision, event.version, f"{event.worker}: {event.detail}")
    if event.cause == "copy":
        copy_inventory.unreadable(decision, NodeId(event.signature))
    cause = _told(decision, event, what)
    if isinstance(state, Stopping):
        decision.amend(job_error=state.job_error or job_error)
        decision.say(cause)
        if state.planned:
            give_up_the_boundary(decision)
    else:
        edges.stop(decision, cause, job_error=job_error)
    if blamed:
        _replace(decision, event, blamed, what)


def _blamed(decision: Decision, event: Broken) -> tuple[WorkerId, ...] | None:
    """Returns the members to replace because the communication library forms no world with their processes;
    () if no member is new.

    A newcomer, which holds no state, is replaced on its own report.  Older members formed worlds before, so
    they stay, and their report counts against all newcomers.  Returns None after a death, since then nobody
    is to blame, and once older members have reported: hundreds report the same, and each report would be
    compared with all members.
    """
    run, state, generation = decision.run, decision.run.state, event.generation
    if isinstance(state, Stopping) and (state.lost or state.expelled):
        return None
    if not run.workers[event.worker].holdings:
        return (event.worker,)
    spoken = (admission.ANY_NODE, generation) in run.cluster.replaced
    if spoken or sum(failure.generation == generation for failure in run.history.failures) > 1:
        return None
    return tuple(
        each for each in decision.plan.members if each in run.workers and not run.workers[each].holdings
    )


def _replace(decision: Decision, event: Broken, newcomers: tuple[WorkerId, ...], what: str) -> None:
    """Replaces ``newcomers``.  The replacement counts against their node if all are on one; of several nodes,
    it is not known which is to blame.
    """
    workers = decision.run.workers
    if event.worker not in newcomers:
        admission.note(decision, admission.ANY_NODE, event.generation)
    for worker in newcomers:
        membership.unfit(decision, worker, what)
    node, *others = {workers[worker].node for worker in newcomers}
    if not others:
        why = f"no world forms with {names(newcomers)} on node {node[:8]}: {what}"
        admission.replaced(decision, node, newcomers, why, event.generation)


def _told(decision: Decision, event: Broken, what: str) -> str:
    """Returns the sentence about a member that stands still because of another member, or of an error that
    other members may have had before.

    A library's message is told once for each world, since hundreds of members may report it, and not at all
    after a death.
    """
    state, worker = decision.run.state, event.worker
    if isinstance(state, Stopping) and event.cause in ("peer", "setup"):
        words = what if event.cause == "setup" else event.signature
        if not words or state.lost or state.expelled or any(mark in state.cause for mark in SAYS):
            return f"{worker} waits meanwhile" if event.cause == "peer" else f"{worker} cannot go on either"
        decision.amend(cause=f"{state.cause}; {worker}{SAYS[0]}{words}")
    if event.cause == "peer":
        return f"{worker} waits, because its world broke (peer: {what})"
    before = [
        each.worker
        for each in decision.run.history.failures
        if (each.signature, each.step) == (event.signature, event.step)
    ]
    also = (
        next((f", as {each} before it" for each in before if each != worker), "")
        if event.cause == "job"
        else ""
    )
    return f"{worker} cannot go on ({event.cause}: {what}){also}"


def _note_failure(decision: Decision, event: Broken) -> str:
    """Returns the user's traceback if the job is at fault: the same error came back at the same step, on
    another worker.

    A device's error may be the job's fault too: an index out of range breaks one device after the other.  The
    next plan gives the microbatch to another worker.  A single worker tries twice.
    """
    failures, members = decision.run.history.failures, decision.plan.members
    same = [each for each in failures if (each.signature, each.step) == (event.signature, event.step)]
    again = any(
        each.generation < event.generation and (each.worker != event.worker or len(members) == 1)
        for each in same
    )
    failure = JobFailure(event.signature, event.step, event.worker, event.generation)
    decision.know("history", failures=(*failures, *((failure,) if failure not in failures else ())))
    return event.detail or event.signature if again else ""


def stands_still(decision: Decision, plan: Plan) -> Stall | None:
    """Returns the stall of the world of ``plan``, with its cause as far as that is known; None while the
    world moves.
    """
    watch, rules, until = decision.run.watch, decision.rules, decision.heard_until
    return silence(watch, plan.nodes, until, rules.silence_s) or stall(
        watch, plan.members, until, rules.stall_s, data_groups(plan.layout)
    )


def unblock(decision: Decision, stalled: Stall) -> None:
    """Ends a world that stands still.  A known culprit is expelled; otherwise the fence shows which member
    does not answer.
    """
    state = decision.run.state
    culprit = (stalled.culprit,) if stalled.culprit else ()
    if not isinstance(state, Stopping):
        return (
            expel(decision, culprit, stalled.sentence) if culprit else edges.stop(decision, stalled.sentence)
        )
    membership.expel(decision, culprit, stalled.sentence, examine=True)
    pending = tuple(worker for worker in state.pending if worker not in culprit)
    decision.amend(pending=pending, expelled=(*state.expelled, *culprit))
    decision.say(stalled.sentence)
    give_up_the_boundary(decision)


def expel(decision: Decision, workers: tuple[WorkerId, ...], cause: str) -> None:
    """Expels ``workers``, which stand still, and stops their generation."""
    membership.expel(decision, workers, cause, examine=True)
    edges.stop(decision, f"{cause}: expel {names(workers)}", expelled=workers)


def members_lost(
    decision: Decision, workers: tuple[WorkerId, ...], sentence: str, *, certain: bool = True
) -> None:
    """Notes that ``workers`` are gone; they are already removed from the run.

    If that is not ``certain`` they count as expelled, because they may still act on their leases.
    """
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
        edges.stop(decision, sentence, expelled=() if certain else members)


def give_up_the_boundary(decision: Decision) -> None:
    """Turns a planned stop into one with a fence, because the members cannot agree on the boundary any more."""
    decision.amend(planned=False, deadline=decision.now + decision.rules.fence_s)
    state = decision.run.state
    if isinstance(state, Stopping) and state.pending:
        decision.do(Fence(state.plan.generation, state.pending))
        copy_inventory.ask(decision)
        decision.say(f"generation {state.plan.generation} stops at once")


# ---- the answers


def fenced(decision: Decision, event: Fenced) -> None:
    """Takes a member's answer to the fence: it applies nothing more in this generation, so what it holds is
    certain now.
    """
    state = decision.run.state
    if isinstance(state, Finishing):
        return
    # an answer to an earlier coordinator: the worker may have gone on since, and answers again
    if event.heeds is not None and event.heeds < decision.run.incarnation:
        return commits.all_committed(decision, event.outcomes)
    if isinstance(state, Forming | Running):
        edges.stop(decision, f"{event.worker} has left generation {event.generation}")
        return fenced(decision, event)
    assert isinstance(state, Stopping)
    if event.generation < state.plan.generation:  # this generation left the worker out
        return membership.hold(decision, {event.worker: event.held})
    # the worker died after it answered: its commits count, its state is gone
    if event.worker not in decision.run.workers:
        return commits.all_committed(decision, event.outcomes)
    if event.worker not in state.pending:
        return decision.refuse(f"{event.worker} has answered already")
    commits.all_committed(decision, event.outcomes)
    membership.hold(decision, {event.worker: event.held})
    place = state.pending.index(event.worker)
    pending = (*state.pending[:place], *state.pending[place + 1 :])
    answer = Answer(event.worker, event.held, event.prepared, event.newest_seen, event.whole)
    decision.amend(pending=pending, answers=(*state.answers, answer))
    if state.save and not pending:
        decision.amend(deadline=decision.now + decision.rules.stop_s)


def go_on(decision: Decision, state: Stopping) -> None:
    if state.planned and edges.is_done(decision.run, state.plan, decision.rules):
        return edges.finish(decision, state.plan)
    if state.planned and state.pending:
        stalled = stands_still(decision, state.plan)
        return unblock(decision, stalled) if stalled else None
    if state.pending and decision.due(state.deadline):
        state = _expel_the_silent(decision, state)
    elif state.pending:
        state = _expel_silent_nodes(decision, state)
    if not state.pending and (knows := _knows_more(decision.run, state)) is not None:
        return ask_again(decision, state, knows, whole=True)
    if state.pending or not _certain(decision, state) or _awaits_save(decision, state):
        return
    if awaits_copies(decision, state):
        return
    if state.planned and state.hand_over:
        known_s, took_s = decision.run.watch.hand_over_s, decision.now - decision.run.watch.stepped_at
        decision.know("watch", hand_over_s=averaged(known_s, took_s))
    _settle(decision, state)
    _next(decision, state)


def _knows_more(run: RunState, state: Stopping) -> WorkerId | None:
    """Returns a living member that has seen a commit that no answer has brought, because the members whose
    answers bring commits are gone; None without one.
    """
    history, generation = run.history, state.plan.generation
    known = max((each.seen.step for each in state.answers if each.seen and each.whole), default=0)
    known = max(
        known, history.version.step if history.version.generation == generation and not history.untold else 0
    )
    more = [
        each
        for each in state.answers
        if each.seen and not each.whole and each.seen.step > known and each.worker in run.workers
    ]
    return max(more, key=lambda each: each.seen.step if each.seen else 0).worker if more else None


def ask_again(decision: Decision, state: Stopping, worker: WorkerId, *, whole: bool = False) -> None:
    """Fences again a member that has answered already: it may have applied the prepared step since, or it has
    seen commits that the coordinator lacks.
    """
    answers = tuple(answer for answer in state.answers if answer.worker != worker)
    if answers != state.answers:
        decision.amend(
            answers=answers, pending=(*state.pending, worker), deadline=decision.now + decision.rules.fence_s
        )
        decision.do(Fence(state.plan.generation, (worker,), whole))


def _certain(decision: Decision, state: Stopping) -> bool:
    """Returns whether neither this generation nor an unknown one can commit any more.

    If no member can be reached, that is certain only once every lease has run out.
    """
    run = decision.run
    return decision.due(run.takeover.blind_until) and (
        bool(state.answers or state.lost) or decision.due(run.watch.lease_until)
    )


def _expel_the_silent(decision: Decision, state: Stopping) -> Stopping:
    """Expels the members that have not answered by the deadline.

    If nothing at all was heard of the generation, they are asked again until the leases have run out.
    """
    pending, generation = state.pending, state.plan.generation
    if not _certain(decision, state):
        decision.amend(deadline=decision.now + decision.rules.fence_s)
        decision.do(Fence(generation, pending))
        decision.say(
            f"no worker of generation {generation} answers: ask again until their leases have run out"
        )
    else:
        why = f"no answer to the fence of generation {generation} within {decision.rules.fence_s:g} s"
        membership.expel(decision, pending, why, examine=True)
        copy_inventory.ask(decision)
        decision.amend(pending=(), expelled=(*state.expelled, *pending))
        decision.say(f"{why}: expel {names(pending)}")
    assert isinstance(decision.run.state, Stopping)
    return decision.run.state


def _expel_silent_nodes(decision: Decision, state: Stopping) -> Stopping:
    """Expels the members on silent nodes, once only their answers to the fence are missing."""
    run, silence_s = decision.run, decision.rules.silence_s
    gone = silent(run.watch, state.plan.nodes, decision.heard_until, LONGER * silence_s, silence_s)
    if not gone:
        return state
    elsewhere = [
        worker
        for worker in state.pending
        if worker not in run.workers or run.workers[worker].node not in gone
    ]
    # a worker may be fenced whose join was never read, so its node is unknown
    if elsewhere or not _certain(decision, state):
        return state
    answered = frozenset(answer.worker for answer in state.answers)
    there = tuple(
        worker for worker, known in run.workers.items() if known.node in gone and worker not in answered
    )
    why = (
        f"nothing was heard from node {', '.join(node[:8] for node in gone)} for {LONGER * silence_s:g} s, "
        "nor an answer to the fence"
    )
    membership.expel(decision, there, why)
    for node in gone:
        lemons.failed(decision, node, "nothing was heard from it")
    saves.without_keepers(decision, gone)
    decision.amend(pending=(), expelled=(*state.expelled, *state.pending))
    decision.say(f"{why}: expel {names(there)}")
    assert isinstance(decision.run.state, Stopping)
    return decision.run.state


def _awaits_save(decision: Decision, state: Stopping) -> bool:
    on_its_way = decision.run.saves.find(decision.run.version) is not None
    return (
        state.planned
        and state.save
        and on_its_way
        and not decision.due(saves.patient_until(decision, state.deadline))
    )


# ---- the outcome, and what comes next


def _settle(decision: Decision, state: Stopping) -> None:
    run, plan = decision.run, state.plan
    answers = [answer for answer in state.answers if answer.worker in run.workers]
    settlement = settle(plan, answers, newest((run.history.last,), plan.generation))
    survivors = tuple(answer.worker for answer in answers)
    membership.hold(decision, settlement.holdings)
    if survivors:
        decision.do(Settle(plan.generation, survivors, settlement.outcome))
        decision.know("history", settled=Settle(plan.generation, survivors, settlement.outcome))
    _say_outcome(decision, settlement, {answer.prepared for answer in answers if answer.prepared})
    let_leave(decision, survivors)
    there = decision.run.workers
    unusable = tuple(worker for worker in survivors if worker in there and there[worker].unfit)
    membership.expel(decision, unusable, "its process is unusable")
    decision.know("copies", unreported=0 if survivors else plan.generation)
    if not state.noticed and (
        run.version.generation != plan.generation
        or (not state.planned and _as_far_as_another(run, plan.generation))
    ):
        decision.know("history", fruitless=run.history.fruitless + 1)


def _as_far_as_another(run: RunState, generation: int) -> bool:
    """Returns whether ``generation`` only repeated steps that were given up: it reached the furthest step of
    the run, which another generation committed first.
    """
    return run.step >= run.history.furthest.step and run.history.furthest.generation != generation


def _say_outcome(decision: Decision, settlement: Settlement, prepared: set[int]) -> None:
    if settlement.outcome is not None:
        decision.say(
            f"step {settlement.outcome.step} was committed: it is applied by {names(settlement.applied_by)} "
            "too"
        )
    elif prepared:
        decision.say(f"nobody saw step {max(prepared)} committed: it is dropped")


def _next(decision: Decision, state: Stopping) -> None:
    run, rules = decision.run, decision.rules
    failures, fruitless = run.history.failures, run.history.fruitless
    if state.job_error:
        step = failures[-1].step
        who = names(tuple(dict.fromkeys(failure.worker for failure in failures if failure.step == step)))
        reason = f"job error: {failures[-1].signature} at step {step}, again on {who}"
        edges.end(decision, Failed(reason, state.job_error))
    elif saves.target_is_saved(run, rules):
        edges.finished(decision, f"finished at step {run.history.saved[-1].step}")
    elif run.stop and not _another_world_saves(run, state):
        edges.end_as_asked(decision)
    elif fruitless > rules.max_fruitless:
        budget = f"{fruitless} generations in a row committed no new step; at most {rules.max_fruitless} may"
        edges.end(decision, Failed(f"{budget}.  The last one ended because: {state.cause}"))
    else:
        edges.form(decision)


def _another_world_saves(run: RunState, state: Stopping) -> bool:
    """Returns whether a stop that was asked for takes one more world, which saves at its first boundary.

    The present world has not saved its newest state: its members had agreed on the boundary before they heard
    of the stop, it lost members, or it ended before it stepped because a machine will be taken.
    """
    last, saved = run.history.last, run.history.saved
    agreed = state.planned and last is not None and not last.saves and last.boundary != SAVE_AND_PAUSE
    left = bool(state.lost or state.expelled) and not run.gave_up
    return (agreed or left or state.noticed) and run.step > (saved[-1].step if saved else 0)
