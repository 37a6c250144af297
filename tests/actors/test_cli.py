"""The commands: what they print, and their exit codes.  What cannot work is said in one sentence before
anything starts.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from actors import cluster
from actors.cli import main
from actors.screen import Screen
from actors.terminal import console
from elastic.config.sections import Workers
from elastic.engine.loss import next_token
from elastic.errors import PlatformGaveUp
from elastic.job import Job
from elastic.report.story import Line, StepLine
from elastic.runs.run import Run
from tests.support.commands import Command, assert_no_actor_left
from tests.support.job_file import to_toml
from tests.support.patience import PATIENCE_S
from tests.support.state_hash import state_hash
from tests.support.toys import LIGHT, toy_job

Shown = pytest.CaptureFixture[str]
ROWS = 3
SHARDED = ["--workers.min", "2", "--parallel.dp-shard", "2", "--parallel.use", "fit"]
UNUSED = "workers.min = 2, parallel.dp_shard = 2, parallel.use = 'fit' have"


def written(folder: Path, name: str = "toy", **changes: object) -> str:
    """Writes a job file and returns its path."""
    job: Job = toy_job(
        folder / "bucket", name=name, **{"steps": 4, "checkpoint": {"save_every": 2}, **LIGHT, **changes}
    )
    path = folder / f"{name}.toml"
    path.write_text(to_toml(job))
    return str(path)


def sentence(shown: Shown) -> str:
    """Returns the one line that a failed command prints."""
    lines = [line for line in shown.readouterr().out.splitlines() if not line.startswith("note:")]
    assert len(lines) == 1, lines
    return lines[0]


def test_train_and_checkpoints(tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    """U9: ``--local``, then ls, verify and export of what it saved."""
    monkeypatch.chdir(tmp_path)
    job = written(tmp_path)
    assert main(["train", job, "--local"]) == 0
    shown, beside = capsys.readouterr()
    assert beside.splitlines() == [
        "checking the job: loading PyTorch, building the model, trying the data and the bucket"
    ]
    assert re.findall(r"step +(\d+)/4  loss \d\.\d{4}", shown) == ["1", "2", "3", "4"]
    assert "Finished at step 4 of 4" in shown
    assert main(["train", job, "--local", "-q"]) == 0, "once more: it is finished already"
    shown, beside = capsys.readouterr()
    assert not re.findall(r"step +\d+/4  loss", shown) and beside == "", (
        "the control: it was asked to be quiet"
    )

    assert main(["checkpoint", "ls", job]) == 0
    table = capsys.readouterr().out
    assert re.search(r"│ 2 .*│ complete ", table) and re.search(r"│ 4 .*│ newest complete ", table)
    assert main(["checkpoint", "verify", job]) == 0
    assert "every digest as written" in sentence(capsys)
    for step in ("2", "4"):
        assert main(["checkpoint", "export", job, "--step", step, "--to", str(tmp_path / step)]) == 0
    capsys.readouterr()
    files = [sorted((tmp_path / step).glob("*.safetensors")) for step in ("2", "4")]
    assert [len(each) for each in files] == [2, 2]
    assert state_hash(files[0]) != state_hash(files[1])
    for to in (job, f"{job}/below"):
        assert main(["checkpoint", "export", job, "--to", to]) == 1
        assert re.fullmatch(
            (
                rf"elastic: --to = '{to}' is not a folder that can be written: .*; name a new "
                r"folder"
            ),
            sentence(capsys),
        )
    assert main(["checkpoint", "export", job, "--to", str(tmp_path / "4")]) == 1, "nothing is overwritten"
    again = (
        rf"elastic: --to = '{tmp_path}/4' has model.safetensors and optimizer.safetensors already, "
        r"perhaps of another step; name a new"
    )
    assert re.match(again, sentence(capsys))
    assert main(["checkpoint", "verify", job, "--step", "3"]) == 1


def test_a_file_gets_the_line_of_every_so_many_steps(
    tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step has one, too; the control above has one of every step."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", written(tmp_path), "--local", "--log-every", "3"]) == 0
    assert re.findall(r"step +(\d+)/4  loss \d\.\d{4}", capsys.readouterr().out) == ["3", "4"]


@pytest.mark.parametrize(
    ("settings", "said"), [([], ""), (["--workers.min", "2"], "workers.min = 2 has"), (SHARDED, UNUSED)]
)
def test_local_says_what_it_does_not_use_and_how_it_goes_on(
    tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch, settings: list[str], said: str
) -> None:
    """Ctrl-C comes at step 2.  The control: without such settings nothing is said."""
    monkeypatch.chdir(tmp_path)
    job = written(tmp_path, workers={"max": 4})

    show = Screen.show

    def ctrl_c(screen: Screen, line: Line) -> None:
        show(screen, line)
        if isinstance(line, StepLine) and line.step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Screen, "show", ctrl_c)
    assert main(["train", job, "--local", *settings]) == 3
    shown = capsys.readouterr().out
    assert [line.split(" ", 1)[1] for line in shown.splitlines() if " no effect" in line] == (
        [f"--local trains with one worker: {said} no effect"] if said else []
    )
    typed = " ".join([job, *settings])
    assert shown.splitlines()[-1] == (
        f"`elastic train {typed} --local` goes on from the newest good checkpoint"
    )


def test_simulate(capsys: Shown) -> None:
    assert main(["simulate", "--seeds", "4"]) == 0
    assert "4 seeds in " in capsys.readouterr().out


def test_data_prepare(tmp_path: Path, capsys: Shown) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("to be or not to be")
    command = ["data", "prepare", str(tmp_path / "text"), str(tmp_path / "tokens")]
    assert main(command) == 0
    assert "1 document, 19 tokens" in sentence(capsys)
    assert main(command) == 0, "again is no error"
    capsys.readouterr()
    assert main(["data", "prepare", str(tmp_path / "nowhere"), str(tmp_path / "tokens")]) == 1
    assert ": neither a file nor a folder" in sentence(capsys)


def test_a_cluster_that_does_not_start_is_said_in_a_sentence(tmp_path: Path) -> None:
    """Ray's own error comes from deep inside it, and would end with the exit code of an error of the job."""
    command = Command(tmp_path, "train", written(tmp_path), warm=True, RAY_TMPDIR=f"/tmp/{'far' * 40}")
    assert command.wait() == 2
    (begins, line) = [line for line in command.text.splitlines() if "Ray cluster" in line]
    assert begins.endswith(" a Ray cluster starts on this machine, in 5 to 20 s"), (
        "nothing else is printed for so long"
    )
    assert (
        "a local Ray cluster did not start (" in line
        and "AF_UNIX path" in line
        and "Traceback" not in command.text
    )


