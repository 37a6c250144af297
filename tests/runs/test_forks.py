"""L4, L5: a run goes on from an older step, or from a checkpoint of another run, or begins with the weights
of one.

The oracle is a run that was so from the beginning: what is asked for by another way has its bits.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from actors.cli import checkpoint_commands
from actors.launch import launch
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.plan.retention import Keep
from elastic.protocol.actions import Retain
from elastic.report.story import Line, Scored, Sentence, StepLine
from elastic.runs import code, forks, resume
from elastic.runs.branches import Branches, Origin
from elastic.runs.metrics import keep_until, rows_of, store_rows, stored
from elastic.runs.retention import collect
from elastic.runs.run import Run
from storage.checkpoints import Checkpoints
from storage.errors import Exists
from storage.objects import ObjectStore
from tests.storage.states import TENSORS, state_of, write
from tests.support.chaos import exported_hash
from tests.support.patience import PATIENCE_S
from tests.support.stores import Forwarding
from tests.support.toys import SMALL, TINY, toy_job

FAST = {"optim": {"lr": 3e-2}}
STATE = state_of(TENSORS[:2], seed=1)
_numbers = itertools.count()


def job_of(folder: Path, name: str = "run", steps: int = 6, **changes: Any) -> Job:
    settings = {**TINY, "schedule": {"kind": "constant"}, "checkpoint": {"save_every": 2}}
    return toy_job(folder, **{"name": name, "steps": steps} | settings | changes)


def trained(job: Job, **how: Any) -> list[Line]:
    """Trains in this process, and returns what was shown."""
    lines: list[Line] = []
    assert launch(job, local=True, show=lines.append, **how).state == "Finished"
    return lines


def told(lines: list[Line]) -> str:
    return "\n".join(line.text for line in lines if isinstance(line, Sentence))


def steps_of(lines: list[Line]) -> list[int]:
    return [line.step for line in lines if isinstance(line, StepLine)]


# ---- a step of the run itself


def test_l4_a_run_goes_on_from_an_older_step_of_its_own(tmp_path: Path) -> None:
    """L4: with another rate from step 4 on it has the bits of a run that had it there.  The control: from
    step 2 on, other bits.

    Each step counts once in the metrics, with the generation that survived.
    """
    early = tmp_path / "early"
    trained(job_of(early, steps=4))
    trained(job_of(early, **FAST), branch=True)
    trained(job_of(tmp_path))
    lines = trained(job_of(tmp_path, **FAST), resume=4)
    assert "branch 2 of run goes on from step 4: optim.lr = 0.01 before and 0.03 now" in told(
        lines
    ) and steps_of(lines) == [5, 6]
    assert exported_hash(job_of(tmp_path, **FAST)) == exported_hash(job_of(early, **FAST))
    run = Run.find(job_of(tmp_path))
    assert [(int(row["step"]), int(row["generation"])) for row in rows_of(run)] == [
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 1),
        (5, 2),
        (6, 2),
    ]
    again = trained(job_of(tmp_path, steps=8, **FAST), resume=4, branch=True)
    assert steps_of(again) == [5, 6, 7, 8], "another job goes back again"
    again = trained(job_of(tmp_path, steps=8, **FAST), resume=4)
    assert steps_of(again) == [] and (
        "branch 3 of run has gone on from step 4 already, so it goes on from its newest "
        "checkpoint, step 8 of generation 3"
    ) in told(again)
    assert steps_of(trained(job_of(tmp_path, **FAST), resume="run@2")) == [3, 4, 5, 6]
    assert exported_hash(job_of(tmp_path, **FAST)) not in ("", exported_hash(job_of(early, **FAST)))


def test_l4_a_run_that_was_rewound_stands_there_until_it_goes_on(tmp_path: Path) -> None:
    """L4: it may be rewound to its beginning, too; what was abandoned counts for nobody, also if the newest
    one is damaged later.
    """
    trained(job_of(tmp_path))
    run = Run.find(job_of(tmp_path))
    assert run.end() is not None
    resume.rewind(Run.look(job_of(tmp_path, **FAST), branch=True), 0.0, Version(4, 1))
    assert (run.newest(), run.end(), [row["step"] for row in rows_of(run)]) == (
        Version(4, 1),
        None,
        [1, 2, 3, 4],
    )
    run.checkpoints.quarantine(Version(4, 1), "a test")
    assert run.newest() == Version(2, 1), "not the abandoned one of step 6"
    with pytest.raises(JobError, match="no good checkpoint at step 6"):
        resume.start_of(job_of(tmp_path, **FAST), "6")
    resume.rewind(Run.look(job_of(tmp_path, **FAST), branch=True), 0.0, Version(0, 0))
    assert steps_of(trained(job_of(tmp_path, **FAST))) == [1, 2, 3, 4, 5, 6]


def test_a_fork_that_has_not_trained_yet_has_the_code_of_its_origin(tmp_path: Path) -> None:
    """Its command may die, or find no machines, between the fork and the note of its code.  The control: the
    same code is let through.
    """
    trained(job_of(tmp_path))
    start = resume.start_of(job_of(tmp_path, "fork", 8), "run@4")
    start.begin()
    run, then = Run.look(start.job), code.at(ObjectStore.open(str(tmp_path)), "run", Version(4, 1))
    assert then is not None and not code.noted(run.store, "fork")
    code.check(run, then, Version(4, 1), accept=False)
    with pytest.raises(
        JobError,
        match=(
            r"the code of the run 'fork' .* has changed since step 4: other\.py "
            r"\(new\)"
        ),
    ):
        code.check(
            run, replace(then, files={**then.files, "other.py": ("1", "1")}), Version(4, 1), accept=False
        )


def test_rows_that_share_a_file_with_abandoned_ones_stay(tmp_path: Path) -> None:
    """The recorder of a cluster writes the rows of several saves as one file.  The control: without a file of
    their own they are lost.
    """
    found = []
    for keeps in (True, False):
        run = Run.open(job_of(tmp_path / str(keeps)))
        for step in (2, 4, 6):
            run.commit(
                Version(step, 1), write(run.checkpoints, Version(step, 1), STATE, 1), ((1, step),), Layout()
            )
        store_rows(run.store, "run", [{"step": step, "generation": 1} for step in range(1, 7)])
        if keeps:
            keep_until(run, Version(4, 1))
        store_rows(run.store, "run", [{"step": 5, "generation": 2}])
        found.append([row["step"] for row in stored(run.store, "run", ((1, 4), (2, 5)))])
    assert found == [[1, 2, 3, 4, 5], [5]]


# ---- another run


def test_l5_a_fork_and_an_older_step_take_the_samples_up_where_their_origin_left_them(tmp_path: Path) -> None:
    """L4, L5: the run has changed its batch and its order by a branch; what goes on from before and after
    that has the bits of a run with the same branches.  The control: a fork from before the branch draws other
    samples.
    """
    doubled, other = {"global_batch": 32, "seed": 3}, {"seed": 7}
    trained(job_of(tmp_path, steps=2))
    trained(job_of(tmp_path, steps=4, **doubled), branch=True)
    after = job_of(tmp_path, "after", **other | {"global_batch": 16})
    trained(after, resume="run@4")
    before = job_of(tmp_path, "before", **other | {"global_batch": 16})
    trained(before, resume="run@2")
    trained(job_of(tmp_path, **other | {"global_batch": 16}), branch=True)
    assert (
        exported_hash(after)
        == exported_hash(job_of(tmp_path, **other | {"global_batch": 16}))
        != exported_hash(before)
    )
    assert [(each.until, each.global_batch, each.seed) for each in Run.look(after).job.stretches()] == [
        (2, 16, 0),
        (4, 32, 3),
        (0, 16, 7),
    ]
    trained(job_of(tmp_path, **other | {"global_batch": 16}), resume=2)
    assert exported_hash(job_of(tmp_path, **other | {"global_batch": 16})) == exported_hash(before), (
        "what was abandoned is no stretch"
    )
    assert [each.until for each in Run.look(before).job.stretches()] == [2, 0]


def test_l5_a_fork_has_the_bits_of_the_run_extended(tmp_path: Path) -> None:
    """L5: it goes on at the step, with the moments and the place in the data, and copies nothing.  The
    control: from another step.
    """
    early = tmp_path / "early"
    trained(job_of(early, steps=4))
    trained(job_of(early, **FAST), branch=True)
    trained(job_of(tmp_path, steps=4))
    fork = job_of(tmp_path, "fork", **FAST)
    lines = trained(fork, resume="run@4")
    assert "fork goes on from step 4 of generation 1 of run: optim.lr = 0.01 before and 0.03 now" in told(
        lines
    )
    assert steps_of(lines) == [5, 6] and exported_hash(fork) == exported_hash(job_of(early, **FAST))
    assert sorted(path.name for path in (tmp_path / "fork" / "steps").iterdir()) == ["000000000006"], (
        "nothing is copied"
    )
    other = job_of(tmp_path, "other", **FAST)
    assert steps_of(trained(other, resume="run@2")) == [3, 4, 5, 6]
    assert exported_hash(other) not in ("", exported_hash(fork))
    assert steps_of(trained(fork, resume="run@4")) == [], "the same command goes on with the fork"
    with pytest.raises(
        JobError,
        match=(
            r"--resume run@2: there is a run 'fork' already, which goes on from "
            r"step 4 of generation 1 of run"
        ),
    ):
        trained(fork, resume="run@2")
    assert steps_of(trained(job_of(tmp_path, "child", steps=8, **FAST), resume="fork@4")) == [5, 6, 7, 8], (
        "what a fork has inherited"
    )
    assert set(forks.references(fork_store := ObjectStore.open(str(tmp_path)), "run")) == {
        Version(4, 1),
        Version(2, 1),
    }
    assert forks.references(fork_store, "fork") == {}, "the run that holds the checkpoint keeps it"
    assert Branches(fork_store, "child").origin() == Origin("run", Version(4, 1))


@pytest.fixture(scope="module")
def of_four_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a run that ended at step 4; what is refused leaves nothing there."""
    folder = tmp_path_factory.mktemp("four")
    trained(job_of(folder, steps=4))
    return folder


