"""Small JSON documents that carry their own digest: manifests, quarantine notes, claims of ownership.

A document is written in exactly one way (sorted keys, one space of indent, UTF-8), with the blake3 of that text, without the
digest, added under ``"blake3"``.  Any other byte anywhere, even a blank, and it is not the document that was written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from storage.errors import BadFormat, Damaged

DIGEST = "blake3"


@dataclass(frozen=True, order=True)
class File:
    """One object of a checkpoint or data set, named relative to its folder; ``blake3`` is what the program ``b3sum`` prints."""

    name: str
    size: int
    blake3: str


def digest_of(data: bytes | bytearray | memoryview) -> str:
    return str(blake3(data).hexdigest())


def seal(content: Mapping[str, Any]) -> bytes:
    """The document's bytes.  ``content`` is JSON-able, with text keys."""
    return _text({**content, DIGEST: digest_of(_text(content))})


def unseal(raw: bytes, object: str, newest_known: int) -> dict[str, Any]:
    """The content.  ``object`` is its name in messages; ``newest_known`` the newest format this code reads.

    Raises :class:`Damaged`, or :class:`BadFormat` for an intact document of a newer release.
    """
    try:
        content = json.loads(raw)
        found = content.pop(DIGEST)
        intact = seal(content) == raw
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise Damaged(object, "a sealed JSON document", f"{len(raw)} bytes that are none") from None
    if not intact:
        raise Damaged(object, f"content with blake3 {found}", digest_of(_text(content)))
    if not 1 <= content["format"] <= newest_known:
        raise BadFormat(f"{object} has format {content['format']}, and this release reads up to {newest_known}: upgrade")
    return dict(content)


def _text(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, indent=1, ensure_ascii=False).encode()
