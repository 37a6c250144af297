"""Types of the names of workers, nodes and versions."""

from __future__ import annotations

from typing import NewType

from storage.slices import Version

WorkerId = NewType("WorkerId", str)
"""Names one worker process; a name is never used again."""
NodeId = NewType("NodeId", str)
"""Names one machine, as Ray does."""

__all__ = ["NodeId", "Version", "WorkerId"]
