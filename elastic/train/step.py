"""One step as a transaction, top to bottom: compute, prepare, commit, apply.

Forward and backward change no state.  The commit is one all-gather over the whole world; its result is the same on every
member, so all apply or none does.
"""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real

import torch
import torch.distributed as dist

from elastic.data.cursor import Cursor
from elastic.data.loader import Loader
from elastic.engine.norm import squared_norms, tree_sum
from elastic.engine.optim.base import Rule
from elastic.engine.optim.schedule import learning_rate_of
from elastic.engine.world import TO_HOST, World
from elastic.errors import LossError, ModelError
from elastic.ids import Version
from elastic.imports import failure
from elastic.job import Job
from elastic.plan.placement import reporters
from elastic.protocol.commit_record import (
    FROM_DEVICE,
    HEADER,
    LOWER,
    NO_COPIES,
    NO_USAGE,
    CommitShape,
    Copied,
    Outcome,
    Usage,
    Validated,
    conclude,
    head_of,
)
from elastic.protocol.copy_schedule import due
from elastic.state.snapshot import Snapshots
from elastic.train.apply_fence import ApplyFence
from elastic.train.counters import Counters
from elastic.train.faults import Faults
from elastic.train.inventory import memory_by_class
from elastic.train.meter import Meter
from elastic.train.model import Builder, State
from elastic.train.replicas import compare

