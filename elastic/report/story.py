"""The run as a person follows it: a line for each step, and a sentence with the reason for each event."""

from __future__ import annotations

from dataclasses import dataclass

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


class Story:
    """Collects lines.  A reader asks for the lines after the last one that it has seen."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.lines: list[Line] = []
        self._last_step_at: float | None = None

    def say(self, at: float, text: str) -> None:
        """Adds a sentence.  An empty one is left out."""
        if text:
            self.lines.append(Sentence(at, text))

    def step(self, at: float, outcome: Outcome, world: int, lr: float) -> None:
        """Adds a step.  Its ``tokens_per_s`` counts from the step before, so a recovery lowers it."""
        seconds = at - self._last_step_at if self._last_step_at is not None else 0.0
        self._last_step_at = at
        rate = outcome.tokens / seconds if seconds > 0 else 0.0
        self.lines.append(StepLine(at, outcome.step, self.steps, outcome.loss, outcome.norm, lr, rate, world, outcome.generation))

    def since(self, seen: int) -> list[Line]:
        """Returns all lines but the first ``seen``."""
        return self.lines[seen:]
