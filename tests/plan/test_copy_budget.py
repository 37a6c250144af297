"""How often copies are made, what the user is told, and what is refused: by what was measured, in numbers that add up."""

from __future__ import annotations

import pytest

from elastic.plan.copy_budget import FIRST_BUDDY_EVERY, GBIT, CopyRule, Link, Pace, Spread, amount, explained, no_room

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


AUTO = CopyRule(copies=True, buddies=True)
ETHERNET = Link("eth0", 100 * GBIT)


def test_what_it_costs_is_said() -> None:
    """Before anything was measured: with auto what it can be at most, else what it is with steps of a second."""
    assert explained(Spread(96 * GB, 2), 1, 1, AUTO, ETHERNET, 0.01) == (
        "copies in host memory every step or more seldom (auto), of 96 GB of state: "
        "up to 336 GB a worker (7 slots of 48 GB, 2 shards at least); "
        "on to another node as often as 20% of each link allow, once a second at most (auto): 96 GB each time over all links, "
        "at most 2.5 GB/s from a node with a link like eth0 here (100 Gb/s); "
        "0.9600 each time, at most 90.00 an hour a node, at copies.price_per_gb = 0.01"
    )
    assert explained(Spread(96 * GB, 2), 5, 10, CopyRule(), ETHERNET, 0.01) == (
        "copies in host memory every 5 steps, of 96 GB of state: up to 336 GB a worker (7 slots of 48 GB, 2 shards at least); "
        "on to another node every 10 steps: 96 GB each time, 9.6 GB a step over all links; "
        "from one worker 4.8 GB a step, with steps of 1 s 4.8 GB/s, 38.40% of a link like eth0 here (100 Gb/s); "
        "0.0960 a step at copies.price_per_gb = 0.01"
    )
    assert explained(Spread(3_000), 5, 0, CopyRule(), ETHERNET, 0.01) == (
        "copies in host memory every 5 steps, of 3 kB of state: up to 9 kB a worker (3 slots of 3 kB, 1 shard at least); "
        "none on other nodes (copies.buddy_every = 0)"
    )
    assert explained(Spread(3_000), 0, 0, CopyRule()) == (
        "no copies in host memory (copies.copy_every = 0): what a dead worker alone held is read from the bucket; "
        "a save on its way there takes up to 3 kB a worker"
    )
    assert [amount(size) for size in (0, 999, 1_000, 1.5e9, 2e15)] == ["0 B", "999 B", "1 kB", "1.5 GB", "2e+03 TB"]


def test_of_a_link_whose_speed_is_not_known_nothing_is_said() -> None:
    said = explained(Spread(96 * GB, 2), 1, 1, AUTO, Link("eth0"), 0.01)
    assert said.endswith(
        "96 GB each time over all links, at most 250 MB/s for every 10 Gb/s of a node's link; "
        "0.9600 each time, at most 9.00 an hour for every 10 Gb/s of a node's link, at copies.price_per_gb = 0.01"
    )
    assert "eth0" not in said and "price" not in explained(Spread(96 * GB, 2), 1, 1, AUTO)
    said = explained(Spread(96 * GB, 2), 5, 10, CopyRule(), Link("eth0"))
    assert said.endswith("from one worker 4.8 GB a step, with steps of 1 s 4.8 GB/s of its node's link")


@pytest.mark.parametrize("link", [Link(), ETHERNET])
def test_a_small_state_needs_no_link_to_say_how_much_at_most(link: Link) -> None:
    """All of it once a second is less than a link's share."""
    said = explained(Spread(5_000_000), 1, 1, AUTO, link, 0.01)
    assert said.endswith(
        "5 MB each time over all links, at most 5 MB/s; 0.0001 each time, at most 0.1800 an hour in all, at copies.price_per_gb = 0.01"
    )


def test_each_replica_is_sent() -> None:
    """Members that hold the same part copy it each: what one has goes with its node."""
    assert "192 GB each time over all links" in explained(Spread(96 * GB, 2, 2), 1, 1, AUTO)
    assert "192 GB each time, 19.2 GB a step over all links; from one worker 4.8 GB a step" in explained(
        Spread(96 * GB, 2, 2), 1, 10, CopyRule()
    )


def test_what_does_not_fit_is_refused_by_name() -> None:
    assert no_room("auto", 10, 10, "the node", 5) == ""
    sentence = no_room("auto", 112 * GB, 64 * GB, "the container (memory.max = 80000000000)", 7)
    assert sentence.startswith("copies.copy_every = auto: this worker's copies and saves take 112 GB")
    assert "take 112 GB of memory (7 slots), and the container (memory.max = 80000000000) leaves 64 GB beside" in sentence
    assert (
        "resources.limits.memory" in sentence
        and "raise it by 48 GB" in sentence
        and "save it: copies.buddy_every = 0 leaves 3 of 7 slots, copies.copy_every = 0 leaves 1 of 7 slots, workers.min" in sentence
    )
    assert "copies.buddy_every" not in no_room(1, 96 * GB, 64 * GB, "the node", 3)
    assert "or save it: workers.min = more" in no_room(0, 96 * GB, 64 * GB, "the node", 1)
