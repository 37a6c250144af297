"""The manifest lists what a checkpoint consists of.  A checkpoint exists once its manifest does, and not
before.

It names every file, the index of slices among them, with size and digest, and says where in the run's history
the checkpoint stands.  Readers refuse every other format than ``FORMAT``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from storage.documents import File, digest_of, seal, unseal
from storage.errors import Damaged
from storage.slices import Slice, Tensor, Version

FORMAT = 2
MANIFEST, INDEX, DAMAGED, DELETED = "MANIFEST.json", "index.jsonl", "DAMAGED.json", "DELETED.json"
ABOUT = {"job", "layout", "cursor", "lineage", "parent", "versions", "written_at"}


@dataclass(frozen=True, order=True)
class Stored:
    """A slice in its place: bytes ``[first, last)`` of ``file``."""

    tensor: Tensor
    slice: Slice
    file: str
    first: int
    last: int
    blake3: str


@dataclass(frozen=True)
class Manifest:
    """The content of ``MANIFEST.json``.

    ``files``: the shards and the index.  ``digest``: the digest of the document, or "" if the manifest was
    not read from one.

    ``about``: what the writer says of the run, all of it optional:

    ``job`` (digest), ``layout`` (degrees by axis), ``cursor`` (position in the data), ``lineage``, ``parent``
    ([step, generation] of the version that training began from), ``versions`` (of torch, Python, Elastic),
    ``written_at`` (see :attr:`written_at`).
    """

    version: Version
    files: tuple[File, ...]
    about: Mapping[str, Any]
    digest: str = ""

    @property
    def index(self) -> File:
        return next(file for file in self.files if file.name.endswith(INDEX[INDEX.rindex(".") :]))

    @property
    def lineage(self) -> tuple[tuple[int, int], ...]:
        """The generations that committed the steps, oldest first: (generation, the last step that it
        committed).
        """
        return tuple((generation, step) for generation, step in self.about.get("lineage", ()))

    @property
    def layout(self) -> dict[str, int]:
        return dict(self.about.get("layout", {}))

    @property
    def written_at(self) -> float | None:
        """The wall-clock time of the commit in seconds, by the clock of the process that wrote the manifest;
        None in older ones.
        """
        return self.about.get("written_at")

    def same_but_for_time(self, other: Manifest) -> bool:
        """Returns whether ``other`` lists the same files and says the same of the run; it may have been
        written at another time.
        """
        first, second = (
            (
                each.version,
                each.files,
                {name: value for name, value in each.about.items() if name != "written_at"},
            )
            for each in (self, other)
        )
        return first == second

    def to_bytes(self) -> bytes:
        """Returns the manifest's bytes: always the same for the same manifest."""
        return seal(
            {
                "format": FORMAT,
                **asdict(self.version),
                "files": [asdict(file) for file in self.files],
                **self.about,
            }
        )

    @classmethod
    def from_bytes(cls, raw: bytes, object: str, version: Version) -> Manifest:
        """Returns the manifest in ``raw``.  Raises :class:`BadFormat`, or :class:`Damaged`, also if the
        manifest belongs to another version.
        """
        content = unseal(raw, object, FORMAT, FORMAT)
        try:
            found = Version(int(content["step"]), int(content["generation"]))
            files, about = (
                tuple(map(File.of, content["files"])),
                {key: content[key] for key in sorted(content.keys() & ABOUT)},
            )
            manifest = cls(found, files, about, digest_of(raw))
            _ = (
                manifest.index,
                manifest.lineage,
                manifest.layout,
                sum((*manifest.layout.values(), manifest.written_at or 0.0)),
            )
        except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
            raise Damaged(object, "a manifest", f"{len(raw)} bytes that are no manifest") from None
        if found != version:
            raise Damaged(object, f"the manifest of {version}", f"the manifest of {found}")
        return manifest
