"""A region outlives its writer, and a slot holds a version complete or nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.errors import StateMissing
from elastic.ids import Version
from elastic.protocol.copy_schedule import Copy
from elastic.state.region import ALIGNED, BLOCK, PIECE, Region, frame
from storage.slices import Tensor
from tests.support.cells import cell

pytestmark = pytest.mark.fast

HELD = Copy(Version(7, 2), cell(4, 3))
WRITER = """
import os, sys
from elastic.protocol.copy_schedule import Copy
from elastic.state.region import Region
from elastic.ids import Version
from tests.support.cells import cell
region = Region.create(2, 5000, 1, folder=sys.argv[2])
region.data(1)[:] = bytes(range(250)) * 20
region.digests(1)[0] = 42
region.begin(1)
if sys.argv[1] == "whole":
    region.finish(1, Copy(Version(7, 2), cell(4, 3)), 5000)
print(region.descriptor, flush=True)
input()
"""


@pytest.mark.parametrize("medium", ["memory", "file"])
@pytest.mark.parametrize("how", ["whole", "torn"])
def test_what_was_written_outlives_the_writer(tmp_path: Path, how: str, medium: str) -> None:
    """The region is opened while its writer lives and read after the SIGKILL; a slot with a copy under way
    holds nothing.
    """
    folder = str(tmp_path) if medium == "file" else ""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, how, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    region = Region.of_process(writer.pid, int(writer.stdout.readline()))
    writer.kill()
    writer.communicate()
    assert region.on_disk == (medium == "file") and not [*tmp_path.iterdir()]
    assert region.held(0) is None
    assert region.held(1) == (HELD if how == "whole" else None)
    assert bytes(region.data(1)) == bytes(range(250)) * 20 and region.digests(1)[0] == 42
    assert (
        region.find(HELD) == (1 if how == "whole" else None)
        and region.find(HELD._replace(cell=cell(4, 2))) is None
    )


def test_memory_is_taken_beforehand_and_what_is_in_it_stays() -> None:
    mib = 2**20
    region = Region.create(2, 8 * mib, 1)
    region.data(1)[:3] = b"abc"

    def taken() -> int:
        return os.fstat(region.descriptor).st_blocks * 512

    assert taken() <= 4 * mib, "two pages, which may be huge ones"
    region.take(region.data_at(0), region.data_at(0) + 6 * mib)
    assert 6 * mib <= taken() <= 10 * mib
    region.take(region.data_at(0) + 6 * mib, region.data_at(1) + 8 * mib)
    assert taken() >= 16 * mib
    assert bytes(region.data(1)[:4]) == b"abc\0" and not any(region.data(0))


@pytest.mark.parametrize("medium", ["memory", "file"])
def test_memory_that_is_given_back_is_free_for_others(tmp_path: Path, medium: str) -> None:
    mib = 2**20
    region = Region.create(2, 8 * mib, 1, folder=str(tmp_path) if medium == "file" else "")

    def taken() -> int:
        return os.fstat(region.descriptor).st_blocks * 512

    for slot in (0, 1):
        region.reserve(slot, 8 * mib)
        region.data(slot)[:] = bytes([slot + 1]) * 8 * mib
    assert taken() >= 16 * mib
    region.give_back(0, mib)
    assert 9 * mib <= taken() <= 10 * mib and region.lacks(0, 8 * mib) == 7 * mib
    assert (
        bytes(region.data(0)[:mib]) == bytes([1]) * mib
        and not any(region.data(0)[mib:])
        and region.data(1)[-1] == 2
    )


def test_a_process_that_reads_a_file_in_pieces_has_one_of_them_in_memory(tmp_path: Path) -> None:
    """The control: the whole slot at once is in memory, until the process lets go of it."""
    size = 8 * PIECE
    region = Region.create(1, size, 1, folder=str(tmp_path))
    for piece in region.pieces(0, 0, size):
        piece[:] = bytes([7]) * len(piece)

    def mapped() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("RssFile:")[2].split()[0])

    before, most, found = mapped(), 0, bytearray()
    for piece in region.pieces(0, 0, size):
        found += piece
        most = max(most, mapped() - before)
    assert found == bytes([7]) * size and most <= 2 * PIECE
    assert bytes(region.data(0)) == found and mapped() - before >= size
    region.let_go(region.data_at(0), region.data_at(0) + size)
    assert mapped() - before <= PIECE and bytes(region.data(0)) == found


def test_slots_do_not_touch_each_other() -> None:
    region = Region.create(3, 10_000, 700)
    for slot in range(3):
        region.data(slot)[:] = bytes([slot + 1]) * 10_000
        region.digests(slot)[:] = memoryview(bytes([slot + 1]) * 5600).cast("q")
        region.finish(slot, Copy(Version(slot, 1), cell(1, 0)), 10_000)
    for slot in range(3):
        assert bytes(region.data(slot)) == bytes([slot + 1]) * 10_000
        assert bytes(region.digests(slot).cast("B")) == bytes([slot + 1]) * 5600
        assert (region.held(slot), region.filled(slot)) == (Copy(Version(slot, 1), cell(1, 0)), 10_000)
    region.begin(1)
    assert [region.held(slot) is None for slot in range(3)] == [False, True, False]
    assert region.copy("safe") is None
    region.set_copy("safe", Copy(Version(4, 2), cell(3, 1)))
    assert region.copy("safe") == Copy(Version(4, 2), cell(3, 1)) and region.copy("send") is None
    region.send(Copy(Version(5, 2), cell(3, 1)))
    assert region.copy("send") == Copy(Version(5, 2), cell(3, 1)) and (
        region["asked"],
        region["brought"],
    ) == (1, 0)
    region.send(None)
    assert region.copy("send") is None and region["asked"] == 2


def test_what_is_no_region_is_refused(tmp_path: Path) -> None:
    for size in (0, 100_000):
        (tmp_path / "other").write_bytes(bytes(size))
        with pytest.raises(StateMissing):
            Region(os.open(tmp_path / "other", os.O_RDWR))


def test_a_frame_has_every_byte_of_the_shard_once() -> None:
    tensors = (
        Tensor("a", "parameter", "F32", (10, 3)),
        Tensor("b", "parameter", "BF16", (BLOCK, 5)),
        Tensor("n", "scalar", "F32", ()),
    )
    whole, shards = frame(tensors, cell(1, 0)), [frame(tensors, cell(4, index)) for index in range(4)]
    for tensor in tensors[:2]:
        assert sum(shard.places[tensor].bytes for shard in shards) == whole.places[tensor].bytes
    assert all(shard.places[tensors[2]].bytes == 4 for shard in shards), "a scalar is whole in every shard"
    for shape in (whole, *shards):
        ends = [0, *(place.offset + place.bytes for place in shape.places.values())]
        assert all(
            place.offset >= end and place.offset % ALIGNED == 0
            for place, end in zip(shape.places.values(), ends, strict=False)
        )
        assert shape.bytes >= ends[-1] and shape.blocks == sum(
            place.blocks for place in shape.places.values()
        )
    assert whole.bytes >= max(shard.bytes for shard in shards) and whole.blocks >= shards[0].blocks
