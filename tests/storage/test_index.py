"""A large index is read by row groups: a reader of few slices fetches few of its bytes, and checks all that it fetches."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.checkpoints import INDEX, MANIFEST, Checkpoints, Manifest, ShardReceipt, Stored
from storage.checkpoints import index as index_module
from storage.checkpoints.index import groups_with
from storage.checkpoints.manifest import Block
from storage.checkpoints.reader import runs
from storage.checkpoints.shards import entry_of, header_of, metadata_of
from storage.documents import File, digest_of
from storage.errors import Damaged, Incomplete
from storage.objects import ObjectStore
from storage.slices import Slice, Tensor, Version
from tests.storage.states import TENSORS, save, state_of
from tests.support.stores import Forwarding

V = Version(7, 1)
TENSORS_OF_LARGE, WRITERS, ITEM = 1600, 100, 8
_numbers = itertools.count()


class Counting(Forwarding):
    """A store that notes how many bytes of which object were fetched."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.fetched: list[tuple[str, int]] = []

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        raw = super().get(key, start, stop)
        self.fetched.append((key.rpartition("/")[2], len(raw)))
        return raw

    def of_index(self) -> list[int]:
        return [size for name, size in self.fetched if name == INDEX]


def fresh() -> Checkpoints:
    return Checkpoints(Counting(ObjectStore.open(f"memory://index-{next(_numbers)}")), "run")


def large() -> tuple[Checkpoints, dict[str, bytes]]:
    """Returns a checkpoint whose index has 160,000 rows, all different, in a counting store; and what each tensor holds."""
    checkpoints, draw = fresh(), random.Random(1)
    tensors = [Tensor(f"layers.{n}.weight", "parameter", "F64", (WRITERS,)) for n in range(TENSORS_OF_LARGE)]
    values = {tensor.name: draw.randbytes(WRITERS * ITEM) for tensor in tensors}
    receipts = []
    for writer in range(WRITERS):
        rows, name = [], f"writer-{writer:03d}.safetensors"
        parts = [(tensor, Slice(tensor.name, tensor.kind, (writer,), (writer + 1,))) for tensor in tensors]
        data = bytearray(header_of([entry_of(*each) for each in parts], metadata_of(V)))
        for tensor, part in parts:
            item = values[tensor.name][writer * ITEM : (writer + 1) * ITEM]
            rows.append(Stored(tensor, part, name, len(data), len(data) + ITEM, digest_of(item)))
            data += item
        checkpoints.store.put(f"{checkpoints.folder(V)}/{name}", data)
        receipts.append(ShardReceipt(V, File(name, len(data), digest_of(data)), tuple(rows)))
    checkpoints.commit(V, receipts, {})
    return checkpoints, values


@pytest.mark.full
def test_of_a_large_index_few_bytes_are_read_for_few_slices() -> None:
    checkpoints, values = large()
    store = checkpoints.store
    assert isinstance(store, Counting)
    size = checkpoints.manifest(V).index.size
    assert size > 10 * 2**20
    wanted = [Slice(f"layers.{n}.weight", "parameter", (5,), (60,)) for n in (1, 1234)]
    store.fetched.clear()
    reader = checkpoints.open(V)
    found = {part.name: bytes(raw) for part, raw in reader.read(wanted)}
    assert found == {part.name: values[part.name][5 * ITEM : 60 * ITEM] for part in wanted}
    assert 0 < sum(store.of_index()) < size / 5, store.of_index()

    again = len(store.of_index())
    assert len(list(reader.read(wanted))) == 2
    assert len(store.of_index()) == again, "what was read is remembered"

    store.fetched.clear()
    reader = checkpoints.open(V)
    assert len(reader.tensors()) == TENSORS_OF_LARGE
    assert len(list(reader.read(wanted))) == 2
    assert len(store.of_index()) == 2, "who has listed the tensors reads no row of them again"

    store.fetched.clear()
    everything = [Slice(name, "parameter", (0,), (1,)) for name in values]
    reader = checkpoints.open(V)
    assert len(list(reader.read(everything))) == TENSORS_OF_LARGE
    assert size <= sum(store.of_index()) < 1.1 * size and len(store.of_index()) == 2, "the control: for all of them it comes whole, at once"
    assert len(reader.rows) == TENSORS_OF_LARGE * WRITERS


# ---- the same in small


