"""Measures one member at the end of a step: the norm of the gradient, and the conclusion from the commit
records of all members.

The gradients are on the device "meta", which computes nothing: the figures count memory and launches.  Shards
have 64 members.  The records are those of 4 microbatches a member, one sample each, encoded by the product.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import torch

from elastic.engine.norm import squared_norm
from elastic.engine.world import World
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import CommitShape, conclude, head_of
from elastic.train.record import blank_record, fill_record
from elastic.train.step import Share
from storage.slices import Tensor
from tests.support.live import Live

SHARDS = 64
REPEATS = 5


def dense() -> Iterator[tuple[int, ...]]:
    """The shapes of a Llama of 70 B."""
    yield from ((128_256, 8_192), (128_256, 8_192), (8_192,))
    for _ in range(80):
        yield from (
            (8_192, 8_192),
            (1_024, 8_192),
            (1_024, 8_192),
            (8_192, 8_192),
            (28_672, 8_192),
            (28_672, 8_192),
            (8_192, 28_672),
        )
        yield from ((8_192,), (8_192,))


def experts() -> Iterator[tuple[int, ...]]:
    """The shapes of 94 layers with 128 experts each, of which every matrix is a tensor."""
    yield from ((151_936, 4_096), (151_936, 4_096), (4_096,))
    for _ in range(94):
        yield from (
            (8_192, 4_096),
            (512, 4_096),
            (512, 4_096),
            (4_096, 8_192),
            (128, 4_096),
            (4_096,),
            (4_096,),
        )
        for _ in range(128):
            yield from ((1_536, 4_096), (1_536, 4_096), (4_096, 1_536))


def measure(n: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    world = World.imagined(Layout(-(-n // SHARDS), SHARDS), torch.device("meta"))
    for name, shapes in (("70b", list(dense())), ("experts", list(experts()))):
        tensors = [Tensor(str(number), "parameter", "F32", shape) for number, shape in enumerate(shapes)]
        grads = {
            each.name: torch.empty(-(-each.shape[0] // SHARDS), *each.shape[1:], device="meta")
            for each in tensors
        }
        began = time.process_time()
        squared_norm(grads, tensors, world)
        figures[f"{name}_norm_launching_s"] = time.process_time() - began
        with Live() as live:
            squared_norm(grads, tensors, world)
        figures[f"{name}_norm_bytes"] = live.peak_bytes
        figures[f"{name}_norm_operations"] = live.operations
    shape = CommitShape(
        incarnation=1, generation=1, microbatches=4 * n, microbatch=1, layout=Layout(-(-n // 8), 8)
    )
    norm = torch.ones((), dtype=torch.float64)
    said = Share(
        [torch.ones(())] * shape.rounds,
        [torch.ones((), dtype=torch.int64)] * shape.rounds,
        [(5,)] * shape.rounds,
    )
    records = torch.cat(
        [
            fill_record(blank_record(shape, head_of(shape, rank, 1, 0), said), said, norm)
            for rank in range(shape.world)
        ]
    )
    gathered = records.numpy().tobytes()
    conclude(shape, 1, gathered)
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        conclude(shape, 1, gathered)
        times.append(time.process_time() - began)
    return figures | {"conclude_s": statistics.median(times), "records_bytes": len(gathered)}
