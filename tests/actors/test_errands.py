"""Exports and samples on a cluster: each is made once over the deaths of a worker, of coordinators, of the
process that makes them, and of the whole run.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from torch import Tensor, nn

from actors.cli import main
from actors.result import Result
from actors.view import View
from elastic.job import Job
from elastic.report.story import Line, Sentence
from elastic.runs import owed
from elastic.runs.run import Run
from tests.support.chaos import Witness, alone, assert_nothing_left, trial
from tests.support.commands import Command
from tests.support.job_file import to_toml
from tests.support.patience import PATIENCE_S, until
from tests.support.processes import Watched
from tests.support.toys import Own, toy_job


class Gated(Own):
    """A model that leaves its process id in a folder whenever it is to continue "a", and goes on once the
    folder has a file ``open``.
    """

    def __init__(self, gate: str, **args: Any) -> None:
        super().__init__(**args)
        self.gate = Path(gate)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.device.type == "cpu" and int(tokens[0, 0]) == ord("a"):  # no sample begins so
            (self.gate / str(os.getpid())).touch()
            until((self.gate / "open").exists, what="nobody has opened the gate")
        return super().forward(tokens)


def gated(**args: Any) -> nn.Module:
    return Gated(**args)


def job_of(bucket: Path, name: str, gate: Path, steps: int = 24, **changes: Any) -> Job:
    gate.mkdir(exist_ok=True)
    settings: dict[str, Any] = {
        "model": "tests.actors.test_errands:gated",
        "model_args": {"vocab": 257, "gate": str(gate)},
        "data": {"dataset": "tests.support.toys:Sums", "args": {"samples": 16 * steps, "read_s": 0.02}},
        "checkpoint": {"save_every": 4},
        "export": {"every": 8},
        "samples": {"every": 12, "prompts": ["a"], "tokens": 4},
    }
    return toy_job(bucket, name=name, steps=steps, **settings | changes)


def due(job: Job) -> set[str]:
    """Returns the names of what a run of 24 steps has made."""
    return {f"export of step {step}" for step in (8, 16, 24)} | {
        f"samples of step {step}" for step in (12, 24)
    }


def made(lines: list[Line]) -> Counter[str]:
    """Returns how often each export and each text was told."""
    said = (line.text for line in lines if isinstance(line, Sentence))
    return Counter(
        text.partition(": ")[0]
        for text in said
        if text.startswith(("export of step", "samples of step")) and " failed" not in text
    )


def results(job: Job) -> dict[str, Any]:
    """Returns the document of each thing that is done, by its name; an export is checked against what
    `checkpoint export` writes.
    """
    run, found = Run.open(job), {}
    for key in run.store.list(f"{job.name}/owed/"):
        if not key.endswith("done.json"):
            continue
        _, _, kind, place, _ = key.split("/")
        debt = owed.Debt(owed.Version(*map(int, place.split("-"))), kind)
        assert str(debt) not in found, "each step is done once"
        about = found[str(debt)] = owed.result(run, debt)
        if kind == "export":
            with TemporaryDirectory() as folder:
                run.checkpoints.export(debt.version, Path(folder))
                assert run.store.get(about["place"]) == (Path(folder) / "model.safetensors").read_bytes()
    return {
        name: {key: value for key, value in about.items() if key != "place"} for name, about in found.items()
    }


def expected(folder: Path, **changes: Any) -> dict[str, Any]:
    """Returns what the same job makes in one process without Ray."""
    gate = folder / "open-gate"
    gate.mkdir(parents=True)
    (gate / "open").touch()
    job = job_of(folder / "alone", "local", gate, **changes)
    alone(job)
    return results(job)


class Strikes:
    """Kills processes in the middle of an errand, one after the other, and then opens the gate.

    ``whom`` says whose process it is each time: that of the errand itself, or that of the coordinator.
    """

    def __init__(self, gate: Path, *whom: str) -> None:
        self.gate, self.whom = gate, whom
        self.errands: list[int] = []
        self.coordinators: list[int] = []

    def __call__(self, witness: Witness, view: View) -> bool:
        for mark in self.gate.iterdir():
            if mark.name == "open" or (pid := int(mark.name)) in self.errands:
                continue
            errand = Watched(pid)
            whom = self.whom[len(self.errands)]
            self.errands.append(pid)
            if whom == "coordinator":
                self.coordinators.append(view.pid)
            os.kill(pid if whom == "errand" else view.pid, signal.SIGKILL)
            errand.wait(PATIENCE_S)  # it dies with its coordinator
        if len(self.errands) < len(self.whom):
            return False
        (self.gate / "open").touch()
        return True


@pytest.mark.full
def test_each_is_made_once_though_the_process_that_makes_it_is_killed(tmp_path: Path) -> None:
    """The process dies in the middle of the first text; all is made, as by one process without Ray, before
    the run ends.
    """
    one = {"workers": {"max": 1}, "steps": 12, "export": {"every": 4}}
    job = job_of(tmp_path, "errand-killed", tmp_path / "gate", **one)
    strikes = Strikes(tmp_path / "gate", "errand")
    chaos = trial(job, strikes)
    assert chaos.result.state == "Finished"
    assert not {*strikes.errands} & {seen.process.pid for seen in chaos.witness.seen.values()}, (
        "it is no worker"
    )
    names = {"export of step 4", "export of step 8", "export of step 12", "samples of step 12"}
    assert results(job) == expected(tmp_path / "reference", **one) and set(results(job)) == names
    told = [line.text for line in chaos.lines if isinstance(line, Sentence)]
    assert (
        sum("samples of step 12 failed: its process died; the run tries again soon" in text for text in told)
        == 1
    )
    assert made(chaos.lines) == dict.fromkeys(names, 1)
    assert owed.debts(Run.open(job)) == []
    assert_nothing_left(chaos)


@pytest.mark.full
def test_four_deaths(tmp_path: Path) -> None:
    """A worker dies in a step; the errand's process twice and a coordinator once, in the middle of an errand.

    The bits of the training are those of an undisturbed run, and checkpoints are deleted once nothing is owed
    for them.
    """
    fault = {"point": "backward", "step": 15, "world_rank": 1}
    kept = {"save_every": 4, "keep_last": 2}
    job = job_of(tmp_path, "four-deaths", tmp_path / "gate", checkpoint=kept, faults=[fault])
    strikes = Strikes(tmp_path / "gate", "errand", "coordinator", "errand")
    chaos = trial(job, strikes)
    assert chaos.result.state == "Finished"
    assert len(strikes.errands) == 3 and len(strikes.coordinators) == 1
    assert len([seen for seen in chaos.witness.killed() if seen.final["step"] == 14]) == 1
    assert_nothing_left(chaos)
    steps = {each.version.step for each in Run.open(job).checkpoints.versions()}
    assert steps == {20, 24}, "no rule keeps those for which something was owed"
    reference = expected(tmp_path / "reference")
    for name, about in reference.items():
        (debt,) = [each for each in _done(job) if str(each) == name]
        found = owed.result(Run.open(job), debt)
        assert {key: value for key, value in found.items() if key != "place"} == about
    assert set(reference) == due(job) == {str(each) for each in _done(job)}


def _done(job: Job) -> list[owed.Debt]:
    """Returns what is done, whether or not its checkpoint is still there."""
    keys = (
        key.split("/") for key in Run.open(job).store.list(f"{job.name}/owed/") if key.endswith("done.json")
    )
    return [owed.Debt(owed.Version(*map(int, place.split("-"))), kind) for _, _, kind, place, _ in keys]


@pytest.mark.full
def test_the_whole_cluster_dies_in_the_middle_of_an_errand_and_again_when_all_steps_are_done(
    tmp_path: Path,
) -> None:
    """The next command finds what is owed, the last one though no step is left.  The control: before it,
    something is missing.
    """
    gate = tmp_path / "gate"
    job = job_of(tmp_path / "bucket", "cluster-killed", gate)
    (tmp_path / "job.toml").write_text(to_toml(job))

    def train() -> Command:
        return Command(tmp_path, "train", "job.toml")

    first = train()
    first.until(lambda: any(gate.iterdir()))
    first.kill_everything()
    assert "samples of step 12" not in results(job)
    second = train()
    second.until(lambda: "; this command does them now, and Ctrl-C leaves them for later" in second.text)
    second.kill_everything()
    assert Run.open(job).newest() == owed.Version(24, Run.open(job).newest().generation)  # type: ignore[union-attr]
    assert not any(name.startswith("samples") for name in results(job)), "the control"
    (gate / "open").touch()
    third = train()
    assert third.wait() == 0, third.text
    assert "samples of step 24: " in third.text and "Finished at step 24 of 24" in third.text
    assert results(job) == expected(tmp_path / "reference") and set(results(job)) == due(job)


@pytest.mark.full
def test_ctrl_c_leaves_what_is_owed_for_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands `elastic status` and `elastic owed` list it, and the latter does it."""
    gate = tmp_path / "gate"
    job = job_of(tmp_path / "bucket", "left", gate)
    (tmp_path / "job.toml").write_text(to_toml(job))
    command = Command(tmp_path, "train", "job.toml")
    parts = (
        "; this command does them now, and Ctrl-C leaves them for later",
        "export of step 16: ",
        "export of step 24: ",
    )
    # no export waits for the text
    command.until(lambda: any(gate.iterdir()) and all(part in command.text for part in parts))
    command.interrupt()
    assert command.wait() == 0, command.text
    assert "; to do it now: `elastic owed job.toml --pay`" in command.text
    assert main(["status", str(tmp_path / "job.toml"), "--once"]) == 0
    owing = "owed: samples of step 12, samples of step 24"
    assert f"it ended as Finished; {owing}" in (said := capsys.readouterr().out), said
    (gate / "open").touch()
    assert main(["owed", str(tmp_path / "job.toml")]) == 0 and "samples" in capsys.readouterr().out
    assert main(["owed", str(tmp_path / "job.toml"), "--pay"]) == 0
    out = capsys.readouterr().out
    assert "samples of step 12: 'a' → " in out and "left owes nothing" in out
    assert results(job) == expected(tmp_path / "reference") and set(results(job)) == due(job)


