"""The page of a run: sentences, plots and tables, made from what its bucket holds by pure functions.

    bucket ── rows, journal, checkpoints, branches ──► Facts ── page_of ──► Page
    Page ──► draw.py (plots), html.py (page.html)

Every list in a page is bounded, so a run of a month makes a page of a few hundred kilobytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from elastic.plan.copy_budget import amount
from elastic.report.page.content import Facts, Page, Tile, TimeShare
from elastic.report.page.plots import best_validation, charts_of, throughput, unit_of
from elastic.report.page.series import GRADIENT, LOSS, SPIKE
from elastic.report.page.spent import shares_of
from elastic.report.words import clipped, counted, duration, percent, shown


def page_of(facts: Facts) -> Page:
    """Returns the page of a run."""
    shares = shares_of(facts.columns, facts.timeline, facts.alone)
    tiles = [*_tiles(facts, shares), *_tiles_of_bad_data(facts)]
    return Page(facts, clipped(facts.name), _lead(facts), tiles, charts_of(facts), shares)


def _lead(facts: Facts) -> str:
    told, where = facts.timeline, f"step {facts.reached:,} of {facts.steps:,}"
    if not facts.reached and not told.state:
        return "The run has begun and has not committed a step yet."
    if facts.end:
        reason = (
            f": {clipped(told.reason)}"
            if told.reason and facts.end != "Finished" and told.state == facts.end
            else ""
        )
        return f"{facts.end} at {where}{reason}."
    doing = {
        "Running": "training",
        "Waiting": "waiting for workers",
        "Finishing": "saving the last step",
        "": "one process trained last",
    }
    return f"Not over: {doing.get('' if facts.local else told.state, 'forming a new world')} at {where}."


def _tiles(facts: Facts, shares: Sequence[TimeShare]) -> list[Tile]:
    columns, told = facts.columns, facts.timeline
    tiles = [Tile("Step", f"{facts.reached:,}", f"of {facts.steps:,}")]
    if (loss := columns.finite("loss")).size:
        tiles.append(Tile("Training loss", shown(loss[-1]), f"{shown(loss[0])} at the beginning"))
    if (best := best_validation(columns)) is not None:
        others = f"; {best.left_out}" if best.left_out else ""
        last = shown(next(reversed(columns.finite("validation_loss")), math.nan))
        tiles.append(
            Tile(
                "Best validation loss",
                shown(best.loss),
                f"after step {best.version.step:,}; the newest is {last}{others}",
            )
        )
    if (rate := throughput(columns)) > 0:
        tiles.append(Tile("Throughput", shown(rate), f"{unit_of(facts)} a second, over all measured steps"))
    if told.life:
        found = told.account.whole.figures
        note = f"{percent(found.paid, 1)} of the node-seconds paid; {percent(found.stepping, 1)} of the time in steps"
        tiles.append(
            Tile("Goodput", percent(found.present, 1), f"of what the nodes present could do; {note}")
        )
    elif shares:
        counts = sum(each.seconds for each in shares if each.kind in ("compute", "data"))
        up, away = (
            sum(each.seconds for each in shares if (each.kind == "away") == is_away)
            for is_away in (False, True)
        )
        note = f"{duration(counts)} of {duration(up)} in steps that count"
        more = f"; besides, {duration(away)} in which nothing ran" if away else ""
        tiles.append(Tile("Goodput", percent(counts, up), note + more))
    if told.life:
        unplanned = sum(not each.planned for each in told.recoveries)
        again = sum(each.again for each in told.worlds.values())
        tiles.append(Tile("Faults", f"{unplanned:,}", f"{counted(again, 'committed step')} done again"))
    if (mfu := columns.finite("mfu")).size:
        tiles.append(Tile("MFU", f"{100 * mfu[-1]:.1f} %", "model FLOPs utilisation of the last step"))
    if (peak := columns.finite("peak_bytes")).size:
        tiles.append(Tile("Device memory", amount(peak.max()), "at most, on one device"))
    return tiles


def _tiles_of_bad_data(facts: Facts) -> list[Tile]:
    columns, tiles = facts.columns, list[Tile]()
    if why := Counter(map(columns.why_skipped, np.flatnonzero(columns["skipped"] == 1).tolist())):
        words = {SPIKE: ("spike", "spikes"), LOSS: ("loss not finite", "losses not finite")}
        words[GRADIENT] = ("gradient not finite", "gradients not finite")
        told = ", ".join(counted(why[each], *names) for each, names in words.items() if why[each])
        tiles.append(Tile("Skipped steps", f"{why.total():,}", told))
    if warned := ((columns["spike"] == 1) & (columns["skipped"] == 0)).sum():
        tiles.append(Tile("Spikes (warned)", f"{warned:,}", "only warned of; their steps counted"))
    for name, label, note in (
        ("would_leave_out", "Microbatches (warned)", "only warned of; they counted"),
        ("left_out", "Microbatches left out", "all others counted"),
    ):
        if (of_steps := columns[name][columns[name] > 0]).size:
            tiles.append(
                Tile(label, f"{of_steps.sum():,.0f}", f"in {counted(of_steps.size, 'step')}; {note}")
            )
    if facts.quarantine:
        tiles.append(
            Tile(
                "Samples in quarantine",
                f"{facts.quarantine:,}",
                "in the newest checkpoint; no step reads them",
            )
        )
    return tiles
