"""Brings the objects of a job to its workers: functions and classes of a script or a notebook, by value.

This is the only place that pickles code.  The driver makes the bytes; Ray keeps them with the coordinator's
arguments, so that they outlive the driver and every coordinator; only workers unpickle them, where the user's
code runs anyway.  They never go to the bucket: nothing that is read from storage can run code.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray import cloudpickle

from elastic.code.given import Given
from elastic.code.imports import failure
from elastic.errors import CodeError, JobError
from elastic.job import Job
from elastic.plan.copy_budget import amount

CHUNK = 64 * 2**10
"""Bytes of one argument of the coordinator.  Ray keeps arguments below 100 KiB with the actor, and larger
ones with their driver.
"""
LARGEST = 4 * 2**20
"""Largest size of all objects together, in bytes: Ray keeps at most 10 MB of arguments with an actor."""


@dataclass(frozen=True)
class UsersCode:
    """The user's code, in the form in which it reaches a worker."""

    search_path: list[str]
    """The folders of the driver's code."""
    objects: bytes = b""
    """The objects by setting, pickled; empty without any."""

    def restore(self, job: Job) -> Job:
        """Returns ``job`` with its objects.  Raises :class:`CodeError` if they need something that this
        process does not find.
        """
        if not self.objects:
            return job
        try:
            found: Mapping[str, tuple[Any, str]] = cloudpickle.loads(self.objects)
        except Exception as error:  # whatever the user's code raises while it is made anew
            raise CodeError(
                f"the objects of the job ({', '.join(job.code())}) cannot be created on this node: "
                f"{failure(error)}; install on every node what the script imports"
            ) from error
        return job.with_objects(
            {setting: Given(value, fingerprint) for setting, (value, fingerprint) in found.items()}
        )


def pack(job: Job) -> list[bytes]:
    """Returns the job's objects in chunks; none if it has none.  Raises :class:`JobError` if one cannot be
    sent.
    """
    named = {"metrics.sinks": job.metrics.sinks, "notices.sources": job.notices.sources}
    for setting, each in ((setting, each) for setting, names in named.items() for each in names):
        if isinstance(each, Given):
            raise JobError(
                f"{setting} = {str(each)!r} is used by processes that do not have your script; put "
                "the class into a module, and name it as 'package.module:Class'"
            )
    given = job.objects()
    if not given:
        return []
    packed = _packed(given)
    if len(packed) > LARGEST:
        sizes = {setting: len(_packed({setting: each})) for setting, each in given.items()}
        largest = max(sizes, key=sizes.__getitem__)
        raise JobError(
            f"{largest} = {str(given[largest])!r} takes {amount(sizes[largest])}, and all objects of a "
            f"job together may take {amount(LARGEST)}: its globals, defaults or closure hold data; let "
            "it read the data from a file, when it is called"
        )
    return [packed[at : at + CHUNK] for at in range(0, len(packed), CHUNK)]


def _packed(given: Mapping[str, Given]) -> bytes:
    """Returns the objects pickled together, so that what they share is one object at the worker, too."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump({setting: (each.value, each.fingerprint) for setting, each in given.items()})
    except Exception as error:  # whatever the user's objects raise
        if len(given) > 1:
            for setting, each in given.items():
                _packed({setting: each})
        settings = " and ".join(f"{setting} = {str(each)!r}" for setting, each in given.items())
        why = (
            str(error)
            if isinstance(error, CodeError)
            else (f"{type(error).__name__}: {' '.join(str(error).split())}")
        )
        raise JobError(
            f"{settings} cannot be sent to workers: {why}; create or open such an object inside the "
            "function that uses it"
        ) from error
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles objects, but refuses those that are useless in another process: open files, and tensors of a
    device.
    """

    def reducer_override(self, value: Any) -> Any:
        # torch is not imported here: a job without tensors need not wait for that
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            raise CodeError(f"it holds a tensor on {value.device}")
        if isinstance(value, io.IOBase):
            raise CodeError(f"it holds the open file {getattr(value, 'name', '')!r}")
        return super().reducer_override(value)
