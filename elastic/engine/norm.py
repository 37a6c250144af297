"""The norm of the whole gradient, with the same bits in every layout.

Library reductions add in an order that depends on the number of rows and threads.  Here a fixed binary tree
(pad to a power of two, add the halves) sums the elements of each row, another one the rows of each whole
tensor, and a third one the tensors.  So the trees are the same for every distribution of the rows.

The members of a pipeline stage exchange the sums of the rows, and each puts them in the places that
``plan/placement.py`` says; so a row that several members hold counts once.  The tree of a row adds the halves
first, so no part of a row is one of its subtrees.  Where tensor parallelism cuts rows, members therefore
exchange elements before, and each adds some of the rows whole.  At the end the stages exchange the norms of
their tensors.

The result of a tree does not change if zeros are appended, or if other trees are computed in the same kernel.
So tensors of equal shape are added together, which takes few kernels.  And tensors take turns, so that memory
holds the rows of the largest tensor and not of all: a mixture of experts has 36,000 tensors, and 86 million
rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from elastic.engine.world import World, all_gather
from elastic.ids import Cell
from elastic.plan.layout import Layout
from elastic.plan.placement import held, model_parts, most_rows
from storage.slices import Tensor

K = TypeVar("K", bound=Hashable)
TURN_ROWS = 1 << 20
"""Number of rows that take one turn, if no tensor has more: 8 MiB as float64.  Each turn costs one
collective.
"""
WIDEST = 1 << 15
"""Number of elements of the widest row that a kernel of our own adds on a GPU."""
SQUARED = 1 << 24
"""Largest number of elements that are squared at once, unless one row has more: 64 MiB as float32."""
UNSIGNED = (1 << 63) - 1
"""Mask of a float64's bits without its sign bit, which a NaN may have set."""


def tree_sum(values: torch.Tensor) -> torch.Tensor:
    """Returns the sum over the last dimension by a fixed binary tree: [..., n] -> [...].  The order depends
    on n alone.
    """
    count = values.shape[-1]
    if count == 0:
        return values.new_zeros(values.shape[:-1])
    half = (1 << (count - 1).bit_length()) // 2
    if half < count < 2 * half:
        values = values[..., :half] + torch.nn.functional.pad(values[..., half:], (0, 2 * half - count))
    while values.shape[-1] > 1:
        left, right = values.chunk(2, -1)
        values = left + right
    return values.squeeze(-1)


def squared_norm(grads: Mapping[str, torch.Tensor], tensors: Sequence[Tensor], world: World) -> torch.Tensor:
    """Returns the squared 2-norm of the whole gradient: a float64 scalar, with the same bits in every layout.

    The arguments are those of :func:`squared_norms`.
    """
    return tree_sum(squared_norms(grads, tensors, world))


def squared_norms(grads: Mapping[str, torch.Tensor], tensors: Sequence[Tensor], world: World) -> torch.Tensor:
    """Returns the squared 2-norm of each tensor of the whole gradient: float64 [tensors], with the same bits
    in every layout.

    The elements are squared as float32, so those below 1e-23 count as zero.  ``grads`` has by name what this
    member holds of each of ``tensors`` that are in its stage.  All members must call it.
    """
    layout, totals = world.layout, dict[int, torch.Tensor]()
    cells = model_parts(layout, world.rank)
    spreads = _spreads(tensors, cells, layout)
    for turn in _turns(spreads, layout.shards * len(cells)):
        groups = _alike(turn, spreads.__getitem__)
        mine = [
            sums
            for each, alike in groups.items()
            for sums in _sums(alike, each, grads, tensors, cells, world)
        ]
        everyone = _gathered(torch.cat(mine), world)
        del mine
        widths = [len(alike) * each.size for each, alike in groups.items()]
        for (each, alike), sums in zip(groups.items(), everyone.split(widths, -1), strict=True):
            whole = _in_place(sums.unflatten(-1, (len(alike), each.size)), each, layout)
            totals.update(zip(alike, tree_sum(whole), strict=True))
    none = torch.zeros((), dtype=torch.float64, device=world.device)
    squares = torch.stack([totals.get(number, none) for number in range(len(tensors))])
    return squares if world.size == layout.replicas * len(layout.stage_ranks(0)) else _of_all_stages(squares)


