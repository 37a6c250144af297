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
from elastic.report.goodput import BUCKETS, Account, Incident
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
FIGURES = {
    "present": "samples, of those that the nodes present could have committed",
    "paid": "samples, of those that the nodes paid could have committed",
    "stepping": "time in steps that count, of the time (Google's definition)",
    "stepping_nodes": "nodes that stepped, of the most that were there at a time",
    "available_nodes": "nodes that were there, of the most at a time",
}
"""The figures of goodput (``report/goodput.py``), in words."""
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
        goodput=_goodput(told.account),
        costs=_costs(told.account),
        cost_of={each.generation: each for each in told.account.incidents if each.generation},
        deleted=len(told.saves.keys() - {each.version for each in facts.checkpoints}),
        open_steps=int((facts.columns["final"] == 0).sum()),
        why_kept=_why_kept,
        buckets=[name for name in BUCKETS if told.account.whole.seconds[name] > 0][1:],
        money=money,
        rows=ROWS,
        long_text=LONG_TEXT,
        **WORDS,
    )
    return UNSOUND.sub("�", written)


def _goodput(account: Account) -> list[tuple[str, float, float]]:
    """Returns the rows of the table of goodput: what is measured, in the whole run and after its first step."""
    both = (account.whole.figures, account.since_first.figures)
    return [(text, *(getattr(each, name) for each in both)) for name, text in FIGURES.items()]


def _costs(account: Account) -> list[Incident]:
    """Returns the cost of all incidents of each kind as one, whose number is how many there were, the
    dearest kind first.
    """
    found: dict[str, Incident] = {}
    for each in account.lost:
        kind = found.setdefault(each.kind, Incident(0, each.kind, each.began_at))
        kind.number, kind.node_s = kind.number + 1, kind.node_s + each.node_s
        for bucket, seconds in each.seconds.items():
            kind.seconds[bucket] += seconds
    return sorted(found.values(), key=lambda each: -each.lost_s)


def money(price: float) -> str:
    """Returns a sum of money with hundredths, or with three digits if it is less than one."""
    return f"{price:,.2f}" if price >= 1 else f"{price:.3g}"


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
