"""Text, JSON lines and parquet become samples: every token comes back, and each input that cannot work gives
one sentence.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from elastic.data import text_sources
from elastic.data.prepare import prepare
from elastic.data.text_sources import documents, text_files
from elastic.data.tokens import TokenDataset
from elastic.errors import DataError
from storage.datasets import DOCUMENTS, TokenFiles
from storage.objects import ObjectStore
from tests.data.texts import TEXTS, dumb_row, memory, write_texts


def parquet(texts: Sequence[object], column: str = "text", kind: Any = None, rows: int = 2) -> bytes:
    buffer = io.BytesIO()
    table = pa.table({"id": list(range(len(texts))), column: pa.array(texts, kind)})
    pq.write_table(table, buffer, row_group_size=rows, write_statistics=False)
    return buffer.getvalue()


def jsonl(*values: object) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


# ---- what is written is read back


def test_every_byte_of_every_document_comes_back(folder: Path, store: ObjectStore) -> None:
    """A11 begins here: the row of tokens is every document once, in the order of their paths."""
    summary = prepare(folder, store.url)
    files = TokenFiles(store)
    row = files.read(0, files.description.tokens)
    assert row.tolist() == dumb_row(TEXTS)
    index = pq.read_table(io.BytesIO(store.get(DOCUMENTS))).to_pylist()
    assert [each["path"] for each in index] == sorted(TEXTS)
    for each in index:
        tokens = row[each["first"] : each["first"] + each["length"]]
        assert bytes(tokens[:-1].astype(np.uint8)).decode() == TEXTS[each["path"]]
        assert blake3(tokens.tobytes()).hexdigest() == each["blake3"]
    assert (summary.made.documents, summary.made.tokens) == (len(TEXTS), len(row))
    assert str(summary).startswith(f"5 documents, {len(row)} tokens in 1 file, vocabulary 257: ")
    one = replace(summary, made=replace(summary.made, documents=1))
    assert str(replace(one, held_out=one)).count("1 document, ") == 2


MIXED = {
    "a.jsonl": jsonl({"text": "one", "id": 1}, {"text": "zwei \u00e4"}) + b" \n" + jsonl({"text": ""}),
    "b.jsonl.gz": gzip.compress(jsonl({"text": "three"})) + gzip.compress(jsonl({"text": "four"})),
    "c.jsonl.zst": zstd(jsonl({"text": "five"})),
    "d/e.parquet": parquet(["six", "seven", "eight"]),
    "f.txt": b"nine\n",
    "g.txt.bz2": bz2.compress(b"ten"),
    "h.jsonl": jsonl({"text": "eleven"}).rstrip(),
}
MIXED_TEXTS = [
    "one",
    "zwei \u00e4",
    "",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine\n",
    "ten",
    "eleven",
]
MIXED_NAMES = ["a.jsonl:1", "a.jsonl:2", "a.jsonl:4", "b.jsonl.gz:1", "b.jsonl.gz:2", "c.jsonl.zst:1"]
MIXED_NAMES += [f"d/e.parquet:{n}" for n in (1, 2, 3)] + ["f.txt", "g.txt.bz2", "h.jsonl:1"]


def mixed(store: ObjectStore) -> ObjectStore:
    for name, data in MIXED.items():
        store.put(name, data)
    return store


def test_a_folder_of_everything_is_read_in_order(store: ObjectStore) -> None:
    found = list(documents(text_files([mixed(store).url])))
    assert [document.name for document in found] == MIXED_NAMES
    assert [document.text.decode() for document in found] == MIXED_TEXTS


def test_a_bucket_gives_the_dataset_that_a_folder_gives(tmp_path: Path) -> None:
    """Sources and destinations are URLs or folders."""
    local, remote, out = ObjectStore.open(str(tmp_path / "text")), memory(), memory()
    summaries = [
        prepare(mixed(source).url, to)
        for source in (local, remote)
        for to in (str(tmp_path / f"{source.local}"), out.url)
    ]
    assert len({summary.made.fingerprint for summary in summaries}) == 1
    assert (
        TokenDataset(out.url, 4)
        .read((0, 5))["tokens"]
        .equal(TokenDataset(str(tmp_path / "True"), 4).read((0, 5))["tokens"])
    )


def test_sources_are_files_and_folders_in_the_order_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_texts(tmp_path, {"b/x.txt": "1", "b/y.txt": "2", "notes": "3", "c.txt": "4"}))
    bucket = memory()
    bucket.put("deep/z.txt", b"5")
    found = documents(text_files(["notes", tmp_path / "b", "./c.txt", f"{bucket.url}/deep/z.txt", "b/x.txt"]))
    assert [document.text for document in found] == [b"3", b"1", b"2", b"4", b"5", b"1"]


def test_the_mark_of_utf8_at_the_beginning_of_a_file_is_no_text(tmp_path: Path) -> None:
    """Some editors write one.  Within the text it is a letter like any other, and a text of JSON has it if it
    says so.
    """
    put(tmp_path / "a.txt", "first".encode("utf-8-sig"))
    put(tmp_path / "b.txt", "sec\ufeffond".encode())
    put(tmp_path / "c.jsonl", jsonl({"text": "\ufeffthird"}).decode().encode("utf-8-sig"))
    assert [d.text.decode() for d in documents(text_files([tmp_path]))] == [
        "first",
        "sec\ufeffond",
        "\ufeffthird",
    ]


def test_another_field_and_other_suffixes(tmp_path: Path) -> None:
    put(tmp_path / "a.log", b"log")
    put(tmp_path / "b.jsonl", jsonl({"body": "one", "text": 1}))
    put(tmp_path / "c.parquet", parquet(["two"], "body", pa.dictionary(pa.int8(), pa.string())))
    assert [d.text for d in documents(text_files([tmp_path]), "body")] == [b"one", b"two"]
    assert [d.text for d in documents(text_files([tmp_path], (".log",)))] == [b"log"]


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=8),
    st.integers(1, 3),
    st.integers(1, 9),
)
def test_any_text_is_itself_from_any_format(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], rows: int, buffer: int
) -> None:
    """The text is read in pieces as small as one byte or one row."""
    root = tmp_path_factory.mktemp("x")
    lines = jsonl(*({"text": text} for text in texts))
    put(root / "a.jsonl", lines)
    put(root / "b.jsonl.zst", zstd(lines))
    put(root / "c.parquet", parquet(texts, kind=pa.string(), rows=rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_sources, "BUFFER_BYTES", buffer)
        patch.setattr(text_sources, "ROWS", rows)
        assert [document.text.decode() for document in documents(text_files([root]))] == texts * 3


def test_a_large_parquet_file_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row group at a time: the first document is there when a tenth of the file has been read."""
    rng = np.random.default_rng(0)
    data = parquet([rng.bytes(2000).hex() for _ in range(500)], rows=10)
    store = memory()
    store.put("a.parquet", data)
    read: list[int] = []
    get = ObjectStore.get
    monkeypatch.setattr(
        ObjectStore, "get", lambda self, key, *place: read.append(len(raw := get(self, key, *place))) or raw
    )
    found = documents(text_files([store.url]))
    next(found)
    assert sum(read) < len(data) / 10
    assert len(list(found)) == 499


