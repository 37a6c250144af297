"""Finds the checkpoint that a command names: by its step, or by its step and its generation if the run has left it behind."""

from __future__ import annotations

import re
from collections.abc import Sequence

from elastic.errors import JobError
from elastic.ids import Version
from elastic.protocol import lineage
from elastic.runs.notes import abandoned
from elastic.runs.run import Run


def is_step(word: str) -> bool:
    """Returns whether a word is a step, as 400, or a step and its generation, as 400.3."""
    return re.fullmatch(r"\d+(\.\d+)?", word) is not None


def parsed(which: str, setting: str = "--step") -> tuple[int, int | None]:
    """Returns the step and the generation that a command names, None for the generation of the run's present line."""
    if not is_step(which):
        raise JobError(f"{setting} = {which!r} must be a step, as 400, or a step and its generation, as 400.3")
    step, _, generation = which.partition(".")
    return int(step), int(generation) if generation else None


def version_at(run: Run, which: str | None, setting: str = "--step") -> Version:
    """Returns the good checkpoint that a command names, or the newest one.

    Raises :class:`JobError` if there is none, which names those that the run has left behind at that step.
    """
    if which is None:
        return run.version_at(None)
    step, generation = parsed(which, setting)
    good = [each.version for each in run.checkpoints.at(step) if each.good and not run.checkpoints.damage(each.version)]
    if generation is not None and Version(step, generation) in good:
        return Version(step, generation)
    try:
        if generation is None:
            return run.version_at(step)
        has = f"`elastic checkpoint ls --name {run.job.name}` lists those that it has"  # it may be another run than that of the job file
        raise JobError(f"{setting} {which}: {run.job.name} has no such good checkpoint; {has}")
    except JobError as error:
        left = ", ".join(f"{each.step}.{each.generation}" for each in left_behind(run, good))
        raise JobError(f"{error}; it has left behind {left}" if left else str(error)) from None


def version_before(run: Run, step: int, generation: int) -> Version:
    """Returns the good checkpoint of the step before that which ``generation`` committed as ``step``: its own, or the one it began with.

    Raises :class:`JobError` if there is none, or if no checkpoint knows where the generation began.
    """
    before = f"{step - 1}.{generation}"
    if not any(each.good and each.version == Version(step - 1, generation) for each in run.checkpoints.at(step - 1)):
        lines = [each.manifest.lineage for each in run.checkpoints.versions() if each.manifest is not None]
        if line := next((each for each in lines if lineage.contains(each, Version(step, generation))), ()):
            before = f"{step - 1}.{next(each for each, last in line if step <= last + 1)}"
    return version_at(run, before, "checkpoint")


def left_behind(run: Run, versions: Sequence[Version]) -> list[Version]:
    """Returns those of ``versions`` that are not on the way of the run: a branch or a fall-back has abandoned them."""
    line, every = run.lineage, run.branches.every()
    passed = [each for each in versions if each.step <= lineage.tip(line).step and not lineage.contains(line, each)]
    return [each for each in versions if each in passed or abandoned(every, each)]
