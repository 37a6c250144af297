"""FSDP2 says nothing of blocks that return views where nothing is wrong, and a sentence tells where something
is.
"""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from tests.support.ranks import Ranks
from tests.support.segments import member
from tests.support.toys import small_job

HERE = __name__


class Rows(nn.Module):
    """Its blocks, and the model, return what a linear layer makes of three dimensions: a view."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.embedding, self.in_place = nn.Embedding(257, 8), in_place
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens % 257)
        for layer in self.layers:
            x = layer(x)
            if self.in_place:
                x += 0.5
            else:
                x = x + 0.5
        return x


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    out = model(batch["tokens"])
    return out.square().sum(), torch.tensor(out.numel())


def stepped(world: World, job: Job, unfiltered: bool) -> tuple[list[str], str]:
    """Returns the warnings of a step, and the last line of its error."""
    with warnings.catch_warnings(record=True) as found, member(world, job, Version(0, 0)) as me:
        if unfiltered:
            warnings.resetwarnings()
        try:
            me.step()
        except RuntimeError as error:
            return [], traceback.format_exception(error)[-1].strip().splitlines()[-1]
        return [str(each.message) for each in found], ""


def job(bucket: Path, **args: Any) -> Job:
    return small_job(
        bucket,
        model=f"{HERE}:Rows",
        model_args=args,
        loss=f"{HERE}:loss",
        parallel={"zero": 3, "dp_shard": 2},
    )


def test_a_view_that_is_left_alone_is_no_reason_to_warn(ranks: Ranks, tmp_path: Path) -> None:
    """The control: without our filter torch warns in this step."""
    same = job(tmp_path, in_place=False)
    filtered, unfiltered = ranks.run_each(Layout(1, 2), stepped, [(same, False), (same, True)])
    assert filtered == [([], "")] * 2
    assert all(any("returned a view tensor" in each for each in found) for found, _ in unfiltered)


def test_a_view_that_is_changed_in_place_ends_the_step_with_what_to_do(ranks: Ranks, tmp_path: Path) -> None:
    """Its control is the test above: the same sum, not in place."""
    for _, said in ranks.run(Layout(1, 2), stepped, job(tmp_path, in_place=True), False):
        assert said.startswith("the weights of a block are missing in the backward pass: ") and said.endswith(
            "; write x = x + y"
        )
