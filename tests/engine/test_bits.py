"""An unsharded torch.optim is the independent judge of what worlds compute; that all compute the same bits is
in ``test_covering.py``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.code.imports import load
from elastic.data.cursor import Cursor
from elastic.engine.optim.schedule import learning_rate_of
from elastic.engine.precision import PRECISIONS, Precision
from elastic.engine.seeds import microbatch_seed
from elastic.engine.sync.ordered import OrderedReduction
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.models.llama import build
from elastic.plan.layout import Layout
from elastic.runs.run import Run
from tests.support.ranks import Ranks
from tests.support.segments import Part, segment, train, train_here
from tests.support.toys import Own, small_job


class Transposed(Own):
    """A model with weights in another order in memory, as after ``.t()`` or
    ``.to(memory_format=torch.channels_last)``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.empty(23, 19).t())
        self.filter = nn.Conv2d(1, 1, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, tokens: Tensor) -> Tensor:
        out = super().forward(tokens)
        return out + self.filter(out[:, None])[:, 0] + (self.embed(tokens) @ self.other).sum(-1, keepdim=True)


@pytest.mark.parametrize(("layout", "zero"), [(Layout(1, 2), 2), (Layout(1, 3), 3)], ids=str)
def test_weights_in_another_order_in_memory_too(
    ranks: Ranks, tmp_path: Path, layout: Layout, zero: int
) -> None:
    """Promise 1.  A world of several shards cuts such weights into parts, which are in the usual order; FSDP2
    refuses them.
    """
    job = small_job(tmp_path / "one", model="tests.engine.test_bits:Transposed", model_args={})
    one = train_here(job, 2)
    assert (
        train(ranks, job.replace(bucket=str(tmp_path / "more"), parallel={"zero": zero}), layout, 2).hash
        == one.hash
    )


def test_the_library_sum_depends_on_the_layout(ranks: Ranks, tmp_path: Path) -> None:
    """E6: negative control of the fold: without it the bits do differ, so the equality above is not for free;
    the values stay near.
    """
    one = train_here(small_job(tmp_path / "one", reproducible=False), 2)
    three = train(ranks, small_job(tmp_path / "three", reproducible=False), Layout(3, 1), 2)
    assert one.hash != three.hash
    for a, b in zip(one.outcomes, three.outcomes, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-4)


