"""L1: what a run validated is validated again."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.cli import main
from elastic.report.story import Sentence
from elastic.train.local import run_local
from elastic.train.revisit import evaluate_here
from tests.support.chaos import alone
from tests.support.job_file import to_toml
from tests.support.toys import LIGHT, toy_job

HELD_OUT = {"every": 4, "samples": 21, "dataset": "tests.support.toys:Sums", "args": {"samples": 50, "seq_len": 16}}


def test_a_checkpoint_is_evaluated_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """L1: the value is that of the run, to the bit; the run is not changed.  The control: another checkpoint loses something else."""
    job = toy_job(tmp_path, name="local", validation=HELD_OUT, steps=8, checkpoint={"save_every": 4}, **LIGHT)
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
    again = toy_job(tmp_path / "again", name="local", validation=HELD_OUT, steps=8, **LIGHT)
    run_local(again, lambda line: lines.append(line.text) if isinstance(line, Sentence) else None)
    assert f"validation after step 4: loss {then.mean:.6g} over {then.count} terms" in lines
