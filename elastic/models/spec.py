"""The sharding table: what a model tells the engine about its structure.  This file is pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShardingTable:
    """``blocks`` holds the dotted names of the modules that are wrapped, gathered and freed one at a time, in forward order."""

    blocks: tuple[str, ...]
