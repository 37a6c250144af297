"""Brings bytes of host memory into a shard, and takes the digest of each block where it arrives.

Copies from unpinned memory to a device reach a third of the possible speed.  So unpinned bytes are first
copied to stages of pinned memory, and go on from there on a stream of their own.  Several stages are filled
at once, since a single thread maps and copies another process's memory at 6 GB/s only.  Bytes that are
already pinned in one piece skip the stages; bytes from a wire are received straight into a stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

from elastic.engine.streams import stream
from elastic.state.digest import digests
from elastic.state.wire import Wire
from storage.background import in_background

STAGE = 2**24
"""Bytes of one piece, and of the stage that holds it."""
STAGES = 8
"""Number of stages of one staging stream, which limits how many pieces are being filled or are on their way
to the device at once.
"""
STREAMS = 2
"""Number of staging streams of one worker: with two, pinned memory arrives at bus speed while other memory is
being staged or received.
"""


@dataclass(frozen=True)
class Coming:
    """The next ``bytes`` bytes on ``wire``.  They go into memory that is reused, because new memory costs
    more than receiving them.
    """

    wire: Wire
    bytes: int

    def into(self, memory: torch.Tensor) -> torch.Tensor:
        """Receives the bytes into the beginning of ``memory`` (uint8, on the host), and returns that part of
        it.
        """
        here = memory[: self.bytes]
        self.wire.receive_into(memoryview(here.numpy()))  # type: ignore[arg-type]
        return here


@dataclass(frozen=True)
class StagedBlocks:
    """``raw`` is whole blocks on the host.  ``room`` (uint8, flat) is the memory that receives the bytes of
    ``raw`` from byte ``skip`` on, as many as fit.
    """

    room: torch.Tensor
    raw: torch.Tensor | Coming
    skip: int

    def land(self, here: torch.Tensor) -> torch.Tensor:
        """Copies the bytes of ``here`` from ``skip`` on into ``room``, and returns the digests of ``here``:
        this is ``raw``, brought to the device of ``room``.
        """
        self.room.copy_(here[self.skip : self.skip + len(self.room)])
        return digests(here)


class _Stage:
    """A piece of pinned memory, and an event that says when its content is on the device."""

    def __init__(self) -> None:
        self.memory, self.gone = torch.empty(STAGE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()

    def take(self, raw: torch.Tensor | Coming) -> torch.Tensor:
        self.gone.synchronize()
        return raw.into(self.memory) if isinstance(raw, Coming) else self.memory[: len(raw)].copy_(raw)

    def pass_by(self, raw: torch.Tensor) -> torch.Tensor:
        """Returns ``raw``, which is pinned already, once the stage is free, so that pinned pieces too are
        limited by the stages.
        """
        self.gone.synchronize()
        return raw


class StagingStream(AbstractContextManager["StagingStream"]):
    """Sends pieces to the device, for one thread.

    It begins after all work on the present stream, because until then that work may use the memory that this
    stream fills.
    """

    def __init__(
        self,
        device: torch.device,
        number: int = 0,
        cuts: Callable[[torch.Tensor], Collection[int]] = lambda memory: (),
    ) -> None:
        """``number`` tells apart the staging streams that this worker has open at the same time.  ``cuts``
        returns where pinned memory has borders over which no copy can go.
        """
        self._cuts = cuts
        self.device, self._stream = device, None
        self._host = torch.empty(STAGE, dtype=torch.uint8)
        self._waiting: deque[tuple[StagedBlocks, _Stage, Callable[[], torch.Tensor]]] = deque()
        if device.type == "cuda":
            self._stream = stream(f"staging {number}", device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._stages = deque(_Stage() for _ in range(STAGES))
        self._sums: list[torch.Tensor] = []

    @torch.no_grad()
    def send(self, piece: StagedBlocks) -> None:
        """Begins to send ``piece``, which is in its place once ``arrived`` has returned."""
        raw = piece.raw
        if self._stream is None or not piece.room.is_cuda:
            self._launch(0)  # the waiting pieces first: digests are in the order of the pieces
            self._sums.append(piece.land(raw.into(self._host) if isinstance(raw, Coming) else raw))
            return
        stage = self._stages[0]
        self._stages.rotate(-1)
        if isinstance(raw, Coming):
            here = stage.take(raw)  # received now, because later reads of the wire come after it
            self._waiting.append((piece, stage, lambda: here))
            self._launch(0)
            return
        ready = (
            partial(stage.pass_by, raw)
            if raw.is_pinned() and not self._cuts(raw)
            else in_background(partial(stage.take, raw), "staging").result
        )
        self._waiting.append((piece, stage, ready))
        self._launch(STAGES - 1)  # so the piece in the stage that is used next has been launched

    def _launch(self, left: int) -> None:
        """Sends pieces on to the device, in order, until only ``left`` of them still wait."""
        while len(self._waiting) > left:
            piece, stage, ready = self._waiting.popleft()
            here = ready()
            with torch.cuda.stream(self._stream):
                self._sums.append(piece.land(here.to(self.device, non_blocking=True)))
                stage.gone.record(self._stream)

    @torch.no_grad()
    def arrived(self) -> torch.Tensor:
        """Waits for all pieces that were sent; returns their digests in the same order, on the host."""
        self._launch(0)
        sums, self._sums = self._sums, []
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                there = torch.cat(
                    [each for each in sums if each.is_cuda]
                    or [torch.empty(0, dtype=torch.int64, device=self.device)]
                )
                parts = iter(there.cpu().split([len(each) for each in sums if each.is_cuda]))
                sums = [next(parts) if each.is_cuda else each for each in sums]
        return torch.cat([torch.empty(0, dtype=torch.int64), *sums])

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.synchronize()  # otherwise bytes could arrive in memory that has another use by then
