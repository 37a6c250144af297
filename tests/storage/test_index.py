"""The index of a checkpoint (N8): a committer and a reader do little however many slices there are, and read
only what they need.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.checkpoints import INDEX, Checkpoints, ShardReceipt
from storage.checkpoints.checkpoints import RECENT
from storage.checkpoints.index import Index, cuts_of, grouped
from storage.documents import seal
from storage.errors import BadFormat, Damaged, Incomplete, Missing
from storage.objects import ObjectStore
from storage.slices import Slice, Tensor, Version
from tests.benchmarks.scale.manifests import Counting, commit, parts_of, saved
from tests.storage.states import TENSORS, save, state_of

pytestmark = pytest.mark.fast
V = Version(1000, 3)
_numbers = itertools.count()


def fresh() -> Checkpoints:
    return Checkpoints(Counting(ObjectStore.open(f"memory://index-{next(_numbers)}")), "run")


# ---- what is counted


def test_a_member_that_heals_reads_the_header_and_the_slices_of_its_own_file_alone() -> None:
    """N8: four requests: the manifest, the index, the header, the slices.  No other member's file exists, so
    the control finds none.
    """
    checkpoints, store, tensors, receipts = saved(64, layers=4)
    commit(checkpoints, receipts)
    assert store.requests <= 64 + 3 + 1, (
        "one for each part, the index, the manifest, and the real part that was written before"
    )
    manifest = checkpoints.manifest(V)
    mine = manifest.files[64 // 5]
    store.requests = store.bytes = 0
    reader = checkpoints.open(V)
    wanted = parts_of(tensors, 64 // 5)
    assert sorted(part for part, _ in reader.read(wanted)) == sorted(wanted)
    of_manifest = len(checkpoints.store.store.get(f"{checkpoints.folder(V)}/MANIFEST.json"))  # type: ignore[attr-defined]
    assert store.requests == 4
    assert store.bytes == of_manifest + manifest.index.size + mine.size
    with pytest.raises(Damaged, match="found no object"):
        list(reader.read(parts_of(tensors, 1)))


def test_an_index_grows_with_writers_times_shapes_not_with_writers_times_tensors() -> None:
    """Twice as many tensors add their names once.  One row for each slice would add 64 rows for each."""
    sizes, names = [], []
    for layers in (4, 8):
        checkpoints, _, tensors, receipts = saved(64, layers)
        commit(checkpoints, receipts)
        sizes.append(checkpoints.manifest(V).index.size)
        names.append(sum(len(f'["{tensor.name}","{tensor.kind}","{tensor.dtype}"],') for tensor in tensors))
    assert 0 < sizes[1] - sizes[0] <= names[1] - names[0]


def test_a_receipt_names_each_tensor_once_and_is_kept_packed() -> None:
    receipts = [[len(receipt) for receipt in saved(n, layers=4)[3]] for n in (4, 64)]
    assert abs(max(receipts[0]) - max(receipts[1])) < 100, "it does not depend on the number of members"
    unpacked = [ShardReceipt.unpacked(receipt) for receipt in saved(4, layers=4)[3]]
    assert unpacked[0].cuts[0].tensors is unpacked[1].cuts[0].tensors, "all receipts share one text"


# ---- groups


BOXES = st.sampled_from([((0,), (2,)), ((2,), (4,)), ((0,), (4,))])
CUT = st.tuples(st.sampled_from("abc"), st.sampled_from("uvwxyz"), BOXES)


@given(st.sets(CUT, max_size=20))
def test_groups_are_the_tensors_with_the_same_boxes_in_the_same_files(
    cuts: set[tuple[str, str, tuple[tuple[int], tuple[int]]]],
) -> None:
    """The simple way compares every tensor's own list."""
    tensors = {name: Tensor(name, "parameter", "F32", (4,)) for _, name, _ in cuts}
    lists: dict[Tensor, set[tuple[str, object]]] = defaultdict(set)
    files: dict[str, list[tuple[Tensor, Slice]]] = defaultdict(list)
    for file, name, box in cuts:
        lists[tensors[name]].add((file, box))
        files[file].append((tensors[name], Slice(name, "parameter", *box)))
    found = grouped((file, cut) for file, slices in sorted(files.items()) for cut in cuts_of(slices))
    assert {tensor: set(group.boxes) for group in found for tensor in group.tensors} == lists
    assert sum(len(group.tensors) for group in found) == len(lists)
    assert len({group.boxes for group in found}) == len(found), "tensors that are cut alike are in one group"


# ---- damage


