"""Token datasets: one endless row of tokens, cut into files of equal size, and a description that is written last.

    tokens-00000.bin …    little-endian uint16, ``SHARD_TOKENS`` each, the last one shorter
    documents.parquet     one row a document: path, first token, length, digest of its tokens
    dataset.json          format, tokenizer, vocabulary, numbers, and every file with its size and digest

As everywhere here, nothing exists until its description does.  A local dataset is memory-mapped, so the workers of a node share its
pages; from any other store, blocks are fetched by range and a few of them kept.
"""

from __future__ import annotations

import io
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3

from storage.errors import BadFormat, Damaged, Exists, Missing
from storage.manifest import File
from storage.objects import ObjectStore

FORMAT = 1
READABLE = (1,)
"""Formats that this version reads: every one that was ever released."""
DESCRIPTION, DOCUMENTS = "dataset.json", "documents.parquet"
TOKEN = np.dtype("<u2")
SHARD_TOKENS = 8 * 2**20
BLOCK_TOKENS = 2**19
BLOCKS = 64
"""Blocks of 1 MiB that a reader of a remote store keeps."""

Tokens = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Description:
    """What ``dataset.json`` says.  ``files``: the token files in order; ``index``: the one of the documents."""

    tokenizer: str
    vocabulary: int
    tokens: int
    documents: int
    files: tuple[File, ...]
    index: File

    def to_json(self) -> bytes:
        """The same bytes for the same description."""
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True, indent=1).encode()

    @classmethod
    def from_json(cls, raw: bytes, name: str = DESCRIPTION) -> Description:
        """Raises :class:`Damaged` or :class:`BadFormat`, naming ``name``."""
        try:
            value = json.loads(raw)
            number = value.pop("format")
            if number not in READABLE:
                raise BadFormat(f"{name} is of format {number}, not {' or '.join(map(str, READABLE))}; use a newer version")
            value["files"] = tuple(File(**file) for file in value["files"])
            return cls(**{**value, "index": File(**value["index"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(name, "the description of a dataset", f"{type(error).__name__}: {error}") from None

    @property
    def fingerprint(self) -> str:
        """Digest of what training sees: the tokens, whatever the documents were called."""
        seen = (self.tokenizer, self.vocabulary, [asdict(file) for file in self.files])
        return blake3(json.dumps(seen).encode()).hexdigest()


def write_dataset(
    store: ObjectStore, documents: Iterable[tuple[str, Tokens]], tokenizer: str, vocabulary: int, shard_tokens: int = SHARD_TOKENS
) -> Description:
    """Write (path, tokens) of every document, in this order.

    Writing the same again changes nothing; a store that holds other tokens already raises :class:`Exists` and is left as it is.
    """
    found = _found(store)
    rows: list[tuple[str, int, int, str]] = []
    files = []
    for number, data in enumerate(_shards(_noted(documents, rows), shard_tokens)):
        file = File(f"tokens-{number:05d}.bin", len(data), blake3(data).hexdigest())
        files.append(file)
        if found is None:
            store.put(file.name, data)
    table = _table(rows)
    index = File(DOCUMENTS, len(table), blake3(table).hexdigest())
    tokens = sum(file.size for file in files) // TOKEN.itemsize
    made = Description(tokenizer, vocabulary, tokens, len(rows), tuple(files), index)
    if found is None:
        store.put(DOCUMENTS, table)
        store.put_if_absent(DESCRIPTION, made.to_json())
        return made
    if found.fingerprint != made.fingerprint:
        raise Exists(DESCRIPTION, store.url)
    return found


class TokenFiles:
    """The tokens of a prepared dataset, by position.  Raises :class:`Missing` where there is none."""

    def __init__(self, store: ObjectStore, block_tokens: int = BLOCK_TOKENS) -> None:
        self.store, self.block_tokens = store, block_tokens
        self.description = Description.from_json(store.get(DESCRIPTION), f"{store.url}/{DESCRIPTION}")
        sizes = [file.size // TOKEN.itemsize for file in self.description.files]
        self._starts = list(accumulate(sizes, initial=0))
        self._maps: dict[int, Tokens] = {}
        self._block = lru_cache(maxsize=BLOCKS)(self._fetch)

    def read(self, first: int, last: int) -> Tokens:
        """Tokens ``[first, last)`` of the row.  Raises IndexError beyond it, :class:`Damaged` for a file of another size."""
        if not 0 <= first <= last <= self.description.tokens:
            raise IndexError(f"tokens {first} to {last} of a dataset of {self.description.tokens}")
        parts = [np.empty(0, TOKEN)]
        while first < last:
            number = bisect_right(self._starts, first) - 1
            start, stop = self._starts[number], min(self._starts[number + 1], last)
            parts.append(self._from_file(number, first - start, stop - start))
            first = stop
        return np.concatenate(parts)

    def _from_file(self, number: int, first: int, last: int) -> Tokens:
        if self.store.local:
            return self._map(number)[first:last]
        blocks = range(first // self.block_tokens, -(-last // self.block_tokens))
        whole = np.concatenate([self._block(number, block) for block in blocks])
        skipped = blocks.start * self.block_tokens
        return whole[first - skipped : last - skipped]

    def _map(self, number: int) -> Tokens:
        if number not in self._maps:
            file = self.description.files[number]
            self._expect(file.name, file.size, self.store.size(file.name))
            self._maps[number] = np.memmap(Path(self.store.root) / file.name, TOKEN, "r")
        return self._maps[number]

    def _fetch(self, number: int, block: int) -> Tokens:
        file = self.description.files[number]
        size = self.block_tokens * TOKEN.itemsize
        first, last = block * size, min((block + 1) * size, file.size)
        raw = self.store.get(file.name, first, last)
        self._expect(file.name, last - first, len(raw))
        return np.frombuffer(raw, TOKEN)

    def _expect(self, name: str, size: int, found: int) -> None:
        if found != size:
            raise Damaged(f"{self.store.url}/{name}", f"{size} bytes", f"{found}")


def _found(store: ObjectStore) -> Description | None:
    try:
        return Description.from_json(store.get(DESCRIPTION), f"{store.url}/{DESCRIPTION}")
    except Missing:
        return None


def _noted(documents: Iterable[tuple[str, Tokens]], rows: list[tuple[str, int, int, str]]) -> Iterator[Tokens]:
    """Passes the tokens on, and notes in ``rows`` where each document is."""
    first = 0
    for path, tokens in documents:
        rows.append((path, first, len(tokens), blake3(tokens.astype(TOKEN).tobytes()).hexdigest()))
        first += len(tokens)
        yield tokens


def _shards(parts: Iterable[Tokens], shard_tokens: int) -> Iterator[bytes]:
    """The same row of tokens, cut anew; one shard is in memory at a time."""
    shard: list[Tokens] = []
    room = shard_tokens
    for part in parts:
        while len(part) >= room:
            yield np.concatenate([*shard, part[:room]]).astype(TOKEN).tobytes()
            shard, part, room = [], part[room:], shard_tokens
        shard.append(part)
        room -= len(part)
    if room < shard_tokens:
        yield np.concatenate(shard).astype(TOKEN).tobytes()


def _table(rows: list[tuple[str, int, int, str]]) -> bytes:
    schema = pa.schema([("path", pa.string()), ("first", pa.int64()), ("length", pa.int64()), ("blake3", pa.string())])
    columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), schema.types, strict=True)]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(columns, schema=schema), buffer)
    return buffer.getvalue()
