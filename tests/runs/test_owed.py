"""The debts of a run follow from its bucket: which there are, what settles them, and which checkpoints they
keep.
"""

from __future__ import annotations

import itertools
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from actors.cli import checkpoint_commands, owed_command
from actors.cli.report_command import report
from actors.cli.run_commands import Absent
from actors.launch import launch
from elastic.control.run import Finished
from elastic.errors import JobError
from elastic.ids import Version
from elastic.plan.layout import Layout
from elastic.plan.retention import Keep
from elastic.protocol.actions import Retain
from elastic.protocol.commit_record import Validated
from elastic.protocol.lineage import Lineage, extended
from elastic.report.story import Line, Sentence
from elastic.runs import alone, asked, branches, forks, owed
from elastic.runs.branches import Origin
from elastic.runs.metrics import store_rows
from elastic.runs.owed import DEATHS, Debt, Failure
from elastic.runs.resume import LATEST, best_of, start_of
from elastic.runs.retention import collect, judge, look
from elastic.runs.run import Run
from elastic.train.errands import WORK, pay
from storage.checkpoints import Checkpoints
from storage.objects import Data, ObjectStore
from storage.objects.port import PARTIAL, size_of
from tests.storage.states import TENSORS, state_of, write
from tests.support.stores import Forwarding
from tests.support.toys import toy_job

STATE = state_of(TENSORS[:2], seed=1)
_numbers = itertools.count()
HELD_OUT = "the samples, 3 samples"


def run_of(bucket: Path | str = "", name: str = "toy", **settings: Any) -> Run:
    settings = {"steps": 40, "checkpoint": {"save_every": 2}, "export": {"every": 10}} | settings
    return Run.open(toy_job(bucket or f"memory://owed-{next(_numbers)}", name=name, **settings))


def save(run: Run, step: int, generation: int = 1, lineage: Lineage = ()) -> Version:
    version = Version(step, generation)
    run.commit(version, write(run.checkpoints, version, STATE, 1), lineage or ((generation, step),), Layout())
    return version


def listed(run: Run) -> list[str]:
    return [f"{debt.kind} {debt.version.step}" for debt in owed.debts(run)]


def started(run: Run, claim: int = 1, generation: int = 0, **settings: Any) -> Run:
    """Returns the run as a command finds it that starts it with other settings; ``generation`` is the last
    one that the run knows.
    """
    again = Run.open(run.job.replace(**settings))
    asked.begin(again, generation, claim)
    return again


def paid(run: Run, *steps: int) -> None:
    for debt in owed.debts(run, kinds=WORK):
        if debt.version.step in steps:
            assert pay(run, run.job, debt)[1]


def test_a_checkpoint_owes_at_or_after_each_multiple_and_at_the_last_step() -> None:
    run = run_of(steps=25)
    for step in (8, 10, 12, 21, 24):  # a save may be late: 21 stands for 20
        save(run, step)
    assert listed(run) == ["export 10", "export 21"]
    save(run, 25)
    assert listed(run) == ["export 10", "export 21", "export 25"]
    for step, settings in (
        (24, {"samples": {"every": 20, "prompts": ["a"]}}),
        (25, {"export": {"every": 0}}),
    ):
        other = run_of(**{"steps": 25} | settings)
        for each in (8, 10, 12, 21, step):
            save(other, each)
        expected = ["export 10", "export 21", "samples 21"] if step == 24 else []
        assert listed(other) == expected, "the control: a job that asks for nothing"


def test_the_last_step_of_a_run_that_ended_early_owes_as_well() -> None:
    """U4: as long as that is the end of the run.  The control: before it, and once the run goes on."""
    run = run_of(steps=25, samples={"every": 20, "prompts": ["a"]})
    claim = run.claim_here()
    save(run, 6)
    save(run, 8)
    assert listed(Run.look(run.job)) == []
    alone.EndWriter(run.store, run.job.name, claim, Finished(8, "the loop was left")).write()
    assert listed(Run.look(run.job)) == ["export 8", "samples 8"]
    Run.look(run.job).claim_here()
    assert listed(Run.look(run.job)) == []


