"""A storage backend that Elastic does not know: objects as rows of an SQLite file,
``toy:///folder/objects.db/prefix``.

This one file is all that a user writes.  ``install`` makes it an installed package, whose entry point fsspec
finds in every process.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem

TABLE = "CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, data BLOB NOT NULL)"
NAMES = "CREATE TABLE IF NOT EXISTS names (key TEXT, since REAL, until REAL)"
LAG_S = 2.0
ENTRY = "[fsspec.specs]\ntoy = tests.support.toy_store:Toy\nlate = tests.support.toy_store:Late\n"


class Toy(AbstractFileSystem):  # type: ignore[misc]
    """The five verbs that a store calls.  SQLite's primary key makes creating an object atomic, also between
    processes.
    """

    protocol = "toy"
    cachable = False

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        how = "INSERT" if mode == "create" else "INSERT OR REPLACE"
        try:
            with self._table(path) as (rows, key):
                rows.execute(f"{how} INTO objects VALUES (?, ?)", (key, value))
        except sqlite3.IntegrityError:
            raise FileExistsError(path) from None

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        with self._table(path) as (rows, key):
            found = rows.execute("SELECT data FROM objects WHERE key = ?", (key,)).fetchone()
        if found is None:
            raise FileNotFoundError(path)
        return bytes(found[0][start:end])

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": len(self.cat_file(path))}

    def find(self, path: str, **_: Any) -> list[str]:
        with self._table(path) as (rows, key):
            found = rows.execute(
                "SELECT key FROM objects WHERE substr(key, 1, ?) = ?", (len(key), key)
            ).fetchall()
        file = path.partition(".db")[0]
        return [f"{file}.db/{each}" for (each,) in found]

    def rm_file(self, path: str) -> None:
        with self._table(path) as (rows, key):
            rows.execute("DELETE FROM objects WHERE key = ?", (key,))

    @contextmanager
    def _table(self, path: str) -> Iterator[tuple[sqlite3.Connection, str]]:
        file, _, key = path.partition(".db")
        with closing(sqlite3.connect(f"{file}.db", timeout=60)) as rows, rows:
            rows.execute(TABLE)
            yield rows, key.strip("/")


class Late(Toy):
    """A toy whose listings are :data:`LAG_S` old: they lack new objects, and show some that are gone.  Reads
    are current.
    """

    protocol = "late"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        super().pipe_file(path, value, mode)
        with self._table(path) as (rows, key):
            rows.execute(NAMES)
            if not rows.execute("SELECT 1 FROM names WHERE key = ? AND until IS NULL", (key,)).fetchone():
                rows.execute("INSERT INTO names VALUES (?, ?, NULL)", (key, time.time()))

    def rm_file(self, path: str) -> None:
        super().rm_file(path)
        with self._table(path) as (rows, key):
            rows.execute(NAMES)
            rows.execute("UPDATE names SET until = ? WHERE key = ? AND until IS NULL", (time.time(), key))

    def find(self, path: str, **_: Any) -> list[str]:
        then = time.time() - LAG_S
        shown = (
            "SELECT DISTINCT key FROM names WHERE substr(key, 1, ?) = ? AND since <= ? AND (until IS NULL "
            "OR until > ?)"
        )
        with self._table(path) as (rows, key):
            rows.execute(NAMES)
            found = rows.execute(shown, (len(key), key, then, then)).fetchall()
        return [f"{path.partition('.db')[0]}.db/{each}" for (each,) in found]


def install(site: Path) -> None:
    """Makes ``site`` a folder of installed packages that has this one, with the files that pip writes for an
    entry point.
    """
    about = site / "toy_store-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-store\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY)
