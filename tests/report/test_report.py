"""L2: the page that `elastic report` draws: its numbers are those of the bucket, its size is bounded, and no
text of a run becomes HTML.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from actors.cli import main
from actors.cli.facts import facts_of
from elastic.ids import Version, WorkerId
from elastic.journal import codec
from elastic.plan.retention import Keep, Rule, reasons
from elastic.protocol import events as ev
from elastic.protocol.commit_record import Outcome, Usage
from elastic.report.goodput import AWAY
from elastic.report.page import page_of
from elastic.report.page.content import BranchRow, Chart, CheckpointRow, Facts, Line
from elastic.report.page.draw import png_of, svg_of
from elastic.report.page.html import KEPT, html_of, money
from elastic.report.page.series import Columns, buckets, smoothed
from elastic.report.recoveries import Recovery
from elastic.report.story import StepLine
from elastic.report.timeline import FORMED, LOST, Moment, SaveSpan, Timeline, WorldSpan
from elastic.report.words import duration, percent, shown
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from storage import journal
from tests.control.play import Play, reformed, stepping
from tests.control.test_takeover import folded
from tests.runs.test_metrics import Written, lines
from tests.support.job_file import to_toml
from tests.support.report_page import Read, read_page
from tests.support.toys import TINY, toy_job

pytestmark = pytest.mark.fast

HOSTILE = "</title></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&lt;\x00\ud800$^{x}$"


class Told(Written):
    """A story whose commits took half a second each, an eighth of it waiting for data."""

    def commit(self, step: int, *args: Any, **options: Any) -> Outcome:
        found = super().commit(step, *args, **options)
        return Outcome(**{**vars(found), "usage": Usage(0.5, 0.0625, 1000, 2000), "usage_ranks": (0,) * 4})


def begun(folder: Path, play: Play, **changes: Any) -> tuple[Run, Told]:
    """Returns a run whose story goes on from ``play`` at the time 1000, with its journal in a bucket in
    ``folder``.
    """
    run = Run.open(toy_job(folder / "bucket", steps=100, **changes))
    told = Told(play, run, folder / "local")
    told.now = 1000.0
    return run, told


def lost_and_joined(folder: Path, *, loses: bool = True) -> Run:
    """Returns a run of two workers.  One is lost after step 7, and its shard with it, so that steps 6 and 7
    are done again by the other.
    """
    run, play = begun(folder, stepping(2, save_every=5))
    for step in range(1, 8):
        play.now += 1.0
        play.step(step)
        if step == 5:
            play.now += 0.25
            play.save(Version(5, 1), "w1", "w2")
    if loses:
        play.now = 1100.0
        play.lose("w2", "its process died & <more>")
        play.now = 1101.5
        play.answer("w1", Version(5, 1))
        play.now = 1103.75
        play.here("w1")
        play.now = 1104.0
        play.tell(ev.Ready(WorkerId("w1"), play.generation, 0.125, 0.0625, 4_000_000))
        play.now = 1108.0
        play.steps(6, 8)
    play.ship()
    return run


def page_in(run: Run, now: float = 5000.0) -> Read:
    return read_page(html_of(page_of(facts_of(run, run.job.keep(), now))))


def commanded(run: Run, folder: Path, *words: str) -> Read:
    """Returns the page that the command writes."""
    file, to = folder / "job.toml", folder / "page.html"
    file.write_text(to_toml(run.job))
    assert main(["report", str(file), "--to", str(to), *words]) == 0
    return read_page(to.read_text(encoding="utf-8"))


def check(page: Read, run: Run) -> None:
    """Fails unless the page has the numbers of the bucket of ``run``: of its journal, as JSON, with nothing
    of the page's own code.
    """
    told: dict[int, float] = {}
    for _, records in journal.read(run.store, run.job.name):
        for record in records:
            told.update(
                {each["step"]: codec.decode(Outcome, each).loss for each in record.get("commits", ())}
            )
    assert [point[0] for point in page.points("loss", 0)] == sorted(told)
    assert [point[3] for point in page.points("loss", 0)] == pytest.approx(
        [told[step] for step in sorted(told)], rel=1e-5
    )
    assert page.tiles["Step"] == str(max(told))
    assert page.tiles["Training loss"] == f"{told[max(told)]:.4g}"


def test_l2_the_numbers_of_the_page_are_those_of_the_bucket(tmp_path: Path) -> None:
    """L2: by the clock of the story: 1.5 s until the outcome is decided, 2.25 s to leave, 0.25 s until all
    go, and 4 s to the first commit.

    The control is the page of another run, in which nobody is lost.
    """
    run = lost_and_joined(tmp_path / "lost")
    page = commanded(run, tmp_path)
    check(page, run)
    head, first, *rest = page.tables["incidents"]
    assert not rest, "the first world was formed before the journal begins"
    row = dict(zip(head, first, strict=True))
    phases = {
        "Decide": "1.50",
        "Abort": "2.25",
        "Form": "0.12",
        "Heal": "0.06",
        "Go": "0.06",
        "Step": "4.00",
        "Sum": "8.00",
    }
    assert (
        row.items()
        >= {"Time (UTC)": "1970-01-01 00:18:20", "Kind": "incident", "Steps again": "2", **phases}.items()
    )
    assert row["State from"].startswith("a living worker") or "4 MB moved" in row["State from"]
    assert row["Why"].startswith("w2 is lost (its process died & <more>)")
    assert [
        mark[0]
        for lane in page.data["loss"]["lanes"]
        if lane["name"].startswith("Worker")
        for mark in lane["marks"]
    ] == [7]
    assert [
        mark[0]
        for lane in page.data["loss"]["lanes"]
        if lane["name"] == "Checkpoint"
        for mark in lane["marks"]
    ] == [5]
    time_of = {name: seconds for name, seconds, *_ in page.tables["shares"][1:]}
    assert time_of == {
        **{"Computing": "5.75 s", "Waiting for data": "0.50 s", "Steps done again": "1.00 s"},
        **{"Noticing faults": "1 min 32 s", "Agreeing": "1.50 s", "Leaving worlds": "2.25 s"},
        **{"Forming worlds": "3.69 s", "Restoring state": "0.06 s"},
    }, (
        "the steps until 1007.25 s count; then half a second is an unfinished step, and half a second step 6 again"
    )
    assert page.tiles["Faults"] == "1"
    assert page.tiles["Goodput"] == f"{100 * 6.25 / 107:.1f} %", (
        "the journal begins at 1001 s and ends at 1108 s; one worker could do as many steps as two"
    )
    assert [row[1:] for row in page.tables["goodput"][1:4]] == [["5.8 %", "5.8 %"]] * 3
    cost = dict(zip(*page.tables["costs"], strict=True))
    assert (cost["Kind"], cost["Lost"], row["Lost"]) == ("loss", "1 min 41 s", "100.75")
    # two nodes: the node of w2 has lost its worker only, and its keeper is there
    assert cost["Of nodes paid"] == "3 min 22 s"
    priced = commanded(run, tmp_path, "--price", "36")
    assert priced.tables["costs"][0][-1] == "Cost" and priced.tables["costs"][1][-1] == f"{201.5 / 100:.2f}"
    assert priced.tables["incidents"][1][-1] == f"{201.5 / 100:.2f}"
    told = "A node-hour costs 36.0, and all nodes of the whole run 2.14."
    assert any(told in text for text in priced.texts["p"]), "two nodes for 107 s"
    assert [money(each) for each in (0.0, 0.00412, 1234.5)] == ["0", "0.00412", "1,234.50"], (
        "cents of a short run"
    )
    assert page.texts["p"][1] == "Not over: training at step 8 of 100."
    quiet = lost_and_joined(tmp_path / "quiet", loses=False)
    other = page_in(quiet)
    check(other, quiet)
    assert "incidents" not in other.tables and other.tiles["Faults"] == "0"
    with pytest.raises(AssertionError):
        check(other, run)


def test_l2_a_takeover_is_no_new_start_and_a_restart_is(tmp_path: Path) -> None:
    """L2: workers go on without their coordinator for ten seconds, in which nothing stops; then a new life
    begins 50 s after a stop.
    """
    run, play = begun(tmp_path, stepping(1, save_every=50))
    play.steps(1, 3)
    play.now += 10
    play.tell(ev.Recovered(2, (WorkerId("w1"),), play.run.cluster.keepers))
    play.ship()
    told = Timeline().read(journal.objects(run.store, "toy"))
    assert (told.life, [each.kind for each in told.moments]) == (1, ["coordinator"])
    assert told.account.whole.seconds[AWAY] == 0
    snapshot = codec.snapshot(folded(Play(run=stepping(1).run)).run)
    snapshot["run"]["incarnation"] = 3
    again = {
        "n": 99,
        "at": told.at + 50,
        "event": {"$": "Tick"},
        "state": "Running",
        "changed": {},
        "actions": [],
        "reason": "",
    }
    told = Timeline().read([*journal.objects(run.store, "toy"), (snapshot, [again])])
    assert (told.life, [each.kind for each in told.moments]) == (2, ["coordinator", "started"])
    assert told.account.whole.seconds[AWAY] == 50


def test_l2_a_death_that_is_seen_and_then_certain_is_one_loss(tmp_path: Path) -> None:
    """L2: the control: the next worker that dies is a loss of its own."""
    run, play = begun(tmp_path, stepping(3, save_every=50))
    play.steps(1, 3)
    play.tell(ev.Lost(WorkerId("w1"), "it exits", certain=False))
    play.lose("w1")
    play.lose("w2")
    play.ship()
    told = Timeline().read(journal.objects(run.store, "toy"))
    assert [each.text[:10] for each in told.moments if each.kind == "lost"] == ["w1 is lost", "w2 is lost"]


@pytest.mark.parametrize("found", [("w1",), ("w1", "w2")], ids=["one is gone", "both are there"])
def test_l2_a_worker_that_the_next_coordinator_does_not_find_is_lost_as_any_other(
    tmp_path: Path, found: tuple[str, ...]
) -> None:
    """L2: it died while nobody led the run."""
    run, play = begun(tmp_path, stepping(2, save_every=50))
    play.steps(1, 3)
    play.tell(ev.Recovered(2, tuple(map(WorkerId, found)), play.run.cluster.keepers))
    play.ship()
    told = Timeline().read(journal.objects(run.store, "toy"))
    assert [each.text.partition(":")[0] for each in told.moments if each.kind == "lost"] == ["w2 is lost"][
        len(found) - 1 :
    ]


@pytest.mark.parametrize("fails", [True, False])
def test_l2_a_run_that_failed_shows_the_error_and_one_that_was_stopped_the_reason(
    tmp_path: Path, fails: bool
) -> None:
    """L2: the traceback of the user's code is text, whatever is in it."""
    error = f'Traceback:\n  File "user.py", line 7\nValueError: {HOSTILE[:-6]}'
    run, play = begun(tmp_path, stepping(1, save_every=50))
    play.steps(1, 3)
    if fails:
        for _ in range(2):
            play.broken("w1", "job", error, "ValueError at user.py:7")
            if play.pending:
                play.answer("w1", Version(3, 1))
            if play.run.plan is not None and not play.run.over:
                reformed(play)
    else:
        play.tell(ev.StopRequested("the <b>power</b> goes"))
        play.step(4, boundary=2)
        play.answer("w1", Version(4, 1), saw=4)
        play.save(Version(4, 1), "w1")
    assert play.run.over
    play.ship()
    page = commanded(run, tmp_path)
    lead = page.texts["p"][1]
    assert lead.startswith("Failed at step 3 of 100: " if fails else "Stopped at step 4 of 100: "), lead
    if fails:
        assert page.texts["pre"] == [error.replace("\x00", "�").replace("\ud800", "�")]
    else:
        assert "pre" not in page.texts and "the <b>power</b> goes" in lead
    assert page.tags["script"] == 2 and "b" not in page.tags


