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

from elastic.control import lineage
from elastic.control.actions import Pair, Release, TakeStock
from elastic.control.buddies import choose
from elastic.control.commit import Outcome
from elastic.control.copying import version_at
from elastic.control.events import Kept
from elastic.control.rules import Rules
from elastic.control.states import Host, RunState, Stopping, Waiting
from elastic.control.turn import Turn
from elastic.ids import NodeId, Version
from elastic.plan.plan import Plan
from elastic.plan.transfer import Holding


def ask(turn: Turn) -> None:
    """All keepers, perhaps once more: what they have said of this generation counts until they say otherwise."""
    run = turn.run
    if turn.rules.copy_every and run.keepers and run.seats and not any(isinstance(action, TakeStock) for action in turn.actions):
        known = run.stock == run.generation
        hosts = {node: replace(host, kept=host.kept if known else (), asked=0) for node, host in run.hosts.items()}
        turn.know(hosts=hosts, stock=run.generation, stock_until=turn.now + turn.rules.fence_s)
        turn.do(TakeStock(run.generation, run.keepers))


def ask_again(turn: Turn, node: NodeId) -> None:
    """Of a keeper that has come up while the others are being asked: it finds its living workers' copies again."""
    run = turn.run
    if run.stock == run.generation > 0 and isinstance(run.state, Waiting | Stopping):
        turn.know(stock_until=turn.now + turn.rules.fence_s)
        turn.do(TakeStock(run.generation, (node,)))


def kept(turn: Turn, event: Kept) -> None:
    run = turn.run
    if event.generation != run.stock or event.node not in run.keepers:
        return turn.refuse(f"nobody asks what the keeper of node {event.node[:8]} holds of generation {event.generation}")
    host = replace(run.hosts.get(event.node, Host()), kept=event.held, asked=event.generation)
    turn.know(hosts={**run.hosts, event.node: host})


def unreadable(turn: Turn, node: NodeId) -> None:
    """A member could not read what it was to take there.  Whatever the keeper says, nothing is taken from it before another commit."""
    turn.know(unreadable=(*turn.run.unreadable, node))


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


def awaited(turn: Turn, plan: Plan) -> tuple[NodeId, ...]:
    """The keepers whose answer may make a better one of ``plan``, and has not come yet."""
    run = turn.run
    whole = (plan.tier in ("live", "host") and plan.version == run.version) or run.version == Version(0, 0)
    if not turn.rules.copy_every or not run.seats or (whole and not run.silent):
        return ()
    if run.stock != run.generation:
        ask(turn)
        run = turn.run
    missing = tuple(node for node in run.keepers if node not in run.hosts or run.hosts[node].asked != run.stock)
    return missing if turn.now < run.stock_until else ()


def complete_before(run: RunState, version: Version) -> tuple[Version | None, Version | None]:
    """What was last known to be complete in host memory and at the buddies, unless it was given up for ``version``."""
    known = (run.copied or run.protected[0], run.buddied or run.protected[1])
    copied, buddied = (each if each is not None and each <= version else None for each in known)
    return copied, buddied


# ---- a world that steps


def committed(turn: Turn, outcome: Outcome, before: RunState) -> None:
    """What is now complete everywhere; once that is newer than what the generation began from, nothing older is needed.

    ``before``: the run before this commit.
    """
    run, plan = turn.run, turn.plan
    if not plan.copy_every:
        return
    if run.unreadable:
        turn.know(unreadable=())
    copied = version_at(plan, outcome.copied_through) or run.copied
    buddied = version_at(plan, outcome.buddied_through) or run.buddied
    turn.know(copied=copied, buddied=buddied)
    if turn.run.late and not before.late:
        since = turn.run.unprotected_since
        turn.say(f"unprotected since step {since}: not every member of generation {plan.generation} has a later copy in host memory")
    elif turn.run.late_at_buddies and not before.late_at_buddies:
        since = turn.run.unbuddied_since
        turn.say(f"no later copies than of step {since} have reached other nodes: the loss of a node would cost what came after it")
    safe = _safe(plan, copied, buddied)
    if safe is not None and _safe(plan, run.copied, run.buddied) is None:
        turn.do(Release(run.keepers, safe, safe))


def _safe(plan: Plan, copied: Version | None, buddied: Version | None) -> Version | None:
    """The newest version of this generation that is complete wherever it is to be."""
    version = buddied if plan.buddy_every else copied
    return version if version is not None and version.generation == plan.generation else None


def buddies_of(run: RunState, rules: Rules, nodes: Sequence[NodeId]) -> dict[NodeId, NodeId]:
    """Of each of ``nodes`` that can have one; ``nodes`` names each once for every worker there."""
    zones = {node: run.hosts[node].zone if node in run.hosts else "" for node in run.keepers}
    return choose(nodes, zones, run.buddies, cross_zone=rules.cross_zone)


def pair(turn: Turn, plan: Plan) -> None:
    """Each member's node with a buddy, as before where nothing speaks against it.

    Said again whenever a keeper comes or goes: one that is new knows nothing of its buddy, and where others find it has changed.
    """
    run = turn.run
    if not turn.rules.buddy_every:
        return
    chosen = buddies_of(run, turn.rules, plan.nodes)
    if alone := tuple(dict.fromkeys(node for node in plan.nodes if node not in chosen)):
        other = ", or set copies.cross_zone = true" if len({host.zone for host in run.hosts.values()}) > 1 else ""
        names = ", ".join(node[:8] for node in alone)
        turn.say(f"no other node of the zone can hold copies of node {names}, so no member's go to other nodes: add a node there{other}")
    if plan.buddy_every:
        addresses = {node: host.address for node, host in run.hosts.items()}
        turn.know(buddies=chosen)
        pairs = [(node, buddy, addresses.get(buddy, "")) for node, buddy in chosen.items()]
        turn.do(Pair(plan.generation, (*pairs, *((node, NodeId(""), "") for node in alone))))
