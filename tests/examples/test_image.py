"""A model of images, with BatchNorm, trains as plain torch does, and its accuracy on images kept aside is
measured.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from actors.launch import launch
from elastic.config.settings import read_toml
from elastic.data.cursor import Cursor
from elastic.job import Job
from elastic.plan.layout import Layout
from examples import image
from tests.examples.blocks import ROOT
from tests.support.chaos import exported_hash
from tests.support.ranks import Ranks
from tests.support.segments import train

STEPS = 8
FILE = ROOT / "examples" / "image.toml"
HERE = "examples.image"
"""The module as the tests import it."""


def job_of(bucket: Path, **settings: Any) -> Job:
    """Returns the job of the example, with few small steps."""
    names = {
        "model": f"{HERE}:Net",
        "loss": f"{HERE}:loss",
        "data.dataset": f"{HERE}:Stripes",
        "validation.dataset": f"{HERE}:Stripes",
    }
    few = {
        "steps": STEPS,
        "global_batch": 32,
        "microbatch": 8,
        "model_args.width": 4,
        "validation.every": 2,
        "validation.samples": 30,
    }
    return Job.load(FILE, {"bucket": str(bucket), **names, **few, "checkpoint.save_every": 2, **settings})


def judged(job: Job, seed: int = 0) -> tuple[list[float], dict[int, float]]:
    """Trains with torch alone, one microbatch after the other; returns the losses, and the parts of wrong
    answers after steps.
    """
    torch.manual_seed(0)
    model = image.Net(**job.model_args)
    model.init_weights()  # as the engine does, after the constructor
    decay = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": decay, "weight_decay": job.optim.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=job.optim.lr, betas=job.optim.betas)
    data, aside = image.Stripes(**job.data.args), image.Stripes(**job.validation.args)
    cursor, losses, wrong = Cursor(len(data), int(job.global_batch), seed), list[float](), dict[int, float]()
    for step in range(1, job.steps + 1):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = job.optim.lr
        optimizer.zero_grad()
        total = 0.0
        for number in range(job.microbatches):
            batch = data.read(cursor.microbatch_ids(step, number, job.microbatch_size))
            mean = F.cross_entropy(model(batch["image"]), batch["label"]) / job.microbatches
            mean.backward()
            total += mean.item()
        nn.utils.clip_grad_norm_(model.parameters(), job.optim.clip_norm)
        optimizer.step()
        losses.append(total)
        with torch.no_grad():
            held = aside.read(range(job.validation.samples))
            model.eval()
            wrong[step] = (model(held["image"]).argmax(1) != held["label"]).double().mean().item()
            model.train()
    return losses, wrong


def test_an_image_model_trains_as_with_plain_torch_in_every_layout(
    tmp_path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    """The losses and the accuracy are those of torch, whose norms see one microbatch after the other, and its
    speed is told in samples.

    The bits are the same for two workers, with whole and with cut state.  The control: torch draws other
    samples.
    """
    job = job_of(tmp_path / "a", **{"schedule.kind": "constant"})
    result = launch(job, local=True)
    losses, wrong = judged(job)
    torch.testing.assert_close([*result.losses.values()], losses, rtol=1e-4, atol=1e-5)
    assert (
        result.validations == pytest.approx({step: wrong[step] for step in result.validations})
        and len(set(wrong.values())) > 2
    )
    with pytest.raises(AssertionError):
        torch.testing.assert_close([*result.losses.values()], judged(job, 1)[0], rtol=1e-3, atol=1e-5)
    told = capsys.readouterr().out
    assert re.search(r"step +8/8 +loss \S+ +[\d,]+ samples/s", told) and "tokens/s" not in told, told
    for layout in (Layout(1, 2), Layout(2, 1)):
        found = train(ranks, job_of(tmp_path / str(layout), **{"schedule.kind": "constant"}), layout, STEPS)
        assert found.hash == exported_hash(job), layout


@pytest.mark.full
def test_the_example_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine of ten images that it has not seen get the right label; by chance it would be one of ten."""
    monkeypatch.syspath_prepend(str(FILE.parent))
    monkeypatch.chdir(tmp_path)
    result = launch(Job.load(FILE), local=True, show=lambda _: None)
    accuracy = {step: 1 - wrong for step, wrong in result.validations.items()}
    assert accuracy[max(accuracy)] > 0.9, accuracy


@pytest.mark.fast
def test_the_images_are_functions_of_their_numbers() -> None:
    """Read together or alone, first or last; each class comes equally often."""
    data = image.Stripes(100, 40)
    together = data.read((3, 1, 39))
    for row, number in enumerate((3, 1, 39)):
        alone = image.Stripes(100 + number, 1).read((0,))
        assert (
            torch.equal(alone["image"][0], together["image"][row])
            and alone["label"][0] == together["label"][row]
        )
    assert torch.bincount(data.read(range(40))["label"]).tolist() == [4] * 10
    assert (
        read_toml(FILE)["data"]["args"]["count"] == 4096 == read_toml(FILE)["validation"]["args"]["first"]
    ), "none is in both"
