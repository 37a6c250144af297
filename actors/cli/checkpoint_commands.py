"""The commands for the checkpoints of a run: ls, show, diff, rm, gc, verify, export."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from actors.cli.job_file import import_from_here
from actors.cli.parser import Pair, command
from actors.terminal import say, show_table
from elastic.errors import JobError, PlatformGaveUp
from elastic.ids import Version
from elastic.job import Job
from elastic.protocol.spikes import Held
from elastic.report.words import counted
from elastic.runs import forks, retention
from elastic.runs.notes import abandoned
from elastic.runs.quarantine import held_in
from elastic.runs.resume import left_behind, parsed, version_at
from elastic.runs.run import Run
from storage.checkpoints import EXPORTED, Manifest, has_average
from storage.errors import Exists, Full
from storage.slices import Tensor, nbytes

KEEPS = tuple(f"checkpoint.{name}" for name in ("keep_last", "keep_every", "keep_best", "keep_younger"))
"""The settings by which checkpoints are kept and deleted."""
KEPT_BY = {
    "newest": "being the newest",
    "last": "checkpoint.keep_last",
    "every": "checkpoint.keep_every",
    "best": "checkpoint.keep_best",
    "younger": "checkpoint.keep_younger",
    "branch": "a branch or a fork that begins here",
    "owed": "an export, samples or a validation that is owed",
    "all": "checkpoint.keep_last = 0, which keeps all",
}
"""The rules that keep a checkpoint, as the ends of a sentence that begins with "kept by"."""


@command("checkpoint ls", KEEPS)
def ls(job: Job, /) -> None:
    """Lists the checkpoints, and which rules keep them, or branches that go on from some."""
    run = Run.begun(job)
    found = retention.look(run, job.keep())
    kept = found.verdict.kept
    left = {version: why for version, why in retention.needed(run).items() if version not in kept}
    ruled = (
        job.keep().last > 0
        or bool(left)
        or any({"branch", "owed"}.intersection(names) for names in kept.values())
    )
    rows = []
    for each in found.listed:
        version, files = each.version, each.manifest.files if each.manifest else ()
        layout = "×".join(str(n) for n in each.manifest.about["layout"].values()) if each.manifest else ""
        size, written = (
            f"{sum(file.size for file in files):,}",
            _written(each.manifest)[: len("2026-01-01 00:00")],
        )
        names = ", ".join(name for name in kept.get(version, ()) if name != "newest") or left.get(version, "")
        state = retention.state_of(each, found.newest)
        rows.append(
            (version.step, version.generation, len(files), size, layout, written, state, *[names] * ruled)
        )
    columns = ("step", "generation", "files", "bytes", "layout", "written", "state", *["kept by"] * ruled)
    show_table(*columns, rows=rows)


@command("checkpoint show", KEEPS)
def show(job: Job, /, step: str | None = None, quarantine: bool = False) -> None:
    """Tells what a checkpoint is: files, tensors, layout, history.

    step: step of the checkpoint, or STEP.GENERATION of an abandoned one (default: the newest good one)
    quarantine: list its samples in quarantine ([spikes]) instead, oldest first
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
        "steps by": ", ".join(
            f"generation {generation} up to {last}" for generation, last in manifest.lineage
        ),
        "layout": " × ".join(f"{axis} {degree}" for axis, degree in manifest.layout.items()),
        "written by": ", ".join(f"{name} {number}" for name, number in about.get("versions", {}).items()),
        "folder": run.store.full_name(run.checkpoints.folder(version)),
        "files": (
            f"{len(manifest.files)}, {sum(file.size for file in manifest.files):,} bytes, "
            f"{reader.index.slices:,} slices"
        ),
        "kept by": ", ".join(KEPT_BY[rule] for rule in kept.get(version, ())),
    }
    if held is not None:
        said["quarantine"] = counted(len(held), "sample") + ("; --quarantine lists them" if held else "")
    for name, text in said.items():
        say(text or "nothing", f"{name:<12}", "dim")
    rows, by_kind = [], dict[str, list[Tensor]]()
    for tensor in reader.tensors():
        by_kind.setdefault(tensor.kind, []).append(tensor)
    for kind, tensors in by_kind.items():
        wholes = [tensor.whole() for tensor in tensors]
        size = sum(nbytes(tensor, whole) for tensor, whole in zip(tensors, wholes, strict=True))
        types = ", ".join(sorted({tensor.dtype for tensor in tensors}))
        rows.append(
            (kind, f"{len(tensors):,}", f"{sum(whole.count for whole in wholes):,}", f"{size:,}", types)
        )
    show_table("kind", "tensors", "elements", "bytes", "types", rows=rows)


