"""Checkpoints: when the state is saved to the bucket, and when a checkpoint counts.

Each member writes its own part in the background and reports it.  Only when all members of the world that began the save have reported,
and the version is on the lineage, is the manifest written: nothing exists until its manifest does, and no manifest counts unless it was
asked for.  A save that lost a writer can never be complete and is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elastic.control.decision import Decision
from elastic.control.rules import Rules
from elastic.control.run import Finishing, RunState, Saves, Saving, Stopping
from elastic.ids import Version, WorkerId
from elastic.protocol import lineage
from elastic.protocol.actions import CommitManifest, Quarantine
from elastic.protocol.commit_record import SAVE_AND_PAUSE, Outcome
from elastic.protocol.events import Saved, SaveFailed, ShardSaved
from elastic.protocol.plan import Plan

# ---- when to save; the members decide by the same two functions


def due(step: int, save_every: int, target_step: int) -> bool:
    """Is the state after ``step`` due to be saved to the bucket?"""
    return step > 0 and (step % save_every == 0 or step == target_step)


def begins(outcome: Outcome, save_every: int, target_step: int) -> bool:
    """Is the state saved after this commit?

    While a member still writes the save before, only the last step and a save that was asked for begin one: a bucket that is down stops
    nobody.
    """
    if outcome.boundary == SAVE_AND_PAUSE or outcome.step == target_step:
        return True
    return due(outcome.step, save_every, target_step) and not outcome.behind


# ---- a save, from its beginning to its manifest


def begin(decision: Decision, version: Version, members: tuple[WorkerId, ...]) -> None:
    """``members`` write ``version``; some of them may have reported their part already, or that there will be none."""
    known, writable = decision.run.saves.find(version), set(members) <= decision.run.workers.keys()
    if known is None and writable and version not in decision.run.history.saved:
        _put(decision, Saving(version, members))
    elif known is not None and known.failed:
        _forget(decision, version, known.failed)


def begin_again(decision: Decision, plan: Plan) -> None:
    """Another world holds that version now and writes all of it; a manifest that was asked for already still counts."""
    known = decision.run.saves.find(plan.version)
    _put(decision, Saving(plan.version, plan.members, asked=known is not None and known.asked, by=plan.generation))


def _put(decision: Decision, saving: Saving) -> None:
    decision.know(saves=decision.run.saves.put(saving))


def shard_saved(decision: Decision, event: ShardSaved) -> None:
    known = decision.run.saves.find(event.version) or _unannounced(decision, event.version)
    if known is None or event.worker not in known.members or not known.is_of(event.by):
        return decision.refuse(f"nobody waits for a part of {event.version} from {event.worker}")
    _put(decision, known.report(event.worker))
    state = decision.run.state
    if isinstance(state, Finishing) or (isinstance(state, Stopping) and state.planned and not state.pending):
        decision.amend(deadline=decision.now + decision.rules.stop_s)


def _unannounced(decision: Decision, version: Version) -> Saving | None:
    """A member may report its part before the commit is reported."""
    plan = decision.run.plan
    own = plan is not None and version.generation == plan.generation and version not in decision.run.history.saved
    if plan is None or not own or not set(plan.members) <= decision.run.workers.keys():
        return None
    return Saving(version, plan.members)


def ask_for_manifests(decision: Decision) -> None:
    """Asks for the manifests of all saves that are complete and part of the history."""
    for each in decision.run.saves.pending:
        if each.complete and decision.now >= each.ask_at and decision.run.history.contains(each.version):
            decision.do(CommitManifest(each.version, lineage.cut(decision.run.history.lineage, each.version), each.by))
            _put(decision, replace(each, asked=True, ask_at=decision.now + decision.rules.stop_s))


def saved(decision: Decision, event: Saved) -> None:
    run, version = decision.run, event.version
    known = run.saves.find(version)
    if not run.history.contains(version):
        return decision.refuse(f"the checkpoint of {version} is not on the lineage")
    if known is None or not known.asked:
        return decision.refuse(f"nobody asked for the manifest of {version}")
    others = tuple(each for each in run.saves.pending if each.asked or each.version > version)
    decision.know(saves=Saves(others).without(version))
    decision.know("history", saved=tuple(sorted({*run.history.saved, version})))
    decision.durable = True
    decision.say(f"the checkpoint of {version} is in the bucket")


def save_failed(decision: Decision, event: SaveFailed) -> None:
    """A part cannot be written a second time, a manifest can."""
    known, committed = decision.run.saves.find(event.version), decision.run.history.contains(event.version)
    if known is None and not committed:
        known = _unannounced(decision, event.version)
    if known is None or not known.is_of(event.by):
        return decision.refuse(f"nobody saves {event.version}")
    if known.asked and known.complete:
        _put(decision, replace(known, ask_at=decision.now + decision.rules.fence_s))
        return decision.say(f"the manifest of {event.version} was not written ({event.reason}); again in {decision.rules.fence_s:g} s")
    if committed:
        _forget(decision, event.version, event.reason)
    else:
        _put(decision, replace(known, failed=event.reason))


def _forget(decision: Decision, version: Version, why: str) -> None:
    decision.know(saves=decision.run.saves.without(version))
    decision.say(f"the checkpoint of {version} failed ({why})")


def survivors(saves: Saves, gone: Iterable[WorkerId]) -> Saves:
    """Returns the saves that need nothing more from ``gone``.

    A save whose manifest was asked for also stays: the manifest may still come, asked for by another coordinator perhaps.
    """
    lost = set(gone)
    return Saves(tuple(each for each in saves.pending if each.asked or not lost & (set(each.members) - set(each.reported))))


# ---- what is in the bucket


def target_is_saved(run: RunState, rules: Rules) -> bool:
    """Is the target step in the bucket?"""
    return bool(run.history.saved) and run.history.saved[-1].step >= rules.target_step


def damaged(decision: Decision, version: Version, detail: str) -> None:
    """A damaged checkpoint is never read again; the good one before it takes its place."""
    if version in decision.run.history.saved:
        left = tuple(each for each in decision.run.history.saved if each != version)
        decision.know("history", saved=left)
        decision.do(Quarantine(version, detail))
        before = f"the one of {left[-1]} takes its place" if left else "there is none before it"
        decision.say(f"the checkpoint of {version} is damaged ({detail}): {before}")
