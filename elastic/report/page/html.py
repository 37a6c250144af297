"""Draws a page as one HTML file that needs nothing else: no network, no font, no script of others.

Every text of the run is escaped in one place, :func:`text`, which :func:`tag` calls for all that is not :class:`Html` already.  Plots are
inline SVG that is stretched to the width of its figure; the labels of their axes are HTML, so that they stay readable on a phone.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Sequence

from elastic.report.page.look import SCRIPT, STYLE
from elastic.report.page.model import Chart, Lane, Line, Page, Share, Table
from elastic.report.page.series import Bucket, log_ticks, ticks, unbroken
from elastic.report.words import duration, percent, shown

WIDTH, HEIGHT = 1000.0, 300.0
"""The size of a plot in units of its SVG."""
UNSOUND = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Matches what HTML cannot hold: control characters but tab and newline, and halves of characters."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The browser loads nothing from anywhere, even if a text of the run should try."""
TALL = {"loss": "tall", "world": "low"}


class Html(str):
    """A text that is HTML already."""


def text(value: str) -> Html:
    """Returns the text as HTML.  What HTML cannot hold becomes U+FFFD."""
    sound = UNSOUND.sub("�", value)
    return Html(html.escape(sound, quote=True))


def tag(name: str, *children: str, **attributes: str) -> Html:
    """Returns an element.  Children that are not :class:`Html` are texts; the attribute ``class_`` is written ``class``."""
    said = "".join(f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{said}>{joined(children)}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    return Html("".join(each if isinstance(each, Html) else text(each) for each in parts))


def html_of(page: Page) -> str:
    """Returns the HTML of a page."""
    head = joined(
        [
            Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
            tag("title", f"{page.name}: run report"),
            tag("style", Html(STYLE)),
        ]
    )
    body = tag(
        "main",
        tag("header", tag("p", "Elastic run report"), tag("h1", page.name), tag("p", page.lead, class_="lead"), tag("p", page.about)),
        _tiles(page),
        _error(page),
        tag("div", *map(_figure, page.charts), class_="charts") if page.charts else Html(),
        _shares(page),
        *map(_table, page.tables),
        tag("footer", *(tag("p", note) for note in page.notes), tag("p", "Times are in UTC.  All numbers are from the run's bucket.")),
    )
    script = joined([Html('<script type="application/json" id="data">'), _data(page), Html(f"</script><script>{SCRIPT}</script>")])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}{script}</body></html>\n'


def _tiles(page: Page) -> Html:
    tiles = [
        tag("div", tag("dt", each.label), tag("dd", each.value, class_="v"), tag("dd", each.note, class_="n") if each.note else Html())
        for each in page.tiles
    ]
    return tag("dl", *tiles, class_="tiles")


def _error(page: Page) -> Html:
    return tag("section", tag("h2", "The error that ended the run"), tag("pre", page.error), id="error") if page.error else Html()


