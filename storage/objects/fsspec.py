"""Objects in any place that fsspec knows and that has no backend of its own: ``gs://``, ``az://``, or a
scheme that an installed package brings.

A package brings a scheme by the entry point that fsspec defines: the group ``fsspec.specs``, the scheme, and
the class.  Every process of a run then finds it, and nothing in Elastic changes.

fsspec does not promise that creating an object is atomic: some of its filesystems look first and write then.
The self-test (:mod:`storage.objects.selftest`) refuses those before a run begins.  Filesystems also differ in
what they try again and in how long they wait, so every call here goes through
:class:`~storage.objects.remote.RemotePolicy`, on a thread that a silent store cannot hold up.

An object is held whole in memory while it is written.  ``pipe_file`` takes it whole, and a failed attempt
needs all bytes again.  A stream, ``open(path, "xb")``, is no substitute: fsspec leaves to each filesystem
whether there is that mode, and whether it is atomic.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import fsspec

from storage.background import in_background
from storage.errors import Exists, Full, Missing, Unavailable
from storage.objects.port import NO_ROOM, Data, ObjectStore, below, pieces_of
from storage.objects.remote import RemotePolicy, Retryable

MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
FINAL = (
    PermissionError,
    NotImplementedError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ImportError,
)
"""Errors that another attempt would meet again.  All other errors may pass: every library has classes of its
own for a busy server.
"""


class Fsspec(ObjectStore):
    """The objects under ``root`` of an fsspec filesystem."""

    def __init__(self, filesystem: Any, root: str, policy: RemotePolicy | None = None) -> None:
        super().__init__(root)
        self.filesystem, self.policy = filesystem, policy or RemotePolicy()

    @classmethod
    def connect(cls, url: str) -> Fsspec:
        try:
            return cls(*fsspec.core.url_to_fs(url, use_listings_cache=False))
        except (ValueError, ImportError, OSError) as error:
            raise Unavailable(url, f"{error}; use a folder, or a URL such as s3://bucket/prefix") from error

    @property
    def url(self) -> str:
        return str(self.filesystem.unstrip_protocol(self.root))

    def put(self, key: str, data: Data) -> None:
        whole = b"".join(pieces_of(data))
        self._call(key, "pipe_file", self._path(key), whole, moved_bytes=len(whole))

    def put_if_absent(self, key: str, data: Data) -> None:
        """Writes the object, or raises :class:`Exists`.

        If the answer to the first attempt is lost, the second attempt raises :class:`Exists` even if the
        object is its own.  All callers compare the bytes or try another name.  The opposite error, two
        writers that both believe they won, would be worse.
        """
        whole = b"".join(pieces_of(data))
        try:
            self._call(key, "pipe_file", self._path(key), whole, mode="create", moved_bytes=len(whole))
        except FileExistsError as error:
            raise Exists(key, self.url) from error

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        if stop is not None and stop <= (start or 0):
            self.size(key)
            return b""
        wanted = stop - (start or 0) if stop is not None else self.size(key)
        return bytes(self._call(key, "cat_file", self._path(key), start, stop, moved_bytes=wanted))

    def size(self, key: str) -> int:
        info = self._call(key, "info", self._path(key))
        if info["type"] != "file":
            raise Missing(key, self.url)
        return int(info["size"])

    def children(self, folder: str = "") -> list[str]:
        try:
            found = self._call(folder, "ls", f"{self.root}/{folder}".rstrip("/"), detail=True)
        except Missing:
            return []
        except Unavailable as error:
            if not isinstance(error.__cause__, NotImplementedError):
                raise
            return below(folder, self.list(folder))  # a filesystem may have ``find`` alone
        return sorted(
            each["name"].rstrip("/").rpartition("/")[2] + ("/" if each["type"] == "directory" else "")
            for each in found
        )

    def list(self, prefix: str = "") -> list[str]:
        try:
            paths = self._call(prefix, "find", f"{self.root}/{prefix.rpartition('/')[0]}")
        except Missing:  # some filesystems raise for an empty folder
            return []
        keys = (path.removeprefix(self.root).lstrip("/") for path in paths)
        return sorted(key for key in keys if key.startswith(prefix))

    def delete(self, key: str) -> None:
        with suppress(Missing):
            self._call(key, "rm_file", self._path(key))

    def tidy(self, folder: str) -> None:
        """Removes the folder, and the one above it, if they are there without objects: some filesystems have
        real folders.

        ``rmdir`` is never called where folders are not real: some filesystems remove a whole bucket by it.
        """
        for each in (folder, f"{folder.rstrip('/').rpartition('/')[0]}/"):
            above, _, name = each.rstrip("/").rpartition("/")
            if self.list(each) or f"{name}/" not in self.children(f"{above}/" if above else ""):
                return
            with suppress(Missing, Unavailable):  # somebody else has removed it, or writes there after all
                self._call(each, "rmdir", f"{self.root}/{each}".rstrip("/"))

    def _call(self, key: str, verb: str, *arguments: Any, moved_bytes: int = 0, **options: Any) -> Any:
        """Calls the filesystem until it answers.  Raises :class:`Missing`, :class:`Unavailable` or
        :class:`FileExistsError`.
        """
        name, call = self.full_name(key), partial(getattr(self.filesystem, verb), *arguments, **options)
        try:
            return self.policy.call(name, partial(_attempt, call), self.policy.transfer_s(moved_bytes))
        except MISSING as error:
            raise Missing(key, self.url) from error
        except FINAL as error:
            raise Unavailable(name, f"{type(error).__name__}: {error}") from error
        except OSError as error:
            if error.errno in NO_ROOM:
                raise Full(name, str(error)) from error
            raise


def _attempt(call: Any, seconds: float) -> Any:
    """Returns the result of ``call()``.  Raises :class:`Retryable` if another attempt may help, or if there
    is no answer within ``seconds``.
    """
    future = in_background(call, "fsspec")
    try:
        error = future.exception(seconds)
    except TimeoutError:
        raise Retryable(f"no answer within {seconds:.1f} s") from None
    if error is None:
        return future.result()
    if isinstance(error, (*MISSING, *FINAL, FileExistsError)) or getattr(error, "errno", None) in NO_ROOM:
        raise error
    raise Retryable(f"{type(error).__name__}: {error}") from error
