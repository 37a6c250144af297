"""Compares two checkpoints, tensor by tensor: the norm of each tensor, and how far the tensor has moved (G4).

One stored slice of each checkpoint is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from elastic.state.shard import DTYPES
from storage.checkpoints import Reader
from storage.slices import Slice, Tensor

ELEMENTS = 2**22
"""Largest number of elements that are in memory as float64 at a time."""


@dataclass
class Moved:
    """A tensor of both checkpoints: its norm in each, and the norm of the difference, of finite elements."""

    tensor: Tensor
    equal: bool = True
    """True if all bits are the same."""
    first_square: float = 0.0
    second_square: float = 0.0
    moved_square: float = 0.0
    largest: float = 0.0
    """The largest absolute difference of an element."""
    strange: tuple[int, int] = (0, 0)
    """The number of elements that are not finite, in the first checkpoint and in the second."""

    @property
    def norms(self) -> tuple[float, float, float]:
        """The Euclidean norms of the tensor in the first checkpoint, in the second, and of the difference."""
        return math.sqrt(self.first_square), math.sqrt(self.second_square), math.sqrt(self.moved_square)

    @property
    def part(self) -> float:
        """The norm of the difference divided by the norm in the first checkpoint; infinite if only the
        divisor is 0, and 0 if both are.
        """
        first, _, moved = self.norms
        return moved / first if first else math.inf if moved else 0.0

    def add(self, first: memoryview, second: memoryview) -> None:
        """Adds one slice to the sums: its bytes in the first checkpoint and in the second."""
        self.equal = self.equal and first == second
        dtype = DTYPES[self.tensor.dtype]
        a, b = (
            torch.frombuffer(bytearray(raw), dtype=dtype) if raw.nbytes else torch.empty(0)
            for raw in (first, second)
        )
        for x, y in zip(a.split(ELEMENTS), b.split(ELEMENTS), strict=True):
            p, q = x.double(), y.double()
            is_finite, also = p.isfinite(), q.isfinite()
            self.strange = self.strange[0] + int((~is_finite).sum()), self.strange[1] + int((~also).sum())
            self.first_square += float(p[is_finite].square().sum())
            self.second_square += float(q[also].square().sum())
            apart = (q - p)[is_finite & also]
            self.moved_square += float(apart.square().sum())
            self.largest = max(self.largest, float(apart.abs().max()) if apart.numel() else 0.0)


@dataclass(frozen=True)
class Comparison:
    """The tensors of both checkpoints, and the tensors of only one.  A tensor with another shape or type
    counts as another tensor.
    """

    moved: tuple[Moved, ...]
    only_first: tuple[Tensor, ...]
    only_second: tuple[Tensor, ...]


def compare(first: Reader, second: Reader, kinds: Sequence[str]) -> Comparison:
    """Compares the tensors whose kind begins with one of ``kinds``.

    Raises :class:`~storage.errors.Damaged` if a checkpoint has other bytes than were written.
    """
    ours, theirs = (
        {tensor for tensor in reader.tensors() if tensor.kind.startswith(tuple(kinds))}
        for reader in (first, second)
    )
    moved = tuple(_moved(first, second, tensor) for tensor in sorted(ours & theirs))
    return Comparison(moved, tuple(sorted(ours - theirs)), tuple(sorted(theirs - ours)))


def _moved(first: Reader, second: Reader, tensor: Tensor) -> Moved:
    found = Moved(tensor)
    for part in _stored(first, tensor):
        ((_, one),), ((_, other),) = first.read([part]), second.read([part])
        found.add(memoryview(one), memoryview(other))
    return found


def _stored(reader: Reader, tensor: Tensor) -> Iterator[Slice]:
    """Yields the slices in which the checkpoint stores the tensor."""
    for _, stored, _ in reader.index.covering(tensor.whole()):
        yield stored
