"""No copy reaches from one registered chunk into the next."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.engine import pinned

ROOM = torch.zeros(2**12, dtype=torch.uint8)


@given(st.integers(0, 2**12), st.integers(0, 2**12), st.sampled_from((1, 7, 64, 512, 2**20)))
def test_parts_are_cut_at_every_multiple_of_a_chunk_and_only_there(one: int, other: int, chunk: int) -> None:
    memory = ROOM[min(one, other) : max(one, other)]
    with patch.object(pinned, "CHUNK", chunk):
        sizes = pinned.parts(memory)
    assert sum(sizes) == len(memory)
    at = memory.data_ptr()
    for size in sizes:
        assert at // chunk == (at + max(size, 1) - 1) // chunk
        at += size
        assert at % chunk == 0 or at == memory.data_ptr() + len(memory)


@pytest.mark.parametrize("value", [torch.arange(100.0), torch.tensor(7), torch.arange(24).view(4, 6).bool(), torch.empty(0)])
def test_all_bytes_arrive(value: torch.Tensor) -> None:
    room = torch.zeros_like(value)
    with patch.object(pinned, "CHUNK", 64):
        pinned.transfer(room, value)
    assert torch.equal(room, value)
