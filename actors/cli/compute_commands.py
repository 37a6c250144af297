"""The commands that compute in this process: estimate, evaluate, rerun.  Each imports PyTorch when it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.cli.job_file import JobFile, import_from_here
from actors.cli.parser import command
from actors.terminal import say, show_table
from elastic.code.imports import failure
from elastic.errors import ElasticError, JobError
from elastic.job import Job
from storage.errors import StorageError

if TYPE_CHECKING:
    from elastic.train.alone.revisit import Again

MOST_PARAMS = 1e15
"""Largest number of parameters of `elastic estimate`."""
DEVICE = tuple(f"workers.{name}" for name in ("gpus", "threads", "device_gb"))
"""The settings by which a command computes in its own process."""
HELD_OUT = tuple(f"validation.{name}" for name in ("every", "samples", "dataset", "args"))
"""The settings that say which samples `elastic evaluate` measures."""


@command("estimate")
def estimate(file: JobFile | None = None, /, params: float | None = None) -> None:
    """Tells how much memory a job takes, before anything runs.

    params: only tell how much memory this number of parameters takes, say 7e9
    """
    from elastic.train.checks import estimate as memory
    from elastic.train.checks.early import check_axes

    if params is not None and file is None:
        if not 1 <= params <= MOST_PARAMS:
            raise JobError(
                f"command line: --params = {params:g} is no number of parameters; give 1 to "
                f"{MOST_PARAMS:g}, say 7e9"
            )
        for line in memory.of_parameters(params):
            say(line)
        return
    if file is None or params is not None:
        raise JobError(
            "command line: elastic estimate takes a job file, or --params and a number, say --params 7e9"
        )
    import_from_here()
    job = file.load()
    check_axes(job)
    job = _sized(job)
    tensors = memory.tensors_of_job(job)
    try:
        found = memory.by_recompute(job)
    except Exception as error:  # of the data, the model or the loss: the rest can be told without them
        found = {}
        say(
            (
                "the memory that a microbatch takes is not known: "
                f"{error if isinstance(error, ElasticError) else failure(error)}"
            ),
            "note: ",
            "yellow",
        )
    for line in memory.of_job(job, tensors, found):
        say(line)
    show_table(
        "workers that share the state",
        *(f"zero = {stage}" for stage in memory.STAGES),
        title="memory of a worker's device, without a microbatch",
        rows=[
            (shards, *map(memory.gigabytes, sizes))
            for shards, sizes in memory.by_stage(job, tensors, job.workers.max)
        ],
    )
    if found:
        limited = job.workers.device_gb != "auto"  # else a line above says what to name for it
        rows = [
            (
                policy,
                memory.gigabytes(max(need.transient)),
                memory.least_of(job, need) or f"more than {job.workers.max}",
            )
            for policy, need in found.items()
        ]
        columns = ("recompute", "more while a microbatch is computed", "workers that must share the state")[
            : 2 + limited
        ]
        show_table(*columns, rows=[row[: len(columns)] for row in rows])


def _sized(job: Job) -> Job:
    """Returns ``job`` with numbers for ``microbatch`` and ``global_batch``, and says what ``microbatch =
    "auto"`` stands for.
    """
    from elastic.train.checks.microbatch import chosen
    from elastic.train.machine.device import limit_of
    from elastic.train.session import settled

    if job.microbatch == "auto":
        memory, one = limit_of(job), job.replace(microbatch=1)
        if not memory and job.workers.gpus:
            job, why = (
                one,
                (
                    "not known until you name the memory of a device, say --workers.device-gb 80; all "
                    "below is for microbatch = 1"
                ),
            )
        else:
            try:
                job, why = chosen(settled(job), memory)
            except (ElasticError, StorageError) as error:  # of the data, or a device that is too small
                job, why = one, f"not known: {error}; all below is for microbatch = 1"
        say(f"microbatch = {job.microbatch if job is not one else 'auto'}: {why}")
    # so many microbatches fill all sums of gradients; more take no more memory
    rounds = job.reduction.block + 2
    return job if job.global_batch != "all" else job.replace(global_batch=rounds * job.microbatch_size)


@command("evaluate", (*DEVICE, *HELD_OUT))
def evaluate(job: Job, /, step: str | None = None, average: bool = False, accept_code: bool = False) -> None:
    """Measures the loss of a checkpoint on held-out samples, in this process.

    step: step of the checkpoint, STEP.GENERATION of an abandoned one, or best for the best validated one
        (default: the newest good one)
    average: measure the average of the weights (optim.average)
    accept_code: use today's code, although the step was made by other code
    """
    from elastic.protocol.commit_record import told_of
    from elastic.train.alone.revisit import evaluate_here

    import_from_here()
    version, found = evaluate_here(
        job, step, accept_code=accept_code, average=average, tell=lambda each: say(each, "note: ", "yellow")
    )
    say(f"{told_of(version.step, found)}{', of the average of the weights' if average else ''}")


@command("rerun", DEVICE)
def rerun(job: Job, /, step: str, accept_code: bool = False) -> None:
    """Computes a step again from the checkpoint before it, in this process.

    step: the step, or STEP.GENERATION of an abandoned one; there must be a checkpoint of the step before it
    accept_code: use today's code, although the step was made by other code
    """
    from elastic.train.alone.revisit import rerun_here

    import_from_here()
    again = rerun_here(job, step, accept_code=accept_code)
    now, then, rows = again.now, again.then, list[tuple[object, ...]]()
    for index, (loss, count, ids) in enumerate(zip(now.losses, now.counts, now.samples, strict=True)):
        named = ", ".join(map(str, ids[:8])) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
        row: tuple[object, ...] = (index, named, f"{loss:g}", f"{count:g}")
        if then is not None:
            told = "the same bits" if then.losses[index] == loss else f"{then.losses[index]:g}"
            row = (*row, f"{told}, left out" if index in then.left_out else told)
        rows.append(row)
    known = () if then is None else ("loss that the run recorded",)
    show_table("microbatch", "samples", "loss", "terms", *known, rows=rows)
    if now.layers:
        show_table(
            "layer",
            "norm of its gradient",
            rows=[(name, f"{norm:.6g}") for name, norm in now.layer_norms.items()],
        )
    skipped = "" if now.finite else "; the gradient is not finite, so the step changes nothing"
    say(f"step {now.step}: loss {now.loss:.6g}, norm {now.norm:.6g}{_compared(again)}{skipped}")


def _compared(again: Again) -> str:
    """Returns the part of a sentence that compares a step with what the run has recorded, or says why
    nothing is compared.
    """
    if again.recorded is None:
        return (
            "; nothing is compared, since the bucket has no record of this step: a run with --local records "
            "its steps when it saves, and the journal of another run may be gone"
        )
    loss, norm = again.recorded
    bits = "the same bits" if again.same else "other bits"
    only = "" if again.then is not None else " (its metrics, which have no losses of single microbatches)"
    return f"; the run recorded {loss:.6g} and {norm:.6g}{only}, {bits}"
