"""A1: gradient descent on all samples, as one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actors.launch import launch
from elastic.engine.world import World
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.runs.run import Run
from elastic.train.session import settled
from tests.support.ranks import Ranks
from tests.support.segments import here, member
from tests.support.toys import small_job

SAMPLES, WIDTH, STEPS, RATE = 24, 6, 12, 0.05


class Points:
    """Points of a noisy plane, in float64."""

    def __init__(self, samples: int = SAMPLES) -> None:
        draw = torch.Generator().manual_seed(3)
        self.x = torch.randn(samples, WIDTH, dtype=torch.float64, generator=draw)
        self.y = self.x @ torch.arange(1.0, WIDTH + 1, dtype=torch.float64) + torch.randn(
            samples, dtype=torch.float64, generator=draw
        )

    def __len__(self) -> int:
        return len(self.y)

    def read(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        return {"x": self.x[[*ids]], "y": self.y[[*ids]]}

    def fingerprint(self) -> str:
        return f"plane {len(self)}"


class Plane(nn.Module):
    """A linear function that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

    def init_weights(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def half_squares(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (model(batch["x"]) - batch["y"]).square().sum() / 2, len(batch["y"])


def job_of(bucket: Path, **changes: Any) -> Job:
    here = "tests.engine.test_full_batch"
    values: dict[str, Any] = {
        "model": f"{here}:Plane",
        "model_args": {},
        "loss": f"{here}:half_squares",
        "data": {"dataset": f"{here}:Points"},
        "global_batch": "all",
        "steps": STEPS,
        "optim": {"kind": "sgd", "momentum": 0.0, "weight_decay": 0.0, "lr": RATE, "clip_norm": 1e9},
        "schedule": {"kind": "constant"},
    }
    return small_job(bucket, **(values | changes))


def iterates(world: World, job: Job) -> list[list[float]]:
    with member(world, job, Version(0, 0)) as me:
        found = []
        for _ in range(STEPS):
            me.step()
            found.append(
                next(
                    value for (kind, _), value in me.state.shard.values.items() if kind == "parameter"
                ).tolist()
            )
        return found


def closed_form() -> Tensor:
    """The judge: wₜ = (I - (I - ηH)ᵗ) w*, with the Hessian H and the minimum w* of least squares.  [steps,
    width].
    """
    points = Points()
    hessian = points.x.T @ points.x / SAMPLES
    best = torch.linalg.solve(hessian, points.x.T @ points.y / SAMPLES)
    shrink, power, found = (
        torch.eye(WIDTH, dtype=torch.float64) - RATE * hessian,
        torch.eye(WIDTH, dtype=torch.float64),
        [],
    )
    for _ in range(STEPS):
        power = power @ shrink
        found.append(best - power @ best)
    return torch.stack(found)


def is_closed_form(parts: list[list[list[float]]], atol: float = 1e-12) -> bool:
    """Returns whether iterates, which members have parts of, are those of the judge."""
    return torch.allclose(
        torch.cat([torch.tensor(part, dtype=torch.float64) for part in parts], 1),
        closed_form(),
        rtol=0,
        atol=atol,
    )


def test_a1_iterates_are_those_of_the_closed_form(ranks: Ranks, tmp_path: Path) -> None:
    """The workers are one, two that have all of the weight, and three that have parts.  The control: steps on
    half of the samples.
    """
    job = settled(job_of(tmp_path))
    assert job.global_batch == SAMPLES
    assert is_closed_form([here(iterates, job)]) and is_closed_form(ranks.run(Layout(1, 3), iterates, job))
    assert all(is_closed_form([replica]) for replica in ranks.run(Layout(2, 1), iterates, job))
    assert not is_closed_form([here(iterates, job.replace(global_batch=SAMPLES // 2))], 1e-3)


def test_the_run_has_the_number_and_refuses_more_samples(tmp_path: Path) -> None:
    """Once begun, a run has the number of its samples; with more of them it would be another run."""
    job = job_of(tmp_path, steps=2, microbatch=4)
    assert launch(job, local=True).state == "Finished"
    assert Run.find(job).job.global_batch == SAMPLES
    assert launch(job.replace(steps=2), local=True).state == "Finished"
    with pytest.raises(JobError, match=r"global_batch = 24 in the run and 28 now"):
        launch(
            job.replace(data={"dataset": "tests.engine.test_full_batch:Points", "args": {"samples": 28}}),
            local=True,
        )


def test_a_number_that_microbatches_do_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        JobError,
        match=(
            r"^global_batch = 'all': the dataset has 24 samples, which is not a multiple of microbatch "
            r"= 5; set microbatch to 6, 8, 12, 24, or"
        ),
    ):
        launch(job_of(tmp_path, microbatch=5), local=True)
    with pytest.raises(
        JobError,
        match=(r"batch_ramp.start = 4 with global_batch = 'all': a ramp needs a number to grow to"),
    ):
        job_of(tmp_path, batch_ramp={"start": 4, "increment": 4, "samples": 8})
