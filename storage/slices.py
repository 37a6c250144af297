"""Slices address state by what it is, never by who holds it.

A :class:`Slice` is a box of one named tensor, in the tensor's own global coordinates; a :class:`Version` says
which moment of the run the state belongs to.  Re-sharding is then interval arithmetic: a held slice supplies
its intersection with a wanted one.  This module is pure and uses only the standard library.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

AVERAGE = "moment.average"
"""Kind of the average of a parameter (``optim.average``)."""
WHOLE = ("buffer", "constant", "scalar")
"""Kinds of tensors that are whole in every shard.  A constant is a buffer that its model does not save
(``persistent=False``): a worker that heals needs it too, but an export leaves it out.
"""


@dataclass(frozen=True, order=True)
class Version:
    """Identifies a state: the step whose update was applied last, and the generation that committed it.

    The same step done again by a later generation is another version.  ``Version(0, 0)`` is the
    initialisation.
    """

    step: int
    generation: int

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.generation}"


@dataclass(frozen=True, order=True)
class Tensor:
    """A whole tensor of the state.  ``kind``: parameter, ``moment.<name>`` or one of :data:`WHOLE`;
    ``dtype``: as safetensors names it.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    split: tuple[int, ...] = ()
    """The dimension along which tensor parallelism cuts it, the elements that stay together there (those of a
    head), and the lengths of the matrices that are fused along it, if there are several; () if it is not cut.
    """
    depth: tuple[int, ...] = ()
    """The place of its block in the model, and the number of blocks; () if every pipeline stage has it."""

    def whole(self) -> Slice:
        """Returns the slice that is the whole tensor."""
        return Slice(self.name, self.kind, (0,) * len(self.shape), self.shape)


@dataclass(frozen=True, order=True)
class Slice:
    """A box of one tensor: the elements with ``start <= index < stop`` in every dimension.  For a scalar both
    are empty.
    """

    name: str
    kind: str
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: Slice) -> Slice | None:
        """Returns the box of the elements that both contain, or None if there are none."""
        if (self.name, self.kind) != (other.name, other.kind):
            return None
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Slice(self.name, self.kind, start, stop)


def nbytes(tensor: Tensor, part: Slice) -> int:
    """Returns the size of ``part`` in bytes.  The number in a dtype's name is its bits (``F32``,
    ``F8_E4M3``); BOOL takes one byte.
    """
    bits = re.search(r"\d+", tensor.dtype)
    return part.count * (int(bits[0]) // 8 if bits else 1)
