"""A run whose validation loss rises while its training loss falls is told to over-fit, wherever the best
validation is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.cli.facts import facts_of
from actors.cli.run_commands import Absent
from elastic.ids import Version
from elastic.report.best import RISES, Loss, over_fit
from elastic.report.page import page_of
from elastic.runs.metrics import rows_of
from elastic.runs.run import Run
from tests.runs.test_forks import job_of, told, trained

pytestmark = pytest.mark.fast
Curve = Callable[[int], float]


class Noise:
    """Sequences of random tokens: nothing can be learnt from one of them about another one."""

    def __init__(self, samples: int, first: int = 0) -> None:
        self.samples, self.first = samples, first

    def __len__(self) -> int:
        return self.samples

    def fingerprint(self) -> str:
        return f"noise {self.first} {self.samples}"

    def read(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        drawn = [
            torch.randint(29, (17,), generator=torch.Generator().manual_seed(self.first + each))
            for each in ids
        ]
        return {"tokens": torch.stack(drawn)}


def said_of(validation: Curve, training: Curve, last: int = 100, data: int = 1) -> str:
    """Returns what is said of a run that is validated at each 10th step up to ``last``."""
    found = {Version(step, 1): Loss(validation(step), data) for step in range(10, last + 1, 10)}
    return over_fit(
        found,
        lambda after: ((step, training(step)) for step in range(after + 1, last + 1)),
        "--resume run@best",
    )


def test_the_validation_loss_that_rises_while_the_training_loss_falls() -> None:
    """The numbers are chosen by hand.

    The controls: it falls, it stands still, it has risen too few times, both rise, and the samples are
    others.
    """
    falls: Curve = lambda step: 3.0 - step / 100  # noqa: E731
    rises: Curve = lambda step: 2.0 + abs(step - 50) / 100  # noqa: E731
    assert said_of(rises, falls) == (
        "the validation loss has risen since step 50 (2 then, 2.5 now) while the training loss fell: "
        "the run over-fits; `--resume run@best` goes back to the best step"
    )
    assert said_of(falls, falls) == said_of(lambda step: 2.0 + (step == 50) * -0.01, falls) == ""
    first = 50 + 10 * RISES
    assert said_of(rises, falls, first) and not said_of(rises, falls, first - 10)
    assert said_of(rises, rises) == said_of(rises, lambda step: math.nan) == "", "it diverges"
    assert said_of(lambda step: rises(step) if step < 100 else math.nan, falls) == "", "nobody knows"
    assert said_of(lambda step: 1.5 if step == 80 else rises(step), falls) == "", "the best is not long ago"
    others = {Version(step, 1): Loss(1.0 + step, 1 if step < 50 else 2) for step in range(10, 61, 10)}
    assert over_fit(others, lambda after: [(step, falls(step)) for step in range(after + 1, 61)], "") == ""


def test_a_model_that_learns_its_samples_by_heart(tmp_path: Path) -> None:
    """The story, the page and the status tell it.  The judge are the numbers of `elastic metrics`.

    The control is a model that is validated on the samples that it learns.
    """
    said = {}
    for name, first in (("run", 1000), ("control", 0)):
        noise: dict[str, Any] = {"dataset": "tests.runs.test_over_fit:Noise"}
        held_out = {"every": 5, **noise, "args": {"samples": 16, "first": first}}
        data, little = (
            {**noise, "args": {"samples": 16}},
            {"checkpoint": {"save_every": 20}, "optim": {"lr": 3e-2}},
        )
        job = job_of(tmp_path, name, 30, data=data, validation=held_out, **little)
        lines = trained(job)
        run = Run.find(job)
        rows = {int(row["step"]): row for row in rows_of(run)}
        validated = {step: row["validation_loss"] for step, row in rows.items() if "validation_loss" in row}
        best = min(validated, key=validated.__getitem__)
        mean = [fmean(rows[step]["loss"] for step in range(last - 4, last + 1)) for last in (best, 30)]
        assert mean[1] < mean[0] or best == 30
        text = (
            f"the validation loss has risen since step {best} ({validated[best]:.4g} then, "
            f"{validated[30]:.4g} now)"
        )
        places = [told(lines), Absent.of(job).said, str(page_of(facts_of(run, job.keep(), 0.0)))]
        said[name] = [text in place.lower() and f"`--resume {name}@best`" in place for place in places]
        assert not any("over-fits" in place for place in places) or name == "run"
    assert said == {"run": [True] * 3, "control": [False] * 3}
