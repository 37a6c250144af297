"""The table of axes: one row for each axis, which says how the axis cuts the state and the work.

A world is a grid of members with one dimension for each axis.  Along a *data* axis members run different
microbatches; along any other axis they run one microbatch together.  Along some axes members hold different
parts of the state, along others they hold the same part; context (``cp``) is counted as one index with the
shards, so the cells of 4 shards are those of 2 shards × 2 parts of a sequence.  The rule of an axis *cuts*
what a member holds: it takes what the inner axes have left, and returns what the member at one index keeps.
Everything else follows from the rows: the place of a world rank, the part of a tensor that a member holds
(``placement.py``), the members that can send it (``transfer.py``), and the members that know the losses of a
microbatch.

A new axis of the state is a new row here.  An axis that also changes the computation has a file and an entry
in ``engine/parallelize.py``, too: see ``examples/guide/extending.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from storage.slices import WHOLE, Slice, Tensor


@dataclass(frozen=True)
class Box:
    """A box is a part of one tensor.

    ``slice`` has the tensor's coordinates; ``at`` is where it begins in the member's memory of the tensor.
    """

    slice: Slice
    at: tuple[int, ...]


@dataclass(frozen=True)
class HeldPart:
    """The part of one tensor that a member holds: memory of ``shape``, filled by ``boxes`` without gaps.

    Without boxes it holds nothing.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def cut(self, dim: int, first: int, last: int) -> HeldPart:
        """Returns the part of the memory with ``first <= index < last`` along ``dim``."""
        found = []
        for box in self.boxes:
            size = box.slice.stop[dim] - box.slice.start[dim]
            low, high = max(first - box.at[dim], 0), min(last - box.at[dim], size)
            if low < high:
                start, stop, at = list(box.slice.start), list(box.slice.stop), list(box.at)
                start[dim], stop[dim] = box.slice.start[dim] + low, box.slice.start[dim] + high
                at[dim] = box.at[dim] + low - first
                found.append(Box(Slice(box.slice.name, box.slice.kind, tuple(start), tuple(stop)), tuple(at)))
        return HeldPart((*self.shape[:dim], max(last - first, 0), *self.shape[dim + 1 :]), tuple(found))


Cut = Callable[[Tensor, HeldPart, int, int], HeldPart]
"""``cut(tensor, held, degree, index)`` returns what the member at ``index`` of ``degree`` keeps of ``held``.
"""


def _first(degree: int) -> int:
    return 0


def _nothing(tensor: Tensor, degree: int | None) -> Hashable:
    return ()


def _all(tensor: Tensor, held: HeldPart, degree: int, part: Slice) -> Iterable[int]:
    return range(degree)


@dataclass(frozen=True)
class Axis:
    """One row of the table."""

    data: bool
    """True if members along it run different microbatches."""
    cut: Cut | None = None
    """The rule by which it cuts what a member holds, or None if all members along it hold the same."""
    key: Callable[[Tensor, int | None], Hashable] = _nothing
    """``key(tensor, degree)`` returns all that ``cut`` uses of a tensor at a degree, with every dimension of
    its shape that it cuts along or looks at.  A degree of None stands for all degrees.

    One tensor stands for all tensors with an equal key: members that together hold all of one must together
    hold all of every other.
    """
    reaches: Callable[[Tensor, HeldPart, int, Slice], Iterable[int]] = _all
    """``reaches(tensor, held, degree, part)`` returns the indices whose share of ``held`` can have elements
    of ``part``.

    It may return too many: they only cost time.
    """
    reports: Callable[[int], int] = _first
    """Returns, for the degree of an axis that is no data axis, the index at which the losses are known."""
    into: str = ""
    """The cutting axis outside of it with which it is counted as one index, if any: members along it hold the
    parts of that axis at the product of both degrees.
    """

    @property
    def cuts_model(self) -> bool:
        """True if members along it compute other parts of the model."""
        return self.cut is not None and not self.data


