"""The coordinator's answer to a question about the run, which commands and drivers show."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.ids import WorkerId
from elastic.protocol.commit_record import Score
from elastic.report.story import Line


@dataclass(frozen=True)
class View:
    """The coordinator's answer to a question about the run.  ``workers`` maps each worker to its node."""

    state: str
    reason: str
    token: str
    pid: int
    incarnation: int
    generation: int
    step: int
    steps: int
    workers: dict[WorkerId, str]
    told: int
    """The number of lines of the story so far; ``lines`` are the last of them."""
    lines: list[Line]
    stopping: str
    """The reason why the run was asked to stop; "" if it was not."""
    over: bool
    job_error: str
    """The user's traceback if the job is at fault."""
    unprotected_since: int | None
    """The step since which some member's state lacks a complete copy in host memory, although it should have
    one; None if no copy is missing.
    """
    unbuddied_since: int | None
    """The step since which some member's state lacks a copy on another node, although it should have one;
    None if no copy is missing.
    """
    paces: tuple[int, int]
    """The steps from one copy in host memory to the next, and from one copy at the buddies to the next; 0
    means no copies.
    """
    speed: str
    """The speed of the steps since this coordinator began, in words; "" before the first one."""
    best: str = ""
    """The best validation so far, in words."""
    warned: tuple[str, ...] = ()
    """The warnings about gradients and the loss that were said in this run: "dead layers.3"."""
    skipped: str = ""
    """The sentence about the steps that were skipped; "" if there is none."""
    owed: str = ""
    """The exports, samples and validations that are owed or were given up, in words; "" if there are none."""


def best_of(score: Score | None) -> str:
    """Returns the best validation in words; "" if there is none."""
    return "" if score is None else f"best validation {score.found.mean:.6g} after step {score.version.step}"
