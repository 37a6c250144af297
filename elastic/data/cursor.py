"""The position in the data is a function of the step.  Nothing is remembered, so no sample can be lost, repeated or swapped.

Step s, with a global batch of B, uses the positions (s-1)·B … s·B-1 of an endless stream; where the batch grows, each step uses those that
follow the step before (``plan/ramp.py``).  Position p is slot ``p mod n`` of epoch ``p
div n``, and the order of an epoch is a permutation that is *computed*, not stored.  It is a Feistel network on the two digits (row,
column) of a slot in a grid just larger than n; a result outside of n is permuted again until it lies inside (Black and Rogaway 2002,
"Ciphers with Arbitrary Finite Domains", method 3).  So every epoch contains each sample exactly once, and the samples of any step take a
few hashes.  This costs about 10 µs a sample, outside of the training thread.

The samples of a step may be put in order of their lengths, the longest first, before they are cut into microbatches.  Then a microbatch
has samples of like length, and so have the microbatches that the data ranks run at the same time.  No other order of the step has less
padding, or less waiting of ranks for each other in each round, whatever their number: a sum of maxima over groups of one size is least if
the groups are cut from the sorted list.

Samples may be avoided from some step on.  Then another sample, drawn by a hash of the position, stands at each of their positions, and all
other positions stay as they are.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from elastic.plan.ramp import Batches

ROUNDS = 8
"""Rounds of the Feistel network.  Four are enough for a large range; a small range needs more to look random, and a round is cheap."""

SAMPLINGS = ("permutation", "with_replacement")
"""Values of ``data.sampling``."""
SORTED = 4
"""Number of steps whose sorted samples are kept: the present one, and those that are read ahead."""

Lengths = Callable[[tuple[int, ...]], Sequence[int]]
"""Returns the lengths of samples, in their order."""


class Cursor:
    """Names the samples of every step.

    ``samples`` is the length of the dataset, and ``global_batch`` the number of samples of each step.  ``sampling`` is "permutation" (each
    sample once an epoch) or "with_replacement".  With ``lengths`` the longest samples of a step come first.
    """

    def __init__(
        self, samples: int, global_batch: int | Batches, seed: int, sampling: str = "permutation", lengths: Lengths | None = None
    ) -> None:
        self.batches = global_batch if isinstance(global_batch, Batches) else Batches(global_batch)
        self.global_batch = self.batches.final
        if samples < 1 or self.global_batch < 1:
            raise ValueError(f"samples = {samples} and global_batch = {self.global_batch} must both be at least 1")
        if sampling not in SAMPLINGS:
            raise ValueError(f"sampling = {sampling!r} must be one of {', '.join(SAMPLINGS)}")
        self.samples, self.seed, self.sampling, self.lengths = samples, seed, sampling, lengths
        self._by_length = lru_cache(maxsize=SORTED)(self._sorted)
        self.avoided: Mapping[int, int] = {}

    def avoid(self, samples: Mapping[int, int]) -> None:
        """Replaces each of ``samples`` by another one, from the step on that it is given with.  At least one sample must be left."""
        self.avoided = dict(samples)
        self._by_length.cache_clear()

    def ids(self, step: int) -> tuple[int, ...]:
        """Returns the sample ids of ``step`` (from 1), in order.  A step that reaches the end of an epoch continues with the next one."""
        return self.microbatch_ids(step, 0, self.batches.of(step))

    def microbatch_ids(self, step: int, index: int, microbatch: int) -> tuple[int, ...]:
        """Returns the sample ids of microbatch ``index`` of ``step``."""
        if self.lengths is not None:
            return self._by_length(step)[index * microbatch :][:microbatch]
        return self._drawn(step, index * microbatch, microbatch)

    def idle_ids(self, step: int, microbatch: int) -> tuple[int, ...]:
        """Returns the sample ids that a rank without a microbatch runs along with: short ones if the lengths are known."""
        last = self.batches.of(step) // microbatch - 1
        return self.microbatch_ids(step, 0 if self.lengths is None else last, microbatch)

    def _drawn(self, step: int, first: int, count: int) -> tuple[int, ...]:
        """Returns so many sample ids of ``step`` in the order in which they are drawn."""
        begin = self.batches.before(step) + first
        return tuple(self._sound(step, position, self.at(position)) for position in range(begin, begin + count))

    def _sound(self, step: int, position: int, sample: int) -> int:
        """Returns ``sample``, or if it is avoided, the first one that is not of those that are drawn for its position."""
        attempts = itertools.count()
        while step >= self.avoided.get(sample, step + 1):
            sample = _hash(_key(self.seed, "instead", position), 0, next(attempts)) % self.samples
        return sample

    def _sorted(self, step: int) -> tuple[int, ...]:
        """Returns the sample ids of ``step``, the longest first, and those of one length as they are drawn."""
        assert self.lengths is not None
        ids = self._drawn(step, 0, self.batches.of(step))
        return tuple(sample for _, sample in sorted(zip(self.lengths(ids), ids, strict=True), key=lambda pair: -pair[0]))

    def at(self, position: int) -> int:
        """Returns the sample id at ``position`` (from 0) of the endless stream."""
        if self.sampling == "with_replacement":
            return _hash(_key(self.seed, "draw"), 0, position) % self.samples
        epoch, slot = divmod(position, self.samples)
        return permuted(slot, self.samples, _key(self.seed, epoch))


def permuted(slot: int, count: int, key: bytes) -> int:
    """Returns the image of ``slot`` under the permutation of ``range(count)`` that ``key`` selects."""
    columns = math.isqrt(count - 1) + 1
    rows = -(-count // columns)
    while True:
        row, column = divmod(slot, columns)
        for round_ in range(0, ROUNDS, 2):
            row = (row + _hash(key, round_, column)) % rows
            column = (column + _hash(key, round_ + 1, row)) % columns
        slot = row * columns + column
        if slot < count:
            return slot


def _key(*parts: object) -> bytes:
    return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=32).digest()


def _hash(key: bytes, tweak: int, value: int) -> int:
    """Returns a hash of 128 bits: so wide that taking a remainder of it favours no value."""
    digest = hashlib.blake2b(value.to_bytes(8, "little"), key=key, salt=tweak.to_bytes(2, "little"), digest_size=16).digest()
    return int.from_bytes(digest, "little")