OF_A_RUN = (
    *(
        ["status", "--once"],
        ["attach"],
        ["stop"],
        ["logs"],
        ["replay"],
        ["replay", "--check"],
        ["metrics"],
        ["report"],
    ),
    *(["checkpoint", "ls"], ["checkpoint", "verify"], ["checkpoint", "export", "--to", "there"]),
)


@pytest.mark.parametrize("command", OF_A_RUN, ids=" ".join)
def test_a_command_of_a_run_says_that_there_is_none(
    tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """The bucket has another run, as if the name in the job file had a mistake.  The control is that run: it
    is not missed.
    """
    monkeypatch.chdir(tmp_path)
    Run.open(toy_job(tmp_path / "bucket"))
    assert main([*command, written(tmp_path, "toi")]) == 1
    said = sentence(capsys)
    assert said.startswith(f"elastic: there is no run 'toi' in bucket = '{tmp_path}/bucket'; ")
    assert f"`elastic train {tmp_path}/toi.toml`" in said, "as it can be pasted"
    main([*command, written(tmp_path)])
    assert "there is no run" not in capsys.readouterr().out
    assert not Path("there").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"continues":7}\n{"n":12}\n',
            ("continues an earlier journal file: its snapshot begins the file 000000000007.jsonl"),
        ),
        (
            '"""A module."""\n',
            ("is not a journal file; name a job file, or a journal file that begins with a snapshot"),
        ),
        ("{}\n", "is not a journal file; "),
        ("", "is not a journal file; "),
    ],
)
def test_replay_of_a_file_that_it_cannot_tell_of(tmp_path: Path, capsys: Shown, text: str, said: str) -> None:
    (tmp_path / "one.jsonl").write_text(text)
    (tmp_path / "one.gz").write_text(text)
    assert main(["replay", f"{tmp_path}/one.jsonl"]) == 1
    assert sentence(capsys).startswith(f"elastic: '{tmp_path}/one.jsonl' {said}")
    assert main(["replay", f"{tmp_path}/one.gz"]) == 1
    assert "one.gz' is not a journal file; name a job file" in sentence(capsys)