@pytest.mark.parametrize(
    ("changes", "word", "says"),
    [
        (
            {"model_args": {"vocab": 29, "dim": 32}},
            "run@4",
            "the state of the run does not fit another value of model_args",
        ),
        ({"optim": {"kind": "sgd"}}, "run@4", "does not fit another value of optim.kind"),
        (
            {"data": {"dataset": "tests.support.toys:Sums", "weights": [1.0, 2.0]}},
            "run@4",
            "but not its length from no to 2 weights",
        ),
        ({"steps": 3}, "run@4", "steps = 3: the checkpoint of run is at step 4 already; raise steps"),
        ({}, "run@3", "no good checkpoint at step 3"),
        ({}, "nobody@3", "there is no run 'nobody'"),
        (
            {},
            "run@best",
            "run has no validation with a finite loss, so there is no best checkpoint; name a step",
        ),
        ({}, "run@soon", "must name a checkpoint of a run in the same bucket"),
        ({}, "4", "there is no run 'fork'"),
        (
            {"data": {"dataset": "tests.support.toys:Sums", "args": {"samples": 32}}},
            "run@4",
            "--resume run@4.1: data.args = {'samples': 32}",
        ),
        ({"init": "run@4"}, "run@4", "leave one of them out"),
        ({"init": "run@3"}, "latest", "no good checkpoint at step 3"),
        (
            {"init": "run@4", "model_args": {"vocab": 29, "dim": 32}},
            "latest",
            "use the model and the model_args of that run",
        ),
        ({"init": "fork@4"}, "latest", "names this run itself"),
    ],
    ids=str,
)
def test_l5_what_does_not_fit_is_refused_before_anything_begins(
    of_four_steps: Path, changes: dict[str, Any], word: str, says: str
) -> None:
    """L5: by name, and nothing is left in the bucket.  The control is the test above.  Only a run of the job
    file can be begun with it.
    """
    with pytest.raises(JobError) as refused:
        launch(job_of(of_four_steps, "fork", **changes), local=True, resume=word)
    assert says in str(refused.value)
    assert ("begin the run" in str(refused.value)) is (word == "4")
    assert not (of_four_steps / "fork").exists() and not (of_four_steps / "run" / "references").exists()


