"""A long run of n workers: each step has four microbatches of one sample a worker, with losses that no two
steps share.

The real codec and the real journal write ``STEPS`` steps into a bucket, with an object every five steps, as
when a step takes a second. Then another coordinator recovers the run from the bucket.  Record numbers begin
at a million, as in a run of that age.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

from elastic.control.run import RunState
from elastic.journal import codec
from elastic.plan.layout import LayoutRule
from elastic.protocol.commit_record import Outcome
from elastic.protocol.events import StepDone
from elastic.runs.run import Run
from storage.journal import Journal
from storage.objects import ObjectStore
from tests.control.play import Play, stepping
from tests.support.stores import Forwarding
from tests.support.toys import toy_job

STEPS, AGE, PER_OBJECT, PER_WORKER = 100, 10**6, 5, 4


class Counting(Forwarding):
    """A store that counts what is asked for, and what comes."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.requests = self.bytes = 0

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        raw = super().get(key, start, stop)
        self.requests, self.bytes = self.requests + 1, self.bytes + len(raw)
        return raw

    def children(self, folder: str = "") -> list[str]:
        self.requests += 1
        return super().children(folder)


def outcome(step: int, microbatches: int, draw: random.Random) -> Outcome:
    """A step whose losses are fp32 numbers about 2, as a model computes them, and whose sample ids are a
    permutation's.
    """
    losses = tuple(float(np.float32(draw.gauss(2.0, 0.5))) for _ in range(microbatches))
    ids = tuple((draw.randrange(10**9),) for _ in range(microbatches))
    return Outcome(step, 1, draw.random(), losses, (4096,) * microbatches, ids, True)


class Writer:
    """Writes a run of ``workers`` workers, step by step, and notes how much is on the disk."""

    def __init__(self, workers: int, folder: Path, microbatches: int) -> None:
        self.store = Counting(ObjectStore.open(str(folder.with_name("bucket"))))
        self.play: Play = stepping(workers, layout=LayoutRule(None, 1, 1, "all"))
        self.folder, self.microbatches, self.draw, self.disk = folder, microbatches, random.Random(1), 0
        job = toy_job("memory://unused")
        self.run = Run(job, self.store)
        self.journal = Journal(
            self.store, job.name, folder, AGE, codec.snapshot(self.play.run), segment_s=3600.0
        )

    def steps(self, first: int, last: int) -> float:
        """Commits these steps, and returns the seconds of the processor that encoding and writing took."""
        spent = 0.0
        for step in range(first, last + 1):
            before, event = (
                self.play.run,
                StepDone(self.play.plan.members[0], 1, outcome(step, self.microbatches, self.draw)),
            )
            self.play.tell(event)
            began = time.thread_time()
            record = codec.record(self.journal.next, 0.0, event, before, self.play.last)
            self.journal.append(record, lambda run=self.play.run: codec.snapshot(run), durable=False)  # type: ignore[misc]
            spent += time.thread_time() - began
            if step % PER_OBJECT == 0:
                assert self.journal.ship(60.0)
            self.disk = max(self.disk, sum(path.stat().st_size for path in self.folder.iterdir()))
        return spent

    def bucket_bytes(self) -> int:
        return sum(self.store.size(key) for key in self.store.list(f"{self.run.job.name}/journal/"))

    def recovered(self, folder: Path) -> RunState:
        found = Run(self.run.job, self.store).recover(1, folder, [])
        assert found is not None
        found[1].close()
        return found[0]


def measure(n: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(n, Path(folder) / "local", PER_WORKER * n)
        spent = writer.steps(1, STEPS // 2)
        disk, half = writer.disk, writer.bucket_bytes()
        tracemalloc.start()
        writer.steps(STEPS // 2 + 1, STEPS // 2 + PER_OBJECT)
        memory, _ = tracemalloc.get_traced_memory()
        writer.steps(STEPS // 2 + PER_OBJECT + 1, STEPS)
        grown = tracemalloc.get_traced_memory()[0] - memory
        tracemalloc.stop()
        writer.journal.close()
        written = writer.bucket_bytes()
        writer.store.requests = writer.store.bytes = 0
        began = time.process_time()
        assert writer.recovered(Path(folder) / "next") == writer.play.run
        takeover_s, requests, read = time.process_time() - began, writer.store.requests, writer.store.bytes
        tracemalloc.start()
        writer.recovered(Path(folder) / "again")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    steps = STEPS - STEPS // 2
    return {
        "record_cpu_s": spent / (STEPS // 2),
        "bucket_bytes_per_microbatch": (written - half) / (steps * PER_WORKER * n),
        "disk_bytes": float(disk),
        "disk_growth_bytes": float(writer.disk - disk),
        "memory_growth_bytes": float(grown),
        "takeover_cpu_s": takeover_s,
        "takeover_peak_bytes": float(peak),
        "takeover_requests": float(requests),
        "takeover_read_bytes": float(read),
    }


if __name__ == "__main__":
    print(measure(int(sys.argv[1])))
