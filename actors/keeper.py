"""A keeper is one process on each node that neither trains nor has an accelerator.

It hosts the store in which a generation meets and watches the node's workers.  It keeps the output of dead
workers, the copies of their state, and, in case the coordinator dies, the end of the journal.  It uploads the
saves.  Heartbeat and watch have their own threads, so that other work cannot make the keeper look dead; a
beat that is late all the same is noted in the keeper's log.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from functools import partial
from importlib import import_module
from typing import Any

import ray

from actors.ends import DIED
from actors.logs import Logs
from actors.notices.known_sources import open_sources
from actors.notices.port import Notice
from actors.notices.teller import Teller
from actors.notices.watch import SourceWatch
from actors.processes import (
    Process,
    compiled_folder,
    describe,
    end_on_sigterm,
    leave_nothing,
    log_folder,
    make_log_folder,
    remove_logs,
    segments,
    sweep,
)
from actors.relay import SPEAKING, Gathering, answered, gone_for_good
from elastic.config.sections import Notices
from elastic.errors import StateMissing
from elastic.ids import NodeId, Version, WorkerId
from elastic.probe import COORDINATOR, Probe
from elastic.protocol.actions import Save
from elastic.protocol.authority import Replica
from elastic.protocol.events import (
    STOPPED,
    Beat,
    Event,
    Kept,
    Lost,
    Progress,
    SaveFailed,
    ShardSaved,
)
from elastic.protocol.member import Lease
from elastic.runs.receipts import SavedShard
from elastic.state.keeper_store import KeeperStore
from elastic.state.uploads import Uploads
from elastic.threads import keep_going, later
from elastic.train.gauges.counters import OPERATIONS, Counters, segment, writer_lives
from storage.checkpoints import ShardReceipt
from storage.errors import Deposed, StorageError
from storage.objects import ObjectStore

GROUPS = {"journal": 1, "life": 1, "orders": 1, "gather": SPEAKING}
"""The actor's concurrency groups, with the number of threads of each."""
BEAT_S = 0.5
"""Seconds from one beat to the next."""
WATCH_S = 0.1
"""Seconds from one look at the workers' processes to the next."""
SURE = 4
"""Number of beats in a row for which Ray must say that no coordinator will come back, before the keeper
believes it.
"""
CLOSE_S = 5.0
"""Seconds that all workers of the keeper together may take to end by themselves when the run is over."""
FOLDER_S = 5.0
"""Seconds between two looks for the run's folder.  A folder that is missing at two looks was not removed at
the end of the run: the keeper would be dead by then.
"""
STORE_S = 60.0
"""Seconds in which the keeper's own store must answer it."""
SAID_S, SAID = 60.0, 10
"""Seconds for which the run's story does not repeat a sentence of this keeper, and the largest number of its
sentences in that time.
"""
UPLOADER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from elastic.state.uploader import main; "
    "main(*sys.argv[2:])"
)
"""Program of the uploader process, which finds modules in the same places as the keeper."""
BY_OTHERS = ("killed by signal 9 ", "killed by signal 15 ")
"""The first words about the end of a worker that another process killed.  Its samples are not to blame then.
"""
SWITCH_S = 0.0005
"""Seconds that one thread of a keeper computes before another may: the beat waits that long for each busy
thread.
"""


