"""Checkpoints of a run: shard files of slices, an index of the slices, and a manifest that is written last."""

from storage.checkpoints.checkpoints import Checkpoints, Known, Listed, Part, ShardReceipt
from storage.checkpoints.export import EXPORTED, Names, content_digest, has_average
from storage.checkpoints.manifest import DAMAGED, INDEX, MANIFEST, Manifest, Stored
from storage.checkpoints.reader import Reader, Verified

__all__ = [
    "DAMAGED",
    "EXPORTED",
    "INDEX",
    "MANIFEST",
    "Checkpoints",
    "Known",
    "Listed",
    "Manifest",
    "Names",
    "Part",
    "Reader",
    "ShardReceipt",
    "Stored",
    "Verified",
    "content_digest",
    "has_average",
]
