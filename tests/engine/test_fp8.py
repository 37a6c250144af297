"""Linear layers that multiply in fp8: the numbers are those that the formats hold.  ``test_covering.py`` has
them in every layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.engine.fp8 import BACKWARD, FORWARD, Recipe, apply_fp8, hold, layers_of, scaled
from elastic.errors import ModelError
from elastic.models.llama import build
from elastic.models.spec import ShardingTable
from elastic.plan.layout import Layout
from elastic.train.checks.preflight import preflight
from tests.support.ranks import Ranks
from tests.support.segments import train, train_each, train_here
from tests.support.toys import small_job

FITS = {"vocab": 29, "dim": 32, "layers": 1, "heads": 4, "hidden": 64, "dropout": 0.1}
TABLE = ShardingTable(("0",))


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The judge: float64 values as the format can hold them, after scaling by the largest power of two that
    fits.
    """
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
@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
def test_a_row_is_scaled_by_itself(dtype: torch.dtype) -> None:
    """A row of zeros stays, and one that is not finite leaves the others alone.  The control: one scale for
    all loses the small row.
    """
    values = torch.linspace(-1, 0.7, 99) * torch.tensor([[1e-6], [3.0], [0.0], [448.1], [1e9]])
    values[4, 7] = torch.nan
    found, inverse = scaled(values, dtype, by_row=True)
    assert inverse.shape == (5, 1)
    want = torch.stack([rounded(row, dtype) if row.any() else row.double() for row in values[:4]])
    assert torch.equal((found.double() * inverse.double())[:4], want)
    assert (found[4].float() * inverse[4]).isnan().all()
    alike, by_all = scaled(values[:4], dtype)
    assert not alike[0].float().any() or not torch.equal((alike.double() * by_all.double())[0], want[0])


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
    """Each is rounded to bf16 once, so it may differ by 2^-8 of its size.  The control: without rounding to
    fp8 it differs by more.
    """
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
@pytest.mark.parametrize("tokens", [32, 21])
@pytest.mark.parametrize("held", [True, False], ids=["held", "cast"])
def test_a_layer_by_rows_and_its_gradients_are_the_products_of_rounded_values(
    tokens: int, held: bool
) -> None:
    """The gradient of the weight is exact.  The gradient of the output is rounded after it was multiplied by
    the scales of the weight.

    Rows of inputs, weights and gradients differ by powers of ten.  The control: without rounding, the
    products differ by more.
    """
    torch.manual_seed(0)
    layer = nn.Linear(32, 48, bias=False).bfloat16()
    model = nn.Sequential(layer)
    with torch.no_grad():
        layer.weight.mul_(10.0 ** torch.randint(-4, 4, (48, 1)))
    apply_fp8(model, TABLE, "row")
    x = (torch.randn(tokens, 32) * 10.0 ** torch.randint(-4, 4, (tokens, 1))).bfloat16().requires_grad_()
    grad = (1e-7 * torch.randn(tokens, 48) * 10.0 ** torch.randint(-4, 4, (tokens, 1))).bfloat16()
    by_rows = [torch.stack([rounded(row, FORWARD) for row in each.detach()]) for each in (x, layer.weight)]
    powers = torch.stack(
        [by_rows[1][n] / scaled(row, FORWARD)[0].double() for n, row in enumerate(layer.weight.detach())]
    )
    powers = powers.nanmedian(1).values  # the scales of the weight, from its values: a zero gives NaN
    g = torch.stack([rounded(row, BACKWARD) for row in (grad.double() * powers).float()]) / powers
    weight = layer.weight.detach().double()
    if held:
        values, inverse = scaled(layer.weight.detach(), FORWARD, by_row=True)
        hold(layer, values, inverse.view(-1))
        layer.weight.data = torch.full_like(layer.weight, torch.nan)
    out = model(x.unsqueeze(0))
    out.backward(grad.unsqueeze(0))
    for found, want, exact in (
        (out[0], by_rows[0] @ by_rows[1].T, x.double() @ weight.T),
        (x.grad, g @ by_rows[1], grad.double() @ weight),
    ):
        assert found is not None and found.dtype == torch.bfloat16
        size = want.abs().amax(1, keepdim=True)
        assert ((found.double() - want).abs() < size * 2**-7).all()
        assert ((found.double() - exact).abs() > size * 2**-7).any()
    of_w = grad.double().T @ x.detach().double()
    assert (
        layer.weight.grad is not None
        and (layer.weight.grad.double() - of_w).abs().max() < of_w.abs().max() * 2**-7
    )


@pytest.mark.fast
@pytest.mark.parametrize("recipe", ["tensor", "row"])
def test_no_rows_and_frozen_layers_work(recipe: Recipe) -> None:
    model = nn.Sequential(nn.Linear(32, 48)).bfloat16()
    apply_fp8(model, TABLE, recipe)
    assert model(torch.zeros(0, 32, dtype=torch.bfloat16)).shape == (0, 48)
    model.requires_grad_(False)
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None and x.grad.any() and model[0].weight.grad is None


@pytest.mark.fast
@pytest.mark.parametrize("recipe", ["tensor", "row"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_second_derivative_is_refused(recipe: Recipe, frozen: bool) -> None:
    """It would be that of a product whose factors are constants.  The control: a layer of torch has one."""
    for ours in (False, True):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(32, 16))
        if ours:
            apply_fp8(layer, ShardingTable(blocks=("0",)), recipe)
        layer[0].weight.requires_grad_(not frozen)
        x = torch.randn(16, 32, requires_grad=True)
        (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        if not ours:
            assert torch.autograd.grad(grad.square().sum(), x)[0].norm() > 1e-2
            continue
        with pytest.raises(
            RuntimeError,
            match=(r"^a product in fp8 has no second derivative, .*; set precision = 'bf16'"),
        ):
            grad.square().sum().backward()


@pytest.mark.fast
def test_layers_are_those_of_the_blocks_whose_sizes_fit() -> None:
    model = build(**{**FITS, "layers": 2})
    assert len(layers_of(model, model.sharding())) == 2 * 7  # type: ignore[operator]
    assert layers_of(build(**{**FITS, "dim": 36, "heads": 3}), ShardingTable(("layers.0",))) == []


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise"])
def test_a_model_without_such_layers_is_refused(tmp_path: Path, precision: str) -> None:
    job = small_job(tmp_path, precision=precision, model_args={**FITS, "dim": 36, "heads": 3, "hidden": 60})
    with pytest.raises(ModelError, match=rf"precision = '{precision}': no block of .* multiples of 16"):
        preflight(job)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise"])
def test_every_layout_gives_the_same_bits_when_compiled(ranks: Ranks, tmp_path: Path, precision: str) -> None:
    """The control: without compilation the bits are others, so the blocks are compiled."""
    fits: dict[str, Any] = {"model_args": {**FITS, "layers": 2, "dropout": 0.0}, "precision": precision}
    one = train(ranks, small_job(tmp_path / "one", **fits, compile=True), Layout(1, 1), 3)
    shards = small_job(tmp_path / "shards", **fits, compile=True)
    whole = small_job(tmp_path / "whole", **fits, compile=True, parallel={"zero": 2})
    assert [each.hash for each in train_each(ranks, [shards, whole], Layout(1, 2), 3)] == [one.hash] * 2
    assert train_here(small_job(tmp_path / "plain", **fits), 3).hash != one.hash
