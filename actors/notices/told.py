"""Notices of your own scripts: a file that somebody writes on the node, or a command that says what it knows.

The file's first line, or the first line that the command prints, is the number of seconds that are left, or a
Unix time; lines after it are words for the run's story.  Without the file, or if the command prints nothing,
there is no notice.
"""

from __future__ import annotations

import math
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from actors.notices.port import Notice, NoticeSource, Unreadable
from elastic.config.sections import Notices

UNIX_TIME = 1e9
"""The smallest number that is a Unix time (of 2001), and no number of seconds that are left (31 years)."""
COMMAND_S = 10.0
"""Seconds that the command may take."""


class NoticeFile(NoticeSource):
    """The file ``notices.file``.  Seconds in it count from when it was written; without any they are
    ``notices.grace_s``.
    """

    every_s = 1.0

    def __init__(self, settings: Notices) -> None:
        self._path, self._grace_s = Path(settings.file), settings.grace_s

    def look(self) -> Notice | None:
        try:
            text, written_at = self._path.read_text(errors="replace"), self._path.stat().st_mtime
        except FileNotFoundError:
            return None
        first, _, words = text.strip().partition("\n")
        left, at = _number(first or f"{self._grace_s}", f"{self._path}")
        return Notice(at or written_at + left, text=" ".join(words.split()) or f"{self._path}")


class NoticeCommand(NoticeSource):
    """The command ``notices.command``.  If it prints seconds that are left, the earliest deadline counts, so a
    command that always prints the same number does not put it off.
    """

    every_s = 5.0

    def __init__(self, settings: Notices) -> None:
        self._command, self._until = settings.command, math.inf

    def look(self) -> Notice | None:
        text = _output(self._command).strip()
        if not text:
            self._until = math.inf
            return None
        first, _, words = text.partition("\n")
        left, at = _number(first, f"{self._command!r}")
        self._until = min(self._until, time.time() + left)
        return Notice(at or self._until, text=" ".join(words.split()) or self._command)


def _number(line: str, whose: str) -> tuple[float, float]:
    """Returns the seconds that are left, and 0; or 0, and a Unix time."""
    try:
        number = float(line)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise Unreadable(f"{whose}: {line[:80]!r} is neither a number of seconds nor a Unix time")
    return (number, 0.0) if number < UNIX_TIME else (0.0, number)


def _output(command: str) -> str:
    """Returns what the command prints.  Raises :class:`OSError` if it fails or takes too long."""
    # `timeout` kills the shell and what it has started, also if this process is gone by then
    words, began = ["timeout", "--signal=KILL", f"{COMMAND_S:g}", "sh", "-c", command], time.monotonic()
    with suppress(subprocess.TimeoutExpired):
        ended = subprocess.run(
            words,
            check=False,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_S + 1,
        )
        if not ended.returncode:
            return ended.stdout
        if time.monotonic() - began < COMMAND_S:
            last = ended.stderr.strip().rpartition("\n")[2]
            raise OSError(f"{command!r} ended with code {ended.returncode}{f': {last}' if last else ''}")
    raise OSError(f"{command!r} has not ended within {COMMAND_S:g} s, and was killed")
