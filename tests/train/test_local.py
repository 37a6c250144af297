"""A run in this process, without a coordinator: what it keeps while it goes on."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from actors.cli.checkpoint_commands import rm
from elastic.engine.loss import next_token
from elastic.engine.optim.base import Hyper, Part, Rule
from elastic.errors import PlatformGaveUp
from elastic.ids import Version
from elastic.job import Job
from elastic.protocol.commit_record import Outcome
from elastic.protocol.member import Member
from elastic.report.story import Line, Scored, Sentence, StepLine
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from tests.support.full_disk import small_disk
from tests.support.toys import Sums, toy_job

SMALL = {"vocab": 29, "dim": 8, "layers": 1, "heads": 1}


@pytest.mark.fast
@pytest.mark.parametrize("drops", [True, False], ids=["", "control"])
def test_a_long_run_keeps_no_more_commits_than_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drops: bool
) -> None:
    """Python's garbage collector counts the commits that are alive after steps 2 and 6.  In the control none
    is ever dropped.
    """
    if not drops:
        monkeypatch.setattr(Member, "recorded", lambda member, generation, step: None)
    alive = dict[int, int]()

    def show(line: Line) -> None:
        if isinstance(line, StepLine) and line.step in (2, 6):
            gc.collect()
            alive[line.step] = sum(type(each) is Outcome for each in gc.get_objects())

    run_local(toy_job(tmp_path, steps=7, model_args=SMALL), show)
    assert alive[2] >= 1
    assert alive[6] - alive[2] == (0 if drops else 4)


SIGNALS = [0]


def update(parts: Sequence[Part], grads: Sequence[Tensor], hyper: Hyper) -> None:
    """SGD; after the first of the tensors the process gets as many signals as ``SIGNALS`` says."""
    for part, grad in zip(parts, grads, strict=True):
        part.values.sub_(hyper.lr * grad)
        while SIGNALS[0]:
            SIGNALS[0] -= 1
            os.kill(os.getpid(), signal.SIGINT)


STRUCK = Rule((), update)


@pytest.fixture
def heard() -> Iterator[None]:
    """Lets SIGINT raise KeyboardInterrupt: a process in the background of a script ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("signals", [1, 2], ids=["once", "control"])
def test_a_signal_in_the_middle_of_an_update_costs_no_step(tmp_path: Path, signals: int) -> None:
    """The control: a second signal is handled at once, and half an update is not saved.  A resume shows what
    was.
    """
    job = toy_job(
        tmp_path, steps=4, model_args=SMALL, optim={"lr": 0.1, "kind": "tests.train.test_local:STRUCK"}
    )
    shown: list[Line] = []

    def show(line: Line) -> None:
        shown.append(line)
        if isinstance(line, StepLine) and line.step == 2 and len(shown) < 10:
            SIGNALS[0] = signals

    state, reason, step = run_local(job, show)
    assert state == "Stopped"
    half = "Ctrl-C in the middle of an update; a later start goes on from the last save"
    assert (step, reason) == ((3, "Ctrl-C; saved at step 3") if signals == 1 else (2, half))
    shown.clear()
    assert run_local(job, shown.append)[0] == "Finished"
    assert [line.step for line in shown if isinstance(line, StepLine)] == (
        [4] if signals == 1 else [1, 2, 3, 4]
    )


WIDE = {"vocab": 29, "dim": 96, "layers": 1, "heads": 1}


def saving(bucket: Path) -> Job:
    return toy_job(bucket, steps=12, model_args=WIDE, checkpoint={"save_every": 2, "keep_last": 2})