def test_boxes_that_overlap_or_leave_a_gap_cover_nothing() -> None:
    """Elements that are stored twice may differ.  The control: a part of which each element is there once."""
    tensor = TENSORS[0]
    rows = tensor.shape[0]

    def part(first: int, last: int) -> Slice:
        return Slice(
            tensor.name, tensor.kind, (first, *tensor.whole().start[1:]), (last, *tensor.whole().stop[1:])
        )

    for second in (rows - 2, rows):
        cuts = [
            (file, cut)
            for file, box in (("a", part(0, rows - 1)), ("b", part(second, rows)))
            for cut in cuts_of([(tensor, box)])
        ]
        index = Index(grouped(cuts), {})
        assert [file for file, _, _ in index.covering(part(0, rows - 2))] == ["a"]
        with pytest.raises(Incomplete, match=r"\d+ of \d+ elements are stored"):
            index.covering(tensor.whole())


def test_verify_and_every_reader_judge_a_header_alike() -> None:
    """A reader of one slice of a file whose header has another byte is told so, as ``verify`` is."""
    checkpoints, state = fresh(), state_of(TENSORS, seed=1)
    save(checkpoints, V, state, 3)
    reader = checkpoints.open(V)
    for tensor in TENSORS:
        file, part, _ = reader.index.covering(tensor.whole())[0]
        key = f"{checkpoints.folder(V)}/{file}"
        good = checkpoints.store.get(key)
        for position in range(0, reader.index.headers[file].size, 61):
            bad = bytearray(good)
            bad[position] ^= 1
            checkpoints.store.put(key, bad)
            assert not checkpoints.verify(V).good
            with pytest.raises(Damaged, match=file):
                list(checkpoints.open(V).read([part]))
        checkpoints.store.put(key, good)
        assert checkpoints.verify(V).good and len(list(checkpoints.open(V).read([part]))) == 1, (
            "the control: nothing is damaged"
        )


def test_a_damaged_index_opens_nothing() -> None:
    checkpoints = fresh()
    save(checkpoints, V, state_of(TENSORS, seed=1), 3)
    key = f"{checkpoints.folder(V)}/{INDEX}"
    good = checkpoints.store.get(key)
    for changed in (good + b" ", good[:-1], b"", good[:50] + b"x" + good[51:]):
        checkpoints.store.put(key, changed)
        with pytest.raises(Damaged, match=INDEX):
            checkpoints.open(V)
    checkpoints.store.delete(key)
    with pytest.raises(Damaged, match=INDEX):
        checkpoints.open(V)


def test_a_checkpoint_of_an_older_format_is_refused() -> None:
    checkpoints = Checkpoints(ObjectStore.open(f"memory://index-{next(_numbers)}"), "run")
    save(checkpoints, V, state_of(TENSORS, seed=1), 3)
    key = f"{checkpoints.folder(V)}/MANIFEST.json"
    content = {
        name: value for name, value in json.loads(checkpoints.store.get(key)).items() if name != "blake3"
    }
    checkpoints.store.put(key, seal(content | {"format": 1}))
    with pytest.raises(
        BadFormat,
        match="has format 1, but this release reads formats from 2 on: use an older release",
    ):
        checkpoints.manifest(V)


# ---- listings


class Noting(Counting):
    """Notes which manifests are read."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.manifests = 0
        self.listed = 0

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        self.manifests += key.endswith("MANIFEST.json")
        return super().get(key, start, stop)

    def list(self, prefix: str = "") -> list[str]:
        raise AssertionError("a listing of checkpoints does not list their files")

    def children(self, folder: str = "") -> list[str]:
        self.listed += 1
        return super().children(folder)


def test_the_newest_checkpoint_is_found_by_a_bounded_number_of_requests() -> None:
    """A run has many checkpoints, and only the newest are looked at; if all of these are damaged, those
    before them.
    """
    store = Noting(ObjectStore.open(f"memory://index-{next(_numbers)}"))
    checkpoints, number, state = Checkpoints(store, "run"), 2 * RECENT + 5, state_of(TENSORS[:1], seed=1)
    for step in range(1, number + 1):
        save(checkpoints, Version(step, 1), state, 1)
    store.manifests = store.listed = 0
    assert checkpoints.latest_good() == Version(number, 1)
    assert store.manifests == RECENT and store.listed == RECENT + 1
    store.manifests = 0
    assert len(checkpoints.versions()) == store.manifests == number, (
        "the control: who wants all of them reads all of them"
    )
    for step in range(number - RECENT, number + 1):
        checkpoints.quarantine(Version(step, 1), "damaged")
    assert checkpoints.latest_good() == Version(number - RECENT - 1, 1)
    assert [listed.version for listed in checkpoints.at(3)] == [Version(3, 1)]
    with pytest.raises(Missing):
        checkpoints.manifest(Version(number + 1, 1))
