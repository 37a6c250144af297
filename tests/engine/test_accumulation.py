"""Gradients of several rounds are added up before they are exchanged, and come out as those of one large
round.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from tests.engine.test_bits import plain_training
from tests.support.collectives import Calls, counting
from tests.support.ranks import Ranks
from tests.support.segments import compute, here, member
from tests.support.toys import small_job

STEPS, UNITS = 2, 4
"""Steps of a run; units of the model: its two blocks, the rest, and the second sum of the weight of its head."""


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss of the toy model in float64, without masked targets."""
    tokens = batch["tokens"]
    targets = tokens[:, 1:].flatten()
    logits = model(tokens[:, :-1].clamp(min=0)).flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="sum"), (
        targets >= 0
    ).sum()


def mean_of_means(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The usual mistake: each microbatch counts as much as any other, however few tokens it has."""
    loss, count = next_token(model, batch)
    return loss / count, torch.ones(())


def accumulating(folder: Path, microbatch: int, **changes: Any) -> Job:
    return small_job(
        folder,
        **{
            "model": "tests.engine.test_bits:double",
            "model_args": {"vocab": 29, "dim": 32, "layers": 2, "heads": 2},
            "loss": f"{__name__}:next_token",
            "global_batch": 16,
            "microbatch": microbatch,
            "optim": {"lr": 1e-2, "clip_norm": 1e9},
            **changes,
        },
    )


def trained(world: World, job: Job) -> tuple[list[float], list[tuple[int, ...]], dict[str, Tensor], Calls]:
    """Returns the losses, the token counts of the microbatches by step, this member's parameters, and the
    collectives of one more step.
    """
    with member(world, job, Version(0, 0), prefetch=0) as me:
        outcomes = [me.step() for _ in range(STEPS)]
        parts = {name: part.clone() for name, part in me.state.parameters.parts.items()}
        with counting() as calls:
            compute(me.session, me.state, STEPS + 1)
        return [outcome.loss for outcome in outcomes], [outcome.counts for outcome in outcomes], parts, calls


def furthest(one: Any, other: Any) -> float:
    (losses, _, parts, _), (others, _, theirs, _) = one, other
    apart = max(abs(a - b) for a, b in zip(losses, others, strict=True))
    return max(apart, *(float((parts[name] - theirs[name]).abs().max()) for name in parts))


MODES = {
    "replicas": (Layout(2, 1), {"reproducible": False}, "allreduce", 1),
    "stage 1": (Layout(1, 2), {"reproducible": False, "parallel": {"zero": 1}}, "reduce_scatter", 1),
    "stage 2": (Layout(1, 2), {"reproducible": False, "parallel": {"zero": 2}}, "reduce_scatter", 4),
    "stage 3": (Layout(1, 2), {"reproducible": False, "parallel": {"zero": 3}}, "reduce_scatter", 4),
    "reproducible": (Layout(1, 2), {"parallel": {"zero": 2}}, "alltoall", 4),
}
"""Layout, settings, kind of collective, and how often in a step of four rounds the gradients of a unit are
exchanged.

Stages 2 and 3 keep only a part of the sums, and the ordered reduction adds each microbatch in its turn: they
exchange every round.
"""


@pytest.mark.parametrize("mode", MODES)
def test_b14_four_rounds_of_two_are_one_round_of_eight(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """B14: in float64 to 1e-10, losses and parameters, with microbatches of unequal numbers of tokens; plain
    torch is the judge.

    The gradients of each unit are exchanged once in four rounds with replicas and in stage 1.  The other
    modes are the control of the count.
    """
    layout, settings, kind, exchanges = MODES[mode]
    many, few = (accumulating(tmp_path / str(size), size, **settings) for size in (2, 8))
    (four, _), (one, _) = ranks.run_each(layout, trained, [(many,), (few,)])
    assert [len(counts) for counts in four[1]] == [8] * STEPS and [len(counts) for counts in one[1]] == [
        2
    ] * STEPS
    assert all(len(set(counts)) > 2 for counts in four[1]), "numbers of tokens differ"
    assert furthest(four, one) <= 1e-10
    _, expected = plain_training(few, STEPS)
    assert max(abs(a - b) for a, b in zip(four[0], expected, strict=True)) <= 1e-10
    sums = [[call for call in calls if kind in call.name] for calls in (four[3], one[3])]
    assert [len(each) for each in sums] == [UNITS * exchanges, UNITS]


def test_equal_weights_for_microbatches_give_something_else(tmp_path: Path) -> None:
    """The control of the values above."""
    wrong = (
        accumulating(tmp_path / str(size), size, loss=f"{__name__}:mean_of_means", reproducible=False)
        for size in (2, 8)
    )
    assert furthest(*(here(trained, job) for job in wrong)) > 1e-5


class Turned(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dim))

    def forward(self) -> Tensor:
        return self.weight.t()


class Together(nn.Module):
    """A model whose two blocks have one matrix each; autograd gives both the same memory as their gradients."""

    def __init__(self, vocab: int = 29, dim: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab)
        self.layers = nn.ModuleList([Turned(dim), Turned(dim)])

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + torch.tanh(x) @ (self.layers[0]() + self.layers[1]()))  # type: ignore[no-any-return]


def together(**args: Any) -> nn.Module:
    return Together(**args)


def summed(world: World, job: Job) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """Returns the gradients of a step of the engine and of torch, and whether those of two blocks lie in one
    memory after a microbatch.
    """
    with member(world, job, Version(0, 0), prefetch=0) as me:
        share = compute(me.session, me.state, 1)
        ours = {name: grad.clone() for name, grad in me.state.parameters.grads().items()}
        judge = together(**job.model_args)
        judge.load_state_dict(me.state.parameters.parts, strict=True)
        known = dict(judge.named_parameters())
        sums = {name: torch.zeros_like(value) for name, value in known.items()}
        for ids in share.samples:
            loss, _ = next_token(judge, me.session.loader.dataset.read(ids))
            for total, grad in zip(
                sums.values(), torch.autograd.grad(loss, [*known.values()], retain_graph=True), strict=True
            ):
                total += grad
        loss.backward()
        first, second = (known[f"layers.{number}.weight"].grad for number in range(2))
        return ours, sums, first is not None and second is not None and first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize(
    "how",
    [{"reproducible": False}, {}, {"reduction": {"block": 2}}],
    ids=["collective", "ordered", "in blocks"],
)
def test_gradients_that_share_memory_are_added_up_apart(tmp_path: Path, how: dict[str, Any]) -> None:
    """A sum that went on in the memory of the first gradient would add the later ones of both blocks to it."""
    changes: dict[str, Any] = {
        "model": f"{__name__}:together",
        "model_args": {},
        "parallel": {"zero": 0, "bucket_elements": 1},
    }
    ours, theirs, shared = here(summed, accumulating(tmp_path, 2, **changes | how))
    assert shared and ours.keys() == theirs.keys()
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-4, atol=1e-5)