# ---- the same text is the same dataset


def test_the_same_folder_gives_the_same_bytes_and_writing_it_again_changes_nothing(
    folder: Path, tmp_path: Path
) -> None:
    first, second = (prepare(folder, str(tmp_path / name)) for name in ("one", "two"))
    names = ObjectStore.open(first.url).list()
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    before = {name: (tmp_path / "one" / name).stat().st_mtime_ns for name in names}
    assert prepare(folder, str(tmp_path / "one")) == first
    assert {name: (tmp_path / "one" / name).stat().st_mtime_ns for name in names} == before
    assert first.made.fingerprint == second.made.fingerprint


def test_another_dataset_is_never_overwritten(folder: Path, tmp_path: Path) -> None:
    prepare(folder, str(tmp_path / "tokens"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "tokens").iterdir()}
    (folder / "b.txt").write_text("changed")
    with pytest.raises(
        DataError,
        match=(r"tokens already holds a dataset; give another destination, or delete this dataset first"),
    ):
        prepare(folder, str(tmp_path / "tokens"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "tokens").iterdir()} == before


def test_the_fingerprint_is_of_the_samples_and_not_of_the_place(folder: Path, tmp_path: Path) -> None:
    prepare(folder, str(tmp_path / "0"))
    (folder / "b.txt").rename(folder / "bb.txt")
    prepare(folder, str(tmp_path / "1"))
    (folder / "bb.txt").write_text("Bee\n")
    prepare(folder, str(tmp_path / "2"))
    zero, one, two = (TokenDataset(str(tmp_path / name), 8).fingerprint() for name in "012")
    assert zero == one != two
    (tmp_path / "2").rename(tmp_path / "moved")
    assert (
        TokenDataset(str(tmp_path / "moved"), 8).fingerprint()
        == two
        != TokenDataset(str(tmp_path / "moved"), 9).fingerprint()
    )


