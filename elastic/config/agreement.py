"""Checks over several settings of a job, which must fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from elastic.config.optimizers import OPTIMIZERS
from elastic.plan.layout import uneven_experts
from elastic.plan.mixture import MOST_TURNS, shares

if TYPE_CHECKING:
    from elastic.config.sections import Deadlines, Optim, Samples, Validation
    from elastic.job import Job

FENCED_LEASES = 4
"""Longest fence, in leases.  A worker that hears no coordinator ends after two leases; the fence may last
twice as long.
"""


def disagreements(job: Job) -> Iterator[str]:
    """Yields a sentence for each check over several settings that fails."""
    if job.global_batch != "all" and job.microbatch != "auto" and (rest := job.global_batch % job.microbatch):
        near = [n for n in (job.global_batch - rest, job.global_batch - rest + job.microbatch) if n]
        yield (
            f"global_batch = {job.global_batch} is not a multiple of microbatch = {job.microbatch}; the "
            f"nearest {'are' if len(near) > 1 else 'is'} {' and '.join(map(str, near))}"
        )
    if job.precision != "fp16" and job.loss_scale != "dynamic":
        yield (
            f"loss_scale = {job.loss_scale:g} is for precision = 'fp16', but precision = "
            f"{job.precision!r}; leave loss_scale out, or set precision to 'fp16'"
        )
    if job.activations != "keep" and job.recompute in ("sqrt", "selective"):
        yield (
            f"activations = {job.activations!r} has no effect with recompute = {job.recompute!r}; set "
            "recompute to 'none', 'attention' or 'block', or leave activations out"
        )
    if job.data.group_by_length and job.compile and job.reproducible:
        yield (
            "data.group_by_length = true with compile = true and reproducible = true: compiled code "
            "for a length depends on the lengths that a process has seen before, so results would "
            "differ; leave one of the three settings out"
        )
    if job.workers.rerun_every and not job.reproducible:
        yield (
            f"workers.rerun_every = {job.workers.rerun_every} needs reproducible = true, because without it two "
            "workers may rightly get different gradients; set reproducible to true, or leave it out"
        )
    for more in (_validation, _schedule, _ramp, _weights, _attention, _owed, _spikes, _notices):
        yield from more(job)
    yield from _unused(job.optim)
    yield from _groups(job.optim)
    if job.parallel.zero == 0 and (job.parallel.shards not in (1, None) or job.parallel.min_shard > 1):
        cut = "min_shard" if job.parallel.shards is None else "dp_shard"
        yield (
            f"parallel.zero = 0 shares nothing, so parallel.{cut} = {getattr(job.parallel, cut)} is "
            "not possible; leave one of the two settings out"
        )
    if not job.parallel.coming and (uneven := uneven_experts(*job.parallel.experts)):
        yield uneven
    if job.parallel.bucket_elements != "block" and _gathers_blocks(job):
        yield (
            f"parallel.bucket_elements = {job.parallel.bucket_elements} with parallel.zero = "
            f"{job.parallel.zero!r}: stage 3 always gathers one block at a time; set parallel.zero to "
            "0, 1 or 2, or leave parallel.bucket_elements out"
        )
    if job.profiled() and job.profiled()[0] > job.steps:
        yield (
            f"profile = {job.profile!r} begins after the last step (steps = {job.steps}); set profile "
            "to earlier steps"
        )
    yield from _offload(job)
    yield from _kept(job)
    if not job.workers.gpus and any(fault.kind == "device_assert" for fault in job.faults):
        yield (
            "faults: kind = 'device_assert' needs an accelerator, but workers.gpus = 0; set "
            "workers.gpus to 1, or use another kind of fault"
        )
    yield from _deadlines(job.deadlines)
    if job.copies.copy_every == 0 and job.copies.buddy_every not in (0, "auto"):
        yield (
            f"copies.buddy_every = {job.copies.buddy_every} with copies.copy_every = 0: there is no copy "
            "that could go to a buddy; set copies.copy_every to 1 or more, or copies.buddy_every to 0"
        )
    if job.workers.min > job.workers.max:
        yield (
            f"workers.min = {job.workers.min} is more than workers.max = {job.workers.max}; raise "
            "workers.max or lower workers.min"
        )
        return
    try:
        if not job.parallel.coming:  # which is refused by a sentence of its own
            job.layout_rule().check(job.workers.min, job.workers.max)
    except ValueError as error:
        yield str(error)


def _turned_off(section: Samples | Validation) -> bool:
    """Returns whether somebody has said ``every = 0``, and has not merely left it out."""
    return "every" in section.model_fields_set and not section.every


def _validation(job: Job) -> Iterator[str]:
    """Yields a sentence for a setting of a validation that there is not."""
    set_ = [name for name in ("samples", "dataset", "args") if getattr(job.validation, name)]
    if not job.validation.every and set_ and not _turned_off(job.validation):
        them = " and ".join(f"validation.{name} = {getattr(job.validation, name)!r}" for name in set_)
        has, out = ("has", f"validation.{set_[0]}") if len(set_) == 1 else ("have", "all of these")
        yield (
            f"validation.every = 0 measures nothing, so {them} {has} no effect; set validation.every to a "
            f"number of steps, or leave {out} out"
        )


def _kept(job: Job) -> Iterator[str]:
    """Yields a sentence for each rule of retention that cannot work."""
    rules, validation = job.checkpoint, job.validation
    if rules.keep_last == 1:
        yield (
            "checkpoint.keep_last = 1 leaves nothing to go on from if the newest checkpoint turns out to be "
            "damaged; set it to 2 or more, or to 0 to keep all"
        )
    others = {
        f"keep_every = {rules.keep_every}": rules.keep_every,
        "keep_best = true": rules.keep_best,
        f"keep_younger = {rules.keep_younger!r}": rules.keep_younger,
    }
    named = next((each for each, is_set in others.items() if is_set), "")
    if not rules.keep_last and named and "keep_last" not in rules.model_fields_set:
        yield (
            f"checkpoint.{named} has no effect with checkpoint.keep_last = 0, which keeps all; set "
            f"checkpoint.keep_last to 2 or more, or leave checkpoint.{named.partition(' ')[0]} out"
        )
    if validation.patience and (not validation.every or validation.every % rules.save_every):
        yield (
            f"validation.patience = {validation.patience} with validation.every = {validation.every}: "
            "a run can end only at a step that is both validated and saved; set validation.every to a "
            f"multiple of checkpoint.save_every = {rules.save_every}, or leave validation.patience out"
        )
    if (
        rules.keep_best
        and not _turned_off(validation)
        and (not validation.every or validation.every % rules.save_every)
    ):
        yield (
            f"checkpoint.keep_best = true with validation.every = {validation.every}: only a step that "
            "is both validated and saved can be kept; set validation.every to a multiple of "
            f"checkpoint.save_every = {rules.save_every}, or leave checkpoint.keep_best out"
        )


def _owed(job: Job) -> Iterator[str]:
    """Yields a sentence for each thing that no checkpoint could owe."""
    save_every, samples = job.checkpoint.save_every, job.samples
    by_spares = job.validation.every if job.validation.by == "spares" else 0
    if by_spares and not job.workers.spares:
        yield (
            "validation.by = 'spares' with workers.spares = 0: no worker would validate; set "
            "workers.spares to 1, or leave validation.by out"
        )
    for name, every in (("export", job.export.every), ("samples", samples.every), ("validation", by_spares)):
        if every % save_every:
            near = [n for n in (every - every % save_every, every - every % save_every + save_every) if n]
            yield (
                f"{name}.every = {every} is not a multiple of checkpoint.save_every = {save_every}, "
                f"but needs a checkpoint each time; the nearest {'are' if len(near) > 1 else 'is'} "
                f"{' and '.join(map(str, near))}"
            )
    if samples.every and not samples.prompts:
        yield (
            f"samples.every = {samples.every} without samples.prompts: there is no text to continue; "
            "set samples.prompts to a list of texts"
        )
    defaults = {name: each.default for name, each in type(samples).model_fields.items()}
    set_ = [name for name, default in defaults.items() if getattr(samples, name) != default]
    if set_ and not samples.every and not _turned_off(samples):
        yield (
            f"samples.every = 0 writes nothing, so samples.{set_[0]} = {getattr(samples, set_[0])!r} has no "
            f"effect; set samples.every to a number of steps, or leave samples.{set_[0]} out"
        )


def _gathers_blocks(job: Job) -> bool:
    """Returns whether there may be worlds in which weights are gathered block by block (stage 3 of ZeRO)."""
    return job.zero == 3 or (job.zero == "auto" and job.parallel.shards != 1)


def _offload(job: Job) -> Iterator[str]:
    """Yields a sentence for each setting with which the state cannot live in the memory of the node."""
    if job.offload_folder and not job.offloads:
        yield (
            f"offload_folder = {job.offload_folder!r} has no effect with offload = 'none'; set offload "
            "to 'optimizer' or 'weights', or leave offload_folder out"
        )
    if not job.offload_folder and job.offload_buffer_gb != 1:
        yield (
            f"offload_buffer_gb = {job.offload_buffer_gb:g} has no effect without offload_folder; set "
            "offload_folder to a folder of a local disk, or leave offload_buffer_gb out"
        )
    if not job.offloads:
        return
    named, zero = f"offload = {job.offload!r}", job.parallel.zero
    if _gathers_blocks(job):
        yield (
            f"parallel.zero = {zero!r} with {named}: stage 3 gathers weights block by block, and "
            "cannot gather them from the memory of the node; set parallel.zero to 2, or to 0 if no "
            "state is shared"
        )
    if job.copies.copy_every not in (1, "auto"):
        yield (
            f"copies.copy_every = {job.copies.copy_every} with {named}: offloaded state is kept in the "
            "copies, so each step must make a copy; set copies.copy_every to 1, or leave it out"
        )


def _attention(job: Job) -> Iterator[str]:
    if job.attention != "flash-4":
        return
    if job.precision == "fp32":
        yield (
            "attention = 'flash-4' needs 16 bits, but precision = 'fp32'; set precision to 'bf16', or "
            "attention to 'auto'"
        )


def _spikes(job: Job) -> Iterator[str]:
    if job.spikes.microbatch_z and job.spikes.off:
        yield (
            f"spikes.microbatch_z = {job.spikes.microbatch_z:g} with spikes.action = "
            f"{job.spikes.action!r} has no effect; set spikes.action to 'quarantine', 'skip' or 'warn', "
            "or spikes.microbatch_z to 0"
        )


def _schedule(job: Job) -> Iterator[str]:
    """Yields a sentence for each part of the schedule that does not fit the others."""
    schedule = job.schedule
    if own := ":" in schedule.kind:
        for name in ("warmup_steps", "final", "decay_steps"):
            if (value := getattr(schedule, name)) != type(schedule).model_fields[name].default:
                yield (
                    f"schedule.{name} = {value} with schedule.kind = {schedule.kind!r}: your own "
                    f"schedule decides the rate of every step; leave schedule.{name} out, or pass its "
                    "value in schedule.args"
                )
    elif schedule.args:
        yield (
            f"schedule.args = {schedule.args} have no effect with schedule.kind = {schedule.kind!r}, "
            "only with a schedule of your own; leave schedule.args out"
        )
    if own:
        return
    if schedule.kind in LEVEL and schedule.final != type(schedule).model_fields["final"].default:
        yield (
            f"schedule.final = {schedule.final:g} has no effect with schedule.kind = "
            f"{schedule.kind!r}, which has no final rate; leave schedule.final out, or set "
            "schedule.kind to 'cosine', 'linear' or 'wsd'"
        )
    warmup, decay, steps = schedule.warmup_steps, schedule.decay_steps, job.steps
    if warmup > steps:
        yield (
            f"schedule.warmup_steps = {warmup} is more than steps = {steps}; lower "
            "schedule.warmup_steps, or raise steps"
        )
    if schedule.kind == "wsd" and not decay:
        yield (
            "schedule.decay_steps = 0 with schedule.kind = 'wsd': the rate would never fall; set "
            "schedule.decay_steps, for example to a tenth of steps"
        )
    elif schedule.kind != "wsd" and decay:
        yield (
            f"schedule.decay_steps = {decay} has no effect with schedule.kind = {schedule.kind!r}, "
            "only with 'wsd'; leave schedule.decay_steps out, or set schedule.kind to 'wsd'"
        )
    elif warmup <= steps < warmup + decay:
        yield (
            f"schedule.warmup_steps = {warmup} and schedule.decay_steps = {decay} are together more "
            f"than steps = {steps}; lower one of them, or raise steps"
        )


def _weights(job: Job) -> Iterator[str]:
    """Yields a sentence for weights of a mixture by which nothing can be drawn."""
    if job.data.weights and not any(job.data.weights):
        yield (
            f"data.weights = {list(job.data.weights)}: at least one part of a mixture must have a "
            "weight above 0; raise one weight"
        )
    if (turns := sum(whole := shares(job.data.weights))) > MOST_TURNS:
        yield (
            f"data.weights = {list(job.data.weights)} are {' : '.join(map(str, whole))} in whole "
            f"numbers, whose sum is {turns} and may be at most {MOST_TURNS}; round the weights to at "
            "most four digits, so that they add up to 1"
        )


def _ramp(job: Job) -> Iterator[str]:
    """Yields a sentence for each part of the batch ramp that does not fit the others."""
    ramp, names = job.batch_ramp, ("start", "increment", "samples")
    if not any(values := [getattr(ramp, name) for name in names]):
        return
    if not all(values):
        missing = " and ".join(
            f"batch_ramp.{name}" for name, value in zip(names, values, strict=True) if not value
        )
        yield (
            f"{missing} = 0: a batch ramp needs all of {', '.join(names)}; set all of them, or none of them"
        )
        return
    for name in ("start", "increment"):
        if job.microbatch != "auto" and (value := getattr(ramp, name)) % job.microbatch:
            yield (
                f"batch_ramp.{name} = {value} is not a multiple of microbatch = {job.microbatch}; "
                "use a multiple"
            )
    if job.global_batch == "all":
        yield (
            f"batch_ramp.start = {ramp.start} with global_batch = 'all': a ramp needs a number to grow "
            "to; set global_batch to a number, or leave [batch_ramp] out"
        )
    elif ramp.start >= job.global_batch or (job.global_batch - ramp.start) % ramp.increment:
        yield (
            f"batch_ramp.start = {ramp.start} does not grow to global_batch = {job.global_batch} by "
            f"batch_ramp.increment = {ramp.increment}; the difference of global_batch and "
            "batch_ramp.start must be a multiple of batch_ramp.increment"
        )


LEVEL = ("constant", "rsqrt")
"""The kinds of schedule that do not fall to ``schedule.final``."""


def _unused(optim: Optim) -> Iterator[str]:
    """Yields a sentence for each setting that the optimizer would not read, unless it has its default."""
    if (built_in := OPTIMIZERS.get(optim.kind)) is None:
        return  # the user's own, which may read any of them
    if optim.args:
        yield (
            f"optim.args = {optim.args} has no effect with optim.kind = {optim.kind!r}, which takes "
            f"its settings from [optim] itself, such as optim.{built_in.reads[0]}; leave optim.args out, or name "
            "an optimizer of your own: optim.kind = 'pkg.module:RULE'"
        )
    for name in sorted({name for each in OPTIMIZERS.values() for name in each.reads} - {*built_in.reads}):
        value, default = getattr(optim, name), type(optim).model_fields[name].default
        if value != default:
            readers = ", ".join(kind for kind, each in OPTIMIZERS.items() if name in each.reads)
            yield (
                f"optim.{name} = {value!r} has no effect with optim.kind = {optim.kind!r}, only with "
                f"{readers}; leave optim.{name} out"
            )
    if optim.kind == "muon" and optim.decay == "l2":
        yield (
            "optim.decay = 'l2' with optim.kind = 'muon': 'l2' would turn the direction of an update, "
            "and shrink no weight; use optim.decay = 'decoupled'"
        )


def _groups(optim: Optim) -> Iterator[str]:
    """Yields a sentence for each group of parameters that has the names of an earlier one."""
    names = [sorted(set(group.names)) for group in optim.groups]
    for number, each in enumerate(names):
        if (first := names.index(each)) < number:
            yield (
                f"optim.groups[{number}].names = {list(optim.groups[number].names)} are the names of "
                f"optim.groups[{first}], too, and only the first group that matches counts; leave one "
                "of the two groups out"
            )


def _notices(job: Job) -> Iterator[str]:
    """Yields a sentence for a file or a command that is not looked at, or that is to be and is not set."""
    for name in ("file", "command"):
        value, sources = getattr(job.notices, name), job.notices.sources
        if name in sources and not value:
            yield f"notices.sources has {name!r}, but notices.{name} is not set; set it, or leave {name!r} out"
        if value and not {name, "auto"} & {*sources}:
            yield (
                f"notices.{name} = {value!r} has no effect, because notices.sources has neither 'auto' nor "
                f"{name!r}; add {name!r} to it, or leave notices.{name} out"
            )


def idle(job: Job) -> Iterator[str]:
    """Yields a sentence for each setting that has no effect because what it belongs to is turned off, or less
    than one may expect.

    Such a setting is no error: who turns something off for one run, by one word, leaves the rest of the file
    as it is.
    """
    off = {
        "spikes.action = 'none'": (job.spikes.action == "none", "spikes", ("z", "window")),
        "validation.patience = 0": (not job.validation.patience, "validation", ("min_delta",)),
        "watch.every = 0": (
            not job.watch.every,
            "watch",
            ("patience", "vanishing", "exploding", "stationary"),
        ),
        "copies.copy_every = 0": (job.copies.copy_every == 0, "copies", ("cross_zone", "link_share")),
        "copies.buddy_every = 0": (
            job.copies.copy_every != 0 and job.copies.buddy_every == 0,
            "copies",
            ("cross_zone", "link_share"),
        ),
        "validation.every = 0": (
            not job.validation.every,
            "validation",
            ("by", "samples", "dataset", "args"),
        ),
        "samples.every = 0": (not job.samples.every, "samples", ("prompts", "tokens", "temperature", "seed")),
        "checkpoint.keep_last = 0": (
            not job.checkpoint.keep_last,
            "checkpoint",
            ("keep_every", "keep_best", "keep_younger"),
        ),
        "samples.temperature = 0": (
            bool(job.samples.every) and not job.samples.temperature,
            "samples",
            ("seed",),
        ),
    }
    for why, (is_off, name, settings) in off.items():
        section = getattr(job, name)
        for each in settings if is_off else ():
            if (value := getattr(section, each)) != type(section).model_fields[each].default:
                told = (
                    f"{value:g}"
                    if isinstance(value, float)
                    else str(value).lower()
                    if isinstance(value, bool)
                    else repr(value)
                )
                yield (
                    f"{name}.{each} = {told} has no effect while {why}; change "
                    f"{why.partition(' ')[0]}, or leave {name}.{each} out"
                )
    if job.checkpoint.keep_best and job.checkpoint.keep_last and not job.validation.every:
        yield (
            "checkpoint.keep_best = true while validation.every = 0: without a validation no "
            "checkpoint is the best, so none is ever deleted; set validation.every, or "
            "checkpoint.keep_best = false"
        )
    if job.optim.average and job.validation.every:
        yield (
            f"optim.average = {job.optim.average:g} with validation.every = {job.validation.every}: "
            "the run validates its weights, not their average, so 'best' is the best by its weights; "
            "`elastic evaluate --average` measures the average"
        )


def _deadlines(deadlines: Deadlines) -> Iterator[str]:
    """Yields a sentence for each deadline that is so short that healthy processes would miss it."""
    rhythm = {
        "lease_s": (1, "a worker renews its lease four times in this time, and healthy workers would stop"),
        "stall_s": (
            1,
            "keepers report the steps of their workers every 0.5 s, and healthy workers would be blamed",
        ),
        "silence_s": (
            2,
            "each node sends a sign of life every 0.5 s, and healthy nodes would count as silent",
        ),
        "driver_s": (
            1,
            (
                "the command that follows the run calls ten times a second, and a healthy command would "
                "count as gone"
            ),
        ),
        "wait_s": (1, "no worker can start in less time, and the run would give up"),
    }
    for name, (least_s, why) in rhythm.items():
        if (value := getattr(deadlines, name)) < least_s:
            yield f"deadlines.{name} = {value:g} is less than {least_s:g}: {why}; raise it"
    lease_s, fence_s = deadlines.lease_s, deadlines.fence_s
    if lease_s >= 1 and fence_s > FENCED_LEASES * lease_s:
        yield (
            f"deadlines.fence_s = {fence_s:g} is more than {FENCED_LEASES} × deadlines.lease_s = "
            f"{lease_s:g}: a worker that no coordinator calls ends itself after two leases, so a "
            "longer wait for its answer is in vain; lower deadlines.fence_s or raise deadlines.lease_s"
        )
