"""The result of a command that trains: how its run ended, and what it measured."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from elastic.errors import FINISHED, STOPPED, JobError, PlatformGaveUp
from elastic.job import Job
from elastic.runs.metrics import rows_of
from elastic.runs.run import Run

STEPS = 100_000
"""Largest number of steps of which a result gives the losses."""


@dataclass(frozen=True)
class Result:
    """The end of a run.  ``state`` is Finished, Stopped or Failed; the last two can be resumed by the same
    command.

    Any other state means that this driver was told to leave while the run goes on; the same command attaches
    to it again.
    """

    state: str
    reason: str
    step: int
    exit_code: int
    bucket: str
    name: str
    job_error: str = ""
    """The user's traceback, if the job is at fault."""

    @classmethod
    def of(cls, job: Job, state: str, reason: str, step: int, job_error: str = "") -> Result:
        """Returns the result of the run of ``job``, which has ended in ``state`` after ``step``."""
        return cls(state, reason, step, exit_code(state, job_error), job.bucket, job.name, job_error)

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step of the run by step, at most of the last :data:`STEPS`.  They are read from
        the bucket.
        """
        return self._column("loss")

    @property
    def validations(self) -> dict[int, float]:
        """The mean loss on the held-out samples, by the step after which it was measured, of the last
        :data:`STEPS` steps.
        """
        return self._column("validation_loss")

    def _column(self, name: str) -> dict[int, float]:
        rows = deque(rows_of(Run.find(Job(name=self.name, bucket=self.bucket))), STEPS)
        return {int(row["step"]): row[name] for row in rows if name in row}


def exit_code(state: str, job_error: str = "") -> int:
    """Returns the exit code of a run that ended in ``state``."""
    codes = {"Finished": FINISHED, "Stopped": STOPPED}
    return codes.get(state, JobError.exit_code if job_error else PlatformGaveUp.exit_code)