def test_which_files_are_text(tmp_path: Path) -> None:
    names = [
        "b.txt",
        "a/c.md",
        "a.rst",
        ".hidden.txt",
        ".venv/x.py",
        "picture.png",
        "a-b.txt",
        "a/.x/y.txt",
        "a/..txt",
        "z.json",
    ]
    root = write_texts(tmp_path, dict.fromkeys(names, "x"))
    assert [file.key for file in text_files([root])] == ["a-b.txt", "a.rst", "a/c.md", "b.txt"]
    assert [file.key for file in text_files([root], (".png",))] == ["picture.png"]


def test_a_dataset_among_the_texts_is_no_text(folder: Path) -> None:
    first = prepare(folder, str(folder / "tokens"))
    assert prepare(folder, str(folder / "tokens")) == first


def test_only_the_files_of_a_dataset_are_no_text(tmp_path: Path) -> None:
    """A file beside a dataset is text, and so is every one beside a file of another kind that is called
    dataset.json.
    """
    names = [
        "a.txt",
        "tokens/b.txt",
        "tokens/deep/c.txt",
        "other/d.txt",
        "other/documents.parquet",
        "other/dataset.json",
    ]
    for name in names:
        put(
            tmp_path / name,
            parquet(["x"]) if name.endswith("parquet") else b"{}" if name.endswith("json") else name.encode(),
        )
    prepare(tmp_path / "a.txt", str(tmp_path / "tokens"), bpe=257)
    assert {"documents.parquet", "tokenizer.json"} < {path.name for path in (tmp_path / "tokens").iterdir()}
    for suffixes in (text_sources.SUFFIXES, (".json", ".parquet", ".txt", ".bin")):
        wanted = {name for name in names if name.endswith(tuple(suffixes))}
        assert {file.key for file in text_files([tmp_path], suffixes)} == wanted
    for raw in (b'{"format": "csv"}', b'{"format": 2}', b"[1]", b"no JSON"):
        put(tmp_path / "other/dataset.json", raw)
        assert "other/d.txt" in {file.key for file in text_files([tmp_path])}


# ---- refused: named, and nothing is left

