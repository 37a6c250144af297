"""Compiled code goes from node to node, so that the first worker on a new node compiles nothing.

Each node has one folder for a job's compiled code, in which torch's compiler and Triton keep what they make.
A worker that has warmed up writes an index of the folder: each file with its size and its sha256.  A worker
on a node without an index asks the keepers of other nodes for the files of their index.  It takes all files
or none: they go into the folder once all have arrived and match their sha256.

A worker runs the code that it takes.  So code is taken only from a process that knows the secret of the run,
whose workers run the same user's code anyway, and never from the bucket.  The index comes with an HMAC by
that secret, so nobody on the way can replace a file either.  The name of the folder is a key, a digest of all
that the code depends on: code for another kind of machine, or of another torch, is never asked for.  The
files keep their relative names, because both compilers look files up by names that depend on the content.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
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
"""Name of the request for compiled code in a message to a keeper."""
LIMIT = 2**28
"""Largest size in bytes of the code that goes to another node.  The code of one model takes some megabytes.
"""
FETCH_S = 20.0
"""Longest time in seconds to fetch the code from one keeper: compiling takes about as long."""
LOCK_S = 30.0
"""Longest time in seconds that a worker waits while another worker of its node fetches the same code."""
UNUSED_S = 14 * 86400.0
"""Seconds after its last use until the code of a key is removed: longer than a holiday.  A job that comes
back later compiles once more.
"""
KEY = re.compile(r"[0-9a-f]{32}")
NOT_KEPT = ("locks",)
"""Folders of the compilers that hold no code."""

File = tuple[str, int, str]
"""The relative name of a file, its size in bytes, and its sha256."""


class Compiled:
    """The compiled code of one job on this node.  Several workers of the node may use it at the same time."""

    def __init__(self, root: Path, key: str, say: Callable[[str], None] = print) -> None:
        """``root`` is this user's folder for the compiled code of all jobs, and ``key`` 32 hexadecimal
        digits.

        ``say`` receives a sentence for code that was taken, and for code that was not.
        """
        self.root, self.key, self._say = root, key, say
        self.folder = root / key

    @contextmanager
    def kept(self, peers: Sequence[str], secret: bytes) -> Iterator[None]:
        """Wraps the caller's compilation: fetches the code from a keeper at one of ``peers`` before it, and
        writes the index after it.

        An error here is reported to ``say``; then the worker compiles what is missing.
        """
        try:
            self.root.mkdir(mode=0o700, exist_ok=True)
            _used(self.root, self.key)
            lock = _opened(self.root, self.key, "lock")
        except OSError as error:
            self._say(f"compiled code cannot be kept in {self.root}: {error}")
            yield
            return
        try:
            _remove_unused(self.root)
            # shared: no worker writes the index while another one still writes files
            shared = _locked(lock, fcntl.LOCK_SH)
            self._fetch_once(peers, secret)
            yield
            # without the exclusive lock another worker still compiles: it writes the index
            if shared and _locked(lock, fcntl.LOCK_EX, 0.0):
                self._write_index()
        finally:
            os.close(lock)

    def _complete(self) -> bool:
        """Returns whether this node has the code: a worker has warmed up here, or fetched all of it."""
        return _index(self.root, self.key).exists() and self.folder.exists()

    def _fetch_once(self, peers: Sequence[str], secret: bytes) -> None:
        """Fetches the code, unless it is here or another worker of this node has asked for it while this
        worker waited.
        """
        try:
            lock = _opened(self.root, self.key, "fetch")
        except OSError as error:
            self._say(f"compiled code of other nodes is not fetched: {error}")
            return
        try:
            asked = os.fstat(lock).st_mtime_ns
            if (
                _locked(lock, fcntl.LOCK_EX, unless=self._complete)
                and not self._complete()
                and os.fstat(lock).st_mtime_ns == asked
            ):
                self._fetch(peers, secret)
                if peers:
                    os.utime(lock, ns=(time.time_ns(),) * 2)
        finally:
            os.close(lock)

    def _fetch(self, peers: Sequence[str], secret: bytes) -> None:
        for left in self.root.glob(f"{self.key}-*"):  # left by a worker that died while it fetched
            shutil.rmtree(left, ignore_errors=True)
        for peer in peers:
            began = time.monotonic()
            try:
                files = self._take(peer, secret)
            except (WireError, OSError) as error:
                self._say(
                    f"compiled code of the node at {peer} is not used, and this worker compiles by "
                    f"itself unless another node has the code: {error}"
                )
                continue
            if files:
                size, took_s = sum(size for _, size, _ in files), time.monotonic() - began
                self._say(
                    f"compiled code came from {peer}: {len(files)} files, {size / 1e6:.1f} MB, in "
                    f"{took_s:.3f} s"
                )
                return

    def _take(self, peer: str, secret: bytes) -> Sequence[File]:
        """Receives the files of the keeper at ``peer``, and moves them into the folder.  Returns none if the
        keeper has no code of this key.  Raises :class:`WireError` or OSError.
        """
        until = time.monotonic() + FETCH_S
        with closing(Wire.connect(peer, secret)) as wire:
            wire.send({"ask": ASK, "key": self.key})
            files = _checked(_proven(wire.head(), self.key, secret))
            if not files:
                return ()
            coming = Path(mkdtemp(prefix=f"{self.key}-", dir=self.root))
            try:
                for name, size, digest in files:
                    data = wire.receive(size)
                    if sha256(data).hexdigest() != digest:
                        raise WireError(f"the file {name} does not match its SHA-256")
                    if time.monotonic() > until:
                        raise WireError(f"the files did not arrive within {FETCH_S:g} s")
                    (coming / name).parent.mkdir(parents=True, exist_ok=True)
                    (coming / name).write_bytes(data)
                self._merge(coming, files)
            finally:
                shutil.rmtree(coming, ignore_errors=True)
        return files

    def _merge(self, coming: Path, files: Sequence[File]) -> None:
        """Moves the files into the folder, in which another worker may be compiling, and then gives the index
        its name.

        The index is written before the files are moved.  So a file that another worker replaces meanwhile is
        newer than the index, and counts as changed.
        """
        index = self._new_index(files)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for name, _, _ in files:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (coming / name).replace(self.folder / name)
        index.replace(_index(self.root, self.key))

    def _write_index(self) -> None:
        """Writes the index of the files in the folder.  An empty folder gets no index, so the next worker
        asks the keepers.
        """
        try:
            found = [
                path for path in sorted(self.folder.rglob("*")) if path.is_file() and not path.is_symlink()
            ]
            stats = {path.relative_to(self.folder).as_posix(): path.stat() for path in found}
            stats = {name: stat for name, stat in stats.items() if name.partition("/")[0] not in NOT_KEPT}
            if not stats:
                return
            files: list[File] = []
            if (size := sum(stat.st_size for stat in stats.values())) > LIMIT:
                self._say(
                    f"compiled code in {self.folder} is not sent to other nodes: it has "
                    f"{size / 1e6:.0f} MB, and the limit is {LIMIT / 1e6:.0f} MB"
                )
            else:
                known, written_ns = self._known()
                for name, stat in stats.items():
                    digest = known.get((name, stat.st_size)) if stat.st_mtime_ns < written_ns else None
                    files.append(
                        (name, stat.st_size, digest or sha256((self.folder / name).read_bytes()).hexdigest())
                    )
            self._new_index(files).replace(_index(self.root, self.key))
        except OSError as error:
            self._say(f"compiled code in {self.folder} is not offered to other nodes: {error}")

    def _known(self) -> tuple[dict[tuple[str, int], str], int]:
        """Returns the sha256 of each file in the last index, by name and size, and the time (ns) at which
        that index was written: files older than the index need not be read again.
        """
        index = _index(self.root, self.key)
        try:
            return {
                (name, size): digest for name, size, digest in _checked(json.loads(index.read_text()))
            }, index.stat().st_mtime_ns
        except (OSError, ValueError, WireError):  # there is no index, or it cannot be read
            return {}, 0

    def _new_index(self, files: Sequence[File]) -> Path:
        """Writes the index to a temporary file and returns the path, which the caller renames."""
        coming = self.root / f"{self.key}.{os.getpid()}"
        coming.write_text(json.dumps(files))
        return coming


def serve(wire: Wire, root: Path | None, head: dict[str, Any], secret: bytes) -> None:
    """Answers a request for compiled code: sends the list of files with its proof, then the bytes of the
    files.

    Raises :class:`WireError` or OSError, which ends the connection, if a file has changed since the index was
    written.
    """
    key = head["key"]
    files: list[File] = []
    if root is not None and KEY.fullmatch(key) and _index(root, key).exists():
        files = _checked(json.loads(_index(root, key).read_text()))
        _used(root, key)

    def parts() -> Iterator[bytes]:
        for name, size, _ in files:
            data = (root / key / name).read_bytes()
            if len(data) != size:
                raise WireError(f"the file {name} has changed since it was listed")
            yield data

    wire.send({"files": files, "proof": proof(secret, key, files)})
    wire.send_raw(parts())


def _index(root: Path, key: str) -> Path:
    return root / f"{key}.json"


def _opened(root: Path, key: str, name: str) -> int:
    return os.open(root / f"{key}.{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _used(root: Path, key: str) -> None:
    """Notes that the code of ``key`` is used now."""
    (root / f"{key}.lock").touch(mode=0o600)


def _remove_unused(root: Path) -> None:
    """Removes the code of each key that nobody has used for ``UNUSED_S`` seconds and for which nobody
    compiles now.
    """
    for path in root.glob("*.lock"):
        # another worker may remove the code too; code that cannot be removed stays
        with contextlib.suppress(OSError):
            oldest = time.time() - UNUSED_S
            if not KEY.fullmatch(path.stem) or path.stat().st_mtime > oldest:
                continue
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if _locked(lock, fcntl.LOCK_EX, 0.0) and os.fstat(lock).st_mtime <= oldest:
                    _remove(root, path.stem)
            finally:
                os.close(lock)


def _remove(root: Path, key: str) -> None:
    _index(root, key).unlink(missing_ok=True)  # first: an index says that the folder is complete
    for folder in (*root.glob(key), *root.glob(f"{key}-*")):
        shutil.rmtree(folder)
    # the lock file is last: its time says when the code was last used
    for path in (*root.glob(f"{key}.[!l]*"), root / f"{key}.lock"):
        path.unlink(missing_ok=True)


def proof(secret: bytes, key: str, files: Any) -> str:
    """Returns the HMAC-SHA256 of an index and its key, which only a process of the run can make."""
    return hmac.new(secret, b"compiled" + json.dumps([key, files]).encode(), sha256).hexdigest()


def _proven(head: Any, key: str, secret: bytes) -> Any:
    """Returns the index in an answer.  Raises :class:`WireError` if the answer was not made for ``key`` by a
    process of the run.
    """
    try:
        files, found = head["files"], head["proof"]
    except (LookupError, TypeError):
        files, found = None, None
    # ``compare_digest`` takes no text but ASCII
    if not hmac.compare_digest(ascii(found), ascii(proof(secret, key, files))):
        raise WireError("the list of files does not come from a process of this run")
    return files


def _checked(files: Any) -> list[File]:
    """Returns the files of an index.  Raises :class:`WireError` for an unsafe name, and for too much code."""
    try:
        found = [(str(name), int(size), str(digest)) for name, size, digest in files]
    except (TypeError, ValueError) as error:
        raise WireError(f"the list of files cannot be read: {error}") from error
    for name, size, _ in found:
        if not _safe(name) or size < 0:
            raise WireError(f"the list of files has an unsafe entry: {name!r} of {size} bytes")
    if (size := sum(size for _, size, _ in found)) > LIMIT:
        raise WireError(f"the files have {size} bytes, more than the allowed {LIMIT}")
    return found


def _safe(name: str) -> bool:
    """Returns whether ``name`` is a possible file name and stays inside its folder."""
    path = PurePosixPath(name)
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return not path.is_absolute() and ".." not in path.parts and bool(path.parts) and "\0" not in name


def _locked(
    descriptor: int, how: int, wait_s: float = LOCK_S, unless: Callable[[], bool] = lambda: False
) -> bool:
    """Takes the lock, shared or exclusive as ``how`` says.  Returns False if the lock is not free within
    ``wait_s`` seconds, if ``unless()`` becomes true, or if the file system has no locks.
    """
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
