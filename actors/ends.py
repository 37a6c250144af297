"""Ends actors and removes what they leave.  Says why an actor ended or could not be made, and which event
failed.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Iterable
from typing import Any

import ray

from actors import cluster
from actors.processes import leave_nothing
from elastic.code.imports import PACKAGES
from elastic.ids import NodeId
from elastic.protocol.events import Event

NODE_DIED, UNREACHED = "its node died", "its process cannot be reached"
"""Reasons that hold only in Ray's view: a process that is cut off may still live."""
DIED = "its process died"
"""The reason if a process has ended, or is ending, and has not said why."""


def why_not_made(error: BaseException) -> str:
    """Returns the last line of an error that prevented an actor from being made; mostly it is a failed
    import.
    """
    last = str(error).strip().splitlines()[-1].strip()
    if (
        any(f"'{package}{end}" in last for package in PACKAGES for end in ("'", "."))
        and "No module named" in last
    ):
        return (
            f"{last}; on this node another folder of this name comes first on Python's path, or "
            "Elastic is not installed"
        )
    return last


def why_ended(error: BaseException | None) -> str:
    """Returns why an actor has ended; ``error`` is that of a call that lasts as long as the actor."""
    if error is None:
        return "its process left"
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return UNREACHED
    if isinstance(error, ray.exceptions.RayActorError):
        return NODE_DIED if "node has died" in str(error) else DIED
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"


def signature(event: Event, error: Exception) -> str:
    """Returns a description of an event that failed, in the same words each time it fails in the same way."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(event).__name__}: {type(error).__name__} at {os.path.basename(frame.filename)}:{frame.lineno}"
    )


def kill_all(actors: Iterable[Any]) -> None:
    for actor in actors:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(actor, no_restart=True)


def wait_for_all(calls: list[Any], until: float) -> None:
    """Waits for the calls to end, until the monotonic clock shows ``until``."""
    if calls:
        ray.wait(calls, num_returns=len(calls), timeout=max(0.0, until - time.monotonic()))


def succeeded(call: Any, unless: type[Exception] | tuple[type[Exception], ...] = ()) -> bool:
    """Returns whether the call is done and raised no error, or one of the types ``unless``."""
    if not ray.wait([call], timeout=0)[0]:
        return False
    try:
        ray.get(call)
    except ray.exceptions.RayTaskError as error:
        return isinstance(error.cause, unless)
    except ray.exceptions.RayError:
        return False
    return True


def leave_nothing_on(nodes: Iterable[NodeId], run: str, until: float) -> list[str]:
    """Removes what the run has on ``nodes``, where no keeper has removed it.  Returns the names of the nodes
    where this did not succeed in time.
    """
    tasks = {}
    for node in nodes:
        if node == cluster.here():
            leave_nothing(run)
        else:
            there = cluster.only_on(node)
            task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(leave_nothing)
            tasks[node] = task.remote(run)
    wait_for_all(list(tasks.values()), until)
    return [cluster.node_name(node) for node, task in tasks.items() if not succeeded(task)]
