"""Microbatches that use different parameters: stage 3 sums like with like, or says that it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastic.engine.loss import next_token
from elastic.engine.parameters import fsdp
from elastic.engine.world import World
from elastic.errors import ModelError, WorldBroken
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from tests.support.ranks import Ranks
from tests.support.segments import here, member, train, train_each, train_here
from tests.support.toys import Sums, small_job

HERE = __name__


class Either(nn.Module):
    """Two layers; a microbatch may use one of them, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return x + torch.tanh((self.odd if which else self.even)(x))


class Branches(nn.Module):
    """The first token chooses a layer of a ``block`` or of the ``rest``, or to ``skip`` a block.  ``twice``
    runs a block twice.

    ``reentrant`` runs one in a reentrant checkpoint, and ``again`` does so twice; ``then`` runs it by itself
    after that, ``first`` before.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embedding = kind, nn.Embedding(257, 16)
        self.layers = nn.ModuleList(Either() for _ in range(2))
        self.rest, self.head = Either(), nn.Linear(16, 257)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        which = int(tokens[0, 0]) % 2
        x = self.layers[0](self.embedding(tokens), which if self.kind == "block" else 0)
        if self.kind != "skip" or which:
            x = self.run(x, 0, self.kind in ("reentrant", "again", "then"))
        if self.kind in ("twice", "again", "then", "first"):
            x = self.run(x, 1, self.kind in ("again", "first"))
        return self.head(self.rest(x, which if self.kind == "rest" else 0))  # type: ignore[no-any-return]

    def run(self, x: Tensor, which: int, reentrant: bool) -> Tensor:
        return (
            checkpoint(self.layers[1], x, which, use_reentrant=True)
            if reentrant
            else self.layers[1](x, which)
        )  # type: ignore[no-any-return]


def job(bucket: Path, kind: str, **changes: Any) -> Job:
    return small_job(
        bucket, model=f"{HERE}:Branches", model_args={"kind": kind}, **{"global_batch": 8, **changes}
    )


def norms(world: World, job: Job, filled: bool) -> tuple[float, float]:
    """Returns the norm of a step, and that of plain torch on one process with all samples.  It needs the
    whole weights: 1×1.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not filled:
            patch.setattr(fsdp, "_fill", lambda group: None)
        with member(world, job, Version(0, 0)) as me:
            plain = Branches(**job.model_args)
            if whole := world.size == 1:
                with torch.no_grad():
                    for name, parameter in plain.named_parameters():
                        parameter.copy_(me.state.shard.values["parameter", name])
            outcome = me.step()
    terms = 0
    for ids in outcome.samples if whole else ():
        loss, count = next_token(plain, Sums().read(ids))
        loss.backward()  # type: ignore[no-untyped-call]
        terms += int(count)
    squares = (
        float((each.grad.double() / terms).square().sum())
        for each in plain.parameters()
        if each.grad is not None
    )
    return outcome.norm, sum(squares) ** 0.5


