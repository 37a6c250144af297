"""Says of the error of a command where the value came from that is at fault: the job file, or an option of the line."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from elastic.config.settings import located, read_toml, source_of
from elastic.errors import ElasticError
from elastic.job import Job
from storage.errors import StorageError, Unavailable


def told(error: ElasticError | StorageError, known: Namespace) -> str:
    """Returns the message of ``error``, with the source of the settings with which its lines begin.

    That of a bucket that does not answer begins with the setting.
    """
    text, file, settings = str(error), getattr(known, "job", None), getattr(known, "settings", None)
    if not isinstance(file, Path) or file.suffix != ".toml" or settings is None:
        return text
    if isinstance(error, Unavailable) and not text.startswith("bucket = "):
        bucket = str(settings.get("bucket", read_toml(file).get("bucket", "")))
        scheme, _, rest = bucket.partition("://")
        if error.object == "s3://…" and scheme == "s3":  # it may have a secret in it
            text = f"bucket = {error.object!r}: {text}"
        elif rest and error.object.startswith(bucket.rstrip("/")):
            text = f"bucket = {bucket!r}: {text}"
    return located(text, Job, source_of(file.name, settings))
