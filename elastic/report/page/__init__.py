"""The page of a run: sentences, plots and tables, made from what its bucket holds by pure functions.

    bucket ── rows, journal, checkpoints, branches ──► Facts ── page_of ──► Page ──► html.py, png.py

Every list in a page is bounded, so a run of a month makes a page of a few hundred kilobytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from elastic.report.page.model import Facts, Page, Share, Tile
from elastic.report.page.plots import best_validation, charts_of, first, throughput, unit_of
from elastic.report.page.series import GRADIENT, LOSS, SPIKE
from elastic.report.page.spent import shares_of, shares_told, shares_useful
from elastic.report.page.tables import tables_of
from elastic.report.words import clipped, counted, duration, percent, shown, size_text, when

LONG_TEXT = 6000
"""Largest number of characters of the traceback that ended a run."""


def page_of(facts: Facts) -> Page:
    """Returns the page of a run."""
    told = facts.timeline
    shares = shares_of(facts.columns, told)
    return Page(
        name=clipped(facts.name),
        lead=_lead(facts),
        about=_about(facts),
        tiles=_tiles(facts, shares),
        charts=[each for each in charts_of(facts) if any(line.points for line in each.lines)],
        shares=shares,
        shares_told=shares_told(shares),
        tables=[each for each in tables_of(facts) if each.rows],
        notes=_notes(facts),
        error=clipped(told.error, LONG_TEXT) if told.error and facts.end == "Failed" else "",
    )


def _lead(facts: Facts) -> str:
    reached = facts.reached
    where = f"step {reached:,} of {facts.steps:,}"
    told = facts.timeline
    if not reached and not told.state:
        return "The run has begun and has not committed a step yet."
    if facts.end:
        reason = f": {clipped(told.reason)}" if told.reason and facts.end != "Finished" and told.state == facts.end else ""
        return f"{facts.end} at {where}{reason}."
    doing = _doing("" if facts.local else told.state)
    return f"Not over: {doing} at {where}."


def _about(facts: Facts) -> str:
    """Returns the times between which the run is known, and that of the page."""
    known = [at for at in facts.columns["time"] if at > 0]
    times = [at for at in (facts.timeline.began_at, *known[:1], *known[-1:], facts.timeline.at) if at and at > 0]
    ran = f"Begun {when(min(times))}, newest record in the bucket {when(max(times))}; " if times else ""
    return f"{ran}page made {when(facts.read_at)} (UTC)."


def _doing(state: str) -> str:
    doing = {"Running": "training", "Waiting": "waiting for workers", "Finishing": "saving the last step", "": "one process trained last"}
    return doing.get(state, "forming a new world")


def _tiles(facts: Facts, shares: Sequence[Share]) -> list[Tile]:
    columns, told = facts.columns, facts.timeline
    tiles = [Tile("Step", f"{facts.reached:,}", f"of {facts.steps:,}")]
    if columns.known("loss"):
        tiles.append(Tile("Training loss", shown(columns.last("loss")), f"{shown(first(columns, 'loss'))} at the beginning"))
    if (best := best_validation(columns)) is not None:
        others = f"; {best.left_out}" if best.left_out else ""
        last = f"{shown(columns.last('validation_loss'))} at last"
        tiles.append(Tile("Best validation loss", shown(best.loss), f"after step {best.version.step:,}; {last}{others}"))
    if (rate := throughput(columns)) > 0:
        what = unit_of(facts)
        tiles.append(Tile("Throughput", shown(rate), f"{what} a second, over all measured steps"))
    if shares:
        counts, up = shares_useful(shares), sum(each.seconds for each in shares if each.kind != "away")
        tiles.append(Tile("Goodput", percent(counts, up), f"{duration(counts)} of {duration(up)} in steps that count"))
    if told.life:
        unplanned = sum(not each.planned for each in told.recoveries)
        again = sum(each.again for each in told.worlds.values())
        tiles.append(Tile("Incidents", f"{unplanned:,}", f"{counted(again, 'committed step')} done again"))
    if columns.known("mfu"):
        tiles.append(Tile("MFU", f"{100 * columns.last('mfu'):.1f} %", "model FLOPs utilisation of the last step"))
    if columns.known("peak_bytes"):
        tiles.append(Tile("Device memory", size_text(max(filter(math.isfinite, columns["peak_bytes"]))), "at most, on one device"))
    return [*tiles, *_tiles_of_bad_data(facts)]


def _tiles_of_bad_data(facts: Facts) -> list[Tile]:
    columns, tiles = facts.columns, list[Tile]()
    if why := Counter(filter(None, map(columns.why_skipped, range(len(columns))))):
        words = {SPIKE: ("spike", "spikes"), LOSS: ("loss not finite", "losses not finite")}
        words[GRADIENT] = ("gradient not finite", "gradients not finite")
        told = ", ".join(counted(why[each], *names) for each, names in words.items() if why[each])
        tiles.append(Tile("Skipped steps", f"{why.total():,}", told))
    if warned := sum(spike == 1 and not skipped for spike, skipped in zip(columns["spike"], columns["skipped"], strict=True)):
        tiles.append(Tile("Spikes (warned)", f"{warned:,}", "only warned of; their steps counted all the same"))
    if of_steps := [int(number) for number in columns["would_leave_out"] if number > 0]:
        told = f"in {counted(len(of_steps), 'step')}; only warned of, and they counted all the same"
        tiles.append(Tile("Microbatches (warned)", f"{sum(of_steps):,}", told))
    if of_steps := [int(number) for number in columns["left_out"] if number > 0]:
        tiles.append(Tile("Microbatches left out", f"{sum(of_steps):,}", f"in {counted(len(of_steps), 'step')}; all others counted"))
    if facts.quarantine:
        tiles.append(Tile("Samples in quarantine", f"{facts.quarantine:,}", "in the newest checkpoint; no step reads them"))
    return tiles


def _notes(facts: Facts) -> list[str]:
    notes, told = [], facts.timeline
    if not told.life and len(facts.columns):
        notes.append("There is no journal: a run with --local writes none, so there are no incidents and no world over time.")
    elif told.life and facts.local:
        notes.append("One process trained this run last, with --local, and wrote no journal: what the page says of incidents ends before.")
    if told.life and told.reached < facts.reached:
        notes.append(f"The journal in the bucket ends at step {told.reached:,}.")
    open_steps = sum(value == 0 for value in facts.columns["final"])
    if open_steps:
        notes.append(f"{counted(open_steps, 'step')} after the newest checkpoint may still be done again.")
    if facts.owed:
        notes.append(f"Exports and samples: {facts.owed}.")
    return notes
