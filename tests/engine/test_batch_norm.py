"""U6: the running statistics of batch norms are those of torch, in every layout; torch's own modules are the
judge.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.engine.batch_norm import Statistics
from elastic.engine.parallelize import parallelize
from elastic.engine.precision import PRECISIONS, Precision
from elastic.engine.seeds import microbatch_seed
from elastic.engine.world import World
from elastic.errors import ModelError
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.train.alone.local import run_local
from elastic.train.checks.preflight import preflight
from elastic.train.gauges.counters import Counters
from elastic.train.model import build_model, tensors_of
from elastic.train.session import make_session
from elastic.train.warmup import warm_up
from tests.engine.test_bits import plain_training
from tests.support.carried import Broken, Healed, broken, go_on, holdings
from tests.support.ranks import Ranks
from tests.support.segments import finish, member, train_here
from tests.support.toys import BatchNormed, batch_normed, small_job
from tests.support.worlds import STEPS
from tests.train.test_transaction import Settled, fenced_in_the_commit, undisturbed

# a head with a bias returns a view; nothing here writes into it
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

HERE = "tests.engine.test_batch_norm"


def job_of(folder: Path, **changes: Any) -> Job:
    return small_job(folder, **{"model": "tests.support.toys:batch_normed", "model_args": {}, **changes})


def double(**args: Any) -> nn.Module:
    """Returns the model in float64."""
    return batch_normed(**args).double()


def in_order_of_arrival(statistics: Statistics, microbatch: int | None) -> None:
    """Weighs the statistics as if the first microbatches had come last: an error that no layout would show."""
    ADD(statistics, None if microbatch is None else statistics.scheme.deal.microbatches - 1 - microbatch)


def before_the_commit(statistics: Statistics, norm: Tensor) -> Tensor:
    """Updates the running statistics while the step may still be given up."""
    statistics.apply(applies=True)
    return norm


ADD = Statistics.add


@dataclass
class Told:
    """One member after its steps: its buffers, and of each step the loss and whether it was applied."""

    buffers: dict[str, Tensor]
    losses: list[float]
    finite: list[bool]


def trained(
    world: World, job: Job, steps: int, add: Callable[..., None] = ADD, reduce: torch.dtype = torch.float32
) -> Told:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Statistics, "add", add)
        patch.setitem(PRECISIONS, "fp32", Precision(None, reduce))
        with member(world, job, Version(0, 0)) as me:
            outcomes = [me.step() for _ in range(steps)]
            buffers = {
                name: value.clone()
                for (kind, name), value in me.state.shard.values.items()
                if kind == "buffer"
            }
    return Told(buffers, [outcome.loss for outcome in outcomes], [outcome.finite for outcome in outcomes])


def alone(job: Job, steps: int, **changes: Any) -> Told:
    """Trains in this process."""
    world = World.alone(torch.device("cpu"))
    try:
        return trained(world, job, steps, **changes)
    finally:
        world.close()


# ---- against torch


def test_statistics_against_plain_torch_in_float64(ranks: Ranks, tmp_path: Path) -> None:
    """A9, U6: the judge runs the microbatches one after the other, as on one device, through torch's own
    modules.  The control: weights in another order.
    """
    job = job_of(
        tmp_path,
        model=f"{HERE}:double",
        loss="tests.engine.test_bits:exact_next_token",
        data={"dataset": "tests.support.toys:Sums", "args": {"masked": False}},
        optim={"lr": 1e-2, "clip_norm": 1e9},
        reduction={"block": 3},
    )
    expected, losses = plain_training(job, 3)
    cases = [(job, 3, add, torch.float64) for add in (ADD, in_order_of_arrival)]
    right, wrong = ranks.run_each(Layout(2, 2), trained, cases, nodes="aabb")
    for told, lost in (*((each, False) for each in right), *((each, True) for each in wrong)):
        # the norms train by their own microbatch, so the losses are right anyway
        assert told.losses == pytest.approx(losses, rel=1e-10)
        assert told.buffers.keys() == expected["buffer"].keys()
        furthest = max(
            float((told.buffers[name] - value).abs().max()) for name, value in expected["buffer"].items()
        )
        assert furthest > 1e-4 if lost else furthest <= 1e-12


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}, {"precision": "fp16"}], ids=str)
def test_statistics_against_plain_torch_in_float32(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Statistics are float32 in every precision; those of activations in 16 bits are as near as these."""
    expected, _ = plain_training(job_of(tmp_path), 2)
    told = alone(job_of(tmp_path, **changes), 2)
    assert {value.dtype for value in told.buffers.values()} == {
        torch.float32,
        torch.int64,
    } and told.finite == [True, True]
    for name, value in expected["buffer"].items():
        torch.testing.assert_close(
            told.buffers[name], value, rtol=0.05 if changes else 1e-4, atol=0.01 if changes else 1e-6
        )


