"""Compiled code that goes to another node arrives whole or not at all, is what was sent, and comes from a
node of the same key only.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import WireError
from elastic.ids import NodeId
from elastic.state import compiled
from elastic.state.compiled import Compiled
from elastic.state.keeper_store import KeeperStore
from elastic.state.wire import NONCE, Listener, Wire
from tests.support.patience import PATIENCE_S, until

pytestmark = pytest.mark.fast
SECRET, KEY, OTHER = b"s" * 32, "0f" * 16, "1e" * 16
CODE = {
    "ab/one.so": b"\x7fELF" + bytes(range(256)) * 9,
    "fxgraph/x/two": b"2" * 5000,
    "triton/K/three.cubin": b"",
    "four.py": b"pass\n",
}

OWN = {"own/five": b"5" * 50}
Change = Callable[[dict[str, Any], list[bytes]], tuple[dict[str, Any], list[bytes]]]


def tree(folder: Path) -> dict[str, bytes]:
    """Returns the content of every file below ``folder``."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def write(folder: Path, files: dict[str, bytes] | None = None) -> None:
    for name, data in ({**CODE, "locks/one.lock": b""} if files is None else files).items():
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

    def start(
        self, *peers: str, makes: dict[str, bytes] | None = None, dies: bool = False
    ) -> dict[str, bytes]:
        """Starts a worker that compiles ``makes``.  Returns what the compilers find when it begins to
        compile.
        """
        with self.code.kept(peers, SECRET):
            found = tree(self.code.folder)
            write(self.code.folder, makes or {})
            if dies:
                raise MemoryError
            return found


def test_a_new_node_gets_all_code_before_it_compiles_and_hands_it_on(
    tmp_path: Path, there: tuple[Path, str]
) -> None:
    """The third node gets it from the second.  Locks stay at home."""
    second, third = New(tmp_path / "second"), New(tmp_path / "third")
    assert second.start(there[1]) == CODE and second.told[0].startswith(
        f"compiled code came from {there[1]}: 4 files, "
    )
    with closing(KeeperStore(NodeId("second"), "127.0.0.1", SECRET, compiled_at=second.root)) as store:
        assert third.start(store.address) == CODE
    assert sorted(os.listdir(third.root)) == [KEY, f"{KEY}.fetch", f"{KEY}.json", f"{KEY}.lock"], (
        "nothing else is left"
    )
    assert third.root.stat().st_mode & 0o077 == third.code.folder.stat().st_mode & 0o077 == 0, (
        "other users cannot put code there"
    )


def test_code_of_another_key_is_not_there(tmp_path: Path, there: tuple[Path, str]) -> None:
    new = New(tmp_path / "new", OTHER)
    assert new.start(there[1]) == {} and new.told == []


def test_a_node_with_code_asks_nobody(tmp_path: Path, there: tuple[Path, str]) -> None:
    """A worker that follows another one on its node goes on with what that one compiled."""
    new = New(tmp_path / "new")
    assert new.start(makes=OWN) == {}
    assert new.start(there[1]) == OWN and new.told == []


@pytest.mark.parametrize("makes", [{}, OWN], ids=["nothing", "a part"])
def test_a_later_worker_fetches_what_the_first_one_could_not(
    tmp_path: Path, there: tuple[Path, str], makes: dict[str, bytes]
) -> None:
    """The first worker of the node finds no peer, or one that is gone, and dies while it compiles.  What it
    has made stays.
    """
    for number, peers in enumerate(((), ("127.0.0.1:1",))):
        new = New(tmp_path / f"new{number}")
        with pytest.raises(MemoryError):
            new.start(*peers, makes=makes, dies=True)
        assert new.start(there[1]) == {**makes, **CODE}
        with closing(KeeperStore(NodeId("new"), "127.0.0.1", SECRET, compiled_at=new.root)) as store:
            assert New(tmp_path / f"next{number}").start(store.address) == {**makes, **CODE}, (
                "the index has all that is here"
            )


def test_a_first_worker_that_makes_nothing_hinders_no_later_one(
    tmp_path: Path, there: tuple[Path, str]
) -> None:
    for makes in ({}, {"locks/one.lock": b""}):
        new = New(tmp_path / f"new{len(makes)}")
        assert new.start(makes=makes) == {} and new.start(there[1]) == {**CODE, **makes}
    shutil.rmtree(new.code.folder)  # and whoever removes the folder alone gets the code again
    assert new.start(there[1]) == CODE


