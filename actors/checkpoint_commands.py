"""The commands for the checkpoints of a run: ls, show, diff, rm, gc, verify, export."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.table import Column, Table

from actors.terminal import console, say
from elastic.errors import JobError, PlatformGaveUp
from elastic.ids import Version
from elastic.job import Job
from elastic.protocol.spikes import Held
from elastic.report.words import counted
from elastic.runs import forks, retention
from elastic.runs.notes import abandoned
from elastic.runs.quarantine import held_in
from elastic.runs.resume import BEST, checkpoint
from elastic.runs.run import Run
from elastic.runs.which import left_behind, parsed, version_at
from storage.checkpoints import EXPORTED, Manifest, has_average
from storage.errors import Exists, Full
from storage.slices import Tensor, nbytes


def ls(job: Job) -> int:
    """Prints a table of the checkpoints.  It says which rules keep them, if there are rules, or branches that go on from some."""
    run = Run.begun(job)
    found = retention.look(run, job.keep())
    kept = found.verdict.kept
    left = {version: why for version, why in retention.needed(run).items() if version not in kept}
    ruled = job.keep().last > 0 or bool(left) or any({"branch", "owed"}.intersection(names) for names in kept.values())
    table = Table("step", "generation", "files", "bytes", "layout", "written", "state", *(["kept by"] if ruled else []))
    for each in found.listed:
        version, files = each.version, each.manifest.files if each.manifest else ()
        layout = "×".join(str(n) for n in each.manifest.about["layout"].values()) if each.manifest else ""
        size = f"{sum(file.size for file in files):,}"
        names = ", ".join(name for name in kept.get(version, ()) if name != "newest") or left.get(version, "")
        row = (
            str(version.step),
            str(version.generation),
            str(len(files)),
            size,
            layout,
            _written(each.manifest)[: len("2026-01-01 00:00")],
            retention.state_of(each, found.newest),
        )
        table.add_row(*row, *([names] if ruled else []))
    console.print(table)
    return 0


def show(job: Job, step: str | None, quarantine: bool = False) -> int:
    """Prints what the checkpoint of ``step`` is, or the newest good one: its history, its files, and its tensors by kind.

    With ``quarantine`` it prints its samples in quarantine instead, oldest first.
    """
    run = Run.begun(job)
    version = version_at(run, step)
    reader = run.checkpoints.open(version)
    held = held_in(reader)
    if quarantine:
        return _show_held(version, held)
    kept = retention.look(run, job.keep()).verdict.kept
    manifest, about = reader.manifest, reader.manifest.about
    said = {
        "version": str(version),
        "written": _written(manifest),
        "steps by": ", ".join(f"generation {generation} up to {last}" for generation, last in manifest.lineage),
        "layout": " × ".join(f"{axis} {degree}" for axis, degree in manifest.layout.items()),
        "written by": ", ".join(f"{name} {number}" for name, number in about.get("versions", {}).items()),
        "folder": run.store.full_name(run.checkpoints.folder(version)),
        "files": f"{len(manifest.files)}, {sum(file.size for file in manifest.files):,} bytes, {reader.index.slices:,} slices",
        "kept by": ", ".join(kept.get(version, ())),
    }
    if held is not None:
        said["quarantine"] = counted(len(held), "sample") + ("; --quarantine lists them" if held else "")
    for name, text in said.items():
        say(text or "nothing", f"{name:<12}", "dim")
    table = Table("kind", "tensors", "elements", "bytes", "types")
    by_kind = dict[str, list[Tensor]]()
    for tensor in reader.tensors():
        by_kind.setdefault(tensor.kind, []).append(tensor)
    for kind, tensors in by_kind.items():
        wholes = [tensor.whole() for tensor in tensors]
        size = sum(nbytes(tensor, whole) for tensor, whole in zip(tensors, wholes, strict=True))
        types = ", ".join(sorted({tensor.dtype for tensor in tensors}))
        table.add_row(kind, f"{len(tensors):,}", f"{sum(whole.count for whole in wholes):,}", f"{size:,}", types)
    console.print(table)
    return 0


def _show_held(version: Version, held: Sequence[Held] | None) -> int:
    if held is None:
        say(f"{version} has no quarantine: its run had no spikes.action that keeps one ([spikes])")
        return 0
    say(f"samples in quarantine in {version}: {len(held)}")
    if held:
        table = Table("sample", "read last by step", "that step")
        for each in held:
            table.add_row(str(each.sample), str(each.step), "was applied without its microbatch" if each.applied else "was skipped")
        console.print(table)
    return 0


def _written(manifest: Manifest | None) -> str:
    """Returns when a manifest was written, in this machine's time zone; "" if it does not say so."""
    at = manifest.written_at if manifest is not None else None
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def diff(job: Job, steps: Sequence[str], every: bool, top: int) -> int:
    """Prints how far each parameter has moved between the checkpoints of two steps, the one that moved most first.

    With ``every``, moments and buffers too.  ``top`` is the largest number of tensors that are listed, 0 for all.
    """
    from elastic.state.difference import compare

    run = Run.begun(job)
    first, second = (run.checkpoints.open(version_at(run, step, "--between")) for step in steps)
    found = compare(first, second, ("",) if every else ("parameter",))
    listed = sorted(found.moved, key=lambda each: (not any(each.strange), -each.part))
    table = Table(
        Column("tensor", overflow="fold"),
        f"norm at {steps[0]}",
        f"norm at {steps[1]}",
        "norm of the difference",
        "as a part",
        "largest change",
        "not finite",
    )
    for each in listed[: top or None]:
        name = each.tensor.name if each.tensor.kind == "parameter" else f"{each.tensor.name} ({each.tensor.kind})"
        strange = "" if not any(each.strange) else " and ".join(f"{count:,}" for count in each.strange)
        numbers = (*(f"{norm:.6g}" for norm in each.norms), f"{each.part:.3g}", f"{each.largest:.3g}")
        table.add_row(name, *numbers, strange)
    console.print(table)
    for step, other, tensors in ((steps[0], steps[1], found.only_first), (steps[1], steps[0], found.only_second)):
        if tensors:
            names = ", ".join(tensor.name for tensor in tensors[:4]) + (" …" if len(tensors) > 4 else "")
            say(f"{len(tensors)} of step {step} are not in step {other}, or have another shape or type there: {names}")
    moved = math.sqrt(sum(each.moved_square for each in found.moved))
    before = math.sqrt(sum(each.first_square for each in found.moved))
    same = sum(each.equal for each in found.moved)
    harmed = sum(any(each.strange) for each in found.moved)
    part = f", {moved / before:.3g} of what it was" if before else ""
    told = f"; {harmed} have elements that are not finite" if harmed else ""
    say(f"{len(found.moved)} tensors: {same} have the same bits; all together moved by {moved:.6g}{part}{told}")
    return 0


