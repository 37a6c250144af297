"""Reruns: in a step that is due (``workers.rerun_every``) every member first runs a microbatch of another member,
and both must get the same gradients, bit for bit.

It is the first microbatch of the other one.  Each member says in its record of the step which bits its own
gradients had, and which the other one's, as a digest.  Bits do not depend on who computes them, so if two
differ, one of the two members has computed wrong ones, or the code does not compute the same twice.  Then
nobody applies the step.

Who runs whose changes from world to world: of three members or more, one that is wrong again is then compared
with another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Computed:
    """A member's digest of the gradients of a microbatch.  ``rank`` is its world rank, and ``place`` its
    place in its model group: members in other places compute other gradients from the same microbatch.
    """

    rank: int
    microbatch: int
    digest: int
    place: int = 0


class Differ(ValueError):
    """Members have computed different gradients from the same microbatches; ``computed`` has their digests."""

    def __init__(self, step: int, computed: Sequence[Computed]) -> None:
        which = ", ".join(str(each) for each in sorted({each.microbatch for each in computed}))
        super().__init__(
            f"step {step}: members computed different gradients from the same microbatch ({which}), so nobody "
            "applies the step"
        )
        self.computed = tuple(computed)


def apart(ranks: int, generation: int) -> int:
    """Returns the distance from a data rank to the one whose microbatch it runs again, in a world of ``ranks``
    data ranks; 0 if it is alone.
    """
    return 1 + generation % (ranks - 1) if ranks > 1 else 0


def compared(
    step: int,
    counterparts: Sequence[Sequence[int]],
    distance: int,
    first: Sequence[int | None],
    own: Sequence[float],
    others: Sequence[float],
) -> tuple[tuple[int, int, int], ...]:
    """Returns the digests on which two members agree, each with their place in a model group and with its microbatch.

    ``counterparts`` are the members in each place of a model group, ``first`` is the first microbatch of each data rank, None if it idles.
    ``own`` and ``others`` are what each member, by world rank, has said of its own microbatch, and of that of
    the data rank ``distance`` after its own.  Raises :class:`Differ` if two of them differ.
    """
    agreed, differ = list[tuple[int, int, int]](), list[Computed]()
    for place, ranks in enumerate(counterparts):
        for data_rank, rank in enumerate(ranks):
            other = (data_rank + distance) % len(ranks)
            if (microbatch := first[other]) is None:
                continue
            known, again = int(own[ranks[other]]), int(others[rank])
            if known == again:
                agreed.append((place, microbatch, known))
            else:
                differ.append(Computed(ranks[other], microbatch, known, place))
                differ.append(Computed(rank, microbatch, again, place))
    if differ:
        raise Differ(step, differ)
    return tuple(agreed)
