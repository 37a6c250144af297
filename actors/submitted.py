"""Checks a command for the mistakes that only ``ray job submit`` makes possible.  It does not need Ray."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.errors import JobError
from storage.objects.urls import folder_of


def _submitted_with() -> Mapping[str, Any]:
    """Returns the runtime environment that ``ray job submit`` gave this process, or nothing if it was not
    submitted.
    """
    text = os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    found: Mapping[str, Any] = json.loads(text).get("runtime_env") or {}
    return found


def check_file(path: Path) -> None:
    """Raises :class:`JobError` for a job file that was not submitted with the job."""
    if _submitted_with().get("working_dir") and not path.exists():
        raise JobError(
            f"there is no job file {str(path)!r} in the submitted working directory ({Path.cwd()}): "
            "put it into the folder that --working-dir names (files in .gitignore are left out), and "
            "give its path relative to this folder"
        )


def check_place(setting: str, url: str) -> None:
    """Raises :class:`JobError` for a folder inside the working directory of a submitted job."""
    folder = folder_of(url)
    if folder is None or not _submitted_with().get("working_dir"):
        return
    here = Path.cwd().resolve()
    if Path(folder).resolve().is_relative_to(here):
        raise JobError(
            f"{setting} = {url!r} lies in the submitted working directory ({here}); every node has its "
            "own copy of this directory, and Ray deletes it: give the absolute path of a folder that "
            "all nodes share, or a URL such as s3://bucket/prefix"
        )
