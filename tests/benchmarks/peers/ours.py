"""Elastic: two replicas on a Ray cluster of two nodes, as a user runs them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from actors.launch import launch
from actors.living import attach
from elastic.report.recoveries import Recovery, recoveries
from elastic.report.story import Line, Sentence, StepLine
from elastic.runs.run import Run
from elastic.train.gauges.counters import Counters, segment
from tests.benchmarks.peers.drive import until
from tests.benchmarks.peers.nodes import Nodes, kill
from tests.benchmarks.peers.toy import MICROBATCHES, MODEL, READ_S, SAVE_EVERY, WORKERS, Mark
from tests.support.toys import toy_job

SHARDS = {"parallel": {"dp_replicate": 1}}
CHANGES: dict[str, dict[str, Any]] = {
    "process": {},
    "node": {},
    "process, shards": SHARDS,
    "node, shards": SHARDS | {"copies": {"buddy_every": 1}},
    "notice": {"notices": {"sources": ["drain"]}},
    "notice, shards": SHARDS | {"copies": {"buddy_every": 1}, "notices": {"sources": ["drain"]}},
    "process, spare": {"workers": {"min": 1, "max": WORKERS, "spares": 1}},
    "process, shards, spare": SHARDS | {"workers": {"min": 1, "max": WORKERS, "spares": 1}},
    "node, silent": {"deadlines": {"grow_debounce_s": 1, "silence_s": 2}},
    "hang": {"deadlines": {"grow_debounce_s": 1, "stall_s": 4}},
}
"""Settings for each event.  Two replicas heal from each other; a shard is restored from a copy in a keeper,
the dead worker's own or a buddy's; a spare waits on a third node."""
PHASES = ("decide_s", "abort_s", "form_s", "heal_s", "go_s", "step_s")


class Ours:
    """Elastic, as a system that is measured.

    The coordinator tells the commits; the members themselves note the first microbatch of a world, in shared
    memory.
    """

    def __init__(self, folder: Path, event: str) -> None:
        self.nodes, self.how = (
            Nodes(),
            signal.SIGSTOP if event in ("hang", "node, silent") else signal.SIGKILL,
        )
        values: dict[str, Any] = {
            "name": "recovery",
            "steps": 100_000,
            "model_args": MODEL,
            "global_batch": 2 * MICROBATCHES,
            "data": {"dataset": "tests.support.toys:Sums", "args": {"read_s": READ_S}},
            "schedule": {"kind": "constant"},
            "workers": {"min": 1, "max": WORKERS},
            "checkpoint": {"save_every": SAVE_EVERY},
            "deadlines": {"grow_debounce_s": 1},
        }
        self.job = toy_job(folder / "bucket", **(values | CHANGES[event]))
        self.settings = f"grow_debounce_s = 1, save_every = {SAVE_EVERY}, {CHANGES[event]}"
        self.lines: list[Line] = []
        self.begun: list[Mark] = []
        self.done = threading.Event()

    def start(self) -> None:
        for _ in range(WORKERS + self.job.workers.spares):
            self.nodes.add()
        self.run = threading.Thread(target=lambda: launch(self.job, show=self.show), daemon=True)
        self.run.start()
        self.coordinator = until(lambda: attach(self.job.name), "the coordinator")
        self.follower = threading.Thread(target=self.follow, daemon=True)
        self.follower.start()

    def show(self, line: Line) -> None:
        self.lines.append(line)
        if isinstance(line, Sentence):
            print(f"    {line.at:.2f} {line.text[:200]}", flush=True)

    def follow(self) -> None:
        """Notes when each world began to step, before a later world overwrites it."""
        token, known = self.view().token, set()
        mapped: dict[Path, Counters] = {}
        while not self.done.wait(0.01):
            for path in segment(token, "").parent.glob(f"{segment(token, '').name}*"):
                if path not in mapped and path.stat().st_size:
                    mapped[path] = Counters(path, create=False)
            for counters in mapped.values():
                generation, since = counters["generation"], counters["stepping_since_ns"]
                if since and (since, generation) not in known:
                    known.add((since, generation))
                    self.begun.append(Mark(since / 1e9, "begin", counters["step"] + 1, generation, 0, 0, 0))

    def marks(self) -> Sequence[Mark]:
        steps = [line for line in list(self.lines) if isinstance(line, StepLine)]
        done = [Mark(line.at, "commit", line.step, line.generation, line.world, 0, 0) for line in steps]
        return sorted([*done, *self.begun], key=lambda mark: mark.at)

    def view(self) -> Any:
        return ray.get(self.coordinator.view.remote(10**9))

    def kill_process(self) -> None:
        """Strikes the newest member."""
        view = self.view()
        mapped = {worker: Counters(segment(view.token, worker), create=False) for worker in view.workers}
        members = [worker for worker, counters in mapped.items() if counters["generation"] == view.generation]
        kill(mapped[max(members, key=lambda name: int(name[1:]))]["pid"], self.how)

    def kill_node(self) -> None:
        """Kills or freezes a node with a worker and without the coordinator."""
        victim = self._victim()
        self.nodes.freeze(victim) if self.how == signal.SIGSTOP else self.nodes.kill(victim)

    def give_notice(self, lead_s: float) -> Callable[[], None]:
        victim = self._victim()
        self.nodes.drain(victim, lead_s)
        return lambda: self.nodes.kill(victim)

    def _victim(self) -> str:
        """Returns a node with a worker and without the coordinator."""
        from ray._private.state import actors

        home = next(
            each["Address"]["NodeID"]
            for each in actors().values()
            if each["Name"] == f"{self.job.name}/coordinator"
        )
        return next(node for node in self.view().workers.values() if node != home)

    def add_node(self) -> None:
        self.nodes.bury()
        self.nodes.add()

    def phases(self, killed_at: float) -> dict[str, Any]:
        """Reads the phases of the recovery from the journal."""

        def look() -> Recovery | None:
            changes = recoveries(Run.open(self.job).records())
            return next((each for each in changes if not each.planned and each.known_at >= killed_at), None)

        found = until(look, "the recovery in the journal")
        plans = [
            action["plan"]
            for record in Run.open(self.job).records()
            for action in record["actions"]
            if action["$"] == "Form"
        ]
        tier = next(plan["tier"] for plan in plans if plan["generation"] == found.generation)
        return {
            "tier": tier,
            "detect_s": found.known_at - killed_at,
            **{name: value for name, value in asdict(found).items() if name in PHASES},
        }

    def close(self) -> None:
        self.done.set()
        self.coordinator.stop.remote("the benchmark is over")
        self.run.join(60)
        self.nodes.close()
