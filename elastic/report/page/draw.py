"""Draws the plots with matplotlib: each as SVG for the page, or all of them, one below the other, as a
picture.

The accent is blue; vermilion marks what went wrong, and validation.  All common kinds of colour blindness
leave these two distinct (Okabe and Ito 2008), and no two marks differ by colour alone.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import LogLocator, MaxNLocator
from numpy.typing import NDArray

from elastic.report.page.content import Chart, Line, Page
from elastic.report.words import shown

COLORS = {
    "ink": "#1b232b",
    "mute": "#57636e",
    "line": "#dde2e7",
    "accent": "#0067a3",
    "raw": "#9dbfd6",
    "bad": "#c04a00",
}
"""The colors on a light background.  In the page they become variables of these names, for which the style
sheet has other values on a dark background.
"""
LOOK = ["default", {"svg.fonttype": "none", "svg.hashsalt": "elastic"}]
"""The settings of matplotlib, whatever settings the machine has: text in SVG stays text, and the same plot
has the same bytes.
"""
STYLES: Mapping[str, dict[str, Any]] = {
    "raw": {"color": COLORS["raw"], "linewidth": 0.7},
    "main": {"color": COLORS["accent"], "linewidth": 1.3},
    "stairs": {"color": COLORS["accent"], "linewidth": 1.3},
    "points": {"color": COLORS["bad"], "linewidth": 0.8, "linestyle": "--", "marker": "o", "markersize": 3.5},
}
SCALES = (
    (172_800.0, 86_400.0, "days"),
    (7200.0, 3600.0, "hours"),
    (180.0, 60.0, "minutes"),
    (0.0, 1.0, "seconds"),
)
"""The units of an axis of time: the range in seconds from which on a unit is used, its length in seconds, and
its name.
"""

WIDE_IN, HALF_IN, LEFT_IN, RIGHT_IN = 11.0, 5.35, 0.6, 0.25
TOP_IN, HIGH_IN, AXIS_IN, LANE_IN = 0.3, {"loss": 2.8, "world": 1.15}, 0.5, 0.3
"""The sizes of a plot and its margins, in inches.  A plot whose key is not in ``HIGH_IN`` is 1.8 high."""
HEAD_IN = 1.05
"""The height of the sentences above the plots of a picture."""
MOST_TEXT = 110
"""Largest number of characters of a line of text in a picture."""


def png_of(page: Page) -> bytes:
    """Returns the picture: all plots of the page, one below the other."""
    with style.context(LOOK):
        heights = [HEAD_IN, *map(_height, page.charts)]
        whole = Figure((WIDE_IN, sum(heights)), dpi=100)
        head, *parts = whole.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        tiles = "     ".join(f"{each.label} {each.value}" for each in page.tiles)
        name, lead = (
            textwrap.shorten(said, most, placeholder="…")
            for said, most in ((page.name, MOST_TEXT // 2), (page.lead, MOST_TEXT))
        )
        said = "\n".join([name, lead, *textwrap.wrap(tiles, MOST_TEXT + 20)])
        # matplotlib stumbles over control characters
        said = "".join(each if each == "\n" or each.isprintable() else "�" for each in said)
        head.text(
            0.01, 0.95, said, fontsize=11, color=COLORS["ink"], va="top", linespacing=1.4, parse_math=False
        )
        for part, chart in zip(parts, page.charts, strict=True):
            _draw(part, chart, WIDE_IN)
            title = {"fontsize": 11, "color": COLORS["ink"], "fontweight": "bold"}
            part.text(LEFT_IN / WIDE_IN, 1 - TOP_IN / 2 / _height(chart), chart.title, **title)
        return _saved(whole, "png", {"Software": None})


def svg_of(chart: Chart) -> str:
    """Returns the plot as SVG without a title, to stand in HTML.  It contains no text from the run."""
    width, height = WIDE_IN if chart.wide else HALF_IN, _height(chart)
    with style.context(LOOK):
        figure = Figure((width, height), facecolor="none")
        _draw(figure, chart, width)
        svg = _saved(figure, "svg", dict.fromkeys(("Creator", "Date", "Format", "Type"))).decode()
    # the new head has no fixed size and no namespaces
    head = f'<svg viewBox="0 0 {72 * width:g} {72 * height:g}" aria-hidden="true">'
    svg = re.sub(r"^.*?<svg [^>]*>", head, svg, flags=re.DOTALL)
    for name, color in COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    return svg


def edges(chart: Chart) -> tuple[float, float]:
    """Returns the beginning and the end of the axes of a plot in the page, as parts of the plot's width."""
    width = WIDE_IN if chart.wide else HALF_IN
    return LEFT_IN / width, 1 - RIGHT_IN / width


