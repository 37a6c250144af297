"""Estimates the memory of a member before anything runs: by class, by stage of ZeRO, and by the number of
members that share the state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from elastic.data.loader import Batch
from elastic.engine.optim.base import rule_of
from elastic.engine.peak import peak_bytes
from elastic.errors import JobError
from elastic.job import Job
from elastic.plan.copy_budget import amount
from elastic.plan.memory_need import NOTHING, Need, Transient, first_roomy, least_shard
from elastic.plan.placement import number_of_cells
from elastic.train.checks.demands import taken_by_copies
from elastic.train.gauges.inventory import off_device
from elastic.train.machine.device import (
    all_policies,
    least_whole,
    limit_of,
    most_shards,
    must_name_policy,
    need_of,
    policies_of,
)
from elastic.train.model import BUFFERS, build_model, builder_of, bytes_of, in_its_stage, tensors_of
from elastic.train.session import lengths_of, loss_function, opened
from storage.slices import Tensor

Policy = str | float
"""A value of the setting ``recompute``."""
LOOKED_AT = 65_536
"""Number of samples that are searched for the longest ones."""
STAGES = (0, 1, 2, 3)
"""The stages of ZeRO (Rajbhandari and others 2020, section 5)."""
CHANGES: tuple[dict[str, object], ...] = (
    {"optim.moments": "bf16"},
    {"offload": "optimizer", "parallel.zero": 2},
    {"offload": "weights", "parallel.zero": 2},
)
"""Settings that need less of a device's memory, in the order of what they cost."""
FACTORS = (2, 4, 8, 16, 32)
"""Multiples of ``workers.max`` with which a job that does not fit is tried."""
SPLITS = {
    "2 + 2 + 12, as the ZeRO paper counts": {
        "bf16 weights": 2,
        "bf16 gradients": 2,
        "float32 weights and moments": 12,
    },
    "4 + 4 + 8, as FSDP2 and Elastic hold it": {
        "float32 weights": 4,
        "float32 gradients": 4,
        "float32 moments": 8,
    },
}
"""Bytes for each parameter in mixed precision with Adam, in the two ways in which they are counted."""


def tensors_of_job(job: Job) -> tuple[Tensor, ...]:
    """Returns every tensor of the state of ``job``.  Raises :class:`~elastic.errors.ElasticError` if model or
    optimizer do not fit.
    """
    return tensors_of(build_model(job, builder_of(job)), rule_of(job))


def of_parameters(count: float) -> Iterator[str]:
    """Yields what ``count`` parameters take in mixed precision with Adam: 16 bytes each, and how these are
    made up.
    """
    yield f"{count:.3g} parameters in mixed precision with Adam: {gigabytes(16 * count)}, 16 bytes each"
    for how, parts in SPLITS.items():
        yield f"{how}: " + ", ".join(f"{gigabytes(size * count)} of {what}" for what, size in parts.items())
    yield (
        "a worker that computes with whole weights (zero = 0, 1 or 2, or one worker) also holds "
        f"{gigabytes(2 * count)} of bf16 weights"
    )