def test_l5_a_warm_start_has_the_weights_and_nothing_else(tmp_path: Path) -> None:
    """L5: with a rate of zero the weights stay those of the checkpoint, as safetensors reads them; the
    moments are those of one step.

    The control: a run that initialises itself.
    """
    still = {"optim": {"lr": 0.0}, "seed": 7, "steps": 1}
    trained(job_of(tmp_path, steps=4))
    files = {}
    for name, changes in {"run": {}, "warm": {"init": "run@4"} | still, "cold": still}.items():
        job = job_of(tmp_path, name, **{"steps": 4} | changes)
        lines = trained(job)
        assert ("warm begins at step 0 with the weights of step 4 of generation 1 of run" in told(lines)) is (
            name == "warm"
        )
        Run.find(job).checkpoints.export(Run.find(job).version_at(None), tmp_path / "out" / name)
        files[name] = [
            load_file(tmp_path / "out" / name / f"{part}.safetensors") for part in ("model", "optimizer")
        ]
    weights = {name: model for name, (model, _) in files.items()}
    assert all(weights["warm"][name].equal(value) for name, value in weights["run"].items())
    assert not all(weights["cold"][name].equal(value) for name, value in weights["run"].items())
    fresh = {name: _of_one_step(optimizer) for name, (_, optimizer) in files.items()}
    assert fresh == {"run": False, "warm": True, "cold": True}
    assert Run.find(job_of(tmp_path, "warm")).job.init == "run@4.1"
    # the choice was made when the run began
    trained(job_of(tmp_path, "warm", **{"init": "run@latest"} | still))
    with pytest.raises(JobError, match="does not fit another value of init"):
        Run.look(job_of(tmp_path, "warm", **{"init": "run@2"} | still), branch=True)


