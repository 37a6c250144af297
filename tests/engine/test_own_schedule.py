"""A schedule of one's own is a function in one's own file: a job names it.  The log has the rate of each
step, also over a resume.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.launch import launch
from elastic.engine.optim.schedule import learning_rate, learning_rate_of
from elastic.errors import CodeError, JobError
from elastic.job import Job
from elastic.report.story import Line, StepLine
from elastic.train.alone.local import run_local
from elastic.train.checks.preflight import preflight
from tests.support.chaos import exported_hash
from tests.support.toys import small_job

pytestmark = pytest.mark.fast

PEAK, STEPS = 1e-2, 9
SMALL: dict[str, Any] = {"model_args": {"vocab": 29, "dim": 32, "layers": 1, "heads": 2}, "global_batch": 4}
HERE = "tests.engine.test_own_schedule"


def cosine(step: int, steps: int, warmup: int = 2, final: float = 0.1) -> float:
    """The formula of the built-in schedule, written once more."""
    if step < warmup:
        return step / warmup
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


calls = [0]


def counting(step: int, steps: int) -> float:
    calls[0] += 1
    return 1 / calls[0]


def late_nan(step: int, steps: int) -> float:
    return math.nan if step == steps else 1.0


def negative(step: int, steps: int) -> float:
    return 0.5 - step / steps


def text(step: int, steps: int) -> str:
    return "0.1"


def failing(step: int, steps: int) -> float:
    return 1 / abs(step - 5)


def own_job(bucket: Path | str, name: str = "cosine", **args: Any) -> Job:
    return small_job(
        bucket, steps=STEPS, **SMALL, optim={"lr": PEAK}, schedule={"kind": f"{HERE}:{name}", "args": args}
    )


def interrupted(job: Job, at: int) -> list[StepLine]:
    """Trains the job in this process, with a stop after step ``at`` and a resume.  Returns the lines of the
    steps.
    """
    lines: list[StepLine] = []

    def show(line: Line) -> None:
        if isinstance(line, StepLine):
            lines.append(line)
            if line.step == at and len(lines) == at:
                raise KeyboardInterrupt

    assert run_local(job, show)[::2] == ("Stopped", at)
    assert run_local(job, show)[::2] == ("Finished", STEPS)
    return lines


def logged(job: Job) -> list[float]:
    """Returns the learning rates of all steps in the bucket, with json alone."""
    files = sorted((Path(job.bucket) / job.name / "metrics").iterdir())
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    return [row["lr"] for row in rows]


@pytest.mark.parametrize("kind", ["built in", "own"])
def test_a5_the_curve_in_the_log_is_the_formula_at_every_step_over_a_resume(
    tmp_path: Path, kind: str
) -> None:
    """A5: warmup, then cosine to exactly 0.1 × the maximum; shown and stored; with a stop at an arbitrary
    step.
    """
    job = (
        own_job(tmp_path) if kind == "own" else small_job(tmp_path, steps=STEPS, **SMALL, optim={"lr": PEAK})
    )
    formula = [PEAK * cosine(step, STEPS) for step in range(1, STEPS + 1)]
    shown = interrupted(job, 4)
    assert [line.lr for line in shown] == logged(job) == pytest.approx(formula, rel=1e-15)
    assert (logged(job)[1], logged(job)[-1]) == (PEAK, 0.1 * PEAK), "exactly"


def test_l13_the_rate_of_an_own_schedule_is_the_one_that_trains(tmp_path: Path) -> None:
    """L13: the same curve gives the bits of the built-in one, also after a stop; another curve, and another
    argument, give others.
    """
    jobs = {name: own_job(tmp_path / name) for name in ("whole", "stopped")}
    jobs["built in"] = small_job(tmp_path / "built in", steps=STEPS, **SMALL, optim={"lr": PEAK})
    jobs["argument"] = own_job(tmp_path / "argument", final=0.2)
    interrupted(jobs["stopped"], 5)
    for name in ("whole", "built in", "argument"):
        run_local(jobs[name], lambda _: None)
    found = {name: exported_hash(job) for name, job in jobs.items()}
    assert found["whole"] == found["stopped"] == found["built in"]
    assert found["argument"] != found["whole"], "the control"


def test_a_branch_goes_on_without_the_schedule_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is gone when the branch begins.  The control: while it is there, the sentence about the
    branch compares the rates.
    """
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "gone_schedule.py").write_text("def half(step, steps):\n    return 0.5\n")
    for there in (True, False):
        job, said = (
            small_job(
                tmp_path / str(there),
                steps=2,
                **SMALL,
                optim={"lr": PEAK},
                schedule={"kind": "gone_schedule:half"},
            ),
            list[str](),
        )
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path / "mine")
            launch(job, local=True, show=lambda line: None)
            later = job.replace(steps=3, schedule={"kind": "constant"})
            if there:
                launch(
                    later,
                    local=True,
                    branch=True,
                    accept_code=True,
                    show=lambda line, said=said: said.append(getattr(line, "text", "")),
                )
        sys.modules.pop("gone_schedule")
        if not there:
            end = launch(
                later,
                local=True,
                branch=True,
                accept_code=True,
                show=lambda line, said=said: said.append(getattr(line, "text", "")),
            )
            assert (end.state, end.step) == ("Finished", 3)
        (branch,) = [text for text in said if "branch 2" in text]
        assert ("the learning rate of step 3 is 0.01, where it would have been 0.005" in branch) == there


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        (
            "counting",
            {},
            "for step 0, and .* at the next call for the same step; it must depend on its arguments alone",
        ),
        (
            "late_nan",
            {},
            "returned nan for step 9 of 9; it must return a factor of optim.lr: a finite number, 0 or more",
        ),
        ("negative", {}, r"returned -0\.0\d* for step 5 of 9"),
        ("text", {}, "returned '0.1' for step 0 of 9"),
        (
            "failing",
            {},
            r"failed for step 5 of 9 with ZeroDivisionError: .*test_own_schedule\.py, line \d+\)",
        ),
        ("cosine", {"warm": 3}, r"has no argument 'warm'; it takes .*did you mean 'warmup'\?"),
        ("cosine", {"warm": 3}, r"it takes (?!.*\bsteps?\b)"),
        ("PEAK", {}, "failed for step 0 of 9 with TypeError: 'float' object is not callable"),
        ("cosinus", {}, f"did you mean '{HERE}:cosine'"),
    ],
)
def test_what_is_no_schedule_is_refused_before_a_worker_starts(
    tmp_path: Path, name: str, args: dict[str, Any], said: str
) -> None:
    with pytest.raises(
        CodeError,
        match=(
            r"^(schedule\.args\.warm = 3: )?schedule.kind = "
            rf"'{HERE}:{name}'.*{said}"
        ),
    ):
        preflight(own_job(tmp_path, name, **args))
    assert not (tmp_path / "toy").exists()


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (
            {"kind": f"{HERE}:cosine", "warmup_steps": 3},
            "schedule.warmup_steps = 3 with schedule.kind = .* leave .* out",
        ),
        ({"args": {"final": 1}}, "schedule.args = {'final': 1} have no effect with schedule.kind"),
        (
            {"kind": "cosin"},
            "schedule.kind = 'cosin' must be 'cosine', 'linear', 'constant', 'wsd' or 'rsqrt', or",
        ),
    ],
)
def test_settings_that_do_not_fit_a_schedule_are_refused(schedule: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        small_job("/b", schedule=schedule)


def test_linear_and_inverse_square_root() -> None:
    """A line that ends at 0.1 × the maximum, and the rate of Vaswani and others by their formula."""
    linear, rsqrt = (
        small_job("/b", steps=10, optim={"lr": 1.0}, schedule={"kind": kind, "warmup_steps": 4})
        for kind in ("linear", "rsqrt")
    )
    line = [0, 0.25, 0.5, 0.75, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1]
    assert [learning_rate_of(linear, step) for step in range(11)] == pytest.approx(line, rel=1e-15)
    vaswani = [min(step**-0.5, step * 4**-1.5) / 4**-0.5 for step in range(1, 11)]
    assert [learning_rate_of(rsqrt, step) for step in range(1, 11)] == pytest.approx(vaswani, rel=1e-15)
    assert learning_rate(0, steps=10, peak=1.0, warmup=0, final=0.1, kind="rsqrt") == 1.0


def test_the_digest_of_an_older_run_stays() -> None:
    assert small_job("/b", schedule={"warmup_steps": 2, "args": {}}).digest == small_job("/b").digest
    assert own_job("/b").digest != own_job("/b", final=0.2).digest