# ---- in every layout, of which test_covering.py has more


RAMP: dict[str, Any] = {"batch_ramp": {"start": 4, "increment": 4, "samples": 24}, "steps": STEPS}


@pytest.fixture(scope="module")
def hash_alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the state that one worker ends with; it covers the buffers."""
    return train_here(job_of(tmp_path_factory.mktemp("alone"), **RAMP), STEPS).hash


def other_momentum(**args: Any) -> nn.Module:
    model = batch_normed(**args)
    assert isinstance(model, BatchNormed)
    model.image.momentum = 0.1
    return model


def test_the_hash_sees_the_statistics(tmp_path: Path, hash_alone: str) -> None:
    """U6: the control; the momentum changes the running statistics of a norm, and nothing else."""
    assert train_here(job_of(tmp_path, **RAMP, model=f"{HERE}:other_momentum"), STEPS).hash != hash_alone


@pytest.mark.parametrize(
    ("layout", "zero"), [(Layout(3, 1), 1), (Layout(1, 3), 2), (Layout(2, 2), 3)], ids=str
)
def test_the_sum_of_the_library_is_near(ranks: Ranks, tmp_path: Path, layout: Layout, zero: int) -> None:
    """It depends on the layout, as that of gradients does."""
    job = job_of(tmp_path, reproducible=False, parallel={"zero": zero})
    expected = alone(job, 2)
    for told in ranks.run(layout, trained, job, 2):
        for name, value in expected.buffers.items():
            torch.testing.assert_close(told.buffers[name], value, rtol=1e-4, atol=1e-6)


# ---- a step that is not applied


def refuse() -> int:
    """A boundary that fails: after the step is prepared, before the commit."""
    raise ZeroDivisionError


def hasty(world: World, job: Job, culprit: int, boundary: Callable[[], int]) -> Broken:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Statistics, "guard", before_the_commit)
        return broken(world, job, culprit, boundary)


def test_an_abandoned_step_changes_no_statistics(ranks: Ranks, tmp_path: Path, hash_alone: str) -> None:
    """U6, promise 2: the next world heals from members, to the same bits.  The control: statistics that are
    applied before the commit.
    """
    layout, job = Layout(2, 2), job_of(tmp_path / "right", **RAMP)
    members: list[Broken] = ranks.run(layout, broken, job, 1, refuse)
    version = Version(1, ranks.generation)
    assert (
        all(each.error and each.untouched and each.version == version for each in members)
        and members[1].prepared == 2
    )
    finish(job, layout, [each.receipt for each in members], version)
    healed: list[Healed] = ranks.run(Layout(3, 1), go_on, job, holdings(layout, version, range(2)), STEPS)
    assert all(not each.wrong for each in healed)
    assert (
        finish(job, Layout(3, 1), [each.receipt for each in healed if each.receipt], healed[0].version)
        == hash_alone
    )
    members = ranks.run(layout, hasty, job_of(tmp_path / "wrong", **RAMP), 1, refuse)
    assert all(each.error and not each.untouched for each in members)


def test_a_settled_step_has_its_statistics(ranks: Ranks, tmp_path: Path) -> None:
    """Promise 2: a member that is fenced before its update applies nothing; the settled outcome then gives it
    the undisturbed bits.
    """
    layout, job = Layout(1, 2), job_of(tmp_path)
    members: list[Settled] = ranks.run(layout, fenced_in_the_commit, job, 1)
    assert [(each.barred, each.untouched) for each in members] == [(False, False), (True, True)]
    assert [each.hash for each in members] == ranks.run(layout, undisturbed, job)


def test_a_step_that_is_skipped_changes_no_statistics(tmp_path: Path) -> None:
    """A scale of the loss that is too large for fp16, until it has been halved."""
    told = alone(job_of(tmp_path, precision="fp16", loss_scale=2.0**40), 2)
    assert told.finite == [False, False]
    assert all(value.eq(name.endswith("var")).all() for name, value in told.buffers.items()), (
        "as the constructor left them"
    )


class Vast(BatchNormed):
    """A model whose first microbatch has features with a variance beyond float32; they are not seen in the
    gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.vast = nn.BatchNorm1d(2, affine=False)

    def forward(self, tokens: Tensor) -> Tensor:
        features = tokens.flatten()[:, None].float().expand(-1, 2) * self.size()
        return super().forward(tokens) + self.vast(features).mean()

    def size(self) -> float:
        return 1e20


