"""A number that is not finite reaches no parameter and no checkpoint, wherever it comes from, and the run
says so.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic.data.cursor import Cursor
from elastic.engine.loss import next_token
from elastic.engine.seeds import microbatch_seed
from elastic.errors import JobError
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.report.story import Line, Sentence
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from tests.support.chaos import exported_hash
from tests.support.ranks import Ranks
from tests.support.segments import train_each
from tests.support.toys import SMALL, small_job, toy_job

HERE = "tests.train.test_skips"
BAD, MICROBATCH = 2, 1


def _step() -> tuple[int, int]:
    """Returns the step and the microbatch that this process computes, found by its seed, before a block has
    a seed of its own.
    """
    seeds = {microbatch_seed(0, step, index): (step, index) for step in range(1, 61) for index in range(8)}
    return seeds.get(torch.initial_seed(), (0, 0))


def one(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """One microbatch of step ``BAD``, which one member computes, is not a number."""
    wrong = _step() == (BAD, MICROBATCH)
    loss, count = next_token(model, batch)
    return loss * (float("nan") if wrong else 1.0), count


def every(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """All microbatches of step ``BAD`` are not numbers."""
    step, _ = _step()
    loss, count = next_token(model, batch)
    return loss * (float("nan") if step == BAD else 1.0), count


def gradient(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of that microbatch is finite, but its gradient is not."""
    wrong = _step() == (BAD, MICROBATCH)
    loss, count = next_token(model, batch)
    return loss + ((loss - loss.detach()) * 0).sqrt() if wrong else loss, count


def ever(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """No loss is a number, step ``BAD`` and later."""
    step, _ = _step()
    loss, count = next_token(model, batch)
    return loss * (float("nan") if step >= BAD else 1.0), count


@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(2, 1), Layout(1, 2)], ids=str)
def test_g3_l3_no_parameter_is_changed(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    """G3, L3: on every member the bytes of weights and moments after the step are those before it; the steps
    around it change them, and the checkpoint holds numbers only.  The control: a finite loss changes them in
    that step too.
    """
    bad = {"one": [MICROBATCH], "every": [*range(4)], "gradient": []}
    jobs = [small_job(tmp_path / kind, loss=f"{HERE}:{kind}") for kind in bad]
    *found, fine = train_each(ranks, [*jobs, small_job(tmp_path / "fine")], layout, 3)
    for job, told, microbatches in zip(jobs, found, bad.values(), strict=True):
        for part in told.parts:
            first, second, third = part.hashes
            assert first == second != third
            assert [outcome.finite for outcome in part.outcomes] == [True, False, True]
        losses = torch.tensor(told.outcomes[BAD - 1].losses)
        assert [*losses.isfinite().logical_not().nonzero().flatten()] == microbatches
        reader = Run.open(job).checkpoints.open(told.version)
        for tensor in reader.tensors():
            raw = bytearray(next(reader.read([tensor.whole()]))[1])
            assert torch.frombuffer(raw, dtype=torch.float32).isfinite().all()
    assert all(len(set(part.hashes)) == 3 for part in fine.parts)


def local(job: Job) -> tuple[list[str], str]:
    """Trains without Ray.  Returns the sentences, the last of which is how it ended, and the error with which
    it did.
    """
    said = list[str]()

    def show(line: Line) -> None:
        if isinstance(line, Sentence):
            said.append(line.text)

    try:
        state, reason, _ = run_local(job, show)
        assert state == "Finished"
        said.append(reason)
    except JobError as error:
        return said, str(error)
    return said, ""


def test_l3_a_run_without_ray_says_it_too(tmp_path: Path) -> None:
    """L3: the samples are those of the cursor.  The control, a finite run, says nothing."""
    said, error = local(small_job(tmp_path, name="one", loss=f"{HERE}:one", steps=3))
    (skipped,) = [text for text in said if "is skipped" in text]
    cause, _, advice = skipped.partition("; ")
    found = re.fullmatch(
        (
            r"step 2 is skipped and changes no weights: the loss of microbatch 1 is nan "
            r"\(samples (\d+), (\d+)\)"
        ),
        cause,
    )
    assert advice == (
        "look at these samples, and in the forward pass for a division, a logarithm or an overflow"
    )
    assert [text for text in said if "not finite" in text or "overflow" in text] == [skipped], (
        "one sentence for one fact"
    )
    job = small_job(tmp_path)
    expected = Cursor(64, job.global_batch, job.seed, job.data.sampling).microbatch_ids(
        2, MICROBATCH, job.microbatch_size
    )
    assert found is not None and [int(each) for each in found.groups()] == [*expected]
    assert (
        said[-1] == "all 3 steps are done; 1 step was skipped, because no finite gradient came: 2"
        and not error
    ), "also with --quiet"
    assert not [text for text in local(small_job(tmp_path, name="fine", steps=3))[0] if "skipped" in text]


def test_l3_too_many_in_a_row_end_it_with_the_last_good_state(tmp_path: Path) -> None:
    """L3: the checkpoint has the weights of a run that ends at the last good step.  The control: one step
    fewer ends otherwise.
    """
    settings: dict[str, Any] = {"schedule": {"kind": "constant"}, **SMALL}
    job = toy_job(tmp_path, name="ever", loss=f"{HERE}:ever", steps=8, watch={"max_skipped": 3}, **settings)
    said, error = local(job)
    assert error.startswith(
        "3 steps were skipped in a row, 2–4, and watch.max_skipped is 3: the last good step is 1"
    )
    assert error.endswith("resumes from step 4") and len([text for text in said if "is skipped" in text]) == 3
    short = [toy_job(tmp_path, name=f"short-{steps}", steps=steps, **settings) for steps in (1, 2)]
    for each in short:
        local(each)
    ended = Run.open(job).newest()
    assert ended is not None and ended.step == 4
    assert exported_hash(job) == exported_hash(short[0]) != exported_hash(short[1])
    _, error = local(job)
    assert error.startswith("3 steps were skipped in a row, 5–7"), (
        "a run that is resumed may skip as many again"
    )


def test_l3_fp16_that_looks_for_its_scale_says_nothing(tmp_path: Path) -> None:
    """L3: a scale that is too large overflows in the first steps; these do not count, however few are
    allowed.
    """
    job = small_job(tmp_path, steps=4, precision="fp16", loss=f"{HERE}:steep", watch={"max_skipped": 1})
    said, error = local(job)
    assert not error and not [text for text in said if "skipped" in text]
    job = toy_job(
        tmp_path,
        name="fixed",
        steps=4,
        precision="fp16",
        loss=f"{HERE}:steep",
        loss_scale=1024.0,
        watch={"max_skipped": 1},
        **SMALL,
    )
    said, error = local(job)
    assert error.startswith("1 step was skipped in a row, 1, and"), (
        "the control: a scale that does not fall is the job's"
    )


def steep(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss whose gradients overflow fp16 at the first scale, and do not at a quarter of it."""
    loss, count = next_token(model, batch)
    return loss * 100, count
