"""The bytes that a microbatch leaves for its backward pass are known before anything is computed."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.profiler import profile

from elastic.engine.kept import Kept, kept_bytes, reader_of_fp8
from elastic.engine.loss import next_token
from elastic.engine.parallelize import parallelize
from elastic.engine.world import World
from elastic.job import Job
from elastic.kernels.attention import causal_mask
from elastic.models.llama import build
from elastic.plan.layout import Layout
from elastic.train.model import build_model, builder_of
from tests.support.toys import toy_job

CPU, SEQ, LAYERS = torch.device("cpu"), 64, 4
STATE = torch.get_rng_state().nbytes
"""Bytes of a state of the CPU's random generator."""
STATES = {"none": 0, "block": 1, "attention": 1, "selective": 1, "sqrt": 2, 0.5: 0.5}
"""States that a block keeps, so that dropout draws the same again."""
SEEDS = 32
"""Most bytes of the seeds that a compiled block keeps."""
BLOCK_INPUT = 2 * SEQ * 64 * 4


def job_of(recompute: str | float, dropout: float = 0.1, **more: Any) -> Job:
    args = {"vocab": 29, "dim": 64, "layers": LAYERS, "heads": 4, "dropout": dropout}
    return toy_job("/nowhere", **{"recompute": recompute, "model_args": args, **more})


def batch_of(samples: int = 2) -> dict[str, Tensor]:
    return {"tokens": torch.arange(samples * (SEQ + 1)).view(samples, SEQ + 1) % 29}


def kept(job: Job, samples: int = 2) -> Kept:
    return kept_bytes(partial(build_model, job, builder_of(job)), job, next_token, batch_of(samples), CPU)


def real(job: Job) -> nn.Module:
    """Returns the model of a world of one member, with weights."""
    world = World.imagined(Layout(1, 1), CPU)
    model, parameters, *_ = parallelize(build_model(job, builder_of(job)), world, job)
    world.close()
    torch.manual_seed(0)
    for part in parameters.parts.values():
        part.normal_(std=0.02)
    parameters.begin_round(0, last=True)
    return model.train()


def allocated(job: Job) -> int:
    """Returns what torch's profiler counts in a real forward pass: bytes that it allocated less those that it freed.

    The first pass of a process compiles, and fills caches.  What earlier tests have left in cycles must not be freed meanwhile.
    """
    model, batch = real(job), batch_of()
    next_token(model, batch)[0].backward()
    gc.collect()
    gc.disable()
    try:
        with profile(profile_memory=True) as seen:
            loss, _ = next_token(model, batch)
    finally:
        gc.enable()
    assert loss.requires_grad
    return sum(event.self_cpu_memory_usage for event in seen.key_averages())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", STATES, ids=str)
def test_the_bytes_are_those_of_a_real_forward_pass(recompute: str | float, precision: str) -> None:
    """F2, F8: with dropout, by torch's own profiler, to the byte.  The control: without recomputation it is another number."""
    job = job_of(recompute, precision=precision)
    expected = allocated(job) - int(LAYERS * STATES[recompute] * STATE)
    found = kept(job)
    assert found.total == sum(found.blocks) + found.rest == expected
    assert (kept(job.replace(recompute="none")).total == expected) == (recompute == "none")


@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch's compiler, about torch
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, while it compiles
@pytest.mark.parametrize(
    "recompute", ["selective", *(pytest.param(each, marks=pytest.mark.full) for each in ("none", "block", "attention", "sqrt", 0.5))]
)
def test_so_are_those_of_compiled_blocks(recompute: str | float) -> None:
    """Compiled for real, to kernels; but for seeds of dropout."""
    job = job_of(recompute, compile=True)
    states = LAYERS * STATE if recompute == "sqrt" else 0  # of groups, which are around compiled blocks
    found, expected = kept(job).total, allocated(job) - states
    assert found <= expected <= found + LAYERS * SEEDS
    assert found < kept(job.replace(compile=False)).total or recompute in ("block", "sqrt"), "the control: fused operations keep less"


def seen_by_hooks(job: Job) -> int:
    """Returns the bytes of the memory, other than weights, that autograd saves in a real forward pass, and of the two results."""
    model, saved = real(job), dict[int, Tensor]()  # which keeps them, so that no memory is used twice
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            saved[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, count = next_token(model, batch_of())
    return sum(each.untyped_storage().nbytes() for each in saved.values()) + loss.nbytes + count.nbytes


@pytest.mark.fast
def test_the_bytes_are_those_of_saved_tensors() -> None:
    """The judge are autograd's own hooks.  The control, and why they would not do: of a selective checkpoint they see only the inputs."""
    for recompute in ("none", "block"):
        assert kept(job_of(recompute)).total == seen_by_hooks(job_of(recompute))
    assert seen_by_hooks(job_of("selective")) == seen_by_hooks(job_of("block")) < kept(job_of("selective")).total


@pytest.mark.fast
def test_each_block_has_its_own_bytes() -> None:
    """Blocks keep their input, which the one before returned; by a budget, half of them.  Twice the samples need twice the bytes."""
    none, block, half = (kept(job_of(recompute, dropout=0)) for recompute in ("none", "block", 0.5))
    assert len({*none.blocks}) == 1 and none.rest == block.rest == half.rest
    assert block.blocks == (BLOCK_INPUT,) * LAYERS
    assert half.blocks == (block.blocks[0], none.blocks[0]) * 2
    assert kept(job_of("none", dropout=0), samples=4).blocks == tuple(2 * each for each in none.blocks)


@pytest.mark.fast
@pytest.mark.parametrize("recompute", ["none", "block", "selective", 0.5])
def test_a_model_of_the_users_own(recompute: str | float) -> None:
    job = toy_job("/nowhere", model="tests.support.toys:own", model_args={}, recompute=recompute)
    assert kept(job).total == allocated(job) - int({"none": 0, 0.5: 2}.get(recompute, 3) * STATE)


def halved(**args: Any) -> nn.Module:
    return build(**args).bfloat16()


@pytest.mark.fast
def test_a_model_that_chooses_its_format_itself() -> None:
    """A builder may change the format of what it has built.  Most of what blocks keep then takes half the bytes; the control is float32."""
    job, plain = job_of("none", dropout=0, model=f"{__name__}:halved"), job_of("none", dropout=0)
    assert kept(job).total < 0.7 * kept(plain).total
    fp8 = job.replace(precision="fp8")
    assert reader_of_fp8(partial(build_model, fp8, builder_of(fp8)), fp8, next_token, batch_of()) is None


@pytest.mark.fast
def test_it_leaves_no_trace() -> None:
    """Neither in the generator of random numbers nor in groups, caches or gradients of a model that is there."""
    job, state = job_of("selective"), torch.get_rng_state()
    first = kept(job)
    assert kept(job) == first
    assert torch.equal(torch.get_rng_state(), state) and not torch.distributed.is_initialized()
    model = real(job)
    assert not any(isinstance(each, FakeTensor) for each in (*model.parameters(), *model.buffers()))
    assert causal_mask.cache_info().currsize == 0


@pytest.mark.fast
def test_a_failure_of_the_model_leaves_no_world() -> None:
    job = job_of("none")

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        raise LookupError("the user's own")

    with pytest.raises(LookupError, match="the user's own"):
        kept_bytes(partial(build_model, job, builder_of(job)), job, loss, batch_of(), CPU)
    assert kept(job).total > 0
