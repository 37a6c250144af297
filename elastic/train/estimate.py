"""Estimates the memory of a member before anything runs: by class, by stage of ZeRO, and by the number of members that share the state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from elastic.data.loader import Batch
from elastic.engine.optim.base import rule_of
from elastic.engine.peak import peak_bytes
from elastic.errors import JobError
from elastic.job import Job
from elastic.plan.copy_budget import amount, explained
from elastic.plan.memory import NOTHING, Need, Transient, first_roomy, least_shard
from elastic.train.inventory import off_device
from elastic.train.machine.device import (
    all_policies,
    gathers_of,
    least_whole,
    memory_of,
    most_shards,
    must_name_policy,
    need_of,
    policies_of,
)
from elastic.train.model import BUFFERS, build_model, builder_of, bytes_of, in_its_stage, tensors_of
from elastic.train.session import lengths_of, loss_of, opened
from storage.slices import Tensor

Policy = str | float
"""A value of the setting ``recompute``."""
LOOKED_AT = 65_536
"""Number of samples among which the longest are looked for."""
STAGES = (0, 1, 2, 3)
"""The stages of ZeRO (Rajbhandari and others 2020, section 5)."""
CHANGES: tuple[dict[str, object], ...] = (
    {"optim.moments": "bf16"},
    {"offload": "optimizer", "parallel.zero": 2},
    {"offload": "weights", "parallel.zero": 2},
)
"""Settings that need less of a device's memory, in the order of what they cost."""
FACTORS = (2, 4, 8, 16, 32)
"""Numbers of times its ``workers.max`` that a job is tried with."""
SPLITS = {
    "2 + 2 + 12, as the ZeRO paper counts": {"bf16 weights": 2, "bf16 gradients": 2, "float32 weights and moments": 12},
    "4 + 4 + 8, as FSDP2 and Elastic hold it": {"float32 weights": 4, "float32 gradients": 4, "float32 moments": 8},
}
"""Bytes for each parameter in mixed precision with Adam, in the two ways in which they are counted."""


def tensors_of_job(job: Job) -> tuple[Tensor, ...]:
    """Returns every tensor of the state of ``job``.  Raises :class:`~elastic.errors.ElasticError` if model or optimizer do not fit."""
    return tensors_of(build_model(job, builder_of(job)), rule_of(job))


def of_parameters(count: float) -> Iterator[str]:
    """Yields what ``count`` parameters take in mixed precision with Adam: 16 bytes each, and how these are made up."""
    yield f"{count:.3g} parameters in mixed precision with Adam: {gigabytes(16 * count)}, 16 bytes each"
    for how, parts in SPLITS.items():
        yield f"{how}: " + ", ".join(f"{gigabytes(size * count)} of {what}" for what, size in parts.items())
    yield f"a worker that computes with whole weights (zero = 0, 1 or 2, or one worker) also holds {gigabytes(2 * count)} of bf16 weights"


