"""The index of a checkpoint: a parquet table with one row a slice, which any tool can query."""

from __future__ import annotations

import io
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.parquet as pq

from storage.checkpoints.manifest import Stored
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


def to_parquet(rows: Iterable[Stored]) -> bytes:
    """The same bytes for the same rows, whatever their order."""
    columns = [
        {
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
        for row in sorted(rows)
    ]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(columns, SCHEMA), sink)
    return sink.getvalue()


def from_parquet(raw: bytes, object: str) -> tuple[Stored, ...]:
    """Sorted.  Its digest was checked before; :class:`Damaged` if it is no index all the same."""
    try:
        table = pq.read_table(io.BytesIO(raw), schema=SCHEMA)
    except (pa.ArrowException, OSError) as error:
        raise Damaged(object, "an index of slices in parquet", str(error)) from None
    return tuple(
        Stored(
            Tensor(row["name"], row["kind"], row["dtype"], tuple(row["shape"])),
            Slice(row["name"], row["kind"], tuple(row["start"]), tuple(row["stop"])),
            row["file"],
            row["first"],
            row["last"],
            row["blake3"],
        )
        for row in table.to_pylist()
    )
