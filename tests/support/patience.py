"""The time that tests wait for what must come.  It measures no promise: a shared machine may be five times
slower than a minute ago.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 300.0
"""Half of the time in seconds that pytest gives a whole test, so that the test that waits can say for what.
"""


def until(
    true: Callable[[], Any], deadline_s: float = PATIENCE_S, what: str = "it did not come about in time"
) -> Any:
    """Waits until ``true`` returns something true, and returns that."""
    end = time.monotonic() + deadline_s
    while not (found := true()):
        assert time.monotonic() < end, what
        time.sleep(0.01)
    return found
