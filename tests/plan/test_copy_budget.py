"""Copies are made as often as the measured times allow, and what the user is told about memory adds up."""

from __future__ import annotations

import pytest

from elastic.plan.copy_budget import (
    FIRST_BUDDY_EVERY,
    LATER,
    CopyRule,
    Pace,
    amount,
    explained,
    no_room,
    slot_size,
    slots_a_worker,
)

pytestmark = pytest.mark.fast
GB = 10**9


def paced(step_s: float, *copies_s: float, copies: bool = True, buddies: bool = True) -> Pace:
    pace = Pace(CopyRule(copies, buddies))
    pace.stepped(step_s)
    for seconds in copies_s:
        pace.copied(seconds)
    return pace


def test_a_copy_that_is_done_within_a_step_is_made_every_step() -> None:
    assert paced(1.3, *[1.2] * 8).copy_every() == 1
    assert paced(0.5, *[1.2] * 8).copy_every() == 3
    assert paced(0.5, *[1.2] * 7).copy_every() == 0, "as planned, until enough was seen"
    assert paced(0.5, *[9.0] * 4, 0.4, *[9.0] * 3).copy_every() == 1, "the others were held up"
    assert paced(0.5, *[0.4] * 8, *[1.2] * 8).copy_every() == 3, "it has become slower"
    assert paced(0.5, *[1.2] * 8, copies=False).copy_every() == 0, "the job says how often"
    assert Pace(CopyRule(copies=True)).copy_every() == 0
    assert paced(1.3, *[1.2] * 8).copy_every(able=False) == LATER, "memory is still being pinned"
    assert paced(1.3, *[1.2] * 8, copies=False).copy_every(able=False) == 0, (
        "the job says how often, and waits for it"
    )


def test_buddies_get_no_more_than_their_share_of_the_link() -> None:
    """A node's copies take 76.8 s at 1.25 GB/s."""
    assert paced(0.8).buddy_every(76.8) == 480 and 76.8 / (480 * 0.8) <= 0.2
    assert Pace(CopyRule(buddies=True, link_share=0.4), 0.8).buddy_every(76.8) == 240
    assert paced(0.8).buddy_every(0.0) == FIRST_BUDDY_EVERY, "none was brought yet"
    assert paced(2.0).buddy_every(0.3) == 1, "a second and a half of a link's share"
    assert paced(0.05).buddy_every(0.001) == 20, "not more than one a second"
    assert paced(0.8, buddies=False).buddy_every(76.8) == 0


def test_a_step_is_as_long_as_recent_ones() -> None:
    pace = paced(4.0)
    for _ in range(10):
        pace.stepped(1.0)
    assert pace.step_s == pytest.approx(1.0, abs=0.01)


def test_the_memory_that_copies_take_is_said() -> None:
    assert explained(12 * GB, 48 * GB, 1, 1) == (
        "copies in host memory and saves take 84 GB of its node for each worker, in 7 slots of 12 GB: "
        "1 for a save, 4 for copies of its own state, 2 for copies of a worker on another node; up to "
        "336 GB if fewer workers share the state and the node has room"
    )
    assert slots_a_worker(1, 1) * 12 == 84
    assert explained(3_000, 3_000, 5, 0) == (
        "copies in host memory and saves take 9 kB of its node for each worker, in 3 slots of 3 kB: 1 for a "
        "save, 2 for copies of its own state"
    )
    assert explained(3_000, 3_000, 1, 0, offload=True) == (
        "state in host memory and saves take 12 kB of its node for each worker, in 4 slots of 3 kB: 1 for a "
        "save, 3 for its own state and copies of it"
    )
    assert explained(3_000, 3_000, 0, 0) == (
        "no copies in host memory (copies.copy_every = 0): state that only a dead worker held is read "
        "from the bucket; a save on its way to the bucket takes 3 kB of its node for each worker"
    )
    assert [amount(size) for size in (0, 999, 1_000, 1.5e9, 2e15)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.5 GB",
        "2e+03 TB",
    ]


def test_what_does_not_fit_is_refused_by_name() -> None:
    assert no_room("auto", 10, 10, "the node", 5) == ""
    sentence = no_room("auto", 112 * GB, 64 * GB, "the container (memory.max = 80000000000)", 7)
    assert sentence.startswith(
        "copies.copy_every = auto: this worker's copies and saves take at least 112 GB"
    )
    assert (
        "take at least 112 GB of memory (7 slots), and the container (memory.max = 80000000000) "
        "leaves only 64 GB after"
    ) in sentence
    assert (
        "resources.limits.memory" in sentence
        and "raise the limit by 48 GB" in sentence
        and (
            "need less: copies.buddy_every = 0 leaves 3 of 7 slots, copies.copy_every = 0 leaves 1 of 7 "
            "slots, more workers"
        )
        in sentence
    )
    assert "need less: copies.buddy_every = 0 leaves 4 of 8 slots, more workers" in no_room(
        1, 128, 64, "the node", 8, offload=True
    )
    assert "copies.buddy_every" not in no_room(1, 96 * GB, 64 * GB, "the node", 3)
    assert "or need less: more workers that share the state" in no_room(0, 96 * GB, 64 * GB, "the node", 1)


def test_a_pinned_slot_is_as_large_as_the_next_world_needs_where_the_node_has_the_memory() -> None:
    """``others`` is room for one worker more, 54 GB here.  The copy has 18 GB, and 36 GB after the loss of
    one of two workers.
    """
    assert slot_size(0, 18, 36, free=100, others=54) == 36, (
        "82 GB stay free beside a copy of today, 64 beside what is foreseen"
    )
    assert slot_size(0, 18, 36, free=89, others=54) == 18, "53 would stay free"
    assert slot_size(18, 18, 36, free=72, others=54) == 36, "18 more leave 54"
    assert slot_size(18, 36, 0, free=20, others=108) == 36, "what the copy needs is not a matter of choice"
    assert slot_size(36, 18, 18, free=54, others=54) == 36, (
        "memory is slow to pin, so it stays while the room is there"
    )
    assert slot_size(36, 18, 18, free=53, others=54) == 18, "then it makes room"
    assert slot_size(36, 18, 36, free=53, others=54) == 18, "whatever is foreseen"
    assert slot_size(18, 18, 36, free=71, others=54) == 18, "and does not come back at once"
