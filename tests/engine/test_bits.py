"""Promise 1: the same bits whatever the number of data ranks, replicas and shards; an unsharded torch.optim is the independent judge."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastic.data.cursor import Cursor
from elastic.engine.loss import next_token
from elastic.engine.optim.schedule import learning_rate_of
from elastic.ids import Version
from elastic.imports import load
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.runs import Run
from elastic.train.step import microbatch_seed
from tests.support.ranks import Ranks
from tests.support.segments import Trained, train
from tests.support.toys import toy_job
from tests.support.worlds import STEPS

LAYOUTS = [Layout(2, 1), Layout(3, 1), Layout(1, 2), Layout(1, 3), Layout(2, 2), Layout(1, 4), Layout(4, 1)]
OWN = {"model": "tests.support.toys:own", "model_args": {}}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_gives_the_bits_of_one_worker(ranks: Ranks, reference: Trained, tmp_path: Path, layout: Layout) -> None:
    """B1, promise 1: dropout on, tied embeddings, masked tokens, uneven shards, clipping; 8 microbatches over 3 ranks leave one idle."""
    found = train(ranks, toy_job(tmp_path), layout, STEPS)
    assert found.hash == reference.hash
    want = [replace(outcome, generation=0) for outcome in reference.outcomes]
    for part in found.parts:
        assert [replace(outcome, generation=0) for outcome in part.outcomes] == want
    assert sum(part.microbatches for part in found.parts) == STEPS * 8


def test_a_users_own_model_too(ranks: Ranks, tmp_path: Path) -> None:
    """Promise 1, without a sharding table: odd sizes, biases, layer norms, untied; shards uneven at every degree."""
    one, three = (train(ranks, toy_job(tmp_path / str(layout.world), **OWN), layout, STEPS) for layout in (Layout(1, 1), Layout(1, 3)))
    assert one.hash == three.hash


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"global_batch": 14},
        {"optim": {"lr": 1e-2, "clip_norm": 0.5}},
        {"data": {"dataset": "tests.support.toys:Sums", "args": {"masked": False}}},
    ],
    ids=["seed", "a microbatch less", "clip", "masks"],
)
def test_the_hash_sees_what_should_change_it(ranks: Ranks, reference: Trained, tmp_path: Path, changes: dict[str, object]) -> None:
    """Negative control."""
    assert train(ranks, toy_job(tmp_path, **changes), Layout(2, 1), STEPS).hash != reference.hash


def test_the_library_sum_depends_on_the_layout(ranks: Ranks, tmp_path: Path) -> None:
    """Negative control of the fold: without it the bits do differ, so the equality above is not for free; the values stay near."""
    one, three = (
        train(ranks, toy_job(tmp_path / str(layout.world), reproducible=False), layout, STEPS) for layout in (Layout(1, 1), Layout(3, 1))
    )
    assert one.hash != three.hash
    for a, b in zip(one.outcomes, three.outcomes, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-4)


def plain_training(job: Job, steps: int) -> tuple[dict[str, dict[str, torch.Tensor]], list[float]]:
    """Trains the job on one process with torch alone: plain module, plain loop, torch.optim.AdamW, torch's clipping.

    Returns the tensors by kind and name, and the losses.
    """
    torch.manual_seed(job.seed)
    model = load(job.model)(**job.model_args)
    model.init_weights()
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": job.optim.weight_decay},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=job.optim.lr, betas=job.optim.betas, eps=job.optim.eps)
    data, losses = load(job.data.dataset)(**job.data.args), []
    cursor = Cursor(len(data), job.global_batch, job.seed, job.data.sampling)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        total, count = 0.0, 0
        for index in range(job.microbatches):
            torch.manual_seed(microbatch_seed(job.seed, step, index))
            loss, tokens = next_token(model, data.read(cursor.microbatch_ids(step, index, job.microbatch)))
            loss.backward()  # type: ignore[no-untyped-call]
            total, count = total + loss.item(), count + int(tokens)
        for parameter in named.values():
            parameter.grad /= count
        torch.nn.utils.clip_grad_norm_(named.values(), job.optim.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_of(job, step)
        optimizer.step()
        losses.append(total / count)
    moments = {f"moment.{kind}": {name: optimizer.state[p][kind] for name, p in named.items()} for kind in ("exp_avg", "exp_avg_sq")}
    return {"parameter": {name: p.detach() for name, p in named.items()}, **moments}, losses


def test_moments_slice_by_slice_through_reshapes_against_an_unsharded_adamw(ranks: Ranks, tmp_path: Path) -> None:
    """A4 (AdamW): 1×3 → 1×2 → 2×2, from the bucket each time: stored parameters and both moments are close to torch.optim's."""
    job = toy_job(tmp_path)
    version = Version(0, 0)
    for layout, last in ((Layout(1, 3), 3), (Layout(1, 2), 6), (Layout(2, 2), 9)):
        trained = train(ranks, job, layout, last, version)
        version = trained.version
        expected, losses = plain_training(job, last)
        reader = Run.open(job).checkpoints.open(version)
        stored = {(t.kind, t.name): t for t in reader.tensors()}
        assert {name for kind, name in stored if kind == "parameter"} == set(expected["parameter"])
        for kind, tensors in expected.items():
            for name, value in tensors.items():
                ((_, raw),) = reader.read([stored[kind, name].whole()])
                found = torch.frombuffer(bytearray(raw), dtype=torch.float32).view(value.shape)
                torch.testing.assert_close(found, value, rtol=2e-4, atol=2e-5 if kind == "parameter" else 1e-7)
        assert trained.outcomes[-1].loss == pytest.approx(losses[-1], rel=1e-4)
    assert losses[-1] < 0.8 * losses[0], "the model must be learning"
