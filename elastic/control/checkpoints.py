"""Checkpoints on their way to the bucket: nothing exists until its manifest does, and none counts unless it was asked for.

Whenever the saves on their way change, the keepers are told all of them (:class:`Upload`).
"""

from __future__ import annotations

from dataclasses import replace

from elastic.control import saving
from elastic.control.decision import Decision
from elastic.control.saving import Saving
from elastic.control.states import Finishing, Stopping
from elastic.ids import NodeId, Version
from elastic.protocol import lineage
from elastic.protocol.actions import CommitManifest, Quarantine, Upload
from elastic.protocol.commit_record import Outcome
from elastic.protocol.events import Saved, SaveFailed, ShardSaved
from elastic.protocol.plan import Plan


def begin(decision: Decision, outcome: Outcome) -> None:
    """The members copy the version that ``outcome`` commits; their keepers upload it."""
    run, plan, version = decision.run, decision.plan, Version(outcome.step, outcome.generation)
    if outcome.saves is None:
        return _begin_of_old(decision, version, plan)
    keepers = frozenset(run.keepers)
    if lacking := tuple(node for node in dict.fromkeys(plan.nodes) if node not in keepers):
        decision.say(f"{version} is not saved: there is no keeper on node {', '.join(node[:8] for node in lacking)}")
    elif version not in run.saved:
        decision.know(saves=saving.put(run.saves, Saving(version, plan.members, layout=plan.layout, nodes=plan.nodes)))
    tell(decision)


def _begin_of_old(decision: Decision, version: Version, plan: Plan) -> None:
    """The same in the journal of a version whose members uploaded their parts themselves."""
    known, writable = saving.find(decision.run.saves, version), set(plan.members) <= decision.run.workers.keys()
    if known is None and writable and version not in decision.run.saved:
        decision.know(saves=saving.put(decision.run.saves, Saving(version, plan.members)))
    elif known is not None and known.failed:
        _forget(decision, version, known.failed)


def begin_again(decision: Decision, plan: Plan) -> None:
    """Another world holds that version now and copies all of it; a manifest that was asked for already counts all the same."""
    known = saving.find(decision.run.saves, plan.version)
    asked = known is not None and known.asked
    again = Saving(plan.version, plan.members, asked=asked, by=plan.generation, layout=plan.layout, nodes=plan.nodes)
    decision.know(saves=saving.put(decision.run.saves, again))
    tell(decision)


def tell(decision: Decision) -> None:
    """Tell all keepers the saves on their way, once a decision: what counts is how they stand at its end.

    Those that upload are told also where they are not known to be up: one that comes up meanwhile hears it then.
    """
    run, saves = decision.run, saving.orders(decision.run.saves)
    keepers = tuple(dict.fromkeys((*run.keepers, *(node for save in saves for node in save.nodes))))
    decision.actions = [action for action in decision.actions if not isinstance(action, Upload)]
    decision.do(Upload(keepers, saves, run.generation, run.version))


def without_keeper(decision: Decision, node: NodeId) -> None:
    """Give up the saves of which the keeper of ``node``, which is gone or not heard any more, had still to upload a part."""
    for each in decision.run.saves:
        if saving.needs(each, node):
            _forget(decision, each.version, f"the keeper of node {node[:8]} had still to upload a part of it")


def shard_saved(decision: Decision, event: ShardSaved) -> None:
    known = saving.find(decision.run.saves, event.version) or _unannounced(decision, event.version)
    if known is None or event.worker not in known.members or not saving.is_of(known, event.by):
        return decision.refuse(f"nobody waits for a part of {event.version} from {event.worker}")
    decision.know(saves=saving.put(decision.run.saves, saving.report(known, event.worker)))
    state = decision.run.state
    if isinstance(state, Finishing) or (isinstance(state, Stopping) and state.planned and not state.pending):
        decision.amend(deadline=decision.now + decision.rules.stop_s)


def _unannounced(decision: Decision, version: Version) -> Saving | None:
    """In the journal of an older version a member may have reported its part before the commit was reported."""
    plan = decision.run.plan
    own = plan is not None and version.generation == plan.generation and version not in decision.run.saved
    if plan is None or not own or not set(plan.members) <= decision.run.workers.keys():
        return None
    return Saving(version, plan.members)


def ask_for_manifests(decision: Decision) -> None:
    """Of all saves that are complete and part of the history."""
    for each in decision.run.saves:
        if each.complete and decision.now >= each.ask_at and lineage.contains(decision.run.lineage, each.version):
            decision.do(CommitManifest(each.version, lineage.cut(decision.run.lineage, each.version), each.by))
            again = replace(each, asked=True, ask_at=decision.now + decision.rules.stop_s)
            decision.know(saves=saving.put(decision.run.saves, again))


def saved(decision: Decision, event: Saved) -> None:
    run, version = decision.run, event.version
    known = saving.find(run.saves, version)
    if not lineage.contains(run.lineage, version):
        return decision.refuse(f"the checkpoint of {version} is not on the lineage")
    if known is None or not known.asked:
        return decision.refuse(f"nobody asked for the manifest of {version}")
    pending = tuple(each for each in run.saves if each.asked or each.version > version)
    decision.know(saved=tuple(sorted({*run.saved, version})), saves=saving.without(pending, version))
    if any(each.nodes for each in run.saves):
        tell(decision)
    decision.durable = True
    decision.say(f"the checkpoint of {version} is in the bucket")


def save_failed(decision: Decision, event: SaveFailed) -> None:
    """A part cannot be had a second time, a manifest can."""
    known, committed = saving.find(decision.run.saves, event.version), lineage.contains(decision.run.lineage, event.version)
    if known is None and not committed:
        known = _unannounced(decision, event.version)
    if known is None or not saving.is_of(known, event.by):
        return decision.refuse(f"nobody saves {event.version}")
    if known.asked and known.complete:
        again = replace(known, ask_at=decision.now + decision.rules.fence_s)
        decision.know(saves=saving.put(decision.run.saves, again))
        return decision.say(f"the manifest of {event.version} was not written ({event.reason}); again in {decision.rules.fence_s:g} s")
    if committed:
        _forget(decision, event.version, event.reason)
    else:
        decision.know(saves=saving.put(decision.run.saves, replace(known, failed=event.reason)))


def _forget(decision: Decision, version: Version, why: str) -> None:
    known = saving.find(decision.run.saves, version)
    decision.know(saves=saving.without(decision.run.saves, version))
    if known is not None and known.nodes:
        tell(decision)
    decision.say(f"the checkpoint of {version} failed ({why})")


def damaged(decision: Decision, version: Version, detail: str) -> None:
    """Never read it again; the good one before it takes its place."""
    if version in decision.run.saved:
        decision.know(saved=tuple(each for each in decision.run.saved if each != version))
        decision.do(Quarantine(version, detail))
        before = f"the one of {decision.run.saved[-1]} takes its place" if decision.run.saved else "there is none before it"
        decision.say(f"the checkpoint of {version} is damaged ({detail}): {before}")
