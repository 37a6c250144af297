"""Puts a number in place of ``microbatch = "auto"`` when a run begins, from an estimate of memory with
tensors that have no values.

The number is part of what fixes the bits, so it is decided once, before any worker starts, and stored with
the run.  A few thousand tokens keep a GPU busy; beyond that, recomputation costs more than a larger
microbatch gains.  So with ``recompute = "auto"`` the microbatch is as large as memory allows *without*
recomputation, which is used only if a single sample is too large.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from elastic.code.imports import failure
from elastic.errors import ElasticError, JobError
from elastic.job import ROUNDS, Job
from elastic.plan.copy_budget import amount
from elastic.plan.memory_need import USABLE, Need, enough
from elastic.runs.run import Run
from elastic.train.checks.estimate import Policy, needs
from elastic.train.machine.device import most_shards, must_name_policy, policies_of
from storage.errors import Unavailable


def decided(job: Job, memory: Callable[[], int], *, local: bool = False) -> tuple[Job, str]:
    """Returns the job with a number in place of ``microbatch = "auto"``, and a sentence that says why; "" if
    the job names a number.

    A run that has begun keeps its number; ``memory()`` is called only for a run that has not begun.  Raises
    as :func:`chosen` and :meth:`Run.look`.
    """
    if job.microbatch != "auto":
        return job, ""
    # other code checks whether the run may go on with other settings
    job, why = Run.look(job, branch=True).job, "the run began with it"
    if job.microbatch == "auto":
        job, why = chosen(job, memory(), local=local)
    return job, f"microbatch = {job.microbatch}: {why}"


def chosen(job: Job, memory: int, *, local: bool = False) -> tuple[Job, str]:
    """Returns the job with a number in place of ``microbatch = "auto"``, and the end of a sentence that says
    why it is that number.

    ``memory`` is the memory of the smallest device, in bytes; 0 means that it is not limited.  With ``local``
    one worker has the whole state.  Raises :class:`JobError` if not even one sample fits, or if the memory of
    a microbatch cannot be found out, and what opening the data raises.
    """
    sizes, bound = job.microbatch_sizes(), "no larger number divides every batch"
    if sizes[-1] < job.microbatch_sizes(least=1)[-1]:
        bound = (
            "with the next larger number that divides every batch, each of workers.max = "
            f"{job.workers.max} workers has fewer than {ROUNDS} microbatches a step"
        )
    if not memory:
        return job.replace(microbatch=sizes[-1]), f"{bound}; the memory of CPUs is not limited"
    policies = ("none",) if local and job.recompute == "auto" else policies_of(job)
    most = 1 if local else most_shards(job)
    members = 1 if local else enough(job.workers.min, most)
    room = f"{amount(USABLE * memory)} of {amount(memory)} can be used"

    @cache
    def least(size: int) -> int:
        (need,) = _needs(job, size, policies[:1])
        return need.of_fewest(members)

    def told(size: int) -> str:
        return (
            f"recompute = {policies[0]!r} and {_shared(members)}, a worker needs {amount(least(size))}, and "
            f"{room}"
        )

    # more samples need more memory
    fitting = bisect_left(sizes, True, key=lambda size: least(size) > USABLE * memory)
    if not fitting:
        if (one := min(need.of_fewest(most) for need in _needs(job, 1, policies))) > memory:
            raise JobError(
                f"microbatch = 'auto': even with 1 sample and {_shared(most)}, a worker needs {amount(one)} "
                f"of device memory, and {room} (workers.device_gb = {job.workers.device_gb}); "
                f"{', or '.join(_fixes(job, most))}"
            )
        return job.replace(microbatch=1), f"even with that, {told(1)}"
    why = bound if fitting == len(sizes) else f"with {sizes[fitting]}, {told(sizes[fitting])}"
    return job.replace(microbatch=sizes[fitting - 1]), why


def _needs(job: Job, size: int, policies: Sequence[Policy]) -> list[Need]:
    """Returns what training needs with microbatches of ``size``, for each of ``policies``."""
    try:
        return [*needs(job.replace(microbatch=size), policies).values()]
    except (ElasticError, Unavailable):
        raise
    except Exception as error:  # of the model or the loss, which may not run with tensors that have no values
        why = f"the memory that a microbatch takes is not known ({failure(error)})"
        raise JobError(f"microbatch = 'auto': {why}; set microbatch to a number") from error


def _fixes(job: Job, most: int) -> Iterator[str]:
    """Yields what to do if one sample fits no device, with any recomputation and any number of workers that
    share the state.
    """
    yield "raise workers.device_gb" if job.workers.device_gb != "auto" else "use devices with more memory"
    if most > 1:
        yield "raise workers.max or parallel.dp_shard"
    if must_name_policy(job) if job.recompute == "auto" else job.recompute != "block":
        yield "set recompute to 'block'"


def _shared(members: int) -> str:
    return f"{members} workers sharing the state" if members > 1 else "the whole state on one device"
