"""Whose doing it is that a generation stopped here: the job's, a peer's, the bucket's, or this process's own device's.

A device's error that cannot be mended (a failed assertion in a kernel, an illegal address, a fault of the hardware) is *sticky*: it was
raised by something that was launched long ago, comes up in whatever call happens to be next, a peer's collective or our own polling
among them, and then in every later call of this process.  So neither its class nor its place tells it from others.  A call does.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

from elastic.errors import AbortStuck, CopyLost, FencedOff, WorldBroken
from elastic.protocol.commit_record import BadRecord
from storage.errors import Damaged, StorageError

OURS = ("/torch/", "/elastic/train/", "/elastic/engine/", "/elastic/state/")
"""Where the user's code is not."""


def touch(device: torch.device) -> None:
    """The cheapest call that asks the device something.  Never waits; raises once this process cannot use it any more."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).query()


def classify(error: Exception, ask_device: Callable[[], None], *, forming: bool = False) -> tuple[str, str]:
    """(cause of ``Broken``, signature) of what stopped a generation here; ``ask_device`` is :func:`touch`, for this worker's.

    A collective that failed is a peer's doing; that is told from the user's code by where the exception was raised.  ``forming``: no
    step had begun; memory that is lacking then may be what earlier worlds have left behind, and a new process has it.
    """
    if isinstance(error, FencedOff):
        return "lease", ""
    try:
        ask_device()
    except RuntimeError as sticky:
        return "device", str(sticky).partition("\n")[0]
    if isinstance(error, AbortStuck):
        return "device", str(error)
    if forming and isinstance(error, torch.OutOfMemoryError):
        return "device", _signature(error)
    if isinstance(error, Damaged):
        return "damaged", ""
    if isinstance(error, CopyLost):
        return "copy", error.keeper
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, StorageError | BadRecord | WorldBroken | dist.DistError) or "/torch/distributed/" in frames[-1].filename:
        return "peer", ""
    return "job", _signature(error)


def _signature(error: Exception) -> str:
    """Of what happened, the same when it happens again."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not any(part in f.filename for part in OURS)]
    frame = (theirs or frames)[-1]
    return f"{type(error).__name__} at {frame.filename}:{frame.lineno} in {frame.name}"


def tell_where_all_stand() -> None:
    """Every thread's stack, into the log.

    Under the GIL: ``faulthandler`` walks the frames of threads that run on, which now and then ends the process (cpython issue 116008).
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        print(f"thread {names.get(ident, ident)} stands at\n{''.join(traceback.format_stack(frame))}", flush=True)