def classes(job: Job, tensors: Sequence[Tensor], shards: int, zero: int | None = None) -> dict[str, int]:
    """Returns the bytes that a member holds at the end of a backward pass if ``shards`` members share the
    state.

    The classes are those of ``train/gauges/inventory.py``.  ``zero`` is the stage of ZeRO, if it is not the
    job's.
    """
    need = need_of(job, tensors, zero)
    where = off_device(job)
    weights = bytes_of([tensor for tensor in tensors if tensor.kind == "parameter"])
    moments = bytes_of([tensor for tensor in tensors if tensor.kind.startswith("moment.")])
    return {
        f"weights{where}": -(-weights // shards),
        f"moments{where}": -(-moments // shards),
        "gradients": need.summed(shards),
        **(
            {"computing copies in host memory": need.hosted}
            if need.hosted
            else {"computing copies": need.copies(shards)}
        ),
        "buffers": bytes_of([tensor for tensor in tensors if tensor.kind in BUFFERS]),
    }


def of_job(job: Job, tensors: Sequence[Tensor], found: Mapping[Policy, Need]) -> Iterator[str]:
    """Yields what a member of the largest world holds, by class, and the memory that its copies take of its
    node, with the policy and the stage that ``auto`` chooses.

    ``found`` is the result of :func:`by_recompute`; it is empty if the memory of a microbatch is not known.
    """
    parameters = sum(math.prod(tensor.shape) for tensor in tensors if tensor.kind == "parameter")
    yield f"{parameters:,} parameters; the state takes {gigabytes(bytes_of(tensors))}"
    memory, least, transient = limit_of(job), 1, NOTHING
    if not memory:
        yield (
            "how many workers must share the state depends on the memory of their devices; name this "
            "memory, say --workers.device-gb 80"
        )
    else:
        policy, least = _chosen(job, found or {"none": need_of_state(job)})
        if not least:
            yield _too_small(job, policy, found)
            return
        enough = f"{least} or more workers with {gigabytes(memory)} each"
        yield (
            f"recompute = {policy!r}: {enough} can train"
            if found
            else (f"{enough} have room for the state, without a microbatch")
        )
        transient = found[policy].transient if found else NOTHING
    layout = job.layouts(least)[-1]
    parts = number_of_cells(layout)
    whole = layout.shards > 1 and 0 < least_whole(job, tensors, memory, transient) <= parts
    if whole:
        yield "zero = 2: a device has room for all weights, so they are gathered once a step"
    zero = 2 if whole else None
    held = ", ".join(
        f"{gigabytes(size)} of {name}" for name, size in classes(job, tensors, parts, zero).items() if size
    )
    whose = (
        f"if {parts} of {layout.world} workers share the state, each"
        if parts > 1
        else "if each worker has the whole state, it"
    )
    yield f"{whose} holds {held}; {gigabytes(need_of(job, tensors, zero).held(parts))} on its device"
    yield taken_by_copies(job, bytes_of(tensors), least)


def _chosen(job: Job, found: Mapping[Policy, Need]) -> tuple[Policy, int]:
    """Returns the policy that ``auto`` chooses, and the smallest number of workers that must share the state
    with that policy; 0 if no number is enough.
    """
    least = {policy: least_of(job, need) for policy, need in found.items()}
    policy = first_roomy([*least], least.__getitem__, job.workers.min, most_shards(job))
    return policy, least[policy]


def least_of(job: Job, need: Need) -> int:
    """Returns the smallest number of workers that must share the state; 0 if the memory of devices is not
    known, or is too small.
    """
    return least_shard(need, limit_of(job), most_shards(job))


def _too_small(job: Job, policy: Policy, found: Mapping[Policy, Need]) -> str:
    """Returns the sentence about a job that does not fit, with settings with which it would."""
    way_out = fitting_policy(job) if found else ""
    own, most = f" with recompute = {policy!r}" if way_out else "", job.workers.max
    way_out = way_out or fitting_changes(
        job, min(found, key=lambda each: found[each].transient.shared, default=None)
    )
    few = (
        f"{_workers(most)} with {gigabytes(limit_of(job))}{'' if most == 1 else ' each'} "
        f"{'is' if most == 1 else 'are'} too few"
    )
    return "; ".join(filter(None, [f"it does not fit{own}: {few}", way_out]))


def by_recompute(job: Job) -> dict[Policy, Need]:
    """Returns what training needs with each policy that ``auto`` tries, or with the one that the job names.
    Raises as :func:`needs`.
    """
    return needs(job, policies_of(job))


def needs(job: Job, policies: Sequence[Policy]) -> dict[Policy, Need]:
    """Returns what training needs with each of ``policies``, by a step on tensors that have no values.

    A member that shares the state is tried with as many other members as the job allows, as in a worker's
    warm-up.  Sums of gradients shrink with the number of members and activations do not, so with fewer
    members no more bytes come and go.  If the whole state does not fit a device, the step of a member with
    the whole state is not tried.

    Raises the errors of opening the data, of the model and of the loss.
    """
    batch, builder, loss = _longest(job), builder_of(job), loss_function(job)
    model = build_model(job, builder)
    job = in_its_stage(job, model)
    need, found = need_of(job, tensors_of(model, rule_of(job))), dict[Policy, Need]()
    most = most_shards(job)
    degrees = (1,) if most == 1 else (most,) if 0 < limit_of(job) < need.held(1) else (1, most)
    for policy in policies:
        tried = job.replace(recompute=policy)
        ask = partial(
            peak_bytes, partial(build_model, tried, builder), tried, loss, batch, torch.device("cpu")
        )
        sizes = [max(0, ask(shards) - need.summed(shards)) for shards in degrees]
        found[policy] = replace(need, transient=Transient(sizes[0], sizes[-1]))
    return found


def need_of_state(job: Job) -> Need:
    """Returns what training needs, without the memory that comes and goes in a step."""
    model = build_model(job, builder_of(job))
    return need_of(in_its_stage(job, model), tensors_of(model, rule_of(job)))


def fitting_policy(job: Job) -> str:
    """Returns words that name a setting of ``recompute`` with which a job fits that does not fit with its
    own; "" if there is none.

    Raises as :func:`needs`.
    """
    others = [policy for policy in all_policies(job) if policy not in policies_of(job)]
    policy, least = _chosen(job, needs(job, others)) if others else ("", 0)
    if not least:
        return ""
    why = (
        "; set recompute by hand, since compile = true and reproducible = true"
        if must_name_policy(job) and job.recompute == "auto"
        else ""
    )
    return f"with recompute = {policy!r} it fits from {_workers(least)} on{why}"


def fitting_changes(job: Job, policy: Policy | None) -> str:
    """Returns words that name other settings, each with which alone a job fits that does not fit with its
    own; "" if there are none.

    ``policy`` is the policy that needs least memory; None if the memory of a step is not known.  Raises as
    :func:`needs`.
    """
    found = list[str]()

    def need_with(other: Job) -> Need:
        return need_of_state(other) if policy is None else needs(other, [policy])[policy]

    for changes in CHANGES:
        with suppress(JobError):  # settings of the job that do not go with these
            other = job.replace(**_onto(job, changes))
            if least := least_of(other, need_with(other)):
                found.append(
                    f"with {' and '.join(f'{name} = {value!r}' for name, value in changes.items())} from "
                    f"{_workers(least)} on"
                )
    with suppress(JobError):
        larger = (job.replace(**_onto(job, {"workers.max": factor * job.workers.max})) for factor in FACTORS)
        need = need_with(first := next(larger))  # of two that share the state, so that of all others too
        if least := next(filter(None, (least_of(other, need) for other in chain([first], larger))), 0):
            found.append(f"with workers.max = {least} or more")
    return f"it fits {', or '.join(found)}" if found else ""


def _onto(job: Job, changes: Mapping[str, object]) -> dict[str, object]:
    """Returns the arguments of ``job.replace`` for settings by their dotted names."""
    found = dict[str, Any]()
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        found[section or name] = getattr(job, section).model_copy(update={key: value}) if section else value
    return found


def _workers(number: int) -> str:
    return f"{number} worker{'s' * (number != 1)}"


def unnamed_policy(job: Job) -> str:
    """Returns a sentence about a job that does not fit because it must name its ``recompute``, and does not;
    "" for any other job.

    It is an estimate, before a worker has measured memory.  If the model or the loss does not run on tensors
    without values, nothing is known and the result is "".
    """
    if not limit_of(job) or job.recompute != "auto" or not must_name_policy(job):
        return ""
    with suppress(Exception):  # of the user's code
        if not _chosen(job, by_recompute(job))[1] and (way_out := fitting_policy(job)):
            return (
                "recompute = 'auto' keeps all activations with these settings, and "
                f"{gigabytes(limit_of(job))} for each worker seem too few; {way_out}"
            )
    return ""


def _longest(job: Job) -> Batch:
    """Returns a microbatch of the first samples; with ``group_by_length`` of the longest of the first
    ``LOOKED_AT``.
    """
    dataset, size = opened(job), job.microbatch_size
    ids = tuple(range(size))
    if job.data.group_by_length:
        some = tuple(range(min(len(dataset), LOOKED_AT)))
        lengths = dict(zip(some, lengths_of(job, dataset)(some), strict=True))
        ids = tuple(sorted(some, key=lengths.__getitem__, reverse=True)[:size])
    return dataset.read(ids)


def by_stage(job: Job, tensors: Sequence[Tensor], most: int) -> list[tuple[int, list[int]]]:
    """Returns pairs (members that share the state, bytes that must fit the device of one for each of
    ``STAGES``): 1, 2, 4, … ``most``.

    The bytes are the larger of two numbers: those held at the end of a backward pass, and those held while a
    world forms, when the old part is beside the new one.
    """
    counts = sorted({*(2**power for power in range(most.bit_length())), most})
    needs = {zero: need_of(job, tensors, zero) for zero in STAGES}
    return [
        (shards, [need.of_a_member(shards if zero else 1) for zero, need in needs.items()])
        for shards in counts
    ]


def gigabytes(size: float) -> str:
    """Returns a number of bytes as text, to a tenth of a GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else amount(size)
