"""The format of token datasets: what is written is read back, and nothing else is."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.data.cursor import Cursor
from elastic.data.loader import Loader
from elastic.data.prepare import prepare
from elastic.data.show import show
from elastic.data.tokens import TokenDataset
from elastic.errors import DataError
from elastic.plan.batch import Deal
from storage.datasets import (
    BLOCKS,
    DESCRIPTION,
    DOCUMENTS,
    Coding,
    Description,
    TokenFiles,
    Tokens,
    datasets,
    files_of_datasets,
    write_dataset,
)
from storage.datasets.datasets import BEGUN
from storage.documents import File
from storage.errors import BadFormat, Damaged, Exists, Missing, Unavailable
from storage.objects import Data, ObjectStore
from tests.data.texts import BYTES, END, memory, numbered, tokenize
from tests.support.stores import Forwarding

WIDE = Coding("wide", 2**16 + 1, 2**16)
FORMAT_1 = Path(__file__).parent / "format_1"


def test_the_description_names_every_file_with_its_size_and_digest(store: ObjectStore) -> None:
    """Any tool can check a dataset with what is in dataset.json."""
    write_dataset(
        store,
        [("a", tokenize(b"x" * 1000)), ("b", tokenize(b"y" * 500))],
        BYTES,
        shard_tokens=400,
        block_bytes=300,
    )
    described = json.loads(store.get(DESCRIPTION))
    assert (described["format"], described["tokenizer"], described["vocabulary"], described["tokens"]) == (
        2,
        "bytes",
        257,
        1502,
    )
    assert (described["dtype"], described["end_of_document"], described["block_bytes"]) == (
        "uint16",
        END,
        300,
    )
    assert [file["name"] for file in described["files"]] == [f"tokens-0000{n}.bin" for n in range(4)]
    assert [file["size"] for file in described["files"]] == [800, 800, 800, 604]
    blocks = []
    for file in (*described["files"], described["index"], described["blocks"]):
        raw = store.get(file["name"])
        assert (len(raw), blake3(raw).hexdigest()) == (file["size"], file["blake3"])
        blocks += [blake3(raw[at : at + 300]).digest() for at in range(0, len(raw), 300)]
    assert store.get(BLOCKS) == b"".join(blocks[: 4 * 3])
    assert store.list() == sorted(
        [DESCRIPTION, DOCUMENTS, BLOCKS, *(file["name"] for file in described["files"])]
    )


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=40), min_size=1, max_size=6).filter(any),
    st.booleans(),
    st.booleans(),
    st.integers(1, 30),
    st.integers(1, 9),
    st.integers(0, 64),
    st.data(),
)
def test_any_rows_of_any_dataset_equal_the_array(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[list[int]],
    wide: bool,
    local: bool,
    shard: int,
    block: int,
    cache: int,
    data: st.DataObject,
) -> None:
    """Rows equal those of a plain array, wherever documents, files and blocks are cut, and however few blocks
    are kept.
    """
    coding = WIDE if wide else Coding("narrow", 2**16, 0)
    store = ObjectStore.open(str(tmp_path_factory.mktemp("x") / "dataset")) if local else memory()
    description = write_dataset(store, numbered(*texts), coding, shard, block * coding.dtype.itemsize)
    array = np.concatenate([np.array(text, np.uint32) for text in texts])
    files = TokenFiles(store, cache)
    assert description.tokens == len(array) and len(description.files) == -(-len(array) // shard)
    for _ in range(3):
        length = data.draw(st.integers(0, len(array)))
        firsts = data.draw(st.lists(st.integers(0, len(array) - length), max_size=4))
        rows = files.rows(firsts, length)
        assert rows.dtype == coding.dtype and rows.shape == (len(firsts), length)
        assert rows.tolist() == [array[first : first + length].tolist() for first in firsts]
    for first, last in ((-1, 0), (0, len(array) + 1), (2, 1)):
        with pytest.raises(
            IndexError, match=rf"there are no tokens {first} to {last} in a dataset of {len(array)} tokens"
        ):
            files.read(first, last)


class Counting(Forwarding):
    """A store that notes what is fetched, and can spoil it on the way."""

    def __init__(self, of: ObjectStore, spoiled: int = 0) -> None:
        super().__init__(of)
        self.fetched: list[tuple[str, int | None, int | None]] = []
        self.spoiled = spoiled

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        self.fetched.append((key, start, stop))
        raw = super().get(key, start, stop)
        if start is not None and self.spoiled:
            self.spoiled -= 1
            return bytes([raw[0] ^ 1]) + raw[1:]
        return raw


def test_blocks_of_a_remote_store_are_fetched_once_and_the_oldest_given_up() -> None:
    plain = memory()
    write_dataset(plain, [("a", tokenize(b"x" * 999))], BYTES, block_bytes=200)
    store = Counting(plain)
    files = TokenFiles(store, cache_bytes=400)
    store.fetched.clear()
    for first in (150, 120, 199):
        assert files.read(first, first + 100).tolist() == [ord("x")] * 100
    assert sorted(store.fetched) == [("tokens-00000.bin", 200, 400), ("tokens-00000.bin", 400, 600)]
    files.read(0, 1)
    files.read(200, 201)
    assert len(store.fetched) == 3, "the block used last is still there"
    files.read(100, 101)
    assert store.fetched[2:] == [("tokens-00000.bin", 0, 200), ("tokens-00000.bin", 200, 400)]
    assert len(files.read(0, 1000)) == 1000, "a row of more blocks than are kept"


def test_a_block_spoiled_on_its_way_is_fetched_again_and_a_wrong_one_is_never_read() -> None:
    plain = memory()
    write_dataset(plain, [("a", tokenize(b"x" * 999))], BYTES, block_bytes=200)
    assert TokenFiles(Counting(plain, spoiled=1)).read(0, 100).tolist() == [ord("x")] * 100
    with pytest.raises(
        Damaged,
        match=(
            r"tokens-00000\.bin, block 1 \(bytes 200 to 400\), is damaged: "
            r"expected blake3"
        ),
    ):
        TokenFiles(Counting(plain, spoiled=2)).read(150, 160)


# ---- interrupted, damaged, refused


class Lost(Forwarding):
    """A store that a writer cannot reach any more after some writes: what it has written stays, as after a
    kill.
    """

    def __init__(self, of: ObjectStore, writes: int) -> None:
        super().__init__(of)
        self.writes = writes

    def put(self, key: str, data: Data) -> None:
        self._reach(key)
        super().put(key, data)

    def put_if_absent(self, key: str, data: Data) -> None:
        self._reach(key)
        super().put_if_absent(key, data)

    def delete(self, key: str) -> None:
        self._reach(key)
        super().delete(key)

    def _reach(self, key: str) -> None:
        if self.writes == 0:
            raise Unavailable(key, "lost")
        self.writes -= 1


DEFINED = replace(BYTES, definition=b"{}")


@pytest.mark.parametrize("writes", range(8))
def test_what_is_left_of_a_killed_preparation_is_no_dataset_and_is_overwritten(
    store: ObjectStore, writes: int
) -> None:
    """The next writer goes on, wherever this one was killed.  One that fails leaves nothing, not even of the
    one before.
    """
    first, second = [("a", tokenize(b"x" * 1000))], [("a", tokenize(b"x" * 100)), ("b", tokenize(b"y"))]
    with pytest.raises(Unavailable):
        write_dataset(Lost(store, writes), first, DEFINED, shard_tokens=400)
    assert len(store.list()) == writes, "the mark, 3 of tokens, documents, blocks and the tokenizer"
    assert files_of_datasets(store, store.list()) == set(store.list()) - {BEGUN}
    with pytest.raises(Missing):
        TokenFiles(store)
    if writes % 2:

        def failing() -> Iterator[tuple[str, Tokens]]:
            yield second[0]
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_dataset(store, failing(), DEFINED, shard_tokens=100)
        assert store.list() == []
    description = write_dataset(store, second, DEFINED, shard_tokens=100)
    assert TokenFiles(store).read(99, description.tokens).tolist() == [ord("x"), END, ord("y"), END]
    assert BEGUN not in store.list()


@pytest.mark.parametrize(
    "name", ["documents.parquet", "tokenizer.json", "blocks.b3", "tokens-00000.bin", "tokens-100000.bin"]
)
def test_a_file_of_somebody_else_is_neither_overwritten_nor_removed(store: ObjectStore, name: str) -> None:
    """The control: files with other names do no harm, and stay."""
    store.put(name, b"mine")

    def documents() -> Iterator[tuple[str, Tokens]]:
        raise AssertionError("it is refused before anything is read")
        yield

    with pytest.raises(Exists, match=re.escape(name)):
        write_dataset(store, documents(), BYTES)
    assert store.list() == [name] and store.get(name) == b"mine"
    store.delete(name)
    for other in (others := [f"my-{name}", f"below/{name}"]):
        store.put(other, b"mine")
    write_dataset(store, [("a", tokenize(b"x"))], BYTES)
    assert [store.get(other) for other in others] == [b"mine"] * 2


def test_an_interrupted_preparation_takes_away_what_it_wrote(store: ObjectStore) -> None:
    def documents() -> Iterator[tuple[str, Tokens]]:
        yield "a", tokenize(b"x" * 1000)
        assert store.list()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_dataset(store, documents(), BYTES, shard_tokens=100)
    assert store.list() == []


def test_whoever_describes_a_dataset_first_wins(store: ObjectStore) -> None:
    """The later of two writers is told; it neither replaces the description nor takes files away."""

    def overtaken() -> Iterator[tuple[str, Tokens]]:
        yield "a", tokenize(b"slow")
        write_dataset(store, [("b", tokenize(b"quick"))], BYTES)

    with pytest.raises(Exists):
        write_dataset(store, overtaken(), BYTES)
    assert len(store.list()) == 4


def test_the_index_of_many_documents_is_written_in_pieces(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "INDEX_ROWS", 3)
    write_dataset(store, numbered(*([n] * n for n in range(1, 9))), BYTES)
    table = pq.ParquetFile(io.BytesIO(store.get(DOCUMENTS)))
    assert table.num_row_groups == 3
    assert table.read().column("first").to_pylist() == [n * (n - 1) // 2 for n in range(1, 9)]


@pytest.mark.parametrize("change", [lambda raw: raw[:-2], lambda raw: raw + b"xx"], ids=["shorter", "longer"])
def test_a_token_file_of_another_size_is_named(tmp_path: Path, change: Any) -> None:
    store = ObjectStore.open(str(tmp_path))
    write_dataset(store, [("a", tokenize(b"x" * 999))], BYTES)
    store.put("tokens-00000.bin", change(store.get("tokens-00000.bin")))
    with pytest.raises(Damaged, match=r"tokens-00000\.bin is damaged: expected 2000 bytes"):
        TokenDataset(str(tmp_path), 8).read((0,))


def test_a_truncated_object_of_a_remote_store_is_named() -> None:
    store = memory()
    write_dataset(store, [("a", tokenize(b"x" * 999))], BYTES)
    store.put("tokens-00000.bin", store.get("tokens-00000.bin")[:-2])
    with pytest.raises(Damaged, match=r"tokens-00000\.bin is damaged: expected 2000 bytes"):
        TokenDataset(store.url, 8).read((0,))


@pytest.mark.parametrize("byte", [0, 199, 200, 1999])
def test_one_flipped_bit_is_found_in_its_block_and_nowhere_else(store: ObjectStore, byte: int) -> None:
    """Tokens that are not what was written are never trained on."""
    write_dataset(store, [("a", tokenize(b"x" * 999))], BYTES, block_bytes=200)
    raw = bytearray(store.get("tokens-00000.bin"))
    raw[byte] ^= 1
    store.put("tokens-00000.bin", raw)
    files, block = TokenFiles(store), byte // 200
    for good in {*range(10)} - {block}:
        files.read(good * 100, good * 100 + 1)
    for _ in range(2):  # it does not become good by having been looked at
        with pytest.raises(
            Damaged,
            match=(
                rf"tokens-00000\.bin, block {block} \(bytes {block * 200} to "
                rf"{block * 200 + 200}\), is damaged"
            ),
        ):
            files.rows([0, block * 100], 1)


def test_a_damaged_dataset_is_an_error_of_the_data_and_not_of_a_checkpoint(store: ObjectStore) -> None:
    """The loop would take ``Damaged`` to mean the checkpoint that the world was healed from, and would put
    that checkpoint away.
    """
    write_dataset(store, [("a", tokenize(b"x" * 999))], BYTES)
    store.put("tokens-00000.bin", bytes(2000))
    loader = Loader(TokenDataset(store.url, 9), Cursor(111, 4, seed=0), microbatch=2)
    with pytest.raises(
        DataError,
        match=(
            r"^data\.dataset: samples \[.*\] cannot be read: Damaged: "
            r".*tokens-00000\.bin, block 0 "
        ),
    ):
        list(loader.microbatches(1, 0, Deal(2, 1, (None,))))
    loader.close()


def test_digests_that_are_not_the_ones_written_are_found(store: ObjectStore) -> None:
    write_dataset(store, [("a", tokenize(b"x"))], BYTES)
    store.put(BLOCKS, bytes(32))
    with pytest.raises(Damaged, match=r"blocks\.b3 is damaged"):
        TokenFiles(store)


WHOLE = Description(
    "bytes", 257, 9, 1, (File("tokens-00000.bin", 18, "d"),), File("documents.parquet", 9, "e")
).to_json()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff",
        WHOLE[:-1],
        WHOLE[: len(WHOLE) // 2],
        WHOLE.replace(b'"format"', b'"gormat"'),
        WHOLE.replace(b'"files"', b'"fales"'),
    ],
)
def test_a_description_that_cannot_be_read_is_damaged(raw: bytes) -> None:
    """Cut short, or with a wrong letter.  The control is the whole one."""
    assert Description.from_json(WHOLE).tokens == 9
    with pytest.raises(Damaged, match=r"^here/dataset\.json is damaged"):
        Description.from_json(raw, "here/dataset.json")


FOREIGN = [
    b"[]",
    b'"x"',
    b"7",
    b"{}",
    b'{"format": 1}',
    b'{"format": "csv", "files": ["a.csv"]}',
    b'{"name": "x", "license": "MIT"}',
]


@pytest.mark.parametrize("raw", FOREIGN)
def test_json_of_another_program_is_no_damaged_dataset(tmp_path: Path, raw: bytes) -> None:
    """The commands that train, look and prepare say the same, and the file stays as it is."""
    said = (
        r"dataset\.json does not describe a dataset of Elastic: it is JSON of another program; `elastic "
        r"data prepare SOURCE FOLDER` "
    )
    put, text = tmp_path / "dataset.json", tmp_path / "text.txt"
    put.write_bytes(raw)
    text.write_text("some text")
    with pytest.raises(DataError, match=rf"data\.args\.path = .*{said}"):
        TokenDataset(str(tmp_path), 4)
    with pytest.raises(BadFormat, match=said):
        show(str(tmp_path))
    with pytest.raises(BadFormat, match=said):
        prepare(text, str(tmp_path))
    assert put.read_bytes() == raw and {each.name for each in tmp_path.iterdir()} == {
        "dataset.json",
        "text.txt",
    }


@pytest.mark.parametrize("change", [{"dtype": "uint32"}, {"block_bytes": 3}])
def test_a_description_that_contradicts_itself_is_damaged(
    store: ObjectStore, change: dict[str, object]
) -> None:
    write_dataset(store, [("a", tokenize(b"x"))], BYTES)
    store.put(DESCRIPTION, json.dumps({**json.loads(store.get(DESCRIPTION)), **change}).encode())
    with pytest.raises(Damaged, match=r"dataset\.json is damaged: .* for a vocabulary of 257"):
        TokenFiles(store)


def test_a_format_of_the_future_is_refused_by_number(store: ObjectStore) -> None:
    write_dataset(store, [("a", tokenize(b"x" * 99))], BYTES)
    value = json.loads(store.get(DESCRIPTION))
    store.put(DESCRIPTION, json.dumps({**value, "format": 3}).encode())
    with pytest.raises(
        BadFormat,
        match=(
            r"dataset\.json has format 3, but this release reads 1 and 2: "
            r"install a newer release"
        ),
    ):
        TokenFiles(store)
    with pytest.raises(DataError, match=r"^data\.args\.path = .*has format 3"):
        TokenDataset(store.url, 8)


# ---- format 1


def test_format_1_is_read_for_ever_and_checked(tmp_path: Path) -> None:
    """The dataset was written by the first version; a job that was begun on it goes on with it."""
    texts = ["Ä dataset of 2026.".encode(), b"read for ever"]
    row = [token for text in texts for token in (*text, END)]
    files = TokenFiles(ObjectStore.open(str(FORMAT_1)))
    assert files.read(0, len(row)).tolist() == row and files.description.tokens == len(row)
    assert files.description.fingerprint == "f2fcf07f89c55f9605b2522bd68debc4c9f0cb0aafee7e970e43aa94d0eb3315"
    assert show(str(FORMAT_1))["as text"].startswith("'Ä dataset of 2026.read")

    again = write_dataset(
        files.store, [("a.txt", tokenize(texts[0])), ("b.txt", tokenize(texts[1]))], BYTES, shard_tokens=20
    )
    assert again == files.description, "the same text again is the same dataset, left as it is"

    store = ObjectStore.open(str(shutil.copytree(FORMAT_1, tmp_path / "copy")))
    store.put("tokens-00001.bin", b"\x01" + store.get("tokens-00001.bin")[1:])
    files = TokenFiles(store)
    assert files.read(0, 20).tolist() == row[:20]
    with pytest.raises(Damaged, match=r"tokens-00001\.bin, block 0"):
        files.read(19, 21)
