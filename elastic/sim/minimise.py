"""a schedule that fails, made as small as it can be: delta debugging.

Source: A. Zeller, R. Hildebrandt, "Simplifying and isolating failure-inducing input" (2002), the algorithm ddmin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastic.sim.faults import Fault


def minimised(faults: Sequence[Fault], fails: Callable[[tuple[Fault, ...]], bool]) -> tuple[Fault, ...]:
    """A part of ``faults`` with which it still ``fails``, and no longer does if any one of them is left out.

    ``fails`` runs something, simulated or real, with a part of the faults in their order; it is true of all of them.
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
