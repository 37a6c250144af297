"""Tells the coordinator the newest word of each source, with times by the coordinator's clock.

A node's clock and the coordinator's may differ by more than a notice's lead.  So the teller asks the
coordinator for its time just before it tells, and tells the deadline that is as far ahead of this time as the
source says.  The answer is a moment old when it arrives, so the deadline is early by that moment, never late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from actors.notices.port import Notice
from elastic.ids import NodeId
from elastic.protocol.events import Event, NodeAdvised, NodeDraining, NodeStays

Word = tuple[NodeId, str]
"""The node that a source speaks of, and the name of the source."""


class Teller:
    """Any thread may use it.

    ``clock`` asks for the coordinator's time; it may wait, and raises :class:`OSError` if there is no
    coordinator: what is told to nobody is told again by :meth:`repeat`.  ``post`` tells an event.
    """

    def __init__(self, clock: Callable[[], float], post: Callable[[Event], object]) -> None:
        self._clock, self._post = clock, post
        self._newest: dict[Word, Notice | None] = {}
        self._telling = threading.Lock()

    def tell(self, source: str, node: NodeId, notice: Notice | None) -> None:
        """Tells what ``source`` says of ``node`` now: a notice, an advice, or that there is none any more."""
        self._newest[node, source] = notice
        self._say((node, source))

    def repeat(self) -> None:
        """Tells the newest words again."""
        for word in list(self._newest):
            self._say(word)

    def _say(self, word: Word) -> None:
        try:
            ahead_s = self._clock() - time.time()
        except OSError:
            return
        (node, source) = word
        with self._telling:  # the newest word is told last, whoever waited for the clock meanwhile
            notice = self._newest[word]
            if notice is None:
                self._post(NodeStays(node, source))
            else:
                kind = NodeAdvised if notice.advice else NodeDraining
                self._post(kind(node, notice.deadline + ahead_s, source, notice.text))
