"""The user's loss is tried before the first step: one that is certainly no sum over terms is refused, and no
other is.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastic.engine.loss import next_token
from elastic.engine.world import World
from elastic.errors import LossError, ModelError
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.report.story import StepLine
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from elastic.train.context import Context
from tests.support.chaos import exported_hash
from tests.support.ranks import Ranks
from tests.support.segments import member, train
from tests.support.toys import SMALL, Sums, own, small_job, toy_job

HERE = "tests.train.test_contract"
Batch = dict[str, Tensor]
MEAN = (
    r"for 4 samples it returns the loss 3\.\d+, the mean of the losses of the two halves \(3\.\d+ and "
    r"3\.\d+\), not their sum; "
)


def mean_and_one(model: nn.Module, batch: Batch) -> Any:
    loss, count = next_token(model, batch)
    return loss / count, 1


def mean_and_count(model: nn.Module, batch: Batch) -> Any:
    loss, count = next_token(model, batch)
    return loss / count, count


def mean_of_samples(model: nn.Module, batch: Batch) -> Any:
    rows = [next_token(model, {"tokens": row[None]}) for row in batch["tokens"]]
    return torch.stack([loss / count for loss, count in rows]).mean(), sum(count for _, count in rows)


def summed(model: nn.Module, batch: Batch) -> Any:
    return next_token(model, batch)


def features(model: nn.Module, batch: Batch) -> Tensor:
    return F.normalize(model(batch["tokens"][:, :-1].clamp(min=0)).mean(1), dim=-1)


def contrastive(model: nn.Module, batch: Batch) -> Any:
    """Every sample is told from all others of its microbatch: the sum over the whole is more than that over
    the halves.
    """
    out = features(model, batch)
    return F.cross_entropy(out @ out.detach().T / 0.1, torch.arange(len(out)), reduction="sum"), len(out)


def pairs(model: nn.Module, batch: Batch) -> Any:
    """The number of pairs grows with the square of that of samples."""
    out = features(model, batch)
    return (out[:, None] - out[None]).square().sum() + next_token(model, batch)[0], len(out) * (len(out) - 1)


def masked(model: nn.Module, batch: Batch) -> Any:
    """The terms are drawn, so halves have other terms than the whole; a count may even be that of the whole."""
    loss, count = next_token(model, batch)
    kept = (torch.rand(()) * count).ceil()
    return loss * kept / count, kept


def of_this_size(model: nn.Module, batch: Batch) -> Any:
    tokens = batch["tokens"].view(4, -1)
    return next_token(model, {"tokens": tokens})


def zero(model: nn.Module, batch: Batch) -> Any:
    loss, count = next_token(model, batch)
    return loss * 0, count


def weighted(model: nn.Module, batch: Batch) -> Any:
    """Every term has the weight 0.3, and so has its place in the count."""
    loss, count = next_token(model, batch)
    return loss * 0.3, count * 0.3


def hundredth(model: nn.Module, batch: Batch) -> Any:
    loss, count = next_token(model, batch)
    return loss * 0.01, float(count) * 0.01


def negative(model: nn.Module, batch: Batch) -> Any:
    loss, count = next_token(model, batch)
    return loss, -count


def not_a_number(model: nn.Module, batch: Batch) -> Any:
    loss, count = next_token(model, batch)
    return loss, count * float("nan")


def weighted_sum(model: nn.Module, batch: Batch) -> Any:
    """This is what the sentence asks for: the mean is over the terms, so a weight of 0.3 is 0.3 of the
    gradient.
    """
    loss, count = next_token(model, batch)
    return loss * 0.3, count


def short_ones(model: nn.Module, batch: Batch) -> Any:
    """The count is no number of terms for short samples, and only the validation has these."""
    loss, count = next_token(model, batch)
    return loss, count + 0.5 * (batch["tokens"].shape[1] < 17)


def later(ctx: Context) -> None:
    """Its loss returns another number of terms from step 2 on."""
    for step in ctx.steps():
        for batch in step.batches():
            loss, count = next_token(ctx.build().model, batch)
            step.backward(loss, count + 0.5 * (step.number > 1))
        step.commit()


def job_of(folder: Path, loss: str, **changes: Any) -> Job:
    return toy_job(
        folder,
        name=loss.replace("_", "-"),
        loss=f"{HERE}:{loss}",
        steps=1,
        schedule={},
        **(SMALL | {"microbatch": 4} | changes),
    )


def lines(job: Job) -> list[StepLine]:
    found = list[Any]()
    run_local(job, found.append)
    return [line for line in found if isinstance(line, StepLine)]


@pytest.mark.parametrize(
    ("loss", "changes", "said"),
    [
        (
            "mean_and_one",
            {},
            (
                r"for 4 samples it returns the count 1, but the two halves have the counts 1 and 1, "
                r"together more"
            ),
        ),
        (
            "mean_and_one",
            {"microbatch": 1},
            (
                r"for 2 samples \(one, twice\) it returns the count 1, but the two halves have the "
                r"counts 1 and 1"
            ),
        ),
        ("mean_and_count", {}, MEAN),
        ("mean_and_count", {"precision": "bf16"}, MEAN),
        ("mean_of_samples", {}, MEAN),
    ],
)
def test_l9_a_mean_is_refused_before_the_first_step(
    tmp_path: Path, loss: str, changes: dict[str, Any], said: str
) -> None:
    """L9, U2: one sentence that names the loss, what came and what must come.  Nothing before it says that
    the loss agrees with plain torch.
    """
    job, shown = job_of(tmp_path, loss, **changes), list[object]()
    with pytest.raises(LossError, match=rf"^loss = '{HERE}:{loss}': {said}") as error:
        run_local(job, shown.append)
    assert not any("compared with plain torch" in str(line) for line in shown), shown
    assert str(error.value).endswith(
        "two scalars, the sum over the terms of the microbatch and their number, not a mean"
    )
    assert "\n" not in str(error.value) and Run.open(job).newest() is None


@pytest.mark.parametrize("loss", ["summed", "contrastive", "pairs", "masked", "of_this_size", "zero"])
def test_l9_what_may_be_right_is_not_refused(tmp_path: Path, loss: str) -> None:
    """L9, the controls: a sum, losses that compare samples or draw random numbers, and a model that knows one
    size only.
    """
    assert [line.step for line in lines(job_of(tmp_path, loss))] == [1]


def of_four(model: nn.Module, batch: Batch) -> Any:
    """A loss that works with microbatches of four samples alone."""
    assert len(batch["tokens"]) == 4, "not four samples"
    return next_token(model, batch)


@pytest.mark.parametrize("samples", [10, 8])
def test_a_loss_that_cannot_end_a_validation_is_refused_before_the_first_step(
    tmp_path: Path, samples: int
) -> None:
    """The last microbatch of ten samples has two.  The control: of eight it has four, and the run trains."""
    held_out = {
        "dataset": "tests.support.toys:Sums",
        "args": {"samples": 50, "seq_len": 16},
        "every": 2,
        "samples": samples,
    }
    job = toy_job(
        tmp_path, **SMALL | {"steps": 2, "microbatch": 4}, loss=f"{HERE}:of_four", validation=held_out
    )
    if samples == 8:
        assert run_local(job, lambda line: None)[0] == "Finished"
        return
    with pytest.raises(
        ModelError,
        match=(
            r"validation.samples = 10: its last microbatch has 2 of 4 samples, .* set "
            r"validation.samples to a multiple of 4"
        ),
    ):
        run_local(job, lambda line: None)


def test_a_model_with_statistics_of_microbatches_is_not_refused(tmp_path: Path) -> None:
    job = toy_job(
        tmp_path,
        name="norms",
        model="tests.support.toys:batch_normed",
        model_args={},
        global_batch=8,
        steps=1,
        schedule={},
    )
    assert [line.step for line in lines(job)] == [1]


def test_no_bit_changes(ranks: Ranks, tmp_path: Path) -> None:
    """A process that tries nothing computes the same bits, with dropout.  The control: another seed has
    others.
    """
    job, other = (small_job(tmp_path, name=f"seed-{seed}", steps=2, seed=seed) for seed in (0, 1))
    lines(job)
    lines(other)
    assert (
        exported_hash(job)
        == train(ranks, small_job(tmp_path / "ranks"), Layout(1, 1), 2).hash
        != exported_hash(other)
    )


NO_COUNT = [
    ("weighted", r"\d+\.\d+"),
    ("hundredth", r"0\.\d+"),
    ("negative", r"-\d+"),
    ("not_a_number", "nan"),
]
TERMS = (
    "a count is a number of terms: a whole number, 0 or more; for a loss with weights return the "
    "weighted sum and the number of terms, with weights whose mean is about 1"
)


@pytest.mark.fast
@pytest.mark.parametrize(("loss", "count"), NO_COUNT)
def test_l9_a_count_that_is_no_number_of_terms_is_refused_before_the_first_step(
    tmp_path: Path, loss: str, count: str
) -> None:
    """L9: it was cut to a whole number, and the weights at the end were not those of the loss.  The control
    is the test below.
    """
    with pytest.raises(
        LossError,
        match=(
            rf"^loss = '{HERE}:{loss}'.* returned the count {count}, but "
            rf"{TERMS}$"
        ),
    ):
        lines(job_of(tmp_path, loss))
    assert Run.open(job_of(tmp_path, loss)).newest() is None


@pytest.mark.fast
def test_a_loss_with_weights_has_the_mean_over_its_terms(tmp_path: Path) -> None:
    """The loss and the norm of a step are those of plain torch.  The control, the mean over the sum of the
    weights, is far from both.
    """
    job, terms = job_of(tmp_path, "weighted_sum", model="tests.support.toys:own", model_args={}), 0
    total = 0.0
    with (
        closing(World.alone(torch.device("cpu"), generation=1)) as world,
        member(world, job, Version(0, 0)) as me,
    ):
        plain = own()
        plain.load_state_dict(
            {
                name: value.clone()
                for (kind, name), value in me.state.shard.values.items()
                if kind == "parameter"
            },
            False,
        )
        outcome = me.step()
    for ids in outcome.samples:
        loss, count = weighted_sum(plain, Sums().read(ids))
        loss.backward()  # type: ignore[no-untyped-call]
        total, terms = total + loss.item(), terms + int(count)
    norm = (
        float(
            torch.nn.utils.get_total_norm([each.grad for each in plain.parameters() if each.grad is not None])
        )
        / terms
    )
    assert [outcome.loss, outcome.norm] == pytest.approx([total / terms, norm], rel=1e-5)
    assert outcome.loss != pytest.approx(total / (0.3 * terms), rel=0.5)


@pytest.mark.fast
def test_l9_a_count_that_is_no_number_of_terms_in_a_later_step_ends_the_run(tmp_path: Path) -> None:
    """L9: it was cut.  The step before is shown, so that this one is not refused by the first look."""
    shown, job = list[Any](), small_job(tmp_path, loop=f"{HERE}:later", steps=3)
    said = (
        rf"^loop = '{HERE}:later': step 2, microbatch 0, samples \[\d+, \d+\] returned the count \d+\.5, "
        rf"but {TERMS}$"
    )
    with pytest.raises(LossError, match=said):
        run_local(job, shown.append)
    assert [line.step for line in shown if isinstance(line, StepLine)] == [1]


def test_l9_every_member_says_so(ranks: Ranks, tmp_path: Path) -> None:
    """L9: all end with the same words, whoever had that microbatch, and none applies the step.  Split and
    whole weights.
    """
    for zero in (2, 3):
        job = job_of(tmp_path / str(zero), "not_a_number", parallel={"zero": zero}, microbatch=2)
        for said in ranks.run(Layout(1, 2), refused, job):
            assert said.startswith(
                f"0 applied; loss = '{HERE}:not_a_number': step 1, microbatch 0, samples "
            ), said


def refused(world: World, job: Job) -> str:
    with member(world, job, Version(0, 0)) as me, pytest.raises(LossError) as error:
        me.step()
    return f"{me.session.counters['updates_applied']} applied; {error.value}"


@pytest.mark.fast
def test_l9_a_validation_says_so(tmp_path: Path) -> None:
    """L9: only the samples of the validation have it.  The control: with samples of the other length the run
    ends well.
    """
    for length, said in (
        (16, ""),
        (
            8,
            (
                r"the validation after step 1, samples \[0, 1, 2, 3\] returned the count \d+\.5, but a "
                r"count is"
            ),
        ),
    ):
        held_out = {
            "dataset": "tests.support.toys:Sums",
            "args": {"samples": 8, "seq_len": length},
            "every": 1,
        }
        job = job_of(tmp_path / str(length), "short_ones", validation=held_out)
        if not said:
            assert run_local(job, lambda _: None)[0] == "Finished"
            continue
        with pytest.raises(LossError, match=rf"^loss = '{HERE}:short_ones': {said}"):
            run_local(job, lambda _: None)
