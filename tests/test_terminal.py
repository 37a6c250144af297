"""L12: what a person sees while a run goes on: one line that changes, sentences above it, and nothing left
over.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from actors import terminal
from actors.cli import UNREAD, main
from actors.screen import Screen
from actors.terminal import Terminal
from actors.view import View
from elastic.job import Job
from elastic.report.progress import RunPace, spell
from elastic.report.story import StepLine
from elastic.runs.run import Run
from tests.support.commands import FORK, ROOT
from tests.support.job_file import to_toml
from tests.support.patience import PATIENCE_S
from tests.support.screen import InTerminal, Seen
from tests.support.toys import TINY, toy_job
from tests.support.warm import SOCKET, Warm

CODE = """
import time
import torch
from tests.support.toys import Sums

def loss(model, batch):
    from elastic.engine.loss import next_token
    if model.training:
        print("a print of the user")
    return next_token(model, batch)

class Class(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 2)

    def init_weights(self):
        torch.nn.init.normal_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

class Images:
    def __len__(self):
        return 64

    def read(self, ids):
        return {"image": torch.tensor([[i % 2.0, 1.0, 0.0] for i in ids]), "label": torch.tensor([i % 2 for i in ids])}

    def fingerprint(self):
        return "images"

def classify(model, batch):
    logits = model.head(batch["image"])
    return torch.nn.functional.cross_entropy(logits, batch["label"], reduction="sum"), len(logits)
