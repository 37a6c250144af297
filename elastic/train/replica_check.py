"""Compares the replicas of the state, so that a silent error of a memory or a processor is found before it is
saved.

In a reproducible job all replicas have the same bits, and every member computes the digest of its own part.
They exchange two numbers each; only if replicas differ do they exchange one number for each tensor, which
tells where.  A single bit that flipped always shows (see ``state/digest.py``).  The comparison cannot find an
error that all replicas share, such as one in a gradient that a single member summed for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from elastic.engine.world import World, all_gather
from elastic.errors import ReplicasDiffer, StateDamaged
from elastic.plan.placement import cell_of, number_of_cells
from elastic.state.digest import digests
from elastic.train.model import State

Row = tuple[int, ...]


def compare(state: State, leave_if_over: Callable[[], None] = lambda: None) -> None:
    """Compares the state with its replicas.  Every member must call it at the same point of a step.

    Raises :class:`StateDamaged` on a member that differs from most replicas of its part, and
    :class:`ReplicasDiffer` on all members that hold this part if no value has a majority.  ``leave_if_over``
    raises if the world is over: the numbers that were gathered may then be garbage.
    """
    world, values = state.world, state.shard.values
    if number_of_cells(world.layout) == world.size:
        return
    nothing = torch.zeros(0, dtype=torch.int64, device=world.device)
    tensors = torch.cat(
        [nothing, *(_weighed(digests(value).to(world.device))[None] for value in values.values())]
    )
    cells = [cell_of(world.layout, rank) for rank in range(world.size)]
    told = _gathered(torch.stack([_weighed(tensors), tensors.new_tensor(len(tensors))]), world)
    leave_if_over()
    if len({*zip(cells, told, strict=True)}) == number_of_cells(world.layout):
        return
    most = max(count for _, count in told)  # other parts may have more tensors
    rows = _gathered(torch.cat([tensors, tensors.new_zeros(most - len(tensors))]), world)
    leave_if_over()
    replicas = {
        rank: rows[rank][: len(tensors)] for rank in range(world.size) if cells[rank] == cells[world.rank]
    }
    _judge(replicas, world.rank, [f"{kind} {name!r}" for kind, name in values], state.shard.version.step)


def _judge(replicas: dict[int, Row], mine: int, names: list[str], step: int) -> None:
    """Raises the error of the member with world rank ``mine``, if it has one.  ``replicas`` has the numbers
    of each replica's tensors, by world rank.
    """
    (common, count), *others = Counter(replicas.values()).most_common()
    if not others:
        return
    where = [name for name, *numbers in zip(names, *replicas.values(), strict=True) if len({*numbers}) > 1]
    said = f"{where[0]}{f' and {len(where) - 1} more tensors' if where[1:] else ''} after step {step}"
    if 2 * count <= len(replicas):
        ranks = ", ".join(map(str, replicas))
        raise ReplicasDiffer(
            f"the replicas of world ranks {ranks} hold different bits of {said}, and no majority "
            "agrees: a memory or a processor is faulty.  Find it, remove its node, and go on from the "
            "newest checkpoint, where all replicas were equal"
        )
    if replicas[mine] != common:
        raise StateDamaged(
            f"world rank {mine} holds other bits of {said} than {count} of {len(replicas)} replicas, so its "
            "state is given up"
        )


def _weighed(numbers: Tensor) -> Tensor:
    """Returns a sum of int64 numbers, modulo 2^64, in which their order counts."""
    return (numbers * torch.arange(1, 2 * len(numbers), 2, device=numbers.device)).sum()


def _gathered(mine: Tensor, world: World) -> list[Row]:
    """Returns the numbers of every member, by world rank."""
    everyone = mine.new_empty(world.size * len(mine))
    all_gather(everyone, mine)
    world.finish()
    return [tuple(row) for row in everyone.view(world.size, -1).tolist()]
