"""This suite says what every object store must do; a test class for each implementation inherits it and gives
a ``store`` fixture.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from storage.errors import Exists, Missing
from storage.objects import ObjectStore


class Writes:
    """Tests of writing, which is all that differs where an object goes up in parts."""

    races = 20
    """Number of times that many threads create one object; a store that is a network away uses fewer."""

    def test_what_was_put_is_got(self, store: ObjectStore) -> None:
        store.put("run/a", b"abc")
        assert store.get("run/a") == b"abc"
        assert store.size("run/a") == 3
        assert store.exists("run/a")

    def test_put_replaces(self, store: ObjectStore) -> None:
        store.put("a", b"longer than before")
        store.put("a", b"new")
        assert store.get("a") == b"new"

    @pytest.mark.parametrize("verb", ["put", "put_if_absent"])
    def test_pieces_are_joined(self, store: ObjectStore, verb: str) -> None:
        getattr(store, verb)("a", (memoryview(piece) for piece in (b"ab", b"", b"cd")))
        assert store.get("a") == b"abcd"

    @pytest.mark.parametrize("data", [b"", bytearray(b"xy"), memoryview(b"xyz")])
    def test_kinds_of_bytes_and_empty_objects(self, store: ObjectStore, data: bytes) -> None:
        store.put("a", data)
        store.put_if_absent("b", data)
        assert store.get("a") == store.get("b") == bytes(data)
        assert store.size("b") == len(data)
        assert store.list() == ["a", "b"]

    def test_keys_of_any_letters(self, store: ObjectStore) -> None:
        keys = sorted(["ü/名前 with blank.json", "a@0,0-16,64", "emoji-🔥", "plus+and%20percent#hash?query"])
        for key in keys:
            store.put_if_absent(key, key.encode())
        assert store.list() == keys
        assert [store.get(key) for key in keys] == [key.encode() for key in keys]

    def test_create_only(self, store: ObjectStore) -> None:
        store.put_if_absent("a", b"first")
        with pytest.raises(Exists, match="/a exists"):
            store.put_if_absent("a", b"second")
        assert store.get("a") == b"first"

    def test_create_only_against_a_rival_that_is_quicker(self, store: ObjectStore) -> None:
        def pieces() -> Iterator[bytes]:
            yield b"mi"
            store.put_if_absent("a", b"theirs")
            yield b"ne"

        with pytest.raises(Exists):
            store.put_if_absent("a", pieces())
        assert store.get("a") == b"theirs"

    def test_of_many_threads_one_creates(self, store: ObjectStore) -> None:
        names = [f"{number}".encode() for number in range(8)]
        for round_ in range(self.races):
            winners = race(store, f"key-{round_}", names)
            assert len(winners) == 1
            assert store.get(f"key-{round_}") == winners[0]

    def test_a_put_that_fails_half_way_leaves_nothing(self, store: ObjectStore) -> None:
        def broken() -> Iterator[bytes]:
            yield b"half"
            raise RuntimeError("the source broke")

        store.put("old", b"whole")
        with pytest.raises(RuntimeError):
            store.put("old", broken())
        for verb in (store.put, store.put_if_absent):
            with pytest.raises(RuntimeError):
                verb("new", broken())
        assert store.get("old") == b"whole"
        assert store.list() == ["old"]


class Conformance(Writes):
    """The whole suite."""

    def test_ranges_are_those_of_a_python_slice(self, store: ObjectStore) -> None:
        store.put("a", b"0123456789")
        store.put("empty", b"")
        for start, stop in [
            (None, None),
            (0, 4),
            (3, 7),
            (9, 10),
            (8, 99),
            (4, 4),
            (None, 2),
            (7, None),
            (10, 20),
            (12, None),
        ]:
            assert store.get("a", start, stop) == b"0123456789"[start:stop], (start, stop)
            assert store.get("empty", start, stop) == b"", (start, stop)

    def test_a_folder_without_objects_is_gone_once_it_is_tidied(self, store: ObjectStore) -> None:
        """The control: a folder with objects keeps them."""
        keys = ["run/steps/1/g1/a", "run/steps/1/g2/a"]
        for key in keys:
            store.put(key, b"")
        store.tidy("run/steps/1/g1/")
        assert store.list() == keys
        for key, left in zip(keys, (["1/"], []), strict=True):
            store.delete(key)
            store.tidy(f"{key[:-1]}")
            store.tidy(f"{key[:-1]}")
            assert store.children("run/steps/") == left
            assert store.children("run/steps/1/") == (["g2/"] if left else [])
        store.put(keys[0], b"again")
        assert store.list() == keys[:1]

    def test_missing(self, store: ObjectStore) -> None:
        store.put("folder/a", b"")
        for key in ("b", "folder", "folder/b", "folder/a/b"):
            assert not store.exists(key)
            with pytest.raises(Missing, match=key):
                store.get(key)
            with pytest.raises(Missing, match=key):
                store.get(key, 1, 1)
            with pytest.raises(Missing, match=key):
                store.size(key)

    def test_list_is_by_prefix_sorted_and_never_stale(self, store: ObjectStore) -> None:
        assert store.list() == store.list("none/") == []
        keys = ["a/1", "a/10/x", "a/2", "ab", "b/c/d/e", "z"]
        for key in reversed(keys):
            store.put(key, b"")
        assert store.list() == keys
        assert store.list("a/1") == ["a/1", "a/10/x"]
        assert store.list("a/") == ["a/1", "a/10/x", "a/2"]
        assert store.list("a") == ["a/1", "a/10/x", "a/2", "ab"]
        assert store.list("b/c/") == ["b/c/d/e"]
        store.delete("ab")
        assert "ab" not in store.list()

    def test_children_are_the_names_directly_below(self, store: ObjectStore) -> None:
        assert store.children() == store.children("none/") == []
        for key in ("a/1", "a/10/x", "a/10/y", "a/2", "ab", "b/c/d/e"):
            store.put(key, b"")
        assert store.children() == ["a/", "ab", "b/"]
        assert store.children("a/") == ["1", "10/", "2"]
        assert store.children("a/10/") == ["x", "y"]
        assert store.children("b/") == ["c/"] and store.children("b/c/") == ["d/"]

    def test_delete_is_idempotent(self, store: ObjectStore) -> None:
        store.put("a", b"")
        store.delete("a")
        store.delete("a")
        assert not store.exists("a")

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a/.partial-b"])
    def test_what_is_no_key(self, store: ObjectStore, key: str) -> None:
        with pytest.raises(ValueError, match="is not a valid key"):
            store.put(key, b"")


def race(store: ObjectStore, key: str, contents: list[bytes]) -> list[bytes]:
    """One thread for each of ``contents`` creates ``key``, all at once; returns the contents of those that
    were told that they won.
    """
    barrier, winners = threading.Barrier(len(contents)), list[bytes]()

    def create(content: bytes) -> None:
        barrier.wait()
        try:
            store.put_if_absent(key, content)
        except Exists:
            return
        winners.append(content)

    threads = [threading.Thread(target=create, args=(content,)) for content in contents]
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that they do meet between any two steps
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(usual_s)
    return winners
