"""Deals the positions of a mixture out to its parts, by weight, so that the share of a part is exact all
along and not only on average.

Among the first p samples, a part with share s has more than s·p - 1 and fewer than s·p + 1, for every p;
independent draws would stray by √p.  The i-th sample of a part (from 0) must come in the window from i/s to
(i+1)/s, and of the parts whose window is open, the one whose window closes first has its turn.  This meets
all windows (Baruah, Cohen, Plaxton and Varvel 1996, "Proportionate progress", for one resource).  Weights are
whole numbers, so the turns repeat after as many positions as their sum, and any position is looked up.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

MOST_TURNS = 10_000
"""Largest number of turns after which the turns repeat; it allows weights of four digits.  A table of so many
turns takes 20 ms to make.
"""


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns the smallest whole numbers in the ratio of ``weights``, taken as written in decimal."""
    exact = [Fraction(repr(weight)) for weight in weights]
    whole = [int(each * math.lcm(*(each.denominator for each in exact))) for each in exact]
    return tuple(each // (math.gcd(*whole) or 1) for each in whole)


@lru_cache(maxsize=16)
def turns(whole: tuple[int, ...]) -> tuple[array[int], array[int]]:
    """Returns the part that each position of a period belongs to, and how many positions before it belong to
    the same part.
    """
    total, had = sum(whole), [0] * len(whole)
    parts, ranks = array("L"), array("L")
    for position in range(total):
        open_ = [part for part, share in enumerate(whole) if had[part] * total < (position + 1) * share]
        part = min(open_, key=lambda part: -(-(had[part] + 1) * total // whole[part]))
        parts.append(part)
        ranks.append(had[part])
        had[part] += 1
    return parts, ranks


@dataclass(frozen=True)
class MixtureTurns:
    """The turns from position ``since`` on, before which each part has had ``had`` samples."""

    since: int
    had: tuple[int, ...]
    whole: tuple[int, ...]

    def at(self, position: int) -> tuple[int, int]:
        """Returns the part of ``position``, and the position in the sequence of that part."""
        parts, ranks = turns(self.whole)
        period, place = divmod(position - self.since, len(parts))
        return parts[place], self.had[parts[place]] + period * self.whole[parts[place]] + ranks[place]

    def before(self, position: int) -> tuple[int, ...]:
        """Returns the number of samples that each part has had before ``position``."""
        parts, _ = turns(self.whole)
        period, place = divmod(position - self.since, len(parts))
        begun = parts[:place]
        return tuple(
            had + period * share + begun.count(part)
            for part, (had, share) in enumerate(zip(self.had, self.whole, strict=True))
        )
