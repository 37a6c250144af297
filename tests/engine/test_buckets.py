"""Blocks that are joined into buckets: fewer collectives, the same bits, and gradients that lie in one
memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from elastic.engine.parameters.buckets import GatherBucket, buckets_of, described
from elastic.engine.world import World
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.models.spec import ShardingTable
from elastic.plan.layout import Layout
from elastic.train.checks.preflight import preflight
from tests.support.collectives import Calls, counting
from tests.support.ranks import Ranks
from tests.support.segments import compute, member
from tests.support.toys import small_job

BLOCK, REST = 4 * 32 * 32 + 3 * 32 * 96 + 2 * 32, 30 * 32 + 32
"""Elements of a block of the toy model, of which there are four, and of the rest; counted by hand."""
HEAD = 30 * 32
"""Elements of the head, whose weight is that of the embedding: the gradients of each have a sum."""
EVEN = {"vocab": 30, "dim": 32, "layers": 4, "heads": 2}
FREE = {"reproducible": False, "copies": {"copy_every": 0}, "model_args": EVEN}


def bucketed(folder: Path, elements: int | str, zero: int = 2, **changes: Any) -> Job:
    return small_job(folder, parallel={"zero": zero, "bucket_elements": elements}, **changes)


def stepping(world: World, job: Job) -> tuple[Calls, list[list[int]], list[int]]:
    """Returns the collectives of a step, and of its gradients by memory: their elements, and the elements of
    that memory.
    """
    with member(world, job, Version(0, 0), prefetch=0) as me:
        me.step()
        with counting() as calls:
            compute(me.session, me.state, 2)
        found: dict[int, list[int]] = {}
        sizes = dict[int, int]()
        for grad in me.state.parameters.grads().values():
            storage = grad.untyped_storage()
            found.setdefault(storage._cdata, []).append(grad.numel())
            sizes[storage._cdata] = storage.nbytes() // grad.itemsize
        return calls, list(found.values()), list(sizes.values())


@pytest.mark.parametrize(
    ("layout", "kind"), [(Layout(2, 1), "allreduce"), (Layout(1, 2), "reduce_scatter")], ids=["2x1", "1x2"]
)
def test_c7_a_bucket_is_one_collective_and_one_memory(
    ranks: Ranks, tmp_path: Path, layout: Layout, kind: str
) -> None:
    """C7: the sizes that the log says are those that are summed; all gradients of a bucket are views of one
    memory, which has no more.

    The control: with ``block`` each block is one by itself.
    """
    sizes_of: dict[int | str, list[int]] = {"block": [BLOCK] * 4, 3 * BLOCK: [BLOCK, 3 * BLOCK]}
    jobs = [
        bucketed(tmp_path / str(elements), elements, 1 if layout.dp_shard > 1 else 0, **FREE)
        for elements in sizes_of
    ]
    found = ranks.run_each(layout, stepping, [(job,) for job in jobs])
    for (elements, buckets), job, (stepped, _) in zip(sizes_of.items(), jobs, found, strict=True):
        check_buckets(job, layout, kind, elements, sorted([*buckets, REST]), stepped)


def check_buckets(
    job: Job, layout: Layout, kind: str, elements: int | str, wanted: list[int], stepped: Any
) -> None:
    calls, gradients, sizes = stepped
    share = layout.dp_shard
    assert sorted(sum(each) for each in gradients) == [each // share for each in wanted] == sorted(sizes)
    # a reduce-scatter has its result beside what is given
    counted = layout.dp_shard + 1 if layout.dp_shard > 1 else 1
    found = [call.bytes // 4 for call in calls if kind in call.name]
    assert sorted(found) == sorted(each * counted // share for each in (*wanted, HEAD))
    if layout.dp_shard > 1:
        assert len([call for call in calls if "gather" in call.name]) == len(wanted)
    said = [note for note in preflight(job).notes if "bucket_elements" in note]
    text = (
        f"parallel.bucket_elements = {elements}: gradients are summed in {len(wanted)} buckets, of which "
        f"the largest has {max(wanted):,} "
    )
    assert said == ([f"{text}elements"] if elements != "block" else [])


def test_c7_gradients_of_a_layer_are_one_memory_in_stage_3(ranks: Ranks, tmp_path: Path) -> None:
    """C7: each layer is a bucket there; its gradients, summed over four rounds, are views of the memory that
    FSDP2 has summed into.
    """
    jobs = [
        bucketed(tmp_path / precision, "block", 3, precision=precision, **FREE)
        for precision in ("fp32", "bf16")
    ]
    for (_, gradients, sizes), _ in ranks.run_each(Layout(1, 2), stepping, [(job,) for job in jobs]):
        assert (
            sorted(sum(each) for each in gradients)
            == [each // 2 for each in (REST, *[BLOCK] * 4)]
            == sorted(sizes)
        )


class Mixed(nn.Module):
    """Blocks of two dtypes, one without parameters, and a weight that two blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.Linear(2, 2),
                nn.Linear(2, 2).double(),
                nn.Linear(2, 2).double(),
                nn.Identity(),
                nn.Linear(2, 2),
            ]
        )
        self.blocks[4].weight = self.blocks[0].weight
        self.head = nn.Linear(2, 3)


