"""Blocks compute again what they do not keep for the backward pass, and nothing but memory and work changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.engine import memory
from elastic.engine.memory import apply_recompute
from elastic.engine.parallelize import sharding_table
from elastic.models.llama import build
from elastic.plan.layout import Layout
from tests.support.ranks import Ranks
from tests.support.segments import Trained, train
from tests.support.toys import toy_job
from tests.support.worlds import STEPS

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


def measured(policy: str, layers: int = 4) -> tuple[int, Counter[Any], Counter[Any], list[Tensor]]:
    """Returns the bytes that the blocks of a model with dropout keep, the operations of forward and of backward, and the gradients."""
    torch.manual_seed(3)
    model = build(vocab=17, dim=DIM, layers=layers, heads=4, dropout=0.1)
    model.init_weights()  # type: ignore[operator]
    apply_recompute(model, sharding_table(model), policy)
    watch = Watch(model)
    with watch:
        loss = model(torch.arange(2 * SEQ).view(2, SEQ) % 17).square().sum()
        kept, forward = watch.living(), Counter(watch.ran)
        loss.backward()
    return kept, forward, watch.ran - forward, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def a_layer(policy: str) -> float:
    """Returns the bytes that one more layer keeps."""
    return (measured(policy, 8)[0] - measured(policy, 4)[0]) / 4


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


@pytest.mark.fast
def test_selective_computes_no_product_again() -> None:
    """Neither a matrix product nor attention runs in the backward pass, and the elementwise work does."""
    _, _, plain, _ = measured("none")
    _, _, again, _ = measured("selective")
    more = again - plain
    assert not [operation for operation in more if operation in memory.KEPT]
    assert more[torch.ops.aten.silu.default] == 4


@pytest.mark.fast
@pytest.mark.parametrize("policy", ["block", "selective"])
def test_gradients_have_the_same_bits(policy: str) -> None:
    """The model has dropout.  The control: other random numbers give other gradients."""
    for ours, plain in zip(measured(policy)[3], measured("none")[3], strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.fast
def test_without_the_seed_of_dropout_the_gradients_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    kept: Callable[..., Any] = memory.checkpoint
    monkeypatch.setattr(memory, "checkpoint", lambda *args, **more: kept(*args, preserve_rng_state=False, **more))
    found = zip(measured("block")[3], measured("none")[3], strict=True)
    assert not all(torch.equal(ours, plain) for ours, plain in found)


@pytest.mark.parametrize("layout", [Layout(1, 2), Layout(2, 1)], ids=str)
@pytest.mark.parametrize("policy", ["block", "selective"])
def test_worlds_end_with_the_bits_of_the_run_that_keeps_everything(
    ranks: Ranks, reference: Trained, tmp_path: Path, layout: Layout, policy: str
) -> None:
    """Promise 1."""
    assert train(ranks, toy_job(tmp_path, recompute=policy), layout, STEPS).hash == reference.hash
