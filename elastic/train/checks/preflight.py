"""Checks a job before a worker starts: the driver itself looks at the model, the loss, the data and the
bucket.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from elastic.code.imports import failure
from elastic.code.sources import Sources, sources_of
from elastic.config.optimizers import OPTIMIZERS
from elastic.config.values import literal_secrets
from elastic.data.loader import Dataset
from elastic.data.rows import notes_of
from elastic.engine.batch_norm import tracking
from elastic.engine.blocks import sharding_table
from elastic.engine.fp8 import MULTIPLE, layers_of
from elastic.engine.kernels import apply_kernels, has_dropout
from elastic.engine.loss import expect_documents
from elastic.engine.optim.groups import check_groups
from elastic.engine.optim.trial import check_rule
from elastic.engine.parameters.buckets import buckets_of, described
from elastic.engine.parameters.split import shared_across, unlike_within, without_dimensions
from elastic.engine.peak import calls_of
from elastic.engine.precision import PRECISIONS
from elastic.errors import DataError, JobError, ModelError
from elastic.ids import Version
from elastic.job import Job
from elastic.kernels.attention import Kernel
from elastic.models.flops import flops_of
from elastic.plan.copy_budget import amount
from elastic.plan.placement import largest_cells, number_of_cells
from elastic.protocol.builds import Build
from elastic.runs import branches, code, data, harmed
from elastic.runs.branches import Branches, Origin
from elastic.runs.quarantine import held_in
from elastic.runs.resume import StartPoint
from elastic.runs.run import Run
from elastic.state.region import frame
from elastic.state.streaming import SHARES, buffer_gb, group_bytes
from elastic.train.checks import demands
from elastic.train.checks.estimate import unnamed_policy
from elastic.train.errands import check_samples
from elastic.train.gauges.counters import Counters
from elastic.train.heal import WEIGHTS
from elastic.train.model import (
    AS_IT_IS_THERE,
    begun_anew,
    build_model,
    builder_of,
    bytes_of,
    misfit,
    tensors_of,
)
from elastic.train.session import build_of, make_session, unlike_held_out
from elastic.train.step import Session, by_next_token
from storage.checkpoints.reader import Reader
from storage.objects import ObjectStore
from storage.slices import Tensor

PLACES = re.compile(r"bucket$|model_args\.|metrics\.sinks\.|\w+\.args\.")
"""Pattern of the settings that are searched for secrets: the arguments of the user's code, and the URL of the
bucket.
"""
UNTRACED = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ImportError)
"""Errors of models that cannot run with tensors that have no values."""
NO_ATTENTION = (
    "recompute = 'attention' has no effect: it computes only torch's scaled_dot_product_attention "
    "again, and the model does not call this function itself; set recompute to 'selective' or "
    "'block', or leave it out"
)


@dataclass(frozen=True)
class Checked:
    """A job that passed the checks: the build that it was checked with, and sentences that its user should
    read.
    """

    build: Build
    notes: list[str]
    sources: Sources
    """The files of the job's code."""


