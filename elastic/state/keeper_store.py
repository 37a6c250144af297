"""The store of a keeper: the regions of its node's workers, dead or alive, and the copies that it keeps as
the buddy of other nodes.

A listener serves slots to workers that heal, and takes the copies that other keepers bring.  One thread
brings this node's copies to the buddy.  The store never looks into the bytes: the reader of a copy checks its
digests.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

from elastic.errors import WireError
from elastic.ids import Cell, NodeId, Version, WorkerId
from elastic.plan.copy_budget import BUDDY_SLOTS, amount
from elastic.plan.transfer import Holding
from elastic.protocol.copy_schedule import Copy, age
from elastic.state import compiled
from elastic.state.node_memory import reserve
from elastic.state.region import Region
from elastic.state.wire import Listener, Wire
from elastic.threads import keep_going

POLL_S = 0.02
"""Seconds between two looks for a copy that is due at the buddy."""
RETRY_S = 1.0
"""Seconds after a failed call to the buddy until the next call."""


class KeeperStore:
    """Holds the copies of one keeper and serves them to others.  It is thread-safe.

    ``host`` is the address at which other nodes reach this node; ``address`` is the address of the store's
    listener.
    """

    def __init__(
        self,
        node: NodeId,
        host: str,
        secret: bytes,
        say: Callable[[str], None] = print,
        folder: str = "",
        compiled_at: Path | None = None,
    ) -> None:
        """``say`` receives the sentences that belong in the keeper's log.  Copies of other nodes' workers are
        in files of ``folder``, if it is given.  ``compiled_at`` is the node's folder of compiled code.
        """
        self.node, self.secret, self.say, self.folder, self._compiled_at = (
            node,
            secret,
            say,
            folder,
            compiled_at,
        )
        self._lock = threading.Lock()
        self._own: dict[WorkerId, Region] = {}
        self._dead: set[WorkerId] = set()
        self._lacking: set[WorkerId] = set()
        """Workers for whose copies this node has no memory, as the log already says."""
        self._sent_s: dict[WorkerId, float] = {}
        """Seconds that it takes to bring a copy of each living worker to the buddy: an average in which the
        last copy counts for half.
        """
        self._others: dict[WorkerId, Region] = {}
        """Copies of the shards of other nodes' workers."""
        self.saves: Collection[tuple[WorkerId, Copy]] = ()
        """The copies of this node's workers for the saves under way, as far as this keeper was told."""
        self._coming: dict[WorkerId, set[int]] = defaultdict(set)
        """The slots of each worker's region in ``_others`` into which a copy is being received."""
        self._buddy = ""
        """Address of the buddy's listener; "" while there is no buddy."""
        self._closed = threading.Event()
        self._listener = Listener(host, secret, self._serve, say)
        self.address = self._listener.address
        keep_going(self._bring, "buddy", say)

    def adopt(self, worker: WorkerId, pid: int, descriptor: int) -> None:
        """Opens the region of a living worker and keeps it.  Raises :class:`StateMissing` or OSError if it
        cannot be opened.
        """
        region = Region.of_process(pid, descriptor)
        region["keeper"] = os.getpid()
        with self._lock:
            region["brought"] = 0  # an earlier keeper may have had another buddy
            self._own[worker] = region
            self._dead.discard(worker)

    def ended(self, worker: WorkerId) -> None:
        """Notes that ``worker`` is dead, and gives back the memory of each of its slots that no reader will
        need.

        Such a slot holds no complete copy, or a copy that another dead worker has left on this node too and
        that belongs to no save under way.  So several deaths in a row do not fill the node: it keeps only one
        of equal copies.
        """
        with self._lock:
            if worker not in self._own or worker in self._dead:
                return
            left, region = (
                {copy for other in self._dead for copy in self._own[other].all_held() if copy},
                self._own[worker],
            )
            saves = {copy for of, copy in self.saves if of == worker}
            # this keeper may not have been told of the newest save yet
            if region.saving and (newest := region.copy("save")):
                saves.add(newest)
            for slot, copy in enumerate(region.all_held()):
                if copy is None or copy in left - saves:
                    region.begin(slot)
                    region.give_back(slot)
            region["wanted"] = 0
            self._dead.add(worker)
            self._sent_s.pop(worker, None)

    def say_who_lacks_memory(self) -> None:
        """Logs once that a worker of this node finds no memory for a copy, and once that it finds memory
        again.
        """
        for worker, region in self.regions():
            lacking = region["lacking"]
            if lacking and worker not in self._lacking:
                self._lacking.add(worker)
                self.say(
                    f"this node lacks {amount(lacking)} of memory for a copy of {worker}: training "
                    "goes on without copies"
                )
            elif not lacking and worker in self._lacking:
                self._lacking.discard(worker)
                self.say(f"this node has memory for copies of {worker} again")

    def regions(self) -> list[tuple[WorkerId, Region]]:
        """Returns the regions of this node's workers, dead or alive."""
        with self._lock:
            return list(self._own.items())

    def region(self, worker: WorkerId) -> tuple[Region | None, bool]:
        """Returns the region of one of this node's workers (None if the store has none), and whether the
        worker has ended.
        """
        with self._lock:
            return self._own.get(worker), worker in self._dead

    def forget(self, worker: WorkerId) -> None:
        """Frees the region that a dead worker has left."""
        with self._lock:
            if worker in self._dead:
                self._dead.remove(worker)
                del self._own[worker]

    def held(self) -> tuple[Holding, ...]:
        """Returns a holding for every complete copy."""
        with self._lock:
            regions = [*self._own.items(), *self._others.items()]
            copies = {(worker, copy) for worker, region in regions for copy in region.all_held() if copy}
        found = (Holding(worker, copy.version, copy.cell, self.node) for worker, copy in copies)
        return tuple(sorted(found, key=lambda each: (each.worker, each.version, each.cell)))

    def release(self, copied: Version, buddied: Version) -> None:
        """Frees the regions that newer copies have made useless.

        The version ``copied`` is complete on all keepers of the present world; the version ``buddied`` is
        also complete at their buddies.  The region of a dead worker is freed if all its copies are older than
        both; the region of a worker on another node is freed if all its copies are older than ``buddied``.
        """
        with self._lock:
            for worker in sorted(self._dead):
                if _outlived(self._own[worker], min(age(copied), age(buddied))):
                    del self._own[worker]
                    self._dead.remove(worker)
            for worker in sorted(self._others):
                if not self._coming[worker] and _outlived(self._others[worker], age(buddied)):
                    del self._others[worker]

    def pair(self, buddy: str) -> None:
        """Makes the keeper at ``buddy`` the receiver of this node's copies; "" means no receiver.  A new
        buddy has none of these copies yet.
        """
        with self._lock:
            if buddy != self._buddy:
                self._buddy = buddy
                for region in self._own.values():
                    region["brought"] = 0

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        with self._lock:
            self._own, self._others = {}, {}

    # ---- answers

    def _serve(self, wire: Wire, head: dict[str, Any]) -> None:
        if head["ask"] == compiled.ASK:
            return compiled.serve(wire, self._compiled_at, head, self.secret)
        worker = WorkerId(head["worker"])
        match head["ask"]:
            case "where":
                found = self._find(worker, head)
                wire.send({"pid": os.getpid(), "descriptor": found[0].descriptor if found else -1})
            case "read":
                self._read(wire, worker, head)
            case "damaged":
                self._damaged(worker, head)
                wire.send({})
            case "bring":
                self._take(wire, worker, head)

    def _find(self, worker: WorkerId, head: dict[str, Any]) -> tuple[Region, int] | None:
        """Returns the region and the slot that hold the copy which ``head`` names, or None."""
        wanted = _wanted(head)
        with self._lock:
            there = [regions[worker] for regions in (self._own, self._others) if worker in regions]
            # another dead worker may have it: of equal copies, ``ended`` keeps only one
            there += [self._own[other] for other in sorted(self._dead - {worker})]
        return next(((region, slot) for region in there if (slot := region.find(wanted)) is not None), None)

    def _read(self, wire: Wire, worker: WorkerId, head: dict[str, Any]) -> None:
        """Sends the digests of each range, then its bytes, and at the end whether the slot still holds the
        same copy.
        """
        found = self._find(worker, head)
        wire.send({"found": found is not None})
        if found is None:
            return
        region, slot = found
        digests = region.digests(slot)
        for offset, size, block, blocks in head["ranges"]:
            wire.send_raw(
                chain([digests[block : block + blocks].cast("B")], region.pieces(slot, offset, size))
            )
        wire.send({"still": region.find(_wanted(head)) == slot})

    def _damaged(self, worker: WorkerId, head: dict[str, Any]) -> None:
        """Empties the slot of a copy in which a reader found bytes that do not match their digest."""
        if found := self._find(worker, head):
            region, slot = found
            self.say(f"the copy of {worker} at {_wanted(head).version} is damaged")
            region.begin(slot)

    def _take(self, wire: Wire, worker: WorkerId, head: dict[str, Any]) -> None:
        """Receives a copy from another keeper.

        Several copies may come at once, each into a slot of its own.
        """
        copy = _wanted(head)
        region, slot = self._slot_for(worker, head)
        try:
            region.begin(slot)
            region.give_back(slot, head["bytes"])
            if why := reserve(region, slot, head["bytes"]):
                self.say(f"this node has no memory for a copy of {worker} of another node: {why}")
                raise WireError(f"no memory for a copy of {worker}")
            wire.receive_into(region.digests(slot)[: head["blocks"]].cast("B"))
            for piece in region.pieces(slot, 0, head["bytes"]):
                wire.receive_into(piece)
            if complete := bool(wire.head()["still"]):
                region.finish(slot, copy, head["bytes"])
        finally:
            with self._lock:
                self._coming[worker].discard(slot)
        wire.send({"taken": complete})

    def _slot_for(self, worker: WorkerId, head: dict[str, Any]) -> tuple[Region, int]:
        """Reserves a slot for a copy of ``worker`` from another keeper; returns its region and its number.

        The slot stays reserved until it is taken out of ``_coming``.  It never holds the only copy of the
        version that is complete at all buddies.  Raises :class:`WireError` if no slot is free, so that the
        sender tries again later, or if the slots of the worker had another size before, which they never
        have: a worker makes its region once.
        """
        safe = _wanted(head["safe"]) if head["safe"] else None
        sizes = head["slot_bytes"], head["slot_blocks"]
        with self._lock:
            region, coming = self._others.get(worker), self._coming[worker]
            if region is None:
                region = self._others[worker] = Region.create(BUDDY_SLOTS, *sizes, folder=self.folder)
            held = region.all_held()
            free = [
                slot
                for slot, copy in enumerate(held)
                if slot not in coming and (copy is None or copy != safe or held.count(safe) > 1)
            ]
            of_another_size = (region.slot_bytes, region.slot_blocks) != sizes
            if of_another_size or not free:
                sized = f"its slots here have {region.slot_bytes} bytes, and {sizes[0]} are asked for"
                arrive = (
                    f"{len(coming)} other copies of this worker are arriving; the sender tries again later"
                )
                why = (
                    f"this node has no free slot for a copy of {worker} of another node: "
                    f"{sized if of_another_size else arrive}"
                )
                self.say(why)
                raise WireError(why)
            slot = min(free, key=lambda each: _worth(held[each]))
            region["wanted"] = BUDDY_SLOTS * head["bytes"]
            coming.add(slot)
            return region, slot

    # ---- to the buddy

    def _bring(self) -> None:
        """Brings one copy after the other to the buddy, the oldest version first."""
        while not self._closed.is_set():
            buddy = self._buddy
            if not buddy or self._due() is None:
                self._closed.wait(POLL_S)
                continue
            try:
                with closing(Wire.connect(buddy, self.secret)) as wire:
                    while self._buddy == buddy and (due := self._due()):
                        self._send(wire, buddy, *due)
            except WireError as error:
                self.say(f"copies cannot be sent to the buddy at {buddy}: {error}; this keeper tries again")
                self._closed.wait(RETRY_S)

    def _due(self) -> tuple[WorkerId, Region, int] | None:
        """Returns the copy to bring next, or None.

        A copy is due if a living worker asks for it, it is complete here, and the buddy does not have it yet.
        """
        with self._lock:
            living = [(worker, region) for worker, region in self._own.items() if worker not in self._dead]
        found = []
        for worker, region in living:
            copy = region.copy("send") if region["brought"] != region["asked"] else None
            slot = region.find(copy) if copy else None
            if copy and slot is not None:
                found.append((copy.age, worker, region, slot))
        return min(found, key=lambda each: each[:2])[1:] if found else None

    def _send(self, wire: Wire, buddy: str, worker: WorkerId, region: Region, slot: int) -> None:
        asked, copy = region["asked"], region.held(slot)
        # the slot was overwritten, or the worker now asks for another copy
        if copy is None or copy != region.copy("send"):
            return
        wire.send({"ask": "where"} | request(worker, copy))
        there = wire.head()["descriptor"] >= 0
        if not there:
            size, blocks, safe = region.filled(slot), region.slot_blocks, region.copy("safe")
            head = {
                "ask": "bring",
                "bytes": size,
                "blocks": blocks,
                "slot_bytes": region.slot_bytes,
                "slot_blocks": blocks,
            }
            head |= {"safe": request(worker, safe) if safe else None} | request(worker, copy)
            began = time.monotonic()
            wire.send(head, chain([region.digests(slot).cast("B")], region.pieces(slot, 0, size)))
            wire.send({"still": region.held(slot) == copy})
            if there := wire.head()["taken"]:
                self._took(worker, time.monotonic() - began)
        with self._lock:
            if there and self._buddy == buddy:
                region["brought"] = asked

    def _took(self, worker: WorkerId, seconds: float) -> None:
        with self._lock:
            living = [region for each, region in self._own.items() if each not in self._dead]
            if worker not in self._dead:
                self._sent_s[worker] = (self._sent_s.get(worker, seconds) + seconds) / 2
            for region in living:
                region["brought_us"] = int(1e6 * sum(self._sent_s.values()))


def request(worker: WorkerId, copy: Copy) -> dict[str, Any]:
    """Returns the fields that identify a copy in a message."""
    return {
        "worker": worker,
        "step": copy.version.step,
        "generation": copy.version.generation,
        "cell": copy.cell,
    }


def _wanted(head: dict[str, Any]) -> Copy:
    return Copy(Version(head["step"], head["generation"]), Cell(head["cell"]))


def _outlived(region: Region, by: tuple[int, int]) -> bool:
    """Returns whether every copy in ``region`` is older than ``by``."""
    return not any(copy and copy.age >= by for copy in region.all_held())


def _worth(copy: Copy | None) -> tuple[bool, tuple[int, int]]:
    """Returns the sort key of a slot: the slot with the least key is overwritten first."""
    return (copy is not None, copy.age if copy else (-1, -1))
