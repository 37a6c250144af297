"""Bytes of host memory into a shard, each block's digest taken where it arrives.

A device takes what is not pinned at a third of the speed at which it could: so that is copied to stages of pinned memory, from where it
goes on a stream of its own.  Several at once, since a thread alone maps and copies another process's memory at 6 GB/s.  What is pinned
already goes straight; what comes over a wire is received where it is pinned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

from elastic.engine.streams import stream
from elastic.state.digest import digests
from elastic.state.wire import Wire
from storage.background import begin

STAGE = 2**24
"""Bytes of one piece."""
STAGES = 8
"""How many of a lane are copied to, or on their way to the device, at once."""
STREAMS = 2
"""Of one worker: what is pinned comes at the speed of the bus while other memory is still being staged or sent."""


@dataclass(frozen=True)
class Coming:
    """So many bytes, the next ones on ``wire``.  Memory that is used again and again takes them: new memory costs more than they do."""

    wire: Wire
    bytes: int

    def into(self, memory: torch.Tensor) -> torch.Tensor:
        """Receive them at the beginning of ``memory`` (uint8, on the host), which is returned."""
        here = memory[: self.bytes]
        self.wire.receive_into(memoryview(here.numpy()))  # type: ignore[arg-type]
        return here


@dataclass(frozen=True)
class Piece:
    """``raw``, whole blocks on the host, of which ``room`` (uint8, flat) gets what comes after the first ``skip`` bytes."""

    room: torch.Tensor
    raw: torch.Tensor | Coming
    skip: int

    def land(self, here: torch.Tensor) -> torch.Tensor:
        """``here``: ``raw``, where ``room`` is.  Returns its digests."""
        self.room.copy_(here[self.skip : self.skip + len(self.room)])
        return digests(here)


class _Stage:
    """A piece of pinned memory, and when what it holds is on the device."""

    def __init__(self) -> None:
        self.memory, self.gone = torch.empty(STAGE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()

    def take(self, raw: torch.Tensor | Coming) -> torch.Tensor:
        self.gone.synchronize()
        return raw.into(self.memory) if isinstance(raw, Coming) else self.memory[: len(raw)].copy_(raw)

    def pass_by(self, raw: torch.Tensor) -> torch.Tensor:
        """It is pinned already, and only waits for its turn."""
        self.gone.synchronize()
        return raw


class StagingStream(AbstractContextManager["StagingStream"]):
    """For one thread.  It begins after all that the present stream has to do: the memory that it fills may be in use until then."""

    def __init__(self, device: torch.device, number: int = 0) -> None:
        """``number``: of those that this worker has open at the same time."""
        self.device, self._stream = device, None
        self._host = torch.empty(STAGE, dtype=torch.uint8)
        self._waiting: deque[tuple[Piece, _Stage, Callable[[], torch.Tensor]]] = deque()
        if device.type == "cuda":
            self._stream = stream(f"lane {number}", device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._stages = deque(_Stage() for _ in range(STAGES))
        self._sums: list[torch.Tensor] = []

    @torch.no_grad()
    def send(self, piece: Piece) -> None:
        """Begin with ``piece``; it is there once ``arrived`` was called."""
        raw = piece.raw
        if self._stream is None or not piece.room.is_cuda:
            self._launch(0)  # digests are in the order of the pieces
            self._sums.append(piece.land(raw.into(self._host) if isinstance(raw, Coming) else raw))
            return
        stage = self._stages[0]
        self._stages.rotate(-1)
        if isinstance(raw, Coming):
            here = stage.take(raw)  # now: what is asked of the wire next comes after it
            self._waiting.append((piece, stage, lambda: here))
            self._launch(0)
            return
        ready = partial(stage.pass_by, raw) if raw.is_pinned() else begin(partial(stage.take, raw), "lane").result
        self._waiting.append((piece, stage, ready))
        self._launch(STAGES - 1)  # what the next stage held last is among them

    def _launch(self, left: int) -> None:
        """Send on to the device, in order, until only ``left`` pieces wait for being staged."""
        while len(self._waiting) > left:
            piece, stage, ready = self._waiting.popleft()
            here = ready()
            with torch.cuda.stream(self._stream):
                self._sums.append(piece.land(here.to(self.device, non_blocking=True)))
                stage.gone.record(self._stream)

    @torch.no_grad()
    def arrived(self) -> torch.Tensor:
        """Wait for all that was sent; the digests, in its order, on the host."""
        self._launch(0)
        sums, self._sums = self._sums, []
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                there = torch.cat([each for each in sums if each.is_cuda] or [torch.empty(0, dtype=torch.int64, device=self.device)])
                parts = iter(there.cpu().split([len(each) for each in sums if each.is_cuda]))
                sums = [next(parts) if each.is_cuda else each for each in sums]
        return torch.cat([torch.empty(0, dtype=torch.int64), *sums])

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.synchronize()  # nothing arrives in memory that somebody else may have by then
