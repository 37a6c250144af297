"""Loops as users write them.  What they do outside of the engine goes to the folder of the bucket, by names
of their own.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from elastic.engine.loss import next_token
from elastic.errors import LoopError
from elastic.train.context import Context
from elastic.train.step import Step


def whole(ctx: Context) -> None:
    """The general form."""
    for step in ctx.steps():
        step.run(next_token)
        step.commit()


def halved(ctx: Context) -> None:
    """Trains with half of the loss that the job names."""

    def half(*given: Any) -> tuple[torch.Tensor, Any]:
        loss, count = next_token(*given)
        return loss / 2, count

    for step in ctx.steps():
        step.run(half)
        step.commit()


def by_batches(ctx: Context) -> None:
    """Batch by batch, with a loss that is written out."""
    model = ctx.build().model
    for step in ctx.steps():
        for batch in step.batches():
            tokens = batch["tokens"]
            inputs, targets = tokens[:, :-1].clamp_min(0), tokens[:, 1:].clamp_min(-1)
            if getattr(model, "fuses_loss", False):
                loss = model(inputs, targets)
            else:
                loss = F.cross_entropy(
                    model(inputs).float().flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
                )
            step.backward(loss, torch.count_nonzero(targets >= 0))
        step.commit()


def without_one(ctx: Context) -> None:
    """The control: the loss of one microbatch counts for nothing."""
    for step in ctx.steps():
        for number, batch in enumerate(step.batches()):
            loss, count = next_token(ctx.build().model, batch)
            step.backward(loss * (number > 0), count)
        step.commit()


def told(ctx: Context) -> None:
    """Tells numbers, and has side effects: a line for each committed step, and one for each attempt at a
    step.
    """
    folder = Path(ctx.job.bucket)

    def note(step: int) -> None:
        _line(folder / "committed", step)
        _dies(folder, f"effect {step}")

    ctx.on_committed(note)
    for step in ctx.steps():
        _line(folder / "tried", step.number)
        _dies(folder, f"before {step.number}")
        for number, batch in enumerate(step.batches()):
            loss, count = next_token(ctx.build().model, batch)
            _dies(folder, f"microbatch {step.number}" if number else "")
            step.backward(loss, count)
        _dies(folder, f"uncommitted {step.number}")
        outcome = step.commit(metrics={"user/double": 2 * step.number, "terms": float(count)})
        _dies(folder, f"committed {step.number}")
        assert outcome.step == step.number


def _line(path: Path, step: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{step}\n".encode())
    os.close(descriptor)


def _dies(folder: Path, place: str) -> None:
    """Ends the process by SIGKILL if ``place`` is the one that the test names: the first process that comes
    there.
    """
    try:
        (folder / "dies" / place).unlink()
    except (FileNotFoundError, IsADirectoryError, PermissionError):
        return
    os.kill(os.getpid(), signal.SIGKILL)


def steps_in(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()]


def ends(ctx: Context) -> None:
    """Ends the run with step 3, as the files in the folder ``how`` say: by ``ctx.stop()`` ("all", "one"
    member), or by ``break``.

    What comes after the loop leaves a line with the step at which it is; it may fail, or take long.
    """
    folder = Path(ctx.job.bucket)
    how, one = folder / "how", folder / "how" / "one"
    for step in ctx.steps():
        step.run()
        if step.number == 3 and ((how / "all").exists() or _is_first(one)):
            ctx.stop("it is good enough")
            _dies(folder, "asked")
        step.commit()
        if step.number == 3:
            _dies(folder, "committed")
        if step.number == 3 and ((how / "break").exists() or _is_first(how / "one breaks")):
            break
    _line(folder / "after", ctx.build().step)
    if (how / "fails").exists():
        raise RuntimeError("the user's own words")
    if (how / "long").exists():
        time.sleep(12)


def _is_first(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def fails_behind(ctx: Context) -> None:
    """Fails behind a commit, within the loop: that is no `break`."""
    for step in ctx.steps():
        step.run()
        step.commit()
        if step.number == 3:
            raise RuntimeError("the user's own words")


# ---- wrong ones


def breaks_at_once(ctx: Context) -> None:
    for _ in ctx.steps():
        break


def breaks_within(ctx: Context) -> None:
    for step in ctx.steps():
        step.run()
        if step.number == 3:
            break
        step.commit()


def stops_without_a_word(ctx: Context) -> None:
    for _ in ctx.steps():
        ctx.stop("")


def never_steps(ctx: Context) -> None:
    ctx.build()


def no_run(ctx: Context) -> None:
    for step in ctx.steps():
        step.commit()


def runs_twice(ctx: Context) -> None:
    for step in ctx.steps():
        step.run()
        step.run()


def no_commit(ctx: Context) -> None:
    for step in ctx.steps():
        step.run()


def commits_twice(ctx: Context) -> None:
    for step in ctx.steps():
        step.run()
        step.commit()
        step.commit()


def swallows(ctx: Context) -> None:
    for step in ctx.steps():

        def committing(
            model: torch.nn.Module, batch: dict[str, torch.Tensor], step: Step = step
        ) -> tuple[torch.Tensor, torch.Tensor]:
            with suppress(LoopError):
                step.commit()
            return next_token(model, batch)

        step.run(committing)
        step.commit()


def leaves_batches(ctx: Context) -> None:
    for step in ctx.steps():
        for batch in step.batches():
            step.backward(*next_token(ctx.build().model, batch))
            break
        step.commit()


def no_backward(ctx: Context) -> None:
    for step in ctx.steps():
        for _ in step.batches():
            pass


def mean(ctx: Context) -> None:
    for step in ctx.steps():
        for batch in step.batches():
            step.backward(next_token(ctx.build().model, batch)[0], None)  # type: ignore[arg-type]


def bad_metrics(ctx: Context) -> None:
    for step in ctx.steps():
        step.run()
        step.commit(metrics={"accuracy": float("nan")})


def taken_metrics(ctx: Context) -> None:
    for step in ctx.steps():
        step.run()
        step.commit(metrics={"loss": 1.0})


def many_metrics(ctx: Context) -> None:
    for step in ctx.steps():
        step.run()
        step.commit(metrics={f"m{number}": 1.0 for number in range(33)})


def hides(ctx: Context) -> None:
    """Goes on after whatever happens."""
    for step in ctx.steps():
        try:
            step.run(failing)
        except Exception as error:
            print(error)
        try:
            step.commit()
        except Exception as error:
            print(error)


def failing(model: Any, batch: Any) -> Any:
    raise RuntimeError("the user's own words")


def fails(ctx: Context) -> None:
    for step in ctx.steps():
        if step.number == 2:
            raise RuntimeError("the user's own words")
        step.run()
        step.commit()


def late_function(ctx: Context) -> None:
    for _ in ctx.steps():
        ctx.on_committed(print)


A_NUMBER = 7