def rm(job: Job, which: str, force: bool) -> int:
    """Deletes the checkpoint of a step, whatever the rules say: the run's own, or one that it has left behind if its generation is named.

    ``which`` is a step, or a step and a generation with a dot between them.  Raises :class:`JobError` if there is none, or if the run goes
    on from there or from before, or a branch does, and :class:`PlatformGaveUp` if the run may live, unless ``force``.
    """
    step, generation = parsed(which)
    run, claim = at_rest(job, force, LIVES)
    there = [each.version for each in run.checkpoints.at(step)]
    left = left_behind(run, there)
    found = [each for each in there if (each.generation == generation if generation is not None else each not in left)]
    if not found and not left:
        raise JobError(f"--step {which}: {job.name} has no checkpoint of that step; `elastic checkpoint ls` lists those that it has")
    if not found:
        raise JobError(f"--step {which}: {job.name} has no such checkpoint, but has left behind {_named(left)}; name one so to delete it")
    for version in found:
        _check_not_needed(run, version, f"--step {which}")
    _delete(run, found, "`elastic checkpoint rm`", claim)
    if others := [each for each in left if each not in found]:
        say(f"what {job.name} has left behind stays: {_named(others)}; name one so to delete it")
    return 0


def _named(versions: Sequence[Version]) -> str:
    return ", ".join(f"{each} (--step {each.step}.{each.generation})" for each in versions)


