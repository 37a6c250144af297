"""Waiting: there is no world; one is formed as soon as enough workers are there."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.control import edges, lemons, membership
from elastic.control.decision import Decision, count
from elastic.control.growth import expects_more
from elastic.control.run import Failed, Refusal, Waiting
from elastic.control.saves import target_is_saved
from elastic.control.seating import candidates, layout_of, least_shard, make_plan
from elastic.ids import NodeId, WorkerId


def go_on(decision: Decision, state: Waiting) -> None:
    run, rules = decision.run, decision.rules
    if _more_join(decision):
        return
    there, waited = (
        candidates(run, rules),
        decision.due(max(state.since, run.takeover.blind_until) + rules.wait_s),
    )
    # unread: a coordinator whose journal could not be read may have begun
    begun = run.members.seats or run.takeover.unread
    if target_is_saved(run, rules):
        edges.finished(decision, f"finished: step {run.history.saved[-1].step} is in the bucket")
    elif run.stop:
        edges.end_as_asked(decision)
    elif not begun and (split := [refusal for refusal in run.cluster.refused.values() if refusal.shared]):
        edges.end(
            decision, Failed(split[0].why, _of_job(split[:1])), "no step has run yet, so the run ends now"
        )
    elif decision.due(run.takeover.blind_until) and not _waits_for_others(decision, state, there, waited):
        edges.form(decision)
    if not isinstance(decision.run.state, Waiting):
        return
    lemons.pardon(decision, state.since)
    if waited and not membership.get_further(decision, state.since + rules.wait_s):
        edges.end(decision, Failed(f"waited {rules.wait_s:g} s for workers: {_have(decision, state, there)}"))
    elif (not begun or _never_formed(decision)) and _only_refused_are_left(decision, state):
        none, fault = (
            "no node has room for another worker that the run can use",
            _of_job([*run.cluster.refused.values()]),
        )
        edges.end(
            decision,
            Failed(f"{fault}; {none}" if fault else (f"{none}: {_have(decision, state, there)}"), fault),
        )


def _never_formed(decision: Decision) -> bool:
    """Returns whether no step was ever run, and on every refused node a process was replaced because of its
    setup.
    """
    run, set_up = decision.run, {node for node, _ in decision.run.cluster.replaced}
    return (
        not run.takeover.unread
        and run.history.furthest.step == 0
        and run.version.step == 0
        and set_up >= run.cluster.refused.keys()
    )


def _of_job(refusals: Sequence[Refusal]) -> str:
    """Returns why the nodes refuse the job if that is the job's fault on each of them, or ""."""
    return (
        "; ".join(refusal.why for refusal in refusals) if all(refusal.by_job for refusal in refusals) else ""
    )


def _more_join(decision: Decision) -> bool:
    """Returns whether a new world certainly waits for more workers.  The test does not look at all workers,
    since thousands of them join one after the other.
    """
    run, rules = decision.run, decision.rules
    newest = run.workers[next(reversed(run.workers))] if run.workers and run.members.starting else None
    fit = newest is not None and not newest.unfit and newest.kind == run.workers[next(iter(run.workers))].kind
    fresh = (
        fit and not run.members.seats and not run.stop and not run.takeover.unread and not run.history.saved
    )
    if newest is None or not fresh or any(refusal.shared for refusal in run.cluster.refused.values()):
        return False
    waited = decision.due(
        max(run.state.since if isinstance(run.state, Waiting) else 0.0, run.takeover.blind_until)
        + rules.wait_s
    )
    return (
        not waited
        and len(run.workers) < rules.max_workers
        and decision.now - newest.joined_at < rules.grow_debounce_s
    )


def _waits_for_others(decision: Decision, state: Waiting, there: tuple[WorkerId, ...], waited: bool) -> bool:
    """Returns whether a new world waits for workers that are on their way.  A world with survivors waits only if
    that costs less, and for a limited time.  A world that has ``waited`` enough waits only for nodes that are not
    checked yet.
    """
    if frozenset(decision.run.members.seats).intersection(there):
        more = bool(decision.run.members.starting) and len(there) < decision.rules.max_workers
        return more and not decision.due(state.until)
    more = not waited and expects_more(decision.run, there, decision.now, decision.rules)
    return more or (bool(_unchecked(decision)) and decision.now - state.since < decision.rules.form_s)


def _unchecked(decision: Decision) -> list[NodeId]:
    """Returns the nodes that are neither approved nor refused yet; a new world waits up to ``form_s`` for
    their check.
    """
    cluster = decision.run.cluster
    return [node for node, checked in cluster.nodes.items() if not checked and node not in cluster.refused]


def _only_refused_are_left(decision: Decision, state: Waiting) -> bool:
    """Returns whether nothing can come but workers on refused nodes or of other kinds.  Only a run that has
    not begun ends because of this.
    """
    run, refused = decision.run, decision.run.cluster.refused
    joined_at = max((worker.joined_at for worker in run.workers.values()), default=0.0)
    refused_at = max((refusal.at for refusal in refused.values()), default=joined_at)
    # what a new coordinator knows of room counts from its beginning, at which the watch begins anew
    waited_s = decision.now - max(state.since, refused_at, joined_at, run.watch.moved_at)
    nothing_to_come = (
        not run.members.starting and run.cluster.slots == 0 and waited_s >= decision.rules.refused_s
    )
    return nothing_to_come and bool(refused or len(candidates(run, decision.rules)) < len(run.workers))


def _have(decision: Decision, state: Waiting, there: tuple[WorkerId, ...]) -> str:
    """Returns which workers there are and, if they are enough, what else a world still waits for."""
    run = decision.run
    refused = [refusal.why for refusal in run.cluster.refused.values()]
    others = [
        f"{worker} on node {known.node[:8]} is {known.kind}"
        for worker, known in run.workers.items()
        if worker not in there
    ]
    have = f"{count(len(there), 'worker')} of at least {decision.rules.min_workers}"
    shards, layout = least_shard(run.members, there), decision.rules.layout
    if (
        shards > layout.min_parts
        and layout.shards is None
        and layout_of(run, tuple(there), decision.rules) is None
    ):
        have += f", and the state fits the memory of {shards} or more"
    elif len(there) >= decision.rules.min_workers and _waits_for_others(decision, state, there, waited=True):
        open_ = _unchecked(decision)
        have += (
            f", but {count(len(open_), 'node')} {'is' if len(open_) == 1 else 'are'} not checked yet, "
            "and the first world waits for their checks"
        )
    elif len(there) >= decision.rules.min_workers and (
        why := edges.missing(decision, make_plan(run, decision.rules))
    ):
        have += f", but {why}"
    return "; ".join((have, *refused, *others))