def _of_one_step(optimizer: dict[str, torch.Tensor], betas: tuple[float, float] = (0.9, 0.95)) -> bool:
    """Returns whether the moments of AdamW are those of one gradient g after zeros: (1 - β1) g and (1 - β2)
    g².
    """
    firsts = {
        key.removeprefix("exp_avg/"): value for key, value in optimizer.items() if key.startswith("exp_avg/")
    }
    pairs = [
        (value / (1 - betas[0]), optimizer[f"exp_avg_sq/{name}"] / (1 - betas[1]))
        for name, value in firsts.items()
    ]
    return bool(pairs) and all(
        torch.allclose(first**2, second, rtol=1e-4, atol=1e-12) for first, second in pairs
    )


def test_l5_the_best_is_the_one_with_the_lowest_validation(tmp_path: Path) -> None:
    validation = {"every": 1, "args": {"samples": 16}}
    job = job_of(tmp_path, validation=validation, optim={"lr": 0.3})
    trained(job)
    rows = {
        int(row["step"]): row["validation_loss"] for row in rows_of(Run.find(job)) if "validation_loss" in row
    }
    best = min(rows, key=rows.__getitem__)
    found = resume.checkpoint(Run.find(job), "best")
    assert found.step == min(step for step in (2, 4, 6) if step >= best) and len(set(rows.values())) > 1


# ---- deletion


def saved(steps: Iterable[int] = range(1, 6)) -> Run:
    run = Run.open(toy_job(f"memory://forks-{next(_numbers)}", name="run"))
    for step in steps:
        run.commit(
            Version(step, 1), write(run.checkpoints, Version(step, 1), STATE, 1), ((1, step),), Layout()
        )
    run.claim("local")
    return run


OLD = Version(2, 1)


def rounds(run: Run, number: int = 2) -> None:
    asked = Retain((Version(5, 1),), ((1, 5),), None, ())
    for _ in range(number):
        collect(run, Keep(last=2), asked, run.latest_claim())


