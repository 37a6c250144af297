"""A damaged checkpoint is put away, reported, and never read again; the one before it takes its place, and
the bits are the same.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.cli import main
from actors.result import Result
from actors.screen import show_result
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.report.story import Line, Sentence, StepLine
from elastic.runs import restarts
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from tests.support.chaos import assert_nothing_left, exported_hash, trial
from tests.support.job_file import to_toml
from tests.support.toys import LIGHT, toy_job

STEPS, STOP, SAVE_EVERY = 9, 5, 2


def job_of(bucket: Path) -> Job:
    return toy_job(bucket, name="damaged", steps=STEPS, checkpoint={"save_every": SAVE_EVERY}, **LIGHT)


@pytest.fixture(scope="module")
def undisturbed_hash(tmp_path_factory: pytest.TempPathFactory) -> str:
    job = job_of(tmp_path_factory.mktemp("local"))
    assert run_local(job, lambda line: None)[0] == "Finished"
    return exported_hash(job)


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Job, Version]:
    """A run that was stopped by Ctrl-C at step 5, with one bit of its newest shard flipped."""

    def ctrl_c(line: Line) -> None:
        if isinstance(line, StepLine) and line.step == STOP:
            raise KeyboardInterrupt

    job = job_of(tmp_path / "bucket")
    assert run_local(job, ctrl_c) == ("Stopped", f"Ctrl-C; saved at step {STOP}", STOP)
    newest = Run.open(job).newest()
    assert newest is not None and newest.step == STOP
    turn_a_byte(job, newest)
    return job, newest


def turn_a_byte(job: Job, version: Version) -> None:
    (shard,) = (Path(job.bucket) / Run.open(job).checkpoints.folder(version)).glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)


def told(lines: list[Line]) -> str:
    return "\n".join(line.text for line in lines if isinstance(line, Sentence))


def assert_put_away(job: Job, version: Version, lines: list[Line]) -> None:
    folder = Run.open(job).checkpoints.folder(version)
    assert f"the checkpoint of {version} is damaged" in told(lines)
    assert f"{folder}/shard-00000-of-00001.safetensors" in told(lines), "the object is named"
    assert "is used instead" in told(lines) and "Traceback" not in told(lines)
    assert "is damaged" in json.loads((Path(job.bucket) / folder / "DAMAGED.json").read_text())["reason"]
    assert next(line.step for line in lines if isinstance(line, StepLine)) == 2 * SAVE_EVERY + 1


def test_one_process_falls_back(damaged: tuple[Job, Version], undisturbed_hash: str) -> None:
    job, version = damaged
    lines: list[Line] = []
    assert run_local(job, lines.append)[0] == "Finished"
    assert_put_away(job, version, lines)
    assert exported_hash(job) == undisturbed_hash


@pytest.mark.full  # one process does so in the default run, and the simulator's clusters do
def test_a_cluster_falls_back(damaged: tuple[Job, Version], undisturbed_hash: str) -> None:
    """Both workers find the damage, and neither of them is replaced for it."""
    job, version = damaged
    chaos = trial(job)
    assert chaos.result.state == "Finished", chaos.result
    assert_put_away(job, version, chaos.lines)
    assert chaos.hash == undisturbed_hash
    assert sorted(chaos.witness.seen) == ["w1", "w2"], "nobody is replaced for it"
    assert_nothing_left(chaos)


def test_verify_finds_it_and_nobody_uses_it(
    damaged: tuple[Job, Version], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job, version = damaged
    (tmp_path / "job.toml").write_text(to_toml(job))
    assert main(["checkpoint", "verify", str(tmp_path / "job.toml")]) == 1
    assert "DAMAGED" in (shown := capsys.readouterr().out) and "shard-00000-of-00001.safetensors" in shown
    assert main(["checkpoint", "verify", str(tmp_path / "job.toml"), "--step", "4"]) == 0
    assert main(["checkpoint", "export", str(tmp_path / "job.toml"), "--to", str(tmp_path / "out")]) == 1
    Run.open(job).checkpoints.quarantine(version, "a test says so")
    assert main(["checkpoint", "export", str(tmp_path / "job.toml"), "--to", str(tmp_path / "out")]) == 0
    with pytest.raises(JobError, match="no good checkpoint at step 5"):
        Run.open(job).version_at(STOP)


def test_when_all_are_damaged_it_begins_again(damaged: tuple[Job, Version], undisturbed_hash: str) -> None:
    job, _ = damaged
    for shard in Path(job.bucket).glob("damaged/steps/*/*/*.safetensors"):
        shard.unlink()
    lines: list[Line] = []
    assert run_local(job, lines.append)[0] == "Finished"
    assert len(re.findall(r"the checkpoint of step \d+ of generation \d+ is damaged", told(lines))) == 3
    assert "there is no earlier checkpoint" in told(lines)
    assert exported_hash(job) == undisturbed_hash


def test_without_damage_it_goes_on_from_the_newest(
    damaged: tuple[Job, Version], undisturbed_hash: str
) -> None:
    """The negative control: the bit is flipped back."""
    job, version = damaged
    turn_a_byte(job, version)
    lines: list[Line] = []
    assert run_local(job, lines.append)[0] == "Finished"
    assert "damaged" not in told(lines)
    assert next(line.step for line in lines if isinstance(line, StepLine)) == STOP + 1
    assert exported_hash(job) == undisturbed_hash


def cut(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def turned(raw: bytes) -> bytes:
    return raw[:40] + bytes([raw[40] ^ 1]) + raw[41:]


HARMS: dict[str, Callable[[bytes], bytes]] = {
    "cut": cut,
    "turned": turned,
    "empty": lambda raw: b"",
    "other": lambda raw: b"[]",
}


def test_a_small_file_of_the_newest_checkpoint_is_damaged(
    damaged: tuple[Job, Version], capsys: pytest.CaptureFixture[str], tmp_path: Path, undisturbed_hash: str
) -> None:
    """Every command counts on the checkpoint before it, and says so, `train` too; also `--resume` of an older
    one.
    """
    job, version = damaged
    turn_a_byte(job, version)  # back
    folder = Path(job.bucket) / Run.open(job).checkpoints.folder(version)
    (file := tmp_path / "job.toml").write_text(to_toml(job))

    def said(*words: str) -> str:
        code = main([*words[:-1], str(file), *words[-1].split()])
        return f"{code}: {' '.join(''.join(capsys.readouterr()).split())}"

    whole = said("status", "--once")
    assert whole.startswith("0: ") and "is damaged (" not in whole, "the control"
    for name, harm in itertools.product(("index.jsonl", "MANIFEST.json"), HARMS.values()):
        raw = (folder / name).read_bytes()
        (folder / name).write_bytes(harm(raw))
        assert f"the checkpoint of {version} is damaged ({folder / name} is damaged" in said(
            "status", "--once"
        )
        assert (
            "5 │ 1 │" in (listed := said("checkpoint", "ls", ""))
            and listed.count(" damaged ") == 1
            and "newest complete" in listed
        )
        assert said("checkpoint", "verify", "").startswith("0: checkpoint of step 4")
        assert said("checkpoint", "verify", "--step 5").startswith(
            f"1: elastic: no good checkpoint at step 5 in {folder.parents[2]}; "
        )
        (folder / name).write_bytes(raw)
    assert said("status", "--once") == whole, "nobody has put it away who only looks"
    (folder / "index.jsonl").write_bytes(b"")
    shutil.copytree(job.bucket, tmp_path / "copy")
    again = said("train", "--local")
    assert (
        again.startswith("0: ")
        and f"the checkpoint of {version} is damaged ({folder / 'index.jsonl'}" in again
    )
    assert (
        "the checkpoint of step 4 of generation 1 is used instead" in again
        and ("from step 4 of generation 1 (bucket)") in again
    )
    assert "index.jsonl is damaged" in json.loads((folder / "DAMAGED.json").read_text())["reason"]
    assert exported_hash(job) == undisturbed_hash
    shutil.rmtree(job.bucket)
    shutil.copytree(tmp_path / "copy", job.bucket)
    assert "from step 2 of generation 1 (bucket)" in (
        older := said("train", "--local --resume 2")
    ) and older.startswith("0: ")
    assert exported_hash(job) == undisturbed_hash
    shutil.rmtree(job.bucket)
    shutil.copytree(tmp_path / "copy", job.bucket)
    fork = said("train", f"--local --name other --resume {job.name}@latest")
    assert fork.startswith("0: ") and "other goes on from step 4" in fork
    state, begins = Run.find(job).begins(9, 0.0)
    assert max(state.history.saved).step == 4 and f"the checkpoint of {version} is damaged" in begins, (
        "a coordinator says so, too"
    )
    assert "DAMAGED.json" in {path.name for path in folder.iterdir()}


def test_the_last_line_names_a_checkpoint_only_if_there_is_one(
    damaged: tuple[Job, Version], capsys: pytest.CaptureFixture[str]
) -> None:
    job, _ = damaged
    result = Result("Failed", "a test", STOP, 2, job.bucket, job.name)
    assert show_result(result, job) == 2
    assert "`elastic train` goes on from the newest good checkpoint" in " ".join(
        capsys.readouterr().out.split()
    ), "the control"
    shutil.rmtree(Path(job.bucket) / job.name / "steps")
    assert show_result(result, job) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "`elastic train` begins again at step 0: no checkpoint was completed" in said and "newest" not in said
    )


def test_r23_a_run_that_was_restarted_in_vain_is_not_started_once_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R23: each start before this one was killed before its first save.  A person says ``--again``, and it is
    trained to its end.
    """
    job = toy_job(tmp_path / "bucket", steps=2, workers={"max": 1}, **LIGHT)
    run = Run.open(job)
    for number in range(4):
        run.claim("127.0.0.1:1", f"life {number}", **restarts.begins(run))
    file = tmp_path / "job.toml"
    file.write_text(to_toml(job))
    assert main(["train", str(file)]) == 4
    said = " ".join(capsys.readouterr().out.split())
    assert "was started 4 times in a row and saved no step after step 0" in said and run.latest_claim() == 4
    assert main(["train", str(file), "--branch"]) == 4, (
        "a supervisor may say so each time, and nothing is to change"
    )
    assert main(["train", str(file), "--again"]) == 0
    owner = run.owner()
    assert owner is not None and (owner["durable"], owner["vain"]) == (0, 0)
