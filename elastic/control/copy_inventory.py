"""Copies in host memory: which keepers hold what, and when the lack of them is reported.

While a world steps its copies are overwritten all the time.  So keepers are asked what they hold only once nothing is written any more:
together with the fence, for a dead member has left its copies as they are and a fenced one begins none.  The next world waits for an answer
only if something depends on it: the survivors do not hold the newest committed step completely.

A copy is proof, too: a version is copied after its commit.  Where every member of a world died without a word, its copies say how far it
came.  Where one has answered, its word is newer than any step that the others could have finished without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

from elastic.control.buddies import choose
from elastic.control.decision import Decision
from elastic.control.rules import Rules
from elastic.control.run import Host, RunState, Stopping, Waiting
from elastic.ids import NodeId, Version
from elastic.plan.transfer import Holding
from elastic.protocol import lineage
from elastic.protocol.actions import ListCopies, Pair, Release
from elastic.protocol.commit_record import Outcome
from elastic.protocol.copy_schedule import version_at
from elastic.protocol.events import Kept
from elastic.protocol.plan import Plan

LATE = 10
"""Number of overdue copies after which the run is reported as unprotected."""

# ---- what keepers hold


def ask(decision: Decision) -> None:
    """Asks all keepers, perhaps once more: what they have listed of this generation counts until they say otherwise."""
    run, copies = decision.run, decision.run.copies
    said = any(isinstance(action, ListCopies) for action in decision.actions)
    if decision.rules.copy_every and run.cluster.keepers and run.members.seats and not said:
        known = copies.asked == run.generation
        hosts = {node: replace(host, kept=host.kept if known else (), asked=0) for node, host in copies.hosts.items()}
        decision.know("copies", hosts=hosts, asked=run.generation, answers_until=decision.now + decision.rules.fence_s)
        decision.do(ListCopies(run.generation, run.cluster.keepers))


def ask_again(decision: Decision, node: NodeId) -> None:
    """Asks a keeper that has come up while the others are being asked: it finds the copies of its living workers again."""
    run = decision.run
    if run.copies.asked == run.generation > 0 and isinstance(run.state, Waiting | Stopping):
        decision.know("copies", answers_until=decision.now + decision.rules.fence_s)
        decision.do(ListCopies(run.generation, (node,)))


def kept(decision: Decision, event: Kept) -> None:
    copies = decision.run.copies
    if event.generation != copies.asked or event.node not in decision.run.cluster.keepers:
        return decision.refuse(f"nobody asks what the keeper of node {event.node[:8]} holds of generation {event.generation}")
    host = replace(copies.hosts.get(event.node, Host()), kept=event.held, asked=event.generation)
    decision.know("copies", hosts={**copies.hosts, event.node: host})


def unreadable(decision: Decision, node: NodeId) -> None:
    """A member could not read a copy there.  Whatever the keeper says, nothing is taken from it before another commit."""
    decision.know("copies", unreadable=(*decision.run.copies.unreadable, node))


def listed(run: RunState) -> list[Holding]:
    """Returns the copies that count: of versions on the lineage, or of later ones of a world of which nobody can say more."""
    copies = run.copies
    if copies.asked != run.generation:
        return []
    on_line = cache(partial(_counts, run))
    nodes = [node for node in run.cluster.keepers if node in copies.hosts and node not in copies.unreadable]
    return [each for node in nodes for each in copies.hosts[node].kept if on_line(each.version)]


def _counts(run: RunState, version: Version) -> bool:
    return run.history.contains(version) or (version.generation == run.copies.unreported > 0 and version.step > run.step)


def line_of(run: RunState, version: Version) -> lineage.Lineage:
    """Returns the lineage up to ``version``, which may be later than any commit that was told."""
    line = run.history.lineage
    return lineage.cut(line, version) if run.history.contains(version) else lineage.extended(line, version)


def awaited(decision: Decision, plan: Plan) -> tuple[NodeId, ...]:
    """Returns the keepers whose answer may make a better plan than ``plan``, and has not come yet."""
    run = decision.run
    whole = (plan.tier in ("live", "host") and plan.version == run.version) or run.version == Version(0, 0)
    if not decision.rules.copy_every or not run.members.seats or (whole and not run.copies.unreported):
        return ()
    if run.copies.asked != run.generation:
        ask(decision)
    copies = decision.run.copies
    missing = tuple(node for node in run.cluster.keepers if node not in copies.hosts or copies.hosts[node].asked != copies.asked)
    return missing if decision.now < copies.answers_until else ()


def complete_before(run: RunState, version: Version) -> tuple[Version | None, Version | None]:
    """Returns what was last known to be complete in host memory and at the buddies, unless it was given up for ``version``."""
    copies = run.copies
    known = (copies.copied or copies.protected[0], copies.buddied or copies.protected[1])
    copied, buddied = (each if each is not None and each <= version else None for each in known)
    return copied, buddied


# ---- while a world steps


def committed(decision: Decision, outcome: Outcome, before: RunState) -> None:
    """Takes note of what is now complete everywhere; ``before`` is the run before this commit.

    Once that is newer than what the generation began from, nothing older is needed.
    """
    run, plan = decision.run, decision.plan
    if not plan.copy_every:
        return
    if run.copies.unreadable:
        decision.know("copies", unreadable=())
    copied = version_at(plan, outcome.copied_through) or run.copies.copied
    buddied = version_at(plan, outcome.buddied_through) or run.copies.buddied
    decision.know("copies", copied=copied, buddied=buddied)
    if _late(decision.run) and not _late(before):
        since = unprotected_since(decision.run)
        decision.say(f"unprotected since step {since}: not every member of generation {plan.generation} has a later copy in host memory")
    elif _late_at_buddies(decision.run) and not _late_at_buddies(before):
        since = unbuddied_since(decision.run)
        decision.say(f"no later copies than of step {since} have reached other nodes: the loss of a node would cost what came after it")
    safe = _safe(plan, copied, buddied)
    if safe is not None and _safe(plan, run.copies.copied, run.copies.buddied) is None:
        decision.do(Release(run.cluster.keepers, safe, safe))


def _safe(plan: Plan, copied: Version | None, buddied: Version | None) -> Version | None:
    """Returns the newest version of this generation that is complete wherever it is to be."""
    version = buddied if plan.buddy_every else copied
    return version if version is not None and version.generation == plan.generation else None


def unprotected_since(run: RunState) -> int | None:
    """Returns the last step whose copies in host memory are complete, if later ones are missing; None where all is well."""
    plan, copied = run.plan, run.copies.copied
    if plan is None or not plan.copy_every:
        return None
    return plan.version.step if copied is None else copied.step if _late(run) else None


def unbuddied_since(run: RunState) -> int | None:
    """Returns the last step whose copies are complete at the buddies, if later ones are long overdue; None where all is well."""
    plan = run.plan
    return (run.copies.buddied or plan.version).step if plan is not None and _late_at_buddies(run) else None


def _late(run: RunState) -> bool:
    """Are so many copies overdue that something must be wrong?"""
    return run.plan is not None and bool(run.plan.copy_every) and _is_late(run, run.plan, run.copies.copied, paces(run)[0])


def _late_at_buddies(run: RunState) -> bool:
    """Are so many copies overdue at the buddies that something must be wrong?"""
    return run.plan is not None and bool(run.plan.buddy_every) and _is_late(run, run.plan, run.copies.buddied, paces(run)[1])


def _is_late(run: RunState, plan: Plan, version: Version | None, pace: int) -> bool:
    return run.step - (version or plan.version).step >= LATE * pace


def paces(run: RunState) -> tuple[int, int]:
    """Returns the steps from one copy of the present world to the next, in host memory and at the buddies (0: none).

    The members may have agreed in a commit on more steps than the plan says.
    """
    plan, last = run.plan, run.history.last
    if plan is None:
        return 0, 0
    agreed = (last.copy_every, last.buddy_every) if last is not None and last.generation == plan.generation else (0, 0)
    copies, buddies = (
        max(planned, each) if planned else 0 for planned, each in zip((plan.copy_every, plan.buddy_every), agreed, strict=True)
    )
    return copies, buddies


# ---- buddies


def buddies_of(run: RunState, rules: Rules, nodes: Sequence[NodeId]) -> dict[NodeId, NodeId]:
    """Returns the buddy of each of ``nodes`` that can have one; ``nodes`` names a node once for every worker there."""
    hosts = run.copies.hosts
    zones = {node: hosts[node].zone if node in hosts else "" for node in run.cluster.keepers}
    return choose(nodes, zones, run.copies.buddies, cross_zone=rules.cross_zone)


def pair(decision: Decision, plan: Plan) -> None:
    """Gives each member's node a buddy, the same as before where nothing speaks against it.

    It is said again whenever a keeper comes or goes: a new keeper does not know its buddy, and the address of an old one may have changed.
    """
    hosts = decision.run.copies.hosts
    if not decision.rules.buddy_every:
        return
    chosen = buddies_of(decision.run, decision.rules, plan.nodes)
    if alone := tuple(dict.fromkeys(node for node in plan.nodes if node not in chosen)):
        other = ", or set copies.cross_zone = true" if len({host.zone for host in hosts.values()}) > 1 else ""
        names = ", ".join(node[:8] for node in alone)
        decision.say(
            f"no other node of the zone can hold copies of node {names}, so no member's go to other nodes: add a node there{other}"
        )
    if plan.buddy_every:
        decision.know("copies", buddies=chosen)
        pairs = [(node, buddy, hosts[buddy].address if buddy in hosts else "") for node, buddy in chosen.items()]
        decision.do(Pair(plan.generation, (*pairs, *((node, NodeId(""), "") for node in alone))))
