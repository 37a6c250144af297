"""Notes what is put on the disk: a power cut cannot be tried in a test."""

from __future__ import annotations

import os

import pytest


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list to which the path of each file and folder is added that this process gives to
    ``os.fsync`` from now on.
    """
    synced, sync = list[str](), os.fsync

    def noting(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    return synced
