"""Checks the parts of a job that need no torch, whose import takes seconds: its axes compute, its code, tokens
and sinks exist, and its bucket works.
"""

from __future__ import annotations

from elastic.code.imports import check_name
from elastic.config.sections import COMING, TOKENS
from elastic.errors import JobError
from elastic.job import Job
from elastic.sinks.port import check_sink
from elastic.train.checks.bucket import check_bucket, open_bucket
from elastic.train.machine import interface


def check_early(job: Job, *, here: bool = False) -> None:
    """Raises :class:`~elastic.errors.JobError`, or as :func:`~elastic.train.checks.bucket.check_bucket`.

    ``here`` says that all workers will be on this machine.
    """
    check_axes(job)
    if here:
        interface.check(job.network.interface, gpu=bool(job.workers.gpus))
    for setting, path in job.named_code().items():
        if setting != "validation.dataset" or job.validation.every:
            check_name(path, setting)
    if open_bucket(job).local:  # a folder is tested at no cost
        check_bucket(job)
    for sink, args in job.metrics.sinks.items():
        check_sink(sink, args)
    folder = job.data.args.get("path")
    if job.data.dataset == TOKENS and isinstance(folder, str):
        from elastic.data.show import open_tokens  # it imports numpy and pyarrow

        open_tokens(folder)


def check_axes(job: Job) -> None:
    """Raises :class:`~elastic.errors.JobError` for a degree of an axis that does not compute yet."""
    for name, degree in job.parallel.coming.items():
        raise JobError(
            f"parallel.{name} = {degree}: {COMING[name]} is not possible yet; set parallel.{name} to 1, or "
            "leave it out"
        )
