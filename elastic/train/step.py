"""One step as a transaction, top to bottom: compute, prepare, commit, apply.

A loop, the user's or our own (``context.py``), drives a :class:`Step` through it.  Forward and backward
change no state.  The commit is one all-gather over the whole world; its result is the same on every member,
so all apply or none does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from elastic.code.imports import failure
from elastic.config.sections import UNUSED_SINCE
from elastic.data.cursor import Cursor
from elastic.data.loader import Loader
from elastic.engine.loss import next_token
from elastic.engine.norm import squared_norms, tree_sum
from elastic.engine.optim.base import Rule
from elastic.engine.optim.schedule import own_rate_of
from elastic.engine.parameters.split import tell_of_views
from elastic.engine.recomputation import tell_of_selective
from elastic.engine.world import TO_HOST, World
from elastic.errors import LoopError, LossError, ModelError
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.placement import reporters
from elastic.protocol.commit_record import (
    NO_COPIES,
    BadCount,
    CommitShape,
    Outcome,
    Unlike,
    Validated,
    conclude,
    head_of,
)
from elastic.state.snapshot import Snapshots
from elastic.train.apply_fence import ApplyFence
from elastic.train.blame import in_a_collective
from elastic.train.checks.shapes import expect_shapes
from elastic.train.gauges.counters import Counters
from elastic.train.gauges.inventory import memory_by_class
from elastic.train.gauges.meter import Meter
from elastic.train.gauges.own_metrics import Metrics, checked_metrics
from elastic.train.model import Builder, State
from elastic.train.own_faults import Faults
from elastic.train.record import blank_record, fill_record
from elastic.train.terms import CONTRACT, expect_no_means, expect_sum, wrong_count

Loss = Callable[[torch.nn.Module, dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]
"""``loss(model, batch)`` returns a sum over the terms of the microbatch and their number, both scalars; never
a mean.
"""
AGAIN = -1
"""The number of the round, before the first one, that runs a microbatch of another member again."""


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
    """The microbatch whose forward or backward runs, in words, for the report of a failure in the user's
    code.
    """
    meter: Meter = field(default_factory=Meter)
    held_out: Loader | None = None
    """Reads the samples of the validation; None if there is none."""
    shapes: dict[str, list[int]] | None = None
    """The shapes of the first microbatch that this process has computed, if all later ones must have the
    same.
    """
    kind: int = 0
    """A digest of the worker's kind."""
    loop: Callable[[Any], object] | None = None
    """The loop that gets a :class:`~elastic.train.context.Context`: the user's, or our own."""

    def close(self) -> None:
        """Ends the threads that read samples, after the reads that they are busy with."""
        for loader in (self.loader, self.held_out):
            if loader is not None:
                loader.close()


@dataclass
class Share:
    """This member's part of a step, by round: the sums on the device, and the ids of their samples (none in
    an idle round).
    """

    losses: list[torch.Tensor]
    counts: list[torch.Tensor]
    samples: list[tuple[int, ...]]
    squares: torch.Tensor | None = None
    """The squared norm of each tensor of the whole gradient, once the step is prepared: float64 [tensors]."""
    validated: Validated | None = None
    """The validation of the state before the step."""
    own_rate: float | None = None
    """The learning rate by the user's own schedule; None without one."""
    most_loss: float | None = None
    """The largest mean loss with which a microbatch counts, or would count if the run did more than warn;
    None if every microbatch counts.
    """
    unused: frozenset[str] | None = None
    """The trained parameters to which none of this member's microbatches gave a gradient; None before its
    first microbatch.
    """
    keeps: list[torch.Tensor] = field(default_factory=list)
    """A bool on the device for each microbatch, true if it counts; empty if every microbatch counts."""
    ran: torch.Tensor | None = None
    reran: torch.Tensor | None = None
    """The digests of the gradients of this member's first microbatch, and of that of another member, which it
    has run again (``protocol/reruns.py``); None in a step without reruns.
    """


class _FirstError:
    """Keeps the first error of a step's operations, each of which runs in a ``with`` of this object, and
    raises it in every later operation.
    """

    error: BaseException | None = None

    def __enter__(self) -> None:
        if self.error is not None:
            raise self.error

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.error = self.error or error  # one operation may call another


