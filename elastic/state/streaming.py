"""Streams state that lives in the host's memory through the device: from the slot of one version into the
slot of the next version.

The slot of a finished version is never written.  An update reads it and writes another slot, which then holds
the next version and *is* its copy.  So a process that dies in an update leaves the previous version complete
in memory that its node's keeper holds too.

Tensors are updated in groups.  While a group is updated, the next group is loaded and the previous group is
written, each over a stream of its own, since a bus reaches full speed in both directions at once.  So an
update takes about as long as the slowest of loading, updating and writing.  The alternative is to update on
the CPU (Ren and others 2021, ZeRO-Offload): only gradients and weights travel then, but a CPU adds in another
order than a GPU, and is slower.

The slots may be in files (Rajbhandari and others 2021, ZeRO-Infinity).  Then threads read and write the
files, and each tensor leaves the memory of this process once it was read or written.  A disk may lose a write
without reporting it, and later return the old bytes.  So an update compares the digests of all tensors that
it has read with the digests that were written, and ends with an error if they differ.  A tensor that is read
outside of an update (:func:`fetch`) is compared before it is used.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Lock
from typing import Any, Protocol, TypeVar

import torch

from elastic.engine.streams import stream, wait_for
from elastic.errors import StateDamaged
from elastic.job import Job
from elastic.state.digest import digests
from elastic.state.shard import Key, ShardHome
from storage.background import in_background

T = TypeVar("T")
GROUP = 2**28
"""Largest size of a group in bytes, unless a parameter with its moments is larger."""
GROUPS = 3
"""Largest number of groups on the device at once: one is loaded, one is updated, one is written."""
SHARES = GROUPS + 2
"""Number of groups for which ``offload_buffer_gb`` has room: ``GROUPS``, one for two tensors that are mapped
while they are read and written, and one for the memory in which an optimizer updates a group.
"""
Values = dict[Key, torch.Tensor]


def group_bytes(job: Job) -> int:
    """Returns the largest size of a group in bytes."""
    return round(job.offload_buffer_gb * 1e9) // SHARES if job.offload_folder else GROUP


def buffer_gb(group: int) -> str:
    """Returns the smallest ``offload_buffer_gb`` whose groups have ``group`` bytes, to the byte, as it is
    written in a job file.
    """
    return f"{SHARES * group / 1e9:.9f}".rstrip("0").rstrip(".")


def groups_of(units: Sequence[Mapping[Key, torch.Tensor]], most: int) -> list[list[Key]]:
    """Returns the keys of all units in groups of at most ``most`` bytes, or of one unit if that is larger."""
    groups = in_groups(units, lambda unit: sum(value.nbytes for value in unit.values()), most)
    return [[key for unit in group for key in unit] for group in groups]


def in_groups(items: Iterable[T], bytes_of: Callable[[T], int], most: int) -> list[list[T]]:
    """Returns the items, in their order, in groups of at most ``most`` bytes, or of one item if that is
    larger.
    """
    groups: list[list[T]] = []
    room = 0
    for item in items:
        if bytes_of(item) > room or not groups:
            groups.append([])
            room = most
        groups[-1].append(item)
        room -= bytes_of(item)
    return groups


def through(
    device: torch.device, before: ShardHome, after: ShardHome, groups: Sequence[Sequence[Key]]
) -> Generator[Values]:
    """Yields the tensors of each group of ``before`` on ``device``.  Writes them to ``after``, as the caller
    has changed them, with their digests.

    The dictionary of a group is emptied once its tensors were written, so the device has at most ``GROUPS``
    groups.  Nothing is in flight any more when the generator ends or is closed.  Raises :class:`StateDamaged`
    after the last group if the bytes of a file are not those that were written there; then ``after`` must not
    be used.
    """
    way: _Direction = (
        _Threads(device) if before.folder else _Streams(device) if device.type == "cuda" else _OnHost()
    )
    coming = [way.load(before, keys) for keys in groups[:1]]
    going = deque[tuple[Values, Callable[[], None]]]()
    try:
        for following in (*groups[1:], ()):
            values = coming.pop()()
            while len(going) > GROUPS - 2:
                written, gone = going.popleft()
                gone()
                written.clear()
            coming.append(way.load(before, following))
            yield values
            going.append((values, way.store(after, values)))
        if wrong := way.wrong():
            raise StateDamaged(_told(before.folder, wrong))
    finally:
        way.finish()


def _told(folder: str, wrong: Sequence[Key]) -> str:
    kind, name = wrong[0]
    return (
        f"state in files of {folder} on {platform.node()}: the bytes that were read differ from those "
        f"that were written (first in {kind} {name!r}); this worker ends, and its state is restored "
        "from copies or the bucket; look for errors of this disk in the kernel's log, and set "
        "offload_folder to another disk if this happens again"
    )


def put(home: ShardHome, key: Key, value: torch.Tensor) -> None:
    """Writes a tensor, which may be on a device, and its digests."""
    home.values[key].copy_(value)
    home.sums[home.blocks[key]] = digests(value).to(home.sums.device)
    home.let_go(key)


def fetch(home: ShardHome, key: Key, device: torch.device) -> torch.Tensor:
    """Returns a tensor of a slot for use on ``device``; it may be the slot's own memory.  For a slot in
    memory, it does not wait for the device.

    Raises :class:`StateDamaged` if the slot is in a file and the bytes are not those that were written there.
    """
    if not home.folder:
        return home.values[key].to(device, non_blocking=True)
    value = home.values[key].clone()  # a clone, because a mapped file may be read anew at each use
    home.let_go(key)
    if not torch.equal(digests(value), home.sums[home.blocks[key]]):
        raise StateDamaged(_told(home.folder, [key]))
    return value.to(device)


def look_at(home: ShardHome, key: Key) -> None:
    """Raises :class:`StateDamaged` if a tensor is in a file and its bytes there are not those that were
    written.
    """
    if home.folder:
        sound = torch.equal(digests(home.values[key]), home.sums[home.blocks[key]])
        home.let_go(key)
        if not sound:
            raise StateDamaged(_told(home.folder, [key]))


class Moments(Mapping[str, torch.Tensor]):
    """The moments of a parameter that lives in a slot.  Each is fetched when it is used, because it may be in
    a file.
    """

    def __init__(self, home: ShardHome, name: str, kinds: Iterable[str], device: torch.device) -> None:
        self._home, self._name, self._kinds, self._device = home, name, tuple(kinds), device

    def __getitem__(self, kind: str) -> torch.Tensor:
        return fetch(self._home, (f"moment.{kind}", self._name), self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)


class _Direction(Protocol):
    def load(self, home: ShardHome, keys: Sequence[Key]) -> Callable[[], Values]:
        """Begins to load tensors to the device.  Returns a call that returns the tensors, for work on the
        present stream.
        """

    def store(self, home: ShardHome, values: Values) -> Callable[[], None]:
        """Begins to write tensors, after the work on the present stream.  Returns a call that waits for the
        writing.
        """

    def wrong(self) -> list[Key]:
        """Returns the loaded tensors whose bytes are not those that were written.  Only files are looked at."""

    def finish(self) -> None:
        """Waits for everything that was begun."""


class _OnHost:
    """The way between a slot in memory and the CPU."""

    def load(self, home: ShardHome, keys: Sequence[Key]) -> Callable[[], Values]:
        values = {key: home.values[key].clone() for key in keys}
        return lambda: values

    def store(self, home: ShardHome, values: Values) -> Callable[[], None]:
        for key, value in values.items():
            put(home, key, value)
        return lambda: None

    def wrong(self) -> list[Key]:
        return []

    def finish(self) -> None:
        """Returns at once."""


class _Threads:
    """The way between files and any device: one thread reads a group while another one writes the previous
    group.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._under_way: set[Future[Any]] = set()
        """The calls that nobody has waited for; the results of the others are not kept."""
        self._one_writes = Lock()
        self._differ = dict[Key, torch.Tensor]()
        """Maps each loaded tensor to a flag on the device: whether its digests differ from those that were
        written.
        """

    def load(self, home: ShardHome, keys: Sequence[Key]) -> Callable[[], Values]:
        return self._begin(partial(self._read, home, keys), "offload in")

    def store(self, home: ShardHome, values: Values) -> Callable[[], None]:
        computed = (
            torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        )
        return self._begin(partial(self._write, home, values, computed), "offload out")

    def wrong(self) -> list[Key]:
        with self._stream("offload in"):
            verdicts = torch.stack([*self._differ.values()]).tolist() if self._differ else []
        return [key for key, differs in zip(self._differ, verdicts, strict=True) if differs]

    def finish(self) -> None:
        errors = [error for each in self._under_way if (error := each.exception())]
        self._under_way.clear()
        if errors:
            raise errors[0]

    def _begin(self, call: Callable[[], T], name: str) -> Callable[[], T]:
        future = in_background(call, name)
        self._under_way.add(future)

        def ended() -> T:
            self._under_way.discard(future)
            return future.result()

        return ended

    @torch.no_grad()
    def _read(self, home: ShardHome, keys: Sequence[Key]) -> Values:
        values = Values()
        with self._stream("offload in"):
            for key in keys:
                values[key] = home.values[key].to(self.device, copy=True)
                found = digests(values[key])
                # this copy waits for ``digests``: after it, an update may change the tensor
                written = home.sums[home.blocks[key]].to(self.device)
                self._differ[key] = (found != written).any()
                home.let_go(key)
        return values

    @torch.no_grad()
    def _write(self, home: ShardHome, values: Values, computed: torch.cuda.Event | None) -> None:
        with self._one_writes, self._stream("offload out"):
            if computed is not None:
                computed.wait()
            for key, value in values.items():
                put(home, key, value)

    def _stream(self, purpose: str) -> AbstractContextManager[object]:
        return (
            torch.cuda.stream(stream(purpose, self.device)) if self.device.type == "cuda" else nullcontext()
        )


class _Streams:
    """The way between a slot in memory and an accelerator.

    Device memory is given back to torch only once the host has seen that its tensor was written: torch does
    not know that other streams use it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._in, self._out = device, stream("offload in", device), stream("offload out", device)

    def load(self, home: ShardHome, keys: Sequence[Key]) -> Callable[[], Values]:
        with torch.cuda.stream(self._in):
            values = {key: home.values[key].to(self.device, non_blocking=True) for key in keys}
            came = self._in.record_event()

        def arrive() -> Values:
            torch.cuda.current_stream(self.device).wait_event(came)
            return values

        return arrive

    def store(self, home: ShardHome, values: Values) -> Callable[[], None]:
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

    def wrong(self) -> list[Key]:
        return []

    def finish(self) -> None:
        for each in (torch.cuda.current_stream(self.device), self._in, self._out):
            wait_for(each.record_event())
