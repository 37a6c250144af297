"""Stages of ZeRO (Rajbhandari and others 2020): what members share, what they send for it, and that nothing
else depends on it.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.engine.world import World
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout, layouts_by_size
from elastic.train.model import build_model, builder_of
from tests.support.collectives import Calls, counting
from tests.support.ranks import Ranks
from tests.support.segments import compute, member, shard_hash, train_each, train_here
from tests.support.toys import small_job

LARGE = {"vocab": 29, "dim": 64, "layers": 4, "heads": 4}
FREE = {"reproducible": False, "precision": "bf16", "model_args": LARGE, "copies": {"copy_every": 0}}


def staged(folder: Path, zero: int, **changes: Any) -> Job:
    return small_job(folder, parallel={"zero": zero}, **changes)


class Narrow(nn.Module):
    """A model in bfloat16, some of whose parameters have two rows, fewer than there are shards."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(29, 16, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 2), nn.Tanh(), nn.Linear(2, 16)).bfloat16() for _ in range(2)
        )
        self.head = nn.Linear(16, 29, dtype=torch.bfloat16)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def test_a_model_in_bf16_with_fewer_rows_than_shards(ranks: Ranks, tmp_path: Path) -> None:
    """Gradients get the dtype of the parameters, as FSDP2 gives it to them.  The control: another seed gives
    other bits.
    """
    kinds = {
        kind: {"model": f"{__name__}:Narrow", "model_args": {}, "optim": {"kind": kind, "lr": 1e-2}}
        for kind in ("adamw", "muon")
    }
    jobs = [
        staged(tmp_path / f"{kind} {zero}", zero, **own) for kind, own in kinds.items() for zero in (1, 2, 3)
    ]
    worlds = [each.hash for each in train_each(ranks, jobs, Layout(1, 3), 2)]
    for (kind, own), found in zip(kinds.items(), (worlds[:3], worlds[3:]), strict=True):
        assert found == [train_here(staged(tmp_path / kind, 0, **own), 2).hash] * 3
        assert train_here(staged(tmp_path / f"{kind} other", 0, seed=1, **own), 2).hash not in found


def test_library_sums_over_shards_and_replicas(ranks: Ranks, tmp_path: Path) -> None:
    """Losses and norms agree in every stage.  The control: without the sum over replicas the norm would be
    another.
    """
    alone, *jobs = (staged(tmp_path / str(zero), zero, reproducible=False) for zero in (0, 1, 2, 3))
    trained = [train_here(alone, 2), *train_each(ranks, jobs, Layout(2, 2), 2)]
    one, *found = (
        [value for outcome in each.outcomes for value in (outcome.loss, outcome.norm)] for each in trained
    )
    for each in found:
        assert each == pytest.approx(one, rel=1e-4)


def stepping(world: World, job: Job) -> tuple[Calls, int, float, str]:
    """Returns the collectives of a step's rounds, the bytes of tensors at their end beyond those before the
    run, and the loss of the step before, with the hash of this member's shard after it.
    """
    before = living()
    with member(world, job, Version(0, 0), prefetch=0) as me:
        me.step()
        loss, found = me.step().loss, shard_hash(me.state.shard)
        with counting() as calls:
            compute(me.session, me.state, 3)
        return calls, living() - before, loss, found


