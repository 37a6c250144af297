"""Shard files are ordinary safetensors files, written as a stream and read by ranges.

    8 bytes   length of the header, little-endian
    header    JSON: key -> {"dtype", "shape", "data_offsets"}; padded with blanks to a multiple of 8
    data      the tensors, without gaps

In a shard the key of a slice is ``kind/name@start-stop`` in the tensor's global coordinates
(``parameter/w@0,0-16,64`` is ``w[0:16, 0:64]``), so any tool that reads safetensors can read a shard and show
what it holds.  All sizes are known before the first byte is written, so a writer can write slice by slice.
Wider types come first, which aligns every tensor to its type.

The header is also the index of its file.  Its metadata has the digest of each slice, in the order of the
data, and the index of the checkpoint has the digest of the header.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from storage.checkpoints.cover import describe
from storage.errors import Damaged
from storage.slices import Slice, Tensor, Version

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""Bytes of one element, by the name that safetensors gives the type."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors file."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


def entry_of(tensor: Tensor, part: Slice) -> Entry:
    """Returns the entry of a slice in its shard."""
    return Entry(describe(part), tensor.dtype, part.shape)


def aligned_order(entry: Entry) -> int:
    """The sorting key with which every tensor starts at a multiple of its element size."""
    return -ITEM_BYTES[entry.dtype]


def header_of(entries: Iterable[Entry], about: Mapping[str, str]) -> bytes:
    """Returns the file up to its data.  ``about`` becomes ``__metadata__``."""
    header: dict[str, Any] = {"__metadata__": dict(about)}
    position = 0
    for entry in entries:
        offsets = [position, position + entry.size]
        header[entry.key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        position = offsets[1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def metadata_of(version: Version, digests: Iterable[str]) -> dict[str, str]:
    """Returns the metadata of a shard of this version, with the ``digests`` of its slices in their order."""
    return {"elastic": "2", "version": str(version), "blake3": " ".join(digests)}


Place = tuple[int, int, str]
"""The place of a slice in its file, and its digest: (first byte, last byte, blake3)."""


def places_in(
    raw: bytes | memoryview, slices: Iterable[tuple[Tensor, Slice]], object: str
) -> dict[str, Place]:
    """Returns where each slice lies, by its key, from the header ``raw`` of its file, whose digest was
    checked before.

    Raises :class:`Damaged` unless the header has exactly ``slices``.
    """
    try:
        header = json.loads(bytes(raw[8:]))
        digests = header.pop("__metadata__")["blake3"].split()
        places = {
            key: (len(raw) + entry["data_offsets"][0], len(raw) + entry["data_offsets"][1], digest)
            for (key, entry), digest in zip(header.items(), digests, strict=True)
        }
        found = {key: (entry["dtype"], tuple(entry["shape"])) for key, entry in header.items()}
    except (ValueError, KeyError, AttributeError, TypeError):
        raise Damaged(object, "a header with the digests of its slices", "something else") from None
    if found != {describe(part): (tensor.dtype, part.shape) for tensor, part in slices}:
        raise Damaged(object, "a header that lists what the index lists", "another header")
    return places
