"""Coverage and moves are compared with arrays, element by element, between any two worlds."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.ids import Cell, NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.plan.placement import cell_of
from elastic.plan.transfer import Holding, Move, covered, missing, moves, newest_covered
from storage.slices import Slice, Tensor
from tests.support.calls import calls
from tests.support.cells import cell, classes, shard_slice

pytestmark = pytest.mark.fast

WHOLE = Cell("")
V1, V2 = Version(4, 1), Version(5, 2)
WORKERS = [WorkerId(f"w{n}") for n in range(1, 8)]
KINDS = ("parameter", "moment.exp_avg", "buffer", "scalar")

shards = st.integers(1, 5).flatmap(lambda count: st.tuples(st.just(count), st.integers(0, count - 1)))
layouts = st.builds(Layout, st.integers(1, 3), st.integers(1, 4))


def holdings(versions: Sequence[Version] = (V1,)) -> st.SearchStrategy[list[Holding]]:
    one = st.builds(
        lambda worker, version, shard: Holding(worker, version, cell(*shard)),
        st.sampled_from(WORKERS),
        st.sampled_from(versions),
        shards,
    )
    return st.lists(one, max_size=7, unique=True)


@st.composite
def worlds(draw: st.DrawFn) -> list[Holding]:
    """Draws a complete world, and whatever else some workers hold."""
    layout = draw(layouts.filter(lambda each: each.world <= len(WORKERS)))
    members = draw(st.permutations(WORKERS))[: layout.world]
    complete = [
        Holding(member, V1, cell(layout.dp_shard, layout.coordinates(rank)["dp_shard"]))
        for rank, member in enumerate(members)
    ]
    return [*complete, *(each for each in draw(holdings()) if each not in complete)]


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    found = []
    for number in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(KINDS))
        shape = () if kind == "scalar" else tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        found.append(Tensor(f"t{number}", kind, draw(st.sampled_from(("F32", "BF16", "I64", "BOOL"))), shape))
    return found


def box(part: Slice) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(part.start, part.stop, strict=True))


def parts(tensor: Tensor, cell: Cell) -> list[Slice]:
    """Returns the slices of a cell by the chunk rule, read from the cell's text and not from the product's
    placement.
    """
    index, _, count = cell.removeprefix("dp_shard ").partition("/") if cell else ("0", "", "1")
    return [shard_slice(tensor, int(count), int(index))]


def held_mask(tensor: Tensor, held: Iterable[Holding]) -> np.ndarray:
    """Returns a bool array [*shape] that is true for each element that somebody holds."""
    mask = np.zeros(tensor.shape, bool)
    for holding in held:
        for part in parts(tensor, holding.cell):
            mask[box(part)] = True
    return mask


# ---- coverage


@given(holdings(), st.lists(st.integers(0, 9), max_size=3))
def test_covered_equals_looking_at_every_row(held: list[Holding], rows: list[int]) -> None:
    everything = [held_mask(Tensor("t", "parameter", "F32", (count,)), held).all() for count in rows]
    assert covered(held, classes(rows)) == (bool(held) and all(everything))


def test_shards_of_two_layouts_cover_together() -> None:
    """A world that broke while it healed from 1×3 to 1×2: neither layout is complete, both together are."""
    old = [Holding(WORKERS[0], V1, cell(3, 0)), Holding(WORKERS[1], V1, cell(3, 1))]
    new = [Holding(WORKERS[1], V1, cell(2, 1))]
    assert not covered(old, classes([6])) and not covered(new, classes([6]))
    assert covered(old + new, classes([6]))


def test_coverage_depends_on_the_number_of_rows() -> None:
    """The chunk rule leaves late shards empty: shard 3 of 4 of a tensor of 6 rows holds nothing, of 8 rows it
    holds two.
    """
    first_three = [Holding(worker, V1, cell(4, index)) for index, worker in enumerate(WORKERS[:3])]
    assert covered(first_three, classes([6])) and not covered(first_three, classes([6, 8]))


@given(holdings((V1, V2, Version(5, 3), Version(6, 3))), st.lists(st.integers(0, 9), max_size=3))
def test_newest_covered_equals_trying_all_versions(held: list[Holding], rows: list[int]) -> None:
    complete = [
        version
        for version in {each.version for each in held}
        if covered([h for h in held if h.version == version], classes(rows))
    ]
    assert newest_covered(iter(held), iter(classes(rows))) == max(complete, default=None)


def test_versions_are_never_mixed() -> None:
    """Half of step 4 and half of step 5 are no state: neither covered, nor a source."""
    halves = [Holding(WORKERS[0], V1, cell(2, 0)), Holding(WORKERS[1], V2, cell(2, 1))]
    assert newest_covered(halves, classes([8])) is None
    assert newest_covered([*halves, Holding(WORKERS[2], V1, cell(2, 1))], classes([8])) == V1
    tensor = Tensor("t", "parameter", "F32", (8,))
    for mixing in (
        lambda: covered(halves, classes([8])),
        lambda: moves([tensor], halves, Layout(), WORKERS[:1]),
        lambda: missing([tensor], halves, WHOLE),
    ):
        with pytest.raises(
            ValueError,
            match=(
                r"must have one version, but there are step 4 of generation 1, "
                r"step 5 of generation 2"
            ),
        ):
            mixing()


@given(tensors(), holdings(), shards)
def test_missing_is_exactly_what_nobody_holds(
    state: list[Tensor], held: list[Holding], shard: tuple[int, int]
) -> None:
    wanted = [shard_slice(tensor, *shard) for tensor in state]
    gaps = missing(state, held, cell(*shard))
    for tensor, part in zip(state, wanted, strict=True):
        counts = np.zeros(tensor.shape, int)
        for gap in gaps:
            if (gap.name, gap.kind) == (tensor.name, tensor.kind):
                counts[box(gap)] += 1
        expected = np.zeros(tensor.shape, int)
        expected[box(part)] = ~held_mask(tensor, held)[box(part)]
        assert (counts == expected).all()


# ---- moves


def deliver(
    state: Sequence[Tensor],
    held: Sequence[Holding],
    layout: Layout,
    members: Sequence[WorkerId],
    todo: Iterable[Move],
) -> None:
    """Carries out the moves on arrays; fails unless each member ends with its shard of the whole, every
    element written once.
    """
    whole = {(t.kind, t.name): np.arange(1, np.prod(t.shape, dtype=int) + 1).reshape(t.shape) for t in state}
    written = {member: {key: np.zeros_like(value) for key, value in whole.items()} for member in members}
    times = {member: {key: np.zeros_like(value) for key, value in whole.items()} for member in members}
    by_key = {(t.kind, t.name): t for t in state}
    for move in todo:
        key = move.slice.kind, move.slice.name
        own = [part for h in held if h.worker == move.source for part in parts(by_key[key], h.cell)]
        assert any(shard.intersect(move.slice) == move.slice for shard in own), (
            f"{move} is not in one shard of its source"
        )
        written[move.destination][key][box(move.slice)] = whole[key][box(move.slice)]
        times[move.destination][key][box(move.slice)] += 1
    for rank, member in enumerate(members):
        for key, tensor in by_key.items():
            expected = np.zeros_like(whole[key])
            inside = box(shard_slice(tensor, layout.dp_shard, layout.coordinates(rank)["dp_shard"]))
            expected[inside] = whole[key][inside]
            assert (written[member][key] == expected).all(), f"{member} has not its shard of {tensor}"
            assert (times[member][key] == (expected > 0)).all(), f"{member} receives parts of {tensor} twice"


@given(tensors(), st.one_of(holdings(), worlds()), layouts, st.randoms(use_true_random=False))
def test_moves_bring_every_shard_between_any_two_worlds(
    state: list[Tensor], held: list[Holding], layout: Layout, rng: random.Random
) -> None:
    """R17, in arrays: replicas, shards and mixtures of both to any layout; newcomers, survivors, holders that
    are no members.
    """
    members = [*WORKERS, *(WorkerId(f"new{n}") for n in range(layout.world))]
    rng.shuffle(members)
    members = members[: layout.world]
    if any(missing(state, held, cell(layout.dp_shard, index)) for index in range(layout.dp_shard)):
        with pytest.raises(ValueError, match=r"needs Slice.*which nobody holds"):
            moves(state, held, layout, members)
        return
    todo = moves(state, held, layout, members)
    deliver(state, held, layout, members, todo)
    for move in todo:
        tensor = next(t for t in state if (t.name, t.kind) == (move.slice.name, move.slice.kind))
        assert (
            move.source == move.destination
            or not held_mask(tensor, [h for h in held if h.worker == move.destination])[box(move.slice)].any()
        )
    assert todo == moves(rng.sample(state, len(state)), rng.sample(held, len(held)), layout, members)


STATE = [
    Tensor(f"layer{n}", kind, "F32", (10 + n, 4))
    for n in range(12)
    for kind in ("parameter", "moment.exp_avg")
]


def world(layout: Layout, workers: Sequence[WorkerId]) -> list[Holding]:
    return [
        Holding(worker, V1, cell(layout.dp_shard, layout.coordinates(rank)["dp_shard"]))
        for rank, worker in enumerate(workers)
    ]


def test_deliver_notices_each_kind_of_wrong_move() -> None:
    """Negative control: the check above fails for a move left out, made twice, cut short, or from a worker
    that does not hold it.
    """
    held, layout, members = world(Layout(1, 3), WORKERS[:3]), Layout(2, 2), WORKERS[1:5]
    with_third = [*held, Holding(WORKERS[3], V1, cell(3, 0))]
    good = moves(STATE, with_third, layout, members)
    deliver(STATE, with_third, layout, members, good)
    first = good[0]
    shorter = replace(
        first, slice=replace(first.slice, stop=(first.slice.stop[0] - 1, *first.slice.stop[1:]))
    )
    stranger = replace(first, source=WORKERS[6])
    for wrong in (good[1:], (*good, first), (shorter, *good[1:]), (stranger, *good[1:])):
        with pytest.raises(AssertionError, match=r"has not its shard|twice|not in one shard"):
            deliver(STATE, with_third, layout, members, wrong)


def test_who_holds_a_part_takes_it_from_itself() -> None:
    """Layout 2×1 becomes 3×1: the survivors move nothing between processes; the newcomer takes its state from
    both of them.
    """
    todo = moves(STATE, world(Layout(2, 1), WORKERS[:2]), Layout(3, 1), WORKERS[:3])
    sources = defaultdict(set)
    for move in todo:
        sources[move.destination].add(move.source)
    assert sources == {WORKERS[0]: {WORKERS[0]}, WORKERS[1]: {WORKERS[1]}, WORKERS[2]: set(WORKERS[:2])}


@given(st.integers(2, 6), st.integers(1, 4), st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_replicas_send_equally_much(replicas: int, newcomers: int, rows: list[int]) -> None:
    """The bytes that any two holders of the same parts send to one newcomer differ by no more than the
    largest part.

    Nobody keeps running totals over the newcomers, so that each can work out its own moves alone.
    """
    state = [Tensor(f"t{n}", "parameter", "BF16", (count, 3)) for n, count in enumerate(rows)]
    holders = [WorkerId(f"h{n}") for n in range(replicas)]
    members = [WorkerId(f"m{n}") for n in range(newcomers)]
    todo = moves(state, world(Layout(replicas, 1), holders), Layout(newcomers, 1), members)
    for newcomer in members:
        sent = Counter(dict.fromkeys(holders, 0))
        for move in todo:
            sent[move.source] += move.slice.count * 2 * (move.destination == newcomer)
        assert sum(sent.values()) == sum(rows) * 6
        assert max(sent.values()) - min(sent.values()) <= max(rows) * 6


def test_scalars_and_buffers_are_whole_everywhere() -> None:
    state = [Tensor("step", "scalar", "F32", ()), Tensor("table", "buffer", "F32", (5, 2))]
    held = [Holding(WORKERS[0], V1, cell(4, 3))]
    assert covered(held, state)
    todo = moves(state, held, Layout(1, 2), WORKERS[:2])
    assert {(move.slice, move.destination) for move in todo} == {
        (t.whole(), member) for t in state for member in WORKERS[:2]
    }


def test_nobody_holds_anything() -> None:
    assert not covered([], ()) and newest_covered([], ()) is None
    assert missing(STATE[:1], [], WHOLE) == (STATE[0].whole(),)
    with pytest.raises(ValueError, match=r"w1 needs .*layer11.*nobody holds"):
        moves(STATE, [], Layout(), WORKERS[:1])


# ---- copies in keepers' memory

NODES = [NodeId("a"), NodeId("b"), NodeId("c")]
TENSOR = Tensor("t", "parameter", "F32", (12, 4))


def copy_of(worker: WorkerId, keeper: NodeId, count: int = 3, index: int = 0) -> Holding:
    return Holding(worker, V1, cell(count, index), keeper)


def sources(
    held: list[Holding], layout: Layout, members: list[WorkerId], nodes: list[NodeId]
) -> list[tuple[str, str]]:
    """Returns (owner of the shard, keeper) of each move, in order."""
    return [(move.source, move.keeper) for move in moves([TENSOR], held, layout, members, nodes)]


def test_what_is_nearest_is_taken() -> None:
    """Own live memory comes first, then a copy on the own node, then a live member, then another node's
    keeper.
    """
    w1, w2, w3 = WORKERS[:3]
    live, near, far = Holding(w2, V1, cell(1, 0)), copy_of(w3, NODES[0], 1), copy_of(w3, NODES[2], 1)
    own = Holding(w1, V1, cell(1, 0))
    for held, expected in [
        ([own, near, live, far], (w1, "")),
        ([near, live, far], (w3, "a")),
        ([live, far], (w2, "")),
        ([far], (w3, "c")),
    ]:
        assert sources(held, Layout(1, 1), [w1], NODES[:1]) == [expected]


def test_a_copy_of_the_own_shard_is_no_live_memory() -> None:
    """It is read from the keeper, and counts as sent over its link."""
    w1 = WORKERS[0]
    [move] = moves([TENSOR], [copy_of(w1, NODES[1], 1)], Layout(1, 1), [w1], NODES[:1])
    assert (move.source, move.destination, move.keeper, move.stays) == (w1, w1, "b", False)


def test_links_of_equal_keepers_carry_equally_much() -> None:
    """Two keepers have all that four newcomers need: each sends half, however many copies it has."""
    held = [copy_of(WORKERS[5], NODES[0], 2, 0), copy_of(WORKERS[5], NODES[1], 2, 0)]
    held += [copy_of(WORKERS[6], NODES[0], 2, 1), copy_of(WORKERS[6], NODES[1], 2, 1)]
    members = WORKERS[:4]
    found = moves(
        [replace(TENSOR, name=f"t{n}") for n in range(6)], held, Layout(1, 4), members, [NODES[2]] * 4
    )
    sent = Counter[str]()
    for move in found:
        sent[move.keeper] += move.slice.count
    assert sent["a"] == sent["b"] == 6 * 24


def test_a_node_has_one_link_however_many_replicas_it_has() -> None:
    """Three replicas on one node, one on another: a newcomer on neither takes half from each node; one beside
    some takes all from those.
    """
    held = [Holding(worker, V1, cell(1, 0)) for worker in WORKERS[:4]]
    a, b, c = NODES
    state = [replace(TENSOR, name=f"t{n}") for n in range(12)]

    def taken(newcomer: NodeId) -> list[int]:
        found = moves(state, held, Layout(5, 1), WORKERS[:5], [a, a, a, b, newcomer])
        count = Counter(move.source for move in found if move.destination == WORKERS[4])
        return [count[worker] for worker in WORKERS[:4]]

    assert taken(c) == [2, 2, 2, 6]
    assert taken(b) == [0, 0, 0, 12]
    assert taken(a) == [4, 4, 4, 0]


@given(
    worlds(),
    st.lists(tensors().map(tuple), max_size=1),
    layouts.filter(lambda each: each.world <= len(WORKERS)),
    st.randoms(),
)
def test_any_mixture_of_live_and_kept_brings_each_element_once(
    held: list[Holding], some: list[tuple[Tensor, ...]], layout: Layout, rng: random.Random
) -> None:
    """Some of the holders died and left copies; what nobody holds is left to the bucket; each element comes
    once.
    """
    held = [replace(each, keeper=rng.choice([NodeId(""), *NODES])) for each in held]
    held = [each for each in held if rng.random() < 0.8]
    members, everything = WORKERS[: layout.world], list(some[0]) if some else [TENSOR]
    nodes = [rng.choice(NODES) for _ in members]
    found = moves(everything, held, layout, members, nodes, partly=True)
    for rank, member in enumerate(members):
        own = cell(layout.dp_shard, layout.coordinates(rank)["dp_shard"])
        wanted = [part for tensor in everything for part in parts(tensor, own)]
        times = {(tensor.name, tensor.kind): np.zeros(tensor.shape, int) for tensor in everything}
        for part in [
            *(move.slice for move in found if move.destination == member),
            *missing(everything, held, own),
        ]:
            times[part.name, part.kind][box(part)] += 1
        for part in wanted:
            expected = np.zeros_like(times[part.name, part.kind])
            expected[box(part)] = 1
            assert (times[part.name, part.kind] == expected).all()
    for move in found:
        tensor = next(
            each for each in everything if (each.name, each.kind) == (move.slice.name, move.slice.kind)
        )
        cells = [each.cell for each in held if (each.worker, each.keeper) == (move.source, move.keeper)]
        assert any(part.intersect(move.slice) == move.slice for each in cells for part in parts(tensor, each))


def world_of(layout: Layout, first: int) -> tuple[list[WorkerId], list[Holding]]:
    """Returns members from ``first`` on and their holdings: each holds its cell live."""
    members = [WorkerId(f"w{first + rank}") for rank in range(layout.world)]
    return members, [Holding(member, V1, cell_of(layout, rank)) for rank, member in enumerate(members)]


def test_a_member_that_stays_does_not_work_out_the_moves_of_all_others_that_stay() -> None:
    """A replica dies: nobody sends anything.  A member's share of the work must not grow with the number of
    replicas.
    """
    state = [Tensor(f"t{number}", "parameter", "F32", (64 + 8 * number,)) for number in range(20)]
    counts = {}
    for replicas in (4, 64):
        layout = Layout(replicas, 8)
        members, held = world_of(layout, 8)
        found = [moves(state, held, layout, members, of=members[5])]
        counts[replicas] = calls(lambda: found.append(moves(state, held, layout, members, of=members[5])))  # noqa: B023
        everything = moves(state, held, layout, members)
        assert found[0] == tuple(
            move for move in everything if members[5] in (move.source, move.destination)
        ) and all(move.stays for move in found[0])
        fixed = calls(lambda: moves(state[:1], held, layout, members, of=members[5]))  # noqa: B023
        counts[replicas] -= fixed
    assert counts[64] < 1.5 * counts[4], counts


def test_a_newcomer_is_still_sent_what_it_lacks() -> None:
    """Negative control: one of two replicas is new; its cells come from members that stay."""
    layout, state = Layout(2, 4), [Tensor(f"t{number}", "parameter", "F32", (64,)) for number in range(5)]
    members, held = world_of(layout, 0)
    everything = moves(state, held[:4], layout, members)
    for member in members:
        assert moves(state, held[:4], layout, members, of=member) == tuple(
            m for m in everything if member in (m.source, m.destination)
        )
    assert {move.destination for move in everything if not move.stays} == set(members[4:])