class Step:
    """One step of a member, for the loop that trains: :meth:`run`, or :meth:`backward` for each of
    :meth:`batches`; then :meth:`commit`.

    Once an operation has failed, every later one raises the same error, whatever the loop has made of it.
    Wrong use raises :class:`LoopError`.
    """

    def __init__(
        self,
        session: Session,
        state: State,
        fence: ApplyFence,
        shape: CommitShape,
        number: int,
        boundary: Callable[[], int],
        validated: Validated | None = None,
        done: Callable[[Outcome, Metrics], None] = lambda outcome, metrics: None,
    ) -> None:
        """``boundary()`` returns this member's request for the boundary after the step.  ``validated`` is the
        validation of the state before the step.  ``done`` gets the outcome and the loop's own metrics once
        the step is applied.
        """
        self._session, self._state, self._fence, self.number = session, state, fence, number
        self._boundary, self._done = boundary, done
        self.outcome: Outcome | None = None
        """The outcome of the step, once it is applied."""
        # a schedule of the user's that fails must do so before the commit
        own_rate = own_rate_of(session.job, number)
        self._share = Share(
            [], [], [], validated=validated, own_rate=own_rate, most_loss=state.spikes.most_loss()
        )
        self._rounds, self.begun, self._open = 0, False, False
        self._failure = _FirstError()
        self._shape, device = (
            shape.of(session.cursor.microbatches(number, session.job.microbatch_size)),
            state.world.device,
        )
        session.meter.begin(shape.generation, session.loader.waited_s, device)
        reserve(state, self._shape)
        session.loader.avoid(state.spikes.quarantined, state.spikes.anywhere)
        if session.job.loop:
            state.guard.begin(loop=True)  # the user's code comes next

    def run(self, loss: Loss | None = None) -> None:
        """Runs forward and backward of this member's microbatches with ``loss``, or with that of the job."""
        for batch in self.batches():
            with self._failure:
                self._backward(*loss_of(self._session, self._state.model, batch, loss))

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yields this member's microbatches, on its device.  Forward and :meth:`backward` of each must run
        before the next one is taken.

        The number of microbatches depends on the world.  All members run equally many, so a microbatch may be
        idle, or one of another member that is run again: its gradient counts for nothing.  The loop cannot
        tell which one it is.
        """
        with self._failure:
            self._expect(
                not self.begun,
                "the microbatches are run twice; call step.run() once, or iterate over step.batches() once",
            )
            self.begun = True
            rounds = self._microbatches()
        while True:
            with self._failure:
                self._expect(
                    not self._open,
                    (
                        "a microbatch had no step.backward(loss_sum, count); call it for each of "
                        "step.batches()"
                    ),
                )
                batch = next(rounds, None)
            if batch is None:
                return
            yield batch

    def backward(self, loss: torch.Tensor, count: torch.Tensor | float) -> None:
        """Runs the backward pass of the microbatch that :meth:`batches` gave last; gradients are reduced as
        they come.

        ``loss`` is a sum, and ``count`` the number of its terms.
        """
        with self._failure:
            self._expect(
                self._open, "step.backward() has no microbatch; call it once for each of step.batches()"
            )
            loss, count = expect_sum("step.backward()", (loss, count), self._session.job.model)
            self._backward(loss, count)

    def commit(self, metrics: Mapping[str, float] | None = None) -> Outcome:
        """Commits the step with all other members, applies it, and returns its outcome, which is the same on
        every member.

        ``metrics`` are numbers by name, for the metrics of the run; those of world rank 0 are taken.

        Raises :class:`FencedOff` if the generation is fenced or the lease runs out before the step is
        applied.
        """
        with self._failure:
            self._expect(self.outcome is None, "step.commit() is called twice; call it once")
            self._expect(
                self.begun, "step.commit() before step.run(); run the microbatches of the step first"
            )
            self._expect(
                not self._open and len(self._share.losses) == self._rounds,
                (
                    f"step.commit() after {len(self._share.losses)} of {self._rounds} microbatches; run all "
                    "of step.batches(), without `break`"
                ),
            )
            told = checked_metrics(metrics or {})
            self.outcome = self._commit()
            if self._session.job.loop:
                self._state.guard.begin(loop=True)
            self._done(self.outcome, told)
            return self.outcome

    def _expect(self, right: bool, wrong: str) -> None:
        if not right:
            raise LoopError(f"loop = {self._session.job.loop!r}: step {self.number}: {wrong}")

    @property
    def failed(self) -> BaseException | None:
        """The error with which an operation of the step failed first, or None."""
        return self._failure.error

    def _barred(self) -> bool:
        """Returns whether nothing of this step can be applied any more."""
        return self._fence.member.barred

    def _microbatches(self) -> Iterator[dict[str, torch.Tensor]]:
        session, state, step = self._session, self._state, self.number
        world, job, pace = state.world, session.job, state.world.pace
        compare_tokens(session, state.model)
        if job.loop:
            state.guard.check(given_up=self._barred)
        deal, begins = state.sync.begin_step(self._shape.microbatches), 0
        self._rounds, now = deal.rounds, state.sync.round
        session.counters.at("reads data")
        rounds = session.loader.microbatches(step, world.data_rank, deal)
        if self._shape.rerun_every and self._shape.reruns(step):
            begins = AGAIN
            rounds = chain(session.loader.again(AGAIN, step, self._shape.again_of(world.data_rank)), rounds)
        for round_, index, ids, batch in rounds:
            session.counters.at("computes")
            session.counters["stepping_since_ns"] = session.counters["stepping_since_ns"] or time.time_ns()
            number = 0 if round_ == AGAIN else round_
            state.parameters.begin_round(number, last=round_ + 1 == deal.rounds)
            state.statistics.begin_round(number, deal)
            now.idle, now.again, now.digest = index is None, round_ == AGAIN, None
            state.train()  # a loss may have left it in evaluation mode
            if batch is None:
                batch = session.loader.read(session.cursor.idle_ids(step, job.microbatch_size))
            if job.compile and job.reproducible:
                expect_shapes(session, state.model, batch, ids)
            if round_ == begins:
                state.guard.begin(values=not state.tried)
                for later in range(begins, deal.rounds):
                    for name, value in batch.items():
                        world.reserve(f"{name} {later}", value)
            session.computing = (
                f"step {step}, microbatch {index}, samples {list(ids)}"
                if index is not None
                else f"step {step}, an idle round"
            )
            session.faults.aim(step, state.model, world)
            state.seeds.begin(step, 0 if index is None else index)
            self._index, self._ids, self._open = index, tuple(ids), True
            batch = {name: world.to_device(f"{name} {round_}", value) for name, value in batch.items()}
            pace.marks = [pace.mark()]
            yield batch

    def _backward(self, loss: torch.Tensor, count: torch.Tensor | float) -> None:
        session, state, share, index = self._session, self._state, self._share, self._index
        self._open, pace = False, state.world.pace
        if (marks := pace.marks) is not None:
            marks.append(pace.mark())
            pace.passes.append(marks)
            pace.marks = None
        state.parameters.end_forward()
        now = state.sync.round
        if not now.again:
            state.statistics.add(index)
        if now.again or (share.reran is not None and not share.losses):
            now.digest = torch.zeros((), dtype=torch.int64, device=state.world.device)
        share.losses.append(loss.detach())
        share.counts.append(torch.as_tensor(count, device=state.world.device))
        weight: float | torch.Tensor = 0.0 if index is None else state.optimizer.loss_scale.value
        # the same arithmetic as in :attr:`Outcome.left_out`, so that both find the same microbatches
        if share.most_loss is not None and state.spikes.rule.skips:
            terms = share.counts[-1].double()
            share.keeps.append((share.losses[-1].double() <= share.most_loss * terms) | (terms == 0))
            weight = weight * share.keeps[-1].to(loss.dtype)
        try:
            (loss if isinstance(weight, float) and weight == 1 else loss * weight).backward()
        except RuntimeError as error:
            if state.world.layout.shards > 1:
                tell_of_views(error)
            if state.job.recompute == "selective":
                tell_of_selective(error)
            raise
        state.parameters.end_round()
        if now.again:  # nothing else of the round counts
            share.reran, share.losses, share.counts, share.keeps = now.digest, [], [], []
        elif len(share.losses) == 1:
            share.ran = now.digest
        if index is not None and not now.again:
            share.unused = (
                state.parameters.missing if share.unused is None else share.unused & state.parameters.missing
            )
        if not state.tried or len(share.losses) == self._rounds:
            state.guard.check(given_up=self._barred)
        if session.job.loop and len(share.losses) == self._rounds:
            state.guard.begin(loop=True)
        state.tried = True
        if not now.again:
            share.samples.append(self._ids if index is not None else ())
            session.counters["microbatch"] = len(share.losses)
            session.counters["microbatches_run"] += index is not None
        session.counters.at("reads data")
        session.computing = ""

    def _commit(self) -> Outcome:
        session, state, share, step, shape = self._session, self._state, self._share, self.number, self._shape
        if session.job.loop:
            state.guard.check(given_up=self._barred)
        copied = session.snapshots.settle() if session.snapshots else NO_COPIES
        if session.snapshots is not None and state.shard.home is not None:
            state.next_home = session.snapshots.next_home(state.shard)
        norm = prepare(session, state, self._fence, step, share)
        if session.snapshots is not None and session.job.copies.verify:
            session.snapshots.verify(state.shard)
        if session.meter.first:
            session.meter.held = memory_by_class(state)
        usage = session.meter.usage(session.loader.waited_s, state.world.device, state.world.pace.read())
        order = state.parameters.order.digest() if state.parameters.order is not None else 0
        blank = blank_record(
            shape,
            head_of(shape, state.world.rank, step, self._boundary(), copied, usage, order, session.kind),
            share,
        )
        record = fill_record(state.world.to_device("record", blank), share, norm)
        outcome = commit(session, state, self._fence, shape, step, record, share)
        session.faults.strike("before_update", step, state.world)
        with self._fence.applying(outcome):
            update(session, state, outcome)
        return outcome


def reserve(state: State, shape: CommitShape) -> None:
    """Reserves the host memory of the commit before anything is launched that may hang."""
    if state.world.device.type == "cpu":
        return
    record = torch.empty(shape.fields, dtype=torch.float64)
    state.world.reserve("record", record)
    state.world.reserve("used", torch.empty(len(state.gradient), dtype=torch.uint8))
    state.reserve()
    state.world.reserve(
        TO_HOST, record.new_empty(shape.world * shape.fields + len(state.gradient) * _watches(state))
    )


def _watches(state: State) -> bool:
    """Returns whether the norms of the layers are recorded."""
    return state.job.watch.every > 0


def loss_of(
    session: Session, model: torch.nn.Module, batch: dict[str, torch.Tensor], loss: Loss | None = None
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Returns what the user's loss returns.  Raises :class:`LossError` unless it is (sum, count), two
    scalars.

    ``loss`` takes the place of the job's loss.  Raises :class:`ModelError` if the loss fails with a KeyError
    or a TypeError.
    """
    named = (
        f"loss = {session.job.loss!r}"
        if loss is None
        else (f"the loss {getattr(loss, '__qualname__', loss)!r:.60} of step.run()")
    )
    try:
        returned = (loss or session.loss)(model, batch)
    except (KeyError, TypeError) as error:  # the usual slips in a loss; any other error speaks for itself
        if in_a_collective(error):
            raise  # a peer caused it
        raise ModelError(
            f"{named} failed with {failure(error)}; it gets the model and a batch of {sorted(batch)}, and "
            f"{CONTRACT}"
        ) from error
    return expect_sum(named, returned, session.job.model)