class Keeper:
    """Runs as the keeper actor of one node.  ``actors/perform.py`` starts it."""

    def __init__(
        self,
        run: str,
        bucket: str,
        name: str,
        coordinator: Any,
        incarnation: int,
        silence_s: float,
        secret: bytes,
        notices: Notices,
        search_path: list[str],
        folder: str = "",
    ) -> None:
        """``incarnation`` is the coordinator that starts this keeper.  ``search_path`` has the folders of the
        user's code, for sources of ``notices``.  ``folder`` is the job's ``offload_folder``.

        A keeper whose beats no coordinator has answered for ``silence_s`` seconds ends itself, as workers do.
        """
        self.run, self.coordinator, self.silence_s = run, coordinator, silence_s
        end_on_sigterm()
        if any(":" in name for name in notices.sources):  # no other code of the user runs in this process
            sys.path[:0] = [entry for entry in search_path if entry not in sys.path]
        self._sources = [
            SourceWatch(name, source, self._noticed, self._say)
            for name, source in open_sources(notices).items()
        ]
        """The sources of notices of this node."""
        self._teller = Teller(self._clock, coordinator.post.remote)
        self.replica, self._hearing = Replica(heeds=incarnation), threading.Lock()
        """The keeper's copy of the journal's end, and the lock for it, since several threads use it."""
        sweep(name)
        make_log_folder(run)  # from now on workers of this node can begin
        self.store = ObjectStore.open(bucket)
        self.node = NodeId(ray.get_runtime_context().get_node_id())
        self.probe = Probe(self.store, name, run)
        self._said: dict[str, float] = {}
        self._told = coordinator.tell.options(max_task_retries=0)
        self.keeper_store = KeeperStore(
            self.node, ray.util.get_node_ip_address(), secret, self._say, folder, compiled_folder()
        )
        command = [sys.executable, "-c", UPLOADER, json.dumps(sys.path), bucket, name]
        self.uploads = Uploads(self.keeper_store, command, self._uploaded, self._say)
        self.logs = Logs(self.store, f"{name}/logs/{run.removeprefix(f'{name}-')}", run, self.node)
        self.late_s = 0.0
        """The largest delay of a beat so far, in seconds."""
        self.workers: dict[WorkerId, tuple[Process, Counters]] = {}
        self._dying: set[WorkerId] = set()
        """The workers of this node that were reported to the coordinator as dying and have not ended yet."""
        self.actors: dict[WorkerId, Any] = {}
        self.pass_to(coordinator)
        self.stores: dict[int, Any] = {}
        self._beats = coordinator.post.options(max_task_retries=0)
        self._closed = threading.Event()
        sys.setswitchinterval(SWITCH_S)
        # not while a world waits
        threading.Thread(
            target=import_module, args=("torch.distributed",), name="import", daemon=True
        ).start()
        keep_going(self._beat, "beat", self._say)
        self._watching = keep_going(self._watch, "watch", self._say)
        for each in self._sources:
            keep_going(partial(each.run, self._closed), f"notices {each.name}", self._say)

    @ray.method(concurrency_group="journal")  # type: ignore[untyped-decorator]
    def attach(self, incarnation: int) -> tuple[int, bytes]:
        """Obeys the coordinator ``incarnation``, which takes over, and refuses earlier coordinators from now
        on.

        Returns the incarnation that wrote the copy of the journal's end kept here, and this copy.
        """
        self._heed(incarnation)
        # the coordinator before this one may not have recorded them; this one has no time for questions yet
        later(0.0, self._teller.repeat)
        with self._hearing:
            return self.replica.by, bytes(self.replica.data)

    @ray.method(concurrency_group="journal")  # type: ignore[untyped-decorator]
    def copy(self, incarnation: int, begin: int, at: int, data: bytes) -> int:
        """Takes a part of the journal: see :meth:`elastic.protocol.authority.Replica.copy`."""
        with self._hearing:
            return self.replica.copy(incarnation, begin, at, data)

    def _say(self, sentence: str) -> None:
        """Writes the sentence into this keeper's log, and into the run's story: each sentence once a minute,
        and no more than ``SAID`` of them.
        """
        print(f"keeper of {self.node[:8]}: {sentence}", flush=True)
        now = time.monotonic()
        self._said = {each: at for each, at in list(self._said.items()) if now - at < SAID_S}
        if sentence not in self._said and len(self._said) < SAID:
            self._said[sentence] = now
            self._told.remote(f"keeper of node {self.node[:8]}: {sentence}")

    def _heed(self, incarnation: int) -> None:
        """Raises :class:`Deposed` if a later coordinator than ``incarnation`` was heard."""
        with self._hearing:
            heard, heeded = self.replica.heeds, self.replica.heed(incarnation)
        if not heeded:
            raise Deposed(
                f"keeper of {self.node[:8]}, which follows coordinator {heard}: the journal of "
                f"coordinator {incarnation}"
            )

    def sees_coordinator(self) -> bool:
        """Returns whether this node finds the coordinator's sign in the bucket.  Leaves a sign of this node
        for the coordinator to find.
        """
        self.probe.leave(self.node)
        # ``close``, which runs beside this, may have removed the sign before it was left
        if self._closed.is_set():
            self.probe.remove(self.node)
        return self.probe.sees(COORDINATOR)

    def open_store(self, incarnation: int, generation: int) -> tuple[str, int]:
        """Hosts the store of ``generation`` here and returns its address."""
        self._heed(incarnation)
        from elastic.engine.stores import host_store

        host = ray.util.get_node_ip_address()
        if generation not in self.stores:
            self.stores[generation] = host_store(host, STORE_S)
        return host, self.stores[generation].port

    def close_store(self, incarnation: int, generation: int) -> None:
        """Closes the store of ``generation``; a worker that still waits in it gets an error."""
        self._heed(incarnation)
        self.stores.pop(generation, None)

    def watch(self, worker: WorkerId, actor: Any) -> None:
        """Follows a worker of this node that has joined, and passes on what the worker says if ``actor``, its
        actor, is given.
        """
        if worker not in self.workers:
            self._follow(worker, actor)
        if actor is not None and worker in self.workers:
            self.actors[worker] = actor
            actor.speak_through.remote(ray.get_runtime_context().current_actor)

    def _follow(self, worker: WorkerId, actor: Any) -> None:
        self.logs.follow(worker)
        try:
            counters = Counters(segment(self.run, worker), create=False)
            self.workers[worker] = (Process(counters["pid"], counters["started"]), counters)
        except ProcessLookupError:
            return self.logs.keep(worker, "ended before its keeper followed it")
        # without its counters, it could not be saved, and nobody would notice that it hangs
        except FileNotFoundError as error:
            # before the event, because the run may be over once it is heard
            self.logs.keep(worker, f"could not be followed, and was killed: {error}")
            self.coordinator.post.remote(Lost(worker, f"its keeper cannot follow it: {error}", certain=False))
            if actor is not None:
                ray.kill(actor)
            return
        if counters["copies"]:
            self.uploads.start()
            try:
                self.keeper_store.adopt(worker, counters["pid"], counters["copies"])
            # the worker sees that nobody holds its copies, and says so in every commit
            except (OSError, StateMissing) as error:
                self._say(f"the copies of {worker} cannot be held here: {error}")

    @ray.method(concurrency_group="orders")  # type: ignore[untyped-decorator]
    def relay(
        self, incarnation: int, workers: tuple[WorkerId, ...], order: str, arguments: tuple[Any, ...]
    ) -> tuple[WorkerId, ...]:
        """Passes an order on to ``workers``.  Returns those of them that this keeper does not follow."""
        self._heed(incarnation)
        actors = {worker: self.actors.get(worker) for worker in workers}
        for actor in filter(None, actors.values()):
            actor.obey.remote(incarnation, order, *arguments)
        return tuple(worker for worker, actor in actors.items() if actor is None)

    def pass_to(self, coordinator: Any) -> None:
        """Gathers for ``coordinator`` the events of this node's workers and their questions for the lease."""
        say, ask = (
            coordinator.post_all.options(max_task_retries=0),
            coordinator.renew_all.options(max_task_retries=0),
        )
        self.saying = Gathering(
            lambda parcels: say.remote(tuple(each for parcel in parcels for each in parcel))
        )
        self.asking = Gathering(ask.remote)

    @ray.method(concurrency_group="gather")  # type: ignore[untyped-decorator]
    def pass_on(self, events: tuple[Event, ...]) -> bool:
        """Passes on what a worker says.  Returns whether the coordinator has it."""
        return self.saying.pass_on(events) is not None

    @ray.method(concurrency_group="gather")  # type: ignore[untyped-decorator]
    def renew(self, worker: WorkerId, generation: int) -> Lease | None:
        """Asks for the lease of a worker.  Returns None without an answer of the coordinator."""
        return self.asking.pass_on((worker, generation))  # type: ignore[no-any-return]

    def address(self) -> str:
        """Returns the address at which this keeper serves its copies."""
        return self.keeper_store.address

    def list_copies(self, incarnation: int, generation: int) -> None:
        """Tells the coordinator which copies are complete here."""
        self._heed(incarnation)
        self.coordinator.post.remote(Kept(self.node, generation, self.keeper_store.held()))

    def release(self, incarnation: int, copied: Version, buddied: Version) -> None:
        self._heed(incarnation)
        self.keeper_store.release(copied, buddied)

    def upload(
        self, incarnation: int, number: int, saves: tuple[Save, ...], generation: int, version: Version
    ) -> None:
        """Obeys the coordinator's ``number``-th list of the saves on their way; see :class:`Upload`."""
        self._heed(incarnation)
        self.uploads.obey((incarnation, number), saves, generation, version)

    def _uploaded(self, save: Save, event: ShardSaved | SaveFailed, receipt: ShardReceipt | None) -> None:
        self.coordinator.post.remote(
            event, SavedShard(save.by, save.layout, receipt.packed()) if receipt is not None else None
        )

    def pair(self, incarnation: int, address: str) -> None:
        """Sends copies on to the keeper at ``address`` from now on."""
        self._heed(incarnation)
        self.keeper_store.pair(address)

    def kill(self, incarnation: int, worker: WorkerId) -> None:
        self._heed(incarnation)
        if worker in self.workers:
            self.workers[worker][0].kill()

    def examine(self, incarnation: int, worker: WorkerId) -> str:
        """Finds out where a worker that does not move stands, then kills it.  Returns the key of its log; ""
        if the worker is not here.
        """
        self._heed(incarnation)
        if worker not in self.workers:
            return ""
        process, _ = self.workers[worker]
        key = self.logs.examine(worker, process)
        process.kill()
        return key

    def announce(self, source: str, left_s: float | None) -> None:
        """Says as ``source`` that the machine is taken in ``left_s`` seconds; None withdraws that.  Chaos does
        so before it takes a node.
        """
        self._noticed(source, None if left_s is None else Notice(time.time() + left_s))

    def _noticed(self, source: str, notice: Notice | None) -> None:
        self._teller.tell(source, self.node, notice)

    def _clock(self) -> float:
        """Returns the coordinator's time.  Waits for a coordinator; raises :class:`OSError` if none comes."""
        try:
            return float(ray.get(self.coordinator.now.remote()))
        except ray.exceptions.RayError as error:
            raise OSError(f"the coordinator does not say its time: {error}") from None

    def left_world(self, incarnation: int) -> None:
        """Tells every source of notices that the run needs nothing on this node any more."""
        self._heed(incarnation)
        for each in self._sources:
            each.left()

    def _note_lateness(self, late_s: float) -> None:
        if late_s > max(self.late_s, BEAT_S):
            print(f"keeper of {self.node[:8]}: a beat was late by {late_s:.3f} s", flush=True)
        self.late_s = max(self.late_s, late_s)

    def _beat(self) -> None:
        heard_at, asked, due, refused = time.monotonic(), None, time.monotonic() + BEAT_S, 0
        while not self._closed.wait(max(due - time.monotonic(), 0.0)):
            self._note_lateness(time.monotonic() - due)
            due = time.monotonic() + BEAT_S
            progress = tuple(
                Progress(
                    worker,
                    c["generation"],
                    c["step"],
                    c["microbatch"],
                    c["collective"],
                    STOPPED if process.stopped() else OPERATIONS[c["operation"]],
                )
                for worker, (process, c) in sorted(self.workers.items())
            )
            if asked is not None and answered(asked):
                try:
                    ray.get(asked)
                    heard_at, refused = time.monotonic(), 0
                except ray.exceptions.RayError as error:
                    refused = refused + 1 if gone_for_good(error) else 0
                asked = None
            # one beat at a time: a busy coordinator gets no more, and its successor needs no old beats
            if asked is None:
                asked = self._beats.remote(Beat(self.node, progress, self.uploads.uploading()))
            if (over := refused >= SURE) or time.monotonic() - heard_at > self.silence_s:
                why = "the run is over" if over else f"no coordinator answered for {self.silence_s:.0f} s"
                print(f"keeper of {self.node[:8]}: {why}; leaving", flush=True)
                self._end(over=over)
                # the coordinator on this node may only stand still: its part of the journal stays
                remove_logs(self.run)
                os._exit(3)

    def _watch(self) -> None:
        looked_at, missing = time.monotonic(), False
        while not self._closed.wait(WATCH_S):
            if time.monotonic() - looked_at > FOLDER_S:
                looked_at, missing = time.monotonic(), self._make_again(missing)
            self.keeper_store.say_who_lacks_memory()
            for worker, (process, counters) in list(self.workers.items()):
                if worker not in self._dying and process.dying():
                    self._dying.add(worker)
                    self.coordinator.post.remote(Lost(worker, DIED, certain=False))
                if process.ended():
                    self.keeper_store.ended(worker)
                    self.logs.keep(worker, how := describe(process.status()))
                    if counters.reading and not how.startswith(BY_OTHERS):
                        self._say(
                            f"{worker} {how.partition(';')[0]} while it read {counters.reading}: read "
                            "these samples by themselves to see why"
                        )
                    del self.workers[worker]
                    self._dying.discard(worker)
                    self.actors.pop(worker, None)

    def _make_again(self, missing: bool) -> bool:
        """Makes the run's folder if it is missing now and was missing at the last look.  Returns whether it
        was missing.

        No worker of this node can begin without the folder, and a cleaner of temporary files may have removed
        it.
        """
        was, missing = missing, not log_folder(self.run).exists()
        if was and missing:
            make_log_folder(self.run)
        return missing

    def close(self, incarnation: int) -> None:
        """Ends the keeper because the run is over: it stores the remaining logs and leaves nothing on the
        node.
        """
        self._heed(incarnation)
        self._end(over=True)
        leave_nothing(self.run)

    def _end(self, *, over: bool) -> None:
        """Ends what runs here, stores the remaining logs, and removes what workers and keeper have left
        outside the run's folder.

        Unless the run is over, the counters of a worker that is not followed here stay: the worker may be one
        of another host that shares this memory.
        """
        self._closed.set()
        self._watching.join()
        deadline = time.monotonic() + CLOSE_S
        for worker, (process, _) in sorted(self.workers.items()):
            while not process.ended() and time.monotonic() < deadline:
                time.sleep(0.01)
            process.kill()
            self.logs.keep(worker, describe(process.status()) if process.ended() else "ended by its keeper")
        self.logs.close()
        self.uploads.close()
        self.stores.clear()
        self.keeper_store.close()
        with contextlib.suppress(StorageError):
            self.probe.remove(self.node)
        ours = {segment(self.run, worker) for worker in self.workers}
        # last, since a worker that is just being killed may still make its counters
        for path in segments(self.run):
            if over or path in ours or not writer_lives(path):
                path.unlink(missing_ok=True)

    @ray.method(concurrency_group="life")  # type: ignore[untyped-decorator]
    def lives(self) -> None:
        """Never returns, so the caller learns at once when the keeper dies.  Later calls wait in line, and
        their callers learn it too.
        """
        threading.Event().wait()
