"""Silent corruption: replicas of the state that should be equal, and are not.

A memory or a processor can be wrong without a sign.  Each copy in host memory has digests, and the keeper
that uploads a save tells the digest of its worker's whole copy.  Workers with equal cells must have the same
one.  They are compared once all parts of the save are in the bucket, before its manifest is asked for: a save
whose replicas differ never becomes a checkpoint.

A worker with wrong weights has computed wrong gradients since, and all replicas have applied them.  So no
replica is right, whoever was wrong, and the run always goes back to the newest checkpoint, whose replicas
were equal.  No later state counts any more, whoever holds it (``History.trusted``).

Who was wrong?  Of three or more replicas, those that differ from most of them.  Of two, nobody knows at
first.  The steps are done again, and the next save of the same step tells: wrong is who then differs from
what most said in both saves, and otherwise who alone had said something else before.  Nothing is known if
both had: then the first wrong bit was older than the save, and both had applied its gradients.  Whoever was
wrong is replaced, and the second time on one node, that node is refused.

Three saves in dispute without an equal one between them end the run, because then the code is more likely to
blame than a machine.  An error that all replicas share is never found here, nor one of a state without a
second replica, nor one whose worker is lost before the save: the worker that takes its place has the state of
the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elastic.control import admission, edges, membership, saves, stopping
from elastic.control.decision import Decision, names
from elastic.control.run import (
    Dispute,
    Finishing,
    Forming,
    Running,
    RunState,
    Saving,
    Stopping,
    Vote,
    Waiting,
)
from elastic.ids import WorkerId
from elastic.plan.placement import cell_of

LIMIT = 3
"""Number of saves in dispute, without an equal one between them, that end the run."""


def compare(decision: Decision) -> None:
    """Compares the replicas of the saves whose parts are all in the bucket and whose manifest was not asked
    for yet.
    """
    if not decision.rules.compare:
        return
    _forget_the_untrusted(decision)
    for saving in decision.run.saves.pending:
        ready = saving.digests and saving.complete and not saving.asked
        if ready and decision.run.history.contains(saving.version):
            votes = votes_of(saving)
            if disputed := in_dispute(votes):
                return _go_back(decision, saving, disputed)
            _agreed(decision, saving, votes)


def votes_of(saving: Saving) -> list[Vote]:
    """Returns what the members of a save have said of their cells."""
    digests, seats = saving.digests, zip(saving.members, saving.nodes, strict=True)
    return [
        Vote(member, node, cell_of(saving.layout, rank), digests[member])
        for rank, (member, node) in enumerate(seats)
        if member in digests
    ]


def in_dispute(votes: Iterable[Vote]) -> tuple[Vote, ...]:
    """Returns the votes about the cells whose votes are not all equal."""
    said: dict[str, dict[str, None]] = {}
    for vote in votes:
        said.setdefault(vote.about, {})[vote.digest] = None
    return tuple(vote for vote in votes if len(said[vote.about]) > 1)


def outvoted(votes: Sequence[Vote], earlier: Iterable[Vote] = ()) -> tuple[Vote, ...]:
    """Returns those of ``votes`` that differ from what most workers said about the same, or said most often if as
    many said something else.  ``earlier`` votes count, too.  Nobody differs from what was said only once, or no
    more often than anything else.
    """
    said: dict[str, dict[str, list[WorkerId]]] = {}
    for vote in (*votes, *earlier):
        said.setdefault(vote.about, {}).setdefault(vote.digest, []).append(vote.worker)
    right: dict[str, str] = {}
    for about, by_digest in said.items():
        (most, digest), *others = sorted(
            (((len({*by}), len(by)), digest) for digest, by in by_digest.items()), reverse=True
        )
        if most > max((support for support, _ in others), default=(1, 1)):
            right[about] = digest
    return tuple(vote for vote in votes if right.get(vote.about, vote.digest) != vote.digest)


def refuted(votes: Iterable[Vote], earlier: Sequence[Vote]) -> tuple[Vote, ...]:
    """Returns those of the ``earlier`` votes that ``votes``, which are all equal, show to be wrong while
    another earlier vote about the same was right.
    """
    right = {vote.about: vote.digest for vote in votes}
    sound = {vote.about for vote in earlier if right.get(vote.about) == vote.digest}
    return tuple(vote for vote in earlier if vote.about in sound and vote.digest != right[vote.about])


# ---- what comes of it


def _go_back(decision: Decision, saving: Saving, votes: tuple[Vote, ...]) -> None:
    """Gives up a save whose replicas differ, and all state that is newer than the newest checkpoint."""
    run, step = decision.run, saving.version.step
    before = run.history.dispute
    again = before is not None and before.step == step
    wrong = outvoted(votes, before.votes if before is not None and again else ())
    who = names(workers_of(wrong or votes))
    cause = (
        f"{who} held other bits after step {step} than {'before, or than ' * again}the other replicas"
        if wrong
        else f"the replicas {who} hold different bits after step {step}, and nobody knows which are right"
    )
    times, trusted = 1 if before is None else before.times + 1, _trusted(run, step)
    decision.know("history", trusted=trusted, dispute=Dispute(step, () if wrong else votes, times))
    decision.durable = True
    _forget_the_untrusted(decision)
    replace_wrong(decision, wrong, cause)
    if times >= LIMIT:
        why = (
            f"replicas of the state differed in {times} saves in a row, the last of step {step}: find the "
            "memory or the processor that is faulty, or the code that computes other bits in each worker; "
            "checkpoint.compare = false trains on without looking"
        )
        decision.know(gave_up=why, stop=run.stop or why)
    _stop(decision, f"{cause}: the run goes back to step {trusted}, the newest at which all were equal")


def _agreed(decision: Decision, saving: Saving, votes: Sequence[Vote]) -> None:
    """Ends a dispute: the replicas are equal at its step, or at a later one."""
    dispute, step = decision.run.history.dispute, saving.version.step
    if dispute is None or step < dispute.step:
        return
    decision.know("history", dispute=None)
    if not dispute.votes:
        return
    wrong = refuted(votes, dispute.votes) if step == dispute.step else ()
    who = names(workers_of(wrong or dispute.votes))
    end_dispute(
        decision,
        wrong,
        f"{who} held other bits after step {step} than the same steps gave when they were done again"
        if wrong
        else f"the replicas agree again after step {step}; which of {who} was wrong after step {dispute.step} "
        "is not known",
    )


def end_dispute(decision: Decision, wrong: Sequence[Vote], sentence: str) -> None:
    """Replaces the workers that a dispute has shown to be wrong, which ends the world of those that are there."""
    there = frozenset(decision.run.workers).intersection(workers_of(wrong))
    replace_wrong(decision, wrong, sentence)
    if there and isinstance(decision.run.state, Forming | Running):
        edges.stop(decision, sentence)
    else:
        decision.say(sentence)


def workers_of(votes: Iterable[Vote]) -> tuple[WorkerId, ...]:
    return tuple(dict.fromkeys(vote.worker for vote in votes))


def _forget_the_untrusted(decision: Decision) -> None:
    """Gives up the saves of state that does not count any more, also if their manifests were asked for.  A
    world that has not heard of it yet may go on to begin some.
    """
    trusted = decision.run.history.trusted
    if trusted is None:
        return
    for each in decision.run.saves.pending:
        if each.version.step > trusted:
            saves.forget(decision, each.version, "replicas of the state differ")


def _trusted(run: RunState, step: int) -> int:
    """Returns the newest step before ``step`` of which all replicas were equal: its checkpoint is written, or
    about to be.
    """
    asked = [each.version for each in run.saves.pending if each.asked]
    return max((each.step for each in (*run.history.saved, *asked) if each.step < step), default=0)


def replace_wrong(decision: Decision, wrong: Iterable[Vote], why: str) -> None:
    """Replaces the workers that were wrong.  The second time on one node, that node is refused."""
    for vote in {each.worker: each for each in wrong}.values():
        if vote.worker in decision.run.workers:
            if isinstance(decision.run.state, Waiting):
                membership.expel(decision, (vote.worker,), why)
            else:
                membership.unfit(decision, vote.worker, why)
        admission.note(decision, vote.node, decision.run.generation)
        if sum(node == vote.node for node, _ in decision.run.cluster.replaced) > 1:
            admission.refuse_node(decision, vote.node, f"{why}, not for the first time on that node")


def _stop(decision: Decision, cause: str) -> None:
    """Ends the present world, if there is one that may still step."""
    state = decision.run.state
    if isinstance(state, Forming | Running | Finishing):
        return edges.stop(decision, cause)
    decision.say(cause)
    if isinstance(state, Stopping) and state.planned:
        stopping.give_up_the_boundary(decision)
