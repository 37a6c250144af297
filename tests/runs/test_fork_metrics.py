"""L2: a fork tells of its run from the first step on, with the steps that it has from its origins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.cli import main
from actors.cli.facts import facts_of
from elastic.report.page import page_of
from elastic.runs.metrics import rows_of
from elastic.runs.run import Run
from tests.runs.test_forks import FAST, job_of, trained
from tests.support.job_file import to_toml


def test_l2_the_metrics_of_a_fork_begin_with_those_of_its_origins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """L2: with those of a fork of a fork, and of a run that went another way since.  The judge is one run of
    that length.

    The report draws the same steps.  It measures time from the fork's own beginning on.
    """
    trained(job_of(tmp_path))
    trained(job_of(tmp_path, "fork", 8, **FAST), resume="run@4")
    trained(last := job_of(tmp_path, "last", 8), resume="fork@6")
    trained(job_of(tmp_path, **FAST), resume=2)  # step 4 of the first one is abandoned there
    (path := tmp_path / "last.toml").write_text(to_toml(last))
    assert main(["metrics", str(path)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows] == [*range(1, 9)] and {row["final"] for row in rows} == {1}
    assert [row["lr"] for row in rows] == [1e-2] * 4 + [3e-2] * 2 + [1e-2] * 2
    judge = job_of(tmp_path / "judge", steps=4)
    trained(judge)
    assert [row["loss"] for row in rows[:4]] == [row["loss"] for row in rows_of(Run.find(judge))]

    facts = facts_of(Run.find(last), last.keep(), 1e10)
    assert list(facts.columns["step"]) == [*range(1, 9)] and list(facts.columns["loss"]) == [
        row["loss"] for row in rows
    ]
    own = rows[6:]
    assert [at for at in facts.columns["time"] if at == at] == [row["time"] for row in own], (
        "NaN is not equal to itself"
    )
    spent = sum(each.seconds for each in page_of(facts).shares)
    steps_s = [row["step_s"] for row in own]
    total = max(own[-1]["time"] - own[0]["time"] + steps_s[0], sum(steps_s))
    assert spent == pytest.approx(total, abs=3 * 0.0005), (
        "up to three shares of half a millisecond are not shown"
    )
