"""The norm of the whole gradient, from its shards, is close to torch's and has the same bits in every layout.
A7, first half.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from elastic.engine import norm
from elastic.engine.norm import squared_norm, squared_norms, tree_sum
from elastic.engine.world import World
from elastic.plan.layout import Layout
from elastic.plan.placement import cell_of, held
from elastic.state.shard import DTYPES
from storage.slices import Tensor
from tests.support.cells import shard_interval
from tests.support.live import Live
from tests.support.ranks import Ranks
from tests.support.toy_axes import LAYOUTS as AXES_LAYOUTS
from tests.support.toy_axes import TENSORS, registered

LAYOUTS = [Layout(1, 1), Layout(1, 2), Layout(1, 3), Layout(2, 2), Layout(1, 4)]
SHAPES = [
    (29, 32),
    (32, 32),
    (7, 5, 3),
    (1, 19),
    (32, 5),
    (0, 3),
    (19,),
    (7,),
    (2,),
    (3, 1),
    (64, 96),
    (29, 4),
]
"""Fewer rows than shards, one row, none, no second dimension, rows that no degree divides, several tensors
with equally many rows, and others between them that have as many once they are padded."""


def gradient() -> list[torch.Tensor]:
    """Returns the whole gradient; its magnitudes differ, so that the order of a sum shows."""
    draw = torch.Generator().manual_seed(7)
    return [
        torch.randn(shape, generator=draw) * 10.0 ** ((index - 4) / 4) for index, shape in enumerate(SHAPES)
    ]


def norm_of(grads: list[torch.Tensor], counts: list[int], world: World) -> float:
    """Returns the product's norm of these shards of tensors, which have so many rows."""
    tensors = [
        Tensor(str(number), "parameter", "F32", (count, *grad.shape[1:]))
        for number, (grad, count) in enumerate(zip(grads, counts, strict=True))
    ]
    named = {each.name: grad for each, grad in zip(tensors, grads, strict=True)}
    return squared_norm(named, tensors, world).item()


def shards(world: World) -> list[torch.Tensor]:
    count, index = world.layout.dp_shard, world.layout.coordinates(world.rank)["dp_shard"]
    return [whole[slice(*shard_interval(len(whole), count, index))] for whole in gradient()]


def tree_norm(world: World) -> float:
    return norm_of(shards(world), [shape[0] for shape in SHAPES], world)


def library_norm(world: World) -> float:
    """Computes the norm in the obvious way, whose bits depend on the layout."""
    total = torch.stack([shard.double().square().sum() for shard in shards(world)]).sum()
    dist.all_reduce(total, group=world.shard_group)
    return total.item()


def small_turns(world: World) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm, "TURN_ROWS", 33)
        patch.setattr(norm, "SQUARED", 40)
        return tree_norm(world)


def computed(world: World, how: str) -> float:
    return {"tree": tree_norm, "library": library_norm, "small turns": small_turns}[how](world)


@pytest.fixture(scope="module")
def norms(ranks: Ranks) -> dict[str, list[list[float]]]:
    """The norms that all members of all layouts compute, in three ways."""
    ways = ("tree", "library", "small turns")
    layouts = [ranks.run_each(layout, computed, [(how,) for how in ways]) for layout in LAYOUTS]
    return {how: [found[number] for found in layouts] for number, how in enumerate(ways)}


def test_the_norm_of_shards_is_that_of_the_whole_gradient(norms: dict[str, list[list[float]]]) -> None:
    """A7: 1e-6 relative to torch's norm of the unsharded gradient; bitwise the same in 1×1, 1×2, 1×3, 2×2 and
    1×4, on every member.
    """
    found = norms["tree"]
    judge = torch.nn.utils.get_total_norm([whole.double() for whole in gradient()]).item()
    assert found[0][0] ** 0.5 == pytest.approx(judge, rel=1e-6)
    assert {value.hex() for values in found for value in values} == {found[0][0].hex()}


