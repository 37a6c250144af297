"""Performs what a run owes for a checkpoint (:mod:`elastic.runs.owed`): an export, or samples of text, from the bucket and on the CPU.

Nothing here belongs to a world.  Several processes may do the same at once: the bytes are the same, and only one of them notes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elastic.data.sources import Document
from elastic.data.tokenizer import Bytes, Encoder
from elastic.errors import ModelError
from elastic.ids import Version
from elastic.imports import failure
from elastic.job import Job
from elastic.runs import asked as recorded
from elastic.runs import owed
from elastic.runs.owed import Debt, Failure
from elastic.runs.run import Run
from elastic.state.shard import DTYPES
from elastic.train.model import BUFFERS, build_model, builder_of
from elastic.train.session import opened
from elastic.train.step import microbatch_seed
from storage.checkpoints import Reader
from storage.errors import Unavailable

Progressed = Callable[[], None]
"""The function that an errand calls after each small part of its work, so that whoever waits for it sees that it makes progress."""


def pay(run: Run, job: Job, debt: Debt) -> tuple[str, bool]:
    """Performs what is owed and notes the result, or that it failed.  Returns the sentence for the story, and whether it is done.

    It is done with the settings that were recorded when its checkpoint was saved, and all else is as ``job`` says.  The sentence is "" if
    somebody else was first.

    Raises :class:`Unavailable` if the bucket does not answer: that is no failure.
    """
    try:
        asked, progressed = recorded.of(run).job(job, debt.version), owed.Progress(run, debt)
        about, told = WORK[debt.kind](run, asked, debt.version, progressed)
    except Unavailable:
        raise
    except Exception as error:  # whatever the user's model raises, and a damaged checkpoint
        return owed.failed(run, debt, Failure(failure(error))), False
    return f"{debt}: {told}" if owed.note_done(run, debt, about) else "", True


def export(run: Run, job: Job, version: Version, progressed: Progressed) -> tuple[dict[str, Any], str]:
    """Writes the weights as one safetensors file into the bucket, with the bytes of model.safetensors of `elastic checkpoint export`."""
    key = f"{job.name}/exports/{version.step:012d}/g{version.generation}/model.safetensors"
    file = run.checkpoints.export_model(version, key, progressed)
    run.store.tidy(f"{key.rpartition('/')[0]}/")  # what processes that died have left; one that lives tries again, and finds the export
    place = run.store.full_name(key)
    return {"place": key, "bytes": file.size, "digest": file.blake3}, f"{file.size:,} bytes in {place}"


def samples(run: Run, job: Job, version: Version, progressed: Progressed) -> tuple[dict[str, Any], str]:
    """Lets the model continue each prompt of ``[samples]``."""
    asked, dataset = job.samples, opened(job)
    encoder = encoder_of(dataset)
    model = restored(job, run.checkpoints.open(version), progressed)
    texts, tokens = [], []
    for number, prompt in enumerate(asked.prompts):
        generator = torch.Generator().manual_seed(microbatch_seed(asked.seed, version.step, number))
        begun = encoded(encoder, prompt)
        end = encoder.coding.end_of_document
        found = list[int]()
        for token in generate(model, begun, asked.tokens, asked.temperature, generator, end, getattr(dataset, "seq_len", None)):
            found.append(token)
            progressed()
        tokens.append(found)
        texts.append(encoder.decode(np.array(found, encoder.coding.dtype)).decode(errors="replace"))
    about = {"prompts": list(asked.prompts), "texts": texts, "tokens": tokens, "temperature": asked.temperature, "seed": asked.seed}
    return about, "; ".join(f"{prompt!r} → {text!r}" for prompt, text in zip(asked.prompts, texts, strict=True))


WORK: Mapping[str, Callable[[Run, Job, Version, Progressed], tuple[dict[str, Any], str]]] = {owed.EXPORT: export, owed.SAMPLES: samples}
"""The function that performs each kind of debt.  It returns the document, and the end of the sentence that tells of it."""


def encoder_of(dataset: object) -> Encoder:
    """Returns the encoder of the dataset, or of the first part of a mixture that has one; else each byte is a token."""
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
    model: nn.Module, begun: list[int], most: int, temperature: float, generator: torch.Generator, end: int, window: int | None
) -> Iterator[int]:
    """Yields at most ``most`` tokens that follow ``begun``, up to the end of a document.  The model sees the last ``window`` of them.

    With ``temperature`` 0 each is the most likely one, the first of several.
    """
    tokens = torch.tensor([begun], dtype=torch.int64)
    for _ in range(most):
        logits = logits_of(model, tokens if window is None else tokens[:, -window:])[0, -1].float()
        if temperature:
            chosen = torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator)
        else:
            chosen = logits.argmax().view(1)
        yield int(chosen)
        if int(chosen) == end:
            break
        tokens = torch.cat((tokens, chosen[None]), dim=1)


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Returns [1, seq, vocabulary].  Raises :class:`ModelError` for a model that returns something else."""
    return _logits(model(tokens), tokens, model)


