"""Uploads a keeper's saves: picks the copies of its node's workers that go to the bucket, and reports the
results.

The coordinator says which saves are under way; all others are over.  A thread looks for copies of them that
have become complete, hands them to the uploader process (``state/uploader.py``) and reports its results.  A
part fails once its copy can never be complete: its worker has ended, or is in a later world, and has not made
it.  An uploader that dies is replaced by another, which begins the parts again.  Objects are created and
never replaced, so writing a part twice does no harm.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic.ids import Version, WorkerId
from elastic.plan.copy_budget import slots_for
from elastic.plan.placement import cell_of
from elastic.protocol.actions import Save
from elastic.protocol.copy_schedule import Copy
from elastic.protocol.events import SaveFailed, ShardSaved
from elastic.protocol.uploads import REFUSALS, Told, hopeless
from elastic.state.keeper_store import KeeperStore
from elastic.state.region import Region
from elastic.state.uploader import SavePart, name_of
from elastic.threads import keep_going
from storage.checkpoints import ShardReceipt

POLL_S = 0.02
"""Seconds between two looks for copies that have become complete."""
UNKNOWN_S = 10.0
"""Seconds that a part waits until its worker's memory is opened here: a keeper that has just started does not
know its workers yet.
"""
RETRY_S = 1.0
"""Seconds after a failed start of an uploader until the next start: a node without memory is not asked for a
process at every look.
"""
HUNG_S = 900.0
"""Seconds after which an uploader that has parts and reports nothing is killed: a store may take 740 s to
join the pieces of an object.
"""
AGAIN_S = 5.0
"""Seconds after the bucket refused a part until it is tried again.  Each try already includes the store's own
attempts (``RemotePolicy``).
"""
ATTEMPTS = 3
"""Number of uploaders that may die while they write a part before that part fails."""

Tell = Callable[[Save, ShardSaved | SaveFailed, ShardReceipt | None], None]
"""Reports to the coordinator what became of one worker's part of a save."""


@dataclass(eq=False)
class Task:
    """One worker's part of a save.  ``number`` is the number of the request to the uploader, 0 before there
    is one.

    ``region`` is kept from the request on, even if its worker ends.
    """

    save: Save
    worker: WorkerId
    since: float
    number: int = 0
    region: Region | None = None
    attempts: int = 0
    again_at: float = 0.0
    """The time before which the part is not tried again."""
    refused: bool = False
    """True if the bucket has refused the part and the coordinator was told so; nothing has reached the bucket
    since.
    """
    full: bool = False
    """True if the last refusal was for want of room."""
    refusals: int = 0
    """Number of times that the bucket refused the part while it counted as being written."""
    told: tuple[ShardSaved | SaveFailed, ShardReceipt | None] | None = None

    @property
    def rank(self) -> int:
        return self.save.members.index(self.worker)


