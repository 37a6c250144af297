"""What is pinned of a region, cell by cell, and that no copy reaches over an edge.  The driver is a stand-in that notes what it is asked
for; a real one: tests/gpu/test_copies.py."""

from __future__ import annotations

import mmap
import os
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from elastic.train import pinned
from elastic.train.pinned import PinnedMemory, cut

CELL = 4 * mmap.PAGESIZE


class Driver:
    """Of ranges by address: refuses what overlaps, as the real one does, and all after the first ``most``."""

    def __init__(self, most: int) -> None:
        self.most, self.asked, self.ranges = most, 0, set[tuple[int, int]]()

    def register(self, place: int, size: int, flags: int) -> int:
        self.asked += 1
        if len(self.ranges) == self.most or any(place < end and start < place + size for start, end in self.ranges):
            return 712
        self.ranges.add((place, place + size))
        return 0

    def unregister(self, place: int) -> None:
        (gone,) = [each for each in self.ranges if each[0] == place]
        self.ranges.remove(gone)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver(most=1000)
    calls = SimpleNamespace(cudaHostRegister=found.register, cudaHostUnregister=found.unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    monkeypatch.setattr(pinned, "CELL", CELL)
    return found


def pages(number: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, number * mmap.PAGESIZE), dtype=torch.uint8)


def test_cells_are_pinned_once_when_something_in_them_is_needed(driver: Driver) -> None:
    memory = pages(40)
    start, held = memory.data_ptr(), PinnedMemory(memory)
    assert driver.ranges == set()
    held.pin(memory[18 * mmap.PAGESIZE :][:1])
    held.pin(memory[18 * mmap.PAGESIZE :][:1])
    ((first, last),) = driver.ranges
    assert first % CELL == 0 and last - first == CELL and first <= start + 18 * mmap.PAGESIZE < last
    held.pin(memory[:0])
    assert driver.asked == 1
    held.pin(memory)
    ranges = sorted(driver.ranges)
    assert ranges[0][0] == start and ranges[-1][1] == start + len(memory) and held.bytes == len(memory)
    assert all(one[1] == other[0] and other[0] % CELL == 0 for one, other in pairwise(ranges))
    assert driver.asked == len(ranges) >= 10
    del held
    assert driver.ranges == set(), "given back with whoever pinned it"


def test_what_is_refused_is_said_once_and_not_asked_for_again(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    memory, driver.most = pages(40), 3
    held = PinnedMemory(memory)
    held.pin(memory)
    held.pin(memory)
    assert driver.asked == 4 and len(driver.ranges) == 3
    assert capsys.readouterr().out.count("cudaHostRegister said 712") == 1


@pytest.mark.parametrize("dtype, size", [(torch.float32, 9000), (torch.bfloat16, 40_001), (torch.int64, 1), (torch.uint8, 0)], ids=str)
def test_no_part_reaches_over_an_edge_and_all_bytes_are_there(driver: Driver, dtype: torch.dtype, size: int) -> None:
    memory = pages(40)
    held, value = PinnedMemory(memory), torch.arange(size).to(dtype)
    room = memory[3 * mmap.PAGESIZE + 64 :][: value.nbytes].view(dtype)
    held.pin(room)
    for here, there in cut(value, room):
        begin, end = there.data_ptr(), there.data_ptr() + there.nbytes
        assert any(first <= begin and end <= last for first, last in driver.ranges)
        there.copy_(here)
    assert torch.equal(room, value)


def test_memory_is_taken_and_what_is_in_it_stays(driver: Driver) -> None:
    file = os.memfd_create("taken", os.MFD_CLOEXEC)
    os.ftruncate(file, 40 * mmap.PAGESIZE)
    memory = torch.frombuffer(mmap.mmap(file, 40 * mmap.PAGESIZE), dtype=torch.uint8)
    memory[:5] = 7
    assert os.fstat(file).st_blocks * 512 < memory.nbytes
    PinnedMemory(memory).take(memory)
    assert os.fstat(file).st_blocks * 512 == memory.nbytes
    assert memory[:6].tolist() == [7] * 5 + [0] and driver.asked == 0
    os.close(file)
