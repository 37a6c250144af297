"""The overlap of communication and computing is computed from a trace."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from elastic.report.overlap import events_of, steps_of, summary

pytestmark = pytest.mark.fast


class Trace:
    """A trace as torch writes it; times are in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]

    def add(self, category: str, name: str, begin: float, end: float, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin, "args": args}
        )

    def kernel(
        self, name: str, launched: float, begin: float, end: float, stream: int = 7, category: str = "kernel"
    ) -> None:
        number = len(self.events)
        self.add("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, correlation=number)
        self.add(category, name, begin, end, correlation=number, stream=stream)


def by_hand(late: float = 0.0) -> Trace:
    """Two steps.  In the first one collectives take 100 + 50, of which 60 + 10 pass under computing; all come
    ``late``.
    """
    trace = Trace()
    trace.add("user_annotation", "step 5", 0, 1000)
    trace.add("user_annotation", "step 6", 1000, 2000)
    trace.add("user_annotation", "step by step", 0, 3000)
    trace.kernel("gemm", 10, 100, 140)
    trace.kernel("gemm", 11, 140, 160)
    trace.kernel("ncclDevKernel_AllReduce_Sum_f32", 12, 100 + late, 200 + late, stream=20)
    # under the other one: no time of its own
    trace.kernel("ncclDevKernel_AllGather", 13, 150 + late, 200 + late, stream=21)
    trace.kernel("ncclDevKernel_ReduceScatter", 14, 300 + late, 350 + late, stream=20)
    trace.kernel("softmax", 15, 340, 400)
    trace.kernel("Memcpy HtoD (Pinned -> Device)", 16, 380, 480, category="gpu_memcpy")
    trace.kernel("Memcpy DtoD (Device -> Device)", 17, 420, 480, category="gpu_memcpy")
    # runs after the host's span, and is of step 6
    trace.kernel("ncclDevKernel_AllReduce_Sum_f32", 1500, 2100, 2200, stream=20)
    trace.kernel("gemm", 2500, 2100, 2200)  # was launched after the steps
    trace.add("kernel", "gemm", 100, 900, correlation=-5)  # nobody knows who launched it
    return trace


def test_b13_the_fraction_of_communication_that_is_hidden() -> None:
    """B12, B13: by hand.  The control: collectives that come after the computing are not hidden, in the same
    time.
    """
    found = steps_of(by_hand().events)
    assert found[5].collectives == pytest.approx((150e-6, 70e-6)) and found[5].copies == pytest.approx(
        (100e-6, 20e-6)
    )
    assert found[6].collectives == pytest.approx((100e-6, 0)) and found[6].copies == (0, 0)
    assert summary(by_hand().events) == [
        "step 5: collectives took 0.15 ms, 47% of it hidden under computing; copies to and from the host "
        "took 0.1 ms, 20% of it hidden under computing",
        "step 6: collectives took 0.1 ms, 0% of it hidden under computing",
    ]
    assert steps_of(by_hand(late=400).events)[5].collectives == pytest.approx((150e-6, 0))


def test_random_spans_against_one_microsecond_after_the_other() -> None:
    """The judge counts microseconds in which something runs."""
    draw = random.Random(3)
    for _ in range(50):
        trace, busy = Trace(), {"ncclDevKernel": set[int](), "gemm": set[int]()}
        trace.add("user_annotation", "step 1", 0, 10)
        for number in range(draw.randrange(12)):
            name, begin = draw.choice([*busy]), draw.randrange(60)
            end = begin + draw.randrange(20)
            trace.kernel(name, 1, begin, end, stream=number)
            busy[name] |= {*range(begin, end)}
        found = steps_of(trace.events)[1].collectives
        assert found == pytest.approx(
            (1e-6 * len(busy["ncclDevKernel"]), 1e-6 * len(busy["ncclDevKernel"] & busy["gemm"]))
        )


def test_events_are_those_of_the_file(tmp_path: Any) -> None:
    """A file is torch's own, and json is the judge.  On a CPU nothing is said, since no events tell
    communication from computing.
    """
    with profile(activities=[ProfilerActivity.CPU]) as found, record_function("step 1"):
        torch.ones(8, 8) @ torch.ones(8, 8)
    found.export_chrome_trace(str(tmp_path / "trace.json"))
    text = (tmp_path / "trace.json").read_text()
    assert [*events_of(text)] == json.loads(text)["traceEvents"] != []
    assert [*steps_of(events_of(text))] == [1] and summary(events_of(text)) == []
    for compact in (
        json.dumps({"traceEvents": by_hand().events, "more": [{}]}),
        json.dumps({"traceEvents": by_hand().events}, indent=1),
    ):
        assert [*events_of(compact)] == by_hand().events
    assert [*events_of("{}")] == [*events_of('{"traceEvents": []}')] == []
