"""Copies in host memory: which keepers hold what, which node is whose buddy, and when the lack of copies is
reported.

While a world steps, its copies are overwritten all the time.  So the keepers are asked for their copies
together with the fence: nothing is written then, since a fenced or dead member begins no copy.  The next
world waits for the answers only if the survivors do not hold the newest committed step completely, or if no
member is left to report the last commits.

A copy also proves a commit, because a version is copied after its commit.  If every member of a world died
without an answer, the copies tell the last commit.  If one member has answered, its answer covers every step
that the other members could have finished without it.

The buddy of a node is a second node that holds its copies.  It is in the same zone, since traffic between
zones is slow and paid for; with ``cross_zone`` it is in another zone, if there is one.  Pairs stay if they
can, since a new buddy begins with nothing. Otherwise the buddy is the next node round the ring that holds
less than its fair share.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from elastic.control.decision import Decision
from elastic.control.rules import Rules
from elastic.control.run import Host, Running, RunState, Stopping, Waiting
from elastic.ids import NodeId, Version
from elastic.plan.copy_budget import LATER
from elastic.plan.transfer import Holding
from elastic.protocol import lineage
from elastic.protocol.actions import ListCopies, Pair, Release
from elastic.protocol.commit_record import Outcome
from elastic.protocol.copy_schedule import version_at
from elastic.protocol.events import Kept
from elastic.protocol.plan import Plan

OVERDUE = 10
"""Number of overdue copies after which the run is reported as unprotected."""

# ---- what keepers hold


def ask(decision: Decision) -> None:
    """Asks all keepers which copies they hold.  Copies that a keeper has already listed for this generation
    count until its new answer.
    """
    run, copies = decision.run, decision.run.copies
    said = any(isinstance(action, ListCopies) for action in decision.actions)
    if decision.rules.copy_every and run.cluster.keepers and run.members.seats and not said:
        known = copies.asked == run.generation
        hosts = {
            node: replace(host, kept=host.kept if known else (), asked=0)
            for node, host in copies.hosts.items()
        }
        decision.know(
            "copies", hosts=hosts, asked=run.generation, answers_until=decision.now + decision.rules.fence_s
        )
        decision.do(ListCopies(run.generation, run.cluster.keepers))


def ask_again(decision: Decision, node: NodeId) -> None:
    """Asks a keeper that comes up while the other keepers are being asked: a restarted keeper finds the
    copies of its living workers again.
    """
    run = decision.run
    if run.copies.asked == run.generation > 0 and isinstance(run.state, Waiting | Stopping):
        decision.know("copies", answers_until=decision.now + decision.rules.fence_s)
        decision.do(ListCopies(run.generation, (node,)))


def kept(decision: Decision, event: Kept) -> None:
    copies = decision.run.copies
    if event.generation != copies.asked or event.node not in decision.run.cluster.keepers:
        return decision.refuse(
            f"the keeper of node {event.node[:8]} was not asked what it holds of generation "
            f"{event.generation}"
        )
    host = replace(copies.hosts.get(event.node, Host()), kept=event.held, asked=event.generation)
    decision.know("copies", hosts={**copies.hosts, event.node: host})


def unreadable(decision: Decision, node: NodeId) -> None:
    """Notes that a member could not read a copy of this keeper.  None of the keeper's copies counts before
    the next commit.
    """
    decision.know("copies", unreadable=(*decision.run.copies.unreadable, node))


def listed(run: RunState) -> list[Holding]:
    """Returns the copies that count: those of versions on the lineage, and later ones of a world of which no
    member is left to report commits.
    """
    copies = run.copies
    if copies.asked != run.generation:
        return []
    on_line = cache(partial(_counts, run))
    nodes = [node for node in run.cluster.keepers if node in copies.hosts and node not in copies.unreadable]
    return [each for node in nodes for each in copies.hosts[node].kept if on_line(each.version)]


def _counts(run: RunState, version: Version) -> bool:
    if run.history.trusted is not None:
        return run.history.may_begin(version)
    return run.history.contains(version) or (
        version.generation == run.copies.unreported > 0 and version.step > run.step
    )


def line_of(run: RunState, version: Version) -> lineage.Lineage:
    """Returns the lineage up to ``version``, which may be later than any reported commit."""
    line = run.history.lineage
    return lineage.cut(line, version) if run.history.contains(version) else lineage.extended(line, version)


def awaited(decision: Decision, plan: Plan) -> tuple[NodeId, ...]:
    """Returns the keepers whose answer may make a better plan than ``plan``, and has not come yet."""
    run = decision.run
    whole = (plan.tier in ("live", "host") and plan.version == run.version) or run.version == Version(0, 0)
    if not decision.rules.copy_every or not run.members.seats or (whole and not run.copies.unreported):
        return ()
    return unheard(decision)


def unheard(decision: Decision) -> tuple[NodeId, ...]:
    """Returns the keepers that have not listed their copies of this generation yet, and may still do so in
    time.  Asks them if that was not done.
    """
    if decision.run.copies.asked != decision.run.generation:
        ask(decision)
    copies = decision.run.copies
    missing = tuple(
        node
        for node in decision.run.cluster.keepers
        if node not in copies.hosts or copies.hosts[node].asked != copies.asked
    )
    return () if decision.due(copies.answers_until) else missing


def complete_before(run: RunState, version: Version) -> tuple[Version | None, Version | None]:
    """Returns the newest versions known to be complete in host memory and at the buddies; None instead of a
    version after ``version``, which is given up.
    """
    copies = run.copies
    known = (copies.copied or copies.protected[0], copies.buddied or copies.protected[1])
    copied, buddied = (each if each is not None and each <= version else None for each in known)
    return copied, buddied


# ---- while a world steps


def committed(decision: Decision, outcome: Outcome, before: RunState) -> None:
    """Notes the versions whose copies are now complete; ``before`` is the run before this commit.

    Once a version of this generation is complete, keepers may free older copies.
    """
    run, plan = decision.run, decision.plan
    if not plan.copy_every:
        return
    if run.copies.unreadable:
        decision.know("copies", unreadable=())
    copied = version_at(plan, outcome.copied_through) or run.copies.copied
    buddied = version_at(plan, outcome.buddied_through) or run.copies.buddied
    decision.know("copies", copied=copied, buddied=buddied)
    if overdue(decision.run) and not overdue(before):
        since = unprotected_since(decision.run)
        decision.say(
            f"unprotected since step {since}: not every worker of generation {plan.generation} has a "
            "later copy in host memory"
        )
    elif _overdue_at_buddies(decision.run) and not _overdue_at_buddies(before):
        since = unbuddied_since(decision.run)
        decision.say(
            f"other nodes hold no copy newer than step {since}: if a node is lost, the steps after step "
            f"{since} may be lost"
        )
    safe = _safe(plan, copied, buddied)
    if safe is not None and _safe(plan, run.copies.copied, run.copies.buddied) is None:
        decision.do(Release(run.cluster.keepers, safe, safe))


def _safe(plan: Plan, copied: Version | None, buddied: Version | None) -> Version | None:
    """Returns the newest complete version, at the buddies if there are any, if it is of this generation; None
    otherwise.
    """
    version = buddied if plan.buddy_every else copied
    return version if version is not None and version.generation == plan.generation else None


def unprotected_since(run: RunState) -> int | None:
    """Returns the last step whose copies in host memory are complete, if later ones are missing; None where
    all is well.
    """
    plan, copied = run.plan, run.copies.copied
    if plan is None or not plan.copy_every:
        return None
    return plan.version.step if copied is None else copied.step if overdue(run) else None


def unbuddied_since(run: RunState) -> int | None:
    """Returns the last step whose copies are complete at the buddies, if later ones are long overdue; None
    where all is well.
    """
    plan = run.plan
    return (
        (run.copies.buddied or plan.version).step if plan is not None and _overdue_at_buddies(run) else None
    )


def overdue(run: RunState) -> bool:
    """Returns whether :data:`OVERDUE` copies in host memory are overdue."""
    return (
        run.plan is not None
        and bool(run.plan.copy_every)
        and _is_overdue(run, run.plan, run.copies.copied, paces(run)[0])
    )


def _overdue_at_buddies(run: RunState) -> bool:
    """Returns whether :data:`OVERDUE` copies at the buddies are overdue."""
    return (
        run.plan is not None
        and bool(run.plan.buddy_every)
        and _is_overdue(run, run.plan, run.copies.buddied, paces(run)[1])
    )


def _is_overdue(run: RunState, plan: Plan, version: Version | None, pace: int) -> bool:
    return run.step - (version or plan.version).step >= OVERDUE * pace


def paces(run: RunState) -> tuple[int, int]:
    """Returns the steps from one copy of the present world to the next, in host memory and at the buddies (0:
    none).

    The members may have agreed in a commit on more steps than the plan says.
    """
    plan, last = run.plan, run.history.last
    if plan is None:
        return 0, 0
    agreed = (
        (last.copy_every, last.buddy_every)
        if last is not None and last.generation == plan.generation
        else (0, 0)
    )
    copies, buddies = (
        max(planned, each if each < LATER else 0) if planned else 0
        for planned, each in zip((plan.copy_every, plan.buddy_every), agreed, strict=True)
    )
    return copies, buddies


# ---- buddies


def buddies_of(run: RunState, rules: Rules, nodes: Sequence[NodeId]) -> dict[NodeId, NodeId]:
    """Returns the buddy of each node in ``nodes``, which names a node once for each of its workers.  A node
    that can have no buddy is left out.
    """
    hosts = run.copies.hosts
    zones = {node: hosts[node].zone if node in hosts else "" for node in run.cluster.keepers}
    leave = frozenset(run.cluster.notices)
    before, cross_zone = run.copies.buddies, rules.cross_zone
    if not leave:
        return choose_buddies(nodes, zones, before, cross_zone=cross_zone)
    # a node that has no other gets one that may be taken, or else one that will be taken
    taken = frozenset(node for node in leave if run.cluster.deadline(node) is not None)
    chosen: dict[NodeId, NodeId] = {}
    for without in (leave, taken, frozenset[NodeId]()):
        if not (rest := [node for node in nodes if node not in chosen]):
            break
        chosen |= choose_buddies(rest, zones, before, cross_zone=cross_zone, without=without)
    return chosen


def is_safe(run: RunState) -> bool:
    """Returns whether the present world's copies are complete, at the buddies if there are any."""
    return run.plan is not None and _safe(run.plan, run.copies.copied, run.copies.buddied) is not None


