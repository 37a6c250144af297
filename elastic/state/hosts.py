"""Heals a shard from host memory: reads the slices that the plan takes from keepers, and checks their digests
where they arrive.

A copy on this node is read in place; a copy on another node comes over a direct socket.  Both are read in
whole blocks, because a digest covers one block.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from elastic.errors import CopyLost, StateMissing, WireError
from elastic.ids import Cell, NodeId, WorkerId
from elastic.plan.placement import held
from elastic.plan.transfer import Holding, Move
from elastic.protocol.copy_schedule import Copy
from elastic.protocol.plan import Plan
from elastic.state.keeper_store import request
from elastic.state.region import BLOCK, WORD, Frame, Region, frame
from elastic.state.shard import Shard, place_of
from elastic.state.staging import STAGE, Coming, StagedBlocks, StagingStream
from elastic.state.wire import Wire
from storage.background import in_background
from storage.slices import Slice, Tensor, nbytes

TURN = 2**30
"""Bytes of a copy that one staging stream reads in one turn, rounded up to a whole slice.  Another stream may
read the next turn of that copy.
"""


@dataclass(frozen=True)
class Range:
    """The whole blocks of a slot that contain the memory of ``slice``.

    The slice begins ``skip`` bytes after the beginning of these blocks, and spans ``span`` bytes from its
    first to its last element.  ``memory`` is the shape of the tensor in the copy's memory.  If ``slice`` is
    not contiguous there, the bytes between its elements are read too.
    """

    tensor: Tensor
    slice: Slice
    memory: tuple[int, ...]
    offset: int
    bytes: int
    block: int
    blocks: int
    skip: int
    span: int


Chunk = tuple[Range, torch.Tensor, torch.Tensor | Wire]
"""One range as it was read: the range, its digests (int64 [blocks]) and its bytes (uint8 [bytes]), both on
the host.

