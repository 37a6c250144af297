"""Bad samples on a run's page, in `elastic checkpoint show`, in the rows and in `elastic status`: the true
cause, and true numbers.
"""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.cli import main
from actors.cli.facts import facts_of
from actors.cli.run_commands import Absent
from actors.launch import launch, lines_of
from actors.screen import Screen
from actors.view import View
from elastic.control.skips import Skips
from elastic.engine.spike_memory import SpikeMemory, tensors_of
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.report.page import page_of
from elastic.report.page.html import html_of
from elastic.report.story import Line, Sentence
from elastic.runs.metrics import rows_of
from elastic.runs.quarantine import held_in
from elastic.runs.run import Run
from elastic.runs.skipped import skips_in
from tests.support.job_file import to_toml
from tests.support.report_page import Read, read_page
from tests.train.test_skips import local
from tests.train.test_spikes import WINDOW, drawn_by, kept, spiky

pytestmark = pytest.mark.fast
JUDGED = {"spikes": {"microbatch_z": 6.0}, "optim": {"lr": 0.002}}


def ended(folder: Path, gains: dict[int, float], **changes: Any) -> tuple[Job, Run]:
    """Returns a run that has ended, and its job, with what is in its bucket."""
    job = spiky(folder / "bucket", gains, **changes)
    local(job)
    (folder / "job.toml").write_text(to_toml(job))
    return job, Run.open(job)


def page_in(run: Run) -> Read:
    return read_page(html_of(page_of(facts_of(run, run.job.keep(), 0.0))))


def lane(page: Read, name: str) -> list[str]:
    return [
        text
        for each in page.data["loss"]["lanes"]
        if each["name"] == name
        for mark in each["marks"]
        for text in mark[2]
    ]


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main([*words]) == code
    return " ".join(re.sub("[─━┃│┏┓┗┛┡┩└┘├┤┬┴┼╇╈╋]", " ", capsys.readouterr().out).split())


def test_g1_l2_the_page_says_why_each_step_was_skipped(tmp_path: Path) -> None:
    """G1, L2: a loss that is not finite, a spike, and (by hand) a gradient alone.  The control: a run of good
    samples has no such words.
    """
    first = WINDOW + 2
    (_, strange), (_, high) = (drawn_by(tmp_path, step, Layout(1, 1), 0) for step in (3, first))
    _, run = ended(tmp_path, {strange: math.nan, high: 1e3})
    page = page_in(run)
    assert lane(page, "Step skipped") == [
        "step 3 was skipped: its loss was not finite",
        f"step {first} was skipped: it was a spike",
    ]
    assert page.tiles["Skipped steps"] == "2" and "1 spike, 1 loss not finite" in " ".join(
        page.texts["p"] + page.texts["div"]
    )
    assert page.tiles["Samples in quarantine"] == "4" and "Microbatches left out" not in page.tiles
    assert not any("left_out" in row for row in rows_of(run)), "the job leaves none out"
    told = (
        f"2 steps were skipped, because no finite gradient came or it was a spike: 3, {first}; 4 samples "
        "are in quarantine"
    )
    assert Absent.of(run.job).said.endswith(f"it ended as Finished; {told}")
    columns = facts_of(run, run.job.keep(), 0.0).columns
    columns["norm"][first - 1] = math.nan
    assert columns.why_skipped(first - 1) == "gradient" and columns.why_skipped(0) == ""
    (tmp_path / "good").mkdir()
    good = page_in(ended(tmp_path / "good", {})[1])
    assert not good.tiles.keys() & {"Skipped steps", "Samples in quarantine"} and not lane(
        good, "Step skipped"
    )
    assert Absent.of(spiky(tmp_path / "good" / "bucket", {})).said.endswith("it ended as Finished")


def test_g1_l2_spikes_that_were_only_warned_of_are_counted(tmp_path: Path) -> None:
    """G1, L2: the judge is the sentence about each of them.  The control: a run of the same samples that
    skips them.
    """
    _, high = drawn_by(tmp_path, WINDOW + 2, Layout(1, 1), 0)
    for action in ("warn", "skip"):
        (tmp_path / action).mkdir()
        job = spiky(tmp_path / action, {high: 1e3}, spikes={"action": action})
        told, error = local(job)
        run, warns = Run.open(job), action == "warn"
        steps = [int(text.split()[1]) for text in told if " is a spike: its loss" in text]
        assert not error and bool(steps) == warns
        assert [row["step"] for row in rows_of(run) if row.get("spike") and not row["skipped"]] == steps
        words = (
            f"{len(steps)} {'step was a spike' if len(steps) == 1 else 'steps were spikes'} (warned): "
            f"{', '.join(map(str, steps))}"
        )
        assert told[-1].endswith(f"steps are done; {words}") == warns
        assert Absent.of(run.job).said.endswith(f"it ended as Finished; {words}") == warns
        page = page_in(run)
        assert (
            page.tiles.get("Spikes (warned)") == (str(len(steps)) if warns else None)
            and ("Skipped steps" in page.tiles) != warns
        )


def test_of_fp16_only_what_no_scale_changes_counts() -> None:
    """The control is another precision."""
    row: dict[str, Any] = {"step": 1, "skipped": 1, "norm": math.nan, "loss": 1.0}
    assert [skips_in([row], fp16=fp16).total for fp16 in (True, False)] == [0, 1]
    assert skips_in([{**row, "loss": math.nan}, {**row, "step": 2, "norm": 9.0}], fp16=True) == Skips(
        ((1, 2),), spikes=(2,)
    )


