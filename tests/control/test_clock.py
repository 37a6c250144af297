"""R9: the coordinator's clock does not jump when the machine's time is set."""

from __future__ import annotations

import pytest

from actors.coordinator import steady_clock

pytestmark = pytest.mark.fast


def test_a_machine_whose_time_is_set_does_not_age() -> None:
    """An hour forward would expel every member and end every lease; an hour back would keep a dead member for
    an hour.
    """
    at = {"wall": 1000.0, "pace": 5.0}
    clock = steady_clock(lambda: at["wall"], lambda: at["pace"])
    assert clock() == 1000.0
    at |= {"wall": 1000.0 + 3600.0, "pace": 6.0}
    assert clock() == 1001.0
    at |= {"wall": 1000.0 - 3600.0, "pace": 7.5}
    assert clock() == 1002.5
