"""Copies in host memory are simulated: what they are for does happen.  ``test_mutants.py`` breaks their
rules.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.protocol.faults import Fault, Kind
from elastic.sim import Coverage, simulate
from elastic.sim.scenario import Scenario
from tests.sim.scenarios import CALM, shards


def test_what_copies_are_for_does_happen(seen: Coverage) -> None:
    """Worlds begin from what dead workers have left, from what a lost node's buddy has, and from copies
    alone; nothing is held for ever.
    """
    rare = (
        "a world starts from copies alone",
        "a copy at a buddy is used",
        "a copy is torn by death",
        "copies of the dead are released",
        "a dead worker's copy is saved",
    )
    assert [each for each in ("a world starts from tier host", *rare) if not seen.occasions[each]] == []


def begun_anew(scenario: Scenario, seed: int) -> int:
    """Returns how often the run gave up all that was committed and began anew."""
    report = simulate(seed, scenario)
    assert report.end == "Finished"
    return sum("(init), abandons" in reason for _, _, reason in report.lines)


@pytest.mark.parametrize(("kind", "buddy_every"), [(Kind.SIGKILL, 0), (Kind.NODE_KILL, 1)])
def test_shards_that_die_are_had_again_from_host_memory(kind: Kind, buddy_every: int) -> None:
    """A dead worker's shard comes from its own node and a dead node's from its buddy; the control without
    copies begins anew.
    """
    assert (
        sum(
            begun_anew(shards(seed, copy_every=1, kind=kind, buddy_every=buddy_every), seed)
            for seed in range(4)
        )
        == 0
    )
    assert sum(begun_anew(shards(seed, copy_every=0, kind=kind), seed) for seed in range(2)) >= 2


def test_where_all_are_lost_at_once_newcomers_begin_from_copies() -> None:
    """R9 in host memory: every worker dies, no keeper does."""
    deaths = tuple(Fault(12.0, Kind.SIGKILL, target) for target in range(8))
    for seed in range(3):
        report = simulate(seed, replace(shards(seed, copy_every=1, kind=Kind.SIGKILL), faults=deaths))
        assert report.end == "Finished" and not any(
            "(init), abandons" in reason for _, _, reason in report.lines
        )
        assert report.occasions["a world starts from copies alone"]


def test_in_calm_weather_nobody_is_asked() -> None:
    """A planned stop has all that it needs live: growth waits for no keeper."""
    for seed in range(5):
        report = simulate(seed, replace(CALM, rules=replace(CALM.rules, copy_every=1, buddy_every=3)))
        assert (
            not any("Kept" in type(event).__name__ for _, event, _ in report.lines if event)
            and report.end == "Finished"
        )
