"""Objects: bytes under a key, in a folder, in memory or in a bucket.

The port is the few verbs that checkpoints, journals and datasets need, and one guarantee that all of them rest on: an object is
there whole or not at all, and ``put_if_absent`` lets exactly one of many writers win.  Nothing is cached: what another process
wrote a moment ago is seen.

fsspec does the transport, but its ``file://`` writes in place and checks before it creates.  So in a folder an object is written
aside, under a name that begins with ``.partial-``, synced to the disk, and then renamed (``put``) or linked (``put_if_absent``,
which fails atomically where something is).  What a killed writer leaves is never listed.  A sync takes half a millisecond on an
SSD; without it a manifest could outlive, in a power cut, the shards it speaks of.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from storage.errors import Exists, Missing, Unavailable
from storage.urls import folder_of

Piece = bytes | bytearray | memoryview
Data = Piece | Iterable[Piece]
"""What can be written: all at once, or piece by piece so that nobody holds the whole."""

PARTIAL = ".partial-"

_create = threading.Lock()
"""``memory://`` checks, then writes; it lives in one process, so a lock makes that atomic."""


class ObjectStore:
    """Objects under one URL.  A key is a relative path: ``run/steps/10/g1/MANIFEST.json``.

    Every verb may raise :class:`Unavailable`; those that need the object to be there raise :class:`Missing`.
    """

    local = False
    """Are the objects files of this machine, at ``root``/key?"""
    at_once = 1
    """How many requests it may be asked at once: one, as long as nobody knows better."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self.filesystem, self.root = filesystem, root.rstrip("/")

    @staticmethod
    def open(url: str) -> ObjectStore:
        """The store at ``url``: a folder (``/data``, ``file:///data``), ``s3://bucket/prefix``, ``memory://name``, or what else
        fsspec knows."""
        try:
            folder = folder_of(url)
        except ValueError as error:
            raise Unavailable(url, str(error)) from None
        if folder is not None:
            return _Folder(LocalFileSystem(), os.path.abspath(folder))
        if url.startswith("s3://"):
            from storage.s3 import S3  # a second of imports that nobody else needs

            return S3.connect(url)
        try:
            return ObjectStore(*fsspec.core.url_to_fs(url, use_listings_cache=False))
        except (ValueError, ImportError, OSError) as error:
            raise Unavailable(url, f"{error}; use a folder, or a URL such as s3://bucket/prefix") from error

    @property
    def url(self) -> str:
        """``open`` of it is this store again."""
        return str(self.filesystem.unstrip_protocol(self.root))

    def put(self, key: str, data: Data) -> None:
        """Write the object, in place of what was there."""
        with self._writing(key):
            self.filesystem.pipe_file(self._path(key), b"".join(pieces_of(data)))

    def put_if_absent(self, key: str, data: Data) -> None:
        """Write the object, or raise :class:`Exists` when there is one.  Of many writers one wins."""
        whole = b"".join(pieces_of(data))
        with self._writing(key), _create:
            self.filesystem.pipe_file(self._path(key), whole, mode="create")

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        """The bytes ``[start, stop)``, as of a Python slice: fewer where the object ends before."""
        if stop is not None and stop <= (start or 0):
            self.size(key)
            return b""
        with self._reading(key):
            return bytes(self.filesystem.cat_file(self._path(key), start, stop))

    def size(self, key: str) -> int:
        """Bytes of the object."""
        with self._reading(key):
            info = self.filesystem.info(self._path(key))
        if info["type"] != "file":
            raise Missing(key, self.url)
        return int(info["size"])

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except Missing:
            return False
        return True

    def list(self, prefix: str = "") -> list[str]:
        """All keys that begin with ``prefix``, sorted."""
        with self._reading(prefix):
            paths = self.filesystem.find(f"{self.root}/{prefix.rpartition('/')[0]}")
        keys = (path.removeprefix(self.root).lstrip("/") for path in paths)
        return sorted(key for key in keys if key.startswith(prefix))

    def delete(self, key: str) -> None:
        """Remove the object; nothing happens when there is none."""
        with suppress(Missing), self._reading(key):
            self.filesystem.rm_file(self._path(key))

    def in_parts(self) -> ObjectStore | None:
        """The same store, but each object goes up in parts, even the smallest; None where there is no such thing."""
        return None

    def full_name(self, key: str) -> str:
        """What messages call the object."""
        return f"{self.url}/{key}"

    def _path(self, key: str) -> str:
        parts = key.split("/")
        if not all(parts) or "." in parts or ".." in parts or parts[-1].startswith(PARTIAL):
            raise ValueError(f"{key!r} is no key: it must be a relative path without '.', '..', empty parts and {PARTIAL}…")
        return f"{self.root}/{key}"

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise Missing(key, self.url) from error
        except OSError as error:
            raise Unavailable(self.full_name(key), str(error)) from error

    @contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileExistsError as error:
            raise Exists(key, self.url) from error
        except OSError as error:
            raise Unavailable(self.full_name(key), str(error)) from error


class _Folder(ObjectStore):
    """Objects as files under a folder, which every process that uses it sees as the same place."""

    local = True
    at_once = 8

    @property
    def url(self) -> str:
        return self.root

    def put(self, key: str, data: Data) -> None:
        path = self._path(key)
        with self._written_aside(key, data) as aside, self._writing(key):
            os.replace(aside, path)
            self._sync_folders(key)

    def put_if_absent(self, key: str, data: Data) -> None:
        path = self._path(key)
        if os.path.lexists(path):  # spares writing what will be refused; the link decides
            raise Exists(key, self.url)
        with self._written_aside(key, data) as aside, self._writing(key):
            os.link(aside, path)
            self._sync_folders(key)

    def list(self, prefix: str = "") -> list[str]:
        """fsspec's ``find`` stumbles over files that vanish while it looks; walking names only does not."""
        found = []
        for folder, _, files in os.walk(f"{self.root}/{prefix.rpartition('/')[0]}"):
            relative = os.path.relpath(folder, self.root)
            found += [str(PurePosixPath(relative, file)) for file in files if not file.startswith(PARTIAL)]
        return sorted(key for key in found if key.startswith(prefix))

    @contextmanager
    def _written_aside(self, key: str, data: Data) -> Iterator[str]:
        """The data in a file of its own, on the disk; the file is gone afterwards unless it was renamed."""
        folder = os.path.dirname(self._path(key))
        aside = f"{folder}/{PARTIAL}{uuid.uuid4().hex}"
        try:
            try:
                os.makedirs(folder, exist_ok=True)
                with open(aside, "xb") as file:
                    file.writelines(pieces_of(data))
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise Unavailable(self.full_name(key), str(error)) from error
            yield aside
        finally:
            with suppress(OSError):
                os.unlink(aside)

    def _sync_folders(self, key: str) -> None:
        """A name is on the disk once its folder is; folders that may be new are names too."""
        for folder in PurePosixPath(key).parents:
            descriptor = os.open(f"{self.root}/{folder}", os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def pieces_of(data: Data) -> Iterable[Piece]:
    """``data`` as its pieces."""
    return (data,) if isinstance(data, bytes | bytearray | memoryview) else data
