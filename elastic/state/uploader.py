"""A process of the keeper that brings saves from the slots of its node's workers to the bucket.

    uploader BUCKET RUN      a line of JSON on stdin for each part to write or to give up, one on stdout for each that goes on or has ended

The uploader is a process of its own, so that hashing and sending never hold up the keeper's beats.  It maps
the memory that the keeper has open, so no byte is copied, and a worker that dies does not matter.  Each block
of a slot must have the digest that it got on the worker's device.  That is checked after the hashes of the
file were taken and before a tensor's first byte goes out, so a file with right hashes never holds bytes that
memory has corrupted.  When the keeper ends, so does this process, because nobody waits for its reports any
more.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, TextIO

import numpy as np

from elastic.errors import StateMissing
from elastic.ids import Version
from elastic.plan.axes import Box
from elastic.plan.layout import Layout
from elastic.plan.placement import cell_of, held, number_of_cells, written_by
from elastic.protocol.copy_schedule import Copy
from elastic.state.region import BLOCK, WORD, Frame, Region, TensorPlace, frame
from storage.checkpoints import Checkpoints, ShardReceipt
from storage.errors import Full, StorageError, Unavailable
from storage.objects import ObjectStore
from storage.slices import Tensor, nbytes

AT_ONCE = 4
"""Parts that one node writes at the same time: a single stream fills neither a fast link nor a node's cores.
"""

PROGRESS_S = 5.0
"""Least number of seconds between two reports that a part goes on: the keeper kills an uploader that reports
nothing for very long.
"""
NICE = 5
"""Added to the niceness of the process: where cores are few, the training comes first."""


@dataclass(frozen=True)
class SavePart:
    """One member's part of a save: the shard of world rank ``rank`` of ``layout`` at ``version``, in the
    region that process ``pid`` has open as ``descriptor``.
    """

    number: int
    pid: int
    descriptor: int
    version: Version
    layout: Layout
    rank: int

    @property
    def copy(self) -> Copy:
        """The copy of which the part is a piece."""
        return Copy(self.version, cell_of(self.layout, self.rank))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SavePart:
        return cls(
            **value | {"version": Version(**value["version"]), "layout": Layout.from_json(value["layout"])}
        )


class GivenUp(Exception):
    """The keeper has given up this part."""


def name_of(layout: Layout, rank: int) -> str:
    """Returns the name of the file that world rank ``rank`` of ``layout`` writes, without its ending."""
    return f"shard-{rank:05d}-of-{layout.world:05d}"


def upload(
    checkpoints: Checkpoints, region: Region, part: SavePart, given_up: Callable[[], bool] = lambda: False
) -> ShardReceipt:
    """Writes ``part`` from its slot in ``region`` and returns the receipt.

    Raises :class:`StateMissing` if the slot does not hold the copy, or holds it corrupted; :class:`GivenUp`;
    :class:`StorageError`.
    """
    copy, tensors = part.copy, region.tensors()
    slot, lies = region.find(copy), frame(tensors, copy.cell)
    if slot is None:
        raise StateMissing(f"the copy of {part.version} is not in its slot any more")
    data, checked = region.data(slot), list[bool]()

    def let_go(tensor: Tensor) -> None:
        first = region.data_at(slot) + lies.places[tensor].offset
        region.let_go(first, first + lies.places[tensor].bytes)

    def before_each_slice() -> None:
        if given_up():
            raise GivenUp
        if not checked:
            checked.append(True)
            check(region, slot, lies, let_go)

    parts = [
        (tensor, box.slice, _bytes_of(data, lies.places[tensor], tensor, box, held(tensor, copy.cell).shape))
        for tensor, box in written_by(tensors, part.layout, part.rank)
    ]
    receipt = checkpoints.write_shard(
        part.version, name_of(part.layout, part.rank), parts, before_each_slice, tensors, let_go
    )
    if region.find(copy) != slot:
        raise StateMissing(f"the copy of {part.version} was overwritten while it was written to the bucket")
    return receipt


def _bytes_of(
    data: memoryview, place: TensorPlace, tensor: Tensor, box: Box, shape: tuple[int, ...]
) -> memoryview:
    """Returns the bytes of ``box`` from a member's memory of ``tensor``, which has ``shape``; they are copied
    only if they are not contiguous.
    """
    item = nbytes(tensor, box.slice) // box.slice.count
    memory = np.frombuffer(data, dtype=np.uint8, count=place.bytes, offset=place.offset).reshape(*shape, item)
    piece = memory[tuple(slice(at, at + size) for at, size in zip(box.at, box.slice.shape, strict=True))]
    return np.ascontiguousarray(piece).reshape(-1).data


def check(
    region: Region, slot: int, lies: Frame, done: Callable[[Tensor], None] = lambda tensor: None
) -> None:
    """Raises :class:`StateMissing` unless every block in the slot has the digest that it was copied with.

    Calls ``done`` for each tensor that is checked.
    """
    data, digests = region.data(slot), region.digests(slot)
    for tensor, place in lies.places.items():
        expected = np.frombuffer(
            digests[place.first_block : place.first_block + place.blocks], dtype=np.int64
        )
        if not np.array_equal(_sums(data, place), expected):
            raise StateMissing(f"the copy of {tensor.kind} {tensor.name!r} in host memory is damaged")
        done(tensor)


def _sums(data: memoryview, place: TensorPlace) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the digests of a tensor's bytes as ``digest.digests`` takes them: the sum of each block's
    words, modulo 2^64.
    """
    raw = np.frombuffer(data, dtype=np.uint8, count=place.bytes, offset=place.offset)
    whole, rest = divmod(place.bytes, BLOCK)
    sums = raw[: whole * BLOCK].view(np.int64).reshape(whole, BLOCK // WORD).sum(axis=1)
    if not rest:
        return sums
    last = np.zeros(-(-rest // WORD) * WORD, dtype=np.uint8)
    last[:rest] = raw[whole * BLOCK :]
    return np.append(sums, last.view(np.int64).sum())


def digest_of_copy(region: Region, copy: Copy) -> str:
    """Returns one digest of all bytes of ``copy``, from the digests of its blocks, in which their order counts;
    "" if no slot holds the copy.  A single bit that differs always shows.
    """
    slot = region.find(copy)
    if slot is None:
        return ""
    sums = np.frombuffer(region.digests(slot), dtype=np.uint64)[: frame(region.tensors(), copy.cell).blocks]
    return f"{int((sums * np.arange(1, 2 * len(sums), 2, dtype=np.uint64)).sum(dtype=np.uint64)):016x}"


class Uploader:
    """Runs the process: reads requests, writes several parts at once, and reports the result of each."""

    def __init__(self, checkpoints: Checkpoints, out: TextIO) -> None:
        self.checkpoints, self.out = checkpoints, out
        self._given_up: set[int] = set()
        self._one_says = threading.Lock()
        self._said_at = -PROGRESS_S

    def serve(self, lines: TextIO) -> None:
        """Serves requests until the other end of ``lines`` is closed; uploads that are under way then are
        abandoned.
        """
        pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="upload")
        for line in lines:
            value = json.loads(line)
            if "give_up" in value:
                self._given_up.add(value["give_up"])
            else:
                pool.submit(self._write, SavePart.from_json(value))

    def _write(self, part: SavePart) -> None:
        try:
            region = Region.of_process(part.pid, part.descriptor)
            slices = count()
            alone = number_of_cells(part.layout) == part.layout.world
            digest = "" if alone else digest_of_copy(region, part.copy)
            receipt = upload(self.checkpoints, region, part, lambda: self._goes_on(part.number, next(slices)))
        except GivenUp:
            self._say(part.number, failed="this save was given up")
        except Unavailable as error:
            self._say(part.number, refused=str(error), full=isinstance(error, Full))
        except (StateMissing, StorageError, OSError) as error:
            self._say(part.number, failed=str(error))
        except Exception as error:  # the boundary of a thread: the keeper waits for a report of the part
            self._say(part.number, failed=f"{type(error).__name__}: {error}")
        else:
            self._say(part.number, receipt=receipt.to_json(), digest=digest)

    def _goes_on(self, number: int, slices: int) -> bool:
        """Reports to the keeper how many slices of a part are written: after the first slice, and otherwise
        at most every ``PROGRESS_S`` seconds.  Returns whether the part is given up.
        """
        if slices == 1 or time.monotonic() - self._said_at >= PROGRESS_S:
            self._said_at = time.monotonic()
            self._say(number, slices=slices)
        return number in self._given_up

    def _say(self, number: int, **what: str | int) -> None:
        with self._one_says:
            print(json.dumps({"number": number, **what}), file=self.out, flush=True)


def main(bucket: str, run: str) -> None:
    """Serves the keeper that started this process, until that keeper ends."""
    os.nice(NICE)
    out, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)  # whatever a library prints goes to the keeper's log, not among the answers
    Uploader(Checkpoints(ObjectStore.open(bucket), run), out).serve(sys.stdin)
    os._exit(0)
