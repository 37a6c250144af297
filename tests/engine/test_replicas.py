"""Data-parallel members get their parameters from one broadcast, read different samples, and hold the same
state ever after.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from elastic.data.cursor import Cursor
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import Outcome
from elastic.train.model import build_model, builder_of
from tests.support.collectives import Calls, counting
from tests.support.ranks import Ranks
from tests.support.segments import member, segment, train_here
from tests.support.toys import Sums, small_job


@pytest.mark.parametrize("layout", [Layout(4, 1), Layout(2, 2)], ids=str)
def test_replicas_are_identical_after_every_step_without_the_fold(
    ranks: Ranks, tmp_path: Path, layout: Layout
) -> None:
    """B1: the hash of a shard is that of its other replicas after each step; no two are alike.
    ``test_covering.py`` has the fold.
    """
    parts = ranks.run(layout, segment, small_job(tmp_path, reproducible=False), Version(0, 0), 3)
    for rank, part in enumerate(parts):
        assert part.hashes == parts[rank % layout.dp_shard].hashes
        assert len(set(part.hashes)) == 3
    assert layout.dp_shard == 1 or parts[0].hashes != parts[1].hashes, (
        "shards differ, so that equal hashes say something"
    )


def counted(world: World, job: Job) -> tuple[Calls, Calls]:
    """Returns the collectives of the start, and of two steps."""
    with counting() as start, member(world, job, Version(0, 0)) as me:
        with counting() as steps:
            me.step()
            me.step()
        return start, steps


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(1, 3)], ids=str)
def test_one_broadcast_at_the_start_and_none_later(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    """B1: each member initialises its own, and the members compare one number a tensor, in one broadcast;
    none comes later.

    A step needs no reduce-scatter, and an all-reduce only of one byte for each parameter: whether anybody
    gave it a gradient, which before ``numerics`` 5 did not matter.  The control: the library's way of summing
    gradients is seen.
    """
    job = small_job(tmp_path, global_batch=8)
    parameters = list(build_model(job, builder_of(job)).parameters())
    cases = [(job.replace(numerics=4),), (job,), (job.replace(reproducible=False),)]
    of_four, of_five, library = ranks.run_each(layout, counted, cases)
    for others, (start, steps) in [
        *((set(), each) for each in of_four),
        *(({"allreduce"}, each) for each in of_five),
    ]:
        assert [call.bytes for call in start.named("broadcast")] == [8 * len(parameters)]
        assert {call.name for call in steps} == {"alltoall_base", "allgather_base", *others}, Counter(
            call.name for call in steps
        )
        assert {call.bytes for call in steps if call.name == "allreduce"} <= {len(parameters)}
    for _, steps in library:
        assert any("reduce" in call.name for call in steps)


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


@pytest.mark.parametrize("layout", [Layout(2, 2), Layout(3, 1)], ids=str)
def test_each_sample_of_a_step_is_read_by_one_member(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    """B2: what the datasets were really asked for: the union is the global batch, nothing twice, and the
    commit tells the truth.
    """
    job = small_job(tmp_path, data={"dataset": "tests.engine.test_replicas:Recorded"})
    members = ranks.run(layout, reads, job)
    cursor = Cursor(64, job.global_batch, job.seed)
    for at in range(3):
        read = [ids for each in members for ids in each.mine[at][: each.own[at]]]
        assert sorted(read) == sorted(members[0].outcomes[at].samples)
        samples = [i for ids in read for i in ids]
        assert len(set(samples)) == len(samples) == job.global_batch
        assert set(samples) == set(cursor.ids(at + 1))
        idle = [ids for each in members for ids in each.mine[at][each.own[at] :]]
        assert len(idle) == -4 % layout.world, "who idles runs along with samples of weight zero"


def test_samples_with_replacement_are_a_function_of_the_step(tmp_path: Path) -> None:
    """A2: they are those of the step in a run that is stopped and goes on.  In an epoch some come twice; the
    control: in a permutation none does.
    """
    read = {}
    for sampling in ("with_replacement", "permutation"):
        small = {"vocab": 29, "dim": 32, "layers": 1, "heads": 2}
        data = {"dataset": "tests.support.toys:Sums", "sampling": sampling}
        job = small_job(tmp_path / sampling, model_args=small, global_batch=16, microbatch=8, data=data)
        first = train_here(job, 1)
        outcomes = [*first.outcomes, *train_here(job, 4, first.version).outcomes]
        read[sampling] = [sample for outcome in outcomes for ids in outcome.samples for sample in ids]
        cursor = Cursor(64, job.global_batch, job.seed, sampling)
        assert read[sampling] == [sample for step in range(1, 5) for sample in cursor.ids(step)]
    assert max(Counter(read["with_replacement"]).values()) > 1 == max(Counter(read["permutation"]).values())
    assert len(read["permutation"]) == len(read["with_replacement"]) == 64
