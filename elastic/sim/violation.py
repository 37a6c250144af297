"""A broken promise, and what oracles look at things with: none of it is shared with the code that they judge."""

from __future__ import annotations

from functools import lru_cache


class Violation(AssertionError):
    """A promise was broken.  ``simulate`` adds seed, time and the end of the story."""


@lru_cache(maxsize=4096)
def covers(shards: frozenset[tuple[int, int]], rows: tuple[int, ...]) -> bool:
    """Whether shards (count, index) together hold every row, looked at one by one (torch's chunk rule)."""
    return all(any(row // -(-length // count) == index for count, index in shards) for length in rows for row in range(length))
