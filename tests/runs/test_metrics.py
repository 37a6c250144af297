"""L2: the rows of a run's metrics, from its journal and in its bucket: each step once, over restarts and
fall-backs.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.cli import main
from actors.launch import launch
from elastic.engine.optim.schedule import learning_rate_of
from elastic.errors import CodeError, JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.journal import codec
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import GO_ON, Outcome, Usage, Validated
from elastic.protocol.events import StepDone, Work
from elastic.report.metrics import Row, csv_table, json_line, row_from, row_of, version_of
from elastic.report.story import Line, Sentence, StepLine
from elastic.runs import metrics, owed, resume
from elastic.runs.metrics import Following, places, rows_of, store_rows, stored
from elastic.runs.owed import Debt
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from elastic.train.checks.early import check_early
from storage.journal import Journal
from storage.objects import ObjectStore
from tests.control.play import Play, reformed, stepping
from tests.storage.states import TENSORS, state_of, write
from tests.support.patience import until
from tests.support.sinks import rows_in
from tests.support.stores import Forwarding
from tests.support.toys import TINY, toy_job

pytestmark = pytest.mark.fast


class Written(Play):
    """A story whose journal is written to the bucket, an object for each :meth:`ship`."""

    def __init__(self, play: Play, run: Run, local: Path) -> None:
        super().__init__(play.rules, play.run)
        self.journal = Journal(run.store, run.job.name, local, 0, codec.snapshot(play.run), segment_s=1e6)

    def tell(self, event: Any) -> str:
        before = self.run
        reason = super().tell(event)
        record = codec.record(self.journal.next, self.now, event, before, self.last)
        known = self.run
        self.journal.append(record, lambda: codec.snapshot(known), durable=False)
        return reason

    def ship(self) -> None:
        assert self.journal.ship(60)


def lines(run: Run) -> list[dict[str, Any]]:
    """Returns what anybody reads in the bucket, with nothing of ours."""
    folder = Path(run.job.bucket) / run.job.name / "metrics"
    return [
        json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()
    ]


def a_story(play: Written) -> Any:
    """Yields whenever a part of the journal is in the bucket: a save, a death with a fall-back, a save, an
    end.
    """
    play.steps(1, 5)
    play.ship()
    yield
    play.save(Version(5, 1), "w1", "w2")
    play.steps(6, 7)
    play.ship()
    yield
    play.lose("w2")
    play.answer("w1", Version(5, 1))
    play.ship()
    yield
    reformed(play)
    play.steps(6, 10)
    play.ship()
    yield
    play.save(Version(10, play.generation), "w1")
    play.step(11)
    play.ship()
    yield


@pytest.mark.parametrize("restarted", [False, True])
def test_l2_each_step_once_over_restarts_and_only_when_it_is_final(tmp_path: Path, restarted: bool) -> None:
    """L2: with ``restarted`` whoever stores the rows is another one each time, who knows only the bucket."""
    run = Run.open(toy_job(tmp_path / "bucket", steps=100))
    play = Written(stepping(2, save_every=5), run, tmp_path / "local")
    following, there = Following(run), []
    for _ in a_story(play):
        following = Following(run) if restarted else following
        following.read()
        following.store_final()
        there.append([(line["step"], line["generation"]) for line in lines(run)])
    again = play.generation
    assert again > 1
    first, second = [(step, 1) for step in range(1, 6)], [(step, again) for step in range(6, 11)]
    assert there == [[], first, first, first, first + second], (
        "step 6 and 7 of generation 1 were given up and never shown"
    )
    assert [place.step for place in places(run.store, "toy")] == [5, 10]
    told = {(row["step"], row["generation"]): row["final"] for row in rows_of(run)}
    assert told == dict.fromkeys(first + second, 1) | {(11, again): 0}
    assert [line["loss"] for line in lines(run)] == pytest.approx([0.1 * step / 4 for step in range(1, 11)])
    assert {line["norm"] for line in lines(run)} == {math.sqrt(1.5) / 4}
    assert lines(run)[0]["lr"] == pytest.approx(1e-2 / 2), "the warmup has two steps"
    cosine = 0.5 * (1 + math.cos(math.pi * (10 - 2) / (100 - 2)))
    assert lines(run)[9]["lr"] == pytest.approx(1e-2 * (0.1 + 0.9 * cosine))
    assert [line["world"] for line in lines(run)] == [2] * 5 + [1] * 5
    events = {line["step"]: line["event"] for line in lines(run) if "event" in line}
    assert events.keys() == {6} and "w2" in events[6], "why there is another world"


class Told(Written):
    """A story of a run with a schedule of the user's, whose commits tell ``rates``, by step."""

    rates: dict[int, float]

    def commit(self, step: int, boundary: int = GO_ON, behind: bool = False) -> Outcome:
        return replace(super().commit(step, boundary, behind), lr=self.rates.get(step))


