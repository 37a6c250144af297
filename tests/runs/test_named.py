"""A command that finds a run goes by its name and its bucket: what else is wrong in the file does not stand
in its way.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from actors.cli import main
from elastic.job import Job
from elastic.runs.named import job_of_run
from tests.runs.test_forks import job_of, trained
from tests.support.job_file import to_toml

MISTAKES: dict[str, tuple[str, Any]] = {
    "workers": ("workers.min = 3 is more than workers.max = 2", {"min": 3, "max": 2}),
    "steps": ("steps = 'many' must be a whole number", "many"),
    "validation": ("validation.by = 'spares' with workers.spares = 0", {"by": "spares"}),
    "checkpoint": ("export.every = 2 is not a multiple of checkpoint.save_every = 7", {"save_every": 7}),
    "optim": ("optim.lr = -1 must be 0 or more", {"lr": -1}),
    "stepz": ("unknown setting 'stepz'", 3),
}
"""Mistakes in the file, by setting: the sentence of `elastic train`, and the value."""
COMMANDS = (
    "status JOB --once",
    "attach JOB",
    "stop JOB",
    "logs JOB",
    "metrics JOB",
    "owed JOB",
    "owed JOB --pay",
    "runs JOB",
    "report JOB --to page.html",
    "evaluate JOB",
    "rerun JOB --step 3",
    "rollback JOB --to 2",
    "checkpoint ls JOB",
    "checkpoint show JOB",
    "checkpoint diff JOB --between 2 4",
    "checkpoint verify JOB",
    "checkpoint export JOB --to exported",
    "checkpoint rm JOB --step 2",
    "checkpoint gc JOB",
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the bucket of a run of four steps."""
    folder = tmp_path_factory.mktemp("kept")
    trained(asked(folder))
    return folder


def asked(bucket: Path) -> Job:
    return job_of(
        bucket,
        steps=4,
        export={"every": 2},
        validation={"every": 2, "samples": 4},
        parallel={"dp_replicate": 1},
    )


def write(path: Path, job: Job, **mistakes: Any) -> str:
    """Writes the file of ``job`` with mistakes: other values, and other settings in its sections."""
    lines = dict(line.split(" = ", 1) for line in to_toml(job).splitlines())
    for name, value in mistakes.items():
        section = (
            tomllib.loads(f"at = {lines[name]}")["at"] if isinstance(value, dict) and name in lines else {}
        )
        lines[name] = _toml(section | value) if isinstance(value, dict) else _toml(value)
    path.write_text("".join(f"{name} = {text}\n" for name, text in lines.items()))
    return str(path)


def _toml(value: Any) -> str:
    match value:
        case dict():
            return "{ " + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + " }"
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case bool():
            return str(value).lower()
        case _:
            return repr(value)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_elsewhere_in_the_file_is_told_on_stderr(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: str
) -> None:
    """The control: `elastic train` refuses the same file, and so does this command if it is typed as an
    option.
    """
    said, value = MISTAKES[mistake]
    path = write(tmp_path / "job.toml", asked(kept), **{mistake: value})
    assert main(["train", path, "--local"]) == 1 and said in capsys.readouterr().out
    assert main(["status", path, "--once"]) == 0
    shown = capsys.readouterr()
    assert (
        shown.out.startswith("run is not running; newest good checkpoint: step 4")
        and f"note: job.toml: {said}" in shown.err
    )


