"""Measures a training step over a slow link between two nodes, with gradients that travel one by one, and
with blocks that nodes add.

    python -m tests.benchmarks.slow_link [--each 2] [--rate 200mbit]

Two nodes of ``--each`` workers (network namespaces on this machine, gloo), one replica a node, four rounds a
step.  A ratio above 1 says that blocks are faster.  Needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.support.slow_link import train

MODEL = {"dim": 256, "layers": 4, "heads": 4}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--each", type=int, default=2)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--out", type=Path, default=Path("tests/benchmarks/results/slow_link.json"))
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for block in (1, options.each):
            microbatches = 4 * 2 * options.each
            found[block] = train(
                Path(folder),
                block,
                each=options.each,
                rate=options.rate,
                model=MODEL,
                microbatches=microbatches,
            )
            print(
                (
                    f"block {block}: {found[block].step_s:.2f} s a step, {found[block].out_bytes / 1e6:.1f} "
                    "MB out of a node"
                ),
                flush=True,
            )
    ratio = found[1].step_s / found[options.each].step_s
    print(f"ratio {ratio:.2f}")
    rows = {block: asdict(each) for block, each in found.items()}
    about = {"each": options.each, "rate": options.rate, "parameters": found[1].parameters}
    options.out.write_text(json.dumps({**about, "ratio": ratio, "blocks": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
