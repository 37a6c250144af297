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

from elastic import branches
from elastic.errors import LoopError
from elastic.job import Job
from elastic.train.model import State
from elastic.train.step import Step
from storage.documents import seal, unseal
from storage.errors import Missing, StorageError
from storage.objects import ObjectStore

FORMAT = 1


class _WorldEnds(BaseException):
    """Leaves the loop at a boundary that is not the end of the run: the function is called again in the next world."""


@dataclass(frozen=True)
class Built:
    """The model of this world, with the weights of the run."""

    model: nn.Module
    """The job's model, wrapped for this world.  Call it; do not change it, and keep it in no place that outlives the loop."""
    step: int
    """The number of the step after which these weights are."""


class Effects:
    """Calls the user's functions for each committed step, on world rank 0, and remembers in the bucket for which they have been called.

    The number is written after the calls.  So each step is told in order, and once, over kills of any process and over steps that are done
    again.  Only if the process dies while the functions run, or before the number is written, they are called once more for that step: they
    can tell by its number.  A branch tells its own steps.
    """

    def __init__(self, store: ObjectStore, run: str, *, tells: bool) -> None:
        """``tells`` is true on world rank 0."""
        self._store, self._run, self._tells = store, run, tells
        self._functions: list[Callable[[int], object]] = []
        self._begun, self._done, self._key = 0, 0, ""

    def add(self, function: Callable[[int], object]) -> None:
        self._functions.append(function)

    def begin(self, step: int) -> None:
        """Tells the steps up to ``step``, at which the world stands, that were committed and not told."""
        self._begun = step
        self.committed(step)

    def committed(self, step: int) -> None:
        if not self._functions or not self._tells or not self._knows():
            return
        for number in range(self._done + 1, step + 1):
            for function in self._functions:
                function(number)
            self._note(number)

    def _knows(self) -> bool:
        """Returns whether it is known which steps were told.  If the bucket does not answer, it is asked again after each step."""
        if self._key:
            return True
        try:
            key = f"{self._run}/effects/{branches.number_of(self._store, self._run):06d}.json"
            try:
                self._done, self._key = int(unseal(self._store.get(key), self._store.full_name(key), FORMAT)["step"]), key
            except Missing:
                self._key = key
                self._note(self._begun)
        except StorageError as error:
            print(f"which steps were told to the functions of ctx.on_committed() is not known yet: {error}", flush=True)
        return bool(self._key)

    def _note(self, step: int) -> None:
        self._done = step
        try:
            self._store.put(self._key, seal({"format": FORMAT, "step": step}))
        except StorageError as error:
            print(f"that step {step} was told to the functions of ctx.on_committed() could not be noted: {error}", flush=True)


class Context:
    """Gives a loop of the user's the model and the steps of one world."""

    def __init__(self, job: Job, state: State, steps: Callable[[], Generator[Step]], effects: Effects) -> None:
        self.job = job
        """The job, with all settings."""
        self._state, self._steps, self._effects = state, steps, effects
        self._step: Step | None = None
        self._begun, self._over = False, False

    def build(self) -> Built:
        """Returns the model with the weights at which this world begins."""
        return Built(self._state.model, self._state.shard.version.step)

    def on_committed(self, function: Callable[[int], object]) -> None:
        """Lets ``function(step)`` be called once for each committed step, in order, on one member; see :class:`Effects`.

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
                self._expect(step.outcome is not None, f"step {step.number} is not committed; call step.commit(), and do not skip a step")
        self._over = True
        if self._state.shard.version.step < self.job.steps:
            raise _WorldEnds

    def run(self, loop: Callable[[Context], object]) -> None:
        """Calls ``loop``.  Raises :class:`LoopError` if it leaves steps undone, and what it raises, or has hidden."""
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
