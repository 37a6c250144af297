"""Buckets: blocks whose weights are gathered, and whose gradients are summed, by one collective.

A large block keeps a network busy by itself.  Many small ones spend their time on beginning collectives, so
DDP and DeepSpeed (``reduce_bucket_size``) join them.  Gathers copy and sums are element by element, so the
bits do not depend on the buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from elastic.models.spec import ShardingTable

ALONE = 1 << 20
"""Number of elements up to which blocks are joined into one bucket in a world of one member: 4 MiB of
gradients in float32.  Nothing travels there, so small buckets gain nothing, and a GPU sums a bucket of this
size in less time than the host takes to launch the sum.
"""


class GatherBucket(NamedTuple):
    """Consecutive blocks by name, in forward order, and their parameters.  Without blocks: the rest of the
    model.
    """

    blocks: tuple[str, ...]
    parameters: tuple[str, ...]
    elements: int


def buckets_of(model: nn.Module, table: ShardingTable, most: int) -> list[GatherBucket]:
    """Returns the buckets of a model that have parameters, in the order in which a backward pass completes
    them; the rest is the last one.

    A bucket has at most ``most`` elements, or one block.  Only blocks whose parameters have the same dtypes
    are joined, because a bucket is summed in the widest of them.
    """
    owns: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        owns.setdefault(table.block_of(name), {})[name] = parameter
    rest, groups, elements, joined = (
        owns.pop("", {}),
        list[list[tuple[str, dict[str, nn.Parameter]]]](),
        0,
        set[torch.dtype](),
    )
    for block in reversed(table.blocks):
        if not (own := owns.pop(block, {})):
            continue
        dtypes, more = (
            {parameter.dtype for parameter in own.values()},
            sum(parameter.numel() for parameter in own.values()),
        )
        if not groups or elements + more > most or dtypes != joined:
            groups.append([])
            elements, joined = 0, dtypes
        groups[-1].append((block, own))
        elements += more
    found = [
        _bucket([block for block, _ in reversed(group)], [own for _, own in reversed(group)])
        for group in groups
    ]
    return [bucket for bucket in (*found, _bucket([], [rest])) if bucket.parameters]


def _bucket(blocks: Sequence[str], owns: Sequence[Mapping[str, nn.Parameter]]) -> GatherBucket:
    parameters = {name: parameter for own in owns for name, parameter in own.items()}
    return GatherBucket(
        tuple(blocks), tuple(parameters), sum(parameter.numel() for parameter in parameters.values())
    )


def described(buckets: Sequence[GatherBucket]) -> str:
    """Returns the number of buckets and the size of the largest, in words."""
    largest = max((bucket.elements for bucket in buckets), default=0)
    return (
        f"{len(buckets)} {'buckets' if len(buckets) != 1 else 'bucket'}, of which the largest has "
        f"{largest:,} elements"
    )
