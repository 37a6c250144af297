"""Schedule, clipping, and an optimizer that does not notice how its tensors are cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.engine.optim.adamw import ADAMW
from elastic.engine.optim.base import Optimizer, rule_of
from elastic.engine.optim.schedule import learning_rate, learning_rate_of
from elastic.job import Job
from elastic.protocol.commit_record import Outcome
from tests.support.toys import small_job

pytestmark = pytest.mark.fast

TOKENS = 48


def outcome(step: int, norm: float, *, finite: bool = True) -> Outcome:
    """Returns the outcome of a step whose mean gradient has ``norm``."""
    return Outcome(step, 1, (norm * TOKENS) ** 2, (1.0,), (TOKENS,), ((0,),), finite)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"matrix": torch.randn(11, 7, generator=draw), "vector": torch.randn(13, generator=draw)}


def optimizer(job: Job) -> Optimizer:
    return Optimizer(job, rule_of(job), tensors(0), dict.fromkeys(tensors(0), ()), frozenset({"matrix"}))


def job(**optim: float) -> Job:
    return small_job("/nowhere", schedule={"warmup_steps": 2}, optim={"lr": 1e-2, **optim})


# ---- schedule: A5


def long(step: int, kind: str = "cosine", warmup: int = 2000) -> float:
    """Returns the learning rate in a run of 10,000 steps with a peak of 3e-4."""
    return learning_rate(step, steps=10_000, peak=3e-4, warmup=warmup, final=0.1, kind=kind)


def test_learning_rate_is_exact_at_its_corners() -> None:
    """A5: lr(0) = 0, lr(warmup) = max, lr(end) = 0.1 × max."""
    assert long(0) == 0.0
    assert long(1000) == 1.5e-4
    assert long(2000) == 3e-4
    assert long(10_000) == 0.1 * 3e-4
    assert long(9000, "constant") == 3e-4
    assert long(1, "constant", warmup=0) == 3e-4


def test_learning_rate_over_the_whole_curve() -> None:
    """A5: every step of 10,000 equals the formula as numpy computes it; up, then down, never outside."""
    steps = np.arange(10_001)
    progress = (steps - 2000) / 8000
    formula = np.where(
        steps < 2000, 3e-4 * steps / 2000, 3e-4 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * progress)))
    )
    curve = [long(int(step)) for step in steps]
    np.testing.assert_allclose(curve, formula, rtol=1e-14)
    assert all(a < b for a, b in pairwise(curve[:2001])) and all(a > b for a, b in pairwise(curve[2000:]))


def test_warmup_stable_decay() -> None:
    """A5: up to the maximum, there until the last 1,000 steps, then straight down to 0.1 × the maximum."""
    curve = [
        learning_rate(step, steps=10_000, peak=3e-4, warmup=2000, final=0.1, kind="wsd", decay=1000)
        for step in range(10_001)
    ]
    assert curve[:2001] == [long(step) for step in range(2001)] and set(curve[2000:9001]) == {3e-4}
    np.testing.assert_allclose(curve[9000:], np.linspace(3e-4, 0.1 * 3e-4, 1001), rtol=1e-12)


def test_the_cosine_is_torchs() -> None:
    """A5, independent judge: torch's warmup and cosine, chained."""
    peak, warmup, steps = 3e-4, 20, 100
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(inner, steps - warmup, eta_min=0.1 * peak)
    for step in range(warmup, steps + 1):
        expected = inner.param_groups[0]["lr"]
        assert learning_rate(
            step, steps=steps, peak=peak, warmup=warmup, final=0.1, kind="cosine"
        ) == pytest.approx(expected, rel=1e-9)
        inner.step()
        cosine.step()


@given(st.integers(1, 50), st.data())
def test_a_job_without_room_for_a_cosine(steps: int, data: st.DataObject) -> None:
    """Warmup to the very end, or none: the rate is defined everywhere, 0 < lr ≤ max, and lr = max at the end
    of warmup.
    """
    warmup = data.draw(st.integers(0, steps))
    curve = [
        learning_rate(step, steps=steps, peak=1.0, warmup=warmup, final=0.1, kind="cosine")
        for step in range(1, steps + 1)
    ]
    assert all(0.0 < rate <= 1.0 for rate in curve)
    assert warmup == 0 or curve[warmup - 1] == 1.0


# ---- clipping: A7


@pytest.mark.parametrize("norm", [0.25, math.nextafter(1.0, 0.0), 1.0])
def test_a_gradient_within_the_norm_is_untouched(norm: float) -> None:
    """A7: up to clip_norm the gradient that is applied is bitwise the mean, and the update is that of a job
    that never clips.
    """
    grads, free = tensors(1), tensors(1)
    clipping, never = optimizer(job(clip_norm=1.0)), optimizer(job(clip_norm=1e30))
    clipping.apply(grads, outcome(1, norm))
    never.apply(free, outcome(1, norm))
    for name, whole in tensors(1).items():
        assert torch.equal(grads[name], whole / TOKENS)
        assert torch.equal(clipping.parts[name].values, never.parts[name].values)