@pytest.mark.fast
def test_blocks_of_other_dtypes_are_not_joined() -> None:
    """A sum in a wider dtype has other bits.  The control joins blocks with one dtype."""
    table, model = ShardingTable(tuple(f"blocks.{number}" for number in range(5))), Mixed()
    found = buckets_of(model, table, 100)
    assert [each.blocks for each in found] == [("blocks.4",), ("blocks.1", "blocks.2"), ("blocks.0",), ()]
    assert [each.elements for each in found] == [2, 12, 6, 9]
    assert sorted(name for each in found for name in each.parameters) == sorted(
        name for name, _ in model.named_parameters()
    )
    assert [each.blocks for each in buckets_of(model.double(), table, 100)] == [
        ("blocks.0", "blocks.1", "blocks.2", "blocks.4"),
        (),
    ]
    sizes = {most: [each.elements for each in buckets_of(model, table, most)] for most in (0, 5, 13, 14, 20)}
    assert sizes == {0: [2, 6, 6, 6, 9], 5: [2, 6, 6, 6, 9], 13: [8, 12, 9], 14: [14, 6, 9], 20: [20, 9]}


@pytest.mark.fast
def test_a_model_without_blocks_is_one_bucket() -> None:
    found = buckets_of(nn.Linear(2, 3), ShardingTable(()), 5)
    assert found == [GatherBucket((), ("weight", "bias"), 9)]
    assert described(found) == "1 bucket, of which the largest has 9 elements"
    assert buckets_of(nn.Identity(), ShardingTable(()), 5) == [] and described([]).startswith("0 buckets")


@pytest.mark.fast
@pytest.mark.parametrize("parallel", [{"zero": 3}, {}, {"dp_shard": 2}])
def test_stage_3_with_buckets_is_refused(parallel: dict[str, Any]) -> None:
    """Controls: other stages, and replicas alone."""
    said = (
        r"parallel\.bucket_elements = 9 with parallel\.zero = .*: stage 3 always gathers .* set parallel\.zero "
        r"to 0, 1 or 2, or leave"
    )
    with pytest.raises(JobError, match=said):
        small_job("/nowhere", parallel={"bucket_elements": 9, **parallel}, workers={"max": 4})
    for fine in ({"zero": 0}, {"zero": 1}, {"zero": 2}, {"dp_shard": 1}):
        assert (
            small_job(
                "/nowhere", parallel={"bucket_elements": 9, **fine}, workers={"max": 4}
            ).parallel.elements
            == 9
        )
