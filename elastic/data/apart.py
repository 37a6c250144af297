"""Generators of random numbers for code that must leave those of the model alone.

``torch.manual_seed(id)`` is what many datasets do, and torchvision's transforms draw from torch's default
generator.  A model draws its dropout from the same one, and a thread that reads ahead would change it in the
middle of a forward pass.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode


def seed_of(ids: tuple[int, ...]) -> int:
    """Returns the seed of the generators while the samples ``ids`` are read together."""
    return int.from_bytes(hashlib.blake2b(repr(ids).encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def apart(seed: int) -> Iterator[Callable[[], bool]]:
    """Seeds the generators of torch's CPU, Python and numpy, and puts them back at the end.  No other thread
    may draw meanwhile.

    Yields a function that returns whether any code has drawn from the generators since, or has seeded them.
    """
    theirs = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    begun = _states()
    try:
        yield lambda: _states() != begun
    finally:
        torch.set_rng_state(theirs[0])
        random.setstate(theirs[1])
        numpy.random.set_state(theirs[2])


def _states() -> tuple[Hashable, ...]:
    name, keys, *rest = numpy.random.get_state(legacy=True)
    return (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        name,
        numpy.asarray(keys).tobytes(),
        *rest,
    )


class Draws(BaseException):
    """An operation would draw from a default generator.  It is no Exception, so that a dataset does not catch
    it.
    """


class NoDraws(TorchDispatchMode):
    """Raises :class:`Draws` in place of an operation of this thread that draws from a default generator of
    torch.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spares each process the import of torch's compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not any(
            isinstance(each, torch.Generator) for each in (*args, *(kwargs or {}).values())
        ):
            raise Draws
        return func(*args, **(kwargs or {}))
