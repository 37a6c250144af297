"""Export writes a checkpoint as ordinary safetensors files of whole tensors, which any tool reads.

``model.safetensors`` has parameters and buffers by their plain names; ``optimizer.safetensors`` has moments as ``exp_avg/<name>``
and scalars by name.  It holds one tensor at a time in memory.  With ``average`` each parameter has the values of its average.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from storage.checkpoints.reader import Reader
from storage.checkpoints.shards import Entry, aligned_order, header_of
from storage.objects.port import Piece
from storage.slices import AVERAGE, Tensor

MODEL_KINDS = ("parameter", "buffer")
EXPORTED = ("model.safetensors", "optimizer.safetensors")
"""The files that an export writes."""


def export(reader: Reader, destination: Path, *, average: bool = False) -> list[Path]:
    """Writes both files into the folder ``destination``, whole or not at all; returns their paths."""
    destination.mkdir(parents=True, exist_ok=True)
    optimizer = [tensor for tensor in reader.tensors() if tensor.kind not in (*MODEL_KINDS, "constant")]
    aside = [destination / f".{name}.partial" for name in EXPORTED]
    for path, pieces in zip(aside, (model_pieces(reader, average=average), _pieces(reader, optimizer)), strict=True):
        with open(path, "wb") as file:
            file.writelines(pieces)
    written = [destination / name for name in EXPORTED]
    for path, final in zip(aside, written, strict=True):
        os.replace(path, final)
    return written


def has_average(reader: Reader) -> bool:
    """Returns whether the checkpoint has an average of the weights."""
    return any(tensor.kind == AVERAGE for tensor in reader.tensors())


def model_pieces(reader: Reader, *, average: bool = False) -> Iterator[Piece]:
    """Yields the bytes of ``model.safetensors``."""
    averages = {tensor.name: tensor for tensor in reader.tensors() if average and tensor.kind == AVERAGE}
    model = [tensor for tensor in reader.tensors() if tensor.kind in MODEL_KINDS]
    chosen = [averages.get(tensor.name, tensor) if tensor.kind == "parameter" else tensor for tensor in model]
    return _pieces(reader, chosen, by_name=True)


def _pieces(reader: Reader, tensors: Sequence[Tensor], *, by_name: bool = False) -> Iterator[Piece]:
    named = ((Entry(t.name if by_name else _key(t), t.dtype, t.shape), t) for t in tensors)
    entries = sorted(named, key=lambda pair: (aligned_order(pair[0]), pair[0].key))
    yield header_of([entry for entry, _ in entries], {"format": "pt"})
    for _, tensor in entries:
        for _, data in reader.read([tensor.whole()]):
            yield data


def _key(tensor: Tensor) -> str:
    if tensor.kind in (*MODEL_KINDS, "scalar"):
        return tensor.name
    return f"{tensor.kind.removeprefix('moment.')}/{tensor.name}"
