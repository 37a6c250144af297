"""Stochastic rounding to bfloat16, by random bits that are a function of the element alone.

A number between two neighbours in bfloat16 becomes the upper one with a probability that grows from 0 at the
lower one to 1 at the upper one, so that its mean is right.  Rounding to the nearest would lose every change
of less than half a step, 2⁻⁹ of the number: with ``betas[1]`` = 0.999 the average of squares would stand
still.  The bits are a hash of the job's seed, the step, the name of the tensor, the moment, and the place of
the element in the tensor (a counter-based generator; Salmon and others 2011).  So they do not depend on how
the tensor is cut, and a step that is done again is rounded as before.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from elastic.engine.optim.base import Hyper, Part

PORTION = 1 << 22
"""Largest number of elements that are updated and rounded at once, unless one row has more: about 200 MiB of
scratch memory.
"""
WORD = (1 << 32) - 1
"""Mask of 32 bits."""


def portions(part: Part) -> Iterator[tuple[slice, Tensor]]:
    """Yields rows of the part, a portion at a time, with the places of their elements in the whole tensor:
    int64, shaped as the rows.
    """
    at = 0
    for box in part.boxes:
        first, last = box.start[0], box.stop[0]
        step = max(1, PORTION * (last - first) // box.count)
        for row in range(first, last, step):
            start, stop = (row, *box.start[1:]), (min(row + step, last), *box.stop[1:])
            places = torch.zeros((), dtype=torch.int64, device=part.values.device)
            for low, high, length in zip(start, stop, part.shape, strict=True):
                places = places[..., None] * length + torch.arange(low, high, device=places.device)
            yield slice(at, at + len(places)), places
            at += len(places)


def lines(part: Part) -> list[tuple[slice, int, int, int]] | None:
    """Returns the rows of each box with three numbers, ``first``, ``run`` and ``whole``: the element ``i`` of
    the box is the element ``first + i // run * whole + i % run`` of the whole tensor.  None if boxes are cut
    along two dimensions besides the first.
    """
    found, at = [], 0
    for box in part.boxes:
        cut = [d for d in range(1, len(part.shape)) if (box.start[d], box.stop[d]) != (0, part.shape[d])]
        if len(cut) > 1:
            return None
        dim = cut[0] if cut else 0
        inner, row = math.prod(part.shape[dim + 1 :]), math.prod(part.shape[1:])
        first = box.start[0] * row + (box.start[dim] * inner if dim else 0)
        rows = box.stop[0] - box.start[0]
        found.append(
            (slice(at, at + rows), first, (box.stop[dim] - box.start[dim]) * inner, part.shape[dim] * inner)
        )
        at += rows
    return found


def round_(moment: Tensor, values: Tensor, places: Tensor, key: tuple[int, int]) -> None:
    """Rounds ``values`` to bfloat16 and stores them in ``moment``; ``places`` are the places of the elements
    in the whole tensor, and ``key`` is the result of :func:`key_of`.

    The 16 bits that bfloat16 lacks and 16 random ones are added as integers; a carry makes the number the
    upper neighbour.
    """
    words = values.float().view(torch.int32) + random_bits(places, key)
    moment.copy_((words & -(1 << 16)).view(torch.float32))


def key_of(hyper: Hyper, name: str, moment: str) -> tuple[int, int]:
    """Returns the key of a moment of a parameter in one step: two words of 32 bits."""
    digest = hashlib.blake2b(f"{hyper.seed}/{hyper.step}/{moment}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def random_bits(places: Tensor, key: tuple[int, int]) -> Tensor:
    """Returns 16 random bits for each place, int32."""
    low, high = places & WORD, places >> 32
    return (_mixed(_mixed(low ^ key[0]) ^ high ^ key[1]) >> 16).int()


def _mixed(words: Tensor) -> Tensor:
    """Returns a hash of each word of 32 bits (Wellons 2018, lowbias32).  The products stay within the signed
    64 bits that hold them.
    """
    words = (words ^ words >> 16) * 0x7FEB352D & WORD
    words = (words ^ words >> 15) * (0x846CA68B - (1 << 32)) & WORD
    return words ^ words >> 16
