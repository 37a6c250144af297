"""Checkpoints on their way to the bucket: nothing exists until its manifest does, and none counts unless it was asked for."""

from __future__ import annotations

from dataclasses import replace

from elastic.control import lineage, saving
from elastic.control.actions import CommitManifest, Quarantine
from elastic.control.events import Saved, SaveFailed, ShardSaved
from elastic.control.saving import Saving
from elastic.control.states import Finishing, Stopping
from elastic.control.turn import Turn
from elastic.ids import Version, WorkerId
from elastic.plan.plan import Plan


def begin(turn: Turn, version: Version, members: tuple[WorkerId, ...]) -> None:
    """``members`` write ``version``; some of them may have reported their part already, or that there will be none."""
    known, writable = saving.find(turn.run.saves, version), set(members) <= turn.run.workers.keys()
    if known is None and writable and version not in turn.run.saved:
        turn.know(saves=saving.put(turn.run.saves, Saving(version, members)))
    elif known is not None and known.failed:
        _forget(turn, version, known.failed)


def begin_again(turn: Turn, plan: Plan) -> None:
    """Another world holds that version now and writes all of it; a manifest that was asked for already counts all the same."""
    known = saving.find(turn.run.saves, plan.version)
    again = Saving(plan.version, plan.members, asked=known is not None and known.asked, by=plan.generation)
    turn.know(saves=saving.put(turn.run.saves, again))


def shard_saved(turn: Turn, event: ShardSaved) -> None:
    known = saving.find(turn.run.saves, event.version) or _unannounced(turn, event.version)
    if known is None or event.worker not in known.members or not saving.is_of(known, event.by):
        return turn.refuse(f"nobody waits for a part of {event.version} from {event.worker}")
    turn.know(saves=saving.put(turn.run.saves, saving.report(known, event.worker)))
    state = turn.run.state
    if isinstance(state, Finishing) or (isinstance(state, Stopping) and state.planned and not state.pending):
        turn.amend(deadline=turn.now + turn.rules.stop_s)


def _unannounced(turn: Turn, version: Version) -> Saving | None:
    """A member may report its part before the commit is reported."""
    plan = turn.run.plan
    own = plan is not None and version.generation == plan.generation and version not in turn.run.saved
    if plan is None or not own or not set(plan.members) <= turn.run.workers.keys():
        return None
    return Saving(version, plan.members)


def ask_for_manifests(turn: Turn) -> None:
    """Of all saves that are complete and part of the history."""
    for each in turn.run.saves:
        if each.complete and turn.now >= each.ask_at and lineage.contains(turn.run.lineage, each.version):
            turn.do(CommitManifest(each.version, lineage.cut(turn.run.lineage, each.version), each.by))
            again = replace(each, asked=True, ask_at=turn.now + turn.rules.stop_s)
            turn.know(saves=saving.put(turn.run.saves, again))


def saved(turn: Turn, event: Saved) -> None:
    run, version = turn.run, event.version
    known = saving.find(run.saves, version)
    if not lineage.contains(run.lineage, version):
        return turn.refuse(f"the checkpoint of {version} is not on the lineage")
    if known is None or not known.asked:
        return turn.refuse(f"nobody asked for the manifest of {version}")
    pending = tuple(each for each in run.saves if each.asked or each.version > version)
    turn.know(saved=tuple(sorted({*run.saved, version})), saves=saving.without(pending, version))
    turn.durable = True
    turn.say(f"the checkpoint of {version} is in the bucket")


def save_failed(turn: Turn, event: SaveFailed) -> None:
    """A part cannot be had a second time, a manifest can."""
    known, committed = saving.find(turn.run.saves, event.version), lineage.contains(turn.run.lineage, event.version)
    if known is None and not committed:
        known = _unannounced(turn, event.version)
    if known is None or not saving.is_of(known, event.by):
        return turn.refuse(f"nobody saves {event.version}")
    if known.asked and known.complete:
        again = replace(known, ask_at=turn.now + turn.rules.fence_s)
        turn.know(saves=saving.put(turn.run.saves, again))
        return turn.say(f"the manifest of {event.version} was not written ({event.reason}); again in {turn.rules.fence_s:g} s")
    if committed:
        _forget(turn, event.version, event.reason)
    else:
        turn.know(saves=saving.put(turn.run.saves, replace(known, failed=event.reason)))


def _forget(turn: Turn, version: Version, why: str) -> None:
    turn.know(saves=saving.without(turn.run.saves, version))
    turn.say(f"the checkpoint of {version} failed ({why})")


def damaged(turn: Turn, version: Version, detail: str) -> None:
    """Never read it again; the good one before it takes its place."""
    if version in turn.run.saved:
        turn.know(saved=tuple(each for each in turn.run.saved if each != version))
        turn.do(Quarantine(version, detail))
        before = f"the one of {turn.run.saved[-1]} takes its place" if turn.run.saved else "there is none before it"
        turn.say(f"the checkpoint of {version} is damaged ({detail}): {before}")
