"""Blocks keep what their backward pass needs on the host, with the same bits, or in eight bits, with nearly
the same gradients.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from elastic.engine import activations
from elastic.engine.activations import apply_activations
from elastic.engine.blocks import sharding_table
from elastic.engine.compile import apply_compile
from elastic.engine.host_memory import host_memory
from tests.engine.test_memory import SEQ, Watch, same, trained, wrapped


def with_activations(
    kept: str, recompute: str = "none", layers: int = 4, *, compiles: bool = False
) -> nn.Module:
    model = wrapped(recompute, layers, heads=2)
    if compiles:
        apply_compile(model, sharding_table(model), forward_alone=True)
    if kept != "keep":
        apply_activations(model, sharding_table(model), kept)
    return model


def hosts() -> set[StorageWeakRef]:
    """Returns the host memory that is free."""
    free = host_memory(pinned=False).free
    return {StorageWeakRef(host.untyped_storage()) for each in free.values() for host in each}


def living(kept: str, recompute: str, layers: int) -> int:
    """Returns the bytes that live after a forward pass, but for memory of the host."""
    model = with_activations(kept, recompute, layers)
    trained(model)  # the host's memory is allocated by now
    model.zero_grad(set_to_none=True)
    watch, free = Watch(model), hosts()
    watch.before |= free
    with watch:
        loss = model(torch.arange(2 * SEQ).view(2, SEQ) % 17).square().sum()
        found = watch.living()
        loss.backward()
    assert hosts() == free, "all is given back, and nothing was allocated"
    assert free or kept != "offload"
    return found


@pytest.mark.fast
def test_microbatches_of_all_lengths_share_the_memory_of_the_host() -> None:
    """F6: after short and long ones, the host's memory is at most four times that which the longest takes
    alone; the control is that of all lengths together, which grew with each new one.
    """

    def taken(*lengths: int) -> int:
        host_memory(pinned=False).free.clear()
        for length in lengths:
            model(torch.arange(length)[None] % 17).square().sum().backward()
        return sum(
            host.untyped_storage().nbytes()
            for each in host_memory(pinned=False).free.values()
            for host in each
        )

    model, lengths = with_activations("offload", "none", 2), range(8, 129, 8)
    longest, together = taken(lengths[-1]), sum(map(taken, lengths))
    assert longest <= taken(*lengths) <= 4 * longest < together


def a_layer(kept: str, recompute: str) -> float:
    """Returns the bytes that one more layer keeps."""
    return (living(kept, recompute, 4) - living(kept, recompute, 2)) / 2


@pytest.mark.fast
@pytest.mark.parametrize("recompute", ["none", "block", "attention"])
def test_offloaded_blocks_keep_nothing_and_change_no_bit(recompute: str) -> None:
    """F6: all but the statistics of norms leaves the device, but for the last block's, and gradients have the
    same bits.
    """
    assert a_layer("offload", recompute) < 0.01 * a_layer("keep", recompute)
    assert same(trained(with_activations("offload", recompute)), trained(with_activations("keep", recompute)))


class Repeated(nn.Module):
    """A model that runs one block three times, as its first and its last two layers."""

    def __init__(self, **_: int) -> None:
        super().__init__()
        self.embed, one, other = (
            nn.Embedding(17, 8),
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
            nn.Linear(8, 8),
        )
        self.layers = nn.ModuleList([one, other, one, one])

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.fast
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_a_block_with_several_names_is_offloaded_whenever_it_runs(recompute: str) -> None:
    """The control: compressed to eight bits the gradients change, so the policy acts on such a block."""

    def grads(kept: str) -> list[Tensor]:
        model = wrapped(recompute, kind=Repeated)
        if kept != "keep":
            apply_activations(model, sharding_table(model), kept)
        return trained(model)

    assert same(grads("offload"), grads("keep"))
    assert not same(grads("int8"), grads("keep"))


class Chained(Repeated):
    """Each block gets what the one before it returns, so with ``recompute = "sqrt"`` they are in groups."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.fast