@pytest.fixture(scope="module")
def checkpoint_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Returns the bytes that a checkpoint takes on a disk, more than all else that a run writes."""
    job = saving(tmp_path_factory.mktemp("whole")).replace(steps=2)
    run_local(job, lambda line: None)
    sizes = [path.stat().st_size for path in Path(job.bucket, job.name).rglob("*") if path.is_file()]
    assert max(sizes) > 4 * 4096 * len(sizes)
    return max(sizes)


def steps_of(job: Job) -> list[int]:
    return [each.version.step for each in Run.open(job).checkpoints.versions() if each.good]


def test_a_disk_with_room_for_one_more_checkpoint_than_are_kept_is_enough(
    tmp_path: Path, checkpoint_bytes: int
) -> None:
    """A checkpoint that is marked takes room until the round after the next save, which would not fit beside
    it.
    """
    with small_disk(tmp_path / "disk", checkpoint_bytes * 7 // 2) as disk:
        job, lines = saving(disk), list[Line]()
        assert run_local(job, lines.append)[0] == "Finished" and steps_of(job) == [10, 12]
        assert not any("full" in str(line) for line in lines)


def test_a_run_on_a_disk_without_room_says_what_frees_some_and_then_goes_on(
    tmp_path: Path, checkpoint_bytes: int
) -> None:
    """Nothing is lost, however often it is started again."""
    with small_disk(tmp_path / "disk", checkpoint_bytes * 5 // 2) as disk:
        job = saving(disk)
        for _ in range(2):
            lines = list[Line]()
            with pytest.raises(
                PlatformGaveUp,
                match=(
                    r"the save of step 6 .* No space left on device; correct "
                    r"this"
                ),
            ):
                run_local(job, lines.append)
            (said,) = (
                line.text
                for line in lines
                if isinstance(line, Sentence) and "the bucket is full" in line.text
            )
            assert (
                "checkpoint.keep_last = 2" in said
                and ("`elastic checkpoint rm --step 2` deletes the oldest") in said
            )
            assert steps_of(job) == [2, 4] and all(
                Run.open(job).checkpoints.verify(Version(step, 1)).good for step in (2, 4)
            )
        rm(job, "2", force=False)
        with pytest.raises(PlatformGaveUp, match="the save of step 8 "):
            run_local(job, lines.append)
        assert steps_of(job) == [4, 6]


STRIKES = [""]


class Unread(Sums):
    """A dataset that cannot be read while ``STRIKES`` says so."""

    def read(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        if STRIKES[0] == "data":
            raise OSError("struck")
        return super().read(ids)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | float]:
    """The loss of other tests, which fails while ``STRIKES`` says so, perhaps after a write to the weights."""
    if STRIKES[0] == "writes":
        with torch.no_grad():
            next(model.parameters()).mul_(2)
    if STRIKES[0] in ("loss", "writes"):
        raise ArithmeticError("struck")
    return next_token(model, batch)


@pytest.mark.parametrize("kind", ["data", "loss", "show", "writes"])
def test_an_error_of_the_job_costs_no_step_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The user's code fails in step 4 of 6.  The control: a loss that has changed the weights before costs
    all steps, and no bit.
    """
    monkeypatch.setitem(globals(), "STRIKES", [""])
    job = toy_job(
        tmp_path, model_args=SMALL, steps=6, loss=f"{__name__}:loss", data={"dataset": f"{__name__}:Unread"}
    )
    shown: list[Line] = []

    def show(line: Line) -> None:
        shown.append(line)
        if isinstance(line, StepLine) and line.step == 3:
            STRIKES[0] = kind
            if kind == "show":
                raise OSError("struck")

    def steps() -> dict[int, float]:
        return {line.step: line.loss for line in shown if isinstance(line, StepLine)}

    run_local(job.replace(name="undisturbed"), shown.append)
    undisturbed = steps()
    shown.clear()
    with pytest.raises(Exception, match="struck"):
        run_local(job, show)
    newest = Run.open(job).newest()
    assert (newest.step if newest else 0) == (0 if kind == "writes" else 3), [
        getattr(line, "text", "") for line in shown
    ]
    STRIKES[0] = ""
    shown.clear()
    assert run_local(job, shown.append)[0] == "Finished"
    assert steps() == {step: undisturbed[step] for step in (range(1, 7) if kind == "writes" else (4, 5, 6))}


def test_a_run_that_has_finished_is_not_validated_again(tmp_path: Path) -> None:
    """The control: on other samples it is."""
    held_out = {
        "dataset": "tests.support.toys:Sums",
        "args": {"samples": 50, "seq_len": 16},
        "every": 2,
        "samples": 8,
    }
    job = toy_job(tmp_path, model_args=SMALL, steps=4, checkpoint={"save_every": 2}, validation=held_out)

    def validated(job: Job) -> list[int]:
        shown: list[Line] = []
        assert run_local(job, shown.append)[0] == "Finished"
        return [line.step for line in shown if isinstance(line, Scored)]

    assert validated(job) == [2, 4]
    assert validated(job) == []
    assert validated(job.replace(validation=held_out | {"samples": 12})) == [4]
