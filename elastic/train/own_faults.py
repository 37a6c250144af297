"""Faults that a worker performs on itself, at an exact point of an exact step: the real signal, the real
exit, the real exception.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from typing import Any, NamedTuple, Protocol

import torch

from elastic.config.sections import WorkerFault
from elastic.engine.blocks import sharding_table
from elastic.protocol.faults import OWN_KINDS, Kind

EXIT_CODE = 17
"""Exit code of a worker that performs a fault of kind "exit"; nothing else exits with it."""
HELD_S = 600.0
"""Seconds for which a fault of kind "held_gil" holds the GIL if it has no duration: longer than any deadline.
"""
HOG_BYTES = 256 * 2**20
"""Bytes that a fault of kind "memory_hog" takes before it ends the process as the kernel would: few enough to
spare other processes.
"""
PAGE_BYTES = 4096
KINDS = (*OWN_KINDS, Kind.CLOCK_SKEW)
"""Faults that a worker can perform on itself.  A clock is skewed at no point of a step, only if chaos asks
for it.
"""
INSIDE = ("forward", "backward")
"""Points that lie inside the model."""


class InjectedError(RuntimeError):
    """The exception of a fault of kind "exception"."""


class Position(Protocol):
    """The position of a worker in a generation; a :class:`~elastic.engine.world.World` is one too."""

    @property
    def generation(self) -> int: ...

    @property
    def rank(self) -> int: ...


class Seat(NamedTuple):
    """A place in a world that has not formed yet."""

    generation: int
    rank: int


class FaultOrder(NamedTuple):
    """A fault that chaos has asked for; if ``point`` is "", it happens at any point."""

    kind: str
    point: str
    duration_s: float = 0.0
    amount: float = 0.0


class Faults:
    """The faults that are set for this worker.  ``strike`` performs a fault that is set at a point; each
    fault happens once in a process.
    """

    def __init__(self, faults: tuple[WorkerFault, ...]) -> None:
        self.faults = list(faults)
        self.asked: list[FaultOrder] = []
        """Faults that chaos has asked for, oldest first; the control thread adds them."""
        self.step = 0
        self._watched = 0
        """The generation whose model has hooks for the points inside it."""
        self._one_takes = threading.Lock()

    def ask(self, asked: FaultOrder) -> None:
        """Sets a fault that happens when this process next reaches its point.  Raises ValueError for a kind
        not in :data:`KINDS`.
        """
        _check(asked.kind)
        self.asked.append(asked)

    def aim(self, step: int, model: torch.nn.Module, place: Position) -> None:
        """Prepares for ``step``, which is about to be computed.

        The points inside the model get their hooks only once a fault is set there.
        """
        self.step = step
        if not self.faults and not self.asked:
            return
        points = [each.point for each in self.faults] + [each.point for each in self.asked]
        if self._watched != place.generation and any(point in INSIDE for point in points):
            self._watched = place.generation
            self._watch(model, place)

    def _watch(self, model: torch.nn.Module, place: Position) -> None:
        """Hooks the points "forward" and "backward" into the middle block of the model.

        "forward" is reached when the block has run, "backward" when the gradient of its output arrives.
        """
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
        # the call wraps the compiled code: torch would trace a hook into it, and recompile it for every step
        else:

            def call(*args: object, **named: object) -> Any:
                output = compiled(*args, **named)
                after(middle, args, output)
                return output

            middle._compiled_call_impl = call

    def strike(self, point: str, step: int, place: Position) -> None:
        """Performs the fault that chaos has asked for at ``point``, if any, and then the fault that the job
        sets for this point, step and place.
        """
        if self.asked and (asked := self._take(point)):
            perform(asked.kind, asked.duration_s, asked.amount)
        for fault in self.faults:
            here = (fault.point, fault.world_rank, fault.generation) == (point, place.rank, place.generation)
            if here and fault.step in (0, step):
                self.faults.remove(fault)
                perform(fault.kind)
                return

    def _take(self, point: str) -> FaultOrder | None:
        """Removes and returns the first fault that fits ``point``.  It holds a lock because the thread that
        saves reaches points too.
        """
        with self._one_takes:
            found = next((each for each in self.asked if each.point in ("", point)), None)
            if found is not None:
                self.asked.remove(found)
            return found


def perform(kind: str, duration_s: float = 0.0, amount: float = 0.0) -> None:
    """Performs a fault now, on this thread.

    ``duration_s`` is for a held GIL, where 0 means ``HELD_S``; ``amount`` is for a skewed clock.  Raises
    ValueError for a kind not in :data:`KINDS`.
    """
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
            # the error shows later, in the next call that asks the device
            torch._assert_async(torch.zeros((), device="cuda"))
        case name:
            signal.raise_signal(signal.Signals[name])  # to this thread: a crash shows where it happened


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(
            f"kind = {kind!r} is not a fault that a worker can perform itself; these are {', '.join(KINDS)}"
        )


def hold_the_gil(duration_s: float) -> None:
    """Holds the GIL like a C extension that computes: meanwhile no thread of this process runs Python."""
    ctypes.PyDLL(None).usleep(int(duration_s * 1e6))


def skew(amount: float) -> None:
    """Makes ``time.monotonic`` of this process, which times its lease, run too fast from now on; ``amount``
    0.1 means 10 %.
    """
    true, since = time.monotonic, time.monotonic()
    time.monotonic = lambda: since + (true() - since) * (1 + amount)


def hog() -> None:
    """Takes memory, touches every page of it, and kills this process."""
    taken = bytearray(HOG_BYTES)
    taken[::PAGE_BYTES] = b"x" * len(range(0, HOG_BYTES, PAGE_BYTES))
    signal.raise_signal(signal.SIGKILL)
