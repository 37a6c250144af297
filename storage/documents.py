"""Small JSON documents that carry their own digest: manifests, notes of damage, claims of ownership.

There is exactly one way to write a document: sorted keys, one space of indent, UTF-8.  The blake3 digest of
that text is then added under ``"blake3"``.  A document with any other byte, even a blank, is damaged.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from storage.errors import BadFormat, Damaged
from storage.objects.port import Piece, is_key

DIGEST = "blake3"
INFLATED_BYTES = 2**28
"""Largest size in bytes of decompressed data: of an object of a journal, or of a receipt.  With 10,240
workers, a snapshot in a journal has 8 MB.
"""


@dataclass(frozen=True, order=True)
class File:
    """An object of a checkpoint or dataset.  ``name``: relative to its folder; ``size``: in bytes;
    ``blake3``: as ``b3sum`` prints it.
    """

    name: str
    size: int
    blake3: str

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> File:
        """Returns the file that a document lists.  Raises :class:`ValueError`, :class:`TypeError` or
        :class:`AttributeError` if ``value`` is no file inside the folder.
        """
        found = cls(**value)
        if not is_key(found.name) or not isinstance(found.blake3, str) or found.size < 0:
            raise ValueError(f"{value} is no file of a folder")
        return found


def inflated(raw: bytes, object: str, wbits: int = zlib.MAX_WBITS) -> bytes:
    """Returns the decompressed bytes of ``raw``; ignores bytes behind the compressed stream.

    Raises :class:`Damaged`, naming ``object``, if ``raw`` cannot be decompressed, or has more than
    ``INFLATED_BYTES``, for which it takes no memory.
    """
    unpacker = zlib.decompressobj(wbits=wbits)
    try:
        found = unpacker.decompress(raw, INFLATED_BYTES + 1)
    except zlib.error as error:
        raise Damaged(object, "compressed data", str(error)) from None
    if len(found) > INFLATED_BYTES:
        raise Damaged(
            object,
            f"at most {INFLATED_BYTES} bytes once it is decompressed (it has {len(raw)} bytes)",
            "more",
        )
    if not unpacker.eof:
        raise Damaged(object, "compressed data", "only the beginning of the compressed data")
    return found


def file_of(name: str, pieces: Iterable[Piece]) -> File:
    """Returns the file ``name`` that consists of ``pieces``."""
    size, digest = 0, blake3()
    for piece in pieces:
        size += memoryview(piece).nbytes
        digest.update(piece)
    return File(name, size, digest.hexdigest())


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """Returns the blake3 digest in hexadecimal."""
    return str(blake3(data).hexdigest())


def seal(content: Mapping[str, Any]) -> bytes:
    """Returns the document's bytes.  ``content`` must be JSON with text keys."""
    return _text({**content, DIGEST: digest_of(_text(content))})


def unseal(raw: bytes, object: str, newest_known: int, oldest_known: int = 1) -> dict[str, Any]:
    """Returns the content of the document ``raw``.  ``object`` is its name in messages; this code reads the
    formats from ``oldest_known`` to ``newest_known``.

    Raises :class:`Damaged`, or :class:`BadFormat` if the document is intact but has another format.
    """
    try:
        content = json.loads(raw)
        found = content.pop(DIGEST)
        intact = seal(content) == raw
        format = int(content["format"]) if intact else 0
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise Damaged(
            object, "a sealed JSON document", f"{len(raw)} bytes that are no such document"
        ) from None
    if not intact:
        raise Damaged(object, f"content with blake3 {found}", digest_of(_text(content)))
    if not 1 <= format <= newest_known:
        raise BadFormat(
            f"{object} has format {format}, but this release reads formats up to {newest_known}: install a "
            "newer release"
        )
    if format < oldest_known:
        raise BadFormat(
            f"{object} has format {format}, but this release reads formats from {oldest_known} on: use "
            "an older release"
        )
    return dict(content)


def _text(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, indent=1, ensure_ascii=False).encode()