def _data(page: Page) -> Html:
    """Returns the numbers of the plots as JSON, for the script: six digits each, and null for what is not finite."""
    charts = {
        each.key: {
            "unit": each.x_unit,
            "x": each.x_range,
            "lines": [{"name": line.name, "look": line.look, "points": [_rounded(point) for point in line.points]} for line in each.lines],
            "lanes": [
                {"name": lane.name, "marks": [[_digits(mark.x), mark.count, mark.texts[:1]] for mark in lane.marks]} for lane in each.lanes
            ],
        }
        for each in page.charts
    }
    written = json.dumps(charts, separators=(",", ":"))
    return Html(written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _rounded(point: Bucket) -> list[float | None]:
    return [*map(_digits, point[:4]), point.number]


def _digits(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.6g}") if abs(value) < 1e6 or value != int(value) else value
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


# ---- plots


def _figure(chart: Chart) -> Html:
    title = tag("h2", chart.title + (f" ({chart.unit})" if chart.unit and chart.unit.lower() not in chart.title.lower() else ""))
    legend = tag("ul", *(tag("li", tag("span", class_=f"key {line.look}"), line.name) for line in chart.lines), class_="legend")
    height = TALL.get(chart.key, "mid")
    return tag(
        "figure",
        tag("figcaption", title, tag("p", chart.told, class_="told") if chart.told else Html()),
        legend if len(chart.lines) > 1 or not chart.wide else Html(),
        _plot(chart, height),
        tag("p", "step" if chart.x_unit == "step" else f"{_x_scale(chart)[1]} since the run began", class_="unit"),
        tag("div", *(_lane(chart, lane) for lane in chart.lanes), class_="lanes") if chart.lanes else Html(),
        id=f"chart-{chart.key}",
        class_="wide" if chart.wide else "half",
    )


def _plot(chart: Chart, height: str) -> Html:
    scale, places = _y_scale(chart)
    grid = [Html(f'<line class="grid" x1="0" x2="1000" y1="{y:.1f}" y2="{y:.1f}"/>') for y, _ in places]
    lines = [_drawn(chart, line, scale) for line in chart.lines]
    label = f"{chart.title}. {chart.told}"
    svg = tag(
        "svg",
        tag("title", label),
        *grid,
        *lines,
        class_="area",
        role="img",
        viewBox="0 0 1000 300",
        preserveAspectRatio="none",
        aria_label=label,
    )
    ys = [tag("span", said, class_="y", style=f"bottom:{100 - y / 3:.2f}%") for y, said in places]
    pointer = [Html('<div class="rule" hidden></div><div class="tip" role="status" hidden></div>')]
    return tag("div", tag("div", svg, *ys, *_x_labels(chart), *pointer, class_="plot", data_chart=chart.key), class_=height)


def _x(chart: Chart, x: float) -> float:
    low, high = chart.x_range
    return (x - low) / ((high - low) or 1.0) * WIDTH


def _y_scale(chart: Chart) -> tuple[tuple[float, float, bool], list[tuple[float, str]]]:
    """Returns the scale, and the place and the text of each label of the axis."""
    low, high = chart.y_range
    if not chart.log:
        found = _whole(ticks(low, high)) if chart.key == "world" else ticks(low, high)
        pace = found[1] - found[0] if len(found) > 1 else 1.0
        if not chart.from_zero or low < 0:
            low = found[0] - pace if low < found[0] - pace * 1e-6 else found[0]
        high = found[-1] + pace if high > found[-1] + pace * 1e-6 else found[-1]
        found = _whole(ticks(low, high, 6)) if chart.key == "world" else ticks(low, high, 6)
    else:
        found = log_ticks(low, high)
    scale = (low, high, chart.log)
    return scale, [(_y(scale, value), shown(value)) for value in found]


def _whole(values: Sequence[float]) -> list[float]:
    return [each for each in values if each == int(each)]


def _y(scale: tuple[float, float, bool], value: float) -> float:
    low, high, log = scale
    part = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
    return HEIGHT * (1 - part)


def _drawn(chart: Chart, line: Line, scale: tuple[float, float, bool]) -> Html:
    places = [(_x(chart, each.x), each) for each in line.points]
    if line.look == "stairs":
        parts = [f"H{x:.1f}V{_y(scale, each.low):.1f}V{_y(scale, each.high):.1f}V{_y(scale, each.mean):.1f}" for x, each in places[1:]]
        begin = f"M{places[0][0]:.1f} {_y(scale, places[0][1].mean):.1f}" if places else ""
        return Html(f'<path class="stairs" d="{begin}{"".join(parts)}"/>')
    if line.look == "points":
        dots = "".join(f"M{x:.1f} {_y(scale, each.low):.1f}h0" for x, each in places)
        path = _path((x, _y(scale, each.low)) for x, each in places)
        return Html(f'<path class="points" d="{path}"/><path class="dots" d="{dots}"/>')
    drawn, (low, high) = list[str](), chart.x_range
    for part in unbroken(line.points, high - low):
        ends = [(each.x, y) for each in part for y in (dict.fromkeys((each.low, each.high)) if line.look == "raw" else (each.mean,))]
        drawn.append(_path((_x(chart, x), _y(scale, y)) for x, y in ends))
    return Html(f'<path class="{line.look}" d="{"".join(drawn)}"/>')


def _path(points: Iterable[tuple[float, float]]) -> str:
    """Returns the path through the points; a lone one is a dot."""
    said = [f"{x:.1f} {y:.1f}" for x, y in points]
    return f"M{'L'.join(said)}" + ("h0" if len(said) == 1 else "") if said else ""


SCALES = ((172_800.0, 86_400.0, "days"), (7200.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


def _x_scale(chart: Chart) -> tuple[float, str]:
    if chart.x_unit == "step":
        return 1.0, "step"
    return next((size, name) for least, size, name in SCALES if chart.x_range[1] >= least)


def _x_labels(chart: Chart) -> Sequence[Html]:
    size, _ = _x_scale(chart)
    low, high = (each / size for each in chart.x_range)
    found = [each for each in ticks(low, high, 5) if chart.x_unit != "step" or each == int(each)]
    labels = list[Html]()
    for value in found:
        part = (value - low) / ((high - low) or 1.0)
        side = " extra" if (len(found) - 1 - len(labels)) % 2 and len(found) > 4 else ""
        side += " first" if part < 0.02 else " last" if part > 0.96 else ""
        labels.append(tag("span", _step(value), class_=f"x{side}", style=f"left:{100 * part:.2f}%"))
    return labels


def _step(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _lane(chart: Chart, lane: Lane) -> Html:
    total = sum(mark.count for mark in lane.marks)
    marks = []
    for mark in lane.marks:
        at = Html(f'<path d="M{_x(chart, mark.x):.1f} 0v12"/>')
        more = [f"and {mark.count - len(mark.texts)} more"] if mark.count > len(mark.texts) else []
        marks.append(tag("g", tag("title", "\n".join([*mark.texts, *more])), at, at, class_=lane.kind))
    svg = tag("svg", *marks, viewBox="0 0 1000 12", preserveAspectRatio="none", role="img", aria_label=f"{lane.name}: {total}")
    return tag("div", tag("b", f"{lane.name} ({total:,})"), svg, class_="lane")


# ---- tables


def _shares(page: Page) -> Html:
    if not page.shares:
        return Html()
    total = sum(each.seconds for each in page.shares)
    bar = [
        tag("i", class_=each.kind, style=f"flex:{each.seconds / total:.5f}", title=f"{each.name}: {_part(each, total)}")
        for each in page.shares
    ]
    rows = [
        tag(
            "tr",
            tag("td", tag("i", class_=f"dot {each.kind}"), each.name),
            tag("td", duration(each.seconds), class_="num"),
            tag("td", percent(each.seconds, total), class_="num"),
            tag("td", each.told),
        )
        for each in page.shares
    ]
    head = tag("thead", tag("tr", *_heads(("What", "Time", "Part", "Meaning"), {1, 2})))
    table = tag("table", head, tag("tbody", *rows), id="shares")
    told = tag("p", page.shares_told, class_="told")
    return tag("section", tag("h2", "Where the time went"), told, tag("div", *bar, class_="bar", aria_hidden="true"), table)


def _part(share: Share, total: float) -> str:
    return f"{duration(share.seconds)}, {percent(share.seconds, total)}"


def _heads(names: Sequence[str], numbers: Iterable[int]) -> list[Html]:
    return [
        tag("th", name, scope="col", class_="num") if place in numbers else tag("th", name, scope="col") for place, name in enumerate(names)
    ]


def _table(table: Table) -> Html:
    rows = [
        tag("tr", *(tag("td", cell, **({"class_": kind} if (kind := _kind(table, place, cell)) else {})) for place, cell in enumerate(row)))
        for row in table.rows
    ]
    names = "".join(f'#{table.key} td:nth-child({place})::before{{content:"{name}"}}' for place, name in enumerate(table.head, 1))
    style = tag("style", Html(f"@media(max-width:760px){{{names}}}")) if not table.folded else Html()
    head = tag("thead", tag("tr", *_heads(table.head, table.numbers)))
    whole = tag("table", head, tag("tbody", *rows), id=table.key, **({} if table.folded else {"class_": "cards"}))
    told, scrolls = (
        tag("p", table.told, class_="told"),
        tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=table.title),
    )
    if table.folded:
        return tag("section", tag("details", tag("summary", table.title), told, scrolls))
    return tag("section", tag("h2", table.title), told, style, scrolls)


def _kind(table: Table, place: int, cell: str) -> str:
    return "num" if place in table.numbers else "incident" if table.key == "incidents" and cell == "incident" else ""
