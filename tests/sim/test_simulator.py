"""Three hundred clusters in which everything goes wrong: promises 2 to 4 hold in each, and each run ends (R8, R14)."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.control.events import Lost
from elastic.plan.layout import LayoutRule
from elastic.plan.transfer import Holding, covered
from elastic.sim import Coverage, Scenario, Violation, coverage_table, run_many, simulate
from elastic.sim.faults import Kind, Point
from elastic.sim.oracle import covers
from elastic.sim.scenario import ROWS, small_rules
from elastic.sim.simulation import EVENTS, STATES
from elastic.sim.weather import Weather
from storage.slices import Version

pytestmark = pytest.mark.fast

SEEDS = range(300)
OVER = ("Finished", "Stopped", "Failed")
IMPOSSIBLE = {
    ("Waiting", "Renewed"): "there is no world whose lease could be prolonged",
    ("Forming", "Renewed"): "a lease begins with Go",
    ("over", "Renewed"): "no lease is granted once the run is over",
}
"""(state, event) that cannot meet, and why.  "over": any of the three ends."""
OCCASIONS = (
    "a damaged checkpoint is put away",
    "a dead worker's report is evidence",
    "a manifest comes in for a version given up",
    "a prepared step is dropped",
    "a silent world's leases are waited out",
    "a step is applied after its world broke",
    "a world starts from tier bucket",
    "a world starts from tier live",
    "an expelled worker applies a step",
    "shards are cut anew",
    "steps are abandoned",
)
"""What must happen in a suite that wants to show it harmless."""


def storm(seed: int) -> Scenario:
    """Hard weather, kills that are often lost, and a user who asks for a stop: for what is rare elsewhere."""
    rng = random.Random(seed)
    scenario = Scenario.drawn(rng)
    return replace(
        scenario,
        rules=replace(scenario.rules, save_every=1),
        weather=replace(Weather().scaled(3.0, until_s=30.0), kill_lost_chance=0.8, save_failure_chance=0.6),
        stop_at_s=rng.uniform(1.0, 25.0) if rng.random() < 0.8 else None,
        error_step=rng.choice((None, 3)),
        error_once=False,
    )


def isolation(seed: int) -> Scenario:
    return Scenario.isolation(random.Random(seed))


CALM = Scenario(rules=small_rules(2, 4, LayoutRule(None, None, 2, "all"), target_step=10, save_every=4))
BARREN = replace(
    CALM, weather=Weather(until_s=60.0, start_failure_chance=0.8, save_failure_chance=0.7, event_rate=0.1, calamities=("kill",))
)
"""Hardly a start succeeds, to the end."""
EDGE = Scenario(
    rules=replace(small_rules(1, 3, LayoutRule(None, None, 1, "all"), target_step=12, save_every=1), lease_s=30.0),
    weather=Weather(
        until_s=30.0,
        point_chance=0.03,
        points=(Point.BEFORE_UPDATE,),
        kinds=(Kind.SIGSTOP,),
        aftershock_chance=0.7,
        kill_lost_chance=1.0,
        save_failure_chance=0.5,
    ),
)
"""Members are stopped between commit and update, others die, no kill arrives: zombies that wake up and apply."""


@pytest.fixture(scope="module")
def seen() -> Coverage:
    """Every promise is asserted on the way: a :class:`Violation` fails all that use this."""
    coverage = run_many(SEEDS)
    for seed in range(150):
        coverage.add(simulate(seed, storm(seed)))
    for seed in range(60):
        coverage.add(simulate(seed, EDGE))
        coverage.add(simulate(seed, BARREN))
        coverage.add(simulate(seed, replace(CALM, stop_at_s=8.0 + 0.2 * seed)))
    print(coverage_table(coverage))
    return coverage


def test_no_promise_is_broken_and_every_run_ends(seen: Coverage) -> None:
    """R8, R14: faults in every phase, also while forming, healing, stopping and saving."""
    assert sum(seen.ends.values()) == seen.seeds
    assert set(seen.ends) == set(OVER)
    assert seen.ends["Finished"] > len(SEEDS) / 2


def test_every_event_met_every_state(seen: Coverage) -> None:
    met = {("over" if state in OVER else state, event) for state, event in seen.visited}
    simulated = [event for event in EVENTS if event not in ("Recovered", "Attached", "Stumbled")]  # one coordinator lives to the end
    every = {("over" if state in OVER else state, event) for state in STATES for event in simulated}
    assert every - met == set(IMPOSSIBLE)


def test_what_is_rare_did_happen(seen: Coverage) -> None:
    assert [occasion for occasion in OCCASIONS if not seen.occasions[occasion]] == []


def test_the_table_has_a_row_an_event_and_a_column_a_state(seen: Coverage) -> None:
    lines = coverage_table(seen).splitlines()
    assert lines[0].split() == list(STATES)
    assert [line.split()[0] for line in lines[1 : len(EVENTS) + 1]] == list(EVENTS)


def test_in_calm_weather_nothing_is_lost() -> None:
    """The control of all the others: without faults no step is dropped or abandoned, and worlds change only to grow."""
    for seed in range(20):
        report = simulate(seed, CALM)
        assert report.end == "Finished"
        assert not report.occasions["a prepared step is dropped"] and not report.occasions["steps are abandoned"]
        assert report.generations <= 3
        assert not any(isinstance(event, Lost) for _, event, _ in report.lines[:-20])


def test_an_error_that_is_the_jobs_own_fails_after_one_retry() -> None:
    """R20: the same error at the same step on a second worker."""
    report = simulate(1, replace(CALM, error_step=5, error_once=False))
    assert report.end == "Failed"
    assert [line for line in report.story().splitlines() if "job error" in line]


def test_an_error_that_does_not_come_back_is_recovered_from() -> None:
    """R20: a random one-off."""
    assert simulate(1, replace(CALM, error_step=5, error_once=True)).end == "Finished"


def test_a_stop_that_is_asked_for_in_calm_weather_loses_nothing() -> None:
    """H2: the boundary is saved before the run stops."""
    for seed in range(20):
        report = simulate(seed, replace(CALM, stop_at_s=6.0))
        assert report.end == "Stopped"
        assert not any("not saved" in reason for _, _, reason in report.lines)


def test_a_stopped_run_is_resumed_by_the_next_incarnation() -> None:
    """H1, H2: from the bucket, with other workers, and nothing counts twice."""
    for seed in range(20):
        report = simulate(seed, replace(CALM, stop_at_s=6.0, resumes=True))
        assert report.end == "Finished"
        assert report.occasions["a world starts from tier bucket"] == 1


@pytest.mark.parametrize("point", list(Point))
def test_a_fault_at_every_point_is_survived(point: Point) -> None:
    """R1: every kind of fault at one point only."""
    kinds = set()
    for seed in range(20):
        report = simulate(seed, replace(CALM, weather=Weather(until_s=20.0, point_chance=0.1, points=(point,))))
        assert report.end == "Finished"
        faults = [what for _, event, what in report.lines if event is None and what.endswith(point)]
        kinds |= {kind for kind in Kind for what in faults if f"{kind} of" in what}
    assert {Kind.SIGKILL, Kind.SIGSTOP, Kind.EXCEPTION} <= kinds, "to the simulator the other two are SIGKILL"


def test_the_same_seed_tells_the_same_story() -> None:
    for seed in (0, 7, 123):
        assert simulate(seed).story() == simulate(seed).story()


STORIES = """
import hashlib
from elastic.sim import simulate
print(hashlib.sha256("".join(simulate(seed).story() for seed in range(12)).encode()).hexdigest())
"""


@pytest.mark.parametrize("hash_seed", ["1", "4242"])
def test_the_story_does_not_depend_on_the_hash_seed(hash_seed: str) -> None:
    here = hashlib.sha256("".join(simulate(seed).story() for seed in range(12)).encode()).hexdigest()
    command = [sys.executable, "-c", STORIES]
    there = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == here


def test_a_violation_names_seed_and_time_and_tells_the_end_of_the_story() -> None:
    with pytest.raises(Violation, match=r"no end after 3 s.*\n.*seed 5, 3\.\d+ s; the story ends") as caught:
        simulate(5, replace(CALM, weather=Weather(until_s=0.0), patience_s=3.0))
    assert 5 < len(str(caught.value).splitlines()) <= 32


@given(
    shards=st.lists(st.integers(1, 5).flatmap(lambda count: st.tuples(st.just(count), st.integers(0, count - 1))), max_size=5),
    rows=st.sampled_from(ROWS),
)
def test_the_oracle_and_the_product_agree_on_coverage(shards: list[tuple[int, int]], rows: tuple[int, ...]) -> None:
    """Interval arithmetic and its dumb twin."""
    holdings = [Holding(f"w{i}", Version(1, 1), *shard) for i, shard in enumerate(shards)]
    assert covered(holdings, rows) == covers(frozenset(shards), rows)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_ten_thousand_seeds() -> None:
    """R8: the long version, and as many storms again."""
    coverage = run_many(range(10_000))
    for seed in range(5_000):
        coverage.add(simulate(seed, storm(seed)))
    print(coverage_table(coverage))
    assert sum(coverage.ends.values()) == 15_000
