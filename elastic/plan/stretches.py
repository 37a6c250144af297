"""The stretches of a run: steps that draw their samples alike.  A branch with another batch, order or mixture
begins a new one.

The samples of a run are one endless sequence, and a stretch takes up the sequence where the one before has
left it.  So a change leaves out no sample and repeats none (``data/cursor.py`` says what each change means).
A branch carries the stretches before its own, each with the last step that it counts for; where the run
stands in its data is computed from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from elastic.plan.ramp import Batches


@dataclass(frozen=True)
class Stretch:
    """The steps from the end of the stretch before up to ``until``, and the rule by which they draw.  An
    ``until`` of 0 means no end.
    """

    until: int
    global_batch: int
    start: int = 0
    increment: int = 0
    samples: int = 0
    seed: int = 0
    sampling: str = "permutation"
    weights: tuple[float, ...] = ()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Stretch:
        return cls(**{**value, "weights": tuple(value["weights"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"weights": list(self.weights)}


Stretches = tuple[Stretch, ...]
"""Stretches in order.  Those that a branch carries all have an end; the last one of a whole run has none."""


def ended(stretches: Stretches, step: int) -> Stretches:
    """Returns the stretches of the steps up to ``step``, of which the last one ends there; none for step 0."""
    found, since = list[Stretch](), 0
    for each in stretches:
        if since >= step:
            break
        found.append(each if 0 < each.until <= step else replace(each, until=step))
        since = found[-1].until
    return tuple(found)


def followed(earlier: Stretches, last: Stretch) -> Stretches:
    """Returns all stretches of a run whose last one is ``last``.  Stretches before ``last`` that draw by the
    same rule become part of it.
    """
    while earlier and replace(earlier[-1], until=0) == last:
        earlier = earlier[:-1]
    return (*earlier, last)


def batches(stretches: Iterable[Stretch]) -> Batches:
    """Returns the number of samples of each step of a run."""
    found, since = None, 0
    for each in stretches:
        found = Batches(each.global_batch, each.start, each.increment, each.samples, found, since)
        since = each.until
    assert found is not None, "a run has a stretch"
    return found
