"""The position in the data is a function of the step: nothing is remembered, so nothing can be lost, repeated or swapped.

The samples of step s are the positions (s-1)·B … s·B-1 of an endless stream.  Position p is slot ``p mod n`` of epoch ``p div n``,
and an epoch's order is a permutation that is *computed*, not stored: a Feistel network on the two digits (row, column) of a slot in
a grid just larger than n, walked again while it leads outside (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains",
method 3).  Every epoch contains each sample exactly once, and any step is a few hashes away.  The price: some 10 µs a sample, off
the training thread.
"""

from __future__ import annotations

import hashlib
import math

ROUNDS = 8
"""Four give a random-looking order of a large range; small ranges need more, and these are cheap."""

SAMPLINGS = ("permutation", "with_replacement")


class Cursor:
    """``samples``: length of the dataset; ``sampling``: "permutation" (each sample once an epoch) or "with_replacement"."""

    def __init__(self, samples: int, global_batch: int, seed: int, sampling: str = "permutation") -> None:
        if samples < 1 or global_batch < 1:
            raise ValueError(f"samples = {samples} and global_batch = {global_batch} must both be at least 1")
        if sampling not in SAMPLINGS:
            raise ValueError(f"sampling = {sampling!r} must be one of {', '.join(SAMPLINGS)}")
        self.samples, self.global_batch, self.seed, self.sampling = samples, global_batch, seed, sampling

    def ids(self, step: int) -> tuple[int, ...]:
        """The sample ids of ``step`` (from 1), in order.  A step over the end of an epoch goes on with the next one."""
        return self.microbatch_ids(step, 0, self.global_batch)

    def microbatch_ids(self, step: int, index: int, microbatch: int) -> tuple[int, ...]:
        """The ids of microbatch ``index`` of ``step``."""
        first = (step - 1) * self.global_batch + index * microbatch
        return tuple(self.at(position) for position in range(first, first + microbatch))

    def epoch(self, step: int) -> int:
        """The epoch in which ``step`` begins, from 0."""
        return (step - 1) * self.global_batch // self.samples

    def at(self, position: int) -> int:
        """The sample id at a position (from 0) of the endless stream."""
        if self.sampling == "with_replacement":
            return _hash(_key(self.seed, "draw"), 0, position) % self.samples
        epoch, slot = divmod(position, self.samples)
        return permuted(slot, self.samples, _key(self.seed, epoch))


def permuted(slot: int, count: int, key: bytes) -> int:
    """Where ``slot`` goes under the permutation of ``range(count)`` that ``key`` names."""
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
    """128 bits, so that a remainder of it favours nobody."""
    digest = hashlib.blake2b(value.to_bytes(8, "little"), key=key, salt=tweak.to_bytes(2, "little"), digest_size=16).digest()
    return int.from_bytes(digest, "little")
