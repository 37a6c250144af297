"""Estimates the memory of a member before anything runs: by class, by stage of ZeRO, and by the number of members that share the state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from elastic.engine.optim.base import rule_of
from elastic.job import Job
from elastic.plan.copy_budget import amount, explained
from elastic.train.machine.device import fitting_shard, need_of
from elastic.train.model import build_model, builder_of, bytes_of, tensors_of
from storage.slices import Tensor

STAGES = (0, 1, 2, 3)
"""The stages of ZeRO (Rajbhandari and others 2020, section 5)."""
SPLITS = {
    "2 + 2 + 12, as the ZeRO paper counts": {"bf16 weights": 2, "bf16 gradients": 2, "float32 weights and moments": 12},
    "4 + 4 + 8, as FSDP2 and Elastic hold it": {"float32 weights": 4, "float32 gradients": 4, "float32 moments": 8},
}
"""Bytes for each parameter in mixed precision with Adam, in the two ways in which they are counted."""


def tensors_of_job(job: Job) -> tuple[Tensor, ...]:
    """Returns every tensor of the state of ``job``.  Raises :class:`~elastic.errors.ElasticError` if model or optimizer do not fit."""
    return tensors_of(build_model(job, builder_of(job)), rule_of(job))


def of_parameters(count: float) -> Iterator[str]:
    """Yields what ``count`` parameters take in mixed precision with Adam: 16 bytes each, and how these are made up."""
    yield f"{count:.3g} parameters in mixed precision with Adam: {gigabytes(16 * count)}, 16 bytes each"
    for how, parts in SPLITS.items():
        yield f"{how}: " + ", ".join(f"{gigabytes(size * count)} of {what}" for what, size in parts.items())


def classes(job: Job, tensors: Sequence[Tensor], shards: int, zero: int | None = None) -> dict[str, int]:
    """Returns the bytes that a member holds at the end of a backward pass if ``shards`` members share the state.

    The classes are those of ``train/inventory.py``.  ``zero`` is the stage of ZeRO, if it is not the job's.
    """
    need = need_of(job, tensors, zero)
    where = " in host memory" if job.offloads else ""
    weights = bytes_of([tensor for tensor in tensors if tensor.kind == "parameter"])
    moments = bytes_of([tensor for tensor in tensors if tensor.kind.startswith("moment.")])
    return {
        f"weights{where}": -(-weights // shards),
        f"moments{where}": -(-moments // shards),
        "gradients": need.gradients if need.late else -(-need.gradients // shards),
        "computing copies": need.computing if shards == 1 else need.gathered,
        "buffers": bytes_of([tensor for tensor in tensors if tensor.kind in ("buffer", "constant")]),
    }


def of_job(job: Job, tensors: Sequence[Tensor]) -> Iterator[str]:
    """Yields what a member of the largest world holds, by class, and what its copies take of its node.

    Raises :class:`JobError` if no world fits devices of ``workers.device_gb``.
    """
    least = fitting_shard(job, tensors, torch.device("cpu"))
    layouts = job.layouts(least)
    shards, parameters = layouts[-1].dp_shard, sum(math.prod(tensor.shape) for tensor in tensors if tensor.kind == "parameter")
    found = classes(job, tensors, shards)
    yield f"{parameters:,} parameters; the state takes {gigabytes(bytes_of(tensors))}"
    if job.workers.device_gb == "auto":
        yield "how many workers must share it depends on the memory of their devices; name that, say --workers.device-gb 80"
    held = ", ".join(f"{gigabytes(size)} of {name}" for name, size in found.items() if size)
    yield f"if {shards} of {layouts[-1].world} workers share the state, each holds {held}; {gigabytes(sum(found.values()))} in all"
    yield "what a microbatch keeps for its backward pass comes on top; a worker measures that before it joins"
    rule = job.rules()
    parts = [bytes_of(tensors) / layout.dp_shard for layout in layouts]
    yield explained(parts[-1], max(parts), rule.copy_every, rule.buddy_every, offload=job.offloads)


def by_stage(job: Job, tensors: Sequence[Tensor], most: int) -> list[tuple[int, list[int]]]:
    """Returns pairs (members that share the state, bytes of one of them on its device for each of ``STAGES``): 1, 2, 4, … ``most``."""
    counts = sorted({*(2**power for power in range(most.bit_length())), most})
    return [(shards, [_on_device(classes(job, tensors, shards if zero else 1, zero)) for zero in STAGES]) for shards in counts]


def _on_device(found: dict[str, int]) -> int:
    return sum(size for name, size in found.items() if not name.endswith("host memory"))


def gigabytes(size: float) -> str:
    """Returns a number of bytes as text, to a tenth of a GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else amount(size)
