"""Draws the plots of a page as a picture, with matplotlib: the extra ``report``."""

from __future__ import annotations

import io
import math
import textwrap

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from elastic.report.page.model import Chart, Line, Page
from elastic.report.page.series import unbroken

INK, MUTE, GRID, ACCENT, RAW, BAD = "#1b232b", "#57636e", "#dde2e7", "#0067a3", "#9dbfd6", "#c04a00"
STYLES = {
    "raw": (RAW, 0.8, "-", "", 0.0),
    "main": (ACCENT, 1.5, "-", "", 0.0),
    "stairs": (ACCENT, 1.5, "-", "", 0.0),
    "points": (BAD, 0.9, "--", "o", 3.5),
}
"""The color, width, style, marker and size of each look of a line."""
LANE = 0.05
"""Height of a lane of marks, as a part of the plot above it."""
MOST_TEXT = 110
"""Largest number of characters of a line of text."""
HOURS_FROM_S, MINUTES_FROM_S = 7200.0, 180.0


def png_of(page: Page) -> bytes:
    """Returns the picture: all plots of the page, one below the other, with the marks of events below them."""
    heights = [2.4 + 0.22 * len(chart.lanes) for chart in page.charts] or [0.1]
    figure = Figure(figsize=(11, 1.0 + sum(heights)), dpi=100, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    tiles = "     ".join(f"{each.label} {each.value}" for each in page.tiles)
    said = [textwrap.shorten(page.name, MOST_TEXT // 2, placeholder="…"), textwrap.shorten(page.lead, MOST_TEXT, placeholder="…"), tiles]
    figure.suptitle(_plain("\n".join(said)), x=0.01, ha="left", fontsize=11, color=INK)
    if page.charts:
        rows = figure.subplots(len(page.charts), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, chart in zip(rows, page.charts, strict=True):
            _draw(axes, chart)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def _plain(text: str) -> str:
    """Returns the text so that matplotlib neither reads formulas in it nor stumbles over control characters."""
    return "".join(each if each == "\n" or each.isprintable() else "�" for each in text).replace("$", r"\$")


def _points(chart: Chart, line: Line) -> tuple[list[float], list[float]]:
    """Returns the places of a line.  NaN stands in its gaps, and each bucket of a raw line has its least and its greatest number."""
    whole, mean = line.look in ("points", "stairs"), line.look != "raw"
    xs, ys = list[float](), list[float]()
    for part in [line.points] if whole else unbroken(line.points, chart.x_range[1] - chart.x_range[0]):
        for each in part:
            found = (each.mean,) if mean else tuple(dict.fromkeys((each.low, each.high)))
            xs += [each.x] * len(found)
            ys += found
        xs.append(math.nan)
        ys.append(math.nan)
    return xs, ys


def _draw(axes: Axes, chart: Chart) -> None:
    size, unit = _scale(chart)
    for line in chart.lines:
        color, width, style, marker, size_ = STYLES[line.look]
        xs, ys = _points(chart, line)
        (drawn,) = axes.plot([x / size for x in xs], ys, style, label=_plain(line.name), color=color, linewidth=width)
        drawn.set(marker=marker, markersize=size_, drawstyle="steps-post" if line.look == "stairs" else "default")
    axes.set_title(chart.title + (f" ({chart.unit})" if chart.unit else ""), loc="left", fontsize=11, color=INK, fontweight="bold")
    axes.set_xlabel(unit, fontsize=9, color=MUTE, loc="right")
    axes.set_xlim(chart.x_range[0] / size, chart.x_range[1] / size)
    if chart.log:
        axes.set_yscale("log")
    elif chart.from_zero:
        axes.set_ylim(bottom=0)
    if not chart.log:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=chart.key == "world"))
    if chart.x_unit == "step":
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.tick_params(colors=MUTE, labelsize=9, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    if len(chart.lines) > 1:
        axes.legend(loc="upper right", frameon=False, fontsize=8.5, labelcolor=MUTE)
    _lanes(axes, chart, size)


def _lanes(axes: Axes, chart: Chart, size: float) -> None:
    """Draws the marks of events below the axis, in coordinates of the axes from top to bottom."""
    for place, lane in enumerate(chart.lanes):
        top = -0.27 - 1.7 * LANE * place
        color = {"bad": BAD, "accent": ACCENT}.get(lane.kind, MUTE)
        axes.vlines(
            [mark.x / size for mark in lane.marks],
            top - LANE,
            top,
            transform=axes.get_xaxis_transform(),
            color=color,
            clip_on=False,
            linewidth=1.2,
        )
        axes.text(1.005, top - LANE / 2, lane.name, transform=axes.transAxes, fontsize=7, color=MUTE, va="center")


def _scale(chart: Chart) -> tuple[float, str]:
    if chart.x_unit == "step":
        return 1.0, "step"
    most = chart.x_range[1]
    size, name = (3600.0, "hours") if most >= HOURS_FROM_S else (60.0, "minutes") if most >= MINUTES_FROM_S else (1.0, "seconds")
    return size, f"{name} since the run began"
