"""A token dataset is one long row of tokens, cut into files of equal size, and a description that is written
last.

    tokens-00000.bin …    little-endian uint16, or uint32 for vocabularies beyond 65,536; ``SHARD_TOKENS`` in each, fewer in the last
    blocks.b3             the blake3 digests of the blocks of all token files, in order: 32 bytes each
    documents.parquet     one row for each document: path, first token, length, digest of its tokens
    tokenizer.json        the tokenizer's definition, unless tokens are bytes
    dataset.json          format, tokenizer, vocabulary, counts, and every file with its size and digest
    dataset.begun         an empty file that is there while the others are written

A dataset exists once its description does.  The mark dataset.begun tells the files of a killed writer from
files of another program that have such names.  The next writer overwrites the former, and never the latter.

Readers fetch and check whole blocks (``token_reader.py``).  The size of a block is a trade-off.  A sample of
4,096 tokens has 8 KiB, so larger blocks would mostly fetch bytes that nobody wants; smaller ones would spend
more on digests and requests.  Format 1 had no blocks: there, each token file counts as one block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3

from storage.documents import File, digest_of, file_of
from storage.errors import BadFormat, Damaged, Exists, Missing, StorageError
from storage.objects import ObjectStore

FORMAT = 2
READABLE = (1, 2)
"""Formats that this release reads: every one that was ever released."""
DESCRIPTION, DOCUMENTS, BLOCKS, TOKENIZER = "dataset.json", "documents.parquet", "blocks.b3", "tokenizer.json"
BEGUN = "dataset.begun"
OURS = {"tokenizer", "vocabulary", "tokens", "documents", "files"}
"""Fields of a description in every format.  JSON with fewer than half of them was written by another program,
whatever its file is called.
"""
WRITTEN = re.compile(rf"tokens-\d{{5,}}\.bin|{'|'.join(map(re.escape, (DOCUMENTS, BLOCKS, TOKENIZER)))}")
"""Matches the names of the files that are written before the description."""
SHARD_TOKENS = 8 * 2**20
BLOCK_BYTES = 256 * 2**10
INDEX = pa.schema(
    [("path", pa.string()), ("first", pa.int64()), ("length", pa.int64()), ("blake3", pa.string())]
)
INDEX_ROWS, PIECE_BYTES = 2**16, 4 * 2**20
"""Number of rows of documents.parquet, and number of bytes of a file, that the writer holds in memory."""

Tokens = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Coding:
    """Says how text became tokens.  ``definition``: the contents of tokenizer.json, if there is one."""

    tokenizer: str
    vocabulary: int
    end_of_document: int
    definition: bytes | None = None

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The narrowest type that can hold every token."""
        return np.dtype("<u2") if self.vocabulary <= 2**16 else np.dtype("<u4")


@dataclass(frozen=True)
class Description:
    """The content of ``dataset.json``.  ``files``: the token files in order; ``index``: documents.parquet."""

    tokenizer: str
    vocabulary: int
    tokens: int
    documents: int
    files: tuple[File, ...]
    index: File
    end_of_document: int = 256
    block_bytes: int = 0
    blocks: File | None = None
    definition: File | None = None
    """The file tokenizer.json, if the dataset has one."""

    def to_json(self) -> bytes:
        """Returns the bytes of ``dataset.json``: always the same for the same description."""
        return json.dumps(
            {"format": FORMAT, "dtype": self.dtype.name, **asdict(self)}, sort_keys=True, indent=1
        ).encode()

    @classmethod
    def from_json(cls, raw: bytes, name: str = DESCRIPTION) -> Description:
        """Returns the description in ``raw``.  Raises :class:`Damaged` or :class:`BadFormat`, naming
        ``name``.
        """
        try:
            value = json.loads(raw)
            if not isinstance(value, dict) or 2 * len(OURS & value.keys()) < len(OURS):
                raise BadFormat(
                    f"{name} does not describe a dataset of Elastic: it is JSON of another program; "
                    "`elastic data prepare SOURCE FOLDER` makes a dataset, in a folder without such a file"
                )
            number = value.pop("format")
            if number not in READABLE:
                readable = " and ".join(map(str, READABLE))
                raise BadFormat(
                    f"{name} has format {number}, but this release reads {readable}: install a newer release"
                )
            dtype = value.pop("dtype", "uint16")
            value["files"] = tuple(map(File.of, value["files"]))
            for each in ("index", "blocks", "definition"):
                value[each] = File.of(value[each]) if value.get(each) is not None else None
            found = cls(**value)
            found = replace(found, block_bytes=found.block_bytes or max(file.size for file in found.files))
            if dtype != found.dtype.name or found.block_bytes % found.dtype.itemsize:
                raise ValueError(
                    f"dtype {dtype} and blocks of {found.block_bytes} bytes for a vocabulary of "
                    f"{found.vocabulary}"
                )
            return found
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(name, "the description of a dataset", f"{type(error).__name__}: {error}") from None

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        return Coding(self.tokenizer, self.vocabulary, self.end_of_document).dtype

    @property
    def names(self) -> frozenset[str]:
        """The names of all files of the dataset."""
        others = (self.index, self.blocks, self.definition)
        return frozenset((DESCRIPTION, *(file.name for file in (*self.files, *others) if file is not None)))

    @property
    def fingerprint(self) -> str:
        """The digest of the tokens, their meaning and their cut into files.  Names and places of documents do
        not change it.
        """
        seen: list[Any] = [self.tokenizer, self.vocabulary, [asdict(file) for file in self.files]]
        if self.definition is not None:
            seen.append(self.definition.blake3)
        return digest_of(json.dumps(seen).encode())


