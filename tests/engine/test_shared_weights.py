"""A weight that blocks share, or one of another format: stages 0 to 2 of ZeRO train it, stage 3 is refused
before any worker starts, and ``auto`` takes stage 2.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from elastic.engine.loss import next_token
from elastic.engine.parameters.split import tell_of_reads
from elastic.engine.world import World
from elastic.errors import ModelError
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.train.blame import classify
from elastic.train.checks.preflight import preflight
from elastic.train.model import build_model, builder_of, in_its_stage
from tests.support.ranks import Ranks
from tests.support.segments import member, train, train_here
from tests.support.toys import small_job

SHARED = {
    "weight": ("layers.0.even.weight", "layers.2.even.weight"),
    "module": ("layers.0.norm.weight", "layers.2.norm.weight"),
    "block": ("layers.0.even.weight", "layers.2.even.weight"),
    "rest": ("layers.1.even.weight", "last.weight"),
    "format": ("embed.weight", "last.weight"),
    "format in a block": ("layers.1.even.weight", "layers.1.norm.weight"),
}
"""The two names of the first parameter that is not of one block, by what blocks share; or of two that are
unlike.
"""


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.even, self.norm = nn.Linear(dim, dim, bias=False), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.even(self.norm(x.to(self.norm.weight.dtype)).tanh().to(self.even.weight.dtype)).to(
            x.dtype
        )


class Sharing(nn.Module):
    """A model whose head and embedding are tied, as is allowed, and that shares more by ``kind``."""

    def __init__(self, kind: str = "", dim: int = 16) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(29, dim), nn.ModuleList(Block(dim) for _ in range(3))
        self.last, self.head = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 29)
        self.head.weight = self.embed.weight
        match kind:
            case "weight":
                self.layers[2].even.weight = self.layers[0].even.weight
            case "module":
                self.layers[2].norm = self.layers[0].norm
            case "block":
                self.layers[2] = self.layers[0]
            case "rest":
                self.last.weight = self.layers[1].even.weight
            case "format":
                self.last.double()
            case "format in a block":
                self.layers[1].norm.double()
            case "format of a block":
                self.layers[1].double()
            case "frozen":
                self.last.double().requires_grad_(False)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(x.to(self.last.weight.dtype)).to(x.dtype))


def sharing(folder: Path, kind: str, zero: int | str = "auto", **changes: Any) -> Job:
    changes = {"parallel": {"zero": zero}, "workers": {"max": 2}, **changes}
    return small_job(folder, model=f"{__name__}:Sharing", model_args={"kind": kind}, **changes)


@pytest.mark.parametrize("kind", SHARED)
def test_stage_3_is_refused_with_both_names_of_the_weight(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ModelError) as refused:
        preflight(sharing(tmp_path, kind, 3))
    said = str(refused.value)
    assert (
        all(repr(name) in said for name in SHARED[kind])
        and said.startswith("parallel.zero = 3: ")
        and "parallel.zero = 2" in said
    )


def test_what_can_be_trained_is_not_refused(tmp_path: Path) -> None:
    """The controls: the other stages, and one worker, can train it; a weight that is shared within the rest
    of the model is no problem.

    Nor is a format of all of a block, or of what is frozen.
    """
    for kind, zero in (("weight", 0), ("format in a block", 1), ("block", 2), ("rest", "auto")):
        preflight(sharing(tmp_path, kind, zero))
    preflight(sharing(tmp_path, "weight", 3, workers={"max": 1}))
    preflight(sharing(tmp_path, "format", 3), local=True)
    for fine in ("", "format of a block", "frozen"):
        preflight(sharing(tmp_path, fine, 3))


@pytest.mark.parametrize("kind", SHARED)
def test_auto_stands_for_a_stage_that_trains_it(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """All layouts have the bits of one worker.  Without sharing ``auto`` stays."""
    one = train_here(sharing(tmp_path / "one", kind), 2)
    job = sharing(tmp_path / "auto", kind)
    chosen = in_its_stage(job, build_model(job, builder_of(job)))
    assert chosen.parallel.zero == 2
    for layout in (Layout(1, 2), Layout(2, 1), Layout(2, 2)) if kind == "weight" else (Layout(1, 2),):
        found = train(ranks, chosen.replace(bucket=str(tmp_path / str(layout))), layout, 2)
        assert found.hash == one.hash, layout
    plain = sharing(tmp_path, "")
    assert in_its_stage(plain, build_model(plain, builder_of(plain))) is plain


@pytest.mark.parametrize("kind", ["weight", "module", "format"])
def test_stage_3_could_not_train_it(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """The control: it ends in an error of torch."""
    with pytest.raises(
        AssertionError,
        match=(
            r"FSDP group|module once|Invariant|uniform original parameter "
            r"dtype"
        ),
    ):
        train(ranks, sharing(tmp_path, kind, 3), Layout(1, 2), 2)


@pytest.mark.parametrize("kind", ["format of a block", "frozen"])
def test_stage_3_trains_the_formats_that_are_not_refused(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    one = train_here(sharing(tmp_path / "one", kind), 2)
    assert train(ranks, sharing(tmp_path / "two", kind, 3), Layout(1, 2), 2).hash == one.hash


def with_penalty(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns a loss that reads weights while no block runs."""
    loss, count = next_token(model, batch)
    return loss + 1e-3 * sum(parameter.square().sum() for parameter in model.parameters()), count


def told(world: World, job: Job) -> tuple[str, str]:
    """Returns what a step's error is blamed on, and the last words of its traceback, as a worker tells them."""
    with member(world, job, Version(0, 0)) as me:
        try:
            me.step()
        except RuntimeError as error:
            tell_of_reads(error)
            return classify(error, lambda: None)[0], "".join(
                traceback.format_exception(error)
            ).strip().rpartition("\n")[2]
    return "", ""


def test_a_weight_that_is_read_outside_its_block_is_told_of(ranks: Ranks, tmp_path: Path) -> None:
    """It is the job's error, not a peer's.  The control: stage 2, which the words name, has the bits of one
    worker.
    """
    job = sharing(tmp_path, "", 3, loss=f"{__name__}:with_penalty")
    for cause, words in ranks.run(Layout(1, 2), told, job):
        assert cause == "job"
        assert (
            "with parallel.zero = 3 a weight can be read only while its block runs" in words
            and "parallel.zero = 2" in words
        )
    one = train_here(job.replace(bucket=str(tmp_path / "one")), 2)
    assert (
        train(ranks, job.in_stage(2).replace(bucket=str(tmp_path / "two")), Layout(1, 2), 2).hash == one.hash
    )
