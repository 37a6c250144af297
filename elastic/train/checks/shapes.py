"""Refuses microbatches of different shapes if blocks are compiled and the bits must not depend on which
worker computes which microbatch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from elastic.engine.blocks import sharding_table
from elastic.errors import DataError

if TYPE_CHECKING:
    from elastic.train.step import Session


def expect_shapes(
    session: Session, model: torch.nn.Module, batch: dict[str, torch.Tensor], ids: tuple[int, ...]
) -> None:
    """Raises :class:`DataError` if a microbatch has other shapes than the first, and the model has blocks."""
    shapes = {name: list(value.shape) for name, value in batch.items()}
    session.shapes = session.shapes or shapes
    if shapes == session.shapes or not sharding_table(model).blocks:
        return
    name = next(name for name in (*shapes, *session.shapes) if shapes.get(name) != session.shapes.get(name))
    raise DataError(
        f"{session.loader.named}: {name!r} of the samples {list(ids)} has the shape "
        f"{shapes.get(name)}, and that of an earlier microbatch {session.shapes.get(name)}: with "
        "compile = true and reproducible = true all microbatches must have the same shapes, since "
        "compiled code, and so its rounding, depends on the lengths that a worker sees first; pad all "
        "samples to one length, or set compile = false or reproducible = false"
    )
