"""Blocks compute again what they do not keep for the backward pass, and nothing but memory and work changes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.engine import recomputation as memory
from elastic.engine import recomputed_groups as groups
from elastic.engine.blocks import sharding_table
from elastic.engine.compile import apply_compile
from elastic.engine.recomputation import apply_recompute
from elastic.engine.recomputed_groups import apply_groups
from elastic.engine.world import World
from elastic.errors import ModelError
from elastic.ids import Version
from elastic.models.llama import build
from tests.support.segments import member
from tests.support.toys import Own, small_job

SEQ, DIM = 64, 64


class Watch(TorchDispatchMode):
    """Counts operations, and knows which of the memory that they made still lives."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.before = {StorageWeakRef(each.untyped_storage()) for each in model.parameters()}
        self.made, self.ran = dict[StorageWeakRef, int](), Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ran[func] += 1
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor):
                self.made[StorageWeakRef(each.untyped_storage())] = each.untyped_storage().nbytes()
        return out

    def living(self) -> int:
        return sum(size for ref, size in self.made.items() if not ref.expired() and ref not in self.before)


def wrapped(
    policy: str | float, layers: int = 4, kind: Callable[..., nn.Module] = build, **args: Any
) -> nn.Module:
    """Returns a model with dropout under ``policy``, in which the generator of random numbers is as it was
    before.
    """
    torch.manual_seed(3)
    model = kind(**{"vocab": 17, "dim": DIM, "layers": layers, "heads": 4, "dropout": 0.1} | args)
    model.init_weights()  # type: ignore[operator]
    if policy != "none":
        apply_recompute(model, sharding_table(model), policy)
    if policy == "sqrt":
        apply_groups(model, sharding_table(model))
    return model


def compiled(policy: str, *, forward_alone: bool = False) -> nn.Module:
    model = wrapped(policy)
    apply_compile(model, sharding_table(model), forward_alone=forward_alone)
    return model


def measured(
    policy: str | float, layers: int = 4, kind: Callable[..., nn.Module] = build
) -> tuple[int, Counter[Any], Counter[Any], list[Tensor]]:
    """Returns the bytes that the blocks of a model with dropout keep, the operations of forward and of
    backward, and the gradients.
    """
    model = wrapped(policy, layers, kind)
    watch = Watch(model)
    with watch:
        loss = model(torch.arange(2 * SEQ).view(2, SEQ) % 17).square().sum()
        kept, forward = watch.living(), Counter(watch.ran)
        loss.backward()
    return kept, forward, watch.ran - forward, grads_of(model)


def grads_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def trained(model: nn.Module) -> list[Tensor]:
    """Returns the gradients of one forward and backward pass."""
    torch.manual_seed(5)
    model(torch.arange(2 * SEQ).view(2, SEQ) % 17).square().sum().backward()
    return grads_of(model)


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(ours, plain) for ours, plain in zip(found, wanted, strict=True))


def a_layer(policy: str) -> float:
    """Returns the bytes that one more layer keeps."""
    return (measured(policy, 8)[0] - measured(policy, 4)[0]) / 4


@pytest.mark.fast
@pytest.mark.parametrize("policy", ["block", "sqrt", "attention", "selective", 0.5])
def test_a_block_whose_forward_was_replaced_computes_that(policy: str | float) -> None:
    """Libraries replace ``forward`` of single modules.  The control: the forward of the class gives other
    gradients.
    """

    def doubled(replace: bool = True, **args: Any) -> nn.Module:
        model = build(**args)
        for block in model.layers if replace else ():
            block.forward = partial(_twice, block.forward)
        return model

    assert same(trained(wrapped(policy, kind=doubled)), trained(wrapped("none", kind=doubled)))
    assert not same(trained(wrapped("none", kind=doubled)), trained(wrapped("none")))


