"""Models the saves of a keeper, by the rules of ``state/uploads.py``.  Writing takes its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.ids import Version, WorkerId
from elastic.plan.placement import cell_of
from elastic.protocol.actions import Save
from elastic.protocol.copy_schedule import Copy
from elastic.protocol.events import SaveFailed, ShardSaved
from elastic.sim.memory import Slots, whole
from elastic.sim.violation import Violation

if TYPE_CHECKING:
    from elastic.sim.cluster import Cluster, Node

POLL_S = 0.3
"""Time in seconds after which a keeper looks again for a copy that is not complete."""


class Uploads:
    """The saves of one keeper, as long as it lives."""

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self.cluster, self.node = cluster, node
        self.number = (0, 0)
        self.saves: tuple[Save, ...] = ()
        self.generation, self.version = 0, Version(0, 0)
        self.told: dict[tuple[Save, WorkerId], ShardSaved | SaveFailed] = {}
        self._begun: set[tuple[Save, WorkerId]] = set()

    @property
    def lives(self) -> bool:
        return self.node.alive and self.node.keeper and self.node.uploads is self

    def obey(self, number: tuple[int, int], saves: tuple[Save, ...], generation: int, version: Version) -> None:
        """Takes the saves that are on their way from now on.  No other save that began by ``version`` of ``generation`` is."""
        if number <= self.number:
            return
        self.number, self.saves, self.generation, self.version = number, saves, generation, version
        for each in self.cluster.on(self.node.name):
            each.memory.heed(self)
        for save in saves:
            for worker, node in zip(save.members, save.nodes, strict=True):
                if node == self.node.name and (save, worker) in self.told:
                    self._say(save, worker, self.told[save, worker])
                elif node == self.node.name and (save, worker) not in self._begun:
                    self._begun.add((save, worker))
                    self._look(save, worker)

    def is_over(self, worker: WorkerId, version: Version) -> bool:
        """Returns whether the save of ``version``, which ``worker`` has begun, is in the bucket or given up."""
        if any(save.version == version and worker in save.members for save in self.saves):
            return False
        return version.generation < self.generation or version <= self.version

    def _look(self, save: Save, name: WorkerId) -> None:
        """Looks for the copy again and again, until it is complete or never will be."""
        if not self.lives or save not in self.saves:
            self._begun.discard((save, name))
            return
        worker = self.cluster.workers[name]
        copy = Copy(save.version, cell_of(save.layout, save.members.index(name)))
        slots = worker.memory.slots if worker.alive else self.node.shelf.left.get(name, [])
        if copy in whole(slots):
            self.cluster.sim.oracle.occasions["a dead worker's copy is saved"] += not worker.alive
            self._write(save, name, copy, slots)
        elif not worker.alive or worker.memory.generation > save.by:
            self._end(save, name, SaveFailed(save.version, f"{name} has no copy of it", save.by))
        else:
            self.cluster.clock.after(POLL_S, self._look, save, name)

    def _write(self, save: Save, name: WorkerId, copy: Copy, slots: Slots) -> None:
        self.cluster.clock.after(0.1 + 0.9 * self.cluster.rng.random(), self._written, save, name, copy, slots)

    def _written(self, save: Save, name: WorkerId, copy: Copy, slots: Slots) -> None:
        if not self.lives or save not in self.saves:
            self._begun.discard((save, name))
            return
        if copy not in whole(slots) and self._superseded(save, name):
            return self._end(save, name, SaveFailed(save.version, f"{name} was to save it again", save.by))
        if copy not in whole(slots):
            raise Violation(f"the copy of {save.version} of {name} was overwritten before it was in the bucket")
        if self.cluster.bucket_fails():
            return self._write(save, name, copy, slots)
        self.cluster.bucket.written(save.version, copy.cell, save.by)
        self._end(save, name, ShardSaved(name, save.version, save.by))

    def _superseded(self, save: Save, name: WorkerId) -> bool:
        """Returns whether the worker is in a later world, which saves the same version again."""
        memory = self.cluster.workers[name].memory
        begun = memory.copies.begun if memory.copies is not None else None
        return memory.generation > save.by and begun is not None and begun.version == save.version

    def _end(self, save: Save, name: WorkerId, event: ShardSaved | SaveFailed) -> None:
        self.told[save, name] = event
        self._say(save, name, event)

    def _say(self, save: Save, name: WorkerId, event: ShardSaved | SaveFailed) -> None:
        self.cluster.say_surely(self.node.name, event)
