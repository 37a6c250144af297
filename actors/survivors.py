"""Survivors are the actors that a dead coordinator has left: workers, which step on, and keepers, which hold
the end of the coordinator's journal.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from actors import cluster
from actors.processes import log_folder
from elastic.ids import NodeId, WorkerId
from elastic.protocol import authority
from elastic.runs.run import Run
from storage.journal import replicas
from storage.journal.replicas import Written

KEEPERS_S = 5.0
"""Seconds in which the keepers must say what they hold; silent ones are not asked again."""


@dataclass
class Left:
    """The actors found, and what the keepers said.

    ``ends`` holds the copies of the journal's end.  ``attached`` maps each keeper that answered to the
    incarnation whose records it holds (0: none).  ``whole`` means that no copy that could matter is missing.
    """

    workers: dict[WorkerId, Any] = field(default_factory=dict)
    keepers: dict[NodeId, Any] = field(default_factory=dict)
    ends: list[Written] = field(default_factory=list)
    attached: dict[NodeId, int] = field(default_factory=dict)
    whole: bool = False


def find(token: str, incarnation: int) -> Left:
    """Finds the living actors of the run under ``token``.  From now on its keepers refuse coordinators before
    ``incarnation``.
    """
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


def look_back(
    run: Run, token: str, incarnation: int, before: Mapping[int, NodeId], lease_over_s: float
) -> Left:
    """Returns what the coordinators ``before`` have left.

    If a part of the journal may be missing, waits until none of these coordinators acts any more, for
    ``lease_over_s`` seconds at most.  Nothing is missing in three cases: all of them ran on this node, so
    they have ended; none of them can reach a majority of the keepers any more; or the run is over.
    """
    claimed_at, folder = time.monotonic(), log_folder(token)
    here = all(
        node == cluster.here() and replicas.folder_of(folder, number).exists()
        for number, node in before.items()
    )
    while True:
        left = find(token, incarnation)
        left.ends = [*replicas.local(folder), *left.ends]
        known = run.read(min(before), left.ends)
        left.whole = here or (
            known is not None and (known.over or authority.has_read_all(left.attached, known.cluster.keepers))
        )
        wait_s = authority.waits_s(claimed_at, lease_over_s, left.whole, time.monotonic())
        if not wait_s:
            return left
        time.sleep(wait_s)
