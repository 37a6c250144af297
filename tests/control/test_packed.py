"""A commit's entries for each microbatch come back as they were, and take few bytes (N2)."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.journal import codec
from elastic.journal.packed import pack, unpack
from elastic.protocol.commit_record import Outcome

pytestmark = pytest.mark.fast
IDS = st.lists(st.lists(st.integers(-1, 2**53), max_size=4).map(tuple), max_size=6)


@given(st.lists(st.floats(allow_nan=False)), st.lists(st.integers(0, 2**53)), IDS)
def test_what_is_packed_comes_back(
    losses: list[float], counts: list[int], samples: list[tuple[int, ...]]
) -> None:
    there = json.loads(json.dumps(pack(losses, counts, samples)))
    assert unpack(there) == (tuple(losses), tuple(counts), tuple(samples))


@pytest.mark.parametrize(
    "edge", [127, 128, -128, -129, 32767, 32768, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**70)]
)
def test_numbers_at_the_edges_of_their_types_come_back(edge: int) -> None:
    assert unpack(pack((), (0, edge), ((edge,), (1,)))) == ((), (0, edge), ((edge,), (1,)))


def test_a_loss_that_is_no_number_comes_back() -> None:
    losses, _, _ = unpack(pack((math.nan, math.inf, -0.0), (), ()))
    assert math.isnan(losses[0]) and losses[1] == math.inf and math.copysign(1, losses[2]) == -1


def commit(microbatches: int) -> Outcome:
    losses = tuple(math.sin(number) for number in range(microbatches))
    return Outcome(
        7,
        1,
        1.5,
        losses,
        (8192,) * microbatches,
        tuple((number * 48271 % 999_999_937,) for number in range(microbatches)),
        True,
    )


def test_n2_a_microbatch_takes_less_than_20_bytes() -> None:
    text = json.dumps(codec.encode(commit(4096)))
    assert len(text) / 4096 < 20 and codec.decode(Outcome, json.loads(text)) == commit(4096)


def test_commits_of_older_journals_are_read() -> None:
    old = codec.encode(commit(3))
    old |= {name: codec.encode(getattr(commit(3), name)) for name in codec.MICROBATCHES}
    del old[codec.PACKED]
    assert codec.decode(Outcome, old) == commit(3)
