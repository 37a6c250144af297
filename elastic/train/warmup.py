"""Pays the cost of a process's first step before it joins: opens libraries, loads kernels, compiles blocks.

So a world that a newcomer or a spare joins, in any layout, waits only for process groups and slices.  The
warm-up computes microbatches with weights of zeros, in a world without other members: compiling and loading
depend on shapes alone, and no collective can hang.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress

import torch

from elastic.engine.norm import squared_norm
from elastic.engine.peak import in_few_rounds
from elastic.engine.world import World
from elastic.errors import JobError, LossError, StateChanged
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.plan.memory_need import first_roomy
from elastic.plan.placement import cell_of, data_ranks
from elastic.protocol.copy_schedule import Copy
from elastic.state.staging import STREAMS, StagingStream
from elastic.train.checks.contract import check_loss
from elastic.train.machine.device import fitting_shard, fitting_whole, memory_of, most_shards, policies_of
from elastic.train.model import BUFFERS, State
from elastic.train.step import Session, compare_tokens, loss_of
from storage.slices import Tensor

COUNTED = "num_batches_tracked"
"""Name of the buffer in which norms count batches; unlike other buffers of whole numbers it is no flag."""


def warm_up(session: Session, tensors: Sequence[Tensor], device: torch.device) -> int:
    """Warms up once, before the first world.  ``tensors`` are those of the state.

    Any other failure than the two below is only printed: it happens again in the first step, and is reported
    there with its samples.

    Returns the peak of the bytes that a member of the largest world took on a GPU; 0 on a CPU, or if that
    computation failed.  Raises :class:`LossError` if the loss breaks its contract, and :class:`StateChanged`
    if forward, backward or the loss changes the state.
    """
    began, took = time.monotonic(), 0
    try:
        world = World.alone(device, generation=0)  # opens the communication library
        world.abort()
        world.close()
        took = _computed_in(_of_one_replica(session.job), session, device)
        for layout, zero in _with_whole_weights(session, tensors, device, took):
            gc.collect()  # the state of the first world would take memory beside that of the second
            with suppress(torch.OutOfMemoryError):  # such a world compiles when it forms, if it ever does
                _computed_in(layout, session, device, zero)
        if session.snapshots is not None:
            # torch keeps their pinned memory for the staging streams of a recovery
            for staging_stream in [StagingStream(device, number) for number in range(STREAMS)]:
                with staging_stream:
                    pass
    except (LossError, StateChanged):
        raise
    except Exception:  # a boundary: the user's code may raise anything
        print(f"not warmed up:\n{traceback.format_exc()}", flush=True)
    gc.collect()
    gc.freeze()  # what is here by now stays: later collections need not look at it
    torch.cuda.empty_cache()
    print(
        f"the warm-up took {time.monotonic() - began:.3f} s{_compiled() if session.job.compile else ''}",
        flush=True,
    )
    return took


def choose_recompute(session: Session, tensors: Sequence[Tensor], device: torch.device) -> int:
    """Warms up, and puts into ``session.job`` the policy that ``recompute = "auto"`` means on ``device``.

    Returns as :func:`warm_up`, of the chosen policy.
    """
    job, took = session.job, dict[str | float, int]()
    if job.recompute != "auto":
        return warm_up(session, tensors, device)
    if not memory_of(job, device):
        session.job = job.replace(recompute="none")
        return warm_up(session, tensors, device)

    def least_of(policy: str | float) -> int:
        session.job = job.replace(recompute=policy)
        took[policy] = warm_up(session, tensors, device)
        if not took[policy]:
            return 0  # the warm-up ran out of memory, or the model cannot train with this policy
        try:
            return fitting_shard(session.job, tensors, device, took[policy])
        except JobError as error:
            print(f"recompute = {policy!r}: {error}", flush=True)
            return 0

    chosen = first_roomy(policies_of(job), least_of, job.workers.min, most_shards(job))
    chosen = chosen if took[chosen] else "none"
    session.job = job.replace(recompute=chosen)
    print(f"recompute = {chosen!r}", flush=True)
    return took[chosen]


def _computed_in(layout: Layout, session: Session, device: torch.device, zero: int | None = None) -> int:
    """Computes as a member of an imagined world with ``layout``, in stage ``zero`` of ZeRO, or in that of the
    job.  Returns as :func:`warm_up`.
    """
    world = World.imagined(layout, device)
    try:
        return _compute(session, world, zero)
    finally:
        world.close()


def _with_whole_weights(
    session: Session, tensors: Sequence[Tensor], device: torch.device, took: int
) -> list[tuple[Layout, int | None]]:
    """Returns the layout and the stage of ZeRO of a second warm-up, with whole weights, if a member may hold
    whole weights and blocks are compiled; else [].

    Compiled code depends on nothing else of a layout: all degrees of shards and of replicas share it.  FSDP
    gives a block another class, so torch traces the block anew where there is no FSDP.  A job whose state
    lives on the host has no second warm-up: it would need all of the node's memory now.
    """
    job = session.job
    if not job.compile or job.workers.max == 1 or job.offloads or job.zero in (1, 2):
        return []
    try:
        least = fitting_shard(job, tensors, device, took)
    except JobError:  # the caller of the warm-up meets the same error
        return []
    if least == 1 and any(layout.shards == 1 for layout in job.layouts()):
        return [(Layout(1, 1, job.parallel.model), None)]
    return [(_of_one_replica(job), 2)] if fitting_whole(job, tensors, device, took) else []


def _of_one_replica(job: Job) -> Layout:
    """Returns the layout in which all workers are one replica."""
    rule = job.layout_rule()
    return Layout(1, job.workers.max // rule.group, rule.model)


def _compiled() -> str:
    """Returns the part of a sentence that says how many graphs were compiled in this process, and how many
    were found compiled.
    """
    counts = torch._dynamo.utils.counters["inductor"]
    return (
        f"; {counts['fxgraph_cache_miss']} graphs were compiled, {counts['fxgraph_cache_hit']} were found "
        "compiled"
    )


def _compute(session: Session, world: World, zero: int | None) -> int:
    """Computes one microbatch forward and backward, in as many rounds as it takes until all sums of gradients
    are held; then the norm, and what the optimizer prepares.

    Returns as :func:`warm_up`.
    """
    before = 0
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
        before = torch.cuda.memory_allocated(world.device)
    home = None
    if session.snapshots is not None and session.job.offloads:
        home = session.snapshots.home(Copy(Version(0, 0), cell_of(world.layout, world.rank)), (), adopt=False)
    job, rounds = in_few_rounds(session.job.in_stage(zero))
    state = State(job, session.builder, session.rule, world, Version(0, 0), home)
    with torch.no_grad():
        for (kind, _), value in state.shard.values.items():
            # averages of zeros would not change
            value.fill_(0.5 if kind in BUFFERS and value.is_floating_point() else 0)
        if home is not None:
            home.sums.zero_()  # the digests of zeros
    compare_tokens(session, state.model)
    batch = session.loader.read(session.cursor.some_ids(session.job.microbatch_size))
    state.model.train()
    flags = any(
        not each.is_floating_point() and not name.endswith(COUNTED)
        for name, each in state.model.named_buffers()
    )
    deal = state.sync.begin_step(rounds * data_ranks(world.layout))
    for number in range(rounds):
        state.parameters.begin_round(number, last=number + 1 == rounds)
        if number == 0:
            state.guard.begin(values=not flags)
        state.statistics.begin_round(number, deal)
        loss, _ = loss_of(
            session, state.model, {name: value.to(world.device, copy=True) for name, value in batch.items()}
        )
        state.parameters.end_forward()
        loss.backward()
        del loss
        state.parameters.end_round()
    # a model may behave otherwise with the real values of its flags; the first microbatch checks that
    state.guard.check(buffers=not flags)
    grads = state.parameters.grads()
    norm = squared_norm(grads, state.gradient, world)
    if state.optimizer.rule.prepare is not None:
        state.optimizer.prepare(grads, norm, torch.ones_like(norm), world)
    if session.held_out is not None:  # without gradients blocks compile to other code
        state.model.eval()
        state.parameters.begin_round(0, last=True)
        with torch.no_grad():
            session.loss(
                state.model, {name: value.to(world.device, copy=True) for name, value in batch.items()}
            )
        state.parameters.end_forward()
    world.finish()
    took = torch.cuda.max_memory_allocated(world.device) - before if world.device.type == "cuda" else 0
    if not session.job.offloads:  # its streamed weights have buffers for one pass only
        check_loss(session, state)
    return took
