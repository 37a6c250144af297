"""Checkpoints: what is written is read, whatever the layouts; nothing exists until its manifest does."""

from __future__ import annotations

import itertools
import json
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.checkpoints import Checkpoints, ShardReceipt
from storage.checkpoints.cover import describe
from storage.checkpoints.export import content_digest, export
from storage.checkpoints.manifest import MANIFEST
from storage.checkpoints.shards import ITEM_BYTES
from storage.documents import seal
from storage.errors import BadFormat, Exists, Incomplete, Unavailable
from storage.objects import ObjectStore
from storage.slices import Slice, Tensor, Version, nbytes
from tests.storage.states import TENSORS, cut, part_of, save, slices_of, state_of, write
from tests.storage.test_cover import boxes, tilings
from tests.support.patience import PATIENCE_S
from tests.support.stores import Forwarding

pytestmark = pytest.mark.fast
V = Version(10, 2)
ABOUT = {
    "job": "a1b2",
    "layout": {"dp_replicate": 1, "dp_shard": 3},
    "cursor": {"sample": 7},
    "lineage": [[1, 4], [2, 10]],
    "parent": [4, 1],
    "versions": {"torch": "2.13.0"},
}
_numbers = itertools.count()


@pytest.fixture
def checkpoints() -> Checkpoints:
    return fresh()


def fresh() -> Checkpoints:
    return Checkpoints(ObjectStore.open(f"memory://checkpoints-{next(_numbers)}"), "run")


# ---- round trips


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    kind, dtype = (
        draw(st.sampled_from(["parameter", "moment.exp_avg", "buffer"])),
        draw(st.sampled_from(sorted(ITEM_BYTES))),
    )
    return Tensor("w", kind, dtype, shape)


@settings(max_examples=60)
@given(st.data())
def test_any_boxes_written_any_boxes_read(data: st.DataObject) -> None:
    """Writers and readers cut each tensor into random boxes; the twin slices the whole tensor with numpy."""
    state = state_of(
        data.draw(st.lists(tensors(), min_size=1, max_size=4, unique_by=lambda t: t.kind)), seed=1
    )
    writers: list[list[tuple[Tensor, Slice]]] = [[] for _ in range(data.draw(st.integers(1, 3)))]
    for tensor in state:
        for tile in data.draw(tilings(tensor.shape)):
            part = Slice(tensor.name, tensor.kind, tile.start, tile.stop)
            if part.count or not tensor.whole().count:
                writers[data.draw(st.integers(0, len(writers) - 1))].append((tensor, part))
    checkpoints = fresh()
    writers = [sorted(set(parts)) for parts in writers]
    receipts = [
        checkpoints.write_shard(V, f"{n}", [part_of(state, *part) for part in parts])
        for n, parts in enumerate(writers)
    ]
    checkpoints.commit(V, [ShardReceipt.unpacked(receipt.packed()) for receipt in receipts], {})
    reader = checkpoints.open(V)
    assert set(reader.tensors()) == set(state)
    wanted = [(tensor, data.draw(boxes(tensor.shape))) for tensor in state for _ in range(2)]
    asked = [Slice(tensor.name, tensor.kind, box.start, box.stop) for tensor, box in wanted]
    found = sorted((part, bytes(raw)) for part, raw in reader.read(asked))
    assert found == sorted(
        (part, cut(state, tensor, part)) for (tensor, _), part in zip(wanted, asked, strict=True)
    )
    needed = {row for row in reader.rows for part in asked if row.slice.intersect(part)}
    assert reader.bytes_read == sum(row.last - row.first for row in needed)
    assert checkpoints.verify(V).good


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_reading_in_the_saved_layout_reads_nothing_twice(checkpoints: Checkpoints, shards: int) -> None:
    state = state_of(TENSORS, seed=2)
    receipts = write(checkpoints, V, state, shards)
    checkpoints.commit(V, receipts, ABOUT)
    reader = checkpoints.open(V)
    for receipt in receipts:
        before = reader.bytes_read
        slices = slices_of(receipt)
        parts = dict(reader.read([part for _, part in slices]))
        assert parts == {part: cut(state, tensor, part) for tensor, part in slices}
        assert reader.bytes_read - before == sum(nbytes(tensor, part) for tensor, part in slices)


