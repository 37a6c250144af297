"""Tells how long a run still takes, from its newest steps.

The pace is the median of the newest steps' durations: a mean would count a recovery of minutes into the pace
of all later steps.  Steps of different generations, or of worlds of different sizes, are not compared.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from elastic.report.story import StepLine

NEWEST = 30
"""Number of newest steps whose durations count: enough for a median, few enough to follow a change within
about a minute.
"""


class RunPace:
    """The pace of a run.  ``add`` takes every step, in order."""

    def __init__(self) -> None:
        self._newest: StepLine | None = None
        self._took: deque[float] = deque(maxlen=NEWEST)
        self._rates: deque[float] = deque(maxlen=NEWEST)
        self.pace_s = 0.0
        """Seconds for each step; 0 if they are not known yet."""
        self.rate = 0.0
        """Tokens, samples or terms per second in the newest steps; 0 if they are not known yet."""

    def add(self, line: StepLine) -> None:
        before, self._newest = self._newest, line
        if before is None:
            return
        if before.world != line.world:
            self._took.clear()
            self._rates.clear()
        if (before.generation, before.step + 1) != (line.generation, line.step):
            return
        self._took.append(max(line.at - before.at, 0.0))
        self._rates.append(line.tokens_per_s)
        self.pace_s, self.rate = median(self._took), median(self._rates)

    @property
    def left_s(self) -> float:
        """Seconds until the last step; 0 if they are not known, or after the last step."""
        return 0.0 if self._newest is None else self.pace_s * (self._newest.steps - self._newest.step)


def spell(seconds: float) -> str:
    """Returns a duration as a clock shows it: ``0:01:05``, or ``3 d 04:00`` from two days on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return (
        f"{hours}:{minute:02}:{second:02}" if hours < 48 else (f"{hours // 24} d {hours % 24:02}:{minute:02}")
    )
