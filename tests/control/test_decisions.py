"""No decision in a world of 10,000 workers takes quadratic time.  The figures are in tests/benchmarks/RESULTS.md."""

from __future__ import annotations

from elastic.sim.coverage import EVENTS
from tests.benchmarks.decisions import measure


def test_nothing_that_ten_thousand_workers_say_is_quadratic() -> None:
    """Each call takes milliseconds, the slowest less than 100 ms; searching one list for each worker would take seconds."""
    slowest = measure(10_000)
    assert {event for _, event in slowest} == set(EVENTS)
    assert max(slowest.values()) < 1.0, {pair: took_s for pair, took_s in slowest.items() if took_s > 0.1}
