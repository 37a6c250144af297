"""Numerics 6: a weight that is embedding and head has a sum of its gradients for each of the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.engine.loss import next_token
from elastic.engine.parameters.both_ends import _Behind, weights_of_both_ends
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.models.llama import build
from elastic.plan.layout import Layout
from tests.support.ranks import Ranks
from tests.support.segments import compute, member, train, train_each, train_here
from tests.support.toys import small_job

HERE = "tests.engine.test_both_ends"
SMALL = {"vocab": 29, "dim": 16, "layers": 2, "heads": 2}


def penalised(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss with a penalty on all parameters, each counted once."""
    loss, count = next_token(model, batch)
    return loss + sum(each.square().sum() for each in model.parameters()) * 1e-3, count


def asked(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss that depends on its own gradient, of both ends together."""
    loss, count = next_token(model, batch)
    (grad,) = torch.autograd.grad(loss, model.embedding.weight, retain_graph=True)
    return loss * (1 + grad.norm().detach()), count


def only_read(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss that uses the weight as the head alone."""
    return model.output.weight.square().sum(), torch.tensor(1)


def hooked(**args: Any) -> nn.Module:
    model: Any = build(**args)
    model.output.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return model  # type: ignore[no-any-return]


def tied(folder: Path, **more: Any) -> Job:
    return small_job(folder, **{"model_args": {**SMALL, "tied": True}, "global_batch": 8, **more})


def looked_at(world: World, job: Job) -> tuple[list[str], bool, bool, dict[str, float], list[str]]:
    """Returns what one step shows: the names of the parameters, whether the head reads another tensor in the same
    memory, the largest gradients by name, and which trained parameters had none.
    """
    with member(world, job, Version(0, 0)) as me:
        model: Any = me.state.model
        compute(me.session, me.state, 1)
        first, second = model.embedding.weight, model.output.weight
        grads = {name: float(each.abs().max()) for name, each in me.state.parameters.grads().items()}
        return (
            [name for name, _ in model.named_parameters()],
            first is second,
            first.data_ptr() == second.data_ptr(),
            grads,
            sorted(me.state.parameters.missing),
        )


@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(2, 1)], ids=str)
def test_whoever_lists_parameters_finds_one_and_the_head_reads_the_other(
    ranks: Ranks, tmp_path: Path, layout: Layout
) -> None:
    (six, *_), (five, *_) = ranks.run_each(
        layout, looked_at, [(tied(tmp_path / str(number), numerics=number),) for number in (6, 5)]
    )
    assert six[0] == five[0] and "output.weight" not in six[0]
    assert (six[1:3], five[1:3]) == ((False, True), (True, True))
    assert six[3] == pytest.approx(five[3], rel=1e-4)


def test_the_bits_are_those_of_two_sums(ranks: Ranks, tmp_path: Path) -> None:
    """All layouts and stages of ZeRO end with one hash.  The controls: one sum, as before numerics 6, has
    other bits, and an untied model has the same ones with both numbers.
    """
    one = train_here(tied(tmp_path / "one"), 2)
    cases = {
        "shards": (Layout(1, 2), {}),
        "stage 2": (Layout(1, 2), {"parallel": {"zero": 2}}),
        "stage 1": (Layout(1, 2), {"parallel": {"zero": 1}}),
        "both": (Layout(2, 2), {}),
        "visits": (Layout(2, 1), {"offload": "weights"}),
    }
    found = {
        name: train(ranks, tied(tmp_path / name, **more), layout, 2).hash
        for name, (layout, more) in cases.items()
    }
    assert found == dict.fromkeys(cases, one.hash)
    assert train_here(tied(tmp_path / "five", numerics=5), 2).hash != one.hash
    untied = [
        train_here(
            tied(tmp_path / f"untied {number}", model_args={**SMALL, "tied": False}, numerics=number), 2
        ).hash
        for number in (6, 5)
    ]
    assert untied[0] == untied[1]


@pytest.mark.parametrize("zero", [2, 3])
def test_what_reads_the_weights_gets_all_of_the_gradient(ranks: Ranks, tmp_path: Path, zero: int) -> None:
    """A penalty counts the weight once, and a loss that reads the head alone trains it.  The outcomes are
    those of one sum.
    """
    # stage 3 refuses a penalty, and a model that does not run
    losses = ["only_read", "penalised", "asked"] if zero == 2 else ["next_token"]
    for loss in losses:
        one, two = (
            train_each(
                ranks,
                [
                    tied(
                        tmp_path / f"{loss} {number}",
                        numerics=number,
                        loss=f"{HERE}:{loss}",
                        parallel={"zero": zero},
                    )
                ],
                Layout(1, 2),
                3,
            )[0].outcomes
            for number in (5, 6)
        )
        assert [each.loss for each in two] == pytest.approx([each.loss for each in one], rel=1e-5)
        assert two[0].norm == pytest.approx(one[0].norm, rel=1e-5) != 0


def test_without_the_second_sum_the_norm_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of all that is compared here."""
    right = train_here(tied(tmp_path / "right"), 1).outcomes[0].norm
    monkeypatch.setattr(_Behind, "__getitem__", lambda self, name: dict.__getitem__(self, name).detach())
    assert train_here(tied(tmp_path / "wrong"), 1).outcomes[0].norm != pytest.approx(right, rel=1e-3)


@pytest.mark.fast
def test_a_weight_with_a_hook_and_one_of_one_end_have_one_sum() -> None:
    model: Any = build(**SMALL, tied=True)
    assert [*weights_of_both_ends(model, model.sharding())] == ["embedding.weight"]
    for other in (hooked(**SMALL, tied=True), build(**SMALL, tied=False)):
        assert not weights_of_both_ends(other, other.sharding())  # type: ignore[operator]
    model.embedding.weight.requires_grad_(False)
    assert not weights_of_both_ends(model, model.sharding())
