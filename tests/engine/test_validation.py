"""L1: the loss on held-out samples is measured between steps, with the same bits in every layout, and changes
no bit of the training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from elastic.engine.loss import next_token
from elastic.engine.world import World
from elastic.errors import DataError, ElasticError, JobError, ModelError
from elastic.ids import Version
from elastic.job import Job
from elastic.kernels import cross_entropy as cross_entropy_module
from elastic.models.llama import build
from elastic.plan.layout import Layout
from elastic.protocol.builds import difference
from elastic.protocol.commit_record import Validated
from elastic.train.checks.preflight import preflight
from elastic.train.gauges.counters import Counters
from elastic.train.session import build_of, make_session
from elastic.train.validation import Blocks, validate
from tests.support.ranks import Ranks
from tests.support.segments import Trained, here, member, train, train_each, train_here
from tests.support.toys import Sums, small_job

HELD_OUT = {
    "every": 2,
    "samples": 7,
    "dataset": "tests.support.toys:Sums",
    "args": {"samples": 50, "seq_len": 16},
}


SMALL: dict[str, Any] = {
    "model_args": {"vocab": 29, "dim": 32, "layers": 1, "heads": 2, "dropout": 0.1},
    "global_batch": 8,
}


def validating(folder: Path, **changes: Any) -> Job:
    return small_job(folder, **SMALL | {"validation": HELD_OUT} | changes)


def found(trained: Trained) -> dict[int, Validated]:
    """Returns the validations that commits told of, by the step whose state they are of."""
    return {each.step - 1: each.validated for each in trained.outcomes if each.validated is not None}


def test_l1_each_sample_counts_once(ranks: Ranks, tmp_path: Path) -> None:
    """L1: the judge computes them one by one from the exported state, without the engine."""
    numbers = (1, 4, 7)
    jobs = [
        validating(tmp_path / str(samples), validation=HELD_OUT | {"samples": samples}) for samples in numbers
    ]
    told = [found(trained)[2] for trained in train_each(ranks, jobs, Layout(1, 2), 3)]
    job = validating(tmp_path / "before", steps=jobs[0].steps)
    assert train_here(job, 2).version.step == 2
    model = build(**job.model_args)
    model.init_weights()
    state: dict[str, torch.Tensor] = {}
    for file in sorted((tmp_path / "before" / "export-2").glob("*.safetensors")):
        state |= load_file(file)
    known = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in known.items():
            value.copy_(
                next(each for key, each in state.items() if key.removeprefix("model.") == name or key == name)
            )
        model.eval()
        dataset = Sums(**HELD_OUT["args"])
        pairs = [next_token(model, dataset.read((sample,))) for sample in range(max(numbers))]
    for samples, validated in zip(numbers, told, strict=True):
        expected, terms = (
            sum(float(loss) for loss, _ in pairs[:samples]),
            sum(int(count) for _, count in pairs[:samples]),
        )
        assert validated.count == terms and validated.loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"reproducible": False, "parallel": {"zero": 1}, "precision": "bf16"},
        pytest.param({"compile": True, "precision": "bf16"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_l1_whatever_the_engine_does(ranks: Ranks, tmp_path: Path, changes: dict[str, Any]) -> None:
    """L1: with and without, a world of two ends with the same bits; nothing is random, so twice is the same.

    ``test_covering.py`` has all else that the engine does.
    """
    jobs = [
        small_job(tmp_path / "without", **SMALL | changes),
        *(validating(tmp_path / name, **changes) for name in ("once", "twice")),
    ]
    without, *both = train_each(ranks, jobs, Layout(1, 2), 5)
    if changes.get("reproducible", True):
        assert {each.hash for each in both} == {without.hash}
    assert [*found(both[0])] == [2, 4] and (
        found(both[0]) == found(both[1]) or not changes.get("reproducible", True)
    )


def noisy(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss that draws a random number, as one with negative samples does."""
    loss, count = next_token(model, batch)
    return loss * (1 + torch.rand(())), count