@pytest.mark.parametrize("guarded", [True, False])
def test_statistics_that_are_not_finite_skip_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    """The gradient is finite all the same.  The control: without the guard the step is applied."""
    if not guarded:
        monkeypatch.setattr(Statistics, "guard", lambda _, norm: norm)
    told = alone(job_of(tmp_path, model=f"{HERE}:Vast"), 1)
    assert told.finite == [not guarded]
    assert told.buffers["vast.running_var"].isfinite().all() == guarded


class VastOnce(Vast):
    """The variance is so in one microbatch alone, the first one of step 1."""

    def size(self) -> float:
        return 1e20 if torch.initial_seed() == microbatch_seed(0, 1, 0) else 1.0


def test_statistics_that_were_not_finite_once_are_finite_in_the_next_step(tmp_path: Path) -> None:
    """Each microbatch begins with zeros: torch multiplies by zero what was there before, and zero times NaN
    is NaN.
    """
    told = alone(job_of(tmp_path, model=f"{HERE}:VastOnce"), 3)
    assert told.finite == [False, True, True]
    assert all(value.isfinite().all() for value in told.buffers.values())


# ---- what a model may do


class Twice(BatchNormed):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + super().forward(tokens)


class Unused(BatchNormed):
    def __init__(self, freezes: bool = False) -> None:
        super().__init__()
        self.unused, self.freezes = nn.BatchNorm1d(3), freezes

    def train(self, mode: bool = True) -> Unused:
        super().train(mode)
        if self.freezes:
            self.unused.eval()
            self.layers[0].eval()
        return self


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("Twice", r"used 'layers.0.norm' of '.*:Twice' 2 times"),
        ("Unused", r"used 'unused' of '.*:Unused' 0 times"),
    ],
)
def test_a_norm_that_is_not_used_once_is_refused(tmp_path: Path, model: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        alone(job_of(tmp_path, model=f"{HERE}:{model}"), 1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_norm_may_be_frozen(tmp_path: Path, precision: str) -> None:
    told = alone(
        job_of(tmp_path, model=f"{HERE}:Unused", model_args={"freezes": True}, precision=precision), 1
    )
    tracked = {
        name.rpartition(".")[0]: int(value)
        for name, value in told.buffers.items()
        if name.endswith("tracked")
    }
    assert tracked == {"layers.0.norm": 0, "layers.1.norm": 4, "image": 4, "unused": 0}
    assert (
        told.buffers["layers.0.norm.running_mean"].eq(0).all()
        and told.buffers["layers.1.norm.running_mean"].ne(0).all()
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"compile": True, "recompute": "block"},
            "recompute = 'block'; set recompute = 'none' or compile = false$",
        ),
        (
            {"spikes": {"action": "skip", "microbatch_z": 6}},
            (
                "spikes.microbatch_z = 6 they would count microbatches that are left out; set "
                "spikes.microbatch_z to 0, or "
            ),
        ),
    ],
    ids=["compile = true and recompute", "left out"],
)
def test_statistics_that_would_be_wrong_are_refused_before_anything_begins(
    tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError, match=rf"^'layers.0.norm' of .* {says}"):
        preflight(job_of(tmp_path, **settings), local=True)


