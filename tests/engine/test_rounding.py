"""Moments in bfloat16: rounding is right on average, has the same bits however a tensor is cut, and lets
small changes through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic.engine.optim import adamw, rounding
from elastic.engine.optim.base import Hyper, Optimizer, Part, rule_of
from elastic.engine.optim.rounding import key_of, lines, portions, random_bits, round_
from elastic.engine.world import World
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import Outcome
from elastic.runs.run import Run
from storage.slices import Slice
from tests.support.carried import hash_after_healing
from tests.support.ranks import Ranks
from tests.support.segments import member, train_here
from tests.support.toys import small_job

STEPS = 4
SMALL = {"vocab": 29, "dim": 32, "layers": 1, "heads": 2, "dropout": 0.1}


def bf16_job(bucket: Path | str = "/nowhere", moments: str = "bf16", **optim: Any) -> Job:
    return small_job(
        bucket,
        model_args=SMALL,
        optim={"lr": 1e-2, "moments": moments, **optim},
        schedule={"kind": "constant"},
    )


@pytest.mark.fast
@given(st.data())
def test_a_kernel_finds_the_places_of_elements_by_three_numbers(data: st.DataObject) -> None:
    """The judge cuts the box out of a tensor that holds its own places.  A box that is cut along two later
    dimensions is left to torch.
    """
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    cuts = [
        sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape
    ]
    box = Slice("w", "parameter", tuple(a for a, _ in cuts), tuple(b for _, b in cuts))
    part = Part("w", (box,), torch.zeros(box.shape), {}, True, shape, False)
    expected = (
        torch.arange(torch.Size(shape).numel()).view(shape)[tuple(slice(a, b) for a, b in cuts)].flatten()
    )
    found, later = lines(part), sum((a, b) != (0, n) for (a, b), n in zip(cuts[1:], shape[1:], strict=True))
    assert (found is None) == (later > 1)
    if found is not None:
        ((rows, first, run, whole),) = found
        at = torch.arange(box.count)
        assert (rows.start, rows.stop) == (0, box.shape[0])
        assert torch.equal(first + at // run * whole + at % run, expected)


# ---- one number


def rounded(value: float, count: int = 1 << 16) -> Tensor:
    """Returns ``value`` rounded at each of ``count`` places."""
    found = torch.empty(count, dtype=torch.bfloat16)
    round_(found, torch.full((count,), value), torch.arange(count), (1, 2))
    return found.double()


@pytest.mark.fast
@pytest.mark.parametrize("value", [1.001, -1.001, 1 / 3, 1e-20, -3.999, 255.3])
def test_rounding_is_right_on_average(value: float) -> None:
    """Each result is one of the two neighbours, and the mean is within five standard errors.  The control:
    the nearest one is not.
    """
    found, exact = rounded(value), float(torch.tensor(value))
    nearest = float(torch.tensor(value).bfloat16())
    low, high = sorted(set(found.tolist()))
    assert low < exact < high and nearest in (low, high)
    assert high - low == pytest.approx(abs(exact) * 2**-7, rel=0.5), "they are neighbours"
    error = (high - low) / 2 / len(found) ** 0.5
    assert abs(float(found.mean()) - exact) < 5 * error < abs(nearest - exact)


@pytest.mark.fast
def test_what_is_in_bfloat16_stays() -> None:
    for value in (0.0, -0.0, 1.0, -2.5, float("inf"), 2.0**-133):
        found = rounded(value, 100)
        assert set(found.tolist()) == {value}
        assert torch.equal(found.signbit(), torch.full((100,), value).signbit())


@pytest.mark.fast
def test_the_bits_are_random() -> None:
    """Every bit is set in half of the places, and says nothing of its neighbours' bits, of another key's, or
    of those far away.
    """
    places = torch.arange(1 << 16)

    def bits(at: Tensor, key: tuple[int, int]) -> Tensor:
        return (random_bits(at, key)[:, None] >> torch.arange(16) & 1).double() * 2 - 1

    mine, error = bits(places, (1, 2)), len(places) ** -0.5
    assert set(random_bits(places, (1, 2)).tolist()) <= set(range(1 << 16))
    assert float(mine.mean(0).abs().max()) < 5 * error
    others = {
        "neighbours": mine.roll(1, 0),
        "another key": bits(places, (1, 3)),
        "yet another": bits(places, (0, 2)),
        "far away": bits(places + (1 << 33), (1, 2)),
    }
    for name, other in others.items():
        assert float((mine.T @ other / len(places)).abs().max()) < 6 * error, name
    assert float((mine.T @ mine / len(places)).abs().max()) == 1, "the control"


@pytest.mark.fast
def test_the_key_is_of_seed_step_name_and_moment() -> None:
    hyper = Hyper(bf16_job().optim, 0.1, torch.zeros(()), {}, 0.0, seed=1, step=5)
    keys = {
        key_of(each, name, moment)
        for each in (hyper, replace(hyper, seed=2), replace(hyper, step=6))
        for name in "ab"
        for moment in "mv"
    }
    assert len(keys) == 12 and key_of(hyper, "a", "m") == key_of(
        replace(hyper, updates=torch.ones(())), "a", "m"
    )


# ---- cuts

SHAPE = (23, 5, 3)


@pytest.mark.fast
@pytest.mark.parametrize("portion", [1, 40, 10**6])
def test_places_are_those_in_the_whole_tensor(monkeypatch: pytest.MonkeyPatch, portion: int) -> None:
    """Two boxes, which cut every dimension, a portion at a time."""
    monkeypatch.setattr(rounding, "PORTION", portion)
    whole = torch.arange(23 * 5 * 3).view(SHAPE)
    boxes = (Slice("w", "parameter", (2, 1, 0), (9, 4, 2)), Slice("w", "parameter", (20, 2, 1), (23, 5, 3)))
    expected = torch.cat([whole[tuple(map(slice, box.start, box.stop))] for box in boxes])
    part, found = (
        Part("w", boxes, expected.float(), {}, True, SHAPE, is_matrix=False),
        torch.full_like(expected, -1),
    )
    taken = list(portions(part))
    for rows, places in taken:
        found[rows] = places
    assert torch.equal(found, expected)
    assert len(taken) == {1: 10, 40: 3, 10**6: 2}[portion]


def gradients(steps: int) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(7)
    return (torch.randn(SHAPE, generator=draw) for _ in range(steps))


def trained(cuts: list[int], steps: int = 5, **optim: Any) -> list[Tensor]:
    """Trains a tensor that members hold rows of; returns values and moments, joined again."""
    found = []
    for first, last in pairwise((0, *cuts, SHAPE[0])):
        job, box = bf16_job(**optim), Slice("w", "parameter", (first, 0, 0), (last, *SHAPE[1:]))
        whole = next(gradients(1))
        mine = Optimizer(
            job, rule_of(job), {"w": whole[first:last].clone()}, {"w": (box,)}, frozenset({"w"}), {"w": SHAPE}
        )
        for step, grad in enumerate(gradients(steps), 1):
            mine.apply({"w": grad[first:last].clone()}, Outcome(step, 1, 0.25, (1.0,), (1,), ((0,),), True))
        part = mine.parts["w"]
        assert (
            all(moment.dtype == torch.bfloat16 for moment in part.moments.values())
            and part.values.dtype == torch.float32
        )
        found.append([part.values, *part.moments.values()])
    return [torch.cat(pieces) for pieces in zip(*found, strict=True)]


@pytest.mark.fast
@settings(max_examples=20, deadline=None)
@given(st.sets(st.integers(1, SHAPE[0] - 1), max_size=4).map(sorted))
def test_the_bits_do_not_depend_on_the_cuts(cuts: list[int]) -> None:
    assert all(torch.equal(whole, cut) for whole, cut in zip(trained([]), trained(cuts), strict=True))


@pytest.mark.fast
def test_places_in_the_slice_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    whole = trained([])

    def local(part: Part) -> Iterator[tuple[slice, Tensor]]:
        yield slice(None), torch.arange(part.values.numel()).view(part.values.shape)

    monkeypatch.setattr(adamw, "portions", local)
    assert all(torch.equal(a, b) for a, b in zip(whole, trained([]), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(whole, trained([9]), strict=True))


# ---- learning


def fitted(moments: str, steps: int) -> tuple[list[float], Tensor]:
    """Fits a matrix to noisy gradients of a quadratic form, which are ten times as large in the first 20
    steps.

    Returns the distances from the optimum, and the average of squares after the last step.
    """
    job = bf16_job(moments=moments, betas=(0.9, 0.999), weight_decay=0.0)
    draw = torch.Generator().manual_seed(11)
    goal = torch.randn(64, 32, generator=draw)
    box = Slice("w", "parameter", (0, 0), (64, 32))
    mine = Optimizer(job, rule_of(job), {"w": torch.zeros(64, 32)}, {"w": (box,)}, frozenset())
    distances = []
    for step in range(1, steps + 1):
        noisy = (mine.parts["w"].values - goal + torch.randn(64, 32, generator=draw) / 10) * (
            10 if step <= 20 else 1
        )
        mine.apply({"w": noisy}, Outcome(step, 1, 0.25, (1.0,), (1,), ((0,),), True))
        distances.append(float((mine.parts["w"].values - goal).norm()))
    return distances, mine.parts["w"].moments["exp_avg_sq"].double()


@pytest.mark.fast
def test_two_hundred_steps_are_near_those_with_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distance from the optimum is within 2 %, the average of squares within 1 %.

    Negative control: rounded to the nearest, nine of ten averages of squares stand still for 100 steps, and
    so does their mean.
    """
    (exact, squares), (found, rough) = (fitted(moments, 200) for moments in ("model", "bf16"))
    assert exact[-1] < 0.6 * exact[0]
    for a, b in zip(exact[20:], found[20:], strict=True):
        assert b == pytest.approx(a, rel=0.02)
    assert float(rough.mean()) == pytest.approx(float(squares.mean()), rel=0.01)
    assert float(fitted("model", 100)[1].mean()) > 1.05 * float(squares.mean()), "it falls"
    monkeypatch.setattr(adamw, "round_", lambda moment, values, places, key: moment.copy_(values))
    before, after = fitted("bf16", 100)[1], fitted("bf16", 200)[1]
    assert float((before == after).double().mean()) > 0.9
    assert float(after.mean()) == pytest.approx(float(before.mean()), rel=1e-3)


