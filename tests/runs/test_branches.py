"""L4: a run goes on with other settings, from a step on, if it is asked to in a word; what cannot change is
refused by name.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from actors.launch import launch
from elastic.data.cursor import Cursor
from elastic.errors import JobError
from elastic.job import Job
from elastic.report.story import Sentence
from elastic.runs.branches import Branches
from elastic.runs.run import Run
from storage.errors import Exists
from storage.objects import ObjectStore
from tests.support.chaos import alone, exported_hash
from tests.support.toys import TINY, Sums, toy_job

CONSTANT = {"kind": "constant"}


def extending(folder: Path, steps: int, **changes: Any) -> Job:
    return toy_job(
        folder, **{**TINY, "microbatch": 4, "name": "run", "steps": steps, "schedule": CONSTANT} | changes
    )


def trained(job: Job, *, branch: bool = False) -> list[str]:
    """Trains in this process, and returns the sentences."""
    said: list[str] = []
    result = launch(
        job,
        local=True,
        branch=branch,
        show=lambda line: said.append(line.text) if isinstance(line, Sentence) else None,
    )
    assert result.state == "Finished"
    return said


def begun(folder: Path) -> list[tuple[int, int, Mapping[str, Any]]]:
    store = ObjectStore.open(str(folder))
    return [(each.number, each.step, each.changed) for each in Branches(store, "run").every()]


def test_l4_an_extended_run_has_the_bits_of_a_longer_one(tmp_path: Path) -> None:
    """L4: twice extended.  The control: with another learning rate from step 4 on, other bits."""
    longer = alone(extending(tmp_path / "longer", 8, name="longer"))
    trained(extending(tmp_path, 4))
    said = trained(extending(tmp_path, 6), branch=True)
    assert any(
        text.startswith("branch 2 of run goes on from step 4: steps = 4 before and 6 now") for text in said
    )
    trained(extending(tmp_path, 8), branch=True)
    assert exported_hash(extending(tmp_path, 8)) == longer.hash
    assert begun(tmp_path) == [(2, 4, {"steps": [4, 6]}), (3, 6, {"steps": [6, 8]})]
    other, faster = tmp_path / "other", {"optim": {"lr": 3e-2}}
    trained(extending(other, 4))
    trained(extending(other, 8, **faster), branch=True)
    assert exported_hash(extending(other, 8, **faster)) not in ("", longer.hash)


def test_l4_the_run_has_the_settings_of_its_newest_branch(tmp_path: Path) -> None:
    """L4: without the word nothing changes and nothing is written; with it the old settings are the others
    from then on.
    """
    trained(extending(tmp_path, 3))
    with pytest.raises(
        JobError,
        match=r"^steps = 3 in the run and 5 now: .*\(--steps 3\), or take the new values with --branch",
    ):
        trained(extending(tmp_path, 5))
    assert not (tmp_path / "run" / "branches").exists()
    trained(extending(tmp_path, 5), branch=True)
    with pytest.raises(JobError, match=r"^steps = 5 in the run and 3 now: "):
        Run.look(extending(tmp_path, 3))
    assert Run.look(extending(tmp_path, 5)).job.steps == 5 and Run.find(extending(tmp_path, 3)).job.steps == 5
    with pytest.raises(JobError, match="steps = 3: the run 'run' is at step 5 already; raise steps"):
        trained(extending(tmp_path, 3), branch=True)
    trained(extending(tmp_path, 5), branch=True)
    assert len(begun(tmp_path)) == 1, "the word alone begins nothing"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optim": {"kind": "sgd"}}, "the state of the run does not fit another value of optim.kind"),
        ({"model_args": {"vocab": 29, "dim": 64}}, "does not fit another value of model_args"),
        (
            {"data": {"dataset": "tests.support.toys:Sums", "weights": [1, 2]}},
            "but not its length from no to 2 weights, since samples would be left out or repeated",
        ),
    ],
    ids=str,
)
def test_l4_what_cannot_change_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    """L4: also with the word.  The control is the test above."""
    Run.open(extending(tmp_path, 3))
    with pytest.raises(JobError) as refused:
        Run.look(extending(tmp_path, 3, **changes), branch=True)
    assert says in str(refused.value)


class Noted(Sums):
    """A dataset that notes which samples are read."""

    def __init__(self, note: str, **args: Any) -> None:
        super().__init__(**args)
        self.note = Path(note)

    def read(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        with self.note.open("a") as note:
            note.write("".join(f"{sample}\n" for sample in ids))
        return super().read(ids)


def noting(folder: Path, steps: int, **changes: Any) -> Job:
    return extending(
        folder,
        steps,
        **{"data": {"dataset": "tests.runs.test_branches:Noted", "args": {"note": str(folder / "note")}}}
        | changes,
    )


def trained_on(folder: Path, job: Job, count: int, *, branch: bool = True) -> list[int]:
    """Trains, and returns the last ``count`` samples that were read; before them, samples are read in order
    to try out the code.
    """
    folder.mkdir(exist_ok=True)
    trained(job, branch=branch)
    return [int(line) for line in (folder / "note").read_text().split()][-count:]


def test_l4_a_branch_with_another_batch_or_seed_leaves_out_no_sample(tmp_path: Path) -> None:
    """L4, A10: as the samples are read, and not as the cursor names them.  Epochs of 64 begin and end inside
    of every branch.

    The control: a run that began with the second batch has read other samples by then.
    """
    first = trained_on(tmp_path, noting(tmp_path, 3), 3 * 16, branch=False)
    second = trained_on(tmp_path, noting(tmp_path, 5, global_batch=32), 2 * 32)
    ramp = {"global_batch": 16, "batch_ramp": {"start": 4, "increment": 4, "samples": 200}, "seed": 5}
    third = trained_on(tmp_path, noting(tmp_path, 18, **ramp), 3 * 8 + 6 * 12 + 4 * 16)
    read = [*first, *second, *third]
    plain = Cursor(64, 1, 0)
    assert [*first, *second] == [plain.at(position) for position in range(112)]
    assert [sorted(read[begin : begin + 64]) for begin in (0, 64, 128, 192)] == [list(range(64))] * 4
    assert len(set(read[256:])) == 16
    assert third[:16] != [plain.at(position) for position in range(112, 128)]
    assert set(third[:16]) == {plain.at(position) for position in range(112, 128)}, (
        "the rest of the epoch, in another order"
    )
    other = trained_on(
        tmp_path / "other", noting(tmp_path / "other", 5, global_batch=32), 2 * 32, branch=False
    )
    assert other != second


def test_l4_a_branch_that_changes_nothing_of_the_data_changes_no_sample(tmp_path: Path) -> None:
    """L4: so does one more branch that takes the change back before it counted for a step."""
    trained(extending(tmp_path, 3))
    for number, changes in enumerate(({"global_batch": 32}, {"global_batch": 16}, {"optim": {"lr": 0.5}}), 2):
        run = Run.look(extending(tmp_path, 5, **changes), branch=True)
        assert run.branch(0.0).startswith(f"branch {number} of run goes on from step 3")
    job = Run.look(extending(tmp_path, 5, optim={"lr": 0.5})).job
    told = [each.format for each in run.branches.every()]
    assert told == [2, 1, 1], "what an older release would draw otherwise it must not read"
    assert job.stretches() == extending(tmp_path, 5).stretches()
    assert job.batches() == extending(tmp_path, 5).batches()


def test_l4_a_run_that_falls_back_to_before_its_branch_has_the_batches_of_then(tmp_path: Path) -> None:
    """L4: the checkpoint from which the branch went on is damaged, so that earlier steps are done again, as
    they were.
    """
    job = noting(tmp_path, 4, checkpoint={"save_every": 2})
    before = trained_on(tmp_path, job, 64, branch=False)
    run = Run.look(job)
    (shard,) = (tmp_path / run.checkpoints.folder(run.version_at(4))).glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    after = trained_on(
        tmp_path, noting(tmp_path, 6, checkpoint={"save_every": 2}, global_batch=8), 2 * 16 + 2 * 8
    )
    assert after[:32] == before[32:]
    assert before + after[32:] == [Cursor(64, 1, 0).at(position) for position in range(80)]


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 5},
        {"global_batch": 32},
        {"batch_ramp": {"start": 8, "increment": 8, "samples": 99}},
        {"data": {"dataset": "tests.support.toys:Sums", "sampling": "with_replacement"}},
    ],
    ids=str,
)
def test_l4_what_says_which_samples_are_drawn_begins_a_branch(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    """L4: only with the word."""
    Run.open(extending(tmp_path, 3))
    with pytest.raises(JobError, match=r"or take the new values with --branch"):
        Run.look(extending(tmp_path, 3, **changed))
    assert (
        Run.look(extending(tmp_path, 3, **changed), branch=True)
        .branch(0.0)
        .startswith("run has saved no step yet, so it begins anew at step 0, as branch 2: ")
    )
    job = Run.look(extending(tmp_path, 3, **changed)).job
    assert job.stretches() == extending(tmp_path, 3, **changed).stretches(), "no step came before"
    assert pickle.loads(pickle.dumps(job)).stretches() == job.stretches()


def test_two_commands_do_not_begin_the_same_branch(tmp_path: Path) -> None:
    """Each has looked at the run before it claimed it.  The control: who looks again may go on from the
    other's branch.
    """
    Run.open(extending(tmp_path, 3))
    slow = Run.look(extending(tmp_path, 5), branch=True)
    assert slow.claim("here") == 1
    quick = Run.look(extending(tmp_path, 4), branch=True)
    assert quick.branch(0.0, incarnation=quick.claim("there")).startswith("run has saved no step yet")
    with pytest.raises(Exists):
        slow.branch(0.0, incarnation=1)
    assert Run.find(slow.job).job.steps == 4, "the later claim has the later branch"
    again = Run.look(extending(tmp_path, 5), branch=True)
    assert ", as branch 3: " in again.branch(0.0, incarnation=again.claim("here"))
