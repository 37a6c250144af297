"""Runs Ray Train elastic on the nodes of a spot trace, and prints its goodput.

    PYTHONPATH=. python -m tests.benchmarks.peers.ray_train_spot trace.csv --speed 60 --nodes 4 --steps 100

``elastic chaos JOB --trace trace.csv --speed 60 --nodes 4`` does the same with Elastic, whose job is that of
``tests/actors/test_replayed_traces.py``: the same nodes come and go at the same times after the first step,
and both figures are computed by ``tests/support/goodput_by_hand.py``.  Where the two systems cannot be counted
alike, Ray Train is favoured: its checkpoints count as a part of its steps, and a node counts as present only
once the loop of its first worker begins, which is after its process group has formed.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq
import ray

from actors.fleet import Fleet, FleetNode
from actors.local_nodes import LocalNodes
from actors.view import View
from elastic.config.sections import Workers
from elastic.sim.trace import rows_of, sped_up, text_of, thinned
from tests.benchmarks.peers import toy
from tests.benchmarks.peers.drive import spans
from tests.benchmarks.peers.nodes import drain
from tests.benchmarks.peers.ray_train import RESIZE_S, TUNED, trainer
from tests.benchmarks.peers.toy import Mark
from tests.support.goodput_by_hand import goodput

LIMIT_S = 540.0
LOOK_S = 0.05
SETTINGS = TUNED | {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20"}
"""Four workers take 12 to 16 s to start on two cores, so with the 5 s of ``recovery.py`` a start times out again
and again.  With Ray's 60 s it waits as long for a node that is gone, if it does not know that yet.
"""


class Drained(Fleet):
    """The nodes of a trace, of whose end Ray's head is told."""

    def _warn(self, each: FleetNode, left_s: float, view: View) -> None:
        drain(ray.get_runtime_context().gcs_address, each.asked.result(), left_s)
        each.told = True


def run(arguments: argparse.Namespace, folder: Path) -> None:
    rows = sped_up(thinned(rows_of(arguments.trace.read_text()), arguments.nodes), arguments.speed)
    size = toy.Size(2, 12, 0.12, arguments.save_every, arguments.steps)
    (steps := folder / "steps").mkdir()
    config = {"folder": str(steps), "size": size}
    with LocalNodes(Workers(min=1, max=arguments.nodes), arguments.nodes, print) as nodes:
        fleet = Drained(rows, nodes, arguments.lead, 1, lambda said: print(f"{time.time():.1f} {said}"))
        fleet.start()
        training = threading.Thread(
            target=trainer(folder / "storage", arguments.nodes, config).fit, daemon=True
        )
        training.start()
        until = time.monotonic() + LIMIT_S
        while training.is_alive() and time.monotonic() < until:
            marks = toy.read_marks(steps)
            done = max((mark.step for mark in marks if mark.what == "commit"), default=0)
            fleet.look(cast(View, SimpleNamespace(step=done)))
            time.sleep(LOOK_S)
        marks = toy.read_marks(steps)
        report(fleet, marks, size, folder)
        if training.is_alive():
            print(f"not finished after {LIMIT_S:g} s", flush=True)
            nodes.empty()
            os._exit(1)  # an orderly end would wait for the run


def report(fleet: Fleet, marks: Sequence[Mark], size: toy.Size, folder: Path) -> None:
    joined: dict[str, float] = {}
    for mark in marks:
        joined.setdefault(mark.node, mark.at)
    files = [folder / name for name in ("present.csv", "paid.csv", "timeline.parquet")]
    for file, each in zip(files, (fleet.present(joined), fleet.paid()), strict=False):
        file.write_text(text_of(each, "nodes of Ray Train"))
    timeline = spans(marks, size.microbatches)
    pq.write_table(pa.Table.from_pylist(timeline), files[2])
    present, paid = goodput(*files)
    commits = [mark for mark in marks if mark.what == "commit"]
    first_s = commits[-1].at - commits[0].at
    pauses = [f"{each['end'] - each['begin']:.1f}" for each in timeline if each["bucket"] == "re-form"]
    print(
        f"Ray Train {ray.__version__}: goodput {present:.1%} of the nodes present, {paid:.1%} of the nodes paid; "
        f"{len({mark.step for mark in commits})} steps in {first_s:.1f} s, "
        f"{sum(each['bucket'] == 'redone' for each in timeline)} done again; pauses of {', '.join(pauses)} s; "
        f"{SETTINGS}, resize interval {RESIZE_S:g} s, a checkpoint every {size.save_every} steps",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--speed", type=float, default=60.0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lead", type=float, default=0.0)
    parser.add_argument("--save-every", type=int, default=10)
    path = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    os.environ |= {**SETTINGS, "PYTHONPATH": os.pathsep.join(path)}
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run(parser.parse_args(), Path(folder))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