def test_every_command_of_a_run_does_with_a_broken_file_what_it_does_with_a_good_one(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints the same words.  The control: each has printed some, and for each there is a note about the
    file.
    """
    monkeypatch.chdir(tmp_path)
    bucket, path = tmp_path / "bucket", tmp_path / "job.toml"
    for line in COMMANDS:
        told = []
        for mistakes in ({}, {name: value for name, (_, value) in MISTAKES.items()}):
            shutil.rmtree(bucket, ignore_errors=True)
            shutil.rmtree(tmp_path / "exported", ignore_errors=True)
            shutil.copytree(kept, bucket)
            words = [
                write(path, asked(bucket), **mistakes) if word == "JOB" else word for word in line.split()
            ]
            code, shown = main(words), capsys.readouterr()
            told.append((code, shown.out.partition("\n")[0] if "rollback" in line else shown.out))
            assert ("note: job.toml: steps = 'many' must be" in shown.err) is bool(mistakes), (line, shown)
        assert told[0] == told[1] and told[0][0] == (line == "logs JOB"), (line, told)


@pytest.mark.parametrize(
    ("line", "mistakes", "said"),
    [
        ("status JOB --once --optim.lr -1", {}, "command line: optim.lr = -1 must be"),
        ("status JOB --once --optim.lr -1", {"steps": "many"}, "command line: optim.lr = -1 must be"),
        (
            "status JOB --once --workers.min 5",
            {"steps": "many"},
            "job.toml with --workers.min: workers.min = 5 is more than",
        ),
        ("status JOB --once --stepz 3", {"steps": "many"}, "unknown setting '--stepz'"),
        (
            "status JOB --once",
            {"steps": "many", "name": "a/b"},
            "job.toml: name = 'a/b' must be a legal folder name",
        ),
        ("status JOB --once", {"steps": "many", "name": "other"}, "there is no run 'other' in bucket"),
        (
            "checkpoint gc JOB",
            {"steps": "many", "checkpoint": {"keep_last": 1}},
            "checkpoint.keep_last = 1 leaves nothing",
        ),
        ("checkpoint gc JOB", {"checkpoint": {"keep_lst": 4}}, "unknown setting 'checkpoint.keep_lst'"),
        ("checkpoint gc JOB", {"chekpoint": {"keep_last": 4}}, "unknown setting 'chekpoint'"),
        (
            "evaluate JOB",
            {"steps": "many", "validation": {"samples": -1}},
            "validation.samples = -1 must be 0 or more",
        ),
        ("rerun JOB --step 3", {"steps": "many", "workers": {"gpus": -1}}, "workers.gpus = -1 must be"),
    ],
    ids=str,
)
def test_what_a_command_reads_is_refused(
    kept: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    line: str,
    mistakes: dict[str, Any],
    said: str,
) -> None:
    """The controls are above: with a mistake in other settings each of these commands does its work."""
    path = write(tmp_path / "job.toml", asked(kept), **mistakes)
    before = sorted(kept.rglob("*"))
    assert main([path if word == "JOB" else word for word in line.split()]) == 1
    assert said in capsys.readouterr().out and sorted(kept.rglob("*")) == before


@pytest.mark.parametrize("line", ["checkpoint ls JOB", "checkpoint gc JOB", "report JOB --to page.html"])
def test_a_broken_file_of_no_run_is_told_that_there_is_none(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    """Its rules to keep checkpoints do not agree with the defaults, of which it says nothing.  The control:
    an option is told.
    """
    job = asked(kept).replace(name="other", checkpoint={"save_every": 2, "keep_last": 2, "keep_best": True})
    words = [
        write(tmp_path / "job.toml", job, validation={"by": "spares"}) if word == "JOB" else word
        for word in line.split()
    ]
    assert main(words) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        f"there is no run 'other' in bucket = '{kept}'; correct the name or the bucket" in shown
        and "keep_best" not in shown
    )
    assert (
        main([*words, "--optim.lr", "-1"]) == 1
        and "command line: optim.lr = -1 must be" in capsys.readouterr().out
    )


def test_what_a_command_reads_is_that_of_the_file(kept: Path, tmp_path: Path) -> None:
    """All else is what the run has stored.  The control: the stored value of a setting that the command does
    not read.
    """
    mistakes = {"steps": "many", "checkpoint": {"keep_last": 3}, "deadlines": {"lease_s": 77.0}}
    path = Path(write(tmp_path / "job.toml", asked(kept), **mistakes))
    job, problems = job_of_run(path, {"seed": 5}, ("checkpoint.keep_last",))
    stored = asked(kept)
    assert [job.checkpoint.keep_last, job.seed, job.steps, job.deadlines.lease_s] == [
        3,
        5,
        4,
        stored.deadlines.lease_s,
    ] and problems
    assert job_of_run(path, {})[0].checkpoint.keep_last == stored.checkpoint.keep_last == 0


def test_a_run_that_needs_an_option_of_its_start_is_found_without_it(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file has `by = "spares"`, and the run was started with `--workers.spares 1`, which nobody types
    again.
    """
    shutil.copytree(kept, bucket := tmp_path / "bucket")
    path = write(tmp_path / "job.toml", asked(bucket), validation={"by": "spares"})
    assert main(["train", path, "--local", "--workers.spares", "1"]) == 0
    assert main(["status", path, "--once"]) == 0 == main(["evaluate", path])
    assert "workers.spares = 0: no worker would validate" in capsys.readouterr().err


def test_evaluate_says_that_it_measures_what_was_trained_on(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does so without `[validation]`, as `train` does with these samples.  The control: others, which are
    held out.
    """
    path = write(tmp_path / "job.toml", asked(kept).replace(validation={}))
    said = (
        "note: validation.args: these samples are the training samples, so their loss says little; "
        "hold out other samples"
    )
    assert main(["evaluate", path]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith(f"{said} validation after step 4: loss ")
    assert main(["evaluate", path, "--validation.every", "2", "--validation.args.samples", "50"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("validation after step 4: loss ") and said not in shown
