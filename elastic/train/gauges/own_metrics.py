"""Numbers that the user's loop reports for a step.  They stand in the metrics of the run beside Elastic's
own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from elastic.errors import LoopError
from elastic.report.metrics import COLUMNS

Metrics = tuple[tuple[str, float], ...]
"""Numbers by name."""
MOST = 32
"""Largest number of these metrics for one step: they pass through the coordinator, and stay in its journal.
"""
NAME = re.compile(r"[\w./-]{1,64}", re.ASCII)


def checked_metrics(metrics: Mapping[str, Any]) -> Metrics:
    """Returns the numbers that the user's loop reports for a step.  Raises :class:`LoopError` for a name or a
    value that a row of metrics cannot have.
    """
    if len(metrics) > MOST:
        raise LoopError(
            f"step.commit(metrics=…) has {len(metrics)} numbers, and a step may have {MOST}; leave some out"
        )
    found = []
    for name, value in metrics.items():
        named = f"step.commit(metrics={{{name!r}: {value!r:.40}}})"
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise LoopError(f"{named}: a name has 1 to 64 letters, digits and . _ / -")
        if name in COLUMNS or name.startswith("norm/"):
            raise LoopError(f"{named}: the metrics of every step have {name!r} already; take another name")
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
        if not math.isfinite(number):
            raise LoopError(
                f"{named}: the value is not a finite number; leave the metric out in a step without a value"
            )
        found.append((name, number))
    return tuple(found)
