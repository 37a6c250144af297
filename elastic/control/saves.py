"""Saves: the checkpoints on their way to the bucket, and the moment from which one counts.

The members copy the version, and the keepers of their nodes upload the copies.  The manifest is written only
when the version is on the lineage, the bucket has the parts of all members of the world that began the save,
and their replicas are equal (``corruption.py``).  A checkpoint does not exist before its manifest does, and a
manifest counts only if it was asked for.  A member may die meanwhile: its keeper says whether its copy was
complete.  If a keeper is lost that still had a part to upload, the save can never be complete and is given
up.

Whenever the saves on their way change, the keepers are told all of them (:class:`Upload`).  A save that is
not in this list is over: its copies may be overwritten.  A save is therefore given up durably, or else the
next coordinator would wait for parts that are gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elastic.control.decision import Decision
from elastic.control.rules import Rules
from elastic.control.run import Finishing, RunState, Saves, Saving, Stopping
from elastic.ids import NodeId, Version
from elastic.plan import retention
from elastic.protocol import lineage
from elastic.protocol.actions import CommitManifest, Quarantine, Retain, Upload
from elastic.protocol.commit_record import Outcome
from elastic.protocol.events import Saved, SaveFailed, ShardSaved
from elastic.protocol.plan import Plan

# ---- a save, from its beginning to its manifest


def begin(decision: Decision, outcome: Outcome) -> None:
    """Begins a save: the members copy the version that ``outcome`` commits, and their keepers upload the
    copies.
    """
    run, plan, version = decision.run, decision.plan, Version(outcome.step, outcome.generation)
    keepers = frozenset(run.cluster.keepers)
    if lacking := tuple(node for node in dict.fromkeys(plan.nodes) if node not in keepers):
        decision.say(
            f"{version} is not saved: there is no keeper on node {', '.join(node[:8] for node in lacking)}"
        )
        decision.durable = True
    elif version not in run.history.saved:
        _put(decision, Saving(version, plan.members, plan.nodes, plan.layout, decision.now))
    tell(decision)


def begin_again(decision: Decision, plan: Plan, version: Version) -> None:
    """Begins the save of ``version`` again, with the members of ``plan``.  A manifest that was asked for
    still counts.
    """
    known = decision.run.saves.find(version)
    asked = known is not None and known.asked
    _put(
        decision,
        Saving(version, plan.members, plan.nodes, plan.layout, decision.now, asked=asked, by=plan.generation),
    )
    tell(decision)


def tell(decision: Decision) -> None:
    """Tells all keepers which saves are on their way, once in a decision: the saves at its end count.

    Keepers that have parts to upload are told even if they are not known to be up: one may come up meanwhile.
    """
    run, orders = decision.run, decision.run.saves.orders
    keepers = tuple(dict.fromkeys((*run.cluster.keepers, *(node for save in orders for node in save.nodes))))
    decision.actions = [action for action in decision.actions if not isinstance(action, Upload)]
    decision.do(Upload(keepers, orders, run.generation, run.version))


def without_keepers(decision: Decision, nodes: Iterable[NodeId]) -> None:
    """Gives up the saves of which a keeper of ``nodes`` had still to report a part; these keepers are gone or
    silent.

    A save whose manifest was asked for is kept: :func:`ask_for_manifests` finds out whether the manifest
    exists.
    """
    for each in decision.run.saves.pending:
        needed = each.needed
        lacking = next((node for node in nodes if node in needed), None)
        if lacking is not None and not each.asked:
            forget(
                decision, each.version, f"the keeper of node {lacking[:8]} is gone and had not saved its part"
            )


def _put(decision: Decision, saving: Saving) -> None:
    decision.know(saves=decision.run.saves.put(saving))


def shard_saved(decision: Decision, event: ShardSaved) -> None:
    known = decision.run.saves.find(event.version)
    if known is None or event.worker not in known.members or not known.is_of(event.by):
        return decision.refuse(f"a part of {event.version} from {event.worker} is not expected")
    _put(decision, known.report(event.worker, decision.now, event.digest))
    _wait_on(decision)


def _wait_on(decision: Decision) -> None:
    """Lets the end of the run, or of a planned stop, wait for ``stop_s`` from now on."""
    state = decision.run.state
    if isinstance(state, Finishing) or (isinstance(state, Stopping) and state.planned and not state.pending):
        decision.amend(deadline=decision.now + decision.rules.stop_s)


def ask_for_manifests(decision: Decision) -> None:
    """Asks for the manifests of all saves that are complete and on the lineage.

    An earlier coordinator may have asked for a manifest already.  If the report of an uploaded part never
    comes then, because its keeper is gone or has lost the copy, the manifest is asked for too: the answer
    tells that it exists, or why it cannot be written.
    """
    run = decision.run
    for each in run.saves.pending:
        if decision.now < each.ask_at or not run.history.contains(each.version):
            continue
        if each.complete or (
            each.asked and (each.failed or not each.needed <= frozenset(run.cluster.keepers))
        ):
            decision.do(CommitManifest(each.version, lineage.cut(run.history.lineage, each.version), each.by))
            _put(decision, replace(each, asked=True, ask_at=decision.now + decision.rules.stop_s))


def give_up_the_silent(decision: Decision) -> None:
    """Gives up the saves of which nothing was heard for ``stop_s``, or which the bucket refused for
    ``wait_s``.

    A manifest may take ``wait_s``.  A silent save is given up whatever the cause, because no other save
    begins while it is on its way.  The states ``Finishing`` and ``Stopping`` wait for their last save
    themselves, and for a save that the bucket refuses, since the bucket would refuse the last save too.
    """
    run, rules = decision.run, decision.rules
    for each in run.saves.pending:
        heard_at = max(each.heard_at, run.watch.uploaded_at)
        until = max([heard_at + rules.stop_s, *refused_until(rules, [each]), *manifests_until(rules, [each])])
        waited_for = isinstance(run.state, Finishing | Stopping) and (
            each.version == run.version or each.refused_at is not None
        )
        if decision.due(until) and not waited_for:
            forget(decision, each.version, f"its save made no progress for {decision.now - heard_at:.0f} s")


def patient_until(decision: Decision, deadline: float) -> float:
    """Returns the time until which the end of the run waits for the save of its present version, no less than
    ``deadline``.

    That is ``stop_s`` after a keeper last wrote a part of a save, and at least ``wait_s`` after the bucket
    began to refuse a save, or after the last part of a save whose manifest was asked for.  Earlier saves
    count too: where only saves are copied, the last save waits for their slot.
    """
    run, rules = decision.run, decision.rules
    until = refused_until(rules, run.saves.pending) + manifests_until(rules, run.saves.pending)
    return max(deadline, run.watch.uploaded_at + rules.stop_s, *until)


def manifests_until(rules: Rules, pending: Iterable[Saving]) -> list[float]:
    """Returns the times until which the manifests of ``pending`` may be written, if the bucket does not
    refuse them.
    """
    return [
        each.heard_at + rules.wait_s
        for each in pending
        if each.asked and each.complete and each.refused_at is None
    ]


def refused_until(rules: Rules, pending: Iterable[Saving]) -> list[float]:
    """Returns the time until which the bucket may refuse what it is given of ``pending``, as a list; empty if
    it refuses nothing.
    """
    since = [each.refused_at for each in pending if each.refused_at is not None]
    return [min(since) + rules.wait_s] if since else []


def saved(decision: Decision, event: Saved) -> None:
    run, version = decision.run, event.version
    known = run.saves.find(version)
    if not run.history.contains(version):
        return decision.refuse(f"the checkpoint of {version} was given up")
    if known is None or not known.asked:
        return decision.refuse(f"the manifest of {version} is not expected")
    others = tuple(each for each in run.saves.pending if each.asked or each.version > version)
    decision.know(saves=Saves(others).without(version))
    decision.know("history", saved=tuple(sorted({*run.history.saved, version})))
    if decision.rules.keep.younger_s:
        decision.know("history", written=(*run.history.written, (version, decision.now)))
    tell(decision)
    decision.durable = True
    if decision.rules.keep.last:
        retain(decision)
    decision.say(f"the checkpoint of {version} is in the bucket")


def save_failed(decision: Decision, event: SaveFailed) -> None:
    """Notes that a part or a manifest was not written.  If only the bucket is at fault it is tried again,
    else the save is given up.
    """
    known, committed = decision.run.saves.find(event.version), decision.run.history.contains(event.version)
    if known is None or not known.is_of(event.by):
        return decision.refuse(f"{event.version} is not being saved")
    what = (
        f"{'the manifest' if event.manifest else 'a part'} of {event.version} was not written "
        f"({event.reason})"
    )
    if event.again:
        ask_at = decision.now + decision.rules.fence_s if known.asked else known.ask_at
        since = decision.now if known.refused_at is None else known.refused_at
        awaited = event.worker in known.members and event.worker not in (*known.reported, *known.refused)
        refused = (*known.refused, event.worker) if event.worker and awaited else known.refused
        _put(decision, replace(known, ask_at=ask_at, refused_at=since, refused=refused))
        if event.full:
            retain(decision, at_once=True)
        if event.manifest:
            decision.say(f"{what}; the run tries again in {decision.rules.fence_s:g} s{_until(decision)}")
        # while a bucket stays full, the first report of each worker is enough
        elif event.worker not in known.refused or not event.worker:
            decision.say(f"{what}; its keeper tries again until the bucket takes it{_until(decision)}")
    elif known.asked and not event.manifest:
        # an earlier coordinator's manifest may be there: it is asked for once more
        _put(decision, replace(known, failed=event.reason))
        tell(decision)
        decision.durable = True
    elif committed:
        forget(decision, event.version, event.reason)
    else:
        _put(decision, replace(known, failed=event.reason))


def _until(decision: Decision) -> str:
    """Returns the part of a sentence that says how long a stop waits for a save that the bucket refuses, and
    what comes then.
    """
    run, rules = decision.run, decision.rules
    if not (isinstance(run.state, Stopping) and run.state.planned and run.state.save):
        return ""
    saved = run.history.saved[-1].step if run.history.saved else 0
    return (
        f", for {rules.wait_s:g} s in all (deadlines.wait_s); then the run stops without it, and resumes "
        f"from step {saved}"
    )


def forget(decision: Decision, version: Version, why: str) -> None:
    """Gives up the save of ``version``, durably: its copies may be overwritten."""
    known = decision.run.saves.find(version)
    decision.know(saves=decision.run.saves.without(version))
    if known is not None:
        tell(decision)
        decision.durable = True
    decision.say(f"the checkpoint of {version} failed ({why})")
    if version != decision.run.version:  # where only saves are copied, the next save gets its slot only now
        _wait_on(decision)


# ---- what is in the bucket


def retain(decision: Decision, *, at_once: bool = False) -> None:
    """Forgets the checkpoints that no rule keeps, durably, and has them deleted: no later world goes on from
    them.
    """
    asked, keep = retained(decision.run), decision.rules.keep
    written = dict(decision.run.history.written)
    young = retention.young(asked.saved, written, keep, decision.now)
    kept = {*retention.reasons(asked.saved, keep, asked.best, (), young), *asked.spared}
    decision.know("history", saved=tuple(each for each in asked.saved if each in kept))
    if written:
        decision.know(
            "history", written=tuple((version, at) for version, at in written.items() if version in kept)
        )
    decision.durable = True
    decision.do(replace(asked, saved=decision.run.history.saved, at_once=at_once))


def retained(run: RunState) -> Retain:
    """Returns the order to delete checkpoints, with what the run knows of them."""
    pending, best = tuple(each.version for each in run.saves.pending), run.history.best
    reads = (run.plan.version,) if run.plan is not None else ()
    return Retain(
        run.history.saved, run.history.lineage, best.version if best is not None else None, (*pending, *reads)
    )


def target_is_saved(run: RunState, rules: Rules) -> bool:
    """Returns whether the last step is in the bucket."""
    return bool(run.history.saved) and run.history.saved[-1].step >= last_step(run, rules)


def last_step(run: RunState, rules: Rules) -> int:
    """Returns the last step of the run: the target step, or the earlier step at which its loop or its
    patience ends the run.
    """
    return min(rules.target_step, run.enough or rules.target_step)


def damaged(decision: Decision, version: Version, detail: str) -> None:
    """Quarantines a damaged checkpoint, so that it is never read again; the good one before it takes its
    place.
    """
    if version in decision.run.history.saved:
        left = tuple(each for each in decision.run.history.saved if each != version)
        decision.know("history", saved=left)
        decision.do(Quarantine(version, detail))
        before = f"the checkpoint of {left[-1]} is used instead" if left else "there is no earlier checkpoint"
        decision.say(f"the checkpoint of {version} is damaged ({detail}): {before}")
