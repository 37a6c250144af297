"""The samples in quarantine, as a checkpoint has them (``elastic/engine/spikes.py``)."""

from __future__ import annotations

from typing import NamedTuple

from storage.checkpoints import Reader

NAME = "spikes.quarantine"
"""The name of the tensor."""


class Held(NamedTuple):
    """A sample in quarantine."""

    sample: int
    step: int
    """The step that put it there, which was the last to read it."""
    applied: bool
    """True if that step changed weights, without the sample's microbatch; false if it was skipped."""


def held_in(reader: Reader) -> list[Held] | None:
    """Returns the samples that a checkpoint has in quarantine, oldest first; None if its run had no memory of spikes (``[spikes]``)."""
    tensors = [tensor for tensor in reader.tensors() if tensor.name == NAME]
    if not tensors:
        return None
    ((_, data),) = reader.read([tensors[0].whole()])
    numbers = memoryview(data).cast("B").cast("q")
    rows = zip(numbers[::2], numbers[1::2], strict=True)
    return [Held(max(sample, -1 - sample), abs(first) - 1, sample < 0) for sample, first in rows if first]