Loss = Callable[[torch.nn.Module, dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]
"""``loss(model, batch)`` returns a sum over the terms of the microbatch and their number, both scalars; never a mean."""
CONTRACT = "it must return (sum, count): two scalars, the sum over the terms of the microbatch and their number, not a mean"
"""End of the message of an error that a wrong :data:`Loss` causes."""


@dataclass
class Session:
    """The things that a worker keeps for the whole run, across worlds.

    The code that the job names is loaded once, before the first world: model, optimizer, loss and data set.
    """

    job: Job
    builder: Builder
    rule: Rule
    loss: Loss
    cursor: Cursor
    loader: Loader
    counters: Counters
    faults: Faults
    snapshots: Snapshots | None = None
    """Makes the copies in host memory; None means that nothing is copied."""
    secret: bytes = b""
    """Secret of the run, by which its processes know each other on direct sockets."""
    computing: str = ""
    """The microbatch whose forward or backward runs, in words, for the report of a failure in the user's code."""
    meter: Meter = field(default_factory=Meter)
    held_out: Loader | None = None
    """Reads the samples of the validation; None if there is none."""

    def close(self) -> None:
        """Ends the threads that read samples, after the reads that they are busy with."""
        for loader in (self.loader, self.held_out):
            if loader is not None:
                loader.close()


@dataclass
class Share:
    """This member's part of a step, by round: the sums on the device, and the ids of their samples (none in an idle round)."""

    losses: list[torch.Tensor]
    counts: list[torch.Tensor]
    samples: list[tuple[int, ...]]
    squares: torch.Tensor | None = None
    """The squared norm of each tensor of the whole gradient, once the step is prepared: float64 [tensors]."""
    validated: Validated | None = None
    """The validation of the state before the step."""


def run_step(
    session: Session,
    state: State,
    fence: ApplyFence,
    shape: CommitShape,
    step: int,
    boundary: Callable[[], int],
    validated: Validated | None = None,
) -> Outcome:
    """Runs step ``step`` from the first forward until it is applied.  ``boundary()`` returns what this member asks for after it.

    ``validated`` is told of the state before it.

    Raises :class:`FencedOff` if the generation is fenced or the lease runs out before the step is applied.
    """
    shape, device = shape.of(session.cursor.microbatches(step, session.job.microbatch_size)), state.world.device
    learning_rate_of(session.job, step)  # a schedule of the user's that fails must do so before the commit
    session.meter.begin(shape.generation, session.loader.waited_s, device)
    reserve(state, shape)
    session.loader.avoid(state.spikes.quarantined)
    if session.job.checkpoint.compare and due(step, session.job.checkpoint.save_every, session.job.steps):
        compare(state, partial(leave_if_over, fence))
    share = compute(session, state, step)
    copied = session.snapshots.settle() if session.snapshots else NO_COPIES
    if session.snapshots is not None and state.shard.home is not None:
        state.next_home = session.snapshots.next_home(state.shard)
    norm = prepare(session, state, fence, step, share)
    if session.meter.first:
        session.meter.held = memory_by_class(state)
    usage = session.meter.usage(session.loader.waited_s, device)
    blank = blank_record(shape, state.world.rank, step, boundary(), share, copied, usage)
    record = fill_record(state.world.to_device("record", blank), share, norm)
    share.validated = validated
    outcome = commit(session, state, fence, shape, step, record, share)
    session.faults.strike("before_update", step, state.world)
    with fence.applying(outcome):
        update(session, state, outcome)
    return outcome


def leave_if_over(fence: ApplyFence) -> None:
    """Raises :class:`FencedOff` if the generation is fenced."""
    with fence as member:
        member.go_on("compared")


def reserve(state: State, shape: CommitShape) -> None:
    """Reserves the host memory of the commit before anything is launched that may hang."""
    record = torch.empty(shape.fields, dtype=torch.float64)
    state.world.reserve("record", record)
    state.world.reserve(TO_HOST, record.new_empty(shape.world * shape.fields + len(state.trained) * _watches(state)))


def _watches(state: State) -> bool:
    """Returns whether the norms of the layers are recorded."""
    return state.job.watch.every > 0


def compute(session: Session, state: State, step: int) -> Share:
    """Runs forward and backward of this member's rounds; gradients are reduced as they come."""
    share, world, job, scale = Share([], [], []), state.world, session.job, state.optimizer.loss_scale.value
    state.model.train()
    buffers, deal = state.buffer_marks(), state.sync.begin_step(session.cursor.microbatches(step, job.microbatch_size))
    session.counters.at("reads data")
    for round_, index, ids, batch in session.loader.microbatches(step, world.data_rank, deal):
        session.counters.at("computes")
        session.counters["stepping_since_ns"] = session.counters["stepping_since_ns"] or time.time_ns()
        state.parameters.begin_round(round_, last=round_ + 1 == deal.rounds)
        state.statistics.begin_round(round_, deal)
        if batch is None:
            batch = session.loader.read(session.cursor.idle_ids(step, job.microbatch_size))
        if round_ == 0:
            for later in range(deal.rounds):
                for name, value in batch.items():
                    world.reserve(f"{name} {later}", value)
        session.computing = f"step {step}, microbatch {index}, samples {list(ids)}" if index is not None else f"step {step}, an idle round"
        session.faults.aim(step, state.model, world)
        seed_all(microbatch_seed(job.seed, step, 0 if index is None else index), world.device)
        loss, count = loss_of(session, state.model, {name: world.to_device(f"{name} {round_}", value) for name, value in batch.items()})
        state.parameters.end_forward()
        state.statistics.add(index)
        weight = 0.0 if index is None else scale
        (loss if weight == 1 else loss * weight).backward()
        state.parameters.end_round()
        refuse_changes(buffers, state)
        share.losses.append(loss.detach())
        share.counts.append(torch.as_tensor(count, device=world.device))
        share.samples.append(tuple(ids) if index is not None else ())
        session.counters["microbatch"] = round_ + 1
        session.counters["microbatches_run"] += index is not None
        session.counters.at("reads data")
        session.computing = ""
    return share


def loss_of(session: Session, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what the user's loss returns.  Raises :class:`LossError` unless it is (sum, count), two scalars.

    Raises :class:`ModelError` for a slip in it.
    """
    named = f"loss = {session.job.loss!r}"
    try:
        returned = session.loss(model, batch)
    except (KeyError, TypeError) as error:  # the usual slips in a loss; any other error speaks for itself
        if "/torch/distributed/" in traceback.extract_tb(error.__traceback__)[-1].filename:
            raise  # a peer's doing, see ``blame.py``
        raise ModelError(
            f"{named} failed with {failure(error)}; it gets the model and a batch of {sorted(batch)}, and {CONTRACT}"
        ) from error
    match returned:
        case (torch.Tensor(shape=()), torch.Tensor(shape=()) | Real()):
            return returned
        case tuple() | list():
            came = f"({', '.join(map(_described, returned))})"
        case _:
            came = _described(returned)
    raise LossError(f"{named} returned {came}; {CONTRACT}")


def _described(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"{type(value).__name__} {value!r:.40}"


def refuse_changes(before: dict[str, tuple[int, int]], state: State) -> None:
    """Raises :class:`ModelError` if a buffer is not as its mark in ``before`` says."""
    for name, mark in state.buffer_marks().items():
        if mark != before.get(name):
            raise ModelError(
                f"forward or backward changed the buffer {name!r} of {state.job.model!r}.  Its value would depend on which worker "
                f"computed which microbatch, so the result would depend on the number of workers.  Keep it out of the model.  In place of "
                f"a norm with statistics of its own use nn.BatchNorm1d, 2d or 3d, whose statistics the engine keeps, or a LayerNorm, "
                f"RMSNorm or GroupNorm"
            )


def seed_all(seed: int, device: torch.device) -> None:
    """Seeds torch's generators, of the CPU and of ``device``.  ``torch.manual_seed`` formats a traceback each time if there is no GPU."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def microbatch_seed(seed: int, step: int, microbatch: int) -> int:
    """Returns the seed of all random numbers of a microbatch, a function of (job, step, microbatch) alone."""
    digest = hashlib.blake2b(f"{seed}/{step}/{microbatch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prepare(session: Session, state: State, fence: ApplyFence, step: int, share: Share) -> torch.Tensor:
    """Reduces what the optimizer needs from the group, and returns the squared norm.  Afterwards this member can apply alone."""
    session.counters.at("commits")
    grads = state.parameters.grads()
    share.squares = squared_norms([grads[name] for name in grads], [state.rows[name] for name in grads], state.world)
    norm = tree_sum(share.squares)
    if (scale := state.optimizer.loss_scale.value) != 1:
        norm = norm / scale**2  # in place it would change the square of a single tensor
    if state.optimizer.rule.prepare is not None:
        state.optimizer.prepare(grads, norm, tokens_of(share, state.world), state.world)
    norm = state.statistics.guard(norm)
    session.counters["collective"] = 1
    session.faults.strike("before_commit", step, state.world)
    with fence as member:
        member.prepare(step)
    return norm


def tokens_of(share: Share, world: World) -> torch.Tensor:
    """Returns the number of tokens of the whole step, which :attr:`Outcome.tokens` will have: a float64 scalar on the device."""
    mine = [count.double().trunc() for count, samples in zip(share.counts, share.samples, strict=True) if samples]
    speaks = world.rank in reporters(world.layout)
    total = torch.stack(mine).sum() if mine and speaks else torch.zeros((), dtype=torch.float64, device=world.device)
    dist.all_reduce(total)
    return total


def blank_record(
    shape: CommitShape, rank: int, step: int, boundary: int, share: Share, copied: Copied = NO_COPIES, usage: Usage = NO_USAGE
) -> torch.Tensor:
    """Returns this member's record, float64 [shape.fields], with all that the host knows; see ``protocol/commit_record.py``."""
    known: list[float] = [*head_of(shape, rank, step, boundary, copied, usage)]
    for ids in share.samples:
        known += [0, 0, *ids, *(0 for _ in range(shape.microbatch - len(ids)))]
    return torch.tensor([*known, 0], dtype=torch.float64)


def fill_record(record: torch.Tensor, share: Share, norm: torch.Tensor) -> torch.Tensor:
    """Fills in what only the device knows, and the checksum, and returns ``record``.  Nothing here waits for the device."""
    record[FROM_DEVICE : FROM_DEVICE + 2] = torch.stack((torch.isfinite(norm).double(), norm))
    sums = [torch.stack((loss.double(), count.double())) for loss, count in zip(share.losses, share.counts, strict=True)]
    record[HEADER:-1].view(len(share.samples), -1)[:, :2] = torch.stack(sums)
    words = record.view(torch.int64)
    mixed = words[:-1] ^ (words[:-1] >> 32 & LOWER)
    words[-1] = (mixed * torch.arange(1, 2 * len(words) - 1, 2, device=words.device)).sum()
    return record


def commit(session: Session, state: State, fence: ApplyFence, shape: CommitShape, step: int, record: torch.Tensor, share: Share) -> Outcome:
    """Performs the one all-gather, and returns the outcome.  The norms of the tensors come to the host in the same copy.

    Raises :class:`WorldBroken` or the collective's own error if it does not complete, and :class:`BadRecord` if a record is invalid.
    """
    told = state.sync.gather(record)
    if _watches(state) and share.squares is not None:
        told = torch.cat((told, share.squares))
    raw = state.world.to_host(told, given_up=lambda: fence.member.barred)
    told, squares = raw.split((shape.world * shape.fields, len(raw) - shape.world * shape.fields))
    outcome = conclude(shape, step, told.numpy().astype("<f8", copy=False).tobytes(), share.validated)
    if not outcome.finite and state.optimizer.loss_scale.shrinks:
        outcome = replace(outcome, rescales=True)
    outcome = state.spikes.judged(outcome, session.cursor.samples)
    if len(squares):
        outcome = _with_layers(state, outcome, squares)
    session.counters["collective"] = 2
    return outcome


def _with_layers(state: State, outcome: Outcome, squares: torch.Tensor) -> Outcome:
    """Returns the outcome with what it tells of layers, if it is to tell anything."""
    scale = state.optimizer.loss_scale
    if outcome.step % state.job.watch.every if outcome.finite else scale.shrinks:
        return outcome
    return replace(outcome, layers=state.layers.recorded(squares.tolist(), scale.value, finite=outcome.finite))


def update(session: Session, state: State, outcome: Outcome) -> None:
    """Applies a committed step with the prepared gradients.  The caller holds the apply fence."""
    session.counters.at("updates")
    state.optimizer.apply(state.parameters.grads(), outcome)
    state.statistics.apply(applies=outcome.applies)
    state.spikes.after(outcome)
    session.faults.strike("in_update", outcome.step, state.world)
    if session.snapshots is not None and state.next_home is not None:
        state.move()
        session.snapshots.moved_in(state.shard, Version(outcome.step, outcome.generation))
    state.world.finish()
    state.parameters.forget_grads()
    session.counters["updates_applied"] += 1
    session.counters["step"], session.counters["microbatch"], session.counters["collective"] = outcome.step, 0, 0
