"""The port: what every source of notices can do, and what it says."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from elastic.ids import NodeId

ADVICE_S = 900.0
"""Seconds for which an advice holds: many an advice of a cloud never comes true, and none is taken back."""


class Unreadable(Exception):
    """A source has answered with something that makes no sense."""


@dataclass(frozen=True)
class Notice:
    """The word of a source that the machine will be taken away.

    An advice says only that it may be: nobody leaves because of it.
    """

    deadline: float
    """Unix seconds at which the machine is taken.  An advice holds until then."""
    advice: bool = False
    text: str = ""
    """The source's own words."""


class NoticeSource(Protocol):
    """A place that says when this machine is taken.  It is made with the section ``[notices]`` of the job.

    One thread calls ``look`` again and again, another may call ``left`` meanwhile.
    """

    every_s: float = 5.0
    """Seconds from the end of one look to the next."""
    remembers: bool = True
    """False if it knows only what it has heard since it was made: by saying nothing then, it takes back nothing
    that was said before.
    """

    @abstractmethod
    def look(self) -> Notice | None:
        """Returns the notice in force now; None if there is none, or none any more.

        The deadline of one and the same notice stays.  Raises :class:`OSError` if the source does not answer,
        and :class:`Unreadable` if the answer makes no sense: what it said before is then still true.
        """

    def left(self) -> None:
        """Hears that the node has left the run, and tells the cloud so if the cloud waits for that.

        If it raises an error it is called again after each look, until the deadline of its notice.
        """


class ClusterSource(Protocol):
    """A place that says which nodes of the whole cluster are taken.  The coordinator alone asks it."""

    every_s: float = 5.0

    @abstractmethod
    def look(self) -> Mapping[NodeId, Notice]:
        """Returns the notices in force now, by node.  Raises as :meth:`NoticeSource.look`."""


class FirstSaid:
    """The moment since which a source has said the same thing: from it counts the time of a notice that has no
    deadline of its own.
    """

    def __init__(self) -> None:
        self._said, self._at = "", 0.0

    def __call__(self, said: str) -> float:
        """Returns the Unix seconds at which ``said`` was said first, without anything else since."""
        if said != self._said:
            self._said, self._at = said, time.time()
        return self._at