def test_l2_no_reader_needs_the_users_schedule(tmp_path: Path) -> None:
    """L2, L13: the module of the schedule is nowhere.  The journal tells the rate of each step, 0 too; a step
    of an older version, which does not tell it, has a row without.  A step gets 60 bytes longer at most.  The
    control: whoever asks the schedule gets an error.
    """
    job = toy_job(tmp_path / "bucket", steps=100, schedule={"kind": "nowhere:cosine"})
    with pytest.raises(CodeError, match="nowhere"):
        learning_rate_of(job, 1)
    play = Told(stepping(2, save_every=5), Run.open(job), tmp_path / "local")
    play.rates = {step: 1e-2 / step for step in range(1, 5)} | {5: 0.0}
    play.steps(1, 5)
    play.save(Version(5, 1), "w1", "w2")
    play.steps(6, 7)
    play.ship()
    Following(Run.open(job)).read()
    found = {row["step"]: row.get("lr") for row in rows_of(Run.open(job))}
    assert found == {**play.rates, 6: None, 7: None}
    told, plain = (len(json.dumps(codec.encode(replace(play.commit(3), lr=lr)))) for lr in (1 / 3, None))
    assert plain < told <= plain + 60 and "lr" not in codec.encode(play.commit(6))


def test_l2_a_reader_goes_on_where_the_stored_rows_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L2: a new coordinator reads no journal that it does not need.  The control is one that finds no stored
    rows.
    """
    run = Run.open(toy_job(tmp_path / "bucket", steps=1000))
    play = Written(stepping(1, save_every=5, target_step=1000), run, tmp_path / "local")
    for step in range(1, 101):
        play.step(step)
        if step % 5 == 0:
            play.save(Version(step, 1), "w1")
            play.ship()
    following = Following(run)
    following.read()
    following.store_final()
    assert [line["step"] for line in lines(run)] == [*range(1, 101)]
    objects = len(list((tmp_path / "bucket/toy/journal").rglob("*.gz")))
    read = list[str]()
    get = type(run.store).get
    monkeypatch.setattr(
        type(run.store), "get", lambda self, key, *args: read.append(key) or get(self, key, *args)
    )
    Following(run).read()
    after, read[:] = [key for key in read if "/journal/" in key], []
    for path in (tmp_path / "bucket/toy/metrics").iterdir():
        path.unlink()
    Following(run).read()
    assert len([key for key in read if "/journal/" in key]) == objects + 1 > 2 * len(after) > 0, (
        "one is too new, or not there"
    )


def test_l2_rows_of_a_checkpoint_that_was_given_up_do_not_count(tmp_path: Path) -> None:
    """L2: the newest checkpoint was damaged, so that steps which were stored are done again by another
    generation.
    """
    run = Run.open(toy_job(tmp_path))

    def rows(generation: int, first: int, last: int) -> list[Row]:
        return [
            row_of(0.0, Outcome(step, generation, 1.0, (1.0,), (1,), ((0,),), True), 0.1)
            for step in range(first, last + 1)
        ]

    store_rows(run.store, "toy", rows(1, 1, 4))
    store_rows(run.store, "toy", rows(2, 3, 6))
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4, 3, 4, 5, 6], (
        "the control: somebody who reads all files"
    )
    found = [(row["step"], row["generation"]) for row in stored(run.store, "toy", ((1, 2), (2, 6)))]
    assert found == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2), (6, 2)]
    assert [row["step"] for row in stored(run.store, "toy", ((1, 2), (2, 6)), after=4)] == [5, 6]


def test_l2_a_validation_is_in_the_row_of_the_step_whose_state_it_is_of(tmp_path: Path) -> None:
    """L2: the row waits for it, since it is told by the next commit, or after the last step."""
    run = Run.open(toy_job(tmp_path / "bucket", steps=10, validation={"every": 5}))
    play = Written(stepping(1, save_every=5, target_step=10), run, tmp_path / "local")
    following = Following(run)

    def at(step: int) -> list[float]:
        play.ship()
        following.read()
        following.store_final()
        return [line["step"] for line in lines(run)]

    play.steps(1, 5)
    play.save(Version(5, 1), "w1")
    assert at(5) == [1, 2, 3, 4], "row 5 waits"
    commit = play.commit(6)
    play.tell(StepDone(play.plan.members[0], 1, Outcome(**{**vars(commit), "validated": Validated(6.0, 4)})))
    assert at(6) == [1, 2, 3, 4, 5]
    play.steps(7, 9)
    play.tell(StepDone(play.plan.members[0], 1, play.commit(10), None, Validated(5.0, 4)))
    play.save(Version(10, 1), "w1")
    assert at(10) == [*range(1, 11)]
    found = {line["step"]: line["validation_loss"] for line in lines(run) if "validation_loss" in line}
    assert found == {5: 1.5, 10: 1.25}


def test_l2_a_row_waits_for_a_spare_but_not_when_the_run_ends_and_what_comes_late_is_joined_to_it(
    tmp_path: Path,
) -> None:
    """L2: no row is lost, and readers and ``run@best`` know what was measured later.  The control: before, no
    reader does.
    """
    spares = {
        "validation": {"every": 5, "by": "spares"},
        "workers": {"spares": 1},
        "checkpoint": {"save_every": 5},
    }
    run = Run.open(toy_job(tmp_path / "bucket", steps=100, **spares))
    play = Written(stepping(1, save_every=5, target_step=100), run, tmp_path / "local")
    following = Following(run)
    play.steps(1, 10)
    play.save(Version(10, 1), "w1")
    play.ship()
    following.read()
    following.store_final()
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4], "row 5 waits"
    following.store_final(closing=True)
    assert [line["step"] for line in lines(run)] == [*range(1, 11)]
    assert resume.best_of(run) is None and not any("validation_loss" in row for row in rows_of(run)), (
        "the control"
    )
    for step, loss in ((5, 2.0), (10, 1.0)):
        owed.note_done(
            run, Debt(Version(step, 1), owed.VALIDATION), owed.validated(Validated(4 * loss, 4), "")
        )
    found = {
        row["step"]: (row["validation_loss"], row["validation_terms"])
        for row in rows_of(run)
        if "validation_loss" in row
    }
    assert found == {5: (2.0, 4), 10: (1.0, 4)}
    run.commit(
        Version(10, 1),
        write(run.checkpoints, Version(10, 1), state_of(TENSORS[:1], seed=1), 1),
        ((1, 10),),
        Layout(),
    )
    assert resume.best_of(run) == (Version(10, 1), 1.0, 0)


class Counting(Forwarding):
    """Counts the bytes that are read, by the folder of the run."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.read = Counter[str]()

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        found = super().get(key, start, stop)
        self.read[key.split("/")[1]] += len(found)
        return found


