"""Compares the engine with plain torch on the user's own model, loss and samples, before the first step of a
run.

No list can name everything that a module may do.  So a new run builds its model once more in plain torch,
without the engine: the values of ``init_weights()``, the loss as it is, gradients by ``backward()``, an
optimizer of ``torch.optim``.  Plain torch and the engine compute the same two microbatches from the same
values and seeds.  If the engine computes differently, the loss, a gradient, or the values after an update
differ.

In between, plain torch computes the first microbatch again after the second, and then once more.  If the loss
or an attribute changes, the model or the loss keeps state that is in no checkpoint (``remembered.py``).
Besides, no operation may write to a parameter.

The run's own format is compared with float32, within a multiple of its precision, and without dropout, since
masks of 16 bits may differ.  Everything is put back afterwards: a run has the same bits with and without its
trial.  Compiled code, other layouts than that of one worker, offloading and compressed activations are not
compared; where memory is short, the first layers stand for all.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from elastic.code.imports import failure
from elastic.config.sections import UNUSED_SINCE
from elastic.data.apart import apart
from elastic.engine.optim.schedule import learning_rate_of
from elastic.engine.world import World
from elastic.errors import ElasticError, ModelError
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import Outcome, is_count
from elastic.train.checks.differences import ROUNDED, apart_by, moved, parts_of
from elastic.train.checks.plain import (
    Batch,
    PlainResult,
    PlainSide,
    Theirs,
    TooLarge,
    TorchOptimizer,
    WatchedSeeds,
)
from elastic.train.checks.remembered import changed
from elastic.train.initialise import cut
from elastic.train.model import BUFFERS, State, build_model, remedy
from elastic.train.step import Session, compare_tokens
from storage.errors import Unavailable

TIMES_MOVED = 4
"""Number of ways in which weights are rounded to find out how sensitive a model is: only some of them change
a choice among experts.
"""
OTHER = 2.0**-6
"""Relative change of the weights with which the engine computes its first microbatch."""
SENSITIVE = 4
"""Factor on the change that rounding of the weights alone causes (:meth:`Trial._by_rounding`): a loss or a
gradient may differ by this product, if it is more than the limit.
"""
UPDATED = 1e-2
"""Largest difference of the values after an update, as a part of the change by that update: AdamW divides by
small gradients.
"""


def compare_with_torch(
    session: Session, device: torch.device, tell: Callable[[str], None] = lambda doing: None
) -> str:
    """Returns a sentence that says what was compared, and what was not; "" if the job asks for no trial.
    ``tell`` is called with what the trial does next.

    The process must be in no world.  Raises :class:`ModelError` if the engine's results differ from those of
    plain torch, or if the model or the loss keeps state or changes parameters.  An error that also occurs in
    plain torch is left to the first step.
    """
    if not session.job.trial:
        return ""
    began, trial = time.monotonic(), Trial(session, device, tell)
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        with apart(session.job.seed):
            said = trial.run()
    except torch.OutOfMemoryError:
        said = "not compared with plain torch: the memory of the device is too small for both"
    finally:
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        del trial
        gc.collect()
        torch.cuda.empty_cache()
    return f"{said} ({time.monotonic() - began:.1f} s)"


class Trial(PlainSide):
    """One comparison."""

    def run(self) -> str:
        """Returns the sentence of :func:`compare_with_torch`, and raises its errors."""
        blueprint = build_model(self.job, self.session.builder)
        compare_tokens(self.session, blueprint)
        first, second = self._samples()
        try:
            plain = self._plain(blueprint)
            self.seeds = WatchedSeeds(plain, self.job, self.device)
            self._remembers(plain, first, second)
        except (Theirs, TooLarge) as error:
            return f"not compared with plain torch: {error}"
        except (ElasticError, Unavailable, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the user's code raises it again where it is used
            return f"not compared with plain torch, where model or loss fail with {failure(error)}"
        self.tell("computes in the engine")
        world = World.imagined(Layout(), self.device)  # which opens no communication library
        try:
            self._compare(plain, world, first, second)
        finally:
            world.close()
        if self._skipped:
            which = "both microbatches" if self._skipped == 2 else "one of two microbatches"
            self.left_out.append(
                f"loss and gradients of {which}, since the model draws random numbers, and torch draws "
                "other numbers in 16 bits"
            )
        if self._skipped == 2:
            return f"not compared with plain torch: {', '.join(self.left_out)}"
        said = (
            f"compared with plain torch on 2 microbatches: loss, gradients{self._updates} agree to "
            f"{self.largest:.1e}"
        )
        return f"{said}; not compared: {', '.join(self.left_out)}" if self.left_out else said

    # ---- the engine

    def _compare(self, model: nn.Module, world: World, first: Batch, second: Batch) -> None:
        """Raises :class:`ModelError` unless the engine has the loss, the gradients and the updates of plain
        torch.
        """
        session = self.session
        state = State(self.job, session.builder, session.rule, world, Version(0, 0))
        self._fill(state, model)
        compare_tokens(session, state.model)
        with torch.no_grad():
            for part in state.parameters.parts.values():
                if part.is_floating_point():
                    part.mul_(1 + OTHER)
        # a model that keeps a value from its first weights keeps that of other weights here
        self._by_the_engine(state, second, 1)
        self._fill(state, model)
        for number, batch in ((1, second), (0, first)):  # plain torch began with the other one
            plain = self._plainly(model, batch, number)
            self._agree(model, batch, number, plain, self._by_the_engine(state, batch, number))
        if (optimizer := TorchOptimizer.of(self.job, model) if self.exact else None) is None:
            self.left_out.append("updates")
            return
        updates = sum(
            self._update(state, model, optimizer, batch, number)
            for number, batch in ((0, first), (1, second))
        )
        self._updates = " and two updates" if updates == 2 else ""

    def _update(
        self, state: State, model: nn.Module, optimizer: TorchOptimizer, batch: Batch, number: int
    ) -> bool:
        """Updates the engine and plain torch by the gradient of a microbatch.  Returns False if no update is
        possible.

        Raises :class:`ModelError` if a parameter has another value than in plain torch.
        """
        plain, ours = self._plainly(model, batch, number), self._by_the_engine(state, batch, number)
        step, squares = (
            max(self.job.steps // 2, 1),
            sum(float(each.norm()) ** 2 for each in ours.grads.values()),
        )
        skipped = self.job.numerics < UNUSED_SINCE and state.parameters.missing
        if (
            skipped
            or not plain.count
            or not is_count(plain.count)
            or not math.isfinite(squares)
            or not learning_rate_of(self.job, step)
        ):
            return False
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        outcome = Outcome(step, 1, squares, (ours.loss,), (int(ours.count),), ((0,),), finite=True)
        lr = state.optimizer.apply(state.parameters.grads(), outcome, state.parameters.missing)
        optimizer.step(lr, plain)
        self._same_values(state, model, before, plain)
        self._fill(state, model)
        return True

    def _fill(self, state: State, model: nn.Module) -> None:
        """Gives the state the values of plain torch."""
        state.parameters.current = False
        values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for tensor in state.tensors:
                if tensor.kind in ("parameter", *BUFFERS):
                    if tensor.name not in values:
                        raise ModelError(
                            f"{tensor.name!r} of model = {self.job.model!r} exists on the meta device, "
                            f"but not on {self.device}; build the same model on every device"
                        )
                    cut(state, tensor, values[tensor.name].detach())

    def _by_the_engine(self, state: State, batch: Batch, number: int) -> PlainResult:
        try:
            return self._in_the_engine(state, batch, number)
        except (ElasticError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the user's code may raise anything
            mend = (
                remedy(error, state.model)
                or self._about_formats(error)
                or "the guide says what a module may do (“Your own code”)"
            )
            raise ModelError(
                f"model = {self.job.model!r} with loss = {self.job.loss!r} can compute a microbatch in "
                f"plain torch, but failed in the engine with {failure(error)}: {mend}"
            ) from error

    def _about_formats(self, error: Exception) -> str:
        """Returns what to do about an error of two formats that meet, in 16 bits; "" for any other error."""
        if self.exact or not any(word in str(error).lower() for word in ("dtype", "type (", "scalar type")):
            return ""
        return (
            f"precision = {self.job.precision!r} is no autocast: weights have this format, and "
            "floating-point inputs are cast only when the model itself or one of its blocks is "
            "called.  Cast the tensors that forward makes (x.to(self.weight.dtype)), call the whole "
            "model, not a part of it, or set precision = 'fp32' and use torch.autocast in the loss"
        )

    def _in_the_engine(self, state: State, batch: Batch, number: int) -> PlainResult:
        scale, deal = state.optimizer.loss_scale.value, state.sync.begin_step(1)
        while True:
            state.train()
            state.parameters.begin_round(0, last=True)
            state.guard.begin(values=True)
            state.statistics.begin_round(0, deal)
            with self._alike():
                loss, count = self._loss(state.model, state.seeds, batch, number)
                state.parameters.end_forward()
                state.statistics.add(0)
                (loss * scale if scale != 1 else loss).backward()
            state.parameters.end_round()
            state.guard.check()
            grads = {
                name: each
                for name, each in state.parameters.grads().items()
                if name not in state.parameters.missing
            }
            if scale <= 1 or all(bool(torch.isfinite(each).all()) for each in grads.values()):
                break
            scale /= 16  # as the loss scale of a run shrinks in its first steps
        if scale != 1:
            grads = {name: each / scale for name, each in grads.items()}
        return PlainResult(float(loss.detach()), float(count), grads)

    def _agree(
        self, model: nn.Module, batch: Batch, number: int, plain: PlainResult, ours: PlainResult
    ) -> None:
        """Raises :class:`ModelError` unless engine and plain torch have the same count, loss and gradients,
        within the limits.
        """
        named = f"model = {self.job.model!r} with loss = {self.job.loss!r}"
        if name := min(plain.grads.keys() ^ ours.grads.keys(), default=""):
            raise ModelError(
                f"{named}: {name!r} has a gradient "
                f"{'in plain torch' if name in plain.grads else 'in the engine'} alone"
            )
        apart_, parts, wrong = apart_by(plain.loss, ours.loss), parts_of(plain.grads, ours.grads), ""
        furthest = max(parts, key=parts.__getitem__, default="")
        if plain.count != ours.count and plain.count == plain.count:  # a NaN count is an error of its own
            wrong = (
                f"the count of a microbatch is {plain.count:g} in plain torch, and {ours.count:g} in the "
                "engine"
            )
        elif max(apart_, parts.get(furthest, 0.0)) > self.most:
            kept = replace(plain, grads={name: each.clone() for name, each in plain.grads.items()})
            loss_by, by = self._by_rounding(model, batch, number, kept)
            over = {name: part for name, part in parts.items() if part > max(self.most, SENSITIVE * by[name])}
            if apart_ > max(self.most, SENSITIVE * loss_by):
                wrong = (
                    f"a microbatch loses {plain.loss:.8g} in plain torch, and {ours.loss:.8g} in the engine"
                )
            elif over:
                name = max(over, key=over.__getitem__)
                wrong = (
                    f"the gradient of {name!r} in the engine is {over[name]:.2g} of its norm away from that "
                    "of plain torch"
                )
            plain = kept
        if wrong and self.seeds.found and not self.exact:  # torch draws other numbers in 16 bits
            self._skipped += 1
            return
        if wrong:
            raise ModelError(f"{named}: {wrong}; {self._why(model, batch, number, plain)}")
        self.largest = max(self.largest, apart_, parts.get(furthest, 0.0))

    def _by_rounding(
        self, model: nn.Module, batch: Batch, number: int, plain: PlainResult
    ) -> tuple[float, dict[str, float]]:
        """Returns how far the loss and each gradient move at most, in float32, if the weights alone are
        rounded, in several ways.
        """
        before = [each.detach().clone() for each in model.parameters()]
        loss, parts = 0.0, dict.fromkeys(plain.grads, 0.0)
        for kind in range(TIMES_MOVED):
            with torch.no_grad():
                for each, value in zip(model.parameters(), before, strict=True):
                    rounded = (
                        value.to(self._dtype)
                        if not self.exact and not kind
                        else moved(value, self._moves, kind)
                    )
                    each.copy_(rounded)
            other = self._plainly(model, batch, number)
            loss = max(loss, apart_by(plain.loss, other.loss))
            by = (
                parts_of(plain.grads, other.grads)
                if other.grads.keys() == plain.grads.keys()
                else dict.fromkeys(parts, math.inf)
            )
            parts = {name: max(part, by[name]) for name, part in parts.items()}
        with torch.no_grad():
            for each, value in zip(model.parameters(), before, strict=True):
                each.copy_(value)
        return loss, parts

    @property
    def _moves(self) -> float:
        """The relative change of a weight by rounding; in float32 by that of a few operations."""
        return ROUNDED if self.exact else torch.finfo(self._dtype).eps / 2

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float16 if self.job.precision == "fp16" else torch.bfloat16

    def _why(self, model: nn.Module, batch: Batch, number: int, plain: PlainResult) -> str:
        """Returns the likely reason of a difference, and what to do: rounding of an input, rounding
        elsewhere, an attribute that the first microbatch set, or an unknown one.
        """
        if not self.exact:
            plain = replace(plain, grads={name: each.clone() for name, each in plain.grads.items()})
            for name, value in batch.items():
                if value.is_floating_point():
                    rounded = self._plainly(
                        model, {**batch, name: value.to(self._dtype).to(value.dtype)}, number
                    )
                    differs = (
                        rounded.count != plain.count or apart_by(plain.loss, rounded.loss) > self.most / 2
                    )
                    if (
                        differs
                        or max(parts_of(plain.grads, rounded.grads).values(), default=0.0) > self.most / 2
                    ):
                        return _rounded(name, self.job)
            return (
                f"precision = {self.job.precision!r} rounds weights, inputs of the model and of its blocks, "
                "and what they compute.  Do in float32 what is sensitive to that, first of all choices "
                "(argmax, top-k, routing), as F.linear(x.float(), w.float()); set casts_inputs = False on "
                "a model whose inputs must stay as they are; or set precision = 'fp32'.  If that is not "
                "the reason, trial = false goes on without a trial"
            )
        if name := changed(self._at_first, self._noted):
            return (
                f"{name!r} is set by the first microbatch that a model computes, and the engine has begun "
                "with other samples and weights; let it depend on the shapes of samples alone, or set it "
                "in init_weights().  If that is not the reason, trial = false goes on without a trial"
            )
        return (
            "the module does something that the engine does not do as torch does; the guide says what a "
            "module may do (“Your own code”).  If you know that the difference is right, trial = false goes "
            "on without a trial"
        )

    def _same_values(
        self, state: State, model: nn.Module, before: Mapping[str, Tensor], plain: PlainResult
    ) -> None:
        """Raises :class:`ModelError` if an update gives a parameter other values than plain torch."""
        largest = max(
            (float(each.norm()) / each.numel() ** 0.5 for each in plain.grads.values()), default=0.0
        )
        for name, parameter in model.named_parameters():
            ours = state.parameters.parts[name].view(-1).to(parameter.dtype)
            grad, theirs, was = (
                plain.grads.get(name),
                parameter.detach().reshape(-1),
                before[name].reshape(-1),
            )
            if grad is not None:  # AdamW enlarges rounding, and that of two parts that cancel
                sure = grad.reshape(-1).abs() >= max(1e-4, self.most) * largest
                ours, theirs, was = ours[sure], theirs[sure], was[sure]
            moved_ = float((theirs - was).float().norm())
            apart_ = float((ours - theirs).float().norm())
            if not apart_ <= UPDATED * moved_ + 1e-6 * float(theirs.float().norm()):
                raise ModelError(
                    f"model = {self.job.model!r}: an update by optim.kind = {self.job.optim.kind!r} "
                    f"differs from torch.optim: torch.optim moves {name!r} by {moved_:.2g}, and the "
                    f"two results are {apart_:.2g} apart; this is a bug in Elastic.  trial = false "
                    "goes on without a trial"
                )


def _rounded(name: str, job: Job) -> str:
    return (
        f"{name!r} of the batch is rounded to the format of precision = {job.precision!r} before the "
        "model gets it (in bf16 999 becomes 1000).  Give whole numbers as an integer tensor, or set "
        "casts_inputs = False on the model and cast the inputs of layers in forward"
    )
