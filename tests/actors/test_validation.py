"""L1: what a run validated is validated again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from actors import cluster
from actors.cli import main
from actors.launch import launch
from elastic.report.story import Sentence
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from elastic.train.alone.revisit import evaluate_here
from tests.support.chaos import alone, exported_hash
from tests.support.job_file import to_toml
from tests.support.own_loops import steps_in
from tests.support.toys import LIGHT, Sums, toy_job

LOOP = "tests.support.own_loops:ends"
HELD_OUT = {
    "every": 4,
    "samples": 21,
    "dataset": "tests.support.toys:Sums",
    "args": {"samples": 50, "seq_len": 16},
}


def test_a_checkpoint_is_evaluated_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """L1: the value is that of the run, to the bit; the run is not changed.  The control: another checkpoint
    loses something else.
    """
    job = toy_job(tmp_path, name="local", validation=HELD_OUT, steps=8, checkpoint={"save_every": 4}, **LIGHT)
    alone(job)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    (version, then), (last, now) = evaluate_here(job, 4), evaluate_here(job)
    assert (version.step, last.step) == (4, 8) and then.loss != now.loss
    file = tmp_path / "job.toml"
    file.write_text(to_toml(job))
    assert main(["evaluate", str(file), "--step", "4"]) == 0
    assert f"validation after step 4: loss {then.mean:.6g} over {then.count} terms" in capsys.readouterr().out
    assert (
        main(["evaluate", str(file), "--step", "5"]) == 1
        and "no good checkpoint at step 5" in capsys.readouterr().out
    )
    file.unlink()
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    lines: list[str] = []
    again = toy_job(tmp_path / "again", name="local", validation=HELD_OUT, steps=8, **LIGHT)
    run_local(again, lambda line: lines.append(line.text) if isinstance(line, Sentence) else None)
    assert f"validation after step 4: loss {then.mean:.6g} over {then.count} terms" in lines


class Noise(Sums):
    """Samples that nobody can learn, so that the loss on them rises.  The process that first reads for the
    ``kills``-th time dies.
    """

    def __init__(self, mark: str, kills: int = 0, **args: Any) -> None:
        super().__init__(**args)
        self.mark, self.kills, self.reads = Path(mark), kills, 0

    def read(self, ids: tuple[int, ...]) -> dict[str, torch.Tensor]:
        self.reads += 1
        if self.reads == self.kills and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        found = super().read(ids)
        draws = torch.Generator().manual_seed(sum(ids))
        return {"tokens": torch.randint(29, found["tokens"].shape, generator=draws)}


@pytest.mark.must_run_in_ci
def test_a_run_that_has_lost_patience_ends_at_the_same_step_in_every_layout(tmp_path: Path) -> None:
    """L1: a worker is killed within the validation that is the last.  Started again it is finished; with more
    patience it goes on.
    """
    held_out = {"every": 2, "samples": 32, "patience": 2, "dataset": f"{__name__}:Noise"}

    def job(name: str, kills: int = 0, patience: int = 2, min_delta: float = 0.0) -> Any:
        args = {"samples": 50, "seq_len": 16, "mark": str(tmp_path / "mark"), "kills": kills}
        validation = held_out | {"args": args, "patience": patience, "min_delta": min_delta}
        return toy_job(
            tmp_path,
            name=name,
            validation=validation,
            steps=40,
            checkpoint={"save_every": 2},
            workers={"max": 2},
            loop=LOOP,
            **LIGHT,
        )

    def after() -> list[int]:
        """Returns the steps at which the code after the loop has run since the last call."""
        steps = steps_in(tmp_path / "after")
        (tmp_path / "after").unlink()
        return steps

    local = alone(job("single"))
    (last,) = {version.step for version in [Run.open(job("single")).newest()] if version is not None}
    assert 6 <= last < 40 and after() == [last]
    two = job("two", kills=last // 2 * 4)
    result = launch(two, show=lambda line: None)
    reasons = " ".join(record["reason"] for record in Run.open(two).records())
    assert (tmp_path / "mark").exists() and "its process died" in reasons
    assert (result.state, result.step, result.exit_code) == (
        "Finished",
        last,
        0,
    ) and f"so step {last} is the last" in reasons
    assert exported_hash(two) == local.hash and {*after()} == {last}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "connect", None)  # it is known before Ray starts
        again = launch(two, show=lambda line: None)
    assert again.reason.endswith(f"so step {last} is the last")
    assert (again.state, again.step) == ("Finished", last) and Run.open(two).newest() == Run.open(
        two
    ).checkpoints.versions()[-1].version
    more = launch(job("two", patience=3), show=lambda line: None)
    assert more.state == "Finished" and more.step > last
    state, reason, step = run_local(job("single"), lambda line: None)
    assert (state, step) == ("Finished", last) and reason.endswith(f"so step {last} is the last")
    for found in (
        launch(job("delta", min_delta=9.0), show=lambda line: None).step,
        run_local(job("one", min_delta=9.0), lambda line: None)[2],
    ):
        assert found == 6, "only the first validation counts"
