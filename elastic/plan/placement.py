"""Maps a layout to cells, a cell to boxes of tensors, and boxes back to cells.

A *cell* names a part of the state.  Two members hold the same part exactly when their cells are equal,
whichever layouts they belong to. All other modules pass cells around and never look inside.  This module
alone turns (tensor, cell) into the boxes of the tensor that a member has, with the place of each box in the
member's memory.  A tensor may have several boxes there (a fused tensor) or none (a tensor of another pipeline
stage), and kinds of state may be cut differently (moments may be sharded while parameters are replicated).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import product

from elastic.ids import Cell
from elastic.plan.axes import AXES, Box, HeldPart, chunk_size, is_cut
from elastic.plan.layout import Layout
from storage.slices import Slice, Tensor, nbytes

CELL_BYTES = 64
"""Largest size of a cell's text in bytes.  The header of a copy has that much room for it."""
Degrees = tuple[tuple[str, int], ...]
"""Axes that cut the state, with their degrees, in the order of the table."""
Cuts = Collection[tuple[str, int | None]]
"""Axes with the degrees at which they may cut the state, an axis several times if it may have several; None
stands for all degrees.
"""
Corners = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and stop of a box."""
Place = tuple[str, int, int]
"""An axis that cuts the state, the index of a part along it, and the number of parts."""

# ---- cells


def cell_of(layout: Layout, world_rank: int) -> Cell:
    """Returns the cell of a member.  Raises ValueError for a layout whose cells have too long a text."""
    index = layout.coordinates(world_rank)
    for name, degree in layout.degrees:
        if into := AXES[name].into:
            index[into] = index[into] * degree + index[name]
    text = _at([(name, index[name], degree) for name, degree in degrees_of(layout)])
    if len(text) > CELL_BYTES:
        raise ValueError(
            f"the cell {text!r} of layout {layout} takes {len(text)} bytes and may take {CELL_BYTES}; use "
            "fewer axes"
        )
    return text


def degrees_of(layout: Layout) -> Degrees:
    """Returns the axes of ``layout`` that cut the state, each with those that are counted as one with it."""
    found = {name: degree for name, degree in layout.degrees if AXES[name].cut is not None}
    for name, degree in layout.degrees:
        if into := AXES[name].into:
            found[into] *= degree
    return tuple((name, degree) for name, degree in found.items() if degree > 1)


def _at(places: Iterable[Place]) -> Cell:
    """Returns the cell at these places, which :func:`_places` reads again."""
    return Cell(";".join(f"{name} {index}/{degree}" for name, index, degree in places))


@cache
def _places(cell: Cell) -> tuple[Place, ...]:
    """Returns the place along each axis that cuts."""
    found = []
    for part in cell.split(";") if cell else ():
        name, _, place = part.partition(" ")
        index, _, degree = place.partition("/")
        found.append((name, int(index), int(degree)))
    return tuple(found)


def degrees_in(cell: Cell) -> Degrees:
    """Returns the axes that cut the state in the layouts that have ``cell``."""
    return tuple((name, degree) for name, _, degree in _places(cell))


def middle_of(cell: Cell) -> tuple[tuple[str, float], ...]:
    """Returns each axis that cuts the state, and where the part lies along it, between 0 and 1.  It sorts
    cells, also of several layouts.
    """
    return tuple((name, (index + 0.5) / degree) for name, index, degree in _places(cell))


def distinct_cells(layout: Layout) -> dict[Cell, tuple[int, ...]]:
    """Returns the cells of ``layout`` in order of their first member, each with the world ranks that hold it."""
    found: dict[Cell, list[int]] = defaultdict(list)
    for world_rank in range(layout.world):
        found[cell_of(layout, world_rank)].append(world_rank)
    return {cell: tuple(ranks) for cell, ranks in found.items()}


def number_of_cells(layout: Layout) -> int:
    """Returns how many parts the state has in ``layout``: each part is held by ``layout.world`` / this number
    of members.
    """
    return math.prod(degree for _, degree in degrees_of(layout))


# ---- from a cell to boxes, and back


@lru_cache(maxsize=2**17)
def held(tensor: Tensor, cell: Cell) -> HeldPart:
    """Returns what a member in ``cell`` holds of ``tensor``.  The innermost axis cuts first, so the outer
    ones cut what it left.
    """
    found = whole(tensor)
    for name, index, degree in reversed(_places(cell)):
        found = _cut(name, tensor, found, degree, index)
    return found


def whole(tensor: Tensor) -> HeldPart:
    """Returns what a member that has all of ``tensor`` holds."""
    part = tensor.whole()
    return HeldPart(tensor.shape, (Box(part, part.start),) if part.count else ())


def _cut(name: str, tensor: Tensor, before: HeldPart, degree: int, index: int) -> HeldPart:
    cut = AXES[name].cut
    assert cut is not None, f"axis {name} cuts nothing and has no place in a cell"
    return cut(tensor, before, degree, index)


def model_part(cell: Cell) -> Cell:
    """Returns the cell of all that a member in ``cell`` computes with: its part of the model, of which it holds
    the part that the data axes leave to it.
    """
    return _at(place for place in _places(cell) if AXES[place[0]].cuts_model)


@cache
def model_parts(layout: Layout, world_rank: int) -> tuple[Cell, ...]:
    """Returns the parts of the model of the members that share a shard in a pipeline stage, in their order.
    They are the same for all shards of the stage.
    """
    members = layout.stage_ranks(world_rank)
    return tuple(model_part(cell_of(layout, rank)) for rank in members[: len(members) // layout.shards])


@lru_cache(maxsize=2**14)
def rows_of(count: int, layout: Layout, world_rank: int) -> tuple[int, int]:
    """Returns the rows ``[first, last)`` that a member holds of a parameter with ``count`` rows in the part of
    the model with which the member computes.
    """
    boxes = held(Tensor("", "parameter", "U8", (count,)), cell_of(layout, world_rank)).boxes
    return (boxes[0].slice.start[0], boxes[0].slice.stop[0]) if boxes else (count, count)


def most_rows(count: int, layout: Layout) -> int:
    """Returns the most rows that :func:`rows_of` gives a member, which is the first one.  Shorter parts are
    padded to it where all must be equal.
    """
    return rows_of(count, layout, 0)[1]


def cells_meeting(tensor: Tensor, part: Slice, degrees: Degrees) -> Iterator[tuple[Cell, HeldPart]]:
    """Yields the cells, of a layout with these ``degrees``, that have elements of ``part``, each with what it
    has of ``tensor``: the inverse of :func:`held`.
    """

    def descend(left: Degrees, before: HeldPart, text: str) -> Iterator[tuple[Cell, HeldPart]]:
        if not any(box.slice.intersect(part) for box in before.boxes):
            return
        if not left:
            yield Cell(text), before
            return
        *outer, (name, degree) = left
        for index in AXES[name].reaches(tensor, before, degree, part):
            place = f"{name} {index}/{degree}"
            yield from descend(
                tuple(outer), _cut(name, tensor, before, degree, index), f"{place};{text}" if text else place
            )

    return descend(degrees, whole(tensor), "")


def written_by(tensors: Sequence[Tensor], layout: Layout, world_rank: int) -> Iterator[tuple[Tensor, Box]]:
    """Yields what this member writes into a checkpoint.  Exactly one member of the world writes each element
    of the state.

    Members that hold the same boxes of a tensor take turns, tensor by tensor.
    """
    cells, degrees = distinct_cells(layout), degrees_of(layout)
    own = cell_of(layout, world_rank)

    @cache
    def sharing(key: Hashable) -> tuple[int, ...]:
        """Returns the members that have the same boxes of ``tensor``, and of all tensors that are cut like
        it.
        """
        mine = _corners(tensor, own)
        return tuple(
            sorted(rank for cell, ranks in cells.items() for rank in ranks if _corners(tensor, cell) == mine)
        )

    for number, tensor in enumerate(tensors):
        ranks = sharing(class_of(tensor, degrees))
        if ranks[number % len(ranks)] == world_rank:
            yield from ((tensor, box) for box in held(tensor, own).boxes)


def _corners(tensor: Tensor, cell: Cell) -> list[Corners]:
    return [(box.slice.start, box.slice.stop) for box in held(tensor, cell).boxes]


# ---- coverage, without listing all tensors


def classes_of(tensors: Iterable[Tensor], cuts: Cuts | None = None) -> tuple[Tensor, ...]:
    """Returns one tensor of each class.  Each of ``cuts`` cuts the tensors of a class alike, so all are
    covered if one is.  Without ``cuts`` any layout does.
    """
    return tuple({class_of(tensor, cuts): tensor for tensor in reversed(list(tensors))}.values())[::-1]


def same_classes(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Returns whether both collections have tensors of the same classes."""
    return some == others or set(map(class_of, some)) == set(map(class_of, others))


