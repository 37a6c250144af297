"""Training in bf16 computes in low precision, and keeps and updates the state in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.engine.optim.base import Optimizer, rule_of
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from tests.support.ranks import Ranks
from tests.support.segments import compute, here, member, train, train_each, train_here
from tests.support.toys import small_job, toy_job

BF16 = {"precision": "bf16"}
STEPS = 3


def dtypes(world: World, job: Job) -> dict[str, set[str]]:
    """Returns the dtypes with which one step computes and those that it keeps, by where they were seen."""
    seen: dict[str, set[str]] = {}

    def note(where: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            seen.setdefault(where, set()).add(str(value.dtype).removeprefix("torch."))

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for where, value in (("weight", module.weight), ("input", args[0]), ("output", output)):
            note(where, value)

    with member(world, job, Version(0, 0)) as me:
        for module in me.state.model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(hook)
        compute(me.session, me.state, 1)
        for gradient in me.state.parameters.grads().values():
            note("gradient", gradient)
        for (kind, _), value in me.state.shard.values.items():
            note(kind, value)
    return seen


@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(1, 2), Layout(2, 1)], ids=str)
def test_e2_what_is_computed_with_is_bf16_and_what_is_kept_is_float32(
    ranks: Ranks, tmp_path: Path, layout: Layout
) -> None:
    """E2: dtypes of the tensors themselves, in every member."""
    low, high = {"bfloat16"}, {"float32"}
    kept = {kind: high for kind in ("gradient", "parameter", "moment.exp_avg", "moment.exp_avg_sq", "scalar")}
    found = ranks.run_each(layout, dtypes, [(small_job(tmp_path, **BF16),), (small_job(tmp_path),)])
    for computed, members in zip((low, high), found, strict=True):
        assert members == [{"weight": computed, "input": computed, "output": computed, **kept}] * layout.world


def test_without_the_fold_bf16_depends_on_the_layout(ranks: Ranks, tmp_path: Path) -> None:
    """Negative control of ``test_covering.py``, with 16 microbatches: in float32 the sum of a few gradients
    in bf16 is often exact.
    """
    one, three = (
        toy_job(tmp_path / name, **BF16, reproducible=False, microbatch=1) for name in ("one", "three")
    )
    assert train_here(one, STEPS).hash != train(ranks, three, Layout(1, 3), STEPS).hash


def small_updates(
    world: World, job: Job, steps: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    """Returns the norms' weights, 1 at first, as the job keeps them and as pure bf16 with the same optimizer,
    and the largest update.
    """
    with member(world, job, Version(0, 0)) as me:
        norms = {name: value for name, value in me.state.trained.items() if "norm" in name}
        pure = {name: value.detach().bfloat16().requires_grad_() for name, value in norms.items()}
        theirs, largest = Optimizer(job, rule_of(job), pure, dict.fromkeys(pure, ()), frozenset()), 0.0
        assert all(bool((value == 1).all()) for value in [*norms.values(), *pure.values()])
        apply = me.state.optimizer.apply

        def both(grads: Any, outcome: Any, unused: Any) -> float:
            theirs.apply({name: grads[name].bfloat16() for name in pure}, outcome)
            return apply(grads, outcome, unused)

        me.state.optimizer.apply = both  # type: ignore[method-assign]
        for _ in range(steps):
            before = {name: value.detach().clone() for name, value in norms.items()}
            me.step()
            largest = max(
                largest,
                *(float((value.detach() - before[name]).abs().max()) for name, value in norms.items()),
            )
        return (
            {k: v.detach().clone() for k, v in norms.items()},
            {k: v.detach().float() for k, v in pure.items()},
            largest,
        )


def test_e2_updates_too_small_for_bf16_move_the_masters(tmp_path: Path) -> None:
    """E2: each update is below 2^-9 of the weight, half of what bf16 can tell apart below 1; pure bf16
    weights stay where they were.
    """
    job = small_job(tmp_path, **BF16, optim={"lr": 2e-4}, schedule={"kind": "constant"})
    masters, pure, largest = here(small_updates, job, 12)
    assert 0 < largest < 2**-9
    for name, value in masters.items():
        assert bool((value != 1).all()), name
        assert bool((pure[name] == 1).all()), name  # the control
    assert max(float((value - 1).abs().max()) for value in masters.values()) > 2**-9  # what was lost adds up


class Scaled(nn.Module):
    """A block that gets a factor in float32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor, *, factors: dict[str, Tensor]) -> Tensor:
        return x + self.linear(torch.tanh(x * factors["first"]))


class Mixed(nn.Module):
    """A user's model that makes float32 tensors in its forward, and gives them to its blocks."""

    def __init__(self, vocab: int = 29, dim: int = 32) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab)
        self.layers = nn.ModuleList(Scaled(dim) for _ in range(2))

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x, factors = self.embedding(tokens), {"first": torch.linspace(0.7, 1.3, 32, device=tokens.device)}
        for layer in self.layers:
            x = layer(x, factors=factors)
        return self.head(x)


def test_inputs_in_float32_are_cast_in_every_layout(ranks: Ranks, tmp_path: Path) -> None:
    """Blocks get bf16, whether FSDP2 wraps them or not.  The control: in float32 the bits are others."""
    own: dict[str, Any] = {"model": f"{__name__}:Mixed", "model_args": {}, **BF16}
    one = train_here(small_job(tmp_path / "one", **own), STEPS)
    none, *shards = (small_job(tmp_path / str(zero), parallel={"zero": zero}, **own) for zero in (0, 2, 3))
    others = [*train_each(ranks, shards, Layout(1, 2), STEPS), train(ranks, none, Layout(2, 1), STEPS)]
    assert [each.hash for each in others] == [one.hash] * 3
    assert train_here(small_job(tmp_path / "high", **{**own, "precision": "fp32"}), STEPS).hash != one.hash


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "block", "selective", 0.5])
def test_compiled_blocks_have_the_same_bits_in_every_layout(
    ranks: Ranks, tmp_path: Path, recompute: str | float
) -> None:
    """FSDP2 and whole weights; a cast inside of compiled code would round at another place."""
    settings: dict[str, Any] = {
        "compile": True,
        "recompute": recompute,
        "model_args": {"vocab": 29, "dim": 64, "layers": 2, "heads": 4},
        **BF16,
    }
    layouts = [Layout(1, 1), Layout(1, 2), Layout(2, 1)]
    hashes = {
        train(ranks, small_job(tmp_path / str(layout), **settings), layout, STEPS).hash for layout in layouts
    }
    assert len(hashes) == 1
