"""State that lives in host memory (``offload``), in real runs: who keeps its part in a recovery reads and
copies nothing.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest

from actors.launch import launch
from elastic.report.story import Line, Sentence
from elastic.runs.run import Run
from tests.support.chaos import alone, assert_nothing_left, assert_survived, formed, trial
from tests.support.commands import assert_no_actor_left
from tests.support.kills import one_after_another, perform
from tests.support.mischief import STEP
from tests.support.toys import toy_job

OFFLOADED: dict[str, Any] = {"offload": "optimizer", "parallel": {"zero": 2}}
READ = ("healed_live_bytes", "healed_host_bytes", "healed_bucket_bytes")


def open_below(folder: Path) -> list[str]:
    """Returns the files of ``folder`` that a process of this machine has open, also those without a name."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            found.append(os.readlink(entry))
    return [link for link in found if link.startswith(f"{folder}/")]


@pytest.mark.full
@pytest.mark.parametrize("medium", ["memory", "files", "weights"])
def test_a_survivor_takes_its_part_from_where_it_lies(tmp_path: Path, medium: str) -> None:
    """F3, F4, R1, R2: of two workers, one is killed after it has written its part of an update, the other in
    a later step.

    They share the state.  Each time a newcomer takes the dead one's part, from host memory.  The survivor has
    only to forget the update that the dead one did not end, and reads nothing.
    """
    expected = alone(toy_job(tmp_path / "alone", name="local", steps=16))
    faults = [
        {"point": "in_update", "step": 6, "world_rank": 1},
        {"point": "backward", "step": 11, "world_rank": 0, "generation": 2},
    ]
    disk = tmp_path / "disk"
    disk.mkdir()
    with TemporaryFile(dir=disk):
        assert open_below(disk), "a file without a name would be found"
    settings = OFFLOADED | (
        {"offload_folder": str(disk), "offload_buffer_gb": 1e-4} if medium == "files" else {}
    )
    settings |= {"offload": "weights"} if medium == "weights" else {}
    settings |= {"workers": {"min": 2, "max": 2}, "checkpoint": {"save_every": 4}}
    job = toy_job(tmp_path / "killed", steps=16, faults=faults, **settings)
    chaos = trial(job)
    assert (chaos.result.state, chaos.hash, chaos.losses) == ("Finished", expected.hash, expected.losses)
    first, second, third = formed(Run.open(job).records())
    assert [(each.tier, each.step, each.redone) for each in (second, third)] == [
        ("host", 5, 1),
        ("host", 10, 0),
    ]
    (survivor,) = {*first.members} & {*second.members}
    assert second.members.index(survivor) == first.members.index(survivor) == 0, "it keeps its part"
    seen = chaos.witness.seen
    assert [seen[survivor].final[field] for field in READ] == [0, 0, 0] and seen[survivor].final[
        "updates_applied"
    ] == 11
    for newcomer in ({*second.members} | {*third.members}) - {*first.members}:
        assert seen[newcomer].final["healed_host_bytes"] > 0 == seen[newcomer].final["healed_bucket_bytes"]
    assert_nothing_left(chaos)
    assert not [*disk.iterdir()] and not open_below(disk), "no file is left, with a name or without"


@pytest.mark.full  # tests/control/test_membership.py has the rule
def test_a_folder_that_a_node_has_not_is_said_once(tmp_path: Path) -> None:
    """Four workers of the node miss it: one sentence names the setting, the node and the fix.  The run ends
    as if the job were refused.
    """
    job = toy_job(
        tmp_path, **OFFLOADED | {"offload_folder": str(tmp_path / "gone"), "workers": {"min": 1, "max": 4}}
    )
    lines = list[Line]()
    result = launch(job, show=lines.append)
    assert (result.state, result.step, result.exit_code) == ("Failed", 0, 1), result
    texts = [line.text for line in lines if isinstance(line, Sentence) and "offload_folder" in line.text]
    told = [text for text in texts if "is refused" in text]
    assert len(told) == 1 and all(
        "no node has room for another worker" in text for text in texts if text not in told
    ), texts
    said = (
        rf"cannot start on node \w{{8}} \(.*\): offload_folder = '{tmp_path}/gone' is not a folder in "
        r"which .*; make it on every node"
    )
    assert re.search(said, told[0]) and re.search(said, result.reason)
    assert_no_actor_left(job.name)


@pytest.mark.full
@pytest.mark.parametrize("believed", [False, True], ids=["looked at", "control"])
def test_a_file_that_changed_is_no_state(tmp_path: Path, believed: bool) -> None:
    """F4: the update that reads the changed version ends its worker, and no world takes that version: the
    bits are those of another run.

    The control: where the update does not look, the run ends with other bits, and nobody notices.
    """
    expected = alone(toy_job(tmp_path / "alone", name="local", steps=12))
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = OFFLOADED | {
        "offload_folder": str(disk),
        "offload_buffer_gb": 1e-4,
        "workers": {"min": 2, "max": 2},
    }
    loss = f"tests.support.mischief:bent_file{'_believed' if believed else ''}"
    chaos = trial(toy_job(tmp_path / "bent", steps=12, loss=loss, checkpoint={"save_every": 4}, **settings))
    assert chaos.result.state == "Finished"
    worlds = formed(Run.open(chaos.job).records())
    if believed:
        assert chaos.hash != expected.hash and len(worlds) == 1
        return
    assert (chaos.hash, chaos.losses) == (expected.hash, expected.losses)
    assert worlds[-1].step < STEP - 1, "the version that changed is no more taken for state"
    assert worlds[0].members[0] not in worlds[-1].members, "the worker was replaced"
    assert any("cannot go on (device: state in files of" in str(line) for line in chaos.lines)


@pytest.mark.full
@pytest.mark.parametrize("offload", ["optimizer", "weights"])
def test_workers_share_the_state_anew_whenever_one_comes_or_goes(
    tmp_path: Path, script_reference: Any, offload: str
) -> None:
    """F3, R1, R4, R14: 3→2→3→2→3→3, with a kill in an update and one in a step; at last a member raises in an
    update.
    """
    script = one_after_another(
        "shard", 3, [("in_update", "SIGKILL", 1), ("forward", "SIGSEGV", 0), ("in_update", "exception", 1)]
    )
    chaos = perform(script, tmp_path, "offloaded", **OFFLOADED | {"offload": offload})
    assert_survived(chaos, script_reference, worlds=script.worlds, tiers=script.tiers)
