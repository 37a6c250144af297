"""Export writes a checkpoint as ordinary safetensors files of whole tensors, which any tool reads.

``model.safetensors`` has parameters and buffers by their plain names; ``optimizer.safetensors`` has moments
as ``exp_avg/<name>`` and scalars by name.  An export holds one tensor at a time in memory.  With ``average``
each parameter has the values of its average.  Other programs may want other names, or matrices transposed, so
an export can have :data:`Names`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from storage.checkpoints.reader import Reader
from storage.checkpoints.shards import ITEM_BYTES, Entry, aligned_order, header_of
from storage.objects.port import Piece, Sized
from storage.slices import AVERAGE, Tensor

MODEL_KINDS = ("parameter", "buffer")
EXPORTED = ("model.safetensors", "optimizer.safetensors")
"""The files that every export writes."""
Names = Mapping[str, tuple[str, bool]]
"""Maps the name of each tensor in a file to its name in the state, and says whether the matrix is transposed
in the file.
"""


def export(
    reader: Reader,
    destination: Path,
    *,
    average: bool = False,
    names: Names | None = None,
    more: Mapping[str, bytes | Names] | None = None,
) -> list[Path]:
    """Writes :data:`EXPORTED` into the folder ``destination``, whole or not at all; returns the paths.

    ``names`` are the tensors in the model's file; by default it has all, with their names in the state.
    ``more`` maps the names of additional files to their bytes, or to their tensors.
    """
    destination.mkdir(parents=True, exist_ok=True)
    optimizer = [
        (_key(tensor), tensor, False)
        for tensor in reader.tensors()
        if tensor.kind not in (*MODEL_KINDS, "constant")
    ]
    contents: dict[str, Iterable[Piece]] = {EXPORTED[0]: model_pieces(reader, average=average, names=names)}
    contents[EXPORTED[1]] = _pieces(reader, optimizer)
    for name, each in (more or {}).items():
        contents[name] = (
            [each] if isinstance(each, bytes) else model_pieces(reader, average=average, names=each)
        )
    for name, pieces in contents.items():
        with open(destination / f".{name}.partial", "wb") as file:
            file.writelines(pieces)
    for name in contents:
        os.replace(destination / f".{name}.partial", destination / name)
    return [destination / name for name in contents]


def has_average(reader: Reader) -> bool:
    """Returns whether the checkpoint has an average of the weights."""
    return any(tensor.kind == AVERAGE for tensor in reader.tensors())


def model_pieces(reader: Reader, *, average: bool = False, names: Names | None = None) -> Sized:
    """Returns the bytes of ``model.safetensors``, or of a file of the model's tensors that has ``names``."""
    averages = {tensor.name: tensor for tensor in reader.tensors() if average and tensor.kind == AVERAGE}
    model = {tensor.name: tensor for tensor in reader.tensors() if tensor.kind in MODEL_KINDS}
    model |= {
        name: averages[name]
        for name, tensor in model.items()
        if tensor.kind == "parameter" and name in averages
    }
    chosen = {name: (name, False) for name in model} if names is None else names
    return _pieces(reader, ((name, model[own], transposed) for name, (own, transposed) in chosen.items()))


def _pieces(reader: Reader, tensors: Iterable[tuple[str, Tensor, bool]]) -> Sized:
    named = [
        (Entry(key, each.dtype, each.shape[::-1] if turned else each.shape), each, turned)
        for key, each, turned in tensors
    ]
    named.sort(key=lambda found: (aligned_order(found[0]), found[0].key))
    header = header_of([entry for entry, _, _ in named], {"format": "pt"})

    def data() -> Iterator[Piece]:
        yield header
        parts = reader.whole(tensor for _, tensor, _ in named)
        for (_, _, turned), (tensor, part) in zip(named, parts, strict=True):
            yield _transposed(part, tensor) if turned else part

    return Sized(len(header) + sum(entry.size for entry, _, _ in named), data())


def _transposed(data: bytearray | memoryview, matrix: Tensor) -> bytes:
    import numpy as np  # imported here: listing checkpoints needs no numpy

    return np.frombuffer(data, f"V{ITEM_BYTES[matrix.dtype]}").reshape(matrix.shape).T.tobytes()


def content_digest(reader: Reader) -> str:
    """Returns the sha256 of all that :func:`export` writes: of each tensor, in order of the names there, the
    name, the type and the shape as JSON, then the bytes, each preceded by its length.  Layouts and files do
    not matter.
    """
    digest = hashlib.sha256()
    named = {
        tensor.name if tensor.kind in MODEL_KINDS else _key(tensor): tensor
        for tensor in reader.tensors()
        if tensor.kind != "constant"
    }
    names = sorted(named)
    for name, (tensor, data) in zip(names, reader.whole(named[name] for name in names), strict=True):
        about = json.dumps([name, tensor.dtype, list(tensor.shape)]).encode()
        for part in (about, data):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def _key(tensor: Tensor) -> str:
    if tensor.kind == "scalar":
        return tensor.name
    return f"{tensor.kind.removeprefix('moment.')}/{tensor.name}"
