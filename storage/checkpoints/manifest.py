"""The manifest lists what a checkpoint consists of.  A checkpoint exists once its manifest does, and not before.

It names every file, the index of slices among them, with size and digest, and says where in the run's history the checkpoint stands.
Readers accept every format that was ever released, and refuse a newer one by its number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from storage.documents import File, seal, unseal
from storage.errors import Damaged
from storage.slices import Slice, Tensor, Version

FORMAT = 1
"""The newest format.  Readers accept 1 to this one."""
MANIFEST, INDEX, DAMAGED = "MANIFEST.json", "index.parquet", "DAMAGED.json"
ABOUT = {"job", "layout", "cursor", "lineage", "parent", "versions"}


@dataclass(frozen=True, order=True)
class Stored:
    """A row of the index: the slice is bytes ``[first, last)`` of ``file``."""

    tensor: Tensor
    slice: Slice
    file: str
    first: int
    last: int
    blake3: str


@dataclass(frozen=True)
class Block:
    """Bytes ``[first, last)`` of a large index: one row group, or, as the last block, its footer.

    ``name``: the tensor of the row group's first row; "" for the footer.
    """

    first: int
    last: int
    blake3: str
    name: str


@dataclass(frozen=True)
class Manifest:
    """The content of ``MANIFEST.json``.

    ``files``: the shards and the index.  ``blocks``: those of the index, if it is large (see :mod:`storage.checkpoints.index`).

    ``about``: what the writer says of the run, all of it optional:

    ``job`` (digest), ``layout`` (degrees by axis), ``cursor`` (position in the data), ``lineage``, ``parent`` ([step, generation]
    of the version that training began from), ``versions`` (of torch, Python, Elastic).
    """

    version: Version
    files: tuple[File, ...]
    about: Mapping[str, Any]
    blocks: tuple[Block, ...] = ()

    @property
    def index(self) -> File:
        return next(file for file in self.files if file.name.endswith(".parquet"))

    @property
    def lineage(self) -> tuple[tuple[int, int], ...]:
        """The generations that committed the steps, oldest first: (generation, the last step that it committed)."""
        return tuple((generation, step) for generation, step in self.about.get("lineage", ()))

    @property
    def layout(self) -> dict[str, int]:
        return dict(self.about.get("layout", {}))

    def to_bytes(self) -> bytes:
        """Returns the manifest's bytes: always the same for the same manifest."""
        blocks = {"blocks": [asdict(block) for block in self.blocks]} if self.blocks else {}
        return seal({"format": FORMAT, **asdict(self.version), "files": [asdict(file) for file in self.files], **blocks, **self.about})

    @classmethod
    def from_bytes(cls, raw: bytes, object: str, version: Version) -> Manifest:
        """Returns the manifest in ``raw``.  Raises :class:`BadFormat`, or :class:`Damaged`, also if it belongs to another version."""
        content = unseal(raw, object, FORMAT)
        found = Version(content["step"], content["generation"])
        if found != version:
            raise Damaged(object, f"the manifest of {version}", f"that of {found}")
        files = tuple(File(**file) for file in content["files"])
        blocks = tuple(Block(**block) for block in content.get("blocks", ()))
        return cls(version, files, {key: content[key] for key in sorted(content.keys() & ABOUT)}, blocks)
