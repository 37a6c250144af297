"""A save goes from a worker's slot to the bucket, by its keeper and the uploader process, whoever dies on the
way (R1, R11, H1).
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.errors import StateMissing
from elastic.ids import Version, WorkerId
from elastic.plan.layout import Layout
from elastic.plan.placement import cell_of, number_of_cells
from elastic.protocol.actions import Save
from elastic.protocol.copy_schedule import Copy, SaveRule
from elastic.protocol.events import SaveFailed, ShardSaved
from elastic.protocol.uploads import REFUSALS
from elastic.state.keeper_store import KeeperStore
from elastic.state.region import Region, frame
from elastic.state.snapshot import Snapshots
from elastic.state.uploader import GivenUp, SavePart, Uploader, digest_of_copy, name_of, upload
from elastic.state.uploads import RETRY_S, Uploads
from storage.checkpoints import Checkpoints, ShardReceipt
from storage.objects import ObjectStore
from storage.objects.folder import Folder
from storage.objects.port import Data
from tests.state.nodes import AT, SECRET, TENSORS, Node, cluster, enter, shard_of, truth
from tests.state.saver import NODE, PLAN, SAVED, WORKER, save
from tests.storage.states import slices_of
from tests.support.cells import cell
from tests.support.full_disk import small_disk
from tests.support.patience import PATIENCE_S, until
from tests.support.segments import shard_hash
from tests.support.warm import MODULES

WHOLE = cell(1, 0)
REPOSITORY = Path(__file__).parents[2]
UPLOADER = "import sys; from elastic.state.uploader import main; main(*sys.argv[1:])"


def command(bucket: Path) -> list[str]:
    return [sys.executable, "-c", UPLOADER, str(bucket), "run"]


def checkpoints(bucket: Path) -> Checkpoints:
    return Checkpoints(ObjectStore.open(str(bucket)), "run")


class Told:
    """This queue collects what a keeper reports to the coordinator."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[tuple[ShardSaved | SaveFailed, ShardReceipt | None]] = (
            queue.SimpleQueue()
        )

    def __call__(self, save: Save, event: ShardSaved | SaveFailed, receipt: ShardReceipt | None) -> None:
        self.events.put((event, receipt))

    def next(self) -> tuple[ShardSaved | SaveFailed, ShardReceipt | None]:
        return self.events.get(timeout=PATIENCE_S)


@contextmanager
def uploading(store: KeeperStore, bucket: Path) -> Iterator[tuple[Uploads, Told]]:
    told = Told()
    uploads = Uploads(store, command(bucket), told)
    try:
        yield uploads, told
    finally:
        uploads.close()


def turned(uploads: Uploads, count: int = 3) -> None:
    """Waits until ``uploads`` has looked at everything so often again."""
    done, turn = threading.Semaphore(0), uploads._turn

    def counted() -> None:
        turn()
        done.release()

    uploads._turn = counted  # type: ignore[method-assign]
    for _ in range(count):
        assert done.acquire(timeout=PATIENCE_S)
    uploads._turn = turn  # type: ignore[method-assign]


