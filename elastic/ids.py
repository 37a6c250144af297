"""Names of the things that come and go."""

from __future__ import annotations

from typing import NewType

from storage.slices import Version

WorkerId = NewType("WorkerId", str)
"""One worker process; never reused."""
NodeId = NewType("NodeId", str)
"""One machine, as Ray names it."""

__all__ = ["NodeId", "Version", "WorkerId"]
