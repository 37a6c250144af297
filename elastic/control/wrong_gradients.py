"""Reruns: two members have computed different gradients from one microbatch (``protocol/reruns.py``).

Nobody has applied the step, so nothing is lost: the world stops, and the step is done again, with its reruns.
Who was wrong?  Two were compared, so nobody knows at first.  If all agree when the step is done again, wrong is
who had said something else of a microbatch of which another one was right.  If they differ again, wrong is who
differs from what was said most often of a microbatch, both times together.  Whoever was wrong is replaced, and
the second time on one node, that node is refused.

Three such steps in a row end the run, because then the code is more likely to blame than a machine.  A member
that is wrong only in other steps is not found, nor one that is the only data rank.
"""

from __future__ import annotations

from elastic.control import corruption, edges, stopping
from elastic.control.decision import Decision, names
from elastic.control.run import Dispute, Stopping, Vote
from elastic.ids import NodeId, WorkerId
from elastic.protocol.events import Broken
from elastic.protocol.reruns import Computed


def differ(decision: Decision, event: Broken) -> None:
    """Stops the world whose members differ, once the first of them tells it."""
    known, state = decision.run.history.rerun, decision.run.state
    cause = f"{event.worker} waits meanwhile"
    if known is None or known.generation != event.generation:
        cause = _note(decision, event)
    if not isinstance(state, Stopping):
        return edges.stop(decision, cause)
    decision.say(cause)
    if state.planned:
        stopping.give_up_the_boundary(decision)


def _note(decision: Decision, event: Broken) -> str:
    """Takes note of the digests that differ, and returns the cause of the stop."""
    known = decision.run.history.rerun
    before = known.votes if known is not None and known.step == event.step else ()
    votes = tuple(_vote(decision, each) for each in event.computed)
    wrong = corruption.outvoted(votes, before)
    who = names(corruption.workers_of(wrong or votes))
    cause = (
        f"{who} computed other gradients in step {event.step} than others did from the same microbatch"
        if wrong
        else f"{who} computed different gradients from the same microbatch in step {event.step}, and nobody "
        "knows which are right: the step is done again"
    )
    times = 1 if known is None else known.times + 1
    dispute = Dispute(event.step, () if wrong else (*before, *votes), times, event.generation)
    decision.know("history", rerun=dispute)
    decision.durable = True
    corruption.replace_wrong(decision, wrong, cause)
    if times >= corruption.LIMIT:
        why = (
            f"members computed different gradients {times} times in a row, the last time in step {event.step}: find "
            "the machine that is faulty, or the code that computes other bits each time; workers.rerun_every = 0 "
            "trains on without looking"
        )
        decision.know(gave_up=why, stop=decision.run.stop or why)
    return cause


def agree(decision: Decision) -> None:
    """Ends a dispute once a step with reruns is committed: the members agree at its step, or at a later one."""
    known, last = decision.run.history.rerun, decision.run.history.last
    if known is None or last is None or not last.reran or last.step < known.step:
        return
    decision.know("history", rerun=None)
    if not known.votes:
        return
    right = [
        Vote(WorkerId(""), NodeId(""), _about(microbatch), _text(digest)) for microbatch, digest in last.reran
    ]
    wrong = corruption.refuted(right, known.votes) if last.step == known.step else ()
    step, who = known.step, names(corruption.workers_of(wrong or known.votes))
    corruption.end_dispute(
        decision,
        wrong,
        f"{who} computed other gradients in step {step} than the same step gave when it was done again"
        if wrong
        else f"all compute the same gradients again; which of {who} was wrong in step {step} is not known",
    )


def _vote(decision: Decision, computed: Computed) -> Vote:
    plan, rank = decision.plan, computed.rank
    node = plan.nodes[rank] if plan.nodes else NodeId("")
    return Vote(plan.members[rank], node, _about(computed.microbatch), _text(computed.digest))


def _about(microbatch: int) -> str:
    return f"microbatch {microbatch}"


def _text(digest: int) -> str:
    return f"{digest:x}"
