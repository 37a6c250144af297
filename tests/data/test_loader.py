"""The loader reads the cursor's samples ahead of time, wherever it is aimed."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.data.cursor import Cursor
from elastic.data.loader import LOOKED_AT, Batch, Ids, Loader
from elastic.errors import DataError
from elastic.plan.batch import Deal
from elastic.train.blame import classify
from storage.errors import Unavailable

pytestmark = pytest.mark.fast

DEADLINE_S = 20.0


def deal(loader: Loader, data_ranks: int) -> Deal:
    """Returns the deal of a world of so many data ranks on one node."""
    return Deal(loader.cursor.global_batch // loader.microbatch, 1, (None,) * data_ranks)


class Numbers:
    """Sample i is the number i.  Notes what is read, and can be told to fail or to stand still at a sample."""

    def __init__(self, failing: frozenset[int] = frozenset(), slow: int | None = None) -> None:
        self.failing, self.slow, self.down = set(failing), slow, False
        self.reads: list[Ids] = []
        self.readers: set[threading.Thread] = set()
        self.changed = threading.Condition()
        self.entered, self.go_on = threading.Event(), threading.Event()
        self._reading = threading.Lock()

    def __len__(self) -> int:
        return 1000

    def fingerprint(self) -> str:
        return "numbers"

    def read(self, ids: Ids) -> Batch:
        assert self._reading.acquire(blocking=False), "two reads at a time"
        try:
            if self.slow in ids:
                self.entered.set()
                assert self.go_on.wait(DEADLINE_S)
            with self.changed:
                self.reads.append(ids)
                self.readers.add(threading.current_thread())
                self.changed.notify_all()
            if self.down:
                raise Unavailable("s3://bucket/tokens-00000.bin", "no answer after 6 attempts")
            bad = self.failing & set(ids)
            if bad:
                raise OSError(f"sector {min(bad)}")
            return {"tokens": torch.tensor(ids)}
        finally:
            self._reading.release()

    def wait_for(self, reads: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.reads) >= reads, DEADLINE_S)


def plain(batch: Batch | None) -> dict[str, list[int]]:
    assert batch is not None
    return {name: value.tolist() for name, value in batch.items()}


def cursor(samples: int = 1000, global_batch: int = 12) -> Cursor:
    return Cursor(samples, global_batch, seed=5)


@contextmanager
def loading(
    dataset: Numbers,
    where: Cursor,
    microbatch: int = 2,
    prefetch: int = 2,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Loader]:
    """Yields a loader, and checks that it leaves no thread behind."""
    before = set(threading.enumerate())
    loader = Loader(dataset, where, microbatch, prefetch, clock)
    loader._looked_at = LOOKED_AT  # tests/train/test_samples.py has the reads before
    try:
        yield loader
    finally:
        dataset.go_on.set()
        loader.close()
    assert set(threading.enumerate()) <= before


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 9), st.integers(0, 3), st.integers(1, 30))
def test_the_ranks_of_any_world_read_the_step_and_nothing_else(
    microbatches: int, microbatch: int, data_ranks: int, prefetch: int, first_step: int
) -> None:
    """B2, R14: over the ranks, the union of a step's ids is the global batch, and each position is read by
    one rank only.
    """
    where = cursor(global_batch=microbatches * microbatch)
    parts: dict[tuple[int, int], Ids] = {}
    for rank in range(data_ranks):
        with loading(Numbers(), where, microbatch, prefetch) as loader:
            for step in range(first_step, first_step + 3):
                rounds = list(loader.microbatches(step, rank, deal(loader, data_ranks)))
                assert [round_ for round_, *_ in rounds] == list(range(-(-microbatches // data_ranks)))
                for round_, index, ids, batch in rounds:
                    assert plain(batch or {"tokens": torch.tensor([])}) == {"tokens": list(ids)}
                    if index is not None:
                        assert index == round_ * data_ranks + rank and (step, index) not in parts
                        parts[step, index] = ids
    for step in range(first_step, first_step + 3):
        ordered = [parts[step, index] for index in range(microbatches)]
        assert tuple(itertools.chain(*ordered)) == where.ids(step)


@pytest.mark.parametrize("prefetch", [1, 3, 8])
def test_it_reads_so_many_microbatches_ahead_and_no_more(prefetch: int) -> None:
    """B16: the depth is as configured, and reaches into the next steps (3 microbatches a step for this rank)."""
    dataset, where = Numbers(), cursor()
    with loading(dataset, where, prefetch=prefetch) as loader:
        taken = loader.microbatches(1, 0, deal(loader, 2))
        next(taken)
        dataset.wait_for(1 + prefetch)
        next(taken)
        loader.read((999,))  # the one thread reads this after everything that it was told to read ahead
    in_order = [where.microbatch_ids(step, index, 2) for step in range(1, 5) for index in (0, 2, 4)]
    assert dataset.reads == [*in_order[: 2 + prefetch], (999,)]


def test_samples_that_are_avoided_are_not_used_although_they_were_read_ahead() -> None:
    """The control: without a word, the samples that were read ahead are used, and nothing is read twice."""
    for avoids in (True, False):
        dataset = Numbers()
        with loading(dataset, cursor(), prefetch=6) as loader:
            rounds = [*loader.microbatches(1, 0, deal(loader, 1))]
            dataset.wait_for(12)
            ahead, used = cursor().ids(2), loader.cursor.ids(1)
            loader.avoid({ahead[3]: 2, used[0]: 2} if avoids else {})
            rounds = [*loader.microbatches(2, 0, deal(loader, 1))]
        seen = [sample for _, _, ids, _ in rounds for sample in ids]
        assert [sample for _, _, _, batch in rounds for sample in plain(batch)["tokens"]] == seen
        assert [place for place, (a, b) in enumerate(zip(seen, ahead, strict=True)) if a != b] == (
            [3] if avoids else []
        )


def test_nothing_is_read_twice_when_steps_follow_each_other() -> None:
    dataset, where = Numbers(), cursor()
    with loading(dataset, where) as loader:
        for step in (1, 2, 3):
            assert len(list(loader.microbatches(step, 1, deal(loader, 2)))) == 3
    assert len(set(dataset.reads)) == len(dataset.reads) <= 9 + 2


def test_without_prefetch_there_is_no_thread() -> None:
    """``--local`` promises that breakpoints in the dataset work, so the calling thread reads."""
    dataset = Numbers()
    with loading(dataset, cursor(), prefetch=0) as loader:
        list(loader.microbatches(1, 0, deal(loader, 1)))
        assert plain(loader.read((7,))) == {"tokens": [7]}
    assert dataset.readers == {threading.current_thread()} and len(dataset.reads) == 7


def test_a_world_that_breaks_in_the_middle_of_a_step_is_followed_by_any_other() -> None:
    """The loader leaves a step after two of three rounds, reads it in a world of 3, then the step before,
    then the first place again.
    """
    dataset, where = Numbers(), cursor()
    with loading(dataset, where) as loader:
        broken = loader.microbatches(4, 0, deal(loader, 2))
        next(broken), next(broken)
        for step, rank, ranks in ((4, 2, 3), (3, 0, 1), (4, 0, 2), (5, 0, 2), (5, 0, 2)):
            found = [plain(batch) for _, _, _, batch in loader.microbatches(step, rank, deal(loader, ranks))]
            assert found == [
                {"tokens": list(where.microbatch_ids(step, index, 2))} for index in range(rank, 6, ranks)
            ]


def test_a_step_that_is_taken_up_again_goes_on_where_it_was() -> None:
    """The step after it is complete too: a seek into the middle of a step must not skip anything of the next
    one.
    """
    dataset, where = Numbers(), cursor()
    with loading(dataset, where) as loader:
        first = loader.microbatches(1, 0, deal(loader, 2))
        next(first)
        list(loader.microbatches(7, 1, deal(loader, 3)))
        found = [plain(batch) for _, _, _, batch in (*first, *loader.microbatches(2, 0, deal(loader, 2)))]
    places = [(1, 2), (1, 4), (2, 0), (2, 2), (2, 4)]
    assert found == [{"tokens": list(where.microbatch_ids(step, index, 2))} for step, index in places]


def test_aiming_elsewhere_does_not_wait_for_the_read_that_is_going_on() -> None:
    where = cursor()
    first, _ = where.microbatch_ids(1, 0, 2)
    dataset = Numbers(slow=first)
    with loading(dataset, where, prefetch=4) as loader:
        loader.seek(1, 0, deal(loader, 2))
        assert dataset.entered.wait(DEADLINE_S)
        loader.seek(9, 1, deal(loader, 3))
        assert dataset.reads == [], "the first read still stands"
        dataset.go_on.set()
        assert [index for _, index, _, _ in loader.microbatches(9, 1, deal(loader, 3))] == [1, 4]
        dataset.wait_for(1 + 2 + 4)
    wanted = [where.microbatch_ids(step, index, 2) for step in (9, 10, 11, 12) for index in (1, 4)]
    assert dataset.reads[1:] == wanted[: len(dataset.reads) - 1], (
        "of the old place nothing more than the read that had begun"
    )


@pytest.mark.parametrize("bad", [0, 3])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_what_the_dataset_raises_names_the_samples_where_they_are_used(prefetch: int, bad: int) -> None:
    where = cursor()
    ids = where.microbatch_ids(2, bad, 2)
    dataset = Numbers(failing=frozenset(ids[1:]))
    with loading(dataset, where, prefetch=prefetch) as loader:
        assert len(list(loader.microbatches(1, 0, deal(loader, 1)))) == 6
        step = loader.microbatches(2, 0, deal(loader, 1))
        for _ in range(bad):
            next(step)
        with pytest.raises(DataError) as failed:
            next(step)
        said = (
            f"data.dataset: samples {list(ids)} cannot be read: OSError: sector {ids[1]} (in {__file__}, "
            "line "
        )
        assert str(failed.value).startswith(said)
        assert isinstance(failed.value.__cause__, OSError)
        assert str(pickle.loads(pickle.dumps(failed.value))) == str(failed.value)
        dataset.failing.clear()
        again = [plain(batch) for _, _, _, batch in loader.microbatches(2, 0, deal(loader, 1))]
        expected = [{"tokens": list(where.microbatch_ids(2, index, 2))} for index in range(6)]
        assert again == expected, "a failure that passes does no harm"


def test_a_store_that_does_not_answer_is_no_error_of_the_jobs() -> None:
    """The control is the test above: what the dataset raises by itself is the job's error."""
    dataset = Numbers()
    dataset.down = True
    with loading(dataset, cursor()) as loader, pytest.raises(Unavailable) as failed:
        next(loader.microbatches(1, 0, deal(loader, 1)))
    assert classify(failed.value, lambda: None) == ("peer", "")


