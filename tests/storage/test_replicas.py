"""The end of a journal on other nodes: grows in order, lets go of what is in the bucket, heeds the latest writer only."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from storage.journal import Journal, read
from storage.journal.replicas import DEPOSED, Tail, furthest, local, segments_of
from storage.objects import ObjectStore

pytestmark = pytest.mark.fast
_numbers = itertools.count()


def lines(first: int, last: int) -> bytes:
    """A segment: a snapshot, and records from ``first`` to ``last``."""
    values = [{"run": {"before": first}}, *({"n": n} for n in range(first, last + 1))]
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def test_a_copy_grows_in_order_and_lets_go() -> None:
    tail = Tail()
    assert tail.extend(1, 0, 0, b"abc") == 3
    assert tail.extend(1, 0, 3, b"def") == 6
    assert tail.extend(1, 0, 2, b"cdefg") == 7, "what is there already is passed over"
    assert tail.extend(1, 0, 9, b"jk") == 7, "what leaves a gap is not taken"
    assert tail.extend(1, 4, 7, b"h") == 8
    assert bytes(tail.data) == b"efgh"
    assert tail.extend(1, 20, 20, b"xyz") == 23, "all before is in the bucket"
    assert bytes(tail.data) == b"xyz"


def test_a_copy_heeds_the_latest_writer_only() -> None:
    tail = Tail()
    tail.extend(1, 0, 0, b"first")
    assert tail.extend(2, 10, 15, b"from the middle") == 10, "from its beginning, please"
    assert bytes(tail.data) == b"first", "until then it is of use"
    assert tail.extend(2, 10, 10, b"second") == 16
    assert bytes(tail.data) == b"second"
    assert tail.extend(1, 0, 5, b" again") == DEPOSED
    assert bytes(tail.data) == b"second"


def test_a_line_that_was_cut_off_is_none() -> None:
    whole = lines(0, 2)
    for cut in range(1, len(b'{"n": 2}\n')):
        ((_, records),) = segments_of(whole[:-cut])
        assert [record["n"] for record in records] == [0, 1]
    assert segments_of(b"") == segments_of(b'{"run": {}}\n') == segments_of(b'{"ru') == []


def numbers(found: list[tuple[object, list[dict[str, int]]]]) -> list[int]:
    return [record["n"] for _, records in found for record in records]


def test_the_tail_that_reaches_furthest_without_a_gap() -> None:
    tails = [(1, lines(4, 7)), (1, lines(4, 9) + lines(10, 12)), (1, lines(6, 20)), (1, lines(0, 3))]
    assert numbers(furthest(5, 1, tails)) == list(range(4, 13)), "6 to 20 would leave a gap"
    assert numbers(furthest(6, 1, tails)) == list(range(6, 21))
    assert furthest(21, 1, tails) == [], "the bucket has them all"
    assert furthest(0, 0, []) == []


def test_what_an_earlier_writer_has_written_on_its_own_is_nothing() -> None:
    """Cut off with some keepers: the next one has gone on from where both knew."""
    tails = [(1, lines(4, 20)), (2, lines(4, 9)), (1, lines(4, 7))]
    assert numbers(furthest(5, 1, tails)) == list(range(4, 10))
    assert furthest(10, 2, tails) == [], "the bucket has all that the later one wrote, and takes no more from the earlier one"
    assert numbers(furthest(10, 1, tails)) == list(range(4, 21)), "had nobody followed it"


def test_a_writer_s_tail_goes_on_where_its_bucket_ends(tmp_path: Path) -> None:
    """What a keeper holds, with what is in the bucket, is every record; with and without what was shipped meanwhile."""
    store = ObjectStore.open(f"memory://tails-{next(_numbers)}")
    journal = Journal(store, "run", tmp_path / "journal-000001", 0, {"run": 0}, segment_s=3600.0)
    tail, held = Tail(), 0
    for n in range(600):
        journal.append({"n": n}, lambda n=n: {"run": n + 1}, durable=False)  # type: ignore[misc]
        if n % 7 == 0:
            held = tail.extend(1, *journal.tail(held))
            assert held == journal.end
            written = read(store, "run")
            end = written[-1][1][-1]["n"] + 1 if written else 0
            ahead = furthest(end, 1, [(1, bytes(tail.data))])
            assert not ahead or numbers(ahead)[-1] == n
            assert ahead or end == n + 1
    written = [record["n"] for _, found in read(store, "run") for record in found]
    assert numbers(furthest(len(written), 1, local(tmp_path)))[-1] == 599, "so has the writer's own disk"
    journal.close()
