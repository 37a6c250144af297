"""The costs of a recorded run: from its journal to a replay."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from actors.cli import main
from elastic.report.measured_costs import DETECT_S, costs_of
from elastic.runs.run import Run
from elastic.sim.costs import Costs
from tests.golden.make import unpack
from tests.support.job_file import to_toml


def test_a_recorded_run_gives_the_costs_of_a_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = unpack("journals/killed.tar.gz", tmp_path)
    costs = Costs.of(costs_of(Run.open(job).segments(), "killed"))
    assert costs.about == "killed" and costs.detect_s == DETECT_S
    assert 0 < costs.round_s < costs.step_s(1) and 0 < costs.reform_s < 10 and 0 < costs.start_s < 60
    (toml := tmp_path / "job.toml").write_text(to_toml(job))
    written = tmp_path / "written.json"
    assert main(["report", str(toml), "--costs", str(written)]) == 0
    assert Costs.from_json(written.read_text()) == replace(costs, about=job.name)
    capsys.readouterr()
    (trace := tmp_path / "machines.csv").write_text("seconds,event,node\n0,add,a\n0,add,b\n600,remove,b\n")
    (file := tmp_path / "costs.json").write_text(costs.to_json())
    words = ["simulate", "--trace", str(trace), "--costs", str(file), "--days", "0.01", "--json"]
    assert main(words) == 0
    assert 0.9 < json.loads(capsys.readouterr().out)["goodput"] <= 1


def test_a_journal_without_steps_has_no_costs() -> None:
    with pytest.raises(ValueError, match="no step whose time is known"):
        costs_of([])