def test_the_library_sum_of_shards_depends_on_the_layout(norms: dict[str, list[list[float]]]) -> None:
    """Negative control: as near to torch's norm, but not the same bits."""
    found = [value for values in norms["library"] for value in values]
    assert found == pytest.approx([found[0]] * len(found), rel=1e-12)
    assert len(set(found)) > 1


def padded_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """Computes the norm in the simple way: pads the rows of each tensor to the number of the longest, and
    adds them all at once.
    """
    longest = max(map(len, grads))
    sums = [
        tree_sum(grad.square().reshape(len(grad), -1)).double() if grad.numel() else torch.zeros(0).double()
        for grad in grads
    ]
    return tree_sum(
        tree_sum(torch.stack([torch.nn.functional.pad(each, (0, longest - len(each))) for each in sums]))
    )


def test_tensors_with_other_numbers_of_rows_do_not_change_the_bits() -> None:
    """Tensors with equally many rows need not follow one another.  That other bits can come out is the
    control: they do if the tensors are added in the order of their numbers of rows.
    """
    draw, world, moved = torch.Generator().manual_seed(7), World.alone(torch.device("cpu")), 0
    for _ in range(20):
        counts = torch.randint(0, 9, (40,), generator=draw).tolist()
        # so wide that float64 rounds
        grads = [10.0 ** (8 * torch.rand(count, 3, generator=draw) - 4) for count in counts]
        found = norm_of(grads, counts, world)
        assert found.hex() == padded_norm(grads).item().hex()
        moved += found != padded_norm(sorted(grads, key=len)).item()
    world.close()
    assert moved, "the order shows in none"


EXPERTS = [*((24, 8) for _ in range(300)), (64, 8), *((8, 24) for _ in range(150))]
"""Shapes as in a mixture of experts: many tensors of few shapes.  The largest has 64 rows, and all have
8,464.
"""


def norm_of_experts(turn_rows: int, squared: int) -> tuple[float, Live]:
    """Returns the squared norm of a gradient of ``EXPERTS`` with these limits of the product, and what it
    took.
    """
    draw, world = torch.Generator().manual_seed(7), World.alone(torch.device("cpu"))
    grads = [
        torch.randn(shape, generator=draw) * 10.0 ** ((index % 9 - 4) / 4)
        for index, shape in enumerate(EXPERTS)
    ]
    with pytest.MonkeyPatch.context() as patch, Live() as live:
        patch.setattr(norm, "TURN_ROWS", turn_rows)
        patch.setattr(norm, "SQUARED", squared)
        found = norm_of(grads, [len(grad) for grad in grads], world)
    world.close()
    assert found.hex() == padded_norm(grads).item().hex()
    return found, live


def test_the_norm_takes_memory_for_the_rows_of_the_largest_tensor() -> None:
    """N9: that all take part at once, as they did, is the control."""
    found, live = norm_of_experts(turn_rows=64, squared=8 * 64)
    same, all_at_once = norm_of_experts(turn_rows=10**6, squared=8 * 64)
    # one float64 a row; a total for each tensor, and all of them once more
    row_bytes, scalars = 8, 2 * 8 * len(EXPERTS)
    assert live.peak_bytes < 8 * 64 * row_bytes + 8 * 64 * 4 * 3 + scalars
    assert all_at_once.peak_bytes > 2 * 8_464 * row_bytes > live.peak_bytes
    assert found == same


def test_tensors_of_equal_shape_are_added_together() -> None:
    """Each operation launches a kernel, and a tensor alone takes about a dozen.  The control squares one at a
    time.
    """
    _, together = norm_of_experts(turn_rows=10**6, squared=10**6)
    _, alone = norm_of_experts(turn_rows=10**6, squared=24 * 8)
    assert together.operations < 100 < 4 * len(EXPERTS) < alone.operations


