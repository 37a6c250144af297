"""R1, R8, R14: every kind of fault, at every point, in every layout, many in a run; each run ends with the
bits of the undisturbed one.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.cli import main
from elastic.config.sections import WorkerFault
from elastic.runs.run import Run
from tests.actors.test_reshaped_settings import CASES, assert_held, disturbed, settings_of
from tests.support.chaos import Trial, assert_survived, assert_work, formed
from tests.support.job_file import to_toml
from tests.support.kills import (
    FATAL,
    LAYOUTS,
    POINTS,
    STEPS,
    Script,
    again_and_again,
    down_again,
    down_and_up,
    one_after_another,
    perform,
    there_and_back,
    undisturbed,
)
from tests.support.toys import LIGHT


def survives(script: Script, folder: Path, reference: Any) -> None:
    assert_survived(perform(script, folder, "kills"), reference, worlds=script.worlds, tiers=script.tiers)


@pytest.mark.full
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kind_at_every_point(tmp_path: Path, script_reference: Any, layout: str, point: str) -> None:
    """R1, R14; R8 where the point lies between two worlds: 3→2→3→2→3…"""
    survives(again_and_again(layout, point), tmp_path, script_reference)


@pytest.mark.full
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_down_to_one_and_up_again(tmp_path: Path, script_reference: Any, layout: str, number: int) -> None:
    """R1, R8, R14: 4→3→1→2→4; a second fault while forming or healing."""
    between, kind = ("forming", "healing")[number % 2], FATAL[number // 2]
    survives(down_and_up(layout, POINTS[number], between, kind), tmp_path, script_reference)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["replicate", "shard"])
def test_there_and_back(tmp_path: Path, script_reference: Any, layout: str) -> None:
    """R4: 4→3→2→4→1→3; replicas heal live each time, lost shards come from host memory, also where three of
    four workers die at once.
    """
    script = there_and_back(layout)
    assert script.worlds == [4, 3, 2, 4, 1, 3]
    survives(script, tmp_path, script_reference)


@pytest.mark.full
def test_replicas_one_after_another(tmp_path: Path, script_reference: Any) -> None:
    """R1, R4, R14: 2→1→2→1→2→1→2; each newcomer is healed live, and no step is lost."""
    strikes = [("backward", "SIGKILL", 1), ("before_update", "SIGKILL", 1), ("save", "SIGKILL", 1)]
    survives(one_after_another("replicate", 2, strikes), tmp_path, script_reference)


@pytest.mark.full  # in the default run shards are lost in test_respawn.py and test_nodes.py
@pytest.mark.parametrize("copies", [True, False], ids=["host", "bucket"])
def test_shards_one_after_another(tmp_path: Path, script_reference: Any, copies: bool) -> None:
    """R1, R4, R14: 3→2→3→2→3, each time from what the dead worker left in host memory; without copies, from
    the bucket.  World rank 0 is a victim too, so the others must tell what only it used to tell; at last a
    member raises."""
    strikes = [("forward", "SIGKILL", 1), ("before_update", "SIGSEGV", 0), ("before_update", "exception", 1)]
    survives(one_after_another("shard", 3, strikes, copies=copies), tmp_path, script_reference)


# replicas in the same script are in the default run, shards in test_respawn.py and test_nodes.py
@pytest.mark.full
def test_two_by_two_before_the_commit_and_while_forming(tmp_path: Path, script_reference: Any) -> None:
    """R1, R8, R14: 2×2→1×3→one waits→1×2→2×2."""
    survives(down_and_up("2x2", "before_commit", "forming", "SIGKILL"), tmp_path, script_reference)


@pytest.mark.full
def test_a_kill_while_weights_are_gathered(tmp_path: Path) -> None:
    """R1, R4, R14: 3→2→3→2→3→3.  With stage 2 of ZeRO a member dies, or raises, when the middle block has run
    and the weights of the next one are under way; the others find out when they wait for those of a later
    block.
    """
    deep = {"model_args": {"vocab": 29, "dim": 32, "layers": 8, "heads": 2, "dropout": 0.1}}
    script = one_after_another(
        "shard", 3, [("forward", "SIGKILL", 1), ("forward", "SIGSEGV", 0), ("forward", "exception", 1)]
    )
    chaos = perform(script, tmp_path, "gathers", parallel={"zero": 2}, **deep)
    assert_survived(chaos, undisturbed(tmp_path / "alone", **deep), worlds=script.worlds, tiers=script.tiers)
    logs = "".join(path.read_text() for path in tmp_path.glob("gathers/logs/*/*.log"))
    for fault in chaos.job.faults:
        broken = (
            f"(a collective of generation {fault.generation} failed|generation {fault.generation} is aborted)"
        )
        assert re.search(rf"parameters/gathers.py.*\n(.*\n){{1,20}}.*WorldBroken: {broken}", logs), broken


DOCUMENTS = CASES["documents"]
"""The settings of the run below: packed documents, gradients that are sent in bf16 and summed in buckets,
whole states.
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return settings_of(DOCUMENTS, tmp_path_factory.mktemp("data")) | {"steps": STEPS, **LIGHT}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any]) -> Any:
    return undisturbed(tmp_path_factory.mktemp("expected"), **settings)


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any]) -> tuple[Script, Trial]:
    """One run, kept for the negative controls."""
    script = down_again(down_and_up("replicate", "in_update", "healing", "exit"))
    return script, disturbed(script, tmp_path_factory.mktemp("survived"), "kills", settings)