def _show_held(version: Version, held: Sequence[Held] | None) -> None:
    if held is None:
        say(f"{version} has no quarantine: spikes.action was 'none' or 'forget', and both keep none")
        return
    say(f"samples in quarantine in {version}: {len(held)}")
    if held:
        became = {True: "was applied without its microbatch", False: "was skipped"}
        rows = [(each.sample, each.step, became[each.applied]) for each in held]
        show_table("sample", "read last by step", "that step", rows=rows)


def _written(manifest: Manifest | None) -> str:
    """Returns when a manifest was written, in this machine's time zone; "" if it does not say so."""
    at = manifest.written_at if manifest is not None else None
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


@command("checkpoint diff")
def diff(job: Job, /, between: Pair, all: bool = False, top: int = 20) -> None:
    """Tells how far each tensor has moved between two checkpoints.

    between STEP: steps of the two checkpoints
    all: compare moments and buffers, too
    top: number of tensors that are listed, those that moved most (default: 20; 0: all)
    """
    from elastic.state.difference import compare

    run = Run.begun(job)
    first, second = (run.checkpoints.open(version_at(run, step, "--between")) for step in between)
    found = compare(first, second, ("",) if all else ("parameter",))
    listed = sorted(found.moved, key=lambda each: (not any(each.strange), -each.part))
    rows = []
    for each in listed[: top or None]:
        name = (
            each.tensor.name
            if each.tensor.kind == "parameter"
            else (f"{each.tensor.name} ({each.tensor.kind})")
        )
        strange = "" if not any(each.strange) else " and ".join(f"{count:,}" for count in each.strange)
        rows.append(
            (
                name,
                *(f"{norm:.6g}" for norm in each.norms),
                f"{each.part:.3g}",
                f"{each.largest:.3g}",
                strange,
            )
        )
    norms = (f"norm at {between[0]}", f"norm at {between[1]}", "norm of the difference")
    show_table("tensor", *norms, "as a part", "largest change", "not finite", rows=rows)
    for step, other, tensors in (
        (between[0], between[1], found.only_first),
        (between[1], between[0], found.only_second),
    ):
        if tensors:
            names = ", ".join(tensor.name for tensor in tensors[:4]) + (" …" if len(tensors) > 4 else "")
            say(
                f"{len(tensors)} tensors of step {step} are missing in step {other}, or have another "
                f"shape or type in step {other}: {names}"
            )
    moved = math.sqrt(sum(each.moved_square for each in found.moved))
    before = math.sqrt(sum(each.first_square for each in found.moved))
    same = sum(each.equal for each in found.moved)
    harmed = sum(any(each.strange) for each in found.moved)
    part = f", {moved / before:.3g} of their norm before" if before else ""
    told = f"; {harmed} have elements that are not finite" if harmed else ""
    say(
        f"{len(found.moved)} tensors: {same} have the same bits; all together moved by "
        f"{moved:.6g}{part}{told}"
    )


@command("checkpoint rm")
def rm(job: Job, /, step: str, force: bool = False) -> None:
    """Deletes the checkpoint of a step, of a run that is not running.

    step: step of the checkpoint, or STEP.GENERATION of an abandoned one
    force: do so even if the run may still be running

    Raises :class:`JobError` if there is none, or if the run goes on from there or from before, or a branch
    does, and :class:`PlatformGaveUp` if the run may live, unless ``force``.
    """
    number, generation = parsed(step)
    run, claim = at_rest(job, force, LIVES)
    there = [each.version for each in run.checkpoints.at(number)]
    left = left_behind(run, there)
    found = [
        each
        for each in there
        if (each.generation == generation if generation is not None else each not in left)
    ]
    if not found and not left:
        raise JobError(
            f"--step {step}: {job.name} has no checkpoint of this step; `elastic checkpoint ls` lists "
            "its checkpoints"
        )
    if not found:
        raise JobError(
            f"--step {step}: {job.name} has no checkpoint of this step, except abandoned ones: "
            f"{_named(left)}; to delete one, give the --step in brackets"
        )
    for version in found:
        _check_not_needed(run, version, f"--step {step}")
    _delete(run, found, "`elastic checkpoint rm`", claim)
    if others := [each for each in left if each not in found]:
        say(
            f"abandoned checkpoints of this step stay: {_named(others)}; to delete one, give the "
            "--step in brackets"
        )


