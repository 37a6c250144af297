"""Reruns: two members have computed different gradients from one microbatch (``protocol/reruns.py``).

Nobody has applied the step, so nothing is lost: the world stops, and the step is done again, with its reruns.
Who was wrong?  Two were compared, so nobody knows at first.  If all agree when the step is done again, wrong is
who had said something else of a microbatch of which another one was right.  If they differ again, wrong is who
differs from what was said most often of a microbatch, all times together; or else who was one of the two each
time, if it is a single worker, or all on a single node.  Whoever was wrong is replaced, and the second time on
one node, that node is refused.

If members differ three times in a row and nobody is found, the run ends, because then the code is more likely to
blame than a machine.  A member that is wrong only in other steps is not found, nor one that is the only data
rank.  If two members are wrong in one step, a third one may be blamed.  The part of the newest state that only
the replaced ones hold is lost with them: steps after the newest copies of it are done again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter

from elastic.control import commits, corruption, edges, stopping
from elastic.control.decision import Decision, names
from elastic.control.run import Dispute, Stopping, Vote
from elastic.ids import NodeId, WorkerId
from elastic.protocol.commit_record import Outcome
from elastic.protocol.events import Broken
from elastic.protocol.reruns import Computed

_worker, _node = attrgetter("worker"), attrgetter("node")


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
    wrong = corruption.outvoted((*before, *votes)) or in_every_pair((*before, *votes))
    blamed = corruption.workers_of(wrong)
    cause = (
        f"{names(blamed)} computed other gradients in step {event.step} than others did from the same microbatch"
        if wrong
        else f"{names(corruption.workers_of(votes))} computed different gradients from the same microbatch in step "
        f"{event.step}, and nobody knows which are right: the step is done again"
    )
    times = 0 if wrong else 1 + (known.times if known is not None else 0)
    rest = (each for each in pairs((*before, *votes)) if not {*blamed} & {*corruption.workers_of(each)})
    dispute = Dispute(event.step, tuple(chain.from_iterable(rest)), times, event.generation)
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


def pairs(votes: Sequence[Vote]) -> Iterator[tuple[Vote, Vote]]:
    """Returns the votes two by two, as they were compared."""
    return zip(votes[::2], votes[1::2], strict=True)


def in_every_pair(votes: Sequence[Vote]) -> tuple[Vote, ...]:
    """Returns the votes of the only worker that is in every pair.  If there is none, those of the only node that is
    in every pair of votes from two nodes.
    """
    apart = [each for pair in pairs(votes) if pair[0].node != pair[1].node for each in pair]
    for those, one in ((votes, _worker), (apart, _node)):
        common = (
            frozenset.intersection(*(frozenset(map(one, pair)) for pair in pairs(those))) if those else ()
        )
        if len(common) == 1:
            return tuple(each for each in those if one(each) in common)
    return ()


def agree(decision: Decision, outcomes: Iterable[Outcome]) -> None:
    """Ends a dispute if one of the ``outcomes``, which were told, is a commit with reruns of its step, or of a later
    one.
    """
    history = decision.run.history
    if (known := history.rerun) is None:
        return
    later = [each for each in outcomes if each.reran and each.step >= known.step]
    told = [each for each in later if history.contains(commits.version_of(each))]
    if told:
        decision.know("history", rerun=None)
        if known.votes:
            _end(decision, known, min(told, key=lambda each: each.step))


def _end(decision: Decision, known: Dispute, outcome: Outcome) -> None:
    """Says who was wrong, as far as the step that was done again shows it."""
    right = [
        Vote(WorkerId(""), NodeId(""), _about(place, microbatch), _text(digest))
        for place, microbatch, digest in outcome.reran
    ]
    wrong = corruption.refuted(right, known.votes) if outcome.step == known.step else ()
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
    return Vote(plan.members[rank], node, _about(computed.place, computed.microbatch), _text(computed.digest))


def _about(place: int, microbatch: int) -> str:
    return f"microbatch {microbatch} in place {place} of a model group"


def _text(digest: int) -> str:
    return f"{digest:x}"