def test_spares_owe_validations_but_that_of_the_last_step() -> None:
    """The members measure the state after the last step; the control are members that measure all."""
    run = run_of(steps=20, export={}, validation={"every": 10, "by": "spares"}, workers={"spares": 1})
    for step in (8, 12, 20):
        save(run, step)
    assert listed(run) == ["validation 12"] and [run.job.validates(step) for step in (10, 12, 20)] == [
        False,
        False,
        True,
    ]
    (debt,) = owed.debts(run)
    assert owed.stands(run, debt) == (False, 0) and owed.untold(run, ((1, 20),)) == []
    owed.failed(run, debt, Failure("no such thing"))
    assert owed.stands(run, debt) == (False, 1)
    assert [owed.note_done(run, debt, owed.validated(Validated(0.1, 3), HELD_OUT)) for _ in range(2)] == [
        True,
        False,
    ]
    assert (
        owed.stands(run, debt) == (True, 1) and listed(run) == [] and owed.untold(run, ((1, 20),)) == [debt]
    )
    about = owed.result(run, debt)
    assert owed.found(about) == Validated(0.1, 3) and about["held_out"] == HELD_OUT
    owed.note_told(run, debt)
    owed.note_told(run, debt)
    assert owed.untold(run, ((1, 20),)) == [] == listed(run)
    control = run_of(steps=20, export={}, validation={"every": 10})
    for step in (8, 12, 20):
        save(control, step)
    assert listed(control) == [] and [control.job.validates(step) for step in (10, 12, 20)] == [
        True,
        False,
        True,
    ]


def test_what_the_members_validated_at_an_end_is_not_owed_once_the_run_goes_on() -> None:
    """The run ended at step 20, where its members measured, and gets more steps.  The control: a checkpoint
    that nobody has validated.
    """
    run = run_of(steps=20, export={}, validation={"every": 10, "by": "spares"}, workers={"spares": 1})
    for step in (10, 12, 20):
        save(run, step)
    longer = Run(run.job.replace(steps=40), run.store)

    def kept() -> set[int]:
        return {
            version.step
            for version, names in look(longer, Keep(last=1), now=0.0).verdict.kept.items()
            if "owed" in names
        }

    assert listed(run) == ["validation 10"] and listed(longer) == ["validation 10", "validation 20"], (
        "the control"
    )
    assert kept() == {10, 20}
    row = {"step": 20, "generation": 1, "time": 0.0}
    store_rows(run.store, run.job.name, [{**row, "validation_loss": 0.5, "validation_terms": 3}])
    assert listed(run) == listed(longer) == ["validation 10"]
    assert kept() == {10}


def test_one_process_that_trains_alone_says_what_it_leaves(tmp_path: Path) -> None:
    """Nobody validates there for the spares of a cluster.  The controls: the end of a run that owes nothing,
    and one that gave all up.
    """
    spares: dict[str, Any] = {"validation": {"every": 2, "by": "spares"}, "workers": {"spares": 1}}
    small = {"vocab": 29, "dim": 16, "layers": 2, "heads": 2}
    run = run_of(tmp_path, steps=6, export={}, model_args=small, **spares)
    assert (
        launch(run.job.replace(steps=3), local=True, show=lambda line: None, branch=True).state == "Finished"
    )
    shutil.rmtree(tmp_path / "toy" / "validations")
    asked.begin(again := Run.look(run.job, branch=True), 0, 9)
    assert listed(again) == ["validation 2"]
    said: list[Line] = []
    assert launch(run.job, local=True, show=said.append, branch=True).state == "Finished"
    left = [line.text for line in said if isinstance(line, Sentence) and "owed" in line.text]
    assert left == ["owed: validation of step 2; to do it now: `elastic owed --pay`"]
    owed.failed(again, Debt(Version(2, 1), owed.VALIDATION), Failure("the test", last=True))
    said.clear()
    assert launch(run.job.replace(steps=7), local=True, show=said.append, branch=True).state == "Finished"
    assert not [line.text for line in said if isinstance(line, Sentence) and "owed" in line.text]


