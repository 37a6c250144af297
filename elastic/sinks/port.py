"""The port: what every sink of metrics can do, and what it is told of its run.

A sink gets only rows that no fall-back takes back, in order of their steps.  Each step comes once, even if
any process dies: a sink says itself which step it has last, so the steps that it has count, and not those
that a process meant to write.

Steps that a person has abandoned (``rollback``, ``--resume 15000``) stay where they were shown.  What goes on
from there is another run of the tracker, named after the branch, with all steps that count.

In one case a sink keeps old numbers: if a checkpoint proves to be damaged after its steps were handed on,
these steps are done again, and the sink does not get their new rows.  ``elastic metrics`` prints the numbers
that count.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from elastic import sinks
from elastic.code.imports import PACKAGES, arguments, did_you_mean, load
from elastic.errors import CodeError
from elastic.report.metrics import Row
from storage.errors import Damaged, Exists, Missing
from storage.objects import ObjectStore

AXES = ("step", "time", "final", "validation_data")
"""Names in a row that say where it belongs.  All others are what is shown."""
EVENT = "event"
"""The name of the sentence in the first row of a world that says why there is a new world.  All other values
are numbers.
"""


@dataclass(frozen=True)
class TrackedRun:
    """A run as a sink knows it.

    ``settings`` are those of its job, flat, by dotted names.  ``store`` is its bucket.  ``branch`` is the
    newest branch that has abandoned stored steps, which sinks may show; 0 without such a branch.
    """

    name: str
    settings: Mapping[str, Any]
    store: ObjectStore
    branch: int = 0

    @property
    def title(self) -> str:
        """The name under which a tracker shows the run; it changes when a branch abandons steps."""
        return f"{self.name}-branch-{self.branch}" if self.branch else self.name

    @property
    def _folder(self) -> str:
        return f"{self.name}/sinks/branch-{self.branch}" if self.branch else f"{self.name}/sinks"

    @property
    def id(self) -> str:
        """A random text of 16 letters and digits that no other run has, also not one of the same name in
        another bucket.
        """
        key = f"{self._folder}/id"
        with suppress(Exists):
            self.store.put_if_absent(key, uuid.uuid4().hex[:16].encode())
        return self.store.get(key).decode()

    def noted(self, sink: str) -> int:
        """Returns the step that :meth:`note` has noted last; 0 without one."""
        try:
            return int(json.loads(self.store.get(self._cursor(sink)))["step"])
        except Missing:
            return 0
        except ValueError:
            fix = "remove this file, and the sink gets all rows again"
            raise Damaged(self.store.full_name(self._cursor(sink)), "a step", "something else", fix) from None

    def note(self, sink: str, step: int) -> None:
        """Notes in the bucket up to which step ``sink`` has its rows: for trackers that cannot always say so
        themselves.
        """
        self.store.put(self._cursor(sink), json.dumps({"step": step}).encode())

    def _cursor(self, sink: str) -> str:
        return f"{self._folder}/{sink}.json"


class Sink(Protocol):
    """A place outside of the metrics folder that gets the rows, such as a database or a tracker.

    It is made with a :class:`TrackedRun` and the arguments of ``metrics.sinks``, on a thread of its own.  A
    run may go on in another process, on another machine: a sink that is made there with the same arguments
    must be the same place.
    """

    def last(self) -> int:
        """Returns the step of the newest row that it has; 0 without any."""

    def write(self, rows: Sequence[Row]) -> None:
        """Adds rows, in order of their steps: all of them or none, so that none comes twice.  When it
        returns, they are there to stay.
        """


def shown(row: Row) -> dict[str, float]:
    """Returns the numbers of a row that a tracker shows, by name."""
    return {name: float(value) for name, value in row.items() if name not in AXES and name != EVENT}


def sink_class(name: str) -> Callable[..., Sink]:
    """Returns the class that a key of ``metrics.sinks`` names.

    Raises :class:`CodeError` if the class, or a package that it needs, is not there.
    """
    if ":" in name:
        found: Callable[..., Sink] = load(name, "metrics.sinks")
        return found
    known = sorted(module.name for module in pkgutil.iter_modules(sinks.__path__) if module.name != "port")
    if name not in known:
        hint = f"use one of {', '.join(known)}, or your own class as 'package.module:Class'"
        raise CodeError(f"metrics.sinks has no {name!r}; {hint}{did_you_mean(name, known)}")
    try:
        tracker: Callable[..., Sink] = load(f"{sinks.__name__}.{name}:Tracker", "metrics.sinks")
    except CodeError as error:
        cause = error.__cause__
        if not isinstance(cause, ModuleNotFoundError) or (cause.name or "").partition(".")[0] in PACKAGES:
            raise
        raise CodeError(
            f"metrics.sinks.{name} needs the package {cause.name!r}, which is not on this machine; "
            "install the package on every node of the cluster with pip install "
            f"'elastic-train[{name}]', or leave the sink out"
        ) from None
    return tracker


def check_sink(name: str, args: Mapping[str, Any]) -> None:
    """Raises :class:`CodeError` if the class is not there, or does not take these arguments."""
    made = sink_class(name)
    try:
        signature = inspect.signature(made)
    except (TypeError, ValueError):  # a class of C has none
        return
    try:
        signature.bind(None, **args)
    except TypeError as error:
        takes = ", ".join(str(each) for each in list(signature.parameters.values())[1:]) or "no arguments"
        unknown = next((each for each in args if each not in signature.parameters), "")
        meant = did_you_mean(unknown, [*signature.parameters][1:])
        raise CodeError(f"metrics.sinks.{name} = {dict(args)!r}: {error}; it takes {takes}{meant}") from None


def make_sink(run: TrackedRun, name: str, args: Mapping[str, Any]) -> Sink:
    """Returns the sink of a run.  Raises :class:`~elastic.errors.CodeError`, or what its class raises."""
    return sink_class(name)(run, **arguments(f"metrics.sinks.{name}", args))
