"""Muon computes what torch.optim.Muon does, with the bits of one worker in every layout, and changes nothing
before the commit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from elastic.engine.blocks import matrices_of
from elastic.engine.optim import muon, owners
from elastic.engine.optim.base import rule_of
from elastic.engine.optim.owners import by_owners, owners_of, turns_of
from elastic.engine.optim.schedule import learning_rate_of
from elastic.engine.world import World
from elastic.errors import JobError, ModelError
from elastic.ids import Version
from elastic.job import Job
from elastic.models.llama import build
from elastic.plan.axes import chunk
from elastic.plan.layout import Layout
from elastic.runs.run import Run
from elastic.train.gauges.counters import Counters
from elastic.train.model import build_model, builder_of, tensors_of
from elastic.train.session import make_session
from elastic.train.warmup import warm_up
from tests.support.carried import Broken, Healed, broken, go_on, hash_after_healing, holdings
from tests.support.collectives import counting
from tests.support.ranks import Ranks
from tests.support.segments import Part, Trained, finish, here, member, segment, train, train_here
from tests.support.toys import own, small_job
from tests.support.worlds import STEPS

MOMENTUM = 0.95
SMALL = {"vocab": 29, "dim": 32, "layers": 2, "heads": 2, "dropout": 0.1}
MOMENTS = {"moment.exp_avg", "moment.exp_avg_sq", "moment.momentum_buffer"}


def muon_job(bucket: Path | str, clip_norm: float = 0.5, **changes: Any) -> Job:
    """Returns a job whose gradients are clipped in about every second step."""
    optim = {"kind": "muon", "lr": 1e-2, "momentum": MOMENTUM, "clip_norm": clip_norm}
    return small_job(bucket, **{"model_args": SMALL, "global_batch": 8, "optim": optim, **changes})


def with_a_spare(**args: Any) -> torch.nn.Module:
    """Returns a model that has no sharding table, and does not use one matrix of a block."""
    model: Any = own(**args)
    model.layers[0].register_parameter("spare", torch.nn.Parameter(torch.empty(10, 6)))
    return cast(torch.nn.Module, model)


@pytest.fixture(scope="module")
def job_alone(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return muon_job(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def alone(job_alone: Job) -> Trained:
    """Trains with one worker; ``test_covering.py`` has the worlds."""
    return train_here(job_alone, STEPS)


# ---- torch is the judge


def judged(
    world: World, job: Job, steps: int, clips: bool, iterations: int
) -> tuple[list[tuple[str, float, bool]], list[float]]:
    """Trains beside torch.optim.Muon and AdamW, which get the gradients of each step.

    Returns, for each parameter, the largest difference, and whether the bits are the same; and the losses.
    """
    with member(world, job, Version(0, 0)) as me:
        parts, optim = me.state.optimizer.parts, job.optim
        theirs = {name: torch.nn.Parameter(part.values.clone()) for name, part in parts.items()}
        matrices = matrices_of(me.state.model)
        both = [
            torch.optim.Muon(
                [theirs[name] for name in theirs if name in matrices],
                weight_decay=optim.weight_decay,
                momentum=MOMENTUM,
                ns_steps=iterations,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(
                [
                    {"params": [p for name, p in theirs.items() if name not in matrices and p.dim() >= 2]},
                    {
                        "params": [p for name, p in theirs.items() if name not in matrices and p.dim() < 2],
                        "weight_decay": 0.0,
                    },
                ],
                betas=optim.betas,
                eps=optim.eps,
                weight_decay=optim.weight_decay,
            ),
        ]
        update = me.state.optimizer.rule.update

        def beside(parts: Any, grads: Sequence[Tensor], hyper: Any) -> None:
            for part, grad in zip(parts, grads, strict=True):
                theirs[part.name].grad = grad / hyper.divide
            if clips and hyper.clip < 1:
                for parameter in theirs.values():
                    assert parameter.grad is not None
                    parameter.grad *= hyper.clip
            for each in both:
                for group in each.param_groups:
                    group["lr"] = learning_rate_of(job, me.state.shard.version.step + 1)
                each.step()
            update(parts, grads, hyper)

        object.__setattr__(me.state.optimizer.rule, "update", beside)
        losses = [me.step().loss for _ in range(steps)]
        pairs = [(name, parts[name].values, theirs[name].detach()) for name in theirs]
        return [
            (name, float((ours - other).abs().max()), torch.equal(ours, other)) for name, ours, other in pairs
        ], losses


def test_twenty_steps_are_torchs(tmp_path: Path) -> None:
    """A model in float32 on one device; both run Newton–Schulz in bfloat16.  The matrices have torch's bits;
    AdamW's rest is within 1e-6.

    The controls: a judge that does not clip, and one with an iteration fewer.
    """
    job = muon_job(tmp_path, steps=20)
    found, losses = here(judged, job, 20, True, muon.ITERATIONS)
    matrices = matrices_of(build(**job.model_args))
    assert {name for name, _, same in found if same} >= matrices and len(matrices) == 2 * 7
    assert max(difference for _, difference, _ in found) < 1e-6
    assert losses[-1] < 0.8 * losses[0], "it learns"
    for clips, iterations in ((False, muon.ITERATIONS), (True, muon.ITERATIONS - 1)):
        other, _ = here(judged, job, 3, clips, iterations)
        assert not any(same for name, _, same in other if name in matrices)


def test_in_fp16_the_scale_of_the_loss_is_taken_out_before_the_commit(tmp_path: Path) -> None:
    """The direction is of the momentum, which has no scale, and of the gradient.  The judge gets gradients
    without it.
    """
    job = muon_job(tmp_path, steps=20, precision="fp16", loss_scale=2.0**10)
    found, _ = here(judged, job, 5, True, muon.ITERATIONS)
    assert {name for name, _, same in found if same} >= matrices_of(build(**job.model_args))
    assert max(difference for _, difference, _ in found) < 1e-6


@pytest.mark.fast
@pytest.mark.parametrize("shape", [(32, 32), (7, 40), (40, 7), (1, 5)])
def test_the_iterations_are_torchs(shape: tuple[int, int]) -> None:
    """Bit for bit, and nearly orthogonal: the singular values are near 1.  A matrix of zeros stays zero."""
    from torch.optim._muon import _zeropower_via_newtonschulz as theirs  # type: ignore[attr-defined]

    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    found = muon.orthogonalised(matrix.clone())
    assert torch.equal(found, theirs(matrix.clone(), muon.COEFFICIENTS, muon.ITERATIONS, muon.LEAST_NORM))
    values = torch.linalg.svdvals(found.float())
    assert 0.4 < float(values.median()) < 1.3 and float(values.max()) < 1.3
    assert not muon.orthogonalised(torch.zeros(shape)).any()


# ---- promise 1


def test_a_users_own_model_too(ranks: Ranks, tmp_path: Path) -> None:
    """Promise 1: odd sizes, so that shards are uneven or have no rows, and a matrix without a gradient."""
    mine = {"model": "tests.engine.test_muon:with_a_spare", "model_args": {}}
    one, four = (muon_job(tmp_path / str(n), **mine) for n in (1, 4))
    assert train_here(one, 3).hash == train(ranks, four, Layout(1, 4), 3).hash


def test_fp16_skips_and_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    """A scale so large that the first step overflows: it is skipped, and 1×3 has the bits of one worker."""
    one, three = (muon_job(tmp_path / name, precision="fp16") for name in ("one", "three"))
    found = train_here(one, 4, how=overflown), train(ranks, three, Layout(1, 3), 4, how=overflown)
    assert found[0].hash == found[1].hash
    assert [[each.finite for each in trained.outcomes] for trained in found] == [
        [False, True, True, True]
    ] * 2


def overflown(world: World, job: Job, version: Version, last: int) -> Part:
    """Trains with a scale of which the first step's gradients overflow."""
    with member(world, job, version) as me:
        me.state.optimizer.scalars["loss_scale"].fill_(2.0**19)
        outcomes = []
        while me.state.shard.version.step < last:
            outcomes.append(me.step())
            me.state.optimizer.scalars["loss_scale"].fill_(2.0**8)
        return Part(outcomes, me.save(), [], me.rates, 0)