def _saved(figure: Figure, kind: str, metadata: Mapping[str, None]) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format=kind, metadata=metadata)
    return out.getvalue()


def _height(chart: Chart) -> float:
    return TOP_IN + HIGH_IN.get(chart.key, 1.8) + AXIS_IN + LANE_IN * len(chart.lanes)


def _draw(figure: FigureBase, chart: Chart, width: float) -> None:
    """Draws a plot into a figure that is ``width`` inches wide: its lines, and below them its lanes of
    marks.
    """
    whole, high = _height(chart), HIGH_IN.get(chart.key, 1.8)
    wide, bottom = width - LEFT_IN - RIGHT_IN, whole - TOP_IN - high
    axes = figure.add_axes((LEFT_IN / width, bottom / whole, wide / width, high / whole), facecolor="none")
    size, unit = 1.0, "step"
    if chart.x_unit == "s":
        size, unit = next(
            (size, f"{name} since the run began") for least, size, name in SCALES if chart.x_range[1] >= least
        )
    start, end = (each / size for each in chart.x_range)
    for line in chart.lines:
        xs, ys = _path(line, chart.x_range[1] - chart.x_range[0])
        axes.plot(xs / size, ys, label=line.name, clip_on=False, **STYLES[line.look])
        around = np.isnan(np.concatenate([[np.nan], ys, [np.nan]]))
        alone = around[:-2] & around[2:]  # no line leads to it
        axes.plot(
            xs[alone] / size, ys[alone], "o", markersize=2.5, color=STYLES[line.look]["color"], clip_on=False
        )
    axes.set_xlim(start, end)
    axes.set_xlabel(unit, loc="right", fontsize=9, color=COLORS["mute"])
    _ticks(axes, chart)
    if len(chart.lines) > 1:
        look = {"ncols": 3, "frameon": False, "borderpad": 0, "fontsize": 9, "labelcolor": COLORS["mute"]}
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), **look)
    for place, lane in enumerate(chart.lanes):
        upper = -AXIS_IN - LANE_IN * place  # in inches below the axis
        xs, ys = (
            np.repeat([mark.x / size for mark in lane.marks], 3),
            np.tile([upper - 0.08, upper - 0.18, np.nan], len(lane.marks)),
        )
        color = COLORS["mute" if lane.kind == "plain" else lane.kind]
        axes.plot(
            xs, ys / high, color=color, linewidth=1.3, clip_on=False, transform=axes.get_xaxis_transform()
        )
        said = f"{lane.name} ({sum(mark.number for mark in lane.marks):,})"
        axes.text(
            0,
            (upper + 0.03) / high,
            said,
            transform=axes.transAxes,
            fontsize=8,
            color=COLORS["mute"],
            va="center",
        )


def _ticks(axes: Axes, chart: Chart) -> None:
    """Gives the axes round numbers, a few lines behind the plot, and no frame."""
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=chart.x_unit == "step"))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}" if x == int(x) else f"{x:g}")
    if chart.log:
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5), numticks=4))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=chart.key == "world"))
        axes.set_ylim(bottom=0 if chart.from_zero else None)
    axes.yaxis.set_major_formatter(lambda y, _: shown(y))
    axes.yaxis.set_minor_formatter(lambda y, _: shown(y))
    axes.tick_params(which="both", left=False, bottom=False, labelsize=9, labelcolor=COLORS["mute"])
    axes.grid(axis="y", color=COLORS["line"], linewidth=0.7, clip_on=False)
    axes.spines[:].set_visible(False)


def _path(line: Line, span: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the points to join.  Each bucket of a raw line goes from its least to its greatest number, and
    stairs end at the mean of their bucket.

    NaN marks a gap without steps: one wider than 10 times the median distance of points and than 1 % of
    ``span``.
    """
    x, low, high, mean, _ = np.array(line.points).T
    before = np.concatenate([mean[:1], mean[:-1]])
    ys = np.stack({"raw": (low, high), "stairs": (before, low, high, mean)}.get(line.look, (mean,)), axis=1)
    if line.look in ("raw", "main") and len(x) > 1:
        wide = np.diff(x) > max(10 * np.median(np.diff(x)), span / 100)
        x, ys = (np.insert(each, np.flatnonzero(wide) + 1, np.nan, axis=0) for each in (x, ys))
    return np.repeat(x, ys.shape[1]), ys.ravel()
