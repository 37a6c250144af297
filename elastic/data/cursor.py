"""The position in the data is a function of the step.  Nothing is remembered, so no sample can be lost,
repeated or swapped.

Step s, with a global batch of B, uses the positions (s-1)·B … s·B-1 of an endless stream; where the batch
grows, each step uses the positions that follow those of the step before (``plan/ramp.py``).  Position p is
slot ``p mod n`` of epoch ``p div n``, and the order of an epoch is a permutation that is *computed*, not
stored.  It is a Feistel network on the two digits (row, column) of a slot in a grid just larger than n; a
result outside of n is permuted again until it lies inside (Black and Rogaway 2002, "Ciphers with Arbitrary
Finite Domains", method 3).  So every epoch contains each sample exactly once, and the samples of any step
take a few hashes.  This costs about 10 µs a sample, outside of the training thread.

A run may be cut into stretches (``plan/stretches.py``).  Each goes on at the position at which the one before
ends, whatever its batch. With another seed, the samples that are left of the epoch are permuted once more,
and later epochs have the permutations of that seed. Another ``sampling`` counts from the next beginning of an
epoch on, since an epoch is either a permutation or not.  So every permuted epoch contains each sample exactly
once, also if changes fall into it.

In a mixture each part has a sequence of its own, with its own epochs, and the weights say whose turn it is
(``plan/mixture.py``).  After a change of the weights, the sequence of each part goes on where it stands.

The samples of a step may be put in order of their lengths, the longest first, before they are cut into
microbatches.  Then a microbatch has samples of like length, and so have the microbatches that the data ranks
run at the same time.  No other order of the step has less padding, or less waiting of ranks for each other in
each round, whatever their number: a sum of maxima over groups of one size is least if the groups are cut from
the sorted list.

Samples may be avoided from some step on.  Then another sample, drawn by a hash of the position, stands at
each of their positions, and all other positions stay as they are.  In a mixture with weights, that sample is
of the same part, so that the shares stay exact.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple

from elastic.errors import JobError
from elastic.plan.mixture import MixtureTurns, shares
from elastic.plan.ramp import Batches
from elastic.plan.stretches import Stretches, batches

ROUNDS = 8
"""Rounds of the Feistel network.  Four are enough for a large range; a small range needs more to look random,
and a round is cheap.
"""

SAMPLINGS = ("permutation", "with_replacement")
"""Values of ``data.sampling``."""
KEYS = 256
"""Number of keys that are kept: a key serves a whole epoch of one part of a mixture."""
SORTED = 4
"""Number of steps whose sorted samples are kept: the present one, and those that are read ahead."""

Lengths = Callable[[tuple[int, ...]], Sequence[int]]
"""Returns the lengths of samples, in their order."""


class Draw(NamedTuple):
    """The rule by which samples are drawn from position ``since`` on."""

    since: int
    seed: int
    sampling: str
    weights: tuple[float, ...] = ()


class Cursor:
    """Names the samples of every step.

    ``samples`` is the length of the dataset, and ``global_batch`` the number of samples of each step.
    ``sampling`` is "permutation" (each sample once an epoch) or "with_replacement".  With ``lengths`` the
    longest samples of a step come first.
    """

    def __init__(
        self,
        samples: int,
        global_batch: int | Batches,
        seed: int,
        sampling: str = "permutation",
        lengths: Lengths | None = None,
        *,
        draws: Sequence[Draw] = (),
        sizes: Sequence[int] = (),
    ) -> None:
        """``draws`` are used in place of seed and sampling.  If they have weights, ``sizes`` are the lengths
        of the weighted parts.
        """
        self.batches = global_batch if isinstance(global_batch, Batches) else Batches(global_batch)
        self.global_batch = self.batches.final
        if samples < 1 or self.global_batch < 1:
            raise ValueError(
                f"samples = {samples} and global_batch = {self.global_batch} must both be at least 1"
            )
        draws = draws or (Draw(0, seed, sampling),)
        for each in draws:
            if each.sampling not in SAMPLINGS:
                raise ValueError(f"sampling = {each.sampling!r} must be one of {', '.join(SAMPLINGS)}")
        self.samples, self.lengths = samples, lengths
        self._sequence = _Mixed(sizes, draws) if draws[0].weights else _Stream(samples, draws)
        self._ends = list(accumulate(sizes)) if draws[0].weights else [samples]
        self._by_length = lru_cache(maxsize=SORTED)(self._sorted)
        self.sizes = tuple(sizes) if draws[0].weights else (samples,)
        """The lengths of the sources of samples: of the parts of a mixture with weights, else of the one
        dataset.
        """
        self.avoided: Mapping[int, int] = {}
        self.anywhere: Collection[int] = ()
        self._seed = draws[0].seed

    def avoid(self, samples: Mapping[int, int], anywhere: Collection[int] = ()) -> None:
        """Replaces each of ``samples``, from its step on, by another sample of its source.  ``samples`` maps
        a sample to its step.

        Samples in ``anywhere`` are replaced by samples of any source.  At least one sample must be left to
        choose from.
        """
        self.avoided, self.anywhere = dict(samples), frozenset(anywhere)
        self._by_length.cache_clear()

    @classmethod
    def of(
        cls, stretches: Stretches, samples: int, lengths: Lengths | None = None, sizes: Sequence[int] = ()
    ) -> Cursor:
        """Returns the cursor of a run with these stretches."""
        steps, last = batches(stretches), stretches[-1]
        firsts = (1, *(each.until + 1 for each in stretches[:-1]))
        draws = [
            Draw(steps.before(first), each.seed, each.sampling, each.weights)
            for first, each in zip(firsts, stretches, strict=True)
        ]
        return cls(samples, steps, last.seed, last.sampling, lengths, draws=draws, sizes=sizes)

    def microbatches(self, step: int, microbatch: int) -> int:
        """Returns the number of microbatches of ``step``.

        Raises :class:`JobError` if the samples of the step cannot be cut into such microbatches, which can
        only happen in a step before the newest branch.
        """
        whole, rest = divmod(self.batches.of(step), microbatch)
        if rest:
            raise JobError(
                f"microbatch = {microbatch}: step {step} is before this branch and is done again, and "
                f"its {self.batches.of(step)} samples cannot be cut into microbatches of {microbatch}; "
                f"until step {self.batches.since} is past, set microbatch to a number that divides "
                f"{self.batches.of(step)}, too"
            )
        return whole

    def some_ids(self, microbatch: int) -> tuple[int, ...]:
        """Returns the sample ids of a microbatch with which code can be tried out: the first one of the
        newest branch.
        """
        return self.microbatch_ids(self.batches.since + 1, 0, microbatch)

    def ids(self, step: int) -> tuple[int, ...]:
        """Returns the sample ids of ``step`` (from 1), in order.  A step that reaches the end of an epoch
        continues with the next one.
        """
        return self.microbatch_ids(step, 0, self.batches.of(step))

    def microbatch_ids(self, step: int, index: int, microbatch: int) -> tuple[int, ...]:
        """Returns the sample ids of microbatch ``index`` of ``step``."""
        if self.lengths is not None:
            return self._by_length(step)[index * microbatch :][:microbatch]
        return self._drawn(step, index * microbatch, microbatch)

    def idle_ids(self, step: int, microbatch: int) -> tuple[int, ...]:
        """Returns the sample ids that a rank without a microbatch runs while other ranks run theirs: short
        samples if the lengths are known.
        """
        last = self.batches.of(step) // microbatch - 1
        return self.microbatch_ids(step, 0 if self.lengths is None else last, microbatch)

    def _drawn(self, step: int, first: int, count: int) -> tuple[int, ...]:
        """Returns ``count`` sample ids of ``step``, from the place ``first`` on, in the order in which they
        are drawn.
        """
        begin = self.batches.before(step) + first
        return tuple(
            self._sound(step, position, self.at(position)) for position in range(begin, begin + count)
        )

    def _sound(self, step: int, position: int, sample: int) -> int:
        """Returns ``sample``.  If it is avoided at ``step``, returns the first sample drawn for ``position``
        that is not avoided.
        """
        if step < self.avoided.get(sample, step + 1):
            return sample
        attempts, first, size = itertools.count(), 0, self.samples
        if sample not in self.anywhere:
            source = bisect_right(self._ends, sample)
            first, size = self._ends[source] - self.sizes[source], self.sizes[source]
        while step >= self.avoided.get(sample, step + 1):
            sample = first + _hash(_key(self._seed, "instead", position), 0, next(attempts)) % size
        return sample

    def _sorted(self, step: int) -> tuple[int, ...]:
        """Returns the sample ids of ``step``, the longest first, and samples of equal length in the order in
        which they are drawn.
        """
        assert self.lengths is not None
        ids = self._drawn(step, 0, self.batches.of(step))
        return tuple(
            sample
            for _, sample in sorted(zip(self.lengths(ids), ids, strict=True), key=lambda pair: -pair[0])
        )

    def at(self, position: int) -> int:
        """Returns the sample id at ``position`` (from 0) of the endless stream."""
        return self._sequence.at(position)


class _Stream:
    """The endless sequence of one dataset, or of one part of a mixture, which ``tag`` then names."""

    def __init__(self, samples: int, draws: Sequence[Draw], *tag: object) -> None:
        self.samples, self.tag = samples, tag
        # the last of several draws at one position counts
        self.draws = list({each.since: each for each in draws}.values())

    def at(self, position: int) -> int:
        epoch, slot = divmod(position, self.samples)
        begun, now = self._number(position - slot), self._number(position)
        if self.draws[begun].sampling == "with_replacement":
            return _hash(_key(self.draws[now].seed, *self.tag, "draw"), 0, position) % self.samples
        for before, each in reversed(list(pairwise(self.draws[begun : now + 1]))):
            if each.seed != before.seed:
                first = each.since - epoch * self.samples
                slot = first + permuted(
                    slot - first, self.samples - first, _key(each.seed, *self.tag, epoch, first)
                )
        return permuted(slot, self.samples, _key(self.draws[begun].seed, *self.tag, epoch))

    def _number(self, position: int) -> int:
        return bisect_right(self.draws, position, key=attrgetter("since")) - 1


class _Mixed:
    """The endless sequence of a mixture.  The ids of a part follow those of the parts before it."""

    def __init__(self, sizes: Sequence[int], draws: Sequence[Draw]) -> None:
        self.deals, streams = list[MixtureTurns](), list[list[Draw]]([] for _ in sizes)
        for draw in draws:
            had, whole = (
                self.deals[-1].before(draw.since) if self.deals else (0,) * len(sizes),
                shares(draw.weights),
            )
            if not self.deals or self.deals[-1].whole != whole:  # equal weights keep their turns
                self.deals.append(MixtureTurns(draw.since, had, whole))
            for each, since in zip(streams, had, strict=True):
                each.append(draw._replace(since=since))
        self.firsts = list(accumulate(sizes, initial=0))
        self.streams = [_Stream(size, streams[part], "part", part) for part, size in enumerate(sizes)]

    def at(self, position: int) -> int:
        deal = self.deals[bisect_right(self.deals, position, key=attrgetter("since")) - 1]
        part, place = deal.at(position)
        return self.firsts[part] + self.streams[part].at(place)


def permuted(slot: int, count: int, key: bytes) -> int:
    """Returns the image of ``slot`` under the permutation of ``range(count)`` that ``key`` selects."""
    columns = math.isqrt(count - 1) + 1
    rows, hashes = -(-count // columns), _rounds(key)
    while True:
        row, column = divmod(slot, columns)
        for of_column, of_row in hashes:
            row = (row + _finished(of_column, column)) % rows
            column = (column + _finished(of_row, row)) % columns
        slot = row * columns + column
        if slot < count:
            return slot


@lru_cache(maxsize=KEYS, typed=True)
def _key(*parts: object) -> bytes:
    return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=32).digest()


def _hash(key: bytes, tweak: int, value: int) -> int:
    """Returns a hash of 128 bits: so wide that taking a remainder of it favours no value."""
    return _finished(_begun(key, tweak), value)


def _finished(begun: hashlib.blake2b, value: int) -> int:
    """Returns the hash of what ``begun`` has taken in, followed by ``value``.  Leaves ``begun`` as it is."""
    found = begun.copy()
    found.update(value.to_bytes(8, "little"))
    return int.from_bytes(found.digest(), "little")


@lru_cache(maxsize=KEYS)
def _rounds(key: bytes) -> list[tuple[hashlib.blake2b, hashlib.blake2b]]:
    """Returns what :func:`permuted` hashes with: for each two of its rounds, the hash of a column and that of
    a row.
    """
    return [(_begun(key, tweak), _begun(key, tweak + 1)) for tweak in range(0, ROUNDS, 2)]


@lru_cache(maxsize=ROUNDS * KEYS)
def _begun(key: bytes, tweak: int) -> hashlib.blake2b:
    """Returns a hash that has taken in ``key``, which takes longer than to take in a value.  Callers must not
    change it: they add the value to a copy.
    """
    return hashlib.blake2b(key=key, salt=tweak.to_bytes(2, "little"), digest_size=16)
