"""Lets a spare worker validate a checkpoint while the others train (``validation.by = "spares"``).

The spare reads the checkpoint from the bucket into a world of its own, on its own device, so the result has the bits that the members would
have found.  It drops the work at the next slice or microbatch once it gets an order, such as one to enter a world; then it stays owed.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable

import torch

from elastic.errors import FencedOff
from elastic.ids import Version
from elastic.imports import failure
from elastic.protocol.commit_record import told_of
from elastic.runs import owed
from elastic.runs.owed import Debt, Failure
from elastic.runs.run import Run
from elastic.train.revisit import evaluate_between
from elastic.train.step import Session
from storage.checkpoints import Checkpoints
from storage.errors import Unavailable


def evaluate(session: Session, device: torch.device, checkpoints: Checkpoints, version: Version, interrupted: Callable[[], bool]) -> None:
    """Validates a checkpoint and notes the result in the bucket, or that it failed, unless it is ``interrupted``."""
    run, debt = Run(session.job, checkpoints.store), Debt(version, owed.VALIDATION)
    try:
        found = evaluate_between(session, device, checkpoints, version, interrupted)
        owed.note_done(run, debt, owed.validated(found))
        print(f"{told_of(version.step, found)}, by this spare worker", flush=True)
    except (FencedOff, Unavailable) as error:
        print(f"the validation of {version} is dropped: {error}", flush=True)
    except Exception as error:  # whatever the user's code raises
        traceback.print_exc()
        print(owed.failed(run, debt, Failure(failure(error))), flush=True)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
