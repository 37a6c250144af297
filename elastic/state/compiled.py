"""Compiled code goes from node to node, so that the first worker on a new node compiles nothing.

Each node has one folder for a job's compiled code, in which torch's compiler and Triton keep what they make.  A worker that has warmed up
writes an index of the folder: each file with its size and its sha256.  A worker on a node without the folder asks the keepers of other
nodes for the files of their index.  It takes all of them or none, and the folder gets its name when all are there and match their sums.

This is code, and whoever takes it runs it.  So it is taken only from a process that knows the secret of the run, whose workers run the same
user's code anyway, and never from the bucket.  The name of the folder is a key, a digest of all that the code depends on: code for another
kind of machine, or of another torch, is never asked for.  The files keep their relative names: both compilers find them by their content.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path, PurePosixPath
from tempfile import mkdtemp
from typing import Any

from elastic.errors import WireError
from elastic.state.wire import Wire

ASK = "compiled"
"""The request for compiled code, among those that a keeper answers."""
LIMIT = 2**28
"""Largest size in bytes of the code that goes to another node; the blocks of one model take some megabytes."""
FETCH_S = 20.0
"""Seconds after which fetching is given up, because compiling takes no longer than that by much."""
LOCK_S = 30.0
"""Longest time in seconds that a worker waits for another one of its node that fetches the same code."""
KEY = re.compile(r"[0-9a-f]{32}")
NOT_KEPT = ("locks",)
"""Folders of the compilers that hold no code."""

File = tuple[str, int, str]
"""The relative name of a file, its size in bytes, and its sha256."""


class Compiled:
    """The compiled code of one job on this node.  Several workers of the node may use it at the same time."""

    def __init__(self, root: Path, key: str, say: Callable[[str], None] = print) -> None:
        """``root`` is this user's folder for the compiled code of all jobs, and ``key`` 32 hexadecimal digits.

        ``say`` receives a sentence for code that was taken, and for code that was not.
        """
        self.root, self.key, self._say = root, key, say
        self.folder = root / key

    @contextmanager
    def kept(self, peers: Sequence[str], secret: bytes) -> Iterator[None]:
        """Lets the caller compile.  Before that it fetches what a keeper at one of ``peers`` has; after that it writes the index.

        Whatever fails here is said, and the worker compiles what it lacks.
        """
        try:
            self.root.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(self.root / f"{self.key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._say(f"compiled code cannot be kept in {self.root}: {error}")
            yield
            return
        try:
            if _locked(lock, fcntl.LOCK_EX, unless=self.folder.exists):
                self._fetch(peers, secret)
            shared = _locked(lock, fcntl.LOCK_SH)  # files that somebody still writes are not put into the index
            yield
            if shared and _locked(lock, fcntl.LOCK_EX, 0.0):  # otherwise another worker still compiles, and writes the index
                self._write_index()
        finally:
            os.close(lock)

    def _fetch(self, peers: Sequence[str], secret: bytes) -> None:
        """Fetches the folder, and makes an empty one if nobody has it, so that no other worker of this node asks again."""
        if self.folder.exists():  # another worker was faster
            return
        for left in self.root.glob(f"{self.key}-*"):  # of a worker that died while it fetched
            shutil.rmtree(left, ignore_errors=True)
        for peer in peers:
            began = time.monotonic()
            try:
                files = self._take(peer, secret)
            except (WireError, OSError) as error:
                self._say(f"compiled code at {peer} is not used, and this worker compiles unless another node has it: {error}")
                continue
            if files:
                size, took_s = sum(size for _, size, _ in files), time.monotonic() - began
                self._say(f"compiled code came from {peer}: {len(files)} files, {size / 1e6:.1f} MB, in {took_s:.3f} s")
                return
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            self._say(f"compiled code cannot be kept in {self.folder}: {error}")

    def _take(self, peer: str, secret: bytes) -> Sequence[File]:
        """Receives the files of the keeper at ``peer``; none if it has no code of this key.  Raises :class:`WireError` or OSError."""
        until = time.monotonic() + FETCH_S
        with closing(Wire.connect(peer, secret)) as wire:
            wire.send({"ask": ASK, "key": self.key})
            files = _checked(wire.head()["files"])
            if not files:
                return ()
            coming = Path(mkdtemp(prefix=f"{self.key}-", dir=self.root))
            try:
                for name, size, digest in files:
                    data = wire.receive(size)
                    if sha256(data).hexdigest() != digest:
                        raise WireError(f"{name} does not match its sum")
                    if time.monotonic() > until:
                        raise WireError(f"it did not come within {FETCH_S:g} s")
                    (coming / name).parent.mkdir(parents=True, exist_ok=True)
                    (coming / name).write_bytes(data)
                coming.rename(self.folder)
            finally:
                shutil.rmtree(coming, ignore_errors=True)
        self._put_index(files)
        return files

    def _write_index(self) -> None:
        try:
            found = [path for path in sorted(self.folder.rglob("*")) if path.is_file() and not path.is_symlink()]
            names = [path.relative_to(self.folder).as_posix() for path in found]
            files = [(name, *_summed(self.folder / name)) for name in names if name.partition("/")[0] not in NOT_KEPT]
            if (size := sum(size for _, size, _ in files)) > LIMIT:
                self._say(f"compiled code in {self.folder} stays here: {size / 1e6:.0f} MB, and {LIMIT / 1e6:.0f} MB may go to other nodes")
                files = []
            self._put_index(files)
        except OSError as error:
            self._say(f"compiled code in {self.folder} is not offered to other nodes: {error}")

    def _put_index(self, files: Sequence[File]) -> None:
        index = _index(self.root, self.key)
        coming = index.with_name(f"{self.key}.{os.getpid()}")
        coming.write_text(json.dumps(files))
        coming.replace(index)


def serve(wire: Wire, root: Path | None, head: dict[str, Any]) -> None:
    """Answers a request for compiled code: the files of the index, then their bytes.

    Raises :class:`WireError` or OSError, which ends the connection, if a file has changed since the index was written.
    """
    key = head["key"]
    files: list[File] = []
    if root is not None and KEY.fullmatch(key) and _index(root, key).exists():
        files = _checked(json.loads(_index(root, key).read_text()))

    def parts() -> Iterator[bytes]:
        for name, size, _ in files:
            data = (root / key / name).read_bytes()
            if len(data) != size:
                raise WireError(f"{name} has changed")
            yield data

    wire.send({"files": files})
    wire.send_raw(parts())


def _index(root: Path, key: str) -> Path:
    return root / f"{key}.json"


def _summed(path: Path) -> tuple[int, str]:
    data = path.read_bytes()
    return len(data), sha256(data).hexdigest()


def _checked(files: Any) -> list[File]:
    """Returns the files of an index.  Raises :class:`WireError` for a name that leads out of the folder, and for too much code."""
    try:
        found = [(str(name), int(size), str(digest)) for name, size, digest in files]
    except (TypeError, ValueError) as error:
        raise WireError(f"its index cannot be read: {error}") from error
    for name, size, _ in found:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or size < 0:
            raise WireError(f"its index has a file {name!r} of {size} bytes")
    if (size := sum(size for _, size, _ in found)) > LIMIT:
        raise WireError(f"it has {size} bytes, more than the {LIMIT} that are taken")
    return found


def _locked(descriptor: int, how: int, wait_s: float = LOCK_S, unless: Callable[[], bool] = lambda: False) -> bool:
    """Takes the lock, shared or alone.  Returns False if it is not free within ``wait_s``, or once there is no need of it."""
    until = time.monotonic() + wait_s
    while not unless():
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)
        except OSError:  # a file system without locks
            return False
        else:
            return True
    return False
