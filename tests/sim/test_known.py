"""A schedule that breaks a promise, and what is known of why; whoever mends it finds out here, and moves it to the others."""

from __future__ import annotations

import pytest

from elastic.sim import Violation, simulate
from tests.sim.scenarios import unshipped


@pytest.mark.xfail(strict=True, raises=Violation)
def test_what_a_step_consumed_is_known_although_its_coordinator_was_followed() -> None:
    """It was told to one that was cut off and acted rightly with its keepers, after another had begun that cannot read them.

    Probably the oracle: ``told`` is not noted for a coordinator that was followed, and the worker forgets what is said to be recorded.
    """
    simulate(423, unshipped(423))
