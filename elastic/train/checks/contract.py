"""Tries the user's loss on the run's first microbatch, before the first step: on the whole of it, and on its
halves.

A loss that returns a mean also trains, so nobody notices that it learns something else with each microbatch
size.  The halves show it: for a sum, the counts of the halves add up to the count of the whole, and so do the
losses.  A loss that compares the samples of a microbatch with each other is an exception: it has more terms
in the whole than in the halves.  So only two faults are refused: fewer terms in the whole than in the halves
together, as with a constant count; and a loss that is the mean of the losses of the halves.

Dropout and the statistics of microbatches are off.  A loss that draws random numbers is not judged.
"""

from __future__ import annotations

import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from math import isfinite
from typing import Any

import torch

from elastic.code.imports import failure
from elastic.engine.batch_norm import about_one_value
from elastic.errors import DataError, ElasticError, LossError, ModelError
from elastic.protocol.commit_record import is_count
from elastic.train.model import State, remedy
from elastic.train.step import Session, compare_tokens, loss_of
from elastic.train.terms import CONTRACT, wrong_count

CLOSE = 1e-2
"""Largest relative difference at which a loss still counts as the mean of the losses of its halves: bf16
rounds to 0.4%.
"""
OutOfMemory = torch.OutOfMemoryError
"""The error of a device that is too small, which is nobody's mistake."""
FAR = 0.1
"""Relative difference up to which a loss still counts as the sum of the losses of its halves: the mean is
half of the sum.
"""


def check_loss(session: Session, state: State, *, initialised: bool = False) -> None:
    """Tries data, model and loss, and changes nothing.  It must not be called between forward and backward.

    ``initialised`` says that the weights are those with which the run begins.  Raises :class:`DataError` if
    the samples are not the same when they are read again, :class:`ModelError` if the model or the loss fails
    with a microbatch, and :class:`LossError` if the loss is certainly no sum.

    It must run in a world without other members, which an error in here would leave waiting.  An error of the
    user's code with another number of samples is only printed.
    """
    compare_tokens(session, state.model)
    batch = _read(session)
    with torch.no_grad(), without_compiling():
        state.model.eval()
        state.parameters.begin_round(0, last=True)
        state.guard.begin()
        try:
            found = _tried(session, state, batch)
        except OutOfMemory:
            raise
        # the user's code may raise anything; a loss that differentiates cannot be tried without gradients
        except Exception:
            found = None
        if found is None:
            _try_with_gradients(session, state, batch)
            return
        loss, count = found
        if initialised and not isfinite(loss):
            raise LossError(
                f"loss = {session.job.loss!r}: with the weights of init_weights() the first microbatch "
                f"loses {loss:g}; correct the loss, the model's init_weights() or the samples"
            )
        if not count and loss and isfinite(loss):
            raise LossError(
                f"loss = {session.job.loss!r}: the first microbatch loses {loss:g}, and the count is 0; "
                f"{CONTRACT}"
            )
        try:
            _check(session, state, batch)
        except LossError:
            raise
        except Exception:  # a boundary: the user's code need not know other sizes than that of a microbatch
            print(f"the loss was not tried on halves of a microbatch:\n{traceback.format_exc()}", flush=True)
        _check_end_of_validation(session, state)
        state.guard.check()


def _check_end_of_validation(session: Session, state: State) -> None:
    """Raises :class:`ModelError` if the model or the loss fails with the fewer samples that end a validation,
    perhaps hours from now.
    """
    if session.held_out is None:
        return
    usual, samples = (
        session.job.microbatch_size,
        session.job.validation.samples or len(session.held_out.dataset),
    )
    if not (few := samples % usual):
        return
    try:
        _tried(session, state, session.held_out.read(tuple(range(samples - few, samples))))
    except (ElasticError, OutOfMemory):
        raise
    except Exception as error:  # the user's code may raise anything
        raise ModelError(
            f"validation.samples = {samples}: its last microbatch has {few} of {usual} samples, with "
            f"which model {session.job.model!r} or loss = {session.job.loss!r} failed with "
            f"{failure(error)}; set validation.samples to a multiple of {usual}"
        ) from error