def preflight(
    job: Job,
    *,
    local: bool = False,
    branch: bool = False,
    accept_code: bool = False,
    start: StartPoint | None = None,
    run: Run | None = None,
) -> Checked:
    """Makes, before a worker starts, the checks that :func:`~elastic.train.checks.early.check_early` does not
    make.  It leaves nothing in the bucket.

    Code that has changed since the run's last start is refused, unless ``accept_code`` says that the run may
    go on with it.  ``start`` says from which checkpoint, perhaps of another run, the run begins.  ``run`` is
    the job's run, if the caller has found it.

    Raises :class:`~elastic.errors.JobError`, or :class:`~storage.errors.Unavailable` for a bucket that cannot
    be relied on.
    """
    leaked = _check_secrets(job)
    model = build_model(job, builder_of(job))
    _check_again(job, model)
    if not local:
        _check_shared(job, model)
    tried = job.replace(microbatch=1) if job.microbatch == "auto" else job
    with TemporaryDirectory() as folder:
        session = make_session(tried, Counters(Path(folder) / "counters", create=True), prefetch=0)
        build = build_of(session, model)
        unread = [*_check_calls(tried, session, model), *_check_held_out(tried, session)]
        of_rows = [
            note
            for each in (session.loader, session.held_out)
            if each is not None
            for note in notes_of(each.dataset)
        ]
        session.close()
    check_rule(job, session.rule)
    _check_dataset(job, model, session)
    _check_layers(job, model)
    _check_eps(job, model)
    groups = check_groups(job.optim, model, job.model)
    run = (run or Run.find(job)).agree(job, branch=branch or None)
    data.check(run, build.data, int(build.samples))
    job = run.job
    notes = [*harmed.notes(run), *leaked, *of_rows, *unread]
    notes += [*_of_its_structure(model), *_without_blocks(job, model), *_not_in_fp8(job, model)]
    if job.parallel.bucket_elements != "block":
        found = described(buckets_of(model, sharding_table(model), job.parallel.elements))
        notes.append(
            f"parallel.bucket_elements = {job.parallel.bucket_elements}: gradients are summed in {found}"
        )
    state_bytes = bytes_of(tensors := tensors_of(model, session.rule))
    _check_buffer(job, tensors)
    _check_flops(model, job)
    if job.profile:
        notes.append(
            f"profile = {job.profile!r}: world rank 0 writes its profile to "
            f"{run.store.full_name(f'{job.name}/profiles')}"
        )
    anew = begun_anew(job, session.rule, tensors)
    sources, lasting = sources_of(job.trajectory_code()), [tensor for tensor in tensors if tensor not in anew]
    if start is not None and start.origin is not None:
        notes += _check_origin(start, start.origin, lasting, run.store, build)
        if not job.init:
            origin = Run(job.replace(name=start.origin.run), run.store)
            code.check_that_of(
                origin,
                start.origin.version,
                sources,
                accept=accept_code or start.origin.version.step >= job.steps,
            )
    if (newest := run.newest()) is None:
        notes += demands.initialising(job, model)
    else:
        at = start.at if start is not None and start.at is not None else newest
        notes += _quarantined(job, run.checkpoints.open(at), at) if at.step else []
        if why := misfit(job, lasting, run.checkpoints.open(newest).tensors(), newest):
            raise ModelError(why)
        notes += filter(None, [_check_code(run, sources, start, newest, accept_code)])
    notes += _attention(job, model, session.loader.dataset)
    if local:
        return Checked(build, [*notes, *_unused(job)], sources)
    notes += [
        *filter(None, [unnamed_policy(tried)]),
        *demands.copying(job, state_bytes),
        *demands.hosting(job, tensors),
    ]
    return Checked(build, [*notes, *demands.updating(job, state_bytes), *groups], sources)


def _check_secrets(job: Job) -> list[str]:
    """Raises :class:`JobError` for an argument that is a secret, and for a secret in the URL of the bucket,
    since all settings are written to the bucket.

    Returns a sentence for each secret that is in the bucket already, because an older release began the run.
    """
    settings = job.model_dump(mode="json")
    found = [
        name
        for setting, value in settings.items()
        for name in literal_secrets(setting, value)
        if PLACES.match(name)
    ]
    if not found:
        return []
    stored = branches.flat(Branches(ObjectStore.open(job.bucket), job.name).job())
    here = branches.flat(settings)
    where, notes = f"in {job.name}/job.json in the bucket", list[str]()
    for name in found:
        variable = re.sub(r"\W", "_", name.rpartition(".")[2]).upper()
        # these variables have a meaning for every program
        variable = f"MY_{variable}" if variable in ("PATH", "PWD", "USER") else variable
        fix = (
            f"write {name} = '${{{variable}}}', and set that environment variable for this command and for "
            "Ray on each node"
        )
        what = "is a secret"
        if name == "bucket":  # only arguments are read from the environment
            what, scheme = "has a secret in it", job.bucket.partition("://")[0].upper()
            fix = (
                "leave it out; fsspec takes the password of a bucket from an environment variable, "
                f"such as FSSPEC_{scheme}_PASSWORD"
            )
        # the setting itself, or the list that contains it
        at = next(each for each in here if f"{name}.".startswith(f"{each}."))
        if at not in stored or stored[at] != here[at]:
            raise JobError(f"{name} {what}, and everybody could read it {where}; {fix}")
        notes.append(
            f"{name} {what}, and has been {where} since the run began: replace the secret by a new "
            f"one, and {fix}"
        )
    return notes


