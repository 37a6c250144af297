"""The microbatches of a step, dealt out to the data ranks in rounds; exact for any number of either.

Microbatch i is run by data rank i mod d in round i div d.  In the last round some ranks may have none: they run along with weight
zero, so that every collective finds all members.
"""

from __future__ import annotations


def rounds(microbatches: int, data_ranks: int) -> int:
    """Rounds of a step: each rank runs at most one microbatch in each."""
    return -(-microbatches // data_ranks)


def microbatch_of(round_: int, data_rank: int, data_ranks: int, microbatches: int) -> int | None:
    """The microbatch that the rank runs in the round, or None when it idles."""
    index = round_ * data_ranks + data_rank
    return index if index < microbatches else None


def active(round_: int, data_ranks: int, microbatches: int) -> int:
    """How many ranks, the first ones, run a microbatch in the round; 0 after the last."""
    return max(0, min(data_ranks, microbatches - round_ * data_ranks))