@pytest.mark.must_run_in_ci
def test_replicas_in_the_update_and_while_healing(survived: tuple[Script, Trial], expected: Any) -> None:
    """C7, E6, R1, R4, R8, R14: 4→3→1→2→4→3→2→1, also between commit and update and in a save; a replica is
    left every time.
    """
    script, chaos = survived
    assert script.worlds == [4, 3, 2, 1, 2, 2, 4, 3, 3, 2, 1]
    assert set(script.tiers) == {"init", "live"}
    assert_survived(chaos, expected, worlds=script.worlds, tiers=script.tiers)
    assert_held(chaos, DOCUMENTS, least=9)


def test_what_the_wire_rounds_counts(tmp_path: Path, settings: dict[str, Any], expected: Any) -> None:
    """The control: gradients that are sent as they are have other bits."""
    assert undisturbed(tmp_path, **settings | {"reduction": {}}).hash != expected.hash


def test_a_crash_has_left_its_traceback(
    survived: tuple[Script, Trial], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R1, U10: the log of the member that died of a segmentation fault names the signal and the line of
    Python, and is in the bucket.
    """
    _, chaos = survived
    (crashed,) = chaos.witness.killed(by=signal.SIGSEGV)
    (tmp_path / "job.toml").write_text(to_toml(chaos.job))
    assert main(["logs", str(tmp_path / "job.toml"), crashed.worker]) == 0
    log = capsys.readouterr().out
    assert "killed by signal 11 (SIGSEGV)" in log
    assert "Fatal Python error: Segmentation fault" in log and "in strike" in log
    assert main(["logs", str(tmp_path / "job.toml"), "w99"]) == 1, "nobody of that name"


WRONG_FAULTS: dict[str, Callable[[WorkerFault], dict[str, Any]]] = {
    "another signal": lambda fault: {
        "kind": {"SIGKILL": "SIGSEGV", "SIGSEGV": "exit", "exit": "SIGKILL"}.get(fault.kind, fault.kind)
    },
    "another victim": lambda fault: {"world_rank": 2 if fault.generation == 1 else fault.world_rank},
    "another step": lambda fault: {"step": 9 if fault.generation == 1 else fault.step},
    "no victim": lambda fault: {"kind": "exception" if fault.generation == 1 else fault.kind},
    "nobody raised": lambda fault: {"kind": "exit" if fault.kind == "exception" else fault.kind},
}


@pytest.mark.parametrize("wrong", WRONG_FAULTS)
def test_a_fault_that_happened_otherwise_is_seen(
    survived: tuple[Script, Trial], expected: Any, wrong: str
) -> None:
    """Negative control: the same run, checked against faults that it did not have."""
    script, chaos = survived
    faults = [fault.model_dump() | WRONG_FAULTS[wrong](fault) for fault in chaos.job.faults]
    with pytest.raises(AssertionError):
        assert_survived(
            replace(chaos, job=chaos.job.replace(faults=faults)),
            expected,
            worlds=script.worlds,
            tiers=script.tiers,
        )


def test_a_step_dropped_or_done_twice_is_seen(survived: tuple[Script, Trial], expected: Any) -> None:
    """Negative control of the ledger."""
    script, chaos = survived
    for steps in ({s: o for s, o in chaos.ledger.items() if s != 9}, chaos.ledger | {9: chaos.ledger[8]}):
        with pytest.raises(AssertionError):
            assert_survived(replace(chaos, ledger=steps), expected, worlds=script.worlds, tiers=script.tiers)


def test_worlds_and_tiers_that_were_others_are_seen(survived: tuple[Script, Trial], expected: Any) -> None:
    """Negative control of the path and of the tier."""
    script, chaos = survived
    for wrong in (
        {"worlds": [*script.worlds, 3]},
        {"worlds": [4, 2, *script.worlds[2:]]},
        {"tiers": ["init", "bucket", *script.tiers[2:]]},
    ):
        with pytest.raises(AssertionError):
            assert_survived(chaos, expected, **({"worlds": script.worlds, "tiers": script.tiers} | wrong))


def test_work_done_again_in_secret_is_seen(survived: tuple[Script, Trial]) -> None:
    """Negative control: a second run from step 0 to the last fault, unknown to the journal, or known and
    beyond what the tier allows.
    """
    _, chaos = survived
    generations = formed(Run.open(chaos.job).records())
    work = chaos.witness.total("microbatches_run")
    assert_work(chaos.job, work, generations)
    last = generations[-1].step  # work up to the first fault could be what nine faults may cost
    for more, known in (
        (last * chaos.job.microbatches, 0),
        (0, 1),
        (-chaos.job.microbatches * (len(chaos.job.faults) + 1), 0),
    ):
        with pytest.raises(AssertionError):
            assert_work(
                chaos.job,
                work + more,
                [generations[0], replace(generations[1], redone=known), *generations[2:]],
            )


@pytest.mark.full  # the test above shows the same of a run that is made up
def test_a_run_that_begins_again_from_step_0_is_seen(tmp_path: Path, script_reference: Any) -> None:
    """Negative control: a single worker, and no save: the only copy is gone.  The bits are right all the
    same; the work is not.
    """
    script = Script("shard", 1, copies=False)
    script.form(1, "init")
    script.fault("forward", "SIGKILL", 0, 9)
    script.form(1, "init")
    chaos = perform(script, tmp_path, "kills", checkpoint={"save_every": 1000})
    assert (chaos.hash, chaos.losses) == (script_reference.hash, script_reference.losses)
    with pytest.raises(AssertionError, match="redone=8"):
        assert_survived(chaos, script_reference, worlds=script.worlds, tiers=script.tiers)
