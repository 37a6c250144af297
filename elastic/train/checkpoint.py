"""Saving: every member writes its part of each checkpoint once, in the background, while the next step runs.

The part is copied aside at the step boundary; what is uploaded can therefore not change.  One save is in flight at a time, so memory
stays bounded: where the store does not keep up saves are left out, by all members the same (``Outcome.behind``), and steps go on.  Only
that of a stop, or of the last step, is never left out; it waits, aside, for the one before it.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from elastic.engine.world import World
from elastic.ids import Version, WorkerId
from elastic.plan.placement import written_by
from elastic.protocol.events import SaveFailed, ShardSaved
from elastic.runs import SavedShard
from elastic.train.faults import Faults
from elastic.train.model import State
from storage.checkpoints import Checkpoints, ShardReceipt
from storage.errors import StorageError
from storage.slices import Slice, Tensor

KEPT_REPORTS = 4
Report = Callable[..., None]
"""``report(event, shard=None)``: tell the coordinator; ``shard``: the :class:`SavedShard` of a ``ShardSaved``."""


@dataclass
class Snapshot:
    """This member's part of a checkpoint, copied to host memory."""

    version: Version
    name: str
    parts: list[tuple[Tensor, Slice, torch.Tensor]]
    state: tuple[Tensor, ...]
    """Every tensor there is: a checkpoint that lacks one is noticed."""


def snapshot(state: State) -> Snapshot:
    """Copy the slices that this member writes."""
    world, parts = state.world, []
    for tensor, box in written_by(state.tensors, world.layout, world.rank):
        value = state.shard.part(tensor, box.slice)
        parts.append((tensor, box.slice, value.detach().to("cpu", copy=True).contiguous()))
    return Snapshot(state.shard.version, f"shard-{world.rank:05d}-of-{world.size:05d}", parts, state.tensors)


class Saver:
    """Writes snapshots on a thread of its own (``threaded``) or at once; reports ``ShardSaved`` with the receipt."""

    def __init__(self, checkpoints: Checkpoints, worker: WorkerId, report: Report, faults: Faults, *, threaded: bool = True) -> None:
        self.checkpoints, self.worker, self.report, self.faults, self.threaded = checkpoints, worker, report, faults, threaded
        self.told: deque[tuple[ShardSaved | SaveFailed, SavedShard | None]] = deque(maxlen=KEPT_REPORTS)
        """The latest reports: what a manifest is made of dies with the coordinator that it was reported to."""
        self._thread: threading.Thread | None = None
        self._awaited: threading.Thread | None = None
        self._latest: Snapshot | None = None

    def save(self, state: State) -> None:
        """Begin to save the version that ``state`` holds, after the save before.  It waits for neither: a slow bucket is no hang."""
        taken = snapshot(state)
        if not self.threaded:
            self._write(taken, state.world)
            return
        self._latest = taken
        thread = threading.Thread(target=self._write_behind, args=(taken, state.world, self._thread), name="saver", daemon=True)
        thread.start()
        self._thread = thread

    def done(self, patience_s: float) -> bool:
        """Has the save before been written?  It is waited for, but only once."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(0.0 if thread is self._awaited else patience_s)
            self._awaited = thread
        return thread is None or not thread.is_alive()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write_behind(self, taken: Snapshot, world: World, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        latest = self._latest
        if latest is not None and latest is not taken and latest.version == taken.version:
            return  # the world was left meanwhile, and the next one writes the same in its own parts
        try:
            self._write(taken, world)
        except Exception as error:  # the end of a thread: who waits for this part must hear that it never comes
            traceback.print_exc()
            self._tell(
                SaveFailed(taken.version, f"{self.worker} could not write {taken.name}: {type(error).__name__}: {error}", world.generation)
            )

    def _write(self, taken: Snapshot, world: World) -> None:
        def between_slices() -> None:
            self.faults.strike("save", taken.version.step, world)

        try:
            receipt: ShardReceipt = self.checkpoints.write_shard(
                taken.version,
                taken.name,
                [(tensor, part, _raw(value)) for tensor, part, value in taken.parts],
                hook=between_slices,
                state=taken.state,
            )
        except (StorageError, OSError) as error:
            self._tell(SaveFailed(taken.version, f"{self.worker} could not write {taken.name}: {error}", world.generation))
        else:
            self._tell(ShardSaved(self.worker, taken.version, world.generation), SavedShard(world.generation, world.layout, receipt))

    def _tell(self, event: ShardSaved | SaveFailed, shard: SavedShard | None = None) -> None:
        self.told.append((event, shard))
        self.report(event, shard)


def _raw(value: torch.Tensor) -> memoryview:
    return memoryview(value.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
