"""A storm: many real faults of all kinds in one run, drawn from a seed, and at the end the bits of an
undisturbed run.

    python -m tests.benchmarks.storm --seed 7 --faults 200
    python -m tests.benchmarks.storm --seed 7 --faults 200 --keep journal.jsonl.gz     # the journal, for ``elastic replay``

Four replicas on two nodes of a local Ray cluster, a small model, gloo; the head, with the coordinator, is on
a third node.  A node that dies is replaced.  ``actors/chaos.py`` strikes; a witness holds every worker's
process by its pidfd and maps its counters.  The table of kinds and of the states that they struck in goes to
results/storm-<seed>.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray

from actors.chaos import Chaos, Strike
from actors.launch import launch
from actors.living import attach, reap
from actors.result import Result
from actors.view import View
from elastic.job import Job
from elastic.protocol.faults import Fault, Kind, draw
from elastic.report.ledger import ledger
from elastic.report.replay import differences
from elastic.report.story import Line, Sentence
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from storage import journal
from tests.benchmarks.recovery import where
from tests.support.chaos import Witness, exported_hash, formed, samples
from tests.support.left import left_of
from tests.support.toys import toy_job

RESULTS = Path(__file__).parent / "results"
STATES = ("Waiting", "Forming", "Running", "Stopping", "Finishing")
MIX: Mapping[Kind, int] = {
    Kind.SIGKILL: 6,
    Kind.SIGTERM: 2,
    Kind.SIGSEGV: 2,
    Kind.SIGABRT: 2,
    Kind.SIGSTOP: 3,
    Kind.EXCEPTION: 2,
    Kind.EXIT: 2,
    Kind.HELD_GIL: 2,
    Kind.MEMORY_HOG: 2,
    Kind.SLOW: 1,
    Kind.NODE_KILL: 1,
    Kind.NODE_NOTICE: 1,
    Kind.NODE_FREEZE: 1,
    Kind.KEEPER_KILL: 1,
    Kind.STORE_LOSS: 1,
    Kind.COORDINATOR_KILL: 1,
}
"""Kinds of faults, with their relative frequency."""
ALL_DIE_EVERY = 60
"""Number of faults after which all workers die at once, to show what happens if nobody is left."""
STATE_S = 5.0
"""Time in seconds for which a second fault waits for its state before another one takes its turn."""
STEPS_A_FAULT = 4
SAVE_EVERY = 5
WORKERS = 4
NODES = 2
END_S = 600.0
"""Time in seconds from the last fault to the end of the run.  It was never needed."""


SHARDS: Mapping[str, Any] = {"parallel": {"dp_replicate": 1}, "copies": {"copy_every": 1, "buddy_every": 1}}
"""Settings without replicas: what a dead worker held is in its keeper's memory, what a dead node held in its
buddy's.
"""
SPARES = 1
HOST_REDONE = 4
"""Largest number of committed steps that a world which begins from copies may do again.  One copy is under
way and one on its way to the buddy, each begun when the one before is known to be complete everywhere.
"""


def job_of(folder: Path, name: str, faults: int, pace_s: float, *, shards: bool = False) -> Job:
    steps = STEPS_A_FAULT * faults
    return toy_job(
        folder / "bucket",
        name=name,
        steps=steps,
        model_args={"vocab": 29, "dim": 16, "layers": 2, "heads": 2, "dropout": 0.1},
        data={
            "dataset": "tests.support.toys:Paced",
            "args": {"calm": str(folder / "calm"), "pace_s": pace_s, "samples": 16 * steps},
        },
        workers={"min": 1, "max": WORKERS, "spares": SPARES if shards else 0},
        checkpoint={"save_every": SAVE_EVERY},
        deadlines={"grow_debounce_s": 1, "stall_s": 4, "fence_s": 4, "form_s": 60},
        **(SHARDS if shards else {}),
    )


@dataclass
class Storm:
    """One run, and everything that struck it."""

    job: Job
    chaos: Chaos
    witness: Witness
    number: int
    lines: list[Line] = field(default_factory=list)
    result: Result | None = None
    left: Sequence[str] = ("nobody has looked",)
    """Things that were left of the run while its cluster was still there: :func:`tests.support.left.left_of`.
    """

    def show(self, line: Line) -> None:
        self.lines.append(line)
        if isinstance(line, Sentence):
            print(f"{time.strftime('%H:%M:%S', time.localtime(line.at))} {line.text[:160]}", flush=True)

    def train(self) -> None:
        self.result = launch(self.job, show=self.show)


def tell(strike: Strike) -> None:
    print(f"{time.strftime('%H:%M:%S')}     {strike}", flush=True)


def rage(
    folder: Path, seed: int, number: int, limit_s: float, spared: Iterable[str] = (), *, shards: bool = False
) -> Storm:
    """Trains and strikes, by all kinds that are not ``spared``, until ``number`` faults were performed; then
    trains to the end of the run.
    """
    from tests.benchmarks.peers.nodes import Nodes

    nodes, room = Nodes(), WORKERS // NODES + (SPARES if shards else 0)
    for _ in range(NODES):
        nodes.add(cpus=room)
    job = job_of(folder, "storm", number, pace_s=0.17, shards=shards)
    kinds = [kind for kind, share in MIX.items() if kind not in spared for _ in range(share)]
    # more than needed: some find nobody
    faults = list(draw(seed, 2 * number, 2.0 * number, kinds, states=STATES[:-1]))
    faults += [Fault(float(at), Kind.SIGKILL, -1) for at in range(ALL_DIE_EVERY, number, ALL_DIE_EVERY)]
    chaos = Chaos(job, faults, tell)
    storm = Storm(job, chaos, Witness(job.name), number)
    training = threading.Thread(target=storm.train, daemon=True)
    training.start()
    try:
        _until_it_steps(job.name)
        storm.witness.act = Strikes(chaos, number, limit_s)
        storm.witness.start()
        while storm.witness.act is not None and training.is_alive():
            nodes.replace_the_dead(room)
            time.sleep(0.1)
        (folder / "calm").touch()
        until = time.monotonic() + END_S
        while training.is_alive() and time.monotonic() < until:
            nodes.replace_the_dead(room)
            training.join(0.1)
        if training.is_alive():
            reap(job.name)
    finally:
        storm.witness.close()
        chaos.close()
        # while there is a cluster: none of its processes outlives it
        storm.left = left_of(job.name, storm.witness.token)
        ray.shutdown()
        nodes.close()
    return storm


def _until_it_steps(name: str) -> None:
    while True:
        coordinator = attach(name)
        if coordinator is not None and ray.get(coordinator.view.remote(10**9)).step >= 2:
            return
        time.sleep(0.05)


class Strikes:
    """The function that a witness calls at every look, to strike.

    The next fault comes once the world of at least two workers has committed a step since the last one.  A
    second fault, which waits for a state, comes as soon as the run is in it.
    """

    def __init__(self, chaos: Chaos, number: int, limit_s: float) -> None:
        self.chaos, self.number, self.until = chaos, number, time.monotonic() + limit_s
        self.queue, chaos.pending = deque(chaos.pending), []
        self.at, self.struck_s = (0, 0), time.monotonic()

    def __call__(self, _: Witness, view: View) -> bool:
        if (
            len(self.chaos.performed) >= self.number
            or view.over
            or not self.queue
            or time.monotonic() > self.until
        ):
            return True
        generation, step = self.at
        if view.generation != generation:
            self.at = (view.generation, view.step)
        fresh = view.generation == generation and view.step > step and len(view.workers) > 1
        fault = self.queue[0]
        if fault.state and fault.state != view.state and time.monotonic() > self.struck_s + STATE_S:
            self.queue.append(self.queue.popleft())  # its time has not come
        elif view.state == fault.state or (not fault.state and view.state == "Running" and fresh):
            self.chaos.pending = [replace(self.queue.popleft(), at=0.0)]
            self.chaos.heed(view)
            self.chaos.pending.clear()
            self.at, self.struck_s = (view.generation, view.step), time.monotonic()
        return False


# ---- what it came to


def judge(storm: Storm, reference: Job) -> dict[str, Any]:
    """Returns the promises that were broken, as sentences (``wrong``), and the figures of the storm."""
    job, witness, strikes = storm.job, storm.witness, storm.chaos.performed
    segments = Run.open(job).segments()
    records = [record for _, each in segments for record in each]
    worlds, steps = formed(records), ledger(segments)
    work, again = witness.total("microbatches_run"), sum(each.redone for each in worlds)
    least, bound = job.steps * job.microbatches, (job.steps + again + len(strikes)) * job.microbatches
    ends = Counter(
        end for victim, signals in _deadly(strikes).items() for end in _end_of(witness, victim, signals)
    )
    used = sorted(number for _, ids in samples(steps) for part in ids for number in part)
    host, bucket = (any(world.tier == tier for world in worlds) for tier in ("host", "bucket"))
    promises = {
        f"the run did not finish: {storm.result}": storm.result is not None
        and storm.result.state == "Finished",
        "the exported weights are not those of the undisturbed run": exported_hash(job)
        == exported_hash(reference)
        != "",
        "a step is missing, or the journal has a step that is not of the job": sorted(steps)
        == list(range(1, job.steps + 1)),
        "a sample was not used exactly once": used == list(range(job.global_batch * job.steps)),
        f"{work} microbatches were computed instead of {least} to {bound}": least <= work <= bound,
        f"some victims ended otherwise than by the signals of their faults: {ends}": not any(
            end.startswith("not by") for end in ends
        ),
        f"the kernel could not tell of too many victims how they ended: {ends}": ends[UNTOLD]
        <= max(2, len(strikes) // 50),
        "a world did more steps again than its checkpoint or its copies allow": all(
            w.redone <= {"bucket": 2 * job.checkpoint.save_every, "host": HOST_REDONE}.get(w.tier, 0)
            for w in worlds
        ),
        "the witness and the journal disagree whether state was read from host copies": (
            witness.total("healed_host_bytes") > 0
        )
        == host,
        "the witness and the journal disagree whether state was read from the bucket": (
            witness.total("healed_bucket_bytes") > 0
        )
        == bucket,
        "this version decides the journal's events differently": not [
            e for e in differences(segments, "") if e.what != "reason"
        ],
        f"the run left things behind: {', '.join(storm.left)}": not storm.left,
    }
    return {
        "wrong": [what for what, kept in promises.items() if not kept],
        "faults": len(strikes),
        "kinds": {
            kind: dict(Counter(strike.state for strike in strikes if strike.fault["kind"] == kind))
            for kind in _kinds(strikes)
        },
        "ends": dict(ends),
        "steps": job.steps,
        "workers": len(witness.seen),
        "worlds": len(worlds),
        "tiers": dict(Counter(each.tier for each in worlds)),
        "steps done again": again,
        "microbatches": {"needed": job.steps * job.microbatches, "computed": work},
        "records": len(records),
        "hash": exported_hash(job),
        "hash of the undisturbed run": exported_hash(reference),
    }


def _kinds(strikes: Iterable[Strike]) -> list[str]:
    return sorted({strike.fault["kind"] for strike in strikes})


ENDS = {
    "SIGKILL": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "SIGSEGV": signal.SIGSEGV,
    "SIGABRT": signal.SIGABRT,
    "memory_hog": signal.SIGKILL,
}
UNTOLD = "reaped before this kernel could be asked"


def _deadly(strikes: Iterable[Strike]) -> dict[str, set[signal.Signals]]:
    """Returns the signals by which each victim may have ended: two faults may meet in one process, and an
    expelled worker is killed.
    """
    found: dict[str, set[signal.Signals]] = {}
    for strike in strikes:
        if strike.fault["kind"] in ENDS:
            for victim in strike.victim.split(","):
                found.setdefault(victim, {signal.SIGKILL}).add(ENDS[strike.fault["kind"]])
    return found


def _end_of(witness: Witness, victim: str, signals: set[signal.Signals]) -> Iterator[str]:
    """Yields how the victim ended, as the kernel reports it; nothing for a worker that had just joined, of
    which only the journal knows.
    """
    seen = witness.seen.get(victim)
    if seen is None or seen.ended is None:
        return
    if seen.ended.source == "gone":
        yield UNTOLD
    elif seen.ended.signal in signals:
        yield f"by {seen.ended.signal.name}"
    else:
        yield f"not by {sorted(each.name for each in signals)}: {seen.ended}"


def table(found: Mapping[str, Any]) -> str:
    """Returns Markdown with kinds of faults and the states in which they struck."""
    lines = [f"| fault | {' | '.join(STATES)} | all |", "|---" * (len(STATES) + 2) + "|"]
    for kind, states in found["kinds"].items():
        lines.append(
            f"| {kind} | {' | '.join(str(states.get(state, '')) for state in STATES)} | "
            f"{sum(states.values())} |"
        )
    sums = [sum(states.get(state, 0) for states in found["kinds"].values()) for state in STATES]
    return "\n".join([*lines, f"| all | {' | '.join(map(str, sums))} | {sum(sums)} |"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument(
        "--limit",
        type=float,
        metavar="SECONDS",
        default=3600.0,
        help="after which no more faults are performed",
    )
    parser.add_argument("--spare", nargs="+", default=[], metavar="KIND", help="kinds that are left out")
    parser.add_argument("--keep", type=Path, help="where the journal goes")
    parser.add_argument(
        "--shards", action="store_true", help="fully sharded, with copies in host memory and a spare"
    )
    parser.add_argument("--rehearsal", action="store_true", help="write no result")
    arguments = parser.parse_args()
    with TemporaryDirectory(prefix="storm-") as name:
        folder = Path(name)
        reference = job_of(folder, "calm", arguments.faults, pace_s=0.0)
        assert run_local(reference, lambda line: None)[0] == "Finished"
        began = time.monotonic()
        storm = rage(
            folder,
            arguments.seed,
            arguments.faults,
            arguments.limit,
            arguments.spare,
            shards=arguments.shards,
        )
        took = time.monotonic() - began
        found = {
            "seed": arguments.seed,
            "seconds": round(took),
            **judge(storm, reference),
            **where(),
            "python": platform.python_version(),
        }
        if arguments.keep:
            keep(Run.open(storm.job), arguments.keep)
    print(table(found))
    print(json.dumps({name: value for name, value in found.items() if name != "kinds"}, indent=1))
    if not arguments.rehearsal:
        told = [
            {**each.fault, "victim": each.victim, "state": each.state, "step": each.step}
            for each in storm.chaos.performed
        ]
        found["strikes"] = [json.dumps(each) for each in told]
        (RESULTS / f"storm-{arguments.seed}{'-shards' if arguments.shards else ''}.json").write_text(
            json.dumps(found, indent=1) + "\n"
        )
    return 1 if found["wrong"] else 0


def keep(run: Run, path: Path) -> None:
    rows = [
        row for snapshot, records in journal.read(run.store, run.job.name) for row in (snapshot, *records)
    ]
    path.write_bytes(
        gzip.compress("\n".join(json.dumps(row, separators=(",", ":")) for row in rows).encode(), 9, mtime=0)
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
