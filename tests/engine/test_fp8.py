"""Linear layers that multiply in fp8: the numbers are those that the formats hold, and the bits are the same in every layout."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.engine import fp8
from elastic.engine.fp8 import BACKWARD, FORWARD, apply_fp8, layers_of, scaled
from elastic.engine.world import World
from elastic.errors import ModelError
from elastic.ids import Version
from elastic.job import Job
from elastic.models.llama import build
from elastic.models.spec import ShardingTable
from elastic.plan.layout import Layout
from elastic.train.preflight import preflight
from tests.support.ranks import Ranks
from tests.support.segments import member, train
from tests.support.toys import toy_job

FITS = {"vocab": 29, "dim": 32, "layers": 2, "heads": 4, "hidden": 64, "dropout": 0.1}
TABLE = ShardingTable(("0",))


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The judge: float64 values as the format can hold them, after scaling by the largest power of two that fits."""
    power = 1.0
    while values.abs().max() * power * 2 <= torch.finfo(dtype).max:
        power *= 2
    while values.abs().max() * power > torch.finfo(dtype).max:
        power /= 2
    return (values.double() * power).float().to(dtype).double() / power


@pytest.mark.fast
@pytest.mark.parametrize("size", [1e-20, 3e-3, 1.0, 447.9, 448.0, 448.1, 7e8])
@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
def test_a_tensor_is_scaled_as_far_as_its_largest_element_fits(dtype: torch.dtype, size: float) -> None:
    values = torch.linspace(-1, 0.7, 99) * size
    found, inverse = scaled(values, dtype)
    assert torch.equal(found.double() * inverse.double(), rounded(values, dtype))
    assert torch.finfo(dtype).max / 2 <= found.float().abs().max() <= torch.finfo(dtype).max


@pytest.mark.fast
def test_zeros_stay_and_what_is_not_finite_makes_everything_so() -> None:
    assert torch.equal(scaled(torch.zeros(4), FORWARD)[0].float(), torch.zeros(4))
    for bad in (float("inf"), float("nan")):
        found, inverse = scaled(torch.tensor([1.0, bad]), FORWARD)
        assert (found.float() * inverse).isnan().all()


@pytest.mark.fast
@pytest.mark.parametrize("tokens", [32, 21], ids=["a multiple of 16", "none"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_and_its_gradients_are_the_products_of_rounded_values(tokens: int, bias: bool) -> None:
    """Each is rounded to bf16 once, so it may differ by 2^-8 of its size.  The control: without rounding to fp8 it differs by more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, bias=bias)).bfloat16()
    apply_fp8(model, TABLE)
    x = torch.randn(tokens, 32, dtype=torch.bfloat16, requires_grad=True)
    grad = 1e-7 * torch.randn(tokens, 48).bfloat16()  # far below what E5M2 holds without a scale
    out = model(x.unsqueeze(0))
    out.backward(grad.unsqueeze(0))
    weight = model[0].weight
    a, w, g = rounded(x.detach(), FORWARD), rounded(weight.detach(), FORWARD), rounded(grad, BACKWARD)
    added = model[0].bias.detach().double() if bias else 0.0
    for found, want, exact in (
        (out[0], a @ w.T + added, x.double() @ weight.double().T + added),
        (x.grad, g @ w, grad.double() @ weight.double()),
        (weight.grad, g.T @ a, grad.double().T @ x.double()),
    ):
        assert found is not None and found.dtype == torch.bfloat16
        size = want.abs().max()
        assert (found.double() - want).abs().max() < size * 2**-7
        assert (found.double() - exact).abs().max() > size * 2**-7


@pytest.mark.fast
def test_no_rows_and_frozen_layers_work() -> None:
    model = nn.Sequential(nn.Linear(32, 48)).bfloat16()
    apply_fp8(model, TABLE)
    assert model(torch.zeros(0, 32, dtype=torch.bfloat16)).shape == (0, 48)
    model.requires_grad_(False)
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None and x.grad.any() and model[0].weight.grad is None


@pytest.mark.fast
def test_layers_are_those_of_the_blocks_whose_sizes_fit() -> None:
    model = build(**FITS)
    assert len(layers_of(model, model.sharding())) == 2 * 7  # type: ignore[operator]
    assert layers_of(build(**{**FITS, "dim": 36, "heads": 3}), ShardingTable(("layers.0",))) == []


def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    job = toy_job(tmp_path, precision="fp8", model_args={**FITS, "dim": 36, "heads": 3, "hidden": 60})
    with pytest.raises(ModelError, match=r"precision = 'fp8': no block of .* multiples of 16"):
        preflight(job)


def test_every_layout_gives_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    """Shards, replicas, weights that are gathered once, recomputation, and a world that changes.  The control: bf16 has other bits."""
    fits: dict[str, Any] = {"model_args": FITS, "precision": "fp8"}
    one = train(ranks, toy_job(tmp_path / "one", **fits), Layout(1, 1), 4)
    for number, (layout, changes) in enumerate(
        [
            (Layout(1, 3), {}),
            (Layout(2, 1), {"recompute": "block"}),
            (Layout(1, 2), {"parallel": {"zero": 2}, "recompute": "selective"}),
        ]
    ):
        assert train(ranks, toy_job(tmp_path / str(number), **fits, **changes), layout, 4).hash == one.hash, (layout, changes)
    half = train(ranks, toy_job(tmp_path / "moved", **fits), Layout(1, 2), 2)
    assert train(ranks, toy_job(tmp_path / "moved", **fits), Layout(2, 1), 4, half.version).hash == one.hash
    assert train(ranks, toy_job(tmp_path / "bf16", **{**fits, "precision": "bf16"}), Layout(1, 1), 4).hash != one.hash


def curve(world: World, job: Job, steps: int, frozen: float = 0.0) -> list[float]:
    """Returns the losses of ``steps`` steps; with ``frozen`` that scale is used for every tensor."""
    if frozen:
        fp8.scaled = lambda values, dtype: ((values * frozen).to(dtype), torch.tensor(1 / frozen))  # type: ignore[assignment]
    try:
        with member(world, job, Version(0, 0)) as me:
            return [me.step().loss for _ in range(steps)]
    finally:
        fp8.scaled = scaled


def test_the_loss_in_fp8_is_that_of_bf16(ranks: Ranks, tmp_path: Path) -> None:
    """Within 1 %, mean of the last ten of 200 steps; a toy.  The control: with one scale for all, too small for weights, it is not."""
    last = {}
    for name, precision, frozen in (("bf16", "bf16", 0.0), ("fp8", "fp8", 0.0), ("frozen", "fp8", 2.0**-6)):
        changes = {"global_batch": 8, "microbatch": 8, "steps": 200, "precision": precision, "optim": {"lr": 1e-3}, "model_args": FITS}
        (losses,) = ranks.run(Layout(1, 1), curve, toy_job(tmp_path / name, **changes), 200, frozen)
        last[name] = statistics.mean(losses[-10:])
    assert last["fp8"] != last["bf16"]
    assert last["fp8"] == pytest.approx(last["bf16"], rel=0.01)
    assert last["frozen"] != pytest.approx(last["bf16"], rel=0.01)
