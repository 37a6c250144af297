"""Tells from a trace of torch's profiler how much of a step's communication on a GPU was hidden under
computing.

Communication is the kernels of NCCL, or the copies between host and device; computing is all other kernels. A
kernel belongs to the step in whose span on the host it was launched.  NCCL's kernels also wait for the other
members, and their time includes this wait.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Event = Mapping[str, Any]
Span = tuple[float, float]
"""Beginning and end, in microseconds."""

STEP = re.compile(r"step (\d+)")
LAUNCHES = ("cuda_runtime", "cuda_driver")
"""Categories of the events in which the host launches work on the device."""


class Overlap(NamedTuple):
    """The seconds of one step with communication of one kind, and the part of these seconds that also had
    computing.
    """

    total_s: float
    hidden_s: float

    def __str__(self) -> str:
        return f"{1e3 * self.total_s:.3g} ms, {self.hidden_s / self.total_s:.0%} of it hidden under computing"


class StepOverlap(NamedTuple):
    """The communication of one step, by kind."""

    collectives: Overlap
    copies: Overlap

    def __str__(self) -> str:
        """Returns the overlap as a sentence; "" if nothing was communicated on a device."""
        named = (("collectives", self.collectives), ("copies to and from the host", self.copies))
        return "; ".join(f"{name} took {each}" for name, each in named if each.total_s)


def events_of(trace: str) -> Iterator[Event]:
    """Yields the events of a trace, one by one.  A trace may be large, and decoding it in one call would stop
    all threads.
    """
    decoder, begin = json.JSONDecoder(), re.search(r'"traceEvents"\s*:\s*\[\s*', trace)
    at = begin.end() if begin is not None else len(trace)
    separator = re.compile(r"\s*,?\s*")
    while at < len(trace) and trace[at] == "{":
        event, at = decoder.raw_decode(trace, at)
        yield event
        following = separator.match(trace, at)
        at = following.end() if following is not None else at


def steps_of(events: Iterable[Event]) -> dict[int, StepOverlap]:
    """Returns what each step in the trace communicated on the device."""
    steps, launched, kernels = dict[int, Span](), dict[int, float](), list[Event]()
    for event in events:
        match event.get("cat"):
            case "user_annotation" if (found := STEP.fullmatch(event["name"])) is not None:
                steps[int(found[1])] = _span(event)
            case category if category in LAUNCHES and "correlation" in event.get("args", {}):
                launched[event["args"]["correlation"]] = event["ts"]
            case "kernel" | "gpu_memcpy":
                kernels.append(event)
    kinds: dict[int, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for event in kernels:
        at = launched.get(event.get("args", {}).get("correlation", -1))
        step = next(
            (number for number, (begin, end) in steps.items() if at is not None and begin <= at <= end), None
        )
        if step is not None:
            kinds[step][_kind(event)].append(_span(event))
    return {number: _step(kinds[number]) for number in sorted(steps)}


def summary(events: Iterable[Event]) -> list[str]:
    """Returns a sentence for each step that communicated on a device."""
    return [f"step {number}: {step}" for number, step in steps_of(events).items() if str(step)]


def _kind(event: Event) -> str:
    if event["cat"] == "gpu_memcpy":
        return "copies" if "DtoD" not in event["name"] else "other"
    return "collectives" if event["name"].startswith("nccl") else "computing"


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _step(kinds: Mapping[str, Sequence[Span]]) -> StepOverlap:
    found, computing = list[Overlap](), kinds.get("computing", ())
    for spans in (kinds.get("collectives", ()), kinds.get("copies", ())):
        total, either = _length(spans), _length([*spans, *computing])
        found.append(Overlap(1e-6 * total, 1e-6 * max(total + _length(computing) - either, 0.0)))
    return StepOverlap(*found)


def _length(spans: Sequence[Span]) -> float:
    """Returns the length of the union of the spans."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total, until = total + max(end - max(begin, until), 0.0), max(end, until)
    return total
