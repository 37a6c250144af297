"""Deals the microbatches of a step out to the data ranks in rounds.  It is exact for any number of microbatches and of ranks.

Microbatch i is run by data rank i mod d in round i div d.  In the last round some ranks may have none.  They run with
weight zero, so that every collective finds all members.
"""

from __future__ import annotations


def rounds(microbatches: int, data_ranks: int) -> int:
    """Returns the number of rounds of a step.  Each rank runs at most one microbatch in a round."""
    return -(-microbatches // data_ranks)


def microbatch_of(round_: int, data_rank: int, data_ranks: int, microbatches: int) -> int | None:
    """Returns the microbatch that the rank runs in the round, or None if it idles."""
    index = round_ * data_ranks + data_rank
    return index if index < microbatches else None


def active(round_: int, data_ranks: int, microbatches: int) -> int:
    """Returns the number of ranks that run a microbatch in the round, always the first ones.  After the last round it is 0."""
    return max(0, min(data_ranks, microbatches - round_ * data_ranks))
