"""The log says what memory a member holds, and which parameters decay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.engine.loss import next_token
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.models.llama import build
from elastic.plan.layout import Layout
from elastic.train.gauges.inventory import decay_line, memory_line
from tests.support.ranks import Ranks
from tests.support.segments import member
from tests.support.toys import own, toy_job

OWN = {"model": "tests.support.toys:own", "model_args": {}}
LLAMA = {"model_args": {"vocab": 29, "dim": 32, "layers": 2, "heads": 2}}


def held(world: World, job: Job) -> tuple[dict[str, int], int, str]:
    """Returns the memory by class, the number of parameters that this member holds, and which of them decay."""
    with member(world, job, Version(0, 0)) as me:
        me.step()
        classes = dict(me.session.meter.held)
        me.step()
        assert me.session.meter.held == classes, "it is looked at once in a generation"
        return classes, sum(part.numel() for part in me.state.parameters.parts.values()), decay_line(me.state)


@pytest.mark.parametrize(
    ("precision", "settings", "whole", "copies", "buffers"),
    [("fp32", OWN, own, 0, 4 * 19), ("bf16", LLAMA, partial(build, **LLAMA["model_args"]), 2, 0)],
    ids=["fp32", "bf16"],
)
@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(2, 1), Layout(1, 2)], ids=str)
def test_the_memory_of_each_class_is_that_of_its_tensors(
    ranks: Ranks,
    tmp_path: Path,
    layout: Layout,
    precision: str,
    settings: dict[str, Any],
    whole: Callable[[], nn.Module],
    copies: int,
    buffers: int,
) -> None:
    """AdamW in float32: 4 bytes for each weight, 8 for its moments, 4 for its gradient.  With one shard there
    is a copy to compute with, in another dtype.  FSDP2 and the reduction fill up parts to equal sizes, so
    their memory may be a little larger.
    """
    members: list[tuple[dict[str, int], int, str]] = ranks.run(
        layout, held, toy_job(tmp_path, **settings, precision=precision, global_batch=4)
    )
    expected = sum(parameter.numel() for parameter in whole().parameters())
    assert sum(numbers for _, numbers, _ in members) == layout.world * expected // layout.dp_shard
    for classes, numbers, _ in members:
        assert 4 * numbers <= classes["weights"] <= (4 if layout.dp_shard == 1 else 4.4) * numbers
        assert classes["moments"] == 8 * numbers and 4 * numbers <= classes["gradients"] <= 4.4 * numbers
        assert classes["computing copies"] == (copies * numbers if layout.dp_shard == 1 else 0)
        assert classes["buffers"] == buffers


def test_memory_that_tensors_share_counts_once(ranks: Ranks, tmp_path: Path) -> None:
    """The embedding is tied to the output.  Control: untied, there is one matrix of 29 × 32 more."""

    def weights(**args: Any) -> int:
        shape = {"vocab": 29, "dim": 32, "layers": 1, "heads": 2}
        classes, _, _ = ranks.run(
            Layout(1, 1), held, toy_job(tmp_path / str(args["tied"]), model_args={**shape, **args})
        )[0]
        return int(classes["weights"])

    assert weights(tied=False) - weights(tied=True) == 4 * 29 * 32


def test_the_log_lists_which_parameters_decay(ranks: Ranks, tmp_path: Path) -> None:
    """A6: biases, norms and other vectors do not; numbers of layers are written as a star."""
    job = toy_job(tmp_path, **OWN, optim={"weight_decay": 0.05, "decay": "l2"})
    (_, _, line), *_ = ranks.run(Layout(1, 2), held, job)
    assert line == (
        "weight decay 0.05 (l2): 9 parameters decay (embed.weight, layers.*.1.weight, layers.*.3.weight, "
        "mix.weight, head.weight), 14 parameters do not (layers.*.0.weight, layers.*.0.bias, "
        "layers.*.1.bias, layers.*.3.bias, mix.bias, head.bias)"
    )


def weights(world: World, job: Job) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the weights before and after two steps."""
    with member(world, job, Version(0, 0)) as me:
        before = {name: value.clone() for name, value in me.state.trained.items()}
        me.step()
        me.step()
        return before, {name: value.clone() for name, value in me.state.trained.items()}


@pytest.mark.parametrize("decay", ["decoupled", "l2"])
def test_what_the_log_says_is_what_decays(ranks: Ranks, tmp_path: Path, decay: str) -> None:
    """A6: without a gradient, lr × decay of a weight goes in the first step.  A bias and a norm do not move.
    The control: no decay.

    In the second step the momentum has the penalty if it is in the gradient, and has nothing if it is
    decoupled.
    """
    lr, share, momentum = 0.25, 0.5, 0.5
    optim = {"kind": "sgd", "lr": lr, "momentum": momentum, "weight_decay": share, "decay": decay}
    job = toy_job(tmp_path, **OWN, loss=f"{__name__}:flat", optim=optim, schedule={"kind": "constant"})
    ((before, after),) = ranks.run(Layout(1, 1), weights, job)
    first = 1 - lr * share
    factor = first * first if decay == "decoupled" else first - lr * (momentum * share + share * first)
    for name, value in before.items():
        torch.testing.assert_close(after[name], value * (factor if value.dim() > 1 else 1), rtol=1e-6, atol=0)
        assert value.abs().sum() == 0 or torch.equal(after[name], value) is (value.dim() < 2)
    ((before, after),) = ranks.run(Layout(1, 1), weights, job.replace(optim={**optim, "weight_decay": 0.0}))
    assert all(torch.equal(after[name], value) for name, value in before.items())


def flat(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss without a gradient."""
    loss, count = next_token(model, batch)
    return loss * 0, count


def test_classes_without_memory_are_not_told() -> None:
    assert (
        memory_line({"weights": 1_500_000_000, "moments": 0, "buffers": 76})
        == "it holds 1.5 GB of weights, 76 B of buffers"
    )
