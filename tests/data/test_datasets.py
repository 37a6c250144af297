"""From a folder of text to samples: every token comes back, and what cannot work is one sentence."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from elastic.data.prepare import END_OF_DOCUMENT, prepare, text_files, tokenize
from elastic.data.tokens import TokenDataset
from elastic.errors import DataError
from storage.datasets import DESCRIPTION, DOCUMENTS, Description, TokenFiles, Tokens, write_dataset
from storage.errors import BadFormat, Damaged, Exists, Missing
from storage.objects import ObjectStore

pytestmark = pytest.mark.fast

TEXTS = {"b.txt": "bee\n", "a/z.md": "zed", "a/empty.txt": "", "a.txt": "Ä é 文 \x00 end", "deep/er/x.py": "x = 1\n" * 50}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "text", TEXTS)


def write_texts(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return root


def dumb_row(texts: dict[str, str]) -> list[int]:
    """All tokens: the bytes of each text in the order of the paths, and a mark after each."""
    return [token for name in sorted(texts) for token in (*texts[name].encode(), END_OF_DOCUMENT)]


def memory() -> ObjectStore:
    return ObjectStore.open(f"memory://{uuid.uuid4().hex}")


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(str(tmp_path / "dataset")) if request.param == "file" else memory()


# ---- what is written is read back


def test_every_byte_of_every_document_comes_back(folder: Path, store: ObjectStore) -> None:
    """A11 begins here: the row of tokens is every document once, in the order of their paths."""
    summary = prepare(folder, store.url)
    files = TokenFiles(store)
    row = files.read(0, files.description.tokens)
    assert row.tolist() == dumb_row(TEXTS)
    documents = pq.read_table(io.BytesIO(store.get(DOCUMENTS))).to_pylist()
    assert [each["path"] for each in documents] == sorted(TEXTS)
    for each in documents:
        tokens = row[each["first"] : each["first"] + each["length"]]
        assert bytes(tokens[:-1].astype(np.uint8)).decode() == TEXTS[each["path"]]
        assert blake3(tokens.tobytes()).hexdigest() == each["blake3"]
    assert (summary.documents, summary.tokens, summary.files) == (len(TEXTS), len(row), 1)
    assert str(summary).startswith(f"5 documents, {len(row)} tokens in 1 file: ")


def test_the_description_names_every_file_with_its_size_and_digest(store: ObjectStore) -> None:
    """Any tool can check a dataset with what is in dataset.json."""
    write_dataset(store, [("a", tokenize(b"x" * 1000)), ("b", tokenize(b"y" * 500))], "bytes", 257, shard_tokens=400)
    described = json.loads(store.get(DESCRIPTION))
    assert (described["format"], described["tokenizer"], described["vocabulary"], described["tokens"]) == (1, "bytes", 257, 1502)
    assert [file["name"] for file in described["files"]] == [f"tokens-0000{n}.bin" for n in range(4)]
    assert [file["size"] for file in described["files"]] == [800, 800, 800, 604]
    for file in (*described["files"], described["index"]):
        raw = store.get(file["name"])
        assert (len(raw), blake3(raw).hexdigest()) == (file["size"], file["blake3"])
    assert store.list() == sorted([DESCRIPTION, DOCUMENTS, *(file["name"] for file in described["files"])])


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=6), st.integers(1, 30), st.integers(1, 9), st.data())
def test_any_interval_of_any_row_equals_the_row_in_memory(texts: list[bytes], shard: int, block: int, data: st.DataObject) -> None:
    """Documents, files and fetched blocks are cut wherever they like."""
    store = memory()
    documents = [(f"{n:03d}", tokenize(text)) for n, text in enumerate(texts)]
    description = write_dataset(store, documents, "bytes", 257, shard)
    row = [token for text in texts for token in (*text, END_OF_DOCUMENT)]
    assert description.tokens == len(row) and len(description.files) == -(-len(row) // shard)
    first = data.draw(st.integers(0, len(row)))
    last = data.draw(st.integers(first, len(row)))
    assert TokenFiles(store, block).read(first, last).tolist() == row[first:last]


def test_blocks_of_a_remote_store_are_fetched_once() -> None:
    fetched = []

    class Counting(ObjectStore):
        def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
            fetched.append((key, start, stop))
            return super().get(key, start, stop)

    plain = memory()
    write_dataset(plain, [("a", tokenize(b"x" * 999))], "bytes", 257)
    files = TokenFiles(Counting(plain.filesystem, plain.root), block_tokens=100)
    fetched.clear()
    for first in (150, 120, 199):
        assert files.read(first, first + 100).tolist() == [ord("x")] * 100
    assert fetched == [("tokens-00000.bin", 200, 400), ("tokens-00000.bin", 400, 600)]


# ---- the same text is the same dataset


def test_the_same_folder_gives_the_same_bytes_and_writing_it_again_changes_nothing(folder: Path, tmp_path: Path) -> None:
    first, second = (prepare(folder, str(tmp_path / name)) for name in ("one", "two"))
    names = ObjectStore.open(first.url).list()
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    before = {name: (tmp_path / "one" / name).stat().st_mtime_ns for name in names}
    assert prepare(folder, str(tmp_path / "one")) == first
    assert {name: (tmp_path / "one" / name).stat().st_mtime_ns for name in names} == before
    assert first.fingerprint == second.fingerprint


def test_another_dataset_is_never_overwritten(folder: Path, tmp_path: Path) -> None:
    prepare(folder, str(tmp_path / "tokens"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "tokens").iterdir()}
    (folder / "b.txt").write_text("changed")
    with pytest.raises(DataError, match=r"tokens holds another dataset already; give another destination, or delete it first"):
        prepare(folder, str(tmp_path / "tokens"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "tokens").iterdir()} == before


def test_the_fingerprint_is_of_the_tokens(folder: Path, tmp_path: Path) -> None:
    prints = [prepare(folder, str(tmp_path / "0")).fingerprint]
    (folder / "b.txt").rename(folder / "bb.txt")
    prints.append(prepare(folder, str(tmp_path / "1")).fingerprint)
    (folder / "bb.txt").write_text("Bee\n")
    prints.append(prepare(folder, str(tmp_path / "2")).fingerprint)
    assert prints[0] == prints[1] != prints[2]
    assert TokenDataset(str(tmp_path / "2"), 8).fingerprint() == prints[2]


def test_which_files_are_text(tmp_path: Path) -> None:
    names = ["b.txt", "a/c.md", "a.rst", ".hidden.txt", ".venv/x.py", "picture.png", "a-b.txt", "a/.x/y.txt"]
    root = write_texts(tmp_path, dict.fromkeys(names, "x"))
    assert [path.relative_to(root).as_posix() for path in text_files(root)] == ["a-b.txt", "a.rst", "a/c.md", "b.txt"]
    assert [path.name for path in text_files(root, (".png",))] == ["picture.png"]


# ---- interrupted, damaged, refused


def test_an_interrupted_preparation_is_no_dataset_and_can_be_repeated(store: ObjectStore) -> None:
    def documents(breaks: bool) -> Iterator[tuple[str, Tokens]]:
        yield "a", tokenize(b"x" * 1000)
        if breaks:
            raise KeyboardInterrupt
        yield "b", tokenize(b"y")

    with pytest.raises(KeyboardInterrupt):
        write_dataset(store, documents(True), "bytes", 257, shard_tokens=100)
    assert store.list() and not store.exists(DESCRIPTION)
    with pytest.raises(Missing):
        TokenFiles(store)
    description = write_dataset(store, documents(False), "bytes", 257, shard_tokens=100)
    assert TokenFiles(store).read(999, description.tokens).tolist() == [ord("x"), END_OF_DOCUMENT, ord("y"), END_OF_DOCUMENT]


def test_whoever_describes_a_dataset_first_wins(store: ObjectStore) -> None:
    """Two at the same time: the later one is told, and does not replace the description."""

    def overtaken() -> Iterator[tuple[str, Tokens]]:
        yield "a", tokenize(b"slow")
        write_dataset(store, [("b", tokenize(b"quick"))], "bytes", 257)

    with pytest.raises(Exists):
        write_dataset(store, overtaken(), "bytes", 257)


@pytest.mark.parametrize("change", [lambda raw: raw[:-2], lambda raw: raw + b"xx"], ids=["shorter", "longer"])
def test_a_token_file_of_another_size_is_named(folder: Path, tmp_path: Path, change) -> None:  # type: ignore[no-untyped-def]
    prepare(folder, str(tmp_path / "tokens"))
    path = tmp_path / "tokens" / "tokens-00000.bin"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(Damaged, match=r"tokens-00000\.bin is damaged: expected \d+ bytes"):
        TokenDataset(str(tmp_path / "tokens"), 8).read((0,))


def test_a_truncated_object_of_a_remote_store_is_named(folder: Path) -> None:
    store = memory()
    prepare(folder, store.url)
    store.put("tokens-00000.bin", store.get("tokens-00000.bin")[:-2])
    dataset = TokenDataset(store.url, 8)
    with pytest.raises(Damaged, match=r"tokens-00000\.bin is damaged: expected \d+ bytes"):
        dataset.read((len(dataset) - 1,))


@pytest.mark.parametrize("raw", [b"", b"[]", b'"x"', b"{}", b'{"format": 1}', b'{"format": 1, "files": 3}', b"\xff"])
def test_a_description_that_cannot_be_read_is_damaged(raw: bytes) -> None:
    with pytest.raises(Damaged, match=r"^here/dataset\.json is damaged"):
        Description.from_json(raw, "here/dataset.json")


def test_a_format_of_the_future_is_refused_by_number(folder: Path, store: ObjectStore) -> None:
    prepare(folder, store.url)
    value = json.loads(store.get(DESCRIPTION))
    store.put(DESCRIPTION, json.dumps({**value, "format": 2}).encode())
    with pytest.raises(BadFormat, match=r"dataset\.json is of format 2, not 1; use a newer version"):
        TokenFiles(store)
    with pytest.raises(DataError, match=r"^data\.args\.path = .*is of format 2"):
        TokenDataset(store.url, 8)


def test_what_prepare_refuses(tmp_path: Path) -> None:
    empty = write_texts(tmp_path / "empty", {"a.txt": "", "b.txt": ""})
    (tmp_path / "nothing").mkdir()
    for source, sentence in (
        (tmp_path / "absent", r"absent' is not a folder; give the folder that holds the text$"),
        (
            tmp_path / "nothing",
            r"nothing' holds no file whose name ends in \.txt or \.md or \.rst or \.py; give another folder, or --suffix$",
        ),
        (empty, r"^the 2 text files in '.*empty' are all empty$"),
    ):
        with pytest.raises(DataError, match=sentence):
            prepare(source, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_what_the_dataset_refuses(folder: Path, tmp_path: Path) -> None:
    prepare(folder, str(tmp_path / "tokens"))
    tokens = len(dumb_row(TEXTS))
    for path, seq_len, sentence in (
        (
            folder,
            8,
            rf"text' is a folder of text \(5 files\), no dataset; run `elastic data prepare {folder} {folder}-tokens` and set path",
        ),
        (tmp_path / "no where", 8, r"holds no dataset; run `elastic data prepare FOLDER_OF_TEXT '.*no where'`$"),
        (
            tmp_path / "tokens",
            tokens,
            rf"has {tokens} tokens, too few for one sample of seq_len \+ 1 = {tokens + 1}; prepare more text",
        ),
        (tmp_path / "tokens", 0, r"data\.args\.seq_len = 0 must be at least 1"),
    ):
        with pytest.raises(DataError, match=sentence):
            TokenDataset(str(path), seq_len)


# ---- samples


@pytest.mark.parametrize("seq_len", [1, 7, 64])
def test_samples_are_windows_that_share_one_token(folder: Path, store: ObjectStore, seq_len: int) -> None:
    prepare(folder, store.url)
    dataset, row = TokenDataset(store.url, seq_len), dumb_row(TEXTS)
    assert len(dataset) == (len(row) - 1) // seq_len
    every = dataset.read(tuple(range(len(dataset))))["tokens"]
    assert every.dtype == torch.int64 and every.shape == (len(dataset), seq_len + 1)
    assert every.tolist() == [row[i * seq_len : i * seq_len + seq_len + 1] for i in range(len(dataset))]
    some = (len(dataset) - 1, 0, 0)
    assert torch.equal(dataset.read(some)["tokens"], every[list(some)])
    for beyond in (-1, len(dataset)):
        with pytest.raises(IndexError, match=rf"sample {beyond} of a dataset of {len(dataset)}"):
            dataset.read((beyond,))
