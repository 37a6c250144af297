"""The initialisation of one of n members: a Llama of 70 B on meta, and the real initialisation of a few of
its layers.

The real part is two blocks of the 70 B model on this CPU, with this member's slices kept.  Seconds and bytes
of the whole model are *extrapolated*: the blocks are all alike, so time grows with their number, while the
memory for whole tensors does not grow.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from elastic.engine import paged
from elastic.models.llama import build
from elastic.plan.layout import Layout
from elastic.plan.placement import cell_of, held
from storage.slices import Tensor

SEVENTY_B = {
    "vocab": 128256,
    "dim": 8192,
    "layers": 80,
    "heads": 64,
    "kv_heads": 8,
    "hidden": 28672,
    "tied": False,
}
REAL_LAYERS = 2


def measure(n: int) -> dict[str, float]:
    torch.set_num_threads(1)
    began = time.process_time()
    with torch.device("meta"):
        whole = build(**SEVENTY_B)
    cell = cell_of(Layout(1, n), 0)
    shapes = [Tensor(name, "parameter", "F32", tuple(each.shape)) for name, each in whole.named_parameters()]
    shard = sum(4 * box.slice.count for tensor in shapes for box in held(tensor, cell).boxes)
    named = time.process_time() - began

    def blocks() -> nn.Module:
        return build(**{**SEVENTY_B, "vocab": 256, "layers": REAL_LAYERS})

    kept: dict[str, torch.Tensor] = {}

    def keep(name: str, values: torch.Tensor) -> None:
        for box in held(Tensor(name, "parameter", "F32", tuple(values.shape)), cell).boxes:
            part = tuple(slice(a, b) for a, b in zip(box.slice.start, box.slice.stop, strict=True))
            kept[name] = values[part].clone()

    began = time.process_time()
    passes, peak = paged.initialise(
        blocks, torch.device("cpu"), 0, keep, lambda name, nbytes: None, lambda: None
    )
    took_s = time.process_time() - began
    assert passes == 1
    real = sum(each.numel() for each in blocks_on_meta().parameters())
    numbers = sum(each.numel() for each in whole.parameters())
    largest = 4 * max(each.numel() for each in whole.parameters())
    return {
        "names_and_slices_cpu_s": named,
        "two_blocks_cpu_s": took_s,
        "two_blocks_pages_peak_bytes": float(peak),
        "shard_bytes": float(shard),
        "extrapolated_70b_cpu_s": took_s * numbers / real,
        "extrapolated_pages_peak_bytes": float(2 * largest),
        "whole_model_bytes": 4.0 * numbers,
    }


def blocks_on_meta() -> nn.Module:
    """Returns the blocks that :func:`measure` initialises for real, without memory."""
    with torch.device("meta"):
        return build(**{**SEVENTY_B, "vocab": 256, "layers": REAL_LAYERS})
