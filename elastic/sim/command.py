"""``elastic simulate``: runs many seeds in several processes, and says what they covered.

If a seed breaks a promise, its schedule is made as small as possible and printed as a script.  With
``--costs`` a spot trace is replayed instead, and a page says what came of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from elastic.protocol.faults import from_json, to_json
from elastic.sim.costs import Costs
from elastic.sim.coverage import Coverage, coverage_table, missing, run_in_processes
from elastic.sim.minimise import minimised
from elastic.sim.page import json_page, page, replay
from elastic.sim.scenario import Scenario
from elastic.sim.simulation import simulate
from elastic.sim.trace import DAY_S, drawn, repeated, rows_of
from elastic.sim.violation import Violation

JUDGED_FROM = 20_000
"""Number of seeds from which on every pair of a state and an event must occur.  With fewer seeds, missing
pairs are only printed.
"""
SHOWN = 20
"""Number of missing pairs that are printed."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Drawn:
    """A trace that is drawn: ``nodes`` machines, each lost after ``mtbf_h`` hours on average and replaced
    ``back_s`` seconds later.
    """

    nodes: int
    mtbf_h: float
    back_s: float = 600.0
    seed: int = 0


def seeds_of(text: str) -> range:
    """Returns the seeds that ``text`` names: ``1000`` means the first 1000, ``5000..6000`` those from 5000 to
    5999. Raises :class:`ValueError`.
    """
    first, dots, last = text.partition("..")
    try:
        seeds = range(int(first), int(last)) if dots else range(int(first))
    except ValueError:
        seeds = range(0)
    if not seeds:
        raise ValueError(
            f"--seeds {text} must be a number of at least 1, or FIRST..LAST with FIRST less than LAST"
        )
    return seeds


def simulate_seeds(seeds: range, jobs: int, say: Say) -> int:
    """Runs the seeds.  Returns the exit code: 1 if a promise was broken or a possible pair never met, else
    0.
    """
    began = time.monotonic()
    coverage, broken = run_in_processes(seeds, jobs)
    say(coverage_table(coverage))
    took_s = time.monotonic() - began
    say(
        f"{coverage.seeds} seeds in {took_s:.0f} s by {jobs} processes; "
        f"{coverage.events / max(coverage.seeds, 1):.0f} events a seed"
    )
    if broken is not None:
        explain(broken, say)
        return 1
    return 1 if _uncovered(coverage, say) else 0


def _uncovered(coverage: Coverage, say: Say) -> bool:
    """Prints the possible pairs that never met.  Returns True if there are any and enough seeds ran to meet
    all.
    """
    absent = missing(coverage)
    if absent:
        shown = ", ".join(absent[:SHOWN]) + (" ..." if len(absent) > SHOWN else "")
        say(f"{len(absent)} pairs never met: {shown}")
    if absent and coverage.seeds < JUDGED_FROM:
        say(f"(judged from {JUDGED_FROM} seeds on)")
    return bool(absent) and coverage.seeds >= JUDGED_FROM


def simulate_script(script: Path, seeds: range, say: Say) -> int:
    """Runs the cluster of each seed with the faults of ``script`` instead of the seed's own.  Returns the
    exit code.
    """
    try:
        faults = from_json(script.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{script}: {error}") from None
    return max(_one(seed, replace(Scenario.drawn(seed), faults=faults), say) for seed in seeds)


def replay_trace(
    trace: Path | None,
    costs: Path,
    lead_s: float,
    say: Say,
    days: float | None = None,
    drawn_of: Drawn | None = None,
    *,
    microbatches: int | None = None,
    as_json: bool = False,
) -> int:
    """Replays a spot trace at measured costs and prints a page.  ``days`` makes a trace longer; without a
    ``trace`` one is drawn.  Raises :class:`ValueError` for files and numbers that are wrong.
    """
    try:
        measured = Costs.from_json(costs.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{costs}: {error}") from None
    if microbatches is not None:
        measured = replace(measured, microbatches=microbatches)
    numbers = {"--lead": lead_s, "--days": days, "--microbatches": microbatches}
    if drawn_of is not None:
        numbers |= {"--nodes": drawn_of.nodes, "--mtbf": drawn_of.mtbf_h, "--back": drawn_of.back_s}
    for option, number in numbers.items():
        least = "at least 0" if option in ("--lead", "--back") else "greater than 0"
        if number is not None and not (0 < number < math.inf or (number == 0 and least == "at least 0")):
            raise ValueError(f"{option} {number:g} must be a finite number, {least}")
    if trace is not None:
        try:
            rows = rows_of(trace.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{trace}: {error}") from None
        seconds = days * DAY_S if days else rows[-1].at - rows[0].at
        rows = repeated(rows, seconds)
    else:
        assert days is not None and drawn_of is not None, "a trace is given, or drawn"
        seconds = days * DAY_S
        rows = drawn(drawn_of.nodes, days, drawn_of.mtbf_h, drawn_of.back_s, drawn_of.seed)
    found = replay(rows, measured, lead_s, seconds)
    say(json_page(found, lead_s) if as_json else page(found, lead_s))
    return 0


def _one(seed: int, scenario: Scenario, say: Say) -> int:
    said, kept = tried(seed, scenario)
    say(said)
    return 0 if kept else 1


def explain(seed: int, say: Say) -> None:
    """Prints the violation that ``seed`` still shows with as few faults as possible, and these faults as a
    script.
    """
    scenario = Scenario.drawn(seed)
    faults = minimised(scenario.faults, lambda part: not tried(seed, replace(scenario, faults=part))[1])
    say(tried(seed, replace(scenario, faults=faults))[0])
    say(
        f"{len(faults)} of {len(scenario.faults)} faults are enough: simulate --seeds {seed}..{seed + 1} "
        "--script with"
    )
    say(to_json(faults))


def tried(seed: int, scenario: Scenario) -> tuple[str, bool]:
    """Simulates one seed.  Returns its end or the broken promise as text, and True if all promises were
    kept.
    """
    try:
        report = simulate(seed, scenario)
    except Violation as violation:
        return str(violation), False
    return (
        f"seed {seed}: {report.end} after {report.virtual_s:.0f} s, {report.generations} generations, "
        f"{report.events} events"
    ), True
