"""A fault of a line or of a job file is said in one sentence with ``--local``, too, before anything is
written.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.cli import main
from tests.support.job_file import to_toml
from tests.support.toys import toy_job

NAME = "worst"
TOO_FEW = {"data": {"dataset": "tests.support.toys:Sums", "args": {"samples": 5}}}
LINES: dict[str, tuple[str, int, str]] = {
    "no such file": ("nowhere.toml", 1, r"nowhere\.toml"),
    "a folder": (".", 1, r"'\.'"),
    "an unknown setting": (
        "job.toml --optim.lrr 3",
        1,
        (
            r"unknown setting '--optim\.lrr'; did you mean "
            r"'--optim\.lr'\?"
        ),
    ),
    "an unknown option": ("job.toml --locla", 1, r"unknown setting '--locla'; did you mean '--local'\?"),
    "a word too many": ("job.toml other.toml", 1, r"'other\.toml' is no option"),
    "no value": ("job.toml --steps", 1, r"--steps has no value"),
    "a text for a number": ("job.toml --steps many", 1, r"steps = .many"),
    "no steps": ("job.toml --steps -1", 1, r"steps = -1"),
    "a learning rate that is not a number": ("job.toml --optim.lr nan", 1, r"optim\.lr = nan"),
    "a name with a slash": ("job.toml --name a/b", 1, r"name = 'a/b'"),
    "an empty bucket": ("job.toml --bucket=", 1, r"bucket"),
    "a bucket of nobody's protocol": ("job.toml --bucket nope://x/y", 1, r"bucket = 'nope://x/y'"),
    "a bucket that is a file": ("job.toml --bucket job.toml", 1, r"bucket = '\S+job\.toml' is not a folder"),
    "a batch that does not divide": ("job.toml --global-batch 7", 1, r"global_batch = 7"),
    "no such module": ("job.toml --model nowhere:build", 1, r"model = 'nowhere:build'"),
    "no such function": (
        "job.toml --model tests.support.toys:nothing",
        1,
        (
            r"model = "
            r"'tests\.support\.toys:nothing'"
        ),
    ),
    "a module that does not parse": ("job.toml --loss broken:loss", 1, r"loss = 'broken:loss'.*SyntaxError"),
    "arguments that the model does not know": (
        "job.toml --model-args {wings=2}",
        1,
        r"command line: model_args.wings = 2: ",
    ),
    "arguments that the dataset does not know": (
        "job.toml --data.args.sampels 5",
        1,
        r"data.args.sampels = 5: .*did you mean 'samples'\?$",
    ),
    "a checkpoint of a misspelt word": ("job.toml --resume tiny@bset", 1, r"; did you mean 'tiny@best'\?$"),
    "a word that ends in the wrong way": (
        "job.toml --spikes.action quarantne",
        1,
        r"; did you mean 'quarantine'\?$",
    ),
    "a list that cannot be read": (
        "job.toml --data.weights [1",
        1,
        (
            r"data.weights = '\[1' must be a list; "
            r"write --data.weights 1 2, or "
        ),
    ),
    "a dataset that is not there": (
        "job.toml --data.dataset elastic.data.tokens:TokenDataset --data.args {path='gone'}",
        1,
        r"gone",
    ),
    "an optimizer that is not there": ("job.toml --optim.kind sgdd", 1, r"optim\.kind = 'sgdd'"),
    "a step of a run that never was": ("job.toml --resume 400", 1, r"no run 'worst'"),
    "a run that never was": ("job.toml --resume other@best", 1, r"other"),
    "a word that is no step": ("job.toml --resume yesterday", 1, r"yesterday"),
    "a branch of a run that never was": ("job.toml --branch", 1, r"no run 'worst'"),
    "workers of another kind": ("job.toml --workers.min 4 --workers.max 2", 1, r"workers"),
}
FILES: dict[str, tuple[bytes, str]] = {
    "a file without a bucket": (b'name = "worst"\n', r"bucket is missing; set it in the file"),
    "no TOML": (b"steps = = 3\n", r"job\.toml"),
    "not text": (bytes(range(256)), r"job\.toml"),
    "a section twice": (b"[optim]\nlr = 1\n[optim]\nlr = 2\n", r"job\.toml"),
    "a value in place of a section": (b'name = "worst"\nbucket = "b"\noptim = 3\n', r"optim = 3"),
}


def refused(capsys: pytest.CaptureFixture[str], folder: Path, words: list[str]) -> tuple[int, str]:
    """Trains with a line that cannot work, checks what all such lines have in common, and returns the code
    and the sentence.
    """
    before, children = files_of(folder), {each.pid for each in psutil.Process().children(recursive=True)}
    code = main(["train", *words, "--local"])
    shown = capsys.readouterr()
    lines = [line for line in shown.out.splitlines() if not re.match(r"note: |\d\d:\d\d:\d\d ", line)]
    assert (
        re.fullmatch(r"(checking the job: .*\n)?", shown.err)
        and len(lines) == 1
        and lines[0].startswith("elastic: ")
    ), shown
    assert files_of(folder) == before, "nothing is written"
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= children and not [
        *Path("/dev/shm").glob(f"*{NAME}*")
    ]
    return code, lines[0]


def files_of(folder: Path) -> dict[str, Any]:
    found = [each for each in folder.rglob("*") if "__pycache__" not in each.parts]
    return {str(each): each.read_bytes() if each.is_file() else None for each in found}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(to_toml(toy_job(tmp_path / "bucket", name=NAME, steps=2)))
    (tmp_path / "broken.py").write_text("def loss(model batch):\n")
    return tmp_path


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_cannot_work_is_refused_in_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    words, code, said = LINES[line]
    found = refused(capsys, folder, words.split())
    assert found[0] == code and re.search(said, found[1]), found


@pytest.mark.parametrize("file", FILES)
def test_a_job_file_that_cannot_be_read_is_refused_in_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    text, said = FILES[file]
    (folder / "job.toml").write_bytes(text)
    found = refused(capsys, folder, ["job.toml"])
    assert found[0] == 1 and re.search(said, found[1]), found


def test_too_few_samples_are_refused_in_a_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.toml").write_text(to_toml(toy_job(folder / "bucket", name=NAME, **TOO_FEW)))
    said = refused(capsys, folder, ["job.toml"])[1]
    assert "global_batch = " in said and "has 5 samples, fewer than one step takes" in said


def test_the_control_trains_and_writes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "job.toml", "--local"]) == 0
    with pytest.raises(AssertionError):
        refused(capsys, folder, ["job.toml"])
    assert (folder / "bucket" / NAME / "job.json").exists()