class _Spread(NamedTuple):
    """The places of the rows of a tensor on the members of a stage.  Tensors with equal values are added
    together.
    """

    rows: int
    """The number of rows of the whole tensor."""
    size: int
    """The most rows that a member adds; a member with fewer appends zeros."""
    is_cut: bool
    """True if the parts of the model have parts of the same rows."""
    parts: tuple[tuple[int, tuple[tuple[int, int, int], ...]], ...]
    """The number of rows of each part of the model, and its boxes of rows: the first, the last, and the place
    in the part's memory.  Empty if rows are cut.
    """


def _spreads(tensors: Sequence[Tensor], cells: Sequence[Cell], layout: Layout) -> dict[int, _Spread]:
    """Returns, by number, the spread of each tensor of which the stage with these parts of the model has
    something.
    """
    known, found = dict[Hashable, _Spread | None](), dict[int, _Spread]()
    for number, tensor in enumerate(tensors):
        key = tensor.shape, tensor.split, tensor.depth
        if key not in known:
            known[key] = _spread(tensor, cells, layout)
        if (spread := known[key]) is not None:
            found[number] = spread
    return found


def _spread(tensor: Tensor, cells: Sequence[Cell], layout: Layout) -> _Spread | None:
    """Returns the spread of ``tensor``, or None if the stage has nothing of it."""
    parts = [held(tensor, cell) for cell in cells]
    if not any(part.boxes for part in parts):
        return None
    size = most_rows(max(part.shape[0] for part in parts), layout)
    if any(part.shape[1:] != tensor.shape[1:] for part in parts):
        return _Spread(tensor.shape[0], -(-size // len(parts)), True, ())
    boxes = (
        tuple((box.slice.start[0], box.slice.stop[0], box.at[0]) for box in part.boxes) for part in parts
    )
    lengths = (part.shape[0] for part in parts)
    return _Spread(tensor.shape[0], size, False, tuple(zip(lengths, boxes, strict=True)))


def _turns(spreads: Mapping[int, _Spread], members: int) -> Iterator[list[int]]:
    """Yields the numbers of the tensors that are added in one turn, in order of their rows: the same lists on
    every member.
    """
    padded = {number: each.size * members for number, each in spreads.items()}
    most, turn, taken = max([TURN_ROWS, *padded.values()]), list[int](), 0
    for number in sorted(spreads, key=lambda number: spreads[number].rows):
        if turn and taken + padded[number] > most:
            yield turn
            turn, taken = [], 0
        turn.append(number)
        taken += padded[number]
    if turn:
        yield turn


def _alike(turn: Iterable[int], key: Callable[[int], K]) -> dict[K, list[int]]:
    """Returns the numbers of ``turn`` in lists, by their ``key``."""
    found: dict[K, list[int]] = defaultdict(list)
    for number in turn:
        found[key(number)].append(number)
    return found


def _sums(
    alike: Sequence[int],
    spread: _Spread,
    grads: Mapping[str, torch.Tensor],
    tensors: Sequence[Tensor],
    cells: Sequence[Cell],
    world: World,
) -> list[torch.Tensor]:
    """Returns the sums of the squares of the rows that this member adds, and zeros behind them: float64
    [spread.size] for each of the tensors ``alike``.
    """

    def shape(number: int) -> Hashable:
        tensor = tensors[number]
        return tensor.shape, tensor.split if spread.is_cut else (), grads[tensor.name].dtype

    found = dict[int, torch.Tensor]()
    for numbers in _alike(alike, shape).values():
        tensor = tensors[numbers[0]]
        portion = SQUARED * world.stage_group.size() // tensor.whole().count
        step = max(1, portion) if spread.is_cut else len(numbers)
        for first in range(0, len(numbers), step):
            some = numbers[first : first + step]
            parts = [grads[tensors[number].name] for number in some]
            if spread.is_cut:
                parts = _whole_rows(parts, tensor, spread.size, cells, world)
            found.update(zip(some, _row_sums(parts, spread.size), strict=True))
    return [found[number] for number in alike]


def _whole_rows(
    grads: Sequence[torch.Tensor], tensor: Tensor, size: int, cells: Sequence[Cell], world: World
) -> list[torch.Tensor]:
    """Exchanges elements of tensors that are cut like ``tensor``, inside of their rows, among the members that
    have parts of the same rows.  Each member gets at most ``size`` whole rows.
    """
    members, count = world.layout.stage_ranks(world.rank), len(cells)
    shard, me = divmod(members.index(world.rank), count)
    mine = torch.stack([*grads]).detach()
    given, taken = [0] * len(members), [0] * len(members)
    blocks = [mine[:, part * size : (part + 1) * size].reshape(-1) for part in range(count)]
    rows = mine[0, me * size : (me + 1) * size].shape[0]
    shapes = [(len(mine), rows, *held(tensor, cell).shape[1:]) for cell in cells]
    given[shard * count : (shard + 1) * count] = [block.numel() for block in blocks]
    taken[shard * count : (shard + 1) * count] = [torch.Size(shape).numel() for shape in shapes]
    came = mine.new_empty(sum(taken))
    dist.all_to_all_single(came, torch.cat(blocks), taken, given, group=world.stage_group)
    whole = mine.new_empty(len(mine), rows, *tensor.shape[1:])
    pieces = came.split(taken[shard * count : (shard + 1) * count])
    for cell, shape, piece in zip(cells, shapes, pieces, strict=True):
        for box in held(tensor, cell).boxes:
            place, part = whole, piece.view(shape)
            for dim in range(1, len(tensor.shape)):
                length = box.slice.shape[dim]
                place = place.narrow(dim + 1, box.slice.start[dim], length)
                part = part.narrow(dim + 1, box.at[dim], length)
            place.copy_(part)
    return [*whole]


def _gathered(mine: torch.Tensor, world: World) -> torch.Tensor:
    """Returns ``mine`` [n] of every member of the stage: [shards, parts of the model, n]."""
    shards, members = world.layout.shards, world.stage_group.size()
    if members == 1:
        return mine[None, None]
    everyone = mine.new_empty(members, mine.numel())
    all_gather(everyone.view(-1), mine, world.stage_group)
    return everyone.view(shards, members // shards, -1)


def _in_place(sums: torch.Tensor, spread: _Spread, layout: Layout) -> torch.Tensor:
    """Puts the sums of rows, [shards, parts of the model, tensors, spread.size], in the order of the whole
    tensors: [tensors, spread.rows].
    """
    if spread.is_cut:  # each part has added some of the rows of each shard
        of_shards = sums.permute(2, 0, 1, 3).flatten(2)
        return of_shards[..., : most_rows(spread.rows, layout)].flatten(1)[:, : spread.rows]

    def of_part(part: int) -> torch.Tensor:
        length = spread.parts[part][0]
        return sums[:, part, :, : most_rows(length, layout)].transpose(0, 1).flatten(1)[:, :length]

    for part, (_, boxes) in enumerate(spread.parts):
        if boxes == ((0, spread.rows, 0),):
            return of_part(part)
    whole = sums.new_full((sums.shape[2], spread.rows), torch.nan)  # a row that nobody has must show
    for part, (_, boxes) in enumerate(spread.parts):
        own = of_part(part)
        for first, last, at in boxes:
            whole[:, first:last] = own[:, at : at + last - first]
    return whole


def _of_all_stages(squares: torch.Tensor) -> torch.Tensor:
    """Returns the squared norms of the tensors of all stages; each stage has 0 for those of the others.

    The largest of the bits is the largest number, because none is negative, and no addition counts a tensor of
    several stages more than once.
    """
    bits = squares.view(torch.int64) & UNSIGNED
    dist.all_reduce(bits, dist.ReduceOp.MAX)
    return bits.view(torch.float64)


def _row_sums(grads: Sequence[torch.Tensor], size: int) -> torch.Tensor:
    """Returns, for tensors of equal shape, the sum of the squares of each row, and zeros up to ``size``:
    float64 [tensors, size].

    The squares are added in float32, and computed in portions of at most ``SQUARED`` elements.
    """
    rows, columns = len(grads[0]), grads[0][:1].numel()
    sums = torch.zeros(len(grads), size, dtype=torch.float64, device=grads[0].device)
    if not rows or not columns:
        return sums
    if grads[0].device.type == "cuda" and grads[0].dtype == torch.float32 and 1 < columns <= WIDEST:
        from elastic.kernels import triton_kernels as kernels

        for number, grad in enumerate(grads):
            kernels.squares_(grad.detach().reshape(rows, columns), sums[number, :rows])
        return sums
    if rows * columns > SQUARED:
        step = max(1, SQUARED // columns)
        for number, grad in enumerate(grads):
            for first in range(0, rows, step):
                squares = grad.detach()[first : first + step].float().square().reshape(-1, columns)
                sums[number, first : first + len(squares)] = tree_sum(squares)
        return sums
    step = SQUARED // (rows * columns)
    for first in range(0, len(grads), step):
        some = torch.stack([*grads[first : first + step]]).detach().reshape(-1, rows, columns)
        sums[first : first + step, :rows] = tree_sum(some.float().square_())
    return sums
