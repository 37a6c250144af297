"""A disk that is full for a moment."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def full_disk(file: Path, room: int) -> Iterator[None]:
    """Lets ``file`` grow by ``room`` bytes only: the system takes that much of a write and refuses the rest, with EFBIG for ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((file.stat().st_size if file.exists() else 0) + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
