"""A part of the state in this process's memory.  Healing, copying and saving know a model only as shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from elastic.errors import StateMissing
from elastic.ids import Cell
from elastic.plan.placement import held
from storage.slices import Slice, Tensor, Version

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Key = tuple[str, str]
"""Key of a tensor: (kind, name)."""


@dataclass(frozen=True)
class ShardHome:
    """A slot of host memory in which a shard lives.

    ``values`` has the memory of each tensor, ``sums`` the digests of all blocks (int64), and ``blocks`` the
    range of each tensor's digests in ``sums``.
    """

    slot: int
    bytes: int
    values: Mapping[Key, torch.Tensor]
    sums: torch.Tensor
    blocks: Mapping[Key, slice]
    whole: bool = False
    """True if the slot held the wanted copy already."""
    folder: str = ""
    """Folder of the file that has the slot; empty if the slot is in memory."""
    let_go: Callable[[Key], None] = lambda key: None
    """Takes a tensor out of this process's memory if the slot is in a file.  It is called after each use of
    the tensor; the next use reads the file again.
    """


@dataclass
class Shard:
    """The part of the whole state that ``cell`` names, at ``version``, in this process's memory.

    ``values`` has the memory of each tensor of which ``cell`` has a part; :func:`placement.held` gives the
    shape of that memory and its boxes.
    """

    version: Version
    cell: Cell
    values: dict[Key, torch.Tensor]
    home: ShardHome | None = None
    """The slot in which the parameters and moments live; None if they have memory of their own."""

    def let_go(self, *keys: Key) -> None:
        """Takes the tensors ``keys``, or all tensors if no key is given, out of this process's memory if they
        live in a file.
        """
        if self.home is not None:
            for key in keys or self.home.values:
                self.home.let_go(key)

    def part(self, tensor: Tensor, wanted: Slice) -> torch.Tensor:
        """Returns the memory of ``wanted``.  Raises :class:`StateMissing` if no box of this shard contains
        all of it.
        """
        value = self.values[tensor.kind, tensor.name]
        place = place_of(tensor, self.cell, wanted)
        if place is None:
            raise StateMissing(f"{wanted} was looked for in cell {self.cell!r}, which does not have it")
        return value[tuple(slice(at, at + size) for at, size in zip(place, wanted.shape, strict=True))]


def place_of(tensor: Tensor, cell: Cell, wanted: Slice) -> tuple[int, ...] | None:
    """Returns where ``wanted`` begins in the memory of a member in ``cell``; None if none of its boxes
    contains all of it.
    """
    for box in held(tensor, cell).boxes:
        if box.slice.intersect(wanted) == wanted:
            return tuple(
                at + start - first
                for at, start, first in zip(box.at, wanted.start, box.slice.start, strict=True)
            )
    return None
