"""L1: a validation survives a kill in its middle, on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.cli import main
from elastic.job import Job
from elastic.report.ledger import ledger
from elastic.report.story import Scored, Sentence
from elastic.runs.run import Run
from elastic.train.local import run_local
from elastic.train.revisit import evaluate_here
from tests.support.chaos import alone, assert_nothing_left, trial
from tests.support.job_file import to_toml
from tests.support.toys import toy_job

HELD_OUT = {"every": 4, "samples": 21, "dataset": "tests.support.toys:Sums", "args": {"samples": 50, "seq_len": 16}}


def told(job: Job) -> dict[int, Any]:
    return {step - 1: each.validated for step, each in ledger(Run.open(job).segments()).items() if each.validated is not None}


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
def test_l1_a_kill_in_a_validation(tmp_path: Path, rank: int) -> None:
    """L1: the next world stands at the same step and validates it again; each is told once, with the bits of one process without Ray.

    The bits of the training are those of a run without validations.
    """
    settings = {"steps": 14, "parallel": {"dp_replicate": 1}}
    expected = alone(toy_job(tmp_path / "alone", name="local", **settings))
    there = toy_job(tmp_path / "validated", name="local", validation=HELD_OUT, **settings)
    alone(there)
    job = toy_job(tmp_path, validation=HELD_OUT, **settings, faults=[{"point": "validation", "step": 9, "world_rank": rank}])
    chaos = trial(job)
    assert (chaos.result.state, chaos.hash, chaos.losses) == ("Finished", expected.hash, expected.losses)
    (killed,) = chaos.witness.killed()
    assert killed.final["step"] == 8
    said = [line.text for line in chaos.lines if isinstance(line, Sentence)]
    (first, *_) = [text for text in said if text.startswith("validation after step 4: loss ")]
    assert sum("validation after step 8: loss " in text for text in said) == 1
    assert sum("validation after step 14: loss " in text for text in said) == 1
    scored = {line.step: line.loss for line in chaos.lines if isinstance(line, Scored)}
    assert [*scored] == [4, 8, 12, 14] and [scored[step] for step in told(job)] == [each.mean for each in told(job).values()]
    assert [*told(job)] == [4, 8, 12] and first.startswith(f"validation after step 4: loss {told(job)[4].mean:.6g}")
    assert_nothing_left(chaos)


def test_a_checkpoint_is_evaluated_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """L1: the value is that of the run, to the bit; the run is not changed.  The control: another checkpoint loses something else."""
    job = toy_job(tmp_path, name="local", validation=HELD_OUT, steps=8, checkpoint={"save_every": 4})
    alone(job)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    (version, then), (last, now) = evaluate_here(job, 4), evaluate_here(job)
    assert (version.step, last.step) == (4, 8) and then.loss != now.loss
    file = tmp_path / "job.toml"
    file.write_text(to_toml(job))
    assert main(["evaluate", str(file), "--step", "4"]) == 0
    assert f"validation after step 4: loss {then.mean:.6g} over {then.count} terms" in capsys.readouterr().out
    assert main(["evaluate", str(file), "--step", "5"]) == 1 and "no good checkpoint at step 5" in capsys.readouterr().out
    file.unlink()
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    lines: list[str] = []
    again = toy_job(tmp_path / "again", name="local", validation=HELD_OUT, steps=8)
    run_local(again, lambda line: lines.append(line.text) if isinstance(line, Sentence) else None)
    assert f"validation after step 4: loss {then.mean:.6g} over {then.count} terms" in lines
