"""Faults that a worker performs on itself, at an exact point of an exact step: the real signal, the real exit, the real exception."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from typing import Any, NamedTuple, Protocol

import torch

from elastic.engine.parallelize import sharding_table
from elastic.job import Fault

EXIT_CODE = 17
"""Of a fault of kind "exit": nobody else's."""
HELD_S = 600.0
"""Of a fault of kind "held_gil" that says no duration: longer than anybody waits."""
HOG_BYTES = 256 * 2**20
"""What a memory hog takes; then it ends as the kernel would end it.  Never so much that others on the machine suffer."""
PAGE_BYTES = 4096
KINDS = (
    "SIGKILL",
    "SIGTERM",
    "SIGSEGV",
    "SIGABRT",
    "SIGSTOP",
    "exception",
    "exit",
    "held_gil",
    "memory_hog",
    "device_assert",
    "clock_skew",
)
"""What a worker can do to itself: the words of ``elastic/sim/faults.py``."""
INSIDE = ("forward", "backward")
"""The points that lie inside the model."""


class InjectedError(RuntimeError):
    """The exception of a fault of kind "exception"."""


class Place(Protocol):
    """Who a worker is in a generation; a :class:`~elastic.engine.world.World` says it too."""

    @property
    def generation(self) -> int: ...

    @property
    def rank(self) -> int: ...


class Seat(NamedTuple):
    """A place in a world that is not there yet."""

    generation: int
    rank: int


class Asked(NamedTuple):
    """A fault that chaos has asked for; ``point``: "" for any."""

    kind: str
    point: str
    duration_s: float = 0.0
    amount: float = 0.0


class Faults:
    """``strike`` names a point; if a fault is set there it happens.  Each happens once a process."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self.faults = list(faults)
        self.asked: list[Asked] = []
        """By chaos, in this order; added by the control thread."""
        self.step = 0
        self._watched = 0
        """The generation whose model has the points that lie inside."""
        self._one_takes = threading.Lock()

    def ask(self, asked: Asked) -> None:
        """It happens where this process next comes to its point.  Raises ValueError for a kind that no worker can do to itself."""
        _check(asked.kind)
        self.asked.append(asked)

    def aim(self, step: int, model: torch.nn.Module, place: Place) -> None:
        """``step`` is about to be computed; what lies inside the model is hooked into it once a fault is set there, and not before."""
        self.step = step
        points = [each.point for each in self.faults] + [each.point for each in self.asked]
        if self._watched != place.generation and any(point in INSIDE for point in points):
            self._watched = place.generation
            self._watch(model, place)

    def _watch(self, model: torch.nn.Module, place: Place) -> None:
        """Make the points "forward" and "backward" lie inside the model: in its middle block, when it is entered and on the way back."""
        blocks = sharding_table(model).blocks
        middle = model.get_submodule(blocks[len(blocks) // 2]) if blocks else model

        def after(_module: torch.nn.Module, _args: object, output: Any) -> None:
            self.strike("forward", self.step, place)
            for each in output if isinstance(output, tuple) else (output,):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    each.register_hook(lambda _grad: self.strike("backward", self.step, place))

        compiled = middle._compiled_call_impl
        if compiled is None:
            middle.register_forward_hook(after)
        else:  # outside of what is compiled: a hook would be traced into it, and compiled again for every step

            def call(*args: object, **named: object) -> Any:
                output = compiled(*args, **named)
                after(middle, args, output)
                return output

            middle._compiled_call_impl = call

    def strike(self, point: str, step: int, place: Place) -> None:
        if self.asked and (asked := self._take(point)):
            perform(asked.kind, asked.duration_s, asked.amount)
        for fault in self.faults:
            here = (fault.point, fault.world_rank, fault.generation) == (point, place.rank, place.generation)
            if here and fault.step in (0, step):
                self.faults.remove(fault)
                perform(fault.kind)
                return

    def _take(self, point: str) -> Asked | None:
        """The first that fits here; the thread that saves passes points too."""
        with self._one_takes:
            found = next((each for each in self.asked if each.point in ("", point)), None)
            if found is not None:
                self.asked.remove(found)
            return found


def perform(kind: str, duration_s: float = 0.0, amount: float = 0.0) -> None:
    """Now, by this thread.  ``duration_s``: of a held GIL, 0 for good; ``amount``: of a skewed clock.  ValueError for any other kind."""
    _check(kind)
    match kind:
        case "exception":
            raise InjectedError("injected by the job's faults")
        case "exit":
            os._exit(EXIT_CODE)
        case "held_gil":
            hold_the_gil(duration_s or HELD_S)
        case "memory_hog":
            hog()
        case "clock_skew":
            skew(amount)
        case "device_assert":
            torch._assert_async(torch.zeros((), device="cuda"))  # seen later, by whatever asks the device next
        case name:
            signal.raise_signal(signal.Signals[name])  # to this thread: a crash shows where it happened


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind = {kind!r} is nothing that a worker can do to itself; it can do {', '.join(KINDS)}")


def hold_the_gil(duration_s: float) -> None:
    """As a C extension that computes: no thread of this process runs Python meanwhile."""
    ctypes.PyDLL(None).usleep(int(duration_s * 1e6))


def skew(amount: float) -> None:
    """From now on the clock of this process, where Python reads it, and by which its lease is counted, runs ``amount`` too fast."""
    true, since = time.monotonic, time.monotonic()
    time.monotonic = lambda: since + (true() - since) * (1 + amount)


def hog() -> None:
    """Take memory, all of it in use, and be killed for it."""
    taken = bytearray(HOG_BYTES)
    taken[::PAGE_BYTES] = b"x" * len(range(0, HOG_BYTES, PAGE_BYTES))
    signal.raise_signal(signal.SIGKILL)