def moved(value: torch.Tensor) -> None:
    """Moves one element to the next larger number, as a single bit that flips does."""
    flat = value.view(-1)
    flat[flat.numel() // 2] = torch.nextafter(flat[flat.numel() // 2], flat.new_tensor(torch.inf))


@pytest.mark.parametrize("place", range(len(TENSORS)))
def test_e6_r16_one_ulp_in_one_replica_changes_the_digest_of_its_copy(place: int) -> None:
    """The judge is the sha256 of what each worker has copied.  The control: sound replicas have one digest."""
    key = TENSORS[place].kind, TENSORS[place].name
    for culprit in (None, 1):
        with cluster(Layout(3, 1), 3) as (plan, (node,)):
            told, hashes = [], []
            for rank, (worker, snapshots) in enumerate(node.workers.items()):
                shard = shard_of(AT, 1, 0)
                if rank == culprit and shard.values[key].is_floating_point():
                    moved(shard.values[key])
                elif rank == culprit:
                    shard.values[key].view(-1)[0] += 1
                snapshots.enter(plan, worker, shard)
                snapshots.settle()
                told.append(digest_of_copy(snapshots.region, Copy(AT, WHOLE)))
                hashes.append(shard_hash(shard))
            assert [each == told[0] for each in told] == [each == hashes[0] for each in hashes]
            assert (told[0] == told[1]) is (culprit is None) and len(told[0]) == 16
            assert digest_of_copy(snapshots.region, Copy(Version(8, 1), WHOLE)) == ""


def test_a_part_of_a_layout_with_other_axes_arrives_as_it_was_sent() -> None:
    part = SavePart(1, 2, 3, AT, Layout(2, 1, (("columns", 2),)), 3)
    arrived = SavePart.from_json(json.loads(part.to_json()))
    assert arrived == part and hash(arrived.layout) == hash(part.layout)


@pytest.mark.parametrize("layout", [Layout(1, 3), Layout(2, 2), Layout(3, 1)], ids=str)
def test_a_save_is_uploaded_by_the_keepers_each_slice_once(tmp_path: Path, layout: Layout) -> None:
    """The manifest would be refused unless the parts were the whole state, each element once; read again, the
    state is what was copied.
    """
    told = []
    with cluster(layout, 2) as (plan, nodes):
        enter(plan, nodes)
        for snapshots in (each for node in nodes for each in node.workers.values()):
            assert snapshots.copies is not None and snapshots.copies.begun is not None
            snapshots.region.begin_save(snapshots.copies.begun)
        save = Save(AT, AT.generation, layout, plan.members, plan.nodes)
        for node in nodes:
            with uploading(node.store, tmp_path) as (uploads, heard):
                uploads.obey((1, 1), (save,), AT.generation, AT)
                told += [heard.next() for _ in node.workers]
    assert sorted(event.worker for event, _ in told if isinstance(event, ShardSaved)) == sorted(
        plan.members
    ), told
    assert {event.by for event, _ in told} == {AT.generation}
    said = {(cell_of(layout, plan.ranks[event.worker]), event.digest) for event, _ in told if event.worker}  # type: ignore[union-attr]
    assert len(said) == number_of_cells(layout), "replicas say the same"
    assert ("" in {digest for _, digest in said}) is (layout.replicas == 1), "one replica says nothing"
    receipts = [receipt for _, receipt in told if receipt is not None]
    found = checkpoints(tmp_path)
    found.commit(AT, receipts, {})
    assert found.verify(AT).good and sum(len(slices_of(receipt)) for receipt in receipts) == len(
        {part for each in receipts for part in slices_of(each)}
    )
    reader = found.open(AT)
    for tensor, value in truth(AT).items():
        expected = shard_of(AT, 1, 0).values[tensor.kind, tensor.name]
        assert (
            b"".join(bytes(data) for _, data in reader.read([tensor.whole()]))
            == expected.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        ), (tensor, value)


@contextmanager
def saving(how: str) -> Iterator[KeeperStore]:
    """A worker in a process of its own copies a save, and is killed; yields the keeper's store that holds its
    memory.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*MODULES, "tests.state.saver"])
    pipe, theirs = context.Pipe()
    worker = context.Process(target=save, args=(how, theirs), daemon=True)
    worker.start()
    theirs.close()
    store = KeeperStore(NODE, "127.0.0.1", SECRET)
    try:
        assert worker.pid is not None
        store.adopt(WORKER, worker.pid, pipe.recv())
        pipe.send("go")
        with pytest.raises(EOFError) if how == "torn" else nullcontext():
            assert pipe.recv() == "copied"
        worker.kill()
        worker.join(PATIENCE_S)
        assert worker.exitcode == -signal.SIGKILL
        store.ended(WORKER)
        yield store
    finally:
        worker.kill()
        store.close()


SAVE = Save(SAVED, SAVED.generation, PLAN.layout, PLAN.members, PLAN.nodes)


@pytest.mark.parametrize("how", ["whole", "torn"])
def test_a_worker_that_dies_after_its_copy_does_not_end_the_save(tmp_path: Path, how: str) -> None:
    """It is killed (SIGKILL) before a byte was uploaded.  The control: a worker that dies while it copies
    ends the save at once.
    """
    with saving(how) as store, uploading(store, tmp_path) as (uploads, told):
        uploads.obey((1, 1), (SAVE,), SAVED.generation, SAVED)
        event, receipt = told.next()
    if how == "torn":
        assert (
            isinstance(event, SaveFailed)
            and ("w0 (shard-00000-of-00001): the worker ended before its copy was complete") in event.reason
        )
        return
    assert event == ShardSaved(WORKER, SAVED, by=SAVED.generation) and receipt is not None
    checkpoints(tmp_path).commit(SAVED, [receipt], {})
    assert checkpoints(tmp_path).verify(SAVED).good


def test_a_part_for_which_there_is_no_room_is_written_once_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R11: the coordinator is told that a deletion helps.  The control is the next test: another refusal is
    told without that.
    """
    monkeypatch.setattr("elastic.state.uploads.AGAIN_S", 0.1)
    with (
        small_disk(tmp_path / "disk", 2**26) as disk,
        saving("whole") as store,
        uploading(store, disk) as (uploads, told),
    ):
        (disk / "other").write_bytes(bytes(2**26 - 2**16))
        uploads.obey((1, 1), (SAVE,), SAVED.generation, SAVED)
        event, receipt = told.next()
        assert (
            isinstance(event, SaveFailed)
            and event.again
            and event.full
            and "No space left on device" in event.reason
        )
        (disk / "other").unlink()
        while isinstance(event, SaveFailed):  # it may have been refused again meanwhile
            event, receipt = told.next()
        assert event == ShardSaved(WORKER, SAVED, by=SAVED.generation) and receipt is not None


@pytest.mark.parametrize("back", [True, False])
def test_a_part_that_the_bucket_refuses_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    """R11: the worker is dead, the copy is the only one, and a file lies where the bucket should be.  The
    coordinator is told once.

    The control: as long as the file is there, nothing else is reported, and nothing is said to be under way.
    """
    monkeypatch.setattr("elastic.state.uploads.AGAIN_S", 0.1)
    bucket = tmp_path / "bucket"
    bucket.touch()
    with saving("whole") as store, uploading(store, bucket) as (uploads, told):
        uploads.obey((1, 1), (SAVE,), SAVED.generation, SAVED)
        event, _ = told.next()
        assert (
            isinstance(event, SaveFailed)
            and event.again
            and "no part of w0 (shard-00000-of-00001) yet" in event.reason
        )
        assert not event.full and uploads.uploading() == ()
        if not back:
            with pytest.raises(queue.Empty):
                told.events.get(timeout=1.0)
            return
        bucket.unlink()
        event, receipt = told.next()
    assert event == ShardSaved(WORKER, SAVED, by=SAVED.generation) and receipt is not None
    checkpoints(bucket).commit(SAVED, [receipt], {})
    assert checkpoints(bucket).verify(SAVED).good


TORN = (
    "import os, sys; sys.stdin.readline(); print('{\"number\": 1, \"rec', end='', flush=True); "
    "os.kill(os.getpid(), 9)"
)
"""Program of an uploader that dies in the middle of its answer."""


@pytest.mark.parametrize("torn", [False, True], ids=["silent", "in the middle of its answer"])
def test_an_uploader_that_is_killed_is_followed_by_another(tmp_path: Path, torn: bool) -> None:
    """The uploader has the part in hand when it is killed (SIGKILL); the worker, which could copy again, is
    dead.
    """
    with saving("whole") as store, uploading(store, tmp_path) as (uploads, told):
        uploads.command = [sys.executable, "-c", TORN] if torn else uploads.command
        uploads.start()
        assert uploads._process is not None
        first, uploads.command = uploads._process, command(tmp_path)
        if not torn:
            os.kill(first.pid, signal.SIGSTOP)
        uploads.obey((1, 1), (SAVE,), SAVED.generation, SAVED)
        until(lambda: any(task.number for task in uploads._tasks.values()) or uploads._process is not first)
        if not torn:
            os.kill(first.pid, signal.SIGKILL)
        event, receipt = told.next()
        assert first.wait(PATIENCE_S) == -signal.SIGKILL and uploads._process.pid != first.pid
    assert isinstance(event, ShardSaved) and receipt is not None
    checkpoints(tmp_path).commit(SAVED, [receipt], {})


def test_a_part_that_kills_uploaders_is_given_up(tmp_path: Path) -> None:
    with saving("whole") as store:
        told = Told()
        uploads = Uploads(
            store, [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(7)"], told
        )
        uploads.obey((1, 1), (SAVE,), SAVED.generation, SAVED)
        event, _ = told.next()
        uploads.close()
    assert isinstance(event, SaveFailed) and "3 uploaders died" in event.reason


def test_an_uploader_that_hangs_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: it neither dies nor answers."""
    with saving("whole") as store, uploading(store, tmp_path) as (uploads, told):
        uploads.start()
        first = uploads._process
        assert first is not None
        os.kill(first.pid, signal.SIGSTOP)
        with monkeypatch.context() as patched:
            patched.setattr("elastic.state.uploads.HUNG_S", 1.0)
            uploads.obey((1, 1), (SAVE,), SAVED.generation, SAVED)
            assert first.wait(PATIENCE_S) == -signal.SIGKILL
        assert isinstance(told.next()[0], ShardSaved)


def test_an_uploader_that_goes_on_is_not_taken_for_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole part takes longer than ``HUNG_S``, but the uploader says again and again that it goes on."""
    monkeypatch.setattr("elastic.state.uploads.HUNG_S", 3.0)
    slow = (
        'import sys, time; n = sys.stdin.readline()\nwhile 1: print(\'{"number": 1, "slices": 0}\', '
        "flush=True); time.sleep(0.1)"
    )
    with saving("whole") as store, uploading(store, tmp_path) as (uploads, told):
        uploads.command = [sys.executable, "-S", "-c", slow]
        uploads.obey((1, 1), (SAVE,), SAVED.generation, SAVED)
        until(lambda: uploads._process is not None)
        assert uploads._process is not None
        with pytest.raises(subprocess.TimeoutExpired):
            uploads._process.wait(6.0)
        assert told.events.empty()


def test_an_uploader_says_that_a_part_goes_on(tmp_path: Path) -> None:
    with copied() as (_, snapshots):
        out = io.StringIO()
        Uploader(checkpoints(tmp_path), out)._write(part(snapshots.region))
    words = [json.loads(line) for line in out.getvalue().splitlines()]
    assert (
        words[:2] == [{"number": 1, "slices": 0}, {"number": 1, "slices": 1}]
        and words[2].keys() == {"number", "receipt", "digest"}
        and len(words) == 3
    )


REFUSED = """
import json, sys, time
for attempt, line in enumerate(sys.stdin):
    for slices in range(2 if attempt else 1):
        print(json.dumps({"number": json.loads(line)["number"], "slices": slices}), flush=True)
    time.sleep(0.5)
    if attempt < int(sys.argv[1]):
        print(json.dumps({"number": json.loads(line)["number"], "refused": "store unavailable"}), flush=True)
"""


@pytest.mark.parametrize("refusals", [1, 1 + REFUSALS])
def test_a_part_that_the_bucket_takes_again_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    """R11: the first attempt is refused before a byte is written, the others in their midst.  A part that is
    refused there again and again counts no more: otherwise nothing would end the wait for it."""
    monkeypatch.setattr("elastic.state.uploads.AGAIN_S", 0.1)
    with saving("whole") as store, uploading(store, tmp_path) as (uploads, told):
        uploads.command = [sys.executable, "-S", "-c", REFUSED, str(refusals)]
        uploads.obey((1, 1), (SAVE,), SAVED.generation, SAVED)
        for _ in range(min(refusals, REFUSALS)):
            event = told.next()[0]
            assert isinstance(event, SaveFailed) and event.again and "store unavailable" in event.reason
        until(lambda: next(iter(uploads._tasks.values())).number > refusals)
        if refusals < REFUSALS:
            until(lambda: uploads.uploading() == (SAVED,), what="its part is not written")
        else:
            turned(uploads)
            assert uploads.uploading() == ()
        assert told.events.empty()


FILLED = """for n in range(1, 9):
    input(), print('{"number":', n, ', "refused": "no", "full":', n // 3, '}', flush=True)"""


def test_a_bucket_that_is_full_after_it_was_down_is_told_to_be_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R11: the coordinator deletes what may go once it hears of want of room.  Each is told once, of four and
    more refusals.
    """
    monkeypatch.setattr("elastic.state.uploads.AGAIN_S", 0.01)
    with saving("whole") as store, uploading(store, tmp_path) as (uploads, told):
        uploads.command = [sys.executable, "-S", "-c", FILLED]
        uploads.obey((1, 1), (SAVE,), SAVED.generation, SAVED)
        assert [isinstance(event := told.next()[0], SaveFailed) and bool(event.full) for _ in range(2)] == [
            False,
            True,
        ]
        until(lambda: next(iter(uploads._tasks.values())).number > 4)
        assert told.events.empty()


def test_an_uploader_that_cannot_be_started_is_tried_again_a_second_later(tmp_path: Path) -> None:
    """The keeper looks for copies fifty times a second, but tries, and says the reason, only every
    ``RETRY_S`` seconds.
    """
    said: list[str] = []
    with saving("whole") as store, uploading(store, tmp_path) as (uploads, told):
        uploads.say, uploads.command = said.append, [str(tmp_path / "missing")]
        began = time.monotonic()
        uploads.obey((1, 1), (SAVE,), SAVED.generation, SAVED)
        until(lambda: len(said) >= 2)
        assert time.monotonic() - began >= RETRY_S and "no uploader can be started" in said[0]
        uploads.command = command(tmp_path)
        assert isinstance(told.next()[0], ShardSaved)


def test_at_the_limit_of_threads_no_uploader_is_left_to_which_nobody_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python raises this error where the system has no thread left; the process, which had been started
    before, ends.
    """
    said, processes, start = list[str](), list[subprocess.Popen[str]](), threading.Thread.start
    popen = subprocess.Popen[str].__init__

    def start_all_but_one(thread: threading.Thread) -> None:
        if thread.name == "uploader" and len(processes) == 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    def note(process: subprocess.Popen[str], *arguments: Any, **settings: Any) -> None:
        processes.append(process)
        popen(process, *arguments, **settings)

    with saving("whole") as store, uploading(store, tmp_path) as (uploads, told):
        uploads.say = said.append
        monkeypatch.setattr(threading.Thread, "start", start_all_but_one)
        monkeypatch.setattr(subprocess.Popen, "__init__", note)
        uploads.obey((1, 1), (SAVE,), SAVED.generation, SAVED)
        assert isinstance(told.next()[0], ShardSaved)
    assert said == ["no uploader can be started: can't start new thread"]
    assert len(processes) == 2 and processes[0].returncode == -signal.SIGKILL


def test_a_look_that_fails_is_told_and_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread goes on after any error, since it is the only one that hands parts to the uploader."""
    said, errors, find = list[str](), [MemoryError("once"), KeyError("twice")], Region.find

    def fail(region: Region, copy: Copy) -> int | None:
        if errors and threading.current_thread().name == "uploads":
            raise errors.pop()
        return find(region, copy)

    with saving("whole") as store, uploading(store, tmp_path) as (uploads, told):
        uploads.say = said.append
        monkeypatch.setattr(Region, "find", fail)
        uploads.obey((1, 1), (SAVE,), SAVED.generation, SAVED)
        assert isinstance(told.next()[0], ShardSaved)
    assert [each.splitlines()[-1] for each in said] == ["KeyError: 'twice'", "MemoryError: once"]


def test_an_uploader_ends_with_its_keeper(tmp_path: Path) -> None:
    """A keeper that is killed leaves no process behind."""
    program = f"""if True:
        import sys
        from elastic.state.keeper_store import KeeperStore
        from elastic.state.uploads import Uploads
        uploads = Uploads(KeeperStore("n", "127.0.0.1", b"k" * 32), {command(tmp_path)!r}, print)
        uploads.start()
        print(uploads._process.pid, flush=True)
        sys.stdin.read()
    """
    keeper = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert keeper.stdout is not None
    uploader = os.pidfd_open(int(keeper.stdout.readline()))
    keeper.kill()
    keeper.communicate()
    assert select.select([uploader], [], [], PATIENCE_S)[0]
    os.close(uploader)


@contextmanager
def copied(slots: int = 3, **changes: Any) -> Iterator[tuple[Node, Snapshots]]:
    """One worker that has entered a world at AT; every other step is saved."""
    with cluster(Layout(1, 1), 1, slots) as (plan, nodes):
        (snapshots,) = nodes[0].workers.values()
        snapshots.saves = SaveRule(2, 100)
        snapshots.enter(replace(plan, **changes), WorkerId("w0"), shard_of(AT, 1, 0))
        snapshots.settle()
        yield nodes[0], snapshots


def part(region: Region, version: Version = AT) -> SavePart:
    return SavePart(1, os.getpid(), region.descriptor, version, Layout(1, 1), 0)


@pytest.mark.parametrize("bent", [True, False])
def test_what_memory_has_bent_does_not_get_into_the_bucket(tmp_path: Path, bent: bool) -> None:
    """One bit of one tensor is flipped.  The control: none is."""
    with copied() as (_, snapshots):
        region = snapshots.region
        slot = region.find(Copy(AT, WHOLE))
        assert slot is not None
        if bent:
            region.data(slot)[frame(TENSORS, WHOLE).places[TENSORS[2]].offset + 3] ^= 1
            with pytest.raises(StateMissing, match="the copy of parameter 'b' in host memory is damaged"):
                upload(checkpoints(tmp_path), region, part(region))
            assert not ObjectStore.open(str(tmp_path)).list()
        else:
            assert (
                upload(checkpoints(tmp_path), region, part(region)).file.name
                == f"{name_of(Layout(1, 1), 0)}.safetensors"
            )


class Interrupted(Folder):
    """This store calls ``interrupt()`` before it takes piece number ``at`` of a shard's file."""

    at = 0
    interrupt: Callable[[], None]

    def put_if_absent(self, key: str, data: Data) -> None:
        def interrupted() -> Iterator[Any]:
            for number, piece in enumerate(data):
                if number == self.at:
                    self.interrupt()
                yield piece

        super().put_if_absent(key, interrupted() if key.endswith(".safetensors") else data)


@pytest.mark.parametrize("at", range(1, len(TENSORS) + 1))
@pytest.mark.parametrize("by", ["another copy", "nothing"])
def test_a_copy_that_is_overwritten_while_it_is_written_is_no_part_of_a_checkpoint(
    tmp_path: Path, by: str, at: int
) -> None:
    """The slot changes after the look at its digests, before each tensor in turn.  A later attempt finds the
    copy again, and the torn object does not stand in its way.  The control: nothing overwrites the slot."""
    with copied() as (_, snapshots):
        region = snapshots.region
        slot = region.find(Copy(AT, WHOLE))
        assert slot is not None
        good, interrupted = bytes(region.data(slot)), list[int]()

        def interrupt() -> None:
            interrupted.append(at)
            if by == "another copy":
                region.begin(slot)
                region.data(slot)[:] = bytes(len(good))
                region.finish(slot, Copy(Version(6, 2), WHOLE), len(good))

        store = Interrupted(str(tmp_path))
        store.at, store.interrupt = at, interrupt
        if by == "another copy":
            with pytest.raises(StateMissing, match="was overwritten while it was written"):
                upload(Checkpoints(store, "run"), region, part(region))
        else:
            upload(Checkpoints(store, "run"), region, part(region))
        assert interrupted == [at] and len(store.list()) == 1
        region.data(slot)[:] = good
        region.finish(slot, Copy(AT, WHOLE), len(good))
        checkpoints(tmp_path).commit(AT, [upload(checkpoints(tmp_path), region, part(region))], {})
        assert checkpoints(tmp_path).verify(AT).good


def test_what_is_given_up_is_not_written(tmp_path: Path) -> None:
    with copied() as (_, snapshots), pytest.raises(GivenUp):
        upload(checkpoints(tmp_path), snapshots.region, part(snapshots.region), lambda: True)
    assert not ObjectStore.open(str(tmp_path)).list()


def test_what_is_not_there_is_not_written(tmp_path: Path) -> None:
    with copied() as (_, snapshots), pytest.raises(StateMissing, match="is not in its slot any more"):
        upload(checkpoints(tmp_path), snapshots.region, part(snapshots.region, Version(9, 2)))