@pytest.mark.parametrize(("room", "together", "comes"), [(2**29, 4, True), (1, 1, True), (1, 2, False)])
def test_several_requests_are_under_way_of_as_many_bytes_as_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, room: int, together: int, comes: bool
) -> None:
    """The store answers only once ``together`` requests have come, which never happens if there is room for
    fewer.
    """
    barrier = threading.Barrier(together)

    class Together(Forwarding):
        waits, at_once = False, 4

        def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
            if self.waits:
                barrier.wait(PATIENCE_S if comes else 0.5)
            return super().get(key, start, stop)

    monkeypatch.setattr("storage.checkpoints.reader.FETCH_BYTES", 1)  # each slice by itself
    monkeypatch.setattr("storage.checkpoints.reader.AHEAD_BYTES", room)
    state, checkpoints = state_of(TENSORS, seed=4), fresh()
    save(checkpoints, V, state, 2)
    store = Together(checkpoints.store)
    reader = Checkpoints(store, "run").open(V)
    rows = [row for row in reader.rows if row.last > row.first]
    rows = rows[: len(rows) // together * together]
    assert len(rows) >= 4
    store.waits = True
    with nullcontext() if comes else pytest.raises(threading.BrokenBarrierError):
        found = dict(reader.read([row.slice for row in rows]))
        assert found == {row.slice: cut(state, row.tensor, row.slice) for row in rows}


def test_neighbours_are_fetched_together(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(Forwarding):
        requests: list[str]

        def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
            self.requests.append(key)
            return super().get(key, start, stop)

    state = state_of(TENSORS, seed=3)
    save(checkpoints, V, state, 2)
    counting = Counting(checkpoints.store)
    counting.requests = []
    reader = Checkpoints(counting, "run").open(V)
    counting.requests.clear()
    assert len(dict(reader.read([tensor.whole() for tensor in TENSORS]))) == len(TENSORS)
    # a header and all slices of each of two files, not one request a slice
    assert len(counting.requests) == 4
    written, requests = [], list[int]()
    for limit in (2**24, 1):
        monkeypatch.setattr("storage.checkpoints.reader.FETCH_BYTES", limit)
        reader = Checkpoints(counting, "run").open(V)
        counting.requests.clear()
        written.append([path.read_bytes() for path in export(reader, tmp_path / str(limit))])
        written[-1].append(content_digest(reader).encode())
        requests.append(len(counting.requests))
    # an export writes tensor by tensor, but small ones are read together, too; the control reads each by itself
    assert written[0] == written[1] and requests[0] < 0.75 * requests[1], requests


def test_every_slice_is_aligned_as_its_type_wants(checkpoints: Checkpoints) -> None:
    """Aligned slices let a mapped file be used in place."""
    save(checkpoints, V, state_of(TENSORS, seed=1), 2)
    for row in checkpoints.open(V).rows:
        assert row.first % ITEM_BYTES[row.tensor.dtype] == 0, row


def test_what_is_not_there_cannot_be_read(checkpoints: Checkpoints) -> None:
    save(checkpoints, V, state_of(TENSORS[:1], seed=1), 2)
    reader = checkpoints.open(V)
    for wanted in (
        Slice("nosuch", "parameter", (0,), (1,)),
        Slice("embed.weight", "parameter", (6, 0), (8, 3)),
    ):
        with pytest.raises(Incomplete, match=wanted.name):
            list(reader.read([wanted]))


# ---- other tools


def test_any_tool_reads_shards_index_and_exports(tmp_path: Path) -> None:
    """The plain ``safetensors`` library and a reader of JSON read them, without our code."""
    checkpoints = Checkpoints(ObjectStore.open(str(tmp_path)), "run")
    state = state_of(TENSORS, seed=4)
    save(checkpoints, V, state, 3)
    folder = tmp_path / checkpoints.folder(V)
    shards = {}
    for path in folder.glob("*.safetensors"):
        shards |= dict(safetensors.deserialize(path.read_bytes()))
    for row in checkpoints.open(V).rows:
        entry = shards.pop(describe(row.slice))
        assert (entry["dtype"], tuple(entry["shape"])) == (row.tensor.dtype, row.slice.shape)
        assert bytes(entry["data"]) == cut(state, row.tensor, row.slice)
    assert not shards
    groups = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()][1:]
    assert sum(len(group["tensors"]) * len(group["boxes"]) for group in groups) == len(
        checkpoints.open(V).rows
    )
    model, optimizer = checkpoints.export(V, tmp_path / "export")
    found = {
        path.name: {name: bytes(entry["data"]) for name, entry in safetensors.deserialize(path.read_bytes())}
        for path in (model, optimizer)
    }
    embed, moment, half, steps, mask, _, updates = TENSORS  # no export has a constant
    assert found == {
        "model.safetensors": {
            "embed.weight": state[embed],
            "half": state[half],
            "steps": state[steps],
            "mask": state[mask],
        },
        "optimizer.safetensors": {"exp_avg/embed.weight": state[moment], "updates": state[updates]},
    }
    with safetensors.safe_open(model, framework="numpy") as file:
        assert file.get_tensor("embed.weight").tobytes() == state[embed]
        assert file.metadata() == {"format": "pt"}


def exported(path: Path) -> dict[str, bytes]:
    return {name: bytes(entry["data"]) for name, entry in safetensors.deserialize(path.read_bytes())}


def test_the_same_state_exports_to_the_same_bytes_whatever_the_layout(tmp_path: Path) -> None:
    exported = set()
    for shards in (1, 2, 5):
        checkpoints = fresh()
        save(checkpoints, V, state_of(TENSORS, seed=5), shards)
        exported.add(b"".join(path.read_bytes() for path in checkpoints.export(V, tmp_path / f"{shards}")))
    assert len(exported) == 1


# ---- commit


def test_a_manifest_says_what_it_was_told(checkpoints: Checkpoints) -> None:
    assert checkpoints.versions() == []
    receipts = write(checkpoints, V, state_of(TENSORS, seed=1), 3)
    assert [listed[:2] for listed in checkpoints.versions()] == [(V, None)]
    checkpoints.commit(V, receipts, ABOUT)
    manifest = checkpoints.manifest(V)
    assert manifest.about == ABOUT
    assert manifest.lineage == ((1, 4), (2, 10))
    assert manifest.layout == ABOUT["layout"]
    assert {file.name for file in manifest.files} == {receipt.file.name for receipt in receipts} | {
        "index.jsonl"
    }
    with pytest.raises(ValueError, match="no entry hobby"):
        checkpoints.commit(V, receipts, {"hobby": 1})


@pytest.mark.parametrize("without", [0, 1, 2])
def test_no_manifest_without_every_shard(checkpoints: Checkpoints, without: int) -> None:
    receipts = write(checkpoints, V, state_of(TENSORS, seed=1), 3)
    with pytest.raises(Incomplete, match=r"embed\.weight"):
        checkpoints.commit(V, [receipt for number, receipt in enumerate(receipts) if number != without], {})
    assert checkpoints.latest_good() is None
    checkpoints.commit(V, receipts, {})
    assert checkpoints.latest_good() == V


def test_no_manifest_with_a_tensor_missing_altogether(checkpoints: Checkpoints) -> None:
    """Replicas share the tensors out, so intervals alone cannot tell; the digest of the tensor list can."""
    state = state_of(TENSORS, seed=1)
    shares = [[part_of(state, tensor, tensor.whole()) for tensor in TENSORS[n::2]] for n in (0, 1)]
    receipts = [checkpoints.write_shard(V, f"{n}", share, state=TENSORS) for n, share in enumerate(shares)]
    with pytest.raises(Incomplete, match="do not cover the whole state"):
        checkpoints.commit(V, receipts[:1], {})
    with pytest.raises(Incomplete, match="do not cover the whole state"):
        checkpoints.commit(V, [], {})
    checkpoints.commit(V, receipts, {})


def test_no_manifest_for_what_is_not_in_the_bucket(checkpoints: Checkpoints) -> None:
    receipts = write(checkpoints, V, state_of(TENSORS, seed=1), 2)
    key = f"{checkpoints.folder(V)}/{receipts[1].file.name}"
    whole = checkpoints.store.get(key)
    for there in (None, whole[:-1]):
        checkpoints.store.delete(key)
        if there is not None:
            checkpoints.store.put(key, there)
        with pytest.raises(Incomplete, match=receipts[1].file.name):
            checkpoints.commit(V, receipts, {})
    with pytest.raises(Incomplete, match="a receipt is for step 10"):
        checkpoints.commit(Version(11, 2), receipts, {})
    assert checkpoints.latest_good() is None


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_commit_asks_once_for_each_shard_and_for_as_many_at_a_time_as_the_store_takes(
    checkpoints: Checkpoints, at_once: int
) -> None:
    """The store answers only once ``together`` requests have come.  A store that takes one at a time is the
    control.
    """

    class Together(Forwarding):
        def size(self, key: str) -> int:
            asked.append(key)
            barrier.wait(PATIENCE_S if together <= at_once else 0.5)
            return super().size(key)

    receipts, store = write(checkpoints, V, state_of(TENSORS, seed=1), 8), Together(checkpoints.store)
    store.at_once = at_once
    for together in (4, 1) if at_once == 1 else (4,):
        asked, barrier = list[str](), threading.Barrier(together)
        comes = together <= at_once
        with nullcontext() if comes else pytest.raises(threading.BrokenBarrierError):
            Checkpoints(store, "run").commit(V, receipts, ABOUT)
        assert (checkpoints.latest_good() == V) == comes
        if comes:
            assert sorted(asked) == [f"{checkpoints.folder(V)}/{receipt.file.name}" for receipt in receipts]


def test_a_commit_that_meets_a_store_that_is_down_asks_for_no_more(checkpoints: Checkpoints) -> None:
    """A request may take a minute until it gives up; here it takes 0.2 s, except the first ones."""

    class Down(Forwarding):
        at_once = 2

        def size(self, key: str) -> int:
            asked.append(key)
            if len(asked) > 2:
                time.sleep(0.2)
            raise Unavailable(self.full_name(key), "503 slow down")

    asked, receipts = list[str](), write(checkpoints, V, state_of(TENSORS, seed=1), 12)
    with pytest.raises(Unavailable, match="503"):
        Checkpoints(Down(checkpoints.store), "run").commit(V, receipts, ABOUT)
    assert len(asked) < len(receipts)


def test_two_committers(checkpoints: Checkpoints) -> None:
    """Create-only: the same bytes again are success, other bytes are refused, and nothing that was committed
    changes.
    """
    receipts = write(checkpoints, V, state_of(TENSORS, seed=1), 2)
    digest = checkpoints.commit(V, receipts, ABOUT)
    assert checkpoints.commit(V, receipts[::-1], ABOUT) == digest
    with pytest.raises(Exists, match=MANIFEST):
        checkpoints.commit(V, receipts, {**ABOUT, "job": "other"})
    with pytest.raises(Exists, match=MANIFEST):
        save(checkpoints, V, state_of(TENSORS, seed=2), 2)
    assert checkpoints.verify(V).good
    assert checkpoints.manifest(V).about == ABOUT


def test_an_attempt_that_came_to_nothing_is_not_in_the_way(checkpoints: Checkpoints) -> None:
    """A world with as many members in another layout left the same names with other bytes; neither is
    overwritten.
    """
    old, new = state_of(TENSORS, seed=1), state_of(TENSORS, seed=2)
    write(checkpoints, V, old, 2)
    checkpoints.store.put(f"{checkpoints.folder(V)}/index.jsonl", b"left behind")
    save(checkpoints, V, new, 2)
    zombie = write(checkpoints, V, old, 2)
    assert checkpoints.verify(V).good
    whole = dict(checkpoints.open(V).read([TENSORS[0].whole()]))
    assert whole == {TENSORS[0].whole(): new[TENSORS[0]]}
    again = write(checkpoints, V, new, 2)
    assert [receipt.file for receipt in again] == [
        f for f in checkpoints.manifest(V).files if f.name.startswith("shard")
    ]
    assert not {receipt.file for receipt in zombie} & {receipt.file for receipt in again}


def test_finding_ones_own_shard_again_takes_the_memory_of_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard may be larger than the memory that is left.  The control: one bit at its end makes it another
    one.
    """
    sizes: list[int] = []

    class Measuring(Forwarding):
        def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
            raw = super().get(key, start, stop)
            sizes.append(len(raw))
            return raw

    monkeypatch.setattr("storage.checkpoints.checkpoints.FETCH_BYTES", 100)
    checkpoints = Checkpoints(Measuring(fresh().store), "run")
    first = write(checkpoints, V, state_of(TENSORS, seed=1), 1)[0]
    assert not sizes and first.file.size > 500
    assert write(checkpoints, V, state_of(TENSORS, seed=1), 1)[0].file == first.file
    assert sum(sizes) == first.file.size and max(sizes) == 100
    key = f"{checkpoints.folder(V)}/{first.file.name}"
    other = bytearray(checkpoints.store.get(key))
    other[-1] ^= 1
    checkpoints.store.put(key, other)
    assert write(checkpoints, V, state_of(TENSORS, seed=1), 1)[0].file.name != first.file.name


def test_the_hook_runs_before_each_slice(checkpoints: Checkpoints) -> None:
    calls: list[int] = []
    state = state_of(TENSORS, seed=1)
    parts = [part_of(state, tensor, tensor.whole()) for tensor in TENSORS]
    checkpoints.write_shard(V, "a", parts, hook=lambda: calls.append(1))
    assert len(calls) == len(TENSORS)


def test_bytes_that_do_not_fit_the_slice_are_a_mistake(checkpoints: Checkpoints) -> None:
    with pytest.raises(
        ValueError,
        match=(r"parameter/embed\.weight@0,0-7,3 as F32 has 84 bytes, but 83 bytes were passed"),
    ):
        checkpoints.write_shard(V, "a", [(TENSORS[0], TENSORS[0].whole(), memoryview(bytes(83)))])


# ---- latest good


def test_latest_good(checkpoints: Checkpoints) -> None:
    state = state_of(TENSORS[:1], seed=1)
    for version in (Version(4, 1), Version(6, 1), Version(6, 2), Version(8, 3)):
        save(checkpoints, version, state, 1)
    write(checkpoints, Version(12, 3), state, 2)  # never committed
    assert checkpoints.latest_good() == Version(8, 3)
    checkpoints.quarantine(Version(8, 3), "a flipped byte")
    checkpoints.quarantine(Version(8, 3), "said twice")
    assert checkpoints.latest_good() == Version(6, 2)
    assert [each.damaged for each in checkpoints.versions() if each.version == Version(8, 3)] == [
        "a flipped byte"
    ]


def test_a_newer_format_is_refused_by_its_number(checkpoints: Checkpoints) -> None:
    checkpoints.store.put(f"{checkpoints.folder(V)}/{MANIFEST}", seal({"format": 3, "step": 10}))
    for look in (lambda: checkpoints.open(V), checkpoints.versions, checkpoints.latest_good):
        with pytest.raises(
            BadFormat,
            match=(
                r"MANIFEST.json has format 3, but this release reads formats up "
                r"to 2: install a newer release"
            ),
        ):
            look()


def test_foreign_objects_are_no_checkpoints(checkpoints: Checkpoints) -> None:
    checkpoints.store.put("run/steps/README", b"")
    checkpoints.store.put("run/steps/ten/g1/MANIFEST.json", b"")
    assert checkpoints.versions() == []
