"""``elastic chaos``: faults that are drawn, performed on a run that lives, and written down."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from actors.chaos import Chaos, Hand, Strike
from actors.cli import main
from actors.launch import launch
from actors.living import attach
from actors.view import View
from elastic.data.cursor import Cursor
from elastic.ids import Version
from elastic.protocol.faults import Fault, Kind, Point, to_json
from elastic.report.story import Line, Sentence
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from storage.objects import ObjectStore
from tests.support.chaos import Witness, assert_nothing_left, exported_hash, formed, samples, trial
from tests.support.commands import assert_no_actor_left
from tests.support.job_file import to_toml
from tests.support.patience import PATIENCE_S
from tests.support.processes import ENDED, state
from tests.support.toys import toy_job

STEPS, GATE = 60, 20
SAMPLES = 16 * STEPS


def test_what_cannot_be_performed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = toy_job(tmp_path, name="refused")
    with pytest.raises(ValueError, match="partition cannot be performed here; use one of SIGABRT, "):
        Chaos(job, [Fault(1.0, Kind.PARTITION)])
    with pytest.raises(
        ValueError,
        match=(
            r"point = 'forward' of kind = 'slow': only .* leave point out, or "
            r"take one of SIGKILL, "
        ),
    ):
        Chaos(job, [Fault(1.0, Kind.SLOW, point=Point.FORWARD)])
    with pytest.raises(
        ValueError,
        match=(
            r"duration_s = 3 of kind = 'SIGSTOP' at point = 'save': .* leave "
            r"out point or duration_s"
        ),
    ):
        Chaos(job, [Fault(1.0, Kind.SIGSTOP, duration_s=3.0, point=Point.SAVE)])
    (tmp_path / "job.toml").write_text(to_toml(job))
    assert main(["chaos", str(tmp_path / "job.toml"), "--kinds", "earthquake"]) == 1
    assert "--kinds: 'earthquake' is no kind of fault; use one of SIGABRT, " in capsys.readouterr().out


def test_a_fault_that_found_no_victim_says_so() -> None:
    """The control is a fault that found one."""
    missed = Strike(
        3,
        0.0,
        {"kind": "node_kill"},
        "",
        0,
        "Running",
        1,
        5,
        "there was no process that this fault could strike",
    )
    assert str(missed) == (
        "chaos 3: node_kill was not performed at step 5 of generation 1, Running: there was no "
        "process that this fault could strike"
    )
    struck = replace(missed, victim="node 1234abcd", failed="")
    assert str(struck) == "chaos 3: node_kill of node 1234abcd at step 5 of generation 1, Running"


def test_a_hand_rests_when_what_it_stopped_goes_on_or_has_ended() -> None:
    hand = Hand()
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        hand.signal(sleeper.pid, "SIGSTOP", 0.2)
        hand.rest()
        assert state(sleeper.pid) not in ("T", *ENDED)
        hand.signal(sleeper.pid, "SIGSTOP", 600.0)
        sleeper.kill()
        hand.rest()


def test_a_hand_rests_when_its_notice_is_withdrawn() -> None:
    told: list[tuple[str, float | None]] = []
    keeper = SimpleNamespace(announce=SimpleNamespace(remote=lambda *word: told.append(word)))
    hand = Hand()
    hand.spare(keeper, 0.1)
    assert told == []
    hand.rest()
    assert told == [("chaos", None)]


@pytest.mark.full
def test_a_script_is_performed_on_a_run_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command strikes a run of another thread of this process: a stop that thaws, an exception in
    forward, a kill in backward.

    The bits are the same.
    """
    data = {"dataset": "tests.support.toys:Sums", "args": {"read_s": 0.04}}
    job = toy_job(
        tmp_path, name="struck", steps=STEPS, data=data, deadlines={"grow_debounce_s": 1, "stall_s": 10}
    )
    reference = toy_job(tmp_path / "reference", name="local", steps=STEPS)
    assert run_local(reference, lambda line: None)[0] == "Finished"
    results: list[str] = []
    lines: list[Line] = []
    training = threading.Thread(target=lambda: results.append(launch(job, show=lines.append).state))
    training.start()
    until_it_steps(job.name)
    (tmp_path / "job.toml").write_text(to_toml(job))
    faults = [
        Fault(0.0, Kind.SIGSTOP, 0, 0.5),
        Fault(1.0, Kind.EXCEPTION, 1, point=Point.FORWARD),
        Fault(2.0, Kind.SIGKILL, 1, state="Running", point=Point.BACKWARD),
    ]
    (tmp_path / "script.json").write_text(to_json(faults))
    assert main(["chaos", str(tmp_path / "job.toml"), "--script", str(tmp_path / "script.json")]) == 0
    shown = capsys.readouterr().out
    training.join(PATIENCE_S)
    assert results == ["Finished"], (lines[-20:], shown)
    assert exported_hash(job) == exported_hash(reference)
    assert_no_actor_left(job.name)
    (key,) = ObjectStore.open(job.bucket).list(f"{job.name}/chaos/")
    told = [json.loads(line) for line in ObjectStore.open(job.bucket).get(key).splitlines()]
    assert [(each["fault"]["kind"], each["failed"], each["state"]) for each in told] == [
        ("SIGSTOP", "", "Running"),
        ("exception", "", "Running"),
        ("SIGKILL", "", "Running"),
    ]
    assert all(each["victim"] in ("w1", "w2") and each["pid"] and 3 <= each["step"] < STEPS for each in told)
    assert f"3 of 3 faults performed, written to {job.bucket}/{key}" in shown
    events = [record["event"] for record in Run.open(job).records()]
    assert [each["worker"] for each in events if each["$"] == "Broken" and each["cause"] == "job"] == [
        told[1]["victim"]
    ]
    assert told[2]["victim"] in [each["worker"] for each in events if each["$"] == "Lost"]
    assert main(["chaos", str(tmp_path / "job.toml")]) == 2, "it is over: that is said, and nothing is struck"
    assert "struck is not running" in capsys.readouterr().out