def test_a_gradient_above_the_norm_is_rescaled_to_it() -> None:
    """A7: it is rescaled to clip_norm, in its own direction; torch's own clipping is the judge.  Negative
    control of the test above.
    """
    grads, judged = tensors(1), [torch.nn.Parameter(torch.zeros_like(value)) for value in tensors(1).values()]
    for parameter, whole in zip(judged, tensors(1).values(), strict=True):
        parameter.grad = whole / TOKENS
    norm = torch.nn.utils.clip_grad_norm_(judged, 0.05).item()
    assert norm > 0.05
    optimizer(job(clip_norm=0.05)).apply(grads, outcome(1, norm))
    for parameter, found in zip(judged, grads.values(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-5, atol=0)
        assert not torch.equal(found, torch.zeros_like(found))
    assert torch.nn.utils.get_total_norm(list(grads.values())).item() == pytest.approx(0.05, rel=1e-5)


def test_a_step_that_is_not_finite_changes_nothing_but_the_step() -> None:
    mine = optimizer(job())
    mine.apply(tensors(1), outcome(1, 0.5))
    before = [value.clone() for value in state(mine)]
    mine.apply(
        {name: value * float("nan") for name, value in tensors(2).items()},
        outcome(2, float("nan"), finite=False),
    )
    assert all(torch.equal(a, b) for a, b in zip(before, state(mine), strict=True))


# ---- pieces


def state(mine: Optimizer) -> list[torch.Tensor]:
    return [
        mine.updates,
        *(value for part in mine.parts.values() for value in (part.values, *part.moments.values())),
    ]


def trained(cuts: Sequence[int], steps: int = 3) -> list[torch.Tensor]:
    """Trains a tensor of 1,003 elements, cut at ``cuts``, and returns parameter and moments, joined again."""
    spans = list(pairwise((0, *cuts, 1003)))
    draw = torch.Generator().manual_seed(3)
    whole = torch.randn(1003, generator=draw)
    pieces = {f"{a:04}": whole[a:b].clone() for a, b in spans}
    mine = Optimizer(job(), ADAMW, pieces, dict.fromkeys(pieces, ()), frozenset(pieces))
    for step in range(1, steps + 1):
        grad = torch.randn(1003, generator=draw)
        mine.apply({f"{a:04}": grad[a:b].clone() for a, b in spans}, outcome(step, 2.0))
    parts = mine.parts.values()
    return [
        torch.cat(each)
        for each in (
            [part.values for part in parts],
            *([part.moments[kind] for part in parts] for kind in ADAMW.moments),
        )
    ]


@settings(max_examples=25)
@given(st.sets(st.integers(1, 1002), max_size=6).map(sorted))
def test_adamw_whole_or_in_pieces_of_odd_sizes(cuts: list[int]) -> None:
    """Parameter and both moments are equal bit for bit.  What a shard computes does not depend on where the
    shard begins or ends.
    """
    assert all(torch.equal(whole, pieces) for whole, pieces in zip(trained([]), trained(cuts), strict=True))


def test_adamw_is_torchs() -> None:
    """A4: three steps against torch.optim.AdamW, a tensor at a time, to 1e-7; one step fewer gives another
    result.
    """
    settings_ = job().optim
    draw = torch.Generator().manual_seed(3)
    judge = torch.nn.Parameter(torch.randn(1003, generator=draw))
    plain = torch.optim.AdamW(
        [judge], betas=settings_.betas, eps=settings_.eps, weight_decay=settings_.weight_decay, foreach=False
    )
    for step in range(1, 4):
        judge.grad = torch.randn(1003, generator=draw) / TOKENS / 2
        plain.param_groups[0]["lr"] = learning_rate_of(job(), step)
        plain.step()
    torch.testing.assert_close(trained([])[0], judge.detach(), rtol=0, atol=1e-7)
    assert not torch.allclose(trained([], steps=2)[0], judge.detach(), rtol=0, atol=1e-4)


DECAYS = {"matrix": job().optim.weight_decay, "vector": 0.0}


def state_of(judge: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns the values and moments of one of torch's, in the order of :func:`state`."""
    parameters = [group["params"][0] for group in judge.param_groups]
    return [
        each
        for p in parameters
        for each in (p.detach(), judge.state[p]["exp_avg"], judge.state[p]["exp_avg_sq"])
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_adamw_has_the_bits_of_torchs(dtype: torch.dtype) -> None:
    """A4: 30 steps of a matrix that decays and a vector that does not, against torch.optim.AdamW with
    ``foreach``: values and moments.

    The control: with another ``eps`` torch's has other values.
    """
    first, optim = {name: value.to(dtype) for name, value in tensors(0).items()}, job().optim
    mine = Optimizer(
        job(),
        ADAMW,
        {name: value.clone() for name, value in first.items()},
        dict.fromkeys(first, ()),
        frozenset({"matrix"}),
    )
    judges = []
    for eps in (optim.eps, 0.01):
        groups = [
            {"params": [torch.nn.Parameter(first[name].clone())], "weight_decay": decay}
            for name, decay in DECAYS.items()
        ]
        judges.append(torch.optim.AdamW(groups, betas=optim.betas, eps=eps, foreach=True))
    for step in range(1, 31):
        grads = {name: value.to(dtype) for name, value in tensors(step).items()}
        for judge in judges:
            for group, grad in zip(judge.param_groups, grads.values(), strict=True):
                group["lr"], group["params"][0].grad = learning_rate_of(job(), step), grad / TOKENS
            judge.step()
        mine.apply(grads, outcome(step, 0.5))
    assert all(torch.equal(*pair) for pair in zip(state(mine)[1:], state_of(judges[0]), strict=True))
    assert not torch.equal(state(mine)[1], state_of(judges[1])[0])
