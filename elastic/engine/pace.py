"""Measures how long the forward passes of a member take on its device, without what it waits for others.

All members of a world take equally long for a step, since each waits for the slowest; so only the time of a
member's own work tells which one is slow.  A forward pass is measured because its waits are few and known:
for weights that are gathered from other members.  A backward pass waits at every sum, and on an accelerator
these waits hold up the host, too, so its own work cannot be told from them.

On a CPU the times are those of the host's clock, on CUDA those of events on the present stream, which are
read once the device has passed them.  Nothing waits for the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class ForwardPace:
    """The forward passes of one member of a world.

    A pass begins with ``marks = [mark()]``, and ends with ``marks.append(mark())``, ``passes.append(marks)``
    and ``marks = None``.  The caller writes this out, since on a CPU it then calls no Python function.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.mark: Callable[[], Any] = _event if self._cuda else time.perf_counter
        """Returns a point in time: a number of seconds, or an event."""
        self.marks: list[Any] | None = None
        """The marks of the present pass: its beginning, the beginning and the end of each wait, and its end."""
        self.passes: deque[list[Any]] = deque()
        """The passes that ended and were not read yet, oldest first."""

    def without(self, wait: Callable[P, T]) -> Callable[P, T]:
        """Returns ``wait``, which waits for other members, so that its time is left out of a forward pass."""

        def left_out(*args: P.args, **kwargs: P.kwargs) -> T:
            marks = self.marks
            if marks is None:
                return wait(*args, **kwargs)
            marks.append(self.mark())
            found = wait(*args, **kwargs)
            marks.append(self.mark())
            return found

        return left_out

    def read(self) -> float:
        """Returns the mean time in seconds of the passes that the device has ended since they were read last;
        0 if there are none.
        """
        found = list[float]()
        while self.passes and (not self._cuda or self.passes[0][-1].query()):
            marks = self.passes.popleft()
            found.append(
                sum(first.elapsed_time(last) for first, last in zip(marks[::2], marks[1::2], strict=True))
                / 1e3
                if self._cuda
                else sum(marks[1::2]) - sum(marks[::2])
            )
        return sum(found) / len(found) if found else 0.0


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
