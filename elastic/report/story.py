"""The run as a person follows it: a line for each step, and a sentence with the reason for each event."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from itertools import islice

from elastic.protocol.commit_record import Outcome


@dataclass(frozen=True)
class Sentence:
    """One event and its reason.  ``at`` is wall-clock time in seconds."""

    at: float
    text: str


@dataclass(frozen=True)
class StepLine:
    """One committed step.  ``at`` is wall-clock time in seconds."""

    at: float
    step: int
    steps: int
    loss: float
    norm: float
    lr: float
    tokens_per_s: float
    world: int
    generation: int


Line = Sentence | StepLine
LINES = 10_000
"""Number of lines that are kept, the newest: a run may have a million steps.  All of them are in the journal."""


class Story:
    """Collects lines.  A reader asks for the lines after the last one that it has seen."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.lines: deque[Line] = deque(maxlen=LINES)
        self.told = 0
        """The number of lines that were added."""
        self._last_step_at: float | None = None
        self._lock = threading.Lock()

    def say(self, at: float, text: str) -> None:
        """Adds a sentence.  An empty one is left out."""
        if text:
            self._add(Sentence(at, text))

    def step(self, at: float, outcome: Outcome, world: int, lr: float) -> None:
        """Adds a step.  Its ``tokens_per_s`` counts from the step before, so a recovery lowers it."""
        seconds = at - self._last_step_at if self._last_step_at is not None else 0.0
        self._last_step_at = at
        rate = outcome.tokens / seconds if seconds > 0 else 0.0
        self._add(StepLine(at, outcome.step, self.steps, outcome.loss, outcome.norm, lr, rate, world, outcome.generation))

    def since(self, seen: int) -> tuple[int, list[Line]]:
        """Returns the number of lines so far, and all but the first ``seen`` of them, as far as they are kept."""
        with self._lock:
            return self.told, list(islice(self.lines, max(seen - self.told + len(self.lines), 0), None))

    def _add(self, line: Line) -> None:
        with self._lock:
            self.lines.append(line)
            self.told += 1
