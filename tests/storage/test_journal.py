"""The journal: numbered without gaps, one writer, never held up by the bucket."""

from __future__ import annotations

import errno
import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.errors import Damaged, Deposed, Unavailable
from storage.journal import (
    CONTINUATIONS,
    RECORDS,
    SEGMENT_RECORDS,
    Journal,
    Newest,
    parse,
    read,
    replicas,
    since,
)
from storage.journal import objects as objects_of
from storage.journal.stored_segment import key_of, packed, unpacked
from storage.objects import Data, ObjectStore
from tests.support.full_disk import full_disk
from tests.support.journals import newest, records
from tests.support.patience import PATIENCE_S, until
from tests.support.stores import Forwarding, Stale

pytestmark = pytest.mark.fast
_numbers = itertools.count()


class Moody(Forwarding):
    """A store that is down, or loses its answers, when told to.  ``asked`` is set by every try."""

    def __init__(self, url: str) -> None:
        super().__init__(ObjectStore.open(url))
        self.up, self.answers, self.asked = threading.Event(), True, threading.Event()
        self.got = list[str]()
        self.up.set()

    def put_if_absent(self, key: str, data: Data) -> None:
        self.asked.set()
        if not self.up.is_set():
            raise Unavailable(self.full_name(key), "503 slow down")
        super().put_if_absent(key, data)
        if not self.answers:
            self.answers = True
            raise Unavailable(self.full_name(key), "connection reset")

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        self.got.append(key)
        return super().get(key, start, stop)


@pytest.fixture
def store() -> Moody:
    return Moody(f"memory://journal-{next(_numbers)}")


@pytest.fixture
def start(store: Moody, tmp_path: Path) -> Callable[..., Journal]:
    def started(first: int = 0, snapshot: int | None = None, **options: float) -> Journal:
        options = {"segment_s": 3600.0, "retry_s": 0.001, **options}
        return Journal(store, "run", tmp_path / f"{next(_numbers)}", first, {"sum": snapshot or 0}, **options)

    return started


