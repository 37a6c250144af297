"""Checkpoints of a run.  Writers write shards, and take digests before the upload; the manifest is written
last.

    <run>/steps/<step>/g<generation>/<name>.safetensors   one writer's slices; its header is their index
    <run>/steps/<step>/g<generation>/index.jsonl          which file has which box of which tensors
    <run>/steps/<step>/g<generation>/MANIFEST.json        before it is written, there is no checkpoint
    <run>/steps/<step>/g<generation>/DAMAGED.json         a note that the checkpoint is damaged; nothing is deleted
    <run>/steps/<step>/g<generation>/DELETED.json         a note that the checkpoint is being deleted; it goes last

Objects are only created, never replaced.  So a writer that was believed dead cannot change what a manifest
lists.  A writer that finds its own bytes in place has succeeded.  If an unfinished attempt has left other
bytes there, a shard or an index is written under a name with its digest in it; writing a manifest raises
:class:`Exists`.

A deletion has two phases.  ``mark`` adds a note: from then on the checkpoint is not good, and nobody begins
from it.  ``remove``, later, takes away the manifest, then all the rest, and the note last.  So an interrupted
deletion is recognised by its note, and the next ``remove`` completes it.  If the store has no room for the
reason, the note is empty.  A checkpoint without a manifest needs no note.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from blake3 import blake3

from storage.checkpoints.cover import describe
from storage.checkpoints.export import Names, export, model_pieces
from storage.checkpoints.index import Cut, Index, cuts_of, grouped
from storage.checkpoints.manifest import ABOUT, DAMAGED, DELETED, INDEX, MANIFEST, Manifest
from storage.checkpoints.reader import FETCH_BYTES, Reader, Verified, verify
from storage.checkpoints.shards import aligned_order, entry_of, header_of, metadata_of
from storage.documents import File, digest_of, file_of, inflated, seal, unseal
from storage.errors import BadFormat, Damaged, Exists, Full, Incomplete, Missing
from storage.objects import ObjectStore, Piece, Sized
from storage.slices import Slice, Tensor, Version

T = TypeVar("T")
R = TypeVar("R")
Part = tuple[Tensor, Slice, memoryview]
"""A slice and its bytes: contiguous, row-major, little-endian."""


@dataclass(frozen=True)
class ShardReceipt:
    """Tells the committer what a writer wrote: the file, its header as a file of its own, and its slices.

    ``state``: digest of the list of all tensors of the whole state, or "" if unknown.
    """

    version: Version
    file: File
    header: File
    cuts: tuple[Cut, ...]
    state: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> ShardReceipt:
        value = json.loads(text)
        # interned: the receipts of a thousand writers name the same few lists of tensors
        cuts = tuple(
            Cut(sys.intern(each["tensors"]), tuple(each["start"]), tuple(each["stop"]))
            for each in value["cuts"]
        )
        return cls(
            Version(**value["version"]), File(**value["file"]), File(**value["header"]), cuts, value["state"]
        )

    def packed(self) -> bytes:
        """Returns the receipt, compressed: a committer keeps the receipts of a thousand writers."""
        return zlib.compress(self.to_json().encode())

    @classmethod
    def unpacked(cls, raw: bytes) -> ShardReceipt:
        return cls.from_json(inflated(raw, "a receipt"))


RECENT = 32
"""Number of steps whose checkpoints are looked at together, newest first."""


class Listed(NamedTuple):
    """A checkpoint in a listing.  ``manifest`` is None if it is missing or unreadable; ``damaged`` says what
    is damaged, or is "".

    ``deleted`` says that it is being deleted.
    """

    version: Version
    manifest: Manifest | None
    damaged: str
    deleted: bool = False

    @property
    def good(self) -> bool:
        """True if nothing is known against the checkpoint; its slices were not read."""
        return self.manifest is not None and not self.damaged and not self.deleted


Known = dict[Version, tuple[frozenset[str], Listed]]
"""Maps each checkpoint to the names of its manifest and notes in the last listing, and to the entry that was
read from them.
"""


class Checkpoints:
    """The checkpoints of one run.  ``inherited`` maps each checkpoint that counts as this run's own, but is
    in the folder of another run, to that run; such a checkpoint is only read.
    """

    def __init__(
        self, store: ObjectStore, run: str, inherited: Mapping[Version, str] = MappingProxyType({})
    ) -> None:
        self.store, self.run, self.inherited = store, run, inherited
        self._opened: dict[Version, str] = {}
        """The answers of :meth:`damage` so far."""
        self._made = set[Version]()
        """The versions that this process knows to be committed and has not seen in a listing yet."""

    def holder(self, version: Version) -> str:
        """Returns the run in whose folder the checkpoint is."""
        return self.inherited.get(version, self.run)

    def folder(self, version: Version) -> str:
        return f"{self.holder(version)}/steps/{version.step:012d}/g{version.generation}"

    # ---- writing

    def write_shard(
        self,
        version: Version,
        name: str,
        parts: Sequence[Part],
        hook: Callable[[], None] | None = None,
        state: Iterable[Tensor] | None = None,
        done: Callable[[Tensor], None] = lambda tensor: None,
    ) -> ShardReceipt:
        """Writes one writer's slices as ``<name>.safetensors``.  Calls ``hook`` before each slice that it
        uploads, and ``done`` each time that the bytes of a slice were read.

        ``state``: every tensor of the whole state.  With it, :meth:`commit` also refuses a state that lacks a
        whole tensor.  Raises :class:`ValueError` if the bytes of a part do not have the size of its slice.
        """
        ordered = sorted(
            ((entry_of(tensor, part), (tensor, part, data)) for tensor, part, data in parts),
            key=lambda each: aligned_order(each[0]),
        )
        for entry, (_, _, data) in ordered:
            if data.nbytes != entry.size:
                raise ValueError(
                    f"{entry.key} as {entry.dtype} has {entry.size} bytes, but {data.nbytes} bytes "
                    "were passed"
                )
        slices = [part for _, part in ordered]
        digests = [digest_of(data) for data in _bytes_of(slices, done)]
        header = header_of([entry for entry, _ in ordered], metadata_of(version, digests))
        file = file_of(f"{name}.safetensors", chain([header], _bytes_of(slices, done)))
        file = self._create(version, file, lambda: chain([header], _bytes_of(slices, done, hook)))
        cuts = cuts_of((tensor, part) for tensor, part, _ in slices)
        return ShardReceipt(
            version, file, file_of(file.name, [header]), cuts, "" if state is None else _state_digest(state)
        )

    def commit(self, version: Version, receipts: Iterable[ShardReceipt], about: Mapping[str, Any]) -> str:
        """Writes index and manifest; returns the manifest's digest.  ``about``: see :class:`Manifest`.

        A manifest that is there already and differs only in its time was written by an earlier attempt, and
        stays.  Raises :class:`Incomplete` if the receipts do not make up the whole state, :class:`Exists` if
        there is another manifest, and :class:`ValueError` if ``about`` has an unknown key.
        """
        if unknown := about.keys() - ABOUT:
            raise ValueError(
                f"a manifest has no entry {', '.join(sorted(unknown))}; its entries are "
                f"{', '.join(sorted(ABOUT))}"
            )
        receipts = sorted(receipts, key=lambda receipt: receipt.file)
        index = self._complete(version, receipts).to_bytes()
        indexed = self._create(version, file_of(INDEX, [index]), lambda: [index])
        manifest = Manifest(version, (*(receipt.file for receipt in receipts), indexed), about)
        raw, key = manifest.to_bytes(), f"{self.folder(version)}/{MANIFEST}"
        try:
            self.store.put_if_absent(key, raw)
        except Exists:
            raw = self.store.get(key)
            if not self._is_same(manifest, raw):
                raise
        self.expect([version])
        return digest_of(raw)

    def quarantine(self, version: Version, reason: str) -> None:
        """Notes that the checkpoint is damaged, and why.  The first note stays."""
        self._note(version, DAMAGED, reason)

    def expect(self, versions: Iterable[Version]) -> None:
        """Notes versions that were committed, so that they are found even if the bucket does not list them
        yet.
        """
        self._made.update(versions)

    # ---- deleting

    def mark(self, version: Version, reason: str) -> None:
        """Notes that the checkpoint, complete or not, is being deleted, and why.  From then on it is not
        good.

        Raises :class:`ValueError` for an inherited checkpoint, and :class:`Full` if there is no room for the
        note of a complete checkpoint.
        """
        if version in self.inherited:
            raise ValueError(
                f"{version} belongs to the run {self.holder(version)}, so {self.run} does not delete it"
            )
        try:
            self._note(version, DELETED, reason)
        except Full:
            try:
                with suppress(Exists):  # a full file system still takes a file without bytes
                    self.store.put_if_absent(f"{self.folder(version)}/{DELETED}", b"")
            except Full:
                if not self._may_go(version):
                    raise

    def unmark(self, version: Version) -> None:
        """Removes the note of :meth:`mark`.  Objects that :meth:`remove` has deleted do not come back."""
        self.store.delete(f"{self.folder(version)}/{DELETED}")

    def remove(self, version: Version) -> None:
        """Deletes a checkpoint that :meth:`mark` has marked: the manifest first, and the note last.

        Does nothing to an inherited checkpoint, or to a complete one that is not marked.  If a call is
        interrupted, another call does the rest.
        """
        folder = self.folder(version)
        if version in self.inherited or not self._may_go(version):
            return
        self.store.delete(f"{folder}/{MANIFEST}")
        self._at_once(
            self.store.delete, [key for key in self.store.list(f"{folder}/") if key != f"{folder}/{DELETED}"]
        )
        self.store.delete(f"{folder}/{DELETED}")
        self.store.tidy(f"{folder}/")

    # ---- reading

    def versions(self) -> list[Listed]:
        """Returns every checkpoint that was ever begun, oldest first.  Raises :class:`BadFormat` if a newer
        release wrote one of them.
        """
        return self._listed(self.steps())

    def changed(self, known: Known) -> list[Listed]:
        """Returns the checkpoints as :meth:`versions` does, by two listings.  Their manifests have no files.

        It reads only the checkpoints whose manifest or notes have come or gone since the last call with
        ``known``, which keeps what was read.  In a step that has objects, it sees only generations that have
        objects.
        """
        folder, there = f"{self.run}/steps/", dict[Version, set[str]]()
        for key in self.store.list(folder):
            if found := re.fullmatch(r"(\d+)/g(\d+)/(.+)", key.removeprefix(folder)):
                there.setdefault(Version(int(found[1]), int(found[2])), set()).update(
                    {found[3]} & {MANIFEST, DAMAGED, DELETED}
                )
        # they are listed now
        self._made.difference_update(version for version, names in there.items() if MANIFEST in names)
        for gone in known.keys() - there.keys():
            del known[gone]
        new = [
            version for version, names in there.items() if version not in known or known[version][0] != names
        ]
        for each in self._at_once(self._look, new):
            manifest = each.manifest and replace(each.manifest, files=())
            known[each.version] = frozenset(there[each.version]), each._replace(manifest=manifest)
        seen = {version.step for version in there} - {version.step for version in self.inherited}
        others = [
            each
            for each in self._listed([step for step in self.steps() if step not in seen])
            if each.version not in known
        ]
        return sorted([*(listed for _, listed in known.values()), *others], key=lambda each: each.version)

    def recent(self, enough: Callable[[Sequence[Listed]], bool]) -> list[Listed]:
        """Returns the checkpoints of the newest steps, oldest first: those of :data:`RECENT` steps, and of as
        many steps again until ``enough`` holds for them.

        So an older run has no more checkpoints to read.  Raises as :meth:`versions` does.
        """
        steps, found = self.steps(), list[Listed]()
        while steps and not (found and enough(found)):
            found = self._listed(steps[-RECENT:]) + found
            del steps[-RECENT:]
        return found

    def steps(self) -> list[int]:
        """Returns the steps of which a checkpoint was begun, in order."""
        own = {
            int(name[:-1])
            for name in self.store.children(f"{self.run}/steps/")
            if re.fullmatch(r"\d+/", name)
        }
        return sorted(own | {version.step for version in (*self.inherited, *self._unlisted())})

    def at(self, step: int) -> list[Listed]:
        """Returns the checkpoints of one step.  Raises as :meth:`versions` does."""
        return self._listed([step])

    def latest_good(self) -> Version | None:
        """Returns the greatest version that has a manifest and no note of damage, or None.  Raises as
        :meth:`versions` does.
        """
        return max(
            (
                each.version
                for each in self.recent(lambda found: any(each.good for each in found))
                if each.good
            ),
            default=None,
        )

    def manifest(self, version: Version) -> Manifest:
        """Returns the manifest.  Raises :class:`Missing`, :class:`Damaged` or :class:`BadFormat`."""
        key = f"{self.folder(version)}/{MANIFEST}"
        return Manifest.from_bytes(self.store.get(key), self.store.full_name(key), version)

    def open(self, version: Version) -> Reader:
        """Returns a reader of the checkpoint.  Raises :class:`Damaged` also if there is no manifest, since
        the caller relies on it.
        """
        try:
            manifest = self.manifest(version)
        except Missing as error:
            raise Damaged(
                error.object,
                "a manifest",
                "no manifest: the checkpoint was never complete, or its manifest was deleted",
            ) from None
        return Reader(self.store, self.folder(version), manifest)

    def damage(self, version: Version) -> str:
        """Returns what is damaged in the manifest or the index, or "".  Both are read once; later listings
        use the answer.
        """
        if version not in self._opened:
            try:
                self.open(version)
                self._opened[version] = ""
            except Damaged as error:
                self._opened[version] = str(error)
        return self._opened[version]

    def verify(self, version: Version) -> Verified:
        """Reads everything and compares every size and digest."""
        try:
            return verify(self.open(version))
        except Damaged as error:  # the manifest or the index
            return Verified(version, 0, 0, 0, (error,))

    def export(
        self,
        version: Version,
        destination: Path,
        *,
        average: bool = False,
        names: Names | None = None,
        more: Mapping[str, bytes | Names] | None = None,
    ) -> list[Path]:
        """Writes whole tensors as ``model.safetensors`` and ``optimizer.safetensors`` into ``destination``;
        returns the paths.

        ``names`` and ``more`` are those of :func:`storage.checkpoints.export.export`.
        """
        return export(self.open(version), destination, average=average, names=names, more=more)

    def export_model(self, version: Version, key: str, progressed: Callable[[], None] = lambda: None) -> File:
        """Creates the object ``key`` with the bytes of ``model.safetensors``, unless it has these bytes
        already, and returns its name, size and digest.

        ``progressed`` is called after each small part of the work.  Raises :class:`Exists` if other bytes are
        there.
        """
        reader, name = self.open(version), key.rpartition("/")[2]
        whole = model_pieces(reader)
        seen = _Counted(_told(whole, progressed))
        try:
            self.store.put_if_absent(key, Sized(whole.size, seen))
        except Exists:
            file = file_of(name, _told(model_pieces(reader), progressed))
            if not self._is_there(key, file, progressed):
                raise
            return file
        return File(name, seen.size, seen.digest.hexdigest())

    # ---- implementation

    def _may_go(self, version: Version) -> bool:
        """Returns whether the checkpoint is marked, or was never complete."""
        folder = self.folder(version)
        return self.store.exists(f"{folder}/{DELETED}") or not self.store.exists(f"{folder}/{MANIFEST}")

    def _create(self, version: Version, file: File, chunks: Callable[[], Iterable[Piece]]) -> File:
        """Creates the object under the name of ``file``, or under a name with its digest if other bytes are
        there; returns the file with the name that it got.
        """
        stem, _, suffix = file.name.rpartition(".")
        for name in (file.name, f"{stem}-{file.blake3[:16]}.{suffix}"):
            key = f"{self.folder(version)}/{name}"
            try:
                self.store.put_if_absent(key, Sized(file.size, chunks()))
            except Exists:
                if not self._is_there(key, file):
                    continue
            return File(name, file.size, file.blake3)
        raise Exists(key, self.store.url)

    def _is_there(self, key: str, file: File, progressed: Callable[[], None] = lambda: None) -> bool:
        """Returns whether the object under ``key`` has the bytes of ``file``.  Holds at most ``FETCH_BYTES``
        of them in memory.
        """
        if self.store.size(key) != file.size:
            return False
        digest = blake3()
        for first in range(0, file.size, FETCH_BYTES):
            digest.update(self.store.get(key, first, min(first + FETCH_BYTES, file.size)))
            progressed()
        return digest.hexdigest() == file.blake3

    def _is_same(self, manifest: Manifest, raw: bytes) -> bool:
        """Returns whether ``raw`` is ``manifest``, or differs from it only in its time.  An unreadable
        ``raw`` is another manifest.
        """
        with suppress(Damaged, BadFormat):
            # through bytes, because JSON has no tuples
            written = Manifest.from_bytes(manifest.to_bytes(), MANIFEST, manifest.version)
            return written.same_but_for_time(Manifest.from_bytes(raw, MANIFEST, manifest.version))
        return False

    def _at_once(self, call: Callable[[T], R], arguments: Iterable[T]) -> list[R]:
        """Returns the result of ``call`` for each argument, at most ``store.at_once`` calls at a time."""
        several = list(arguments)
        if min(len(several), self.store.at_once) < 2:
            return [call(each) for each in several]
        with ThreadPoolExecutor(self.store.at_once, "checkpoints") as pool:
            return list(pool.map(call, several))

    def _size(self, key: str) -> int | None:
        """Returns the size of an object, or None if there is none."""
        try:
            return self.store.size(key)
        except Missing:
            return None

    def _complete(self, version: Version, receipts: Sequence[ShardReceipt]) -> Index:
        """Returns the index of the receipts.  Raises :class:`Incomplete` unless all receipts are of this
        version, their files are stored, and together they make up the whole state.
        """
        keys = [f"{self.folder(version)}/{receipt.file.name}" for receipt in receipts]
        for key, receipt in zip(keys, receipts, strict=True):
            if receipt.version != version:
                raise Incomplete(
                    self.store.full_name(key), f"a receipt is for {receipt.version}, not for {version}"
                )
        for key, receipt, size in zip(keys, receipts, self._at_once(self._size, keys), strict=True):
            if size != receipt.file.size:
                there = "no" if size is None else size
                raise Incomplete(
                    self.store.full_name(key),
                    f"its writer wrote {receipt.file.size} bytes and {there} bytes are there",
                )
        groups = grouped((receipt.file.name, cut) for receipt in receipts for cut in receipt.cuts)
        index = Index(groups, {receipt.file.name: receipt.header for receipt in receipts})
        index.check()
        states = {receipt.state for receipt in receipts if receipt.state}
        if not index.tensors or (states and states != {_state_digest(index.tensors.values())}):
            raise Incomplete(
                self.folder(version),
                f"{len(receipts)} receipts with {len(index.tensors)} tensors do not cover the whole state",
            )
        return index

    def _listed(self, steps: Sequence[int]) -> list[Listed]:
        """Returns the checkpoints of these steps, oldest first."""
        others = (*self.inherited, *self._unlisted())

        def generations(step: int) -> list[int]:
            folder = self.folder(Version(step, 0)).rpartition("/")[0]
            own = {
                int(name[1:-1]) for name in self.store.children(f"{folder}/") if re.fullmatch(r"g\d+/", name)
            }
            known = {version.generation for version in others if version.step == step}
            for generation in own & known:
                self._made.discard(Version(step, generation))
            return sorted(own | known)

        found = zip(steps, self._at_once(generations, steps), strict=True)
        return self._at_once(
            self._look,
            [Version(step, generation) for step, generations in found for generation in generations],
        )

    def _unlisted(self) -> set[Version]:
        """Returns the committed versions that may be too new to be listed: some buckets list new objects
        late.
        """
        for version in tuple(self._made):
            if not self.store.exists(f"{self.folder(version)}/{MANIFEST}"):  # somebody else has deleted it
                self._made.discard(version)
        return set(self._made)

    def _look(self, version: Version) -> Listed:
        damaged = self._quarantined(version) or self._opened.get(version, "")
        # the run that inherits it has made sure that it stays, even if it was marked later
        deleted = version not in self.inherited and self.store.exists(f"{self.folder(version)}/{DELETED}")
        try:
            return Listed(version, self.manifest(version), damaged, deleted)
        except Missing:
            return Listed(version, None, damaged, deleted)
        except Damaged as error:
            return Listed(version, None, damaged or str(error), deleted)

    def _note(self, version: Version, name: str, reason: str) -> None:
        with suppress(Exists):
            self.store.put_if_absent(f"{self.folder(version)}/{name}", seal({"format": 1, "reason": reason}))

    def _quarantined(self, version: Version) -> str:
        key = f"{self.folder(version)}/{DAMAGED}"
        try:
            return str(unseal(self.store.get(key), key, 1)["reason"]) or "no reason was given"
        except Missing:
            return ""
        except Damaged:
            return "it is marked as damaged, and the note that says why is damaged too"


def _bytes_of(
    parts: Iterable[Part], done: Callable[[Tensor], None], hook: Callable[[], None] | None = None
) -> Iterator[Piece]:
    """Yields the bytes of each part.  Calls ``hook`` before a part, and ``done`` with its tensor once the
    next part is asked for.
    """
    for tensor, _, data in parts:
        if hook is not None:
            hook()
        yield data
        done(tensor)


class _Counted:
    """Yields pieces once, and counts the size and the digest of those that it has yielded."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.size, self.digest, self._pieces = 0, blake3(), pieces

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._pieces:
            self.size += memoryview(piece).nbytes
            self.digest.update(piece)
            yield piece


def _told(pieces: Iterable[Piece], progressed: Callable[[], None]) -> Iterator[Piece]:
    """Yields the pieces, and calls ``progressed`` when the next one is asked for."""
    for piece in pieces:
        yield piece
        progressed()


def _state_digest(tensors: Iterable[Tensor]) -> str:
    names = sorted(
        {f"{describe(tensor.whole())} {tensor.dtype}" for tensor in tensors if tensor.whole().count}
    )
    return digest_of("\n".join(names).encode())