def _named(versions: Sequence[Version]) -> str:
    return ", ".join(f"{each} (--step {each.step}.{each.generation})" for each in versions)


def _check_not_needed(run: Run, version: Version, asked: str) -> None:
    """Raises :class:`JobError` if this run or another run goes on from a checkpoint, or if this run may still
    do so.
    """
    if version in run.checkpoints.inherited:
        raise JobError(
            f"{asked} belongs to the run {run.checkpoints.holder(version)!r}, from which "
            f"{run.job.name} was forked, so it stays"
        )
    newest = run.newest() or Version(0, 0)
    if version == newest:
        raise JobError(
            f"{asked} is the newest good checkpoint, from which {run.job.name} goes on; it can be "
            "deleted once there is a newer one"
        )
    if version > newest and not left_behind(run, [version]):
        raise JobError(
            f"{asked} is later than step {newest.step}, from which {run.job.name} goes on; it can be "
            "deleted once the run has saved a step after it"
        )
    if (why := retention.needed(run).get(version)) is not None:
        raise JobError(f"{asked} stays: {why} goes on from it")


@command("checkpoint gc", KEEPS)
def gc(job: Job, /, dry_run: bool = False, force: bool = False) -> None:
    """Deletes what no rule of the job keeps, and what saves have left unfinished.

    dry_run: only say what would be deleted
    force: do so even if the run may still be running

    Raises :class:`PlatformGaveUp` as :func:`rm` does.
    """
    run, claim = at_rest(job, force, LIVES)
    there = retention.look(run, job.keep())
    found = there.verdict
    begun = {each.version for each in there.listed if each.manifest is None}
    if dry_run:
        for version in (*found.marked, *found.due):
            what = (
                "an earlier command has begun to delete it"
                if version in found.marked
                else "never completed"
                if version in begun
                else "no rule keeps it"
            )
            say(f"{version} would be deleted: {what}")
    else:
        never, complete = (
            (each for each in found.due if each in begun),
            (each for each in found.due if each not in begun),
        )
        _delete(run, (*found.marked, *never, *complete), "`elastic checkpoint gc`", claim)
        run.store.tidy(f"{run.job.name}/")
    _release(run, dry_run, claim)
    number = len(found.marked) + len(found.due)
    rule = "" if job.keep().last else "; checkpoint.keep_last = 0 keeps all complete checkpoints"
    say(f"{number} {'would be ' if dry_run else ''}deleted, {len(found.kept)} kept{rule}")
    _tell_of_others(run, there, job.keep().last)


def _tell_of_others(run: Run, there: retention.Look, last: int) -> None:
    """Says which checkpoints are neither kept by a rule nor deleted now, and what becomes of them."""
    found, every = there.verdict, run.branches.every()
    others = [each for each in there.listed if each.version not in {*found.kept, *found.marked, *found.due}]
    left = [each.version for each in others if abandoned(every, each.version)]
    needed = retention.needed(run).keys() & {*left}
    gone = [version.step for version in left if version not in needed]
    if gone:
        rest, good = (
            "; later ones can be deleted once the run has saved steps after them",
            max(len(found.kept), 2),
        )
        fix = (
            f"`elastic checkpoint gc --checkpoint.keep-last {good}` deletes those that are older than "
            f"the newest good checkpoint{rest}"
        )
        then = (
            "they are deleted once the run has saved later steps"
            if last
            else f"nothing goes on from them; {fix}"
        )
        say(
            f"also there: {len(gone)} checkpoints of abandoned branches, steps {min(gone)} to "
            f"{max(gone)}: {then}"
        )
    if needed:
        say(
            f"also there: {len(needed)} checkpoints of abandoned branches, which stay because a later "
            "branch or a fork goes on from them"
        )
    if more := len(others) - len(left):
        say(
            f"also there: {more} checkpoints that are incomplete or damaged, or whose steps the run "
            "has given up; they stay for now"
        )


def _release(run: Run, dry: bool, claim: int) -> None:
    """Removes the references of forks that never began, or were removed, so that their checkpoints are no
    longer kept.  With ``dry``, it only lists these references.
    """
    for each, gone in (
        [(each, False) for each in forks.unused(run.store, run.job.name)]
        if dry
        else retention.release(run, claim)
    ):
        then = (
            f"is no longer kept for the run {each.run!r}" if gone else (f"is kept for the run {each.run!r}")
        )
        again = (
            "" if gone else "; the next `elastic checkpoint gc` removes this mark, unless that has changed"
        )
        say(f"{each.version} {then}, which does not exist or does not go on from this checkpoint{again}")


