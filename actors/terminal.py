"""Prints the output of commands."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from elastic.job import Job
from elastic.plan.copy_budget import amount
from elastic.report.story import Line, StepLine

if TYPE_CHECKING:
    from actors.launch import Result

console = Console(highlight=False, force_jupyter=False)  # a notebook would make a block of HTML of each line
DATA_WAIT = 0.1
"""Smallest part of a step for which a worker waits for data that a line of the step tells."""


def say(text: str, head: str = "", style: str = "") -> None:
    """Prints one line of any length after a coloured ``head``.  Brackets in ``text`` are not markup."""
    console.print(Text.assemble((head, style), text), soft_wrap=True)


def show(line: Line) -> None:
    """Prints a line of the story.  On a terminal a step overwrites the step before it; a sentence stays."""
    clock = time.strftime("%H:%M:%S", time.localtime(line.at))
    if not isinstance(line, StepLine):
        say(line.text, f"{clock} ", "dim")
        return
    rate = f"{line.tokens_per_s:>9,.0f} tokens/s" if line.tokens_per_s else ""
    console.print(
        f"[dim]{clock}[/] step {line.step:>5}/{line.steps}  loss {line.loss:.4f}  {rate:18}  "
        f"world {line.world}  generation {line.generation}  lr {line.lr:.2e}  norm {line.norm:.3f}{_usage(line)}",
        soft_wrap=True,
        end="\r" if console.is_terminal and line.step < line.steps else "\n",
    )


def show_for(job: Job) -> Callable[[Line], None]:
    """Returns :func:`show` for the run of ``job``: off a terminal, the only steps are the last one and those that ``log_every`` divides."""

    def told(line: Line) -> None:
        if console.is_terminal or not isinstance(line, StepLine) or line.step % job.log_every == 0 or line.step == line.steps:
            show(line)

    return told


def _usage(line: StepLine) -> str:
    told = f"  MFU {line.mfu:.0%} ({line.causal_mfu:.0%} causal)" if line.mfu else ""
    told += f"  {amount(line.peak_bytes)}" if line.peak_bytes else ""
    return f"{told}  {line.waiting} waits {line.data_wait:.0%} for data" if line.data_wait >= DATA_WAIT else told


def show_result(result: Result, job: Job, line: str) -> int:
    """Prints how the run ended and what the user can do next, and returns the exit code.

    ``line`` is the job file with its options, as the user typed them.
    """
    if result.job_error and result.job_error not in result.reason:
        print(result.job_error)
    colours = {"Finished": "green", "Stopped": "yellow", "Failed": "red"}
    colour = colours.get(result.state, "yellow")
    say(f" at step {result.step} of {job.steps}: {result.reason}", result.state, colour)
    if result.state not in colours:
        say(f"the same command attaches to it again, `elastic stop {line}` stops it")
    elif result.exit_code in (2, 3):
        say(f"`elastic train {line}` goes on from the newest good checkpoint")
    return result.exit_code
