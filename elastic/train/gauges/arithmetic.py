"""Counts the floating-point operations of committed steps from the tokens and samples in their outcomes."""

from __future__ import annotations

import torch
from torch import nn

from elastic.engine.world import World
from elastic.models.flops import flops_of
from elastic.protocol.commit_record import Outcome
from elastic.protocol.events import Work
from elastic.train.machine.peaks import peak_flops


class Arithmetic:
    """Counts for one world; every member is assumed to have a device like this member's."""

    def __init__(self, model: nn.Module, world: World, precision: str) -> None:
        self._flops, self._devices, cuda = flops_of(model), world.size, world.device.type == "cuda"
        self._peak = peak_flops(torch.cuda.get_device_name(world.device), precision) if cuda else 0.0

    def of(self, outcome: Outcome) -> Work:
        """Returns the work of a step.  Only tokens that the loss counts are counted, in sequences of the mean
        length of the step.
        """
        tokens = sum(outcome.counts)
        seq = tokens / max(sum(map(len, outcome.samples)), 1)
        full, causal = (self._flops(seq, causal) * tokens for causal in (False, True))
        return Work(float(full), float(causal), self._devices, self._peak)
