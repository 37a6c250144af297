"""A process is killed while it is in a loop of the user's: no bit changes, and each committed step has its
side effects.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from actors.launch import launch
from elastic.runs.run import Run
from tests.engine.test_own_schedule import cosine
from tests.support.chaos import alone, assert_nothing_left, trial
from tests.support.own_loops import steps_in
from tests.support.toys import LIGHT, toy_job

STEPS = 12
OWN = {
    "optim": {"kind": "tests.support.own_optimizers:LION", "lr": 3e-3, "betas": [0.9, 0.99]},
    "schedule": {"kind": "tests.engine.test_own_schedule:cosine"},
    **LIGHT,
}
FULL = pytest.mark.full


@pytest.mark.parametrize(
    "place",
    [
        "uncommitted 6",
        *(
            pytest.param(f"{where} 6", marks=FULL)
            for where in ("before", "microbatch", "committed", "effect")
        ),
    ],
)
def test_u4_a_kill_inside_the_users_code(tmp_path: Path, place: str) -> None:
    """U4, L13: the hash is that of the undisturbed run, whose loop is ours, and each committed step has its
    side effects, in order.  Loop, optimizer and schedule are files outside of the package.  The coordinator,
    which does not ask the schedule, knows the rates by formula.

    Only the last steps before the kill, of which the bucket had no note, have them once more: those of a
    process that dies among the side effects themselves do.
    """
    expected = alone(toy_job(tmp_path / "alone", name="local", steps=STEPS, **OWN))
    bucket = tmp_path / "bucket"
    (bucket / "dies").mkdir(parents=True)
    (bucket / "dies" / place).touch()
    chaos = trial(
        toy_job(bucket, steps=STEPS, loop="tests.support.own_loops:told", checkpoint={"save_every": 4}, **OWN)
    )
    assert chaos.losses[-1] < chaos.losses[0]
    assert (chaos.result.state, chaos.hash, chaos.losses) == ("Finished", expected.hash, expected.losses)
    assert not (bucket / "dies" / place).exists()
    (killed,) = chaos.witness.killed()
    assert killed.ended is not None and killed.ended.signal == signal.SIGKILL
    assert {outcome.generation for outcome in chaos.ledger.values()} > {1}
    told = steps_in(bucket / "committed")
    once, again = next(n for n in range(STEPS, 0, -1) if told[:n] == [*range(1, n + 1)]), len(told) - STEPS
    assert told == [*range(1, once + 1), *range(once + 1 - again, STEPS + 1)]
    assert (once, again > 0) == (6, True) if place == "effect 6" else once in (5, 6, STEPS)
    tried = steps_in(bucket / "tried")
    assert len(tried) > len({*tried}), (
        "the control: what stands between two steps has run more than once for a step"
    )
    rows = [
        json.loads(line)
        for file in sorted((bucket / "toy" / "metrics").iterdir())
        for line in file.read_text().splitlines()
    ]
    assert {row["step"]: row["user/double"] for row in rows if "user/double" in row}.items() >= {
        (s, 2 * s) for s in range(1, 6)
    }
    assert [row["lr"] for row in rows] == pytest.approx(
        [3e-3 * cosine(step, STEPS) for step in range(1, STEPS + 1)], rel=1e-15
    )
    assert_nothing_left(chaos)


@pytest.mark.parametrize(
    ("how", "place", "why"),
    [
        pytest.param("one", "", "it is good enough", marks=FULL),
        ("one breaks", "", "the loop was left"),
        pytest.param("all", "asked", "it is good enough", marks=FULL),
        ("break", "", "the loop was left"),
        pytest.param("break", "committed", "the loop was left", marks=FULL),
        pytest.param("all", "committed", "it is good enough", marks=FULL),
    ],
)
def test_u4_a_loop_ends_the_run_for_all_workers(tmp_path: Path, how: str, place: str, why: str) -> None:
    """U4: the run ends with step 3, whoever asks for it, and over a kill at that moment.  The same command
    does nothing more.

    What comes after a `break` may take longer than ``stall_s``.  Whoever breaks off validates nothing: others
    may be in the next step.
    """
    more = {
        "schedule": {"kind": "constant"},
        "workers": {"min": 1, "max": 2},
        "deadlines": {"stall_s": 4},
        **LIGHT,
    }
    expected = alone(toy_job(tmp_path / "alone", name="local", steps=3, **more))
    bucket = tmp_path / "bucket"
    for folder in ("dies", "how"):
        (bucket / folder).mkdir(parents=True)
    (bucket / "how" / how).touch()
    (bucket / "how" / "long").touch() if how == "break" else None
    (bucket / "dies" / place).touch() if place else None
    job = toy_job(
        bucket,
        steps=6,
        loop="tests.support.own_loops:ends",
        validation={"every": 6},
        export={"every": 1000},
        **more,
    )
    chaos = trial(job)
    assert (chaos.result.state, chaos.result.step, chaos.result.exit_code, chaos.hash) == (
        "Finished",
        3,
        0,
        expected.hash,
    )
    reasons = " ".join(record["reason"] for record in Run.open(job).records())
    assert (
        f"step 3 is the last: {why}" in reasons
        and f"finished at step 3: {why}" in reasons
        and why in chaos.result.reason
    )
    assert len(chaos.witness.killed()) >= bool(place) and {*steps_in(bucket / "after")} == {3}
    assert ("and the loops of other workers wait for it" in reasons) is (how == "one breaks")
    cut_off = "break" in how or place == "committed"  # who dies after the commit does not validate
    assert ("no member moved" in reasons) is False and (
        "the last validation was cut off" in reasons
    ) is cut_off
    assert [*bucket.glob("toy/exports/*3")], "what the last step owes is done"
    again = launch(job, show=lambda line: None)
    assert (again.state, again.step, again.reason) == (
        "Finished",
        3,
        f"finished: step 3 is in the bucket: {why}",
    )
    assert_nothing_left(chaos)
