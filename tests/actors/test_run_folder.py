"""A run's folder with files of others, one that cannot be listed, and small files without content: each
command goes on, or says why.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from actors.cli import main
from elastic.errors import ElasticError
from elastic.job import Job
from elastic.runs.run import Run
from tests.support.job_file import to_toml
from tests.support.toys import toy_job

STRAY = (
    ".nfs000000000c3a2b9e00000001",
    ".DS_Store",
    "Thumbs.db",
    "x.tmp",
    ".ipynb_checkpoints/x-checkpoint.json",
    "000009/000009.json",
)
READERS = (
    "status --once",
    "metrics",
    "checkpoint ls",
    "checkpoint gc --dry-run",
    "checkpoint verify",
    "owed",
    "logs",
    "replay",
)
"""Commands that read the folder, without those that train and `report`, which writes a file."""


def job_of(bucket: Path) -> Job:
    return toy_job(
        bucket,
        name="small",
        model_args={"vocab": 29, "dim": 16, "layers": 1, "heads": 1},
        steps=4,
        global_batch=4,
        microbatch=4,
        checkpoint={"save_every": 2},
        validation={"every": 2, "samples": 4},
        export={"every": 4},
    )


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the job's file and its bucket: a run of two branches, and one that was forked from it."""
    folder = tmp_path_factory.mktemp("begun")
    (folder / "job.toml").write_text(to_toml(job_of(folder / "bucket")))
    file = str(folder / "job.toml")
    assert main(["train", file, "--local", "-q"]) == 0
    assert main(["train", file, "--local", "-q", "--branch", "--steps", "6", "--optim.lr", "0.02"]) == 0
    assert (
        main(["train", file, "--local", "-q", "--name", "fork", "--resume", "small@4", "--steps", "6"]) == 0
    )
    return folder


class Commands:
    """Gives commands on a copy of the run that had begun, and reads what they print."""

    def __init__(self, begun: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        shutil.copytree(begun / "bucket", folder / "bucket")
        self.file, self.run = folder / "job.toml", folder / "bucket" / "small"
        self.file.write_text(to_toml(job_of(folder / "bucket")))

    def give(self, line: str) -> tuple[int, str]:
        words = line.split()
        at = 2 if words[0] == "checkpoint" else 1
        code = main([*words[:at], str(self.file), *words[at:]])
        return code, " ".join("".join(self.capsys.readouterr()).split())

    def train(self, more: str = "") -> tuple[int, str]:
        return self.give(f"train --local --branch --optim.lr 0.02 --steps 8{more}")


@pytest.fixture
def commands(begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(begun, tmp_path, capsys)


def test_files_of_others_change_nothing(commands: Commands, tmp_path: Path) -> None:
    before = {line: commands.give(line) for line in READERS}
    assert [line for line, (code, _) in before.items() if code] == ["logs", "replay"], (
        "there are none with --local"
    )
    for folder in [path for path in (tmp_path / "bucket").rglob("*") if path.is_dir()]:
        for name in STRAY:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"of somebody else")
    assert {line: commands.give(line) for line in READERS} == before
    assert commands.give(f"report --to {tmp_path}/page.html")[0] == 0
    assert "8 steps" in commands.train()[1] and Run.find(job_of(tmp_path / "bucket")).newest().step == 8
    assert (
        commands.train(" --name fork")[0] == 0
        and commands.give("checkpoint gc --checkpoint.keep-last 2")[0] == 0
    )
    assert main(["runs", str(tmp_path / "bucket")]) == 0


def test_a_folder_in_the_place_of_a_document_is_named(commands: Commands) -> None:
    (commands.run / "owner" / "000003.json").mkdir()
    code, said = commands.train()
    assert (
        code == 2
        and "small/owner/000003.json" in said
        and "there is a folder of this name; remove the folder" in said
    )
    (commands.run / "owner" / "000003.json").rmdir()
    assert commands.train()[0] == 0, "the control"


@pytest.mark.parametrize("part", ["steps", "owner", "code", "steps/000000000006"])
def test_a_folder_that_cannot_be_listed_is_a_fault_of_the_store(commands: Commands, part: str) -> None:
    """A link to itself cannot be listed, by whoever asks.  The same command goes on once it can."""
    (commands.run / part).rename(commands.folder / "away")
    (commands.run / part).symlink_to(commands.run / part)
    for code, said in (
        commands.train(),
        *([commands.give("status --once"), commands.give("checkpoint ls")] if "steps" in part else []),
    ):
        assert (
            code == ElasticError.exit_code == 2
            and "Too many levels of symbolic links" in said
            and "Traceback" not in said
        ), said
    (commands.run / part).unlink()
    (commands.folder / "away").rename(commands.run / part)
    assert commands.train()[0] == 0, "the control"


LOST = {
    "job.json": "is written again with the settings of this command, which made the run's checkpoints",
    "data.json": "data.json is damaged: it is written again",
    "code": "it said which code the run used from some step on, and this is lost",
    "owner": "is damaged: it said where the run was started, and this is lost",
    "ends": "is damaged: it said how the run ended, and this is lost",
    "asked": "is damaged: it said which exports and samples were wanted from some step on, and this is lost",
    "branches": "remove the file, and begin the branch again: `elastic train ",
    "metrics": "is damaged: its rows are lost",
    "validations": "",
    "references": "",
    "owed": "",
    "effects": "",
    "steps": "is damaged",
}
"""Maps the first part of a small file's name to what `train` says if the newest one has no content.  All but
a branch let it go on.
"""


@pytest.mark.full
def test_a_small_file_without_content_stops_no_run(
    begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A power cut may do that.  Each small file is cut in turn.  The control: none."""
    there = sorted(
        path.relative_to(begun / "bucket" / "small")
        for path in (begun / "bucket" / "small").rglob("*")
        if path.is_file()
    )
    small = [path for path in there if path.suffix in (".json", ".jsonl")]
    assert {path.parts[0] for path in small} >= {*LOST} - {"effects", "asked"}, small
    newest = {(path.parts[0], path.name if path.parts[0] == "steps" else ""): path for path in small}
    for number, path in enumerate([None, *small]):
        commands = Commands(begun, tmp_path / str(number), capsys)
        if path is not None:
            (commands.run / path).write_bytes(b"")
        for line in (
            "status --once",
            "metrics",
            "checkpoint ls",
            "checkpoint gc --dry-run --force",
            "checkpoint verify",
            "owed",
        ):
            code, said = commands.give(line)
            assert code == 0 or (path is not None and str(path) in said and ("back from a copy" in said)), (
                path,
                line,
                code,
                said,
            )
        if path is not None and path not in newest.values():
            continue
        begins = commands.give("train --local")[1] if path is not None and path.parts[0] == "job.json" else ""
        code, said = commands.give("train --local --optim.lr 0.02 --steps 6 --branch")
        said += begins  # by the settings with which the run began
        if path is None:
            assert code == 0 and not [lost for lost in LOST.values() if lost and lost in said], said
            continue
        assert LOST[path.parts[0]] in said, (path, said)
        assert (code == 0) is (path.parts[0] != "branches"), (path, code, said)
        shutil.rmtree(tmp_path / str(number))