"""
STEP = StepLine(1000.0, 1, 1000, 3.0, 1.0, 0.1, 0.0, 2, 1)
VIEW = View("Running", "", "t", 1, 1, 1, 9, 10, {}, 0, [], "", False, "", None, None, (0, 0), "")


def written(folder: Path, name: str = "toy", **changes: object) -> str:
    """Writes a job of 8 steps, two of them saved, and user code; returns the path of the job file."""
    job = toy_job(
        folder / "bucket",
        name=name,
        **{**TINY, "steps": 8, "microbatch": 4, "checkpoint": {"save_every": 4}, **changes},
    )
    (folder / "shown_code.py").write_text(CODE)
    path = folder / f"{name}.toml"
    path.write_text(to_toml(job))
    return str(path)


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch, forks: Warm) -> None:
    """Commands may be forks."""
    monkeypatch.setenv(SOCKET, forks.path)


def steps(first: int, last: int, took_s: float, at: float = 0.0, **changes: object) -> list[StepLine]:
    return [
        replace(STEP, at=at + took_s * n, step=step, tokens_per_s=100 / took_s, **changes)  # type: ignore[arg-type]
        for n, step in enumerate(range(first, last + 1))
    ]


@pytest.mark.fast
def test_l12_the_time_left_is_that_of_the_newest_steps_whatever_a_recovery_took() -> None:
    """Control: with the mean of the same steps, three minutes without a step would be taken for the pace."""
    progress = RunPace()
    lines = [*steps(1, 10, 2.0), *steps(9, 20, 2.0, at=200.0, generation=2)]
    for line in lines:
        progress.add(line)
    assert progress.left_s == 2.0 * (1000 - 20) and progress.rate == 50.0
    mean = (lines[-1].at - lines[0].at) / (len(lines) - 1)
    assert abs(mean * 980 - progress.left_s) > 1000
    for line in steps(21, 26, 4.0, at=300.0, generation=3, world=1):
        progress.add(line)
    assert progress.left_s == 4.0 * (1000 - 26), (
        "half the world takes twice as long, and that is known after two steps"
    )
    assert RunPace().left_s == 0.0


@pytest.mark.fast
@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0:00:00"), (65, "0:01:05"), (3600 * 47 + 59.6, "47:01:00"), (3600 * 76 + 65, "3 d 04:01")],
)
def test_a_duration_reads_as_a_clock_does(seconds: float, said: str) -> None:
    assert spell(seconds) == said


@pytest.mark.fast
def test_the_tests_screen_is_a_terminal() -> None:
    """Judged by hand after ECMA-48: the carriage return overwrites, EL clears to the end, a full line goes on
    below.
    """
    seen = Seen(5)
    for text in ("abc\r\x1b[", "K\x1b[2mde\x1b[0m\r\n", "12345678\rX\r\n", "longer\r", "\x1b[Ky"):
        seen.feed(text)
    assert seen.lines == ["de", "12345", "X78", "longe", "y"]
    with pytest.raises(AssertionError):
        seen.feed("\x1b[3A")


@pytest.mark.fast
@pytest.mark.parametrize(("every", "told"), [("auto", [1, 2000, 2500, 4000]), (3000, [3000])])
def test_l12_a_file_gets_a_hundred_lines_of_a_run_and_one_a_minute(
    capsys: pytest.CaptureFixture[str], every: int | str, told: list[int]
) -> None:
    """Step 2,500 came late.  The control is a number: only the steps that it divides are told."""
    screen = Screen(every)
    for step in range(1, 4001):
        if step not in (2001, 2002):
            screen.show(
                replace(STEP, at=1000 + step / 100 + (60 if step >= 2500 else 0), step=step, steps=200_000)
            )
    shown = capsys.readouterr().out
    assert (
        [int(step) for step in re.findall(r"step +(\d+)/200000", shown)] == told
        and "\x1b" not in shown
        and "\r" not in shown
    )


@pytest.mark.fast
def test_l12_while_no_step_comes_the_line_says_what_the_run_does_and_how_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock is the test's.  Control: while steps come, it shows the step and the time left."""
    now, drawn = [0.0], list[str]()
    monkeypatch.setattr(Terminal, "changes", True)
    monkeypatch.setattr(Terminal, "draw", lambda console, text: drawn.append(text))
    screen = Screen(clock=lambda: now[0])
    for line in steps(1, 10, 2.0):
        screen.show(line)
    screen.look(VIEW)
    assert "step 10/1000" in drawn[-1] and "0:33:00 left" in drawn[-1] and "50 tokens/s" in drawn[-1]
    now[0] = 11.0
    screen.look(VIEW)
    assert "no step for 0:00:11" in drawn[-1] and "left" not in drawn[-1]
    now[0] = 30.0
    screen.look(replace(VIEW, state="Forming", step=10, steps=1000, reason="w2 is gone; form generation 2"))
    assert drawn[-1] == "step 10/1000  forms a world, for 0:00:19 now: w2 is gone"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("took_s", "said"), [(0.01, ""), (2.0, "0:00:12 left")], ids=("nothing to say", "the control")
)
def test_l12_time_left_and_mfu_are_shown_if_they_say_something(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], took_s: float, said: str
) -> None:
    """Less than a second is nothing, and so is an MFU that rounds to 0%: on the line that changes, and in a
    file.
    """
    drawn = list[str]()
    monkeypatch.setattr(Terminal, "draw", lambda console, text: drawn.append(text))
    mfu = 0.004 if not said else 0.4
    for changes in (True, False):
        monkeypatch.setattr(Terminal, "changes", changes)
        screen = Screen(1)
        for line in steps(1, 4, took_s):
            screen.show(replace(line, steps=10, mfu=mfu, causal_mfu=mfu))
    for text in (drawn[-1], capsys.readouterr().out.splitlines()[-1]):
        assert "4/10" in text and said in text and text.count("left") == bool(said)
        assert ("MFU 40% (40% causal)" in text) is bool(said) and text.count("MFU") == bool(said)