def _check_origin(
    start: StartPoint, origin: Origin, tensors: Sequence[Tensor], store: ObjectStore, build: Build
) -> list[str]:
    """Returns sentences about the checkpoint of another run, from which the run begins.

    Raises :class:`JobError` unless the checkpoint fits the model and, if the run goes on from it and does not
    only take its weights, the samples.
    """
    reader, weights = Branches(store, origin.run).checkpoints().open(origin.version), bool(start.job.init)
    wanted = [each for each in tensors if not weights or each.kind in WEIGHTS]
    if why := misfit(start.job, wanted, reader.tensors(), origin.version, AS_IT_IS_THERE):
        raise JobError(f"{start.setting}: {why}")
    if weights:
        return []
    notes = _quarantined(start.job, reader, origin.version)
    try:
        data.check(Run(start.job.replace(name=origin.run), store), build.data, int(build.samples))
    except JobError as error:
        raise JobError(f"{start.setting}: {error}") from None
    return notes


def _quarantined(job: Job, reader: Reader, version: Version) -> list[str]:
    """Returns sentences about the samples in quarantine at ``version``, if the job would read them again.

    Raises :class:`JobError` if it would because it has turned spikes off, without asking for it by
    ``spikes.action = 'forget'``.
    """
    number = len(held_in(reader) or ()) if job.spikes.off else 0
    samples = f"{number} sample{'s' * (number > 1)}"
    if number and job.spikes.action == "none":
        raise JobError(
            f"spikes.action = 'none' would read samples again that are in quarantine in {version} "
            f"({samples}); set spikes.action to 'warn' to keep them out, or to 'forget' to read them "
            "again"
        )
    return (
        [f"spikes.action = 'forget': samples that are in quarantine in {version} are read again ({samples})"]
        if number
        else []
    )


def _check_layers(job: Job, model: nn.Module) -> None:
    """Raises :class:`ModelError` if the job has settings that do not work with the model's layers."""
    table = sharding_table(model)
    tracking(model, table, job)
    if PRECISIONS[job.precision].fp8 is not None and not layers_of(model, table):
        raise ModelError(
            f"precision = {job.precision!r}: no block of {job.model!r} has a torch.nn.Linear whose "
            f"sizes are multiples of {MULTIPLE}, and only such layers multiply in fp8; set precision "
            "to 'bf16', or change the sizes"
        )


def _check_eps(job: Job, model: nn.Module) -> None:
    """Raises :class:`JobError` if ``optim.eps`` is zero in the format of a parameter: a parameter without a
    gradient then becomes 0 / 0.
    """
    if (built_in := OPTIMIZERS.get(job.optim.kind)) is None or "eps" not in built_in.reads:
        return
    for name, value in model.named_parameters():
        if value.requires_grad and not torch.tensor(job.optim.eps, dtype=value.dtype):
            kept = str(value.dtype).removeprefix("torch.")
            raise JobError(
                f"optim.eps = {job.optim.eps:g} is 0 in {kept}, the format of {name!r} in {job.model!r}, so "
                "an update would divide by zero; keep the weights in float32, with precision = 'fp16' or "
                "'bf16' for what is computed, or set optim.eps to 1e-4"
            )


def _check_again(job: Job, model: nn.Module) -> None:
    """Raises :class:`ModelError` if the builder returns a different model at a second call: each worker calls
    it, too.
    """
    first, second = (
        {n: list(p.shape) for n, p in each.named_parameters()}
        for each in (model, build_model(job, builder_of(job)))
    )
    if first != second:
        name = next(name for name in (*first, *second) if first.get(name) != second.get(name))
        came = [f"of shape {each[name]}" if name in each else "missing" for each in (first, second)]
        raise ModelError(
            f"model = {job.model!r} builds another model at each call: the parameter {name!r} is "
            f"{came[0]}, and {came[1]} at the second call; every worker builds the model, so it must "
            "depend on model_args alone"
        )


