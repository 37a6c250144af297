"""A storage backend is one file: a toy that the product does not know passes the common suite, and a job
trains and resumes on it.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from actors.cli import main
from storage.errors import Exists, Full, Missing, Unavailable
from storage.objects import ObjectStore
from storage.objects.folder import Folder
from storage.objects.fsspec import Fsspec
from storage.objects.remote import RemotePolicy
from storage.objects.selftest import check
from storage.objects.urls import BACKENDS
from tests.storage.conformance import Conformance
from tests.support.job_file import to_toml
from tests.support.patience import PATIENCE_S
from tests.support.state_hash import state_hash
from tests.support.toy_store import Toy, install
from tests.support.toys import TINY, toy_job

ROOT = Path(__file__).parents[2]
QUICK = RemotePolicy(attempts=3, first_pause_s=0.001)


@pytest.fixture
def toy(tmp_path: Path) -> Fsspec:
    return Fsspec(Toy(), f"{tmp_path}/objects.db/prefix", QUICK)


@pytest.mark.fast
class TestToy(Conformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        fsspec.register_implementation("toy", "tests.support.toy_store.Toy", clobber=True)
        return ObjectStore.open(f"toy://{tmp_path}/objects.db/prefix")


@pytest.mark.fast
class TestRow(Conformance):
    """A backend of ours: its class, and a row of the table."""

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
        monkeypatch.setitem(BACKENDS, "shelf", f"{__name__}:Shelf")
        opened = ObjectStore.open(f"shelf://{tmp_path}/bucket")
        assert type(opened) is Shelf
        return opened


class Shelf(Folder):
    @classmethod
    def connect(cls, url: str) -> Shelf:
        return cls(url.partition("://")[2])


# ---- a job on it


COMMANDS = """
import sys
from actors.cli import main
for line in sys.argv[1:]:
    if code := main(line.split()):
        sys.exit(code)
