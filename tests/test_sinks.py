"""L2: TensorBoard, Weights & Biases and MLflow, read back with their own readers: each step once, whatever
dies.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic.errors import JobError
from elastic.report.metrics import Row
from elastic.sinks.port import make_sink
from elastic.train.checks.early import check_early
from tests.support.toys import toy_job
from tests.support.trackers import STEPS, History, mlflow_has, row, tensorboard_has, tracked, wandb_has


def same(found: History, rows: Sequence[Row], exact: bool = True) -> None:
    """Fails unless a tracker has each number of each step of ``rows`` once, and in order; ``exact`` says that
    it has them in fp64.
    """
    for name in {name for each in rows for name in each} - {"step", "time", "event", "final"}:
        wanted = [(each["step"], each[name]) for each in rows if name in each]
        assert [step for step, _ in found[name]] == [step for step, _ in wanted], name
        values = [value if exact else float(np.float32(value)) for _, value in wanted]
        np.testing.assert_array_equal([value for _, value in found[name]], values, name)


def of_tensorboard(folder: Path) -> tuple[dict[str, Any], Callable[[], tuple[History, dict[int, str]]], bool]:
    pytest.importorskip("tensorboard")
    return {}, lambda: tensorboard_has(folder / "runs/toy/tensorboard/toy"), False


def of_wandb(folder: Path) -> tuple[dict[str, Any], Callable[[], tuple[History, dict[int, str]]], bool]:
    pytest.importorskip("wandb")

    def has() -> tuple[History, dict[int, str]]:
        numbers, texts, ids = wandb_has(next((folder / "wandb").iterdir()))
        assert ids == {tracked(folder).id}
        return numbers, texts

    return {"folder": str(folder / "wandb"), "mode": "offline"}, has, True


def of_mlflow(folder: Path) -> tuple[dict[str, Any], Callable[[], tuple[History, dict[int, str]]], bool]:
    pytest.importorskip("mlflow")
    uri = f"file://{folder}/mlflow"

    def has() -> tuple[History, dict[int, str]]:
        numbers, texts, runs = mlflow_has(uri)
        assert runs == 1
        return numbers, texts

    return {"uri": uri}, has, True


TRACKERS = {"tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow}


@pytest.mark.parametrize("name", TRACKERS)
def test_l2_a_tracker_has_each_step_once_although_its_writer_is_killed(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L2: SIGKILL at any moment of writing, again and again.  The controls: a step that is missing, and one
    that is there twice.
    """
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_SILENT", "true")
    args, has, exact = TRACKERS[name](tmp_path)
    program = f"from tests.support.trackers import hand_on; hand_on({str(tmp_path)!r}, {name!r}, {args!r})"
    killed = 0
    for lives in (1, 3, STEPS):
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(lives):
                if not writer.stdout.readline():
                    break
            else:
                writer.kill()
                killed += 1
        assert writer.returncode == (-9 if lives < STEPS else 0)
    found, texts = has()
    assert killed == 2
    rows = [row(step) for step in range(1, STEPS + 1)]
    same(found, rows, exact)
    assert texts == {25: "w25 was lost", 50: "w50 was lost"}
    for wrong in (rows[:-1], [*rows, rows[-1]], [*rows[:5], {**rows[5], "loss": 0.5}, *rows[6:]]):
        with pytest.raises(AssertionError):
            same(found, wrong, exact)


def test_l2_whatever_is_written_twice_is_seen(tmp_path: Path) -> None:
    """L2: the control of the test above: a tracker that appends what it has; and ours, which refuses it."""
    pytest.importorskip("tensorboard")
    _, has, exact = of_tensorboard(tmp_path)
    rows = [row(step) for step in range(1, 5)]
    ours = make_sink(tracked(tmp_path), "tensorboard", {})
    ours.write(rows)
    with pytest.raises(Exception, match="exists"):
        ours.write(rows)
    same(has()[0], rows, exact)
    folder = tmp_path / "runs/toy/tensorboard/toy"
    file = next(folder.iterdir())
    (folder / f"{file.name}.again").write_bytes(file.read_bytes())
    with pytest.raises(AssertionError):
        same(has()[0], rows, exact)


def test_l2_a_step_of_which_only_a_part_was_written_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L2: MLflow, whose process died between two numbers of step 3.  The control is whoever does not look."""
    client = pytest.importorskip("mlflow.tracking").MlflowClient
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    args, has, exact = of_mlflow(tmp_path)
    rows = [row(step) for step in range(1, 5)]
    make_sink(tracked(tmp_path), "mlflow", args).write(rows[:2])
    began = client(tracking_uri=args["uri"])
    run = began.search_runs([began.get_experiment_by_name("elastic").experiment_id])[0].info.run_id
    began.log_metric(run, "loss", rows[2]["loss"], step=3)
    goes_on = make_sink(tracked(tmp_path), "mlflow", args)
    assert goes_on.last() == 2
    goes_on.write(rows[2:])
    same(has()[0], rows, exact)
    began.log_metric(run, "loss", rows[2]["loss"], step=3)
    with pytest.raises(AssertionError):
        same(has()[0], rows, exact)


def test_l2_a_run_of_the_same_name_in_another_bucket_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L2: so a folder that was emptied does not go on in the tracker's old run.  The control is the same
    bucket.
    """
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path}/mlflow"
    first = make_sink(tracked(tmp_path / "a"), "mlflow", {"uri": uri})
    first.write([row(1), row(2)])
    assert make_sink(tracked(tmp_path / "a"), "mlflow", {"uri": uri}).last() == 2
    assert make_sink(tracked(tmp_path / "b"), "mlflow", {"uri": uri}).last() == 0
    assert mlflow_has(uri)[2] == 2


def test_l2_another_machine_goes_on_where_the_bucket_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L2: W&B's folder is not there.  The control is another run, which begins at its first step."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    here, there = ({"folder": str(tmp_path / each), "mode": "offline"} for each in ("here", "there"))
    make_sink(tracked(tmp_path), "wandb", here).write([row(step) for step in range(1, 5)])
    goes_on = make_sink(tracked(tmp_path), "wandb", there)
    assert goes_on.last() == 4
    goes_on.write([row(step) for step in range(5, 9)])
    found = [wandb_has(next((tmp_path / each).iterdir())) for each in ("here", "there")]
    assert [[step for step, _ in numbers["loss"]] for numbers, _, _ in found] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert found[0][2] == found[1][2] == {tracked(tmp_path).id}
    assert make_sink(tracked(tmp_path / "other"), "wandb", there).last() == 0


def test_l2_a_tracker_without_its_package_is_refused_before_any_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L2: the sentence says what to install; so are a name that there is not, and arguments that it does not
    take.
    """
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "elastic.sinks.wandb", raising=False)

    def refusal(sinks: dict[str, Any]) -> str:
        with pytest.raises(JobError) as refused:
            check_early(toy_job(tmp_path, metrics={"sinks": sinks}))
        return str(refused.value)

    assert "pip install 'elastic-train[wandb]'" in refusal({"wandb": {"folder": "w"}})
    assert "did you mean 'tensorboard'" in refusal({"tensorbord": {}})
    assert "use one of mlflow, tensorboard, wandb, or your own class" in refusal({"zzz": {}})
    pytest.importorskip("tensorboard")
    assert "unexpected keyword argument 'foldr'; it takes folder: str = ''" in refusal(
        {"tensorboard": {"foldr": "x"}}
    ).replace("'str'", "str")
    check_early(toy_job(tmp_path, metrics={"sinks": {"tensorboard": {}}}))
