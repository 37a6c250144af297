"""Every error that Elastic raises on purpose.

    ElasticError                 exit code 2: the platform gave up
    ├── JobError             1   the job cannot work: the message names the setting, its value and the fix
    │   ├── CodeError            code that the job names cannot be imported
    │   ├── ModelError           the model breaks its contract
    │   │   ├── LossError        the loss breaks its contract
    │   │   └── StateChanged     forward, backward or the loss changes the state
    │   ├── LoopError            the user's loop breaks its contract
    │   └── DataError            the dataset breaks its contract, or cannot be read
    ├── WorldBroken          2   a collective failed: a peer is gone, or the world was aborted
    │   ├── CopyLost             a keeper's copy that the plan needs cannot be read
    │   └── AbortStuck           the abort of the previous world does not end in this process
    ├── FencedOff            2   this worker may apply nothing more in a generation
    ├── StateMissing         2   state is not where the plan says
    ├── StateDamaged         2   state differs from what was written
    ├── NoRoomYet            2   memory that a worker needs is still held by others
    ├── WireError            2   the other end of a direct socket is gone, or is a stranger
    ├── NoProgress           4   the run was restarted again and again, and saved no new step
    ├── ClusterGone          2   the head of the cluster cannot be reached any more
    └── PlatformGaveUp       2   a budget is spent: workers, time, or generations without a commit
        ├── CoordinatorGone      no coordinator acts for the run any more
        └── Refused          1   the command cannot work as it is, or another one has taken the run over

A supervisor repeats a command that ends with 2, so exactly the errors that a repeat may avoid have this code.

A message has one clear sentence for each problem, one problem a line.  Errors travel between processes, so
each of them can be pickled, and what an error knows beyond its message is an attribute.  A run that ends in
good order raises no error; its exit codes are ``FINISHED`` and ``STOPPED`` (the same command resumes it).
``elastic chaos`` ends with ``DIFFERS`` if a run under faults was not as the undisturbed one.
"""

from __future__ import annotations

FINISHED = 0
STOPPED = 3
DIFFERS = 5


class ElasticError(Exception):
    """Base class.  ``exit_code`` is the exit code of a command that this error ends."""

    exit_code = 2


class JobError(ElasticError):
    """The job cannot work as it is, and trying again does not help."""

    exit_code = 1


class CodeError(JobError):
    """The job's ``pkg.module:name`` cannot be imported, or a package of Elastic is shadowed."""


class ModelError(JobError):
    """``model`` names something that cannot be trained.  The contract is at ``Job.model`` and in the guide
    ("Your own code").
    """


class LossError(ModelError):
    """``loss`` names a function that does not return a sum over the terms of a microbatch and the number of
    these terms.
    """


class StateChanged(ModelError):
    """Forward, backward or the loss changes a buffer or a parameter, so the result would depend on which
    worker computed which microbatch.
    """


class LoopError(JobError):
    """``loop`` names something that is not a loop, or does not go through its steps as the class ``Context``
    says.
    """


class DataError(JobError):
    """``data.dataset`` names something that is not a dataset, or a sample of it cannot be read."""


class WorldBroken(ElasticError):
    """The world of this generation cannot go on; a later one can."""


class CopyLost(WorldBroken):
    """A copy that the plan takes from ``keeper`` cannot be read; a later plan takes another copy."""

    def __init__(self, message: str, keeper: str = "") -> None:
        super().__init__(message)
        self.keeper = keeper


class AbortStuck(WorldBroken):
    """The abort of a world does not end in this process, so this process cannot join another world."""


class FencedOff(ElasticError):
    """This worker may apply nothing more in the generation.  ``lease`` says that its lease ran out: no
    coordinator answered in time.
    """

    def __init__(self, message: str, *, lease: bool = False) -> None:
        super().__init__(message)
        self.lease = lease


class StateMissing(ElasticError):
    """The holder that the plan names lacks a slice, or the checkpoint belongs to another model."""


class StateDamaged(ElasticError):
    """State read from a file differs from what was written there, or state in memory from its copy.

    This process then holds no state that can be trusted.
    """


class NoRoomYet(ElasticError):
    """Memory that a worker needs to start is still held for workers that died, or by other processes; a later
    start may find it free.
    """


class WireError(ElasticError):
    """The other end of a direct socket is gone, hung up, or does not know the secret of the run."""


class ClusterGone(ElasticError):
    """The head of the cluster cannot be reached any more, so nothing of the run can be ended from here."""


class NoProgress(ElasticError):
    """The run was restarted ``watch.max_restarts`` times without saving a new step, so it is not started
    again.
    """

    exit_code = 4


class PlatformGaveUp(ElasticError):
    """The run ended as ``Failed``, but not because of the job; the same command resumes it."""


class CoordinatorGone(PlatformGaveUp):
    """The coordinator of the run does not exist any more."""


class Refused(PlatformGaveUp):
    """A repeat of this command would be refused again, or take the run back from the command that has taken
    it over.
    """

    exit_code = 1
