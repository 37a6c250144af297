"""Compares the engine with plain torch on the user's own model, loss and samples, before the first step of a run.

Nobody can list what a module may do.  So a new run builds its model once more in plain torch, where nothing of the engine is: the values
of ``init_weights()``, the loss as it is, gradients by ``backward()``, an optimizer of ``torch.optim``.  Both compute the same two
microbatches from the same values and seeds.  What the engine does otherwise shows as another loss, another gradient, or other values after
an update.

In between plain torch computes one microbatch again after the other one, and then once more.  Another loss, or another value of an
attribute, is state of the model or the loss that no checkpoint has (``remembered.py``).  And no operation may write to a parameter.

The run's own format is compared with float32, within a multiple of its precision, and without dropout, since masks of 16 bits may differ.
Everything is put back afterwards: a run has the same bits with and without its trial.  Compiled code, other layouts than that of one
worker, offloading and compressed activations are not compared; where memory is short, the first layers stand for all.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Hashable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from elastic.config.sections import UNUSED_SINCE
from elastic.data.apart import apart
from elastic.engine import paged
from elastic.engine.axes.base import with_rows
from elastic.engine.dtypes import FORMATS, format_of
from elastic.engine.optim.schedule import learning_rate_of
from elastic.engine.parallelize import aliases_of, sharding_table, tie
from elastic.engine.world import World
from elastic.errors import ElasticError, ModelError, StateChanged
from elastic.ids import Version
from elastic.imports import failure
from elastic.job import Job
from elastic.models.spec import ShardingTable
from elastic.plan.copy_budget import amount
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import Outcome, is_count
from elastic.state.initialise import cut
from elastic.state.node_memory import free_memory
from elastic.train.guards import BUFFER, WRITTEN
from elastic.train.model import BUFFERS, State, about_meta, build_model
from elastic.train.plain import Found, NoDropout, NoWrites, TorchOptimizer, apart_by, moved, near, parts_of, summary_of
from elastic.train.remembered import attributes_of, changed
from elastic.train.step import Session, compare_tokens, loss_of, microbatch_seed, seed_all
from storage.errors import Unavailable

EXACT = 1e-5
"""Largest difference in float32, as a part of the loss or of the norm of a gradient."""
STEPS = {"bf16": ("bf16", 16), "fp16": ("fp16", 32), "fp8": ("fp8 e4m3", 8), "fp8-rowwise": ("fp8 e4m3", 8)}
"""The largest difference in other formats: a format, and the multiple of the distance from 1 to its next larger number."""
SENSITIVE = 4
"""Times that a gradient may be further away than rounding of the weights alone moves it in float32, if that is more than the limit."""
UPDATED = 1e-2
"""Largest difference of the values after two updates, as a part of what these have changed: AdamW divides by small gradients."""
TIMES = 11
"""Bytes that a trial takes for each byte of the parameters: values, gradients and moments of both sides, and copies between them."""
ROOM = 0.5
"""The part of the free memory that they may take; activations are in the rest.  Workers without a GPU share it, since they try at once."""
KEPT = 2
"""Number of layers that stand for all where memory is short."""
Batch = dict[str, Tensor]


def compare_with_torch(session: Session, device: torch.device) -> str:
    """Returns a sentence that says what was compared, and what was not; "" if the job asks for no trial.

    No world may be there.  Raises :class:`ModelError` if the engine gives anything else than plain torch, or if the model or the loss keeps
    state or changes parameters.  Errors that plain torch has, too, are left to the first step.
    """
    if not session.job.trial:
        return ""
    began, trial = time.monotonic(), Trial(session, device)
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
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return f"{said} ({time.monotonic() - began:.1f} s)"


class Trial:
    """One comparison."""

    def __init__(self, session: Session, device: torch.device) -> None:
        job = session.job
        policy = job.recompute if job.recompute != "auto" else "none"
        changes: dict[str, Any] = {"compile": False, "activations": "keep", "recompute": policy, "offload": "none", "offload_folder": ""}
        self.job = job.replace(**changes, offload_buffer_gb=1.0)
        self.session, self.device = replace(session, job=self.job), device
        self.left_out = [name for name, is_set in _others(job) if is_set]
        self.exact = job.precision == "fp32"
        """True if both sides compute in one format."""
        self._updates = ""
        self._at_first: Mapping[str, Hashable] = {}
        self._noted: Mapping[str, Hashable] = {}
        """The attributes of the model in plain torch before its first microbatch, and after that."""
        self.largest = 0.0
        """The largest difference that was found, as a part."""
        self.most = EXACT if self.exact else _steps(job.precision)
        if job.reduction.wire == "bf16":
            self.most = max(self.most, _steps("bf16"))

    def run(self) -> str:
        first, second = self._samples()
        try:
            plain = self._plain()
        except _TooLarge as error:
            return f"not compared with plain torch: {error}"
        except (ElasticError, Unavailable, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the user's code raises it again where it is used
            return f"not compared with plain torch, where the model fails with {failure(error)}"
        try:
            self._remembers(plain, first, second)
        except (ElasticError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return f"not compared with plain torch, where model or loss fail with {failure(error)}"
        world = World.imagined(Layout(), self.device)  # which opens no communication library
        try:
            self._compare(plain, world, first, second)
        finally:
            world.close()
        said = f"compared with plain torch on 2 microbatches: loss, gradients{self._updates} agree to {self.largest:.1e}"
        return f"{said}; not compared: {', '.join(self.left_out)}" if self.left_out else said

    def _samples(self) -> tuple[Batch, Batch]:
        """Returns the first microbatch, and the second one of that step, or the first one backwards."""
        session, job = self.session, self.job
        step = session.cursor.batches.since + 1
        first = session.loader.read(session.cursor.some_ids(job.microbatch_size))
        if session.cursor.microbatches(step, job.microbatch_size) > 1 and not job.compile:
            second = session.loader.read(session.cursor.microbatch_ids(step, 1, job.microbatch_size))
        else:
            second = {name: value.flip(0) for name, value in first.items()}
        return first, second

    # ---- plain torch

    def _plain(self) -> nn.Module:
        """Returns the model in plain torch, with the values of ``init_weights()``."""
        job, session = self.job, self.session
        blueprint = build_model(job, session.builder)
        size = sum(each.nbytes for each in blueprint.parameters())
        if TIMES * size <= (room := _room(self.device, job)):
            with paged.seeded(job.seed), torch.device(self.device), torch.no_grad():
                model: nn.Module = session.builder(**job.model_args)
                model.init_weights()  # type: ignore[operator]
            paged.refuse_other_than_values(paged.facts_of(blueprint), model)
            return model
        builder = session.builder

        def shortened(**args: Any) -> nn.Module:
            model: nn.Module = builder(**args)
            _shorten(model)
            return model

        self.session = session = replace(session, builder=shortened)
        model, layers = build_model(job, shortened), len(sharding_table(blueprint).blocks)
        size = sum(each.nbytes for each in model.parameters())
        if layers <= KEPT or TIMES * size > room:
            raise _TooLarge(f"both sides need {amount(TIMES * size)}, and {amount(int(room))} are for that")
        self.left_out.append(f"{layers - KEPT} of {layers} layers, since memory is short")
        tied = aliases_of(model)
        model.to_empty(device=self.device)
        tie(model, tied)
        there = {**dict(model.named_parameters()), **dict(model.named_buffers())}

        def keep(name: str, whole: Tensor) -> None:
            there[name].data.copy_(whole)

        with paged.seeded(job.seed):
            paged.initialise(lambda: shortened(**job.model_args), self.device, job.seed, keep, lambda name, nbytes: None, lambda: None)
        return model

    def _plainly(self, model: nn.Module, batch: Batch, number: int, *, watch: bool = False) -> Found:
        """Computes a microbatch in plain torch; with ``watch`` no operation may write to a parameter."""
        for parameter in model.parameters():
            parameter.grad = None
        model.train()
        with self._alike(), NoWrites(model, self.job.model) if watch else nullcontext():
            loss, count = self._loss(model, batch, number)
            loss.backward()
        grads = {name: each.grad for name, each in model.named_parameters() if each.requires_grad and each.grad is not None}
        if sparse := next((name for name, each in grads.items() if each.layout is not torch.strided), ""):
            raise ModelError(
                f"the gradient of {sparse!r} of {self.job.model!r} is sparse, and sparse gradients cannot be summed in a fixed order; "
                f"leave out sparse=True where the model calls torch.nn.functional.embedding"
            )
        return Found(float(loss.detach()), float(count), grads)

    def _loss(self, model: nn.Module, batch: Batch, number: int) -> tuple[Tensor, Tensor | float]:
        seed_all(microbatch_seed(self.job.seed, 1, number), self.device)
        there = {name: value.to(self.device, copy=True) for name, value in batch.items()}
        try:
            return loss_of(self.session, model, there)
        except StateChanged:
            raise
        except ElasticError as error:  # the model or the loss breaks its contract, and that is told where it is used
            raise _Theirs(str(error)) from error

    def _alike(self) -> Any:
        """Both sides drop the same values, or none."""
        return nullcontext() if self.exact else NoDropout()

    def _remembers(self, model: nn.Module, first: Batch, second: Batch) -> None:
        """Raises :class:`ModelError` if plain torch computes the first microbatch otherwise after another one."""
        job, exact = self.job, self.job.reproducible
        storages = {name: (id(each), each.untyped_storage()._cdata) for name, each in model.named_parameters()}
        self._at_first = attributes_of(model, exact=exact)
        before = summary_of(self._watched(model, first))
        noted = self._noted = attributes_of(model, exact=exact)
        self._plainly(model, second, 1)
        after = summary_of(self._plainly(model, first, 0))
        since = attributes_of(model, exact=exact)
        self._plainly(model, first, 0)
        last = attributes_of(model, exact=exact)
        for name, each in model.named_parameters():
            if storages.get(name) != (id(each), each.untyped_storage()._cdata):
                raise StateChanged(WRITTEN.format(name=name, model=job.model))
        if name := changed(since, last):
            if name in dict(model.named_buffers()):
                raise StateChanged(BUFFER.format(name=name, model=job.model))
            raise ModelError(
                f"forward or the loss changes {name!r} of {job.model!r} with each microbatch: its value would depend on which worker "
                f"computed which microbatch, and is in no checkpoint.  Compute it anew in each forward pass; draw random numbers from the "
                f"default generators of torch, Python and numpy, which are seeded for each microbatch"
            )
        same = before == after if exact else all(near(a, b, 1e-3) for a, b in zip(before, after, strict=True))
        if not same:
            kept = changed(noted, since)
            what = f"forward or the loss has set {kept!r}" if kept else "something outside of the model keeps a value"
            raise ModelError(
                f"model = {job.model!r} with loss = {job.loss!r}: plain torch computes the first microbatch otherwise once another one was "
                f"computed (loss {before[0]:g}, then {after[0]:g}): {what}.  The result would depend on which worker computed which "
                f"microbatch; let each depend on its samples and the weights alone"
            )

    def _watched(self, model: nn.Module, batch: Batch) -> Found:
        try:
            return self._plainly(model, batch, 0, watch=True)
        except (ElasticError, torch.OutOfMemoryError):
            raise
        except Exception:  # some operations of torch cannot be watched
            return self._plainly(model, batch, 0)

    # ---- the engine

    def _compare(self, model: nn.Module, world: World, first: Batch, second: Batch) -> None:
        """Raises :class:`ModelError` unless the engine has the loss, the gradients and the updates of plain torch."""
        session = self.session
        state = State(self.job, session.builder, session.rule, world, Version(0, 0))
        self._fill(state, model)
        compare_tokens(session, state.model)
        for number, batch in ((1, second), (0, first)):  # plain torch began with the other one
            plain = self._plainly(model, batch, number)
            self._agree(model, batch, number, plain, self._by_the_engine(state, batch, number))
        if (optimizer := TorchOptimizer.of(self.job, model) if self.exact else None) is None:
            self.left_out.append("updates")
            return
        updates = sum(self._update(state, model, optimizer, batch, number) for number, batch in ((0, first), (1, second)))
        self._updates = " and two updates" if updates == 2 else ""

    def _update(self, state: State, model: nn.Module, optimizer: TorchOptimizer, batch: Batch, number: int) -> bool:
        """Updates both by the gradient of a microbatch.  Returns False if there is nothing to update by.

        Raises :class:`ModelError` if a parameter has another value than in plain torch.
        """
        plain, ours = self._plainly(model, batch, number), self._by_the_engine(state, batch, number)
        step, squares = max(self.job.steps // 2, 1), sum(float(each.double().square().sum()) for each in ours.grads.values())
        skipped = self.job.numerics < UNUSED_SINCE and state.parameters.missing
        if skipped or not plain.count or not is_count(plain.count) or not math.isfinite(squares) or not learning_rate_of(self.job, step):
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
                            f"{tensor.name!r} of model = {self.job.model!r} is there on the meta device, and not on {self.device}"
                        )
                    cut(state, tensor, values[tensor.name].detach())

    def _by_the_engine(self, state: State, batch: Batch, number: int) -> Found:
        try:
            return self._in_the_engine(state, batch, number)
        except (ElasticError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the user's code may raise anything
            mend = about_meta(error, state.model) or "the sentences in the guide, at “Your own code”, say what a module may do"
            raise ModelError(
                f"model = {self.job.model!r} with loss = {self.job.loss!r} computes a microbatch in plain torch, and failed in the engine "
                f"with {failure(error)}: {mend}"
            ) from error

    def _in_the_engine(self, state: State, batch: Batch, number: int) -> Found:
        scale, deal = state.optimizer.loss_scale.value, state.sync.begin_step(1)
        while True:
            state.train()
            state.parameters.begin_round(0, last=True)
            state.guard.begin(values=True)
            state.statistics.begin_round(0, deal)
            with self._alike():
                loss, count = self._loss(state.model, batch, number)
                state.parameters.end_forward()
                (loss * scale if scale != 1 else loss).backward()
            state.parameters.end_round()
            state.guard.check()
            grads = {name: each for name, each in state.parameters.grads().items() if name not in state.parameters.missing}
            if scale <= 1 or all(bool(torch.isfinite(each).all()) for each in grads.values()):
                break
            scale /= 16  # as the run would find out in its first steps
        if scale != 1:
            grads = {name: each / scale for name, each in grads.items()}
        return Found(float(loss.detach()), float(count), grads)

    def _agree(self, model: nn.Module, batch: Batch, number: int, plain: Found, ours: Found) -> None:
        """Raises :class:`ModelError` unless both have the same count, loss and gradients."""
        named = f"model = {self.job.model!r} with loss = {self.job.loss!r}"
        if name := min(plain.grads.keys() ^ ours.grads.keys(), default=""):
            raise ModelError(f"{named}: {name!r} has a gradient {'in plain torch' if name in plain.grads else 'in the engine'} alone")
        apart_, parts, wrong = apart_by(plain.loss, ours.loss), parts_of(plain.grads, ours.grads), ""
        furthest = max(parts, key=parts.__getitem__, default="")
        if plain.count != ours.count and plain.count == plain.count:  # what is no number is another matter
            wrong = f"the count of a microbatch is {plain.count:g} in plain torch, and {ours.count:g} in the engine"
        elif max(apart_, parts.get(furthest, 0.0)) > self.most:
            kept = replace(plain, grads={name: each.clone() for name, each in plain.grads.items()})
            loss_by, by = self._by_rounding(model, batch, number, kept)
            over = {name: part for name, part in parts.items() if part > max(self.most, SENSITIVE * by[name])}
            if apart_ > max(self.most, SENSITIVE * loss_by):
                wrong = f"a microbatch loses {plain.loss:.8g} in plain torch, and {ours.loss:.8g} in the engine"
            elif over:
                name = max(over, key=over.__getitem__)
                wrong = f"the gradient of {name!r} in the engine is {over[name]:.2g} of its norm away from that of plain torch"
            plain = kept
        if wrong:
            raise ModelError(f"{named}: {wrong}; {self._why(model, batch, number, plain)}")
        self.largest = max(self.largest, apart_, parts.get(furthest, 0.0))

    def _by_rounding(self, model: nn.Module, batch: Batch, number: int, plain: Found) -> tuple[float, dict[str, float]]:
        """Returns how far the loss and each gradient move in float32 if the weights alone are rounded to the format."""
        before = [each.detach().clone() for each in model.parameters()]
        with torch.no_grad():
            for each in model.parameters():
                each.copy_(each.to(self._dtype) if not self.exact else moved(each))
        rounded = self._plainly(model, batch, number)
        with torch.no_grad():
            for each, value in zip(model.parameters(), before, strict=True):
                each.copy_(value)
        return apart_by(plain.loss, rounded.loss), parts_of(plain.grads, rounded.grads)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float16 if self.job.precision == "fp16" else torch.bfloat16

    def _why(self, model: nn.Module, batch: Batch, number: int, plain: Found) -> str:
        """Returns what may be the reason: inputs that are rounded, or something that nobody has thought of."""
        if not self.exact:
            plain = replace(plain, grads={name: each.clone() for name, each in plain.grads.items()})
            for name, value in batch.items():
                if value.is_floating_point():
                    rounded = self._plainly(model, {**batch, name: value.to(self._dtype).to(value.dtype)}, number)
                    differs = rounded.count != plain.count or apart_by(plain.loss, rounded.loss) > self.most / 2
                    if differs or max(parts_of(plain.grads, rounded.grads).values(), default=0.0) > self.most / 2:
                        return _rounded(name, self.job)
            return (
                f"with precision = {self.job.precision!r} floating-point inputs of the model and of its blocks are rounded, and so is what "
                f"layers compute: set casts_inputs = False on the model and cast what its layers need, compute sensitive parts in float32, "
                f"or set precision = 'fp32'.  If that is not the reason, trial = false goes on without a trial"
            )
        if name := changed(self._at_first, self._noted):
            return (
                f"{name!r} is set by the first microbatch, and the engine has computed another one first; let it depend on the weights and "
                f"the shapes of samples alone.  If that is not the reason, trial = false goes on without a trial"
            )
        return (
            "the module does something that the engine does not do as torch does; the guide says what a module may do (“Your own code”).  "
            "If you know that the difference is right, trial = false goes on without a trial"
        )

    def _same_values(self, state: State, model: nn.Module, before: Mapping[str, Tensor], plain: Found) -> None:
        """Raises :class:`ModelError` if an update gives a parameter other values than plain torch."""
        largest = max((float(each.norm()) / each.numel() ** 0.5 for each in plain.grads.values()), default=0.0)
        for name, parameter in model.named_parameters():
            ours = state.parameters.parts[name].view(-1).to(parameter.dtype)
            grad = plain.grads.get(name)
            noise = grad is not None and float(grad.norm()) / grad.numel() ** 0.5 < 1e-4 * largest  # AdamW makes much of it
            moved = float((parameter.detach() - before[name]).float().norm())
            apart_ = float((ours - parameter.detach().reshape(-1)).float().norm())
            if not noise and not apart_ <= UPDATED * moved + 1e-6 * float(with_rows(parameter.detach()).float().norm()):
                raise ModelError(
                    f"model = {self.job.model!r}: an update by optim.kind = {self.job.optim.kind!r} leaves {name!r} at {apart_:.2g} from "
                    f"where torch.optim leaves it, which has moved it by {moved:.2g}; this is a fault of Elastic.  trial = false goes on "
                    f"without a trial"
                )


class _Theirs(Exception):
    """The model or the loss fails in plain torch, too."""


class _TooLarge(Exception):
    """Both sides do not fit the memory."""


def _others(job: Job) -> Iterator[tuple[str, bool]]:
    """Yields what a trial leaves out, and whether the job has it."""
    yield "compiled code", job.compile
    yield f"activations = {job.activations!r}", job.activations != "keep"
    yield f"offload = {job.offload!r}", job.offloads
    yield "worlds of several workers", job.workers.max > 1
    yield "dropout", job.precision != "fp32"


def _steps(precision: str) -> float:
    name, multiple = STEPS[precision]
    return multiple * format_of(FORMATS[name]).eps


def _room(device: torch.device, job: Job) -> float:
    """Returns the bytes that the values, gradients and moments of both sides may take."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return ROOM * torch.cuda.mem_get_info(device)[0]
    return ROOM * free_memory()[0] / min(job.workers.max, os.cpu_count() or 1)


def _shorten(model: nn.Module) -> None:
    """Leaves the first ``KEPT`` layers of the list that has the blocks of ``model``."""
    blocks = sharding_table(model).blocks
    for name in {block.rpartition(".")[0] for block in blocks}:
        layers = model.get_submodule(name)
        if not isinstance(layers, nn.ModuleList):
            raise _TooLarge(f"both sides do not fit the memory, and {name!r} is no list that can be made shorter")
        del layers[KEPT:]
    names = {name for name, _ in model.named_modules()}
    table = ShardingTable(tuple(block for block in blocks if block in names))
    if hasattr(model, "sharding"):
        model.sharding = lambda: table  # type: ignore[assignment]  # its own may name layers that are gone


def _rounded(name: str, job: Job) -> str:
    return (
        f"{name!r} of the batch is rounded to the format of precision = {job.precision!r} on its way into the model (in bf16 999 becomes "
        f"1000).  Give it as a whole number, or set casts_inputs = False on the model and cast there what layers need"
    )