def test_the_sentence_of_the_end_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The result has it.  The controls: a run that is not over, and the sentences before."""
    lines = tuple(
        Sentence(1.0, text) for text in ("form generation 1", "finished at step 3; 1 step was skipped")
    )
    view = View(
        **{
            **dict.fromkeys((each.name for each in fields(View)), 0),
            "state": "Finished",
            "reason": lines[1].text,
            "lines": lines,
        }
    )
    for each, shown in ((view, lines[:1]), (replace(view, state="Finishing"), lines)):
        for line in lines_of(each):
            Screen().show(line)
        assert [
            text in said for said in [capsys.readouterr().out] for text in (line.text for line in lines)
        ] == [line in shown for line in lines]


def test_g1_l2_the_page_has_what_was_left_out(tmp_path: Path) -> None:
    """G1, L2: the numbers of the page are those of the rows; no step was skipped.  The control is the run
    above.
    """
    first = WINDOW + 1
    _, bad = drawn_by(tmp_path, first, Layout(1, 1), 0)
    _, run = ended(tmp_path, {bad: 1.3}, **JUDGED)
    rows = list(rows_of(run))
    steps = [row["step"] for row in rows if row.get("left_out")]
    assert steps and sum(row["skipped"] for row in rows) == 0
    page = page_in(run)
    assert all("left_out" in row for row in rows) and rows[0]["left_out"] == 0, "as skipped is 0"
    number, of = sum(row["left_out"] for row in rows), f"{len(steps)} step{'s' * (len(steps) > 1)}"
    assert (
        f"; {number} microbatch{'es were' if number > 1 else ' was'} left out of {of}"
        in Absent.of(run.job).said
    )
    assert (
        page.tiles["Microbatches left out"] == str(sum(row.get("left_out", 0) for row in rows))
        and "Skipped steps" not in page.tiles
    )
    assert lane(page, "Microbatch left out")[0] == f"step {steps[0]} left out 1 microbatch"
    assert page.tiles["Samples in quarantine"] == str(sum(row.get("quarantined", 0) for row in rows))


def test_g1_a_checkpoint_lists_its_samples_in_quarantine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """G1: the judge is the memory that the run itself reads by, made from the same checkpoint; the controls
    are runs that have none.
    """
    (_, strange), (_, noisy) = (drawn_by(tmp_path, step, Layout(1, 1), 0) for step in (3, WINDOW + 4))
    job, run = ended(tmp_path, {strange: math.nan, noisy: 1.3}, **JUDGED)
    newest = run.newest()
    assert newest is not None
    memory = SpikeMemory(job, {each.name: kept(job, newest, each.name) for each in tensors_of(job.spikes)})
    held = held_in(run.checkpoints.open(newest))
    assert held is not None and tuple(held) == memory.held
    assert {each.applied for each in held} == {True, False}
    file = str(tmp_path / "job.toml")
    assert f"quarantine {len(held)} samples; --quarantine lists them" in said(
        capsys, "checkpoint", "show", file
    )
    words = said(capsys, "checkpoint", "show", file, "--quarantine")
    assert f"samples in quarantine in {newest}: {len(held)}" in words
    for each in held:
        assert (
            f"{each.sample} {each.step} was {'applied without its microbatch' if each.applied else 'skipped'}"
        ) in words
    (tmp_path / "good").mkdir()
    ended(tmp_path / "good", {})
    assert "samples in quarantine in step 16 of generation 1: 0" in said(
        capsys, "checkpoint", "show", str(tmp_path / "good" / "job.toml"), "--quarantine"
    )
    (tmp_path / "off").mkdir()
    ended(tmp_path / "off", {}, spikes={"action": "none"}, steps=2)
    assert "has no quarantine" in said(
        capsys, "checkpoint", "show", str(tmp_path / "off" / "job.toml"), "--quarantine"
    )


def test_a_branch_that_forgets_says_how_many_samples_are_read_again(tmp_path: Path) -> None:
    """The number is that of the checkpoint.  The controls: a branch that keeps them out, and the branch once
    it has begun.
    """
    _, strange = drawn_by(tmp_path, 3, Layout(1, 1), 0)
    for action, number in (("skip", 0), ("forget", 1)):
        job, run = ended(tmp_path, {strange: math.nan}, steps=4, name=action)
        lines, told = (
            list[Line](),
            (
                f"spikes.action = 'forget': samples that are in quarantine in {run.newest()} are read "
                "again (2 samples)"
            ),
        )
        words: dict[str, Any] = {"local": True, "show": lines.append}
        later = job.replace(steps=5, spikes={"action": action, "window": WINDOW})
        launch(later, branch=True, **words)
        assert [told in line.text for line in lines if isinstance(line, Sentence)].count(True) == number
        launch(later.replace(steps=6), again=True, branch=True, **words)
        assert [told in line.text for line in lines if isinstance(line, Sentence)].count(True) == number


def test_samples_of_a_mixture_are_listed_by_their_ids(tmp_path: Path) -> None:
    """The step of a row is negative in a weighted mixture: the list has the same samples and steps.  The
    control is the plain data set.
    """

    class Kept:
        def __init__(self, rows: torch.Tensor) -> None:
            self.rows = rows

        def tensors(self) -> Any:
            return tensors_of(spiky(tmp_path, {}).spikes)

        def read(self, wanted: Any) -> Any:
            return [(wanted[0], bytearray(self.rows.numpy().tobytes()))]

    rows = torch.zeros((10, 2), dtype=torch.int64)
    rows[:3] = torch.tensor([[5, 3], [0, 4], [-1 - 7, 9]])
    mixed = rows * torch.tensor([1, -1])
    for written, anywhere in ((rows, True), (mixed, False)):
        expected = [(5, 2, False, anywhere), (0, 3, False, anywhere), (7, 8, True, anywhere)]
        assert held_in(Kept(written)) == expected  # type: ignore[arg-type]
