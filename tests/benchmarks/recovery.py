"""Measures what a SIGKILL costs under Elastic, Ray Train elastic and torchft: the same toy job, the same
strikes, on one machine.

    python -m tests.benchmarks.recovery                                   # all three, one table
    python -m tests.benchmarks.recovery --only elastic --events process   # one of them; the others' last figures stay
    python -m tests.benchmarks.recovery --kills 9 --peer-kills 5

Needs ``pip install -e '.[test,bench]'``, or ``--peers-python`` names another interpreter that has the peers
beside Elastic.  Two workers, gloo, one thread each.  process: one of them is SIGKILLed, and the system
replaces it.  node: a raylet (torchft: a torchrun) is SIGKILLed with all its processes; when the other worker
has settled, a new node comes.  notice: Ray's head is told 8 s before that the node will be taken (torchft,
which hears of no notice, is only struck).  ``peers/drive.py`` says what is measured. Figures go to results/recovery.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "recovery.json"
SYSTEMS = ("elastic", "ray-train", "torchft")
EVENTS = ("process", "node", "notice")
OWN_EVENTS = (
    "process, shards",
    "node, shards",
    "node, silent",
    "process, spare",
    "process, shards, spare",
    "notice, shards",
    "hang",
)
"""Events that the other systems cannot survive; ``peers/ours.py`` describes them."""


def make(name: str, folder: Path, event: str) -> Any:
    """Returns the system.  It imports only what that system needs."""
    if name == "elastic":
        from tests.benchmarks.peers.ours import Ours

        return Ours(folder, event)
    if name == "ray-train":
        from tests.benchmarks.peers.ray_train import RayTrain

        return RayTrain(folder)
    from tests.benchmarks.peers.torchft_ddp import Torchft

    return Torchft(folder)


def measure(name: str, event: str, kills: int, target: Path) -> None:
    """Measures one run of one system, struck ``kills`` times.

    It writes the result before it closes the system, which Ray Train's driver may not survive.
    """
    from tests.benchmarks.peers import drive

    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        system = make(name, Path(folder), event)
        system.start()
        try:
            load = os.getloadavg()[0]
            by_first_word = {"node": drive.node_kills, "notice": drive.notices}
            rows = by_first_word.get(event.split(",")[0], drive.process_kills)(system, kills)
            steps = {f"step_s_of_{world}": drive.step_s(system, world) for world in (1, 2)}
            found = {"settings": system.settings, "load_before": load, **steps, "kills": rows, **where()}
            target.write_text(json.dumps(found))
        finally:
            system.close()


def where() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": str(date.today()),
        "commit": commit,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
    }


def stored() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def store(name: str, event: str, found: dict[str, Any]) -> None:
    everything = stored()
    everything.setdefault(name, {})[event] = found
    RESULTS.write_text(json.dumps(everything, indent=1) + "\n")


def child(python: str, name: str, event: str, kills: int) -> None:
    """Runs a measurement in a process of its own, so that no system leaves anything behind for the next."""
    from tests.benchmarks.peers.nodes import VARIABLES

    with TemporaryDirectory() as folder:
        target = Path(folder) / "found.json"
        command = [python, "-m", "tests.benchmarks.recovery", "--child", name, event, str(kills), str(target)]
        environment = os.environ | VARIABLES | {"PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, check=False
        )
        if target.exists():
            store(name, event, json.loads(target.read_text()))
        else:
            store(name, event, {"failed": ended.stderr[-2000:], **where()})
            print(ended.stderr[-4000:], flush=True)


def spread(rows: list[dict[str, Any]], *names: str) -> str:
    """Returns median (worst) as text."""
    values = []
    for row in rows:
        for name in names:
            row = row.get(name, {}) if isinstance(row, dict) else row
        values += [row] if isinstance(row, int | float) else []
    if not values:
        return "-"
    form = "{:g}" if all(isinstance(value, int) for value in values) else "{:.2f}"
    return f"{form.format(statistics.median(values))} ({form.format(max(values))})"


def table(everything: dict[str, Any]) -> str:
    """Returns Markdown with one line for each system and event: seconds, median (worst)."""
    heads = (
        "first microbatch",
        "next commit",
        "pause",
        "lost steps",
        "growth: pause",
        "growth: lost steps",
        "growth: joined",
    )
    lines = [
        f"| event | system | n | {' | '.join(heads)} | step s, 2 and 1 workers |",
        "|---" * (len(heads) + 4) + "|",
    ]
    for event in (*EVENTS, *OWN_EVENTS):
        for name in SYSTEMS:
            found = everything.get(name, {}).get(event)
            if found is None:
                continue
            if "failed" in found:
                lines.append(f"| {event} | {name} | failed: {found['failed'].strip().splitlines()[-1]} |")
                continue
            rows = found["kills"]
            cells = [
                spread(rows, each)
                for each in ("first_microbatch_s", "next_commit_s", "pause_s", "lost_steps")
            ]
            cells += [spread(rows, "growth", each) for each in ("pause_s", "lost_steps", "joined_s")]
            steps = f"{found['step_s_of_2']:.3f}, {found['step_s_of_1']:.3f}"
            lines.append(f"| {event} | {name} | {len(rows)} | {' | '.join(cells)} | {steps} |")
    return "\n".join(lines)


PHASES = (
    "detect_s",
    "decide_s",
    "abort_s",
    "form_s",
    "heal_s",
    "go_s",
    "step_s",
    "first_microbatch_s",
    "next_commit_s",
)


def phases(event: str, found: dict[str, Any]) -> str:
    """Returns Markdown that shows where the time of Elastic's recoveries went, in median (worst) seconds."""
    rows = found["kills"]
    cells = [
        f"{statistics.median(values):.2f} ({max(values):.2f})"
        for values in ([row[name] for row in rows] for name in PHASES)
    ]
    tiers = "/".join(sorted({row.get("tier", "live") for row in rows}))
    return (
        f"| {event} | {tiers} | {len(rows)} | {' | '.join(cells)} | {spread(rows, 'lost_steps')} | "
        f"{spread(rows, 'growth', 'pause_s')} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=9, help="of Elastic, for each event")
    parser.add_argument("--peer-kills", type=int, default=3, help="of each of the others")
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--events", nargs="+", choices=(*EVENTS, *OWN_EVENTS), default=[*EVENTS, *OWN_EVENTS])
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        name, event, kills, target = arguments.child
        measure(name, event, int(kills), Path(target))
        sys.stdout.flush()
        os._exit(0)  # peers leave threads that do not end
    for name in arguments.only:
        for event in arguments.events:
            ours = name == "elastic"
            if not ours and event in OWN_EVENTS:
                continue
            print(f"=== {name}, {event}; load {os.getloadavg()[0]:.1f}", flush=True)
            child(
                sys.executable if ours else arguments.peers_python,
                name,
                event,
                arguments.kills if ours else arguments.peer_kills,
            )
    everything = stored()
    print(table(everything))
    print(
        f"\n| fault | tier | n | {' | '.join(each.removesuffix('_s').replace('_', ' ') for each in PHASES)} "
        "| lost steps | growth pause |"
    )
    print("|---" * (len(PHASES) + 5) + "|")
    for event in (*EVENTS, *OWN_EVENTS):
        measured = everything.get("elastic", {}).get(event, {}).get("kills", ())
        if measured and "detect_s" in measured[0]:
            print(phases(event, everything["elastic"][event]))


if __name__ == "__main__":
    main()