def adamw_of(job: Job, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": job.optim.weight_decay},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=job.optim.lr, betas=job.optim.betas, eps=job.optim.eps)


def seed_by_block(model: nn.Module, seed: int) -> None:
    """Lets torch draw from ``seed`` before the layers of ``model``, and from a seed of its own in each."""
    torch.manual_seed(seed)
    for number, layer in enumerate(model.layers):  # type: ignore[arg-type]
        digest = hashlib.blake2b(f"{seed}/layers.{number}/1".encode(), digest_size=8).digest()
        own = int.from_bytes(digest, "little") >> 1
        layer._forward_pre_hooks.clear()
        layer.register_forward_pre_hook(lambda *_, own=own: torch.manual_seed(own) and None)


def plain_training(
    job: Job,
    steps: int,
    optimizer_of: Callable[[Job, Mapping[str, nn.Parameter]], torch.optim.Optimizer] = adamw_of,
) -> tuple[dict[str, dict[str, torch.Tensor]], list[float]]:
    """Trains the job on one process with torch alone: plain module, plain loop, an optimizer of torch.optim,
    torch's clipping.

    Returns the tensors by kind and name, and the losses.
    """
    torch.manual_seed(job.seed)
    model = load(job.model)(**job.model_args)
    model.init_weights()
    named = dict(model.named_parameters())
    optimizer = optimizer_of(job, named)
    data, losses = load(job.data.dataset)(**job.data.args), []
    cursor = Cursor(len(data), job.global_batch, job.seed, job.data.sampling)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        total, count = 0.0, 0
        for index in range(job.microbatches):
            seed_by_block(model, microbatch_seed(job.seed, step, index))
            loss, tokens = load(job.loss)(
                model, data.read(cursor.microbatch_ids(step, index, job.microbatch))
            )
            loss.backward()
            total, count = total + loss.item(), count + int(tokens)
        for parameter in named.values():
            parameter.grad /= count
        torch.nn.utils.clip_grad_norm_(named.values(), job.optim.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_of(job, step)
        optimizer.step()
        losses.append(total / count)
    kinds = {"exp_avg", "exp_avg_sq"}.intersection(*optimizer.state.values())
    moments = {
        f"moment.{kind}": {name: optimizer.state[p][kind] for name, p in named.items()}
        for kind in sorted(kinds)
    }
    buffers = {name: value for name, value in model.named_buffers() if name in model.state_dict()}
    return {
        "parameter": {name: p.detach() for name, p in named.items()},
        "buffer": buffers,
        **moments,
    }, losses


def test_moments_slice_by_slice_through_reshapes_against_an_unsharded_adamw(
    ranks: Ranks, tmp_path: Path
) -> None:
    """A4 (AdamW): 1×3 → 1×2 → 2×2, from the bucket each time: stored parameters and both moments are close to
    torch.optim's.
    """
    job = small_job(tmp_path, global_batch=8)
    version = Version(0, 0)
    for layout, last in ((Layout(1, 3), 2), (Layout(1, 2), 4), (Layout(2, 2), 7)):
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
                torch.testing.assert_close(
                    found, value, rtol=2e-4, atol=2e-5 if kind == "parameter" else 1e-7
                )
        assert trained.outcomes[-1].loss == pytest.approx(losses[-1], rel=1e-4)
    assert losses[-1] < 0.8 * losses[0], "the model must be learning"


def double(**args: Any) -> nn.Module:
    """Returns the toy model in float64."""
    model: nn.Module = build(**args).double()
    return model


def exact_next_token(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of the toy model in float64; no target is masked."""
    tokens = batch["tokens"]
    loss = nn.functional.cross_entropy(
        model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    )
    return loss, torch.tensor(tokens[:, 1:].numel())


def exactly(world: World, job: Job, steps: int, lossy: bool) -> Part:
    """Trains with gradients that are reduced in float64; with ``lossy`` a node loses a gradient of every
    block that a node adds.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRECISIONS, "fp32", Precision(None, torch.float64))
        if lossy:
            added = OrderedReduction._added
            patch.setattr(
                OrderedReduction,
                "_added",
                lambda self, unit, *more: added(self, replace(unit, ranks=unit.ranks[-1:]), *more),
            )
        return segment(world, job, Version(0, 0), steps)


def test_blocks_against_plain_torch_in_float64(ranks: Ranks, tmp_path: Path) -> None:
    """N7: the losses of a plain loop to 1e-10, with two nodes that add blocks of two, with a weight of two
    leaves and seeds of blocks; equal bits would hide an error that all share.

    The control: a gradient of every block is lost.
    """
    job = small_job(
        tmp_path,
        model="tests.engine.test_bits:double",
        model_args={"vocab": 29, "dim": 32, "layers": 2, "heads": 2, "dropout": 0.1, "tied": True},
        loss="tests.engine.test_bits:exact_next_token",
        data={"dataset": "tests.support.toys:Sums", "args": {"masked": False}},
        optim={"lr": 1e-2, "clip_norm": 1e9},
        reduction={"block": 2},
    )
    _, expected = plain_training(job, 3)
    parts = [
        members[0]
        for members in ranks.run_each(Layout(2, 2), exactly, [(job, 3, False), (job, 3, True)], nodes="aabb")
    ]
    all_there, lossy = (
        max(abs(each.loss - loss) for each, loss in zip(part.outcomes, expected, strict=True))
        for part in parts
    )
    assert all_there <= 1e-10 and lossy > 1e-4
