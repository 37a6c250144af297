"""A loop of one's own may call the model between two steps: it has the weights of the run, in every layout."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import GO_ON, Outcome
from elastic.train.context import Context
from elastic.train.effects import Effects
from elastic.train.model import builder_of
from elastic.train.step import Step
from storage.objects import ObjectStore
from tests.support.ranks import Ranks
from tests.support.segments import Member, finish, here, member
from tests.support.toys import SMALL, Sums, small_job, toy_job

STEPS, HELD = 3, (1, 2)
Read = list[float]
"""The model's answer before the first step, and after each."""


def answer(model: nn.Module) -> float:
    """Returns a number that depends on all weights."""
    model.eval()
    with torch.no_grad():
        tokens = Sums().read(HELD)["tokens"][:, :-1].clamp_min(0)
        return float(model(tokens).double().square().sum())


def reading(
    world: World, job: Job, version: Version, last: int, calls: bool = True
) -> tuple[Read, Read, list[Outcome], Any]:
    """Trains by a loop that calls the model between steps.  Returns its answers, those of plain torch with
    the weights of the shard if it is whole, and what :class:`~tests.support.segments.Part` has.
    """
    found, plain, outcomes = Read(), Read(), list[Outcome]()
    with member(world, job, version) as me:

        def look(model: nn.Module) -> None:
            if calls:
                found.append(answer(model))
            if world.size == 1 and not job.offloads:
                plain.append(answer(in_plain_torch(me, job)))

        def loop(ctx: Context) -> None:
            model = ctx.build().model
            assert ctx.build().model is model
            look(model)
            for step in ctx.steps():
                step.run()
                if calls:
                    # it has the weights of before the step, and the next pass those of after it
                    answer(model)
                outcomes.append(step.commit())
                look(model)

        with me.fence as rules:
            rules.go(me.shape.generation)
        context = Context(job.replace(steps=last), me.state, partial(steps_of, me, last), effects_of(job))
        context.run(loop)
        return found, plain, outcomes, me.save()


def effects_of(job: Job) -> Effects:
    return Effects(ObjectStore.open(job.bucket), job.name, tells=False)


def steps_of(me: Member, last: int) -> Iterator[Step]:
    for number in range(me.state.shard.version.step + 1, last + 1):
        yield Step(me.session, me.state, me.fence, me.shape, number, lambda: GO_ON)


def in_plain_torch(me: Member, job: Job) -> nn.Module:
    """Returns the user's model with the weights of a shard that is whole, in the format of the precision."""
    model: nn.Module = builder_of(job)(**job.model_args)
    values: dict[str, Tensor] = {
        name: value.clone() for (kind, name), value in me.state.shard.values.items() if kind == "parameter"
    }
    model.load_state_dict(values, strict=False)
    return model.bfloat16() if job.precision == "bf16" else model


@pytest.fixture(scope="module", params=[pytest.param("fp32", marks=pytest.mark.full), "bf16"])
def judged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Read, list[float]]:
    """The precision, the answers of plain torch with the weights of each step, which have the same bits in
    every layout, and the losses.
    """
    job = small_job(tmp_path_factory.mktemp("judged"), precision=request.param, steps=STEPS)
    _, plain, outcomes, _ = here(reading, job, Version(0, 0), STEPS, False)
    assert all(abs(after / before - 1) > 1e-2 for before, after in pairwise(plain)), (
        "the control: steps differ"
    )
    return request.param, plain, [each.loss for each in outcomes]


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Layout(1, 1), {}),
        (Layout(2, 1), {}),
        (Layout(1, 2), {"parallel": {"zero": 1}}),
        (Layout(1, 2), {"parallel": {"zero": 2}}),
        (Layout(1, 2), {"parallel": {"zero": 3}}),
        (Layout(1, 1), {"parallel": {"zero": 0}, "offload": "optimizer"}),
        (Layout(1, 2), {"parallel": {"zero": 2}, "offload": "optimizer"}),
        (Layout(1, 2), {"parallel": {"zero": 2}, "offload": "weights"}),
    ],
    ids=str,
)
def test_u4_the_model_between_steps_has_the_weights_of_the_run(
    ranks: Ranks,
    tmp_path: Path,
    judged: tuple[str, Read, list[float]],
    layout: Layout,
    changes: dict[str, Any],
) -> None:
    """U4: before the first step, after each, and where a later world goes on.  It was one step old, or memory
    without values.  The calls change no bit of the training.
    """
    precision, expected, losses = judged
    job = small_job(tmp_path, precision=precision, steps=STEPS, **changes)
    first = ranks.run(layout, reading, job, Version(0, 0), STEPS - 1)
    end = Version(STEPS - 1, first[0][2][-1].generation)
    finish(job, layout, [receipt for *_, receipt in first], end)
    then = ranks.run(layout, reading, job, end, STEPS)
    for before, after in zip(first, then, strict=True):
        assert [*before[0], after[0][-1]] == pytest.approx(expected, rel=1e-4)
        assert after[0][0] == before[0][-1]
        assert [each.loss for each in (*before[2], *after[2])] == losses


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.full), {"parallel": {"zero": 2}}, {"parallel": {"zero": 3}}],
    ids=str,
)
def test_u4_so_have_weights_in_fp8(ranks: Ranks, tmp_path: Path, changes: dict[str, Any]) -> None:
    """U4: a world that goes on, and begins by a call, answers as the one before did after its last step; fp8
    rounds, so plain torch is near only.  The control: the next step is farther away.
    """
    layout = Layout(1, 2) if changes else Layout(1, 1)
    settings: dict[str, Any] = {"precision": "fp8", "optim": {"lr": 0.5}, "steps": STEPS, **SMALL}
    job = toy_job(tmp_path, **settings, **changes)
    first = ranks.run(layout, reading, job, Version(0, 0), STEPS - 1)
    end = Version(STEPS - 1, first[0][2][-1].generation)
    finish(job, layout, [receipt for *_, receipt in first], end)
    again = ranks.run(layout, reading, job, end, STEPS)
    alone = here(reading, toy_job(tmp_path, **settings), end, STEPS)
    expected = alone[1]
    assert abs(expected[1] / expected[0] - 1) > 0.06
    for before, after in zip(first, again, strict=True):
        assert before[0][-1] == after[0][0] == alone[0][0] and after[0][1] == alone[0][1]
        assert after[0] == pytest.approx(expected, rel=0.02)
