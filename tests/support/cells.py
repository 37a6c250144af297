"""Computes cells of worlds that are cut along dimension 0, and their content, by torch's chunk rule: a second
opinion on placement.
"""

from __future__ import annotations

from elastic.ids import Cell
from elastic.plan.layout import Layout
from elastic.plan.placement import cell_of
from storage.slices import WHOLE, Slice, Tensor


def cell(count: int, index: int) -> Cell:
    """Returns the cell of shard ``index`` of ``count``."""
    return cell_of(Layout(1, count), index)


def shard_of(cell: Cell) -> tuple[int, int]:
    """Returns (count, index) of a cell, read from its text."""
    index, _, count = cell.removeprefix("dp_shard ").partition("/") if cell else ("0", "", "1")
    return int(count), int(index)


def classes(rows: tuple[int, ...] | list[int]) -> tuple[Tensor, ...]:
    """Returns tensors with these numbers of rows."""
    return tuple(Tensor(f"t{number}", "parameter", "F32", (count,)) for number, count in enumerate(rows))


def shard_interval(rows: int, count: int, index: int) -> tuple[int, int]:
    """Returns the rows ``[first, last)`` of shard ``index`` of ``count``."""
    size = -(-rows // count)
    return min(index * size, rows), min((index + 1) * size, rows)


def shard_slice(tensor: Tensor, count: int, index: int) -> Slice:
    """Returns the part of ``tensor`` in shard ``index`` of ``count``.  Scalars and buffers are in every
    shard.
    """
    if not tensor.shape or tensor.kind in WHOLE:
        return tensor.whole()
    first, last = shard_interval(tensor.shape[0], count, index)
    return Slice(tensor.name, tensor.kind, (first, *(0 for _ in tensor.shape[1:])), (last, *tensor.shape[1:]))