def _logits(found: Any, tokens: Tensor, model: nn.Module) -> Tensor:
    if not isinstance(found, Tensor) or found.dim() != 3 or found.shape[:2] != tokens.shape:
        what = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ModelError(
            f"samples.every: {type(model).__name__} returns {what} for tokens of shape {list(tokens.shape)}; text can be written by a "
            f"model that returns logits, [batch, seq, vocabulary]; leave [samples] out, or let forward(tokens) return them"
        )
    return found


def check_samples(job: Job, model: nn.Module, dataset: object) -> None:
    """Raises :class:`ModelError` if the model, which is on the meta device, cannot continue the prompts of the job."""
    if not job.samples.every:
        return
    encoder, window = encoder_of(dataset), getattr(dataset, "seq_len", None)
    for prompt in job.samples.prompts:
        tokens = encoded(encoder, prompt)
        if not tokens:
            raise ModelError(f"samples.prompts: {prompt!r} has no token that the model could continue; give it some text")
        shown = torch.zeros((1, len(tokens[-window:] if window else tokens)), dtype=torch.int64, device="meta")
        try:
            with torch.no_grad(), torch.device("meta"):
                found = model(shown)
        except Exception:  # it may need values; then the first checkpoint shows it
            return
        vocabulary = _logits(found, shown, model).shape[2]
        if max(tokens) >= vocabulary:
            raise ModelError(
                f"samples.prompts: {prompt!r} has the token {max(tokens)}, and the model knows {vocabulary}; leave [samples] out, or give "
                f"the dataset an encoder() whose tokens the model knows"
            )


def restored(job: Job, reader: Reader, progressed: Progressed = lambda: None) -> nn.Module:
    """Returns the job's model on the CPU with the weights and buffers of a checkpoint, ready to evaluate.

    Raises :class:`ModelError` if the checkpoint lacks one of them.
    """
    model = build_model(job, builder_of(job))
    named: dict[tuple[str, str], Tensor] = {("parameter", name): each for name, each in model.named_parameters()}
    persistent = model.state_dict(keep_vars=True).keys()
    for name, each in model.named_buffers():
        named[BUFFERS[0] if name in persistent else BUFFERS[1], name] = each
    stored = {(each.kind, each.name): each for each in reader.tensors()}
    if lacking := [name for kind, name in named if (kind, name) not in stored]:
        raise ModelError(f"model = {job.model!r}: {lacking[0]!r} is not in the checkpoint; use the model of the run")
    made: dict[int, Tensor] = {}
    for part, data in reader.read([stored[key].whole() for key in named]):
        tensor = stored[part.kind, part.name]
        value = torch.frombuffer(bytearray(data), dtype=DTYPES[tensor.dtype]) if part.count else torch.empty(0, dtype=DTYPES[tensor.dtype])
        made[id(named[part.kind, part.name])] = value.view(tensor.shape)
        progressed()
    for module in model.modules():  # a weight that modules share stays shared
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, _parameter(made, parameter))
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, made[id(buffer)])
    return model.eval()


def _parameter(made: dict[int, Tensor], parameter: nn.Parameter) -> nn.Parameter:
    """Returns the parameter that takes the place of one on the meta device: the same for every module that has it."""
    value = made[id(parameter)]
    if not isinstance(value, nn.Parameter):
        value = made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    return value
