"""The costs of a recorded run: from its journal to a replay."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median

import pytest

from actors.cli import main
from actors.cli.chaos_command import simulated
from elastic.report.goodput import ABORT, DECIDE, HEAL, LOSS, REFORM
from elastic.report.measured_costs import DETECT_S, costs_of
from elastic.report.page.parquet import parquet_of
from elastic.report.recoveries import recoveries
from elastic.report.timeline import Timeline
from elastic.runs.run import Run
from elastic.sim.costs import Costs
from elastic.sim.trace import Row, rows_of
from tests.golden.make import unpack
from tests.sim.test_replay import BY_HAND
from tests.support.goodput_by_hand import goodput
from tests.support.job_file import to_toml


def test_a_recorded_run_gives_the_costs_of_a_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = unpack("journals/killed.tar.gz", tmp_path)
    costs = Costs.of(costs_of(Run.open(job).segments(), "killed"))
    assert costs.about == "killed; guessed: bucket_s, detect_s" and costs.detect_s == DETECT_S
    assert 0 < costs.round_s < costs.step_s(1) and 0 < costs.reform_s < 10 and 0 < costs.start_s < 60
    (toml := tmp_path / "job.toml").write_text(to_toml(job))
    written = tmp_path / "written.json"
    assert main(["report", str(toml), "--costs", str(written)]) == 0
    assert Costs.from_json(written.read_text()) == replace(
        costs, about=f"{job.name}; guessed: bucket_s, detect_s"
    )
    capsys.readouterr()
    (trace := tmp_path / "machines.csv").write_text("seconds,event,node\n0,add,a\n0,add,b\n600,remove,b\n")
    (file := tmp_path / "costs.json").write_text(costs.to_json())
    words = ["simulate", "--trace", str(trace), "--costs", str(file), "--days", "0.01", "--json"]
    assert main(words) == 0
    assert 0.9 < json.loads(capsys.readouterr().out)["goodput"] <= 1


def test_a_change_of_worlds_costs_what_its_incident_did(tmp_path: Path) -> None:
    """The detection is the time from a loss to the incident that follows it.  A loss counts once, and the last
    one before an incident counts.
    """
    segments = list(Run.open(unpack("journals/killed.tar.gz", tmp_path)).segments())
    incidents = Timeline().read(segments).account.incidents
    losses = [each for each in incidents if each.kind == LOSS]
    lost_at = [each.began_at - wait_s for each, wait_s in zip(losses, (0.25, 0.5, 0.75), strict=True)]
    costs = Costs.of(costs_of(segments, lost_at=[lost_at[0] - 60.0, *lost_at, losses[-1].began_at + 1.0]))
    assert costs.detect_s == pytest.approx(0.5)
    whole_s = [sum(each.seconds[name] for name in (DECIDE, ABORT, REFORM, HEAL)) for each in losses]
    assert costs.decide_s + costs.reform_s + costs.heal_s == pytest.approx(mean(whole_s))
    assert len(costs.starts_s) == len(losses) + 2 and costs.start_s == median(costs.starts_s)


def test_a_resume_costs_what_its_world_took_to_form(tmp_path: Path) -> None:
    """A world that forms when a run is started again is part of the start-up: its newcomers have joined no
    world, and from the bucket the state came.
    """
    segments = list(Run.open(unpack("journals/stopped.tar.gz", tmp_path)).segments())
    records = [record for _, part in segments for record in part]
    begun, resumed = recoveries(records)
    found = costs_of(segments, "stopped")
    assert found["bucket_s"] == resumed.abort_s + resumed.form_s + resumed.heal_s + resumed.go_s > 0
    assert found["join_s"] == found["reform_s"] == begun.abort_s + begun.form_s + begun.go_s > 0
    assert found["about"] == "stopped; guessed: join_s, detect_s, decide_s"
    assert found["heal_s"] is None, "no world has lost a member"


def test_r18_the_simulator_has_the_goodput_of_a_recorded_replay(tmp_path: Path) -> None:
    """R18: nodes of a real cluster came and went on parcae_hh_55_65 (``tests/actors/test_replayed_traces.py``),
    two were lost, and two came later.  The real goodput is computed by the script without code of ours.  The
    bound is 10 %; the controls are a simulator that hears of no loss, and one whose nodes start at once.
    """
    job = unpack("journals/spot.tar.gz", tmp_path)
    files = [tmp_path / job.name / f"{kind}.csv" for kind in ("present", "trace")]
    present, paid = (rows_of(file.read_text()) for file in files)
    timeline = Timeline().read(Run.open(job).segments())
    (table := tmp_path / "timeline.parquet").write_bytes(parquet_of(timeline.account.intervals))
    real = goodput(*files, table)
    assert real == pytest.approx([0.865, 0.724], abs=0.001)

    def near(paid: Sequence[Row], present: Sequence[Row]) -> bool:
        found = simulated(job, timeline, paid, present, 0.0)
        return [found.goodput, found.goodput_paid] == pytest.approx(real, rel=0.1)

    assert near(paid, present)
    assert not near([row for row in paid if row.comes], present)
    assert not near(paid, paid)


@pytest.mark.parametrize("starts_s", [7, "7", [1.0, -1.0], [1.0, None], [float("inf")]])
def test_starts_are_numbers_of_seconds(starts_s: object) -> None:
    with pytest.raises(ValueError, match=r"^starts_s = "):
        Costs.of({**asdict(BY_HAND), "starts_s": starts_s})


def test_a_journal_without_steps_has_no_costs() -> None:
    with pytest.raises(ValueError, match="no step whose time is known"):
        costs_of([])