def test_l2_a_run_without_ray_and_one_that_has_no_step_yet(tmp_path: Path) -> None:
    """L2: there is no journal; all that is in the bucket is shown: rows, validations, and checkpoints with
    the sizes of their files.
    """
    held_out = {
        "every": 4,
        "samples": 21,
        "dataset": "tests.support.toys:Sums",
        "args": {"samples": 50, "seq_len": 16},
    }
    sinks = {"tests.support.sinks:Table": {"path": str(tmp_path / "hush.db")}}
    keeps = {"save_every": 4, "keep_last": 2, "keep_younger": "24h"}
    job = toy_job(
        tmp_path / "bucket", steps=10, checkpoint=keeps, validation=held_out, metrics={"sinks": sinks}, **TINY
    )
    empty = commanded(Run.open(job), tmp_path)
    assert empty.texts["p"][1] == "The run has begun and has not committed a step yet."
    assert not empty.data and empty.tiles == {"Step": "0"}
    assert run_local(job, lambda _: None)[0] == "Finished"
    page, rows = commanded(Run.open(job), tmp_path), lines(Run.open(job))
    assert page.texts["p"][1] == "Finished at step 10 of 10."
    assert any("There is no journal" in text for text in page.texts["p"])
    assert [point[3] for point in page.points("loss", 0)] == pytest.approx(
        [row["loss"] for row in rows], rel=1e-5
    )
    assert [point[3] for point in page.points("norm", 0)] == pytest.approx(
        [row["norm"] for row in rows], rel=1e-5
    )
    assert [point[3] for point in page.points("lr", 0)] == pytest.approx(
        [row["lr"] for row in rows], rel=1e-5
    )
    validated = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    assert {point[0]: point[3] for point in page.points("loss", 2)} == pytest.approx(validated, rel=1e-5)
    assert page.tiles["Best validation loss"] == f"{min(validated.values()):.4g}"
    took = sum(row["step_s"] for row in rows)
    assert float(page.tiles["Throughput"].replace(",", "")) == pytest.approx(
        sum(row["tokens"] for row in rows) / took, rel=1e-3
    )
    manifests = list((tmp_path / "bucket" / "toy" / "steps").rglob("MANIFEST.json"))
    sizes = {
        sum(each["size"] for each in json.loads(manifest.read_text())["files"]) for manifest in manifests
    }
    shown_sizes = {row[2] for row in page.tables["checkpoints"][1:]}
    assert len(page.tables["checkpoints"]) - 1 == len(manifests) == 3
    assert {round(float(size.split()[0])) for size in shown_sizes} == {round(size / 1000) for size in sizes}
    last, young = KEPT["last"], KEPT["younger"]
    assert [row[-1] for row in page.tables["checkpoints"][1:]] == [
        f"{last}, {young}",
        f"{last}, {young}",
        young,
    ]
    settings = dict(page.tables["settings"][1:])
    assert settings["optim.lr"] == "0.01" and settings["validation.args.samples"] == "50"
    assert settings["metrics.sinks.tests.support.sinks:Table.path"] == "(not shown)", "it may be a key"
    assert (
        "hush" not in (tmp_path / "page.html").read_text(encoding="utf-8") and (tmp_path / "hush.db").exists()
    )