"""


def python(folder: Path, site: Path | None, *arguments: str) -> tuple[int, str]:
    """Runs a program in a process of its own and returns its exit code and its output.

    ``site`` is a folder of packages, beside those of this Python.
    """
    path = os.pathsep.join([str(ROOT), *([str(site)] if site else [])])
    done = subprocess.run(
        [sys.executable, "-c", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    return done.returncode, done.stdout


@pytest.mark.full
def test_a_job_trains_resumes_and_exports_on_a_backend_that_a_package_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job is killed before the commit of step 4, resumes from step 3, and equals the same job in a folder
    bit for bit.
    """
    install(tmp_path / "site")
    folder, bucket = f"{tmp_path}/bucket", f"toy://{tmp_path}/objects.db/bucket"
    killed = [{"point": "before_commit", "step": 4}]
    for name, place, faults in (("killed", bucket, killed), ("toy", bucket, []), ("folder", folder, [])):
        job = toy_job(folder, steps=6, checkpoint={"save_every": 3}, faults=faults, **TINY)
        # this process does not know the scheme
        (tmp_path / f"{name}.toml").write_text(to_toml(job).replace(folder, place))

    code, shown = python(
        tmp_path, None, f"from storage.objects import ObjectStore; ObjectStore.open({bucket!r})"
    )
    assert code != 0 and "has an unknown scheme" in shown, (
        "the control: without the package nobody knows toy://"
    )
    code, shown = python(tmp_path, tmp_path / "site", COMMANDS, "train killed.toml --local")
    assert code < 0, shown

    def export(name: str, step: str) -> list[str]:
        return [
            "checkpoint",
            "export",
            f"{name}.toml",
            "--step",
            step,
            "--to",
            str(tmp_path / f"{name}-{step}"),
        ]

    code, shown = python(
        tmp_path, tmp_path / "site", COMMANDS, "train toy.toml --local", " ".join(export("toy", "6"))
    )
    assert code == 0 and re.findall(r"step +(\d+)/6  loss", shown) == ["4", "5", "6"], shown
    monkeypatch.chdir(tmp_path)
    assert main(["train", "folder.toml", "--local"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"step +(\d+)/6  loss", shown) == ["1", "2", "3", "4", "5", "6"], shown
    assert [main(export("folder", step)) for step in "36"] == [0, 0]
    toy, early, late = (
        state_hash(sorted((tmp_path / name).glob("*.safetensors")))
        for name in ("toy-6", "folder-3", "folder-6")
    )
    assert toy == late != early
    assert not list(tmp_path.glob("toy:*")), "nothing was taken for a folder"


OLD_WAY = """
from pathlib import PurePosixPath
from storage.numbered import Numbered
Numbered.numbers = lambda self: [int(PurePosixPath(key).stem) for key in self.store.list(f"{self.folder}/")]
"""


def test_a_run_on_a_bucket_that_lists_objects_late_is_the_run_in_a_folder(tmp_path: Path) -> None:
    """Its listings are 2 s old.  The run is killed, resumes, exports each checkpoint, deletes old ones and
    tells a sink all steps.

    The bits and the names of all objects are those in a folder.  The control believes the listing of claims,
    and does not save.
    """
    pytest.importorskip("tensorboard")
    install(tmp_path / "site")
    folder, place = f"{tmp_path}/bucket", f"{tmp_path}/objects.db/bucket"
    more: dict[str, Any] = {
        "checkpoint": {"save_every": 2, "keep_last": 1},
        "export": {"every": 2},
        "metrics": {"sinks": {"tensorboard": {}}},
    }
    for name, faults in (("killed", [{"point": "before_commit", "step": 4}]), ("whole", [])):
        text = to_toml(toy_job(folder, steps=6, faults=faults, trial=False, **more, **TINY))
        (tmp_path / f"{name}-folder.toml").write_text(text)
        (tmp_path / f"{name}-late.toml").write_text(text.replace(folder, f"late://{place}"))

    def train(program: str, name: str) -> tuple[int, str]:
        return python(tmp_path, tmp_path / "site", program, f"train {name}.toml --local")

    code, shown = train(OLD_WAY + COMMANDS, "whole-late")
    assert code == 75 and "this command's claim, .* is missing" in shown, "the control"
    Path(tmp_path, "objects.db").unlink()
    for where in ("late", "folder"):
        assert train(COMMANDS, f"killed-{where}")[0] == -9
        code, shown = train(COMMANDS, f"whole-{where}")
        assert code == 0 and re.findall(r"step +(\d+)/6  loss", shown) == ["3", "4", "5", "6"], shown
        assert ("lists a new object only 2." in shown) == (where == "late") and "owed" not in shown, shown
    late, there = Fsspec(Toy(), place), ObjectStore.open(folder)
    assert late.list() == there.list() and [key for key in there.list() if "/exports/" in key]
    for key in there.list():
        assert not key.endswith(".safetensors") or late.get(key) == there.get(key), key


# ---- what fsspec itself does not promise


class Disturbed(Toy):
    """Runs ``before`` ahead of every write and read, and ``after`` after every write."""

    def __init__(
        self, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self.before, self.after = before, after

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self.before()
        super().pipe_file(path, value, mode)
        self.after()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self.before()
        return super().cat_file(path, start, end)


def failing(times: int, error: Exception) -> Callable[[], None]:
    left = [error] * times

    def fail() -> None:
        if left:
            raise left.pop()

    return fail


class Busy(Exception):
    """A class of its own, as every client library has for a server that is busy."""


@pytest.mark.fast
@pytest.mark.parametrize(
    "error", [Busy("503 slow down"), ConnectionResetError("reset"), TimeoutError("timed out")]
)
def test_what_may_pass_is_tried_again(toy: Fsspec, error: Exception) -> None:
    toy.filesystem = Disturbed(failing(2, error))
    toy.put_if_absent("a", b"1")
    toy.filesystem = Disturbed(failing(2, error))
    assert toy.get("a") == b"1"
    toy.filesystem = Disturbed(failing(3, error))
    with pytest.raises(
        Unavailable,
        match=f"objects.db/prefix/a cannot .* gave up after 3 attempts .* {type(error).__name__}: {error}",
    ):
        toy.get("a")


@pytest.mark.fast
@pytest.mark.parametrize("error", [PermissionError("no"), TypeError("unexpected keyword argument 'mode'")])
def test_what_would_fail_again_is_not_tried_again(toy: Fsspec, error: Exception) -> None:
    toy.filesystem = Disturbed(failing(1, error))
    with pytest.raises(Unavailable, match=str(error)):
        toy.put_if_absent("a", b"1")
    assert not toy.exists("a")


@pytest.mark.fast
def test_a_filesystem_without_room_is_not_asked_again(toy: Fsspec) -> None:
    toy.filesystem = Disturbed(failing(1, OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(Full, match="No space left on device"):
        toy.put_if_absent("a", b"1")
    assert not toy.exists("a")


@pytest.mark.fast
def test_a_store_that_does_not_answer_is_left_waiting(toy: Fsspec) -> None:
    answered = threading.Event()
    toy.policy = replace(QUICK, attempts=2, attempt_s=0.05, slowest_bytes_s=1e9)
    toy.filesystem = Disturbed(lambda: answered.wait(PATIENCE_S) and None)
    with pytest.raises(Unavailable, match=r"gave up after 2 attempts .* no answer within 0\.\d s"):
        toy.put("a", b"1")
    answered.set()


@pytest.mark.fast
def test_a_writer_whose_answer_is_lost_is_not_told_that_it_won(toy: Fsspec) -> None:
    """Its caller compares what is there; the object is whole."""
    toy.filesystem = Disturbed(after=failing(1, ConnectionResetError("reset")))
    with pytest.raises(Exists):
        toy.put_if_absent("a", b"mine")
    assert toy.get("a") == b"mine"


class LooksFirst(Toy):
    """This store acts like fsspec's own default: it checks, and writes only a network's round trip later."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        if mode == "create":
            with self._table(path) as (rows, key):
                if rows.execute("SELECT 1 FROM objects WHERE key = ?", (key,)).fetchone():
                    raise FileExistsError(path)
            time.sleep(0.02)
        super().pipe_file(path, value)


@pytest.mark.fast
def test_a_filesystem_that_looks_first_and_writes_then_is_refused(toy: Fsspec) -> None:
    check(toy, "run")
    toy.filesystem = LooksFirst()
    with pytest.raises(Unavailable, match=r"of 8 create-only writes .* at the same time, \d succeeded"):
        for _ in range(20):
            check(toy, "run")
    assert toy.list() == []
    with pytest.raises(Missing):
        toy.get("run")
