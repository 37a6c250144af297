"""The commands for the checkpoints of a run: ls, rm, gc, verify, export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from actors.terminal import console, say
from elastic import retention
from elastic.errors import JobError, PlatformGaveUp
from elastic.ids import Version
from elastic.job import Job
from elastic.runs import Run
from storage.checkpoints import EXPORTED, Listed
from storage.errors import Exists


def ls(job: Job) -> int:
    """Prints a table of the checkpoints.  It says which rules keep them, if there are rules, or branches that go on from some."""
    run = Run.begun(job)
    listed, asked = run.checkpoints.versions(), retention.as_it_stands(run)
    newest, kept = max(asked.saved, default=None), retention.judge(run, job.keep(), asked, listed).kept
    ruled = job.keep().last > 0 or any("branch" in names for names in kept.values())
    table = Table("step", "generation", "files", "bytes", "layout", "state", *(["kept by"] if ruled else []))
    for each in listed:
        version, files = each.version, each.manifest.files if each.manifest else ()
        layout = "×".join(str(n) for n in each.manifest.about["layout"].values()) if each.manifest else ""
        size = f"{sum(file.size for file in files):,}"
        names = ", ".join(name for name in kept.get(version, ()) if name != "newest")
        row = (str(version.step), str(version.generation), str(len(files)), size, layout, _state(each, newest))
        table.add_row(*row, *([names] if ruled else []))
    console.print(table)
    return 0


def _state(listed: Listed, newest: Version | None) -> str:
    if listed.deleted:
        return "being deleted"
    if listed.damaged or listed.manifest is None:
        return "damaged" if listed.damaged else "incomplete"
    return "newest complete" if listed.version == newest else "complete"  # the digests are not checked here


def rm(job: Job, step: int, force: bool) -> int:
    """Deletes the checkpoints of ``step``, whatever the rules say.

    Raises :class:`JobError` if there are none, or if the run goes on from there or from before, or a branch does, and
    :class:`PlatformGaveUp` if the run may live, unless ``force``.
    """
    run, claim = _at_rest(job, force)
    asked, found = retention.as_it_stands(run), [each.version for each in run.checkpoints.at(step)]
    newest = max(asked.saved, default=Version(0, 0))
    if not found:
        raise JobError(f"--step {step}: {job.name} has no checkpoint of that step; `elastic checkpoint ls` lists those that it has")
    if max(found) >= newest:
        where = "the newest good checkpoint, from which the run goes on" if newest in found else f"not older than that, step {newest.step}"
        raise JobError(f"--step {step} is {where}; it stays until there is a newer one")
    needed = retention.needed(run)
    for version in needed.keys() & set(found):
        raise JobError(f"--step {step}: branch {needed[version]} of {job.name} goes on from there, so it stays")
    _delete(run, found, "`elastic checkpoint rm`", claim)
    return 0


def gc(job: Job, dry: bool, force: bool) -> int:
    """Deletes what no rule keeps and what saves have left, or with ``dry`` only says so.  Raises :class:`PlatformGaveUp` as :func:`rm`."""
    run, claim = _at_rest(job, force)
    listed = run.checkpoints.versions()
    found = retention.judge(run, job.keep(), retention.as_it_stands(run), listed)
    begun = {each.version for each in listed if each.manifest is None}
    if dry:
        for version in (*found.marked, *found.due):
            what = "its deletion has begun" if version in found.marked else "never completed" if version in begun else "no rule keeps it"
            say(f"{version} would be deleted: {what}")
    else:
        _delete(run, (*found.marked, *found.due), "`elastic checkpoint gc`", claim)
    number = len(found.marked) + len(found.due)
    rule = "" if job.keep().last else "; checkpoint.keep_last = 0 keeps all that are complete"
    say(f"{number} {'would be ' if dry else ''}deleted, {len(found.kept)} kept{rule}")
    return 0


def verify(job: Job, step: int | None) -> int:
    """Checks every digest of the checkpoint of ``step``, or of the newest good one.  Returns 1 if it is not good."""
    run = Run.begun(job)
    report = run.checkpoints.verify(run.version_at(step))
    say(str(report))
    return 0 if report.good else 1


def export(job: Job, step: int | None, folder: Path) -> int:
    """Writes the whole tensors of a checkpoint to ``folder``.  Raises :class:`JobError` if it has such files or cannot be written."""
    run = Run.begun(job)
    there = [name for name in EXPORTED if (folder / name).exists()]
    if there:
        raise JobError(f"--to = {str(folder)!r} has {' and '.join(there)} already, perhaps of another step; name a new folder")
    try:
        written = run.checkpoints.export(run.version_at(step), folder)
    except OSError as error:  # an error of the bucket would be a StorageError
        raise JobError(f"--to = {str(folder)!r} is not a folder that can be written: {error.strerror}; name a new folder") from error
    for path in written:
        say(str(path))
    return 0


def _delete(run: Run, versions: Sequence[Version], why: str, claim: int) -> None:
    try:
        retention.mark(run, versions, why, claim)
        for version in versions:
            retention.remove(run, [version], claim)
            say(f"{version} is deleted")
    except Exists:
        raise PlatformGaveUp(f"another command has begun to train {run.job.name} meanwhile; what is left is as its rules say") from None


def _at_rest(job: Job, force: bool) -> tuple[Run, int]:
    """Returns the run and its newest claim.  Raises :class:`PlatformGaveUp` if it may live, unless ``force``."""
    from actors.run_commands import Absent, coordinator_of

    run = Run.begun(job)
    claim = run.latest_claim()
    if not force and coordinator_of(job) is not None:
        raise PlatformGaveUp(
            f"{job.name} lives: after each save its coordinator deletes what checkpoint.keep_last and the others do not keep; "
            f"`elastic stop` stops it, or wait for its end"
        )
    if not force and not (absent := Absent.of(job)).over:
        raise PlatformGaveUp(f"{absent.said}; --force deletes all the same, if you know that it does not run")
    return run, claim
