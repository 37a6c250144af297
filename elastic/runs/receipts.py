"""The receipts of the shards of a checkpoint, from which its manifest is made."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.ids import Version, WorkerId
from elastic.plan.layout import Layout

KEPT = 4
"""Largest number of checkpoints whose receipts are kept: the newest one is being saved, and the manifest of
an older one may be asked for again.
"""


@dataclass(frozen=True)
class SavedShard:
    """The receipt of a shard, packed, which goes to the coordinator with ``ShardSaved``.

    A checkpoint consists of the shards of one generation, in that generation's layout.
    """

    generation: int
    layout: Layout
    receipt: bytes


class Parts:
    """The receipts of the newest checkpoints, from which their manifests are made, perhaps more than once."""

    def __init__(self) -> None:
        self._parts: dict[Version, dict[tuple[int, WorkerId], SavedShard]] = {}

    def add(self, version: Version, worker: WorkerId, shard: SavedShard) -> None:
        """Adds a receipt.  If there are too many checkpoints, drops the checkpoint that got no receipt for
        the longest time.

        That is not always the lowest version: the save of a higher version may have been given up.
        """
        known = self._parts.pop(version, {})
        known[shard.generation, worker] = shard
        self._parts[version] = known
        if len(self._parts) > KEPT:
            del self._parts[next(iter(self._parts))]

    def of(self, version: Version, generation: int) -> list[SavedShard]:
        """Returns the receipts that ``generation`` wrote; those of another generation may be incomplete.

        Raises :class:`KeyError` if there is no receipt.
        """
        written = [shard for shard in self._parts[version].values() if shard.generation == generation]
        if not written:
            raise KeyError(f"no part of {version} by generation {generation}")
        return written
