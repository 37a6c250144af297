"""The commands that tell of a run from its bucket alone: report, metrics."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from actors.cli.checkpoint_commands import KEEPS
from actors.cli.parser import command
from actors.terminal import say
from elastic.config.values import HIDDEN, is_secret
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.retention import Keep
from elastic.report.metrics import csv_table, json_line
from elastic.report.page import page_of
from elastic.report.page.model import BranchRow, CheckpointRow, Facts
from elastic.report.page.series import Columns
from elastic.report.timeline import Timeline
from elastic.runs import branches, owed, retention
from elastic.runs.metrics import origin_rows, rows_of, with_origin
from elastic.runs.quarantine import held_in
from elastic.runs.run import LOCAL, Run
from storage import journal
from storage.errors import StorageError

LEARNT = ("step", "final", "loss", "norm", "lr", "tokens", "validation_loss", "validation_data")
"""The numbers that a fork's page shows of its origin's steps: what was learnt, and not when."""


@command("report", KEEPS)
def report(job: Job, /, to: Path | None = None, png: Path | None = None) -> int:
    """Writes a page with plots of a run: loss, speed, incidents, checkpoints.

    to FILE.html: the page (default: <name>-report.html in this folder)
    png FILE.png: a picture of the plots, too

    Raises :class:`JobError` if there is no such run, or if a file cannot be written.
    """
    to = to or Path(f"{job.name}-report.html")
    _check(to, "--to", (".html", ".htm"))
    if png is not None:
        _check(png, "--png", (".png",))
    from elastic.report.page.draw import png_of
    from elastic.report.page.html import html_of

    run = Run.begun(job)
    page = page_of(facts_of(run, job.keep(), time.time()))
    _write(to, "--to", html_of(page).encode())
    if png is not None:
        _write(png, "--png", png_of(page))
    return 0


@command("metrics")
def metrics(job: Job, /, csv: bool = False) -> None:
    """Prints the metrics of a run, one line of JSON for each step.

    csv: print them as CSV
    """
    try:
        rows = with_origin(Run.begun(job))
    except JobError:
        from actors.living import run_of  # it imports Ray

        run_of(job)
        rows = iter(())  # before its next save there are none, and its journal lacks the beginning
    if csv:
        print(csv_table(list(rows)), end="")
    else:
        for row in rows:
            print(json_line(row))


def facts_of(run: Run, keep: Keep, now: float) -> Facts:
    """Returns what the bucket holds of the run; ``keep`` has the rules that keep checkpoints."""
    job, owner, end = run.job, run.owner(), run.end()
    found = retention.look(run, keep, now=now)
    settings = branches.flat(run.branches.job())
    return Facts(
        name=job.name,
        steps=job.steps,
        global_batch=job.global_batch if isinstance(job.global_batch, int) else 0,
        settings={
            name: HIDDEN if is_secret(name, value) else _text(value) for name, value in settings.items()
        },
        columns=Columns(
            chain(
                ({name: row[name] for name in LEARNT if name in row} for row in origin_rows(run)),
                rows_of(run),
            )
        ),
        timeline=Timeline().read(journal.objects(run.store, job.name)),
        checkpoints=_checkpoints(found),
        owed=owed.sentence(found.debts),
        branches=[_branch(each) for each in run.branches.every()],
        end="" if end is None else type(end).__name__,
        local=owner is not None and owner["address"] == LOCAL,
        quarantine=_quarantine(run, found.newest),
        read_at=now,
    )


def _quarantine(run: Run, newest: Version | None) -> int:
    """Returns the number of samples in quarantine in the newest checkpoint; 0 if it cannot be read, since a
    page can do without it.
    """
    with suppress(StorageError):
        return len(held_in(run.checkpoints.open(newest)) or ()) if newest is not None else 0
    return 0


def _checkpoints(found: retention.Look) -> list[CheckpointRow]:
    told = []
    for each in found.listed:
        files = each.manifest.files if each.manifest else ()
        layout = "×".join(str(degree) for degree in each.manifest.layout.values()) if each.manifest else ""
        state, kept = retention.state_of(each, found.newest), found.verdict.kept.get(each.version, ())
        told.append(CheckpointRow(each.version, sum(file.size for file in files), layout, state, kept))
    return told


def _branch(one: branches.Branch) -> BranchRow:
    shown = {name: pair for name, pair in one.changed.items() if not is_secret(name, pair)}
    changed = {name: (_text(before), _text(after)) for name, (before, after) in shown.items()}
    return BranchRow(one.number, one.step, one.at, changed)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _check(path: Path, option: str, endings: tuple[str, ...]) -> None:
    """Raises :class:`JobError`, before anything is read, unless a file can be written there."""
    if path.suffix.lower() not in endings:
        raise JobError(
            f"{option} = {str(path)!r} does not end in {endings[0]}; name a file, say report{endings[0]}"
        )
    if path.is_dir():
        raise JobError(
            f"{option} = {str(path)!r} is a folder; name a file in it, say "
            f"{str(path / ('report' + endings[0]))!r}"
        )
    if not path.parent.is_dir():
        raise JobError(
            f"{option} = {str(path)!r}: there is no folder {str(path.parent)!r}; make it, or name another one"
        )


def _write(path: Path, option: str, content: bytes) -> None:
    """Replaces the file in one step, so that a reader never sees half of a page."""
    aside = path.with_name(f".{path.name}.part")
    try:
        aside.write_bytes(content)
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise JobError(
            f"{option} = {str(path)!r} cannot be written: {error.strerror}; name another file"
        ) from None
    say(f"{path}: {len(content) / 1000:,.0f} kB")
