"""R5: a node that will be taken leaves the world before its deadline; nothing is lost, and nothing is done twice.

The head has room for one worker, the node that is taken for the two others.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import ray

from actors.chaos import Chaos
from actors.living import attach
from actors.view import View
from elastic.data.cursor import Cursor
from elastic.protocol.faults import Fault, Kind
from elastic.runs.run import Run
from tests.support.chaos import Trial, Witness, assert_nothing_left, formed, samples, trial
from tests.support.kills import SAMPLES, Script, undisturbed
from tests.support.nodes import Joined, Node, joined
from tests.support.patience import PATIENCE_S
from tests.support.toys import LIGHT

CPUS = 5
"""CPUs of one worker; the head has 8, so it has room for one."""
NOTICE_AT = 6
"""Step after which the notice comes."""
SHORT, PACE_S = 40, 0.1
"""Steps of a short run, and seconds of a read until the machine was taken: within the five seconds before, three
workers do not come to the last step, which waits for that.
"""
LONG = pytest.mark.full


class Taken:
    """Gives notice for the node with two workers, and takes it ``lead_s`` seconds later.

    With ``withdrawn`` the notice is withdrawn instead.  ``state`` is the state of the run in which the notice
    comes.  With ``kills_coordinator`` the coordinator dies at that moment.
    """

    look_s = 0.02

    def __init__(
        self,
        folder: Path,
        nodes: Joined,
        lead_s: float,
        *,
        state: str = "Running",
        withdrawn: bool = False,
        kills_coordinator: bool = False,
    ) -> None:
        self.file, self.nodes, self.lead_s = folder / "n0" / "notice", nodes, lead_s
        self.state, self.withdrawn, self.kills_coordinator = state, withdrawn, kills_coordinator
        self.gate = folder / "taken"
        self.deadline = 0.0
        self.over = False

    def __call__(self, witness: Witness, view: View) -> bool:
        started = view.step >= NOTICE_AT or self.state != "Running"
        if not self.deadline and view.state == self.state and started:
            self.deadline = time.time() + self.lead_s
            if self.kills_coordinator and (coordinator := attach(witness.job_name)) is not None:
                ray.kill(coordinator, no_restart=False)
            self.file.write_text(f"{self.deadline}\n")
        elif self.deadline and not self.over and time.time() >= self.deadline:
            self.over = True
            if self.withdrawn:
                self.file.unlink()
            else:
                self.nodes.cut_power("n0")
            self.gate.touch()
        return False


def paced(gate: Path) -> dict[str, Any]:
    """Returns the data of a short run, which is slow, and whose last step cannot be read, before ``gate``
    exists.
    """
    last = Cursor(SAMPLES, 16, 0, "permutation").ids(SHORT)[0]
    args = {"samples": SAMPLES, "calm": str(gate), "pace_s": PACE_S, "gates": {str(last): str(gate)}}
    return {"data": {"dataset": "tests.support.toys:Paced", "args": args}}


def noticed(
    folder: Path,
    layout: str,
    lead_s: float,
    *,
    steps: int = 150,
    changes: Mapping[str, Any] = MappingProxyType({}),
    **how: Any,
) -> tuple[Trial, Taken, Any]:
    """Returns a trial with a notice, what gave it, and the undisturbed run."""
    script = Script(layout, 3)
    (folder / "n0").mkdir()
    (folder / "notices").mkdir()
    settings: dict[str, Any] = {
        "steps": steps,
        **LIGHT,
        "copies": {"copy_every": 1, "buddy_every": 1},
        "checkpoint": {"save_every": 100},
        "notices": {"sources": ["file"], "file": f"{folder}/notices/notice"},
        "workers": {"min": 1, "max": 3, "cpus": CPUS},
        **(paced(folder / "taken") if steps == SHORT else {}),
        **changes,
    }
    with ExitStack() as stack:
        node = Node("n0", 2 * CPUS, instead={folder / "notices": folder / "n0"})
        taken = Taken(folder, stack.enter_context(joined(folder, node)), lead_s, **how)
        chaos = trial(script.job(folder, "noticed", **settings), taken)
    return chaos, taken, undisturbed(folder / "alone", steps=steps, **LIGHT, **changes)


def assert_same(chaos: Trial, reference: Any) -> None:
    """Checks that the run ended as the undisturbed one: bits, losses and samples, each step once."""
    assert chaos.result.state == "Finished", chaos.result
    assert (chaos.hash, chaos.losses) == (reference.hash, reference.losses)
    assert samples(chaos.ledger) == samples(reference.ledger)
    assert_nothing_left(chaos)


def went(chaos: Trial, generation: int) -> float:
    """Returns the time at which the world of ``generation`` began to step."""
    return next(
        record["at"]
        for record in Run.open(chaos.job).records()
        for action in record["actions"]
        if action["$"] == "Go" and action["generation"] == generation
    )


@pytest.mark.must_run_in_ci
@pytest.mark.parametrize(
    ("layout", "tier"), [("shard", "host"), pytest.param("replicate", "live", marks=LONG)]
)
def test_r5_a_node_with_notice_is_out_before_it_is_taken(tmp_path: Path, layout: str, tier: str) -> None:
    """No step is lost or done again, even if only the node that leaves has a part of the newest state."""
    chaos, taken, reference = noticed(tmp_path, layout, lead_s=5.0, steps=SHORT)
    worlds = formed(Run.open(chaos.job).records())
    assert [(len(each.members), each.tier, each.redone) for each in worlds] == [(3, "init", 0), (1, tier, 0)]
    assert taken.over, "the machine was taken while the run went on"
    assert went(chaos, 2) < taken.deadline, "the world was out before"
    assert_same(chaos, reference)


@LONG
@pytest.mark.parametrize("lead_s", [20.0, 5.0, 2.0])
@pytest.mark.parametrize(
    "phase", ["start-up", "forming", "validation", "save", "finishing", "coordinator gone", "compile"]
)
def test_r5_in_every_phase(tmp_path: Path, phase: str, lead_s: float) -> None:
    """The run may be anywhere when the notice comes, and the notice may come late: bits, samples and steps
    are those of the undisturbed run, and no step is done twice.  The exception is a coordinator that dies with
    the notice, two seconds before the machine is taken: that is a crash.
    """
    changes: dict[str, Any] = {
        "validation": {
            "validation": {"dataset": "tests.support.toys:Sums", "args": {"samples": 64}, "every": 1}
        },
        "save": {"checkpoint": {"save_every": 1}},
        "compile": {"compile": True},
    }.get(phase, {})
    how: dict[str, Any] = {
        "start-up": {"state": "Waiting"},
        "forming": {"state": "Forming"},
        "compile": {"state": "Forming"},
        "finishing": {"state": "Finishing"},
        "coordinator gone": {"kills_coordinator": True},
    }.get(phase, {})
    chaos, taken, reference = noticed(tmp_path, "shard", lead_s, **how, changes=changes)
    assert taken.deadline, "the notice was given"
    redone = [each.redone for each in formed(Run.open(chaos.job).records())]
    # the next coordinator takes about two seconds to take over, and by then the machine is gone
    assert max(redone) <= int((phase, lead_s) == ("coordinator gone", 2.0)), redone
    assert_same(chaos, reference)


@LONG
def test_a_withdrawn_notice_costs_one_pause_at_most(tmp_path: Path) -> None:
    chaos, _, reference = noticed(tmp_path, "shard", lead_s=3.0, withdrawn=True)
    worlds = formed(Run.open(chaos.job).records())
    assert len(worlds[1:]) <= 2 and len(worlds[-1].members) == 3, "out, and in again as there is room"
    assert [each.redone for each in worlds] == [0] * len(worlds)
    assert_same(chaos, reference)


@LONG
def test_with_less_time_than_a_step_takes_it_is_a_crash(tmp_path: Path) -> None:
    chaos, taken, reference = noticed(tmp_path, "shard", lead_s=0.05)
    assert taken.over and chaos.witness.generation == 2
    assert_same(chaos, reference)


@LONG
@pytest.mark.parametrize("amount", [0.0, 0.5])
def test_chaos_gives_notice_and_takes_or_spares_the_node(tmp_path: Path, amount: float) -> None:
    """R5: the world leaves the node before chaos powers it off; a node that is spared lives on."""
    strikes: list[Chaos] = []

    class Announced:
        look_s = 0.02

        def __call__(self, witness: Witness, view: View) -> bool:
            if not strikes and view.step >= NOTICE_AT:
                strikes.append(Chaos(job, [Fault(0.0, Kind.NODE_NOTICE, duration_s=6.0, amount=amount)]))
                strikes[0].heed(view)
            return False

    settings: dict[str, Any] = {**LIGHT, "copies": {"copy_every": 1, "buddy_every": 1}}
    job = Script("shard", 3).job(
        tmp_path, "struck", steps=150, workers={"min": 1, "max": 3, "cpus": CPUS}, **settings
    )
    (tmp_path / "n0").mkdir()
    # another folder outside the test's: then the node's raylet is the parent of its processes, as chaos assumes
    with joined(tmp_path, Node("n0", 2 * CPUS, instead={Path("/mnt"): tmp_path / "n0"})) as nodes:
        chaos = trial(job, Announced())
        strikes[0].close()
        if amount:
            assert nodes.processes["n0"].poll() is None
        else:
            nodes.processes["n0"].wait(PATIENCE_S)
    worlds = formed(Run.open(job).records())
    assert [strike.failed for strike in strikes[0].strikes] == [""]
    assert [each.redone for each in worlds] == [0] * len(worlds)
    # the run may end before new workers have joined on a node that was spared
    assert [len(each.members) for each in worlds] in ([3, 1], *([[3, 1, 3]] if amount else []))
    assert_same(chaos, undisturbed(tmp_path / "alone", steps=150, **LIGHT))
