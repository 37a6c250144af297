"""A small model's state, and writers that share it out: what the checkpoint tests save and read."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np

from storage.checkpoints import Checkpoints, Part, ShardReceipt
from storage.checkpoints.index import tensors_of
from storage.checkpoints.shards import ITEM_BYTES
from storage.slices import Slice, Tensor, Version
from tests.support.cells import shard_slice

State = Mapping[Tensor, bytes]
"""Every tensor, whole."""

TENSORS = (
    Tensor("embed.weight", "parameter", "F32", (7, 3)),
    Tensor("embed.weight", "moment.exp_avg", "F32", (7, 3)),
    Tensor("half", "parameter", "BF16", (5,)),
    Tensor("steps", "buffer", "I64", (2, 2)),
    Tensor("mask", "buffer", "BOOL", (3,)),
    Tensor("turns", "constant", "F32", (2,)),
    Tensor("updates", "scalar", "F32", ()),
)


def state_of(tensors: Sequence[Tensor], seed: int) -> State:
    draw = random.Random(seed)
    return {tensor: draw.randbytes(tensor.whole().count * ITEM_BYTES[tensor.dtype]) for tensor in tensors}


def cut(state: State, tensor: Tensor, part: Slice) -> bytes:
    """Returns the bytes of ``part`` the simple way: numpy slices the whole tensor, element by element."""
    raw, size = state[tensor], ITEM_BYTES[tensor.dtype]
    whole = np.array([raw[at : at + size] for at in range(0, len(raw), size)], dtype=object)
    chosen = whole.reshape(tensor.shape)[
        tuple(slice(a, b) for a, b in zip(part.start, part.stop, strict=True))
    ]
    return b"".join(np.asarray(chosen, dtype=object).reshape(-1).tolist())


def part_of(state: State, tensor: Tensor, part: Slice) -> Part:
    return tensor, part, memoryview(cut(state, tensor, part))


def save(checkpoints: Checkpoints, version: Version, state: State, shards: int, **about: object) -> str:
    """Saves with ``shards`` writers, split along dim 0, and returns the manifest's digest."""
    return checkpoints.commit(version, write(checkpoints, version, state, shards), about)


def slices_of(receipt: ShardReceipt) -> list[tuple[Tensor, Slice]]:
    """Returns the slices that the receipt names."""
    return [
        (t, Slice(t.name, t.kind, cut.start, cut.stop))
        for cut in receipt.cuts
        for t in tensors_of(cut.tensors)
    ]


def write(checkpoints: Checkpoints, version: Version, state: State, shards: int) -> list[ShardReceipt]:
    receipts = []
    for index in range(shards):
        parts = [(tensor, shard_slice(tensor, shards, index)) for tensor in state]
        mine = [(t, part) for t, part in parts if part.count and (index == 0 or part != t.whole())]
        name = f"shard-{index:05d}-of-{shards:05d}"
        receipts.append(
            checkpoints.write_shard(
                version, name, [part_of(state, t, part) for t, part in mine], state=list(state)
            )
        )
    return receipts