def test_replay_names_the_file_with_a_damaged_line(tmp_path: Path, capsys: Shown) -> None:
    (tmp_path / "one.jsonl").write_text('{"run":{}}\n{"n":0}\nno JSON\n')
    assert main(["replay", f"{tmp_path}/one.jsonl"]) == 1
    assert sentence(capsys).startswith(
        f"elastic: {tmp_path}/one.jsonl, line 3 is damaged: expected a snapshot, or a record after a snapshot"
    )


def test_a_run_that_is_over_is_attached_to_with_the_code_of_its_end(
    tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = written(tmp_path)
    assert main(["train", job, "--local"]) == 0
    capsys.readouterr()
    for command in ("attach", "stop"):
        assert main([command, job]) == 0
        assert sentence(capsys).endswith("; it ended as Finished")


def test_every_command_takes_the_jobs_settings(
    tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job, other = written(tmp_path), ["--name", "b"]
    assert main(["train", job, "--local", *other]) == 0
    capsys.readouterr()
    assert main(["status", job, *other, "--once"]) == 0
    assert sentence(capsys).startswith("b is not running; newest good checkpoint: step 4")
    assert main(["status", job, "--once"]) == 1
    assert "there is no run 'toy'" in sentence(capsys), "the control"
    assert (
        main(["attach", job, *other]) == main(["stop", job, "--name=b"]) == main(["clean", job, *other]) == 0
    )
    assert (
        main(["checkpoint", "ls", job, *other])
        == main(["checkpoint", "verify", job, *other, "--step", "2"])
        == 0
    )
    capsys.readouterr()
    assert main(["checkpoint", "verify", job, *other, "--step", "3"]) == 1
    assert "no good checkpoint at step 3" in sentence(capsys)
    for workers in ((), ("w1",)):
        assert main(["logs", job, *workers, *other]) == 1
        assert sentence(capsys) == (
            "elastic: b runs with --local, which stores no logs: see the terminal in which it was started"
        )
    assert main(["replay", job, *other]) == 1
    assert "b has no journal" in sentence(capsys)
    assert main(["status", job, "--onse"]) == 1
    assert "unknown setting '--onse'" in sentence(capsys)
    (tmp_path / "journal.jsonl").write_text("")
    assert main(["replay", str(tmp_path / "journal.jsonl"), *other]) == 1
    assert "is a journal file, which takes no settings" in sentence(capsys)
    with pytest.raises(SystemExit):
        main(["data", "show", job, *other])


def test_an_option_of_a_setting_takes_no_word_that_is_not_its_own(tmp_path: Path, capsys: Shown) -> None:
    """Workers may be named before and after it, and a setting may come before the job file."""
    job, option = written(tmp_path), ["--checkpoint.save-every", "100"]
    Run.open(Job.load(Path(job)))
    for line in ([job, *option, "w1", "w2"], [job, "w1", *option, "w2"], [*option, job, "w1", "w2"]):
        assert main(["logs", *line]) == 1
        assert sentence(capsys).startswith("no logs of w1, w2 in")
    assert main(["stop", job, *option, "w1"]) == 1
    assert sentence(capsys) == (
        "elastic: command line: 'w1' is no option; write an option as '--section.option value', "
        "say '--workers.max 3'"
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "stop JOB --address X",
            "'elastic stop' has no option '--address', unlike 'elastic train'; leave it out",
        ),
        (
            "train JOB --dry-run",
            (
                "'elastic train' has no option '--dry-run'; `elastic estimate JOB` checks a job and starts "
                "nothing"
            ),
        ),
        ("clean JOB --once", "'elastic clean' has no option '--once', unlike 'elastic status'; leave it out"),
        ("status JOB --onse", "unknown setting '--onse'; did you mean '--once'?"),
        ("train --locla JOB", "unknown setting '--locla'; did you mean '--local'?"),
        ("stop JOB --workers.spars 3", "unknown setting '--workers.spars'; did you mean '--workers.spares'?"),
        ("logs JOB --nmae b w1", "unknown setting '--nmae'; did you mean '--name'?"),
        ("attach JOB --name", "--name has no value; write '--name value'"),
        ("chaos JOB --sed 3", "unknown setting '--sed'; did you mean '--seed'?"),
    ],
)
def test_an_option_that_a_command_does_not_have(tmp_path: Path, capsys: Shown, line: str, said: str) -> None:
    job = written(tmp_path)
    assert main(line.replace("JOB", job).split()) == 1
    assert sentence(capsys) == f"elastic: command line: {said.replace('JOB', job)}"