def classes(job: Job, tensors: Sequence[Tensor], shards: int, zero: int | None = None) -> dict[str, int]:
    """Returns the bytes that a member holds at the end of a backward pass if ``shards`` members share the state.

    The classes are those of ``train/inventory.py``.  ``zero`` is the stage of ZeRO, if it is not the job's.
    """
    need = need_of(job, tensors, zero)
    where = off_device(job)
    weights = bytes_of([tensor for tensor in tensors if tensor.kind == "parameter"])
    moments = bytes_of([tensor for tensor in tensors if tensor.kind.startswith("moment.")])
    return {
        f"weights{where}": -(-weights // shards),
        f"moments{where}": -(-moments // shards),
        "gradients": need.gradients if need.deferred else -(-need.gradients // shards),
        **({"computing copies in host memory": need.hosted} if need.hosted else {"computing copies": need.copies(shards)}),
        "buffers": bytes_of([tensor for tensor in tensors if tensor.kind in BUFFERS]),
    }


@dataclass(frozen=True)
class Tried:
    """One setting of ``recompute``, and the memory that it asks for."""

    policy: Policy
    transient: Transient
    least: int
    """Smallest number of workers that must share the state; 0 if the memory of devices is not known, or if the state does not fit."""


def of_job(job: Job, tensors: Sequence[Tensor], tried: Sequence[Tried]) -> Iterator[str]:
    """Yields what a member of the largest world holds, by class, and what its copies take of its node, with what ``auto`` takes."""
    parameters = sum(math.prod(tensor.shape) for tensor in tensors if tensor.kind == "parameter")
    yield f"{parameters:,} parameters; the state takes {gigabytes(bytes_of(tensors))}"
    by_policy, memory, least = {each.policy: each.least for each in tried}, memory_of(job, torch.device("cpu")), 1
    if not memory:
        yield "how many workers must share it depends on the memory of their devices; name that, say --workers.device-gb 80"
    else:
        by_policy = by_policy or {"none": least_shard(foreseen(job, tensors), memory, most_shards(job))}
        policy = first_roomy([*by_policy], by_policy.__getitem__, job.workers.min, most_shards(job))
        if not (least := by_policy[policy]):
            way_out = fitting_policy(job, tensors) if tried else ""
            own = f" with recompute = {policy!r}" if way_out else ""
            smallest = min(tried, key=lambda each: each.transient.shared, default=None)
            one, way_out = job.workers.max == 1, way_out or fitting_changes(job, smallest)
            few = f"{_workers(job.workers.max)} with {gigabytes(memory)}{'' if one else ' each'} {'is' if one else 'are'} too few"
            yield "; ".join(filter(None, [f"it does not fit{own}: {few}", way_out]))
            return
        yield f"recompute = {policy!r}: {least} or more workers with {gigabytes(memory)} each can train"
    layouts = job.layouts(least)
    shards = layouts[-1].dp_shard
    transient = next((each.transient.shared for each in tried if memory and each.policy == policy), 0)
    whole = shards > 1 and 0 < least_whole(job, tensors, memory, transient) <= shards
    if whole:
        yield "zero = 2: there is room for all weights to compute with, so they are gathered once a step"
    found = classes(job, tensors, shards, 2 if whole else None)
    held = ", ".join(f"{gigabytes(size)} of {name}" for name, size in found.items() if size)
    world = layouts[-1].world
    whose = f"if {shards} of {world} workers share the state, each" if shards > 1 else "if each worker has the whole state, it"
    yield f"{whose} holds {held}; {gigabytes(_on_device(job, found))} on its device"
    passing = foreseen(job, tensors).passing if shards > 1 and not whole else NOTHING
    if passing != NOTHING:
        yield (
            f"blocks are gathered one after the other: {gigabytes(passing.beside)} of weights and gradients come and go beside the "
            f"activations of a microbatch, and {gigabytes(passing.after)} at the end of its backward pass"
        )
    rule = job.rules()
    parts = [bytes_of(tensors) / layout.dp_shard for layout in layouts]
    yield explained(parts[-1], max(parts), rule.copy_every, rule.buddy_every, offload=job.offloads, folder=job.offload_folder)


def by_recompute(job: Job, tensors: Sequence[Tensor]) -> list[Tried]:
    """Returns what ``auto`` tries, or the one policy that the job names.

    Raises what opening the data raises, and what model or loss raise: they run with tensors that have no values.
    """
    return _tried(job, tensors, policies_of(job) if job.recompute == "auto" else (job.recompute,))


def _tried(job: Job, tensors: Sequence[Tensor], policies: Sequence[Policy]) -> list[Tried]:
    memory, need, most, found = memory_of(job, torch.device("cpu")), foreseen(job, tensors), most_shards(job), list[Tried]()
    for policy, transient in transients(job, policies).items():
        least = least_shard(need.with_transient(transient), memory, most) if memory else 0
        found.append(Tried(policy, transient, least))
    return found


def foreseen(job: Job, tensors: Sequence[Tensor]) -> Need:
    """Returns what training needs beside activations, as long as no worker has measured anything."""
    job = in_its_stage(job, build_model(job, builder_of(job)))
    return replace(need_of(job, tensors), passing=gathers_of(job, tensors))


def fitting_policy(job: Job, tensors: Sequence[Tensor]) -> str:
    """Returns words that name a setting of ``recompute`` with which a job fits that does not fit with its own; "" if there is none.

    Raises as :func:`by_recompute`.
    """
    own = policies_of(job) if job.recompute == "auto" else (job.recompute,)
    others = [policy for policy in all_policies(job) if policy not in own]
    by_policy = {each.policy: each.least for each in _tried(job, tensors, others)} if others else {}
    policy = first_roomy([*by_policy], by_policy.__getitem__, job.workers.min, most_shards(job)) if by_policy else ""
    if not by_policy.get(policy):
        return ""
    why = "; a compiled reproducible job must name it" if must_name_policy(job) and job.recompute == "auto" else ""
    return f"with recompute = {policy!r} it fits from {_workers(by_policy[policy])} on{why}"


def fitting_changes(job: Job, tried: Tried | None) -> str:
    """Returns words that name other settings, each with which alone a job fits that does not fit with its own; "" if there are none.

    ``tried`` has the policy that needs least; it is None if what a step takes is not known.  Raises as :func:`by_recompute`.
    """
    memory, found = memory_of(job, torch.device("cpu")), list[str]()

    def takes(other: Job) -> Transient:
        return transients(other, [tried.policy])[tried.policy] if tried is not None else Transient(0, 0)

    for changes in CHANGES:
        with suppress(JobError):  # settings of the job that do not go with these
            other = job.replace(**_onto(job, changes))
            if least := _least(other, takes(other), memory):
                found.append(f"with {' and '.join(f'{name} = {value!r}' for name, value in changes.items())} from {_workers(least)} on")
    with suppress(JobError):
        larger = (job.replace(**_onto(job, {"workers.max": factor * job.workers.max})) for factor in FACTORS)
        first = next(larger)
        transient = takes(first)  # of two that share the state, so that of all others too
        if least := next(filter(None, (_least(other, transient, memory) for other in chain([first], larger))), 0):
            found.append(f"with workers.max = {least} or more")
    return f"it fits {', or '.join(found)}" if found else ""


def _onto(job: Job, changes: Mapping[str, object]) -> dict[str, object]:
    """Returns the arguments of ``job.replace`` for settings by their dotted names."""
    found = dict[str, Any]()
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        found[section or name] = getattr(job, section).model_copy(update={key: value}) if section else value
    return found


def _least(job: Job, transient: Transient, memory: int) -> int:
    return least_shard(foreseen(job, tensors_of_job(job)).with_transient(transient), memory, most_shards(job))


def _workers(number: int) -> str:
    return f"{number} worker{'s' * (number != 1)}"


def unnamed_policy(job: Job, tensors: Sequence[Tensor]) -> str:
    """Returns a sentence about a job that does not fit because it must name its ``recompute``, and does not; "" for any other one.

    It is a guess before a worker has measured anything.  A model or a loss that does not run without values says nothing about memory.
    """
    memory = memory_of(job, torch.device("cpu"))
    if not memory or job.recompute != "auto" or not must_name_policy(job):
        return ""
    with suppress(Exception):  # of the user's code
        if not any(each.least for each in by_recompute(job, tensors)) and (way_out := fitting_policy(job, tensors)):
            return f"recompute = 'auto' keeps everything here, and {gigabytes(memory)} for each worker seem too few; {way_out}"
    return ""


def transients(job: Job, policies: Sequence[Policy]) -> dict[Policy, Transient]:
    """Returns the bytes that come and go in a step, for each of ``policies``.  Raises as :func:`by_recompute`.

    Sums of gradients are not among them, as :func:`~elastic.train.machine.device.need_of` has these.  A member that shares the state has
    half of it, since with more members less comes and goes.  Where the whole state does not fit a device anyway, its step is not tried.
    """
    batch, builder, loss = _longest(job), builder_of(job), loss_of(job)
    model = build_model(job, builder)
    job = in_its_stage(job, model)
    need, device = need_of(job, tensors_of(model, rule_of(job))), torch.device("cpu")

    def found(policy: Policy, shards: int) -> int:
        tried = job.replace(recompute=policy)
        return max(0, peak_bytes(partial(build_model, tried, builder), tried, loss, batch, device, shards) - need.summed(shards))

    degrees = (1,) if most_shards(job) == 1 else (2,) if 0 < memory_of(job, device) < need.held(1) else (1, 2)
    tried = {policy: [found(policy, shards) for shards in degrees] for policy in policies}
    return {policy: Transient(sizes[0], sizes[-1]) for policy, sizes in tried.items()}


def _longest(job: Job) -> Batch:
    """Returns a microbatch of the first samples; with ``group_by_length`` of the longest of the first ``LOOKED_AT``."""
    dataset, size = opened(job), job.microbatch_size
    ids = tuple(range(size))
    if job.data.group_by_length:
        some = tuple(range(min(len(dataset), LOOKED_AT)))
        lengths = dict(zip(some, lengths_of(job, dataset)(some), strict=True))
        ids = tuple(sorted(some, key=lengths.__getitem__, reverse=True)[:size])
    return dataset.read(ids)


def by_stage(job: Job, tensors: Sequence[Tensor], most: int) -> list[tuple[int, list[int]]]:
    """Returns pairs (members that share the state, bytes that must fit the device of one for each of ``STAGES``): 1, 2, 4, … ``most``.

    That is what it holds at the end of a backward pass, or while a world forms: an old part beside the new one.
    """
    counts = sorted({*(2**power for power in range(most.bit_length())), most})
    needs = {zero: need_of(job, tensors, zero) for zero in STAGES}
    return [(shards, [need.of_a_member(shards if zero else 1) for zero, need in needs.items()]) for shards in counts]


def _on_device(job: Job, found: dict[str, int]) -> int:
    elsewhere = off_device(job)
    return sum(size for name, size in found.items() if not elsewhere or not name.endswith(elsewhere))


def gigabytes(size: float) -> str:
    """Returns a number of bytes as text, to a tenth of a GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else amount(size)
