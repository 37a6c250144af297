"""L4: a run goes on with other settings, from a step on, if it is asked to in a word; what cannot change is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.launch import launch
from elastic import branches
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.report.story import Sentence
from elastic.runs import Run
from storage.errors import Exists
from storage.objects import ObjectStore
from tests.support.chaos import alone, exported_hash
from tests.support.toys import toy_job

CONSTANT = {"kind": "constant"}


def extending(folder: Path, steps: int, **changes: Any) -> Job:
    return toy_job(folder, **{"name": "run", "steps": steps, "schedule": CONSTANT} | changes)


def trained(job: Job, *, branch: bool = False) -> list[str]:
    """Trains in this process, and returns the sentences."""
    said: list[str] = []
    result = launch(job, local=True, branch=branch, show=lambda line: said.append(line.text) if isinstance(line, Sentence) else None)
    assert result.state == "Finished"
    return said


def begun(folder: Path) -> list[tuple[int, int, dict[str, Any]]]:
    store = ObjectStore.open(str(folder))
    return [(each["number"], each["step"], each["changed"]) for each in branches.every(store, "run")]


def test_l4_an_extended_run_has_the_bits_of_a_longer_one(tmp_path: Path) -> None:
    """L4: twice extended.  The control: with another learning rate from step 4 on, other bits."""
    longer = alone(toy_job(tmp_path / "longer", name="longer", steps=8, schedule=CONSTANT))
    trained(extending(tmp_path, 4))
    said = trained(extending(tmp_path, 6), branch=True)
    assert any(text.startswith("branch 2 of run goes on from step 4: steps = 4 before and 6 now") for text in said)
    trained(extending(tmp_path, 8), branch=True)
    assert exported_hash(extending(tmp_path, 8)) == longer.hash
    assert begun(tmp_path) == [(2, 4, {"steps": [4, 6]}), (3, 6, {"steps": [6, 8]})]
    other, faster = tmp_path / "other", {"optim": {"lr": 3e-2}}
    trained(extending(other, 4))
    trained(extending(other, 8, **faster), branch=True)
    assert exported_hash(extending(other, 8, **faster)) not in ("", longer.hash)


def test_l4_the_run_has_the_settings_of_its_newest_branch(tmp_path: Path) -> None:
    """L4: without the word nothing changes and nothing is written; with it the old settings are the others from then on."""
    trained(extending(tmp_path, 3))
    with pytest.raises(JobError, match=r"\(steps = 3 there and 5 here\).*or go on with these by --branch"):
        trained(extending(tmp_path, 5))
    assert not (tmp_path / "run" / "branches").exists()
    trained(extending(tmp_path, 5), branch=True)
    with pytest.raises(JobError, match=r"\(steps = 5 there and 3 here\)"):
        Run.look(extending(tmp_path, 3))
    assert Run.look(extending(tmp_path, 5)).job.steps == 5 and Run.find(extending(tmp_path, 3)).job.steps == 5
    with pytest.raises(JobError, match="steps = 3: the run 'run' is at step 5 already; ask for more steps"):
        trained(extending(tmp_path, 3), branch=True)
    trained(extending(tmp_path, 5), branch=True)
    assert len(begun(tmp_path)) == 1, "the word alone begins nothing"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optim": {"kind": "sgd"}}, "the state of that run does not fit another value of optim.kind"),
        ({"model_args": {"vocab": 29, "dim": 64}}, "does not fit another value of model_args"),
        ({"seed": 5}, "with another value of seed it would leave out samples, or repeat them"),
        ({"global_batch": 32}, "with another value of global_batch it would leave out samples, or repeat them"),
        ({"data": {"dataset": "tests.support.toys:Sums", "sampling": "with_replacement"}}, "another value of data.sampling it would"),
    ],
    ids=str,
)
def test_l4_what_cannot_change_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    """L4: also with the word.  The control is the test above."""
    Run.open(extending(tmp_path, 3))
    with pytest.raises(JobError) as refused:
        Run.look(extending(tmp_path, 3, **changes), branch=True)
    assert says in str(refused.value)


def test_two_commands_do_not_begin_the_same_branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Run.open(extending(tmp_path, 3))
    found, store = extending(tmp_path, 3), ObjectStore.open(str(tmp_path))
    branches.begin(store, extending(tmp_path, 4), found, Version(3, 1), 0.0)
    assert Run.find(found).job.steps == 4
    monkeypatch.setattr(branches, "_newest", lambda *_: 1)  # as it was when the other command looked
    with pytest.raises(Exists):
        branches.begin(store, extending(tmp_path, 5), found, Version(3, 1), 0.0)
