"""Survivors: the actors that a dead coordinator has left, which are workers that step on and keepers with the end of its journal."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import ray

from actors import cluster
from elastic.ids import NodeId, WorkerId
from storage.journal.replicas import Written

KEEPERS_S = 5.0
"""Seconds in which the keepers must say what they hold; silent ones are not asked again."""


@dataclass
class Left:
    """The actors found, and what the keepers said.

    ``ends`` holds the keepers' copies of the journal's end.  ``attached`` maps each keeper that answered to the incarnation whose records
    it holds (0: none).
    """

    workers: dict[WorkerId, Any] = field(default_factory=dict)
    keepers: dict[NodeId, Any] = field(default_factory=dict)
    ends: list[Written] = field(default_factory=list)
    attached: dict[NodeId, int] = field(default_factory=dict)


def find(token: str, incarnation: int) -> Left:
    """Finds the living actors of the run under ``token``.  From now on its keepers refuse coordinators before ``incarnation``."""
    left, nodes = Left(), cluster.nodes()
    for name, actor in cluster.named(f"{token}/").items():
        if name.startswith("keeper-"):
            home = [node for node in nodes if node.startswith(name.removeprefix("keeper-"))]
            left.keepers |= dict.fromkeys(home, actor)
        else:
            left.workers[WorkerId(name)] = actor
    asked = {actor.attach.remote(incarnation): node for node, actor in left.keepers.items()}
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=KEEPERS_S) if asked else ([], [])
    for ref in answered:
        with contextlib.suppress(ray.exceptions.RayActorError):
            by, tail = ray.get(ref)
            left.ends.append((by, tail))
            left.attached[asked[ref]] = by
    return left
