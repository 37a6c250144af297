"""Buckets: blocks whose weights are gathered, and whose gradients are summed, by one collective.

A large block keeps a network busy by itself.  Many small ones spend their time on beginning collectives, so DDP and DeepSpeed
(``reduce_bucket_size``) join them.  Gathers copy and sums are element by element, so the bits do not depend on the buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from elastic.models.spec import ShardingTable


class Bucket(NamedTuple):
    """Names of consecutive blocks, in forward order; none for the rest of the model."""

    blocks: tuple[str, ...]
    parameters: tuple[str, ...]
    elements: int


def buckets_of(model: nn.Module, table: ShardingTable, most: int) -> list[Bucket]:
    """Returns the buckets of a model that have parameters, in the order in which a backward pass completes them; the rest is the last one.

    A bucket has at most ``most`` elements, or one block.  Only blocks whose parameters have the same dtypes are joined, because a bucket
    is summed in the widest of them.
    """
    rest, found, joined = dict(model.named_parameters()), list[Bucket](), set[torch.dtype]()
    for block in reversed(table.blocks):
        own = {name: rest.pop(name) for name in [*rest] if name.startswith(f"{block}.")}
        if not own:
            continue
        dtypes, elements = {parameter.dtype for parameter in own.values()}, sum(parameter.numel() for parameter in own.values())
        if found and found[-1].elements + elements <= most and dtypes == joined:
            last = found[-1]
            found[-1] = Bucket((block, *last.blocks), (*own, *last.parameters), last.elements + elements)
        else:
            found.append(Bucket((block,), tuple(own), elements))
        joined = dtypes
    found.append(Bucket((), tuple(rest), sum(parameter.numel() for parameter in rest.values())))
    return [bucket for bucket in found if bucket.parameters]


def described(buckets: Sequence[Bucket]) -> str:
    """Returns the number of buckets and the size of the largest, in words."""
    largest = max((bucket.elements for bucket in buckets), default=0)
    return f"{len(buckets)} {'buckets' if len(buckets) != 1 else 'bucket'}, of which the largest has {largest:,} elements"