def test_l1_a_loss_that_draws_is_the_same_in_every_layout(ranks: Ranks, tmp_path: Path) -> None:
    """L1: each block of samples has a seed of its own, whoever computes it in whatever round.  Otherwise the
    best step would depend on the layout.  The control: without chance the loss is another one.
    """
    jobs = {loss: validating(tmp_path / loss, loss=f"{__name__}:{loss}") for loss in ("noisy", "next_token")}
    noisy, quiet = (found(train_here(job, 3)) for job in jobs.values())
    assert noisy and noisy.keys() == quiet.keys() and noisy != quiet
    for layout in (Layout(1, 2), Layout(3, 1)):
        assert (
            found(train(ranks, jobs["noisy"].replace(bucket=str(tmp_path / str(layout))), layout, 3)) == noisy
        )


def twice(world: World, job: Job) -> tuple[Validated, Validated, int]:
    """Validates two times without a step between; returns how often, the graph of training being compiled,
    anything was traced later.
    """
    with member(world, job, Version(0, 0)) as me:
        me.step()
        both = [validate(me.session, me.state, me.fence, 1) for _ in range(2)]
        before = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        me.step()
        return both[0], both[1], int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) - before


@pytest.mark.full
def test_l1_training_is_not_compiled_again(ranks: Ranks, tmp_path: Path) -> None:
    job = validating(tmp_path, compile=True)
    for first, second, traced in ranks.run(Layout(1, 2), twice, job):
        assert first == second and traced == 0


def pairs(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    """A loss that compares the samples of a microbatch, as contrastive ones do.  It has a term for each pair."""
    tokens = batch["tokens"]
    far = (tokens[:, None] - tokens).abs().double().sum()
    return far + 0 * model(tokens[:, :-1].clamp(0)).sum(), len(tokens) ** 2


def test_l1_a_loss_that_compares_samples_gets_those_of_the_last_microbatch_alone(
    ranks: Ranks, tmp_path: Path
) -> None:
    """The control: a microbatch filled up with the last sample has another loss, and other terms."""
    jobs = [validating(tmp_path / name, loss=f"{__name__}:pairs", microbatch=4) for name in ("one", "two")]
    told = [found(train_here(jobs[0], 3))[2], found(train_each(ranks, jobs[1:], Layout(1, 2), 3)[0])[2]]
    dataset, blocks = Sums(**HELD_OUT["args"]), Blocks(7, 4)
    assert [blocks.ids(each) for each in range(len(blocks))] == [(0, 1, 2, 3), (4, 5, 6)] and len(
        Blocks(8, 4)
    ) == 2

    def expected(*microbatches: tuple[int, ...]) -> Validated:
        each = [pairs(lambda tokens: tokens, dataset.read(ids)) for ids in microbatches]  # type: ignore[arg-type]
        return Validated(sum(float(loss) for loss, _ in each), sum(count for _, count in each))

    assert told == [expected((0, 1, 2, 3), (4, 5, 6))] * 2 and told[0] != expected((0, 1, 2, 3), (4, 5, 6, 6))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"samples": 51},
            (
                "validation.samples = 51: the dataset of validation.args = {'samples': 50, 'seq_len': 16} "
                "has 50 samples"
            ),
        ),
        (
            {"args": {"path": "x"}},
            "validation.dataset = 'tests.support.toys:Sums' has no argument 'path'; it takes samples, ",
        ),
        ({"dataset": "tests.support.toys:Nobody"}, "validation.dataset"),
        (
            {"dataset": "elastic.data.tokens:TokenDataset", "args": {"path": "gone", "seq_len": 4}},
            "validation.args.path = 'gone'",
        ),
    ],
)
def test_a_validation_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    job = validating(tmp_path, validation=HELD_OUT | changes)
    with pytest.raises(ElasticError) as refused:
        make_session(job, Counters(tmp_path / "counters", create=True), prefetch=0)
    assert says in str(refused.value)


