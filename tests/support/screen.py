"""A terminal, as far as our commands need one: what a person sees who looks at it, and a command that runs in
a real pseudo-terminal.

``Seen`` understands the few control characters that a line which changes needs, and refuses all others; what
a real terminal does with them is ECMA-48 (8.3.41 EL, 8.3.39 ED, 8.3.117 SGR).
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

from tests.support.commands import FORK, MARK, ROOT
from tests.support.patience import PATIENCE_S

SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")


class Seen:
    """The lines on a screen of ``width`` columns, and those that have left it at the top."""

    def __init__(self, width: int) -> None:
        self.width, self.rows, self.row, self.column, self._rest = width, [""], 0, 0, ""

    def feed(self, text: str) -> None:
        text, self._rest = self._rest + text, ""
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                if (found := SEQUENCE.match(text, at)) is None:
                    assert len(text) - at < 16, f"no control sequence: {text[at : at + 20]!r}"
                    self._rest = text[at:]  # its end has not come yet
                    return
                self._control(*found.groups())
                at = found.end()
            else:
                self._put(text[at])
                at += 1

    def _control(self, numbers: str, letter: str) -> None:
        row = self.rows[self.row]
        if letter == "K":
            left, right = (
                ("" if numbers == "2" else row[: self.column]),
                (row[self.column :] if numbers == "1" else ""),
            )
            self.rows[self.row] = left.ljust(self.column if right else 0) + right
        else:
            assert letter == "m", f"ESC [ {numbers} {letter}"

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self._down()
        else:
            assert character.isprintable(), repr(character)
            if self.column == self.width:
                self._down()
                self.column = 0
            row = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
            self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.rows):
            self.rows.append("")

    @property
    def lines(self) -> list[str]:
        return [row.rstrip() for row in self.rows]


class InTerminal:
    """``python -m elastic <arguments>`` in a pseudo-terminal of its own, of which ``typed`` is everything
    that it has printed.

    If it is ``warm``, a fork of the process at ``SOCKET`` does that.
    """

    def __init__(
        self, folder: Path, *arguments: str, warm: bool = False, width: int = 100, **environment: str
    ) -> None:
        ours = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("RAY_") and name not in ("NO_COLOR", "CI", "COLUMNS", "LINES")
        }
        self.master, slave = pty.openpty()
        self.typed, self.seen, self._heard = "", Seen(width), threading.Condition()
        self.resize(width)
        known = {
            "PYTHONPATH": f"{folder}:{ROOT}",
            "TERM": "xterm-256color",
            "PYTHONUNBUFFERED": "1",
            MARK: str(folder),
        }
        self.process = subprocess.Popen(
            [sys.executable, *[FORK] * warm, "-m", "elastic", *arguments],
            cwd=folder,
            env={**ours, **known, **environment},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")()
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(self.master, 4096):
                with self._heard:
                    text = decoder.decode(data)
                    self.typed += text
                    self.seen.feed(text)
                    self._heard.notify_all()

    def resize(self, width: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
        self.seen.width = width

    def until(self, pattern: str) -> None:
        """Waits until the command has printed ``pattern``."""
        with self._heard:
            assert self._heard.wait_for(lambda: re.search(pattern, self.typed), PATIENCE_S), (
                f"no {pattern!r} in {self.typed}"
            )

    def press(self, key: bytes) -> None:
        os.write(self.master, key)

    def wait(self) -> int:
        """Waits for the command's end, and for what it has printed."""
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"still running: {self.typed}") from None
        self._reader.join(10)
        os.close(self.master)
        return code
