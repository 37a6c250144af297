"""A line that cannot work says where the wrong value came from, and how the line is written; no cluster is
needed for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.cli import main
from actors.cluster import check_gpus, connect
from elastic.__main__ import main as entry
from elastic.config.sections import Workers
from elastic.errors import STOPPED, PlatformGaveUp
from elastic.runs.run import Run
from tests.support.commands import ROOT, Command
from tests.support.job_file import to_toml
from tests.support.patience import PATIENCE_S, until
from tests.support.processes import processes
from tests.support.toys import toy_job

Shown = pytest.CaptureFixture[str]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "afile").touch()
    (tmp_path / "job.toml").write_text(
        to_toml(toy_job(tmp_path / "bucket", model="tests.support.toys:nothing"))
    )
    return "job.toml"


def said(shown: Shown) -> str:
    """Returns the one line that was printed, besides the one with which training begins."""
    captured = shown.readouterr()
    (line,) = (
        each
        for each in (captured.out + captured.err).splitlines()
        if not each.startswith("checking the job: ")
    )
    return line


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        ([], "elastic: job.toml: model = 'tests.support.toys:nothing': "),
        (
            ["--model", "tests.support.toys:nobody"],
            "elastic: command line: model = 'tests.support.toys:nobody': ",
        ),
        (
            ["--model", "elastic.models.llama:build", "--model-args.x", "3"],
            "elastic: command line: model_args.x = 3: ",
        ),
        (
            ["--model", "elastic.models.llama:build", "--model-args", "{x = 3}"],
            "elastic: command line: model_args.x = 3: ",
        ),
        (
            ["--model", "elastic.models.llama:build", "--model-args.heads", "3"],
            "elastic: job.toml with --model-args.heads: model_args = {",
        ),
        (
            ["--model", "elastic.models.llama:build", "--resume", "400"],
            "elastic: --resume 400: there is no run 'toy' in bucket = ",
        ),
    ],
)
def test_a_value_says_where_it_came_from(job: str, capsys: Shown, words: list[str], begins: str) -> None:
    """The control is the last one: it is about no value of the job."""
    assert main(["train", job, "--local", *words]) == 1
    assert said(capsys).startswith(begins)


@pytest.mark.full
def test_checks_that_fail_end_the_cluster_that_starts_meanwhile(job: str, tmp_path: Path) -> None:
    """Nobody waits for it: the command ends with its sentence, and the system ends Ray's processes with it."""
    command = Command(
        tmp_path,
        "train",
        job,
        "--address",
        "local",
        "--model",
        "elastic.models.llama:build",
        "--model-args.heads",
        "3",
    )
    assert command.wait() == 1, command.text
    assert command.text.index("a Ray cluster starts on this machine") < command.text.index(
        "elastic: job.toml with --model-args.heads: "
    )
    until(
        lambda: (
            not [
                each
                for each in processes(str(tmp_path))
                if "gcs_server" in each.command or "raylet/raylet" in each.command
            ]
        )
    )


TWICE = """
import ray
from actors.launch import launch
from elastic.errors import JobError
from tests.support.toys import toy_job

job = toy_job("{bucket}", steps=2, workers={{"min": 1, "max": 1}})
try:
    launch(job.replace(model="elastic.models.llama:build", model_args={{"heads": 3}}), address="local")
except JobError:
    print("refused", flush=True)
print(launch(job.replace(workers=job.workers.model_copy(update={{"max": 9}})), address="local").state, ray.cluster_resources()["CPU"])
"""