def nudged(world: World, job: Job) -> str:
    """Validates a model that changes a buffer when it is not trained; returns the error."""
    with member(world, job, Version(0, 0)) as me:
        name, buffer = next(iter(me.state.model.named_buffers()))

        def nudge(module: torch.nn.Module, _: Any) -> None:
            if not module.training:
                buffer.mul_(1.01)

        me.state.model.register_forward_pre_hook(nudge)
        with pytest.raises(ModelError) as refused:
            validate(me.session, me.state, me.fence, 0)
        return f"{name}: {refused.value}"


def test_a_model_that_changes_in_a_validation_is_refused(tmp_path: Path) -> None:
    """The control is every other test: a model that changes nothing passes."""
    job = validating(tmp_path, model="tests.support.toys:batch_normed", model_args={})
    said = here(nudged, job)
    name = said.partition(":")[0]
    assert f"changed the buffer {name!r}" in said


def test_a_validation_computes_no_gradient_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with gradients it does."""
    made = list[int]()
    genuine = cross_entropy_module._added
    monkeypatch.setattr(cross_entropy_module, "_added", lambda *args: made.append(1) or genuine(*args))
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    with torch.no_grad():
        alone = cross_entropy_module.cross_entropy(hidden, weight, torch.arange(6))
    assert not made and alone == cross_entropy_module.cross_entropy(hidden, weight, torch.arange(6)) and made


def test_members_must_hold_out_the_same_samples(tmp_path: Path) -> None:
    """A worker that sees others is no member: worlds would disagree on how often they compute."""
    builds = []
    for samples in (50, 51, 50):
        job = validating(
            tmp_path, validation=HELD_OUT | {"samples": 0, "args": {"samples": samples, "seq_len": 16}}
        )
        session = make_session(job, Counters(tmp_path / f"counters{len(builds)}", create=True), prefetch=0)
        builds.append(build_of(session))
        session.close()
    found = difference(builds[1], builds[0], True)
    assert (
        found is not None
        and found.part == "held_out"
        and "let validation.args name what every node sees" in found.sentence
    )
    assert difference(builds[2], builds[0], True) is None


def test_held_out_samples_are_compared_with_those_of_the_training(tmp_path: Path) -> None:
    """Samples of the training are said; other tensors are refused before the start.  The control: other
    samples, and nothing is said.
    """
    same = validating(tmp_path / "same", validation={"every": 2, "args": small_job("/nowhere").data.args})
    assert any(
        "validation.args: these samples are the training samples" in note
        for note in preflight(same, local=True).notes
    )
    assert not any(
        "validation" in note for note in preflight(validating(tmp_path / "other"), local=True).notes
    )
    longer = {**HELD_OUT, "args": {"samples": 50, "seq_len": 24}}
    with pytest.raises(
        DataError,
        match=(r"^validation\.dataset: a batch has 'tokens' \[2, 25\] of int64, but a training batch has"),
    ):
        preflight(validating(tmp_path / "longer", validation=longer, compile=True), local=True)
    preflight(validating(tmp_path / "eager", validation=longer), local=True)
    with pytest.raises(DataError, match=r"a batch has 'now' .* make both the same, since the loss gets both"):
        preflight(
            validating(tmp_path / "keys", validation=HELD_OUT | {"dataset": f"{__name__}:Other"}), local=True
        )
    with pytest.raises(
        JobError,
        match=(
            r"validation\.every = 0 measures nothing, so validation\.samples = 7 "
            r"has no effect"
        ),
    ):
        validating(tmp_path, validation={"samples": 7})


class Other(Sums):
    """Samples whose tensor has another name."""

    def read(self, ids: tuple[int, ...]) -> dict[str, torch.Tensor]:
        return {"now": super().read(ids)["tokens"]}
