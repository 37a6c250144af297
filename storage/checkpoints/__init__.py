"""Checkpoints of a run: shard files of slices, an index of the slices, and a manifest that is written last."""

from storage.checkpoints.checkpoints import Checkpoints, Listed, Part, ShardReceipt
from storage.checkpoints.export import EXPORTED
from storage.checkpoints.manifest import DAMAGED, INDEX, MANIFEST, Manifest, Stored
from storage.checkpoints.reader import Reader, Verified

__all__ = [
    "DAMAGED",
    "EXPORTED",
    "INDEX",
    "MANIFEST",
    "Checkpoints",
    "Listed",
    "Manifest",
    "Part",
    "Reader",
    "ShardReceipt",
    "Stored",
    "Verified",
]