def _check_shared(job: Job, model: nn.Module) -> None:
    """Raises :class:`ModelError` if the job gathers weights block by block, and the model has weights for
    which that is not possible.
    """
    if job.parallel.zero != 3 or all(layout.shards == 1 for layout in job.layouts()):
        return
    if names := shared_across(model):
        raise ModelError(
            f"parallel.zero = 3: {names[0]!r} and {names[1]!r} of {job.model!r} are one weight in two "
            "places, and stage 3 gathers and frees the weights of one block at a time; set "
            "parallel.zero = 2, which gathers each weight once a step"
        )
    if name := without_dimensions(model):
        raise ModelError(
            f"parallel.zero = 3: {name!r} of {job.model!r} has no dimensions, so stage 3 cannot cut it "
            "into parts; set parallel.zero = 2, or give the parameter the shape [1]"
        )
    if names := unlike_within(model):
        formats = (str(model.get_parameter(name).dtype).removeprefix("torch.") for name in names)
        of = " and ".join(f"{name!r} is {dtype}" for name, dtype in zip(names, formats, strict=True))
        raise ModelError(
            f"parallel.zero = 3: {of} in {job.model!r}, but stage 3 sums all gradients of a block in "
            "one format; set parallel.zero = 2, or give both parameters the same format"
        )


def _check_held_out(job: Job, session: Session) -> list[str]:
    """Compares a held-out batch with a training batch.  Returns a sentence if the samples of both are the
    same.

    Raises :class:`DataError` if the held-out batch has other tensors, or, in a job that compiles, other
    shapes or formats.
    """
    if session.held_out is None:
        return []
    ids = tuple(range(min(job.microbatch_size, len(session.held_out.dataset), len(session.loader.dataset))))
    batches = (session.loader.read(ids), session.held_out.read(ids))
    trained, held_out = (
        {name: (list(value.shape), value.dtype) for name, value in batch.items()} for batch in batches
    )
    if trained.keys() != held_out.keys() or (job.compile and trained != held_out):
        why = "blocks would be compiled again during the run" if job.compile else "the loss gets both"
        raise DataError(
            f"validation.dataset: a batch has {_shapes(held_out)}, but a training batch has "
            f"{_shapes(trained)}; make both the same, since {why}"
        )
    return unlike_held_out(session)


def _shapes(batch: dict[str, tuple[list[int], torch.dtype]]) -> str:
    return ", ".join(
        f"{name!r} {shape} of {str(dtype).removeprefix('torch.')}"
        for name, (shape, dtype) in sorted(batch.items())
    )


def _check_calls(job: Job, session: Session, model: nn.Module) -> list[str]:
    """Raises :class:`ModelError` if the model reads a weight that is held in fp8.

    Returns a sentence if this cannot be found out, or if ``recompute = "attention"`` has no effect because
    the model makes no call that it would compute again.
    """
    holds_fp8 = PRECISIONS[job.precision].fp8 is not None and not job.offloads
    again = job.recompute == "attention" and bool(sharding_table(model).blocks)
    if not holds_fp8 and not again:
        return []
    batch = session.loader.read(session.cursor.some_ids(job.microbatch_size))
    try:
        calls = calls_of(partial(build_model, job, session.builder), job, session.loss, batch)
    except UNTRACED as error:  # not every model can be traced
        unknown = (
            f"precision = {job.precision!r}: whether the model reads weights of linear layers by itself is "
            f"not known: {failure(error)}"
        )
        return [unknown] if holds_fp8 else []
    if holds_fp8 and calls.of_fp8 is not None:
        name, function = calls.of_fp8
        raise ModelError(
            f"precision = {job.precision!r}: {job.model!r} calls {function}() with the weight {name!r} "
            "directly, but only its layer can compute with a weight in fp8; call the layer, or set "
            "precision to 'bf16'"
        )
    return [NO_ATTENTION] if again and not calls.attention else []


def _check_buffer(job: Job, tensors: Sequence[Tensor]) -> None:
    """Raises :class:`JobError` if a parameter with its moments is larger than a group that passes through
    ``offload_buffer_gb``.
    """
    if not job.offload_folder:
        return
    units = Counter[str]()
    for cell in largest_cells(min(job.layouts(), key=number_of_cells)):
        here = Counter[str]()
        for tensor, place in frame(tensors, cell).places.items():
            here[tensor.name] += place.bytes
        units |= here
    name, largest = units.most_common(1)[0]
    if largest > group_bytes(job):
        raise JobError(
            f"offload_buffer_gb = {job.offload_buffer_gb:g} is too small: the state passes through it "
            f"in {SHARES} groups, and {name!r} of {job.model!r} with its moments has {amount(largest)} "
            f"on the worker with the largest part; set offload_buffer_gb to {buffer_gb(largest)} or "
            "more, or raise workers.min or parallel.min_shard"
        )