@pytest.mark.usefixtures("warm")
def test_l12_a_terminal_shows_one_line_that_changes_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    """L12.  Also with the user's own prints in between.  The controls: the line was there, and with what a
    terminal does not know as an end of line it would be left.
    """
    (tmp_path / "bucket").mkdir()
    run = InTerminal(
        tmp_path, "train", written(tmp_path, loss="shown_code:loss", trial=False), "--local", warm=True
    )
    assert run.wait() == 0, run.typed
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in run.seen.lines]
    assert lines[0].startswith("checking the job: ")
    assert lines[1] == "one worker in this process, from step 0 of generation 0 (init)"
    prints = [n for n, line in enumerate(lines) if line == "a print of the user"]
    last = next(n for n, line in enumerate(lines) if line.startswith("step     8/8  loss "))
    assert len(prints) == 8 * 4 and prints == list(range(prints[0], last)), lines
    assert lines[-2].startswith("Finished at step 8 of 8: ") and lines[-1] == ""
    assert not any("loss" in line or "━" in line for line in lines[:last]), lines
    assert [f"step {n}/8" in run.typed for n in range(1, 9)] == [True] * 7 + [False], (
        "the last step has a line that stays"
    )
    seen = Seen(100)
    seen.feed(run.typed.replace("\x1b[K", ""))
    assert any("loss" in line and "a print of the user" in line for line in seen.lines), "the control"


@pytest.mark.usefixtures("warm")
def test_l12_a_narrow_terminal_without_colours_that_is_resized_and_hears_ctrl_c(tmp_path: Path) -> None:
    """The line that changes fits into 40 columns, and into 30 after the window became smaller, with the ^C
    that the terminal writes.
    """
    run = InTerminal(
        tmp_path,
        "train",
        written(tmp_path, steps=10_000, data=paced()),
        "--local",
        warm=True,
        width=40,
        NO_COLOR="1",
    )
    run.until(r"step 3/10000")
    run.resize(30)
    run.until(r"step 6/10000")
    run.press(b"\x03")
    assert run.wait() == 3, run.typed
    # the terminal may write its ^C into the middle of a line that is being drawn
    drawn, lines = re.findall(r"\r\x1b\[K(step [^\r\n\x1b^]+)(?=[\r\x1b])", run.typed), run.seen.lines
    widths = [len(each) for each in drawn]  # at first a line lacks what is not known yet, as the time left
    assert max(widths) == 37 and max(widths[widths.index(27) :]) == 27, widths
    assert not re.search(r"\x1b\[(3|4)\d", run.typed)
    assert any(re.match(r"Stopped at step \d+ of 10000:", line) for line in lines), lines
    assert (
        "Traceback" not in run.typed
        and "^C" in run.typed
        and not any(re.match(r"step|\^", line) for line in lines)
    ), lines


@pytest.mark.usefixtures("warm")
def test_l12_no_line_breaks_within_a_word_or_a_number(tmp_path: Path) -> None:
    """Each line that a narrow terminal shows, put together again, is what a file gets."""
    run = InTerminal(tmp_path, "train", written(tmp_path), "--local", warm=True, width=50)
    assert run.wait() == 0, run.typed
    lines = [line for line in run.seen.lines[2:] if line]
    assert all(len(line) <= 50 for line in lines)
    words = " ".join(lines).split()
    for each in (
        "generation 1",
        r"lr \d\.\d\de-\d\d",
        r"\d+ parameters? do(es)? not",
        "all 8 steps are done",
    ):
        assert re.search(rf"\b{each}\b", " ".join(words)), lines
    assert any(re.search(r"  norm \d+\.\d{3}$|^norm \d+\.\d{3}\b", line) for line in lines), lines