def pair_again(decision: Decision) -> None:
    """Gives buddies anew if keepers or notices have changed in this decision.  It is done once, however many have
    changed: several hundred machines may be announced together, and each choice looks at all nodes.
    """
    run, before = decision.run, decision.before
    if isinstance(run.state, Running) and not (
        run.cluster.keepers is before.cluster.keepers
        and run.cluster.notices is before.cluster.notices
        and run.copies.hosts is before.copies.hosts
    ):
        pair(decision, run.state.plan, before)


def pair(decision: Decision, plan: Plan, known: RunState | None = None) -> None:
    """Gives each member's node a buddy, and keeps the earlier one where possible.

    All keepers are told.  With ``known``, a run of the same world, only those are told for which something has
    changed since: they have another buddy, or its keeper or their own has come up, since a new keeper does not
    know its buddy and may have another address.
    """
    hosts = decision.run.copies.hosts
    if not decision.rules.buddy_every:
        return
    chosen = buddies_of(decision.run, decision.rules, plan.nodes)
    alone = tuple(dict.fromkeys(node for node in plan.nodes if node not in chosen))
    # on a single machine nobody expects copies elsewhere
    had_others = len(hosts) > 1 or bool(decision.run.copies.buddies)
    if had_others and frozenset(alone) - frozenset(decision.run.copies.alone):
        other = ", or set copies.cross_zone = true" if len({host.zone for host in hosts.values()}) > 1 else ""
        names = ", ".join(node[:8] for node in alone)
        decision.say(
            f"no second node in the zone of node {names} can hold copies, so they have no copies on "
            f"other nodes: add a node to the zone{other}"
        )
    if alone != decision.run.copies.alone:
        decision.know("copies", alone=alone)
    if plan.buddy_every:
        decision.know("copies", buddies=chosen)
        before, old = (known.copies.buddies, known.copies.hosts) if known is not None else ({}, {})
        came = {node for node, host in hosts.items() if old.get(node) is not host}
        pairs = [
            (node, buddy, hosts[buddy].address if buddy in hosts else "")
            for node, buddy in chosen.items()
            if before.get(node) != buddy or node in came or buddy in came
        ]
        lonely = [(node, NodeId(""), "") for node in alone if known is None or node in before or node in came]
        if pairs or lonely:
            decision.do(Pair(plan.generation, (*pairs, *lonely)))


