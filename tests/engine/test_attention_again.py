"""``recompute = "attention"`` runs attention again by the kernels that the model has chosen."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.test_memory import same, trained, wrapped

ORDER = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]


class Choosing(nn.Module):
    """A block that lets torch attend by one kernel only, or by one before another."""

    in_order = False

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(ORDER, set_priority=True) if self.in_order else sdpa_kernel(SDPBackend.MATH):
            return x + F.scaled_dot_product_attention(x, x, x, is_causal=True)


class Chosen(nn.Module):
    def __init__(self, layers: int, **_: Any) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(17, 8), nn.ModuleList(Choosing() for _ in range(layers))

    def init_weights(self) -> None:
        """The weights are those of the constructor, after a seed."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)[:, None]
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.fast
def test_attention_runs_again_by_the_kernel_that_the_model_allows() -> None:
    """Torch's default is another one, with which the backward pass ended in an error.  The control: its
    gradients have other bits.
    """
    with sdpa_kernel(SDPBackend.MATH):
        wanted = trained(wrapped("none", 2, Chosen))
    assert same(trained(wrapped("attention", 2, Chosen)), wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.sdpa_kernel", lambda _: nullcontext())
        assert not same(trained(wrapped("none", 2, Chosen)), wanted)


class Orders(TorchDispatchMode):
    """Notes the order of kernels at each attention; on a CPU torch does not keep to it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in func.name() and "backward" not in func.name():
            self.seen.append(tuple(torch._C._get_sdp_priority_order()))
        return func(*args, **(kwargs or {}))


@pytest.mark.fast
def test_it_keeps_the_order_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: outside of the model the order is another one."""
    monkeypatch.setattr(Choosing, "in_order", True)
    usual = tuple(torch._C._get_sdp_priority_order())
    with Orders() as orders:
        trained(wrapped("attention", 2, Chosen))
    assert len(orders.seen) >= 4 and len({*orders.seen}) == 1 and usual not in orders.seen