def test_a_worker_fetches_while_another_one_compiles(tmp_path: Path, there: tuple[Path, str]) -> None:
    """The first worker of the node found no peer.  The later one does not wait for it, and what both have is
    offered.
    """
    first, later = New(tmp_path / "new"), New(tmp_path / "new")
    with first.code.kept((), SECRET):
        (first.code.folder / "own").mkdir(parents=True)
        began = time.monotonic()
        assert later.start(there[1]) == CODE
        assert time.monotonic() - began < compiled.LOCK_S / 2
        (first.code.folder / "own/five").write_bytes(OWN["own/five"])
    with closing(KeeperStore(NodeId("new"), "127.0.0.1", SECRET, compiled_at=first.root)) as store:
        assert New(tmp_path / "next").start(store.address) == {**OWN, **CODE}


def damage(root: Path) -> str:
    changed = bytearray(CODE["ab/one.so"])
    changed[100] ^= 1
    (root / KEY / "ab/one.so").write_bytes(changed)
    return "ab/one.so does not match its SHA-256"


def cut(root: Path) -> str:
    (root / KEY / "fxgraph/x/two").write_bytes(b"2" * 4999)
    return "closed the connection"


def remove(root: Path) -> str:
    (root / KEY / "four.py").unlink()
    return "closed the connection"


def lead_out(root: Path) -> str:
    (root / f"{KEY}.json").write_text(json.dumps([["../../evil.py", 5, "00"]]))
    return "closed the connection"


@pytest.mark.parametrize("harm", [damage, cut, remove, lead_out])
def test_damaged_code_is_refused_in_one_sentence(
    tmp_path: Path, there: tuple[Path, str], harm: Callable[[Path], str]
) -> None:
    """Nothing of it is used.  Another node that has the code is asked next; the control is the order of the
    two.
    """
    why, new = harm(there[0]), New(tmp_path / "new")
    assert new.start(there[1]) == {}
    (sentence,) = new.told
    assert sentence.startswith(
        f"compiled code of the node at {there[1]} is not used, and this worker compiles by itself "
        "unless another node has the code: "
    )
    assert why in sentence and tree(new.code.folder) == {}
    with node(tmp_path / "sound") as sound:
        later = New(tmp_path / "later")
        assert later.start(there[1], sound) == CODE and len(later.told) == 2
        first = New(tmp_path / "first")
        assert first.start(sound, there[1]) == CODE and len(first.told) == 1


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ([["../evil.py", 4, "00"]], "has an unsafe entry: '../evil.py'"),
        ([["/evil.py", 4, "00"]], "has an unsafe entry: '/evil.py'"),
        ([["evil.py", 2**40, "00"]], "more than the allowed 268435456"),
        ([["evil.py", -1, "00"]], "of -1 bytes"),
        ([["evil.py\0", 4, "00"]], "has an unsafe entry: 'evil.py"),
        ([["evil\ud800.py", 4, "00"]], "has an unsafe entry: 'evil"),
        ([["evil.py"]], "cannot be read"),
        (7, "cannot be read"),
    ],
)
def test_what_a_keeper_would_never_send_is_refused(tmp_path: Path, files: Any, why: str) -> None:
    """A keeper checks what it sends by the same rules, so this sender is none."""
    answer = {"files": files, "proof": compiled.proof(SECRET, KEY, files)}
    with Listener("127.0.0.1", SECRET, lambda wire, head: wire.send(answer, [b"evil"])) as sender:
        new = New(tmp_path / "new")
        assert new.start(sender.address) == {} and why in new.told[0]
    assert not list(tmp_path.rglob("*evil*"))


