"""R16: now and then a microbatch is run twice, by two members, whose gradients must have the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from elastic.engine.loss import next_token
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.protocol.reruns import Computed, Differ
from tests.support.ranks import Ranks
from tests.support.segments import Trained, member, train, train_each, train_here
from tests.support.toys import small_job

STEPS, EVERY = 4, 2
WRONG = 1
"""The world rank that computes a wrong gradient in step ``EVERY``."""


def rerunning(folder: Path, **changes: Any) -> Job:
    return small_job(folder, workers={"min": 1, "max": 4, "rerun_every": EVERY}, **changes)


def computed_wrongly(world: World, job: Job, version: Version, call: int) -> tuple[Computed, ...]:
    """Runs two steps, and returns what the members have said.  In the second step ``WRONG`` has a wrong gradient,
    though no wrong loss, in pass number ``call``.
    """
    with member(world, job, version) as me:
        me.step()
        calls = 0

        def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            nonlocal calls
            calls += 1
            found, count = next_token(model, dict(batch))
            if world.rank == WRONG and calls == call:
                found.register_hook(lambda grad: grad * (1 + 1e-6))
            return found, count

        me.session.loss = loss
        try:
            me.step()
        except Differ as differ:
            assert me.state.shard.version.step == 1 and me.session.counters["updates_applied"] == 1
            return differ.computed
        return ()


def reran(trained: Trained) -> list[dict[int, int]]:
    """Returns the digests by microbatch, step by step."""
    (every,) = {tuple(each.reran for each in part.outcomes) for part in trained.parts}
    return [{microbatch: digest for _, microbatch, digest in each} for each in every]


@pytest.mark.parametrize(
    ("layout", "zero"),
    [(Layout(2, 1), 0), (Layout(1, 2), 3), pytest.param(Layout(1, 4), 2, marks=pytest.mark.full)],
    ids=str,
)
def test_r16_reruns_change_nothing_and_all_agree(
    ranks: Ranks, tmp_path: Path, reference: Trained, layout: Layout, zero: int
) -> None:
    """The gradients of a microbatch have the same bits however the state is cut.  A single worker has nobody
    to compare with.
    """
    found = train(ranks, rerunning(tmp_path, parallel={"zero": zero}), layout, STEPS)
    assert (found.hash, [each.losses for each in found.outcomes]) == (
        reference.hash,
        [each.losses for each in reference.outcomes],
    )
    said = reran(found)
    assert [sorted(each) for each in said] == [[], [*range(layout.world)], [], [*range(layout.world)]]
    assert len({digest for each in said for digest in each.values()}) == 2 * layout.world, (
        "digests tell them apart"
    )
    assert sum(part.microbatches for part in found.parts) == STEPS * len(found.outcomes[0].losses)
    assert train_here(rerunning(tmp_path / "one"), STEPS).outcomes[EVERY - 1].reran == ()


def test_r16_what_a_pass_leaves_in_a_model_stays_the_same(ranks: Ranks, tmp_path: Path) -> None:
    """Running statistics count each microbatch once."""
    more: dict[str, Any] = {"model": "tests.support.toys:batch_normed", "model_args": {}}
    jobs = [small_job(tmp_path / "plain", **more), rerunning(tmp_path / "again", **more)]
    plain, again = train_each(ranks, jobs, Layout(2, 1), STEPS)
    assert plain.hash == again.hash and reran(again)[EVERY - 1] and not any(reran(plain))


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(1, 3)], ids=str)
def test_r16_a_wrong_gradient_is_applied_by_nobody(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    """It is found in a member's own microbatch and in that of another one; later microbatches are not compared,
    and nothing is wrong in the control.
    """
    job, size = rerunning(tmp_path), layout.world
    of_another, of_its_own, later, never = (
        ranks.run(layout, computed_wrongly, job, Version(0, 0), call) for call in (1, 2, 3, 99)
    )
    for found in (of_another, of_its_own):
        assert [found[0]] * size == [*found], "all members conclude the same"
        first, second = found[0]
        assert first.microbatch == second.microbatch and first.digest != second.digest
        assert WRONG in (first.rank, second.rank) and first.rank != second.rank
        assert first.rank == first.microbatch, "the first to speak is whose microbatch it is"
    assert (of_another[0][1].rank, of_its_own[0][0].rank) == (WRONG, WRONG)
    assert [*later] == [*never] == [()] * size