In place of the bytes there may be the wire on which they come next.
"""


@dataclass(frozen=True)
class Access:
    """The means by which ``worker`` reads the copies of keepers: the run's secret, and its own region, whose
    memory is pinned here.
    """

    worker: WorkerId
    secret: bytes
    own: Region | None = None


def read(
    shard: Shard,
    tensors: Sequence[Tensor],
    plan: Plan,
    access: Access,
    moves: Sequence[Move],
    streams: Sequence[StagingStream],
    hook: Callable[[], None],
) -> int:
    """Fills the parts of ``shard`` that ``moves`` take from keepers, and returns the bytes used.

    One thread reads for each of ``streams``.  The copies are read in turns of about ``TURN`` bytes.  ``hook``
    is called before each turn and between two pieces.  Raises :class:`CopyLost`; after any exception no
    thread writes to ``shard`` any more.
    """
    turns = iter(_turns(tensors, plan, access.worker, moves))
    failed = threading.Event()

    def between() -> None:
        if failed.is_set():
            raise _Over
        hook()

    @torch.no_grad()
    def drain(staging_stream: StagingStream) -> int:
        """Reads the next turn that no other thread has taken, until none is left; returns the bytes used."""
        used = 0
        with contextlib.ExitStack() as otherwise:
            otherwise.callback(failed.set)
            for holding, ranges in turns:
                between()
                used += _read_one(shard, plan, access, holding, ranges, staging_stream, between)
            otherwise.pop_all()
        return used

    readers: list[Future[int]] = []
    try:
        for staging_stream in streams:
            readers.append(in_background(partial(drain, staging_stream), "copies"))
    except RuntimeError:  # the system gives no more threads
        failed.set()
        raise
    finally:
        wait(readers)
    _raise_what_failed(plan, access, [error for reader in readers if (error := reader.exception())])
    return sum(reader.result() for reader in readers)


def _turns(
    tensors: Sequence[Tensor], plan: Plan, worker: WorkerId, moves: Sequence[Move]
) -> list[tuple[Holding, list[Range]]]:
    """Returns the turns of ``worker`` in reading order: the first turn of every copy, then the second turn of
    every copy that has one, and so on.
    """
    by_name = {(tensor.kind, tensor.name): tensor for tensor in tensors}
    copies: dict[tuple[NodeId, WorkerId], list[Holding]] = defaultdict(list)
    for each in plan.holders:
        copies[each.keeper, each.worker].append(each)

    @cache
    def frame_of(cell: Cell) -> Frame:
        return frame(tensors, cell)

    turns: dict[tuple[int, Holding], list[Range]] = defaultdict(list)
    asked: dict[Holding, int] = defaultdict(int)
    for move in moves:
        if move.keeper and move.destination == worker and move.slice.count:
            tensor = by_name[move.slice.kind, move.slice.name]
            holding = _holding(copies[move.keeper, move.source], move, tensor)
            part = _range(tensor, move.slice, holding, frame_of(holding.cell))
            turns[asked[holding] // TURN, holding].append(part)
            asked[holding] += part.bytes
    order = sorted(turns, key=lambda each: (each[0], each[1].keeper, each[1].worker, each[1].cell))
    return [(turn[1], turns[turn]) for turn in order]


def _raise_what_failed(plan: Plan, access: Access, errors: Sequence[BaseException]) -> None:
    """Raises the most useful of ``errors``, if there is any: a damaged or lost copy before others, because
    the next plan has to know of it.

    Tells the keeper of each damaged copy; by now no thread reads that copy any more.
    """
    damaged = [error for error in errors if isinstance(error, _DamagedCopy)]
    for error in damaged:
        _tell(plan, access, error.holding)
    if damaged:
        raise CopyLost(str(damaged[0]), damaged[0].holding.keeper)
    if errors:
        raise min(errors, key=lambda error: (not isinstance(error, CopyLost), isinstance(error, _Over)))


def _tell(plan: Plan, access: Access, damaged: Holding) -> None:
    """Tells the keeper of a damaged copy, so that the copy no longer counts.

    If the keeper cannot be reached, the coordinator learns of the copy from the error and avoids it.
    """
    with (
        contextlib.suppress(WireError),
        contextlib.closing(Wire.connect(dict(plan.hosts)[damaged.keeper], access.secret)) as wire,
    ):
        wire.send(_request("damaged", damaged))
        wire.head()


def _read_one(
    shard: Shard,
    plan: Plan,
    access: Access,
    holding: Holding,
    ranges: Sequence[Range],
    staging_stream: StagingStream,
    hook: Callable[[], None],
) -> int:
    """Reads one turn, the ``ranges`` of one copy, and returns the bytes used."""
    where = f"the copy of {holding.worker} on node {holding.keeper[:8]}"
    try:
        wire = Wire.connect(dict(plan.hosts)[holding.keeper], access.secret)
    except WireError as error:
        raise CopyLost(f"{where} cannot be reached: {error}", holding.keeper) from error
    try:
        own = access.own if holding.worker == access.worker else None
        near = holding.keeper == plan.nodes[plan.world_rank(access.worker)]
        chunks, still = _local(wire, holding, ranges, own) if near else _remote(wire, holding, ranges)
        used, right = _fill(shard, chunks, staging_stream, hook)
        if not still():
            raise StateMissing("a newer copy has overwritten it during the transfer")
        if not right:
            raise _DamagedCopy(
                f"{where}, of {holding.version}, is damaged: its bytes do not match their digests", holding
            )
        return used
    except (WireError, StateMissing, OSError) as error:
        raise CopyLost(f"{where} cannot be read: {error}", holding.keeper) from error
    finally:
        wire.close()


class _DamagedCopy(Exception):
    """Bytes of ``holding`` do not match their digest."""

    def __init__(self, sentence: str, holding: Holding) -> None:
        super().__init__(sentence)
        self.holding = holding


class _Over(Exception):
    """Another staging stream has failed, and with it the healing."""


def _fill(
    shard: Shard, chunks: Iterator[Chunk], staging_stream: StagingStream, hook: Callable[[], None]
) -> tuple[int, bool]:
    """Copies ``chunks`` into ``shard``; returns the bytes used, and whether all blocks match their digests."""
    used, sums = 0, [torch.empty(0, dtype=torch.int64)]
    scattered: list[tuple[Range, torch.Tensor, torch.Tensor]] = []
    for chunk in chunks:
        part = chunk[0]
        value = shard.part(part.tensor, part.slice)
        if part.span == value.nbytes and value.is_contiguous():
            room = value.reshape(-1).view(torch.uint8)
        else:
            room = torch.empty(part.span, dtype=torch.uint8, device=value.device)
            scattered.append((part, room, value))
        for piece in _pieces(room, chunk):
            staging_stream.send(piece)
            hook()
        used += value.nbytes
        sums.append(chunk[1].clone())
        shard.let_go((part.tensor.kind, part.tensor.name))
    right = torch.equal(staging_stream.arrived(), torch.cat(sums))
    for part, room, value in scattered if right else ():
        value.copy_(_gathered(part, room, value))
    return used, right


def _gathered(part: Range, room: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a slice as a view of ``room``, which has the copy's memory from the first to the last element
    of the slice.
    """
    steps = [1]
    for length in reversed(part.memory[1:]):
        steps.insert(0, steps[0] * length)
    return room.view(like.dtype).as_strided(like.shape, steps)


