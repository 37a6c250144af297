"""A part of the state in this process's memory: what healing, copying and saving know of a model."""

from __future__ import annotations

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
"""(kind, name) of a tensor."""


@dataclass
class Shard:
    """The part of the whole state that ``cell`` names, at ``version``, in this process's memory.

    ``values`` has the memory of each tensor of which there is a part, of the shape and with the boxes that :func:`placement.held` gives.
    """

    version: Version
    cell: Cell
    values: dict[Key, torch.Tensor]

    def part(self, tensor: Tensor, wanted: Slice) -> torch.Tensor:
        """Return the memory of ``wanted``.  Raises :class:`StateMissing` where no box of this shard contains all of it."""
        value = self.values[tensor.kind, tensor.name]
        place = place_of(tensor, self.cell, wanted)
        if place is None:
            raise StateMissing(f"{wanted} was looked for in cell {self.cell!r}, which does not have it")
        return value[tuple(slice(at, at + size) for at, size in zip(place, wanted.shape, strict=True))]


def place_of(tensor: Tensor, cell: Cell, wanted: Slice) -> tuple[int, ...] | None:
    """Return where ``wanted`` begins in the memory of a member in ``cell``; None where none of its boxes contains all of it."""
    for box in held(tensor, cell).boxes:
        if box.slice.intersect(wanted) == wanted:
            return tuple(at + start - first for at, start, first in zip(box.at, wanted.start, box.slice.start, strict=True))
    return None
