"""L2, L5: no row and no validation is lost when a run leaves its journal: it goes on in one process, is forked, or goes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.protocol.commit_record import Validated
from elastic.report.story import Scored
from elastic.runs import resume, validations
from elastic.runs.metrics import rows_of
from elastic.runs.run import Run
from elastic.train import local
from elastic.train.local import run_local
from elastic.train.validation import validate
from tests.runs.test_forks import job_of, trained

pytestmark = pytest.mark.fast


def measured(run: Run) -> dict[int, float]:
    return {version.step: loss.mean for version, (_, loss) in validations.stored(run.store, run.job.name).items()}


def test_l5_a_validation_that_ctrl_c_ends_is_made_and_noted_by_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L5: a stop saves, and so the row is stored without it.  The judge is a run that nobody has stopped."""
    jobs = [job_of(tmp_path / name, validation={"every": 2, "args": {"samples": 16}}) for name in ("judge", "run")]
    trained(jobs[0])

    def ctrl_c(*args: Any) -> Validated:
        if args[-1] == 4:
            raise KeyboardInterrupt
        return validate(*args)

    with monkeypatch.context() as patched:
        patched.setattr(local, "validate", ctrl_c)
        assert run_local(jobs[1], lambda line: None)[::2] == ("Stopped", 4)
    runs = [Run.find(job) for job in jobs]
    assert [*measured(runs[1])] == [2], "the control"
    trained(jobs[1])
    expected, found = ({row["step"]: row.get("validation_loss") for row in rows_of(run)} for run in runs)
    assert [step for step, loss in expected.items() if loss] == [2, 4, 6] and found == expected
    assert measured(runs[0]) == measured(runs[1])
    best = [resume.best_of(run) for run in runs]
    assert None not in best and best[0].loss == best[1].loss  # type: ignore[union-attr]


def test_l5_what_is_validated_again_counts_as_it_was_first(tmp_path: Path) -> None:
    """L5: each start validates its first state.  On other samples that is another number, of which one alone would count by chance."""
    job = job_of(tmp_path, validation={"every": 2, "args": {"samples": 16}})
    trained(job)
    first = measured(Run.find(job))
    lines = trained(job_of(tmp_path, steps=8, validation={"every": 2, "args": {"samples": 8}}), branch=True)
    again = {line.step: line.loss for line in lines if isinstance(line, Scored)}
    assert measured(Run.find(job)) == again | first and again[6] != first[6]