def _pieces(room: torch.Tensor, chunk: Chunk) -> Iterator[StagedBlocks]:
    part, _, raw = chunk
    for first in range(0, part.bytes, STAGE):
        last = min(first + STAGE, part.bytes)
        begin, end = max(first, part.skip), min(last, part.skip + len(room))
        here = Coming(raw, last - first) if isinstance(raw, Wire) else raw[first:last]
        yield StagedBlocks(room[begin - part.skip : end - part.skip], here, begin - first)


Answer = tuple[Iterator[Chunk], Callable[[], bool]]
"""The requested chunks, and a function to call after the last chunk was used, which returns whether the copy
is still there.
"""


def _local(wire: Wire, holding: Holding, ranges: Sequence[Range], own: Region | None) -> Answer:
    """Reads a copy of this node from its keeper's memory, in place."""
    wire.send(_request("where", holding))
    answer = wire.head()
    if answer["descriptor"] < 0:
        raise StateMissing("it is not there any more")
    region = own or Region.of_process(answer["pid"], answer["descriptor"])
    slot = region.find(_copy(holding))
    if slot is None:
        raise StateMissing("a newer copy has overwritten it")
    data = torch.frombuffer(region.data(slot), dtype=torch.uint8)
    sums = torch.frombuffer(region.digests(slot), dtype=torch.int64)

    def chunks() -> Iterator[Chunk]:
        for part in ranges:
            yield (
                part,
                sums[part.block : part.block + part.blocks],
                data[part.offset : part.offset + part.bytes],
            )
            region.let_go(region.data_at(slot) + part.offset, region.data_at(slot) + part.offset + part.bytes)

    return chunks(), lambda: region.find(_copy(holding)) == slot


def _remote(wire: Wire, holding: Holding, ranges: Sequence[Range]) -> Answer:
    """Reads a copy of another node over the wire, in the order of ``ranges``."""
    wire.send(
        _request("read", holding)
        | {"ranges": [[part.offset, part.bytes, part.block, part.blocks] for part in ranges]}
    )
    if not wire.head()["found"]:
        raise StateMissing("it is not there any more")

    def chunks() -> Iterator[Chunk]:
        for part in ranges:
            yield part, torch.frombuffer(wire.receive(part.blocks * WORD), dtype=torch.int64), wire

    return chunks(), lambda: bool(wire.head()["still"])


def _request(ask: str, holding: Holding) -> dict[str, Any]:
    return {"ask": ask} | request(holding.worker, _copy(holding))


def _copy(holding: Holding) -> Copy:
    return Copy(holding.version, holding.cell)


def _holding(copies: Sequence[Holding], move: Move, tensor: Tensor) -> Holding:
    """Returns the one of ``copies`` that has the slice of ``move``: a worker may have left two copies, of two
    layouts.  Raises :class:`StateMissing`.
    """
    for holding in copies:
        if place_of(tensor, holding.cell, move.slice) is not None:
            return holding
    raise StateMissing(
        f"the plan takes {move.slice} from the copy of {move.source}, which does not hold this slice"
    )


def _range(tensor: Tensor, part: Slice, holding: Holding, shape: Frame) -> Range:
    place, memory, at = (
        shape.places[tensor],
        held(tensor, holding.cell).shape,
        place_of(tensor, holding.cell, part),
    )
    assert at is not None, f"{holding} does not have {part}"
    item = nbytes(tensor, part) // part.count
    first_byte = item * _flat(at, memory)
    last_byte = item * (
        _flat(tuple(begin + size - 1 for begin, size in zip(at, part.shape, strict=True)), memory) + 1
    )
    first, last = first_byte // BLOCK, -(-last_byte // BLOCK)
    begin, end = first * BLOCK, min(last * BLOCK, place.bytes)
    return Range(
        tensor,
        part,
        memory,
        offset=place.offset + begin,
        bytes=end - begin,
        block=place.first_block + first,
        blocks=last - first,
        skip=first_byte - begin,
        span=last_byte - first_byte,
    )


def _flat(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Returns the number of the element at ``index`` in row-major memory of ``shape``."""
    found = 0
    for at, length in zip(index, shape, strict=True):
        found = found * length + at
    return found