@pytest.mark.full
def test_the_cluster_of_a_job_that_failed_in_its_checks_is_not_that_of_the_next(tmp_path: Path) -> None:
    """The process of a notebook goes on, and its next job gets a cluster with room for itself."""
    (tmp_path / "twice.py").write_text(TWICE.format(bucket=tmp_path / "bucket"))
    ran = subprocess.run([sys.executable, "twice.py"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, check=False,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=4 * PATIENCE_S)  # fmt: skip
    assert "refused" in ran.stdout and ran.stdout.splitlines()[-1] == "Finished 12.0", ran.stdout


@pytest.mark.parametrize(
    "command", [["train", "--local"], ["status", "--once"], ["checkpoint", "ls"]], ids=lambda words: words[0]
)
def test_a_bucket_without_credentials_is_told_as_the_setting(
    job: str, capsys: Shown, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """The credentials are looked for on the node, so no request is sent."""
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    line = [*command, job, "--bucket", "s3://pail/x", "--model", "elastic.models.llama:build"]
    assert main(line) == 2
    told = said(capsys)
    assert (
        told.startswith("elastic: command line: bucket = 's3://pail/x': s3://pail/x/toy/")
        and "correct AWS_PROFILE" in told
    )


@pytest.mark.parametrize("command", [["train", "--local"], ["status", "--once"]], ids=lambda words: words[0])
def test_a_secret_in_the_url_of_a_bucket_is_not_repeated(job: str, capsys: Shown, command: list[str]) -> None:
    assert (
        main([*command, job, "--bucket", "s3://me:secret@pail/x", "--model", "elastic.models.llama:build"])
        == 2
    )
    told = said(capsys)
    assert told.startswith("elastic: command line: bucket = 's3://…': ") and "secret" not in told


def test_a_secret_of_the_line_is_in_no_command_to_paste(job: str, tmp_path: Path, capsys: Shown) -> None:
    """Pasted, the command asks for it.  The control: the other words are there."""
    secret = ["--metrics.sinks.wandb.api-key", "hush", "--data.args.source", "https://me:hush@host/x"]
    Run.open(toy_job(tmp_path / "bucket"))
    assert main(["checkpoint", "rm", job, "--step", "3", "--force", "--seed", "4", *secret]) == 1
    told = said(capsys)
    hint = "elastic checkpoint ls job.toml --seed 4 --metrics.sinks.wandb.api-key --data.args.source"
    assert f"`{hint}` lists its checkpoints" in told and "hush" not in told
    assert main(hint.split()[1:]) == 1
    assert said(capsys) == (
        "elastic: command line: --metrics.sinks.wandb.api_key has no value; write "
        "'--metrics.sinks.wandb.api_key value'"
    )


def test_a_bucket_that_is_a_file_is_told_by_commands_that_look(
    job: str, tmp_path: Path, capsys: Shown
) -> None:
    for command in (["status", "--once"], ["logs"], ["checkpoint", "ls"], ["rollback", "--to", "3"]):
        assert main([*command, job, "--bucket", "afile"]) == 1
        assert f"no run 'toy' in bucket = '{tmp_path}/afile', which is a file, not a folder; correct" in said(
            capsys
        )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["rollback", "job.toml"],
            (
                "elastic rollback: it needs --to (step of the checkpoint, or auto: the last good one before "
                "a divergence)"
            ),
        ),
        (
            ["rollback", "job.toml", "--to"],
            "elastic rollback: --to needs one value; write `elastic rollback job.toml --to 400` (",
        ),
        (["rollback"], "elastic rollback: it needs job and --to (step of"),
        (["chaos", "job.toml", "--seed", "x"], "elastic chaos: --seed = 'x' must be a whole number ("),
        (
            ["checkpoint", "diff", "job.toml", "--between", "3"],
            "elastic checkpoint diff: --between needs 2 values; write `elastic checkpoint",
        ),
        (
            ["data", "prepare"],
            (
                "elastic data prepare: it needs source and destination; write `elastic data prepare texts "
                "tokens` ("
            ),
        ),
        (
            ["export", "job.toml"],
            "elastic: there is no command 'export'; did you mean `elastic checkpoint export`?",
        ),
        (["trian", "job.toml"], "elastic: there is no command 'trian'; there are train, rollback, "),
        (
            ["simulate", "--nope"],
            "elastic simulate: unrecognized arguments: --nope (`elastic simulate --help` tells more)",
        ),
    ],
)
def test_a_line_that_is_not_complete_is_one_sentence(
    job: str, capsys: Shown, words: list[str], sentence: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    told = said(capsys)
    assert ended.value.code == 1 and told.startswith(sentence) and "usage" not in told
    assert ("did you mean 'train'?" in told) == (words[0] == "trian")


@pytest.mark.parametrize(
    ("named", "address"), [("--address", "127.0.0.1:9"), ("the environment variable RAY_ADDRESS", None)]
)
def test_a_cluster_that_does_not_answer_is_told_by_where_its_address_came_from(
    monkeypatch: pytest.MonkeyPatch, named: str, address: str | None
) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    told = list[str]()
    with pytest.raises(
        PlatformGaveUp, match=f"no Ray cluster answers at 127.0.0.1:9; correct {named}, or leave it out"
    ):
        connect(address, tell=told.append)
    assert told == [], "none starts here"


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets a word when a Ray cluster would start, which then fails.  This machine shows
    its processes no GPU.
    """
    begun = list[str]()

    def init(**options: object) -> None:
        begun.append(str(options["address"]))
        raise OSError("no processes here")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", init)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return begun


def test_what_this_machine_lacks_is_told_before_ray_starts(
    job: str, capsys: Shown, starts: list[str], tmp_path: Path
) -> None:
    """The GPUs and the interfaces of the workers, if they will be here; neither is asked for a run on another
    cluster.
    """
    line = ["train", job, "--address", "local", "--model", "elastic.models.llama:build"]
    assert main([*line, "--workers.gpus", "1"]) == 1
    assert (
        "workers.gpus = 1, but Ray sees no GPU on this machine: train on a cluster (--address), or set "
        "workers.gpus = 0"
    ) in said(capsys)
    assert main([*line, "--network.interface", "eth77"]) == 1
    assert "network.interface = 'eth77' does not exist on this node" in said(capsys)
    assert starts == [] and not (tmp_path / "bucket").exists()
    check_gpus(Workers(min=2, max=2))


def test_a_run_that_has_finished_says_so_without_ray(job: str, capsys: Shown, starts: list[str]) -> None:
    """The control: a run that has not begun would start Ray."""
    line = ["train", job, "--model", "elastic.models.llama:build", "--steps"]
    assert main([*line, "2", "--local"]) == 0
    capsys.readouterr()
    assert main([*line, "2", "--address", "local"]) == 0
    assert said(capsys) == "Finished at step 2 of 2: finished: step 2 is in the bucket" and starts == []
    assert main([*line, "2", "--address", "local", "--name", "other"]) == 2 and starts == ["local"]


def test_ctrl_c_before_a_command_has_begun_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While modules are imported.  The control: a command that begins."""

    def pressed() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("signal.signal", lambda *_: None)  # which would outlive the test
    monkeypatch.setattr("actors.cli.main", lambda: 0)
    assert entry() == 0 and not capsys.readouterr().err
    monkeypatch.setattr("actors.cli.main", pressed)
    assert entry() == STOPPED
    assert capsys.readouterr().err == "elastic: interrupted; give the same command again to go on\n"
