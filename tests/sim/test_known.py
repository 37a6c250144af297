"""Schedules that break a promise, and what is known of why; whoever mends one finds out here, and moves it to the others."""

from __future__ import annotations

import random

import pytest

from elastic.plan.layout import LayoutRule
from elastic.sim import Violation, simulate
from elastic.sim.faults import Fault, Kind
from elastic.sim.scenario import Scenario, small_rules
from tests.sim.scenarios import unshipped


def expelled(seed: int) -> Scenario:
    """The bucket is down, three workers die, and coordinators are cut off with all nodes, one after the other."""
    rng = random.Random(seed)
    at = rng.uniform(11.0, 14.0)
    down = Fault(rng.uniform(4.0, 7.0), Kind.BUCKET_DOWN, duration_s=at - 2.0, amount=0.9)
    deaths = tuple(Fault(rng.uniform(5.0, at + 3.0), Kind.SIGKILL, rng.randrange(4)) for _ in range(3))
    cuts = (Fault(at + 2.0 * n, Kind.COORDINATOR_CUT, duration_s=rng.uniform(7.0, 7.9), amount=1.0) for n in range(3))
    rules = small_rules(2, 4, LayoutRule(None, None, 2, "all"), target_step=25, save_every=50)
    return Scenario(rules=rules, faults=(down, *deaths, *cuts), nodes=3, slots=5)


@pytest.mark.xfail(strict=True, raises=Violation)
def test_what_one_holds_that_was_expelled_and_lives_counts_for_the_next_coordinator() -> None:
    """It was in generation 3, was expelled and not killed, since its coordinator was cut off; generation 4 was begun without it.

    The next coordinator, which read of neither, hears of both, and refuses its answer as that of an older generation: step 6 is given up
    although it and a member of generation 4 hold it all.
    """
    simulate(108, expelled(108))


@pytest.mark.xfail(strict=True, raises=Violation)
def test_what_a_step_consumed_is_known_although_its_coordinator_was_followed() -> None:
    """It was told to one that was cut off and acted rightly with its keepers, after another had begun that cannot read them.

    Probably the oracle: ``told`` is not noted for a coordinator that was followed, and the worker forgets what is said to be recorded.
    """
    simulate(423, unshipped(423))
