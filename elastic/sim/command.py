"""``elastic simulate``: many seeds over several processes, what they covered, and of a violation the smallest schedule."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from elastic.sim.coverage import Coverage, coverage_table, missing, run_in_processes
from elastic.sim.faults import from_json, to_json
from elastic.sim.minimise import minimised
from elastic.sim.scenario import Scenario
from elastic.sim.simulation import simulate
from elastic.sim.trace import scenario_of
from elastic.sim.violation import Violation

JUDGED_FROM = 20_000
"""So many seeds must cover every pair; of fewer it is only said what they did not."""
SHOWN = 20

Say = Callable[[str], None]


def seeds_of(text: str) -> range:
    """``1000``: the first so many; ``5000..6000``: from the one up to the other, which is left out."""
    first, dots, last = text.partition("..")
    try:
        seeds = range(int(first), int(last)) if dots else range(int(first))
    except ValueError:
        seeds = range(0)
    if not seeds:
        raise ValueError(f"--seeds {text} must be a number, or FIRST..LAST with FIRST less than LAST")
    return seeds


def simulate_seeds(seeds: range, jobs: int, say: Say) -> int:
    """The exit code: 0, or 1 when a promise was broken or a pair that can meet never met."""
    began = time.monotonic()
    coverage, broken = run_in_processes(seeds, jobs)
    say(coverage_table(coverage))
    took_s = time.monotonic() - began
    say(f"{coverage.seeds} seeds in {took_s:.0f} s by {jobs} processes; {coverage.events / max(coverage.seeds, 1):.0f} events a seed")
    if broken is not None:
        explain(broken, say)
        return 1
    return 1 if _uncovered(coverage, say) else 0


def _uncovered(coverage: Coverage, say: Say) -> bool:
    absent = missing(coverage)
    if absent:
        shown = ", ".join(absent[:SHOWN]) + (" ..." if len(absent) > SHOWN else "")
        say(f"{len(absent)} pairs never met: {shown}")
    if absent and coverage.seeds < JUDGED_FROM:
        say(f"(judged from {JUDGED_FROM} seeds on)")
    return bool(absent) and coverage.seeds >= JUDGED_FROM


def simulate_script(script: Path, seeds: range, say: Say) -> int:
    """Each seed's cluster with the faults of ``script`` instead of its own."""
    faults = from_json(script.read_text(encoding="utf-8"))
    return max(_one(seed, replace(Scenario.drawn(seed), faults=faults), say) for seed in seeds)


def simulate_trace(trace: Path, seeds: range, pace: float, say: Say) -> int:
    """A run on the machines of a spot trace."""
    return max(_one(seed, scenario_of(trace.read_text(encoding="utf-8"), pace), say) for seed in seeds)


def _one(seed: int, scenario: Scenario, say: Say) -> int:
    said, kept = tried(seed, scenario)
    say(said)
    return 0 if kept else 1


def explain(seed: int, say: Say) -> None:
    """The violation of ``seed`` by as few faults as show one, as a script."""
    scenario = Scenario.drawn(seed)
    faults = minimised(scenario.faults, lambda part: not tried(seed, replace(scenario, faults=part))[1])
    say(tried(seed, replace(scenario, faults=faults))[0])
    say(f"{len(faults)} of {len(scenario.faults)} faults are enough: simulate --seeds {seed}..{seed + 1} --script with")
    say(to_json(faults))


def tried(seed: int, scenario: Scenario) -> tuple[str, bool]:
    """How it ended, or which promise was broken; and whether all were kept."""
    try:
        report = simulate(seed, scenario)
    except Violation as violation:
        return str(violation), False
    return f"seed {seed}: {report.end} after {report.virtual_s:.0f} s, {report.generations} generations, {report.events} events", True