def choose_buddies(
    homes: Sequence[NodeId],
    zones: Mapping[NodeId, str],
    before: Mapping[NodeId, NodeId],
    *,
    cross_zone: bool = False,
    without: Collection[NodeId] = (),
) -> dict[NodeId, NodeId]:
    """Returns the buddy of each node in ``homes``, which names a node once for each worker there.

    ``zones`` has the zone of each node whose keeper is up; nodes without a label ("") are one zone.  A node
    in ``without`` is nobody's buddy.  A node that can have no buddy is left out.
    """
    weights = Counter(homes)
    rings = {
        zone: [node for node in ring if node not in without]
        for zone, ring in _rings(zones, cross_zone).items()
    }
    members = {zone: frozenset(ring) for zone, ring in rings.items()}
    fair = -(-len(homes) // max(len(zones.keys() - without), 1))
    load: Counter[NodeId] = Counter()
    chosen: dict[NodeId, NodeId] = {}
    for node in sorted(weights):
        old, zone = before.get(node), zones.get(node, "")
        if (
            old is not None
            and old != node
            and old in members.get(zone, ())
            and load[old] + weights[node] <= max(fair, weights[node])
        ):
            chosen[node] = old
            load[old] += weights[node]
    skips: dict[str, dict[int, int]] = defaultdict(dict)
    for node in sorted(weights.keys() - chosen.keys()):
        zone = zones.get(node, "")
        buddy = _next(node, rings.get(zone, []), skips[zone], load, fair)
        if buddy is not None:
            chosen[node] = buddy
            load[buddy] += weights[node]
    return dict(sorted(chosen.items()))


def _rings(zones: Mapping[NodeId, str], cross_zone: bool) -> dict[str, list[NodeId]]:
    """Returns for each zone the nodes that may be buddies of its nodes, in order."""
    near: dict[str, list[NodeId]] = {zone: [] for zone in zones.values()}
    for node in sorted(zones):
        near[zones[node]].append(node)
    if not cross_zone or len(near) == 1:
        return near
    return {zone: [node for node in sorted(zones) if zones[node] != zone] for zone in near}


def _next(
    node: NodeId, ring: list[NodeId], skips: dict[int, int], load: Mapping[NodeId, int], fair: int
) -> NodeId | None:
    """Returns the first node on the ring after ``node`` whose load is below ``fair``, or else the first node
    after ``node``; None without another node.

    ``skips`` maps the position of a node with a full share to the distance at which the search goes on.
    """
    if ring in ([], [node]):
        return None
    first = bisect_right(ring, node)
    seen, place = [], first
    while place < first + len(ring):
        index = place % len(ring)
        if ring[index] != node and load[ring[index]] < fair:
            break
        if ring[index] != node:
            seen.append(index)
        place += max(skips.get(index, 1), 1) if ring[index] != node else 1
    else:
        place = first
    for index in seen:
        skips[index] = (place - index) % len(ring) or 1
    return ring[place % len(ring)]