def of_thousands(folder: Path, every: int, name: str = "run") -> Run:
    """Returns a run without a journal with a row for each of 3000 steps, of which each 500th was validated;
    the best is of step 1500.
    """
    validation = {"every": every, "args": {"samples": 16}} if every else {}
    run = Run.open(toy_job(folder, name=name, steps=4000, validation=validation))
    for last in range(100, 3001, 100):
        rows: list[Row] = [
            {"step": step, "generation": 1, "time": 0.0, "loss": 1.0} for step in range(last - 99, last + 1)
        ]
        if every and last % every == 0:
            rows[-1] |= {
                "validation_loss": math.nan if last == 500 else abs(last - 1500) / 3 - 0.1,
                "validation_terms": 7,
            }
        store_rows(run.store, name, rows)
    run.commit(
        Version(3000, 1),
        write(run.checkpoints, Version(3000, 1), state_of(TENSORS[:1], seed=1), 1),
        ((1, 3000),),
        Layout(),
    )
    return run


def test_l5_the_best_of_a_run_is_found_without_the_rows_of_its_steps(tmp_path: Path) -> None:
    """The judge is the best of all rows, of which none is read."""
    run = of_thousands(tmp_path, 500)
    rows = {
        version_of(row): row["validation_loss"]
        for row in rows_of(run)
        if not math.isnan(row.get("validation_loss", math.nan))
    }
    expected, counting = min(rows, key=rows.__getitem__), Counting(run.store)
    assert (
        resume.best_of(Run(run.job, counting)) == (expected, rows[expected], 0) == (Version(1500, 1), -0.1, 0)
    )
    assert not counting.read["metrics"]
    never = of_thousands(tmp_path, 0, "never")
    counting = Counting(never.store)
    assert resume.best_of(Run(never.job, counting)) is None and not counting.read["metrics"], (
        "none was due, so there is none to look for"
    )