def test_a_command_in_a_sentence_can_be_pasted_as_it_is(
    tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the job file, and the settings of the line, as the sentence was about the run that they name.
    The controls: a command that takes no job file, one that has it, and a sentence that no command of a job
    says.
    """
    monkeypatch.chdir(tmp_path)
    written(tmp_path, steps=6)
    assert main(["train", "toy.toml", "--local", "--name", "other", "-q"]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "rm", "toy.toml", "--step", "3", "--name", "other"]) == 1
    assert "`elastic checkpoint ls toy.toml --name other` lists its checkpoints" in sentence(capsys)
    assert console.job == "" and console.pasteable("`elastic train`") == "`elastic train`"
    monkeypatch.setattr(console, "job", "toy.toml --seed 1")
    for hint, whole in {
        "`elastic owed --pay`": "`elastic owed toy.toml --seed 1 --pay`",
        "`elastic checkpoint gc --checkpoint.keep-last 4`": (
            "`elastic checkpoint gc toy.toml --seed 1 --checkpoint.keep-last 4`"
        ),
        "`elastic train --help`, `elastic stop other.toml`, `elastic data prepare A B`": "",
        "`elastic settings`": "",
    }.items():
        assert console.pasteable(f"so: {hint}.") == f"so: {whole or hint}."


def test_the_job_in_a_command_of_a_sentence_is_the_file_of_the_line(
    tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no other word that ends like one, and a shell reads its spaces, also where the rest of the line
    cannot be read.
    """
    monkeypatch.chdir(tmp_path)
    Path(written(tmp_path)).rename("my toy.toml")
    said = "`elastic train 'my toy.toml' --data.args.path other.toml`"
    for line, hint in (
        ("checkpoint ls --data.args.path other.toml", said),
        ("status --dry-run", "`elastic estimate 'my toy.toml'`"),
    ):
        assert main([*line.split(), "my toy.toml"]) == 1 and hint in sentence(capsys)


def test_settings_prints_the_page_of_the_guide(capsys: Shown) -> None:
    assert main(["settings"]) == 0
    assert "| `workers.max` | integer ≥ 1 | `2` |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        *(
            "",
            "train",
            "settings",
            "status",
            "attach",
            "stop",
            "clean",
            "logs",
            "replay",
            "metrics",
            "report",
        ),
        *("chaos", "simulate", "data", "checkpoint"),
    ],
)
def test_every_command_has_help(command: str, capsys: Shown) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*filter(None, [command]), "--help"])
    assert ended.value.code == 0 and f"usage: elastic {command}".rstrip() in capsys.readouterr().out


def test_who_looks_at_a_run_does_not_begin_it(tmp_path: Path) -> None:
    """A folder that is looked at, or a job that cannot start, may be another job's afterwards."""
    job = written(tmp_path)
    for command in ("status", "stop", "attach", "clean", "logs", "replay", "report"):
        main([command, job])
    for command in (["ls", job], ["verify", job], ["export", job, "--to", str(tmp_path / "out")]):
        main(["checkpoint", *command])
    assert not (tmp_path / "bucket").exists()


