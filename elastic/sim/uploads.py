"""Models the uploads of a keeper, by the rules of ``protocol/uploads.py``.  Each part takes a drawn time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from elastic.ids import Version, WorkerId
from elastic.plan.placement import cell_of
from elastic.protocol import lineage, uploads
from elastic.protocol.actions import Save
from elastic.protocol.copy_schedule import Copy
from elastic.protocol.events import SaveFailed, ShardSaved
from elastic.sim.memory import Slot, Slots
from elastic.sim.violation import Violation

if TYPE_CHECKING:
    from elastic.sim.cluster import Cluster, Node

POLL_S = 0.3
"""Time in seconds after which a keeper looks again for a copy that is not complete."""
AGAIN_S = 1.0
"""Time in seconds after which a keeper tries again to write a part that the bucket has refused."""
SLOW, SLOW_S = 0.1, 30.0
"""Share of the parts that take long to write, and the longest time in seconds that they take."""


class Uploads:
    """The uploads of one keeper, as long as it lives."""

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self.cluster, self.node = cluster, node
        self.latest = uploads.Told()
        self.told: dict[tuple[Save, WorkerId], ShardSaved | SaveFailed] = {}
        self._begun: set[tuple[Save, WorkerId]] = set()
        self._refusals: Counter[tuple[Save, WorkerId]] = Counter()
        self._refused: dict[tuple[Save, WorkerId], bool] = {}
        """The parts that count as being written.  The value is True if the bucket has refused the part, and
        the coordinator was told this.
        """
        self.writing: set[tuple[Save, WorkerId]] = set()
        """The parts that the bucket really takes now, whatever the keeper reports."""

    @property
    def lives(self) -> bool:
        return self.node.alive and self.node.keeper and self.node.uploads is self

    def obey(
        self, number: tuple[int, int], saves: tuple[Save, ...], generation: int, version: Version
    ) -> None:
        """Takes the list of all saves under way, as of ``version`` of ``generation``.  Earlier saves that are
        not in the list are over.
        """
        if number <= self.latest.number:
            return
        self.latest = uploads.Told(number, saves, generation, version)
        self._refused = dict.fromkeys(self._refused, False)
        for each in self.cluster.on(self.node.name):
            each.memory.heed(self)
        for save in saves:
            for worker, node in zip(save.members, save.nodes, strict=True):
                if node == self.node.name and (save, worker) in self.told:
                    self._say(save, worker, self.told[save, worker])
                elif node == self.node.name and (save, worker) not in self._begun:
                    self._begun.add((save, worker))
                    self._look(save, worker)

    def _look(self, save: Save, name: WorkerId) -> None:
        """Looks for the copy again and again, until it is complete or can never be."""
        if not self.lives or save not in self.latest.saves:
            self._begun.discard((save, name))
            return
        worker = self.cluster.workers[name]
        copy = Copy(save.version, cell_of(save.layout, save.members.index(name)))
        slots = worker.memory.slots if worker.alive else self.node.shelf.left.get(name, [])
        place = next(
            (n for n, slot in enumerate(slots) if slot and slot.complete and slot.save and slot.copy == copy),
            None,
        )
        if place is not None and (found := slots[place]) is not None:
            self.cluster.sim.oracle.occasions["a dead worker's copy is saved"] += not worker.alive
            self._write(save, name, slots, place, found)
        elif why := uploads.hopeless(save, worker.memory.generation, ended=not worker.alive):
            self._end(save, name, SaveFailed(save.version, f"no part of {name}: {why}", save.by, again=False))
        else:
            self.cluster.clock.after(POLL_S, self._look, save, name)

    @property
    def uploading(self) -> tuple[Version, ...]:
        """The saves of which a part is being written, unless the bucket has just refused that part."""
        return tuple(
            dict.fromkeys(save.version for (save, _), refused in self._refused.items() if not refused)
        )

    def _write(self, save: Save, name: WorkerId, slots: Slots, place: int, slot: Slot) -> None:
        self._refused.setdefault((save, name), False)
        self.writing.add((save, name))
        longest_s = SLOW_S if self.cluster.rng.random() < SLOW else 0.9
        self.cluster.clock.after(
            0.1 + longest_s * self.cluster.rng.random(), self._written, save, name, slots, place, slot
        )

    def _is_over(self, save: Save, name: WorkerId) -> bool:
        """Returns whether the keeper no longer writes this part, and then forgets the part."""
        if self.lives and save in self.latest.saves:
            return False
        self._begun.discard((save, name))
        self._refused.pop((save, name), None)
        self.writing.discard((save, name))
        return True

    def _written(self, save: Save, name: WorkerId, slots: Slots, place: int, slot: Slot) -> None:
        """Ends the upload of a part.  Its slot may have been released meanwhile, but must not have been
        overwritten.
        """
        overwritten = slots[place] is not None and slots[place] is not slot
        if self._is_over(save, name):
            return
        if overwritten and self._superseded(save, name):
            return self._end(
                save, name, SaveFailed(save.version, f"{name} was to save it again", save.by, again=False)
            )
        if overwritten:
            raise Violation(
                f"the copy of {save.version} of {name} was overwritten before it was in the bucket"
            )
        if self.cluster.bucket_fails():
            return self._try_again(save, name, slots, place, slot)
        cell, bits, flips = cell_of(save.layout, save.members.index(name)), slot.bits, self.cluster.sim.flips
        self.cluster.bucket.written(save.version, cell, save.by)
        flips.written(save, cell, bits)
        self._end(save, name, ShardSaved(name, save.version, save.by, flips.digest(save, bits)))

    def _try_again(self, save: Save, name: WorkerId, slots: Slots, place: int, slot: Slot) -> None:
        self.writing.discard((save, name))
        if not self._refused[save, name]:
            self._refused[save, name] = True
            self._refusals[save, name] += 1
            self._say(
                save,
                name,
                SaveFailed(
                    save.version,
                    f"no part of {name} yet: store unavailable",
                    save.by,
                    again=True,
                    worker=name,
                ),
            )
        self.cluster.clock.after(AGAIN_S, self._write_again, save, name, slots, place, slot)

    def _write_again(self, save: Save, name: WorkerId, slots: Slots, place: int, slot: Slot) -> None:
        """Writes the part again.  If the bucket takes its first bytes, the part counts as being written,
        unless it was refused ``REFUSALS`` times before.
        """
        if self._is_over(save, name):
            return
        if self.cluster.bucket_fails():
            return self._try_again(save, name, slots, place, slot)
        self._refused[save, name] = self._refusals[save, name] >= uploads.REFUSALS
        self._write(save, name, slots, place, slot)

    def _superseded(self, save: Save, name: WorkerId) -> bool:
        """Returns whether the worker is in a later world, which saves the same version again or has given it
        up.
        """
        copies = self.cluster.workers[name].memory.copies
        if copies is None or copies.plan.generation <= save.by:
            return False
        again = copies.begun is not None and copies.begun.version == save.version
        return again or not lineage.contains(copies.plan.lineage, save.version)

    def _end(self, save: Save, name: WorkerId, event: ShardSaved | SaveFailed) -> None:
        self.told[save, name] = event
        self._refused.pop((save, name), None)
        self.writing.discard((save, name))
        self._say(save, name, event)

    def _say(self, save: Save, name: WorkerId, event: ShardSaved | SaveFailed) -> None:
        self.cluster.say_surely(self.node.name, event)