HELD_OUT = {
    "every": 4,
    "samples": 21,
    "dataset": "tests.support.toys:Sums",
    "args": {"samples": 50, "seq_len": 16},
}


def scores(job: Job) -> dict[int, tuple[float, int]]:
    """Returns the sums of each validation that the journal knows, by the step after which it was made."""
    run, found = Run.open(job), {}
    for record in run.records():
        event = record["event"]
        if event["$"] == "Evaluated" and not record["reason"].startswith("refused"):
            found[event["version"]["step"]] = (float.fromhex(event["found"]["loss"]), event["found"]["count"])
        elif event["$"] == "StepDone" and event.get("validated"):
            found[event["outcome"]["step"]] = (
                float.fromhex(event["validated"]["loss"]),
                event["validated"]["count"],
            )
    return found


def by_members(folder: Path, steps: int) -> dict[int, float]:
    """Returns the mean of each validation of a run without Ray."""
    job = toy_job(folder, name="local", validation=HELD_OUT, steps=steps, data=data_of(steps))
    alone(job)
    return Result("Finished", "", job.steps, 0, job.bucket, job.name).validations


def data_of(steps: int, read_s: float = 0.0) -> dict[str, Any]:
    return {"dataset": "tests.support.toys:Sums", "args": {"samples": 16 * steps, "read_s": read_s}}