def test_what_is_settled_is_not_owed_by_a_later_checkpoint_when_it_is_deleted() -> None:
    run = run_of()
    for step in (10, 12, 14):
        save(run, step)
    paid(run, 10)
    assert listed(run) == []
    run.checkpoints.mark(Version(10, 1), "a test")
    run.checkpoints.remove(Version(10, 1))
    assert listed(run) == []
    run.checkpoints.quarantine(save(run, 20), "a test")
    assert listed(run) == []
    save(run, 22)
    assert listed(run) == ["export 22"], "a damaged one owes nothing, and the next one takes its place"


def test_the_last_step_settles_nothing_before_it() -> None:
    """The export of step 20 fails while that of the last step, which is after the same multiple, is made."""
    run = run_of(steps=25)
    for step in (10, 20, 25):
        save(run, step)
    owed.failed(run, Debt(Version(20, 1), owed.EXPORT), Failure("no such thing"))
    paid(run, 25)
    assert listed(run) == ["export 10", "export 20"] == listed(Run(run.job.replace(steps=50), run.store))
    paid(run, 10, 20)
    assert listed(run) == [], "the control"


def test_l7_the_best_stays_before_the_coordinator_knows_of_it() -> None:
    """L7: the coordinator asks for a round with the best that it knows.  The control: a worse validation
    keeps nothing.
    """
    spares = {"validation": {"every": 10, "by": "spares"}, "workers": {"spares": 1}, "export": {"every": 0}}
    run = run_of(checkpoint={"save_every": 2, "keep_last": 2, "keep_best": True}, **spares)
    versions = [save(run, step) for step in (10, 20, 30, 36)]
    for version, loss in zip(versions, (5.0, 1.0, 9.0), strict=False):
        owed.note_done(run, Debt(version, owed.VALIDATION), owed.validated(Validated(loss, 1), HELD_OUT))
    asked = Retain(tuple(versions), ((1, 36),), versions[0], ())
    kept = judge(run, run.job.keep(), asked, run.checkpoints.versions(), 0.0).kept
    assert {version.step: names for version, names in kept.items()} == {
        36: ("newest", "last"),
        30: ("last",),
        20: ("best",),
        10: ("best",),
    }


def test_l5_another_checkpoint_than_the_best_is_not_taken_in_silence() -> None:
    """L5: the control is the best itself, while there is a checkpoint of it."""
    run = run_of(export={})
    versions = [save(run, step) for step in (10, 20)]
    for version, loss in zip(versions, (1.0, 5.0), strict=True):
        owed.note_done(run, Debt(version, owed.VALIDATION), owed.validated(Validated(loss, 1), HELD_OUT))
    for name, init, said in (("one", "", ""), ("two", "toy@best", "")):
        job = run.job.replace(name=name, init=init)
        assert said == start_of(job, LATEST if init else "toy@best").said
    run.checkpoints.mark(versions[0], "the test")
    run.checkpoints.remove(versions[0])
    for name, init in (("three", ""), ("four", "toy@best")):
        told = start_of(run.job.replace(name=name, init=init), LATEST if init else "toy@best").begin()
        assert (
            told.endswith(
                "; the best validation was after step 10, which has no checkpoint, so the next one is used"
            )
            and "step 20" in told
        )


def test_only_one_of_two_that_do_the_same_notes_it_and_the_bytes_are_the_same() -> None:
    run = run_of()
    save(run, 10)
    (debt,) = owed.debts(run)
    first, second = (pay(run, run.job, debt) for _ in range(2))
    assert first[1] and second == ("", True) and first[0].startswith("export of step 10: ")
    assert [*map(owed.sentence, (owed.debts(run),))] == [""]