def read_description(store: ObjectStore) -> Description:
    """Returns the description of the dataset in ``store``.  Raises :class:`Missing` if there is none."""
    return Description.from_json(store.get(DESCRIPTION), store.full_name(DESCRIPTION))


def write_dataset(
    store: ObjectStore,
    documents: Iterable[tuple[str, Tokens]],
    coding: Coding,
    shard_tokens: int = SHARD_TOKENS,
    block_bytes: int = BLOCK_BYTES,
) -> Description:
    """Writes a dataset of ``documents``, which are (path, tokens), in this order.  Holds one shard in memory.
    Only one writer may run.

    Writing the same dataset again changes nothing.  If the store holds other tokens, or a file that
    :func:`expect_room` refuses, this raises :class:`Exists` and changes nothing.  If ``documents`` raises,
    the files that were written until then are removed.
    """
    expect_room(store)
    found = _found(store)
    if found is None:
        with _Files(store) as files, _index(coding.dtype) as index:
            made = _write(files, index, documents, coding, shard_tokens, block_bytes)
            store.put_if_absent(DESCRIPTION, made.to_json())
        return made
    with _index(coding.dtype) as index:
        made = _write(_Digests(), index, documents, coding, shard_tokens, block_bytes)
    if found.fingerprint != made.fingerprint:
        raise Exists(DESCRIPTION, store.url)
    return found


def expect_room(store: ObjectStore) -> None:
    """Raises :class:`Exists` if the store holds somebody else's file under a name that a dataset uses: one
    without a description, or the mark of a killed writer, beside it.
    """
    if not store.exists(DESCRIPTION) and not store.exists(BEGUN):
        for name in _written(store):
            raise Exists(name, store.url)


def _written(store: ObjectStore) -> list[str]:
    return [name for name in store.children() if WRITTEN.fullmatch(name)]


def files_of_datasets(store: ObjectStore, keys: Iterable[str]) -> set[str]:
    """Returns those of ``keys`` that are files of datasets, complete or not.  ``keys`` are all keys of
    ``store``.

    Another program's file may be called dataset.json; then neither it nor a file beside it belongs to a
    dataset, unless a killed writer's mark says so.
    """
    folders: dict[str, list[str]] = {}
    for key in keys:
        folder, slash, name = key.rpartition("/")
        folders.setdefault(folder + slash, []).append(name)
    found = set[str]()
    for folder, names in folders.items():
        own = {name for name in names if WRITTEN.fullmatch(name)} if BEGUN in names else set[str]()
        if DESCRIPTION in names:
            with suppress(Damaged, BadFormat):
                own |= Description.from_json(store.get(f"{folder}{DESCRIPTION}")).names
        found |= {f"{folder}{name}" for name in own}
    return found


def _found(store: ObjectStore) -> Description | None:
    try:
        return read_description(store)
    except Missing:
        return None


