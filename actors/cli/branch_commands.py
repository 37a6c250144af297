"""The commands about where runs come from: rollback, runs."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from itertools import chain
from typing import Any

from actors.cli.checkpoint_commands import at_rest
from actors.cli.job_file import JobFile
from actors.cli.parser import command
from actors.terminal import say
from elastic.code.given import OBJECT
from elastic.config.command_line import Options
from elastic.config.settings import option_of
from elastic.config.values import place, shown
from elastic.errors import JobError, PlatformGaveUp
from elastic.ids import Version
from elastic.job import Job
from elastic.report.divergence import diverged_at
from elastic.runs import branches, resume
from elastic.runs.branches import Branch, Origin
from elastic.runs.descent import Descent, family, runs_of, tree
from elastic.runs.metrics import with_origin
from elastic.runs.run import Run
from storage.errors import Exists

AUTO = "auto"
AGES = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


@command("rollback")
def rollback(file: JobFile, /, to: str, lr_scale: float = 1.0, force: bool = False) -> None:
    """Begins a branch of a run at an older checkpoint, with another learning rate.

    to STEP: step of the checkpoint, or auto: the last good one before a divergence
    lr_scale FACTOR: factor of the learning rate (default: 1)
    force: do so even if the run may still be running

    Raises :class:`JobError` if there is no such checkpoint, and :class:`PlatformGaveUp` if the run may live,
    unless ``force``.
    """
    asked = file.of_run()
    if not (math.isfinite(lr_scale) and lr_scale > 0):
        raise JobError(f"--lr-scale = {lr_scale:g} must be more than 0, such as 0.5")
    if to != AUTO and not to.isdecimal():
        raise JobError(f"--to = {to!r} must be a step, or 'auto'")
    run, claim = at_rest(asked, force, "stop it first with `elastic stop`, then roll it back")
    version = before_divergence(run) if to == AUTO else resume.checkpoint(run, to)
    optim = run.job.optim.model_copy(update={"lr": run.job.optim.lr * lr_scale})
    job = run.job.replace(optim=optim)
    with suppress(JobError):  # free settings that do not go with the others are refused when somebody trains
        if there := run.branches.job():
            job = job.with_free_of(Job.from_json(json.dumps(there))).replace(bucket=run.job.bucket)
    with suppress(JobError):
        job = job.with_free_of(asked).replace(bucket=run.job.bucket)
    changed = Run.look(job, branch=True)
    if changed.branches_at(version) is None:
        say(f"{asked.name} is at step {version.step} already, and no setting would change: nothing to do")
        return
    try:
        say(resume.rewind(changed, time.time(), version, changed.claim_here(after=claim, trains=False)))
    except Exists:
        raise PlatformGaveUp(
            f"another command has just started {asked.name}, or a branch of {asked.name}, so nothing "
            "was rolled back"
        ) from None
    say(_goes_on(file, Run.find(asked)))


def _goes_on(file: JobFile, run: Run) -> str:
    """Returns the sentence with the command that goes on with the newest branch of ``run``, as it was trained
    last.

    The command has options for the settings in which the job file and the line differ from the branch, since
    `elastic train` would refuse these.  A run with code that was given as objects goes on only where they
    are.
    """
    branch, how = run.job, " --local" if run.trained_alone else ""
    if objects := [each for each in branch.code() if each.startswith(f"{OBJECT}:")]:
        changed = {name: now for each in run.branches.every() for name, (_, now) in each.changed.items()}
        same = (
            ", ".join(f"{name} = {shown(name, value)}" for name, value in changed.items())
            or "the same settings"
        )
        return (
            f"to go on, call launch(Job(...)) with {same}, in the script or notebook that defines the "
            f"job's objects ({', '.join(objects)})"
        )
    name, options = file.path.name, file.options
    try:
        differs = _otherwise(file.load(), branch)
    except JobError:
        return (
            f"to go on, correct {name}, give it the settings of this branch, and run `elastic train "
            f"{file.typed}{how}`"
        )
    line = {setting: words for setting, words in options.words.items() if setting not in differs}
    line |= {setting: [option_of(setting), *_words(value)] for setting, value in differs.items()}
    again = JobFile(file.file, Options(options.settings | differs, line))
    try:
        left = _otherwise(Job.load(file.path, list(chain(*line.values()))), branch)
    except JobError:
        left = differs
    if left:  # no option can say it
        there = ", ".join(
            f"{name} left out" if value is None else f"{name} = {shown(name, value)}"
            for name, value in differs.items()
        )
        return f"to go on, change {name} ({there}), and run `elastic train {file.typed}{how}`"
    told = ", ".join(f"{name} = {shown(name, value)}" for name, value in differs.items())
    written = f" (write {told} into {name}, too)" if told else ""
    return f"to go on, run `elastic train {again.typed}{how}`{written}"


def _otherwise(job: Job, branch: Job) -> dict[str, Any]:
    """Returns the settings of ``branch`` that differ in ``job``, so that a run with that branch would refuse
    ``job``.
    """
    job = job.going_on(branch.model_dump(mode="json"))
    found = {name: value for name, (_, value) in branches.changed(branch, job).items()}
    return {
        name: value for name, value in found.items() if (name, job.global_batch) != ("global_batch", "all")
    }


def _words(value: Any) -> list[str]:
    """Returns the value of an option as it is typed."""
    if isinstance(value, list):
        return [word for each in value for word in _words(each)]
    return [value if isinstance(value, str) else json.dumps(value)]


def before_divergence(run: Run) -> Version:
    """Returns the last good checkpoint before the run diverged.  Raises :class:`JobError` if the run did not
    diverge, or has no such checkpoint.

    The loss of a step is that of the weights before the step.  So the newest weights that are known to be
    good are those before the last step with a usual loss.
    """
    at = diverged_at([{name: row[name] for name in ("step", "loss", "norm")} for row in with_origin(run)])
    if at is None:
        raise JobError(
            f"--to auto: the losses of {run.job.name} do not diverge; name the step of a checkpoint "
            "(`elastic checkpoint ls` lists the checkpoints)"
        )
    say(f"{run.job.name} diverged at step {at}: the last step with a usual loss is {at - 1}")
    good = [version for version in resume.saved(run) if version.step <= at - 2]
    if not good and run.origin is not None:
        return _at_origin(run, run.origin, at)
    if not good:
        raise JobError(
            f"--to auto: there is no good checkpoint of step {at - 2} or of an earlier step; --to "
            "0 begins again at step 0"
        )
    return max(good)


def _at_origin(run: Run, origin: Origin, at: int) -> Version:
    """Returns the version at which the fork ``run`` began, for a divergence at step ``at`` before which the
    fork has no good checkpoint of its own.

    Raises :class:`JobError` if the run diverged before the fork began: then only another fork, from an
    earlier step, helps.
    """
    again = (
        f"fork again from step {at - 2} or an earlier step: `elastic train --name OTHER --resume "
        f"{origin.run}@STEP`"
    )
    if at <= origin.version.step:
        raise JobError(
            f"--to auto: {run.job.name} was forked from {origin}, but the losses had diverged by then; "
            f"{again}"
        )
    say(
        f"{run.job.name} was forked from {origin}, and goes back to that checkpoint, since it has no "
        f"earlier one; if it diverges again, {again}"
    )
    return resume.checkpoint(run, str(origin.version.step))


@command("runs")
def runs(file: JobFile, /) -> None:
    """Shows the runs of a bucket, and how they descend from each other; with --name NAME only that run and
    its relatives.

    file bucket: the bucket, or a job file (TOML) that names it
    """
    name = file.options.settings.get("name", "")
    bucket = file.of_run().bucket if file.path.is_file() else place(file.file)
    found = runs_of(bucket)
    if not found:
        raise JobError(f"there is no run in bucket = {bucket!r}; name the bucket of a job, or its job file")
    if name and not (found := family(found, name)):
        raise JobError(
            f"there is no run {name!r} in bucket = {bucket!r}; correct the name, or leave it out to see all "
            "runs"
        )
    for depth, each, branch in tree(found):
        say(f"{'    ' * depth}{described(each, time.time()) if branch is None else f'  {_branch(branch)}'}")


def described(each: Descent, now: float) -> str:
    """Returns the line about a run."""
    if each.unread:
        return f"{each.name}: {each.unread}"
    told = [f"{each.name}: step {each.step} of {each.steps}", each.state]
    if each.parent:
        told.append(f"from {each.origin}" if each.origin else f"with the weights of {each.warm}")
    if each.best:
        others = f" ({each.best.left_out})" if each.best.left_out else ""
        told.append(f"best validation {each.best.loss:.4g} at step {each.best.version.step}{others}")
    if each.at is not None:
        told.append(_age(now - each.at))
    return ", ".join(told)


def _branch(one: Branch) -> str:
    what = ", ".join(
        f"{key} = {shown(key, before)} → {shown(key, after)}" for key, (before, after) in one.changed.items()
    )
    left = f", abandons {one.left}" if one.left else ""
    return f"branch {one.number} from step {one.step}: {what or 'the same settings'}{left}"


def _age(seconds: float) -> str:
    number, name = next(((round(seconds / unit), name) for unit, name in AGES if seconds >= unit), (0, ""))
    return f"{number} {name}{'' if number == 1 else 's'} ago" if number else "just now"
