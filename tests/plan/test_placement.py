"""Placement is compared with numpy: what a cell has of a tensor, and who has what, along all axes and two
that only tests have.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from elastic.ids import Cell, Version, WorkerId
from elastic.plan import placement
from elastic.plan.axes import AXES, is_cut, stage_of
from elastic.plan.layout import Layout
from elastic.plan.transfer import Holding, Move, covered, missing, moves
from storage.slices import Slice, Tensor
from tests.support import toy_axes
from tests.support.calls import calls
from tests.support.toy_axes import LAYOUTS, TENSORS

pytestmark = pytest.mark.fast
AT = Version(3, 1)


@pytest.fixture(autouse=True)
def _toys() -> Iterator[None]:
    with toy_axes.registered():
        yield
    assert list(AXES) == ["pp", "dp_replicate", "dp_shard", "cp", "tp"]


def numbers(tensor: Tensor) -> np.ndarray:
    """Returns an array of the tensor's shape in which every element has a number of its own."""
    return np.arange(1, int(np.prod(tensor.shape)) + 1).reshape(tensor.shape)


def box(part: Slice) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(part.start, part.stop, strict=True))


def gathered(whole: np.ndarray, held: placement.HeldPart) -> np.ndarray:
    """Returns a member's memory, filled box by box from ``whole``."""
    memory = np.zeros(held.shape, whole.dtype)
    for each in held.boxes:
        memory[tuple(slice(at, at + size) for at, size in zip(each.at, each.slice.shape, strict=True))] = (
            whole[box(each.slice)]
        )
    return memory


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_cell_has_what_numpy_cuts(layout: Layout) -> None:
    places = toy_axes.places(layout)
    assert [layout.coordinates(rank) for rank in range(layout.world)] == [
        {axis: index for axis, index in place.items() if axis in dict(layout.degrees)} for place in places
    ]
    for (rank, place), tensor in itertools.product(enumerate(places), TENSORS):
        found = placement.held(tensor, placement.cell_of(layout, rank))
        expected = toy_axes.local(numbers(tensor), tensor, layout, place)
        assert (gathered(numbers(tensor), found) == expected).all() and found.shape[1:] == expected.shape[
            1:
        ], (tensor, place)
        assert sum(each.slice.count for each in found.boxes) == expected.size


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_rows_of_a_parameter_are_those_that_numpy_cuts(layout: Layout) -> None:
    """The rows are counted within the part of the model that the member computes with."""
    plain = Layout(layout.dp_replicate, layout.dp_shard, tuple(each for each in layout.more if "cp" in each))
    for count in range(12):
        tensor, longest = Tensor("w", "parameter", "F32", (count,)), 0
        for rank, place in enumerate(toy_axes.places(layout)):
            found = toy_axes.local(np.arange(count), tensor, plain, {"cp": 0} | place)
            first, last = placement.rows_of(count, layout, rank)
            assert found.tolist() == list(range(first, last))
            longest = max(longest, len(found))
        assert placement.most_rows(count, layout) == longest