def relay(asked: socket.socket, keeper: str, change: Change) -> None:
    """Stands on the way of one connection: passes the handshake on, then lets ``change`` alter what is asked
    and what is answered.
    """
    host, _, port = keeper.rpartition(":")
    with asked, socket.create_connection((host, int(port))) as answering:
        client, server = Wire(asked), Wire(answering)
        client.send_raw([server.receive(NONCE)])
        server.send_raw([client.receive(2 * NONCE)])
        client.send_raw([server.receive(NONCE)])
        head = client.head()
        server.send({**head, "key": OTHER if change is other_key else head["key"]})
        answer, code = server.head(), []
        for _, size, _ in answer["files"]:
            code.append(bytes(server.receive(size)))
        with suppress(WireError):  # who refuses it hangs up
            client.send(*change(answer, code))
            client.receive(1)


def nothing(answer: dict[str, Any], code: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    return answer, code


def other_key(answer: dict[str, Any], code: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """Passes on what the keeper has answered for another key."""
    return answer, code


def another_file(answer: dict[str, Any], code: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """Puts in a file of its own under the name of the first one, with the sum that belongs to it."""
    evil = b"evil"
    return {
        **answer,
        "files": [[answer["files"][0][0], len(evil), sha256(evil).hexdigest()], *answer["files"][1:]],
    }, [evil, *code[1:]]


def no_proof(answer: dict[str, Any], code: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    return {"files": answer["files"]}, code


def own_proof(answer: dict[str, Any], code: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    return {**answer, "proof": compiled.proof(b"guessed", KEY, answer["files"])}, code


def no_object(answer: dict[str, Any], code: list[bytes]) -> tuple[Any, list[bytes]]:
    return [answer], code


@pytest.mark.parametrize("change", [nothing, another_file, other_key, no_proof, own_proof, no_object])
def test_nobody_on_the_way_can_put_code_in(tmp_path: Path, there: tuple[Path, str], change: Change) -> None:
    """The connection is proven at its beginning only.  The control is the one who passes all on as it is."""
    with Compiled(there[0], OTHER).kept((), SECRET):
        write(there[0] / OTHER, {"of/another": b"key"})
    new = New(tmp_path / "new")
    with socket.create_server(("127.0.0.1", 0)) as middle:
        way = threading.Thread(target=lambda: relay(middle.accept()[0], there[1], change), daemon=True)
        way.start()
        found = new.start(f"127.0.0.1:{middle.getsockname()[1]}")
        way.join(PATIENCE_S)
    assert found == (CODE if change is nothing else {})
    assert len(new.told) == 1 and new.told[0].endswith(
        "the list of files does not come from a process of this run"
    ) == (change is not nothing)


def test_what_another_worker_puts_in_place_of_a_file_that_came_is_offered(
    tmp_path: Path, there: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the size of the file that came, and is older than the name of the index, whose sum for it is
    another one.
    """
    first, later = New(tmp_path / "new"), New(tmp_path / "new")

    def overtaken(path: Path, target: Path, real: Callable[[Path, Path], Path] = Path.replace) -> Path:
        found = real(path, target)
        if target.name == "four.py":
            target.write_bytes(b"exit\n")
            time.sleep(0.05)  # so that an index written after this is newer in any file system
        return found

    with first.code.kept((), SECRET), monkeypatch.context() as patch:
        patch.setattr(Path, "replace", overtaken)
        later.start(there[1])
    with closing(KeeperStore(NodeId("new"), "127.0.0.1", SECRET, compiled_at=first.root)) as store:
        assert New(tmp_path / "next").start(store.address) == {**CODE, "four.py": b"exit\n"}


def test_code_that_nobody_has_used_for_two_weeks_is_removed(tmp_path: Path, there: tuple[Path, str]) -> None:
    """Used is what a worker starts with, what goes to another node, and what a worker still compiles, however
    old.  Strangers stay.
    """
    root, day = there[0], 86400.0
    keys = {
        name: f"{number:032x}"
        for number, name in enumerate(("old", "young", "compiling", "served", "started"))
    }

    def age(key: str, days: float) -> None:
        os.utime(root / f"{key}.lock", (time.time() - days * day,) * 2)

    for key in keys.values():
        with Compiled(root, key).kept(("127.0.0.1:1",), SECRET):
            write(root / key)
    (root / f"{keys['old']}-torn").mkdir()
    (root / f"{keys['old']}.4711").touch()
    (root / "stranger.lock").touch()
    os.utime(root / "stranger.lock", (0, 0))
    with Compiled(root, keys["compiling"]).kept((), SECRET):
        for key in keys.values():
            age(key, 14.1)
        age(keys["young"], 13.9)
        assert New(tmp_path / "new", keys["served"]).start(there[1]) == CODE
        with Compiled(root, keys["started"]).kept((), SECRET):
            pass
    left = {path.name.partition(".")[0].partition("-")[0] for path in root.iterdir()}
    assert left == {KEY, "stranger", *keys.values()} - {keys["old"]}
    for name in set(keys) - {"old"}:
        assert tree(root / keys[name]).items() >= CODE.items(), name


def test_the_index_reads_only_what_is_new(
    tmp_path: Path, there: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that has changed without changing its size is new, and so is one in a folder of which no index
    is known.
    """
    here, read = Compiled(there[0], KEY), list[str]()

    def noted(path: Path, real: Callable[[Path], bytes] = Path.read_bytes) -> bytes:
        read.append(path.relative_to(here.folder).as_posix())
        return real(path)

    for path in here.folder.rglob("*"):
        os.utime(path, (time.time() - 60,) * 2)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", noted)
        with here.kept((), SECRET):
            write(here.folder, {**OWN, "four.py": b"exit\n"})
        assert sorted(read) == ["four.py", "own/five"]
        read.clear()
        (there[0] / f"{KEY}.json").write_text("[[")
        with here.kept((), SECRET):
            pass
        assert sorted(read) == sorted({**CODE, **OWN})
        read.clear()
        patch.setattr(compiled, "LIMIT", 100)
        with here.kept((), SECRET):
            pass
        assert read == [], "what is too much is not read"
    with here.kept((), SECRET):
        pass
    assert New(tmp_path / "new").start(there[1]) == {**CODE, **OWN, "four.py": b"exit\n"}


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


def test_what_a_worker_left_that_died_while_it_fetched_is_removed(
    tmp_path: Path, there: tuple[Path, str]
) -> None:
    new = New(tmp_path / "new")
    write(new.root / f"{KEY}-torn")
    assert new.start(there[1]) == CODE and not list(new.root.glob(f"{KEY}-*"))


def test_workers_that_start_together_fetch_once(tmp_path: Path, there: tuple[Path, str]) -> None:
    """All of them find the code when they begin to compile, and the index is written when the last one has
    ended.
    """
    asked = list[str]()

    def counted(wire: Wire, head: dict[str, Any]) -> None:
        asked.append(head["key"])
        compiled.serve(wire, there[0], head, SECRET)

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


def test_workers_that_start_together_ask_in_vain_once(tmp_path: Path) -> None:
    """A peer that does not answer costs seconds, so those who waited meanwhile compile at once.  The control:
    a later worker asks again.
    """
    asked, workers = list[str](), [New(tmp_path / "new") for _ in range(6)]

    def waiting() -> int:
        """Returns how many workers have opened the lock for fetching."""
        links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        return sum(
            link.is_symlink() and str(link.readlink()) == str(tmp_path / "new" / f"{KEY}.fetch")
            for link in links
        )

    def late(wire: Wire, head: dict[str, Any]) -> None:
        asked.append(head["key"])
        until(lambda: waiting() == (6 if len(asked) == 1 else 1), what="not all workers wait")
        time.sleep(0.2)  # the last one looks at the lock, too
        compiled.serve(wire, None, head, SECRET)

    with Listener("127.0.0.1", SECRET, late) as sender:
        threads = [threading.Thread(target=worker.start, args=(sender.address,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert asked == [KEY]
        workers[0].start(sender.address)
        assert asked == [KEY] * 2 and not any(worker.told for worker in workers)


def test_files_that_another_worker_still_writes_are_not_offered(tmp_path: Path) -> None:
    """The last of two workers writes the index; until then, another node gets nothing.  The control is the
    index after that.
    """
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
            assert wire.head()["files"] == []
        wire.send({"ask": "compiled", "key": KEY})
        assert len(wire.head()["files"]) == 4


def test_a_folder_that_cannot_be_made_is_no_obstacle(tmp_path: Path, there: tuple[Path, str]) -> None:
    (tmp_path / "file").touch()
    new = New(tmp_path / "file" / "below")
    assert new.start(there[1]) == {} and "cannot be kept" in new.told[0]
