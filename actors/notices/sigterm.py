"""SIGTERM to the keeper as a notice, for supervisors that send it to every process of a machine that they take.

The machine is taken ``notices.grace_s`` later.  A second SIGTERM ends the keeper, as the first one does without
this source.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

from actors.notices.port import Notice, NoticeSource
from elastic.config.sections import Notices


class Sigterm(NoticeSource):
    """Must be made on the main thread."""

    every_s = 0.2
    remembers = False

    def __init__(self, settings: Notices) -> None:
        self._grace_s = settings.grace_s
        self._at: float | None = None
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._at = time.time()
        signal.signal(number, signal.SIG_DFL)

    def look(self) -> Notice | None:
        return None if self._at is None else Notice(self._at + self._grace_s, text="SIGTERM")
