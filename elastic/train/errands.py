"""Makes what a run owes for a checkpoint (:mod:`elastic.runs.owed`) from the bucket: an export, samples of
text, or a validation.

Exports and samples are made on the CPU, without a world.  A spare worker makes a validation in a world of its
own.  Several processes may do the same errand at once: they make the same bytes, and only one of them notes
the result.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elastic.code.imports import failure
from elastic.data.text_sources import Document
from elastic.data.tokenizer import Bytes, Encoder
from elastic.engine.seeds import microbatch_seed
from elastic.errors import FencedOff, ModelError
from elastic.ids import Version
from elastic.job import Job
from elastic.protocol.commit_record import told_of
from elastic.runs import asked as recorded
from elastic.runs import owed
from elastic.runs.owed import Debt, Failure
from elastic.runs.run import Run
from elastic.state.shard import DTYPES
from elastic.train.alone.revisit import evaluate_between
from elastic.train.model import BUFFERS, build_model, builder_of
from elastic.train.session import held_out_of, opened
from elastic.train.step import Session
from storage.checkpoints import Checkpoints, Reader
from storage.errors import Unavailable

AGAIN_S = 5.0
"""Seconds that a spare waits before it validates again, if the bucket did not answer."""

Progressed = Callable[[], None]
"""The function that an errand calls after each small part of its work, so that a waiting process sees
progress.
"""
Made = tuple[dict[str, Any], str]
"""The document of what was made, and the sentence that tells of it."""


def pay(run: Run, job: Job, debt: Debt) -> tuple[str, bool]:
    """Pays ``debt`` with the settings that were recorded when its checkpoint was saved; all other settings
    are those of ``job``.

    Returns and raises as :func:`attempt`.
    """
    return attempt(
        run,
        debt,
        lambda progressed: WORK[debt.kind](run, recorded.of(run).job(job, debt.version), debt, progressed),
    )


def attempt(
    run: Run, debt: Debt, make: Callable[[Progressed], Made], *, traced: bool = False
) -> tuple[str, bool]:
    """Notes in the bucket what ``make`` returns, or that it failed.  Returns (sentence for the story, whether
    the debt is paid).

    The sentence is "" if another process was first.  With ``traced``, the traceback of a failure goes to the
    log of this process.  Raises :class:`Unavailable` if the bucket does not answer, and :class:`FencedOff` if
    an order interrupts the work: neither is noted as a failure.
    """
    try:
        about, told = make(owed.ProgressNote(run, debt))
    except (Unavailable, FencedOff):
        raise
    except Exception as error:  # whatever the user's code raises, and a damaged checkpoint
        if traced:
            traceback.print_exc()
        return owed.failed(run, debt, Failure(failure(error))), False
    return told if owed.note_done(run, debt, about) else "", True


def export(run: Run, job: Job, debt: Debt, progressed: Progressed) -> Made:
    """Writes the weights as one safetensors file into the bucket, with the same bytes as the
    model.safetensors that `elastic checkpoint export` writes.
    """
    key = f"{job.name}/exports/{debt.version.step:012d}/g{debt.version.generation}/model.safetensors"
    file = run.checkpoints.export_model(debt.version, key, progressed)
    # parts that dead processes left; a process that still writes tries again, and finds the export
    run.store.tidy(f"{key.rpartition('/')[0]}/")
    return {"place": key, "bytes": file.size, "digest": file.blake3}, (
        f"{debt}: {file.size:,} bytes in {run.store.full_name(key)}"
    )


def samples(run: Run, job: Job, debt: Debt, progressed: Progressed) -> Made:
    """Lets the model continue each prompt of ``[samples]``."""
    asked, dataset = job.samples, opened(job)
    encoder = encoder_of(dataset)
    model = restored(job, run.checkpoints.open(debt.version), progressed)
    texts, tokens = [], []
    for number, prompt in enumerate(asked.prompts):
        generator = torch.Generator().manual_seed(microbatch_seed(asked.seed, debt.version.step, number))
        begun = encoded(encoder, prompt)
        end = encoder.coding.end_of_document
        found = list[int]()
        for token in generate(
            model, begun, asked.tokens, asked.temperature, generator, end, getattr(dataset, "seq_len", None)
        ):
            found.append(token)
            progressed()
        tokens.append(found)
        texts.append(encoder.decode(np.array(found, encoder.coding.dtype)).decode(errors="replace"))
    about = {
        "prompts": list(asked.prompts),
        "texts": texts,
        "tokens": tokens,
        "temperature": asked.temperature,
        "seed": asked.seed,
    }
    said = "; ".join(f"{prompt!r} → {text!r}" for prompt, text in zip(asked.prompts, texts, strict=True))
    return about, f"{debt}: {said}"


WORK: Mapping[str, Callable[[Run, Job, Debt, Progressed], Made]] = {
    owed.EXPORT: export,
    owed.SAMPLES: samples,
}
"""The functions for the kinds of debts that any process can pay."""


def validate_by_spare(
    session: Session,
    device: torch.device,
    checkpoints: Checkpoints,
    version: Version,
    interrupted: Callable[[], bool],
) -> None:
    """Validates a checkpoint while the others train (``validation.by = "spares"``), and notes the result in
    the bucket, or that it failed.

    The spare reads the checkpoint into a world of its own, on its own device, so the result has the bits that
    the members would have found.  Once ``interrupted()`` is true, because an order has come, the spare drops
    the work at the next slice or microbatch; the validation then stays owed.
    """
    run, debt = Run(session.job, checkpoints.store), Debt(version, owed.VALIDATION)

    def make(progressed: Progressed) -> Made:
        def asked() -> bool:
            progressed()
            return interrupted()

        found = evaluate_between(session, device, checkpoints, version, asked)
        return owed.validated(found, held_out_of(session)), (
            f"{told_of(version.step, found)}, by this spare worker"
        )

    while True:
        again_at = 0.0
        try:
            print(attempt(run, debt, make, traced=True)[0], flush=True)
        except FencedOff as error:
            print(f"the validation of {version} is dropped: {error}", flush=True)
        except Unavailable as error:
            print(f"the validation of {version} begins again in {AGAIN_S:g} s: {error}", flush=True)
            again_at = time.monotonic() + AGAIN_S
        gc.collect()
        torch.cuda.empty_cache()
        while time.monotonic() < again_at and not interrupted():
            time.sleep(0.1)
        if not again_at or interrupted():
            return


def encoder_of(dataset: object) -> Encoder:
    """Returns the encoder of the dataset, or of the first part of a mixture that has one; else each byte is a
    token.
    """
    for each in (dataset, *getattr(dataset, "parts", ())):
        if callable(made := getattr(each, "encoder", None)):
            found: Encoder = made()
            return found
    return Bytes()


def encoded(encoder: Encoder, prompt: str) -> list[int]:
    """Returns the tokens of a prompt, without the end of a document."""
    ((_, tokens),) = encoder.encode([Document("samples.prompts", prompt.encode())])
    return [int(token) for token in tokens[:-1]]


@torch.no_grad()
def generate(
    model: nn.Module,
    begun: list[int],
    most: int,
    temperature: float,
    generator: torch.Generator,
    end: int,
    window: int | None,
) -> Iterator[int]:
    """Yields at most ``most`` tokens that follow ``begun``, up to the end of a document.  The model sees the
    last ``window`` tokens, or all if it is None.

    With ``temperature`` 0 each token is the most likely one; of equally likely ones, the first.
    """
    tokens = torch.tensor([begun], dtype=torch.int64)
    for _ in range(most):
        seen = tokens if window is None else tokens[:, -window:]
        logits = _logits(model(seen), seen, model)[0, -1].float()
        if temperature:
            chosen = torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator)
        else:
            chosen = logits.argmax().view(1)
        yield int(chosen)
        if int(chosen) == end:
            break
        tokens = torch.cat((tokens, chosen[None]), dim=1)


def _logits(found: Any, tokens: Tensor, model: nn.Module) -> Tensor:
    """Returns ``found``, the model's output for ``tokens``, if it is logits [batch, seq, vocabulary].  Raises
    :class:`ModelError` if it is anything else.
    """
    if not isinstance(found, Tensor) or found.dim() != 3 or found.shape[:2] != tokens.shape:
        what = (
            f"a tensor of shape {list(found.shape)}"
            if isinstance(found, Tensor)
            else f"a {type(found).__name__}"
        )
        raise ModelError(
            f"samples.every: {type(model).__name__} returns {what} for tokens of shape "
            f"{list(tokens.shape)}; samples need a model that returns logits, [batch, seq, "
            "vocabulary]; leave [samples] out, or let forward(tokens) return logits"
        )
    return found


def check_samples(job: Job, model: nn.Module, dataset: object) -> None:
    """Raises :class:`ModelError` if the model, which is on the meta device, cannot continue the prompts of
    the job.
    """
    if not job.samples.every:
        return
    encoder, window = encoder_of(dataset), getattr(dataset, "seq_len", None)
    for prompt in job.samples.prompts:
        tokens = encoded(encoder, prompt)
        if not tokens:
            raise ModelError(
                f"samples.prompts: {prompt!r} has no token, so the model has nothing to continue; "
                "give some text"
            )
        shown = torch.zeros(
            (1, len(tokens[-window:] if window else tokens)), dtype=torch.int64, device="meta"
        )
        try:
            with torch.no_grad(), torch.device("meta"):
                found = model(shown)
        except Exception:  # the model may need values; then the first checkpoint shows the fault
            return
        vocabulary = _logits(found, shown, model).shape[2]
        if max(tokens) >= vocabulary:
            raise ModelError(
                f"samples.prompts: {prompt!r} has the token {max(tokens)}, and the model knows "
                f"{vocabulary}; leave [samples] out, or give the dataset an encoder() whose tokens the "
                "model knows"
            )


def restored(job: Job, reader: Reader, progressed: Progressed = lambda: None) -> nn.Module:
    """Returns the job's model on the CPU with the weights and buffers of a checkpoint, ready to evaluate.

    Raises :class:`ModelError` if the checkpoint lacks one of them.
    """
    model = build_model(job, builder_of(job))
    named: dict[tuple[str, str], Tensor] = {
        ("parameter", name): each for name, each in model.named_parameters()
    }
    persistent = model.state_dict(keep_vars=True).keys()
    for name, each in model.named_buffers():
        named[BUFFERS[0] if name in persistent else BUFFERS[1], name] = each
    stored = {(each.kind, each.name): each for each in reader.tensors()}
    if lacking := [name for kind, name in named if (kind, name) not in stored]:
        raise ModelError(
            f"model = {job.model!r}: {lacking[0]!r} is not in the checkpoint; use the model with "
            "which the run was trained"
        )
    made = dict[int, Any]()
    for part, data in reader.read([stored[key].whole() for key in named]):
        tensor, there = stored[part.kind, part.name], named[part.kind, part.name]
        value = (
            torch.frombuffer(bytearray(data), dtype=DTYPES[tensor.dtype])
            if part.count
            else torch.empty(0, dtype=DTYPES[tensor.dtype])
        )
        value = value.view(tensor.shape)
        made[id(there)] = (
            nn.Parameter(value, requires_grad=there.requires_grad)
            if isinstance(there, nn.Parameter)
            else value
        )
        progressed()
    for module in model.modules():  # a weight that modules share stays shared
        for held in (module._parameters, module._buffers):
            held.update({name: made[id(each)] for name, each in held.items() if each is not None})
    return model.eval()