def without_compiling() -> AbstractContextManager[Any]:
    """Returns a context in which code that is compiled otherwise runs uncompiled, since another size would be
    compiled anew.

    If torch's compiler is not imported, the context does nothing: no code is compiled then, and the import
    takes a second.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _read(session: Session) -> dict[str, Any]:
    """Reads the first microbatch, twice.  Raises :class:`DataError` unless both have the same tensors."""
    ids = session.cursor.some_ids(session.job.microbatch_size)
    batch, again = session.loader.read(ids), session.loader.read(ids)
    first, second = (
        {name: (list(value.shape), value.dtype) for name, value in each.items()} for each in (batch, again)
    )
    if first != second:
        name = next(name for name in (*first, *second) if first.get(name) != second.get(name))
        came = [f"{each[name][1]} {each[name][0]}" if name in each else "nothing" for each in (first, second)]
        raise DataError(
            f"{session.loader.named}: read() of the ids {list(ids)} returned {came[0]} as {name!r}, "
            f"and at the next call {came[1]}; it must return the same samples for the same ids at "
            "every call"
        )
    return batch


def _tried(session: Session, state: State, batch: dict[str, Any]) -> tuple[float, float]:
    """Returns the loss of the microbatch, and its count.  Raises :class:`LossError` if that is no number of
    terms.
    """
    state.seeds.begin(0, 0)
    loss, count = loss_of(
        session, state.model, {name: value.to(state.world.device, copy=True) for name, value in batch.items()}
    )
    state.parameters.end_forward()
    if not is_count(float(count)):
        raise LossError(wrong_count(f"loss = {session.job.loss!r}", float(count), "the first microbatch"))
    return float(loss.detach()), float(count)


def _try_with_gradients(session: Session, state: State, batch: dict[str, Any]) -> None:
    """Raises :class:`ModelError` if the model and the loss fail as they would in a step."""
    job = session.job
    try:
        with torch.enable_grad():
            _tried(session, state, batch)
    except (ElasticError, OutOfMemory):
        raise
    except Exception as error:  # the user's code may raise anything
        shapes = ", ".join(
            f"{name!r} {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
            for name, value in batch.items()
        )
        mend = (
            about_one_value(error, job.microbatch_size)
            or remedy(error, state.model)
            or ("correct the model, the loss or the dataset")
        )
        raise ModelError(
            f"model = {job.model!r} with loss = {job.loss!r} failed with {failure(error)}; the microbatch "
            f"had {shapes}: {mend}"
        ) from None


def _check(session: Session, state: State, read: dict[str, Any]) -> None:
    job, world = session.job, state.world
    batch = {name: value.to(world.device) for name, value in read.items()}
    if job.microbatch_size == 1:
        batch = {name: torch.cat((value, value)) for name, value in batch.items()}
    size = max(job.microbatch_size, 2)
    half = size // 2

    def lost(first: int, last: int, draw: int = 0) -> tuple[float, float]:
        state.seeds.begin(0, draw)
        loss, count = loss_of(
            session, state.model, {name: value[first:last].clone() for name, value in batch.items()}
        )
        state.parameters.end_forward()
        return float(loss), float(count)

    whole, again = lost(0, size), lost(0, size, draw=1)
    if whole[1] != again[1]:
        return
    parts = lost(0, half), lost(half, size)
    counts = f"{parts[0][1]:g} and {parts[1][1]:g}"
    what = f"loss = {job.loss!r}: for {size} samples" + (" (one, twice)" if job.microbatch_size == 1 else "")
    if whole[1] < parts[0][1] + parts[1][1]:
        raise LossError(
            f"{what} it returns the count {whole[1]:g}, but the two halves have the counts {counts}, "
            f"together more; {CONTRACT}"
        )
    if not _near(whole[0], again[0], abs(whole[0]), CLOSE):
        return
    weights = ((half, size - half), (parts[0][1], parts[1][1]))
    if any(_is_mean(whole[0], (parts[0][0], parts[1][0]), each) for each in weights):
        losses = f"{parts[0][0]:g} and {parts[1][0]:g}"
        raise LossError(
            f"{what} it returns the loss {whole[0]:g}, the mean of the losses of the two halves "
            f"({losses}), not their sum; {CONTRACT}"
        )


def _is_mean(whole: float, parts: tuple[float, float], weights: tuple[float, float]) -> bool:
    """Returns whether ``whole`` is the mean of ``parts`` by ``weights``, and not their sum."""
    scale = max(map(abs, (whole, *parts)))
    if not isfinite(whole) or not all(map(isfinite, (*parts, *weights))) or not sum(weights) or not scale:
        return False
    mean = (parts[0] * weights[0] + parts[1] * weights[1]) / sum(weights)
    return _near(whole, mean, scale, CLOSE) and not _near(whole, sum(parts), scale, FAR)


def _near(one: float, other: float, scale: float, part: float) -> bool:
    return one == other or abs(one - other) <= part * scale
