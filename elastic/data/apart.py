"""Generators of random numbers for code that must leave those of the model alone.

``torch.manual_seed(id)`` is what many datasets do, and torchvision's transforms draw from torch's default generator.  A model draws its
dropout from the same one, and a thread that reads ahead would change it in the middle of a forward pass.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import numpy
import torch


@contextmanager
def apart(seed: int) -> Iterator[Callable[[], bool]]:
    """Seeds the generators of torch's CPU, Python and numpy, and puts them back at the end.  No other thread may draw meanwhile.

    Yields a call that returns whether anybody has drawn from them since, or has seeded them.
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
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), name, numpy.asarray(keys).tobytes(), *rest
