"""Every member initialises the model on its own GPU: the bits of plain torch there, in every layout, and
never the whole model in memory.

The second test prints seconds and bytes for a model of 3.2 B parameters, before (rank 0's CPU builds it
whole) and after.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic.engine import paged
from elastic.models.llama import build
from elastic.plan.layout import Layout
from elastic.plan.placement import cell_of, held
from storage.slices import Tensor
from tests.support.initialised import Odd, Widest, plain

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

THREE_B = {"vocab": 128256, "dim": 3072, "layers": 28, "heads": 24, "kv_heads": 8, "hidden": 8192}
CUDA = torch.device("cuda")


def slices(
    make: Callable[[], nn.Module], seed: int, layout: Layout, rank: int, resident: int
) -> tuple[dict[Any, torch.Tensor], int, int]:
    """Returns this member's slices by name and place, with the number of passes, and the largest number of
    bytes of pages.
    """
    cell, found = cell_of(layout, rank), dict[Any, torch.Tensor]()

    def keep(name: str, whole: torch.Tensor) -> None:
        for box in held(Tensor(name, "parameter", "F32", tuple(whole.shape)), cell).boxes:
            part = tuple(slice(a, b) for a, b in zip(box.slice.start, box.slice.stop, strict=True))
            found[name, part] = whole[part].clone()

    return found, *paged.initialise(make, CUDA, seed, keep, lambda name, nbytes: None, lambda: None, resident)


@pytest.mark.parametrize("make", [Odd, Widest, build])
@pytest.mark.parametrize("resident", [paged.RESIDENT, 0])
@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(1, 2), Layout(2, 2)], ids=str)
def test_the_slices_are_those_of_plain_torch_on_the_gpu(
    make: Callable[[], nn.Module], resident: int, layout: Layout
) -> None:
    want, other = plain(make, 7, "cuda"), plain(make, 8, "cuda")
    names, differ = set[str](), 0
    for rank in range(layout.world):
        found, _, _ = slices(make, 7, layout, rank, resident)
        for (name, part), value in found.items():
            assert value.is_cuda and torch.equal(value, want[name][part]), name
            differ += not torch.equal(value, other[name][part])
            names.add(name)
    assert names == set(want)
    assert differ, "negative control: another seed has other bits"


def test_three_billion_parameters_one_tensor_at_a_time() -> None:
    """Member 0 of eight keeps an eighth.  What was before: plain torch on one thread of the CPU, and the same
    model whole on the GPU.
    """
    torch.set_num_threads(1)
    device = torch.ones((), device=CUDA)
    began = time.perf_counter()
    found, passes, pages = slices(lambda: build(**THREE_B), 7, Layout(1, 8), 0, paged.RESIDENT)
    torch.cuda.synchronize()
    after_s, peak = time.perf_counter() - began, torch.cuda.max_memory_allocated()
    shard = sum(value.nbytes for value in found.values())
    whole, largest = 8 * shard, 4 * THREE_B["vocab"] * THREE_B["dim"]
    assert passes == 1
    assert peak <= shard + 3 * largest + paged.RESIDENT + device.nbytes < 0.6 * whole
    began = time.perf_counter()
    want = plain(lambda: build(**THREE_B), 7, "cuda")
    torch.cuda.synchronize()
    whole_s = time.perf_counter() - began
    assert all(torch.equal(value, want[name][part]) for (name, part), value in found.items()), (
        "the bits of plain torch on this GPU"
    )
    del want
    began = time.perf_counter()
    plain(lambda: build(**THREE_B), 7)
    before_s = time.perf_counter() - began
    print(
        json.dumps(
            {
                "gpu": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "parameters": whole // 4,
                "before_cpu_s": round(before_s, 2),
                "plain_torch_on_gpu_s": round(whole_s, 2),
                "after_s": round(after_s, 2),
                "whole_bytes": whole,
                "shard_bytes": shard,
                "largest_tensor_bytes": largest,
                "peak_pages_bytes": pages,
                "peak_allocated_bytes": peak,
            }
        )
    )
    assert after_s < before_s
