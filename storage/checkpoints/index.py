"""The index of a checkpoint: a parquet table with one row for each stored slice, which any tool can query.

Rows are sorted by tensor and stored in row groups of ``GROUP_ROWS``.  A large index is also described by *blocks*, one for each row group
and one for the footer, which together hold all of its bytes.  The manifest has their digests and the name of each block's first tensor.
So a reader that wants a few tensors fetches, checks and parses only the footer and the blocks with these tensors.
"""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq

from storage.checkpoints.manifest import Block, Stored
from storage.documents import digest_of
from storage.errors import Damaged
from storage.slices import Slice, Tensor

SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("kind", pa.string()),
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int64())),
        ("start", pa.list_(pa.int64())),
        ("stop", pa.list_(pa.int64())),
        ("file", pa.string()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("blake3", pa.string()),
    ]
)
GROUP_ROWS = 8192
"""Rows of one row group: about 650 kB, which a request to an object store fetches in little more than its latency."""
MAGIC = b"PAR1"


def to_parquet(rows: Iterable[Stored]) -> tuple[bytes, tuple[Block, ...]]:
    """Returns the index and its blocks: the same for the same rows in any order.  An index of one row group has no blocks."""
    ordered, sink, ends = sorted(rows), io.BytesIO(), [0]
    groups = [ordered[first : first + GROUP_ROWS] for first in range(0, len(ordered), GROUP_ROWS)]
    with pq.ParquetWriter(sink, SCHEMA) as table:
        for group in groups:
            table.write_table(pa.Table.from_pylist([_record(row) for row in group], SCHEMA))
            ends.append(sink.tell())
    raw = sink.getvalue()
    if len(groups) < 2:
        return raw, ()
    names = [*(group[0].tensor.name for group in groups), ""]
    bounds = pairwise([*ends, len(raw)])
    return raw, tuple(Block(a, b, digest_of(raw[a:b]), name) for (a, b), name in zip(bounds, names, strict=True))


def from_parquet(raw: bytes, object: str) -> tuple[Stored, ...]:
    """Returns the rows of a whole index, sorted.  Raises :class:`Damaged` if ``raw``, whose digest was checked before, is no index."""
    try:
        return tuple(_rows_of(pq.read_table(io.BytesIO(raw), schema=SCHEMA)))
    except (pa.ArrowException, OSError) as error:
        raise Damaged(object, "an index of slices in parquet", str(error)) from None


def groups_with(blocks: Sequence[Block], names: Collection[str]) -> list[int]:
    """Returns the numbers of the row groups that may hold rows of tensors with these names.

    A tensor's rows may begin at the end of one group and continue in the next ones.
    """
    firsts = [block.name for block in blocks[:-1]]
    found: set[int] = set()
    for name in names:
        found.update(range(max(bisect_left(firsts, name) - 1, 0), bisect_right(firsts, name)))
    return sorted(found)


def from_block(footer: bytes, block: Block, group: int, raw: bytes, object: str) -> tuple[Stored, ...]:
    """Returns the rows of row group number ``group``, whose bytes are ``raw``.  Raises as :func:`from_parquet` does."""
    try:
        metadata = pq.read_metadata(io.BytesIO(MAGIC + footer))
        file = pq.ParquetFile(pa.PythonFile(_Part(raw, block.first), mode="r"), metadata=metadata)
        return tuple(_rows_of(file.read_row_group(group)))
    except (pa.ArrowException, OSError) as error:
        raise Damaged(object, "an index of slices in parquet", str(error)) from None


class _Part(io.BytesIO):
    """The bytes of a larger file from ``first`` on, at their own positions."""

    def __init__(self, raw: bytes, first: int) -> None:
        super().__init__(raw)
        self.first = first

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        return super().seek(position - self.first if whence == io.SEEK_SET else position, whence) + self.first

    def tell(self) -> int:
        return super().tell() + self.first


def _record(row: Stored) -> dict[str, object]:
    return {
        "name": row.tensor.name,
        "kind": row.tensor.kind,
        "dtype": row.tensor.dtype,
        "shape": row.tensor.shape,
        "start": row.slice.start,
        "stop": row.slice.stop,
        "file": row.file,
        "first": row.first,
        "last": row.last,
        "blake3": row.blake3,
    }


def _rows_of(table: pa.Table) -> Iterator[Stored]:
    for row in table.to_pylist():
        yield Stored(
            Tensor(row["name"], row["kind"], row["dtype"], tuple(row["shape"])),
            Slice(row["name"], row["kind"], tuple(row["start"]), tuple(row["stop"])),
            row["file"],
            row["first"],
            row["last"],
            row["blake3"],
        )
