"""L7: what no rule keeps is deleted at once in simulated runs in which everything goes wrong, and every
promise holds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.plan.retention import Keep
from elastic.sim import simulate
from elastic.sim.scenario import Scenario

pytestmark = pytest.mark.fast


def deletions(seeds: range, keep: Keep) -> tuple[int, int]:
    """Returns how many of the runs delete checkpoints, and how many of these also begin worlds from the
    bucket.
    """
    found = []
    for seed in seeds:
        drawn = Scenario.drawn(seed)
        seen = simulate(seed, replace(drawn, rules=replace(drawn.rules, save_every=1, keep=keep))).occasions
        if seen["checkpoints are deleted"]:
            found.append(seen["a world starts from tier bucket"] > 0)
    return len(found), sum(found)


def test_l7_no_promise_breaks_where_old_checkpoints_are_deleted() -> None:
    runs, from_bucket = deletions(range(12), Keep(last=2))
    assert runs >= 4 and from_bucket >= 1
    assert deletions(range(3), Keep()) == (0, 0), "the control: without a rule nothing is deleted"
