"""Says in a few words why an actor ended or could not be made, and which event failed."""

from __future__ import annotations

import os
import traceback

import ray

from elastic.imports import PACKAGES
from elastic.protocol.events import Event

NODE_DIED, UNREACHED = "its node died", "its process cannot be reached"
"""Reasons that hold only in Ray's view: a process that is cut off may still live."""


def why_not_made(error: BaseException) -> str:
    """Returns the last line of an error that prevented an actor from being made; mostly it is a failed import."""
    last = str(error).strip().splitlines()[-1].strip()
    if any(f"'{package}{end}" in last for package in PACKAGES for end in ("'", ".")) and "No module named" in last:
        return f"{last}; another folder of that name comes first on its path, or Elastic is not installed there"
    return last


def why_ended(error: BaseException | None) -> str:
    """Returns why a call to an actor that lasts as long as it does has ended."""
    if error is None:
        return "its process left"
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return UNREACHED
    if isinstance(error, ray.exceptions.RayActorError):
        return NODE_DIED if "node has died" in str(error) else "its process died"
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"


def signature(event: Event, error: Exception) -> str:
    """Returns a description of an event that failed, in the same words each time it fails in the same way."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(event).__name__}: {type(error).__name__} at {os.path.basename(frame.filename)}:{frame.lineno}"