def _unused(job: Job) -> list[str]:
    """Returns sentences about the settings that have no effect with the one worker of ``--local``."""
    asked = {"workers.min": job.workers.min} | {
        f"parallel.{name}": value for name, value in job.parallel.model_dump().items()
    }
    if job.offloads:
        del asked["parallel.zero"]  # offloading asks for it
    unused = [
        f"{name} = {value!r}" for name, value in asked.items() if value not in (1, "auto", "all", "block")
    ]
    notes = (
        [
            f"--local trains with one worker: {', '.join(unused)} {'have' if len(unused) > 1 else 'has'} no "
            "effect"
        ]
        if unused
        else []
    )
    if job.validation.by == "spares" and job.validation.every:
        notes.append(
            "--local has no spares for validation.by = 'spares': this process validates by itself, between "
            "steps"
        )
    return notes


def _check_dataset(job: Job, model: nn.Module, session: Session) -> None:
    """Raises :class:`ModelError` if the model cannot train on what the dataset gives, or continue the prompts
    of the job.
    """
    _check_vocabulary(model, session.loader.dataset)
    if by_next_token(session):  # any other loss or loop may use samples in its own way
        _check_length(model, session.loader.dataset)
        _check_documents(model, session.loader.dataset)
        if session.held_out is not None:
            _check_vocabulary(model, session.held_out.dataset)
            _check_length(model, session.held_out.dataset)
    check_samples(job, model, session.loader.dataset)


def _check_vocabulary(model: nn.Module, dataset: Dataset) -> None:
    """Raises :class:`ModelError` if the dataset's vocabulary is larger than the model's.

    A token that the model does not know would make a worker's kernel fail in the first step.  Nothing is
    checked unless model and dataset both give a number.
    """
    known, used = getattr(model, "vocab", None), getattr(dataset, "vocabulary", None)
    if isinstance(known, int) and isinstance(used, int) and known < used:
        raise ModelError(
            f"the vocabulary of the model ({known}) is smaller than the vocabulary of the dataset "
            f"({used}); set it to {used} or more in model_args"
        )


def _check_length(model: nn.Module, dataset: Dataset) -> None:
    """Raises :class:`ModelError` if samples are longer than a model with learned positions can read, so that
    its first step would fail.
    """
    most, used = getattr(model, "most_positions", None), getattr(dataset, "seq_len", None)
    if isinstance(most, int) and isinstance(used, int) and most < used:
        raise ModelError(
            f"seq_len = {used} of the dataset is longer than the longest sequence of the model, "
            f"{most}; lower data.args.seq_len to {most}, or raise length, n_positions or "
            f"max_position_embeddings in model_args to {used}"
        )


def _check_documents(model: nn.Module, dataset: Dataset) -> None:
    """Raises :class:`ModelError` if the dataset tells the documents of its samples, and the model cannot keep
    them apart.
    """
    if getattr(dataset, "documents", False) is not True:
        return
    kind: Any = type(model)
    expect_documents(kind)
    if callable(own := getattr(model, "mixes_documents", None)) and (why := own()):
        raise ModelError(
            f"data.args.documents = true: {why}; set data.args.documents to false, or use a model "
            "whose layers attend to all earlier tokens, such as 'llama'"
        )


def _check_flops(model: nn.Module, job: Job) -> None:
    """Raises :class:`ModelError` if the model's own count of operations, which is called after each step,
    fails.
    """
    try:
        float(flops_of(model)(1.0, True))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"flops_per_token of {job.model!r} failed with {failure(error)}; let flops_per_token(seq, "
            "causal) return a number, or leave it out"
        ) from error


def _check_code(run: Run, sources: Sources, start: StartPoint | None, newest: Version, accept: bool) -> str:
    """Compares the job's code with the code of the version from which the run goes on.  Returns and raises as
    ``code.check``, or raises as ``code.check_that_of``.
    """
    if start is None or start.at is None:
        return code.check(run, sources, newest, accept=accept)
    code.check_that_of(run, start.at, sources, accept=accept)
    return ""


