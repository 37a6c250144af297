"""Finds out what stopped a generation here: the job, a peer, the bucket, or this process's own device or
disk.

An error of a device that cannot be mended (a failed assertion in a kernel, an illegal address, a hardware
fault) is *sticky*.  Its cause was launched long ago.  It appears in the next call to the device, which may be
a peer's collective or our own polling, and then in every later call of this process.  So neither the class of
a sticky error nor the place where it is raised tells it from other errors; another call to the device does.
"""

from __future__ import annotations

import re
import sys
import threading
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

from elastic.engine.parallelize import parallelize
from elastic.errors import (
    AbortStuck,
    CopyLost,
    ElasticError,
    FencedOff,
    StateDamaged,
    WorldBroken,
)
from elastic.protocol.commit_record import BadRecord
from elastic.protocol.reruns import Differ
from elastic.state.snapshot import NoMemory
from storage.errors import Damaged, StorageError

OURS = ("/torch/", "/elastic/train/", "/elastic/engine/", "/elastic/state/")
"""Parts of paths that are never the user's code."""

COLLECTIVES, SPLIT_TENSORS = "/torch/distributed/distributed_c10d.py", "/torch/distributed/tensor/"
"""Parts of paths of torch: the functions that call a communication library, and DTensor."""

REFUSALS = {
    "ncclInvalidUsage": "NCCL refuses to form a world as this process is set up (invalid usage)",
    "ncclInvalidArgument": "NCCL refuses to form a world as this process is set up (invalid argument)",
    "no socket interface found": "NCCL finds no network interface",
    "Unable to find address for": "gloo finds no network interface",
}
"""Maps words of NCCL's and gloo's errors that a second attempt in the same process cannot mend to their
meaning.

NCCL says "invalid usage" if two members are on one GPU, or have different versions of NCCL (NCCL 2.28,
``src/init.cc``).
"""
WORDS = 300
"""Largest number of characters of a library's message that the story shows."""
SOURCE = re.compile(r"\[[^\]]*\.(?:cc|cpp|h):\d+\] ?")
"""The place in a library's source with which gloo begins a message."""


def touch(device: torch.device) -> None:
    """Makes the cheapest call to ``device``.  It never waits, and raises if this process cannot use the
    device any more.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).query()


def classify(error: Exception, ask_device: Callable[[], None], *, forming: bool = False) -> tuple[str, str]:
    """Returns (cause of ``Broken``, signature) of the error that stopped a generation here.

    ``ask_device`` is :func:`touch` for this worker's device.  A failed collective has the cause "peer"; the
    place where the exception was raised tells it from an error in the user's code (:func:`in_a_collective`).

    ``forming`` means that no step of this world had begun.  A lack of memory then has the cause "device":
    earlier worlds may have left memory behind, which a new process can use.  For an error of a communication
    library the signature is the library's message, and the cause is "setup" if the library refuses
    (:data:`REFUSALS`).
    """
    if isinstance(error, FencedOff):
        return "lease", ""
    try:
        ask_device()
    except RuntimeError as sticky:
        return "device", str(sticky).partition("\n")[0]
    if isinstance(error, AbortStuck | StateDamaged):
        return "device", str(error)
    if forming and isinstance(error, torch.OutOfMemoryError | NoMemory):
        return "device", _signature(error)
    if isinstance(error, Damaged):
        return "damaged", ""
    if isinstance(error, CopyLost):
        return "copy", error.keeper
    if isinstance(error, Differ):
        return "differs", ""
    if isinstance(error, StorageError | BadRecord | WorldBroken | dist.DistError) or in_a_collective(error):
        refused = (
            next((meaning for words, meaning in REFUSALS.items() if words in str(error)), "")
            if forming
            else ""
        )
        ours = isinstance(error, ElasticError | StorageError | BadRecord)
        return (
            ("setup", refused) if refused else ("peer", in_its_words(error) if forming and not ours else "")
        )
    return "job", _signature(error)


def in_a_collective(error: Exception) -> bool:
    """Returns whether ``error`` was raised where torch talks with peers: by a collective, or by a wait for
    one.

    Much of ``torch.distributed`` talks with no peer.  Its errors then refuse what the job's model or loss
    asks for: they are raised where a model is wrapped or where split tensors are used, or their class is none
    of communication.
    """
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    if COLLECTIVES in last or "/torch/distributed/" not in last:
        return COLLECTIVES in last
    wrapping = any(
        frame.f_code is parallelize.__code__ for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    refused = isinstance(error, NotImplementedError) or not isinstance(error, RuntimeError)
    return not (wrapping or refused or SPLIT_TENSORS in last)


def plainly(error: Exception, *, words: str = "") -> str:
    """Returns what happened, for an error that is not the user's.

    ``words`` is the message of a communication library while a world forms, when it may be the only clue; it
    is then part of the result.  After the death of a member the message says nothing more than this text, and
    only the log has it.
    """
    if isinstance(error, ElasticError | StorageError | BadRecord | Differ):
        return str(error)
    happened = "the connection to another member broke, or that member does not answer"
    return (
        f"{happened}; the library says: {words}"
        if words
        else (f"{happened}; this worker's log has the library's own words")
    )


def in_its_words(error: Exception) -> str:
    """Returns the line in which a communication library says what happened, without places in its source.

    In a message of NCCL it is the line after "Last error:", or else the line with the name of NCCL's error.
    """
    lines = [line.strip() for line in str(error).partition("Exception raised from")[0].splitlines()]
    said = [line for line in lines if line and line != "Last error:"]
    return SOURCE.sub("", said[-1])[:WORDS] if said else ""


def _signature(error: Exception) -> str:
    """Returns a line that identifies the error; it is the same when the error happens again."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not any(part in f.filename for part in OURS)]
    frame = (theirs or frames)[-1]
    return f"{type(error).__name__} at {frame.filename}:{frame.lineno} in {frame.name}"


def tell_where_all_stand() -> None:
    """Writes the stack of every thread to the log.

    It holds the GIL meanwhile: ``faulthandler`` walks the frames of running threads, which sometimes ends the
    process (cpython issue 116008).
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        print(
            f"thread {names.get(ident, ident)} stands at\n{''.join(traceback.format_stack(frame))}",
            flush=True,
        )
