"""The end of a journal, read back from a file that its writer left in the middle of a line, or from a
keeper's copy of it.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from elastic.protocol.authority import JournalCopy, Replica, furthest
from storage.journal import Journal, read
from storage.journal.replicas import Segment, Written, first_of, last_of, local, segments_of
from storage.objects import ObjectStore

pytestmark = pytest.mark.fast
_numbers = itertools.count()


def lines(first: int, last: int) -> bytes:
    """Returns a segment: a snapshot, and records from ``first`` to ``last``."""
    values = [{"run": {"before": first}}, *({"n": n} for n in range(first, last + 1))]
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def test_a_line_that_was_cut_off_is_none() -> None:
    whole = lines(0, 2)
    for cut in range(1, len(b'{"n": 2}\n')):
        ((_, records),) = segments_of(whole[:-cut])
        assert [record["n"] for record in records] == [0, 1]
    assert segments_of(b"") == segments_of(b'{"run": {}}\n') == segments_of(b'{"ru') == []


def numbers(found: list[Segment]) -> list[int]:
    return [record["n"] for _, records in found for record in records]


def furthest_of(end: int, tails: list[Written]) -> list[Segment]:
    """Returns the records that a follower reads from the tails of the first coordinator, after which nobody
    else wrote.
    """
    parsed = [(by, segments_of(data)) for by, data in tails]
    found = furthest(
        end, 1, [JournalCopy(by, first_of(each), last_of(each), each) for by, each in parsed if each]
    )
    return found.records if found is not None else []


def test_a_writer_s_tail_goes_on_where_its_bucket_ends(tmp_path: Path) -> None:
    """A keeper's copy and the bucket together hold every record, whether or not some were shipped meanwhile."""
    store = ObjectStore.open(f"memory://tails-{next(_numbers)}")
    journal = Journal(store, "run", tmp_path / "journal-000001", 0, {"run": 0}, segment_s=3600.0)
    replica, held = Replica(), 0
    for n in range(600):
        journal.append({"n": n}, lambda n=n: {"run": n + 1}, durable=False)  # type: ignore[misc]
        if n % 7 == 0:
            held = replica.copy(1, *journal.tail(held))
            assert held == journal.end
            written = read(store, "run")
            end = written[-1][1][-1]["n"] + 1 if written else 0
            ahead = furthest_of(end, [(1, bytes(replica.data))])
            assert not ahead or numbers(ahead)[-1] == n
            assert ahead or end == n + 1
    written = [record["n"] for _, found in read(store, "run") for record in found]
    assert numbers(furthest_of(len(written), local(tmp_path)))[-1] == 599, "so has the writer's own disk"
    journal.close()
