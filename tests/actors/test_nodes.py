"""R2, R4, H4: a whole node dies, its raylet and all its processes at once, and a node comes back.

The head has room for one worker, the node that dies for the two others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from actors.view import View
from elastic.runs.run import Run
from tests.support.chaos import Witness, assert_survived, formed, trial
from tests.support.kills import Director, Grow, Script, undisturbed
from tests.support.nodes import Joined, Node, joined
from tests.support.processes import Ended
from tests.support.room import Room
from tests.support.toys import LIGHT

CPUS = 5
"""CPUs of one worker; the head has 8, so it has room for one."""
BUDDY_EVERY = 2
LONG = pytest.mark.full


class PowerCuts:
    """Cuts the power of the node with two workers at each of ``steps``; once the remaining world runs,
    another node joins.
    """

    look_s = 0.02

    def __init__(self, folder: Path, script: Script, steps: Sequence[int], stack: ExitStack) -> None:
        self.folder, self.steps, self.stack = folder, list(steps), stack
        self.director = Director(script, folder, Room())
        self.nodes: list[Joined] = []
        self.victims: list[list[str]] = []
        self.ends: list[Ended] = []
        self._add()

    def _add(self) -> None:
        self.nodes.append(
            self.stack.enter_context(joined(self.folder, Node(f"n{len(self.nodes)}", 2 * CPUS)))
        )

    def __call__(self, witness: Witness, view: View) -> bool:
        self.director(witness, view)
        cuts = len(self.victims)
        if view.state == "Running" and view.generation == 2 * cuts:
            if len(self.nodes) == cuts:
                self._add()
        elif (
            view.state == "Running"
            and self.steps
            and view.step >= self.steps[0]
            and view.workers.keys() <= witness.seen.keys()
        ):
            self.steps.pop(0)
            (home,) = self.nodes[-1].values()
            self.victims.append([worker for worker, node in view.workers.items() if node == home])
            self.ends += self.nodes[-1].cut_power(f"n{cuts}")
        return False


@pytest.mark.must_run_in_ci
@pytest.mark.parametrize(
    ("layout", "tier", "steps"),
    [
        ("shard", "host", (8,)),
        pytest.param("shard", "host", (8, 24), marks=LONG),
        pytest.param("replicate", "live", (8,), marks=LONG),
        pytest.param("shard", "bucket", (8, 24), marks=LONG),
    ],
)
def test_a_node_loses_its_power_and_one_comes_back(
    tmp_path: Path, layout: str, tier: str, steps: tuple[int, ...]
) -> None:
    """R2, R4, H4: two of three workers and the keeper beside them die at once.  The replica on the head loses
    no step.  Shards come from the memory of the head's keeper, which is the buddy of the dead one; without
    copies, from the last save in the bucket.  Then a node with room for two joins."""
    script = Script(layout, 3, copies=tier != "bucket")
    script.form(3, "init")
    for step in steps:
        script.growth.append(Grow(script.generation + 1, step + 8))
        script.form(1, tier)
        script.form(3, "live")
    with ExitStack() as stack:
        act = PowerCuts(tmp_path, script, steps, stack)
        changes: dict[str, Any] = {"steps": steps[-1] + 16, **LIGHT}
        if tier == "host":
            changes |= {
                "copies": {"copy_every": 1, "buddy_every": BUDDY_EVERY},
                "checkpoint": {"save_every": 100},
            }
        chaos = trial(
            script.job(tmp_path, "nodes", workers={"min": 1, "max": 3, "cpus": CPUS}, **changes), act
        )
    assert [len(each) for each in act.victims] == [2] * len(steps)
    assert {end.signal for end in act.ends} == {SIGKILL}, act.ends
    worlds = formed(Run.open(chaos.job).records())
    struck = [
        {
            "point": "forward",
            "kind": "SIGKILL",
            "generation": 2 * cut + 1,
            "world_rank": worlds[2 * cut].members.index(victim),
        }
        for cut, victims in enumerate(act.victims)
        for victim in victims
    ]  # from outside
    chaos = replace(chaos, job=chaos.job.replace(faults=struck))
    reference = undisturbed(tmp_path / "alone", steps=chaos.job.steps, **LIGHT)
    assert_survived(chaos, reference, worlds=script.worlds, tiers=script.tiers)
