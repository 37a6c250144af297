"""Objects as files under a folder.

A writer first writes a file of its own whose name begins with ``.partial-``, and syncs it to the disk.
``put`` then renames that file; ``put_if_absent`` links it, which fails atomically if the name is taken.  The
partial file of a killed writer is never listed.  A sync takes half a millisecond on an SSD.  Without it, a
power cut could leave a manifest without the shards that it names.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EINVAL, EMLINK, ENOSYS, EOPNOTSUPP, EPERM
from pathlib import PurePosixPath

from storage.errors import Exists, Full, Missing, Unavailable
from storage.objects.port import NO_ROOM, PARTIAL, Data, ObjectStore, pieces_of
from storage.objects.urls import folder_of

NO_LINKS = (EMLINK, ENOSYS, EOPNOTSUPP, EPERM)
"""Errors of file systems without hard links."""
NO_SYNC = (EINVAL, ENOSYS, EOPNOTSUPP)
"""Errors of file systems that cannot sync a folder."""
MOUNTED = (
    "if the folder is a mounted bucket, give the bucket's URL (s3://bucket/prefix); otherwise name a "
    "folder on a local disk or on NFS"
)


def sync_folder(folder: str) -> bool:
    """Puts the names in a folder on the disk.  Returns False if its file system cannot do that: then they get
    there some time later.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
        return False
    finally:
        os.close(descriptor)
    return True


class Folder(ObjectStore):
    """The objects in a folder, which every process that uses it must see as the same folder."""

    local = True
    at_once = 8

    @classmethod
    def connect(cls, url: str) -> Folder:
        return cls(os.path.abspath(folder_of(url) or ""))

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
        if os.path.isdir(path):
            raise Unavailable(self.full_name(key), "there is a folder of this name; remove the folder")
        if os.path.lexists(path):  # saves writing what would be refused; the link decides
            raise Exists(key, self.url)
        with self._written_aside(key, data) as aside, self._writing(key):
            self._link(aside, path)
            self._sync_folders(key)

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        with self._reading(key), open(self._path(key), "rb") as file:
            first, last, _ = slice(start, stop).indices(os.fstat(file.fileno()).st_size)
            file.seek(first)
            return file.read(max(last - first, 0))

    def size(self, key: str) -> int:
        with self._reading(key):
            found = os.stat(self._path(key))
        if not stat.S_ISREG(found.st_mode):
            raise Missing(key, self.url)
        return found.st_size

    def children(self, folder: str = "") -> list[str]:
        try:
            with os.scandir(f"{self.root}/{folder}") as found:
                return sorted(
                    f"{each.name}/" if each.is_dir() else each.name
                    for each in found
                    if not each.name.startswith(PARTIAL)
                )
        except OSError as error:
            self._cannot_list(error)
            return []

    def list(self, prefix: str = "") -> list[str]:
        found = []
        for folder, _, files in os.walk(
            f"{self.root}/{prefix.rpartition('/')[0]}", onerror=self._cannot_list
        ):
            relative = os.path.relpath(folder, self.root or "/")
            found += [str(PurePosixPath(relative, file)) for file in files if not file.startswith(PARTIAL)]
        return sorted(key for key in found if key.startswith(prefix))

    def delete(self, key: str) -> None:
        with suppress(Missing), self._reading(key):
            os.unlink(self._path(key))

    def tidy(self, folder: str) -> None:
        """Removes partial files in ``folder`` and below, each folder there that is empty then, and the one
        above it if that is empty.
        """
        path = self._path(folder.rstrip("/"))
        for place, _, files in os.walk(path, topdown=False):
            for name in files:
                if name.startswith(PARTIAL):
                    with suppress(OSError):  # somebody else has tidied up
                        os.unlink(f"{place}/{name}")
            with suppress(OSError):  # there is an object in it
                os.rmdir(place)
        with suppress(OSError):
            os.rmdir(os.path.dirname(path))

    @contextmanager
    def _written_aside(self, key: str, data: Data) -> Iterator[str]:
        """Yields the path of a file that holds the data and is on the disk.  Removes it afterwards, unless it
        was renamed.
        """
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
                raise _refused(self.full_name(key), error) from error
            yield aside
        finally:
            with suppress(OSError):
                os.unlink(aside)

    def _link(self, aside: str, path: str) -> None:
        try:
            os.link(aside, path)
        except OSError as error:
            if error.errno in NO_LINKS:
                raise Unavailable(
                    path, f"its file system has no hard links ({error.strerror}); {MOUNTED}"
                ) from error
            raise

    def _sync_folders(self, key: str) -> None:
        """Puts the object's name on the disk, and the names of its folders, which may be new."""
        for folder in PurePosixPath(key).parents:
            sync_folder(f"{self.root}/{folder}")

    def _cannot_list(self, error: OSError) -> None:
        """Raises :class:`Unavailable` if a folder is there and cannot be read; one that is gone meanwhile has
        no objects.
        """
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise Unavailable(str(error.filename or self.root), str(error)) from error

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
            raise _refused(self.full_name(key), error) from error


def _refused(name: str, error: OSError) -> Unavailable:
    return (Full if error.errno in NO_ROOM else Unavailable)(name, str(error))
