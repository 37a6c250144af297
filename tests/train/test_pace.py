"""The time of a forward pass is that of a member's own work, whatever it waits for (``engine/pace.py``)."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.engine.pace import ForwardPace
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import Late, Outcome
from tests.support.ranks import Ranks
from tests.support.segments import member
from tests.support.toys import small_job, toy_job

STEPS = 2
EACH_S = 0.1
"""Seconds for which every member sleeps in each forward pass, so that the noise of a busy machine is small."""
LONG_S = 0.3
LAG_S = 0.02
"""Seconds by which each exchange of the slow member begins later."""
SLOW = 1
"""World rank of the member that is slow."""
CPU = torch.device("cpu")


def steps(world: World, job: Job, where: str) -> list[Outcome]:
    """Runs steps of a member.  World rank :data:`SLOW`, or with "alike" every member, sleeps ``LONG_S`` more in
    the forward pass, or in exchanges with others, or while it reads data.
    """
    with member(world, job, Version(0, 0), prefetch=0) as me:
        mine = where == "alike" or world.rank == SLOW
        me.state.model.register_forward_pre_hook(lambda *_: time.sleep(EACH_S))
        if where in ("forward", "alike") and mine:
            me.state.model.register_forward_pre_hook(lambda *_: time.sleep(LONG_S))
        if where == "exchange" and mine:
            for name in ("all_to_all", "begin_all_gather", "keep_up"):
                setattr(world, name, after_a_sleep(getattr(world, name)))
        if where == "data" and mine:
            me.session.loader.dataset.read = after_a_sleep(me.session.loader.dataset.read, LONG_S)  # type: ignore[method-assign]
        if where == "kind":
            me.session.kind = world.rank
            me.state.model.register_forward_pre_hook(lambda *_: time.sleep(LONG_S * world.rank))
        return [me.step() for _ in range(STEPS)]


def after_a_sleep(call: Any, seconds: float = LAG_S) -> Any:
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return call(*args, **kwargs)

    return slow


@pytest.mark.parametrize(
    ("layout", "zero"),
    [
        pytest.param(Layout(2, 1), "auto", marks=pytest.mark.full),
        pytest.param(Layout(1, 2), 2, marks=pytest.mark.full),
        (Layout(1, 2), 3),
    ],
    ids=["whole", "stage 2", "stage 3"],
)
def test_r15_only_the_member_whose_own_work_is_slow_is_late(
    ranks: Ranks, tmp_path: Path, layout: Layout, zero: Any
) -> None:
    """The others wait for it at each gather of stage 3, in the middle of their forward passes.  Controls: a
    member that is slow only in exchanges, or in reading; all slow alike; another kind.
    """
    job = small_job(tmp_path, parallel={"dp_replicate": "auto", "dp_shard": "auto", "zero": zero})
    kinds = ["forward", "exchange", "data", "alike", "kind"]
    forward, *controls = ranks.run_each(layout, steps, [(job, where) for where in kinds])
    for outcomes in forward:
        assert [[each.rank for each in outcome.late] for outcome in outcomes] == [[SLOW]] * STEPS
        for outcome in outcomes:
            (late,) = outcome.late
            assert late.forward_s == outcome.usage.forward_s > LONG_S > late.usual_s >= EACH_S
    for where, members in zip(kinds[1:], controls, strict=True):
        for outcomes in members:
            assert [outcome.late for outcome in outcomes] == [()] * STEPS, where
            assert all(outcome.usage.forward_s >= EACH_S for outcome in outcomes)


def test_uneven_microbatches_are_measured_one_by_one(ranks: Ranks, tmp_path: Path) -> None:
    """Three microbatches on two members: the second one runs an idle one, and is not late for it."""
    job = toy_job(tmp_path, global_batch=6, microbatch=2, model_args=small_job(tmp_path).model_args)
    for outcomes in ranks.run(Layout(2, 1), steps, job, "forward"):
        assert [[each.rank for each in outcome.late] for outcome in outcomes] == [[SLOW]] * STEPS
        assert all(LONG_S < outcome.usage.forward_s < 2 * LONG_S for outcome in outcomes), (
            "a microbatch, not a step"
        )


def test_waits_are_left_out_and_the_rest_is_a_mean() -> None:
    """The clock is that of the test.  What is waited for outside of a pass is not measured."""
    pace, now = ForwardPace(CPU), [10.0]
    pace.mark = lambda: now[0]

    def takes(seconds: float) -> float:
        now[0] += seconds
        return seconds

    wait = pace.without(takes)
    assert pace.read() == 0.0 and wait(100.0) == 100.0
    for own_s in (1.0, 3.0):
        pace.marks = [pace.mark()]
        takes(own_s)
        wait(50.0)
        takes(1.0)
        wait(7.0)
        pace.marks.append(pace.mark())
        pace.passes.append(pace.marks)
        pace.marks = None
        wait(20.0)
    assert pace.read() == 3.0 and pace.read() == 0.0


def test_outcomes_are_equal_whoever_was_late() -> None:
    one = Outcome(1, 1, 1.0, (1.0,), (1,), ((0,),), True)
    assert one == replace(one, late=(Late(1, 2.0, 1.0),))
