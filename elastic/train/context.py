"""The loop that trains: our own, in three lines, or a function of the user's that goes through the same steps.

``loop(ctx)`` is called on every member, once for each world: if a member is lost or joins, the function is left by an exception and called
again, in the same process, and ``ctx.steps()`` goes on where the world stands.  So what stands between two steps may run twice for one step
number, and only what the engine keeps (weights, moments, buffers) and what depends on the number of the step is the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass

from torch import nn

from elastic.engine.axes.gathers import before_calls
from elastic.engine.batch_norm import about_one_value
from elastic.errors import LoopError
from elastic.job import Job
from elastic.train.effects import Effects
from elastic.train.model import State
from elastic.train.step import Step


class _WorldEnds(BaseException):
    """Leaves the loop at a boundary that is not the end of the run: the function is called again in the next world."""


@dataclass(frozen=True)
class Built:
    """The model of this world, with the weights of the run."""

    model: nn.Module
    """The job's model, wrapped for this world.  Call it, on every member; do not change it, and keep it in no place that outlives the loop.

    Its parameters are what it computes with: of an older step until it is called, in the format of forward, perhaps only a part of each.
    """
    step: int
    """The number of the step after which these weights are."""


class Context:
    """Gives a loop of the user's the model and the steps of one world."""

    def __init__(self, job: Job, state: State, steps: Callable[[], Generator[Step]], effects: Effects) -> None:
        self.job = job
        """The job, with all settings."""
        self._state, self._steps, self._effects = state, steps, effects
        self._step: Step | None = None
        self._begun, self._over, self._built = False, False, False
        state.parameters.current = False  # it may have been healed since its last pass

    def build(self) -> Built:
        """Returns the model, with the weights at which this world begins.

        A call of it between steps has the weights after the last commit, for which the members may gather them: all must call it.
        """
        if not self._built:
            before_calls(self._state.model, self._refresh)
            self._built = True
        return Built(self._state.model, self._state.shard.version.step)

    def _refresh(self) -> None:
        if not self._state.parameters.current:
            self._state.parameters.refresh()

    def on_committed(self, function: Callable[[int], object]) -> None:
        """Lets ``function(step)`` be called for each committed step, in order, on one member; see :class:`Effects`.

        It may not call the model, since the other members do not.  It is called before the loop goes on.
        """
        self._expect(not self._begun, "ctx.on_committed() after ctx.steps() has begun; call it before")
        self._effects.add(function)

    def steps(self) -> Iterator[Step]:
        """Yields the steps of the run that are to be done, each to be committed before the next comes.

        It ends after the last step of the run, and only then.
        """
        self._expect(not self._begun, "ctx.steps() is called twice; go through it once")
        self._begun = True
        self._effects.begin(self._state.shard.version.step)
        with closing(self._steps()) as steps:
            for step in steps:
                self._step = step
                yield step
                if step.failed is not None:
                    raise step.failed
                if self.job.loop:
                    self._state.guard.check()
                self._expect(step.outcome is not None, f"step {step.number} is not committed; call step.commit(), and do not skip a step")
        self._over = True
        if self._state.shard.version.step < self.job.steps:
            raise _WorldEnds

    def run(self, loop: Callable[[Context], object]) -> None:
        """Calls ``loop``.  Raises :class:`LoopError` if it leaves steps undone, and what it raises, or has hidden."""
        broken = False
        try:
            self._goes_through(loop)
        except Exception as error:
            broken = True
            if said := about_one_value(error, self.job):
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
        if self._step is not None and self._step.failed is not None:
            raise self._step.failed
        step = self._state.shard.version.step
        self._expect(
            self._over,
            f"it ended after step {step} of {self.job.steps}; go through ctx.steps() to its end, without `break` or `return`, and set "
            f"steps to a smaller number to end earlier",
        )

    def _expect(self, right: bool, wrong: str) -> None:
        if not right:
            raise LoopError(f"loop = {self.job.loop!r}: {wrong}")


def standard(ctx: Context) -> None:
    """The loop of a job that names none."""
    for step in ctx.steps():
        step.run()
        step.commit()