def test_too_little_data(tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = written(tmp_path, data={"dataset": "tests.support.toys:Sums", "args": {"samples": 5}})
    assert main(["train", job]) == 1
    said = "global_batch = 16: data.dataset = 'tests.support.toys:Sums' has 5 samples, fewer than one step"
    assert f"{said} takes; give it more samples (data.args), or lower global_batch" in sentence(capsys)
    assert_no_actor_left("toy")


def mean(model: Any, batch: Any) -> Any:
    return torch.zeros((), requires_grad=True)


def unreduced(model: Any, batch: Any) -> Any:
    return torch.zeros(2, requires_grad=True), 2


def in_a_table(model: Any, batch: Any) -> Any:
    return dict(zip(("loss", "count"), next_token(model, batch), strict=True))


def misnamed(model: Any, batch: Any) -> Any:
    return batch["z"].sum(), 1


def no_count(model: Any, batch: Any) -> Any:
    return next_token(model, batch)[0], None


def plain_count(model: Any, batch: Any) -> Any:
    return next_token(model, batch)[0], 16 * len(batch["tokens"])


@pytest.mark.parametrize(
    ("loss", "said", "traced"),
    [
        ("mean", "returned a tensor of shape []; it must return (sum, count): two scalars", False),
        ("unreduced", "returned (a tensor of shape [2], int 2); it must return (sum, count)", False),
        ("no_count", "returned (a tensor of shape [], NoneType None); it must return (sum, count)", False),
        (
            "in_a_table",
            "returned dict with the keys 'loss', 'count'; it must return (sum, count): two scalars",
            False,
        ),
        (
            "misnamed",
            (
                "failed with KeyError: 'z' (in FILE, line LINE); it gets the model and a batch of "
                "['tokens'], and it must"
            ),
            True,
        ),
        ("Path", "names a class; name a function: loss(model, batch) returns (sum, count)", False),
        ("ROWS", "names a int; name a function", False),
    ],
)
def test_a_loss_that_breaks_its_contract(
    tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch, loss: str, said: str, traced: bool
) -> None:
    """The last line says so; the traceback of the user's code stays above it."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", written(tmp_path), "--local", "--loss", f"{__name__}:{loss}"]) == 1
    shown = capsys.readouterr().out
    line = misnamed.__code__.co_firstlineno + 1
    said = said.replace("FILE", __file__).replace("LINE", str(line))
    assert shown.splitlines()[-1].startswith(f"elastic: command line: loss = '{__name__}:{loss}' {said}")
    assert (f'File "{__file__}", line {line}, in misnamed' in shown) == traced


def test_a_loss_may_count_with_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the control of the test above."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", written(tmp_path), "--local", "--loss", f"{__name__}:plain_count"]) == 0


@pytest.mark.parametrize(
    ("bucket", "said"),
    [
        (
            "afile",
            (
                "is not a folder in which this user can write (FOLDER/afile: Not a directory); name "
                "another folder, or a URL such as s3:"
            ),
        ),
        (
            "afile/below",
            (
                "is not a folder in which this user can write (FOLDER/afile: Not a directory); name "
                "another folder, or a URL"
            ),
        ),
        (
            "/proc/nope",
            (
                "is not a folder in which this user can write (/proc: No such file or directory); "
                "name another folder, or a URL"
            ),
        ),
        (
            "gs://x/y",
            (
                "needs a package: Please install gcsfs to access Google Storage; install the package "
                "on every node, or name another bucket"
            ),
        ),
    ],
)
def test_a_bucket_that_cannot_be_written(
    tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch, bucket: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("afile").touch()
    assert main(["train", written(tmp_path), "--local", "--bucket", bucket]) == 1
    named = bucket if bucket[0] == "/" or ":" in bucket else f"{tmp_path}/{bucket}"
    assert sentence(capsys).startswith(
        f"elastic: command line: bucket = {named!r} {said.replace('FOLDER', str(tmp_path))}"
    )


def test_another_jobs_bucket(tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings that differ are named; those that may differ are not."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", written(tmp_path), "--local"]) == 0
    capsys.readouterr()
    assert main(["train", written(tmp_path, seed=7, optim={"lr": 0.5}, workers={"max": 4}), "--local"]) == 1
    refused = sentence(capsys)
    assert "seed = 0 in the run and 7 now" in refused and "optim.lr = 0.01 in the run and 0.5 now" in refused
    assert "workers" not in refused
    assert main(["checkpoint", "ls", written(tmp_path, seed=7)]) == 0, (
        "who only reads may name other settings"
    )
    assert main(["status", written(tmp_path, seed=7), "--once"]) == 0
    assert "newest good checkpoint: step" in capsys.readouterr().out


def test_an_address_at_which_nobody_answers_is_said_at_once(
    tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would try for minutes, with warnings of its own."""
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", lambda **_: pytest.fail("it asks Ray"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bucket").mkdir()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*nobody.getsockname())
        assert main(["train", written(tmp_path), "--address", address]) == 2
    assert sentence(capsys) == (
        f"elastic: no Ray cluster answers at {address}; correct --address, or leave it out"
    )