def _write(
    files: _Digests,
    index: _DocumentIndex,
    documents: Iterable[tuple[str, Tokens]],
    coding: Coding,
    shard_tokens: int,
    block_bytes: int,
) -> Description:
    shards, blocks = [], []
    for number, data in enumerate(_shards(index.noted(documents), shard_tokens)):
        shards.append(files.put(f"tokens-{number:05d}.bin", data))
        view = memoryview(data)
        blocks += [
            blake3(view[first : first + block_bytes]).digest() for first in range(0, len(data), block_bytes)
        ]
    table = index.finish()
    return Description(
        tokenizer=coding.tokenizer,
        vocabulary=coding.vocabulary,
        tokens=sum(file.size for file in shards) // coding.dtype.itemsize,
        documents=index.documents,
        files=tuple(shards),
        index=files.put(DOCUMENTS, table),
        end_of_document=coding.end_of_document,
        block_bytes=block_bytes,
        blocks=files.put(BLOCKS, b"".join(blocks)),
        definition=None if coding.definition is None else files.put(TOKENIZER, coding.definition),
    )


class _Digests:
    """Computes what a dataset would consist of, and writes nothing."""

    def put(self, name: str, data: bytes | IO[bytes]) -> File:
        return file_of(name, _pieces(data))


class _Files(_Digests):
    """Writes the files.  After an error it removes them, unless somebody else has completed a dataset with
    them.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def put(self, name: str, data: bytes | IO[bytes]) -> File:
        self.store.put(name, _pieces(data))
        return super().put(name, data)

    def __enter__(self) -> _Files:
        with suppress(Exists):  # the mark of a killed writer
            self.store.put_if_absent(BEGUN, b"")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            with suppress(StorageError):  # beside the description the mark means nothing
                self.store.delete(BEGUN)
        elif not self.store.exists(DESCRIPTION):
            for name in (*_written(self.store), BEGUN):  # also what a killed writer left
                self.store.delete(name)


def _pieces(data: bytes | IO[bytes]) -> Iterator[bytes]:
    if isinstance(data, bytes):
        yield data
        return
    data.seek(0)
    while piece := data.read(PIECE_BYTES):
        yield piece


class _DocumentIndex:
    """Writes documents.parquet to a temporary file while the documents pass through."""

    def __init__(
        self, file: IO[bytes], table: pq.ParquetWriter, dtype: np.dtype[np.unsignedinteger[Any]]
    ) -> None:
        self.dtype, self.documents = dtype, 0
        self._file, self._table = file, table
        self._rows: list[tuple[str, int, int, str]] = []

    def noted(self, documents: Iterable[tuple[str, Tokens]]) -> Iterator[Tokens]:
        """Yields the tokens of each document, and notes where they lie."""
        first = 0
        for path, tokens in documents:
            tokens = tokens.astype(self.dtype)
            self._rows.append((path, first, len(tokens), digest_of(tokens.tobytes())))
            if len(self._rows) == INDEX_ROWS:
                self._flush()
            first += len(tokens)
            self.documents += 1
            yield tokens

    def finish(self) -> IO[bytes]:
        self._flush()
        self._table.close()
        return self._file

    def _flush(self) -> None:
        if self._rows:
            columns = [
                pa.array(column, kind)
                for column, kind in zip(zip(*self._rows, strict=True), INDEX.types, strict=True)
            ]
            self._table.write_table(pa.Table.from_arrays(columns, schema=INDEX))
            self._rows.clear()


@contextmanager
def _index(dtype: np.dtype[np.unsignedinteger[Any]]) -> Iterator[_DocumentIndex]:
    with TemporaryFile() as file, pq.ParquetWriter(file, INDEX) as table:
        yield _DocumentIndex(file, table, dtype)


def _shards(parts: Iterable[Tokens], shard_tokens: int) -> Iterator[bytes]:
    """Yields the tokens of ``parts``, in order, as the bytes of shards.  Holds one shard in memory."""
    shard: list[Tokens] = []
    room = shard_tokens
    for part in parts:
        while len(part) >= room:
            yield np.concatenate([*shard, part[:room]]).tobytes()
            shard, part, room = [], part[room:], shard_tokens
        shard.append(part)
        room -= len(part)
    if room < shard_tokens:
        yield np.concatenate(shard).tobytes()