class Uploads:
    """Runs the uploads of one keeper.  ``command`` starts its uploader; ``say`` receives sentences for the
    keeper's log.
    """

    def __init__(
        self, store: KeeperStore, command: Sequence[str], tell: Tell, say: Callable[[str], None] = print
    ) -> None:
        self.store, self.command, self.tell, self.say = store, command, tell, say
        self._told = Told()
        self._tasks: dict[tuple[Save, WorkerId], Task] = {}
        self._number = 0
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._listener = threading.Thread()
        self._start_at = self._heard_at = 0.0
        keep_going(self._run, "uploads", lambda sentence: self.say(sentence))

    def obey(self, number: tuple[int, int], saves: Sequence[Save], generation: int, version: Version) -> None:
        """Accepts ``saves`` as all saves under way; every other save that had begun by ``version`` of
        ``generation`` is over.

        Results that are already known are reported again, since the coordinator may be new.  A call is
        ignored unless its ``number`` is greater than the number of the last call.
        """
        with self._lock:
            if number <= self._told.number:
                return
            self._told = Told(number, saves, generation, version)
            wanted = {
                (save, worker)
                for save in saves
                for worker, node in zip(save.members, save.nodes, strict=True)
                if node == self.store.node
            }
            self.store.saves = {(worker, _copy(save, worker)) for save, worker in wanted}
            for key in self._tasks.keys() - wanted:
                self._give_up(self._tasks.pop(key))
            again = [task for task in self._tasks.values() if task.told]
            for task in self._tasks.values():
                task.refused = False
            for save, worker in wanted - self._tasks.keys():
                self._tasks[save, worker] = Task(save, worker, time.monotonic())
        for task in again:
            assert task.told is not None
            self.tell(task.save, *task.told)

    def start(self) -> None:
        """Starts the uploader, unless it runs.  This is called before the first save needs it, since its
        imports take a second.
        """
        with self._lock:
            if self._process is None and not self._closed.is_set() and time.monotonic() >= self._start_at:
                try:
                    self._process = self._started()
                # no memory for a process or no thread, for example: its parts wait
                except (OSError, RuntimeError) as error:
                    self._start_at = time.monotonic() + RETRY_S
                    self.say(f"no uploader can be started: {error}")

    def _started(self) -> subprocess.Popen[str]:
        """Starts an uploader and the thread that listens to it, or neither: Python raises RuntimeError at the
        system's limit of threads.
        """
        process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        listener = threading.Thread(target=self._listen, args=(process,), name="uploader", daemon=True)
        try:
            listener.start()
        except RuntimeError:
            process.kill()
            process.communicate()
            raise
        self._listener = listener
        return process

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            process, listener = self._process, self._listener
        if process is not None:
            process.kill()
            listener.join()

    def uploading(self) -> tuple[Version, ...]:
        """Returns the saves of which a part is being written now, unless the bucket has just refused that
        part.
        """
        with self._lock:
            return tuple(
                {
                    task.save.version
                    for task in self._tasks.values()
                    if task.number and not task.told and not task.refused
                }
            )

    # ---- on the thread

    def _run(self) -> None:
        while not self._closed.wait(POLL_S):
            self._turn()

    def _turn(self) -> None:
        with self._lock:
            now = time.monotonic()
            waiting = [
                task
                for task in self._tasks.values()
                if not task.told and not task.number and now >= task.again_at
            ]
            failed = [(task, why) for task in waiting if (why := self._look(task))]
            told = self._told
        for task, why in failed:
            self._fail(task, why)
        for worker, region in self.store.regions():
            # in this order: the worker first names a save, then counts it
            number, save = region["saves"], region.copy("save")
            if save is not None and region["saves_over"] != number and told.is_over(worker, save.version):
                region["saves_over"] = number
        self._forget_the_dead()
        self._end_if_hung()

    def _look(self, task: Task) -> str:
        """Hands the task to the uploader if its copy is complete.  Returns why the copy can never be
        complete, or "".
        """
        copy = _copy(task.save, task.worker)
        region, ended = self.store.region(task.worker)
        region = task.region or region
        if region is None:
            return (
                "the keeper has not opened the worker's memory yet"
                if time.monotonic() - task.since > UNKNOWN_S
                else ""
            )
        # both are read before the slot: the copy may become complete just before either changes
        generation = region["generation"]
        if region.find_save(copy) is not None:
            task.region = region
            self._hand_over(task)
            return ""
        return hopeless(
            task.save, generation, ended=ended, failed=generation >= task.save.by and region.failed(copy)
        )

    def _hand_over(self, task: Task) -> None:
        self.start()
        if self._process is None:
            return
        self._heard_at = time.monotonic()
        self._number += 1
        task.number, task.attempts = self._number, task.attempts + 1
        assert task.region is not None
        part = SavePart(
            task.number, os.getpid(), task.region.descriptor, task.save.version, task.save.layout, task.rank
        )
        self._write(part.to_json())

    def _write(self, line: str) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        try:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        # the uploader has died: the thread that listens to it begins its parts again
        except (OSError, ValueError):
            return

    def _give_up(self, task: Task) -> None:
        if task.number and not task.told:
            self._write(json.dumps({"give_up": task.number}))

    def _fail(self, task: Task, why: str) -> None:
        self._tell(task, _failed(task, f": {why}", again=False), None)

    def _refused(self, task: Task, why: str, full: bool) -> None:
        """Lets the part be tried again after ``AGAIN_S``, since its copy stays in the slot while the save is
        under way.

        Reports once that the bucket refused the part, and once that the bucket has no room.
        """
        with self._lock:
            task.number, task.attempts, task.again_at = 0, 0, time.monotonic() + AGAIN_S
            known, task.refusals = (
                task.refused and (task.full or not full),
                task.refusals + (not task.refused),
            )
            task.refused, task.full = True, full
        if not known:
            self.tell(task.save, _failed(task, f" yet: {why}", again=True, full=full), None)

    def _tell(self, task: Task, event: ShardSaved | SaveFailed, receipt: ShardReceipt | None) -> None:
        task.told, task.region = (event, receipt), None
        self.tell(task.save, event, receipt)

    def _forget_the_dead(self) -> None:
        """Frees the memory of dead workers once their save is over.  This is for jobs without copies;
        otherwise ``release`` frees it.
        """
        for worker, region in self.store.regions():
            if region.slots == slots_for(0, 0) and not region.saving and self.store.region(worker)[1]:
                self.store.forget(worker)

    def _end_if_hung(self) -> None:
        """Kills an uploader that makes no progress; the next one begins its parts again."""
        with self._lock:
            process, has_parts = (
                self._process,
                any(task.number and not task.told for task in self._tasks.values()),
            )
        if process is not None and has_parts and time.monotonic() - self._heard_at > HUNG_S:
            self._heard_at = time.monotonic()
            self.say(
                f"the uploader of this keeper made no progress for {HUNG_S:g} s and is killed; a new "
                "uploader writes its parts again"
            )
            process.kill()

    # ---- what the uploader says

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                answer = json.loads(line)
            except ValueError:  # it died in the middle of a line
                process.kill()
                break
            self._heard_at = time.monotonic()
            with self._lock:
                task = next((each for each in self._tasks.values() if each.number == answer["number"]), None)
            if task is None or task.told:
                continue
            if "slices" in answer:  # the part goes on
                task.refused = task.refused and not (answer["slices"] and task.refusals < REFUSALS)
                continue
            if "refused" in answer:
                self._refused(task, answer["refused"], answer.get("full", False))
            elif "failed" in answer:
                self._fail(task, answer["failed"])
            else:
                receipt = ShardReceipt.from_json(answer["receipt"])
                self._tell(
                    task,
                    ShardSaved(task.worker, task.save.version, task.save.by, answer.get("digest", "")),
                    receipt,
                )
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # a line that it never read cannot be flushed
                assert pipe is not None
                pipe.close()
        if not self._closed.is_set():
            self._begin_again(process)

    def _begin_again(self, died: subprocess.Popen[str]) -> None:
        self.say(
            f"the uploader of this keeper died (exit code {died.returncode}); a new uploader writes "
            "its parts again"
        )
        with self._lock:
            self._process = None
            left = [task for task in self._tasks.values() if task.number and not task.told]
            hopeless = [task for task in left if task.attempts >= ATTEMPTS]
            for task in left:
                task.number = 0 if task not in hopeless else task.number
        for task in hopeless:
            self._fail(task, f"{ATTEMPTS} uploaders died while they wrote this part")


def _failed(task: Task, why: str, *, again: bool, full: bool = False) -> SaveFailed:
    """Returns the report that a part was not written; ``again`` says that it is tried again, ``full`` that
    there is no room for it.
    """
    reason = f"no part of {task.worker} ({name_of(task.save.layout, task.rank)}){why}"
    return SaveFailed(task.save.version, reason, task.save.by, again=again, worker=task.worker, full=full)


def _copy(save: Save, worker: WorkerId) -> Copy:
    """Returns the copy from which the worker's part of ``save`` is written."""
    return Copy(save.version, cell_of(save.layout, save.members.index(worker)))
