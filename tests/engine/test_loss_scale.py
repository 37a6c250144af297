"""E3: training in fp16 scales its loss, and the scale is part of the state that all members share."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic import launch
from elastic.engine import loss_scale
from elastic.engine.loss import next_token
from elastic.engine.loss_scale import FIRST, SCALARS
from elastic.engine.seeds import microbatch_seed
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.runs.run import Run
from tests.support.ranks import Ranks
from tests.support.segments import compute, here, member, train, train_here
from tests.support.toys import small_job, toy_job

HERE = "tests.engine.test_loss_scale"
SMALL: dict[str, Any] = {"model_args": {"vocab": 29, "dim": 32, "layers": 1, "heads": 2, "dropout": 0.1}}
FP16 = {"precision": "fp16", **SMALL}
BAD, GROWS_AFTER = 3, 2


def faint(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss whose gradients are below what fp16 can hold (6e-8)."""
    loss, count = next_token(model, batch)
    return loss * 1e-8, count


def infinite_once(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss that is infinite in one microbatch of step ``BAD``, which one member runs."""
    wrong = torch.initial_seed() == microbatch_seed(0, BAD, 1)  # later blocks have seeds of their own
    loss, count = next_token(model, batch)
    return loss * (float("inf") if wrong else 1.0), count


def gradients(world: World, job: Job) -> float:
    """Returns the largest gradient of one step."""
    with member(world, job, Version(0, 0)) as me:
        compute(me.session, me.state, 1)
        return max(float(grad.abs().max()) for grad in me.state.parameters.grads().values())


def test_small_gradients_survive_because_the_loss_is_scaled(ranks: Ranks, tmp_path: Path) -> None:
    """E3: the control is a scale of 1, with which they are all zero."""
    job = small_job(tmp_path, **FP16, loss=f"{HERE}:faint")
    scaled, unscaled = ranks.run_each(Layout(1, 2), gradients, [(job,), (job.replace(loss_scale=1.0),)])
    assert min(scaled) > 0 and max(unscaled) == 0


def scales(world: World, job: Job, steps: int) -> list[tuple[float, int, float, float]]:
    """Returns, for each step, the scale after it, the number of updates, the norm, and a weight."""
    with pytest.MonkeyPatch.context() as patch, member(world, job, Version(0, 0)) as me:
        patch.setattr(loss_scale, "GROWS_AFTER", GROWS_AFTER)
        found = []
        for _ in range(steps):
            outcome = me.step()
            optimizer = me.state.optimizer
            weight = float(next(iter(me.state.trained.values())).flatten()[0])
            found.append((optimizer.loss_scale.value, int(optimizer.updates), outcome.norm, weight))
        return found


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(1, 2)], ids=str)
def test_an_infinite_gradient_skips_the_step_everywhere_and_halves_the_scale(
    ranks: Ranks, tmp_path: Path, layout: Layout
) -> None:
    """E3: then the scale grows back, after two good steps.  The control is the same run without that
    microbatch.
    """
    jobs = [small_job(tmp_path, **FP16, loss=f"{HERE}:infinite_once"), small_job(tmp_path, **FP16)]
    told, control = ranks.run_each(layout, scales, [(job, 6) for job in jobs])
    for found in told:
        assert [scale / FIRST for scale, *_ in found] == [1, 2, 1, 1, 2, 2]
        assert [updates for _, updates, *_ in found] == [1, 2, 2, 3, 4, 5]
        assert found[BAD - 1][3] == found[BAD - 2][3] and found[BAD][3] != found[BAD - 1][3]
    for found in control:
        assert [scale / FIRST for scale, *_ in found] == [1, 2, 2, 4, 4, 8]
        assert [updates for _, updates, *_ in found] == [1, 2, 3, 4, 5, 6]


def test_the_norm_that_is_clipped_is_that_of_the_loss_itself(tmp_path: Path) -> None:
    """E3: the scale, static or not, changes neither the norm nor the weights by more than what fp16 rounds
    away.
    """
    runs = [
        here(scales, small_job(tmp_path, **FP16, loss_scale=scale), 3) for scale in ("dynamic", 1024.0, 100.0)
    ]
    plain = here(scales, small_job(tmp_path, **SMALL), 3)
    for found in runs:
        assert [norm for _, _, norm, _ in found] == pytest.approx([norm for _, _, norm, _ in plain], rel=0.02)


def test_the_scale_is_in_the_checkpoint_and_the_bits_do_not_depend_on_the_layout(
    ranks: Ranks, tmp_path: Path
) -> None:
    """E3, promises 1 and 4: 2×1, then from the bucket 1×3.  The control: fp32 ends with other bits."""
    settings: dict[str, Any] = {**FP16, "loss": f"{HERE}:infinite_once"}
    alone = train_here(small_job(tmp_path / "alone", **settings), BAD + 2)
    job = small_job(tmp_path / "run", **settings)
    first = train(ranks, job, Layout(2, 1), BAD + 1)
    reader = Run.open(job).checkpoints.open(first.version)
    scalars = {tensor.name: tensor for tensor in reader.tensors() if tensor.kind == "scalar"}
    assert set(scalars) == {"updates", "updates.missed", *SCALARS}
    raw = {name: bytearray(next(reader.read([scalars[name].whole()]))[1]) for name in SCALARS}
    stored = {name: torch.frombuffer(each, dtype=torch.float32).item() for name, each in raw.items()}
    assert stored == {"loss_scale": FIRST / 2, "good_steps": 1}
    assert train(ranks, job, Layout(1, 3), BAD + 2, first.version).hash == alone.hash
    assert train_here(small_job(tmp_path / "high", **SMALL), BAD + 2).hash != alone.hash


def test_a_branch_and_a_fork_may_turn_to_fp16(tmp_path: Path) -> None:
    """E3: where the checkpoint has no scale it begins with the first one.  The control: a scale that is there
    goes on.
    """
    high = small_job(tmp_path, steps=2, checkpoint={"save_every": 2}, **SMALL)
    begin = partial(launch, local=True, show=lambda line: None)
    begin(high)
    low = high.replace(steps=4, precision="fp16")
    for job, words in (
        (low, {"branch": True}),
        (low.replace(name="fork"), {"resume": "toy@2"}),
        (low.replace(steps=6), {"branch": True}),
    ):
        assert begin(job, **words).state == "Finished"
        newest = Run.open(job).newest()
        assert newest is not None and newest.step == job.steps
        reader = Run.open(job).checkpoints.open(newest)
        scalars = {tensor.name: tensor for tensor in reader.tensors() if tensor.kind == "scalar"}
        raw = bytearray(next(reader.read([scalars["good_steps"].whole()]))[1])
        assert torch.frombuffer(raw, dtype=torch.float32).item() == job.steps - 2, (
            "steps since the scale began"
        )


def losses(world: World, job: Job, steps: int) -> list[float]:
    with member(world, job, Version(0, 0)) as me:
        return [me.step().loss for _ in range(steps)]


@pytest.mark.full
def test_the_loss_in_fp16_is_that_of_fp32(tmp_path: Path) -> None:
    """E3: within 1 % after 200 steps (mean of the last ten)."""
    last = {}
    for precision in ("fp16", "fp32"):
        job = toy_job(
            tmp_path / precision,
            global_batch=8,
            microbatch=8,
            steps=200,
            precision=precision,
            optim={"lr": 1e-3},
        )
        curve = here(losses, job, 200)
        assert curve[-1] < 0.5 * curve[0]
        last[precision] = statistics.mean(curve[-10:])
    assert last["fp16"] == pytest.approx(last["fp32"], rel=0.01) and last["fp16"] != last["fp32"]