# ---- worlds


def held_bytes(world: World, job: Job) -> tuple[int, int]:
    """Returns the bytes of the live storages of all moments of this member, and of its parameters."""
    with member(world, job, Version(0, 0)) as me:
        me.step()
        parts = me.state.optimizer.parts.values()
        storages = {
            moment.untyped_storage().data_ptr(): moment.untyped_storage().nbytes()
            for p in parts
            for moment in p.moments.values()
        }
        return sum(storages.values()), sum(part.values.nbytes for part in parts)


def test_moments_take_half_the_bytes(ranks: Ranks, tmp_path: Path) -> None:
    """Counted from the storages of a member that has done a step.  The control: in the format of the model
    they take twice as many.
    """
    cases = [(bf16_job(tmp_path / moments, moments),) for moments in ("bf16", "model")]
    for factor, members in enumerate(ranks.run_each(Layout(1, 2), held_bytes, cases), 1):
        assert all(held == factor * weights for held, weights in members)


def test_its_state_is_healed_from_members(ranks: Ranks, tmp_path: Path) -> None:
    """Promise 4: on 2×2, then from members on 1×4.  The control: another seed of the rounding."""
    alone = train_here(bf16_job(tmp_path / "alone"), STEPS)
    stored = {
        (t.kind, t.dtype)
        for t in Run.open(bf16_job(tmp_path / "alone")).checkpoints.open(alone.version).tensors()
    }
    assert stored >= {("parameter", "F32"), ("moment.exp_avg", "BF16"), ("moment.exp_avg_sq", "BF16")}
    assert hash_after_healing(ranks, bf16_job(tmp_path / "healed"), STEPS) == alone.hash
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            adamw, "key_of", lambda hyper, name, moment: key_of(replace(hyper, seed=1), name, moment)
        )
        assert train_here(bf16_job(tmp_path / "other"), STEPS).hash != alone.hash


@pytest.mark.fast
def test_other_optimizers_refuse_it() -> None:
    with pytest.raises(
        JobError,
        match=(
            r"optim\.moments = 'bf16' has no effect with optim\.kind = 'sgd', only with adamw; leave "
            r"optim\.moments out"
        ),
    ):
        small_job("/nowhere", optim={"kind": "sgd", "moments": "bf16"})
    with pytest.raises(
        JobError, match=r"optim\.moments = 'bf16' has no effect with optim\.kind = .*, only with adamw"
    ):
        small_job("/nowhere", optim={"kind": "muon", "moments": "bf16"})
