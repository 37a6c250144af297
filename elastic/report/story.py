"""The run as a person follows it: a line a step, and one sentence with the reason when something happens."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.protocol.commit_record import Outcome


@dataclass(frozen=True)
class Sentence:
    """Something happened.  ``at``: wall clock, seconds."""

    at: float
    text: str


@dataclass(frozen=True)
class StepLine:
    """A committed step."""

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
    """Collects lines; readers ask for those after the last one they have seen."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.lines: list[Line] = []
        self._last_step_at: float | None = None

    def say(self, at: float, text: str) -> None:
        if text:
            self.lines.append(Sentence(at, text))

    def step(self, at: float, outcome: Outcome, world: int, lr: float) -> None:
        """``tokens_per_s`` is since the step before, so a recovery shows in it."""
        seconds = at - self._last_step_at if self._last_step_at is not None else 0.0
        self._last_step_at = at
        rate = outcome.tokens / seconds if seconds > 0 else 0.0
        self.lines.append(StepLine(at, outcome.step, self.steps, outcome.loss, outcome.norm, lr, rate, world, outcome.generation))

    def since(self, seen: int) -> list[Line]:
        return self.lines[seen:]