def _check_not_needed(run: Run, version: Version, asked: str) -> None:
    """Raises :class:`JobError` if the run or another one goes on from a checkpoint, or if the run may still do so."""
    if version in run.checkpoints.inherited:
        raise JobError(f"{asked} is a checkpoint of run {run.checkpoints.holder(version)!r}, from which {run.job.name} was forked")
    newest = run.newest() or Version(0, 0)
    if version == newest:
        raise JobError(f"{asked} is the newest good checkpoint, from which the run goes on; it stays until there is a newer one")
    if version > newest and not left_behind(run, [version]):
        raise JobError(
            f"{asked} is later than step {newest.step}, from which the run goes on; it stays until the run has saved a later step"
        )
    if (why := retention.needed(run).get(version)) is not None:
        raise JobError(f"{asked}: {why} goes on from there, so it stays")


def gc(job: Job, dry: bool, force: bool) -> int:
    """Deletes what no rule keeps and what saves and dead writers have left, or with ``dry`` only says so.

    Then it looks for references that nobody needs.  What they have kept goes with the next call.
    Raises :class:`PlatformGaveUp` as :func:`rm` does.
    """
    run, claim = at_rest(job, force, LIVES)
    there = retention.look(run, job.keep())
    found = there.verdict
    begun = {each.version for each in there.listed if each.manifest is None}
    if dry:
        for version in (*found.marked, *found.due):
            what = "its deletion has begun" if version in found.marked else "never completed" if version in begun else "no rule keeps it"
            say(f"{version} would be deleted: {what}")
    else:
        never, complete = (each for each in found.due if each in begun), (each for each in found.due if each not in begun)
        _delete(run, (*found.marked, *never, *complete), "`elastic checkpoint gc`", claim)
        run.store.tidy(f"{run.job.name}/")
    _release(run, dry, claim)
    number = len(found.marked) + len(found.due)
    rule = "" if job.keep().last else "; checkpoint.keep_last = 0 keeps all that are complete"
    say(f"{number} {'would be ' if dry else ''}deleted, {len(found.kept)} kept{rule}")
    _tell_of_others(run, there, job.keep().last)
    return 0


def _tell_of_others(run: Run, there: retention.Look, last: int) -> None:
    """Says which checkpoints are neither kept by a rule nor deleted now, and what becomes of them."""
    found, every = there.verdict, run.branches.every()
    others = [each for each in there.listed if each.version not in {*found.kept, *found.marked, *found.due}]
    left = [each.version for each in others if abandoned(every, each.version)]
    needed = retention.needed(run).keys() & {*left}
    gone = [version.step for version in left if version not in needed]
    if gone:
        rest, good = ", and the others once the run has saved later steps", max(len(found.kept), 2)
        fix = f"`elastic checkpoint gc --checkpoint.keep-last {good}` deletes those before the newest good checkpoint{rest}"
        then = "they go once the run has saved later steps" if last else f"nothing goes on from them; {fix}"
        say(f"besides, {len(gone)} of abandoned branches, of steps {min(gone)} to {max(gone)}: {then}")
    if needed:
        say(f"besides, {len(needed)} of abandoned branches from which a later branch or a fork went on, so they stay")
    if more := len(others) - len(left):
        say(f"besides, {more} incomplete or damaged, or of steps that a fall-back has abandoned, which stay for now")


def _release(run: Run, dry: bool, claim: int) -> None:
    """Collects the references of forks that never began, or were removed, or with ``dry`` only says which there are."""
    for each, gone in [(each, False) for each in forks.unused(run.store, run.job.name)] if dry else retention.release(run, claim):
        then = f"is not kept for the run {each.run!r} any more" if gone else f"is kept for the run {each.run!r}"
        again = "" if gone else "; the next `elastic checkpoint gc` lets it go if that is still so"
        say(f"{each.version} {then}, which is not there or does not go on from it{again}")