def chunk_size(length: int, count: int) -> int:
    """Returns the rows of a full chunk if ``length`` rows are cut into ``count`` chunks by torch's rule.
    Shorter chunks are padded to it where all must be equal.
    """
    return -(-length // count)


def chunk(length: int, count: int, index: int) -> tuple[int, int]:
    """Returns the rows ``[first, last)`` of chunk ``index`` of ``count``: torch's chunk rule, so the last
    chunks may be short or empty.
    """
    size = chunk_size(length, count)
    return min(index * size, length), min((index + 1) * size, length)


def cut_rows(tensor: Tensor, held: HeldPart, degree: int, index: int) -> HeldPart:
    """Cuts dimension 0 by the chunk rule, as FSDP2 does; a tensor that no axis may cut stays whole."""
    if not is_cut(tensor):
        return held
    return held.cut(0, *chunk(held.shape[0], degree, index))


def reaches_rows(tensor: Tensor, held: HeldPart, degree: int, part: Slice) -> Iterable[int]:
    """Returns the indices of :func:`cut_rows` that can have rows of ``part``, and perhaps more."""
    size = chunk_size(held.shape[0], degree) if is_cut(tensor) else 0
    return _reaches(0, size, held, degree, part)


def _reaches(dim: int, size: int, held: HeldPart, degree: int, part: Slice) -> range:
    """Returns the indices of the chunks of ``size`` along ``dim`` that can have elements of ``part``: all,
    unless ``held`` is one box.
    """
    if not size or len(held.boxes) != 1:
        return range(degree)
    offset = held.boxes[0].at[dim] - held.boxes[0].slice.start[dim]
    first, last = max(part.start[dim] + offset, 0), min(part.stop[dim] + offset, held.shape[dim])
    return range(first // size, -(-last // size)) if first < last else range(0)


def cut_split(tensor: Tensor, held: HeldPart, degree: int, index: int) -> HeldPart:
    """Cuts a tensor along the dimension of its ``split``, in whole units; each of the matrices that are fused
    there is cut, so the member has a box of each.
    """
    if not (tensor.split and is_cut(tensor)):
        return held
    dim, unit, *fused = tensor.split
    boxes, size, begin = list[Box](), 0, 0
    for length in fused or (tensor.shape[dim],):
        first, last = (begin + unit * edge for edge in chunk(length // unit, degree, index))
        for box in held.cut(dim, first, last).boxes:
            at = (*box.at[:dim], box.at[dim] + size, *box.at[dim + 1 :])
            boxes.append(Box(box.slice, at))
        size += last - first
        begin += length
    return HeldPart((*held.shape[:dim], size, *held.shape[dim + 1 :]), tuple(boxes))


def reaches_split(tensor: Tensor, held: HeldPart, degree: int, part: Slice) -> Iterable[int]:
    """Returns the indices of :func:`cut_split` that can have elements of ``part``, and perhaps more: all, if
    matrices are fused.
    """
    if not (tensor.split and is_cut(tensor)) or len(tensor.split) > 2:
        return range(degree)
    dim, unit = tensor.split
    return _reaches(dim, unit * chunk_size(tensor.shape[dim] // unit, degree), held, degree, part)


def split_key(tensor: Tensor, degree: int | None) -> Hashable:
    """Returns the split and the length of its dimension, or () for a tensor that it does not cut."""
    return (tensor.split, tensor.shape[tensor.split[0]]) if tensor.split and is_cut(tensor) else ()


def stage_of(tensor: Tensor, degree: int) -> int | None:
    """Returns the pipeline stage that has the tensor, of ``degree`` stages with as many blocks each as can
    be; None if each stage has it.
    """
    if not (tensor.depth and is_cut(tensor)):
        return None
    place, blocks = tensor.depth
    return place * degree // blocks


def cut_depth(tensor: Tensor, held: HeldPart, degree: int, index: int) -> HeldPart:
    """Leaves a tensor to its stage."""
    return held if stage_of(tensor, degree) in (None, index) else HeldPart((0, *held.shape[1:]), ())


def reaches_depth(tensor: Tensor, held: HeldPart, degree: int, part: Slice) -> Iterable[int]:
    """Returns the stage that has the tensor, or all."""
    stage = stage_of(tensor, degree)
    return range(degree) if stage is None else (stage,)


def depth_key(tensor: Tensor, degree: int | None) -> Hashable:
    """Returns the stage that has the tensor, or for all degrees its place among the blocks; None or () for a
    tensor that each stage has.
    """
    if degree is not None:
        return stage_of(tensor, degree)
    return tensor.depth if is_cut(tensor) else ()


def _last(degree: int) -> int:
    return degree - 1


def rows_key(tensor: Tensor, degree: int | None) -> Hashable:
    """Returns the number of rows, or None for a tensor that no axis may cut."""
    return tensor.shape[0] if is_cut(tensor) else None


def is_cut(tensor: Tensor) -> bool:
    """Returns whether axes may cut the tensor: scalars, buffers and constants are whole on every member."""
    return bool(tensor.shape) and tensor.kind not in WHOLE


AXES: dict[str, Axis] = {
    "pp": Axis(data=False, cut=cut_depth, key=depth_key, reaches=reaches_depth, reports=_last),
    "dp_replicate": Axis(data=True),
    "dp_shard": Axis(data=True, cut=cut_rows, key=rows_key, reaches=reaches_rows),
    "cp": Axis(data=False, into="dp_shard"),
    "tp": Axis(data=False, cut=cut_split, key=split_key, reaches=reaches_split),
}
"""All axes by name, the outermost first.  Members that are neighbours along the last axis have neighbouring
world ranks.  The state can be cut along all of them; only the data axes compute, so no job has others yet.
"""