def bytes_by_class(tensors: Iterable[Tensor], cuts: Cuts | None = None) -> tuple[int, ...]:
    """Returns the bytes of all tensors of each class, in the order of :func:`classes_of`."""
    everything, found = list(tensors), defaultdict[Hashable, int](int)
    for tensor in everything:
        found[class_of(tensor, cuts)] += nbytes(tensor, tensor.whole())
    return tuple(found[class_of(tensor, cuts)] for tensor in classes_of(everything, cuts))


def padding(classes: Sequence[Tensor], class_bytes: Sequence[int], shards: int) -> float:
    """Returns the padding, as a share of the state, if dimension 0 is cut into ``shards`` chunks of equal
    size; 0 if nothing is known.

    Where the rows cannot be divided, the last chunks are short or empty; their members compute and send as
    much as the others.
    """
    cut = [
        (tensor.shape[0], size)
        for tensor, size in zip(classes, class_bytes, strict=False)
        if is_cut(tensor) and size
    ]
    padded = sum(size * (chunk_size(rows, shards) * shards / rows - 1) for rows, size in cut)
    return padded / sum(size for _, size in cut) if cut else 0.0


def class_of(tensor: Tensor, cuts: Cuts | None = None) -> Hashable:
    """Returns the class of ``tensor``: all that ``cuts``, or without them all layouts, use of it, and whether
    it has no elements.

    Every member holds the same of a tensor without elements, namely nothing, so it cannot stand for others
    that are cut like it.
    """
    pairs = ((name, None) for name in AXES) if cuts is None else cuts
    return (0 in tensor.shape, *(AXES[name].key(tensor, degree) for name, degree in pairs))


