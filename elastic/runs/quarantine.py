"""Reads the samples in quarantine from a checkpoint."""

from __future__ import annotations

from elastic.protocol.spikes import QUARANTINE, Held
from storage.checkpoints import Reader


def held_in(reader: Reader) -> list[Held] | None:
    """Returns the samples that a checkpoint has in quarantine, oldest first; None if its run had no memory of
    spikes (``[spikes]``).
    """
    tensors = [tensor for tensor in reader.tensors() if tensor.name == QUARANTINE]
    if not tensors:
        return None
    ((_, data),) = reader.read([tensors[0].whole()])
    numbers = memoryview(data).cast("B").cast("q")
    return [
        held for row in zip(numbers[::2], numbers[1::2], strict=True) if (held := Held.of(row)) is not None
    ]