def mistaken(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    raise ValueError("a mistake of my own")


def mistaken_later(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    if model.training:
        raise ValueError("a mistake of my own")
    return next_token(model, batch)


def test_a_mistake_in_the_users_code_ends_a_local_run_with_a_sentence(
    tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first microbatch is tried before the first step.  If only a later one fails, the traceback of the
    user's code comes first.
    """
    monkeypatch.chdir(tmp_path)
    assert main(["train", written(tmp_path, loss="tests.actors.test_cli:mistaken"), "--local"]) == 1
    assert "failed with ValueError: a mistake of my own (in " in capsys.readouterr().out
    later = written(tmp_path, name="later", loss="tests.actors.test_cli:mistaken_later")
    assert main(["train", later, "--local"]) == 1
    shown = capsys.readouterr()
    assert "in mistaken_later" in shown.err and "in compute" not in shown.err
    assert "elastic: the job failed in this process: ValueError: a mistake of my own (in " in shown.out


@pytest.fixture
def full_cluster() -> Iterator[Any]:
    """Yields an actor of somebody else, which holds every CPU."""

    class Other:
        def there(self) -> bool:
            return True

    other = ray.remote(Other).options(num_cpus=ray.cluster_resources()["CPU"]).remote()
    assert ray.get(other.there.remote())
    while cluster.slots(Workers()):  # Ray's count of free CPUs is late by a moment
        time.sleep(0.01)
    yield other
    ray.kill(other)


@pytest.mark.usefixtures("full_cluster")
def test_no_free_cpu(tmp_path: Path, capsys: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster, "ROOM_S", 0.5)
    assert main(["train", written(tmp_path)]) == 2
    assert not (tmp_path / "bucket").exists(), "no run was begun"
    room = (
        r"workers.min = 1, but the cluster has room for 0 \(each needs 1 CPU; node \w{8} \(\S+, \S+\): 0 "
        r"of \d+ CPUs free\): "
    )
    *before, said = capsys.readouterr().out.splitlines()
    assert re.search(room, said)
    assert any(line.endswith("is not there yet: the run makes it") for line in before)
    assert_no_actor_left("toy")


def test_room_that_another_job_has_just_left_is_waited_for(
    full_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's head hears of it a moment later: a run that began at once was refused, with all CPUs free."""
    monkeypatch.setattr(cluster, "ROOM_S", PATIENCE_S)  # the head of a busy machine hears of it later
    timer = threading.Timer(1.0, ray.kill, [full_cluster])
    timer.start()
    cluster.check_room(Workers())
    timer.join()
    monkeypatch.setattr(cluster, "ROOM_S", 0.0)
    with pytest.raises(PlatformGaveUp, match=r"workers\.min = 99, but the cluster has room for"):
        cluster.check_room(Workers(min=99, max=99))


@pytest.mark.parametrize("package", ["storage", "actors"])
def test_a_folder_that_takes_the_place_of_ours(tmp_path: Path, package: str) -> None:
    """The folder is named before anything in it is imported."""
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise RuntimeError('imported')")
    written(tmp_path)
    command = Command(tmp_path, "train", "toy.toml")
    assert command.wait() == 1
    assert command.text.count("\n") == 1
    assert f"{tmp_path}/{package} hides Elastic's own package '{package}'" in command.text
