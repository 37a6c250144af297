"""N10: a run of any age.  What its journal keeps on the disk, and what is read to find its end, does not
grow.
"""

from __future__ import annotations

import itertools
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.checkpoints import ShardReceipt
from storage.errors import Damaged
from storage.journal import Journal, Newest, parse
from storage.journal.stored_segment import key_of, packed
from storage.objects import ObjectStore
from tests.storage.test_journal import KNOWN, Moody, lengths, objects, write
from tests.support.journals import newest, records
from tests.support.patience import PATIENCE_S
from tests.support.syncs import noted

pytestmark = pytest.mark.fast
_numbers = itertools.count()


@pytest.fixture
def store() -> Moody:
    return Moody(f"memory://long-journal-{next(_numbers)}")


def begun(store: ObjectStore, local: Path, first: int = 0, snapshot: int = 0) -> Journal:
    return Journal(store, "run", local, first, {"sum": snapshot}, segment_s=3600.0, retry_s=0.001)


class Listings(Moody):
    """Counts listings, and the names in them."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.listings = self.names = 0

    def list(self, prefix: str = "") -> list[str]:
        raise AssertionError("the whole journal was listed")

    def children(self, folder: str = "") -> list[str]:
        found = super().children(folder)
        self.listings, self.names = self.listings + 1, self.names + len(found)
        return found


def test_the_end_of_a_journal_of_any_age_is_found_by_five_short_listings(tmp_path: Path) -> None:
    """N10: 3,000 objects of one record, with numbers about a million.  The control: a listing of all has
    3,000 names.
    """
    store = Listings(f"memory://long-journal-{next(_numbers)}")
    first, count = 998_500, 3_000
    for n in range(first, first + count):
        store.store.put(key_of("run", n), packed(f'{{"sum":{n}}}\n{{"n":{n}}}\n'.encode()))
    journal = Journal(store, "run", tmp_path, first + count, {"run": 7}, segment_s=3600.0)
    for _ in range(3):
        journal.append({"n": journal.next}, lambda: {"run": 7, "known": KNOWN}, durable=False)
        assert journal.ship(PATIENCE_S)
    journal.close()
    assert newest(store, "run") == (
        {"run": 7, "known": KNOWN},
        [{"n": first + count + 1}, {"n": first + count + 2}],
    )
    assert store.listings <= 5 and store.names <= 1_600
    assert len(store.store.list("run/journal/")) > count


def test_an_object_is_parsed_once_however_often_the_end_is_read(store: Moody, tmp_path: Path) -> None:
    """A coordinator that takes over looks again and again while an earlier coordinator may still write; only
    what is new is read.
    """
    journal, end = begun(store, tmp_path), Newest(store, "run")
    for n in range(1, 10):
        objects(journal, 1)
        store.got.clear()
        found = end.segment()
        assert found is not None and found == newest(store, "run") and found[1][-1]["n"] == n - 1
        assert store.got[0] == key_of("run", n - 1) and store.got.count(key_of("run", 1)) <= 2, (
            "one of both was the control"
        )
        store.got.clear()
        assert end.segment() == found and store.got == []
    journal.close()


def test_a_folder_that_a_killed_writer_left_empty_hides_nothing(tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path / "bucket"))
    journal = Journal(store, "run", tmp_path / "local", 999, {"sum": 0}, segment_s=3600.0)
    write(journal, 1)
    journal.close()
    (tmp_path / "bucket" / key_of("run", 1000)).parent.mkdir()
    found = newest(store, "run")
    assert found is not None and found[1] == [{"n": 999}]


@pytest.mark.parametrize("too_early", [False, True])
def test_whenever_a_writer_dies_its_disk_and_the_bucket_have_every_record(
    store: Moody, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, too_early: bool
) -> None:
    """The disk is looked at after each record and each object, as a writer that is killed there leaves it.

    The control removes a file when its object is not in the bucket yet.
    """
    local, lost = tmp_path / "journal", list[int]()
    journal = Journal(store, "run", local, 0, {"run": 0}, segment_s=3600.0, retry_s=0.001)
    if too_early:
        monkeypatch.setattr(journal, "_ship", lambda part: True)
    for n in range(60):
        journal.append({"n": n}, lambda n=n: {"run": n + 1}, durable=False)  # type: ignore[misc]
        if n % 4 == 3:
            journal.ship(PATIENCE_S)
        left = parse(b"".join(path.read_bytes() for path in sorted(local.iterdir())), tail=True)
        there = {record["n"] for record in records(store, "run")} | {
            record["n"] for _, some in left for record in some
        }
        lost += sorted(set(range(n + 1)) - there)
        assert len(list(local.iterdir())) <= 2
    journal.close()
    assert bool(lost) == too_early


def test_the_names_of_a_journal_s_files_are_put_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut could otherwise leave a coordinator's node without the file that has its newest records."""
    synced = noted(monkeypatch)
    journal = Journal(ObjectStore.open("memory://names"), "run", tmp_path, 0, {"run": 0}, segment_s=3600.0)
    journal.append({"n": 0}, lambda: {"run": 0}, durable=True)
    journal.close()
    assert str(tmp_path) in synced


@pytest.mark.parametrize("byte", [b"\n", b"a", b"["])
def test_what_a_small_object_holds_takes_little_memory(
    store: Moody, monkeypatch: pytest.MonkeyPatch, byte: bytes
) -> None:
    """A takeover does not take 64 MB for 64 kB that hold them.  The control is zlib without a limit."""
    limit, size = 2**20, 2**26
    monkeypatch.setattr("storage.documents.INFLATED_BYTES", limit)
    object = packed(byte * size)
    store.put(key_of("run", 0), object)
    receipt = zlib.compress(byte * size)

    def refused() -> None:
        for read_it in (lambda: newest(store, "run"), lambda: ShardReceipt.unpacked(receipt)):
            with pytest.raises(
                Damaged, match=f"expected at most {limit} bytes once it is decompressed .*, found more"
            ):
                read_it()

    assert len(object) < size / 500 and peak_of(lambda: zlib.decompress(object, 31)) > size
    assert peak_of(refused) < 4 * limit
    with pytest.raises(Damaged):  # also what fits
        store.put(key_of("run", 0), packed(byte * (limit - 1)))
        newest(store, "run")


def peak_of(call: Callable[[], object]) -> int:
    """Returns how many bytes of memory a call takes at most."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_long_object_ends_before_its_time(
    store: Moody, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No writer makes an object that no reader takes, although no snapshot is due."""
    monkeypatch.setattr("storage.journal.journal.OBJECT_BYTES", 10_000)
    journal = begun(store, tmp_path)
    for n in range(100):
        journal.append({"n": n, "said": "x" * 1000}, lambda: {"known": KNOWN}, durable=False)
    journal.close()
    assert max(each for each in lengths(store) if each < len(KNOWN)) < 12_000 and len(lengths(store)) > 5
    assert [record["n"] for record in records(store, "run")] == [*range(100)]