def by_own_rows(shapes: Any, rows: Any, compute: Any, world: World) -> list[Tensor]:
    """The mistake that the exchange prevents: each member takes its rows for the whole."""
    return [compute(rows(number)) for number in range(len(shapes))]


def wrong(world: World, job: Job, version: Version, last: int) -> Part:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "by_owners", by_own_rows)
        return segment(world, job, version, last)


def test_the_hash_sees_a_matrix_that_is_not_whole(ranks: Ranks, alone: Trained, tmp_path: Path) -> None:
    """Negative control."""
    assert train_here(muon_job(tmp_path / "one"), STEPS, how=wrong).hash == alone.hash
    assert train(ranks, muon_job(tmp_path / "two"), Layout(1, 2), STEPS, how=wrong).hash != alone.hash


# ---- promises 2 and 4


def test_a_matrix_of_a_block_has_one_moment_and_every_other_parameter_has_two(
    job_alone: Job, alone: Trained
) -> None:
    stored = {
        (tensor.kind, tensor.name) for tensor in Run.open(job_alone).checkpoints.open(alone.version).tensors()
    }
    matrices = matrices_of(build(**job_alone.model_args))
    assert {kind for kind, _ in stored} == {"parameter", "scalar", *MOMENTS}
    assert {name for kind, name in stored if kind == "moment.momentum_buffer"} == matrices
    others = {name for kind, name in stored if kind == "parameter"} - matrices
    assert {name for kind, name in stored if kind == "moment.exp_avg_sq"} == others and others >= {
        "embedding.weight",
        "norm.weight",
    }