LONE = b'{"text": "\\ud800"}\n'
CUT = gzip.compress(jsonl({"text": "x" * 999}), mtime=0)[:-9]  # the same in every process that collects tests


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        (
            "b.jsonl",
            jsonl({"text": "good"}) + b"{bad\n",
            (
                r"b\.jsonl, line 2: is not JSON in UTF-8: "
                r"Expecting property name"
            ),
        ),
        (
            "b.jsonl",
            b'\n{"text": "\xff"}',
            (
                r"b\.jsonl, line 2: is not JSON in UTF-8: 'utf-8' codec can't "
                r"decode byte 0xff"
            ),
        ),
        ("b.jsonl", b"[1, 2]\n", r"b\.jsonl, line 1: is a JSON list, not an object with the field 'text'"),
        (
            "b.jsonl",
            jsonl({"a": 1, "b": 2}),
            (
                r"b\.jsonl, line 1: has no field 'text', only 'a', 'b'; name "
                r"another with --text-field"
            ),
        ),
        ("b.jsonl", jsonl({"text": None}), r"b\.jsonl, line 1: 'text' is None, not text"),
        ("b.jsonl", LONE, r"b\.jsonl, line 1: 'text' is not UTF-8: .* surrogates not allowed"),
        ("b.jsonl.gz", CUT, r"b\.jsonl\.gz cannot be read: Truncated compressed stream"),
        ("b.jsonl.gz", b"no gzip", r"b\.jsonl\.gz cannot be read: .*incorrect header"),
        (
            "b.parquet",
            parquet(["x"], "body"),
            (
                r"b\.parquet has no column 'text', only 'id', 'body'; name "
                r"another with --text-field"
            ),
        ),
        ("b.parquet", parquet(["x", "y", None]), r"b\.parquet, row 3: 'text' is None, not text"),
        ("b.parquet", parquet([1, 2]), r"b\.parquet, row 1: 'text' is 1, not text"),
        ("b.parquet", b"PAR1 not", r"b\.parquet cannot be read: "),
    ],
)
def test_text_that_cannot_be_read_is_named_and_nothing_is_left(
    store: ObjectStore, tmp_path: Path, name: str, data: bytes, sentence: str
) -> None:
    put(tmp_path / "text" / "a.txt", b"good " * 1000)
    put(tmp_path / "text" / name, data)
    with pytest.raises(DataError, match=sentence):
        prepare(tmp_path / "text", store.url)
    assert store.list() == []


def test_text_in_parquet_that_is_not_utf8(tmp_path: Path) -> None:
    bad = pa.array([b"good", b"\xff"], pa.binary()).view(pa.string())
    put(tmp_path / "b.parquet", parquet(bad))
    with pytest.raises(DataError, match=r"b\.parquet, row 2: 'text' is not UTF-8: "):
        prepare(tmp_path, str(tmp_path / "out"))


def test_what_prepare_refuses(tmp_path: Path) -> None:
    empty = write_texts(tmp_path / "empty", {"a.txt": "", "b.txt": ""})
    (tmp_path / "nothing").mkdir()
    for source, sentence in (
        (
            tmp_path / "absent",
            (
                r"absent': neither a file nor a folder with a file whose name ends in \.txt or .* or "
                r"\.parquet; give another"
            ),
        ),
        (
            tmp_path / "nothing",
            (
                r"nothing' is a folder without a file whose name ends in \.txt or .* or "
                r"\.parquet; give another"
            ),
        ),
        (
            ["memory://nowhere", tmp_path / "nothing"],
            r"^'memory://nowhere' and '.*nothing': neither a file nor a folder",
        ),
        (empty, r"^the 2 text files in '.*empty' are all empty$"),
    ):
        with pytest.raises(DataError, match=sentence):
            prepare(source, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["documents.parquet", "tokenizer.json", "tokens-00000.bin", "held-out/documents.parquet"]
)
def test_a_file_of_the_user_at_the_destination_is_kept(tmp_path: Path, name: str) -> None:
    """It is kept whether the text can be read or not.  The control: without the file the dataset is written
    beside the text.
    """
    put(tmp_path / "a.jsonl", jsonl(*({"text": f"text {number}"} for number in range(50))))
    put(tmp_path / name, data := parquet(["mine"]))
    refusal = rf"{name} exists, and without a dataset\.json beside it .*; give another destination$"
    for source in (tmp_path, tmp_path / "a.jsonl"):
        with pytest.raises(DataError, match=refusal):
            prepare(source, str(tmp_path), held_out=0.2)
    assert (tmp_path / name).read_bytes() == data and {path.name for path in tmp_path.rglob("*.*")} == {
        "a.jsonl",
        Path(name).name,
    }
    (tmp_path / name).unlink()
    assert prepare(tmp_path, str(tmp_path), held_out=0.2) == prepare(tmp_path, str(tmp_path), held_out=0.2)


