"""Tests the bucket of a job before anything starts."""

from __future__ import annotations

import os
from errno import EACCES, ENOENT, ENOTDIR, EPERM, EROFS
from pathlib import Path
from tempfile import TemporaryDirectory

from elastic.errors import JobError
from elastic.job import Job
from storage.errors import Unavailable
from storage.objects import PARTIAL, ObjectStore
from storage.objects.folder import NO_LINKS, NO_SYNC, Folder, sync_folder
from storage.objects.selftest import check

WRONG_FOLDER = (EACCES, ENOENT, ENOTDIR, EPERM, EROFS)
"""Errors on creating a file that mean that the job names a wrong folder.  Other errors, such as a full disk,
are no fault of the job.
"""
UNABLE = {*NO_LINKS, *NO_SYNC}
"""Errors of a file system that lacks what a store of objects needs."""


def check_bucket(job: Job) -> list[str]:
    """Tests the bucket, and returns sentences about it that the user should read.

    Raises as :func:`open_bucket`; :class:`JobError` for a folder that this user cannot write or whose file
    system cannot hold objects; and :class:`Unavailable`, with the setting, for a bucket that cannot be relied
    on.
    """
    named = f"bucket = {job.bucket!r}"
    try:
        store = open_bucket(job)
        if store.local:
            new = (
                []
                if os.path.lexists(store.url)
                else [f"bucket {store.url} is not there yet: the run makes it"]
            )
            return new + _check_folder(named, Path(store.url, job.name))
        late_s = check(store, job.name)
    except Unavailable as error:
        # a URL that is no bucket's may have a secret in it
        shown = error.object if "…" in error.object else job.bucket
        raise Unavailable(f"bucket = {shown!r}: {error.object}", *error.args[1:]) from error
    late = f"{named} lists a new object only {late_s:.1f} s after it was written"
    return [f"{late}; so each start waits until earlier objects are listed"] if late_s else []


def open_bucket(job: Job) -> ObjectStore:
    """Returns the bucket.  Raises :class:`JobError` for a URL whose package is missing."""
    try:
        return ObjectStore.open(job.bucket)
    except Unavailable as error:
        if isinstance(error.__cause__, ImportError):
            fix = "install the package on every node, or name another bucket"
            raise JobError(f"bucket = {job.bucket!r} needs a package: {error.__cause__}; {fix}") from error
        raise


def _check_folder(named: str, there: Path) -> list[str]:
    """Writes objects into a temporary folder in the nearest existing parent of ``there``, or in ``there``,
    and returns a warning if the file system cannot sync a folder.
    """
    while not os.path.lexists(there):
        there = there.parent
    try:
        with TemporaryDirectory(prefix=PARTIAL, dir=there) as folder:
            trial = Folder(folder)
            trial.put_if_absent("object", b"")
            trial.put("object", b"")
            syncs = sync_folder(folder)
    except Unavailable as error:
        if getattr(error.__cause__, "errno", None) not in UNABLE:
            raise
        raise JobError(f"{named} cannot hold objects ({there}): {error.args[1]}") from error
    except OSError as error:
        if error.errno not in WRONG_FOLDER:
            raise Unavailable(str(there), str(error)) from error
        wrong = f"{named} is not a folder in which this user can write ({there}: {error.strerror})"
        raise JobError(f"{wrong}; name another folder, or a URL such as s3://bucket/prefix") from error
    return (
        []
        if syncs
        else [f"{named}: its file system cannot sync a folder, so a power cut may take the newest checkpoint"]
    )