def test_its_state_is_healed_from_members(ranks: Ranks, alone: Trained, tmp_path: Path) -> None:
    """Promise 4: from memory, to a member that had nothing."""
    assert hash_after_healing(ranks, muon_job(tmp_path), STEPS) == alone.hash


def lost() -> int:
    """A boundary that fails: after the matrices are exchanged, before the commit."""
    raise ZeroDivisionError


def broken_in_the_exchange(world: World, job: Job, culprit: int) -> Broken:
    """Runs a good step, then one in which ``culprit`` fails while the others wait for its rows."""
    calls = 0

    def second_fails(*arguments: Any) -> list[Tensor]:
        nonlocal calls
        calls += 1
        return by_owners(*arguments) if calls == 1 or world.rank != culprit else [torch.empty(lost())]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "by_owners", second_fails)
        return broken(world, job, culprit, None)


@pytest.mark.parametrize("where", ["in the exchange", "before the commit"])
def test_a_lost_member_leaves_all_untouched(ranks: Ranks, alone: Trained, tmp_path: Path, where: str) -> None:
    """Promise 2: the others do the step again, in another layout, to the bits of the undisturbed run."""
    job, old, new = muon_job(tmp_path), Layout(2, 2), Layout(1, 3)
    members: list[Broken]
    if where == "in the exchange":
        members = ranks.run(old, broken_in_the_exchange, job, 3)
    else:
        members = ranks.run(old, broken, job, 3, lost)
    assert members[3].error == "ZeroDivisionError" and all(each.error and each.untouched for each in members)
    version = members[0].version
    finish(job, old, [each.receipt for each in members], version)
    healed: list[Healed] = ranks.run(new, go_on, job, holdings(old, version, range(3)), STEPS)
    assert (
        finish(job, new, [each.receipt for each in healed if each.receipt], healed[0].version) == alone.hash
    )


# ---- the exchange

SHAPES = ((12, 4), (3, 50), (1, 9), (40, 40), (12, 4), (7, 2), (40, 40), (41, 39), (40, 40), (5, 5))


@dataclass
class Exchanged:
    """The report of one member: its rows of the results, the bytes that it sent to others, and the largest
    matrices that it owned.
    """

    rows: list[Tensor]
    sent: list[tuple[int, ...]]
    computed: int


def matrices() -> list[Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=draw).bfloat16() for shape in SHAPES]


def exchanged(world: World, elements: int) -> Exchanged:
    index, computed = world.layout.coordinates(world.rank)["dp_shard"], list[Tensor]()

    def compute(matrix: Tensor) -> Tensor:
        computed.append(matrix)
        assert matrix.is_contiguous() and matrix.untyped_storage().nbytes() == matrix.nbytes, (
            "it has memory of its own"
        )
        return muon.orthogonalised(matrix)

    with pytest.MonkeyPatch.context() as patch, counting() as calls:
        patch.setattr(owners, "TURN_ELEMENTS", elements)
        whole = matrices()
        rows = by_owners(
            SHAPES,
            lambda n: whole[n][slice(*chunk(len(whole[n]), world.layout.dp_shard, index))],
            compute,
            world,
        )
    return Exchanged(rows, [call.sent for call in calls.named("alltoall_base")], len(computed))


def test_rows_go_to_the_owners_and_back_once(ranks: Ranks) -> None:
    """The rows are those of the matrices computed alone; what travels is what an owner lacks of its matrices,
    both ways, in bfloat16.
    """
    for elements, members in zip(
        (1, 10**6), ranks.run_each(Layout(1, 3), exchanged, [(1,), (10**6,)]), strict=True
    ):
        check_rows(elements, members)