def test_l5_the_best_is_of_the_steps_that_survived(tmp_path: Path) -> None:
    """A run that was rewound to step 1000 has the best of what is left.  The control is the test above."""
    run = of_thousands(tmp_path, 500)
    for step in (1000, 3000):
        version = Version(step, 1 if step == 1000 else 2)
        line = ((1, 1000),) if step == 1000 else ((1, 1000), (2, 3000))
        run.commit(version, write(run.checkpoints, version, state_of(TENSORS[:1], seed=1), 1), line, Layout())
    assert resume.best_of(run) == (Version(1000, 1), abs(1000 - 1500) / 3 - 0.1, 0)


def test_l2_the_numbers_of_a_row() -> None:
    """L2: by hand: 8 tokens in half a second, an eighth of it waiting, 3e9 of 2 × 0.5 × 1e10 operations."""
    usage = Usage(0.5, 0.0625, 1000, 2000)
    outcome = Outcome(
        3,
        2,
        36.0,
        (4.0, 8.0),
        (4, 4),
        ((0,), (1,)),
        True,
        copied_through=2,
        usage=usage,
        usage_ranks=(0,) * 4,
        layers=(("a", 64.0),),
    )
    row = row_of(7.5, outcome, 0.1, Work(3e9, 2e9, 2, 1e10), 2)
    assert row == {
        **{
            "step": 3,
            "generation": 2,
            "time": 7.5,
            "lr": 0.1,
            "skipped": 0,
            "loss": 1.5,
            "norm": 0.75,
            "tokens": 8,
            "world": 2,
        },
        **{
            "step_s": 0.5,
            "tokens_per_s": 16.0,
            "data_wait": 0.125,
            "peak_bytes": 1000,
            "reserved_bytes": 2000,
        },
        **{"mfu": pytest.approx(0.3), "causal_mfu": pytest.approx(0.2), "copied_through": 2, "norm/a": 1.0},
    }
    table = list(csv.DictReader(io.StringIO(csv_table([row, {"step": 4, "generation": 2, "loss": 1.25}]))))
    assert [(float(each["loss"]), each["norm/a"]) for each in table] == [(1.5, "1.0"), (1.25, "")]
    lost = row_of(0.0, Outcome(4, 2, math.nan, (math.inf,), (1,), ((0,),), False), 0.1)
    assert lost["skipped"] == 1 and json.loads(json_line(lost), parse_constant=pytest.fail)["loss"] is None
    assert math.isnan(row_from(json_line(lost))["norm"])