def test_l7_what_a_fork_needs_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """L7: in rounds and for `rm`, also once the fork has gone further.  The fork itself deletes nothing of
    the other run.
    """
    run = saved()
    forks.begin(run.store, run.job.replace(name="fork"), Origin("run", OLD), {})
    rounds(run)
    assert [each.version.step for each in run.checkpoints.versions()] == [2, 4, 5], (
        "the control: 1 and 3 are deleted"
    )
    monkeypatch.setattr("elastic.job.Job.keep", lambda self: Keep())
    with pytest.raises(JobError, match="--step 2 stays: run 'fork' goes on from it"):
        checkpoint_commands.rm(run.job, "2", force=True)
    fork = Run.find(run.job.replace(name="fork"))
    assert [each.version for each in fork.checkpoints.versions()] == [OLD] and fork.newest() == OLD
    for step in (3, 4, 5):
        version, line = Version(step, 2), ((1, 2), (2, step))
        fork.commit(version, write(fork.checkpoints, version, STATE, 1), line, Layout())
    claim = fork.claim("local")
    for _ in range(2):
        collect(fork, Keep(last=1), Retain((Version(5, 2),), ((1, 2), (2, 5)), None, ()), claim)
    assert [each.version for each in fork.checkpoints.versions()] == [OLD, Version(5, 2)]
    with pytest.raises(JobError, match="--step 2 belongs to the run 'run', from which fork was forked"):
        checkpoint_commands.rm(fork.job, "2", force=True)
    with pytest.raises(ValueError, match="so fork does not delete it"):
        fork.checkpoints.mark(OLD, "a mistake")
    assert run.checkpoints.verify(OLD).good


class Taking(Forwarding):
    """Makes its calls only in its turns: ``turns`` says after how many calls it waits for the other one."""

    def __init__(self, store: ObjectStore, calls: int, meanwhile: Callable[[], None]) -> None:
        super().__init__(store)
        self.calls, self.meanwhile = calls, meanwhile

    def _tick(self) -> None:
        self.calls -= 1
        if self.calls == -1:
            self.meanwhile()

    def put(self, key: str, data: object) -> None:
        self._tick()
        super().put(key, data)  # type: ignore[arg-type]

    def put_if_absent(self, key: str, data: object) -> None:
        self._tick()
        super().put_if_absent(key, data)  # type: ignore[arg-type]

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        self._tick()
        return super().get(key, start, stop)

    def list(self, prefix: str = "") -> list[str]:
        self._tick()
        return super().list(prefix)

    def exists(self, key: str) -> bool:
        self._tick()
        return super().exists(key)

    def delete(self, key: str) -> None:
        self._tick()
        super().delete(key)


def by_command(run: Run) -> None:
    """Deletes as `elastic checkpoint rm` does: one phase after the other."""
    checkpoint_commands._delete(run, [OLD], "a test", run.latest_claim())


def interleaved(first: int, then: int, delete: Callable[[Run], None] = rounds) -> tuple[bool, bool]:
    """Deletes until call ``first``, forks until call ``then``, ends the deletion, and ends the fork.

    Returns whether the fork began, and whether its checkpoint is whole.
    """
    run, began, at_rest, go = saved((2, 4, 5)), list[bool](), threading.Event(), threading.Event()

    def pause() -> None:
        at_rest.set()
        assert go.wait(PATIENCE_S)

    def fork() -> None:
        try:
            forks.begin(Taking(run.store, then, pause), run.job.replace(name="fork"), Origin("run", OLD), {})
            began.append(True)
        except JobError:
            began.append(False)
        at_rest.set()

    thread = threading.Thread(target=fork)

    def meanwhile() -> None:
        thread.start()
        assert at_rest.wait(PATIENCE_S)

    deleting = Run(run.job, Taking(run.store, first, meanwhile))
    delete(deleting)
    go.set()
    if thread.ident is None:
        thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    return began == [True], Checkpoints(run.store, "run").verify(OLD).good