def test_a_large_tensor_is_squared_in_portions_of_its_rows() -> None:
    """Control: at once, it takes twice its own memory."""

    def peak(squared: int) -> tuple[float, int]:
        grad, world = (
            torch.randn(1_000, 16, generator=torch.Generator().manual_seed(7)),
            World.alone(torch.device("cpu")),
        )
        with pytest.MonkeyPatch.context() as patch, Live() as live:
            patch.setattr(norm, "SQUARED", squared)
            found = norm_of([grad], [1_000], world)
        world.close()
        return found, live.peak_bytes

    (found, portions), (same, at_once) = peak(16 * 50), peak(16 * 1_000)
    assert found == same
    assert portions < 16 * 50 * 4 * 2 + 1_000 * 8 * 4 < 1_000 * 16 * 4 < at_once


def test_turns_and_portions_change_no_bit_in_any_layout(norms: dict[str, list[list[float]]]) -> None:
    """Each tensor of these has a turn of its own, or shares one, and most are squared in portions."""
    assert {value.hex() for values in norms["small turns"] for value in values} == {norms["tree"][0][0].hex()}


# ---- other axes than those of data

MORE = (
    *(tensor for tensor in TENSORS if tensor.kind == "parameter"),
    Tensor("merged", "parameter", "BF16", (9, 40), (1, 2, 16, 24), (0, 2)),
    Tensor("second cube", "parameter", "F32", (3, 5, 4), (1, 1), (1, 2)),
    Tensor("second fused", "parameter", "F32", (12, 6), (0, 2, 6, 6), (1, 2)),
    Tensor("expert", "parameter", "F32", (13, 6), (), (1, 2)),
    Tensor("scale", "parameter", "F32", (1,)),
)
"""Tensors that tensor parallelism cuts along rows, inside of rows, or not at all, and tensors of one stage or
of all; some are cut alike.
"""
TENSOR_PARALLEL = Layout(1, 2, (("tp", 2),))


def of_axes(number: int) -> torch.Tensor:
    """Returns the whole gradient of one of ``MORE``."""
    tensor, draw = MORE[number], torch.Generator().manual_seed(number)
    values = torch.randn(tensor.shape, generator=draw) * 10.0 ** torch.randn(tensor.shape, generator=draw)
    return values.to(DTYPES[tensor.dtype])


def own_part(world: World, number: int) -> torch.Tensor:
    """Returns what a member holds of the gradient of one of ``MORE``."""
    whole, part = of_axes(number), held(MORE[number], cell_of(world.layout, world.rank))
    memory = whole.new_empty(part.shape)
    for box in part.boxes:
        size = zip(box.at, box.slice.shape, strict=True)
        memory[tuple(slice(at, at + length) for at, length in size)] = whole[
            tuple(slice(a, b) for a, b in zip(box.slice.start, box.slice.stop, strict=True))
        ]
    return memory


def squares_of_axes(world: World, patches: dict[str, Any]) -> list[str]:
    """Returns the squared norm of each of ``MORE`` with these values in place of the product's, and the norm
    of all, in hexadecimal.  No member has anything of a tensor of another stage.
    """
    stage = range(world.size) if "pp" not in dict(world.layout.more) else world.layout.stage_ranks(world.rank)
    here = [
        number
        for number, tensor in enumerate(MORE)
        if any(held(tensor, cell_of(world.layout, rank)).boxes for rank in stage)
    ]
    grads = {MORE[number].name: own_part(world, number) for number in here}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in patches.items():
            patch.setattr(norm, name, value)
        squares = squared_norms(grads, MORE, world)
    return [float(each).hex() for each in (*squares, tree_sum(squares))]


def left_out(squares: torch.Tensor) -> torch.Tensor:
    """Returns the squared norms of one stage alone."""
    return squares


