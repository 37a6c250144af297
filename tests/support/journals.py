"""Reads a whole journal, or its end, in one call."""

from __future__ import annotations

from storage.journal import Json, Newest, Segment, read
from storage.objects import ObjectStore


def newest(store: ObjectStore, run: str) -> Segment | None:
    """Returns the last segment in the bucket, or None; see :meth:`storage.journal.Newest.segment`."""
    return Newest(store, run).segment()


def records(store: ObjectStore, run: str) -> list[Json]:
    """Returns all records in the bucket, in order."""
    return [record for _, segment in read(store, run) for record in segment]
