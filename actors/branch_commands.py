"""The commands about where runs come from: rollback, runs."""

from __future__ import annotations

import math
import shlex
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from actors.checkpoint_commands import at_rest
from actors.commands import of_run
from actors.terminal import say
from elastic.config.values import place
from elastic.errors import JobError, PlatformGaveUp
from elastic.ids import Version
from elastic.report.divergence import diverged_at
from elastic.runs import resume
from elastic.runs.descent import Descent, family, runs_of, tree
from elastic.runs.metrics import rows_of
from elastic.runs.run import Run
from storage.errors import Exists

AUTO = "auto"
AGES = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


def rollback(known: Namespace) -> int:
    """Begins a branch at an older checkpoint of a run that is at rest, and says which command goes on with it.

    Raises :class:`JobError` if there is no such checkpoint, and :class:`PlatformGaveUp` if the run may live, unless ``--force``.
    """
    asked = of_run(known)
    if not (math.isfinite(known.lr_scale) and known.lr_scale > 0):
        raise JobError(f"--lr-scale = {known.lr_scale:g} must be more than 0, such as 0.5")
    if known.to != AUTO and not known.to.isdecimal():
        raise JobError(f"--to = {known.to!r} must be a step, or 'auto'")
    run, claim = at_rest(asked, known.force, "`elastic stop` stops it, and then it can be rolled back")
    version = before_divergence(run) if known.to == AUTO else resume.checkpoint(run, known.to)
    optim = run.job.optim.model_copy(update={"lr": run.job.optim.lr * known.lr_scale})
    changed = Run.look(run.job.replace(optim=optim), branch=True)
    if changed.branches_at(version) is None:
        say(f"{asked.name} is at step {version.step} already, and nothing was to change")
        return 0
    try:
        say(resume.rewind(changed, time.time(), version, changed.claim_here(after=claim)))
    except Exists:
        raise PlatformGaveUp(
            f"another command has begun to train {asked.name} or a branch of it meanwhile; it is not rolled back"
        ) from None
    words = [str(known.job), *known.line]
    if known.lr_scale != 1:
        words = [str(known.job), *_without(known.line, "--optim.lr"), "--optim.lr", repr(optim.lr)]
    again = f" (write optim.lr = {optim.lr!r} into the job file, too)" if known.lr_scale != 1 else ""
    say(f"`elastic train {shlex.join(words)}` goes on with it{again}")
    return 0


def _without(words: Sequence[str], option: str) -> list[str]:
    """Returns the words of a command line without an option and its value."""
    found = list[str]()
    for at, word in enumerate(words):
        if word != option and not word.startswith(f"{option}=") and (not at or words[at - 1] != option):
            found.append(word)
    return found


def before_divergence(run: Run) -> Version:
    """Returns the last good checkpoint before the run diverged.  Raises :class:`JobError` if it did not, or if there is none.

    A loss is that of the weights before its step.  So the last weights that are known to be good are those whose step had a usual one.
    """
    at = diverged_at([{name: row[name] for name in ("step", "loss", "norm")} for row in rows_of(run)])
    if at is None:
        raise JobError(f"--to auto: the losses of {run.job.name} do not diverge; name a step (`elastic checkpoint ls` lists them)")
    say(f"{run.job.name} diverged at step {at}: the last step before it with a usual loss is {at - 1}")
    good = [version for version in resume.saved(run) if version.step <= at - 2]
    if not good:
        raise JobError(f"--to auto: there is no good checkpoint of step {at - 2} or before; --to 0 begins again")
    return max(good)


def runs(known: Namespace) -> int:
    """Prints the runs of a bucket as a tree; of all trees only the one of the run that ``--name`` names, if it does."""
    name = known.settings.get("name", "")
    bucket = of_run(known, file="bucket").bucket if Path(known.bucket).is_file() else place(known.bucket)
    found = runs_of(bucket)
    if not found:
        raise JobError(f"there is no run in bucket = {bucket!r}; name the bucket of a job, or its job file")
    if name and not (found := family(found, name)):
        raise JobError(f"there is no run {name!r} in bucket = {bucket!r}; correct the name, or leave it out to see all runs")
    for depth, each, branch in tree(found):
        say(f"{'    ' * depth}{described(each, time.time()) if branch is None else f'  {_branch(branch)}'}")
    return 0


def described(each: Descent, now: float) -> str:
    """Returns the line about a run."""
    if each.unread:
        return f"{each.name}: {each.unread}"
    told = [f"{each.name}: step {each.step} of {each.steps}", each.state]
    if each.parent:
        told.append(f"from {each.origin}" if each.origin else f"with the weights of {each.warm}")
    if each.best:
        told.append(f"best validation {each.best[1]:.4g} at step {each.best[0].step}")
    if each.at is not None:
        told.append(_age(now - each.at))
    return ", ".join(told)


def _branch(one: dict[str, object]) -> str:
    changed = one["changed"]
    assert isinstance(changed, dict)
    what = ", ".join(f"{key} = {before!r} → {after!r}" for key, (before, after) in changed.items())
    return f"branch {one['number']} from step {one['step']}: {what or 'the same settings'}"


def _age(seconds: float) -> str:
    number, name = next(((round(seconds / unit), name) for unit, name in AGES if seconds >= unit), (0, ""))
    return f"{number} {name}{'' if number == 1 else 's'} ago" if number else "just now"
