"""Prints the output of commands: lines that stay and, on a terminal, one line below them that changes.

The line that changes is taken away before anything else is printed, whoever prints it, so nothing of it is
left over.  A pipe whose reader has gone ends no run: what is printed from then on is lost.  Off a terminal
there are only plain lines, without control characters.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

WIDE = 240
"""Largest width of a table off a terminal, in columns: nothing is cut or wrapped in a file, where ``grep``
must find it.
"""
ERASE = "\r\x1b[K"
"""Returns to the beginning of the line, and clears it."""
ECHO = 3
"""Columns that are left free at the end of the line that changes: the terminal itself writes ^C there."""
HINT = re.compile(
    r"`elastic ((?:checkpoint )?(?!data|dtypes|settings|simulate)[a-z]+)((?: "
    r"--(?!help)[^`]*)?)`"
)
"""Matches a command in a sentence that takes a job file and does not name one."""
GONE = (errno.EPIPE, errno.EIO)
"""Errors of a pipe whose reader has gone, and of a terminal that has."""


class Terminal(Console):
    """The terminal of this process, or the file or pipe in its place."""

    def __init__(self) -> None:
        # a notebook would make a block of HTML of each line
        super().__init__(highlight=False, force_jupyter=False)
        if not self.is_screen:
            self.width = WIDE
        self._drawn, self._guard = "", threading.RLock()
        self.job = ""
        """The words that name the job on the line of the command under way: its file, and its settings."""
        self._midline = False
        """True if what was printed last has not ended its line."""

    @property
    def is_screen(self) -> bool:
        """True if this is a terminal.  A notebook is none, although rich takes it for one because Jupyter
        sets ``FORCE_COLOR``.
        """
        return self.is_terminal and bool(self.file.isatty())

    @property
    def changes(self) -> bool:
        """True if a line can change: not in a file, nor on a terminal without control characters."""
        return self.is_screen and not self.is_dumb_terminal

    def draw(self, text: str) -> None:
        """Shows ``text`` in the line that changes, as much as fits."""
        with self._guard:
            text = text[: max(self.width - ECHO, 1)]  # a longer line would go on in a second one, which stays
            if self.changes and not self._midline and text != self._drawn:
                _write(_raw(self.file), f"{ERASE}{text}")
                self._drawn = text

    def erase(self) -> None:
        """Takes the line that changes away."""
        with self._guard:
            if self._drawn:
                self._drawn = ""
                _write(_raw(self.file), ERASE)

    def print(self, *objects: Any, **options: Any) -> None:
        self.erase()
        super().print(*objects, **options)

    def pasteable(self, text: str) -> str:
        """Returns ``text`` with the job in every command that lacks it, so that the user can paste these
        commands.
        """
        return (
            HINT.sub(lambda found: f"`elastic {found[1]} {self.job}{found[2]}`", text) if self.job else text
        )

    def on_broken_pipe(self) -> None:
        """Raises ``BrokenPipeError``, so that the command decides whether it ends: see :func:`lasting`."""
        raise BrokenPipeError(errno.EPIPE, "nobody reads what this command prints")

    def passing(self, stream: TextIO, text: str) -> None:
        """Prints ``text``, which this console has not made, to ``stream``."""
        with self._guard:
            if stream.isatty():
                self.erase()
                self._midline = not text.endswith(("\n", "\r")) if text else self._midline
            _write(stream, text)


console = Terminal()


class _Lasting:
    """A stream of this process that erases the line that changes before it prints, and goes on without a
    reader.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        console.passing(self.stream, text)
        return len(text)

    def flush(self) -> None:
        _write(self.stream, "")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Replaces stdout and stderr within the block: printing goes on without a reader, and does not disturb
    the line that changes.
    """
    out, err = _Lasting(sys.stdout), _Lasting(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        finally:
            console.erase()


def _raw(file: Any) -> Any:
    return file.stream if isinstance(file, _Lasting) else file


def _write(stream: Any, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        if error.errno not in GONE:
            raise
        forget(stream)


def forget(stream: Any) -> None:
    """Discards what is printed to ``stream`` from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def say(text: str, head: str = "", style: str = "") -> None:
    """Prints a sentence after a coloured ``head``, in lines that break between words on a terminal, and in
    one line elsewhere.

    Brackets in ``text`` are not markup; commands in it get the job.
    """
    console.print(Text.assemble((head, style), console.pasteable(text)), soft_wrap=not console.is_screen)


def show_table(*columns: str, rows: Iterable[Sequence[object]], title: str = "") -> None:
    """Prints a table.  A cell that is too wide for a terminal goes on below, so that nothing of it is left
    out.
    """
    table = Table(*(Column(name, overflow="fold") for name in columns), title=title)
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)


def filled(text: str, width: int) -> str:
    """Returns the line of a step, in lines of ``width`` that break between two of its numbers."""
    lines = [""]
    for part in re.split(r"(?<=\S)(?<!step) {2,}", text):
        longer = f"{lines[-1]}  {part}" if lines[-1] else part
        lines[-1:] = [longer] if len(longer) <= width else [lines[-1], part]
    return "\n".join(lines)
