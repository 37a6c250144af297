"""Five axes that the product does not have, each a row in its table; numpy computes what each leaves to a
member, as a second opinion.

``columns`` cuts dimension 1, as a row-parallel matrix is cut.  ``stages`` puts half of the tensors on half of
the members, as a pipeline does.  ``opt`` cuts the moments over members that hold the same parameters.
``halves`` cuts a fused tensor, so that a member has a box of each half.  ``together`` cuts nothing: its
members hold the same part, and run each microbatch together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from elastic.plan.axes import AXES, Axis, HeldPart, chunk, is_cut
from elastic.plan.layout import Layout
from storage.slices import Tensor

TENSORS = (
    Tensor("embed", "parameter", "F32", (11, 6)),
    Tensor("embed", "moment.exp_avg", "F32", (11, 6)),
    Tensor("fused", "parameter", "F32", (12, 6)),
    Tensor("fused", "moment.exp_avg", "F32", (12, 6)),
    Tensor("norm", "parameter", "BF16", (7,)),
    Tensor("norm", "moment.exp_avg", "BF16", (7,)),
    Tensor("cube", "parameter", "F32", (3, 5, 4)),
    Tensor("seen", "buffer", "I64", (4,)),
    Tensor("updates", "scalar", "F32", ()),
)


def _columns(tensor: Tensor, held: HeldPart, degree: int, index: int) -> HeldPart:
    return (
        held.cut(1, *chunk(held.shape[1], degree, index))
        if is_cut(tensor) and len(tensor.shape) > 1
        else held
    )


def stage_of(tensor: Tensor) -> int:
    """Returns which of two stages has the tensor, or -1 for both."""
    return (len(tensor.name) % 2) if is_cut(tensor) else -1


def _stages(tensor: Tensor, held: HeldPart, degree: int, index: int) -> HeldPart:
    here = stage_of(tensor) in (-1, index * 2 // degree)
    return held if here else HeldPart((0, *held.shape[1:]), ())


def _opt(tensor: Tensor, held: HeldPart, degree: int, index: int) -> HeldPart:
    return held.cut(0, *chunk(held.shape[0], degree, index)) if tensor.kind.startswith("moment.") else held


def _halves(tensor: Tensor, held: HeldPart, degree: int, index: int) -> HeldPart:
    if tensor.name != "fused":
        return held
    half = tensor.shape[0] // 2
    first, last = chunk(half, degree, index)
    one, two = held.cut(0, first, last), held.cut(0, half + first, half + last)
    below = tuple(type(box)(box.slice, (box.at[0] + last - first, *box.at[1:])) for box in two.boxes)
    return HeldPart((2 * (last - first), *held.shape[1:]), (*one.boxes, *below))


def _name(tensor: Tensor) -> tuple[str, str, tuple[int, ...]]:
    return tensor.name, tensor.kind, tensor.shape


TOYS = {
    "opt": Axis(data=True, cut=_opt, key=_name),
    "stages": Axis(data=False, cut=_stages, key=_name, reports=lambda degree: degree - 1),
    "columns": Axis(data=False, cut=_columns, key=_name),
    "halves": Axis(data=False, cut=_halves, key=_name),
    "together": Axis(data=False),
}


@contextmanager
def registered() -> Iterator[None]:
    """Puts the toys into the product's table as the innermost axes, and takes them out at the end, unless
    they were there before.
    """
    new = TOYS.keys() - AXES.keys()
    AXES.update(TOYS)
    try:
        yield
    finally:
        for name in new:
            del AXES[name]


LAYOUTS = (
    Layout(1, 1),
    Layout(2, 2),
    Layout(1, 3),
    Layout(1, 2, (("columns", 2),)),
    Layout(1, 1, (("columns", 4),)),
    Layout(1, 2, (("stages", 2),)),
    Layout(2, 1, (("stages", 2),)),
    Layout(1, 1, (("opt", 4),)),
    Layout(1, 2, (("opt", 2),)),
    Layout(1, 2, (("halves", 2),)),
    Layout(1, 1, (("halves", 3),)),
    Layout(1, 1, (("columns", 2), ("halves", 2))),
    Layout(1, 1, (("stages", 2), ("columns", 2))),
    Layout(1, 2, (("together", 2),)),
)
"""Layouts of at most four members."""


def places(layout: Layout) -> list[dict[str, int]]:
    """Returns the place of each world rank, counted up like an odometer with the outermost axis first."""
    order = ("dp_replicate", "dp_shard", "opt", "stages", "columns", "halves", "together")
    degree = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, **dict(layout.more)}
    found = [dict[str, int]()]
    for axis in order:
        found = [{**place, axis: index} for place in found for index in range(degree.get(axis, 1))]
    return found


def local(whole: np.ndarray, tensor: Tensor, layout: Layout, place: dict[str, int]) -> np.ndarray:
    """Returns the part of ``tensor`` of the member at ``place``, cut by numpy alone with the innermost axis
    first.
    """
    degree = {"dp_shard": layout.dp_shard, **dict(layout.more)}
    if tensor.kind in ("buffer", "scalar"):
        return whole
    if "halves" in degree and tensor.name == "fused":
        gate, up = np.split(whole, 2)
        whole = np.concatenate(
            [
                _chunk(gate, degree["halves"], place["halves"], 0),
                _chunk(up, degree["halves"], place["halves"], 0),
            ]
        )
    if "columns" in degree and whole.ndim > 1:
        whole = _chunk(whole, degree["columns"], place["columns"], 1)
    if "stages" in degree and stage_of(tensor) != place["stages"]:
        whole = whole[:0]
    if "opt" in degree and tensor.kind.startswith("moment."):
        whole = _chunk(whole, degree["opt"], place["opt"], 0)
    return _chunk(whole, degree["dp_shard"], place["dp_shard"], 0)


def _chunk(values: np.ndarray, count: int, index: int, axis: int) -> np.ndarray:
    size = -(-values.shape[axis] // count)
    return np.take(
        values,
        np.arange(min(index * size, values.shape[axis]), min((index + 1) * size, values.shape[axis])),
        axis,
    )
