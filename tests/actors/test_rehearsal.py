"""``elastic chaos job.toml``: a job is trained undisturbed and under faults, and the second run is judged.

The cluster is the product's own, of two nodes and a head without room for workers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from torch import Tensor, nn

from actors.cli import main
from actors.local_nodes import LocalNodes
from actors.processes import log_folder
from actors.rehearsal import Judged, Rehearsal
from elastic.engine.loss import next_token
from elastic.errors import JobError
from elastic.job import Job
from elastic.protocol.faults import Fault, Kind, from_json, to_json
from elastic.report.judgement import HAPPENED
from tests.support import warm
from tests.support.chaos import exported_hash
from tests.support.commands import ROOT
from tests.support.job_file import to_toml
from tests.support.toys import LIGHT, toy_job
from tests.support.warm import Warm

STEPS = 24


@pytest.fixture(scope="module", autouse=True)
def local_cluster(no_cluster_is_left: None, forks: Warm) -> Iterator[None]:
    """No cluster; those of this module start their own, whose workers are forks."""
    ray.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(warm.SOCKET, forks.path)
        patch.setattr(ray._private.ray_constants, "SETUP_WORKER_FILENAME", warm.__file__)
        warm.lean(patch.setattr)
        patch.setenv("PYTHONPATH", str(ROOT))
        yield
    ray.shutdown()


def noisy(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The usual loss, times a number that depends on the time: no two runs have the same bits."""
    found, count = next_token(model, dict(batch))
    return found * (1.0 + 1e-3 * (time.time() % 1.0)), count


def job_of(folder: Path, name: str, **changes: Any) -> Job:
    settings: dict[str, Any] = {
        **LIGHT,
        "steps": STEPS,
        "data": {"dataset": "tests.support.toys:Sums", "args": {"samples": 16 * STEPS, "read_s": 0.05}},
        "workers": {"min": 1, "max": 2},
        "deadlines": {"grow_debounce_s": 1, "stall_s": 10},
    }
    return toy_job(folder / "bucket", name=name, **(settings | changes))


def holds(judged: Judged) -> dict[str, bool | None]:
    return {each.name: each.holds for each in judged.findings}


@pytest.mark.must_run_in_ci
def test_a_kill_changes_nothing(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """An earlier run of the same name, which was killed, has left a folder: this run is not blamed for it."""
    (before := log_folder("sure-chaos-1-0001-abcdef")).mkdir(parents=True, exist_ok=True)
    request.addfinalizer(before.rmdir)
    kill = Fault(0.3, Kind.SIGKILL, 1)
    with LocalNodes(job_of(tmp_path, "sure").workers, 2, print) as nodes:
        nodes.fill()
        good = Rehearsal(job_of(tmp_path, "sure"), nodes, print, quiet=True)
        good.undisturbed()
        judged = good.under([kill], good.name("chaos"))
        assert judged.agrees and set(holds(judged).values()) == {True}, judged.findings
        assert exported_hash(judged.job) == exported_hash(good.calm_job) == judged.evidence.digest, (
            "by a program of its own"
        )
        (struck,) = [row for row in judged.rows if row.fault.startswith("SIGKILL of ")]
        assert (struck.tier, struck.redone) == ("live", 0), judged.rows


@pytest.mark.full
def test_a_loss_with_noise_is_found(tmp_path: Path) -> None:
    """The control of the others: a job that does not give the same bits twice.  Only its bits and its losses
    differ.
    """
    job = job_of(tmp_path, "unsure", loss=f"{__name__}:noisy", trial=False, steps=6)
    with LocalNodes(job.workers, 2, print) as nodes:
        nodes.fill()
        bad = Rehearsal(job, nodes, print, quiet=True)
        bad.undisturbed()
        judged = bad.under([], bad.name("chaos"))
        wrong = {name for name, held in holds(judged).items() if held is False}
        assert judged.differs and wrong == {"same bits", "same losses", HAPPENED}, judged.findings


@pytest.mark.full
def test_the_command_writes_what_it_did_and_does_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is 0 if nothing differs, and 5 if anything does; a reference is trained once."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(to_toml(job_of(tmp_path, "toy")))
    line = ["chaos", "job.toml", "-q", "--kinds", "SIGKILL", "SIGSEGV", "--faults", "2", "--seed", "4"]
    assert main(line) == 0
    assert "nothing differs: toy-chaos-1 is as toy-calm-1" in (shown := capsys.readouterr().out), shown
    drawn = from_json(Path("toy-chaos-1.schedule.json").read_text())
    assert len(drawn) == 2 and {each.kind for each in drawn} <= {Kind.SIGKILL, Kind.SIGSEGV}
    again = ["--schedule", "toy-chaos-1.schedule.json", "--reference", "toy-calm-1"]
    assert main(["chaos", "job.toml", "-q", *again]) == 0
    assert "toy-chaos-2 is as toy-calm-1" in capsys.readouterr().out
    Path("noisy.toml").write_text(to_toml(job_of(tmp_path, "noisy", loss=f"{__name__}:noisy", trial=False)))
    assert main(["chaos", "noisy.toml", "-q", *again[:2], "--minimise"]) == 5
    shown = capsys.readouterr().out
    assert "NOT as it must be: same bits, same losses" in shown
    assert "the job itself does not give the same bits twice" in shown
    assert json.loads(Path("noisy-chaos-1.least.json").read_text()) == []


WRONG = {
    "--nodes 9": "--nodes 9 must be between 1 and 8",
    "--speed 0 --trace trace.csv": "--speed 0 must be a number greater than 0",
    "--lead -1 --trace trace.csv": "--lead -1 must be a number of at least 0",
    "--trace trace.csv": "--trace trace.csv: line 3: x,add,a: 'x' is no number of seconds",
    "--trace none.csv": "--trace none.csv: [Errno 2] No such file or directory: 'none.csv'",
    "--trace trace.csv --kinds SIGKILL": "--kinds does nothing with --trace; leave one of them out",
    "--trace trace.csv --minimise": "--minimise does nothing with --trace",
    "--schedule bad.json --seed 3": "--seed does nothing with --schedule",
    "--speed 60": "--speed does nothing without --trace; give that, too, or leave it out",
    "--lead 5": "--lead does nothing without --trace",
    "--tries 5": "--tries does nothing without --minimise",
    "--speed inf --trace trace.csv": "--speed inf must be a number greater than 0",
    "--faults 0": "--faults 0 must be at least 1",
    "--span 0": "--span 0 must be a number greater than 0",
    "--schedule bad.json": "--schedule bad.json: 'earthquake' is not a valid Kind",
    "--schedule cut.json": "--schedule or --kinds: partition cannot be performed here; use one of",
    "--reference other": "there is no run 'other' in bucket = ",
    "--workers.gpus 1 --nodes 2": "workers.gpus = 1: --nodes starts several nodes on this machine",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_line_is_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(to_toml(job_of(tmp_path, "toy")))
    Path("trace.csv").write_text("seconds,event,node\n0,add,b\nx,add,a\n")
    Path("bad.json").write_text('[{"at": 1.0, "kind": "earthquake"}]')
    Path("cut.json").write_text(to_json([Fault(1.0, Kind.PARTITION)]))
    assert main(["chaos", "job.toml", *words.split()]) == JobError.exit_code
    assert WRONG[words] in (said := capsys.readouterr().out), said
    assert not (tmp_path / "bucket").exists()
