"""The commands that tell of a run from its bucket alone: report, metrics."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from actors.cli.checkpoint_commands import KEEPS
from actors.cli.parser import command
from actors.terminal import say
from elastic.errors import JobError
from elastic.job import Job
from elastic.report.metrics import csv_table, json_line
from elastic.runs.metrics import with_origin
from elastic.runs.run import Run


@command("report", KEEPS)
def report(
    job: Job,
    /,
    to: Path | None = None,
    png: Path | None = None,
    price: float | None = None,
    costs: Path | None = None,
) -> None:
    """Writes a page with plots of a run: loss, speed, incidents, checkpoints.

    The time of a run with a journal is also a table beside the page, FILE.timeline.parquet.

    to FILE.html: the page (default: <name>-report.html in this folder)
    png FILE.png: a picture of the plots, too
    price: the price of a node-hour, by which the page says what incidents cost
    costs FILE.json: what its steps and recoveries cost, for elastic simulate --costs, in place of the page

    Raises :class:`JobError` if there is no such run, or if a file cannot be written.
    """
    if costs is not None:
        return _write_costs(job, costs)
    to = to or Path(f"{job.name}-report.html")
    _check(to, "--to", (".html", ".htm"))
    if png is not None:
        _check(png, "--png", (".png",))
    if price is not None and not 0 <= price < math.inf:
        raise JobError(f"--price = {price} is no price of a node-hour; give a number, 0 or more, say 2.5")
    run = Run.begun(job)
    from actors.cli.facts import facts_of  # it takes numpy, and a page matplotlib
    from elastic.report.page import page_of
    from elastic.report.page.draw import png_of
    from elastic.report.page.html import html_of
    from elastic.report.page.parquet import parquet_of

    page = page_of(replace(facts_of(run, job.keep(), time.time()), price=price))
    _write(to, "--to", html_of(page).encode())
    if page.facts.timeline.life:
        _write(to.with_suffix(".timeline.parquet"), "--to", parquet_of(page.facts.timeline.account.intervals))
    if png is not None:
        _write(png, "--png", png_of(page))


def _write_costs(job: Job, to: Path) -> None:
    from elastic.report.measured_costs import costs_of

    _check(to, "--costs", (".json",))
    try:
        found = costs_of(Run.begun(job).segments(), job.name)
    except ValueError as error:
        raise JobError(f"the costs of {job.name}: {error}") from None
    _write(to, "--costs", json.dumps(found, indent=1).encode())
    if unknown := [name for name, cost in found.items() if cost is None]:
        say(
            f"the run has not shown {' and '.join(unknown)}, which elastic simulate needs: write seconds into {to}, or "
            "take the costs of a run that has lost a worker, such as one of elastic chaos"
        )
    if "; guessed: " in found["about"]:
        say(f"what the run has not shown is a guess: {found['about'].partition('; guessed: ')[2]}")


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
