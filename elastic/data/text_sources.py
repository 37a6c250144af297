"""Reads text from text files, JSON lines and parquet, in folders, single files or buckets, compressed or not.

Documents come in the order of the sources as named, then of the paths, then of the rows; so the same text
always gives the same dataset. Everything is read as a stream: one document, a piece of one file, or a few
rows are in memory at a time.  An error names the file and the line or row, counted from 1.
"""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from elastic.errors import DataError
from storage.datasets import files_of_datasets
from storage.objects import ObjectStore

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
"""Compressions by suffix.  Each may follow any suffix of :data:`SUFFIXES` except .parquet, which compresses
by itself.
"""
BUFFER_BYTES = 4 * 2**20
"""Size of one read from a store in bytes.  A large read makes a file of a bucket take few requests."""
ROWS = 128
"""Number of rows of a parquet file that are in memory at a time."""


class Document(NamedTuple):
    """One document.  ``name`` is the path of its file, followed by ``:line`` or ``:row`` if the file holds
    many; ``text`` is its bytes.
    """

    name: str
    text: bytes


class TextFile(NamedTuple):
    """One object of a store that holds text."""

    store: ObjectStore
    key: str

    @property
    def place(self) -> str:
        return self.store.full_name(self.key)


def text_files(sources: Iterable[str | Path], suffixes: Sequence[str] = SUFFIXES) -> list[TextFile]:
    """Returns the files that ``sources`` name, and the files with one of ``suffixes`` in the folders that
    they name.

    Files of a folder are sorted by path; hidden files and the files of prepared datasets are left out, but
    not other files beside these.
    """
    return [file for source in sources for file in (_itself(str(source)) or _below(str(source), suffixes))]


def _itself(source: str) -> list[TextFile]:
    """Returns the file that ``source`` names, or nothing if it is not the name of one file."""
    folder, _, name = source.rpartition("/")
    if name in ("", ".", "..") or folder.endswith(":/"):
        return []
    store = ObjectStore.open(folder or ("/" if source.startswith("/") else "."))
    return [TextFile(store, name)] if store.exists(name) else []


def _below(source: str, suffixes: Sequence[str]) -> list[TextFile]:
    store = ObjectStore.open(source)
    keys = store.list()
    prepared = files_of_datasets(store, keys)  # a dataset's own parquet is no text
    ends = (*suffixes, *(f"{suffix}{packed}" for suffix in suffixes for packed in COMPRESSIONS))
    return [
        TextFile(store, key)
        for key in keys
        if key.endswith(ends) and "/." not in f"/{key}" and key not in prepared
    ]


def documents(files: Iterable[TextFile], text_field: str = "text") -> Iterator[Document]:
    """Yields every document: a text file, a line of JSON, or a row of a parquet file.

    Raises :class:`DataError` for a file, line or row that cannot be read as text.
    """
    for file in files:
        stem = _stem(file.key)
        try:
            if stem.endswith(".parquet"):
                yield from _rows(file, text_field)
            elif stem.endswith(".jsonl"):
                yield from _lines(file, text_field)
            else:
                yield Document(file.key, _checked(_open(file).read(), file))
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{file.place} cannot be read: {error}") from error


def _lines(file: TextFile, field: str) -> Iterator[Document]:
    for number, line in enumerate(_open(file), 1):
        if line.isspace():
            continue
        place = f"{file.place}, line {number}:"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DataError(f"{place} is not JSON in UTF-8: {error}") from None
        if not isinstance(value, dict):
            raise DataError(
                f"{place} is a JSON {type(value).__name__}, not an object with the field {field!r}"
            )
        if field not in value:
            raise DataError(
                f"{place} has no field {field!r}, only {', '.join(map(repr, value)) or 'none'}; name "
                "another with --text-field"
            )
        yield Document(f"{file.key}:{number}", _utf8(value[field], place, field))


def _rows(file: TextFile, field: str) -> Iterator[Document]:
    # with pre_buffer, or with all groups at once, arrow would fetch the column of the whole file first
    with pq.ParquetFile(
        pa.PythonFile(_Raw(file), mode="r"), pre_buffer=False, buffer_size=BUFFER_BYTES
    ) as table:
        names = table.schema_arrow.names
        if field not in names:
            raise DataError(
                f"{file.place} has no column {field!r}, only {', '.join(map(repr, names))}; name another "
                "with --text-field"
            )
        groups = (table.iter_batches(ROWS, [group], [field]) for group in range(table.num_row_groups))
        cells = (cell for batches in groups for batch in batches for cell in batch.column(0))
        for number, cell in enumerate(cells, 1):
            place = f"{file.place}, row {number}:"
            try:
                text = cell.as_py()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{place} {field!r} is not UTF-8: {error}; convert the text to UTF-8"
                ) from None
            yield Document(f"{file.key}:{number}", _utf8(text, place, field))


def _checked(text: bytes, file: TextFile) -> bytes:
    """Returns ``text`` without the byte order mark that some editors write at its beginning.  Raises
    :class:`DataError` unless it is UTF-8.

    Latin letters in UTF-16 are valid UTF-8, too, with a zero byte beside each letter.  So a text in which
    more than a quarter of the bytes are zero is refused.
    """
    if text.count(0) * 4 > len(text):
        line = text.count(b"\n", 0, text.index(0)) + 1
        raise DataError(
            f"{file.place}, line {line}: many bytes are 0x00, as in UTF-16; convert the file to UTF-8, or "
            "leave it out"
        )
    try:
        text.decode()
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{file.place}, line {line}: byte {text[error.start]:#04x} is not UTF-8; convert the file to "
            "UTF-8, or leave it out"
        ) from None
    return text.removeprefix(codecs.BOM_UTF8)


def _utf8(text: object, place: str, field: str) -> bytes:
    if not isinstance(text, str):
        raise DataError(f"{place} {field!r} is {text!r:.40}, not text")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place} {field!r} is not UTF-8: {error}") from None


def _stem(key: str) -> str:
    """Returns ``key`` without the suffix of a compression."""
    return next((key.removesuffix(packed) for packed in COMPRESSIONS if key.endswith(packed)), key)


def _open(file: TextFile) -> io.BufferedIOBase:
    """Opens the text of ``file``, decompressed."""
    raw = io.BufferedReader(_Raw(file), BUFFER_BYTES)
    packed = COMPRESSIONS.get(file.key.removeprefix(_stem(file.key)))
    if packed is None:
        return raw
    return io.BufferedReader(pa.input_stream(pa.PythonFile(raw, mode="r"), compression=packed), BUFFER_BYTES)


class _Raw(io.RawIOBase):
    """Presents an object of a store as a file that is read by ranges."""

    def __init__(self, file: TextFile) -> None:
        self.file, self.at, self.size = file, 0, file.store.size(file.key)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self.file.store.get(self.file.key, self.at, min(self.at + len(buffer), self.size))
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)