def spared(bucket: Path, name: str, steps: int, read_s: float, **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "steps": steps,
        "data": data_of(steps, read_s),
        "checkpoint": {"save_every": 4},
        "workers": {"max": 1, "spares": 1},
        "validation": {**HELD_OUT, "by": "spares"},
    }
    return toy_job(bucket, name=name, **settings | changes)


@pytest.mark.full  # that no bit changes is shown without processes, too
def test_l1_spares_validate_while_the_others_train(tmp_path: Path) -> None:
    """L1: each value has the bits of the members' own, and the best one is known.  The member validates the
    state after the last step only.

    No bit of the training depends on it.
    """
    job = spared(tmp_path, "spared", 24, 0.1)
    chaos = trial(job)
    assert chaos.result.state == "Finished"
    expected = by_members(tmp_path / "alone", 24)
    assert chaos.result.validations == expected and [*expected] == [4, 8, 12, 16, 20, 24]
    assert {step: loss / count for step, (loss, count) in scores(job).items()} == expected
    assert not [step for step, each in chaos.ledger.items() if each.validated is not None], (
        "no commit waited for one"
    )
    best = Run.open(job).last_recorded().history.best  # type: ignore[union-attr]
    assert best is not None and best.version.step == min(expected, key=expected.__getitem__)
    assert chaos.hash == alone(toy_job(tmp_path / "plain", name="local", steps=24, data=data_of(24))).hash
    assert owed.debts(Run.open(job)) == []
    assert_nothing_left(chaos)


class Seats:
    """Kills the member once the spare is in the middle of a validation: when it has read the sample that
    marks it.
    """

    def __init__(self, mark: Path) -> None:
        self.mark, self.killed = mark, 0

    def __call__(self, witness: Witness, view: View) -> bool:
        if not self.mark.exists() or not (reader := self.mark.read_text()):
            return False
        for seen in witness.seen.values():
            if seen.process.pid != int(reader):
                self.killed = seen.process.pid
                os.kill(self.killed, signal.SIGKILL)
        return bool(self.killed)


@pytest.mark.full
def test_a_spare_that_is_seated_drops_its_validation_which_stays_owed(tmp_path: Path) -> None:
    """The next spare makes it, with the same bits.  The control is the word of the spare in its log."""
    mark = tmp_path / "mark"
    late = {**HELD_OUT["args"], "sample": 10, "late_s": 2.0, "mark": str(mark)}  # type: ignore[dict-item]
    held_out = {**HELD_OUT, "dataset": "tests.support.toys:Late", "args": late, "by": "spares"}
    job = spared(tmp_path / "bucket", "seated", 60, 0.1, validation=held_out, checkpoint={"save_every": 4})
    seats = Seats(mark)
    chaos = trial(job, seats)
    assert chaos.result.state == "Finished" and seats.killed
    logs = "".join(path.read_text() for path in (tmp_path / "bucket" / "seated" / "logs").rglob("*.log"))
    assert "the validation of step 4 of generation 1 is dropped: the worker is needed for training" in logs
    expected = by_members(tmp_path / "alone", 60)
    found = {step: loss / count for step, (loss, count) in scores(job).items()}
    assert {4, 60} <= found.keys() and found == {step: expected[step] for step in found}
    assert {debt.version.step for debt in owed.debts(Run.open(job))} == expected.keys() - found.keys(), (
        "the rest is listed"
    )
    assert_nothing_left(chaos)
