"""Profiles the steps that the setting ``profile`` names, in world rank 0: a trace of operations, and on a GPU
the history of its memory.

The profiler only watches, so the bits of the run do not change.  A thread of its own writes the profile to
the folder ``profiles/`` of the run: a slow bucket does not hold up training, and a failure does not end it.
A profile ends with its last step, or with the world if the world ends earlier.
"""

from __future__ import annotations

import contextlib
import gzip
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from elastic.engine.world import World
from elastic.job import Job
from elastic.report.overlap import events_of, summary
from storage.background import in_background
from storage.objects import ObjectStore

CLOSE_S = 30.0
"""Longest time in seconds for which the end of a process waits for a profile that is being written."""
ALLOCATIONS = 100_000
"""Number of the newest allocations and frees that a memory snapshot holds."""
PIECE = 2**23
"""Bytes that are read from a file at a time while it is written to the bucket."""


class Profiler:
    """Profiles the steps of one process.  ``say`` receives a sentence about where a profile is, or why there
    is none.
    """

    def __init__(self, job: Job, store: ObjectStore, say: Callable[[str], None]) -> None:
        self._steps, self._store, self._say = job.profiled(), store, say
        self._folder = f"{job.name}/profiles"
        self._running: profile | None = None
        self._done: list[int] = []
        """The steps that are in the running profile."""
        self._memory, self._generation = False, 0
        self._writing: list[Future[None]] = []

    @contextlib.contextmanager
    def watch(self, step: int, world: World) -> Iterator[None]:
        """Surrounds a step.  If the step fails, the profile waits for :meth:`finish`, because the device may
        hang now.
        """
        if step not in self._steps or world.rank:
            yield
            return
        if self._running is None:
            self._start(world)
        with record_function(f"step {step}"):
            yield
        self._done.append(step)
        if step == self._steps[-1]:
            self.finish()

    def finish(self) -> None:
        """Ends the running profile, if any, and begins to write it.  Nothing may hang on the device."""
        running, self._running = self._running, None
        if running is None:
            return
        folder = TemporaryDirectory()
        try:
            running.stop()
            if self._memory:
                torch.cuda.memory._dump_snapshot(str(Path(folder.name, "memory.pickle")))
        except Exception:  # a boundary: training goes on without the profile
            self._say(f"the profile failed:\n{traceback.format_exc()}")
            self._done = []
        finally:
            self._forget_memory()
        if not self._done:
            return folder.cleanup()
        name = f"steps-{self._done[0]}-{self._done[-1]}-g{self._generation}"
        self._writing.append(in_background(lambda: self._write(running, folder, name), "profile"))

    def close(self) -> None:
        """Waits a while for what is being written."""
        wait_for(self._writing, CLOSE_S)

    def _start(self, world: World) -> None:
        self._memory, self._generation, self._done = world.device.type == "cuda", world.generation, []
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._memory else [])]
        try:
            if self._memory:
                torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS, stacks="python")
            running = profile(activities=activities)
            running.start()
        except Exception:  # a boundary: training goes on without the profile
            self._steps = range(0)
            self._forget_memory()
            self._say(f"the profile failed:\n{traceback.format_exc()}")
        else:
            self._running = running

    def _forget_memory(self) -> None:
        if self._memory:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, found: profile, folder: TemporaryDirectory[str], name: str) -> None:
        try:
            with folder:
                trace = Path(folder.name, "trace.json.gz")
                found.export_chrome_trace(str(trace))
                hidden = summary(events_of(gzip.decompress(trace.read_bytes()).decode(errors="replace")))
                for file in sorted(Path(folder.name).iterdir()):
                    self._store.put(f"{self._folder}/{name}.{file.name}", _pieces(file))
            self._say(". ".join([f"a profile is at {self._store.full_name(self._folder)}/{name}.*", *hidden]))
        except Exception:  # a boundary: training goes on without the profile
            self._say(
                f"the profile {name} could not be written to "
                f"{self._store.full_name(self._folder)}:\n{traceback.format_exc()}"
            )


def _pieces(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while piece := opened.read(PIECE):
            yield piece
