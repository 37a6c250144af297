"""One keeper a node: no accelerator, no training.  It hosts the store in which a generation meets, watches the node's workers, keeps what
a dead one printed, the copies of its state, and the end of the journal for when the coordinator is dead, and uploads the saves.

Heartbeat and watch have threads of their own, so that nothing it does can make it look dead; a beat that is late all the same is
said in its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from datetime import timedelta
from importlib import import_module
from typing import Any

import ray

from actors.logs import Logs
from actors.processes import Process, describe, end_on_sigterm, log_folder, sweep
from elastic.errors import StateMissing
from elastic.ids import NodeId, Version, WorkerId
from elastic.probe import COORDINATOR, Probe
from elastic.protocol.actions import Save
from elastic.protocol.authority import Replica
from elastic.protocol.events import STOPPED, Beat, Kept, Progress, SaveFailed, ShardSaved
from elastic.runs import SavedShard
from elastic.state.keeper_store import KeeperStore
from elastic.state.uploads import Uploads
from elastic.train.counters import OPERATIONS, Counters, segment
from storage.checkpoints import ShardReceipt
from storage.errors import Deposed, StorageError
from storage.objects import ObjectStore

BEAT_S = 0.5
CLOSE_S = 5.0
"""Of all its workers together, to end by themselves when the run is over."""
REAPED_S = 0.5
SAID_S, SAID = 60.0, 10
UPLOADER = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from elastic.state.uploader import main; main(*sys.argv[2:])"
"""Program of the uploader process: it finds modules where the keeper does."""
SWITCH_S = 0.0005
"""How long a thread of a keeper computes before another one may; the beat waits for each of those that do."""


class Keeper:
    def __init__(self, run: str, bucket: str, name: str, coordinator: Any, incarnation: int, silence_s: float, secret: bytes) -> None:
        """``incarnation``: of the coordinator that makes it.  ``silence_s``: a keeper whose beats no coordinator has answered for so many
        seconds leaves, as workers do.
        """
        self.run, self.coordinator, self.silence_s = run, coordinator, silence_s
        end_on_sigterm()
        self.replica, self._hearing = Replica(heeds=incarnation), threading.Lock()
        """Which coordinator is heeded, and its journal's end; calls on several threads use it."""
        sweep(name)
        self.store = ObjectStore.open(bucket)
        self.node = NodeId(ray.get_runtime_context().get_node_id())
        self.probe = Probe(self.store, name, run)
        self._said: dict[str, float] = {}
        self._told = coordinator.tell.options(max_task_retries=0)
        self.stock = KeeperStore(self.node, ray.util.get_node_ip_address(), secret, self._say)
        command = [sys.executable, "-c", UPLOADER, json.dumps(sys.path), bucket, name]
        self.uploads = Uploads(self.stock, command, self._uploaded, self._say)
        self.logs = Logs(self.store, f"{name}/logs/{run.removeprefix(f'{name}-')}", run, self.node)
        self.late_s = 0.0
        """The most that a beat was late."""
        self.workers: dict[WorkerId, tuple[Process, Counters]] = {}
        self.stores: dict[int, Any] = {}
        self._beats = coordinator.post.options(max_task_retries=0)  # what one that died did not hear is old when the next one does
        self._closed = threading.Event()
        sys.setswitchinterval(SWITCH_S)
        threading.Thread(target=import_module, args=("torch.distributed",), name="import", daemon=True).start()  # not while worlds wait
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        self._watching = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._watching.start()

    @ray.method(concurrency_group="journal")  # type: ignore[untyped-decorator]
    def attach(self, incarnation: int) -> tuple[int, bytes]:
        """A coordinator takes over: returns which one has left its journal's end here, and that.  Earlier ones are heard no more."""
        self._heed(incarnation)
        with self._hearing:
            return self.replica.by, bytes(self.replica.data)

    @ray.method(concurrency_group="journal")  # type: ignore[untyped-decorator]
    def copy(self, incarnation: int, begin: int, at: int, data: bytes) -> int:
        """Holds a part of the journal: :meth:`elastic.protocol.authority.Replica.copy`."""
        with self._hearing:
            return self.replica.copy(incarnation, begin, at, data)

    def _say(self, sentence: str) -> None:
        """Into this keeper's log and the run's story, each sentence once a minute, and no more than a few."""
        print(f"keeper of {self.node[:8]}: {sentence}", flush=True)
        now = time.monotonic()
        self._said = {each: at for each, at in list(self._said.items()) if now - at < SAID_S}
        if sentence not in self._said and len(self._said) < SAID:
            self._said[sentence] = now
            self._told.remote(f"keeper of node {self.node[:8]}: {sentence}")

    def _heed(self, incarnation: int) -> None:
        """Raises :class:`Deposed` for a coordinator that does not know that it is over."""
        with self._hearing:
            heard, heeded = self.replica.heeds, self.replica.heed(incarnation)
        if not heeded:
            raise Deposed(f"keeper of {self.node[:8]}: coordinator {heard} was heard; the journal of coordinator {incarnation}")

    def sees_coordinator(self) -> bool:
        """Is the bucket here what it is for the coordinator?  Leaves a sign of this node, which the coordinator is to look for."""
        self.probe.leave(self.node)
        return self.probe.sees(COORDINATOR)

    def open_store(self, incarnation: int, generation: int) -> tuple[str, int]:
        """Host the store of ``generation`` here; where it listens."""
        self._heed(incarnation)
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        if generation not in self.stores:
            self.stores[generation] = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        return host, self.stores[generation].port

    def close_store(self, incarnation: int, generation: int) -> None:
        """Whoever still waits in the store of ``generation`` is freed with an error."""
        self._heed(incarnation)
        self.stores.pop(generation, None)

    def watch(self, worker: WorkerId) -> None:
        """Follow a worker of this node, which has joined."""
        if worker in self.workers:
            return
        counters = Counters(segment(self.run, worker), create=False)
        self.workers[worker] = (Process(counters["pid"]), counters)
        self.logs.follow(worker)
        if counters["copies"]:
            self.uploads.start()
            try:
                self.stock.adopt(worker, counters["pid"], counters["copies"])
            except (OSError, StateMissing) as error:  # the worker sees that nobody holds its copies, and says so in every commit
                self._say(f"the copies of {worker} cannot be held here: {error}")

    def address(self) -> str:
        """Where its copies are to be had."""
        return self.stock.address

    def take_stock(self, incarnation: int, generation: int) -> None:
        """Tell the coordinator what is held here complete."""
        self._heed(incarnation)
        self.coordinator.post.remote(Kept(self.node, generation, self.stock.held()))

    def release(self, incarnation: int, copied: Version, buddied: Version) -> None:
        self._heed(incarnation)
        self.stock.release(copied, buddied)

    def upload(self, incarnation: int, number: int, saves: tuple[Save, ...], generation: int, version: Version) -> None:
        """The saves on their way, as that coordinator says for the ``number``-th time; see :class:`Upload`."""
        self._heed(incarnation)
        self.uploads.obey((incarnation, number), saves, generation, version)

    def _uploaded(self, save: Save, event: ShardSaved | SaveFailed, receipt: ShardReceipt | None) -> None:
        self.coordinator.post.remote(event, SavedShard(save.by, save.layout, receipt) if receipt is not None else None)

    def pair(self, incarnation: int, address: str) -> None:
        """From now on, copies go on to the keeper at ``address``."""
        self._heed(incarnation)
        self.stock.pair(address)

    def kill(self, incarnation: int, worker: WorkerId) -> None:
        self._heed(incarnation)
        if worker in self.workers:
            self.workers[worker][0].kill()

    def examine(self, incarnation: int, worker: WorkerId) -> str:
        """It stands still and is to be ended: find out where, then end it.  Where that can be read; "" when it is not here."""
        self._heed(incarnation)
        if worker not in self.workers:
            return ""
        process, _ = self.workers[worker]
        key = self.logs.examine(worker, process)
        process.kill()
        return key

    def _note_lateness(self, late_s: float) -> None:
        if late_s > max(self.late_s, BEAT_S):
            print(f"keeper of {self.node[:8]}: a beat was late by {late_s:.3f} s", flush=True)
        self.late_s = max(self.late_s, late_s)

    def _beat(self) -> None:
        heard_at, asked, due = time.monotonic(), None, time.monotonic() + BEAT_S
        while not self._closed.wait(max(due - time.monotonic(), 0.0)):
            self._note_lateness(time.monotonic() - due)
            due = time.monotonic() + BEAT_S
            progress = tuple(
                Progress(worker, c["generation"], c["step"], c["microbatch"], c["collective"], self._operation(process, c))
                for worker, (process, c) in sorted(self.workers.items())
            )
            told = self._beats.remote(Beat(self.node, progress))
            asked = asked or told
            if ray.wait([asked], timeout=0)[0]:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(asked)
                    heard_at = time.monotonic()
                asked = None
            if time.monotonic() - heard_at > self.silence_s:
                print(f"keeper of {self.node[:8]}: no coordinator answered for {self.silence_s:.0f} s; leaving", flush=True)
                self.close(self.replica.heeds)
                os._exit(3)

    def _operation(self, process: Process, counters: Counters) -> str:
        return STOPPED if process.stopped() else OPERATIONS[counters["operation"]]

    def _watch(self) -> None:
        while not self._closed.wait(0.05):
            self.stock.say_who_lacks_memory()
            for worker, (process, _) in list(self.workers.items()):
                if process.ended():
                    self.stock.ended(worker)
                    self.logs.keep(worker, _how(process))
                    del self.workers[worker]

    def close(self, incarnation: int) -> None:
        """The run is over: keep the logs of those that left in good order, and leave nothing on the node."""
        self._heed(incarnation)
        self._closed.set()
        self._watching.join()
        deadline = time.monotonic() + CLOSE_S
        for worker, (process, _) in sorted(self.workers.items()):
            while not process.ended() and time.monotonic() < deadline:
                time.sleep(0.01)
            process.kill()
            self.logs.keep(worker, _how(process) if process.ended() else "ended by its keeper")
        for path in segment(self.run, "x").parent.glob(f"elastic-{self.run}-*"):
            path.unlink(missing_ok=True)
        self.logs.close()
        self.uploads.close()
        self.workers.clear()
        self.stores.clear()
        self.stock.close()
        with contextlib.suppress(StorageError):
            self.probe.remove(self.node)
        shutil.rmtree(log_folder(self.run), ignore_errors=True)

    @ray.method(concurrency_group="life")  # type: ignore[untyped-decorator]
    def lives(self) -> None:
        """Never returns: whoever holds this call learns at once when the keeper dies.  Those of coordinators that died wait behind it."""
        threading.Event().wait()


def _how(process: Process) -> str:
    """How it ended.  Its parent has to reap it: only then does the kernel tell the status."""
    until = time.monotonic() + REAPED_S
    while (status := process.status()) is None and time.monotonic() < until:
        time.sleep(0.01)
    return describe(status)
