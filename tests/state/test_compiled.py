"""Compiled code that goes to another node arrives whole or not at all, is what was sent, and comes from a node of the same key only."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic.ids import NodeId
from elastic.state import compiled
from elastic.state.compiled import Compiled
from elastic.state.keeper_store import KeeperStore
from elastic.state.wire import Listener, Wire
from tests.support.patience import PATIENCE_S, until

pytestmark = pytest.mark.fast
SECRET, KEY, OTHER = b"s" * 32, "0f" * 16, "1e" * 16
CODE = {"ab/one.so": b"\x7fELF" + bytes(range(256)) * 9, "fxgraph/x/two": b"2" * 5000, "triton/K/three.cubin": b"", "four.py": b"pass\n"}


def tree(folder: Path) -> dict[str, bytes]:
    """Returns the content of every file below ``folder``."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(folder: Path) -> None:
    for name, data in {**CODE, "locks/one.lock": b""}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


@contextmanager
def node(root: Path) -> Iterator[str]:
    """Yields the address of a keeper whose node has compiled ``CODE``."""
    here = Compiled(root, KEY)
    with here.kept((), SECRET):
        write(here.folder)
    with closing(KeeperStore(NodeId("n"), "127.0.0.1", SECRET, compiled_at=root)) as store:
        yield store.address


@pytest.fixture
def there(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A node that has the code: its folder for compiled code, and its keeper's address."""
    root = tmp_path / "there"
    with node(root) as address:
        yield root, address


class New:
    """A node that has no compiled code yet."""

    def __init__(self, root: Path, key: str = KEY) -> None:
        self.root, self.told = root, list[str]()
        self.code = Compiled(root, key, self.told.append)

    def start(self, *peers: str) -> dict[str, bytes]:
        """Starts a worker.  Returns what the compilers find when it begins to compile."""
        with self.code.kept(peers, SECRET):
            return tree(self.code.folder)


def test_a_new_node_gets_all_code_before_it_compiles_and_hands_it_on(tmp_path: Path, there: tuple[Path, str]) -> None:
    """The third node gets it from the second.  Locks stay at home."""
    second, third = New(tmp_path / "second"), New(tmp_path / "third")
    assert second.start(there[1]) == CODE and second.told[0].startswith(f"compiled code came from {there[1]}: 4 files, ")
    with closing(KeeperStore(NodeId("second"), "127.0.0.1", SECRET, compiled_at=second.root)) as store:
        assert third.start(store.address) == CODE
    assert sorted(os.listdir(third.root)) == sorted([KEY, f"{KEY}.json", f"{KEY}.lock"]), "nothing else is left"
    assert third.root.stat().st_mode & 0o077 == third.code.folder.stat().st_mode & 0o077 == 0, "other users cannot put code there"


def test_code_of_another_key_is_not_there(tmp_path: Path, there: tuple[Path, str]) -> None:
    new = New(tmp_path / "new", OTHER)
    assert new.start(there[1]) == {} and new.told == []


def test_a_node_with_code_asks_nobody(tmp_path: Path, there: tuple[Path, str]) -> None:
    """A worker that follows another one on its node goes on with what that one compiled, even in part."""
    new = New(tmp_path / "new")
    assert new.start() == {}
    assert new.start(there[1]) == {} and new.told == []


def damage(root: Path) -> str:
    changed = bytearray(CODE["ab/one.so"])
    changed[100] ^= 1
    (root / KEY / "ab/one.so").write_bytes(changed)
    return "ab/one.so does not match its sum"


def cut(root: Path) -> str:
    (root / KEY / "fxgraph/x/two").write_bytes(b"2" * 4999)
    return "hung up"


def remove(root: Path) -> str:
    (root / KEY / "four.py").unlink()
    return "hung up"


def lead_out(root: Path) -> str:
    (root / f"{KEY}.json").write_text(json.dumps([["../../evil.py", 5, "00"]]))
    return "hung up"


@pytest.mark.parametrize("harm", [damage, cut, remove, lead_out])
def test_damaged_code_is_refused_in_one_sentence(tmp_path: Path, there: tuple[Path, str], harm: Callable[[Path], str]) -> None:
    """Nothing of it is used.  Another node that has the code is asked next; the control is the order of the two."""
    why, new = harm(there[0]), New(tmp_path / "new")
    assert new.start(there[1]) == {}
    (sentence,) = new.told
    assert sentence.startswith(f"compiled code at {there[1]} is not used, and this worker compiles unless another node has it: ")
    assert why in sentence and tree(new.code.folder) == {}
    with node(tmp_path / "sound") as sound:
        later = New(tmp_path / "later")
        assert later.start(there[1], sound) == CODE and len(later.told) == 2
        first = New(tmp_path / "first")
        assert first.start(sound, there[1]) == CODE and len(first.told) == 1


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ([["../evil.py", 4, "00"]], "has a file '../evil.py'"),
        ([["/evil.py", 4, "00"]], "has a file '/evil.py'"),
        ([["evil.py", 2**40, "00"]], "more than the 268435456 that are taken"),
        ([["evil.py", -1, "00"]], "of -1 bytes"),
        ([["evil.py"]], "cannot be read"),
        (7, "cannot be read"),
    ],
)
def test_what_a_keeper_would_never_send_is_refused(tmp_path: Path, files: Any, why: str) -> None:
    """A keeper checks what it sends by the same rules, so this sender is none."""
    with Listener("127.0.0.1", SECRET, lambda wire, head: wire.send({"files": files}, [b"evil"])) as sender:
        new = New(tmp_path / "new")
        assert new.start(sender.address) == {} and why in new.told[0]
    assert not list(tmp_path.rglob("*evil*"))


