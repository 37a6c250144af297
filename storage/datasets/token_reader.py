"""The reader of a token dataset reads whole blocks, from a memory map or by ranges, and checks each of them.

It hands out no token before it has compared the digest of its block with the one that the writer took.  A
local file is memory-mapped, so the workers of a node share its pages; each process checks a block when it
first touches it.  From any other store, the reader fetches blocks by range, the blocks of one call at the
same time, and keeps some of them.  It fetches a damaged block once more, since a network damages bytes more
often than the disk of a store does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
from blake3 import blake3

from storage.datasets.datasets import Description, Tokens, read_description
from storage.documents import digest_of
from storage.errors import Damaged
from storage.objects import ObjectStore

CACHE_BYTES = 64 * 2**20
FETCHES = 8
"""Blocks of a remote store that one call fetches at the same time."""
DIGEST_BYTES = 32


class TokenFiles:
    """The tokens of a prepared dataset, by position.  Only one thread may use it at a time.  Raises
    :class:`Missing` if there is none.
    """

    def __init__(self, store: ObjectStore, cache_bytes: int = CACHE_BYTES) -> None:
        self.store, self.description = store, read_description(store)
        self.block_bytes, self.dtype = self.description.block_bytes, self.description.dtype
        self._starts = list(
            accumulate((file.size // self.dtype.itemsize for file in self.description.files), initial=0)
        )
        self._blocks = list(
            accumulate((-(-file.size // self.block_bytes) for file in self.description.files), initial=0)
        )
        self._digests = _digests(store, self.description, self._blocks[-1])
        self._checked = bytearray(self._blocks[-1])
        self._maps: dict[int, Tokens] = {}
        self._kept: OrderedDict[int, Tokens] = OrderedDict()
        self._room = max(1, cache_bytes // self.block_bytes)

    def read(self, first: int, last: int) -> Tokens:
        """Returns tokens ``[first, last)`` of the row.  Raises as :meth:`rows` does."""
        row: Tokens = self.rows([first], last - first)[0]
        return row

    def rows(self, firsts: Sequence[int], length: int) -> Tokens:
        """Returns ``length`` tokens from each of ``firsts`` on: [rows, length].

        Raises IndexError beyond the end of the dataset, and :class:`Damaged` if a file has another size, or a
        block has other bytes, than were written.
        """
        for first in firsts:
            if not 0 <= first <= first + length <= self.description.tokens:
                raise IndexError(
                    f"there are no tokens {first} to {first + length} in a dataset of "
                    f"{self.description.tokens} tokens"
                )
        spans = [list(self._spans(first, first + length)) for first in firsts]
        blocks = self._get(list(dict.fromkeys(block for row in spans for block, _, _ in row)))
        rows = np.empty((len(firsts), length), self.dtype)
        for row, parts in zip(rows, spans, strict=True):
            at = 0
            for block, first, last in parts:
                row[at : at + last - first] = blocks[block][first:last]
                at += last - first
        return rows

    def _spans(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yields where the tokens lie: (number of the block, counted through all files; first token in it;
        token behind the last one).
        """
        size = self.block_bytes // self.dtype.itemsize
        while first < last:
            file = bisect_right(self._starts, first) - 1
            block, skipped = divmod(first - self._starts[file], size)
            stop = min(last, self._starts[file + 1], first - skipped + size)
            yield self._blocks[file] + block, skipped, skipped + stop - first
            first = stop

    def _get(self, blocks: list[int]) -> dict[int, Tokens]:
        if self.store.local:
            return {block: self._mapped(block) for block in blocks}
        found = {block: self._kept[block] for block in blocks if block in self._kept}
        missing = [block for block in blocks if block not in found]
        fetch = self._fetchers.map if len(missing) > 1 else map
        found |= zip(missing, fetch(self._fetch, missing), strict=True)
        for block in blocks:
            self._kept[block] = found[block]
            self._kept.move_to_end(block)
        while len(self._kept) > self._room:
            self._kept.popitem(last=False)
        return found

    @cached_property
    def _fetchers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(FETCHES, thread_name_prefix="tokens")

    def _mapped(self, block: int) -> Tokens:
        file, first, last = self._place(block)
        if file not in self._maps:
            described = self.description.files[file]
            self._expect_size(file, described.size, self.store.size(described.name))
            self._maps[file] = np.memmap(Path(self.store.root) / described.name, self.dtype, "r")
        tokens = self._maps[file][first // self.dtype.itemsize : last // self.dtype.itemsize]
        if not self._checked[block]:
            self._expect_digest(block, tokens.view(np.uint8).data)
            self._checked[block] = True
        return tokens

    def _fetch(self, block: int) -> Tokens:
        try:
            return self._fetch_once(block)
        except Damaged:
            return self._fetch_once(block)

    def _fetch_once(self, block: int) -> Tokens:
        file, first, last = self._place(block)
        raw = self.store.get(self.description.files[file].name, first, last)
        self._expect_size(file, last - first, len(raw))
        self._expect_digest(block, memoryview(raw))
        return np.frombuffer(raw, self.dtype)

    def _place(self, block: int) -> tuple[int, int, int]:
        """Returns where the block lies: (number of the file, first byte, byte behind the last one)."""
        file = bisect_right(self._blocks, block) - 1
        first = (block - self._blocks[file]) * self.block_bytes
        return file, first, min(first + self.block_bytes, self.description.files[file].size)

    def _expect_size(self, file: int, size: int, found: int) -> None:
        if found != size:
            raise Damaged(
                self.store.full_name(self.description.files[file].name), f"{size} bytes", f"{found}"
            )

    def _expect_digest(self, block: int, data: memoryview) -> None:
        expected, found = (
            self._digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES],
            blake3(data).digest(),
        )
        if found != expected:
            file, first, last = self._place(block)
            name = (
                f"{self.store.full_name(self.description.files[file].name)}, block "
                f"{block - self._blocks[file]} (bytes {first} to {last}),"
            )
            raise Damaged(name, f"blake3 {expected.hex()[:16]}…", f"{found.hex()[:16]}…")


def _digests(store: ObjectStore, description: Description, blocks: int) -> bytes:
    """Returns the digests of all blocks, in order: 32 bytes each."""
    if description.blocks is None:  # format 1: a file is one block
        return b"".join(bytes.fromhex(file.blake3) for file in description.files)
    raw = store.get(description.blocks.name)
    if digest_of(raw) != description.blocks.blake3 or len(raw) != blocks * DIGEST_BYTES:
        raise Damaged(
            store.full_name(description.blocks.name),
            f"blake3 {description.blocks.blake3[:16]}…",
            f"{digest_of(raw)[:16]}…",
        )
    return raw
