"""Export writes a checkpoint as ordinary safetensors files of whole tensors, which any tool reads.

``model.safetensors`` has parameters and buffers by their plain names; ``optimizer.safetensors`` has moments as ``exp_avg/<name>``
and scalars by name.  It holds one tensor at a time in memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from storage.checkpoints.reader import Reader
from storage.checkpoints.shards import Entry, aligned_order, header_of
from storage.slices import Tensor

MODEL_KINDS = ("parameter", "buffer")
EXPORTED = ("model.safetensors", "optimizer.safetensors")
"""The files that an export writes."""


def export(reader: Reader, destination: Path) -> list[Path]:
    """Writes both files into the folder ``destination``, each whole or not at all; returns their paths."""
    destination.mkdir(parents=True, exist_ok=True)
    model = [tensor for tensor in reader.tensors() if tensor.kind in MODEL_KINDS]
    optimizer = [tensor for tensor in reader.tensors() if tensor.kind not in (*MODEL_KINDS, "constant")]
    return [_write(reader, destination / name, tensors) for name, tensors in zip(EXPORTED, (model, optimizer), strict=True)]


def _write(reader: Reader, path: Path, tensors: Sequence[Tensor]) -> Path:
    entries = sorted(((Entry(_key(t), t.dtype, t.shape), t) for t in tensors), key=lambda pair: (aligned_order(pair[0]), pair[0].key))
    aside = path.with_name(f".{path.name}.partial")
    with open(aside, "wb") as file:
        file.write(header_of([entry for entry, _ in entries], {"format": "pt"}))
        for _, tensor in entries:
            for _, data in reader.read([tensor.whole()]):
                file.write(data)
    os.replace(aside, path)
    return path


def _key(tensor: Tensor) -> str:
    if tensor.kind in (*MODEL_KINDS, "scalar"):
        return tensor.name
    return f"{tensor.kind.removeprefix('moment.')}/{tensor.name}"
