"""Checks that slices make up whole tensors.  Pure interval arithmetic."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from storage.errors import Incomplete
from storage.slices import Slice, Tensor

Key = tuple[str, str]
"""The (name, kind) of a tensor."""


def check_exact_cover(pieces: Sequence[tuple[Tensor, Slice]]) -> None:
    """Raises :class:`Incomplete`, naming the tensor, unless the slices hold each element of each tensor
    exactly once.
    """
    groups: dict[Key, list[tuple[Tensor, Slice]]] = defaultdict(list)
    for tensor, part in pieces:
        groups[tensor.name, tensor.kind].append((tensor, part))
    for group in groups.values():
        tensor = group[0][0]
        if others := {other for other, _ in group if other != tensor}:
            raise Incomplete(
                describe(tensor.whole()), f"two writers describe it differently: {tensor} and {min(others)}"
            )
        parts = sorted(part for _, part in group)
        if outside := [part for part in parts if not _within(part, tensor)]:
            raise Incomplete(describe(tensor.whole()), f"the slice {describe(outside[0])} lies outside of it")
        if twice := _overlap(parts):
            raise Incomplete(describe(tensor.whole()), f"the slice {describe(twice)} is stored twice")
        found, needed = sum(part.count for part in parts), math.prod(tensor.shape)
        if found != needed:
            raise Incomplete(describe(tensor.whole()), f"only {found} of {needed} elements are there")


def describe(part: Slice) -> str:
    """Returns a text that names the slice and no other: ``parameter/embed.weight@0,0-16,64`` is [0:16, 0:64]
    of that tensor.
    """
    box = f"@{','.join(map(str, part.start))}-{','.join(map(str, part.stop))}" if part.start else ""
    return f"{part.kind}/{part.name}{box}"


def _within(part: Slice, tensor: Tensor) -> bool:
    if (part.name, part.kind, len(part.start), len(part.stop)) != (
        tensor.name,
        tensor.kind,
        len(tensor.shape),
        len(tensor.shape),
    ):
        return False
    return all(
        0 <= start <= stop <= size
        for start, stop, size in zip(part.start, part.stop, tensor.shape, strict=True)
    )


def _overlap(parts: Sequence[Slice]) -> Slice | None:
    """Returns a box that two of the sorted slices share, or None.  Sweeps along dimension 0: it compares only
    slices whose rows meet.
    """
    active: list[Slice] = []
    for part in parts:
        active = [other for other in active if not part.start or other.stop[0] > part.start[0]]
        for other in active:
            if common := other.intersect(part):
                return common
        active.append(part)
    return None
