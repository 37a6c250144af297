"""How often copies are made, what the user is told, and what is refused: by what was measured, in numbers that add up."""

from __future__ import annotations

import pytest

from elastic.plan.copies import CopyRule, amount, buddy_every, copy_every, explained, no_room

pytestmark = pytest.mark.fast
GB = 10**9


def test_a_copy_that_is_done_within_a_step_is_made_every_step() -> None:
    assert copy_every(24 * GB, 1.3, 20e9) == 1
    assert copy_every(24 * GB, 0.5, 20e9) == 3, "1.2 s"
    assert copy_every(24 * GB, 0.0, 20e9) == 1, "nothing was measured yet"
    assert copy_every(100_000, 0.001, 2e9) == 1, "a toy's copy is free"


def test_buddies_get_no_more_than_their_share_of_the_link() -> None:
    every = buddy_every(96 * GB, 0.8, 0.2)
    assert every == 480 and 96 * GB / (every * 0.8) <= 0.2 * 1.25e9
    assert buddy_every(96 * GB, 0.8, 0.4) == 240
    assert buddy_every(1_000, 0.8, 0.2) == buddy_every(96 * GB, 0.0, 0.2) == 10, "small jobs, and before anything was measured"


def test_what_it_costs_is_said() -> None:
    auto = CopyRule(copies=True, buddies=True)
    assert explained(96 * GB, 2, 1, 10, auto, 0.01) == (
        "copies in host memory every step or more seldom (auto), of 96 GB of state: up to 192 GB a worker (4 slots, 2 shards at least); "
        "on to another node every 10 steps or more seldom (auto), 9.6 GB a step over all links, at most 20% of each; "
        "0.0960 a step at copies.price_per_gb = 0.01"
    )
    assert explained(3_000, 1, 5, 0, CopyRule()) == (
        "copies in host memory every 5 steps, of 3 kB of state: up to 6 kB a worker (2 slots, 1 shard at least); "
        "none on other nodes (copies.buddy_every = 0)"
    )
    assert "read from the bucket" in explained(3_000, 1, 0, 0, CopyRule())
    assert [amount(size) for size in (0, 999, 1_000, 1.5e9, 2e15)] == ["0 B", "999 B", "1 kB", "1.5 GB", "2e+03 TB"]


def test_what_does_not_fit_is_refused_by_name() -> None:
    assert no_room(10, 10, "the node", 4) == ""
    sentence = no_room(96 * GB, 64 * GB, "the container (memory.max = 80000000000)", 4)
    assert "take 96 GB of memory (4 slots), and the container (memory.max = 80000000000) leaves 64 GB" in sentence
    assert "resources.limits.memory" in sentence and "raise it by 32 GB" in sentence and "copies.buddy_every = 0" in sentence
    assert "copies.buddy_every" not in no_room(96 * GB, 64 * GB, "the node", 2)