def test_a_failure_ahead_of_what_is_used_is_nobodys_trouble() -> None:
    where = cursor()
    dataset = Numbers(failing=frozenset(where.ids(2)))
    with loading(dataset, where, prefetch=4) as loader:
        assert len(list(loader.microbatches(1, 0, deal(loader, 1)))) == 6
        dataset.wait_for(10)


def test_idle_ranks_read_nothing_ahead_but_what_they_are_asked_for() -> None:
    """Rank 4 always idles, because there are 2 microbatches for 5 ranks; it runs along with microbatch 0."""
    dataset, where = Numbers(), cursor(global_batch=4)
    with loading(dataset, where) as loader:
        for step in (1, 2):
            assert list(loader.microbatches(step, 4, deal(loader, 5))) == [(0, None, (), None)]
        assert dataset.reads == []
        ids = where.microbatch_ids(2, 0, 2)
        assert plain(loader.read(ids)) == {"tokens": list(ids)}


def test_reading_by_id_shares_the_thread() -> None:
    """A dataset need not be thread-safe: all its reads are made by one thread, one after the other."""
    dataset = Numbers()
    with loading(dataset, cursor(), prefetch=8) as loader:
        for step in range(1, 20):
            for _ in loader.microbatches(step, 0, deal(loader, 2)):
                assert plain(loader.read((3, 4))) == {"tokens": [3, 4]}
    assert len(dataset.readers) == 1 and threading.current_thread() not in dataset.readers


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    ("returned", "came"),
    [
        ({"tokens": torch.zeros(1, 4)}, "'tokens' of shape [1, 4]"),
        ({"fine": torch.zeros(2), "sum": torch.zeros(())}, "'sum' of shape []"),
        ({"tokens": [1, 2]}, "a list as 'tokens'"),
        ((torch.zeros(2),), "a tuple"),
        ({}, "an empty dictionary"),
    ],
)
def test_what_the_dataset_returns_has_a_row_for_each_sample(prefetch: int, returned: Any, came: str) -> None:
    """The control: two rows for two samples are taken."""
    where = cursor()
    ids = where.microbatch_ids(1, 0, 2)
    dataset = Numbers()
    dataset.read = lambda ids: {"tokens": torch.zeros(len(ids), 4)}  # type: ignore[method-assign]
    with loading(dataset, where, prefetch=prefetch) as loader:
        assert len(list(loader.microbatches(1, 0, deal(loader, 1)))) == 6
        dataset.read = lambda ids: returned  # type: ignore[method-assign]
        with pytest.raises(DataError) as refused:
            loader.read(ids)
    assert str(refused.value) == (
        f"data.dataset: read() returned {came} for the 2 ids {list(ids)}; it must return a dictionary of "
        "tensors of shape [2, ...], with one row for each id"
    )


class Clock:
    """A clock that stands still unless somebody moves it on, so no time depends on how threads are scheduled."""

    def __init__(self) -> None:
        self.now, self.asked = 100.0, threading.Semaphore(0)

    def __call__(self) -> float:
        self.asked.release()
        return self.now


class Timed(Numbers):
    """Each read takes 3 seconds of ``clock``.  They begin once the clock was asked, which is when somebody
    waits.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def read(self, ids: Ids) -> Batch:
        assert self.clock.asked.acquire(timeout=DEADLINE_S)
        self.clock.now += 3
        return super().read(ids)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("pause_s", [0, 5])
def test_the_time_that_callers_wait_is_counted(prefetch: int, pause_s: int) -> None:
    """It is what the reads took while the caller waited.  The control: time between two calls is none of it."""
    clock = Clock()
    with loading(Timed(clock), cursor(), prefetch=prefetch, clock=clock) as loader:
        loader.read((1, 2))
        assert loader.waited_s == 3 and clock.asked.acquire(timeout=DEADLINE_S), (
            "the clock was asked once more, when the wait was over"
        )
        clock.now += pause_s
        loader.read((3, 4))
        assert loader.waited_s == 6 and clock.now == 106 + pause_s
