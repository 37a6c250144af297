"""The plots of a page: lines by step and by time, and the moments of the run on their axes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from elastic.ids import Version
from elastic.report.best import Best, Loss, best, over_fit
from elastic.report.goodput import ENDED
from elastic.report.page.content import Chart, Facts, Lane, Line, Mark
from elastic.report.page.series import GRADIENT, LOSS, SPIKE, Columns, Numbers, buckets, sampled, smoothed
from elastic.report.speed import noun_of
from elastic.report.timeline import (
    BRANCH,
    COORDINATOR,
    FORMED,
    LEFT_OUT,
    LOST,
    SAVED,
    SKIPPED,
    STARTED,
    Moment,
)
from elastic.report.words import TEXT, clipped, counted, shown

MARKS = 240
"""Largest number of marks of a lane; moments closer together share one."""
TOLD = 2
"""Largest number of moments whose texts a mark has."""
AVERAGED, MOST_AVERAGED = 50, 500
"""A smooth line averages over one in ``AVERAGED`` of the steps, but over ``MOST_AVERAGED`` steps at most, and
over up to 10 in a short run.
"""

TOLD_WHY = {SPIKE: "it was a spike", LOSS: "its loss was not finite", GRADIENT: "its gradient was not finite"}


def _moments(facts: Facts) -> list[Moment]:
    """Returns all moments of the run, from the journal, the rows, the branches and the checkpoints, in order
    of their steps.
    """
    columns, found = facts.columns, list(facts.timeline.moments)
    steps, times, left_out = (
        columns["step"].astype(int).tolist(),
        columns["time"].tolist(),
        columns["left_out"],
    )
    for place in np.flatnonzero(columns["skipped"] == 1).tolist():
        text = f"step {steps[place]} was skipped: {TOLD_WHY[columns.why_skipped(place)]}"
        found.append(Moment(times[place], steps[place], SKIPPED, text))
    for place in np.flatnonzero(left_out > 0).tolist():
        text = f"step {steps[place]} left out {counted(int(left_out[place]), 'microbatch', 'microbatches')}"
        found.append(Moment(times[place], steps[place], LEFT_OUT, text))
    for branch in facts.branches:
        changes = islice(branch.changed.items(), TOLD)
        text = "; ".join(
            f"{name} = {clipped(before)} before and {clipped(after)} now" for name, (before, after) in changes
        )
        found.append(Moment(branch.at, branch.step, BRANCH, f"branch {branch.number} begins: {text}"))
    saved = facts.timeline.saves
    for each in facts.checkpoints:
        if each.version not in saved and each.state.endswith("complete"):
            step = each.version.step
            found.append(
                Moment(columns.time_of(step), step, SAVED, f"the checkpoint of step {step} is in the bucket")
            )
    return sorted(found, key=lambda each: each.step)


LANES = (
    ("Worker, node or coordinator lost", "bad", (LOST, COORDINATOR)),
    ("World formed", "plain", (FORMED,)),
    ("Started again, branch", "accent", (STARTED, BRANCH)),
    ("Step skipped", "bad", (SKIPPED,)),
    ("Microbatch left out", "bad", (LEFT_OUT,)),
    ("Checkpoint", "plain", (SAVED,)),
)


def _lanes(
    moments: Sequence[Moment], x_range: tuple[float, float], began_at: float | None = None
) -> list[Lane]:
    """Returns the lanes that have marks, by step, or by time since ``began_at`` if that is given."""
    lanes = []
    for name, kind, kinds in LANES:
        places = [
            (float(each.step) if began_at is None else each.at - began_at, each.text)
            for each in moments
            if each.kind in kinds
        ]
        marks = _marks(sorted(place for place in places if math.isfinite(place[0])), x_range)
        if marks:
            lanes.append(Lane(name, kind, marks))
    return lanes


def _marks(places: Sequence[tuple[float, str]], x_range: tuple[float, float]) -> list[Mark]:
    low, high = x_range
    width = (high - low) / MARKS
    groups = dict[int, list[tuple[float, str]]]()
    for place in places:
        groups.setdefault(int((place[0] - low) / width), []).append(place)
    return [
        Mark(
            min(max(group[0][0], low), high),
            len(group),
            tuple(clipped(text, TEXT // 2) for _, text in group[:TOLD]),
        )
        for group in groups.values()
    ]


def charts_of(facts: Facts) -> list[Chart]:
    """Returns the plots that have points, from top to bottom."""
    columns, told, moments = facts.columns, facts.timeline, _moments(facts)
    steps, by_step = columns["step"], (0.0, max(float(facts.reached), 1.0))
    loss, norm = _averaged(steps, columns["loss"]), _averaged(steps, columns["norm"])
    loss.append(Line("validation", "points", buckets(steps, columns["validation_loss"])))
    rate = [Line("learning rate", "main", buckets(steps, columns["lr"]))]
    lanes, said = _lanes(moments, by_step), f"This is the norm before clipping. {_extent(columns, 'norm')}"
    charts = [
        Chart("loss", "Loss", "step", by_step, loss, lanes, _wide_range(loss), told=_loss_told(facts)),
        Chart(
            "norm",
            "Norm of the gradient",
            "step",
            by_step,
            norm,
            (),
            _wide_range(norm),
            from_zero=True,
            wide=False,
            told=said,
        ),
        Chart(
            "lr",
            "Learning rate",
            "step",
            by_step,
            rate,
            from_zero=True,
            wide=False,
            told=_extent(columns, "lr"),
        ),
    ]
    times = columns.finite("time")
    times = times[times > 0].tolist()
    if known := [at for at in (told.began_at, *times[:1]) if at is not None]:
        charts += _by_time(facts, moments, min(known), max(told.at, *times[-1:], min(known) + 1.0))
    return [
        replace(each, lines=lines)
        for each in charts
        if (lines := [line for line in each.lines if line.points])
    ]


def _by_time(facts: Facts, moments: Sequence[Moment], began: float, ends: float) -> list[Chart]:
    """Returns the plots by time, from ``began`` to ``ends``."""
    columns, told, by_time = facts.columns, facts.timeline, (0.0, ends - began)
    since, unit = columns["time"] - began, unit_of(facts)
    sizes = [(at - began, float(size)) for at, size in told.sizes] or _worlds(since, columns)
    if told.sizes and told.state not in ENDED:
        sizes.append((by_time[1], sizes[-1][1]))
    ats, most = [at for at, _ in sizes], max((size for _, size in sizes), default=0.0)
    stairs = [
        each._replace(mean=sizes[bisect_right(ats, each.x) - 1][1])
        for each in buckets(ats, [size for _, size in sizes])
    ]
    world, rate, mfu = (
        Line("workers", "stairs", stairs if most else ()),
        columns["tokens_per_s"],
        100 * columns["mfu"],
    )
    over = f"Over all measured steps it is {shown(throughput(columns))} {unit} a second."
    most_told, lanes = (
        f"At most {counted(int(most), 'worker')}; 0 while there was no world.",
        _lanes(moments, by_time, began),
    )
    return [
        Chart(
            "throughput",
            f"Throughput ({unit} a second)",
            "s",
            by_time,
            _averaged(since, rate),
            lanes,
            from_zero=True,
            told=over,
        ),
        Chart("world", "World size (workers)", "s", by_time, [world], from_zero=True, told=most_told),
        Chart("mfu", "Model FLOPs utilisation (%)", "s", by_time, _averaged(since, mfu), from_zero=True),
    ]


def _averaged(xs: Numbers, ys: Numbers) -> list[Line]:
    """Returns the line of all numbers and the line of their average; no line if no number is finite."""
    if not np.isfinite(ys).any():
        return []
    span = max(3, min(len(ys) // 5, 10), min(len(ys) // AVERAGED, MOST_AVERAGED))
    return [
        Line("each step", "raw", buckets(xs, ys)),
        Line(f"average of {span:,} steps", "main", sampled(xs, smoothed(ys, span))),
    ]


def _loss_told(facts: Facts) -> str:
    columns, told = facts.columns, list[str]()
    if (loss := columns.finite("loss")).size:
        told.append(f"The training loss goes from {shown(loss[0])} to {shown(loss[-1])}.")
    if (found := best_validation(columns)) is not None:
        others = f" ({found.left_out})" if found.left_out else ""
        told.append(
            f"The best validation loss is {shown(found.loss)}, after step {found.version.step:,}{others}."
        )
        if said := over_fits(columns, facts.name):
            told.append(f"{said[0].upper()}{said[1:]}.")
    return " ".join(told)


def _extent(columns: Columns, name: str) -> str:
    values = columns.finite(name)
    return f"The newest is {shown(values[-1])}, the largest is {shown(values.max())}." if values.size else ""


def _wide_range(lines: Iterable[Line]) -> bool:
    """Returns whether a logarithmic axis shows the lines better: all numbers are positive, and the greatest
    is more than 30 times the least.
    """
    ends = [(each.low, each.high) for line in lines for each in line.points]
    low, high = min((low for low, _ in ends), default=0.0), max((high for _, high in ends), default=0.0)
    return low > 0 and high > 30 * low


def _worlds(times: Numbers, columns: Columns) -> list[tuple[float, float]]:
    """Returns the (time, size) of each world by the rows: its size from its first step to its last, and 0
    until the next world.
    """
    found, last = list[tuple[float, float]](), -1.0
    rows = (times, *(columns[name] for name in ("world", "generation", "step_s")))
    for at, size, generation, took_s in zip(*(each.tolist() for each in rows), strict=True):
        if not math.isfinite(size + at):
            continue
        if generation != last:
            ended = found[-1][0] if found else 0.0
            found += [
                *([(ended, 0.0)] if found else []),
                (max(at - took_s, ended) if math.isfinite(took_s) else at, size),
            ]
            last = generation
        found.append((at, size))
    return found


# ---- numbers of all steps


def best_validation(columns: Columns) -> Best | None:
    """Returns the best of the validations that can be compared; None if nothing was validated."""
    return best(_validations(columns))


def over_fits(columns: Columns, name: str) -> str:
    """Returns the sentence about the run ``name`` if it over-fits; "" if it does not."""
    losses = list(zip(columns["step"].astype(int).tolist(), columns["loss"].tolist(), strict=True))
    return over_fit(
        _validations(columns),
        lambda after: (each for each in losses if each[0] > after),
        f"--resume {name}@best",
    )


def _validations(columns: Columns) -> dict[Version, Loss]:
    each = zip(
        *(columns[name].tolist() for name in ("step", "validation_loss", "validation_data")), strict=True
    )
    known = [
        (int(step), loss, data) for step, loss, data in each if math.isfinite(loss) or math.isfinite(data)
    ]
    return {
        Version(step, 0): Loss(loss, int(data) if math.isfinite(data) else 0) for step, loss, data in known
    }


def throughput(columns: Columns) -> float:
    """Returns the terms of the loss a second over all steps whose time was measured."""
    measured = np.isfinite(columns["step_s"])
    took_s = float(columns["step_s"][measured].sum())
    return float(columns["tokens"][measured].sum()) / took_s if took_s else 0.0


def unit_of(facts: Facts) -> str:
    """Returns the noun for what the run's steps count, as in the lines of the run."""
    by_sample = bool(facts.global_batch) and bool((facts.columns["tokens"] == facts.global_batch).all())
    return noun_of(facts.settings.get("loss", "elastic"), by_sample=by_sample)
