"""U4: gradients, optimizers and means in a loop of the user's work, or end in a sentence that says what to
do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import LossError, StateChanged
from elastic.train.alone.local import run_local
from tests.support.plain_models import Net, job_of, loss

HERE = "tests.train.test_own_loop_gradients"


def scaling(ctx: Any) -> None:
    model = ctx.build().model
    for step in ctx.steps():
        step.run()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad *= 0
        step.commit()


def clipping_norm(ctx: Any) -> None:
    model = ctx.build().model
    for step in ctx.steps():
        step.run()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step.commit()


def optimizing(ctx: Any) -> None:
    model = ctx.build().model
    own = torch.optim.AdamW(model.parameters(), lr=1.0)
    for step in ctx.steps():
        step.run()
        step.commit()
        own.step()


def adding(ctx: Any) -> None:
    """A backward pass between two steps."""
    model = ctx.build().model
    for step in ctx.steps():
        step.run()
        step.commit()
        model(torch.zeros(1, 6, dtype=torch.int64)).sum().backward()


def looking(ctx: Any) -> None:
    """The control: gradients are emptied as in a loop of plain torch, and not used."""
    model = ctx.build().model
    for step in ctx.steps():
        model.zero_grad()
        step.run()
        step.commit()
        with torch.no_grad():
            model(torch.zeros(1, 6, dtype=torch.int64))
        model.zero_grad()


def averaging(ctx: Any) -> None:
    model = ctx.build().model
    for step in ctx.steps():
        for batch in step.batches():
            summed, count = loss(model, batch)
            step.backward(summed / count, 1)
        step.commit()


def restoring(ctx: Any) -> None:
    """The control: as the sentence says."""
    model = ctx.build().model
    for step in ctx.steps():
        for batch in step.batches():
            summed, count = loss(model, batch)
            step.backward(summed / count * count, count)
        step.commit()


@pytest.mark.parametrize("loop", [scaling, clipping_norm, optimizing, adding])
def test_a_loop_that_uses_gradients_that_are_not_there_is_refused(
    tmp_path: Path, loop: Callable[[Any], None]
) -> None:
    with pytest.raises(
        StateChanged,
        match=(r"uses or changes parameter\.grad of .* set optim, optim\.clip_norm"),
    ):
        run_local(job_of(tmp_path, Net, loop=f"{HERE}:{loop.__name__}", trial=False), lambda line: None)


def test_a_loop_that_gives_means_is_refused_before_the_first_update(tmp_path: Path) -> None:
    said = (
        r"averaging': step\.backward\(\) got the count 1 for each microbatch of 2 samples; .* call "
        r"step\.backward\(mean \* n, n\)"
    )
    with pytest.raises(LossError, match=said):
        run_local(job_of(tmp_path, Net, loop=f"{HERE}:averaging"), lambda line: None)
    for loop in (restoring, looking):
        job = job_of(tmp_path, Net, loop=f"{HERE}:{loop.__name__}", name=loop.__name__)
        assert run_local(job, lambda line: None)[0] == "Finished"
