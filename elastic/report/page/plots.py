"""The plots of a page: lines by step and by time, and the moments of the run on their axes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import islice

from elastic.ids import Version
from elastic.report.best import Best, Loss, best, over_fit
from elastic.report.page.model import Chart, Facts, Lane, Line, Mark
from elastic.report.page.series import GRADIENT, LOSS, SPIKE, Bucket, Columns, buckets, sampled, smoothed
from elastic.report.speed import noun_of
from elastic.report.timeline import BRANCH, COORDINATOR, ENDED, FORMED, LEFT_OUT, LOST, SAVED, SKIPPED, STARTED, Moment
from elastic.report.words import TEXT, clipped, counted, shown

MARKS = 240
"""Largest number of marks of a lane; moments closer together share one."""
TOLD = 2
"""Largest number of moments whose texts a mark tells."""
AVERAGED, MOST_AVERAGED = 50, 500
"""A smooth line averages over one of so many parts of the steps, over no more than the second number, and over 10 of a short run."""


TOLD_WHY = {SPIKE: "it was a spike", LOSS: "its loss was not finite", GRADIENT: "its gradient was not finite"}


def _moments(facts: Facts) -> list[Moment]:
    """Returns all moments of the run, those of the journal and those that rows, branches and checkpoints tell, in order of their steps."""
    columns, found = facts.columns, list(facts.timeline.moments)
    for place, step in enumerate(columns["step"]):
        at = columns["time"][place]
        if why := columns.why_skipped(place):
            found.append(Moment(at, int(step), SKIPPED, f"step {int(step)} was skipped: {TOLD_WHY[why]}"))
        if (number := columns["left_out"][place]) > 0:
            found.append(Moment(at, int(step), LEFT_OUT, f"step {int(step)} left out {counted(int(number), 'microbatch', 'microbatches')}"))
    for branch in facts.branches:
        text = "; ".join(
            f"{name} = {clipped(before)} before and {clipped(after)} now" for name, (before, after) in islice(branch.changed.items(), TOLD)
        )
        found.append(Moment(branch.at, branch.step, BRANCH, f"branch {branch.number} begins: {text}"))
    saved = facts.timeline.saves
    for each in facts.checkpoints:
        if each.version not in saved and each.state.endswith("complete"):
            step = each.version.step
            found.append(Moment(columns.time_of(step), step, SAVED, f"the checkpoint of step {step} is in the bucket"))
    return sorted(found, key=lambda each: each.step)


LANES = (
    ("Worker, node or coordinator lost", "bad", (LOST, COORDINATOR)),
    ("World formed", "plain", (FORMED,)),
    ("Started again, branch", "accent", (STARTED, BRANCH)),
    ("Step skipped", "bad", (SKIPPED,)),
    ("Microbatch left out", "bad", (LEFT_OUT,)),
    ("Checkpoint", "plain", (SAVED,)),
)


def _lanes(moments: Sequence[Moment], x_range: tuple[float, float], began_at: float | None) -> list[Lane]:
    """Returns the lanes that have marks, by step, or by time since ``began_at`` if that is given."""
    lanes = []
    for name, kind, kinds in LANES:
        places = [(float(each.step) if began_at is None else each.at - began_at, each.text) for each in moments if each.kind in kinds]
        marks = _marks(sorted(place for place in places if math.isfinite(place[0])), x_range)
        if marks:
            lanes.append(Lane(name, kind, marks))
    return lanes


def _marks(places: Sequence[tuple[float, str]], x_range: tuple[float, float]) -> list[Mark]:
    low, high = x_range
    width = (high - low) / MARKS or 1.0
    groups = dict[int, list[tuple[float, str]]]()
    for place in places:
        groups.setdefault(int((place[0] - low) / width), []).append(place)
    return [
        Mark(min(max(group[0][0], low), high), len(group), tuple(clipped(text, TEXT // 2) for _, text in group[:TOLD]))
        for group in groups.values()
    ]


def charts_of(facts: Facts) -> list[Chart]:
    """Returns the plots, from top to bottom; one without any number has lines without points."""
    columns, told, moments = facts.columns, facts.timeline, _moments(facts)
    steps = columns["step"]
    by_step = (0.0, max(float(facts.reached), 1.0))
    loss = [*_averaged(steps, columns["loss"]), Line("validation", "points", buckets(steps, columns["validation_loss"]))]
    lanes, found = _lanes(moments, by_step, None), best_validation(columns)
    lowest = ""
    if found:
        others = f" ({found.left_out})" if found.left_out else ""
        lowest = f" The best validation loss is {shown(found.loss)}, after step {found.version.step:,}{others}."
        if said := over_fits(columns, facts.name):
            lowest += f" {said[0].upper()}{said[1:]}."
    fell = f"The training loss goes from {shown(first(columns, 'loss'))} to {shown(columns.last('loss'))}." if columns.known("loss") else ""
    charts = [
        Chart("loss", "Loss", "", "step", by_step, [each for each in loss if each.points], lanes, _wide_range(loss), told=fell + lowest),
        _norm(columns, by_step),
        _rate(columns, by_step),
    ]
    times, began = columns["time"], told.began_at
    finite = [at for at in times if math.isfinite(at) and at > 0]
    if began is None and not finite:
        return charts
    began = min([*finite[:1], *([began] if began is not None else [])])
    by_time = (0.0, max([1.0, told.at - began, *(finite[-1:] and [finite[-1] - began])]))
    since, unit = [at - began for at in times], unit_of(facts)
    over = f"Over all measured steps it is {shown(throughput(columns))} {unit} a second."
    by_clock = _lanes(moments, by_time, began)
    charts.append(
        Chart(
            "throughput",
            "Throughput",
            f"{unit} a second",
            "s",
            by_time,
            _averaged(since, columns["tokens_per_s"]),
            by_clock,
            from_zero=True,
            told=over,
        )
    )
    sizes = [(at - began, float(size)) for at, size in told.sizes] or _worlds(since, columns)
    if sizes and told.sizes and told.state not in ENDED:
        sizes.append((by_time[1], sizes[-1][1]))
    most = max((size for _, size in sizes), default=0.0)
    stairs = Line("workers", "stairs", _stairs(sizes))
    said = f"At most {counted(int(most), 'worker')}; 0 while there was no world."
    charts.append(Chart("world", "World size", "workers", "s", by_time, [stairs] if most else [], from_zero=True, told=said))
    if columns.known("mfu"):
        mfu = _averaged(since, [100 * each for each in columns["mfu"]])
        charts.append(Chart("mfu", "Model FLOPs utilisation", "%", "s", by_time, mfu, from_zero=True))
    return charts


def _averaged(xs: Sequence[float], ys: Sequence[float], what: str = "each step") -> list[Line]:
    """Returns the line of all numbers, and that of their average."""
    span = max(3, min(len(ys) // 5, 10), min(len(ys) // AVERAGED, MOST_AVERAGED))
    return [Line(what, "raw", buckets(xs, ys)), Line(f"average of {span:,} steps", "main", sampled(xs, smoothed(ys, span)))]


def _norm(columns: Columns, x_range: tuple[float, float]) -> Chart:
    lines = _averaged(columns["step"], columns["norm"])
    most = max((each.high for each in lines[0].points), default=math.nan)
    told = f"Before it is clipped: {shown(columns.last('norm'))} at last, {shown(most)} at most."
    return Chart("norm", "Norm of the gradient", "", "step", x_range, lines, (), _wide_range(lines), from_zero=True, wide=False, told=told)


def _rate(columns: Columns, x_range: tuple[float, float]) -> Chart:
    line = Line("learning rate", "main", buckets(columns["step"], columns["lr"]))
    told = f"{shown(columns.last('lr'))} at last, {shown(max((each.high for each in line.points), default=math.nan))} at most."
    return Chart("lr", "Learning rate", "", "step", x_range, [line], from_zero=True, wide=False, told=told)


def _wide_range(lines: Iterable[Line]) -> bool:
    """Returns whether a logarithmic axis shows the lines better: all numbers are positive, and the greatest is 30 times the least."""
    ends = [(each.low, each.high) for line in lines for each in line.points]
    low, high = min((low for low, _ in ends), default=0.0), max((high for _, high in ends), default=0.0)
    return low > 0 and high > 30 * low


def _stairs(sizes: Sequence[tuple[float, float]]) -> list[Bucket]:
    """Returns the sizes over time as buckets: each bucket has the size that it ends with as its mean."""
    found = buckets([at for at, _ in sizes], [size for _, size in sizes])
    ends = [at for at, _ in sizes]
    return [Bucket(each.x, each.low, each.high, sizes[bisect_right(ends, each.x) - 1][1], each.number) for each in found]


def _worlds(times: Sequence[float], columns: Columns) -> list[tuple[float, float]]:
    """Returns the sizes of the worlds that the rows tell: from its first step to its last, and 0 until the next one."""
    found, last = list[tuple[float, float]](), -1.0
    for at, size, generation, took_s in zip(times, *(columns[name] for name in ("world", "generation", "step_s")), strict=True):
        if not (math.isfinite(size) and math.isfinite(at)):
            continue
        if math.isfinite(generation) and generation != last:
            ended = found[-1][0] if found else 0.0
            found += [*([(ended, 0.0)] if found else []), (max(at - took_s, ended) if math.isfinite(took_s) else at, size)]
            last = generation
        found.append((at, size))
    return found


# ---- numbers of all steps


def first(columns: Columns, name: str) -> float:
    return next((value for value in columns[name] if math.isfinite(value)), math.nan)


def best_validation(columns: Columns) -> Best | None:
    """Returns the best of the validations that can be compared; None if nothing was validated."""
    return best(_validations(columns))


def over_fits(columns: Columns, name: str) -> str:
    """Returns the sentence about a run of that name that over-fits; "" for another one."""
    losses = list(zip(map(int, columns["step"]), columns["loss"], strict=True))
    return over_fit(_validations(columns), lambda after: (each for each in losses if each[0] > after), f"--resume {name}@best")


def _validations(columns: Columns) -> dict[Version, Loss]:
    each = zip(columns["step"], columns["validation_loss"], columns["validation_data"], strict=True)
    known = [(int(step), loss, data) for step, loss, data in each if math.isfinite(loss) or math.isfinite(data)]
    return {Version(step, 0): Loss(loss, int(data) if math.isfinite(data) else 0) for step, loss, data in known}


def throughput(columns: Columns) -> float:
    """Returns the terms of the loss a second over all steps whose time was measured."""
    measured = [(tokens, took) for tokens, took in zip(columns["tokens"], columns["step_s"], strict=True) if math.isfinite(took)]
    took_s = math.fsum(took for _, took in measured)
    return math.fsum(tokens for tokens, _ in measured) / took_s if took_s else 0.0


def unit_of(facts: Facts) -> str:
    """Returns what is counted, in the words of the run's lines."""
    by_sample = bool(facts.global_batch) and all(terms == facts.global_batch for terms in facts.columns["tokens"])
    return noun_of(facts.settings.get("loss", "elastic"), by_sample=by_sample)
