"""One object of a journal: its key, its bytes, and what is in it."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from storage.documents import digest_of, inflated
from storage.errors import Damaged
from storage.objects import ObjectStore

CONTINUED = 4
"""The format number in the head of a continuation.  Releases that know no continuations read formats up to 3,
and refuse this number.
"""
GZIP = 31
"""The ``wbits`` by which zlib knows the format of gzip, with the largest window."""
PER_FOLDER = 1000
"""Record numbers of one folder."""

Json = Mapping[str, Any]
Segment = tuple[Json, list[Json]]
"""A snapshot and the records after it."""


def object_at(store: ObjectStore, key: str) -> Segment:
    """Returns the head of an object, and its records.  Raises :class:`Damaged`."""
    object, first = store.full_name(key), first_of(key)
    lines = io.BytesIO(unpacked(unsealed(store.get(key), object), object))
    try:
        head, *records = map(json.loads, lines)
        numbers = [record["n"] for record in records]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Damaged(object, "a head and its records, one a line", "lines that are no records") from None
    if not numbers or numbers != list(range(first, first + len(numbers))):
        raise Damaged(object, f"records from {first} on", f"records {numbers[:1]} to {numbers[-1:]}")
    return head, records


def key_of(run: str, first: int) -> str:
    digits = f"{first:012d}"
    return f"{run}/journal/{digits[:3]}/{digits[3:6]}/{digits[6:9]}/{digits}.jsonl.gz"


def first_of(key: str) -> int:
    """Returns the number of an object's first record."""
    return int(PurePosixPath(key).name.partition(".")[0])


def line(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def sealed(lines: bytes) -> bytes:
    return lines + json.dumps({"blake3": digest_of(lines)}).encode() + b"\n"


def unsealed(raw: bytes, object: str) -> bytes:
    lines = raw[: -len(sealed(b""))]
    if sealed(lines) != raw:
        raise Damaged(
            object, "an object that ends with its digest", f"{len(raw)} bytes without a digest at the end"
        )
    return lines


def packed(lines: bytes) -> bytes:
    """Returns the lines as the bytes of an object: compressed, with the digest of the compressed bytes
    behind.  The same lines give the same bytes.
    """
    packer = zlib.compressobj(wbits=GZIP)
    return sealed(packer.compress(lines) + packer.flush())


def unpacked(raw: bytes, object: str) -> bytes:
    """Returns the lines of a compressed file; ignores bytes behind the compressed stream.  Raises
    :class:`Damaged` if the file cannot be decompressed.
    """
    return inflated(raw, object, GZIP)