@command("checkpoint verify")
def verify(job: Job, /, step: str | None = None) -> int:
    """Checks every digest of a checkpoint.

    step: step of the checkpoint, or STEP.GENERATION of an abandoned one (default: the newest good one)
    """
    run = Run.begun(job)
    report = run.checkpoints.verify(version_at(run, step))
    say(str(report))
    return 0 if report.good else 1


@command("checkpoint export")
def export(
    job: Job,
    /,
    to: Path,
    step: str | None = None,
    average: bool = False,
    transformers: bool = False,
    accept_code: bool = False,
) -> None:
    """Writes whole tensors as safetensors, for other programs.

    to: folder to write to
    step: step of the checkpoint, or STEP.GENERATION of an abandoned one, or best (default: the newest good
        one)
    average: write the average of the weights (optim.average) in place of the weights
    transformers: give tensors the names that from_pretrained of transformers needs
    accept_code: use today's code, although the step was made by other code

    Raises :class:`JobError` if ``to`` has such files, cannot be written, or there is no average, and another
    :class:`ElasticError` if the model is none of transformers.
    """
    import_from_here()
    from elastic.train.published import published  # it imports torch

    run = Run.begun(job)
    version = version_at(run, step)
    if average and not has_average(run.checkpoints.open(version)):
        raise JobError(
            f"--average: the checkpoint of {version} has no average of the weights, since "
            "optim.average was 0; leave --average out"
        )
    made = published(
        run,
        job,
        version,
        rename=transformers,
        accept_code=accept_code,
        tell=lambda each: say(each, "note: ", "yellow"),
    )
    there = [name for name in (*EXPORTED, *made.more) if (to / name).exists()]
    if there:
        raise JobError(
            f"--to = {str(to)!r} has {' and '.join(there[:2])} already, perhaps of another step; name a new "
            "folder"
        )
    try:
        written = run.checkpoints.export(version, to, average=average, names=made.names, more=made.more)
    except OSError as error:  # an error of the bucket would be a StorageError
        raise JobError(
            f"--to = {str(to)!r} is not a folder that can be written: {error.strerror}; name a new folder"
        ) from error
    for path in written:
        say(str(path))


LIVES = (
    "a living run deletes old checkpoints by itself, by checkpoint.keep_last and the other "
    "checkpoint.keep settings; wait for its end, or stop it with `elastic stop`"
)
"""The end of the sentence in which a command that deletes refuses a run that lives."""


def _delete(run: Run, versions: Sequence[Version], why: str, claim: int) -> None:
    try:
        for version in versions:
            with _told_if_full(run, version):
                retention.mark(run, version, why, claim)
            gone = retention.remove(run, version, claim)
            say(f"{version} is deleted" if gone else f"{version} stays: a fork has just started from it")
    except Exists:
        raise PlatformGaveUp(
            f"another command has just started {run.job.name}, so this command deletes nothing "
            "more; the run deletes old checkpoints by itself"
        ) from None


@contextmanager
def _told_if_full(run: Run, version: Version) -> Iterator[None]:
    """Says which folder may be removed by hand if the bucket is too full for the mark with which a deletion
    begins.
    """
    try:
        yield
    except Full as error:
        folder = run.store.full_name(run.checkpoints.folder(version))
        raise PlatformGaveUp(
            f"the bucket is so full that the deletion of {version} cannot even be recorded; nothing "
            f"needs {version}: remove its folder by hand ({folder}), and give the same command again"
        ) from error


def at_rest(job: Job, force: bool, lives: str) -> tuple[Run, int]:
    """Returns the run and its newest claim.  Raises :class:`PlatformGaveUp` if it may live, unless ``force``.

    ``lives`` is the end of the message: what the user can do if the run lives.
    """
    from actors.cli.run_commands import Absent
    from actors.living import coordinator_of

    run = Run.begun(job)
    claim = run.latest_claim()
    if not force and coordinator_of(job) is not None:
        raise PlatformGaveUp(f"{job.name} is running: {lives}")
    if not force and not (absent := Absent.of(job)).over:
        raise PlatformGaveUp(f"{absent.said}; if you know that it does not run, use --force")
    return run, claim
