"""Shows a run to the user of this process: its story, line by line, and how it ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from actors.result import Result
from actors.terminal import ECHO, console, filled, say
from actors.view import View
from elastic.errors import ElasticError
from elastic.job import Job
from elastic.plan.copy_budget import amount
from elastic.report.progress import RunPace, spell
from elastic.report.speed import LEAST_MFU
from elastic.report.story import Ending, Line, StepLine
from elastic.runs.run import Run
from storage.errors import StorageError

DATA_WAIT = 0.1
"""Smallest part of a step that a worker must wait for data before the line of the step tells it."""
MINUTE_S = 60.0
"""Seconds after which a file or a pipe gets the line of a step in any case, if ``log_every`` is ``auto``."""
STILL_S = 10.0
"""Seconds without a new step after which a terminal shows how long ago the last one was, unless steps take
longer.
"""
BAR = 20
"""Largest width of the bar, in characters."""
DOES = {
    "Waiting": "waits for workers",
    "Forming": "forms a world",
    "Stopping": "leaves a world",
    "Finishing": "saves the last step",
}
"""The words for what a run does in each state in which it does not train."""


class Screen:
    """Shows a run to the user of this process.

    ``log_every`` is the setting.  ``quiet`` shows nothing; errors and the end of the run are printed
    elsewhere.
    """

    def __init__(
        self, log_every: int | str = 1, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.log_every, self.quiet, self._clock = log_every, quiet, clock
        self.progress = RunPace()
        self._step: StepLine | None = None
        self._stepped_at, self._formed_at = clock(), float("inf")
        self._told_at = 0.0

    def show(self, line: Line) -> None:
        """Shows a line of the story.  On a terminal a step takes the place of the step before it; a sentence
        stays.
        """
        if isinstance(line, StepLine):
            self.progress.add(line)
            self._step, self._stepped_at = line, self._clock()
        if self.quiet or isinstance(line, Ending):
            return
        if not isinstance(line, StepLine):
            say(line.text, f"{_clock_of(line)} ", "dim")
        elif line.step == line.steps or (not console.changes and self._is_told(line)):
            self._told_at = line.at
            said, head = "  ".join([_step_of(line), *_left(self.progress)]), f"{_clock_of(line)} "
            fits = not console.is_screen or len(head) + len(said) <= console.width
            return say(said if fits else filled(said, console.width - len(head)), head, "dim")
        if self._step is not None and self._step.step < self._step.steps and console.changes:
            console.draw(self._status())

    def look(self, view: View) -> None:
        """Shows what the run does while there is no step."""
        now = self._clock()
        self._formed_at = now if view.state == "Running" else min(self._formed_at, now)
        if self.quiet or view.over or not console.changes:
            return
        if what := DOES.get(view.state):
            step = f"step {view.step}/{view.steps}" if view.step else f"{view.steps} steps"
            console.draw(
                f"{step}  {what}, for {spell(now - self._formed_at)} now: {view.reason.partition('; ')[0]}"
            )
        elif self._step is not None and self._step.step < self._step.steps:
            console.draw(self._status(now - self._stepped_at))

    def _is_told(self, line: StepLine) -> bool:
        """Returns whether a file gets the line of this step."""
        if isinstance(self.log_every, int):
            return line.step % self.log_every == 0
        return (
            not self._told_at
            or line.step % max(line.steps // 100, 1) == 0
            or line.at - self._told_at >= MINUTE_S
        )

    def _status(self, since_s: float = 0.0) -> str:
        """Returns the line that changes: what matters most comes first, because a narrow terminal cuts the
        rest off.
        """
        line, progress = self._step, self.progress
        assert line is not None
        part, width = line.step / line.steps, console.width - ECHO
        bar = min(BAR, max(width - 60, 0))
        filled = int(bar * part)
        parts = [
            f"step {line.step}/{line.steps}",
            *([f"{'━' * filled}{'─' * (bar - filled)}"] if bar > 4 else []),
            f"loss {line.loss:.4f}",
        ]
        if since_s > max(STILL_S, 3 * progress.pace_s):
            parts.append(f"no step for {spell(since_s)}")
        else:
            parts += _left(progress)
        if progress.rate:
            parts.append(f"{progress.rate:,.0f} {line.noun}/s")
        return "  ".join([*parts, f"world {line.world}"]) + _usage(line)


def _left(progress: RunPace) -> list[str]:
    """Returns the time until the end of the run, in words; nothing if unknown or less than a second."""
    return [f"{spell(progress.left_s)} left"] if round(progress.left_s) else []


def _clock_of(line: Line) -> str:
    return time.strftime("%H:%M:%S", time.localtime(line.at))


def _step_of(line: StepLine) -> str:
    rate = f"{line.tokens_per_s:>9,.0f} {line.noun}/s" if line.tokens_per_s else ""
    return (
        f"step {line.step:>5}/{line.steps}  loss {line.loss:.4f}  {rate:18}  world {line.world}  generation "
        f"{line.generation}  lr {line.lr:.2e}  norm {line.norm:.3f}{_usage(line)}"
    )


def _usage(line: StepLine) -> str:
    told = f"  MFU {line.mfu:.0%} ({line.causal_mfu:.0%} causal)" if line.mfu >= LEAST_MFU else ""
    told += f"  {amount(line.peak_bytes)}" if line.peak_bytes else ""
    return (
        f"{told}  {line.waiting} waits {line.data_wait:.0%} for data" if line.data_wait >= DATA_WAIT else told
    )


def screen_for(job: Job, *, quiet: bool = False) -> Screen:
    """Returns the screen of a command for the run of ``job``."""
    return Screen(job.log_every, quiet=quiet)


def show_result(result: Result, job: Job, local: bool = False) -> int:
    """Prints how the run ended and what the user can do next, and returns the exit code."""
    if result.job_error and result.job_error not in result.reason:
        say(result.job_error)
    colours = {"Finished": "green", "Stopped": "yellow", "Failed": "red"}
    colour = colours.get(result.state, "yellow")
    say(f" at step {result.step} of {job.steps}: {result.reason}", result.state, colour)
    if result.state not in colours:
        say("give the same command again to attach to the run, or stop it with `elastic stop`")
    elif result.exit_code in (2, 3):
        say(f"`elastic train{' --local' if local else ''}` {_again(result)}")
    return result.exit_code


def _again(result: Result) -> str:
    """Returns the end of a sentence: what the same command does when the user gives it again."""
    # if the bucket does not answer, nobody knows
    with contextlib.suppress(StorageError, ElasticError, OSError):
        if Run.find(Job(name=result.name, bucket=result.bucket)).newest() is None:
            return "begins again at step 0: no checkpoint was completed"
    return "goes on from the newest good checkpoint"
