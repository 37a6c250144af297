"""Measures what a copy of one shard costs a device and its host, and how fast a shard comes back, on one
device without a world.

    python -m tests.benchmarks.gpu_copies                     # a quarter of 3.2 B parameters; needs 30 GB of host memory
    python -m tests.benchmarks.gpu_copies --size tiny         # a rehearsal, on a device too

*alone*: one copy, while nothing else runs; *products*: the same number of matrix products alone, and beside a
copy; *back*: from memory that is pinned here, from that of another mapping as a dead worker leaves it, and
with torch's own ``to``.  Each way back is timed twice:
the second time its pages are mapped.  torch has one thread on the host, as in a worker of one CPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from elastic.engine.optim.adamw import ADAMW
from elastic.ids import NodeId, Version, WorkerId
from elastic.models.llama import Llama
from elastic.plan.copy_budget import CopyRule
from elastic.plan.layout import Layout
from elastic.plan.transfer import Holding
from elastic.protocol.copy_schedule import Copy
from elastic.protocol.plan import Plan
from elastic.state import staging
from elastic.state.digest import digests
from elastic.state.hosts import Chunk, _fill, _range
from elastic.state.region import Region, frame
from elastic.state.shard import DTYPES, Shard
from elastic.state.snapshot import Snapshots
from elastic.state.staging import StagingStream
from elastic.train.heal import nothing
from elastic.train.model import tensors_of
from storage.background import in_background
from tests.support.cells import cell, shard_slice

SIZES = {
    "3b": {"dim": 3072, "layers": 28, "heads": 24, "kv_heads": 8, "hidden": 8192, "vocab": 128256},
    "tiny": {"dim": 64, "layers": 3, "heads": 2},
}
SHARDS = 4
PRODUCTS = 600
AT = Version(4, 2)


def products(beside: Callable[[], object]) -> float:
    """Returns the milliseconds that ``PRODUCTS`` products take on the device, the median of three.

    ``beside`` begins after a tenth of them.
    """
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    taken = []
    for _ in range(4):
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for number in range(PRODUCTS):
            torch.mm(left, right)
            if number == PRODUCTS // 10:
                beside()
        last.record()
        torch.cuda.synchronize()
        taken.append(first.elapsed_time(last))
    return statistics.median(taken[1:])


def plainly(shard: Shard, chunks: list[Chunk]) -> None:
    for part, _, raw in chunks:
        room = shard.part(part.tensor, part.slice)
        here = raw.to(room.device)
        digests(here)
        room.copy_(here.view(room.dtype).view(room.shape))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="3b")
    parser.add_argument("--stages", type=int, default=staging.STAGES)
    options = parser.parse_args()
    size, staging.STAGES = SIZES[options.size], options.stages
    torch.set_num_threads(1)
    with torch.device("meta"):
        tensors = tensors_of(Llama(**size), ADAMW)
    shape, values, device = frame(tensors, cell(SHARDS, 0)), {}, torch.device("cuda")
    for tensor in tensors:
        place = torch.device("cpu") if tensor.kind == "scalar" else device
        values[tensor.kind, tensor.name] = torch.randn(shard_slice(tensor, SHARDS, 0).shape, device=place).to(
            DTYPES[tensor.dtype]
        )
    shard, gigabytes = Shard(AT, cell(SHARDS, 0), values), shape.bytes / 1e9
    region = Region.create(2, shape.bytes, shape.blocks)
    region["keeper"] = os.getpid()
    snapshots = Snapshots(region, tensors, device, CopyRule(copies=True, buddies=True))
    snapshots.ready()
    workers = tuple(WorkerId(f"w{rank}") for rank in range(SHARDS))
    snapshots.enter(
        Plan(1, 2, Layout(1, SHARDS), workers, AT, "init", (), NodeId("n"), copy_every=1), workers[0], shard
    )

    snapshots.settle()
    copy = partial(snapshots._copy, 0, Copy(AT, cell(SHARDS, 0)), shard, saves=False)

    def alone() -> float:
        began = time.monotonic()
        copy()
        return time.monotonic() - began

    print(
        (
            f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}: {len(tensors)} tensors, "
            f"{gigabytes:.2f} GB"
        ),
        flush=True,
    )
    taken = statistics.median(alone() for _ in range(5))
    print(f"a copy alone takes {1e3 * taken:.1f} ms: {gigabytes / taken:.1f} GB/s", flush=True)
    before, beside, after = (
        products(work) for work in (lambda: None, lambda: in_background(copy, "copies"), lambda: None)
    )
    print(f"products alone {before:.1f} ms, beside a copy {beside:.1f}, alone {after:.1f}", flush=True)
    alone()
    holding = Holding(workers[0], AT, cell(SHARDS, 0), NodeId("n"))
    ranges = [_range(tensor, shard_slice(tensor, SHARDS, 0), holding, shape) for tensor in tensors]
    for name, memory in (
        ("pinned", region),
        ("another mapping", Region.of_process(os.getpid(), region.descriptor)),
        ("torch's way", None),
    ):
        there = memory or Region.of_process(os.getpid(), region.descriptor)
        data, sums = (
            torch.frombuffer(there.data(0), dtype=torch.uint8),
            torch.frombuffer(there.digests(0), dtype=torch.int64),
        )
        chunks = [
            (each, sums[each.block : each.block + each.blocks], data[each.offset : each.offset + each.bytes])
            for each in ranges
        ]
        times = []
        for _ in range(2):
            found = Shard(
                AT, cell(SHARDS, 0), {key: torch.empty_like(value) for key, value in values.items()}
            )
            torch.cuda.synchronize()
            began = time.monotonic()
            if memory is None:
                plainly(found, chunks)
            else:
                with StagingStream(device) as way:
                    assert _fill(found, iter(chunks), way, nothing)[1], "bytes do not match their digests"
            torch.cuda.synchronize()
            times.append(time.monotonic() - began)
            assert all(torch.equal(found.values[key], values[key]) for key in values)
        speeds = ", then ".join(f"{took:.3f} s, {gigabytes / took:.1f} GB/s" for took in times)
        print(f"back from {name}, {options.stages} stages: {speeds}", flush=True)


if __name__ == "__main__":
    main()
