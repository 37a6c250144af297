"""``python -m tests.benchmarks.schedules LAST [--jobs 2] [--limit SECONDS]`` runs simulated schedules and
records the result.

It runs all seeds below LAST in chunks.  After each chunk the sum is written to results/schedules.json, and
the next call goes on from there.  It refuses to go on with a file that was made by other sources of the
decisions, the protocol or the simulator.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import elastic
from elastic.sim.command import explain
from elastic.sim.coverage import Coverage, coverage_table, missing, run_in_processes

RESULT = Path(__file__).parent / "results" / "schedules.json"
CHUNK = 2_000


def rules() -> str:
    """Returns a digest of everything that a schedule is made by."""
    package = Path(elastic.__file__).parent
    sources = sorted(
        path for part in ("control", "protocol", "plan", "sim") for path in (package / part).rglob("*.py")
    )
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def load() -> tuple[Coverage, float]:
    """Returns what was recorded, and the seconds that it took."""
    if not RESULT.exists():
        return Coverage(), 0.0
    json_of = json.loads(RESULT.read_text(encoding="utf-8"))
    if json_of.get("rules") != rules():
        raise SystemExit(f"{RESULT} was made by other sources; remove it to begin anew")
    values: dict[str, Any] = {field.name: json_of[field.name] for field in fields(Coverage)}
    for name in ("visited", "struck", "overlaps"):
        values[name] = Counter({tuple(pair.split("/")): number for pair, number in values[name].items()})
    values |= {name: Counter(values[name]) for name in ("ends", "occasions")}
    return Coverage(**values), json_of["seconds"]


def save(coverage: Coverage, seconds: float, jobs: int) -> None:
    values = {field.name: getattr(coverage, field.name) for field in fields(Coverage)}
    for name in ("visited", "struck", "overlaps"):
        values[name] = {"/".join(pair): number for pair, number in sorted(values[name].items())}
    totals: dict[str, Any] = {"rules": rules(), "seconds": round(seconds, 1), "jobs": jobs, "violations": 0}
    totals["events_a_seed"] = round(coverage.events / coverage.seeds, 1)
    totals["pairs_never_met"] = missing(coverage)
    RESULT.write_text(json.dumps({**totals, **values}, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("last", type=int)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds after which no chunk is begun"
    )
    known = parser.parse_args()
    coverage, seconds = load()
    began = time.monotonic()
    while coverage.seeds < known.last and time.monotonic() - began < known.limit:
        chunk_began = time.monotonic()
        chunk = range(coverage.seeds, min(coverage.seeds + CHUNK, known.last))
        more, broken = run_in_processes(chunk, known.jobs)
        if broken is not None:
            explain(broken, print)
            return 1
        coverage.merge(more)
        seconds += time.monotonic() - chunk_began
        save(coverage, seconds, known.jobs)
    print(coverage_table(coverage))
    print(
        f"{coverage.seeds} seeds in {seconds:.0f} s by {known.jobs} processes; never met: "
        f"{', '.join(missing(coverage)) or 'no pair'}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