def by_next_token(session: Session) -> bool:
    """Returns whether Elastic's next-token loss alone reads the samples, so that they are known to hold
    tokens.
    """
    return session.loss is next_token and not session.job.loop


def compare_tokens(session: Session, model: torch.nn.Module) -> None:
    """Lets the loaders compare the tokens that they read from now on with the vocabulary of ``model``, if the
    model names one and the samples are known to hold tokens (:func:`by_next_token`).
    """
    known = getattr(model, "vocab", None) if by_next_token(session) else None
    for loader in filter(None, (session.loader, session.held_out)):
        loader.vocab = known if isinstance(known, int) else None


def prepare(session: Session, state: State, fence: ApplyFence, step: int, share: Share) -> torch.Tensor:
    """Reduces over the group what the optimizer needs, and returns the squared norm of the gradient.
    Afterwards this member can apply the step without the other members.
    """
    session.counters.at("commits")
    grads = state.parameters.grads()
    share.squares = squared_norms(grads, state.gradient, state.world)
    norm = tree_sum(share.squares)
    if (scale := state.optimizer.loss_scale.value) != 1:
        norm = norm / scale**2  # in place it would change the square of a single tensor
    if state.optimizer.rule.prepare is not None:
        state.optimizer.prepare(grads, norm, tokens_of(share, state.world), state.world)
    norm = state.statistics.guard(norm)
    state.used = used_anywhere(state, share) if session.job.numerics >= UNUSED_SINCE else None
    session.counters["collective"] = 1
    session.faults.strike("before_commit", step, state.world)
    with fence as member:
        member.prepare(step)
    return norm


