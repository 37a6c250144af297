"""Lets a spare worker validate a checkpoint while the others train (``validation.by = "spares"``).

The spare reads the checkpoint from the bucket into a world of its own, on its own device, so the result has the bits that the members would
have found.  It drops the work at the next slice or microbatch once it gets an order, such as one to enter a world; then it stays owed.
"""

from __future__ import annotations

import gc
import time
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
from elastic.train.session import held_out_of
from elastic.train.step import Session
from storage.checkpoints import Checkpoints
from storage.errors import Unavailable

AGAIN_S = 5.0
"""Seconds from an attempt that met a bucket which did not answer to the next."""


def evaluate(session: Session, device: torch.device, checkpoints: Checkpoints, version: Version, interrupted: Callable[[], bool]) -> None:
    """Validates a checkpoint and notes the result in the bucket, or that it failed, unless it is ``interrupted``."""
    run, debt, done = Run(session.job, checkpoints.store), Debt(version, owed.VALIDATION), False
    while not done:
        done = _attempt(run, debt, session, device, checkpoints, interrupted)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        until = time.monotonic() + AGAIN_S
        while not done and time.monotonic() < until:  # the bucket did not answer
            done = interrupted()
            time.sleep(0.1)


def _attempt(
    run: Run, debt: Debt, session: Session, device: torch.device, checkpoints: Checkpoints, interrupted: Callable[[], bool]
) -> bool:
    """Returns False if the bucket did not answer, so that another attempt may succeed."""
    try:
        progress = owed.Progress(run, debt)

        def asked() -> bool:
            progress()
            return interrupted()

        found = evaluate_between(session, device, checkpoints, debt.version, asked)
        owed.note_done(run, debt, owed.validated(found, held_out_of(session)))
        print(f"{told_of(debt.version.step, found)}, by this spare worker", flush=True)
    except FencedOff as error:
        print(f"the validation of {debt.version} is dropped: {error}", flush=True)
    except Unavailable as error:
        print(f"the validation of {debt.version} begins again in {AGAIN_S:g} s: {error}", flush=True)
        return False
    except Exception as error:  # whatever the user's code raises
        traceback.print_exc()
        print(owed.failed(run, debt, Failure(failure(error))), flush=True)
    return True
