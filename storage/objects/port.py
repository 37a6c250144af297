"""The port: what every object store can do, and what checkpoints, journals and datasets rely on.

An object is bytes under a key.  Every store keeps three promises.  An object is there whole or not at all.
Of several writers that create the same object with ``put_if_absent``, exactly one succeeds.  A reader sees
what another process wrote a moment ago: no store caches.  Only listings (``list``, ``children``) may be some
seconds old: what must be current is found by its name.

A backend is one file with a subclass of :class:`ObjectStore`, and one row in
:data:`storage.objects.urls.BACKENDS`.  Its tests inherit ``tests/storage/conformance.py``.
"""

from __future__ import annotations

import errno
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from storage.errors import Missing, Unavailable
from storage.objects.urls import backend_of

Piece = bytes | bytearray | memoryview
Data = Piece | Iterable[Piece]
"""The content that a writer passes: the whole object, or its pieces one by one, so that the whole need not be
in memory.
"""


@dataclass(frozen=True)
class Sized:
    """Yields the pieces of an object that has ``size`` bytes: a store that knows this beforehand uploads it
    in equal parts.
    """

    size: int
    pieces: Iterable[Piece]

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.pieces)


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Errors of the system by which it refuses to store more."""

PARTIAL = ".partial-"
"""File names that begin with this are objects that are still being written.  They are never listed, and no
key may contain them.
"""


class ObjectStore(ABC):
    """The objects under one URL.  A key is a relative path: ``run/steps/10/g1/MANIFEST.json``.

    Every method may raise :class:`Unavailable`; ``get`` and ``size`` raise :class:`Missing` if there is no
    such object.
    """

    local = False
    """True if the objects are files of this machine, at ``root``/key."""
    at_once = 1
    """Number of requests that one caller may have under way at the same time."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")

    @staticmethod
    def open(url: str) -> ObjectStore:
        """Returns the store at ``url``: a folder (``/data``, ``file:///data``), ``s3://bucket/prefix``,
        ``memory://name``, or any other URL that fsspec knows.
        """
        try:
            backend = backend_of(url)
        except ValueError as error:
            raise Unavailable(url, str(error)) from None
        store: ObjectStore = pkgutil.resolve_name(backend).connect(url)
        return store

    @classmethod
    @abstractmethod
    def connect(cls, url: str) -> ObjectStore:
        """Returns the store at ``url``.  Sends no request yet."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL with which :meth:`open` returns this store again."""

    @abstractmethod
    def put(self, key: str, data: Data) -> None:
        """Writes the object and replaces the one that was there."""

    @abstractmethod
    def put_if_absent(self, key: str, data: Data) -> None:
        """Writes the object, or raises :class:`Exists` if there is one already.  Exactly one of several
        writers succeeds.
        """

    @abstractmethod
    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Returns the bytes ``[start, stop)``, like a Python slice: fewer if the object ends earlier."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Returns the size of the object in bytes."""

    @abstractmethod
    def children(self, folder: str = "") -> list[str]:
        """Returns the names that stand directly below ``folder``, sorted: of objects, and of folders, which
        end with "/".

        ``folder`` is "" or ends with "/".  Unlike :meth:`list`, it does not look into the folders.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> list[str]:
        """Returns all keys that begin with ``prefix``, sorted."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Removes the object; does nothing if there is none."""

    def matching(self, folder: str, pattern: str) -> Sequence[re.Match[str]]:
        """Returns the matches of ``pattern`` with the keys below ``folder``, in their order.  ``folder`` ends
        with "/", and is cut off before the match.

        Keys that do not match are foreign and passed over: NFS, file managers and editors leave files of
        their own.
        """
        return [found for key in self.list(folder) if (found := re.fullmatch(pattern, key[len(folder) :]))]

    def exists(self, key: str) -> bool:
        """Returns whether there is such an object."""
        try:
            self.size(key)
        except Missing:
            return False
        return True

    def tidy(self, folder: str) -> None:  # noqa: B027 (most stores have nothing to tidy)
        """Removes what a store keeps in ``folder`` beside its objects: unfinished files of dead writers, and
        folders without objects.

        ``folder`` ends with "/".  Nobody writes there any more.  Most stores have folders only in the names
        of their objects.
        """

    def in_parts(self) -> ObjectStore | None:
        """Returns the same store set to upload even the smallest object in parts, or None if it has no such
        uploads.
        """
        return None

    def full_name(self, key: str) -> str:
        """Returns the object's name for messages."""
        return f"{self.url}/{key}"

    def _path(self, key: str) -> str:
        """Returns ``root``/key.  Raises :class:`ValueError` if ``key`` is not a key."""
        if not is_key(key):
            raise ValueError(
                f"{key!r} is not a valid key: it must be a relative path without '.', '..', empty parts and "
                f"{PARTIAL}…"
            )
        return f"{self.root}/{key}"


def is_key(key: str) -> bool:
    """Returns whether ``key`` names an object: a relative path that stays where it begins."""
    parts = key.split("/")
    return (
        all(parts)
        and not {".", ".."}.intersection(parts)
        and not parts[-1].startswith(PARTIAL)
        and "\0" not in key
    )


def below(folder: str, keys: Iterable[str]) -> list[str]:
    """Returns what :meth:`ObjectStore.children` returns for ``folder``, below which all ``keys`` lie."""
    names = (key.removeprefix(folder).partition("/") for key in keys)
    return sorted({name + slash for name, slash, _ in names})


def pieces_of(data: Data) -> Iterable[Piece]:
    """Returns ``data`` as its pieces."""
    return (data,) if isinstance(data, bytes | bytearray | memoryview) else data


def size_of(data: Data) -> int | None:
    """Returns the number of bytes of ``data``, or None if nobody knows it before the last piece."""
    return (
        data.size
        if isinstance(data, Sized)
        else memoryview(data).nbytes
        if isinstance(data, bytes | bytearray | memoryview)
        else None
    )
