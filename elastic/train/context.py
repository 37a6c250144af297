"""The loop that trains: our own, in three lines, or a function of the user's that goes through the same
steps.

``loop(ctx)`` is called on every member, once for each world: if a member is lost or joins, the function is
left by an exception and called again, in the same process, and ``ctx.steps()`` goes on where the world
stands.  So the code between two steps may run twice for one step number.  Only what the engine keeps
(weights, moments, buffers), and what depends on the step number alone, is the same both times.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from types import FrameType, TracebackType

from torch import nn

from elastic.engine.batch_norm import about_one_value
from elastic.engine.parameters.gathers import before_calls
from elastic.errors import LoopError
from elastic.job import Job
from elastic.train.effects import Effects
from elastic.train.model import State
from elastic.train.step import Step


class _WorldEnds(BaseException):
    """Leaves the loop at a boundary that is not the end of the run: the function is called again in the next
    world.
    """


@dataclass(frozen=True)
class Built:
    """The model of this world, with the weights of the run."""

    model: nn.Module
    """The job's model, wrapped for this world.  Call it, on every member; do not change it, and keep it in no
    place that outlives the loop.

    Its parameters are those with which it computes: in the format of forward, perhaps only a part of each,
    and of an older step until the model is called.
    """
    step: int
    """The number of the newest step that these weights include."""


class Context:
    """Gives a loop of the user's the model and the steps of one world."""

    def __init__(
        self,
        job: Job,
        state: State,
        steps: Callable[[], Generator[Step, None, bool | None]],
        effects: Effects,
        stop: Callable[[str], None] = lambda reason: None,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        """``steps()`` yields the steps of the world, and returns whether the run ends there.  ``stop`` gets
        the reason of :meth:`stop`.

        ``leave()`` makes the newest step the last one of the run, because the loop was left after it.
        """
        self.job = job
        """The job, with all settings."""
        self._stop, self._leave, self._early = stop, leave, False
        self._failed: Exception | None = None
        self._state, self._steps, self._effects = state, steps, effects
        self._step: Step | None = None
        self._begun, self._over, self._built, self._left = False, False, False, False
        state.parameters.current = False  # it may have been healed since its last pass

    def build(self) -> Built:
        """Returns the model, with the weights at which this world begins.

        A call of the model between steps computes with the weights after the last commit.  The members may
        have to gather these weights, so all members must call the model.
        """
        if not self._built:
            before_calls(self._state.model, self._refresh)
            self._built = True
        return Built(self._state.model, self._state.shard.version.step)

    def _refresh(self) -> None:
        if not self._state.parameters.current:
            self._state.parameters.refresh()

    def on_committed(self, function: Callable[[int], object]) -> None:
        """Lets ``function(step)`` be called for each committed step, in order, on one member; see
        :class:`Effects`.

        It may not call the model, since the other members do not.  It is called before the loop goes on.
        """
        self._expect(not self._begun, "ctx.on_committed() after ctx.steps() has begun; call it before")
        self._effects.add(function)

    def steps(self) -> Iterator[Step]:
        """Yields the remaining steps of the run; each must be committed before the next one is taken.

        The iterator ends after the last step of the run: the job's last one, or the one with which
        :meth:`stop` ends the run.  If every member leaves it after the same earlier step, by ``break`` or
        ``return``, that step is the last one of the run.
        """
        self._expect(not self._begun, "ctx.steps() is called twice; call it once")
        self._begun = True
        self._effects.begin(self._state.shard.version.step)
        try:
            with closing(self._told()) as steps:
                for step in steps:
                    self._step = step
                    yield step
                    if step.failed is not None:
                        raise step.failed
                    if self.job.loop:
                        self._state.guard.check()
                    why = f"step {step.number} is not committed; call step.commit(), and do not skip a step"
                    self._expect(step.outcome is not None, why)
        except GeneratorExit:
            if not _raises(sys._getframe(1)):
                self._leave_early()
            raise
        self._over = True
        if not self._early and self._state.shard.version.step < self.job.steps:
            raise _WorldEnds

    def _told(self) -> Generator[Step]:
        try:
            self._early = bool((yield from self._steps()))
        except Exception as error:
            self._failed = error  # whatever the loop makes of it
            raise

    def stop(self, reason: str) -> None:
        """Ends the run on all members, with a save, after the next step that is committed: the present one,
        if it is called before ``step.commit()``.

        One member that asks is enough.  ``reason`` is shown to the user.
        """
        self._expect(
            isinstance(reason, str) and bool(reason.strip()), f"ctx.stop({reason!r}): say why in words"
        )
        self._stop(reason)

    def _leave_early(self) -> None:
        """Tells at once that the loop was left, since the user's code after it may take long.  An error in
        here is raised once the user's function has returned.
        """
        step = self._step
        if (
            self._left
            or not self._state.shard.version.step
            or (step is not None and (step.failed is not None or self._is_within))
        ):
            return
        self._left = True
        try:
            self._state.guard.check()
            self._leave()
        except Exception as error:  # the loop's iterator must not raise here
            self._failed = error

    @property
    def _is_within(self) -> bool:
        """True in the middle of a step."""
        return self._step is not None and self._step.begun and self._step.outcome is None

    def run(self, loop: Callable[[Context], object]) -> None:
        """Calls ``loop``.  If it ends before the last step of the run, the newest step becomes the last one.

        Raises :class:`LoopError` if the loop ends without any step, or within one.  Raises the loop's own
        error, and an error of a step that the loop has hidden.
        """
        broken = False
        try:
            self._goes_through(loop)
        except Exception as error:
            broken = True
            if said := about_one_value(error, self.job.microbatch_size):
                error.add_note(said)
            raise
        finally:
            self._effects.close(broken=broken)

    def _goes_through(self, loop: Callable[[Context], object]) -> None:
        try:
            loop(self)
        except _WorldEnds:
            return
        except Exception as error:
            if self._step is None or self._step.failed in (None, error):
                raise
            raise self._step.failed from None  # whatever the loop has made of it
        if (failed := self._failed or (self._step.failed if self._step is not None else None)) is not None:
            raise failed
        if self._over or self._left:
            return
        step = self._state.shard.version.step
        self._expect(
            self._begun and step > 0,
            f"it ended after step {step} of {self.job.steps}; go through ctx.steps() to its end",
        )
        self._expect(
            not self._is_within,
            (
                f"it was left within step {step + 1}; leave the loop after step.commit(), or before "
                "the first batch of a step"
            ),
        )
        self._left = True
        self._state.guard.check()
        self._leave()

    def _expect(self, right: bool, wrong: str) -> None:
        if not right:
            raise LoopError(f"loop = {self.job.loop!r}: {wrong}")


def _raises(frame: FrameType) -> bool:
    """Returns whether an exception is leaving ``frame``.  ``sys.exc_info()`` does not show it here, but the
    traceback of the exception refers to the frame.
    """
    return any(isinstance(each, TracebackType) for each in gc.get_referrers(frame))


def standard(ctx: Context) -> None:
    """The loop of a job that names none."""
    for step in ctx.steps():
        step.run()
        step.commit()
