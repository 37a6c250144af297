"""R1, R8, R14: every kind of fault, at every point, in every layout, many in a run; each run ends with the bits of the undisturbed one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.data.cursor import Cursor
from elastic.report.story import StepLine
from elastic.train.local import run_local
from tests.support.chaos import assert_survived, exported_hash
from tests.support.kills import FATAL, LAYOUTS, POINTS, SAMPLES, STEPS, Script, again_and_again, down_and_up, perform
from tests.support.toys import toy_job


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The undisturbed run: one worker in this process, without Ray."""
    data = {"dataset": "tests.support.toys:Sums", "args": {"samples": SAMPLES}}
    job = toy_job(tmp_path_factory.mktemp("reference"), name="local", steps=STEPS, data=data)
    lines: list[StepLine] = []
    state, _, step = run_local(job, lambda line: lines.append(line) if isinstance(line, StepLine) else None)
    assert (state, step) == ("Finished", STEPS)
    cursor = Cursor(SAMPLES, job.global_batch, job.seed, job.data.sampling)
    read = {s: tuple(cursor.microbatch_ids(s, i, job.microbatch) for i in range(job.microbatches)) for s in range(1, STEPS + 1)}
    due = {step: SimpleNamespace(samples=ids) for step, ids in read.items()}
    return SimpleNamespace(hash=exported_hash(job), losses=[line.loss for line in lines], ledger=due)


def survives(script: Script, folder: Path, reference: Any) -> None:
    assert_survived(perform(script, folder, "kills"), reference, worlds=script.worlds, tiers=script.tiers)


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kind_at_every_point(tmp_path: Path, reference: Any, layout: str, point: str) -> None:
    """3→2→3→2→3…"""
    survives(again_and_again(layout, point), tmp_path, reference)


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_down_to_one_and_up_again(tmp_path: Path, reference: Any, layout: str, number: int) -> None:
    """4→3→1→2→4"""
    between, kind = ("forming", "healing")[number % 2], FATAL[number // 2]
    survives(down_and_up(layout, POINTS[number], between, kind), tmp_path, reference)