def test_l2_two_processes_that_trained_one_after_the_other(tmp_path: Path) -> None:
    """L2: there was no world between them, and the page counts what the run's lines count: terms of a loss
    that is not ours.
    """
    job = toy_job(tmp_path / "bucket", steps=6, loss=f"{__name__}:squares", **TINY)

    def stops(line: Any) -> None:
        if isinstance(line, StepLine) and line.step == 3:
            raise KeyboardInterrupt

    shown_ = list[Any]()
    assert run_local(job, stops)[0] == "Stopped" and run_local(job, shown_.append)[0] == "Finished"
    facts, rows = facts_of(Run.open(job), job.keep(), 5000.0), lines(Run.open(job))
    page = page_of(facts)
    (world,) = (chart for chart in page.charts if chart.key == "world")
    (stairs,) = world.lines
    began, at = rows[0]["time"], [row["time"] for row in rows]
    sizes = [(point.x, point.mean) for point in stairs.points]
    assert (pytest.approx(at[2] - began), 0) in sizes and sizes[-1] == (pytest.approx(at[5] - began), 1)
    assert len({x for x, size in sizes if size == 0}) == 1
    (rate,) = (chart for chart in page.charts if chart.key == "throughput")
    assert rate.title == "Throughput (terms a second)" and "terms a second" in next(
        tile.note for tile in page.tiles if tile.label == "Throughput"
    )
    assert {line.noun for line in shown_ if isinstance(line, StepLine)} == {"terms"}
    (first, ended), (second, _) = facts.alone
    assert ended is not None and first < at[0] < at[2] < ended < second < at[3]