def by_the_library(world: World) -> list[float]:
    """Adds the squares of all parts that a stage holds, whoever else has them too."""
    total = torch.stack([own_part(world, number).double().square().sum() for number in range(len(MORE))])
    dist.all_reduce(total, group=world.stage_group)
    return total.tolist()


@pytest.fixture(scope="module")
def judged() -> list[str]:
    """The squared norm of each of ``MORE``, and of all, by trees over whole tensors."""
    found = [
        tree_sum(tree_sum(each.float().square().reshape(len(each), -1)).double())
        for each in map(of_axes, range(len(MORE)))
    ]
    return [float(each).hex() for each in (*found, tree_sum(torch.stack(found)))]


@pytest.mark.parametrize("turns", [{}, {"TURN_ROWS": 33, "SQUARED": 40}], ids=["", "small turns"])
def test_every_tensor_counts_once_along_every_axis(
    ranks: Ranks, judged: list[str], turns: dict[str, int]
) -> None:
    """A7: the same bits for each tensor, on every member, whichever axes cut the state."""
    with registered():
        for layout in AXES_LAYOUTS:
            for found in ranks.run(layout, squares_of_axes, turns):
                assert found == judged, str(layout)


def test_a_stage_that_is_left_out_shows(ranks: Ranks, judged: list[str]) -> None:
    """Negative control: without the exchange between stages each member lacks the tensors of the others."""
    for found in ranks.run(Layout(1, 2, (("pp", 2),)), squares_of_axes, {"_of_all_stages": left_out}):
        wrong = {MORE[number].name for number in range(len(MORE)) if found[number] != judged[number]}
        assert found[-1] != judged[-1]
        assert wrong in (
            {each.name for each in MORE if each.depth == (0, 2)},
            {each.name for each in MORE if each.depth == (1, 2)},
        )


def test_the_library_sum_counts_a_tensor_that_is_not_cut_once_for_each_member(
    ranks: Ranks, judged: list[str]
) -> None:
    """Negative control: torchtitan #596 and its kind, and other bits for tensors that are cut."""
    right = [float.fromhex(each) for each in judged[:-1]]
    for found in ranks.run(TENSOR_PARALLEL, by_the_library):
        times = [2 if not tensor.split else 1 for tensor in MORE]
        assert found == pytest.approx([a * b for a, b in zip(right, times, strict=True)], rel=1e-6)
        assert sum(a != b for a, b in zip(found, right, strict=True)) > times.count(2)


def test_a_part_of_a_row_is_no_subtree() -> None:
    """Negative control: sums of the parts of rows, added, have other bits, so members exchange elements."""
    whole = of_axes([each.name for each in MORE].index("merged")).float().square()
    halves = tree_sum(whole[:, :20]) + tree_sum(whole[:, 20:])
    assert torch.allclose(halves, tree_sum(whole)) and not torch.equal(halves, tree_sum(whole))


def dumb_tree(values: list[float]) -> float:
    """Adds one half of ``values`` to the other until one is left; their number is a power of two."""
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return dumb_tree([a + b for a, b in zip(values[:half], values[half:], strict=True)])


@given(st.lists(st.floats(-1e6, 1e6), max_size=40))
def test_the_tree_is_what_it_says(values: list[float]) -> None:
    """The tree has the bits of the recursion in plain Python."""
    size = 1 << max(len(values) - 1, 0).bit_length()
    found = tree_sum(torch.tensor(values, dtype=torch.float64))
    assert float(found).hex() == dumb_tree(values + [0.0] * (size - len(values))).hex()


@given(st.integers(1, 9), st.integers(1, 300), st.integers(0, 9))
def test_a_row_sums_alike_alone_and_among_others(rows: int, columns: int, seed: int) -> None:
    """The sum of a row has the same bits however many rows there are; a library's reduction does not promise
    that.
    """
    values = torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, columns)))
    together = tree_sum(values)
    assert all(torch.equal(tree_sum(values[row : row + 1].clone())[0], together[row]) for row in range(rows))
