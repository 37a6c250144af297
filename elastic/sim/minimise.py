"""Makes a schedule that fails as small as possible, by delta debugging.

Source: A. Zeller, R. Hildebrandt, "Simplifying and isolating failure-inducing input" (2002), the algorithm
ddmin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastic.protocol.faults import Fault


def minimised(faults: Sequence[Fault], fails: Callable[[tuple[Fault, ...]], bool]) -> tuple[Fault, ...]:
    """Returns a part of ``faults`` for which ``fails`` is true, and false as soon as any single fault is left
    out.

    ``fails`` runs the faults that it is given, simulated or real, in their order.  It must be true of all
    faults together.
    """
    left, parts = tuple(faults), 2
    while len(left) > 1:
        size = -(-len(left) // parts)
        cuts = (left[:begin] + left[begin + size :] for begin in range(0, len(left), size))
        smaller = next(filter(fails, cuts), None)
        if smaller is not None:
            left, parts = smaller, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(2 * parts, len(left))
    return left
