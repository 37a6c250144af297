"""A worker may start for longer than ``form_s``, as one does that takes a hundred gigabytes for copies; only
standing still is limited.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import ray
from torch import nn

from elastic.report.story import Sentence
from tests.support.chaos import assert_nothing_left, trial
from tests.support.patience import PATIENCE_S
from tests.support.toys import Own, Sums, toy_job

FORM_S = 8.0
LONG_S = 0.8 * FORM_S
_built: list[bool] = []


def _in_a_worker() -> bool:
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


class Slow(Sums):
    """A dataset that a worker needs long to open; ``stuck``, if it is named, is the file by which the first
    worker never opens it.
    """

    def __init__(self, stuck: str = "", **args: Any) -> None:
        super().__init__(**args)
        if _in_a_worker():
            first = bool(stuck) and not Path(stuck).exists()
            if first:
                Path(stuck).touch()
            time.sleep(PATIENCE_S if first else LONG_S)


def slowly() -> nn.Module:
    """Returns the toy model, the first time in a worker after a long time."""
    if _in_a_worker() and not _built:
        _built.append(True)
        time.sleep(LONG_S)
    return Own()


@pytest.mark.full
@pytest.mark.parametrize("stuck", [False, pytest.param(True, marks=pytest.mark.full)])
def test_form_s_limits_only_a_start_that_stands_still(tmp_path: Path, stuck: bool) -> None:
    """Its data and its model take w1 longer than ``form_s``, which begins anew with each, so it joins.  The
    control: a worker that never opens its data is ended, with a sentence that says what it did, and the next
    one joins."""
    args = {"stuck": str(tmp_path / "stuck")} if stuck else {}
    job = toy_job(
        tmp_path,
        name="slow",
        steps=2,
        model="tests.actors.test_slow_start:slowly",
        model_args={},
        data={"dataset": "tests.actors.test_slow_start:Slow", "args": args},
        workers={"min": 1, "max": 1},
        deadlines={"form_s": FORM_S, "grow_debounce_s": 1},
    )
    began = time.monotonic()
    done = trial(job, hash_it=False)
    told = [line.text for line in done.lines if isinstance(line, Sentence)]
    ended = [text for text in told if "neither joined nor made progress" in text]
    assert done.result.state == "Finished" and time.monotonic() - began > 2 * LONG_S > FORM_S
    assert any("is still starting" in text for text in told), told
    first = "w1 neither joined nor made progress for 8 s; w1 imports the job's code and opens its data"
    assert [text[: len(first)] for text in ended] == ([first] if stuck else []), told
    assert_nothing_left(done)
