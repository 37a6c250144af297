"""Reads the index of a checkpoint of format 1: a parquet table, ``index.parquet``, with one row for each stored slice."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from storage.checkpoints.manifest import Stored
from storage.errors import Damaged
from storage.slices import Slice, Tensor


def from_parquet(raw: bytes, object: str) -> tuple[Stored, ...]:
    """Returns the rows of the table.  Raises :class:`Damaged` if ``raw``, whose digest was checked before, is no such table."""
    try:
        return tuple(_rows_of(pq.read_table(io.BytesIO(raw))))
    except (pa.ArrowException, OSError, KeyError) as error:
        raise Damaged(object, "an index of slices in parquet", str(error)) from None


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