def _attention(job: Job, model: nn.Module, dataset: Dataset) -> list[str]:
    """Returns sentences about the attention kernel of the model on a GPU, if the engine chooses the kernel.

    Raises :class:`ModelError` if the model cannot use the kernel that the job names.
    """
    packed = getattr(dataset, "documents", False) is True
    if job.attention == "flash-4":
        _check_flash(job, model, packed)
    if not job.workers.gpus:
        return []
    apply_kernels(model, torch.device("cuda"), job)
    own = getattr(model, "attends", None)
    chosen = getattr(model, "attends_in_documents", own and Kernel.TORCH) if packed else own
    said = [f"attention is by {chosen.value}"] if isinstance(chosen, Kernel) else []
    if chosen is Kernel.FLEX and job.recompute == "attention":
        said.append(
            "recompute = 'attention' has no effect with FlexAttention, which keeps little more than its "
            "inputs; leave it out"
        )
    if not packed or chosen is Kernel.FLEX:
        return said
    return [
        *said,
        "data.args.documents = true: without FlexAttention, attention within documents is slow on a GPU, "
        "and needs a mask of seq_len × seq_len; FlexAttention needs compile = true and a model without "
        "dropout",
    ]


def _check_flash(job: Job, model: nn.Module, packed: bool) -> None:
    """Raises :class:`ModelError`, with all reasons, if ``model`` cannot use flash-attention 4."""
    reasons = {
        "it needs GPUs, but workers.gpus = 0; set workers.gpus to 1": not job.workers.gpus,
        f"{job.model!r} computes attention with its own code": not hasattr(model, "attends"),
        "it supports no dropout, but the model has dropout": has_dropout(model),
        "it cannot keep documents apart, but data.args.documents = true": packed,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise ModelError(f"attention = 'flash-4': {'; '.join(found)}; or set attention to 'auto'")


def _of_its_structure(model: nn.Module) -> list[str]:
    """Returns sentences about the structure of the model that its user may not know: its doubts, and how it
    is wrapped.
    """
    wrapping = "" if hasattr(model, "sharding") else _wrapping(sharding_table(model).blocks)
    return [*filter(None, [getattr(model, "doubt", ""), wrapping])]


def _wrapping(blocks: tuple[str, ...]) -> str:
    """Returns a sentence that says how a model without a sharding table is wrapped."""
    match blocks:
        case ():
            what = "none (the model has no ModuleList), so all parameters are one unit"
        case (only,):
            what = f"{only} (the only child of the largest ModuleList), and all other parameters as one unit"
        case (first, *_, last):
            what = (
                f"{first} … {last} (the children of the largest ModuleList), and all other parameters as one "
                "unit"
            )
    return f"blocks: {what}; there is no sharding table, so data parallel only"


def _without_blocks(job: Job, model: nn.Module) -> list[str]:
    """Returns a sentence about settings that act on blocks, if the model has none."""
    asked = {"recompute": ("none", "auto"), "activations": ("keep",), "compile": (False,)}
    idle = [
        f"{name} = {value!r}" for name, usual in asked.items() if (value := getattr(job, name)) not in usual
    ]
    idle += ["offload = 'weights' (but for what 'optimizer' does)"] if job.offload == "weights" else []
    if not idle or sharding_table(model).blocks:
        return []
    have = "have" if len(idle) > 1 else "has"
    return [
        f"the model has no blocks: {', '.join(idle)} {have} no effect; put its layers into a ModuleList, or "
        "name them in sharding()"
    ]


def _not_in_fp8(job: Job, model: nn.Module) -> list[str]:
    """Returns a sentence about weights of blocks that do not multiply in fp8, although the job asks for it,
    if there are some.
    """
    if PRECISIONS[job.precision].fp8 is None:
        return []
    table = sharding_table(model)
    fp8 = {id(layer.weight) for layer in layers_of(model, table)}
    looked_up = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    weights = [
        (name, value) for name, value in model.named_parameters() if table.block_of(name) and value.dim() > 1
    ]
    others = {name: value.numel() for name, value in weights if id(value) not in fp8 | looked_up}
    if not others:
        return []
    there, largest = (
        sum(value.numel() for _, value in weights if id(value) in fp8),
        max(others, key=others.__getitem__),
    )
    return [
        (
            f"precision = {job.precision!r}: {there:,} of {there + sum(others.values()):,} elements of "
            f"weights in blocks multiply in fp8 (torch.nn.Linear whose sizes are multiples of {MULTIPLE}); "
            f"all others, such as {largest!r}, multiply in bf16"
        )
    ]
