"""Models whose initialisation is hard to run piece by piece, and what plain torch makes of a model on one
device.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn


class Odd(nn.Module):
    """Ties, copies of modules, values that decide, tensors read again, parts written one by one, another
    dtype, other libraries' chance.
    """

    def __init__(self, vocab: int = 500, dim: int = 64) -> None:
        super().__init__()
        self.e = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim, bias=False)) for _ in range(4)
        )
        self.blocks.append(copy.deepcopy(self.blocks[0]))
        self.h = nn.Linear(dim, vocab, bias=False)
        self.h.weight = self.e.weight
        self.register_buffer("scale", torch.empty(dim))
        self.register_buffer("table", torch.linspace(0.5, 2.0, dim), persistent=False)
        self.q = nn.Parameter(torch.empty(3, dim, dim))
        self.mixed = nn.Linear(dim, dim).to(torch.bfloat16)
        self.replaced = nn.Parameter(torch.randn(dim, dim))
        self.drawn = nn.Parameter(torch.empty(dim))
        self.untouched = nn.Linear(dim, 3 * dim)
        self.experts = nn.Parameter(torch.empty(4, dim, dim))

    def init_weights(self) -> None:
        nn.init.trunc_normal_(self.e.weight, std=0.02)
        for a, b in self.blocks:
            nn.init.orthogonal_(a.weight)
            nn.init.zeros_(a.bias)
            nn.init.kaiming_uniform_(b.weight, a=5**0.5)
            b.weight.mul_(0.5)
        for expert in self.experts:
            nn.init.xavier_normal_(expert)
        with torch.no_grad():
            w = torch.randn(128, 64)
            self.scale.copy_(w[0])
            self.q[1].normal_(0, 0.1)
            self.q[0].copy_(self.q[1].t())
            self.q[2].copy_(self.blocks[0][1].weight[:, :64] + self.e.weight[:64].sum() + w[1:65])
            if self.scale.mean().item() > 0:
                self.q[0].neg_()
            self.replaced = nn.Parameter(self.replaced * self.table)
            self.drawn.copy_(
                torch.tensor([random.random() + numpy.random.rand() for _ in range(64)], dtype=torch.float32)
            )
            for a, _ in self.blocks:  # once more, when all have been written
                a.weight.data = a.weight.data / a.weight.abs().max()


class Widest(Odd):
    """Each tensor is scaled by what the largest of all was before: the whole model is read again at the end."""

    def init_weights(self) -> None:
        super().init_weights()
        with torch.no_grad():
            widest = max(parameter.abs().max().item() for parameter in self.parameters())
            for parameter in self.parameters():
                parameter.div_(widest)


def odd(**args: Any) -> nn.Module:
    return Odd(**args)


def plain(build: Callable[[], nn.Module], seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Returns every parameter and buffer by name, as plain torch initialises them on one device from
    ``seed``.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    with torch.device(device):
        model = build()
        with torch.no_grad():
            model.init_weights()  # type: ignore[operator]
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
