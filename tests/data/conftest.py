"""A folder of text, and places for datasets."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.objects import ObjectStore
from tests.data.texts import TEXTS, memory, write_texts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "text", TEXTS)


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(str(tmp_path / "dataset")) if request.param == "file" else memory()
