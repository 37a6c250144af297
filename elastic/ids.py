"""Types of the names of workers, nodes, versions and parts of the state."""

from __future__ import annotations

from typing import NewType

from storage.slices import Version

WorkerId = NewType("WorkerId", str)
"""Names one worker process; a name is never used again."""
NodeId = NewType("NodeId", str)
"""Names one machine, as Ray does."""
Cell = NewType("Cell", str)
"""Names the part of the state that one member holds.  Only ``plan/placement.py`` reads the text of the name.
"""

__all__ = ["Cell", "NodeId", "Version", "WorkerId"]