def absent(cells: Iterable[Cell]) -> list[Cell]:
    """Returns the cells that ``cells`` lack of a layout, the one of which fewest are absent.  All cells of a
    layout have the whole state, whatever tensors it consists of.
    """
    there = frozenset(cells)
    found = Counter(map(degrees_in, there))
    degrees = min(found, key=lambda each: math.prod(degree for _, degree in each) - found[each], default=())
    if found[degrees] == math.prod(degree for _, degree in degrees):
        return []
    places = ([(name, index, degree) for index in range(degree)] for name, degree in degrees)
    return [cell for cell in map(_at, product(*places)) if cell not in there]


# ---- model groups and their microbatches


def data_rank(layout: Layout, world_rank: int) -> int:
    """Returns the number of the model group of a member, among those that run microbatches."""
    found, index = 0, layout.coordinates(world_rank)
    for name, degree in layout.degrees:
        if AXES[name].data:
            found = found * degree + index[name]
    return found


def data_ranks(layout: Layout) -> int:
    """Returns the number of model groups: each runs one microbatch at a time."""
    found = 1
    for name, degree in layout.degrees:
        found *= degree if AXES[name].data else 1
    return found


@cache
def model_group(layout: Layout, number: int) -> tuple[int, ...]:
    """Returns the world ranks of the model group with data rank ``number``: they run its microbatches
    together.

    The first model group has the largest parts of the state, since along a data axis no member holds more
    than the first.
    """
    return tuple(rank for rank in range(layout.world) if data_rank(layout, rank) == number)


def largest_cells(layout: Layout) -> set[Cell]:
    """Returns the cells among which are those with most of the state, in bytes and in boxes."""
    return {cell_of(layout, rank) for rank in model_group(layout, 0)}


@cache
@cache
def data_groups(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Returns the data groups of the world.  The members of a group compute the same part of the model, so
    they begin the same collectives in the same order.
    """
    found, seen = list[tuple[int, ...]](), set[int]()
    for rank in range(layout.world):
        if rank not in seen:
            found.append(layout.data_group(rank))
            seen.update(found[-1])
    return tuple(found)


@cache
def counterparts(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Returns the world ranks in each place of a model group, by data rank.  From one microbatch they compute the
    same gradients; members of a data group may run different parts of it.
    """
    groups = [list[int]() for _ in range(data_ranks(layout))]
    for rank in range(layout.world):
        groups[data_rank(layout, rank)].append(rank)
    return tuple(zip(*groups, strict=True))


@cache
def reporters(layout: Layout) -> tuple[int, ...]:
    """Returns, by data rank, the world rank of the member that knows the losses of that model group."""
    found = {}
    for world_rank in range(layout.world):
        index = layout.coordinates(world_rank)
        if all(
            AXES[name].data or index[name] == AXES[name].reports(degree) for name, degree in layout.degrees
        ):
            found[data_rank(layout, world_rank)] = world_rank
    return tuple(found[rank] for rank in range(data_ranks(layout)))
