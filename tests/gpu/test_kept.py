"""The bytes that a microbatch leaves on a GPU for its backward pass are known before anything is computed there."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch

from elastic.engine.kept import kept_bytes
from elastic.engine.loss import next_token
from elastic.engine.parallelize import parallelize
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
    """Returns the bytes that a forward pass leaves on the device, by torch's allocator, which rounds each tensor up to 512.

    One before it compiles, and opens libraries.
    """
    world = World.imagined(Layout(1, 1), DEVICE)
    model, parameters, scheme, _ = parallelize(build_model(job, builder_of(job)), world, job)
    world.close()
    for part in parameters.parts.values():
        part.normal_(std=0.02)
    scheme.begin_step(1)
    parameters.begin_round(0, last=True)
    model.train()
    tokens = torch.randint(1024, (SAMPLES, SEQ + 1), device=DEVICE)
    loss, _ = next_token(model, {"tokens": tokens})
    torch.autograd.grad(loss, [each for each in model.parameters() if each.requires_grad])
    del loss
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(DEVICE)
    loss, _ = next_token(model, {"tokens": tokens})
    assert loss.requires_grad
    return torch.cuda.memory_allocated(DEVICE) - before


@pytest.mark.parametrize("changes", [{}, {"reproducible": False}, {"compile": True}, {"compile": True, "reproducible": False}], ids=str)
@pytest.mark.parametrize("recompute", ["none", "block", "selective", "attention", "sqrt", 0.5], ids=str)
def test_the_bytes_are_those_of_the_allocator(recompute: str | float, changes: dict[str, Any]) -> None:
    """F8: within 2 %, which rounding up takes.  Afterwards a real forward pass runs.  The control: another setting is further away."""
    job = toy_job("/nowhere", workers={"gpus": 1}, precision="bf16", model_args=MODEL, recompute=recompute, **changes)
    batch = {"tokens": torch.zeros(SAMPLES, SEQ + 1, dtype=torch.int64)}
    build = partial(build_model, job, builder_of(job))
    torch.compiler.reset()  # what an earlier test compiled keeps a few bytes
    causal_mask.cache_clear()  # and so does the mask that it made; kept_bytes gives that back, because it makes one of its own
    gc.collect()  # and it may have left cycles with tensors
    before = torch.cuda.memory_allocated(DEVICE)
    found = kept_bytes(build, job, next_token, batch, DEVICE).total
    other = kept_bytes(build, job.replace(recompute="none" if recompute == "block" else "block"), next_token, batch, DEVICE).total
    assert torch.cuda.memory_allocated(DEVICE) == before, "nothing is computed"
    expected = allocated(job)
    assert found == pytest.approx(expected, rel=0.02)
    assert other != pytest.approx(expected, rel=0.02)