def test_l2_a_run_without_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """L2: a run in one process that stops, and goes on: the commands, and the files as the standard library
    reads them.
    """
    shown = list[StepLine]()
    held_out = {
        "every": 4,
        "samples": 21,
        "dataset": "tests.support.toys:Sums",
        "args": {"samples": 50, "seq_len": 16},
    }
    settings: dict[str, Any] = {
        "checkpoint": {"save_every": 4},
        "schedule": {"kind": "constant"},
        "validation": held_out,
    }

    def show(line: Any) -> None:
        if isinstance(line, StepLine):
            shown.append(line)
            if line.step == 6 and len(shown) == 6:
                raise ConnectionError("the terminal is gone after step 6")

    job: Job = toy_job(tmp_path, steps=10, **settings)
    with pytest.raises(ConnectionError):
        run_local(job, show)
    assert [line["step"] for line in lines(Run.open(job))] == [1, 2, 3, 4, 5, 6], (
        "an error of the job's own code loses none"
    )
    assert run_local(job, show)[0] == "Finished"
    assert [line.step for line in shown] == [*range(1, 11)], "the control: what a terminal shows"
    there = lines(Run.open(job))
    assert [line["step"] for line in there] == [*range(1, 11)]
    assert [line["loss"] for line in there] == [line.loss for line in shown]
    assert [line["step"] for line in there if "validation_loss" in line] == [4, 8, 10]
    file = tmp_path / "job.toml"
    file.write_text(f'name = "toy"\nbucket = "{tmp_path}"\n')
    capsys.readouterr()
    assert main(["metrics", str(file)]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        line | {"final": 1} for line in there
    ]
    assert main(["metrics", str(file), "--csv"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(int(each["step"]), float(each["loss"])) for each in table] == [
        (line["step"], line["loss"]) for line in there
    ]


def test_the_metrics_of_a_run_without_a_step_are_a_table_without_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON has no line, and CSV has the line with the names: a reader finds columns, and no rows."""
    Run.open(toy_job(tmp_path))
    (tmp_path / "job.toml").write_text(f'name = "toy"\nbucket = "{tmp_path}"\n')
    assert main(["metrics", str(tmp_path / "job.toml")]) == 0 and capsys.readouterr().out == ""
    assert main(["metrics", str(tmp_path / "job.toml"), "--csv"]) == 0
    table = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert {"step", "loss", "norm", "lr"} < {*(table.fieldnames or ())} and [*table] == []


def test_l2_a_sink_gets_each_final_step_once(tmp_path: Path) -> None:
    """L2: it is broken at first, and the process dies; it gets every step once, and the run is told of the
    failure once.

    The control is a sink that says that it has nothing: its table refuses the second copy of a step.
    """
    there, forgetful, broken = tmp_path / "steps.db", tmp_path / "forgetful.db", tmp_path / "broken"
    sinks = {
        "tests.support.sinks:Table": {"path": str(there), "broken": str(broken)},
        "tests.support.sinks:Forgetful": {"path": str(forgetful)},
    }
    job = toy_job(tmp_path, steps=10, checkpoint={"save_every": 2}, metrics={"sinks": sinks}, **TINY)
    shown, told = list[StepLine](), list[str]()

    def show(line: Line) -> None:
        if isinstance(line, Sentence):
            return told.append(line.text)
        shown.append(line)
        if line.step == 5:
            assert rows_in(there) == [], "it is broken"
            until((tmp_path / "broken.tried").exists)
            broken.unlink()
        if line.step == 7 and len(shown) == 7:
            until(lambda: [step for step, _ in rows_in(there)] == [1, 2, 3, 4, 5, 6])
            raise ConnectionError("the process dies after step 7")
        return None

    broken.touch()
    with pytest.raises(ConnectionError):
        run_local(job, show)
    failures = [
        text
        for text in told
        if text.startswith("metrics.sinks: tests.support.sinks:Table failed, and gets the rows")
    ]
    assert len(failures) == 1 and "the table is broken" in failures[0]
    assert run_local(job, show)[0] == "Finished"
    losses = {line.step: line.loss for line in shown}
    assert rows_in(there) == [(step, losses[step]) for step in range(1, 11)]
    assert any("Forgetful failed" in text and "UNIQUE constraint failed: steps.step" in text for text in told)


def test_l2_what_goes_on_from_an_older_step_is_another_run_of_a_tracker(tmp_path: Path) -> None:
    """L2, G2: it has each step that counts; the abandoned ones stay where they were shown.  An own branch
    without that is the same run.
    """
    sinks, sink = (
        {"tests.support.sinks:Titled": {"path": str(tmp_path / "steps")}},
        {**TINY, "checkpoint": {"save_every": 2}},
    )
    run_local(toy_job(tmp_path, steps=6, metrics={"sinks": sinks}, **sink), lambda line: None)
    longer = toy_job(tmp_path, steps=8, metrics={"sinks": sinks}, **sink)
    launch(longer, local=True, branch=True, show=lambda line: None)
    first = rows_in(tmp_path / "steps-toy")
    assert [step for step, _ in first] == [1, 2, 3, 4, 5, 6, 7, 8]
    slower = longer.replace(steps=10, optim={"lr": 1e-4})
    launch(slower, local=True, resume=4, show=lambda line: None)
    second = rows_in(tmp_path / "steps-toy-branch-3")
    assert [step for step, _ in second] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10] and rows_in(
        tmp_path / "steps-toy"
    ) == first
    assert second[:5] == first[:5] and all(
        one != other for one, other in zip(second[5:8], first[5:8], strict=True)
    )
    assert second == [(int(row["step"]), row["loss"]) for row in rows_of(Run.find(slower))]


def test_l2_a_sink_that_hangs_disturbs_neither_the_run_nor_another_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L2: it never returns from its first rows; the other one has all of them, and the losses are those of a
    run without it.
    """
    monkeypatch.setattr(metrics, "CLOSE_S", 0.5)
    there, begun = tmp_path / "steps.db", tmp_path / "begun"
    sinks = {
        "tests.support.sinks:Hanging": {"path": str(tmp_path / "hanging.db"), "broken": str(begun)},
        "tests.support.sinks:Table": {"path": str(there)},
    }
    shown, told = dict[str, list[float]](), list[str]()
    for name, each in (("hanging", sinks), ("calm", {})):
        job = toy_job(tmp_path / name, steps=6, checkpoint={"save_every": 2}, metrics={"sinks": each}, **TINY)
        shown[name] = []

        def show(line: Line, losses: list[float] = shown[name]) -> None:
            told.append(line.text) if isinstance(line, Sentence) else losses.append(line.loss)

        assert run_local(job, show)[0] == "Finished"
    assert begun.exists() and rows_in(tmp_path / "hanging.db") == []
    assert rows_in(there) == [*enumerate(shown["calm"], 1)] and shown["hanging"] == shown["calm"]
    assert len([text for text in told if "Hanging did not take all rows within 0.5 s" in text]) == 1


def test_l2_a_sink_that_is_not_there_is_refused_before_any_worker_starts(tmp_path: Path) -> None:
    """L2: with a sentence that names the setting.  The control is the same job with a sink that is there."""
    job = toy_job(tmp_path, metrics={"sinks": {"tests.support.sinks:Tabel": {"path": "steps.db"}}})
    with pytest.raises(
        JobError,
        match=(
            r"metrics\.sinks = 'tests\.support\.sinks:Tabel': .* did you mean "
            r"'tests\.support\.sinks:Table'"
        ),
    ):
        check_early(job)
    check_early(toy_job(tmp_path, metrics={"sinks": {"tests.support.sinks:Table": {"path": "steps.db"}}}))
    with pytest.raises(JobError, match=r"metrics\.sinks"):
        toy_job(tmp_path, metrics={"sinks": {"no code": {}}})
