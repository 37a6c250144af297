"""A buddy is a node that holds another node's copies: never its own, evenly spread, and unchanged unless
there is a reason.
"""

from __future__ import annotations

import random

import pytest

from elastic.control.copy_inventory import choose_buddies
from elastic.ids import NodeId

pytestmark = pytest.mark.fast
A, B, C, D = (NodeId(name) for name in "abcd")


def test_the_next_on_the_ring_that_has_not_its_share() -> None:
    assert choose_buddies([A, B, C, D], dict.fromkeys((A, B, C, D), ""), {}) == {A: B, B: C, C: D, D: A}
    assert choose_buddies([A, B], dict.fromkeys((A, B), ""), {}) == {A: B, B: A}
    assert choose_buddies([A] * 4 + [B] * 4 + [C], dict.fromkeys((A, B, C, D), ""), {}) == {
        A: B,
        B: C,
        C: D,
    }, "D has no workers, and room"
    assert choose_buddies([A, A], {A: ""}, {}) == {}


def test_zones_are_kept_or_crossed() -> None:
    zones = {A: "x", B: "x", C: "y", D: "z"}
    assert choose_buddies([A, B, C, D], zones, {}) == {A: B, B: A}, "alone in their zones"
    crossed = choose_buddies([A, B, C, D], zones, {}, cross_zone=True)
    assert crossed.keys() == {A, B, C, D} and all(
        zones[node] != zones[buddy] for node, buddy in crossed.items()
    )
    assert choose_buddies([A, B], {A: "x", B: "x"}, {}, cross_zone=True) == {A: B, B: A}, (
        "there is no other zone"
    )


def test_only_the_pairs_of_who_went_are_changed() -> None:
    nodes = [NodeId(f"n{i:03}") for i in range(200)]
    first = choose_buddies(nodes, dict.fromkeys(nodes, ""), {})
    gone = nodes.pop(77)
    second = choose_buddies(nodes, dict.fromkeys(nodes, ""), first)
    assert [node for node in nodes if second[node] != first[node]] == [
        node for node in nodes if first[node] == gone
    ]
    assert choose_buddies(nodes, dict.fromkeys(nodes, ""), second) == second


def test_whatever_there_is_everybody_who_can_has_a_buddy() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        names = [NodeId(chr(97 + i)) for i in range(rng.randint(1, 8))]
        zones = {name: rng.choice(("", "x", "y")) for name in names}
        homes = [rng.choice(names) for _ in range(rng.randint(1, 12))]
        before = {name: rng.choice(names) for name in names}
        for cross_zone in (False, True):
            chosen = choose_buddies(homes, zones, before, cross_zone=cross_zone)
            for node in set(homes):
                near = {other for other in names if other != node and zones[other] == zones[node]}
                far = {other for other in names if zones[other] != zones[node]}
                possible = (far or near) if cross_zone else near
                assert (chosen[node] in possible) if possible else node not in chosen
