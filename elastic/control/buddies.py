"""Whose memory holds copies of whose: each node's buddy, in another failure domain.

A buddy is another node of the same zone, for traffic between zones is slow and paid for; with ``cross_zone`` it is in another zone, where
there is one.  Pairs stay as they are where they can, since another buddy begins with nothing; otherwise whoever has least to hold is taken,
and of equals the next one round the ring, so that no two nodes end up as each other's only hope unless there are only two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from elastic.ids import NodeId


def choose(
    homes: Sequence[NodeId], zones: Mapping[NodeId, str], before: Mapping[NodeId, NodeId], *, cross_zone: bool = False
) -> dict[NodeId, NodeId]:
    """The buddy of each node in ``homes``, which names it once for each worker there.

    ``zones``: those of the nodes whose keepers are up ("": no label, all such are one zone).  A node for which there is none is left out.
    """
    weights = Counter(homes)
    ring = sorted(zones)
    fair = -(-len(homes) // max(len(ring), 1))
    load: Counter[NodeId] = Counter()
    chosen: dict[NodeId, NodeId] = {}
    possible = {node: _possible(node, zones, cross_zone) for node in sorted(weights)}
    for node, others in possible.items():
        old = before.get(node)
        if old in others and load[old] + weights[node] <= max(fair, weights[node]):
            chosen[node] = old
            load[old] += weights[node]
    for node, others in possible.items():
        if node not in chosen and others:
            after = {other: (ring.index(other) - ring.index(node)) % len(ring) if node in zones else 0 for other in others}
            chosen[node] = min(others, key=lambda other: (load[other], after[other], other))
            load[chosen[node]] += weights[node]
    return dict(sorted(chosen.items()))


def _possible(node: NodeId, zones: Mapping[NodeId, str], cross_zone: bool) -> list[NodeId]:
    others = [other for other in zones if other != node]
    near = [other for other in others if zones[other] == zones.get(node, "")]
    far = [other for other in others if zones[other] != zones.get(node, "")]
    return (far or near) if cross_zone else near