def check_rows(elements: int, members: list[Exchanged]) -> None:
    for number, matrix in enumerate(matrices()):
        assert torch.equal(torch.cat([each.rows[number] for each in members]), muon.orthogonalised(matrix))
    assert sum(each.computed for each in members) == len(SHAPES)
    owner = owners_of(SHAPES, 3)
    lacking = 0
    for (rows, columns), index in zip(SHAPES, owner, strict=True):
        first, last = chunk(rows, 3, index)
        lacking += 2 * columns * (rows - (last - first))
    to_others = sum(
        size for each in range(3) for call in members[each].sent for to, size in enumerate(call) if to != each
    )
    assert to_others == 2 * lacking
    turns = len(turns_of(SHAPES, owner, elements))
    assert [len(each.sent) for each in members] == [2 * turns] * 3
    assert (turns == 1) == (elements > 1)


def test_replicas_exchange_among_themselves(ranks: Ranks) -> None:
    """Both replicas own all matrices, and send each other nothing."""
    members: list[Exchanged] = ranks.run(Layout(2, 2), exchanged, 10**6)
    for rank, each in enumerate(members):
        assert all(size == 0 for call in each.sent for to, size in enumerate(call) if to // 2 != rank // 2)
    assert [each.computed for each in members[:2]] == [each.computed for each in members[2:]]


@pytest.mark.fast
def test_owners_have_about_the_same_work() -> None:
    """The busiest of 64 owners of 80 blocks has at most 5 % more than the mean.  The control: if they take
    turns, it has more.
    """
    shapes = (
        (4096, 4096),
        (1024, 4096),
        (1024, 4096),
        (4096, 4096),
        (14336, 4096),
        (14336, 4096),
        (4096, 14336),
    ) * 80

    def busiest(found: Sequence[int]) -> float:
        loads = [0] * 64
        for (rows, columns), index in zip(shapes, found, strict=True):
            loads[index] += rows * columns * min(rows, columns)
        return max(loads) / (sum(loads) / 64)

    assert busiest(owners_of(shapes, 64)) < 1.05 < busiest([number % 64 for number in range(len(shapes))])


@pytest.mark.fast
def test_turns_are_bounded_and_complete() -> None:
    owner = owners_of(SHAPES * 9, 4)
    for elements in (1, 100, 2000, 10**6):
        turns = turns_of(SHAPES * 9, owner, elements)
        assert sorted(number for turn in turns for number in turn) == list(range(9 * len(SHAPES)))
        for turn in turns:
            assert [owner[number] for number in turn] == sorted(owner[number] for number in turn)
            # of one owner
            most = max(
                sum(math.prod((SHAPES * 9)[n]) for n in turn if owner[n] == index) for index in range(4)
            )
            assert most <= max(elements, 1600)


@pytest.mark.fast
def test_a_warm_up_computes_with_whole_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It is rank 0 of a world of three, and owns some of the 14 matrices."""
    computed = list[tuple[int, ...]]()
    monkeypatch.setattr(
        muon, "orthogonalised", lambda matrix: (computed.append(tuple(matrix.shape)), matrix)[1]
    )
    job = muon_job(tmp_path, workers={"max": 3})
    session = make_session(job, Counters(tmp_path / "counters", create=True))
    warm_up(session, tensors_of(build_model(job, session.builder), session.rule), torch.device("cpu"))
    session.close()
    assert "not warmed up" not in capsys.readouterr().out
    assert 4 <= len(computed) <= 6 and set(computed) <= {(32, 32), (96, 32), (32, 96)}


# ---- what is refused


@pytest.mark.fast
def test_weight_decay_in_the_gradient_is_refused() -> None:
    with pytest.raises(JobError, match=r"optim\.decay = 'l2' with optim\.kind = 'muon'"):
        small_job("/nowhere", optim={"kind": "muon", "decay": "l2"})


@pytest.mark.fast
def test_a_model_without_matrices_in_blocks_is_refused() -> None:
    job = small_job("/nowhere", optim={"kind": "muon"})
    with pytest.raises(ModelError, match="inside the model's blocks, and the model has none"):
        tensors_of(torch.nn.Linear(3, 3), rule_of(job))
    assert tensors_of(builder_of(job)(**job.model_args), rule_of(job)), "the control"
