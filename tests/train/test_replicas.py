"""E6: a replica that silently holds other bits is found before anything is saved, and named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic.engine.world import World
from elastic.errors import ElasticError, JobError, ReplicasDiffer, StateDamaged
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.state.shard import Key
from elastic.train.replica_check import compare
from tests.support.ranks import Ranks
from tests.support.segments import member, shard_hash
from tests.support.toys import small_job, toy_job

NORM, MOMENT = ("parameter", "norm.weight"), ("moment.exp_avg_sq", "layers.1.attention.wq.weight")


def drift(value: torch.Tensor) -> None:
    """Moves one element to the next larger number, as a single bit that flips does."""
    flat = value.view(-1)
    flat[flat.numel() // 2] = torch.nextafter(flat[flat.numel() // 2], torch.tensor(torch.inf))


def compared(world: World, job: Job, culprits: tuple[int, ...], key: Key) -> tuple[str, str, str]:
    """Returns the hashes of this member's part before and after one element of it has moved, if it is a
    culprit, and what is found then.
    """
    with member(world, job, Version(0, 0)) as me:
        me.step()
        compare(me.state)
        before = shard_hash(me.state.shard)
        if world.rank in culprits:
            drift(me.state.shard.values[key])
        try:
            compare(me.state)
        except ElasticError as error:
            return before, shard_hash(me.state.shard), f"{type(error).__name__}: {error}"
        return before, shard_hash(me.state.shard), ""


def test_e6_one_ulp_in_one_of_three_replicas_is_found_where_it_is(ranks: Ranks, tmp_path: Path) -> None:
    """E6: the judge is the sha256 of each member's state.  The control: nothing is found before, nor by
    members that agree.
    """
    job, keys = small_job(tmp_path), (NORM, MOMENT)
    for (kind, name), told in zip(
        keys, ranks.run_each(Layout(3, 1), compared, [(job, (1,), key) for key in keys]), strict=True
    ):
        assert len({before for before, _, _ in told}) == 1
        assert [after == before for before, after, _ in told] == [True, False, True]
        wrong = (
            f"StateDamaged: world rank 1 holds other bits of {kind} {name!r} after step 1 than 2 of 3 "
            "replicas, so its state is given up"
        )
        assert [found for *_, found in told] == ["", wrong, ""]


def test_e6_of_two_replicas_none_is_known_to_be_right(ranks: Ranks, tmp_path: Path) -> None:
    """E6: both stop, in the shard that differs, and the others do not."""
    told = ranks.run(Layout(2, 2), compared, small_job(tmp_path), (3,), NORM)
    assert [after == before for before, after, _ in told] == [True, True, True, False]
    alike, first, *others = [found for *_, found in told]
    assert first.startswith(
        "ReplicasDiffer: the replicas of world ranks 1, 3 hold different bits of parameter 'norm.weight' "
        "after step 1, "
    )
    assert [alike, *others] == ["", "", first]


def stepped(world: World, job: Job) -> tuple[list[int], str]:
    """Lets world rank 1 drift after the first of three steps.  Returns the steps that were committed, and
    what ended them.
    """
    committed = list[int]()
    with member(world, job, Version(0, 0)) as me:
        try:
            for _ in range(3):
                committed.append(me.step().step)
                if committed == [1] and world.rank == 1:
                    drift(me.state.shard.values[NORM])
        except ElasticError as error:
            assert me.state.shard.version.step == committed[-1], (
                "the step that is given up has changed nothing"
            )
            return committed, type(error).__name__
    return committed, ""


def test_e6_a_step_that_would_be_saved_compares_first(ranks: Ranks, tmp_path: Path) -> None:
    """E6: step 3 is to be saved.  The controls: with one replica nothing is compared, and without the setting
    nothing is found.
    """
    job = small_job(tmp_path, checkpoint={"save_every": 3, "compare": True})
    assert ranks.run(Layout(1, 2), stepped, job) == [([1, 2, 3], "")] * 2
    silent = job.replace(checkpoint={"save_every": 3})
    found = [[([1, 2], "ReplicasDiffer")] * 2, [([1, 2, 3], "")] * 2]
    assert ranks.run_each(Layout(2, 1), stepped, [(job,), (silent,)]) == found


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "says"),
    [({"reproducible": False}, "reproducible = false"), ({"offload": "optimizer"}, "offload = ")],
)
def test_it_is_refused_where_replicas_may_differ(changes: dict[str, object], says: str) -> None:
    with pytest.raises(
        JobError, match=f"checkpoint.compare = true with {says}.*leave one of the two settings out"
    ):
        toy_job("/nowhere", checkpoint={"compare": True}, **changes)
    assert issubclass(ReplicasDiffer, ElasticError) and not issubclass(ReplicasDiffer, StateDamaged)
