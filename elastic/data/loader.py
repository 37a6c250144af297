"""Reads the microbatches of a data rank ahead of the step that needs them.

The next microbatch is a function of the step, the data rank and the deal.  So there is nothing to save or
restore, and a move to another step, rank or world only drops what was read ahead.  One thread does all the
reading, that of :meth:`Loader.read` too, so a dataset need not be thread-safe.  An exception of the dataset
is raised where the microbatch is asked for, with the ids of its samples.

The caller's thread reads the first microbatches, and finds out whether the dataset draws from the model's
generators of random numbers (``apart.py``).  If it does, the caller's thread reads all microbatches, with
generators that are seeded by the sample ids.

With ``readers`` each reader process has a thread that waits for its samples (``readers.py``), and generators
are always seeded by the sample ids.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch

from elastic.code.imports import failure
from elastic.data.apart import Draws, NoDraws, apart, seed_of
from elastic.data.cursor import Cursor
from elastic.data.readers import Readers
from elastic.errors import DataError
from elastic.plan.batch import Deal
from storage.errors import Unavailable

Batch = dict[str, Any]
"""Tensors by name, each of shape [microbatch, ...]."""
Ids = tuple[int, ...]
LOOKED_AT = 8
"""Number of reads by which a loader finds out whether its dataset draws random numbers from the model's
generators.
"""
Round = tuple[int, int | None, Ids, Batch | None]
"""One round: (round, microbatch that the rank runs in it, its sample ids, their batch).  An idle round has
None, () and None.
"""


class Dataset(Protocol):
    """Gives random access to samples.  These three methods are all that a user's own class needs.

    ``read(ids)`` returns a batch of those samples, whatever was read before.  ``fingerprint()`` returns a
    text that changes when any sample changes, and stays the same when the data only moves to another place.
    A run remembers the fingerprint and refuses to continue on other data.
    """

    def __len__(self) -> int: ...

    def read(self, ids: Ids) -> Batch: ...

    def fingerprint(self) -> str: ...


class Reading(NamedTuple):
    """The next read of one data rank: the step, the round, the rank and the deal of its world."""

    step: int
    round: int
    data_rank: int
    deal: Deal


class Loader:
    """Yields the microbatches of one data rank.

    ``prefetch`` is the number of microbatches that are read ahead, across steps.  With 0 the loader has no
    thread and reads when asked. ``clock`` returns seconds, by which waiting is measured.
    """

    def __init__(
        self,
        dataset: Dataset,
        cursor: Cursor,
        microbatch: int,
        prefetch: int = 2,
        clock: Callable[[], float] = time.monotonic,
        named: str = "data.dataset",
        reads: Callable[[Ids], object] = len,
        readers: Readers | None = None,
    ) -> None:
        """``named`` is the setting of the dataset, for errors.  ``reads`` is called with the sample ids
        before each read, and with none after it.
        """
        self.dataset, self.cursor, self.microbatch, self.prefetch, self.named = (
            dataset,
            cursor,
            microbatch,
            prefetch,
            named,
        )
        self._clock, self._reads, self._readers = clock, reads, readers
        self._final = cursor.batches.final // microbatch
        self._reader = ThreadPoolExecutor(readers.count if readers else 1, "loader") if prefetch else None
        self._next: Reading | None = None
        self._ahead: deque[tuple[Ids, Future[Batch] | None]] = deque()
        self._unread: Iterator[Ids] = iter(())
        self.vocab: int | None = None
        """Number of tokens that the model knows; None if the tokens of samples are not checked."""
        self.draws = False
        """True once the dataset was seen to draw from the generators of the model, or to seed them."""
        self._looked_at = 0
        self.waited_s = 0.0
        """Seconds that callers have waited for batches."""

    def microbatches(self, step: int, data_rank: int, deal: Deal) -> Iterator[Round]:
        """Yields every round of ``step`` for ``data_rank``.

        Raises :class:`DataError` for any exception of the dataset except :class:`Unavailable`: a store that
        does not answer is not the job's error.
        """
        deal, dealt = deal.of(self._final), self._dealt(deal, step)
        for round_ in range(dealt.rounds):
            if self._next != (step, round_, data_rank, deal):
                self.seek(step, data_rank, deal, round_)
            self._next = None  # stays None if the read below fails, so that the next call seeks
            index = dealt.microbatch_of(round_, data_rank)
            ids, batch = ((), None) if index is None else self._take(step, index)
            after = (step, round_ + 1) if round_ + 1 < dealt.rounds else (step + 1, 0)
            self._next = Reading(*after, data_rank, deal)
            yield round_, index, ids, batch

    def again(self, round_: int, step: int, index: int | None) -> Iterator[Round]:
        """Yields, as round ``round_``, a microbatch of another data rank, which is read now; None: an idle
        round.
        """
        ids = () if index is None else self._ids(step, index)
        yield round_, index, ids, None if index is None else self.read(ids)

    def seek(self, step: int, data_rank: int, deal: Deal, round_: int = 0) -> None:
        """Starts to read ahead from another place.

        A read that is under way for the old place ends by itself, and its result is dropped.
        """
        for _, future in self._ahead:
            if future is not None:
                future.cancel()
        self._ahead.clear()
        self._next = Reading(step, round_, data_rank, deal)
        self._unread = self._work(self._next)
        self._top_up()

    def avoid(self, samples: Mapping[int, int], anywhere: Collection[int] = ()) -> None:
        """Replaces each of ``samples`` from its step on, and drops what was read ahead if ``samples`` has
        changed.  ``samples`` maps a sample to its step.

        A sample in ``anywhere`` is replaced by a sample of any source, any other one by a sample of its own
        source.
        """
        if samples != self.cursor.avoided:
            self.cursor.avoid(samples, anywhere)
            self._next = None

    def read(self, ids: Ids) -> Batch:
        """Reads the samples ``ids`` and returns them."""
        return self._await(self._submitted(ids), ids)

    def each(self, blocks: Iterable[Ids]) -> Iterator[Batch]:
        """Yields the samples of each of ``blocks``, and reads ahead meanwhile."""
        under_way = deque[tuple[Ids, Future[Batch] | None]]()
        for ids in blocks:
            under_way.append((ids, self._submitted(ids)))
            if len(under_way) > self.prefetch:
                yield self._next_of(under_way)
        while under_way:
            yield self._next_of(under_way)

    def _next_of(self, under_way: deque[tuple[Ids, Future[Batch] | None]]) -> Batch:
        ids, future = under_way.popleft()
        return self._await(future, ids)

    def close(self) -> None:
        """Ends the thread after the read that it is busy with.  Readers end at once."""
        if self._readers is not None:
            self._readers.close()
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)

    def _take(self, step: int, index: int) -> tuple[Ids, Batch]:
        """Returns the sample ids of the microbatch, and its samples; both are there already if they are read
        ahead.
        """
        ids, future = self._ahead.popleft() if self._reader is not None else (self._ids(step, index), None)
        self._top_up()
        return ids, self._await(future, ids)

    def _await(self, future: Future[Batch] | None, ids: Ids) -> Batch:
        """Returns the batch of ``future``, or reads ``ids`` here, and adds the time to ``waited_s``."""
        began = self._clock()
        try:
            if future is None:
                future = self._submitted(ids)
            return future.result() if future is not None else self._read_here(ids)
        except Draws:
            assert self._reader is not None
            # what is read ahead ends first: the dataset need not be thread-safe
            self._reader.submit(int).result()
            return self._read_here(ids)
        finally:
            self.waited_s += self._clock() - began

    def _submitted(self, ids: Ids) -> Future[Batch] | None:
        """Lets the thread read ``ids``; returns None if the caller is to read them when they are needed."""
        if self._reader is None or (self._readers is None and (self.draws or self._looked_at < LOOKED_AT)):
            return None
        return self._reader.submit(self._read_ahead, ids)

    def _read_ahead(self, ids: Ids) -> Batch:
        """Reads in the loader's thread, where no operation may draw random numbers from the model's
        generators.  The first operation that would draw ends the reading ahead, before it draws.
        """
        if self._readers is not None:
            return self._known(self._readers.read(ids), ids)
        try:
            with NoDraws():
                return self._read(ids)
        except Draws:
            self._drew()
            raise

    def _drew(self) -> None:
        if not self.draws:
            self.draws = True
            if self._readers is not None:  # this process reads only to check the job
                return
            print(
                f"{self.named}: {_maker(self.dataset)[0]} draws from the default generators of torch, "
                "Python or numpy, or seeds them, as the model does, so samples are not read ahead; to "
                "read faster, give the dataset its own generator (torch.Generator().manual_seed(id)), "
                "or set data.readers",
                flush=True,
            )

    def _read_here(self, ids: Ids) -> Batch:
        """Reads in the caller's thread, and leaves the generators of the model as they are."""
        if not self.draws and self._looked_at >= LOOKED_AT:
            return self._read(ids)
        with apart(seed_of(ids)) as drawn:
            batch = self._read(ids)
            drew = drawn()
        self._looked_at += 1
        if drew:
            self._drew()
        return batch

    def _top_up(self) -> None:
        while (
            self._reader is not None
            and len(self._ahead) < self.prefetch
            and (ids := next(self._unread, None)) is not None
        ):
            self._ahead.append((ids, self._submitted(ids)))

    def _work(self, reading: Reading) -> Iterator[Ids]:
        """Yields the sample ids of every microbatch of the rank from ``reading`` on, without end; none for a
        rank that always idles.
        """
        first = reading.round
        for step in itertools.count(reading.step):
            dealt = self._dealt(reading.deal, step)
            mine = [dealt.microbatch_of(round_, reading.data_rank) for round_ in range(dealt.rounds)]
            if step >= self.cursor.batches.steady and not any(index is not None for index in mine):
                return
            yield from (self._ids(step, index) for index in mine[first:] if index is not None)
            first = 0

    def _dealt(self, deal: Deal, step: int) -> Deal:
        """Returns the deal of the microbatches of ``step``."""
        return deal.of(self.cursor.microbatches(step, self.microbatch))

    def _ids(self, step: int, index: int) -> Ids:
        return self.cursor.microbatch_ids(step, index, self.microbatch)

    def _read(self, ids: Ids) -> Batch:
        self._reads(ids)
        try:
            return self._known(batch_of(self.dataset, ids, self.named), ids)
        finally:
            self._reads(())

    def _known(self, batch: Batch, ids: Ids) -> Batch:
        """Returns ``batch``.  Raises :class:`DataError` if the model does not know one of its tokens: a GPU
        would end the process without naming the sample.
        """
        tokens = batch.get("tokens") if self.vocab is not None else None
        if self.vocab is None or tokens is None or tokens.device.type != "cpu" or not tokens.numel():
            return batch
        if (largest := int(tokens.numpy().max())) < self.vocab:
            return batch
        raise DataError(
            f"{self.named}: samples {list(ids)} have the token {largest}, but the model has only the "
            f"tokens 0 to {self.vocab - 1}; set the vocabulary in model_args to {largest + 1} or more, "
            "or correct the dataset"
        )


