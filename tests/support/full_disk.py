"""A disk that is full for a moment, and one that is small."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def full_disk(file: Path, room: int) -> Iterator[None]:
    """Lets ``file`` grow by ``room`` bytes only: the system takes that much of a write and refuses the rest,
    with EFBIG for ENOSPC.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((file.stat().st_size if file.exists() else 0) + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Lets ``folder`` be a file system of its own with room for ``size`` bytes, rounded up to 4 KiB."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
