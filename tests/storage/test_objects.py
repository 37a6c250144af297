"""The folder and memory stores pass the suite that all stores must pass; some tests are about folders alone."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from storage.errors import Exists, Unavailable
from storage.objects import PARTIAL, ObjectStore
from storage.objects.fsspec import Fsspec
from tests.storage.conformance import Conformance
from tests.support.patience import PATIENCE_S
from tests.support.syncs import noted

ROOT = Path(__file__).parents[2]


@pytest.mark.fast
class TestFolder(Conformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return ObjectStore.open(str(tmp_path / "bucket"))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("number", "listed"), [(errno.ESTALE, None), (errno.EACCES, None), (errno.ENOENT, ["a/1"])]
)
def test_a_folder_that_cannot_be_read_is_no_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, listed: list[str] | None
) -> None:
    """R11: a run whose network folder failed for a moment began again at step 0.  The control: a folder that
    is gone meanwhile is empty.
    """
    store = ObjectStore.open(str(tmp_path))
    store.put("a/1", b"")
    store.put("b/2", b"")
    scan = os.scandir

    def fails(path: str) -> Any:
        if path.endswith("/b"):
            raise OSError(number, os.strerror(number), path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", fails)
    if listed is not None:
        assert store.list() == listed
        return
    with pytest.raises(Unavailable, match=f"{tmp_path}/b.*{os.strerror(number)}"):
        store.list()


@pytest.mark.fast
class TestFileUrl(Conformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return ObjectStore.open(f"file://{tmp_path}/bucket/")


@pytest.mark.fast
class TestMemory(Conformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return ObjectStore.open(f"memory://{tmp_path.name}")


def test_of_many_processes_one_creates(tmp_path: Path) -> None:
    """Promise 6: create-only holds between processes, and what is seen is always whole."""
    script = (
        "import sys; from storage.objects import ObjectStore; from storage.errors import Exists\n"
        "store, me = ObjectStore.open(sys.argv[1]), sys.argv[2]\n"
        "sys.stdin.readline()\n"
        "for n in range(50):\n"
        "    try: store.put_if_absent(f'k/{n:02}', (me * 1000).encode())\n"
        "    except Exists: continue\n"
        "    print(n)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    writers = [
        subprocess.Popen([*command, me], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        for me in "abc"
    ]
    for writer in writers:  # all are told to begin before any is waited for
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    won = [writer.communicate(timeout=PATIENCE_S)[0].split() for writer in writers]
    store = ObjectStore.open(str(tmp_path))
    assert sorted(key for keys in won for key in keys) == sorted(str(n) for n in range(50))
    for me, keys in zip("abc", won, strict=True):
        assert all(store.get(f"k/{int(n):02}") == (me * 1000).encode() for n in keys)


class _RivalAfterTheCheck(LocalFileSystem):  # type: ignore[misc]
    """This is fsspec's own ``file://`` with a rival that writes between its check and its write."""

    cachable = False

    def exists(self, path: str, **options: Any) -> bool:
        found = super().exists(path, **options)
        Path(path).write_bytes(b"theirs")
        return bool(found)


@pytest.mark.fast
def test_fsspec_create_mode_is_not_enough_in_a_folder(tmp_path: Path) -> None:
    """The negative control: without our link the rival's object is overwritten and nobody is told."""
    naive = Fsspec(_RivalAfterTheCheck(), str(tmp_path))
    naive.put_if_absent("a", b"mine")
    assert (tmp_path / "a").read_bytes() == b"mine"


@pytest.mark.fast
def test_what_a_killed_writer_leaves_is_not_listed(tmp_path: Path) -> None:
    store = ObjectStore.open(str(tmp_path))
    store.put("a", b"1")
    (tmp_path / f"{PARTIAL}left").write_bytes(b"half")
    assert store.list() == ["a"]
    assert store.list(PARTIAL) == []


@pytest.mark.fast
def test_a_refused_create_leaves_nothing_behind(tmp_path: Path) -> None:
    def beaten() -> Iterator[bytes]:
        store.put("a", b"theirs")
        yield b"mine"

    store = ObjectStore.open(str(tmp_path))
    with pytest.raises(Exists):
        store.put_if_absent("a", beaten())
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.fast
def test_a_store_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Unavailable, match="file/run/a cannot be reached or written"):
        ObjectStore.open(str(tmp_path / "file")).put("run/a", b"")
    with pytest.raises(Unavailable, match=r"nosuch://x .*use a folder, or a URL"):
        ObjectStore.open("nosuch://x")


@pytest.mark.fast
@pytest.mark.parametrize("put", ["put", "put_if_absent"])
def test_the_names_of_an_object_and_of_its_folders_are_put_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: str
) -> None:
    """A power cut could otherwise leave a manifest without the shards that it names."""
    store, synced = ObjectStore.open(str(tmp_path)), noted(monkeypatch)
    getattr(store, put)("a/b/c", b"1")
    assert synced[-3:] == [f"{tmp_path}/a/b", f"{tmp_path}/a", f"{tmp_path}"] and len(synced) > 3, (
        "its bytes come first"
    )
