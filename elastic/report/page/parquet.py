"""Writes the timeline of a run as a table for other programs: a row for each interval."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from elastic.report.goodput import Interval

TYPES = {"begin": pa.float64(), "end": pa.float64(), "bucket": pa.dictionary(pa.int8(), pa.string())}
"""The types of the columns that are no whole numbers.  Times are in seconds since 1970."""


def parquet_of(intervals: Sequence[Interval]) -> bytes:
    """Returns the file, whose columns are the fields of an interval."""
    columns = zip(*intervals, strict=True) if intervals else ([] for _ in Interval._fields)
    table = pa.table(
        {
            name: pa.array(column, TYPES.get(name, pa.int64()))
            for name, column in zip(Interval._fields, columns, strict=True)
        }
    )
    written = io.BytesIO()
    pq.write_table(table, written, compression="zstd")
    return written.getvalue()
