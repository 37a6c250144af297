"""The memory that a member needs, and the smallest shard degree at which it fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.plan.memory_need import USABLE, Need, Transient, first_roomy, least_roomy, least_shard

pytestmark = pytest.mark.fast
GB = 10**9
PARAMETERS = 8_030_261_248
LLAMA_8B = Need(
    state=12 * PARAMETERS,
    gradients=4 * PARAMETERS,
    computing=2 * PARAMETERS,
    transient=Transient(6 * GB, 6 * GB),
)
sizes = st.integers(0, 200 * GB)
needs = st.builds(Need, sizes, sizes, sizes, sizes, transient=st.builds(Transient, sizes, sizes))


@pytest.mark.parametrize(("device", "shards"), [(400, 1), (140, 2), (80, 3), (40, 6), (24, 9), (6, 0)])
def test_eight_billion_parameters_by_device(device: int, shards: int) -> None:
    """A state of 16 bytes a parameter has 128 GB, so one GPU of 80 GB is too small, and eight of them need
    not replicate the state.
    """
    assert least_shard(LLAMA_8B, device * GB, 64) == shards


@given(needs, st.integers(1, 300 * GB), st.integers(1, 64))
def test_it_is_the_smallest_that_fits(need: Need, device: int, most: int) -> None:
    found = least_shard(need, device, most)
    fitting = [shards for shards in range(1, most + 1) if need.of_a_member(shards) <= USABLE * device]
    assert found == (fitting[0] if fitting else most if need.of_a_member(most) <= device else 0)
    assert least_roomy(need, device, most) == (fitting[0] if fitting else 0)
    assert (need.of_fewest(most) <= USABLE * device) is bool(fitting)


@given(needs, st.integers(1, 63))
def test_a_member_needs_no_more_among_more_shards(need: Need, shards: int) -> None:
    """A world of more shards than the least fits, too.

    A single shard may need less than two, which hold an old part beside the new one.
    """
    assert shards == 1 or need.of_a_member(shards + 1) <= need.of_a_member(shards)


@pytest.mark.parametrize(
    ("least", "fewest", "most", "policy", "asked"),
    [
        ({"none": 3, "selective": 2, "block": 1}, 2, 8, "selective", ["none", "selective"]),
        ({"none": 400, "selective": 100, "block": 60}, 64, 1024, "block", ["none", "selective", "block"]),
        ({"none": 400, "selective": 100, "block": 60}, 1, 1024, "none", ["none"]),
        ({"none": 2, "selective": 1, "block": 1}, 1, 4, "none", ["none"]),
        ({"none": 3, "selective": 2, "block": 1}, 1, 4, "selective", ["none", "selective"]),
        ({"none": 4, "selective": 3, "block": 3}, 1, 4, "none", ["none", "selective", "block"]),
        ({"none": 0, "selective": 4, "block": 3}, 1, 4, "selective", ["none", "selective", "block"]),
        ({"none": 0, "selective": 0, "block": 0}, 1, 4, "block", ["none", "selective", "block"]),
        ({"none": 1, "selective": 1, "block": 1}, 1, 1, "none", ["none"]),
        ({"none": 0, "selective": 0, "block": 1}, 1, 1, "block", ["none", "selective", "block"]),
    ],
)
def test_the_first_policy_with_which_enough_workers_can_train(
    least: dict[str, int], fewest: int, most: int, policy: str, asked: list[str]
) -> None:
    """If there is none, it is the first one with which all can, and without that the one that needs least."""
    found: list[str] = []

    def least_of(each: str) -> int:
        found.append(each)
        return least[each]

    assert first_roomy([*least], least_of, fewest, most) == policy
    assert found == asked