def used_anywhere(state: State, share: Share) -> torch.Tensor | None:
    """Returns, for each trained parameter of the whole model, 1 if a microbatch of any member gave it a
    gradient, else 0: uint8, on the device.

    Returns None if this worker is alone and all parameters are used.
    """
    unused = frozenset(state.trained) if share.unused is None else share.unused
    used, alone = state.trained.keys() - unused, state.world.size == 1
    if alone and not unused:
        return None
    mine = torch.ones(len(state.gradient), dtype=torch.uint8)
    if len(used) < len(mine):  # some are unused, or in other stages
        mine = torch.tensor([each.name in used for each in state.gradient], dtype=torch.uint8)
    if alone:
        return mine
    found = state.world.to_device("used", mine)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found


def tokens_of(share: Share, world: World) -> torch.Tensor:
    """Returns the number of tokens of the whole step, which :attr:`Outcome.tokens` will have: a float64
    scalar on the device.
    """
    counts = (
        [count * keep for count, keep in zip(share.counts, share.keeps, strict=True)]
        if share.keeps
        else share.counts
    )
    mine = [count.double() for count, samples in zip(counts, share.samples, strict=True) if samples]
    speaks = world.rank in reporters(world.layout)
    total = (
        torch.stack(mine).sum()
        if mine and speaks
        else torch.zeros((), dtype=torch.float64, device=world.device)
    )
    dist.all_reduce(total)
    return total