class Pooled(BatchNormed):
    """A model whose norm gets one value of each feature from a sample."""

    def __init__(self, *, tracks: bool = True) -> None:
        super().__init__()
        self.pooled = nn.BatchNorm1d(self.head.out_features, track_running_stats=tracks)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        return logits + self.pooled(logits.mean(1))[:, None]


@pytest.mark.parametrize("tracks", [True, False])
def test_a_norm_that_gets_a_single_sample_is_told_of_its_microbatch(tmp_path: Path, tracks: bool) -> None:
    """One that does not track fails where the loss is tried before the first step, too.  The control has two
    samples.
    """
    job = job_of(tmp_path, model=f"{HERE}:Pooled", model_args={"tracks": tracks}, steps=2)
    with pytest.raises(
        ValueError if tracks else ModelError, match="Expected more than 1 value per channel"
    ) as wrong:
        run_local(job.replace(microbatch=1), lambda line: None)
    told = "".join(traceback.format_exception_only(wrong.value))
    assert (
        "microbatch = 1: a batch norm takes its mean and variance from the samples of one microbatch, "
        "and one value is too few; set"
    ) in told
    assert run_local(job.replace(name="two"), lambda line: None)[0] == "Finished"


def graphs(job: Job, passes: int) -> int:
    """Returns how many graphs are compiled in a warm-up and so many passes without gradients after it."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    session = make_session(job, Counters(Path(job.bucket) / f"{job.name}-{passes}", create=True), prefetch=0)
    warm_up(session, tensors_of(build_model(job, session.builder), session.rule), torch.device("cpu"))
    session.close()
    with closing(World.imagined(Layout(1, 1), torch.device("cpu"))) as world:
        model = parallelize(build_model(job, session.builder), world, job)[0].eval()
    with torch.no_grad():
        for _ in range(passes):
            model(torch.zeros(2, 9, dtype=torch.int64))
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.full  # compiles
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch's compiler, about torch
# torch's own, while it compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_norms_are_compiled_once_for_all_microbatches(tmp_path: Path) -> None:
    """A warm-up has four microbatches here, or one, and held-out samples are many."""
    job = job_of(tmp_path, compile=True, global_batch=12, reduction={"block": 2}, workers={"max": 1})
    one = graphs(job.replace(name="one", global_batch=2, reduction={}), 1)
    assert graphs(job, 4) == one > 0


@pytest.mark.full  # compiles
def test_compiled_blocks_track_the_same_statistics(ranks: Ranks, tmp_path: Path) -> None:
    """The bits of a compiled run do not depend on the layout either.  A norm that is used twice is still
    seen.
    """
    eager, (one,), (two, _) = (
        alone(job_of(tmp_path), 1),
        ranks.run(Layout(1, 1), trained, job_of(tmp_path, compile=True), 1),
        ranks.run(Layout(1, 2), trained, job_of(tmp_path, compile=True), 1),
    )
    for name, value in eager.buffers.items():
        torch.testing.assert_close(one.buffers[name], value, rtol=1e-4, atol=1e-6)
        assert torch.equal(one.buffers[name], two.buffers[name])
    with pytest.raises(
        AssertionError,
        match=(
            r"ModelError: the forward pass used 'layers.0.norm' of .* 2 "
            r"times"
        ),
    ):
        ranks.run(Layout(1, 1), trained, job_of(tmp_path, compile=True, model=f"{HERE}:Twice"), 1)