@pytest.mark.parametrize(("ended", "away"), [(1003.0, 995.0), (None, 996.0)], ids=["stopped", "killed"])
def test_l2_the_time_between_two_processes_is_no_time_of_the_run(ended: float | None, away: float) -> None:
    """L2: nothing ran from the end of the first until the second began; a killed process has its last step as
    its end.  The control: with one process all the time counts.
    """
    rows = [{"step": n, "time": n + (999 if n < 4 else 1996), "step_s": 0.5} for n in range(1, 7)]
    facts = Facts("run", 6, 4, {}, Columns(rows), Timeline(), alone=[(999.0, ended), (1998.0, 2003.0)])
    tile = next(each for each in page_of(facts).tiles if each.label == "Goodput")
    up = 1002.5 - away
    assert tile.value == percent(3.0, up) and tile.note == (
        f"3.00 s of {duration(up)} in steps that count; besides, {duration(away)} in which nothing ran"
    )
    tile = next(
        each for each in page_of(replace(facts, alone=facts.alone[:1])).tiles if each.label == "Goodput"
    )
    assert tile.value == percent(3.0, 1002.5) and "nothing ran" not in tile.note


def squares(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    found = model(batch["tokens"][:, :-1].clamp_min(0))
    return found.float().square().sum(), torch.tensor(found.numel())


def test_each_rule_that_keeps_a_checkpoint_has_words() -> None:
    """Each rule of ``plan/retention.py`` keeps something here, but for the one that ``runs/retention.py``
    adds.
    """
    saved = [Version(step, 1) for step in range(1, 9)]
    some = reasons(saved, Keep(2, 4, True, 1.0), saved[2], saved[:1], saved[-3:])
    found = {
        name
        for rules in (some, reasons(saved, Keep(), None, ()))
        for names in rules.values()
        for name in names
    }
    assert set(KEPT) == set(get_args(Rule)) == found | {"owed"}


def test_l2_a_branch_is_shown_with_what_it_changed(tmp_path: Path) -> None:
    """L2: the learning rates are those of the formula on both sides of the branch."""
    settings: dict[str, Any] = {
        **TINY,
        "checkpoint": {"save_every": 4},
        "schedule": {"kind": "constant", "warmup_steps": 0},
    }
    run_local(toy_job(tmp_path / "bucket", steps=4, **settings), lambda _: None)
    job = toy_job(tmp_path / "bucket", steps=8, optim={"lr": 0.125}, **settings)
    run = Run.look(job, branch=True)
    assert run.branch(7.0)
    run_local(job, lambda _: None)
    page = commanded(run, tmp_path)
    assert [row[3:] for row in page.tables["branches"][1:]] == [
        ["optim.lr", "0.01", "0.125"],
        ["steps", "4", "8"],
    ]
    assert [point[3] for point in page.points("lr", 0)] == [0.01] * 4 + [0.125] * 4
    assert any(
        lane["name"].endswith("branch") and lane["marks"][0][0] == 4 for lane in page.data["loss"]["lanes"]
    )


def long_run(steps: int, incidents: int, text: str = HOSTILE) -> Facts:
    """Returns a run that nobody ever trained: ``steps`` steps with one spike, ``incidents`` incidents, and
    ``text`` everywhere.
    """
    told = Timeline(
        began_at=1e9, at=1e9 + steps, state="Failed", reason=text, error=text * 1000, reached=steps, life=1
    )
    spike = steps * 2 // 3
    rows = []
    for step in range(1, steps + 1):
        loss = 1e3 if step == spike else 2 + 8 / step + (step * 7919 % 101) / 1000
        rate = {
            "tokens": 4096,
            "step_s": 0.9,
            "tokens_per_s": 4551.0,
            "data_wait": 0.01,
            "mfu": 0.4,
            "world": 8,
        }
        rows.append(
            {
                "step": step,
                "time": 1e9 + step,
                "final": 1,
                "loss": loss,
                "norm": 1.0,
                "lr": 1e-4,
                "skipped": step % 997 == 0,
                **rate,
            }
        )
    for number in range(incidents):
        step, at = steps * number // incidents, 1e9 + steps * number / incidents
        told.moments += [Moment(at, step, LOST, text), Moment(at, step, FORMED, text)]
        told.worlds[number] = WorldSpan(8, text, text, step, 7, 0, False)
        told.sizes += [(at, 7), (at + 0.5, 8)]
        told.recoveries.append(Recovery(number, text, False, at, 0.1, 0.1, 0.1, 0.1, 0.0, 0.1, at + 0.5))
    kept = [CheckpointRow(Version(step, 1), 10**9, text, text, ("best",)) for step in range(incidents)]
    told.saves = {each.version: SaveSpan(1.0, (text,) * 20) for each in kept}
    branch = BranchRow(2, 1, 1e9, {f"{number} {text}": (text, text * 100) for number in range(incidents)})
    settings = {f"{number} {text}": text for number in range(1000)}
    return Facts(text, steps, 8, settings, Columns(rows), told, kept, [branch] * 20, "Failed")


def test_l2_the_page_of_a_long_run_is_small_and_its_spikes_are_seen() -> None:
    """L2: four times the steps and incidents make no larger page.  The control of the spike is the mean of
    its bucket, which hides it.
    """
    sizes = []
    for steps in (2000, 8000):
        html = html_of(page_of(long_run(steps, steps // 2)))
        sizes.append(len(html.encode()))
        raw = read_page(html).points("loss", 0)
        assert len(raw) <= 480 and sum(point[4] for point in raw) == steps
        spikes = [point for point in raw if point[2] == 1e3]
        assert len(spikes) == 1 and abs(spikes[0][0] - steps * 2 // 3) <= steps / 480
        assert steps < 8000 or spikes[0][3] < 100
    assert sizes[1] < 1.1 * sizes[0] < 1.5e6, sizes


@pytest.mark.full
def test_l2_the_page_of_a_month_is_below_a_megabyte() -> None:
    """L2: 100,000 steps and 200 incidents, with texts as they are."""
    facts = long_run(
        100_000,
        200,
        (
            "w17 is lost (its process died): stop generation 16 of 64 workers; start w80: 63 workers of at "
            "most 64"
        ),
    )
    assert len(html_of(page_of(facts)).encode()) < 1e6


def test_l2_no_text_of_a_run_becomes_html() -> None:
    """L2: a page with hostile texts everywhere has the elements of one with kind texts, and the texts are
    read back as they were.

    The control is a page that does not escape.
    """
    page = html_of(page_of(long_run(50, 3)))
    kind = html_of(page_of(long_run(50, 3))).replace(HOSTILE, "")
    found = read_page(page)
    plain = HOSTILE.replace("\x00", "�").replace("\ud800", "�")
    assert found.tags == read_page(kind).tags and found.tags["script"] == 2 and "img" not in found.tags
    assert not {name for name in found.attributes if name.startswith("on")} and "src" not in found.attributes
    assert found.texts["h1"] == [plain]
    assert found.tables["incidents"][1][2] == plain and found.tables["settings"][1] == [f"0 {plain}", plain]
    assert found.texts["pre"][0].startswith(plain) and len(found.texts["pre"][0]) == 6000
    assert found.data["loss"]["lanes"][0]["marks"][0][2][0] == HOSTILE
    with pytest.raises(AssertionError):
        open_page = read_page(page.replace("&lt;", "<").replace("&gt;", ">"))
        assert open_page.tags == found.tags


def test_l2_the_page_loads_nothing(tmp_path: Path) -> None:
    """L2: no address, no import, nothing that a browser would fetch; and it says so to the browser.  The
    control is a page with a font.
    """

    def loads(html: str) -> list[str]:
        return re.findall(r'https?:|//\w|url\(|@import|\bsrc=|\bhref="(?!#)|<link|fetch\(|XMLHttp', html)

    run = lost_and_joined(tmp_path)
    html = html_of(page_of(facts_of(run, run.job.keep(), 0.0)))
    assert loads(html.replace(str(tmp_path), "")) == []
    assert "default-src 'none'" in html
    assert loads(html.replace("<style>", "<style>@import url(https://fonts.example/x.css);", 1)) == [
        "@import",
        "url(",
        "https:",
        "//f",
    ]


def test_l2_the_picture(tmp_path: Path) -> None:
    """L2: a PNG, also with hostile texts."""
    run = lost_and_joined(tmp_path)
    commanded(run, tmp_path, "--png", str(tmp_path / "page.png"))
    for drawn in (
        (tmp_path / "page.png").read_bytes(),
        png_of(page_of(long_run(50, 3))),
        png_of(page_of(Facts("x", 1, 1, {}, Columns(), Timeline()))),
    ):
        assert drawn.startswith(b"\x89PNG\r\n\x1a\n") and drawn.endswith(b"IEND\xaeB`\x82")
    width = int.from_bytes((tmp_path / "page.png").read_bytes()[16:20], "big")
    assert width == 1100


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "page.pdf"], "does not end in .html; name a file, say report.html"),
        (["--to", "missing/page.html"], "there is no folder"),
        (["--to", "folder.html"], "is a folder; name a file in it"),
        (["--png", "page.jpg"], "--png = 'page.jpg' does not end in .png"),
        (["--name", "nobody"], "there is no run 'nobody'"),
        (["--price", "nan"], "--price = nan is no price of a node-hour; give a number, 0 or more, say 2.5"),
    ],
)
def test_l2_what_cannot_be_written_or_read(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    said: str,
) -> None:
    """L2: each error names the option and the fix, and leaves no file.  The control is the command without
    the fault.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.html").mkdir()
    job = toy_job(tmp_path / "bucket")
    Run.open(job)
    (tmp_path / "job.toml").write_text(to_toml(job))
    there = sorted(tmp_path.iterdir())
    assert main(["report", "job.toml", *words]) == 1
    assert said in " ".join(capsys.readouterr().out.split())
    assert sorted(tmp_path.iterdir()) == there
    assert main(["report", "job.toml"]) == 0
    assert sorted(tmp_path.iterdir()) == sorted([*there, tmp_path / "toy-report.html"])


def test_l2_buckets_averages_and_ticks() -> None:
    """L2: against the plain definitions, by hand and with the standard library; the ticks are read back from
    the drawing.
    """
    ys = [float(step * 7919 % 1009) for step in range(1000)]
    xs = [float(step) for step in range(1000)]
    found = buckets(xs, ys, 10)
    assert [(each.low, each.high, each.number) for each in found] == [
        (min(part), max(part), len(part))
        for part in (
            [
                y
                for x, y in zip(xs, ys, strict=True)
                if int(x / 999 * 10) == min(place, 9) or (place == 9 and x == 999)
            ]
            for place in range(10)
        )
    ]
    assert [each.mean for each in buckets(xs[:5], ys[:5], 10)] == ys[:5]
    assert buckets([1.0, 2.0], [math.nan, 3.0]) == buckets([2.0], [3.0])
    assert smoothed(ys, 5)[100] == pytest.approx(statistics.fmean(ys[98:103]))
    assert smoothed([1.0, math.nan, 3.0], 3).tolist()[::2] == [1.0, 3.0]
    for log, labels in (
        (False, ["0", "10", "20", "30", "40"]),
        (True, ["1", "10", "0.5", "2", "5", "20", "50"]),
    ):
        line = Line("", "main", buckets([0.0, 500.0], [0.3, 40.0]))
        svg = svg_of(Chart("loss", "", "step", (0.0, 500.0), [line], log=log, from_zero=True))
        assert re.findall(r"<text [^>]*>([^<]+)</text>", svg) == [
            *map(str, range(0, 501, 100)),
            "step",
            *labels,
        ]
    assert [duration(each) for each in (0.314, 12.34, 200, 18_720, 273_600)] == [
        "0.31 s",
        "12.3 s",
        "3 min 20 s",
        "5 h 12 min",
        "3 d 4 h",
    ]
    assert [shown(each) for each in (2.7716, 3e-4, 12_345.6, math.inf)] == [
        "2.772",
        "0.0003",
        "12,346",
        "not finite",
    ]
    parts = ((9999, 10_000), (99_999, 100_000), (1 - 2**-53, 1), (1, 3), (1, 0), (2, 2))
    assert [percent(*each) for each in parts] == [
        *("99.99 %", "99.99 %", "99.99 %"),
        "33.3 %",
        "not known",
        "100.0 %",
    ]