def living() -> int:
    """Returns the bytes of all tensors of this process; each memory counts once."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if issubclass(type(each), Tensor) and each.device.type == "cpu":
            local = each.to_local() if hasattr(each, "to_local") else each
            found[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize("members", [2, 4])
def test_a_stage_shares_and_sends_what_it_promises(ranks: Ranks, tmp_path: Path, members: int) -> None:
    """C2, C3, C4: bytes of live storages a parameter and member, and bytes sent a parameter, with bf16 and
    sums in float32; losses agree.

    Before a commit a member has 4 bytes of the weights, 8 of the moments and 4 of the sums for each parameter
    that it updates, and 2 for each with which it computes.  Stage 1 sends gradients once a step and not in
    each of ``rounds``; a member sends the part (``members`` - 1) / ``members`` of what is gathered or
    scattered.  The control: stages differ by more than the tolerance.
    """
    rounds, share = 4 // members, 1 / members
    job = staged(tmp_path, 0, **FREE)
    count = sum(parameter.numel() for parameter in build_model(job, builder_of(job)).parameters())
    layouts = {0: Layout(members, 1), 1: Layout(1, members), 2: Layout(1, members), 3: Layout(1, members)}
    promised = {0: 4 + 8 + 4 + 2, 1: 2 + 16 * share, 2: 2 + 16 * share, 3: 16 * share}
    gathered, scattered = {0: 0, 1: 2, 2: 2, 3: 2 * 2 * rounds}, {0: 0, 1: 4, 2: 4 * rounds, 3: 4 * rounds}
    losses = []
    for zero, layout in layouts.items():
        found = ranks.run(layout, stepping, staged(tmp_path / str(zero), zero, **FREE))
        calls, taken, loss, _ = found[0]
        losses.append(loss)
        assert taken / count == pytest.approx(promised[zero], rel=0.03), zero
        whole = sum(call.bytes for call in calls if "gather" in call.name) * members / (members + 1)
        assert whole / count == pytest.approx(gathered[zero], rel=0.03), (zero, "gathered")
        whole = sum(call.bytes for call in calls if "reduce_scatter" in call.name) * members / (members + 1)
        assert whole / count == pytest.approx(scattered[zero], rel=0.03), (zero, "scattered")
    assert losses == pytest.approx([losses[0]] * 4, rel=2e-3)


def after_rounds(world: World, job: Job) -> list[int]:
    """Returns the bytes of tensors at the end of each round of a step, beyond those before the run."""
    before, found = living(), list[int]()
    with member(world, job, Version(0, 0), prefetch=0) as me:
        me.step()
        ends = me.state.parameters.end_round

        def ended() -> None:
            ends()
            found.append(living() - before)

        me.state.parameters.end_round = ended  # type: ignore[method-assign]
        compute(me.session, me.state, 2)
    return found


def test_stage_3_keeps_one_sum_of_gradients_from_round_to_round(ranks: Ranks, tmp_path: Path) -> None:
    """C4: 16 bytes a parameter, shared by all, after each of two rounds: FSDP2's own result of a round is not
    kept beside the sum.
    """
    job = staged(tmp_path, 3)
    count = sum(parameter.numel() for parameter in build_model(job, builder_of(job)).parameters())
    found, _ = ranks.run(Layout(1, 2), after_rounds, job)
    assert [each / count for each in found] == pytest.approx([16 / 2] * len(found), rel=0.05) and len(
        found
    ) > 1


@pytest.mark.fast
@pytest.mark.parametrize(
    ("parallel", "worlds"),
    [
        ({"zero": 0}, ["1×1", "2×1", "3×1", "4×1"]),
        ({"zero": 2}, ["1×1", "1×2", "1×3", "1×4"]),
        ({"zero": 1, "dp_shard": 2}, ["", "1×2", "1×2", "2×2"]),
        ({"zero": "auto"}, ["1×1", "2×1", "3×1", "4×1"]),
    ],
)
def test_a_stage_says_what_is_cut(parallel: dict[str, Any], worlds: list[str]) -> None:
    rule = small_job("/nowhere", parallel=parallel, workers={"max": 4}).layout_rule()
    assert [str(layout or "") for _, layout in layouts_by_size(rule, 4, 1)] == worlds


@pytest.mark.fast
@pytest.mark.parametrize("cut", ["dp_shard", "min_shard"])
def test_stage_0_with_shards_is_refused(cut: str) -> None:
    with pytest.raises(
        JobError,
        match=(
            rf"parallel\.zero = 0 shares nothing, so parallel\.{cut} = 2 is not possible; leave one of "
            r"the two settings out"
        ),
    ):
        small_job("/nowhere", parallel={"zero": 0, cut: 2}, workers={"max": 4})
