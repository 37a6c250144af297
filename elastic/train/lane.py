"""Bytes of host memory into a shard, each block's digest taken where it arrives.

A device takes what is not pinned at a third of the speed at which a thread copies it to memory that is: so this one copies through two
pieces of pinned memory in turn, on a stream of its own.  What is pinned already goes straight.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from elastic.copies.digest import digests
from elastic.engine.streams import stream

STAGE = 2**24
"""Bytes of one piece."""


@dataclass(frozen=True)
class Piece:
    """``raw``, whole blocks on the host, of which ``room`` (uint8, flat) gets what comes after the first ``skip`` bytes."""

    room: torch.Tensor
    raw: torch.Tensor
    skip: int

    def land(self, here: torch.Tensor) -> torch.Tensor:
        """``here``: ``raw``, where ``room`` is.  Returns its digests."""
        self.room.copy_(here[self.skip : self.skip + len(self.room)])
        return digests(here)


class Lane(AbstractContextManager["Lane"]):
    """For one thread.  It begins after all that the present stream has to do: the memory that it fills may be in use until then."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, None
        if device.type == "cuda":
            self._stream = stream("lane", device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._stages = [(torch.empty(STAGE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2)]
        self._sums: list[torch.Tensor] = []

    @torch.no_grad()
    def send(self, piece: Piece) -> None:
        """Begin with ``piece``; it is there once ``arrived`` was called."""
        if self._stream is None or not piece.room.is_cuda:
            self._sums.append(piece.land(piece.raw))
            return
        stage, gone = self._stages[0]
        self._stages.reverse()
        if piece.raw.is_pinned():
            stage = piece.raw
        else:
            gone.synchronize()
            stage = stage[: len(piece.raw)].copy_(piece.raw)
        with torch.cuda.stream(self._stream):
            self._sums.append(piece.land(stage.to(self.device, non_blocking=True)))
            gone.record(self._stream)

    def arrived(self) -> torch.Tensor:
        """Wait for all that was sent; the digests, in its order, on the host."""
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