def test_code_that_is_too_large_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(len(data) for data in CODE.values())
    for limit, found in ((size - 1, {}), (size, CODE)):  # the second is the control
        monkeypatch.setattr(compiled, "LIMIT", limit)
        with node(tmp_path / f"there{limit}") as address:
            assert New(tmp_path / f"new{limit}").start(address) == found


def serve(root: Path, tell: Any) -> None:
    with node(root) as address:
        (root / KEY / "four.py").unlink()
        os.mkfifo(root / KEY / "four.py")  # whoever reads this file waits
        tell.send(address)
        signal.pause()


def test_a_sender_that_dies_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    """The sender has sent one file, stands in the second, and is killed there."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(tmp_path / "there", theirs), daemon=True)
    process.start()
    new, found = New(tmp_path / "new"), list[Any]()
    address = ours.recv()
    thread = threading.Thread(target=lambda: found.append(new.start(address)))
    thread.start()
    until(lambda: list(new.root.glob(f"{KEY}-*/ab/one.so")), what="the first file has not come")
    assert thread.is_alive() and not new.code.folder.exists(), "what has come in part has no name yet"
    process.kill()
    thread.join(PATIENCE_S)
    process.join(PATIENCE_S)
    assert process.exitcode == -signal.SIGKILL
    assert found == [{}] and len(new.told) == 1 and not list(new.root.glob(f"{KEY}-*"))


def test_what_a_worker_left_that_died_while_it_fetched_is_removed(tmp_path: Path, there: tuple[Path, str]) -> None:
    new = New(tmp_path / "new")
    write(new.root / f"{KEY}-torn")
    assert new.start(there[1]) == CODE and not list(new.root.glob(f"{KEY}-*"))


def test_workers_that_start_together_fetch_once(tmp_path: Path, there: tuple[Path, str]) -> None:
    """All of them find the code when they begin to compile, and the index is written when the last one has ended."""
    asked = list[str]()

    def counted(wire: Wire, head: dict[str, Any]) -> None:
        asked.append(head["key"])
        compiled.serve(wire, there[0], head)

    workers, found, compiling = [New(tmp_path / "new") for _ in range(6)], list[Any](), threading.Barrier(6)

    def start(worker: New) -> None:
        with worker.code.kept([sender.address], SECRET):
            found.append(tree(worker.code.folder))
            compiling.wait(PATIENCE_S)

    with Listener("127.0.0.1", SECRET, counted) as sender:
        threads = [threading.Thread(target=start, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert found == [CODE] * 6 and asked == [KEY]


def test_files_that_another_worker_still_writes_are_not_offered(tmp_path: Path) -> None:
    """The last of two workers writes the index; until then, another node gets nothing.  The control is the index after that."""
    root = tmp_path / "there"
    one, other = Compiled(root, KEY), Compiled(root, KEY)
    with closing(KeeperStore(NodeId("n"), "127.0.0.1", SECRET, compiled_at=root)) as store:
        with one.kept((), SECRET):
            with other.kept((), SECRET):
                write(one.folder)
            assert New(tmp_path / "early").start(store.address) == {}
        assert New(tmp_path / "late").start(store.address) == CODE


def test_a_failed_warm_up_offers_nothing(tmp_path: Path) -> None:
    root = tmp_path / "there"
    with pytest.raises(MemoryError), Compiled(root, KEY).kept((), SECRET):
        write(root / KEY)
        raise MemoryError
    with closing(KeeperStore(NodeId("n"), "127.0.0.1", SECRET, compiled_at=root)) as store:
        assert New(tmp_path / "new").start(store.address) == {}


def test_a_keeper_answers_for_keys_only(tmp_path: Path, there: tuple[Path, str]) -> None:
    """The control is the key itself."""
    with closing(Wire.connect(there[1], SECRET)) as wire:
        for key in ("", "..", f"../there/{KEY}", KEY.upper(), f"{KEY}\n"):
            wire.send({"ask": "compiled", "key": key})
            assert wire.head() == {"files": []}
        wire.send({"ask": "compiled", "key": KEY})
        assert len(wire.head()["files"]) == 4


def test_a_folder_that_cannot_be_made_is_no_obstacle(tmp_path: Path, there: tuple[Path, str]) -> None:
    (tmp_path / "file").touch()
    new = New(tmp_path / "file" / "below")
    assert new.start(there[1]) == {} and "cannot be kept" in new.told[0]