def verify(job: Job, step: str | None) -> int:
    """Checks every digest of the checkpoint of ``step``, or of the newest good one.  Returns 1 if it is not good."""
    run = Run.begun(job)
    report = run.checkpoints.verify(version_at(run, step))
    say(str(report))
    return 0 if report.good else 1


def export(
    job: Job, step: str | None, folder: Path, *, average: bool = False, transformers: bool = False, accept_code: bool = False
) -> int:
    """Writes the whole tensors of a checkpoint to ``folder``, with ``average`` those of the average of the weights, and what else makes it
    a folder that other programs open (:mod:`elastic.train.published`).

    With ``transformers`` tensors have the names that this library wants.  Raises :class:`JobError` if ``folder`` has such files, cannot be
    written, or there is no average, and another :class:`ElasticError` if the model is none of transformers.
    """
    from elastic.train.published import published  # it imports torch

    run = Run.begun(job)
    version = checkpoint(run, BEST) if step == BEST else version_at(run, step)
    if average and not has_average(run.checkpoints.open(version)):
        raise JobError(f"--average: the checkpoint of {version} has no average of the weights, which optim.average keeps; leave it out")
    made = published(run, job, version, rename=transformers, accept_code=accept_code, tell=lambda each: say(each, "note: ", "yellow"))
    there = [name for name in (*EXPORTED, *made.more) if (folder / name).exists()]
    if there:
        raise JobError(f"--to = {str(folder)!r} has {' and '.join(there[:2])} already, perhaps of another step; name a new folder")
    try:
        written = run.checkpoints.export(version, folder, average=average, names=made.names, more=made.more)
    except OSError as error:  # an error of the bucket would be a StorageError
        raise JobError(f"--to = {str(folder)!r} is not a folder that can be written: {error.strerror}; name a new folder") from error
    for path in written:
        say(str(path))
    return 0


LIVES = (
    "after each save its coordinator deletes what checkpoint.keep_last and the others do not keep; `elastic stop` stops it, or wait for "
    "its end"
)
"""The end of the sentence in which a command that deletes refuses a run that lives."""


def _delete(run: Run, versions: Sequence[Version], why: str, claim: int) -> None:
    try:
        for version in versions:
            with _told_if_full(run, version):
                retention.mark(run, [version], why, claim)
            gone = retention.remove(run, [version], claim)
            say(f"{version} is deleted" if gone else f"{version} stays: a fork has begun to need it")
    except Exists:
        raise PlatformGaveUp(f"another command has begun to train {run.job.name} meanwhile; what is left is as its rules say") from None


@contextmanager
def _told_if_full(run: Run, version: Version) -> Iterator[None]:
    """Says which folder may be removed by hand if the bucket is too full for the mark with which a deletion begins."""
    try:
        yield
    except Full as error:
        folder = run.store.full_name(run.checkpoints.folder(version))
        raise PlatformGaveUp(
            f"the bucket is full, so that not even the mark with which a deletion begins can be written; nothing needs {version}: remove "
            f"its folder by hand ({folder}), and give the same command again"
        ) from error


def at_rest(job: Job, force: bool, lives: str) -> tuple[Run, int]:
    """Returns the run and its newest claim.  Raises :class:`PlatformGaveUp` if it may live, unless ``force``.

    ``lives`` says what to do if it does.
    """
    from actors.living import coordinator_of
    from actors.run_commands import Absent

    run = Run.begun(job)
    claim = run.latest_claim()
    if not force and coordinator_of(job) is not None:
        raise PlatformGaveUp(f"{job.name} lives: {lives}")
    if not force and not (absent := Absent.of(job)).over:
        raise PlatformGaveUp(f"{absent.said}; --force does it all the same, if you know that it does not run")
    return run, claim