def batch_of(dataset: Dataset, ids: Ids, named: str) -> Batch:
    """Returns a copy of what ``dataset.read(ids)`` returned, since the dataset may use its memory again.

    Raises :class:`DataError` if the read fails, or if a tensor does not have one row for each id, and
    :class:`Unavailable` if a store does not answer.
    """
    try:
        batch = dataset.read(ids)
    # a store that does not answer, after all retries, is a fault of the platform and not of the job
    except Unavailable:
        raise
    # the user's dataset may raise anything; without this nobody would see for which samples
    except Exception as error:
        raise DataError(f"{named}: samples {list(ids)} cannot be read: {failure(error)}") from error
    return {name: value.clone() for name, value in _checked(batch, ids, named, *_maker(dataset)).items()}


def _maker(dataset: Dataset) -> tuple[str, str]:
    """Returns, for errors, the name of the code that makes the batches of ``dataset``, and how to mend a
    wrong batch.
    """
    return getattr(dataset, "made_by", ("read()", ""))


def _checked(batch: object, ids: Ids, named: str, maker: str, mend: str) -> Batch:
    """Returns ``batch``.  Raises :class:`DataError` unless it has a row of each tensor for each id."""
    came = None
    if not isinstance(batch, Mapping):
        came = f"a {type(batch).__name__}"
    elif not batch:
        came = "an empty dictionary"
    else:
        for name, value in batch.items():
            if not isinstance(value, torch.Tensor):
                came = f"a {type(value).__name__} as {name!r}"
            elif value.shape[:1] != (len(ids),):
                came = f"{name!r} of shape {list(value.shape)}"
    if came is None:
        return batch  # type: ignore[return-value]
    raise DataError(
        f"{named}: {maker} returned {came} for the {len(ids)} ids {list(ids)}; it must return a dictionary "
        f"of tensors of shape [{len(ids)}, ...], with one row for each id{mend and f': {mend}'}"
    )
