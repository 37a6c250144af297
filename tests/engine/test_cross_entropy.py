"""The fused loss is the loss: against torch's cross-entropy of whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from elastic.engine.loss import next_token
from elastic.kernels import cross_entropy as fused
from elastic.models.llama import Llama

pytestmark = pytest.mark.fast
Results = tuple[Tensor, Tensor, Tensor]


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [2, 50, 16] and a head of 33 words, small enough that no two sums are equal by chance;
    some targets are masked.
    """
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 50, 16, dtype=dtype), torch.randn(33, 16, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(-5, 33, (2, 50))


def by_torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Results:
    logits = (hidden @ weight.T).float().flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten().clamp_min(-1), ignore_index=-1, reduction="sum")
    return (loss, *torch.autograd.grad(loss, (hidden, weight)))


def by_us(hidden: Tensor, weight: Tensor, targets: Tensor) -> Results:
    loss = fused.cross_entropy(hidden, weight, targets)
    return (loss, *torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("chunk", [1, 7, 100, 2048])
def test_the_loss_and_its_gradients_are_those_of_whole_logits(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """F7: only the order of additions differs.  The control: one target more that is masked is far outside of
    what is allowed.
    """
    monkeypatch.setattr(fused, "CHUNK", chunk)
    hidden, weight, targets = inputs(torch.float32)
    found, expected = by_us(hidden, weight, targets), by_torch(hidden, weight, targets)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    targets[0, 0] = -1 if targets[0, 0] >= 0 else 3
    other = by_torch(hidden, weight, targets)
    assert all((mine - theirs).abs().max() > 1e-2 for mine, theirs in zip(found, other, strict=True))


def test_in_bf16_the_gradient_of_the_head_is_added_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred chunks of one token are as exact as one chunk; added in bf16, as the control does, they are
    not.
    """
    hidden, weight, targets = inputs(torch.bfloat16)
    exact = by_torch(
        hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), targets
    )[2]
    monkeypatch.setattr(fused, "CHUNK", 1)

    def error() -> float:
        return float((by_us(hidden, weight, targets)[2].double() - exact).abs().mean())

    wide = error()

    def narrow(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
        return left @ right if total is None else total.add_(left @ right)

    monkeypatch.setattr(fused, "_added", narrow)
    assert error() > 1.5 * wide


def test_the_gradient_is_scaled_as_the_loss_is() -> None:
    """An idle round multiplies its loss by zero."""
    hidden, weight, targets = inputs(torch.float32)
    (fused.cross_entropy(hidden, weight, targets) * 0).backward()
    assert hidden.grad is not None and weight.grad is not None
    assert not hidden.grad.any() and not weight.grad.any()


def test_a_model_that_fuses_its_loss_trains_as_one_that_does_not() -> None:
    """F7: the loss and all gradients to 1e-5."""
    torch.manual_seed(0)
    model = Llama(vocab=29, dim=16, layers=1, heads=2)
    model.init_weights()
    batch, found = {"tokens": torch.randint(-3, 29, (3, 12))}, []
    for fuses in (True, False):
        model.fuses_loss = fuses
        loss, count = next_token(model, batch)
        found.append([loss, count.float(), *torch.autograd.grad(loss, list(model.parameters()))])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, None], ids=["a constant gradient", "one with a derivative"])
def test_a_second_derivative_is_refused(scale: float | None) -> None:
    """It lacked what depends on the saved tensors.  The first derivative stays, also where a graph of it is
    asked for; the control is that torch has a second one, far from what the fused loss gave.
    """
    hidden, weight, targets = inputs(torch.float32)
    factor = weight.mean().exp() if scale is None else scale

    def first(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss * factor, hidden, create_graph=True)[0]

    plain = first(
        F.cross_entropy(
            (hidden @ weight.T).flatten(0, 1),
            targets.flatten().clamp_min(-1),
            ignore_index=-1,
            reduction="sum",
        )
    )
    found = first(fused.cross_entropy(hidden, weight, targets))
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)
    assert torch.autograd.grad(plain.square().sum(), weight)[0].norm() > 1e-2
    with pytest.raises(
        RuntimeError,
        match=(
            r"^the loss that the model computes itself has no second derivative, .*; call the model without"
        ),
    ):
        found.square().sum().backward()  # type: ignore[no-untyped-call]
