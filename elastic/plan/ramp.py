"""The number of samples of each step, a function of the step alone.

The batch may grow while the run is young (Brown and others 2020, section 2.3; McCandlish and others 2018):
from ``start`` by ``increment`` up to the final batch.  Each size below the final one lasts for an equal share
of the first ``samples`` samples.

A branch of a run may have another rule from some step on.  The samples that its ramp counts are those of the
whole run: a ramp that was over stays over, and a rule that is replaced by an equal one goes on as if nothing
had happened.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Batches:
    """The samples of each step.  Without a ``start`` all steps have ``final`` of them.

    With ``earlier``, the steps up to ``since`` are those of that rule.
    """

    final: int
    start: int = 0
    increment: int = 1
    samples: int = 0
    earlier: Batches | None = None
    since: int = 0

    @property
    def steady(self) -> int:
        """The step from which on all have ``final`` samples."""
        return self._levels[-1][0]

    def of(self, step: int) -> int:
        """Returns the number of samples of ``step``, from 1."""
        return self._level(step)[2]

    def before(self, step: int) -> int:
        """Returns the number of samples of all steps before ``step``."""
        first, consumed, batch = self._level(step)
        return consumed + (step - first) * batch

    def _level(self, step: int) -> tuple[int, int, int]:
        return self._levels[bisect_right(self._levels, step, key=lambda level: level[0]) - 1]

    @cached_property
    def _levels(self) -> list[tuple[int, int, int]]:
        """The sizes of the batch, each as its first step, the samples of all steps before, and the samples of
        a step.
        """
        levels = (
            [level for level in self.earlier._levels if level[0] <= self.since]
            if self.earlier is not None
            else []
        )
        step, consumed = (
            self.since + 1,
            self.earlier.before(self.since + 1) if self.earlier is not None else 0,
        )
        sizes = range(self.start, self.final, self.increment) if self.start else range(0)
        for number, size in enumerate(sizes, 1):
            # samples until the end of this share, times the number of sizes
            left = number * self.samples - consumed * len(sizes)
            if (steps := -(-left // (size * len(sizes)))) > 0:
                levels.append((step, consumed, size))
                step, consumed = step + steps, consumed + steps * size
        return [*levels, (step, consumed, self.final)]
