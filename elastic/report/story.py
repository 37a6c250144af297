"""The run as a person follows it: a line for each step, and a sentence with the reason for each event."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from elastic.ids import WorkerId
from elastic.protocol.commit_record import Outcome, Score
from elastic.protocol.events import Work
from elastic.report.speed import Speed, noun_of


@dataclass(frozen=True)
class Sentence:
    """One event and its reason.  ``at`` is wall-clock time in seconds."""

    at: float
    text: str


@dataclass(frozen=True)
class Ending(Sentence):
    """The sentence with which a run ends.  The run's result repeats it, so a screen leaves it out."""


@dataclass(frozen=True)
class Scored(Sentence):
    """The sentence about a validation: the state after ``step`` has the mean ``loss`` over the terms of
    held-out samples.
    """

    step: int
    loss: float


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
    """The tokens per second, or the unit that ``noun`` names; 0 while the rate is not known."""
    world: int
    generation: int
    data_wait: float = 0.0
    """The largest part of the step for which a worker waited for data."""
    waiting: str = ""
    """The worker that waited for the largest part."""
    peak_bytes: int = 0
    """The most bytes that were allocated on one GPU."""
    mfu: float = 0.0
    causal_mfu: float = 0.0
    """The model FLOPs utilisation without the half of attention that a causal mask leaves out.  Both are 0 if
    they are not known.
    """
    layers: Mapping[str, float] = field(default_factory=dict)
    """The norm of the gradient of each layer, in the steps that record them."""
    noun: str = "tokens"
    """The word for the terms of the loss: tokens, samples or terms."""


Line = Sentence | StepLine
Show = Callable[[Line], None]
"""A function that shows a line to the user."""
LINES = 10_000
"""Number of newest lines that are kept, because a run may have a million steps.  The journal has all of
them.
"""


def tell(show: Show, *sentences: str) -> None:
    """Shows the sentences that are not empty."""
    for sentence in filter(None, sentences):
        show(Sentence(time.time(), sentence))


class Story:
    """Collects lines.  A reader asks for the lines after the last one that it has seen."""

    def __init__(self, steps: int, loss: str = "elastic") -> None:
        """``loss`` is the job's setting of that name."""
        self.steps, self.loss = steps, loss
        self.lines: deque[Line] = deque(maxlen=LINES)
        self.told = 0
        """The number of lines that were added."""
        self._timed_at: float | None = None
        """The time at which the newest step that was not ``queued`` was reported."""
        self._tokens, self._rate = 0, 0.0
        """The tokens of the steps since ``_timed_at``, and the newest ``tokens_per_s``."""
        self.speed = Speed()
        """The speed of all steps so far."""
        self._lock = threading.Lock()

    def say(self, at: float, text: str, score: Score | None = None) -> None:
        """Adds a sentence.  With a ``score`` it is the sentence of a validation.  An empty ``text`` is left
        out.
        """
        if text:
            self._add(
                Sentence(at, text)
                if score is None
                else Scored(at, text, score.version.step, score.found.mean)
            )

    def step(
        self,
        at: float,
        outcome: Outcome,
        members: Sequence[WorkerId],
        lr: float,
        work: Work | None = None,
        *,
        queued: bool = False,
    ) -> StepLine:
        """Adds a step of ``members``, by world rank, and returns its line.

        Its ``tokens_per_s`` counts from the step before, so a recovery lowers it.

        A step is ``queued`` if others wait behind it, as after a takeover.  The time of its report then does
        not tell when it was done.
        """
        self._tokens += outcome.tokens
        if not queued:
            if self._timed_at is not None and at > self._timed_at:
                self._rate = self._tokens / (at - self._timed_at)
            self._timed_at, self._tokens = at, 0
        usage, waiting, alone = outcome.usage, outcome.waiting, Speed()
        for speed in (alone, self.speed):
            speed.add(outcome, work)
        self.speed.noun = noun_of(self.loss, by_sample=sum(outcome.counts) == sum(map(len, outcome.samples)))
        line = StepLine(
            at,
            outcome.step,
            self.steps,
            outcome.loss,
            outcome.norm,
            lr,
            self._rate,
            len(members),
            outcome.generation,
            usage.data_wait,
            "" if waiting is None else members[waiting],
            usage.peak_bytes,
            alone.mfu,
            alone.causal_mfu,
            outcome.layer_norms,
            self.speed.noun,
        )
        self._add(line)
        return line

    def since(self, seen: int) -> tuple[int, list[Line]]:
        """Returns the number of lines so far, and the lines after the first ``seen`` of them, as far as they
        are kept.
        """
        with self._lock:
            return self.told, list(islice(self.lines, max(seen - self.told + len(self.lines), 0), None))

    def _add(self, line: Line) -> None:
        with self._lock:
            self.lines.append(line)
            self.told += 1