def _twice(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    return 2 * forward(*args, **kwargs)


@pytest.mark.fast
def test_a_block_keeps_its_input_alone() -> None:
    """Bytes a layer, from live storages: about the input, and the seed of dropout.  Selective is between."""
    everything, selective, block = (a_layer(policy) for policy in ("none", "selective", "block"))
    state = 2 * torch.get_rng_state().numel()
    assert 2 * SEQ * DIM * 4 <= block <= 2 * SEQ * DIM * 4 + state
    assert block < selective < 0.8 * everything


@pytest.mark.fast
def test_the_forward_pass_runs_twice() -> None:
    """Every matrix product of the blocks, and nothing of the rest of the model."""
    _, forward, plain, _ = measured("none")
    _, _, again, _ = measured("block")
    product = torch.ops.aten.mm.default
    assert again[product] - plain[product] == forward[product] - 1, "the head is not in a block"


def heavy(ran: Counter[Any]) -> Counter[str]:
    """Returns the matrix products, convolutions and attention kernels among operations, by their names."""
    return Counter(
        {
            str(each): number
            for each, number in ran.items()
            if re.search(r"mm|mv|conv|attention|linear", str(each))
        }
    )


class Plain(nn.Module):
    """A model whose blocks have norms, GELU, convolutions, dropout and attention of torch."""

    def __init__(self, layers: int, **_: Any) -> None:
        super().__init__()
        self.embedding, self.layers = (
            nn.Embedding(17, DIM),
            nn.ModuleList(PlainBlock() for _ in range(layers)),
        )

    def init_weights(self) -> None:
        """The weights are those of the constructor, after a seed."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), nn.MultiheadAttention(DIM, 4, batch_first=True)
        self.mixed = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.wide, self.narrow, self.dropout = (
            nn.Linear(DIM, 4 * DIM),
            nn.Linear(4 * DIM, DIM),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0] + self.mixed(y.transpose(1, 2)).transpose(1, 2)
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.norm(x)))))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kind", "again_at_least"),
    [(build, {"silu": 4, "rsqrt": 8}), (Plain, {"gelu": 4, "native_layer_norm": 8})],
)
def test_selective_computes_no_product_again(
    kind: Callable[..., nn.Module], again_at_least: dict[str, int]
) -> None:
    """F2: neither a matrix product nor attention runs in the backward pass, while norms, activation functions
    and dropout do.  The gradients have the same bits, and bytes are between those of ``none`` and ``block``.
    The control: ``block`` runs products again.
    """
    kept, _, plain, wanted = measured("none", 4, kind)
    less, _, again, found = measured("selective", 4, kind)
    least, _, all_again, _ = measured("block", 4, kind)
    more = {str(operation): number for operation, number in (again - plain).items()}
    assert not heavy(again - plain) and heavy(all_again - plain)
    for name, number in {**again_at_least, "bernoulli_": 4}.items():
        assert (
            sum(times for operation, times in more.items() if operation.startswith(f"aten.{name}.")) >= number
        ), more
    assert same(found, wanted)
    assert least < less < 0.8 * kept


# torch's own, while it compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch's compiler, about torch
def test_compiled_blocks_compute_no_product_again_either() -> None:
    """F2: of blocks that are split for the compiler and run as they are.  The control is ``block``."""
    found = {}
    for policy in ("none", "selective", "block"):
        torch.compiler.reset()
        model = wrapped(policy, 2)
        apply_compile(model, sharding_table(model), backend="aot_eager_decomp_partition")
        trained(model)  # what runs while blocks are compiled does not count
        with Running() as watch:
            loss = model(torch.arange(2 * SEQ).view(2, SEQ) % 17).square().sum()
            forward = Counter(watch.ran)
            loss.backward()
        found[policy] = heavy(watch.ran - forward)
    torch.compiler.reset()
    assert found["selective"] == found["none"] != found["block"]


class Running(Watch):
    """Counts what compiled code runs, too."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__(nn.Module())

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True


@pytest.mark.fast
@pytest.mark.parametrize("part", [0.1, 0.3, 0.5, 0.75, 0.99])
def test_a_budget_is_kept(part: float) -> None:
    """F1: bytes go at least the asked part of the way from ``none`` to ``block``, and would not with one
    block fewer.  That many blocks run twice.  The gradients have the same bits.
    """
    (none, _, once, wanted), (block, *_) = measured("none", 7), measured("block", 7)
    kept, _, again, found = measured(part, 7)
    budget, a_block = none - part * (none - block), (none - block) / 7
    twice = math.ceil(part * 7)
    assert budget - a_block < kept <= budget < kept + a_block
    assert heavy(again - once)["aten.mm.default"] == 7 * twice
    assert same(found, wanted)


@pytest.mark.fast
def test_blocks_of_a_budget_are_spread() -> None:
    """Their number is rounded up.  Stretches of blocks that are equally long have equally many of them, or
    one more or less.
    """
    for count in range(1, 40):
        names = [f"layers.{n}" for n in range(count)]
        for hundredths in range(1, 100):
            chosen = memory.spread(names, hundredths / 100)
            assert len(chosen) == -(-hundredths * count // 100)
            assert names[-1] not in chosen or chosen == names
            sums = [0, *accumulate(name in chosen for name in names)]
            for length in {2, 3, count // 2, count - 1} & set(range(1, count)):
                found = {sums[n + length] - sums[n] for n in range(count - length + 1)}
                assert max(found) - min(found) <= 1, (count, hundredths, chosen)


@pytest.mark.fast
def test_attention_alone_is_computed_again() -> None:
    """F2: what runs again is what attention by itself runs; linear layers are kept.  Bytes are between those
    of ``none`` and ``block``.
    """
    (kept, _, plain, _), (less, _, again, _) = measured("none"), measured("attention")
    q = torch.ones(2, SEQ, 4, DIM // 4, requires_grad=True).transpose(1, 2)
    with Watch(nn.Module()) as alone:
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1, is_causal=True)
    more = again - plain
    assert {operation for operation in more if operation is not torch.ops.aten.detach.default} <= {*alone.ran}
    assert more[torch.ops.aten._safe_softmax.default] == 4
    assert measured("block")[0] < less <= kept - 4 * 2 * 4 * SEQ * SEQ * 4, (
        "at least one square for each head"
    )


@pytest.mark.fast
def test_a_pass_in_inference_mode_is_possible() -> None:
    model = wrapped("block").eval()
    with torch.inference_mode():
        found = model(torch.zeros(1, 4, dtype=torch.long))
    assert torch.equal(found, model(torch.zeros(1, 4, dtype=torch.long)))


@pytest.mark.parametrize("layers", [16, pytest.param(64, marks=pytest.mark.full)])
def test_groups_of_blocks_keep_one_input_each(layers: int) -> None:
    """F1: bytes, from live storages: √L inputs for L = 4, 16, 64 blocks, where single blocks keep L, and
    without a policy L times all that a block keeps.  Single blocks run twice, and all but the last one of a
    group three times.  The gradients have the same bits.
    """
    none, _, plain, kept_all = measured("none", layers)
    (block, _, once, wanted), (sqrt, _, twice, found) = measured("block", layers), measured("sqrt", layers)
    a_block = (measured("none", 4)[0] - measured("block", 4)[0]) / 4
    assert none - block == pytest.approx(layers * a_block, rel=0.01) and a_block > 10 * (block / layers)
    size, root = 2 * SEQ * DIM * 4, math.isqrt(layers)
    assert sqrt - measured("sqrt", 4)[0] == (root - 2) * size
    assert block - measured("block", 4)[0] == pytest.approx((layers - 4) * size, rel=0.01)
    product = torch.ops.aten.mm.default
    assert once[product] - plain[product] == 7 * layers
    assert twice[product] - once[product] == 7 * (layers - root)
    assert same(found, wanted) and same(wanted, kept_all)


class Halving(nn.Module):
    """Changes what blocks return before the next one gets it: into something new, or where it is."""

    def __init__(self, layers: int, where_it_is: bool, **_: Any) -> None:
        super().__init__()
        self.where_it_is, self.embedding, self.head = where_it_is, nn.Embedding(17, 8), nn.Linear(8, 17)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(layers)
        )

    def init_weights(self) -> None:
        """The weights are those of the constructor, after a seed."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
            x = x.mul_(0.5) if self.where_it_is else x * 0.5
        return self.head(x)


@pytest.mark.fast
@pytest.mark.parametrize("where_it_is", [True, False])
def test_a_block_with_another_input_begins_a_group(
    monkeypatch: pytest.MonkeyPatch, where_it_is: bool
) -> None:
    """The control: groups that go on all the same give other gradients."""
    plain, ours, wrong = (
        trained(wrapped(policy, 4, Halving, where_it_is=where_it_is)) for policy in ("none", "sqrt", "none")
    )
    assert same(ours, plain) and same(wrong, plain)
    monkeypatch.setattr(groups._Values, "__ne__", lambda *_: False)
    assert not same(trained(wrapped("sqrt", 4, Halving, where_it_is=where_it_is)), plain)


class Adding(nn.Module):
    """Blocks get a tensor by name or by place, and add to it where it is, or make a new one."""

    def __init__(self, layers: int, where_it_is: bool, named: bool, **_: Any) -> None:
        super().__init__()
        self.named, self.embedding, self.head = named, nn.Embedding(17, 8), nn.Linear(8, 17)
        self.layers = nn.ModuleList(AddingBlock(where_it_is) for _ in range(layers))

    def init_weights(self) -> None:
        """The weights are those of the constructor, after a seed."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x=x) if self.named else layer(x)
        return self.head(x)


class AddingBlock(nn.Module):
    def __init__(self, where_it_is: bool) -> None:
        super().__init__()
        self.where_it_is, self.bias, self.layer = where_it_is, nn.Parameter(torch.randn(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.add_(self.bias) if self.where_it_is else x + self.bias
        return x + torch.tanh(self.layer(x))


@pytest.mark.fast
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("policy", ["block", "sqrt", "selective", 0.5])
def test_a_block_that_changes_what_it_gets_is_refused(policy: str | float, named: bool) -> None:
    """It would run again from what it has changed; of what it gets by name torch does not say so, and
    gradients were others.

    The controls: without a policy it trains, and in place of a change something new has the same gradients
    with all.
    """
    plain, new, again = (
        trained(wrapped(each, 4, Adding, where_it_is=each == "none" and number == 0, named=named))
        for number, each in enumerate(("none", "none", policy))
    )
    assert same(plain, new) and same(again, new)
    with pytest.raises(
        ModelError,
        match=(r"AddingBlock changes an argument in place.* set recompute = 'none'"),
    ):
        trained(wrapped(policy, 4, Adding, where_it_is=True, named=named))


class Rectified(Own):
    """Each block changes the result of a matrix product in place, or makes a new tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        for layer in self.layers:
            layer[2] = nn.ReLU(inplace=in_place)


def test_a_kept_result_that_is_changed_in_place_ends_the_step_with_what_to_do(tmp_path: Path) -> None:
    """F2.  The controls: the same with ``block``, and a model that makes a new tensor, have the bits of one
    that keeps everything.
    """

    def last(in_place: bool, recompute: str) -> Tensor:
        args = {"model": f"{__name__}:Rectified", "model_args": {"in_place": in_place}}
        world = World.alone(torch.device("cpu"))
        try:
            with member(world, small_job(tmp_path, recompute=recompute, **args), Version(0, 0)) as me:
                me.step()
                return me.state.shard.values["parameter", "head.weight"].clone()
        finally:
            world.close()

    plain = last(True, "none")
    assert torch.equal(last(True, "block"), plain) and torch.equal(last(False, "selective"), plain)
    with pytest.raises(RuntimeError, match="mutated") as wrong:
        last(True, "selective")
    assert "set recompute = 'block' or 'none', or inplace=False" in wrong.value.__notes__[-1]


@pytest.mark.fast
def test_without_the_random_numbers_of_a_group_the_gradients_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the tests of groups: they draw other ones when they run again."""
    fixed = torch.get_rng_state()
    monkeypatch.setattr(groups, "_generators", lambda _: (fixed, [], []))
    assert not same(trained(wrapped("sqrt")), trained(wrapped("none")))


# torch's own, while it compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch's compiler, about torch
@pytest.mark.full
def test_compiled_blocks_recompute_attention_and_form_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients are those of compiled blocks that keep everything, and half of the blocks of groups keep
    no input.
    """
    wanted, found = (trained(compiled(policy)) for policy in ("none", "attention"))
    assert same(found, wanted)
    again = []
    of = groups._Group.input_of
    monkeypatch.setattr(
        groups._Group, "input_of", lambda group, number: again.append(number) or of(group, number)
    )
    model = compiled("block", forward_alone=True)
    apply_groups(model, sharding_table(model))
    assert same(trained(model), wanted) and sorted(again) == [0, 0, 1, 1]


@pytest.mark.fast
@pytest.mark.parametrize("policy", ["block", "sqrt", "attention", "selective", 0.5])
def test_gradients_have_the_same_bits(policy: str | float) -> None:
    """A8: the model has dropout, and its mask is the same when a block is computed again.  The next test is
    the control.
    """
    assert same(measured(policy)[3], measured("none")[3])


@pytest.mark.fast
def test_without_the_seed_of_dropout_the_gradients_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A8: negative control of the test above."""
    kept: Callable[..., Any] = memory.checkpoint
    monkeypatch.setattr(
        memory, "checkpoint", lambda *args, **more: kept(*args, preserve_rng_state=False, **more)
    )
    assert not same(measured("block")[3], measured("none")[3])
