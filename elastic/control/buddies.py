"""Each node's buddy: the node that holds its copies too, in another failure domain.

A buddy is another node of the same zone, for traffic between zones is slow and paid for; with ``cross_zone`` it is in another zone, where
there is one.  Pairs stay as they are where they can, since a new buddy begins with nothing.  Otherwise the node with the least to hold is
chosen, and of equals the next one round the ring, so that no two nodes are each other's only hope unless there are only two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from elastic.ids import NodeId


def choose(
    homes: Sequence[NodeId], zones: Mapping[NodeId, str], before: Mapping[NodeId, NodeId], *, cross_zone: bool = False
) -> dict[NodeId, NodeId]:
    """Returns the buddy of each node in ``homes``, which names a node once for each worker there.

    ``zones`` has the zone of each node whose keeper is up; nodes without a label ("") are one zone.  A node that can have no buddy is left
    out.
    """
    weights = Counter(homes)
    rings = _rings(zones, cross_zone)
    members = {zone: frozenset(ring) for zone, ring in rings.items()}
    fair = -(-len(homes) // max(len(zones), 1))
    load: Counter[NodeId] = Counter()
    chosen: dict[NodeId, NodeId] = {}
    for node in sorted(weights):
        old, zone = before.get(node), zones.get(node, "")
        if old is not None and old != node and old in members.get(zone, ()) and load[old] + weights[node] <= max(fair, weights[node]):
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


def _next(node: NodeId, ring: list[NodeId], skips: dict[int, int], load: Mapping[NodeId, int], fair: int) -> NodeId | None:
    """Returns the first node on the ring after ``node`` that does not have its share yet, or simply the first.

    ``skips`` remembers for nodes that have their share where to go on.
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