def write(journal: Journal, count: int, *, durable: bool = False) -> None:
    """Appends ``count`` records that hold their number n; a snapshot has the sum of the numbers."""
    for _ in range(count):
        n = journal.next
        journal.append({"n": n}, lambda n=n: {"sum": n * (n + 1) // 2}, durable=durable)  # type: ignore[misc]


def test_segments_begin_with_what_was_known_before(store: Moody, start: Callable[..., Journal]) -> None:
    journal = start()
    write(journal, SEGMENT_RECORDS * 2 + 3)
    journal.close()
    assert store.list("run/journal/") == [key_of("run", n) for n in (0, 256, 512)]
    segments = read(store, "run")
    assert [len(found) for _, found in segments] == [256, 256, 3]
    for snapshot, found in segments:
        assert snapshot["sum"] == sum(range(found[0]["n"]))
    assert [record["n"] for record in records(store, "run")] == list(range(515))
    assert journal.behind == ""


def test_a_segment_does_not_wait_for_the_next_record(store: Moody, start: Callable[..., Journal]) -> None:
    """The bucket has a record after ``segment_s`` even when nothing else happens."""
    journal = start(segment_s=0.01)
    write(journal, 1)
    until(lambda: store.exists(key_of("run", 0)))
    write(journal, 1)
    until(lambda: store.exists(key_of("run", 1)))
    assert [snapshot for snapshot, _ in read(store, "run")] == [{"sum": 0}, {"sum": 0}]
    journal.close()


def test_a_record_is_in_the_local_file_before_append_returns(store: Moody, tmp_path: Path) -> None:
    store.up.clear()
    journal = Journal(store, "run", tmp_path / "new folder" / "j", 0, {"sum": 0}, retry_s=0.001)
    for durable in (True, False):
        write(journal, 1, durable=durable)
        (file,) = (tmp_path / "new folder" / "j").iterdir()
        lines = file.read_text().splitlines()
        assert json.loads(lines[-1]) == {"n": journal.next - 1}
    journal.close(timeout_s=0)


def test_the_disk_holds_what_the_bucket_lacks_and_little_more(store: Moody, tmp_path: Path) -> None:
    """It does not grow with the run; while the store is down nothing is removed."""
    journal = Journal(store, "run", tmp_path, 0, {"sum": 0}, segment_s=3600.0, retry_s=0.001)
    for _ in range(20):
        write(journal, SEGMENT_RECORDS)
        assert journal.ship(PATIENCE_S)
        assert len(list(tmp_path.iterdir())) <= 2
    store.up.clear()
    write(journal, 3 * SEGMENT_RECORDS)
    assert [path.read_text().count('"n"') for path in sorted(tmp_path.iterdir())] == [SEGMENT_RECORDS] * 3
    store.up.set()
    journal.close()
    assert [record["n"] for record in records(store, "run")] == list(range(23 * SEGMENT_RECORDS))


def test_a_segment_ends_when_its_records_are_twice_as_long_as_its_snapshot(
    store: Moody, start: Callable[..., Journal]
) -> None:
    """Snapshots are at most a third of the journal, however long they are; one every 256 records would be
    most of the journal.
    """
    journal, known = start(), {"sum": 0, "workers": "w" * 100_000}
    for n in range(SEGMENT_RECORDS * 80):
        journal.append({"n": n, "said": "x" * 10}, lambda: known, durable=False)
    journal.close()
    segments = read(store, "run")[1:]  # the first begins with what the test gave it
    snapshots = len(segments) * len(json.dumps(known))
    recorded = sum(len(json.dumps(record)) for _, found in segments for record in found)
    assert len(segments) > 2 and RECORDS * snapshots <= recorded + RECORDS * len(json.dumps(known))
    assert snapshots < 80 * len(json.dumps(known)) / 5


KNOWN = "w" * 100_000
"""A snapshot is long because it holds this text of 100,000 characters."""


def objects(journal: Journal, count: int, length: int = 10) -> None:
    """Ships ``count`` objects of one record each, as if time ended them; a snapshot says how many records
    came before.
    """
    for _ in range(count):
        n = journal.next
        journal.append(
            {"n": n, "said": "x" * length}, lambda n=n: {"run": n + 1, "known": KNOWN}, durable=False
        )  # type: ignore[misc]
        assert journal.ship(PATIENCE_S)


def lengths(store: Moody) -> list[int]:
    """Returns how long the lines of each object are."""
    return [len(unpacked(store.get(key), key)) for key in store.list("run/journal/")]


def test_objects_that_end_by_time_do_not_repeat_a_snapshot_longer_than_their_records(
    store: Moody, start: Callable[..., Journal]
) -> None:
    """If each of the 200 objects began with a snapshot, 95 % of the journal would be snapshots."""
    journal = start()
    objects(journal, 200, length=5_000)
    recorded = sum(len(json.dumps(record)) for record in records(store, "run"))
    snapshots = sum(length for length in lengths(store) if length > len(KNOWN))
    assert recorded > 1e6 and 3 < sum(length > len(KNOWN) for length in lengths(store)) < 8
    assert sum(lengths(store)) < 1.8 * recorded and snapshots < 0.8 * recorded
    segments = read(store, "run")
    assert [snapshot["run"] for snapshot, _ in segments[1:]] == [
        found[0]["n"] for _, found in segments[1:]
    ], "each is what was known there"
    assert newest(store, "run") == segments[-1]
    journal.close()


@pytest.mark.parametrize("length", [10, 10_000, 250_000])
def test_a_takeover_reads_a_snapshot_and_records_of_twice_its_length_in_a_bounded_number_of_objects(
    store: Moody, start: Callable[..., Journal], length: int
) -> None:
    journal, most = start(), 0
    for n in range(1, 3 * CONTINUATIONS):
        objects(journal, 1, length)
        store.got.clear()
        segment = newest(store, "run")
        assert segment is not None and segment[1][-1]["n"] == n - 1
        got = list(store.got)
        read_bytes = sum(len(unpacked(store.get(key), key)) for key in got)
        assert len(got) == len(set(got)) <= 1 + CONTINUATIONS and read_bytes <= (1 + RECORDS) * len(
            KNOWN
        ) + length + 100 * (1 + CONTINUATIONS)
        most = max(most, len(got))
    assert most == {10: 1 + CONTINUATIONS, 10_000: 20, 250_000: 1}[length]
    journal.close()


@pytest.fixture
def continued(store: Moody, start: Callable[..., Journal]) -> list[str]:
    """Two snapshots with continuations.  Returns the keys of the second one and of what continues it, with a
    record each.
    """
    journal = start()
    objects(journal, 2 + CONTINUATIONS + 4)
    journal.close()
    keys = store.list("run/journal/")
    assert [index for index, length in enumerate(lengths(store)) if length > len(KNOWN)] == [
        1,
        2 + CONTINUATIONS,
    ]
    return keys[2 + CONTINUATIONS :]


def test_a_continuation_without_its_snapshot_is_damage(store: Moody, continued: list[str]) -> None:
    snapshot = store.get(continued[0])
    store.put(continued[0], snapshot[:-1])
    with pytest.raises(Damaged, match=r"000000000034.jsonl.gz .* an object that ends with its digest"):
        newest(store, "run")
    for gone in continued[:2]:
        held = store.get(gone) if gone != continued[0] else snapshot
        store.delete(gone)
        with pytest.raises(Damaged, match="expected"):
            newest(store, "run")
        with pytest.raises(Damaged, match="expected records from"):
            read(store, "run")
        store.put(gone, held)
    assert newest(store, "run") == read(store, "run")[-1]


def test_where_the_oldest_objects_are_gone_the_journal_begins_with_the_first_snapshot_there_is(
    store: Moody, continued: list[str]
) -> None:
    whole = read(store, "run")
    for key in store.list("run/journal/")[:5]:
        store.delete(key)
    assert read(store, "run") == whole[-1:] and newest(store, "run") == whole[-1]


def test_copies_of_objects_are_joined_as_the_bucket_joins_them(store: Moody, continued: list[str]) -> None:
    copies = [unpacked(store.get(key), key) for key in continued]
    assert parse(b"".join(copies)) == read(store, "run")[-1:]
    with pytest.raises(Damaged, match=r"line 1 .* a snapshot before it that begins with record 34"):
        parse(copies[1])
    with pytest.raises(
        Damaged,
        match=(
            r"a snapshot before it that begins with record 34.* the snapshot before it begins with record 1"
        ),
    ):
        parse(unpacked(store.get(key_of("run", 1)), "") + copies[1])


def test_who_loses_the_create_of_a_continuation_is_deposed(
    store: Moody, start: Callable[..., Journal]
) -> None:
    old, new = start(), start(first=3, snapshot=3)
    objects(old, 3)
    write(new, 1)
    assert new.ship(PATIENCE_S)
    with pytest.raises(Deposed, match=r"000000000003.jsonl.gz was written by another coordinator"):
        objects(old, 1)
    assert newest(store, "run") == ({"sum": 3}, [{"n": 3}])


def test_a_journal_that_is_opened_again_goes_on_where_it_ended(store: Moody, tmp_path: Path) -> None:
    """The records that a copy of the journal holds keep their positions."""
    store.up.clear()
    journal = Journal(store, "run", tmp_path, 0, {"sum": 0}, segment_s=3600.0, retry_s=0.001)
    write(journal, 3)
    journal.close(timeout_s=0)
    again = Journal(store, "run", tmp_path, 3, {"sum": 3}, segment_s=3600.0, retry_s=0.001)
    assert again.end == journal.end
    write(again, 1)
    begin, at, data = again.tail(0)
    assert begin == at == journal.end and len(data) == again.end - journal.end
    again.close(timeout_s=0)


# ---- a local disk that fails


def say(journal: Journal, what: str) -> None:
    journal.append({"n": journal.next, "what": what * 40}, lambda: {"run": 1}, durable=True)


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("room", [0, 5, 25, 60])
def test_a_record_that_a_full_disk_refuses_leaves_no_trace(
    store: Moody, tmp_path: Path, before: int, room: int
) -> None:
    """Its number is free for the next one; disk, keepers and bucket tell the same.  The first record of a
    file fails with its head.
    """
    local = replicas.folder_of(tmp_path, 1)
    journal = Journal(store, "run", local, 0, {"run": 0}, segment_s=3600.0, retry_s=0.001)
    told = ["a", "b"][:before]
    for what in told:
        say(journal, what)
    end = journal.end
    with full_disk(local / f"{0:015d}.jsonl", room), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        say(journal, "lost")
    assert (journal.next, journal.end) == (before, end)
    if not before:
        assert journal.ship(PATIENCE_S) and store.list() == [], "a head without records is no object"
    for what in ("second", "c"):
        say(journal, what)
        told.append(what)
    (written,) = replicas.local(tmp_path)
    assert written[1] == journal.tail(0)[2]
    assert [each["what"] for _, found in replicas.segments_of(written[1]) for each in found] == [
        what * 40 for what in told
    ]
    journal.close()
    assert [(each["n"], each["what"]) for each in records(store, "run")] == [
        (n, what * 40) for n, what in enumerate(told)
    ]


def test_a_record_that_the_disk_does_not_keep_leaves_no_trace(
    store: Moody, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written whole, but not on the disk: whoever reads the disk must not find it beside the record that took
    its number.
    """
    local = replicas.folder_of(tmp_path, 1)
    journal = Journal(store, "run", local, 0, {"run": 0}, segment_s=3600.0, retry_s=0.001)
    say(journal, "a")

    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as disk, pytest.raises(OSError, match=os.strerror(errno.EIO)):
        disk.setattr(os, "fsync", broken)
        say(journal, "lost")
    say(journal, "b")
    (written,) = replicas.local(tmp_path)
    for found in (parse(written[1]), replicas.segments_of(journal.tail(0)[2])):
        assert [(each["n"], each["what"][:1]) for _, those in found for each in those] == [(0, "a"), (1, "b")]
    journal.close()
    assert len(records(store, "run")) == 2


def test_a_sealed_object_that_cannot_be_read_is_damage(store: Moody, three_segments: list[str]) -> None:
    """Its digest is right: whoever sealed it had wrong lines.  The control: the right lines, sealed by the
    same function.
    """
    key = three_segments[1]
    lines = unpacked(store.get(key), key).splitlines(keepends=True)
    torn, foreign = b"".join(lines)[:-5] + b"\n", lines[0] + b'{"m": 2}\n'
    for wrong in (torn, foreign, lines[0] + b"7\n", b"\n", b""):
        store.put(key, packed(wrong))
        with pytest.raises(Damaged, match="000000000002"):
            records(store, "run")
    store.put(key, packed(b"".join(lines)))
    assert len(records(store, "run")) == 6


# ---- a store that fails


def test_a_store_that_is_down_delays_nothing(store: Moody, start: Callable[..., Journal]) -> None:
    """The queue holds positions in the local file, not the records themselves."""
    store.up.clear()
    journal = start()
    write(journal, SEGMENT_RECORDS * 3)
    store.asked.wait(PATIENCE_S)
    until(lambda: "503 slow down" in journal.behind)
    assert store.list() == []
    store.up.set()
    until(lambda: len(store.list()) == 3)
    until(lambda: journal.behind == "")
    journal.close()
    assert len(records(store, "run")) == SEGMENT_RECORDS * 3


def test_closing_gives_up_on_a_store_that_stays_down(store: Moody, start: Callable[..., Journal]) -> None:
    store.up.clear()
    journal = start()
    write(journal, 3)
    journal.close(timeout_s=0.05)
    until(lambda: "503" in journal.behind)
    assert store.list() == []


def test_an_answer_that_was_lost_deposes_nobody(store: Moody, start: Callable[..., Journal]) -> None:
    """The segment was written though the store said nothing: finding one's own bytes is success."""
    journal = start()
    write(journal, 2)
    store.answers = False
    journal.close()
    assert (journal.deposed, journal.behind) == ("", "")
    assert len(records(store, "run")) == 2


def test_who_loses_a_create_is_deposed(store: Moody, start: Callable[..., Journal]) -> None:
    """Promise 3: two coordinators cannot both go on; what the first one wrote stays."""
    old = start(segment_s=0.0)
    write(old, 2)
    until(lambda: len(records(store, "run")) == 2)
    store.up.clear()
    write(old, 1)  # on the local disk only
    store.asked.clear()
    new = start(first=2, snapshot=1, segment_s=0.0)
    store.put(key_of("run", 2), b"the new coordinator's")
    store.up.set()
    until(lambda: bool(old.deposed))
    with pytest.raises(Deposed):
        old.tail(0)
    with pytest.raises(Deposed, match=r"000000000002.jsonl.gz was written by another coordinator"):
        write(old, 1)
    assert store.get(key_of("run", 2)) == b"the new coordinator's"
    old.close()
    new.close()


def test_records_are_numbered_by_the_journal(start: Callable[..., Journal]) -> None:
    journal = start(first=7)
    for wrong in (6, 8):
        with pytest.raises(ValueError, match=f"record {wrong} was appended, but the next record must be 7"):
            journal.append({"n": wrong}, dict, durable=False)
    write(journal, 1)
    assert journal.next == 8
    journal.close()


@pytest.fixture
def three_segments(store: Moody, start: Callable[..., Journal]) -> list[str]:
    for first in (0, 2, 4):
        journal = start(first, sum(range(first)))
        write(journal, 2)
        journal.close()
    assert len(records(store, "run")) == 6
    return store.list("run/journal/")


def test_a_gap_is_noticed(store: Moody, three_segments: list[str]) -> None:
    store.delete(three_segments[1])
    with pytest.raises(Damaged, match=r"000000000004.jsonl.gz .* expected records from 2 on"):
        records(store, "run")


def test_the_newest_segment_is_read_alone(store: Moody, three_segments: list[str]) -> None:
    assert newest(store, "nobody's") is None
    store.put(three_segments[0], b"damaged")
    assert newest(store, "run") == ({"sum": 6}, [{"n": 4}, {"n": 5}])


def test_old_segments_may_be_gone(store: Moody, three_segments: list[str]) -> None:
    store.delete(three_segments[0])
    assert [record["n"] for record in records(store, "run")] == [2, 3, 4, 5]
    assert read(store, "run")[0][0] == {"sum": 1}


def test_a_record_twice_is_noticed(
    store: Moody, start: Callable[..., Journal], three_segments: list[str]
) -> None:
    journal = start(first=5)
    write(journal, 1)
    journal.close()
    with pytest.raises(Damaged, match=r"000000000005.jsonl.gz .* expected records from 6 on"):
        records(store, "run")


def test_a_segment_in_the_place_of_another(store: Moody, three_segments: list[str]) -> None:
    store.put(three_segments[1], store.get(three_segments[0]))
    with pytest.raises(Damaged, match="000000000002"):
        records(store, "run")


def test_any_flipped_or_missing_byte_is_noticed(store: Moody, three_segments: list[str]) -> None:
    key = three_segments[1]
    good = store.get(key)
    bad = [good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :] for at in range(len(good))]
    for data in (*bad, b"", good[:-1], good + b"\n"):
        store.put(key, data)
        with pytest.raises(Damaged, match="000000000002"):
            records(store, "run")
    store.put(key, good)
    assert len(records(store, "run")) == 6


def test_what_was_appended_is_shipped_at_once_where_that_is_asked_for(
    store: Moody, start: Callable[..., Journal]
) -> None:
    """Shipping does not wait an hour for the segment to become old enough."""
    journal = start()
    assert journal.ship(0.0), "there is nothing yet"
    write(journal, 3)
    assert journal.ship(PATIENCE_S)
    write(journal, 2)
    assert journal.ship(PATIENCE_S) and journal.ship(0.0)
    assert [len(found) for _, found in read(store, "run")] == [3, 2]
    store.up.clear()
    write(journal, 1)
    assert not journal.ship(0.05), "the store is down"
    store.up.set()
    assert journal.ship(PATIENCE_S) and len(records(store, "run")) == 6


def test_who_is_deposed_learns_it_when_it_ships(store: Moody, start: Callable[..., Journal]) -> None:
    first, second = start(), start()
    write(first, 1)
    write(second, 1)
    second.append({"n": 1, "mine": True}, lambda: {"sum": 0}, durable=True)
    assert first.ship(PATIENCE_S)
    with pytest.raises(Deposed):
        second.ship(PATIENCE_S)


def test_files_of_others_are_no_objects_of_a_journal(store: Moody, three_segments: list[str]) -> None:
    before = read(store, "run"), newest(store, "run"), since(store, "run", 256)
    for folder in ("", "000/", "000/000/", "000/000/000/", "lost+found/"):
        for name in (".nfs01", "Thumbs.db", "x.tmp", "zz.jsonl", ".ipynb_checkpoints/000000000000.jsonl"):
            store.put(f"run/journal/{folder}{name}", b"of somebody else")
    assert (read(store, "run"), newest(store, "run"), since(store, "run", 256)) == before


def test_the_newest_object_without_content_says_what_to_do(store: Moody, three_segments: list[str]) -> None:
    before = read(store, "run")[:-1]
    store.put(three_segments[-1], b"")
    with pytest.raises(
        Damaged,
        match=(
            r"000000000004.* found 0 bytes without a digest at the end; .*remove it: the run then goes "
            r"on from its newest checkpoint"
        ),
    ):
        newest(store, "run")
    store.delete(three_segments[-1])
    assert read(store, "run") == before and newest(store, "run") == before[-1], "so it does"


@pytest.mark.parametrize("listed", [0, 1, 3, 40])
def test_objects_that_a_bucket_does_not_list_yet_are_read(
    store: Moody, start: Callable[..., Journal], listed: int
) -> None:
    """The bucket lists the first ones of 45 objects.  The last snapshot may be among the others, and a reader
    may have read before.
    """
    journal = start()
    objects(journal, listed)
    stale = Stale(store)
    reader = Newest(stale, "run")
    assert reader.segment() == newest(store, "run")
    for more in (1, 44 - listed):
        objects(journal, more)
        assert reader.segment() == newest(store, "run") == newest(stale, "run")
    assert read(stale, "run") == read(store, "run") and list(objects_of(stale, "run")) == list(
        objects_of(store, "run")
    )
    for first in (0, 2, 41, 44, 45):
        assert since(stale, "run", first) == since(store, "run", first)
    tail = [(json.loads(json.dumps(head)), found) for head, found in list(objects_of(store, "run"))[-1:]]
    assert reader.rejoined(tail) == Newest(store, "run").rejoined(tail)
    assert len(stale.list()) == listed
    journal.close()
