"""What a keeper holds: the regions of its node's workers, dead or alive, and copies of others' that it keeps as their buddy.

Its listener hands out slots to those who heal and takes what other keepers bring; one thread brings this node's copies to the buddy.
Nobody here looks into the bytes: who reads them checks their digests.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elastic.copies.region import Held, Region
from elastic.copies.wire import Listener, Wire
from elastic.errors import WireError
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.transfer import Holding

BUDDY_SLOTS = 2
POLL_S = 0.02
RETRY_S = 1.0


class Stock:
    """Thread-safe.  ``address``: where its listener is; ``host``: the address of the node that others reach."""

    def __init__(self, node: NodeId, host: str, secret: bytes) -> None:
        self.node, self.secret = node, secret
        self._lock = threading.Lock()
        self._own: dict[WorkerId, Region] = {}
        self._dead: set[WorkerId] = set()
        self._others: dict[WorkerId, Region] = {}
        """Copies of the shards of other nodes' workers."""
        self._buddy: tuple[str, int] | None = None
        """Its address, and which steps it is brought: the multiples of this one."""
        self._listener = Listener(host, secret, self._serve)
        self.address = self._listener.address
        threading.Thread(target=self._bring, name="buddy", daemon=True).start()

    def adopt(self, worker: WorkerId, pid: int, descriptor: int) -> None:
        """The worker lives, and this is its region.  Raises :class:`StateMissing` or OSError where it cannot be opened."""
        region = Region.of_process(pid, descriptor)
        with self._lock:
            self._own[worker] = region
            self._dead.discard(worker)

    def ended(self, worker: WorkerId) -> None:
        with self._lock:
            if worker in self._own:
                self._dead.add(worker)

    def held(self) -> tuple[Holding, ...]:
        """Every slot that is complete."""
        with self._lock:
            regions = [*self._own.items(), *self._others.items()]
            found = {
                Holding(worker, held.version, held.count, held.index, self.node)
                for worker, region in regions
                for slot in range(region.slots)
                if (held := region.held(slot))
            }
        return tuple(sorted(found, key=lambda each: (each.worker, each.version, each.shard_count, each.shard_index)))

    def release(self, copied: Version, buddied: Version) -> None:
        """Versions up to ``copied`` are complete on all keepers of the present world, up to ``buddied`` at their buddies too."""
        with self._lock:
            for worker in sorted(self._dead):
                if all(held.version < min(copied, buddied) for held in _held(self._own[worker])):
                    self._own.pop(worker).close()
                    self._dead.remove(worker)
            for worker in sorted(self._others):
                if all(held.version < buddied for held in _held(self._others[worker])):
                    self._others.pop(worker).close()

    def pair(self, buddy: str, every: int) -> None:
        """Bring copies of every ``every``-th step to the keeper at ``buddy``; "" for none."""
        self._buddy = (buddy, every) if buddy and every else None

    def close(self) -> None:
        self._listener.close()
        self._buddy = None
        with self._lock:
            for region in (*self._own.values(), *self._others.values()):
                region.close()
            self._own, self._others = {}, {}

    # ---- answers

    def _serve(self, wire: Wire, head: dict[str, Any]) -> None:
        worker = WorkerId(head["worker"])
        match head["ask"]:
            case "where":
                region = self._find(worker, head)
                wire.send({"pid": os.getpid(), "descriptor": region.descriptor if region else -1})
            case "read":
                self._read(wire, worker, head)
            case "spoilt":
                self._spoilt(worker, head)
                wire.send({})
            case "bring":
                self._take(wire, worker, head)

    def _find(self, worker: WorkerId, head: dict[str, Any]) -> Region | None:
        wanted = _wanted(head)
        with self._lock:
            there = [regions[worker] for regions in (self._own, self._others) if worker in regions]
        return next((region for region in there if region.find(*wanted) is not None), None)

    def _read(self, wire: Wire, worker: WorkerId, head: dict[str, Any]) -> None:
        """For each range its digests, then its bytes; at the end, whether the slot still holds what it held."""
        region = self._find(worker, head)
        slot = region.find(*_wanted(head)) if region else None
        wire.send({"found": slot is not None})
        if region is None or slot is None:
            return
        digests, data = region.digests(slot), region.data(slot)
        for offset, size, block, blocks in head["ranges"]:
            wire.send_raw([digests[block : block + blocks].cast("B"), data[offset : offset + size]])
        wire.send({"still": region.find(*_wanted(head)) == slot})

    def _spoilt(self, worker: WorkerId, head: dict[str, Any]) -> None:
        """Somebody read bytes that have not their digest: the slot holds nothing any more."""
        region = self._find(worker, head)
        slot = region.find(*_wanted(head)) if region else None
        if region is not None and slot is not None:
            print(f"keeper of {self.node[:8]}: the copy of {worker} at {_wanted(head)[0]} is damaged", flush=True)
            region.begin(slot)

    def _take(self, wire: Wire, worker: WorkerId, head: dict[str, Any]) -> None:
        """A copy that another keeper brings, into the slot that is not the newest one complete at all buddies."""
        version, count, index = _wanted(head)
        safe = Version(*head["safe"])
        with self._lock:
            region = self._others.get(worker)
            if region is None or (region.slot_bytes, region.slot_blocks) != (head["slot_bytes"], head["slot_blocks"]):
                region = self._others[worker] = Region.create(BUDDY_SLOTS, head["slot_bytes"], head["slot_blocks"])
        slot = min(range(region.slots), key=lambda each: _worth(region.held(each), safe))
        region.begin(slot)
        wire.receive_into(region.digests(slot)[: head["blocks"]].cast("B"))
        wire.receive_into(region.data(slot)[: head["bytes"]])
        if complete := bool(wire.head()["still"]):
            region.finish(slot, Held(version, count, index, head["bytes"]))
        wire.send({"taken": complete})

    # ---- to the buddy

    def _bring(self) -> None:
        """One copy after the other, the oldest version first."""
        wire: Wire | None = None
        there = ""
        while True:
            pairing = self._buddy
            due = self._due(*pairing) if pairing else None
            if pairing is None or due is None:
                time.sleep(POLL_S)
                continue
            try:
                if wire is None or there != pairing[0]:
                    there, wire = pairing[0], Wire.connect(pairing[0], self.secret)
                self._send(wire, *due)
            except WireError as error:
                print(f"keeper of {self.node[:8]}: no copy reaches the buddy at {there}: {error}", flush=True)
                wire = None
                time.sleep(RETRY_S)

    def _due(self, buddy: str, every: int) -> tuple[WorkerId, Region, int] | None:
        """What is to be brought next: the newest due version of a living worker that its buddy lacks."""
        with self._lock:
            living = {worker: region for worker, region in self._own.items() if worker not in self._dead}
        found = []
        for worker, region in living.items():
            last = region.version("buddied")
            slots = [(held.version, slot) for slot in range(region.slots) if (held := region.held(slot)) and held.version.step % every == 0]
            if slots and (last is None or max(slots)[0] > last):
                found.append((*max(slots), worker, region))
        if not found:
            return None
        _, slot, worker, region = min(found, key=lambda each: each[:1])
        return worker, region, slot

    def _send(self, wire: Wire, worker: WorkerId, region: Region, slot: int) -> None:
        with _sending(region, slot):
            held = region.held(slot)
            if held is None:  # overwritten meanwhile
                return
            safe = region.version("safe") or Version(-1, -1)
            blocks = region.slot_blocks
            head = {"ask": "bring", "worker": worker, "step": held.version.step, "generation": held.version.generation, "count": held.count}
            head |= {"index": held.index, "bytes": held.bytes, "blocks": blocks, "slot_bytes": region.slot_bytes, "slot_blocks": blocks}
            wire.send(head | {"safe": [safe.step, safe.generation]}, [region.digests(slot).cast("B"), region.data(slot)[: held.bytes]])
            wire.send({"still": region.held(slot) == held})
            if wire.head()["taken"]:
                region.set_version("buddied", held.version)


def _wanted(head: dict[str, Any]) -> tuple[Version, int, int]:
    return Version(head["step"], head["generation"]), head["count"], head["index"]


def _held(region: Region) -> Iterator[Held]:
    yield from (held for slot in range(region.slots) if (held := region.held(slot)))


def _worth(held: Held | None, safe: Version) -> tuple[bool, bool, Version]:
    """Of two slots the one that is worth less is overwritten."""
    return (held is not None and held.version == safe, held is not None, held.version if held else safe)


@contextmanager
def _sending(region: Region, slot: int) -> Iterator[None]:
    """The worker leaves the slot alone meanwhile, if it has not begun to overwrite it; what is torn all the same is not taken."""
    region["sending"] = slot + 1
    try:
        yield
    finally:
        region["sending"] = 0