@pytest.mark.parametrize(
    ("firsts", "thens"),
    [
        ((0, *range(19, 23), 39, 40, 41), (0, 1, 2, 5, 6)),
        pytest.param(range(66), range(9), marks=pytest.mark.full),
    ],
    ids=("where they meet", "everywhere"),
)
def test_l7_a_fork_and_a_deletion_at_the_same_time(
    firsts: Iterable[int], thens: Iterable[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L7: wherever the two meet, a fork that began has its checkpoint; both ends occur.  Neither occurs
    always.

    The controls lose the checkpoint of a fork that began: a deletion that does not look for references, one
    that looks for them only before it marks, and a fork that does not look for the mark.
    """
    found = {interleaved(*schedule) for schedule in itertools.product(firsts, thens)}
    assert found == {(True, True), (False, False), (False, True)}, (
        "a fork that was refused may have saved the checkpoint for a round"
    )
    assert {interleaved(first, 60, by_command) for first in range(8)} == {(True, True), (False, False)}
    with monkeypatch.context() as broken:
        broken.setattr("elastic.runs.retention.forks.references", lambda store, name: {})
        assert interleaved(0, 6) == (True, False)
    with monkeypatch.context() as broken:
        broken.setattr(
            "elastic.runs.retention.remove", lambda run, version, claim: run.checkpoints.remove(version)
        )
        assert (True, False) in {interleaved(first, 60, by_command) for first in range(8)}
    look = forks._look
    with monkeypatch.context() as broken:
        broken.setattr(
            forks,
            "_look",
            lambda *where: None if (found := look(*where)) is None else found._replace(deleted=False),
        )
        assert (True, False) in {interleaved(first, then) for first in (39, 40, 41) for then in thens}


def test_a_fork_without_its_checkpoint_does_not_begin_anew() -> None:
    """It would be a run from step 0 under the name of a fork.  The control: with a checkpoint of its own it
    goes on.
    """
    run = saved()
    job = run.job.replace(name="fork")
    forks.begin(run.store, job, Origin("run", OLD), {})
    with pytest.raises(JobError, match="step 0: fork was forked at step 2, and has no earlier steps"):
        resume.start_of(job, 0)
    run.checkpoints.quarantine(OLD, "a test")
    fork = Run.find(job)
    with pytest.raises(
        JobError,
        match=(
            "'fork' was forked from step 2 of generation 1 of run 'run', whose checkpoint is damaged or gone"
        ),
    ):
        fork.newest()
    fork.commit(Version(3, 2), write(fork.checkpoints, Version(3, 2), STATE, 1), ((1, 2), (2, 3)), Layout())
    assert fork.newest() == Version(3, 2)


def test_two_commands_do_not_begin_the_same_fork() -> None:
    run = saved()
    fork = run.job.replace(name="fork")
    forks.begin(run.store, fork, Origin("run", OLD), {})
    with pytest.raises(Exists):
        forks.begin(run.store, fork, Origin("run", OLD), {})
    assert Run.find(fork).newest() == OLD


@pytest.mark.parametrize("keep_best", [True, False], ids=("kept", "the control"))
def test_l7_the_best_checkpoint_of_a_run_in_this_process_is_kept_and_others_go(
    tmp_path: Path, keep_best: bool
) -> None:
    """L7: with ``--local``, too, also by a command that goes on.  The judge reads the losses from what was
    shown.
    """
    rules = {"save_every": 2, "keep_last": 2, "keep_best": keep_best}
    settings = {
        "validation": {"every": 2, "args": {"samples": 16}},
        "optim": {"lr": 1.0},
        "numerics": 5,  # with which the best step is none of the last two
        "checkpoint": rules,
    }
    settings |= {"model_args": SMALL["model_args"], "microbatch": 4}
    shown = trained(job_of(tmp_path, steps=8, **settings))
    shown += trained(job_of(tmp_path, steps=14, **settings), branch=True)
    losses = {line.step: line.loss for line in shown if isinstance(line, Scored)}
    best = min(losses, key=lambda step: (losses[step], step))
    assert sorted(losses) == list(range(2, 15, 2)) and best not in (8, 12, 14)
    good = {
        each.version.step
        for each in Run.find(job_of(tmp_path, steps=14, **settings)).checkpoints.versions()
        if each.good
    }
    assert good == ({best, 8, 12, 14} if keep_best else {8, 12, 14}), "a branch goes on from step 8"
