"""The most bytes that a microbatch takes on a GPU are known before anything is computed there."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch

from elastic.engine.loss import next_token
from elastic.engine.parallelize import parallelize
from elastic.engine.peak import peak_bytes
from elastic.engine.world import World
from elastic.job import Job
from elastic.kernels.attention import causal_mask
from elastic.plan.layout import Layout
from elastic.train.model import build_model, builder_of
from tests.support.toys import toy_job

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODEL = {"vocab": 1024, "dim": 512, "layers": 4, "heads": 8, "kv_heads": 4, "hidden": 1536}
SAMPLES, SEQ = 4, 1024
DEVICE = torch.device("cuda", 0)


def allocated(job: Job) -> int:
    """Returns the most bytes that a round takes on the device, by torch's allocator.  A round before it
    compiles, and opens libraries.
    """
    world = World.imagined(Layout(1, 1), DEVICE)
    model, parameters, scheme, *_ = parallelize(build_model(job, builder_of(job)), world, job)
    world.close()
    for part in parameters.parts.values():
        part.normal_(std=0.02)
    model.train()
    tokens, before = torch.randint(1024, (SAMPLES, SEQ + 1), device=DEVICE), 0
    for _ in range(2):
        scheme.begin_step(1)
        parameters.begin_round(0, last=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(DEVICE)
        before = torch.cuda.memory_allocated(DEVICE)
        loss, count = next_token(model, {"tokens": tokens})
        parameters.end_forward()
        loss.backward()
        del loss, count
        parameters.end_round()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(DEVICE) - before


@pytest.mark.parametrize(
    "changes",
    [{}, {"reproducible": False}, {"compile": True}, {"compile": True, "reproducible": False}],
    ids=str,
)
@pytest.mark.parametrize("recompute", ["none", "block", "selective", "attention", "sqrt", 0.5], ids=str)
def test_the_bytes_are_those_of_the_allocator(recompute: str | float, changes: dict[str, Any]) -> None:
    """F8: within a tenth; compiled, it may be too much.  Then a real round runs.  The control: sums of
    gradients are less.
    """
    args = {"microbatch": SAMPLES, "global_batch": SAMPLES, "workers": {"max": 1, "gpus": 1}, **changes}
    job = toy_job("/nowhere", precision="bf16", model_args=MODEL, recompute=recompute, **args)
    batch = {"tokens": torch.zeros(SAMPLES, SEQ + 1, dtype=torch.int64)}
    build = partial(build_model, job, builder_of(job))
    torch.compiler.reset()  # what an earlier test compiled keeps a few bytes
    # and so does the mask that it made; peak_bytes gives that back, because it makes one of its own
    causal_mask.cache_clear()
    gc.collect()  # and it may have left cycles with tensors
    before = torch.cuda.memory_allocated(DEVICE)
    found = peak_bytes(build, job, next_token, batch, DEVICE)
    assert torch.cuda.memory_allocated(DEVICE) == before, "nothing is computed"
    expected = allocated(job)
    print(
        f"F8 {recompute} {changes}: a round takes {expected / 1e6:.1f} MB, found {found / 1e6:.1f} "
        f"({found / expected - 1:+.1%})"
    )
    assert 0.9 * expected <= found <= (1.4 if job.compile else 1.1) * expected, (
        "kernels fuse what is counted one by one"
    )
    assert 4 * sum(each.numel() for each in build().parameters()) < 0.9 * expected
