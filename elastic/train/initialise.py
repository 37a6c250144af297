"""Gives a new run its first values: every member runs the user's initialisation by itself and keeps its own
slices.

All members run the same code from the same seed on devices of one kind, so they get the same bits; they
exchange only a few numbers to check this.  Initialisation has no deadline of its own: each time the
coordinator sees that a member makes progress, ``deadlines.form_s`` begins anew.  A member that is lost
meanwhile ends the world, and the next one initialises again, in its own layout, to the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from elastic.engine import paged
from elastic.engine.parameters.base import with_rows
from elastic.errors import JobError, ModelError
from elastic.plan.copy_budget import amount
from elastic.plan.placement import held
from elastic.state.node_memory import SPARE, free_memory
from elastic.state.shard import DTYPES
from elastic.train.gauges.counters import Counters
from elastic.train.model import BUFFERS, Builder, State
from storage.slices import Tensor

TOLD_S = 1.0
"""Seconds from which on the duration of an initialisation is written to the log."""
SAMPLED = 4096
"""Number of elements of a tensor, evenly spread, that members compare to check that they have the same
values.
"""


@torch.no_grad()
def initialise(
    state: State,
    builder: Builder,
    counters: Counters,
    hook: Callable[[], None],
    leave_if_over: Callable[[], None],
) -> None:
    """Initialises the shard: parameters and buffers as the user's code does, moments and scalars to zero.

    ``hook`` is called after each tensor, ``leave_if_over`` before each operation of the user's code.
    """
    for tensor in state.tensors:
        if (
            tensor.kind not in ("parameter", *BUFFERS)
            and (value := state.shard.values.get((tensor.kind, tensor.name))) is not None
        ):
            value.zero_()
            state.shard.let_go((tensor.kind, tensor.name))
    differing = _by_itself(state, builder, counters, hook, leave_if_over)
    if not differing:
        return
    what = (
        f"init_weights() of model = {state.job.model!r} gives {differing[0]!r} other values on some "
        "workers than on the first worker"
    )
    if state.job.reproducible:
        raise ModelError(
            f"{what} (and {len(differing) - 1} more); draw from the generators of torch, random or numpy, "
            "which are seeded"
        )
    print(
        f"{what}: world rank 0 initialises the model on its CPU, and all other workers take its values",
        flush=True,
    )
    from_first(state, builder, hook)


def _by_itself(
    state: State,
    builder: Builder,
    counters: Counters,
    hook: Callable[[], None],
    leave_if_over: Callable[[], None],
) -> list[str]:
    """Initialises this member's slices; returns the names of the tensors whose values differ between some
    member and world rank 0.
    """
    job, device, began = state.job, state.world.device, time.monotonic()
    tensors = {tensor.name: tensor for tensor in state.tensors if tensor.kind in ("parameter", *BUFFERS)}
    samples: dict[str, torch.Tensor] = {}

    def keep(name: str, whole: torch.Tensor) -> None:
        cut(state, tensors[name], whole)
        samples[name] = _sample(whole)
        hook()

    def moved() -> None:
        counters.got_further()
        leave_if_over()

    counters.at("initialises")
    passes, peak = paged.initialise(lambda: builder(**job.model_args), device, job.seed, keep, lay, moved)
    counters["collective"] = 0
    counters.at("forms")
    took_s = time.monotonic() - began
    if took_s >= TOLD_S:
        print(
            (
                f"initialised in {took_s:.3f} s on {device}: {passes} passes, at most {amount(peak)} of "
                "whole tensors at once"
            ),
            flush=True,
        )
    return _differing(state, [(name, samples[name].to(device)) for name in tensors])


def cut(state: State, tensor: Tensor, whole: torch.Tensor) -> None:
    """Copies this member's boxes of the whole tensor into its shard.  Raises :class:`ModelError` if ``whole``
    has another shape than ``tensor``.
    """
    if tensor.kind == "parameter":
        whole = with_rows(whole)
    if tuple(whole.shape) != tensor.shape:
        there = f"the shape {tensor.shape} on the meta device, and {tuple(whole.shape)} on {whole.device}"
        raise ModelError(
            f"{tensor.name!r} of model = {state.job.model!r} has {there}; build the same model on every "
            "device"
        )
    for box in held(tensor, state.shard.cell).boxes:
        part = tuple(slice(a, b) for a, b in zip(box.slice.start, box.slice.stop, strict=True))
        state.shard.part(tensor, box.slice).copy_(whole[part])
    state.shard.let_go((tensor.kind, tensor.name))


def lay(name: str, nbytes: int) -> None:
    """Raises :class:`JobError` unless the node has room to lay aside ``nbytes`` of host memory for the values
    of ``name``.
    """
    free, where = free_memory()
    if nbytes + SPARE > free:
        raise JobError(
            f"init_weights() reads {name!r} again after it has worked on other tensors, so "
            f"{amount(nbytes)} must be kept in host memory, but {where} has only {amount(free)} left; "
            "finish each tensor before the next tensor, and build the model in its final dtype"
        )


def _sample(whole: torch.Tensor) -> torch.Tensor:
    """Returns a number that depends on the bits of about ``SAMPLED`` elements and on their order: int64, on
    the device of ``whole``.
    """
    flat = whole.detach().flatten()
    bits = flat[:: max(1, flat.numel() // SAMPLED)].contiguous().view(torch.uint8).to(torch.int64)
    places = torch.arange(1, bits.numel() + 1, dtype=torch.int64, device=whole.device)
    return (bits * (places * places % 1_000_003)).sum()


def _differing(state: State, samples: list[tuple[str, torch.Tensor]]) -> list[str]:
    """Returns the names whose samples are not the same on all members; every member gets the same answer."""
    if not samples:
        return []
    mine = torch.stack([value for _, value in samples])
    first = mine.clone()
    dist.broadcast(first, src=0)
    differ = (first != mine).to(torch.int64)
    dist.all_reduce(differ, op=dist.ReduceOp.MAX)
    state.world.finish()
    return [name for (name, _), found in zip(samples, differ.tolist(), strict=True) if found]


def from_first(state: State, builder: Builder, hook: Callable[[], None]) -> None:
    """Initialises the parameters and buffers of all members from world rank 0, which builds the whole model
    on its CPU.
    """
    sources: dict[str, torch.Tensor] = {}
    if state.world.rank == 0:
        torch.manual_seed(state.job.seed)
        model = builder(**state.job.model_args)
        model.init_weights()
        sources = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for tensor in state.tensors:
        if tensor.kind not in ("parameter", *BUFFERS):
            continue
        whole = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device=state.world.device)
        if state.world.rank == 0:
            state.world.finish()  # the copy below synchronises, and would block behind a peer that died
            whole.copy_(sources[tensor.name])
        dist.broadcast(whole, src=0)
        state.world.finish()  # as above, where the shard lives in host memory
        hook()
        cut(state, tensor, whole)
