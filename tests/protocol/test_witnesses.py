"""The journal goes to a bounded number of keepers, however many there are, and only what they hold now
counts.
"""

from __future__ import annotations

import pytest

from elastic.ids import NodeId
from elastic.protocol.authority import WITNESSES, Authority, has_read_all

pytestmark = pytest.mark.fast


def test_n2_the_journal_goes_to_a_bounded_number_of_keepers_and_a_follower_asks_the_same_ones() -> None:
    """Fifteen of 100 keepers hold the journal: eight of them are a majority, and a follower that reached
    eight has read all.
    """
    nodes = tuple(NodeId(f"n{number:03d}") for number in range(100))
    rules = Authority(1, 60.0, 0.0, nodes, "begun")
    rules.note(10, nodes, "first")
    asked = [node for node, _ in rules.requests(10, nodes, 0.0)]
    assert tuple(asked) == nodes[:WITNESSES]
    for node in asked[:7]:
        rules.answered(node, 10)
    assert not rules.secured(10, 1.0)
    rules.answered(asked[7], 10)
    assert rules.secured(10, 1.0) and rules.holders(10) == (8, WITNESSES)
    assert has_read_all(dict.fromkeys(asked[:8], 1), nodes)
    assert not has_read_all(dict.fromkeys(asked[:7], 1), nodes)
    assert not has_read_all(dict.fromkeys(nodes[WITNESSES:], 1), nodes), "other keepers prove nothing"


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "control"])
def test_what_a_lost_keeper_held_counts_no_more(lost: bool) -> None:
    """The keeper that replaces it has nothing: with another one's copy it is no majority.  It is sent the
    journal from the beginning.
    """
    keepers = a, b, _ = NodeId("a"), NodeId("b"), NodeId("c")
    authority = Authority(1, 60.0, 0.0, keepers, "nothing")
    authority.note(10, keepers, "ten")
    authority.requests(10, keepers, 0.0)
    authority.answered(a, 10)
    authority.note(20, keepers, "twenty")
    assert authority.requests(20, (a,), 0.1) == [(a, 10)]
    if lost:
        authority.failed(a)
    authority.answered(b, 10)
    assert authority.secured(10, 0.2) != lost and authority.holders(10) == (1 if lost else 2, 3)
    if lost:
        assert authority.requests(20, (a,), 0.2) == [(a, 0)]
        authority.answered(a, 20)
        assert authority.secured(10, 0.3) and not authority.secured(20, 0.3), "the new one has it now"