def norms_alone(world: World, job: Job) -> float:
    """Returns the norm of a step in which a module is not idle between its parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "_end", lambda group, state: None)
        return norms(world, job, True)[0]


def said(world: World, job: Job) -> str:
    """Returns what a member says that finds the fault; "" of one that waits for it in vain."""
    with member(world, job, Version(0, 0)) as me:
        try:
            for _ in range(job.steps):
                me.step()
            return ""
        except ModelError as error:
            world.abort()
            return str(error)
        except (RuntimeError, WorldBroken):
            return ""


def test_unlike_microbatches_have_the_gradients_of_plain_torch(ranks: Ranks, tmp_path: Path) -> None:
    """C3: with every stage, also where sums have no fixed order.  The control: FSDP2 by itself adds one
    layer's gradients to another's.
    """
    judges, split_up = {"block": 0.0, "rest": 0.0}, {"parallel": {"dp_shard": 2, "zero": 3}}
    for kind in judges:
        whole, judges[kind] = here(norms, job(tmp_path / kind, kind), True)
        assert whole == pytest.approx(judges[kind], rel=1e-5)
    cases = [(kind, each, filled) for kind in judges for each in (True, False) for filled in (True, False)]
    jobs = [
        (job(tmp_path / str(n), kind, **split_up, reproducible=each), filled)
        for n, (kind, each, filled) in enumerate(cases)
    ]
    for (kind, _, filled), members in zip(cases, ranks.run_each(Layout(1, 2), norms, jobs), strict=True):
        for norm, _ in members:
            assert (
                norm == pytest.approx(judges[kind], rel=1e-5)
                if filled
                else norm != pytest.approx(judges[kind], rel=1e-3)
            )


def test_unlike_microbatches_have_the_same_bits_in_every_layout_and_stage(
    ranks: Ranks, tmp_path: Path
) -> None:
    one = train_here(job(tmp_path / "1", "block"), 3)
    stages = [
        job(tmp_path / f"2-{zero}", "block", parallel={"dp_shard": 2, "zero": zero}) for zero in (1, 2, 3)
    ]
    assert [each.hash for each in train_each(ranks, stages, Layout(1, 2), 3)] == [one.hash] * 3


def test_a_block_in_a_reentrant_checkpoint_has_its_part_in_stage_3(ranks: Ranks, tmp_path: Path) -> None:
    """It runs without gradients first, and with them in the backward pass."""
    whole, judge = here(norms, job(tmp_path / "1", "reentrant"), True)
    assert whole == pytest.approx(judge, rel=1e-5)
    for norm, _ in ranks.run(
        Layout(1, 2), norms, job(tmp_path / "3", "reentrant", parallel={"dp_shard": 2, "zero": 3}), True
    ):
        assert norm == whole


def test_several_parts_of_a_block_are_all_summed_where_sums_have_no_fixed_order(
    ranks: Ranks, tmp_path: Path
) -> None:
    """FSDP2 by itself, the control, leaves out the gradients of a reentrant checkpoint that runs backward
    after another part.
    """
    kinds, free = ("again", "then", "first"), {"reproducible": False}
    jobs = [job(tmp_path / kind, kind, parallel={"dp_shard": 2, "zero": 3}, **free) for kind in kinds]
    ours = ranks.run_each(Layout(1, 2), norms, [(each, True) for each in jobs])
    theirs = ranks.run_each(Layout(1, 2), norms_alone, [(each,) for each in jobs])
    for kind, found, alone in zip(kinds, ours, theirs, strict=True):
        _, judge = here(norms, job(tmp_path / f"{kind} alone", kind, parallel={"zero": 3}, **free), True)
        assert [norm for norm, _ in found] == pytest.approx([judge, judge], rel=1e-5)
        assert (alone == pytest.approx([judge, judge], rel=1e-3)) is (kind == "first")


@pytest.mark.parametrize(
    ("kind", "begins"),
    [
        ("twice", "layers.1 is used twice"),
        ("again", "layers.1 is used twice"),
        ("then", "layers.1 is used twice"),
        ("first", "layers.1 is used twice"),
        ("skip", "with parallel.zero = 3 every member must run"),
    ],
)
def test_a_block_that_runs_twice_or_not_at_all_ends_a_step_of_stage_3(
    ranks: Ranks, tmp_path: Path, kind: str, begins: str
) -> None:
    """The next test is the control."""
    stage_3 = job(tmp_path / "3", kind, parallel={"dp_shard": 2, "zero": 3})
    found = [sentence for sentence in ranks.run(Layout(1, 2), said, stage_3) if sentence]
    assert found and all(
        sentence.startswith(begins) and "set parallel.zero = 2" in sentence for sentence in found
    )


def test_what_stage_3_refuses_has_the_bits_of_one_worker_in_stage_2(ranks: Ranks, tmp_path: Path) -> None:
    kinds = ("twice", "again", "then", "first", "skip")
    stage_2 = [job(tmp_path / kind, kind, parallel={"dp_shard": 2, "zero": 2}) for kind in kinds]
    alone = [train_here(job(tmp_path / f"{kind} alone", kind), 2).hash for kind in kinds]
    assert [each.hash for each in train_each(ranks, stage_2, Layout(1, 2), 2)] == alone


def learning(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """The model runs twice with gradients."""
    first, count = next_token(model, batch)
    return first + next_token(model, batch)[0], count


def weighted_by_teacher(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """The teacher's numbers change the gradient."""
    with torch.no_grad():
        teacher = model(batch["tokens"][:, :-1].clamp_min(0)).softmax(-1)
    loss, count = next_token(model, batch)
    return loss * (1 + teacher.square().sum(-1).mean()), count


