"""Simulations collect garbage rarely, and never look at objects that were there before them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

RARELY = 100_000
"""Number of new objects after which Python looks for garbage.  A simulation is one cycle of some thousand objects, and Python's own 700
would cost a seventh of the time, or more after thousands of tests were collected.
"""


@pytest.fixture(scope="package", autouse=True)
def garbage_is_collected_rarely() -> Iterator[None]:
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(RARELY)
    yield
    gc.set_threshold(*usual)
    gc.unfreeze()
