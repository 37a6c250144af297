"""Numbers, times and texts of a run as a reader sees them."""

from __future__ import annotations

import math
import time

TEXT = 300
"""Largest number of characters of a text from the run, such as a reason or a value of a setting."""


def clipped(text: str, most: int = TEXT) -> str:
    """Returns the text, cut to ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def shown(value: float) -> str:
    """Returns a number with about four digits: 2.772, 0.0003, 1.235e+07."""
    if not math.isfinite(value):
        return "not finite" if not math.isnan(value) else "not known"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Returns a duration as text: 0.31 s, 12.4 s, 3 min 20 s, 5 h 12 min, 3 d 4 h."""
    if not math.isfinite(seconds):
        return "not known"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, size, lesser, less in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // less
            return f"{whole // size} {unit}" + (f" {rest} {lesser}" if rest else "")
    return f"{whole} s"


def when(at: float) -> str:
    """Returns a wall-clock time as text, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)) if math.isfinite(at) and at > 0 else ""


def percent(part: float, whole: float) -> str:
    """Returns a part as text, in per cent.  A share between 99.9 % and 100 % has two decimals, and is never
    rounded up to 100 %.
    """
    if not whole > 0:
        return "not known"
    found = 100 * part / whole
    return f"{min(found, 99.99):.2f} %" if found > 99.9 and part < whole else f"{found:.1f} %"


def counted(number: int, one: str, more: str = "") -> str:
    """Returns a number with its noun: 1 step, 1,234 steps."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"