@pytest.mark.parametrize("reproducible", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_pass_without_gradients_has_no_part_in_stage_3(
    ranks: Ranks, tmp_path: Path, reproducible: bool
) -> None:
    """A teacher is no second part: one worker, who computes with whole weights, is the judge.  The controls
    are a second pass that has gradients, which is refused, and the loss without a teacher, which has another
    norm.
    """
    changes: dict[str, Any] = {
        "model": "tests.support.toys:own",
        "model_args": {},
        "reproducible": reproducible,
        "loss": f"{HERE}:weighted_by_teacher",
    }
    one = train_here(small_job(tmp_path / "1", **changes), 2)
    split_up = train(
        ranks, small_job(tmp_path / "3", **changes, parallel={"dp_shard": 2, "zero": 3}), Layout(1, 2), 2
    )
    assert [each.norm for each in split_up.outcomes] == pytest.approx(
        [each.norm for each in one.outcomes], rel=1e-4
    )
    assert not reproducible or split_up.hash == one.hash
    alone = train_here(
        small_job(tmp_path / "alone", **changes | {"loss": "elastic.engine.loss:next_token"}), 1
    )
    assert alone.outcomes[0].norm != pytest.approx(one.outcomes[0].norm, rel=1e-2)
    if reproducible:
        refused = small_job(
            tmp_path / "2", **changes | {"loss": f"{HERE}:learning"}, parallel={"dp_shard": 2, "zero": 3}
        )
        assert any(
            "is used twice in one microbatch" in sentence
            for sentence in ranks.run(Layout(1, 2), said, refused)
        )


def penalised(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """A backward pass runs within the loss, down to the embeddings."""
    found = list[Tensor]()
    handle = model.embed.register_forward_hook(lambda _module, _args, output: found.append(output))  # type: ignore[union-attr]
    loss, count = next_token(model, batch)
    handle.remove()
    (grad,) = torch.autograd.grad(loss, found[0], create_graph=True)
    return loss + grad.square().sum(), count


def stepped_back(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    loss, count = next_token(model, batch)
    (grad,) = torch.autograd.grad(
        loss, model.get_parameter("head.weight"), create_graph=True, allow_unused=True
    )
    return loss if grad is None else loss + grad.square().sum(), count


@pytest.mark.parametrize("loss", ["penalised", "stepped_back"])
def test_a_backward_pass_within_the_loss_is_named_by_stage_3(ranks: Ranks, tmp_path: Path, loss: str) -> None:
    """The control: stage 2 has the bits of one worker, as the sentence promises."""
    changes: dict[str, Any] = {"model": "tests.support.toys:own", "model_args": {}, "loss": f"{HERE}:{loss}"}
    stage_3 = small_job(tmp_path / "3", **changes, parallel={"dp_shard": 2, "zero": 3})
    found = [sentence for sentence in ranks.run(Layout(1, 2), said, stage_3) if sentence]
    assert found and all(
        sentence.startswith("the loss runs a backward pass itself (torch.autograd.grad") for sentence in found
    ), found
    assert all(sentence.endswith("set parallel.zero = 2") for sentence in found)
    one = train_here(small_job(tmp_path / "1", **changes), 2)
    assert (
        train(
            ranks, small_job(tmp_path / "2", **changes, parallel={"dp_shard": 2, "zero": 2}), Layout(1, 2), 2
        ).hash
        == one.hash
    )
