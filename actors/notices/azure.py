"""Notices of Microsoft Azure: the scheduled events of its metadata service that name this machine.

``Preempt`` comes 30 s ahead or more, ``Terminate``, ``Redeploy``, ``Reboot`` and ``Freeze`` 5 to 15 minutes.
An event without a time has begun.  An event that is over, or was called off, is not in the list any more.

An event that is acknowledged begins at once, for all its machines, so an event is acknowledged only if it
names this machine alone.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from actors.notices.metadata import TIMEOUT_S, MetadataAnswer, ask, unreadable
from actors.notices.port import Notice, NoticeSource
from elastic.config.sections import Notices

HOME = "http://169.254.169.254"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
HEADERS = {"Metadata": "true"}
KINDS = ("Preempt", "Terminate", "Redeploy", "Reboot", "Freeze")
FIRST_S = 130.0
"""Seconds for the first answer about events: the service is turned on by the first question, in up to 2
minutes.
"""


@dataclass(frozen=True)
class ScheduledEvent:
    """A scheduled event that names this machine.  ``begins`` is None once it has begun."""

    id: str
    kind: str
    begins: float | None
    alone: bool
    """True if no other machine is named."""


class Azure(NoticeSource):
    every_s = 1.0  # as Azure recommends
    home = HOME

    def __init__(self, settings: Notices) -> None:
        self._name, self._timeout_s = "", FIRST_S
        self._begun = dict[str, float]()
        """The moments, in Unix seconds, at which events were first seen to have begun."""
        self._events: tuple[ScheduledEvent, ...] = ()
        self._acknowledged = set[str]()

    def look(self) -> Notice | None:
        if not self._name:
            answer = ask(self.home, NAME, HEADERS, timeout_s=TIMEOUT_S)
            if not answer.text or not answer.text.isprintable():
                raise unreadable(answer, "a machine's name")
            self._name = answer.text
        answer = ask(self.home, EVENTS, HEADERS, timeout_s=self._timeout_s)
        self._timeout_s = TIMEOUT_S
        events, now = _events(answer, self._name), time.time()
        self._begun = {each.id: self._begun.get(each.id, now) for each in events if each.begins is None}
        self._events = events
        at = {each: self._begun[each.id] if each.begins is None else each.begins for each in events}
        if not at:
            return None
        first = min(at, key=at.__getitem__)
        return Notice(at[first], text=f"scheduled event {first.kind}")

    def left(self) -> None:
        for event in self._events:
            if event.alone and event.begins is not None and event.id not in self._acknowledged:
                body = json.dumps({"StartRequests": [{"EventId": event.id}]})
                ask(self.home, EVENTS, HEADERS, method="POST", body=body, timeout_s=TIMEOUT_S)
                self._acknowledged.add(event.id)


def _events(answer: MetadataAnswer, machine: str) -> tuple[ScheduledEvent, ...]:
    try:
        return tuple(_event(each) for each in json.loads(answer.text)["Events"] if _is_about(each, machine))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise unreadable(answer, "a list of scheduled events") from None


def _is_about(event: dict[str, Any], machine: str) -> bool:
    if not isinstance(event["Resources"], list):  # the name of another machine may contain this one's
        raise TypeError
    scheduled = event["EventStatus"] in ("Scheduled", "Started")
    return scheduled and event["EventType"] in KINDS and machine in event["Resources"]


def _event(event: dict[str, Any]) -> ScheduledEvent:
    at = event["NotBefore"] if event["EventStatus"] == "Scheduled" else ""
    return ScheduledEvent(
        str(event["EventId"]),
        event["EventType"],
        parsedate_to_datetime(at).timestamp() if at else None,
        len(event["Resources"]) == 1,
    )