@pytest.mark.parametrize("recompute", ["block", "sqrt", "attention", "selective", 0.5])
def test_a_block_with_several_names_is_computed_again_whenever_it_ran(recompute: str | float) -> None:
    """A group of ``sqrt`` had it once for each name, and the gradients were those of another function."""
    assert same(trained(wrapped(recompute, kind=Chained)), trained(wrapped("none", kind=Chained)))


@pytest.mark.fast
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_compressed_blocks_keep_a_quarter(kept: str, recompute: str) -> None:
    assert a_layer(kept, recompute) <= 0.26 * a_layer("keep", recompute)
    pairs = zip(
        trained(with_activations(kept, recompute)), trained(with_activations("keep", recompute)), strict=True
    )
    assert 0 < max((ours - plain).norm() / plain.norm() for ours, plain in pairs) < 0.06


def restored(kept: str, values: Tensor) -> Tensor:
    restore = activations._FORMATS[kept](values)
    assert restore is not None
    return restore().float()


@pytest.mark.fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compressed_number_is_within_half_a_step(dtype: torch.dtype) -> None:
    """The step of int8 is that of the number's row; fp8 has three bits after the first.  -inf stays, whatever
    else is in its row.
    """
    torch.manual_seed(0)
    values = (torch.randn(1000) * torch.logspace(-3, 3, 1000)).to(dtype)
    exact = values.clone().float()
    values[10] = values[: activations.ROW] = -torch.inf
    values[300:400] = -torch.inf
    masked = values == -torch.inf
    exact[masked] = 0
    for kept in ("int8", "fp8"):
        assert torch.equal(restored(kept, values) == -torch.inf, masked)
    largest = torch.stack([row.abs().max() for row in exact.split(activations.ROW)]).repeat_interleave(
        activations.ROW
    )[:1000]
    error = (restored("int8", values) - exact).masked_fill(masked, 0).abs()
    assert (error <= largest * (1 / 254 + torch.finfo(dtype).eps)).all()
    error = (restored("fp8", values) - exact).masked_fill(masked, 0).abs()
    assert (error <= 2**-4 * exact.abs() + 2**-16 * exact.abs().max()).all()


@pytest.mark.fast
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    values = torch.ones(1000)
    values[500] = bad
    assert not restored("int8", values)[500].isfinite() and not restored("fp8", values).isfinite().any()


@pytest.mark.fast
def test_memory_with_gaps_is_not_compressed() -> None:
    """Anything that a kernel left in the gaps would decide about scales."""
    assert activations._FORMATS["int8"](torch.ones(4, 4)[:, :3]) is None


@pytest.mark.fast
def test_what_is_changed_in_place_is_refused() -> None:
    """Autograd refuses it too, unless hooks are there."""

    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).mul_(2)
            return x

    for kept in ("keep", "offload"):
        model = Doubling()
        if kept != "keep":
            apply_activations(model, sharding_table(model), kept)
        with pytest.raises(
            RuntimeError, match=r"(the backward pass needs its old values|needed for gradient computation)"
        ):
            model(torch.ones(4, 8, requires_grad=True)).sum().backward()


class Again(nn.Module):
    """A block that keeps memory for a result that nobody uses, changes it, and keeps it again."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.sin()
        y.mul_(3)
        return y * y


@pytest.mark.fast
@pytest.mark.parametrize("kept", ["int8", "fp8"])
def test_memory_that_is_changed_between_two_uses_is_kept_twice(kept: str) -> None:
    """Autograd allows that, since the backward pass needs the changed values alone.  The gradient of (6x)² is
    72x.
    """
    model = nn.Module()
    model.layers = nn.ModuleList([Again()])
    apply_activations(model, sharding_table(model), kept)
    x = torch.full((32, 32), 0.5, requires_grad=True)
    model.layers[0](x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 36.0), rtol=0.05, atol=0.0)


# torch's own, while it compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch's compiler, about torch
@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_compiled_blocks_too(recompute: str) -> None:
    wanted, moved, rounded = (
        trained(with_activations(kept, recompute, compiles=True)) for kept in ("keep", "offload", "int8")
    )
    assert same(moved, wanted) and not same(rounded, wanted)