@pytest.fixture
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> Checkpoints:
    """The small state of the other tests, with an index of two rows a group."""
    monkeypatch.setattr(index_module, "GROUP_ROWS", 2)
    found = fresh()
    save(found, V, state_of(TENSORS, seed=1), 3)
    assert len(found.manifest(V).blocks) > 5
    return found


@pytest.mark.fast
def test_every_tensor_by_itself_is_what_was_saved(checkpoints: Checkpoints) -> None:
    state = state_of(TENSORS, seed=1)
    for tensor in TENSORS:
        assert dict(checkpoints.open(V).read([tensor.whole()])) == {tensor.whole(): state[tensor]}
    reader = checkpoints.open(V)
    for tensor in TENSORS:  # one after the other, with one reader
        assert dict(reader.read([tensor.whole()])) == {tensor.whole(): state[tensor]}
    assert checkpoints.verify(V).good
    for name in ("a", "nosuch", "zzz"):
        with pytest.raises(Incomplete, match=name):
            list(checkpoints.open(V).read([Slice(name, "parameter", (0,), (1,))]))


@pytest.mark.fast
def test_blocks_are_all_bytes_of_the_index_and_any_damage_to_them_is_noticed(checkpoints: Checkpoints) -> None:
    """A reader that needs the damaged block says so; a reader that does not need it returns right data."""
    manifest, key = checkpoints.manifest(V), f"{checkpoints.folder(V)}/{INDEX}"
    assert [block.first for block in manifest.blocks] == [0, *(block.last for block in manifest.blocks[:-1])]
    assert manifest.blocks[-1].last == manifest.index.size
    good, state, noticed = checkpoints.store.get(key), state_of(TENSORS, seed=1), 0
    for position in range(0, len(good), 97):
        bad = bytearray(good)
        bad[position] ^= 1
        checkpoints.store.put(key, bad)
        assert not checkpoints.verify(V).good
        for tensor in (TENSORS[0], TENSORS[-1]):
            try:
                assert dict(checkpoints.open(V).read([tensor.whole()])) == {tensor.whole(): state[tensor]}
            except Damaged as error:
                assert INDEX in error.object
                noticed += 1
    assert noticed
    for changed in (good + b" ", good[:-1], good[:100], b""):
        checkpoints.store.put(key, changed)
        with pytest.raises(Damaged, match=INDEX):
            checkpoints.open(V)
    checkpoints.store.delete(key)
    with pytest.raises(Damaged, match=INDEX):
        checkpoints.open(V)


@pytest.mark.fast
def test_a_manifest_without_blocks_is_read_as_before(checkpoints: Checkpoints) -> None:
    """Every checkpoint that is older than blocks has such a manifest, and so has every small one."""
    key, manifest = f"{checkpoints.folder(V)}/{MANIFEST}", checkpoints.manifest(V)
    old = Manifest(manifest.version, manifest.files, manifest.about).to_bytes()
    assert b"blocks" not in old
    checkpoints.store.put(key, old)
    state = state_of(TENSORS, seed=1)
    assert dict(checkpoints.open(V).read([tensor.whole() for tensor in TENSORS])) == {t.whole(): state[t] for t in TENSORS}
    assert checkpoints.verify(V).good


@pytest.mark.fast
def test_a_small_index_has_no_blocks() -> None:
    checkpoints = fresh()
    save(checkpoints, V, state_of(TENSORS, seed=1), 3)
    assert checkpoints.manifest(V).blocks == ()
    assert b"blocks" not in checkpoints.store.get(f"{checkpoints.folder(V)}/{MANIFEST}")


@pytest.mark.fast
@given(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=30), st.integers(1, 4), st.sets(st.sampled_from("`abcdefgh")))
def test_the_groups_of_a_name_are_all_that_hold_it(rows: list[str], size: int, names: set[str]) -> None:
    """The simple way looks into every group; the product reads at most one group more for a name."""
    rows.sort()
    groups = [rows[first : first + size] for first in range(0, len(rows), size)]
    blocks = [Block(0, 0, "", group[0]) for group in groups] + [Block(0, 0, "", "")]
    needed = {number for number, group in enumerate(groups) if names & set(group)}
    found = groups_with(blocks, names)
    assert needed <= set(found) and len(found) <= len(needed) + len(names)
    assert [number for run in runs(found) for number in run] == found
    assert all(run == list(range(run[0], run[-1] + 1)) for run in runs(found))
