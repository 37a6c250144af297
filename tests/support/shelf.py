"""The part of a keeper that holds the journal, as an actor whose process imports nothing else."""

from __future__ import annotations

from elastic.protocol.authority import Replica


class Shelf:
    """The part of a keeper that holds the journal."""

    def __init__(self) -> None:
        self.replica = Replica()

    def attach(self, incarnation: int) -> None:
        self.replica.heed(incarnation)

    def copy(self, incarnation: int, begin: int, at: int, data: bytes) -> int:
        return self.replica.copy(incarnation, begin, at, data)
