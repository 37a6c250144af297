"""A run as a command knows it before it changes it."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Self

from elastic.control.run import RunState
from elastic.job import Job
from elastic.runs.branches import Branches
from elastic.runs.run import Run
from storage.journal import owner_of
from storage.objects import ObjectStore


class Standing(Run):
    """A run of which each fact is read from the bucket once, when it is first asked for: who has claimed it,
    which branches and checkpoints it has, what its journal says.  A command hands one standing to all its
    checks.

    The newest claim is read first.  So if another command begins the run later, its claim is newer than
    :meth:`latest_claim`, and a claim after that one (:meth:`Run.follows`) is refused.

    A standing is not read again, so it is good for looking and never for writing: the checks and the start of
    Ray take up to a minute, and meanwhile another command may have begun the run.  After the checks a command
    takes a new standing, and what is written, a claim or a branch, begins from a new look at the run
    (:func:`elastic.runs.begin.begin`).
    """

    def __init__(self, job: Job, store: ObjectStore) -> None:
        super().__init__(job, store)
        self.branches = Branches(store, job.name, once=True)
        self._claim = super().latest_claim()
        self._known: RunState | None = None
        """The run's state with the job that it has; None before it is read."""

    def agree(self, job: Job, *, branch: bool | None = False) -> Self:
        before = self.job
        super().agree(job, branch=branch)
        if self.job != before:  # a state says what the job makes of it
            self._known = None
        return self

    def latest_claim(self) -> int:
        return self._claim

    def owner(self) -> dict[str, Any] | None:
        return self._owner

    @cached_property
    def _owner(self) -> dict[str, Any] | None:
        claim = owner_of(self.store, self.job.name, self._claim) if self._claim else None
        return dict(claim) if claim is not None else None

    def last_recorded(self) -> RunState | None:
        return self._recorded

    @cached_property
    def _recorded(self) -> RunState | None:
        return super().last_recorded()

    def state(self, incarnation: int = 0, now: float = 0.0, step: int | None = None) -> RunState:
        if incarnation or step is not None:
            return super().state(incarnation, now, step)
        if self._known is None:
            self._known = super().state()
        return self._known
