"""Checkpoints of a run.  Writers write shards, and take digests before the upload; the manifest is written last.

    <run>/steps/<step>/g<generation>/<name>.safetensors   one writer's slices
    <run>/steps/<step>/g<generation>/index.parquet        one row for each slice
    <run>/steps/<step>/g<generation>/MANIFEST.json        before it is written, there is no checkpoint
    <run>/steps/<step>/g<generation>/DAMAGED.json         a note that the checkpoint is damaged; nothing is deleted

Objects are only created, never replaced.  So a writer that was believed dead cannot change what a manifest lists.  A writer that finds
its own bytes in place has succeeded.  If an unfinished attempt has left other bytes there, a shard or an index is written under a name with
its digest in it; writing a manifest raises :class:`Exists`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from storage.checkpoints.cover import check_exact_cover, describe
from storage.checkpoints.export import export
from storage.checkpoints.index import to_parquet
from storage.checkpoints.manifest import ABOUT, DAMAGED, INDEX, MANIFEST, Manifest, Stored
from storage.checkpoints.reader import FETCH_BYTES, Reader, Verified, verify
from storage.checkpoints.shards import Entry, aligned_order, entry_of, header_of, metadata_of
from storage.documents import File, digest_of, seal, unseal
from storage.errors import Damaged, Exists, Incomplete, Missing
from storage.objects import ObjectStore, Piece
from storage.slices import Slice, Tensor, Version

Part = tuple[Tensor, Slice, memoryview]
"""A slice and its bytes: contiguous, row-major, little-endian."""


@dataclass(frozen=True)
class ShardReceipt:
    """Tells the committer what a writer wrote.  ``state``: digest of the list of all tensors of the whole state, or "" if unknown."""

    version: Version
    file: File
    rows: tuple[Stored, ...]
    state: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ShardReceipt:
        value = json.loads(text)
        rows = tuple(Stored(**row | {"tensor": _tensor(row["tensor"]), "slice": _slice(row["slice"])}) for row in value["rows"])
        return cls(Version(**value["version"]), File(**value["file"]), rows, value["state"])


class Listed(NamedTuple):
    """A checkpoint in a listing.  ``manifest`` is None if it is missing or unreadable; ``damaged`` says what is damaged, or is ""."""

    version: Version
    manifest: Manifest | None
    damaged: str


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, store: ObjectStore, run: str) -> None:
        self.store, self.run = store, run

    def folder(self, version: Version) -> str:
        return f"{self.run}/steps/{version.step:012d}/g{version.generation}"

    # ---- writing

    def write_shard(
        self,
        version: Version,
        name: str,
        parts: Sequence[Part],
        hook: Callable[[], None] | None = None,
        state: Iterable[Tensor] | None = None,
    ) -> ShardReceipt:
        """Writes one writer's slices as ``<name>.safetensors``.  Calls ``hook`` before each slice.

        ``state``: every tensor of the whole state.  With it, :meth:`commit` also refuses a state that lacks a whole tensor.  Raises
        :class:`ValueError` if the bytes of a part do not have the size of its slice.
        """
        ordered = sorted(((entry_of(tensor, part), (tensor, part, data)) for tensor, part, data in parts), key=_alignment)
        for entry, (_, _, data) in ordered:
            if data.nbytes != entry.size:
                raise ValueError(f"{entry.key} as {entry.dtype} has {entry.size} bytes; {data.nbytes} were given")
        header = header_of([entry for entry, _ in ordered], metadata_of(version))
        slices = [part for _, part in ordered]
        digests = [digest_of(data) for _, _, data in slices]
        file = _digested(f"{name}.safetensors", [header, *(data for _, _, data in slices)])
        file = self._create(version, file, lambda: _chunks(header, slices, hook))
        rows, first = [], len(header)
        for (tensor, part, data), digest in zip(slices, digests, strict=True):
            rows.append(Stored(tensor, part, file.name, first, first + data.nbytes, digest))
            first += data.nbytes
        return ShardReceipt(version, file, tuple(rows), "" if state is None else _state_digest(state))

    def commit(self, version: Version, receipts: Iterable[ShardReceipt], about: Mapping[str, Any]) -> str:
        """Writes index and manifest; returns the manifest's digest.  ``about``: see :class:`Manifest`.

        Raises :class:`Incomplete` if the receipts do not make up the whole state, :class:`Exists` if there is another manifest, and
        :class:`ValueError` if ``about`` has an unknown key.
        """
        if unknown := about.keys() - ABOUT:
            raise ValueError(f"a manifest has no entry {', '.join(sorted(unknown))}; its entries are {', '.join(sorted(ABOUT))}")
        receipts = sorted(receipts, key=lambda receipt: receipt.file)
        rows = self._complete(version, receipts)
        index, blocks = to_parquet(rows)
        indexed = self._create(version, _digested(INDEX, [index]), lambda: [index])
        manifest = Manifest(version, (*(receipt.file for receipt in receipts), indexed), about, blocks).to_bytes()
        key = f"{self.folder(version)}/{MANIFEST}"
        try:
            self.store.put_if_absent(key, manifest)
        except Exists:
            if self.store.get(key) != manifest:
                raise
        return digest_of(manifest)

    def quarantine(self, version: Version, reason: str) -> None:
        """Notes that the checkpoint is damaged, and why.  The first note stays."""
        try:
            self.store.put_if_absent(f"{self.folder(version)}/{DAMAGED}", seal({"format": 1, "reason": reason}))
        except Exists:
            return

    # ---- reading

    def versions(self) -> list[Listed]:
        """Returns every checkpoint that was ever begun, oldest first.  Raises :class:`BadFormat` if a newer release wrote one of them."""
        found: dict[Version, set[str]] = {}
        for key in self.store.list(f"{self.run}/steps/"):
            if place := re.fullmatch(r"(\d+)/g(\d+)/([^/]+)", key.removeprefix(f"{self.run}/steps/")):
                found.setdefault(Version(int(place[1]), int(place[2])), set()).add(place[3])
        return [self._listed(version, names) for version, names in sorted(found.items())]

    def latest_good(self) -> Version | None:
        """Returns the greatest version that has a manifest and no note of damage, or None.  Raises as :meth:`versions` does."""
        return max((version for version, manifest, damaged in self.versions() if manifest is not None and not damaged), default=None)

    def manifest(self, version: Version) -> Manifest:
        """Returns the manifest.  Raises :class:`Missing`, :class:`Damaged` or :class:`BadFormat`."""
        key = f"{self.folder(version)}/{MANIFEST}"
        return Manifest.from_bytes(self.store.get(key), self.store.full_name(key), version)

    def open(self, version: Version) -> Reader:
        """Returns a reader of the checkpoint.  Raises :class:`Damaged` also if there is no manifest, since the caller relies on it."""
        try:
            manifest = self.manifest(version)
        except Missing as error:
            raise Damaged(error.object, "a manifest", "none: the checkpoint was never complete, or its manifest was deleted") from None
        return Reader(self.store, self.folder(version), manifest)

    def verify(self, version: Version) -> Verified:
        """Reads everything and compares every size and digest."""
        try:
            return verify(self.open(version))
        except Damaged as error:  # the manifest or the index
            return Verified(version, 0, 0, 0, (error,))

    def export(self, version: Version, destination: Path) -> list[Path]:
        """Writes whole tensors as ``model.safetensors`` and ``optimizer.safetensors`` into ``destination``; returns their paths."""
        return export(self.open(version), destination)

    # ---- implementation

    def _create(self, version: Version, file: File, chunks: Callable[[], Iterable[Piece]]) -> File:
        """Creates the object under the name of ``file``, or under a name with its digest if other bytes are there; returns where it is."""
        stem, _, suffix = file.name.rpartition(".")
        for name in (file.name, f"{stem}-{file.blake3[:16]}.{suffix}"):
            key = f"{self.folder(version)}/{name}"
            try:
                self.store.put_if_absent(key, chunks())
            except Exists:
                if not self._is_there(key, file):
                    continue
            return File(name, file.size, file.blake3)
        raise Exists(key, self.store.url)

    def _is_there(self, key: str, file: File) -> bool:
        """Returns whether the object under ``key`` has the bytes of ``file``.  Holds at most ``FETCH_BYTES`` of them in memory."""
        if self.store.size(key) != file.size:
            return False
        digest = blake3()
        for first in range(0, file.size, FETCH_BYTES):
            digest.update(self.store.get(key, first, min(first + FETCH_BYTES, file.size)))
        return digest.hexdigest() == file.blake3

    def _sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Returns the size of each object, or None if there is none.  Sends one request for each, as many at a time as the store takes."""

        def size(key: str) -> int | None:
            try:
                return self.store.size(key)
            except Missing:
                return None

        with ThreadPoolExecutor(self.store.at_once, "sizes") as pool:
            return list(pool.map(size, keys))

    def _complete(self, version: Version, receipts: Sequence[ShardReceipt]) -> list[Stored]:
        """Returns the rows of the receipts.  Raises :class:`Incomplete` unless they are of this version, stored, and the whole state."""
        keys = [f"{self.folder(version)}/{receipt.file.name}" for receipt in receipts]
        for key, receipt in zip(keys, receipts, strict=True):
            if receipt.version != version:
                raise Incomplete(self.store.full_name(key), f"it was written for {receipt.version}, not for {version}")
        for key, receipt, size in zip(keys, receipts, self._sizes(keys), strict=True):
            if size != receipt.file.size:
                there = "no" if size is None else size
                raise Incomplete(self.store.full_name(key), f"its writer wrote {receipt.file.size} bytes and {there} bytes are there")
        rows = [row for receipt in receipts for row in receipt.rows]
        check_exact_cover([(row.tensor, row.slice) for row in rows])
        states = {receipt.state for receipt in receipts if receipt.state}
        if not rows or (states and states != {_state_digest(row.tensor for row in rows)}):
            tensors = len({row.tensor for row in rows})
            raise Incomplete(self.folder(version), f"{len(receipts)} receipts with {tensors} tensors are not the whole state")
        return rows

    def _listed(self, version: Version, names: set[str]) -> Listed:
        damaged = self._quarantined(version) if DAMAGED in names else ""
        if MANIFEST not in names:
            return Listed(version, None, damaged)
        try:
            return Listed(version, self.manifest(version), damaged)
        except Damaged as error:
            return Listed(version, None, damaged or str(error))

    def _quarantined(self, version: Version) -> str:
        key = f"{self.folder(version)}/{DAMAGED}"
        try:
            return str(unseal(self.store.get(key), key, 1)["reason"]) or "no reason was given"
        except Damaged:
            return "it is marked as damaged, and the note that says why is damaged too"


def _chunks(header: bytes, parts: Iterable[Part], hook: Callable[[], None] | None) -> Iterator[Piece]:
    yield header
    for _, _, data in parts:
        if hook is not None:
            hook()
        yield data


def _digested(name: str, pieces: Iterable[Piece]) -> File:
    size, digest = 0, blake3()
    for piece in pieces:
        size += memoryview(piece).nbytes
        digest.update(piece)
    return File(name, size, digest.hexdigest())


def _alignment(item: tuple[Entry, Part]) -> int:
    return aligned_order(item[0])


def _state_digest(tensors: Iterable[Tensor]) -> str:
    names = sorted({f"{describe(tensor.whole())} {tensor.dtype}" for tensor in tensors if tensor.whole().count})
    return digest_of("\n".join(names).encode())


def _tensor(value: Mapping[str, Any]) -> Tensor:
    return Tensor(value["name"], value["kind"], value["dtype"], tuple(value["shape"]))


def _slice(value: Mapping[str, Any]) -> Slice:
    return Slice(value["name"], value["kind"], tuple(value["start"]), tuple(value["stop"]))
