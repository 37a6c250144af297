"""The commit of a step says how long it took, and who waited longest for data."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from elastic.data.loader import LOOKED_AT
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import Outcome, Usage
from elastic.protocol.events import Work
from elastic.report.speed import Speed
from elastic.train.gauges.meter import Meter
from tests.support.patience import PATIENCE_S
from tests.support.ranks import Ranks
from tests.support.segments import member
from tests.support.toys import small_job, toy_job

READ_S = 2**-4
"""Seconds of a slow read, whose sums are exact."""
CPU = torch.device("cpu")


def the_work_of_a_step(world: World, job: Job) -> tuple[Outcome, Work]:
    with member(world, job, Version(0, 0)) as me:
        outcome = me.step()
        return outcome, me.state.arithmetic.of(outcome)


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(1, 2)], ids=str)
def test_every_member_knows_the_operations_of_a_step(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    """They are counted by hand from the job's model: 4 layers, 32 wide, 96 hidden, 29 words, and 16 tokens a
    sample, of which some are masked and count for nothing.
    """
    members: list[tuple[Outcome, Work]] = ranks.run(layout, the_work_of_a_step, toy_job(tmp_path))
    outcome, work = members[0]
    assert all(each == members[0] for each in members) and 0.5 * 256 < outcome.tokens < 256
    matrices, seq = 4 * (4 * 32 * 32 + 3 * 32 * 96) + 29 * 32, outcome.tokens / 16
    assert work.flops == outcome.tokens * (6 * matrices + 12 * 4 * 32 * seq)
    assert work.causal_flops == outcome.tokens * (6 * matrices + 6 * 4 * 32 * seq)
    assert (work.devices, work.peak_flops) == (2, 0), "the peak of a CPU is not known"


def steps_with_slow_data(world: World, job: Job, slow: int) -> tuple[list[Outcome], float]:
    """Runs three steps in which the data of world rank ``slow`` is slow; returns them, and the time that they
    took.

    The times are those of a clock that only the reads and the computing of this member move on.
    """
    now = [0.0]
    with member(world, job, Version(0, 0), prefetch=0) as me:
        loader, read = me.session.loader, me.session.loader.dataset.read
        me.session.meter, loader._clock = Meter(lambda: now[0]), lambda: now[0]

        def takes(seconds: float) -> None:
            now[0] += seconds

        def reads(ids: tuple[int, ...]) -> dict[str, torch.Tensor]:
            takes(READ_S if world.rank == slow else READ_S / 8)
            return read(ids)

        loader.dataset.read = reads  # type: ignore[method-assign]
        me.state.model.register_forward_pre_hook(lambda *_: takes(READ_S))
        return [me.step() for _ in range(3)], now[0]


def test_the_member_that_waits_longest_for_data_is_known_to_all(ranks: Ranks, tmp_path: Path) -> None:
    """Each of two members reads two microbatches a step, and all times are by its own clock."""
    job = small_job(tmp_path)
    for slow, members in enumerate(ranks.run_each(Layout(2, 1), steps_with_slow_data, [(job, 0), (job, 1)])):
        (outcomes, took_s), (others, took_there_s) = members
        assert outcomes == others
        assert [each.waiting for each in outcomes] == [slow] * 3
        for usage in (each.usage for each in outcomes):
            assert 2 * READ_S <= usage.data_s <= usage.step_s and 0 < usage.data_wait <= 1
            assert (usage.peak_bytes, usage.reserved_bytes) == (0, 0), "on a CPU torch has no such counters"
        assert sum(each.usage.step_s for each in outcomes) <= took_s + took_there_s


def test_the_first_step_of_a_generation_counts_from_its_beginning_and_others_from_the_record_before() -> None:
    """Control: what came between two generations belongs to no step; what came between two steps belongs to
    the second.
    """
    now, waited = 100.0, 7.0
    meter = Meter(lambda: now)
    meter.begin(1, waited, CPU)
    now, waited = 103.0, 8.0
    assert meter.usage(waited, CPU) == Usage(3.0, 1.0)
    now = 104.0
    meter.begin(1, waited, CPU)
    now = 105.0
    assert meter.usage(waited, CPU) == Usage(2.0, 0.0)
    now, waited = 200.0, 9.0
    meter.begin(2, waited, CPU)
    now, waited = 201.0, 9.5
    assert meter.usage(waited, CPU) == Usage(1.0, 0.5)


def steps_by_a_clock_of_their_own(world: World, job: Job, prefetch: int) -> list[Outcome]:
    """Runs three steps in which each read takes 3 s, and each microbatch computes as long as the next read
    takes, or 3 s without any.

    The times are those of a clock that the reads and the computing move on.  What is read ahead for the first
    microbatches has come before the first step.
    """
    now, permits, ended = [0.0], threading.Semaphore(0), threading.Semaphore(0)
    with member(world, job, Version(0, 0), prefetch=prefetch) as me:
        loader, read = me.session.loader, me.session.loader.dataset.read
        me.session.meter, loader._clock = Meter(lambda: now[0]), lambda: now[0]

        def reads(ids: tuple[int, ...]) -> dict[str, torch.Tensor]:
            assert not prefetch or permits.acquire(timeout=PATIENCE_S)
            now[0] += 3
            ended.release()
            return read(ids)

        def one_read() -> None:
            permits.release()
            assert ended.acquire(timeout=PATIENCE_S)

        def computes(*_: object) -> None:
            if prefetch:
                one_read()
            else:
                now[0] += 3

        for _ in range(LOOKED_AT):
            loader.read((0, 1))  # the first reads are the caller's
        loader.dataset.read = reads  # type: ignore[method-assign]
        me.state.model.register_forward_pre_hook(computes)
        try:
            loader.seek(1, world.data_rank, me.state.sync.deal)
            for _ in range(prefetch):
                one_read()
            return [me.step() for _ in range(3)]
        finally:
            permits.release(1000)  # the last reads ahead are of no step


def test_b16_the_log_says_that_a_run_hardly_waits_for_data_that_is_read_while_it_computes(
    ranks: Ranks, tmp_path: Path
) -> None:
    """B16: less than 5 % of the time with prefetch, in the log's own sentence.  The control, without
    prefetch, waits half of the time.
    """
    job, ahead = small_job(tmp_path), (1, 3, 0)
    found = ranks.run_each(
        Layout(2, 1), steps_by_a_clock_of_their_own, [(job, prefetch) for prefetch in ahead]
    )
    for prefetch, (outcomes, _) in zip(ahead, found, strict=True):
        speed = Speed()
        for outcome in outcomes:
            speed.add(outcome, None)
        assert speed.took_s == 3 * 2 * (3 if prefetch else 6), (
            "each of two members computes two microbatches a step"
        )
        assert ("0.0%" if prefetch else "50.0%") + " of the time waiting for data" in str(speed)
        assert (speed.waited_s / speed.took_s < 0.05) is bool(prefetch)
