"""Survivors: the actors that a dead coordinator has left in the cluster, workers that step on and keepers with the end of its journal."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import ray

from actors import cluster
from elastic.ids import NodeId, WorkerId
from storage.journal.replicas import Written

KEEPERS_S = 5.0
"""Time limit in seconds for the keepers to say what they have; silent keepers are not asked again."""


@dataclass
class Left:
    """The actors that were found, with what the keepers hold.

    ``tails`` are the parts of the journal that the keepers hold; ``attached`` are the keepers that have held any, and heed nobody else.
    """

    workers: dict[WorkerId, Any] = field(default_factory=dict)
    keepers: dict[NodeId, Any] = field(default_factory=dict)
    tails: list[Written] = field(default_factory=list)
    attached: set[NodeId] = field(default_factory=set)

    def half_of(self, keepers: tuple[NodeId, ...]) -> bool:
        """Returns whether so many of ``keepers`` are attached that no earlier coordinator finds a majority of them."""
        there = len(self.attached.intersection(keepers))
        return there > 0 and 2 * there >= len(keepers)


def find(token: str, incarnation: int) -> Left:
    """Returns the actors of the run that live under ``token``.  From now on its keepers heed no coordinator before ``incarnation``."""
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
            left.tails.append((by, tail))
            left.attached |= {asked[ref]} if by else set()
    return left