def commit(
    session: Session,
    state: State,
    fence: ApplyFence,
    shape: CommitShape,
    step: int,
    record: torch.Tensor,
    share: Share,
) -> Outcome:
    """Performs the one all-gather, and returns the outcome.  The norms of the tensors come to the host in the
    same copy.

    Raises :class:`WorldBroken` or the collective's own error if it does not complete, :class:`BadRecord` if a
    record is invalid, :class:`LossError` if a count is no number of terms, and :class:`ModelError` if members
    ran unlike blocks.
    """
    told = state.sync.gather(record)
    if _watches(state) and share.squares is not None:
        told = torch.cat((told, share.squares))
    raw = state.world.to_host(told, given_up=lambda: fence.member.barred)
    told, squares = raw.split((shape.world * shape.fields, len(raw) - shape.world * shape.fields))
    try:
        outcome = conclude(shape, step, told.numpy().astype("<f8", copy=False).tobytes(), share.validated)
    except BadCount as bad:  # the same one on every member
        named, where = (
            session.job.loop or session.job.loss,
            f"step {step}, microbatch {bad.index}, samples {list(bad.samples)}",
        )
        raise LossError(
            wrong_count(f"{'loop' if session.job.loop else 'loss'} = {named!r}", bad.count, where)
        ) from None
    except Unlike:  # on every member, too
        assert state.parameters.order is not None
        raise ModelError(state.parameters.order.differs()) from None
    expect_no_means(session.job, outcome)
    if state.parameters.order is not None:
        state.parameters.order.committed()
    if share.own_rate is not None:
        outcome = replace(outcome, lr=share.own_rate)
    if not outcome.finite and state.optimizer.loss_scale.shrinks:
        outcome = replace(outcome, rescales=True)
    outcome = state.spikes.judged(outcome, session.cursor.sizes, share.most_loss)
    if len(squares):
        outcome = _with_layers(state, outcome, squares)
    session.counters["collective"] = 2
    return outcome


def _with_layers(state: State, outcome: Outcome, squares: torch.Tensor) -> Outcome:
    """Returns ``outcome`` with the norms of the layers, if they are to be recorded for this step."""
    scale = state.optimizer.loss_scale
    if outcome.step % state.job.watch.every if outcome.finite else scale.shrinks:
        return outcome
    return replace(
        outcome, layers=state.layers.recorded(squares.tolist(), scale.value, finite=outcome.finite)
    )


def update(session: Session, state: State, outcome: Outcome) -> None:
    """Applies a committed step with the prepared gradients.  The caller holds the apply fence."""
    session.counters.at("updates")
    state.parameters.current = False
    state.optimizer.apply(state.parameters.grads(), outcome, state.unused())
    state.statistics.apply(applies=outcome.applies)
    state.spikes.after(outcome)
    session.faults.strike("in_update", outcome.step, state.world)
    if session.snapshots is not None and state.next_home is not None:
        state.move()
        session.snapshots.moved_in(state.shard, Version(outcome.step, outcome.generation))
    state.world.finish()
    state.parameters.forget_grads()
    session.counters["updates_applied"] += 1
    session.counters["step"], session.counters["microbatch"], session.counters["collective"] = (
        outcome.step,
        0,
        0,
    )
