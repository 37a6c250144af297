"""A sink of a user's own: a table of SQLite, which refuses a step that it has."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from elastic.sinks.port import TrackedRun


class Table:
    """``broken`` is a file: as long as it is there, the table cannot be written, and ``broken``.tried says
    that somebody has tried.
    """

    def __init__(self, run: TrackedRun, path: str, broken: str = "") -> None:
        self.path, self.broken = path, broken
        with closing(sqlite3.connect(path)) as there, there:
            there.execute("create table if not exists steps (step integer primary key, loss real, run text)")
        self.run = run.name

    def last(self) -> int:
        with closing(sqlite3.connect(self.path)) as there:
            return int(there.execute("select coalesce(max(step), 0) from steps").fetchone()[0])

    def write(self, rows: Sequence[Mapping[str, float]]) -> None:
        if self.broken and Path(self.broken).exists():
            Path(f"{self.broken}.tried").touch()
            raise OSError("the table is broken")
        with closing(sqlite3.connect(self.path)) as there, there:
            there.executemany(
                "insert into steps values (?, ?, ?)", [(row["step"], row["loss"], self.run) for row in rows]
            )


class Forgetful(Table):
    """A sink that does not know what it has: the control."""

    def last(self) -> int:
        return 0


class Titled(Table):
    """A sink with a table for each run that a tracker would show."""

    def __init__(self, run: TrackedRun, path: str) -> None:
        super().__init__(run, f"{path}-{run.title}")


class Hanging(Table):
    """A sink that begins to write and never ends, as a tracker whose server does not answer."""

    def write(self, rows: Sequence[Mapping[str, float]]) -> None:
        Path(self.broken).touch()
        threading.Event().wait()


def rows_in(path: Path) -> list[tuple[int, float]]:
    with closing(sqlite3.connect(path)) as there:
        return there.execute("select step, loss from steps order by rowid").fetchall()
