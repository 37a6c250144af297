"""Reads the microbatches of a data rank ahead of the step that needs them.

What comes next is a function of (step, data rank, data ranks): there is nothing to save or restore, and aiming at another step,
rank or world only drops what was read for the old one.  One thread reads, also on behalf of :meth:`Loader.read`, so a dataset need
not be thread-safe.  What it raises is raised where the microbatch is asked for, with the ids of its samples.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from elastic.data.cursor import Cursor
from elastic.errors import DataError
from elastic.plan.batch import microbatch_of, rounds
from storage.errors import Unavailable

Batch = dict[str, Any]
"""Tensors by name, [microbatch, ...]."""
Ids = tuple[int, ...]
Round = tuple[int, int | None, Ids, Batch | None]
"""(round, microbatch that the rank runs in it, its sample ids, their batch); None, () and None where the rank idles."""


class Dataset(Protocol):
    """Random access to samples; all that a user's own class needs.

    ``read`` may not depend on what was read before.  ``fingerprint`` differs where any sample does, whatever they were made from,
    and stays where they are only moved: a run remembers it, and refuses to go on with others.
    """

    def __len__(self) -> int: ...

    def read(self, ids: Ids) -> Batch: ...

    def fingerprint(self) -> str: ...


class Place(NamedTuple):
    """A round of a step, as one rank of a world sees it."""

    step: int
    round: int
    data_rank: int
    data_ranks: int


class Loader:
    """``prefetch``: microbatches read ahead, also of the next steps; 0 reads when asked, without a thread."""

    def __init__(self, dataset: Dataset, cursor: Cursor, microbatch: int, prefetch: int = 2) -> None:
        self.dataset, self.cursor, self.microbatch, self.prefetch = dataset, cursor, microbatch, prefetch
        self._count = cursor.global_batch // microbatch
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader") if prefetch else None
        self._next: Place | None = None
        self._ahead: deque[Future[Batch]] = deque()
        self._unread: Iterator[Ids] = iter(())

    def microbatches(self, step: int, data_rank: int, data_ranks: int) -> Iterator[Round]:
        """Every round of ``step`` for this rank of the world.

        Raises :class:`DataError` for whatever the dataset raises, but for :class:`Unavailable`: that is nobody's error.
        """
        count = rounds(self._count, data_ranks)
        for round_ in range(count):
            if self._next != (step, round_, data_rank, data_ranks):
                self.seek(step, data_rank, data_ranks, round_)
            self._next = None  # unless all goes well
            index = microbatch_of(round_, data_rank, data_ranks, self._count)
            ids = () if index is None else self._ids(step, index)
            batch = None if index is None else self._take(ids)
            after = (step, round_ + 1) if round_ + 1 < count else (step + 1, 0)
            self._next = Place(*after, data_rank, data_ranks)
            yield round_, index, ids, batch

    def seek(self, step: int, data_rank: int, data_ranks: int, round_: int = 0) -> None:
        """Begin to read for another place.  A read that has begun for the old one ends by itself, unused."""
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._next = Place(step, round_, data_rank, data_ranks)
        self._unread = self._work(self._next)
        self._top_up()

    def read(self, ids: Ids) -> Batch:
        """Samples by id, now."""
        return self._reader.submit(self._read, ids).result() if self._reader else self._read(ids)

    def close(self) -> None:
        """End the thread; waits for the read that it is at."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)

    def _take(self, ids: Ids) -> Batch:
        if self._reader is None:
            return self._read(ids)
        future = self._ahead.popleft()
        self._top_up()
        return future.result()

    def _top_up(self) -> None:
        while self._reader is not None and len(self._ahead) < self.prefetch and (ids := next(self._unread, None)) is not None:
            self._ahead.append(self._reader.submit(self._read, ids))

    def _work(self, place: Place) -> Iterator[Ids]:
        """The samples of every microbatch that the rank runs from ``place`` on: endless, or none for a rank that always idles."""
        first = place.round * place.data_ranks + place.data_rank
        for step in itertools.count(place.step) if place.data_rank < self._count else ():
            for index in range(first, self._count, place.data_ranks):
                yield self._ids(step, index)
            first = place.data_rank

    def _ids(self, step: int, index: int) -> Ids:
        return self.cursor.microbatch_ids(step, index, self.microbatch)

    def _read(self, ids: Ids) -> Batch:
        try:
            return self.dataset.read(ids)
        except Unavailable:  # a store that does not answer, and not for want of patience: the platform's trouble, not the job's
            raise
        except Exception as error:  # the user's dataset may raise anything, in a thread where nobody would see of which samples
            raise DataError(f"data.dataset: samples {list(ids)} cannot be read: {type(error).__name__}: {error}") from error