def test_a_branch_and_a_fork_owe_nothing_for_what_they_left_behind() -> None:
    run = run_of()
    for step in (10, 20, 30):
        save(run, step)
    paid(run, 10)
    job = run.job.replace(steps=50)
    branches.begin(run.branches, job, run.job, Version(10, 1), 0.0, until=1)
    again = Run(job, run.store)
    assert listed(run) == [] == listed(again), "20 and 30 are abandoned"
    line = extended(((1, 10),), Version(20, 2))
    save(again, 20, 2, line)
    assert [debt.version for debt in owed.debts(again)] == [Version(20, 2)]
    fork = job.replace(name="fork", export={"every": 8})
    forks.begin(run.store, fork, Origin("toy", Version(20, 2)), {})
    forked = Run.look(fork)
    save(forked, 22, 3, extended(line, Version(22, 3)))
    assert listed(forked) == [], "the multiple before, 16, was its origin's"
    save(forked, 24, 3, extended(line, Version(24, 3)))
    assert listed(forked) == ["export 24"]


def test_what_fails_is_counted_and_given_up_aloud(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Deaths count less than errors.  The command lists it, and does it after all."""
    run = run_of(tmp_path)
    save(run, 10)
    (debt,) = owed.debts(run)
    said = [owed.failed(run, debt, Failure("its process died", died=True)) for _ in range(DEATHS - 3)]
    said += [owed.failed(run, debt, Failure("no such thing")) for _ in range(2)]
    assert {text.rpartition("; ")[2] for text in said} == {"the run tries again soon"} and not owed.debts(
        run
    )[0].given_up
    assert owed_command.owed(run.job, pay=False) == 0 and "owed" in capsys.readouterr().out
    assert "given up after 10 attempts" in owed.failed(run, debt, Failure("no such thing"))
    (given_up,) = owed.debts(run)
    assert given_up.given_up and owed.sentence([given_up]) == "given up: export of step 10 (no such thing)"
    assert owed.needed(owed.debts(run)) == frozenset()
    assert owed_command.owed(run.job, pay=False) == 1
    assert "given up" in (out := capsys.readouterr().out) and "--pay tries again what was given up" in out
    assert owed_command.owed(run.job, pay=True) == 0
    assert "export of step 10: " in (out := capsys.readouterr().out) and "owes nothing" in out


@pytest.mark.parametrize("damaged", [True, False], ids=["damaged", "the control"])
def test_a_command_that_could_not_do_what_is_owed_ends_with_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, damaged: bool
) -> None:
    """It says why; nothing is given up yet, so that the list alone is no failure."""
    run = run_of(tmp_path)
    version = save(run, 10)
    if damaged:
        for path in (tmp_path / "toy").rglob("shard-*"):
            path.write_bytes(bytes(path.stat().st_size))
    assert owed_command.owed(run.job, pay=True) == int(damaged)
    assert (f"export of step {version.step} failed: " in " ".join(capsys.readouterr().out.split())) == damaged
    assert owed_command.owed(run.job, pay=False) == 0


def test_what_was_given_up_is_listed_as_long_as_its_checkpoint_exists(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Nobody can make it any more then.  The command does the rest.  The control: the same before the
    checkpoint is deleted.
    """
    run = run_of(tmp_path, steps=20, validation={"every": 10, "by": "spares"}, workers={"spares": 1})
    for step in (10, 20):
        save(run, step)
    paid(run, 10)
    for _ in range(3):
        owed.failed(run, Debt(Version(10, 1), owed.VALIDATION), Failure("out of memory"))
    assert listed(run) == ["validation 10", "export 20"]
    run.checkpoints.mark(Version(10, 1), "a test")
    assert listed(run) == ["export 20"]
    run.checkpoints.remove(Version(10, 1))
    assert listed(run) == ["export 20"], "a later checkpoint does not take its place"
    assert owed_command.owed(run.job, pay=True) == 0
    assert "export of step 20: " in (out := capsys.readouterr().out) and "validation" not in out


def test_what_is_owed_is_what_the_run_has_recorded_whatever_the_job_file_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The files ask for nothing, and for much more.  The control: what the run owes is done, and then nobody
    lists anything.
    """
    run = run_of(tmp_path / "bucket", checkpoint={"save_every": 2, "keep_last": 2})
    for step in range(8, 30, 2):
        save(run, step)
    run.claim("local")
    nothing = run.job.replace(export={}, steps=900)
    more = run.job.replace(export={"every": 2}, samples={"every": 2, "prompts": ["a"]})
    for job in (nothing, more):
        assert owed_command.owed(job, pay=False) == 0
        assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if "export" in line] == [
            "10",
            "20",
        ]
        checkpoint_commands.ls(job)
        assert capsys.readouterr().out.count("owed") == 2
        checkpoint_commands.show(job, "10")
        assert "kept by     an export, samples or a validation that is owed" in capsys.readouterr().out
        checkpoint_commands.gc(job, dry_run=True, force=True)
        deleted = [
            int(line.split()[1]) for line in capsys.readouterr().out.splitlines() if line.startswith("step ")
        ]
        assert deleted == [8, 12, 14, 16, 18, 22, 24], "10 and 20, and the last two, stay"
        assert "owed: export of step 10, export of step 20" in Absent.of(job).said
        report(job, tmp_path / "page.html", None)
        assert "owed: export of step 10, export of step 20" in (tmp_path / "page.html").read_text()
        capsys.readouterr()
    assert owed_command.owed(nothing, pay=True) == 0
    assert owed_command.owed(more, pay=False) == 0 and capsys.readouterr().out.count("owes nothing") == 2


def test_the_best_is_chosen_by_one_rule_and_what_is_no_number_is_never_the_best() -> None:
    """The judge is the list of losses.  The control: a number among them."""
    spares = {"validation": {"every": 10, "by": "spares"}, "workers": {"spares": 1}, "export": {"every": 0}}
    run = run_of(checkpoint={"save_every": 2, "keep_last": 2, "keep_best": True}, **spares)
    versions = [save(run, step) for step in (10, 20, 30, 36)]
    owed.note_done(
        run, Debt(versions[1], owed.VALIDATION), owed.validated(Validated(float("nan"), 1), HELD_OUT)
    )
    assert best_of(run) is None and "best" not in str(look(run, run.job.keep()).verdict.kept.get(versions[1]))
    with pytest.raises(JobError, match="no validation with a finite loss"):
        start_of(run.job.replace(name="other"), "toy@best")
    owed.note_done(run, Debt(versions[0], owed.VALIDATION), owed.validated(Validated(3.0, 1), HELD_OUT))
    assert (
        best_of(run) == (versions[0], 3.0, 0)
        and "best" in look(run, run.job.keep()).verdict.kept[versions[0]]
    )


def test_status_and_the_page_list_what_is_owed_and_what_was_given_up(tmp_path: Path) -> None:
    """The control: a run that was never asked for anything."""
    run = run_of(tmp_path / "bucket")
    for step in (10, 20):
        save(run, step)
    for _ in range(3):
        owed.failed(run, Debt(Version(10, 1), "export"), Failure("no such thing"))
    run.claim("local")
    told = "owed: export of step 20; given up: export of step 10 (no such thing)"
    assert told in Absent.of(run.job).said
    other = run_of(tmp_path / "other", export={})
    for step in (10, 20):
        save(other, step)
    other.claim("local")
    without = other.job
    assert "owed" not in Absent.of(without).said
    pages = []
    for number, job in enumerate((run.job, without)):
        report(job, tmp_path / f"{number}.html", None)
        pages.append((tmp_path / f"{number}.html").read_text())
    assert (
        f"Exports and samples: {told}." in pages[0]
        and pages[0].count("an export, samples or a validation is owed") == 1
    )
    assert "Exports and samples" not in pages[1] and "a validation is owed" not in pages[1]


def test_ten_deaths_give_it_up_too() -> None:
    run = run_of()
    save(run, 10)
    (debt,) = owed.debts(run)
    for _ in range(DEATHS - 1):
        owed.failed(run, debt, Failure("its process died", died=True))
    assert not owed.debts(run)[0].given_up
    owed.failed(run, debt, Failure("its process died", died=True))
    assert owed.debts(run)[0].given_up


def rounds(run: Run, claim: int, step: int) -> list[int]:
    for _ in range(2):
        collect(run, run.job.keep(), Retain((Version(step, 1),), ((1, step),), None, ()), claim)
    return [each.version.step for each in run.checkpoints.versions() if each.good]


def test_l7_what_owes_something_is_kept_until_it_is_done_or_given_up(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """L7: the rounds of a coordinator, and the command that deletes.  The control: no export."""
    run = run_of(tmp_path, checkpoint={"save_every": 2, "keep_last": 2})
    claim = run.claim("local")
    for step in range(2, 30, 2):
        save(run, step)
    assert rounds(run, claim, 28) == [10, 20, 26, 28]
    checkpoint_commands.ls(run.job)
    assert capsys.readouterr().out.count("owed") == 2
    checkpoint_commands.gc(run.job, dry_run=False, force=True)
    assert rounds(run, claim, 28) == [
        10,
        20,
        26,
        28,
    ]
    paid(run, 10)
    for _ in range(3):
        owed.failed(run, Debt(Version(20, 1), "export"), Failure("no such thing"))
    assert rounds(run, claim, 28) == [26, 28]
    assert listed(run) == [], "what was given up is not listed any more"
    control = run_of(checkpoint={"save_every": 2, "keep_last": 2}, export={"every": 0})
    for step in range(2, 30, 2):
        save(control, step)
    assert rounds(control, control.claim("local"), 28) == [26, 28]


def test_an_export_has_the_bytes_of_the_command(tmp_path: Path) -> None:
    run = run_of(tmp_path / "bucket")
    save(run, 10)
    (debt,) = owed.debts(run)
    folder = tmp_path / "bucket" / "toy" / "exports" / "000000000010" / "g1"
    folder.mkdir(parents=True)
    (folder / f"{PARTIAL}1234").write_bytes(b"of a process that died")
    pay(run, run.job, debt)
    checkpoint_commands.export(run.job, tmp_path / "by-hand", "10")
    found = owed.result(run, debt)
    assert [path.name for path in (tmp_path / "bucket" / "toy" / "exports").rglob("*.*")] == [
        "model.safetensors"
    ], "a part is cleared"
    there, expected = run.store.get(found["place"]), (tmp_path / "by-hand" / "model.safetensors").read_bytes()
    assert there == expected and (found["bytes"], found["place"]) == (
        len(there),
        "toy/exports/000000000010/g1/model.safetensors",
    )


def test_an_export_that_somebody_else_has_written_counts_if_it_has_the_same_bytes() -> None:
    """A process dies between the export and its note.  The control: other bytes in its place are an error,
    and stay.
    """
    run = run_of()
    for step in (10, 20):
        save(run, step)
    first, second = owed.debts(run)
    run.checkpoints.export_model(Version(10, 1), "toy/exports/000000000010/g1/model.safetensors")
    run.store.put("toy/exports/000000000020/g1/model.safetensors", b"something else")
    assert pay(run, run.job, first)[1]
    said, done = pay(run, run.job, second)
    assert not done and "export of step 20 failed" in said and listed(run) == ["export 20"]


def test_of_a_run_that_was_never_asked_for_anything_no_checkpoint_is_read() -> None:
    """The control: a run that was."""

    class Deaf(Forwarding):
        def list(self, prefix: str = "") -> list[str]:
            assert prefix in ("toy/asked/", "toy/branches/"), prefix
            return super().list(prefix)

        def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
            assert key == "toy/job.json", key
            return super().get(key, start, stop)

        def children(self, folder: str = "") -> list[str]:
            raise AssertionError(folder)

    for every, fails in ((0, False), (10, True)):
        run = run_of(export={"every": every})
        deaf = Run(run.job, Deaf(ObjectStore.open(run.job.bucket)))
        with pytest.raises(AssertionError) if fails else nullcontext():
            assert owed.debts(deaf) == []


def test_progress_is_seen_and_goes_when_it_is_done() -> None:
    """A note is written now and then only.  The control: an attempt that is short writes none."""
    run = run_of(deadlines={"wait_s": 3600})
    save(run, 10)
    (debt,) = owed.debts(run)
    owed.ProgressNote(run, debt)()
    assert owed.progress(run, debt) == (0, 0.0)
    quick = Run(
        run.job.model_copy(update={"deadlines": run.job.deadlines.model_copy(update={"wait_s": 0.0})}),
        run.store,
    )
    progress = owed.ProgressNote(quick, debt)
    found = [(progress(), owed.progress(run, debt)[0])[1] for _ in range(3)]
    assert found == [1, 2, 3]
    assert owed.stands(run, debt) == (False, 0) and listed(run) == ["export 10"]
    paid(run, 10)
    assert (
        owed.progress(run, debt) == (0, 0.0)
        and [key for key in run.store.list("toy/owed/") if "done" not in key] == []
    )


def test_an_export_tells_of_each_part_of_its_work() -> None:
    """An export that another process has written is made again and compared: that has more parts."""
    run = run_of()
    save(run, 10)
    told = list[int]()
    for _ in range(2):
        run.checkpoints.export_model(
            Version(10, 1), "toy/exports/model.safetensors", lambda: told.append(len(told))
        )
    pieces = 1 + sum(tensor.kind == "parameter" for tensor in run.checkpoints.open(Version(10, 1)).tensors())
    assert len(told) == 2 * pieces + pieces + 1


def test_a_store_knows_beforehand_how_large_an_export_is() -> None:
    """Else it could not upload a large one in equal parts, as some stores demand."""

    class Knows(Forwarding):
        def put_if_absent(self, key: str, data: Data) -> None:
            known.append(size_of(data))
            super().put_if_absent(key, data)

    run, known = run_of(), list[int | None]()
    save(run, 10)
    file = Checkpoints(Knows(run.store), "toy").export_model(Version(10, 1), "toy/exports/model.safetensors")
    assert known == [file.size] == [run.store.size("toy/exports/model.safetensors")]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"export": {"every": 25}},
            (
                "export.every = 25 is not a multiple of checkpoint.save_every = 10, .* the nearest are 20 "
                "and 30"
            ),
        ),
        (
            {"samples": {"every": 5, "prompts": ["a"]}},
            "samples.every = 5 is not a multiple .* the nearest is 10",
        ),
        ({"samples": {"every": 10}}, "samples.every = 10 without samples.prompts"),
        (
            {"validation": {"every": 10, "by": "spares"}},
            "validation.by = 'spares' with workers.spares = 0: .* set workers.spares to 1",
        ),
        (
            {"validation": {"every": 5, "by": "spares"}, "workers": {"spares": 1}},
            "validation.every = 5 is not a multiple",
        ),
        (
            {"samples": {"prompts": ["a"]}},
            (
                r"samples.every = 0 writes nothing, so samples.prompts = \('a',\) "
                r"has no effect"
            ),
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=said):
        toy_job("/bucket", checkpoint={"save_every": 10}, **settings)
    assert toy_job(
        "/bucket",
        checkpoint={"save_every": 10},
        export={"every": 20},
        samples={"every": 10, "prompts": ["a"]},
    )
