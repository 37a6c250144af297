"""L2: the metrics of a run on a cluster whose coordinator and worker are killed: in the bucket, each step
once.
"""

from __future__ import annotations

import json
import re
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.cli import main
from tests.actors.test_failover import Killer, job_of, running
from tests.support.chaos import alone, assert_nothing_left, trial
from tests.support.job_file import to_toml
from tests.support.kills import SAMPLES
from tests.support.report_page import read_page
from tests.support.sinks import rows_in
from tests.support.toys import LIGHT
from tests.support.trackers import History, mlflow_has, tensorboard_has, wandb_has

STEPS, GATE, LOST = 20, 14, 16
"""Steps of the run; the one that waits for the coordinator's death, and the one in which a worker dies."""

DEATH = re.compile(r"\bw\d+ is lost\b|\blost \(not found\): w\d+")
"""The words by which an incident names a dead worker, whom the coordinator saw dead or the next one did not
find.
"""


def trackers(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the trackers whose packages are here, with their arguments."""
    every: dict[str, tuple[str, dict[str, Any]]] = {
        "tensorboard": ("tensorboard", {}),
        "wandb": ("wandb", {"folder": str(folder / "wandb"), "mode": "offline"}),
        "mlflow": ("tests.support.trackers:mlflow_in_files", {"uri": f"file://{folder}/mlflow"}),
    }
    return {sink: args for package, (sink, args) in every.items() if find_spec(package) is not None}


def single(numbers: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns the numbers in fp32, in which TensorBoard has them."""
    return [(step, float(np.float32(value))) for step, value in numbers]


def shown_by(folder: Path) -> dict[str, tuple[History, dict[int, str]]]:
    """Returns what each tracker has."""
    found = dict[str, tuple[History, dict[int, str]]]()
    if (folder / "killed/tensorboard/killed").exists():
        found["tensorboard"] = tensorboard_has(folder / "killed/tensorboard/killed")
    if (folder / "wandb").exists():
        numbers, texts, ids = wandb_has(next((folder / "wandb").iterdir()))
        assert len(ids) == 1
        found["wandb"] = numbers, texts
    if (folder / "mlflow").exists():
        numbers, texts, runs = mlflow_has(f"file://{folder}/mlflow")
        assert runs == 1
        found["mlflow"] = numbers, texts
    return found


def test_l2_each_step_once_although_coordinator_and_worker_are_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L2: read back with json alone, the losses are those of one process without Ray, bit for bit, and every
    number is finite.

    The trackers that are installed, read with their own readers, have the same numbers, each step once, in
    one run each.

    The coordinator is killed between two saves; then a worker is, the only holder of its shard, so that steps
    are done again.
    """
    settings: dict[str, Any] = {
        **LIGHT,
        "parallel": {"dp_replicate": 1},
        "copies": {"copy_every": 0},
        "steps": STEPS,
    }
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    settings["metrics"] = {
        "sinks": {"tests.support.sinks:Table": {"path": str(tmp_path / "steps.db")}, **trackers(tmp_path)}
    }
    data = {"dataset": "tests.support.toys:Sums", "args": {"samples": SAMPLES}}
    reference = alone(job_of(tmp_path / "alone", "local", data=data, steps=STEPS, **LIGHT))
    job = job_of(
        tmp_path,
        "killed",
        {GATE: "gate"},
        faults=[{"point": "backward", "step": LOST, "world_rank": 1}],
        **settings,
    )
    killer = Killer(tmp_path, [running(9)])
    chaos = trial(job, killer)
    assert (chaos.result.state, chaos.hash) == ("Finished", reference.hash)
    assert [end.signal for end in killer.ends] == [signal.SIGKILL]
    assert LOST - 1 in [each.final["step"] for each in chaos.witness.killed()], "the victim, in its step"
    assert rows_in(tmp_path / "steps.db") == [*enumerate(reference.losses, 1)], "a sink of the user's own"
    files = sorted((tmp_path / "killed" / "metrics").iterdir())
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert [row["loss"] for row in rows] == reference.losses
    assert len({row["generation"] for row in rows}) > 1 and {row["world"] for row in rows} >= {2}
    assert len(shown_by(tmp_path)) == len(trackers(tmp_path))
    for name, (numbers, texts) in shown_by(tmp_path).items():
        for number in ("loss", "norm", "lr", "tokens", "world", "skipped", "tokens_per_s", "generation"):
            wanted = [(row["step"], row[number]) for row in rows]
            assert numbers[number] == (single(wanted) if name == "tensorboard" else wanted), (name, number)
        assert texts == {row["step"]: row["event"] for row in rows if "event" in row} != {}, name
    assert len(files) <= STEPS // 6 + 1, "no more than one for each save"
    shown = [line.step for line in chaos.lines if hasattr(line, "step")]
    assert len(shown) != STEPS or len(set(shown)) != STEPS, (
        "the control: what the terminal shows is not each step once"
    )
    told = {
        row["step"]
        for row in rows
        if row.get("tokens_per_s", 0) > 0 and row["lr"] > 0 and row["norm"] > 0 and row["time"] > 1e9
    }
    assert told == {*range(1, STEPS + 1)}
    file = tmp_path / "job.toml"
    file.write_text(to_toml(job))
    capsys.readouterr()
    assert main(["metrics", str(file)]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        row | {"final": 1} for row in rows
    ]
    check_report(file, tmp_path / "page.html", rows, chaos.lines)
    assert_nothing_left(chaos)


def check_report(job: Path, to: Path, rows: list[dict[str, Any]], shown: list[Any]) -> None:
    """Fails unless the page has the losses of ``rows``, an incident for the killed worker, and the
    coordinator's death, once each.
    """
    assert main(["report", str(job), "--to", str(to)]) == 0
    page = read_page(to.read_text(encoding="utf-8"))
    assert [point[3] for point in page.points("loss", 0)] == pytest.approx(
        [row["loss"] for row in rows], rel=1e-5
    )
    incidents = [row for row in page.tables["incidents"][1:] if row[1] == "incident"]
    assert page.tiles["Faults"] == str(len(incidents)) and any(DEATH.search(row[2]) for row in incidents)
    again = sum(int(row[5]) for row in page.tables["incidents"][1:])
    assert again > 0, "only the victim had its shard"
    lanes = {lane["name"]: sum(mark[1] for mark in lane["marks"]) for lane in page.data["loss"]["lanes"]}
    assert lanes["World formed"] >= 2 and lanes["Worker, node or coordinator lost"] >= 2
    assert "Started again, branch" not in lanes, "a coordinator that takes over starts nothing again"
    saved = {
        line.text.partition(" is in the bucket")[0]
        for line in shown
        if " is in the bucket" in getattr(line, "text", "")
    }
    assert lanes["Checkpoint"] >= len(saved) > 0
