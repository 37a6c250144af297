"""The user's loss is tried before the first step: one that is certainly no sum over terms is refused, and no other is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastic.engine.loss import next_token
from elastic.errors import LossError
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.report.story import StepLine
from elastic.runs.run import Run
from elastic.train.local import run_local
from tests.support.chaos import exported_hash
from tests.support.ranks import Ranks
from tests.support.segments import train
from tests.support.toys import toy_job

HERE = "tests.train.test_contract"
Batch = dict[str, Tensor]
MEAN = r"of 4 samples it returns the loss 3\.\d+, and of their halves 3\.\d+ and 3\.\d+, of which that is the mean; "


def mean_and_one(model: nn.Module, batch: Batch) -> Any:
    loss, count = next_token(model, batch)
    return loss / count, 1


def mean_and_count(model: nn.Module, batch: Batch) -> Any:
    loss, count = next_token(model, batch)
    return loss / count, count


def mean_of_samples(model: nn.Module, batch: Batch) -> Any:
    rows = [next_token(model, {"tokens": row[None]}) for row in batch["tokens"]]
    return torch.stack([loss / count for loss, count in rows]).mean(), sum(count for _, count in rows)


def summed(model: nn.Module, batch: Batch) -> Any:
    return next_token(model, batch)


def features(model: nn.Module, batch: Batch) -> Tensor:
    return F.normalize(model(batch["tokens"][:, :-1].clamp(min=0)).mean(1), dim=-1)


def contrastive(model: nn.Module, batch: Batch) -> Any:
    """Every sample is told from all others of its microbatch: the sum over the whole is more than that over the halves."""
    out = features(model, batch)
    return F.cross_entropy(out @ out.detach().T / 0.1, torch.arange(len(out)), reduction="sum"), len(out)


def pairs(model: nn.Module, batch: Batch) -> Any:
    """The number of pairs grows with the square of that of samples."""
    out = features(model, batch)
    return (out[:, None] - out[None]).square().sum() + next_token(model, batch)[0], len(out) * (len(out) - 1)


def masked(model: nn.Module, batch: Batch) -> Any:
    """The terms are drawn, so halves have other terms than the whole; a count may even be that of the whole."""
    loss, count = next_token(model, batch)
    kept = torch.rand(()) * count
    return loss * kept / count, kept


def of_this_size(model: nn.Module, batch: Batch) -> Any:
    tokens = batch["tokens"].view(4, -1)
    return next_token(model, {"tokens": tokens})


def zero(model: nn.Module, batch: Batch) -> Any:
    loss, count = next_token(model, batch)
    return loss * 0, count


def job_of(folder: Path, loss: str, **changes: Any) -> Job:
    return toy_job(folder, name=loss.replace("_", "-"), loss=f"{HERE}:{loss}", steps=1, schedule={}, **{"microbatch": 4, **changes})


def lines(job: Job) -> list[StepLine]:
    found = list[Any]()
    run_local(job, found.append)
    return [line for line in found if isinstance(line, StepLine)]


@pytest.mark.parametrize(
    ("loss", "changes", "said"),
    [
        ("mean_and_one", {}, r"of 4 samples it returns the count 1, and of their halves 1 and 1, which is more"),
        ("mean_and_one", {"microbatch": 1}, r"of 2 samples \(one, twice\) it returns the count 1, and of their halves 1 and 1"),
        ("mean_and_count", {}, MEAN),
        ("mean_and_count", {"precision": "bf16"}, MEAN),
        ("mean_of_samples", {}, MEAN),
    ],
)
def test_l9_a_mean_is_refused_before_the_first_step(tmp_path: Path, loss: str, changes: dict[str, Any], said: str) -> None:
    """L9, U2: one sentence that names the loss, what came and what must come."""
    job = job_of(tmp_path, loss, **changes)
    with pytest.raises(LossError, match=rf"^loss = '{HERE}:{loss}': {said}") as error:
        lines(job)
    assert str(error.value).endswith("two scalars, the sum over the terms of the microbatch and their number, not a mean")
    assert "\n" not in str(error.value) and Run.open(job).newest() is None


@pytest.mark.parametrize("loss", ["summed", "contrastive", "pairs", "masked", "of_this_size", "zero"])
def test_l9_what_may_be_right_is_not_refused(tmp_path: Path, loss: str) -> None:
    """L9, the controls: a sum, losses that compare samples or draw random numbers, and a model that knows one size only."""
    assert [line.step for line in lines(job_of(tmp_path, loss))] == [1]


def test_a_model_with_statistics_of_microbatches_is_not_refused(tmp_path: Path) -> None:
    job = toy_job(tmp_path, name="norms", model="tests.support.toys:batch_normed", model_args={}, steps=1, schedule={})
    assert [line.step for line in lines(job)] == [1]


def test_no_bit_changes(ranks: Ranks, tmp_path: Path) -> None:
    """A process that tries nothing computes the same bits, with dropout.  The control: another seed has others."""
    job, other = (toy_job(tmp_path, name=f"seed-{seed}", steps=2, seed=seed) for seed in (0, 1))
    lines(job)
    lines(other)
    assert exported_hash(job) == train(ranks, toy_job(tmp_path / "ranks"), Layout(1, 1), 2).hash != exported_hash(other)
