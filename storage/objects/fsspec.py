"""Objects in any other place that fsspec knows: ``gs://``, ``az://``, or a scheme that an installed package brings.

A package brings a scheme by the entry point that fsspec defines (group ``fsspec.specs``), so every process finds it.  fsspec does not
promise that creating an object is atomic: some of its filesystems look first and write then.  The self-test
(:mod:`storage.objects.selftest`) refuses those before a run begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import fsspec

from storage.errors import Exists, Missing, Unavailable
from storage.objects.port import Data, ObjectStore, pieces_of


class Fsspec(ObjectStore):
    """The objects under ``root`` of an fsspec filesystem."""

    def __init__(self, filesystem: Any, root: str) -> None:
        super().__init__(root)
        self.filesystem = filesystem

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
        with self._writing(key):
            self.filesystem.pipe_file(self._path(key), b"".join(pieces_of(data)))

    def put_if_absent(self, key: str, data: Data) -> None:
        with self._writing(key):
            self.filesystem.pipe_file(self._path(key), b"".join(pieces_of(data)), mode="create")

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        if stop is not None and stop <= (start or 0):
            self.size(key)
            return b""
        with self._reading(key):
            return bytes(self.filesystem.cat_file(self._path(key), start, stop))

    def size(self, key: str) -> int:
        with self._reading(key):
            info = self.filesystem.info(self._path(key))
        if info["type"] != "file":
            raise Missing(key, self.url)
        return int(info["size"])

    def list(self, prefix: str = "") -> list[str]:
        with self._reading(prefix):
            paths = self.filesystem.find(f"{self.root}/{prefix.rpartition('/')[0]}")
        keys = (path.removeprefix(self.root).lstrip("/") for path in paths)
        return sorted(key for key in keys if key.startswith(prefix))

    def delete(self, key: str) -> None:
        with suppress(Missing), self._reading(key):
            self.filesystem.rm_file(self._path(key))

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
