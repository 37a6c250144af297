"""Every error that Elastic raises on purpose.

    ElasticError                 exit code 2: the platform gave up
    ├── JobError             1   what was asked for cannot work: the setting, its value, the fix
    │   ├── CodeError            code that the job names cannot be imported
    │   ├── ModelError           the model does not keep its contract
    │   └── DataError            the dataset does not, or it cannot be read
    ├── WorldBroken          2   a collective failed: a peer is gone, or the world was aborted under us
    │   ├── CopyLost             a keeper's copy that the plan counts on cannot be read
    │   └── AbortStuck           the abort of the world before does not end in this process
    ├── FencedOff            2   this worker may apply nothing more in a generation
    ├── StateMissing         2   state that the plan counts on is not where it says
    ├── NoRoomYet            2   memory that a worker needs is still held for workers that died
    ├── WireError            2   the other end of a direct socket is gone, or a stranger
    └── PlatformGaveUp       2   a budget is spent: workers, time or generations without a commit
        └── CoordinatorGone      nobody acts for the run any more

A message is one clear sentence a problem, one problem a line.  Errors travel between processes, so every one of them
pickles: whatever an error knows beyond its message is an attribute.  What ends in good order is no error:
``FINISHED`` and ``STOPPED`` (resumable by the same command) are the other two exit codes.
"""

from __future__ import annotations

FINISHED = 0
STOPPED = 3


class ElasticError(Exception):
    """Base of all; ``exit_code`` is that of a command which it ends."""

    exit_code = 2


class JobError(ElasticError):
    """The job cannot work as it is; trying again changes nothing."""

    exit_code = 1


class CodeError(JobError):
    """Code that the job names by ``pkg.module:name`` cannot be imported, or our own packages are shadowed."""


class ModelError(JobError):
    """What ``model`` names is no model that can be trained: what one must be is in the README ("What is yours") and at ``Job.model``."""


class DataError(JobError):
    """What ``data.dataset`` names is no dataset that can be trained on, or a sample of it cannot be read."""


class WorldBroken(ElasticError):
    """The world of this generation cannot go on; a later one can."""


class CopyLost(WorldBroken):
    """What the plan takes from the copies of ``keeper`` cannot be had there; a later plan takes it elsewhere."""

    def __init__(self, message: str, keeper: str = "") -> None:
        super().__init__(message)
        self.keeper = keeper


class AbortStuck(WorldBroken):
    """The abort of a world does not end in this process, which can therefore be in no other one."""


class FencedOff(ElasticError):
    """Nothing more may be applied in the generation; ``lease``: because no coordinator was heard for too long."""

    def __init__(self, message: str, *, lease: bool = False) -> None:
        super().__init__(message)
        self.lease = lease


class StateMissing(ElasticError):
    """A slice is not held by whom the plan names, or the checkpoint is of another model."""


class NoRoomYet(ElasticError):
    """Memory that a worker needs to start is still held for workers that died; the next start may find it."""


class WireError(ElasticError):
    """The other end of a direct socket is gone, hung up, or does not know the secret of the run."""


class PlatformGaveUp(ElasticError):
    """The run ended as ``Failed`` by no fault of the job; the same command resumes it."""


class CoordinatorGone(PlatformGaveUp):
    """The run's coordinator was asked, and is not there any more."""