def test_cells_are_equal_exactly_where_what_is_held_is() -> None:
    """Over all layouts: replicas and members of other layouts may hold the same, and then they have one cell."""
    seen: dict[str, set[bytes]] = {}
    for layout in LAYOUTS:
        for rank, place in enumerate(toy_axes.places(layout)):
            content = b"|".join(toy_axes.local(numbers(t), t, layout, place).tobytes() for t in TENSORS)
            seen.setdefault(placement.cell_of(layout, rank), set()).add(content)
    assert all(len(contents) == 1 for contents in seen.values())
    assert (
        placement.cell_of(Layout(2, 2), 1)
        == placement.cell_of(Layout(2, 2), 3)
        != placement.cell_of(Layout(2, 2), 0)
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_inverse_finds_every_cell_with_elements_of_a_box(layout: Layout) -> None:
    rng, degrees = random.Random(7), placement.degrees_of(layout)
    for tensor in TENSORS:
        for _ in range(8):
            start = tuple(rng.randrange(size) for size in tensor.shape)
            part = Slice(
                tensor.name,
                tensor.kind,
                start,
                tuple(rng.randint(a + 1, size) for a, size in zip(start, tensor.shape, strict=True)),
            )
            wanted = set(numbers(tensor)[box(part)].flat)
            expected = {
                placement.cell_of(layout, rank)
                for rank, place in enumerate(toy_axes.places(layout))
                if wanted & set(toy_axes.local(numbers(tensor), tensor, layout, place).flat)
            }
            found = dict(placement.cells_meeting(tensor, part, degrees))
            assert found == {cell: placement.held(tensor, cell) for cell in expected}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_element_is_written_once(layout: Layout) -> None:
    times = {tensor: np.zeros(tensor.shape, int) for tensor in TENSORS}
    for rank in range(layout.world):
        own = placement.cell_of(layout, rank)
        for tensor, each in placement.written_by(TENSORS, layout, rank):
            assert each in placement.held(tensor, own).boxes
            times[tensor][box(each.slice)] += 1
    assert all((count == 1).all() for count in times.values())


def world(layout: Layout, names: str) -> list[Holding]:
    return [
        Holding(WorkerId(f"{names}{rank}"), AT, placement.cell_of(layout, rank))
        for rank in range(layout.world)
    ]


def deliver(held: list[Holding], layout: Layout, members: list[WorkerId], todo: tuple[Move, ...]) -> None:
    """Fails unless each member ends with what numpy cuts for it, every element written once, from somebody
    who has it in one box.
    """
    places = toy_axes.places(layout)
    for tensor in TENSORS:
        whole = numbers(tensor)
        for rank, member in enumerate(members):
            times = np.zeros(tensor.shape, int)
            for move in todo:
                if (move.destination, move.slice.name, move.slice.kind) == (member, tensor.name, tensor.kind):
                    cells = [
                        each.cell for each in held if (each.worker, each.keeper) == (move.source, move.keeper)
                    ]
                    boxes = [b.slice for cell in cells for b in placement.held(tensor, cell).boxes]
                    assert any(b.intersect(move.slice) == move.slice for b in boxes), (
                        f"{move} is in no box of its source"
                    )
                    times[box(move.slice)] += 1
            has = set(toy_axes.local(whole, tensor, layout, places[rank]).flat)
            expected = np.isin(whole, list(has)).astype(int)
            assert (times == expected).all(), f"{member} does not get exactly its part of {tensor}"


@pytest.mark.parametrize("before", LAYOUTS, ids=str)
def test_moves_bring_every_cell_from_any_layout_to_any_other(before: Layout) -> None:
    """Survivors keep what they have; one member's own moves are those of all in which it takes part, in the
    same order.
    """
    for after in LAYOUTS:
        held = world(before, "w")
        members = [WorkerId(f"w{rank}" if rank % 2 == 0 else f"n{rank}") for rank in range(after.world)]
        todo = moves(TENSORS, held, after, members)
        deliver(held, after, members, todo)
        for who in {*members, *(each.worker for each in held)}:
            own = tuple(move for move in todo if who in (move.destination, move.source))
            assert moves(TENSORS, held, after, members, of=who) == own


def test_deliver_notices_a_move_left_out_made_twice_or_from_a_stranger() -> None:
    """Negative control."""
    before, after = Layout(1, 2, (("tp", 2),)), Layout(1, 1, (("tp", 3),))
    held, members = world(before, "w"), [WorkerId(f"n{rank}") for rank in range(3)]
    good = moves(TENSORS, held, after, members)
    deliver(held, after, members, good)
    for wrong in (good[1:], (*good, good[0]), (replace(good[0], source=WorkerId("x")), *good[1:])):
        with pytest.raises(AssertionError):
            deliver(held, after, members, wrong)


@pytest.mark.parametrize("seed", range(4))
def test_two_broken_worlds_cover_exactly_what_numpy_finds(seed: int) -> None:
    """Cells of two layouts, some of them lost: coverage by classes of all layouts or of these two, and what
    is left to the bucket, element by element.
    """
    rng = random.Random(seed)
    for _ in range(12):
        both = rng.sample(LAYOUTS, 2)
        held = [each for layout, name in zip(both, "ab", strict=True) for each in world(layout, name)]
        cuts = {cut for layout in both for cut in placement.degrees_of(layout)}
        held = [each for each in held if rng.random() < 0.7]
        masks = {tensor: np.zeros(tensor.shape, bool) for tensor in TENSORS}
        for tensor, each in itertools.product(TENSORS, held):
            for b in placement.held(tensor, each.cell).boxes:
                masks[tensor][box(b.slice)] = True
        truth = bool(held) and all(mask.all() for mask in masks.values())
        assert covered(held, placement.classes_of(TENSORS)) is truth
        assert covered(held, placement.classes_of(TENSORS, cuts)) is truth
        layout = rng.choice(LAYOUTS)
        own = placement.cell_of(layout, rng.randrange(layout.world))
        for tensor in TENSORS:
            gaps = np.zeros(tensor.shape, int)
            for part in missing([tensor], held, own):
                gaps[box(part)] += 1
            mine = np.zeros(tensor.shape, int)
            for b in placement.held(tensor, own).boxes:
                mine[box(b.slice)] = 1
            assert (gaps == mine * ~masks[tensor]).all()


def test_classes_are_few_and_a_class_stands_for_all_of_it() -> None:
    """The product's own axes look only at the number of rows; an axis that cuts by name makes more classes."""
    many = [
        Tensor(f"t{n}", kind, "F32", (n % 3 + 4, 8))
        for n in range(30)
        for kind in ("parameter", "moment.exp_avg")
    ]
    assert len(placement.classes_of(many)) == 60
    for name in toy_axes.TOYS:
        del AXES[name]
    try:
        assert len(placement.classes_of(many)) == 3 and placement.same_classes(
            many, placement.classes_of(many)
        )
        assert not placement.same_classes(many, placement.classes_of(many[:2]))
    finally:
        AXES.update(toy_axes.TOYS)


def test_n3_a_state_that_is_held_whole_is_known_by_its_cells() -> None:
    """N3: 1,024 distinct cells of 8 stages, 16 shards and 8 tensor ranks, and a class for each block.  Boxes
    are looked at only of a cell that is absent, so most classes never meet most cells.  Counted in calls.
    """
    cells = placement.distinct_cells(Layout(1, 16, (("pp", 8), ("tp", 8))))
    others = placement.distinct_cells(Layout(1, 15, (("pp", 8), ("tp", 8))))
    whole, fewer = (
        [Holding(WorkerId(f"w{number}"), AT, cell) for number, cell in enumerate(each)]
        for each in (cells, others)
    )
    classes = [Tensor(f"t{n}", "parameter", "F32", (64, 64), (n % 2, 8), (n, 80)) for n in range(80)]
    assert len(placement.classes_of(classes)) == 80 and len(cells) == 1024
    assert covered(whole, classes) and calls(lambda: covered(whole, classes)) < 10 * len(cells)
    for held, there in ((whole[1:], False), (whole[:-1], False), (whole[1:] + fewer[:-1], True)):
        assert covered(held, classes) is there
        assert calls(lambda held=held: covered(held, classes)) < len(classes) * len(cells)


def test_blocks_of_one_stage_are_of_one_class_at_its_degree() -> None:
    """Equal blocks make as many classes as a degree has stages, or as several degrees tell stages apart."""
    blocks = [Tensor(f"t{n}", "parameter", "F32", (64, 64), (0, 8), (n, 80)) for n in range(80)]
    for degrees, count in (((1,), 1), ((8,), 8), ((8, 4, 2), 8), ((8, 3), 10), ((None,), 80)):
        cuts = [("pp", degree) for degree in degrees]
        assert len(placement.classes_of(blocks, cuts)) == count, degrees
        assert len(placement.classes_of(blocks, [*cuts, ("dp_shard", None), ("tp", 8)])) == count


def test_many_blocks_cost_no_more_than_one_where_stages_do_not_cut() -> None:
    """Half of a world of shards is lost, and another layout has it: the blocks are cut alike, so one class is
    looked at.  Counted in calls, in place of one for each class and cell that is absent.
    """
    half = [
        Holding(WorkerId("w"), AT, cell)
        for layout, part in ((Layout(1, 64), slice(None, 40)), (Layout(1, 60), slice(30, None)))
        for cell in list(placement.distinct_cells(layout))[part]
    ]
    classes = [Tensor(f"t{n}", "parameter", "F32", (640, 64), (n % 2, 8), (n, 80)) for n in range(80)]
    assert covered(half, classes)
    assert calls(lambda: covered(half, classes)) < 2 * calls(lambda: covered(half, classes[:1])) + 20 * 80


def random_tensors(rng: random.Random, *, columns: bool = False) -> list[Tensor]:
    """Returns tensors that often agree in a dimension, or have none of some.  With ``columns`` each is split
    along dimension 1, if it has one; otherwise some are split somewhere.
    """
    shapes = [tuple(rng.choice((0, 1, 4, 6)) for _ in range(rng.randint(1, 3))) for _ in range(8)]
    found = []
    for n, shape in enumerate(shapes):
        dim = rng.randrange(len(shape))
        unit = rng.choice((1, 2)) if shape[dim] % 2 == 0 else 1
        fused = (shape[dim] // 2,) * 2 if shape[dim] % 4 == 0 and rng.random() < 0.5 else ()
        split, depth = rng.choice(((), (dim, unit, *fused))), rng.choice(((), (rng.randrange(2), 2)))
        kind = rng.choice(("parameter", "moment.exp_avg", "buffer"))
        if columns:
            split, depth = (1, 1) if len(shape) > 1 else (), ()
        found.append(Tensor(f"t{n}", kind, "F32", shape, split, depth))
    return found


def is_whole(cells: Iterable[Cell], tensor: Tensor) -> bool:
    """Returns whether members in ``cells`` hold every element of ``tensor`` between them."""
    mask = np.zeros(tensor.shape, bool)
    for cell in cells:
        for each in placement.held(tensor, cell).boxes:
            mask[box(each.slice)] = True
    return bool(mask.all())


def classes_that_lie(rng: random.Random, layout: Layout, *, columns: bool = False) -> list[str]:
    """Returns where a class does not stand for all its tensors: in coverage by some of the cells, or in what
    the members write.
    """
    tensors, found = random_tensors(rng, columns=columns), []
    cells = [cell for cell in placement.distinct_cells(layout) if rng.random() < 0.6] or [
        placement.cell_of(layout, 0)
    ]
    held = [Holding(WorkerId("w"), AT, cell) for cell in cells]
    truth = all(is_whole(cells, tensor) for tensor in tensors)
    for cuts in (None, placement.degrees_of(layout)):
        if covered(held, placement.classes_of(tensors, cuts)) != truth:
            found.append(f"coverage of {tensors} by {cells}, with classes of {cuts}")
    written = [
        (tensor, each.slice)
        for rank in range(layout.world)
        for tensor, each in placement.written_by(tensors, layout, rank)
    ]
    for tensor in tensors:
        times = np.zeros(tensor.shape, int)
        for other, part in written:
            if other == tensor:
                times[box(part)] += 1
        if not (times == 1).all():
            found.append(f"{tensor} is not written once by {layout}")
    return found


@pytest.fixture
def own_axes(_toys: None) -> Iterator[None]:
    """Takes the toys out of the table."""
    for name in toy_axes.TOYS:
        del AXES[name]
    yield
    AXES.update(toy_axes.TOYS)


@pytest.mark.usefixtures("own_axes")
@pytest.mark.parametrize(
    "layout", [layout for layout in LAYOUTS if not toy_axes.TOYS.keys() & dict(layout.more)], ids=str
)
def test_a_class_stands_for_its_tensors_also_if_some_have_no_elements(layout: Layout) -> None:
    assert [lie for seed in range(60) for lie in classes_that_lie(random.Random(seed), layout)] == []


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_class_along_the_toys_stands_for_its_tensors_too(layout: Layout) -> None:
    assert [lie for seed in range(60) for lie in classes_that_lie(random.Random(seed), layout)] == []


@pytest.mark.usefixtures("own_axes")
@pytest.mark.parametrize(
    ("axis", "key", "right"),
    [
        ("tp", AXES["tp"].key, True),
        ("tp", lambda tensor, degree: (is_cut(tensor), tensor.split), False),
        ("pp", AXES["pp"].key, True),
        ("pp", lambda tensor, degree: stage_of(tensor, 1), False),
    ],
    ids=["with-what-it-cuts", "without", "with-the-stage", "of-another-degree"],
)
def test_the_key_of_an_axis_needs_the_dimension_that_it_cuts(
    axis: str, key: Callable[[Tensor, int | None], Hashable], right: bool
) -> None:
    """The part of the shape that the docstring of ``Axis.key`` asks for is enough, and less is not: every
    second key is a control.
    """
    AXES[axis], before = replace(AXES[axis], key=key), AXES[axis]
    layout = Layout(1, 2, ((axis, 4 if axis == "tp" else 2),))
    try:
        draws = map(random.Random, range(200))
        lies = [lie for rng in draws for lie in classes_that_lie(rng, layout, columns=axis == "tp")]
    finally:
        AXES[axis] = before
    assert (lies == []) is right


def test_model_groups_data_ranks_and_who_reports() -> None:
    """Members along axes that are no data axes run one microbatch together; the last stage knows the losses."""
    layout = Layout(1, 2, (("pp", 2),))
    assert [placement.data_rank(layout, rank) for rank in range(4)] == [0, 1, 0, 1]
    assert placement.data_ranks(layout) == 2 and placement.reporters(layout) == (2, 3)
    assert placement.data_groups(layout) == ((0, 1), (2, 3)) and placement.model_group(layout, 1) == (1, 3)
    assert placement.data_ranks(Layout(2, 2)) == 4 and placement.reporters(Layout(2, 2)) == (0, 1, 2, 3)
    assert placement.reporters(Layout(1, 1, (("tp", 4),))) == (0,)


def test_a_cell_that_is_too_long_for_a_header_is_refused() -> None:
    layout = Layout(1, 100_000, tuple((name, 100_000) for name in ("pp", "tp", "opt")))
    with pytest.raises(ValueError, match=r"takes \d+ bytes and may take 64"):
        placement.cell_of(layout, layout.world - 1)
