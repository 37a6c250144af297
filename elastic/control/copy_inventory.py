"""Copies in host memory: which keepers hold what, asked when a world has broken.

While a world steps its copies are overwritten all the time, so what a keeper holds is asked once nothing is written any more: together with
the fence, for whoever died has left its copies as they are and whoever is fenced begins none.  The next world waits for an answer only if
something depends on it: what the survivors hold live is not complete at the newest committed step.

A copy is proof, too: a version is copied after its commit.  Where every member of a world died without a word, its copies say how far it
came; where one has answered, that one's word is newer than any step that the others could have finished without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

from elastic.control.buddies import choose
from elastic.control.decision import Decision
from elastic.control.rules import Rules
from elastic.control.states import Host, RunState, Stopping, Waiting
from elastic.ids import NodeId, Version
from elastic.plan.transfer import Holding
from elastic.protocol import lineage
from elastic.protocol.actions import Pair, Release, TakeStock
from elastic.protocol.commit_record import Outcome
from elastic.protocol.copy_schedule import version_at
from elastic.protocol.events import Kept
from elastic.protocol.plan import Plan


def ask(decision: Decision) -> None:
    """All keepers, perhaps once more: what they have said of this generation counts until they say otherwise."""
    run = decision.run
    if decision.rules.copy_every and run.keepers and run.seats and not any(isinstance(action, TakeStock) for action in decision.actions):
        known = run.stock == run.generation
        hosts = {node: replace(host, kept=host.kept if known else (), asked=0) for node, host in run.hosts.items()}
        decision.know(hosts=hosts, stock=run.generation, stock_until=decision.now + decision.rules.fence_s)
        decision.do(TakeStock(run.generation, run.keepers))


def ask_again(decision: Decision, node: NodeId) -> None:
    """Of a keeper that has come up while the others are being asked: it finds its living workers' copies again."""
    run = decision.run
    if run.stock == run.generation > 0 and isinstance(run.state, Waiting | Stopping):
        decision.know(stock_until=decision.now + decision.rules.fence_s)
        decision.do(TakeStock(run.generation, (node,)))


def kept(decision: Decision, event: Kept) -> None:
    run = decision.run
    if event.generation != run.stock or event.node not in run.keepers:
        return decision.refuse(f"nobody asks what the keeper of node {event.node[:8]} holds of generation {event.generation}")
    host = replace(run.hosts.get(event.node, Host()), kept=event.held, asked=event.generation)
    decision.know(hosts={**run.hosts, event.node: host})


def unreadable(decision: Decision, node: NodeId) -> None:
    """A member could not read what it was to take there.  Whatever the keeper says, nothing is taken from it before another commit."""
    decision.know(unreadable=(*decision.run.unreadable, node))


def copies(run: RunState) -> list[Holding]:
    """What keepers have said to hold of versions on the lineage, or of later ones of a world of which nobody can say more."""
    if run.stock != run.generation:
        return []
    on_line = cache(partial(counts, run))
    nodes = [node for node in run.keepers if node in run.hosts and node not in run.unreadable]
    return [each for node in nodes for each in run.hosts[node].kept if on_line(each.version)]


def counts(run: RunState, version: Version) -> bool:
    return lineage.contains(run.lineage, version) or (version.generation == run.silent > 0 and version.step > run.step)


def line_of(run: RunState, version: Version) -> lineage.Lineage:
    """The lineage up to ``version``, which may be later than any commit that was told."""
    if lineage.contains(run.lineage, version):
        return lineage.cut(run.lineage, version)
    return lineage.extended(run.lineage, version)


def awaited(decision: Decision, plan: Plan) -> tuple[NodeId, ...]:
    """The keepers whose answer may make a better one of ``plan``, and has not come yet."""
    run = decision.run
    whole = (plan.tier in ("live", "host") and plan.version == run.version) or run.version == Version(0, 0)
    if not decision.rules.copy_every or not run.seats or (whole and not run.silent):
        return ()
    if run.stock != run.generation:
        ask(decision)
        run = decision.run
    missing = tuple(node for node in run.keepers if node not in run.hosts or run.hosts[node].asked != run.stock)
    return missing if decision.now < run.stock_until else ()


def complete_before(run: RunState, version: Version) -> tuple[Version | None, Version | None]:
    """What was last known to be complete in host memory and at the buddies, unless it was given up for ``version``."""
    known = (run.copied or run.protected[0], run.buddied or run.protected[1])
    copied, buddied = (each if each is not None and each <= version else None for each in known)
    return copied, buddied


# ---- a world that steps


def committed(decision: Decision, outcome: Outcome, before: RunState) -> None:
    """What is now complete everywhere; once that is newer than what the generation began from, nothing older is needed.

    ``before``: the run before this commit.
    """
    run, plan = decision.run, decision.plan
    if not plan.copy_every:
        return
    if run.unreadable:
        decision.know(unreadable=())
    copied = version_at(plan, outcome.copied_through) or run.copied
    buddied = version_at(plan, outcome.buddied_through) or run.buddied
    decision.know(copied=copied, buddied=buddied)
    if decision.run.late and not before.late:
        since = decision.run.unprotected_since
        decision.say(f"unprotected since step {since}: not every member of generation {plan.generation} has a later copy in host memory")
    elif decision.run.late_at_buddies and not before.late_at_buddies:
        since = decision.run.unbuddied_since
        decision.say(f"no later copies than of step {since} have reached other nodes: the loss of a node would cost what came after it")
    safe = _safe(plan, copied, buddied)
    if safe is not None and _safe(plan, run.copied, run.buddied) is None:
        decision.do(Release(run.keepers, safe, safe))


def _safe(plan: Plan, copied: Version | None, buddied: Version | None) -> Version | None:
    """The newest version of this generation that is complete wherever it is to be."""
    version = buddied if plan.buddy_every else copied
    return version if version is not None and version.generation == plan.generation else None


def buddies_of(run: RunState, rules: Rules, nodes: Sequence[NodeId]) -> dict[NodeId, NodeId]:
    """Of each of ``nodes`` that can have one; ``nodes`` names each once for every worker there."""
    zones = {node: run.hosts[node].zone if node in run.hosts else "" for node in run.keepers}
    return choose(nodes, zones, run.buddies, cross_zone=rules.cross_zone)


def pair(decision: Decision, plan: Plan) -> None:
    """Each member's node with a buddy, as before where nothing speaks against it.

    Said again whenever a keeper comes or goes: one that is new knows nothing of its buddy, and where others find it has changed.
    """
    run = decision.run
    if not decision.rules.buddy_every:
        return
    chosen = buddies_of(run, decision.rules, plan.nodes)
    if alone := tuple(dict.fromkeys(node for node in plan.nodes if node not in chosen)):
        other = ", or set copies.cross_zone = true" if len({host.zone for host in run.hosts.values()}) > 1 else ""
        names = ", ".join(node[:8] for node in alone)
        decision.say(
            f"no other node of the zone can hold copies of node {names}, so no member's go to other nodes: add a node there{other}"
        )
    if plan.buddy_every:
        addresses = {node: host.address for node, host in run.hosts.items()}
        decision.know(buddies=chosen)
        pairs = [(node, buddy, addresses.get(buddy, "")) for node, buddy in chosen.items()]
        decision.do(Pair(plan.generation, (*pairs, *((node, NodeId(""), "") for node in alone))))
