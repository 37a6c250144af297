"""Layouts of all axes, and three axes that the product does not have, each a row in its table; numpy computes
what each leaves to a member, as a second opinion.

``opt`` cuts the moments over members that hold the same parameters.  ``together`` cuts nothing: its members
hold the same part, and run each microbatch together.  ``columns`` computes, too: its members compute other
columns of what linear layers return (``columns.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from elastic.plan.axes import AXES, Axis, HeldPart, chunk, cut_split, split_key
from elastic.plan.layout import Layout
from storage.slices import Tensor

TENSORS = (
    Tensor("embed", "parameter", "F32", (11, 6), (0, 1), (0, 2)),
    Tensor("embed", "moment.exp_avg", "F32", (11, 6), (0, 1), (0, 2)),
    Tensor("fused", "parameter", "F32", (12, 6), (0, 2, 6, 6), (1, 2)),
    Tensor("fused", "moment.exp_avg", "F32", (12, 6), (0, 2, 6, 6), (1, 2)),
    Tensor("norm", "parameter", "BF16", (7,)),
    Tensor("norm", "moment.exp_avg", "BF16", (7,)),
    Tensor("cube", "parameter", "F32", (3, 5, 4), (1, 1), (1, 2)),
    Tensor("seen", "buffer", "I64", (4,)),
    Tensor("updates", "scalar", "F32", ()),
)
"""An embedding in the first of two blocks, and in the second one a fused matrix, of which two rows stay
together, and a tensor that is cut inside of its rows.
"""


def _opt(tensor: Tensor, held: HeldPart, degree: int, index: int) -> HeldPart:
    return held.cut(0, *chunk(held.shape[0], degree, index)) if tensor.kind.startswith("moment.") else held


def _name(tensor: Tensor, degree: int | None) -> tuple[str, str, tuple[int, ...]]:
    return tensor.name, tensor.kind, tensor.shape


TOYS = {
    "opt": Axis(data=True, cut=_opt, key=_name),
    "together": Axis(data=False),
    "columns": Axis(data=False, cut=cut_split, key=split_key),
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
    Layout(1, 2, (("tp", 2),)),
    Layout(1, 1, (("tp", 4),)),
    Layout(1, 1, (("tp", 3),)),
    Layout(1, 2, (("pp", 2),)),
    Layout(2, 1, (("pp", 2),)),
    Layout(1, 2, (("cp", 2),)),
    Layout(1, 1, (("cp", 2), ("tp", 2))),
    Layout(1, 1, (("pp", 2), ("tp", 2))),
    Layout(1, 1, (("opt", 4),)),
    Layout(1, 2, (("opt", 2),)),
    Layout(1, 2, (("together", 2),)),
)
"""Layouts of at most four members."""


def places(layout: Layout) -> list[dict[str, int]]:
    """Returns the place of each world rank, counted up like an odometer with the outermost axis first."""
    order = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "opt", "together")
    degree = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, **dict(layout.more)}
    found = [dict[str, int]()]
    for axis in order:
        found = [{**place, axis: index} for place in found for index in range(degree.get(axis, 1))]
    return found


def local(whole: np.ndarray, tensor: Tensor, layout: Layout, place: dict[str, int]) -> np.ndarray:
    """Returns the part of ``tensor`` of the member at ``place``, cut by numpy alone with the innermost axis
    first.
    """
    degree = {"cp": 1, "dp_shard": layout.dp_shard, **dict(layout.more)}
    if tensor.kind in ("buffer", "scalar"):
        return whole
    if "opt" in degree and tensor.kind.startswith("moment."):
        whole = _chunk(whole, degree["opt"], place["opt"], 0)
    if "tp" in degree and tensor.name != "norm":
        whole = _columns(whole, tensor.name, degree["tp"], place["tp"])
    whole = _chunk(
        whole, degree["dp_shard"] * degree["cp"], place["dp_shard"] * degree["cp"] + place["cp"], 0
    )
    stages = {"embed": 0, "fused": 1, "cube": 1}
    if "pp" in degree and stages.get(tensor.name, place["pp"]) != place["pp"]:
        whole = whole[:0]
    return whole


def _columns(whole: np.ndarray, name: str, count: int, index: int) -> np.ndarray:
    if name == "cube":
        return _chunk(whole, count, index, 1)
    if name == "embed":
        return _chunk(whole, count, index, 0)
    gate, up = (half.reshape(3, 2, -1) for half in np.split(whole, 2))
    mine = [_chunk(half, count, index, 0).reshape(-1, whole.shape[1]) for half in (gate, up)]
    return np.concatenate(mine)


def _chunk(values: np.ndarray, count: int, index: int, axis: int) -> np.ndarray:
    size = -(-values.shape[axis] // count)
    return np.take(
        values,
        np.arange(min(index * size, values.shape[axis]), min((index + 1) * size, values.shape[axis])),
        axis,
    )