def test_what_the_dataset_refuses(folder: Path, tmp_path: Path) -> None:
    prepare(folder, str(tmp_path / "tokens"))
    tokens = len(dumb_row(TEXTS))
    for path, seq_len, sentence in (
        (
            folder,
            8,
            (
                r"text' is a folder of text \(5 files\), not a dataset; run `elastic data prepare "
                rf"{folder} {folder}-tokens`, and set data.args.path"
            ),
        ),
        (
            tmp_path / "no where",
            8,
            (
                r"holds no dataset; run `elastic data prepare FOLDER_OF_TEXT '.*no "
                r"where'`$"
            ),
        ),
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
        with pytest.raises(
            IndexError, match=rf"there is no sample {beyond} in a dataset of {len(dataset)} samples"
        ):
            dataset.read((beyond,))


# ---- held out, and once


def texts_of(store: ObjectStore) -> list[bytes]:
    """Returns the documents of a dataset of bytes, read back."""
    files = TokenFiles(store)
    row = files.read(0, files.description.tokens)
    index = pq.read_table(io.BytesIO(store.get(DOCUMENTS))).to_pylist()
    return [bytes(row[each["first"] : each["first"] + each["length"] - 1].astype(np.uint8)) for each in index]


def test_a14_held_out_documents_are_never_trained_on(tmp_path: Path) -> None:
    """A14: the two datasets share no document, and have all of them together; equal ones are on one side,
    which more text does not change.

    The control: without the option all are trained on.
    """
    texts = [f"text {number % 150}" for number in range(200)]
    put(tmp_path / "a.jsonl", jsonl(*({"text": text} for text in texts)))
    summary = prepare(tmp_path / "a.jsonl", str(tmp_path / "out"), held_out=0.2)
    trained, held_out = (
        texts_of(ObjectStore.open(str(tmp_path / place))) for place in ("out", "out/held-out")
    )
    assert not set(trained) & set(held_out) and sorted([*trained, *held_out]) == sorted(
        text.encode() for text in texts
    )
    assert (
        10 < len(set(held_out)) < 55
        and summary.held_out is not None
        and summary.held_out.made.documents == len(held_out)
    )
    assert "held out: " in str(summary)
    put(
        tmp_path / "b.jsonl",
        jsonl(*({"text": f"more {number}"} for number in range(50)), *({"text": text} for text in texts)),
    )
    prepare(tmp_path / "b.jsonl", str(tmp_path / "more"), held_out=0.2)
    assert set(held_out) <= set(texts_of(ObjectStore.open(str(tmp_path / "more/held-out"))))
    assert prepare(tmp_path / "a.jsonl", str(tmp_path / "out"), held_out=0.2) == summary, (
        "the same again is no error"
    )
    prepare(tmp_path / "a.jsonl", str(tmp_path / "all"))
    assert set(texts_of(ObjectStore.open(str(tmp_path / "all")))) & set(held_out)


def test_documents_that_came_before_are_left_out(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", jsonl(*({"text": text} for text in ("one", "two", "one", "three", "two"))))
    prepare(tmp_path / "a.jsonl", str(tmp_path / "out"), unique=True)
    assert texts_of(ObjectStore.open(str(tmp_path / "out"))) == [b"one", b"two", b"three"]
    prepare(tmp_path / "a.jsonl", str(tmp_path / "all"))
    assert len(texts_of(ObjectStore.open(str(tmp_path / "all")))) == 5


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (1.0, "--held-out 1 must be a share of the documents: at least 0, and less than 1"),
        (-0.1, "--held-out -0.1 must be a share"),
        (1e-9, "--held-out 1e-09: no document would be held out; give another share, or more documents"),
    ],
)
def test_a_part_that_cannot_be_held_out_is_refused(tmp_path: Path, part: float, says: str) -> None:
    put(tmp_path / "a.jsonl", jsonl({"text": "one"}, {"text": "two"}))
    with pytest.raises(DataError, match=f"^{says}"):
        prepare(tmp_path / "a.jsonl", str(tmp_path / "out"), held_out=part)
    assert not (tmp_path / "out").exists()