@pytest.mark.full
def test_a_checkpoint_is_damaged_when_it_is_needed_and_clocks_differ(tmp_path: Path) -> None:
    """R11: shards have only the bucket; a checkpoint that cannot be read there is put away, and the one
    before it is taken (``bucket_damage``).  Meanwhile one worker counts its lease by a clock that is too
    fast, the other by one that is too slow (``clock_skew``)."""
    gates = {str(Cursor(SAMPLES, 16, 0, "permutation").microbatch_ids(GATE, 0, 2)[0]): str(tmp_path / "gate")}
    args = {"samples": SAMPLES, "read_s": 0.02, "gates": gates}
    job = toy_job(
        tmp_path,
        name="damaged",
        steps=STEPS,
        data={"dataset": "tests.support.toys:Sums", "args": args},
        parallel={"dp_replicate": 1},
        copies={"copy_every": 0},
        workers={"min": 1, "max": 2},
        checkpoint={"save_every": 6},
        deadlines={"grow_debounce_s": 8, "lease_s": 6},
    )
    reference = toy_job(
        tmp_path / "alone",
        name="local",
        steps=STEPS,
        data={"dataset": "tests.support.toys:Sums", "args": args},
    )
    faults = [Fault(0.0, Kind.CLOCK_SKEW, 0, amount=0.02), Fault(0.0, Kind.CLOCK_SKEW, 1, amount=-0.02)]
    chaos = Chaos(job, [*faults, Fault(0.0, Kind.BUCKET_DAMAGE), Fault(0.0, Kind.SIGKILL, 1)])
    run = Run.open(job)

    def act(witness: Witness, view: View) -> bool:
        if (
            view.state == "Running"
            and view.step >= GATE - 1
            and GATE - 2 in [each.step for each in run.state().history.saved]
        ):
            chaos.heed(view)
        if not chaos.pending:
            (tmp_path / "gate").touch()
        return not chaos.pending

    struck = trial(job, act)
    chaos.close()
    assert run_local(reference, lambda line: None)[0] == "Finished"
    assert [each.fault["kind"] for each in chaos.performed] == [
        "clock_skew",
        "clock_skew",
        "bucket_damage",
        "SIGKILL",
    ], chaos.strikes
    damaged = Version(GATE - 2, 1)
    assert chaos.performed[2].victim == f"the checkpoint of {damaged}"
    told = [line.text for line in struck.lines if isinstance(line, Sentence)]
    assert [
        text
        for text in told
        if f"the checkpoint of {damaged} is damaged" in text and "is used instead" in text
    ], told
    assert (struck.result.state, struck.hash) == ("Finished", exported_hash(reference))
    assert [(each.tier, each.step) for each in formed(run.records())][1] == ("bucket", damaged.step)
    assert GATE - 8 in [each.step for each in formed(run.records())]
    assert [step for step, _ in samples(struck.ledger)] == list(range(1, STEPS + 1))
    assert_nothing_left(struck)


def until_it_steps(name: str) -> None:
    """Waits until the run has taken three steps; it needs seconds to begin."""
    waited, until = threading.Event(), time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        coordinator = attach(name)
        if coordinator is not None and ray.get(coordinator.view.remote(10**9)).step >= 3:
            return
        waited.wait(0.05)
    raise AssertionError(f"{name} does not step")
