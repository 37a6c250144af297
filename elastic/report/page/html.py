"""Fills in the page, ``page.html``: one file that needs no network, no font and no script from elsewhere.

Jinja2 escapes every text of the run.  Only the plots, which have no text of the run, are HTML already.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from elastic.plan.copy_budget import amount
from elastic.report.page.content import Chart, Page
from elastic.report.page.draw import edges, svg_of
from elastic.report.words import clipped, counted, duration, percent, when

ROWS = 200
"""Largest number of rows of a table: the newest or the most important ones."""
LONG_TEXT = 6000
"""Largest number of characters of the traceback that ended a run."""
UNSOUND = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Matches what HTML cannot hold: control characters except tab and newline, and lone surrogates.  Each
becomes U+FFFD.
"""
KEPT = {
    "newest": "newest",
    "last": "one of the last",
    "every": "at a multiple",
    "best": "best validation",
    "younger": "written not long ago",
    "branch": "a branch or a fork begins here",
    "owed": "an export, samples or a validation is owed",
    "all": "all are kept",
}
"""The rules that keep a checkpoint (``plan/retention.py``), in words."""
WORDS = {each.__name__: each for each in (amount, clipped, counted, duration, percent, when)}


def html_of(page: Page) -> str:
    """Returns the HTML of a page."""
    facts, told = page.facts, page.facts.timeline
    times = facts.columns.finite("time")
    known = [at for at in (told.began_at, *times[times > 0][:1], *times[-1:], told.at) if at and at > 0]
    changes = (
        (branch, name, *pair) for branch in reversed(facts.branches) for name, pair in branch.changed.items()
    )
    loader = PackageLoader("elastic.report.page", ".")
    pages = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    written = pages.get_template("page.html").render(
        page=page,
        facts=facts,
        told=told,
        times=sorted(known),
        numbers={each.key: _numbers(each) for each in page.charts},
        svg_of=svg_of,
        changes=list(islice(changes, ROWS)),
        deleted=len(told.saves.keys() - {each.version for each in facts.checkpoints}),
        open_steps=int((facts.columns["final"] == 0).sum()),
        why_kept=_why_kept,
        rows=ROWS,
        long_text=LONG_TEXT,
        **WORDS,
    )
    return UNSOUND.sub("�", written)


def _why_kept(rules: Sequence[str]) -> str:
    return ", ".join(KEPT[rule] for rule in rules if rule != "newest" or len(rules) == 1)


def _numbers(chart: Chart) -> dict[str, Any]:
    """Returns the numbers of a plot, with eight digits each, for the script that shows those below the
    pointer.
    """
    lines = [
        {
            "name": line.name,
            "look": line.look,
            "points": [[float(f"{each:.8g}") for each in point] for point in line.points],
        }
        for line in chart.lines
    ]
    lanes = [lane._asdict() for lane in chart.lanes]
    return {"unit": chart.x_unit, "x": chart.x_range, "edges": edges(chart), "lines": lines, "lanes": lanes}
