"""``python -m tests.benchmarks.scale [MODULE ...] [--sizes 64,256,…] [--limit SECONDS]`` measures the product
at many sizes.

Workers, nodes and network are modelled; all that one coordinator, worker or keeper computes, writes and reads
is the product's.  Each module of this package has ``measure(n)``, which returns figures by name for n
workers; a name ends with its unit.  A figure that does not come within the limit is missing.  Results replace
those of the same module and size in results/scale.json, with the commit, the day and the load of the machine.
results/scale.png draws them in both logarithms, with the slope between the two largest sizes: 1 is linear, 2
is quadratic.  ``--table`` measures nothing and prints all that is recorded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pkgutil
import subprocess
import sys
import time
from pathlib import Path

from tests.support.commands import ROOT

SIZES = (64, 256, 1_024, 4_096, 10_240)
RESULTS = Path(__file__).parents[1] / "results"
FILE = RESULTS / "scale.json"
ONE = """
import importlib, json, resource, sys
found = importlib.import_module(sys.argv[1]).measure(int(sys.argv[2]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print("figures: " + json.dumps({**found, "process_peak_bytes": peak}))
"""

ASKED = (
    ("rev-parse", "--short", "HEAD"),
    ("status", "--porcelain", "--", "elastic", "actors", "storage", "tests/benchmarks/scale"),
)
"""Questions to git: the commit, and what of the measured code differs from it."""

Figures = dict[str, dict[int, float]]
"""Maps a figure's name to its values by size."""
Where = dict[int, str]
"""Maps a size to the commit, the day and the load at which a module was measured."""


def modules() -> list[str]:
    """Returns the names of all modules that measure something."""
    return sorted(
        each.name
        for each in pkgutil.iter_modules([str(Path(__file__).parent)])
        if not each.name.startswith("_")
    )


def measure(module: str, size: int, limit_s: float) -> dict[str, float]:
    """Returns the figures of one module at one size, from a process of its own; empty if it took too long or
    failed.
    """
    command = [sys.executable, "-c", ONE, f"tests.benchmarks.scale.{module}", str(size)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        print(f"{module} {size}: more than {limit_s:g} s", flush=True)
        return {}
    lines = [line for line in done.stdout.splitlines() if line.startswith("figures: ")]
    if done.returncode or not lines:
        print(f"{module} {size}: failed\n{done.stderr[-2000:]}", flush=True)
        return {}
    found: dict[str, float] = json.loads(lines[-1].removeprefix("figures: "))
    return found


def slope(values: dict[int, float]) -> float | None:
    """Returns the exponent with which a figure grows between its two largest sizes, or None if it has not two
    values above zero.
    """
    known = [(size, value) for size, value in sorted(values.items()) if value > 0][-2:]
    if len(known) < 2:
        return None
    (small, low), (large, high) = known
    return math.log(high / low) / math.log(large / small)


def table(figures: dict[str, Figures]) -> str:
    """Returns all figures as the rows of a Markdown table."""
    sizes = sorted({size for each in figures.values() for values in each.values() for size in values})
    head = (
        f"| figure | {' | '.join(f'{size:,}' for size in sizes)} | slope |\n|---|{'---|' * (len(sizes) + 1)}"
    )
    rows = [head]
    for module, each in figures.items():
        for name, values in each.items():
            shown = [f"{values[size]:.4g}" if size in values else "" for size in sizes]
            grows = slope(values)
            rows.append(
                f"| {module} {name} | {' | '.join(shown)} | {'' if grows is None else f'{grows:.2f}'} |"
            )
    return "\n".join(rows)


def draw(figures: dict[str, Figures], path: Path) -> None:
    """Draws each module's figures over the number of workers, both logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 2
    rows = math.ceil(len(figures) / columns)
    picture, places = pyplot.subplots(rows, columns, figsize=(9 * columns, 4.5 * rows), squeeze=False)
    for place in places.flat[len(figures) :]:
        place.axis("off")
    for place, (module, each) in zip(places.flat, figures.items(), strict=False):
        for name, values in each.items():
            if name.startswith("process_"):  # mostly the interpreter and torch
                continue
            points = sorted((size, value) for size, value in values.items() if value > 0)
            grows = slope(values)
            label = name if grows is None else f"{name} (slope {grows:.2f})"
            place.loglog(
                [size for size, _ in points], [value for _, value in points], marker="o", label=label
            )
        place.set_title(module)
        place.set_xlabel("workers")
        place.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    picture.tight_layout()
    picture.savefig(path, dpi=100)


def where() -> str:
    """Returns the commit, the day, and the number of processes that wanted a core in the last minute."""
    said = [
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        for words in ASKED
    ]
    commit = f"{said[0]}{'-dirty' if said[1] else ''}"
    return f"{commit}, {time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}"


def recorded() -> dict[str, tuple[Figures, Where]]:
    """Returns what results/scale.json has of each module."""
    if not FILE.exists():
        return {}
    return {
        module: (
            {
                name: {int(size): value for size, value in values.items()}
                for name, values in each["figures"].items()
            },
            {int(size): at for size, at in each["measured"].items()},
        )
        for module, each in json.loads(FILE.read_text(encoding="utf-8")).items()
    }


def record(known: dict[str, tuple[Figures, Where]]) -> None:
    found = {
        module: {"measured": measured, "figures": figures}
        for module, (figures, measured) in sorted(known.items())
    }
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measure_all(names: list[str], sizes: list[int], limit_s: float) -> None:
    known = recorded()
    for module in names:
        figures, measured = known.setdefault(module, ({}, {}))
        for size in sizes:
            at, found = where(), measure(module, size, limit_s)
            for values in figures.values():
                values.pop(size, None)
            for name, value in found.items():
                figures.setdefault(name, {})[size] = value
            measured[size] = at
        kept = {name: dict(sorted(values.items())) for name, values in figures.items() if values}
        known[module] = kept, dict(sorted(measured.items()))
        record(known)
        print(table({module: kept}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"{', '.join(modules())} (default: all)")
    parser.add_argument(
        "--sizes", default=",".join(map(str, SIZES)), help="numbers of workers, with commas between them"
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one module at one size")
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    known = parser.parse_args()
    if unknown := [each for each in known.modules if each not in modules()]:
        parser.error(f"{unknown[0]!r} is no module; there are {', '.join(modules())}")
    try:
        sizes = [int(size) for size in known.sizes.split(",")]
    except ValueError:
        parser.error(f"--sizes: {known.sizes!r} is not a list such as 64,256")
    if not known.table:
        print(f"results replace those in {FILE.relative_to(ROOT)}", flush=True)
        measure_all(known.modules or modules(), sizes, known.limit)
    figures = {module: figures for module, (figures, _) in recorded().items()}
    if known.table:
        return print(table(figures))
    draw(figures, RESULTS / "scale.png")


if __name__ == "__main__":
    main()
