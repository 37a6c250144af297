"""Data-parallel members get their parameters from one broadcast, read different samples, and hold the same state ever after."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from elastic.data.cursor import Cursor
from elastic.engine.optim.schedule import learning_rate
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import Outcome
from elastic.train.model import build_model, builder_of
from tests.support.collectives import Calls, counting
from tests.support.ranks import Ranks
from tests.support.segments import Trained, member, segment, train
from tests.support.toys import Sums, toy_job
from tests.support.worlds import STEPS


@pytest.mark.parametrize("reproducible", [True, False], ids=["fold", "library sum"])
@pytest.mark.parametrize("layout", [Layout(4, 1), Layout(2, 2)], ids=str)
def test_replicas_are_identical_after_every_step(ranks: Ranks, tmp_path: Path, layout: Layout, reproducible: bool) -> None:
    """B1: the hash of a shard is that of its other replicas, step by step, and no two steps are alike; without the fold too."""
    parts = ranks.run(layout, segment, toy_job(tmp_path, reproducible=reproducible), Version(0, 0), STEPS)
    for rank, part in enumerate(parts):
        assert part.hashes == parts[rank % layout.dp_shard].hashes
        assert len(set(part.hashes)) == STEPS
    assert layout.dp_shard == 1 or parts[0].hashes != parts[1].hashes, "shards differ, so that equal hashes say something"


def counted(world: World, job: Job) -> tuple[Calls, Calls]:
    """Returns the collectives of the start, and of two steps."""
    with counting() as start, member(world, job, Version(0, 0)) as me:
        with counting() as steps:
            me.step()
            me.step()
        return start, steps


@pytest.mark.parametrize("layout", [Layout(4, 1), Layout(1, 3)], ids=str)
def test_one_broadcast_of_each_parameter_at_the_start(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    """B1: as many broadcasts as parameters, Φ × 4 bytes in all, none later; a step needs no all-reduce and no reduce-scatter.

    So it is where world rank 0 initialises the model for all.
    """
    job = toy_job(tmp_path, numerics=1)
    parameters = list(build_model(job, builder_of(job)).parameters())
    for start, steps in ranks.run(layout, counted, job):
        assert len(start.named("broadcast")) == len(parameters)
        assert start.bytes("broadcast") == 4 * sum(parameter.numel() for parameter in parameters)
        assert {call.name for call in steps} == {"alltoall_base", "allgather_base"}, Counter(call.name for call in steps)


@pytest.mark.parametrize("layout", [Layout(4, 1), Layout(1, 3)], ids=str)
def test_no_parameter_is_sent_where_each_member_initialises_its_own(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    """B1: the members compare one number a tensor instead."""
    job = toy_job(tmp_path)
    parameters = list(build_model(job, builder_of(job)).parameters())
    for start, steps in ranks.run(layout, counted, job):
        assert [call.bytes for call in start.named("broadcast")] == [8 * len(parameters)]
        assert {call.name for call in steps} == {"alltoall_base", "allgather_base"}, Counter(call.name for call in steps)


def test_the_counter_sees_an_all_reduce(ranks: Ranks, tmp_path: Path) -> None:
    """Negative control: the library's way of summing gradients is seen."""
    for _, steps in ranks.run(Layout(4, 1), counted, toy_job(tmp_path, reproducible=False)):
        assert steps.named("allreduce")


class Recorded(Sums):
    """A dataset that knows what was read from it."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[int, ...]] = []

    def read(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        self.log.append(ids)
        return super().read(ids)


@dataclass
class Reads:
    """The reads of one member in each step, and what the outcomes say of all members."""

    mine: list[list[tuple[int, ...]]]
    outcomes: list[Outcome]
    own: list[int]
    """Microbatches that were this member's."""


def reads(world: World, job: Job) -> Reads:
    """Returns the reads of three steps; nothing is read ahead, so that what each step read is known."""
    with member(world, job, Version(0, 0), prefetch=0) as me:
        log: list[tuple[int, ...]] = me.session.loader.dataset.log  # type: ignore[attr-defined]
        found = Reads([], [], [])
        for _ in range(3):
            log.clear()
            run = me.session.counters["microbatches_run"]
            found.outcomes.append(me.step())
            found.mine.append(list(log))
            found.own.append(me.session.counters["microbatches_run"] - run)
        return found


@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(4, 1), Layout(2, 2), Layout(3, 1)], ids=str)
def test_each_sample_of_a_step_is_read_by_one_member(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    """B2: what the datasets were really asked for: the union is the global batch, nothing twice, and the commit tells the truth."""
    job = toy_job(tmp_path, data={"dataset": "tests.engine.test_replicas:Recorded"})
    members = ranks.run(layout, reads, job)
    cursor = Cursor(64, job.global_batch, job.seed)
    for at in range(3):
        read = [ids for each in members for ids in each.mine[at][: each.own[at]]]
        assert sorted(read) == sorted(members[0].outcomes[at].samples)
        samples = [i for ids in read for i in ids]
        assert len(set(samples)) == len(samples) == job.global_batch
        assert set(samples) == set(cursor.ids(at + 1))
        idle = [ids for each in members for ids in each.mine[at][each.own[at] :]]
        assert len(idle) == -8 % layout.world, "who idles runs along with samples of weight zero"


def test_samples_with_replacement_are_a_function_of_the_step(ranks: Ranks, tmp_path: Path) -> None:
    """A2: they are those of the step in a run that is stopped and goes on in another layout.  In an epoch some come twice; the control: in
    a permutation none does.
    """
    read = {}
    for sampling in ("with_replacement", "permutation"):
        job = toy_job(tmp_path / sampling, data={"dataset": "tests.support.toys:Sums", "sampling": sampling})
        first = train(ranks, job, Layout(1, 2), 1)
        outcomes = [*first.outcomes, *train(ranks, job, Layout(3, 1), 4, first.version).outcomes]
        read[sampling] = [sample for outcome in outcomes for ids in outcome.samples for sample in ids]
        cursor = Cursor(64, job.global_batch, job.seed, sampling)
        assert read[sampling] == [sample for step in range(1, 5) for sample in cursor.ids(step)]
    assert max(Counter(read["with_replacement"]).values()) > 1 == max(Counter(read["permutation"]).values())
    assert len(read["permutation"]) == len(read["with_replacement"]) == 64


@pytest.mark.parametrize("stop", [1, 4])
def test_everything_continues_unchanged_after_a_resume(ranks: Ranks, reference: Trained, tmp_path: Path, stop: int) -> None:
    """A2, A5: a run that is stopped and resumed by another world has the samples, losses and learning rates of an undisturbed one."""
    job = toy_job(tmp_path)
    first = train(ranks, job, Layout(1, 2), stop)
    second = train(ranks, job, Layout(3, 1), STEPS, first.version)
    assert second.hash == reference.hash
    outcomes = [*first.outcomes, *second.outcomes]
    cursor = Cursor(64, job.global_batch, job.seed)
    for step, (found, expected) in enumerate(zip(outcomes, reference.outcomes, strict=True), start=1):
        assert found.step == step
        assert (found.samples, found.losses, found.counts) == (expected.samples, expected.losses, expected.counts)
        assert tuple(i for ids in found.samples for i in ids) == cursor.ids(step)
    curve = [learning_rate(step, steps=12, peak=1e-2, warmup=2, final=0.1, kind="cosine") for step in range(1, STEPS + 1)]
    for part in second.parts:
        assert first.parts[0].rates + part.rates == curve
