"""A job trains along an axis that the product does not have, through all that a job passes: its settings,
the choice of a layout, seats, the warm-up, a death, healing, checkpoints and export.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.config.sections import COMING
from elastic.engine.parallelize import REWRITES
from elastic.plan.layout import Layout
from elastic.runs.run import Run
from tests.support.chaos import alone, assert_nothing_left, trial
from tests.support.toys import LIGHT, toy_job


def test_a_worker_of_a_tensor_group_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two model groups of two workers.  Nobody but this test may set ``parallel.tp``, so it lifts the refusal;
    the axis is ``tests/support/columns.py``.
    """
    monkeypatch.delitem(COMING, "tp")
    monkeypatch.setitem(REWRITES, "tp", lambda *_: None)  # the model's builder sets it; not for other tests
    settings = {
        **LIGHT,
        "model": "tests.support.columns:build_in_a_job",
        "steps": 8,
    }
    expected = alone(toy_job(tmp_path / "alone", name="local", **settings))
    chaos = trial(
        toy_job(
            tmp_path / "bucket",
            **settings,
            parallel={"tp": 2},
            workers={"min": 2, "max": 4},
            faults=[{"point": "backward", "step": 4, "world_rank": 3}],
        )
    )
    assert (chaos.result.state, chaos.hash, chaos.losses) == ("Finished", expected.hash, expected.losses)
    (killed,) = chaos.witness.killed()
    layouts = [
        Layout.from_json({name: value for name, value in did["plan"]["layout"].items() if name != "$"})
        for each in Run.open(chaos.job).records()
        for did in each["actions"]
        if did["$"] == "Form"
    ]
    assert layouts[:2] == [Layout(2, 1, (("tp", 2),)), Layout(1, 1, (("tp", 2),))], (
        "the mate of the dead worker has no group to train in, and the other group goes on"
    )
    assert 0 < killed.final["step"] < chaos.job.steps - 1
    assert_nothing_left(chaos)
