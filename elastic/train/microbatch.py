"""Puts a number in place of ``microbatch = "auto"`` when a run begins, from the memory model and tensors that have no values.

The number is part of what fixes the bits, so it is decided once, before any worker starts, and stored with the run.  A GPU is busy from a
few thousand tokens on, and recomputation costs more than a larger microbatch brings then.  So with ``recompute = "auto"`` the microbatch is
as large as memory allows *without* recomputation; it makes room only where a single sample is too large.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from elastic.errors import ElasticError, JobError
from elastic.imports import failure
from elastic.job import ROUNDS, Job
from elastic.plan.copy_budget import amount
from elastic.plan.memory import USABLE, Need, enough, roomy
from elastic.runs.run import Run
from elastic.train.estimate import Policy, foreseen, tensors_of_job, transients
from elastic.train.machine.device import most_shards, must_name_policy, policies_of
from storage.errors import Unavailable


def decided(job: Job, memory: Callable[[], int], *, local: bool = False) -> tuple[Job, str]:
    """Returns the job with a number in place of ``microbatch = "auto"``, and a sentence that says why; "" if the job names a number.

    A run that has begun keeps its own.  ``memory()`` is asked only if the run has not.  Raises as :func:`chosen` and :meth:`Run.look`.
    """
    if job.microbatch != "auto":
        return job, ""
    job, why = Run.look(job, branch=True).job, "the run began with it"  # whether it may go on with other settings is asked elsewhere
    if job.microbatch == "auto":
        job, why = chosen(job, memory(), local=local)
    return job, f"microbatch = {job.microbatch}: {why}"


def chosen(job: Job, memory: int, *, local: bool = False) -> tuple[Job, str]:
    """Returns the job with a number in place of ``microbatch = "auto"``, and the end of a sentence that says why it is that number.

    ``memory`` is that of the smallest device, in bytes; 0 means that it is not limited.  With ``local`` one worker has the whole state.
    Raises :class:`JobError` if not even one sample fits, or if the memory of a microbatch cannot be found out, and what opening the data
    raises.
    """
    sizes, bound = job.microbatch_sizes(), "no larger number divides every batch"
    if sizes[-1] < job.microbatch_sizes(least=1)[-1]:
        bound = (
            f"with the next that divides every batch, each of workers.max = {job.workers.max} has fewer than {ROUNDS} microbatches a step"
        )
    if not memory:
        return job.replace(microbatch=sizes[-1]), f"{bound}; the memory of CPUs is not limited"
    trial = _Trial(job, memory, local=local)
    fitting = bisect_left(sizes, True, key=lambda size: not trial.fits(size))  # more samples need more memory
    if not fitting:
        trial.check()
        return job.replace(microbatch=1), f"even with that, {trial.needs(1)}"
    why = bound if fitting == len(sizes) else f"with {sizes[fitting]}, {trial.needs(sizes[fitting])}"
    return job.replace(microbatch=sizes[fitting - 1]), why


class _Trial:
    """Knows the memory that microbatches of a job need, and that of the devices."""

    def __init__(self, job: Job, memory: int, *, local: bool) -> None:
        self.job, self.memory, self.need = job, memory, foreseen(job, tensors_of_job(job))
        self.policies: Sequence[Policy] = (job.recompute,)
        if job.recompute == "auto":
            self.policies = ("none",) if local else policies_of(job)
        self.most = 1 if local else most_shards(job)
        self.members = 1 if local else enough(job.workers.min, self.most)
        self._known: dict[int, Need] = {}

    def fits(self, size: int) -> bool:
        return roomy(self._need(size), self.memory, self.members)

    def needs(self, size: int) -> str:
        """Returns the words that say what a worker needs for microbatches of ``size``."""
        least = amount(_least(self._need(size), self.members))
        return f"recompute = {self.policies[0]!r} and {_shared(self.members)}, a worker needs {least}, and {self._room()}"

    def check(self) -> None:
        """Raises :class:`JobError` if one sample fits no device, whatever is computed again and however many workers share the state."""
        least = min(_least(need, self.most) for need in self._tried(1, self.policies))
        if least <= self.memory:
            return
        given, policy = self.job.workers.device_gb, self.job.recompute
        fixes = ["raise workers.device_gb" if given != "auto" else "take devices with more memory"]
        if self.most > 1:
            fixes.append("raise workers.max or parallel.dp_shard")
        if policy not in ("auto", "block") or (policy == "auto" and must_name_policy(self.job)):
            fixes.append("set recompute to 'block'")
        raise JobError(
            f"microbatch = 'auto': even with 1 sample and {_shared(self.most)}, a worker needs {amount(least)} of device memory, and "
            f"{self._room()} (workers.device_gb = {given}); {', or '.join(fixes)}"
        )

    def _need(self, size: int) -> Need:
        if size not in self._known:
            (self._known[size],) = self._tried(size, self.policies[:1])
        return self._known[size]

    def _tried(self, size: int, policies: Sequence[Policy]) -> list[Need]:
        """Returns what training needs with microbatches of ``size``, for each of ``policies``."""
        try:
            found = transients(self.job.replace(microbatch=size), policies)
        except (ElasticError, Unavailable):
            raise
        except Exception as error:  # of the model or the loss, which may not run with tensors that have no values
            why = f"the memory that a microbatch takes is not known ({failure(error)})"
            raise JobError(f"microbatch = 'auto': {why}; name a number") from error
        return [self.need.with_transient(transient) for transient in found.values()]

    def _room(self) -> str:
        return f"{amount(USABLE * self.memory)} of {amount(self.memory)} can be used"


def _least(need: Need, members: int) -> int:
    return min(need.of_a_member(shards) for shards in (1, members))


def _shared(members: int) -> str:
    return f"{members} workers sharing the state" if members > 1 else "the whole state on one device"