@pytest.mark.parametrize("terminal_name", [pytest.param("dumb", marks=pytest.mark.full), "pipe", "notebook"])
def test_l12_without_control_characters_there_are_plain_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal_name: str
) -> None:
    """Besides, the model of this run has no tokens, so samples are counted."""
    classes = {
        "model": "shown_code:Class",
        "model_args": {},
        "loss": "shown_code:classify",
        "data": {"dataset": "shown_code:Images"},
    }
    job = written(tmp_path, **classes, log_every=4 if terminal_name == "notebook" else 1)
    if terminal_name != "dumb":
        if terminal_name == "notebook":
            monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter's kernel does
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "shown_code", raising=False)
        code, text = main(["train", job, "--local"]), capfd.readouterr().out
    else:
        run = InTerminal(tmp_path, "train", job, "--local", TERM="dumb")
        code, text = run.wait(), run.typed.replace("\r\n", "\n")
    assert code == 0, text
    told = list("48" if terminal_name == "notebook" else "12345678")
    assert re.findall(r"step +(\d)/8", text) == told and "\x1b" not in text and "\r" not in text
    assert (
        " 0 samples/s" not in text
        and re.search(rf"step +{told[-1]}/8 .* samples/s ", text)
        and "tokens" not in text
    )


def paced() -> dict[str, object]:
    return {"dataset": "tests.support.toys:Sums", "args": {"read_s": 0.02}}


def test_l12_quiet_prints_the_end_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error is printed, too: the control."""
    monkeypatch.chdir(tmp_path)
    job = written(tmp_path)
    assert main(["train", job, "--local", "-q"]) == 0
    assert capsys.readouterr().out == "Finished at step 8 of 8: all 8 steps are done\n"
    assert main(["train", job, "--local", "--quiet", "--seed", "7"]) == 1
    assert "seed = 0 in the run and 7 now" in capsys.readouterr().out


@pytest.mark.parametrize(
    "local", [True, pytest.param(False, marks=pytest.mark.full)], ids=["local", "cluster"]
)
@pytest.mark.usefixtures("warm")
def test_l12_a_run_outlives_the_reader_of_what_it_prints(tmp_path: Path, local: bool) -> None:
    """The reader is gone as with ``| head``.  The control is a command that only tells something: it ends
    with its reader.
    """
    job = written(tmp_path, name="unread", loss="shown_code:loss")
    command = [
        sys.executable,
        *[FORK] * local,
        "-m",
        "elastic",
        "train",
        job,
        *(["--local"] if local else []),
    ]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {**ours, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(PATIENCE_S) == 0 and "Traceback" not in said and "Error" not in said, said
    newest = Run.find(Job.load(Path(job))).newest()
    assert newest is not None and newest.step == 8
    read, write = os.pipe()
    os.close(read)
    told = subprocess.run(
        [sys.executable, FORK, "-m", "elastic", "metrics", job],
        cwd=tmp_path,
        env=environment,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert (told.returncode, told.stderr) == (UNREAD, "")


@pytest.mark.full
def test_l12_on_a_cluster_the_line_shows_what_the_run_does(tmp_path: Path) -> None:
    """L12: with two workers, and what a laptop's user need not know is not said."""
    run = InTerminal(tmp_path, "train", written(tmp_path, name="shown", data=paced()))
    assert run.wait() == 0, run.typed
    lines = run.seen.lines
    assert "waits for workers, for 0:0" in run.typed and "world 2" in run.typed
    assert not any("waits for workers" in line or "━" in line for line in lines), lines
    assert "no other node" not in run.typed and "copies of" not in run.typed


def test_what_somebody_else_has_begun_to_write_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is not ended yet stays, and the line that changes comes back after it."""
    shown = list[str]()
    monkeypatch.setattr(Terminal, "changes", True)
    monkeypatch.setattr(terminal, "_write", lambda stream, text: shown.append(text))

    class Tty:
        def isatty(self) -> bool:
            return True

    console = Terminal()
    for draw, text in ((True, "one"), (False, "half a li"), (True, "two"), (False, "ne\n"), (True, "three")):
        console.draw(text) if draw else console.passing(Tty(), text)  # type: ignore[arg-type]
    assert shown == ["\r\x1b[Kone", "\r\x1b[K", "half a li", "ne\n", "\r\x1b[Kthree"]
