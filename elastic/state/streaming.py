"""Streams state that lives in the host's memory through the device: from the slot of one version into the slot of the next one.

Nobody writes to the slot of a version.  An update reads it and writes another slot, which then holds the next version and *is* its copy.
So a process that dies in an update leaves the version before, whole, in memory that its node's keeper holds too.

Tensors come in groups.  While a group is updated, the next one comes and the one before goes, each over a stream of its own, since a bus
carries as much in both directions at once.  The alternative is to update on the CPU
(Ren and others 2021, ZeRO-Offload): only gradients and weights travel then, but a CPU adds in another order than a GPU, and is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Protocol

import torch

from elastic.engine.streams import stream, wait_for
from elastic.state.digest import digests
from elastic.state.shard import Home, Key

GROUP = 2**28
"""Bytes after which a group ends, rounded up to a parameter with its moments."""
GROUPS = 3
"""Largest number of groups on the device at once."""
Values = dict[Key, torch.Tensor]


def groups_of(units: Sequence[Mapping[Key, torch.Tensor]]) -> list[list[Key]]:
    """Returns the keys of all units in groups of about ``GROUP`` bytes; each unit is in one group."""
    groups: list[list[Key]] = []
    room = 0
    for unit in units:
        if room <= 0 or not groups:
            groups.append([])
            room = GROUP
        groups[-1] += unit
        room -= sum(value.nbytes for value in unit.values())
    return groups


def through(device: torch.device, before: Home, after: Home, groups: Sequence[Sequence[Key]]) -> Generator[Values]:
    """Yields the tensors of each group of ``before`` on ``device``.  What the caller makes of them goes to ``after``, with its digests.

    Nothing is in flight any more when it ends or is closed.
    """
    way: _Way = _Streams(device) if device.type == "cuda" else _Plain()
    coming = [way.load(before, keys) for keys in groups[:1]]
    gone: Callable[[], None] | None = None
    try:
        for following in (*groups[1:], ()):
            values = coming.pop()()
            if gone is not None:
                gone()
            coming.append(way.load(before, following))
            yield values
            gone = way.store(after, values)
    finally:
        way.finish()


def put(home: Home, key: Key, value: torch.Tensor) -> None:
    """Writes a tensor, which may be on a device, and its digests."""
    home.values[key].copy_(value)
    home.sums[home.blocks[key]] = digests(value).to(home.sums.device)


class _Way(Protocol):
    def load(self, home: Home, keys: Sequence[Key]) -> Callable[[], Values]:
        """Begins to bring tensors to the device.  Returns a call that returns them, for work on the present stream."""

    def store(self, home: Home, values: Values) -> Callable[[], None]:
        """Begins to write tensors, after the work on the present stream.  Returns a call that waits for that."""

    def finish(self) -> None:
        """Waits for everything that was begun."""


class _Plain:
    """The way where the device is the host."""

    def load(self, home: Home, keys: Sequence[Key]) -> Callable[[], Values]:
        values = {key: home.values[key].clone() for key in keys}
        return lambda: values

    def store(self, home: Home, values: Values) -> Callable[[], None]:
        for key, value in values.items():
            put(home, key, value)
        return lambda: None

    def finish(self) -> None:
        """Returns at once."""


class _Streams:
    """The way to an accelerator and back.

    Memory that came over a stream is given back to torch only once the host has seen that it was written out: torch would not know of its
    use on other streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._in, self._out = device, stream("offload in", device), stream("offload out", device)

    def load(self, home: Home, keys: Sequence[Key]) -> Callable[[], Values]:
        with torch.cuda.stream(self._in):
            values = {key: home.values[key].to(self.device, non_blocking=True) for key in keys}
            came = self._in.record_event()

        def arrive() -> Values:
            torch.cuda.current_stream(self.device).wait_event(came)
            return values

        return arrive

    def store(self, home: Home, values: Values) -> Callable[[], None]:
        sums = {key: digests(value) for key, value in values.items()}
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            for key, value in values.items():
                home.values[key].copy_(value, non_blocking=True)
                home.sums[home.blocks[key]].copy_(sums[key], non_blocking=True)
            left = self._out.record_event()
        kept = [*values.values(), *sums.values()]

        def gone() -> None:
            wait_for(left)
            kept.clear()

        return gone

    def finish(self) -> None:
        for each in (torch.cuda.current_stream(self.device), self._in, self._out):
            wait_for(each.record_event())
