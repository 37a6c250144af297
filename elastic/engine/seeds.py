"""Seeds of random numbers by the place that draws them: the job, the step, the microbatch, the block, and the
number of its call.

A member that computes some blocks of a model then draws what a member with all blocks draws, and a block that
runs again in a backward pass draws what it drew first.  Code between two blocks, or after the last one, goes
on with the numbers of the block before it; code before the first block has the seed of the microbatch.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn

from elastic.config.sections import STAGES_SINCE
from elastic.engine.blocks import sharding_table
from elastic.job import Job

IN_FLIGHT = 256
"""Most microbatches whose blocks may run again.  A stage of a pipeline has one for each stage behind it between
their forward and backward passes (1F1B), and one worker has one.  Each takes about 200 bytes a block.
"""


class Seeds:
    """Seeds the generators of torch, Python and numpy for each microbatch, and before each call of a block.

    A call of a block is known by the seed that it finds.  Two calls find the same seed only where the user's
    code brings back the generators, since each call leaves its own seed behind.  So does torch's checkpoint
    where it runs a block again: the block then draws what it drew first.
    """

    def __init__(self, model: nn.Module, job: Job, device: torch.device) -> None:
        """Wraps ``forward`` of the blocks, outside of all that repeats or compiles it."""
        blocks = sharding_table(model).blocks if for_stages(job) else ()
        self._job_seed, self.device = job.seed, device
        self._microbatch: int | None = None
        """The seed of the present microbatch.  Before the first one nothing is seeded."""
        self._calls = Counter[str]()
        self._known = dict[tuple[str, int], int]()
        """The seeds of the calls in the last :data:`IN_FLIGHT` microbatches, by the block and the seed that the
        call finds.
        """
        self._of = dict[int, list[tuple[str, int]]]()
        """The calls of each of these microbatches, by its seed."""
        for block, name in {model.get_submodule(name): name for name in reversed(blocks)}.items():
            block.forward = partial(self._run, name, block.forward)

    def begin(self, step: int, microbatch: int) -> None:
        """Begins a microbatch."""
        self._microbatch = microbatch_seed(self._job_seed, step, microbatch)
        self._calls.clear()
        if self._microbatch in self._of:  # it begins anew
            self._forget(self._microbatch)
        elif len(self._of) == IN_FLIGHT:
            self._forget(next(iter(self._of)))
        self._of[self._microbatch] = []
        self.seed(self._microbatch)

    def _forget(self, microbatch: int) -> None:
        for call in self._of.pop(microbatch, ()):
            del self._known[call]

    def seed(self, seed: int) -> None:
        """Seeds the generators.

        It does not call ``torch.manual_seed``, which formats a traceback each time if there is no GPU.
        """
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _run(self, block: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._microbatch is not None:
            call = block, torch.default_generator.initial_seed()
            if call not in self._known:
                self._known[call] = self._next(block)
                self._of[self._microbatch].append(call)
            self.seed(self._known[call])
        return forward(*args, **kwargs)

    def _next(self, block: str) -> int:
        """Returns the seed of the next call of a block."""
        self._calls[block] += 1
        return _derived(f"{self._microbatch}/{block}/{self._calls[block]}")


def for_stages(job: Job) -> bool:
    """Returns whether the bits are those of a model in stages, so that each block has a seed of its own; else one
    seed holds for a whole microbatch.
    """
    return job.numerics >= STAGES_SINCE


def microbatch_seed(seed: int, step: int, microbatch: int) -> int:
    """Returns the seed of a microbatch, a function of (seed of the job, step, microbatch) alone."""
    return _derived(f"{seed}/{step}/{microbatch}")


def _derived(place: str) -> int:
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "little") >> 1
