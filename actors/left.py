"""What a coordinator that died has left in the cluster: workers that step on, keepers with the end of its journal."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import ray

from actors import cluster
from elastic.ids import NodeId, WorkerId

KEEPERS_S = 5.0
"""For the keepers to say what they have; those that are silent are asked no more."""


@dataclass
class Left:
    """``tails``: what the keepers hold of the journal."""

    workers: dict[WorkerId, Any] = field(default_factory=dict)
    keepers: dict[NodeId, Any] = field(default_factory=dict)
    tails: list[bytes] = field(default_factory=list)


def find(token: str, incarnation: int) -> Left:
    """The actors of the run that live under ``token``.  From now on its keepers heed no coordinator before ``incarnation``."""
    left, nodes = Left(), cluster.nodes()
    for name, actor in cluster.named(f"{token}/").items():
        if name.startswith("keeper-"):
            home = [node for node in nodes if node.startswith(name.removeprefix("keeper-"))]
            left.keepers |= dict.fromkeys(home, actor)
        else:
            left.workers[WorkerId(name)] = actor
    asked = [actor.attach.remote(incarnation) for actor in left.keepers.values()]
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=KEEPERS_S) if asked else ([], [])
    for ref in answered:
        with contextlib.suppress(ray.exceptions.RayActorError):
            left.tails.append(ray.get(ref))
    return left
