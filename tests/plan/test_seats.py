"""Seats are compared with the best of all seatings, which a simple function finds by trying them one after
the other.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.ids import Cell, NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.plan.placement import cell_of
from elastic.plan.seats import seat
from elastic.plan.transfer import Holding
from tests.support.calls import calls
from tests.support.cells import cell
from tests.support.toy_axes import registered

pytestmark = pytest.mark.fast

AT = Version(4, 2)
Nodes = dict[WorkerId, NodeId]
Seat = Callable[..., tuple[WorkerId, ...]]


def replicas(members: Sequence[WorkerId], layout: Layout) -> list[Sequence[WorkerId]]:
    """Returns the members of each replica, those of its first stage first."""
    degree = dict(layout.more)
    size, stages = layout.world // layout.dp_replicate, degree.get("pp", 1)
    stage, a_stage = layout.world // stages, size // stages
    return [
        [members[at * stage + row * a_stage + seat] for at in range(stages) for seat in range(a_stage)]
        for row in range(layout.dp_replicate)
    ]


def within(members: Sequence[WorkerId], layout: Layout, nodes: Nodes, size: int = 0) -> int:
    """Returns how many replicas, or blocks of ``size`` members of a replica, lie within one node."""
    size = size or layout.world // layout.dp_replicate
    blocks = [each[at : at + size] for each in replicas(members, layout) for at in range(0, len(each), size)]
    return sum(len({nodes[worker] for worker in each}) == 1 for each in blocks)


def blocks_of(layout: Layout) -> list[int]:
    """Returns the sizes of a replica, of its stages, of model groups in a stage, and of tensor groups."""
    degree = dict(layout.more)
    inner = [degree.get(name, 1) for name in ("together", "tp", "cp")]
    sizes = [math.prod(inner[:count]) for count in range(1, 4)]
    return [layout.world // layout.dp_replicate, sizes[-1] * layout.dp_shard, *reversed(sizes)]


def stay(members: Sequence[WorkerId], layout: Layout, holds: dict[WorkerId, Cell]) -> int:
    """Returns how many members keep their cell."""
    return sum(holds.get(worker) == cell_of(layout, rank) for rank, worker in enumerate(members))


@st.composite
def halls(draw: st.DrawFn) -> tuple[list[WorkerId], Nodes, Layout, dict[WorkerId, Cell]]:
    """Draws at most six workers on at most three nodes, a layout that they can form, and what each of them
    holds.
    """
    there = [WorkerId(f"w{number}") for number in range(draw(st.integers(1, 6)))]
    nodes = {worker: NodeId(draw(st.sampled_from("abc"))) for worker in there}
    left, more = len(there), list[tuple[str, int]]()
    for axis in draw(st.sampled_from([(), ("together",), ("tp",), ("pp", "tp"), ("cp", "tp")])):
        if (degree := draw(st.integers(1, min(3, left)))) > 1:
            more.append((axis, degree))
            left //= degree
    shards = draw(st.integers(1, left))
    layout = Layout(draw(st.integers(1, left // shards)), shards, tuple(more))
    held = st.none() | st.integers(0, layout.world - 1).map(lambda rank: cell_of(layout, rank))
    return there, nodes, layout, {worker: found for worker in there if (found := draw(held)) is not None}


def seated(
    choose: Seat, hall: tuple[list[WorkerId], Nodes, Layout, dict[WorkerId, Cell]]
) -> tuple[WorkerId, ...]:
    there, nodes, layout, holds = hall
    return choose(there, nodes, layout, [Holding(worker, AT, held) for worker, held in holds.items()])


def worse(choose: Seat, hall: tuple[list[WorkerId], Nodes, Layout, dict[WorkerId, Cell]]) -> str:
    """Returns in what the seats are worse than the best of all seatings, or ""."""
    there, nodes, layout, holds = hall
    members = seated(choose, hall)
    assert len(set(members)) == len(members) == layout.world and set(members) <= set(there)
    everything = list(permutations(there, layout.world))
    best = everything
    for size in blocks_of(layout):
        most = max(within(each, layout, nodes, size) for each in best)
        if (found := within(members, layout, nodes, size)) != most:
            return f"{found} blocks of {size} lie within a node, {most} could"
        best = [each for each in best if within(each, layout, nodes, size) == most]
    if layout.more:
        return ""
    kept = max(stay(each, layout, holds) for each in best)
    if (found := stay(members, layout, holds)) != kept:
        return f"{found} members keep their cells, {kept} could"
    return ""


@pytest.fixture(autouse=True, scope="module")
def toys() -> Iterator[None]:
    """The toys have an axis that cuts nothing: members along it have equal cells."""
    with registered():
        yield


@given(halls())
def test_no_seating_has_more_replicas_within_nodes_or_moves_fewer_cells(
    hall: tuple[list[WorkerId], Nodes, Layout, dict[WorkerId, Cell]],
) -> None:
    """N6."""
    assert worse(seat, hall) == ""


@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(2, 2)])
def test_a_member_that_holds_a_part_is_no_worse_off_by_others_that_hold_the_same(layout: Layout) -> None:
    """A spare comes first; all others hold parts of the state, each of them on two members of a replica."""
    layout = Layout(layout.dp_replicate, layout.dp_shard, (("together", 2),))
    there = [WorkerId("spare"), *(WorkerId(f"w{number}") for number in range(layout.world))]
    holds = held(there[1:], layout)
    members = seated(seat, (there, dict.fromkeys(there, NodeId("a")), layout, holds))
    assert members == tuple(there[1:])


@given(halls())
def test_no_tensor_group_lies_over_nodes_if_none_has_to(
    hall: tuple[list[WorkerId], Nodes, Layout, dict[WorkerId, Cell]],
) -> None:
    """N6, whatever the workers hold: their cells move once, activations in every layer."""
    there, nodes, layout, _ = hall
    size = dict(layout.more).get("tp", 1)
    groups = layout.world // size
    possible = any(within(each, layout, nodes, size) == groups for each in permutations(there, layout.world))
    assert (within(seated(seat, hall), layout, nodes, size) == groups) is possible


@pytest.mark.parametrize(
    "more", [(("pp", 8), ("tp", 8)), (("pp", 4), ("cp", 2), ("tp", 8)), (("tp", 4),)], ids=str
)
@pytest.mark.parametrize("shards", [1, 4])
def test_a_node_is_lost_and_a_spare_node_joins(more: tuple[tuple[str, int], ...], shards: int) -> None:
    """N6: 1,024 workers on nodes of 8.  Each tensor group lies within a node before and after the loss, and
    when another node has come; then nobody but the newcomers takes another cell.
    """
    there, nodes = big(1024)
    random.Random(3).shuffle(there)
    size, group = dict(more)["tp"], math.prod(degree for _, degree in more) * shards
    layout, smaller = Layout(1024 // group, shards, more), Layout(1016 // group, shards, more)
    members = seat(there, nodes, layout)
    assert within(members, layout, nodes, size) == 1024 // size
    lost, holds = nodes[members[300]], held(members, layout)
    left = [worker for worker in members if nodes[worker] != lost]
    fewer = seated(seat, (left, nodes, smaller, holds))
    assert within(fewer, smaller, nodes, size) == smaller.world // size
    assert stay(fewer, smaller, holds) == smaller.world
    came = {WorkerId(f"new{number}"): NodeId("new") for number in range(8)}
    for before in (holds, held(fewer, smaller)):
        again = seated(seat, ([*left, *came], nodes | came, layout, before))
        assert within(again, layout, nodes | came, size) == 1024 // size
        assert stay(again, layout, before) == len(before.keys() - {w for w in before if nodes[w] == lost})


def test_a_tensor_group_comes_into_one_node_though_its_survivors_must_move() -> None:
    """Two members of a group are left, and a node of newcomers has room for all: they take its cells.  The
    control: without the newcomers the group lies over both nodes, and the survivors keep their cells.
    """
    more, names = (("tp", 4),), [WorkerId(f"w{number}") for number in range(8)]
    nodes = {worker: NodeId("a" if number < 4 else "b") for number, worker in enumerate(names)}
    holds = held(names, Layout(1, 2, more))
    left, came = names[:6], [WorkerId(f"new{number}") for number in range(4)]
    at = nodes | dict.fromkeys(came, NodeId("c"))
    assert seated(seat, ([*left, *came], at, Layout(1, 2, more), holds)) == (*names[:4], *came)
    two = {came[0]: NodeId("c"), came[1]: NodeId("d")}
    again = seated(seat, ([*left, *two], nodes | two, Layout(1, 2, more), holds))
    assert again == (*left, *two)


def in_order(
    there: Sequence[WorkerId], nodes: Nodes, layout: Layout, holders: Sequence[Holding] = ()
) -> tuple[WorkerId, ...]:
    """Seats workers in the order in which they joined, as it was before."""
    return tuple(there[: layout.world])


def test_seats_in_the_order_of_joining_are_found_to_be_worse() -> None:
    """Negative control."""
    there = [WorkerId(f"w{number}") for number in range(4)]
    two = {worker: NodeId("ab"[number % 2]) for number, worker in enumerate(there)}
    assert worse(in_order, (there, two, Layout(2, 2), {})) == "0 blocks of 2 lie within a node, 2 could"
    one = dict.fromkeys(there, NodeId("a"))
    holds = {there[1]: cell(2, 0), there[2]: cell(2, 1)}
    assert worse(in_order, (there, one, Layout(1, 2), holds)) == "0 members keep their cells, 2 could"


def test_workers_that_join_on_two_nodes_in_turn_sit_together() -> None:
    """Sixteen workers gave ABABABAB in each replica."""
    there = [WorkerId(f"w{number}") for number in range(16)]
    nodes = {worker: NodeId("AB"[number % 2]) for number, worker in enumerate(there)}
    members = seat(there, nodes, Layout(2, 8))
    assert "".join(nodes[worker] for worker in members) == "A" * 8 + "B" * 8
    assert members == (*there[::2], *there[1::2])


def big(count: int, a_node: int = 8) -> tuple[list[WorkerId], Nodes]:
    there = [WorkerId(f"w{number}") for number in range(count)]
    return there, {worker: NodeId(f"n{number // a_node}") for number, worker in enumerate(there)}


def held(members: Sequence[WorkerId], layout: Layout) -> dict[WorkerId, Cell]:
    return {worker: cell_of(layout, rank) for rank, worker in enumerate(members)}


def test_a_loss_moves_no_survivor() -> None:
    """One rank of 1,024 is lost: its node's others are left over; one on the same node comes, and takes the
    cell that is free.
    """
    there, nodes = big(1024)
    random.Random(3).shuffle(there)
    members = seat(there, nodes, Layout(128, 8))
    holds = held(members, Layout(128, 8))
    lost = members[300]
    left = [worker for worker in members if worker != lost]
    fewer = seated(seat, (left, nodes, Layout(127, 8), holds))
    assert stay(fewer, Layout(127, 8), holds) == 127 * 8
    assert {nodes[worker] for worker in set(left) - set(fewer)} == {nodes[lost]}
    nodes[WorkerId("new")] = nodes[lost]
    again = seated(seat, ([*left, WorkerId("new")], nodes, Layout(128, 8), holds))
    assert stay(again, Layout(128, 8), holds) == 1023 and within(again, Layout(128, 8), nodes) == 128
    assert cell_of(Layout(128, 8), again.index(WorkerId("new"))) == holds[lost]


def test_a_node_that_is_lost_breaks_only_its_own_replicas() -> None:
    there, nodes = big(64)
    for layout, broken in ((Layout(8, 8), 1), (Layout(32, 2), 4), (Layout(4, 16), 1)):
        members = seat(random.Random(5).sample(there, 64), nodes, layout)
        touched = Counter(
            node for each in replicas(members, layout) for node in {nodes[worker] for worker in each}
        )
        assert set(touched.values()) == {broken}


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(2, 12),
    st.randoms(use_true_random=False),
)
def test_replicas_over_several_nodes_touch_few(sizes: list[int], shards: int, rng: random.Random) -> None:
    """They touch the fewest nodes that have enough workers between them, and at most one more for each
    replica but the last.
    """
    there = [WorkerId(f"{node}-{number}") for node, size in enumerate(sizes) for number in range(size)]
    rng.shuffle(there)
    nodes = {worker: NodeId(worker.partition("-")[0]) for worker in there}
    layout = Layout(max(1, len(there) // shards), min(shards, len(there)))
    across = [
        each
        for each in replicas(seat(there, nodes, layout), layout)
        if len({nodes[worker] for worker in each}) > 1
    ]
    over = sorted((size % layout.dp_shard for size in sizes), reverse=True)
    needed = next(
        count for count in range(len(over) + 1) if sum(over[:count]) >= len(across) * layout.dp_shard
    )
    assert sum(len({nodes[worker] for worker in each}) for each in across) <= needed + max(len(across) - 1, 0)


def test_who_holds_another_layout_s_cell_sits_near_it() -> None:
    """Eight shards become four on one node: each worker gets a cell whose rows it holds already, whatever the
    order of joining.
    """
    there, nodes = big(8)
    held_before = [Holding(worker, AT, cell(4, 3 - number % 4)) for number, worker in enumerate(there)]
    members = seat(there, nodes, Layout(1, 8), held_before)
    halves = {each.worker: int(each.cell.split()[1][0]) for each in held_before}
    assert [halves[worker] for worker in members] == [0, 0, 1, 1, 2, 2, 3, 3]
    two = [Holding(WorkerId("w2"), AT, cell(2, 0)), Holding(WorkerId("w1"), AT, cell(2, 1))]
    assert seat(there[:3], nodes, Layout(1, 3), two) == ("w2", "w0", "w1"), (
        "the newcomer takes the rows between"
    )
    assert seat(there[:4], nodes, Layout(1, 4), two[:1])[:1] == ("w2",)


def test_newcomers_take_the_cells_whose_copies_their_node_has() -> None:
    """All workers of two nodes died; their keepers have the copies, and nothing has to pass between the
    nodes.
    """
    there, nodes = big(4, 2)
    copies = [
        Holding(WorkerId(f"dead{number}"), AT, cell(4, number), NodeId("n1" if number < 2 else "n0"))
        for number in range(4)
    ]
    assert seat(there, nodes, Layout(1, 4), copies) == ("w2", "w3", "w0", "w1")


@pytest.mark.parametrize("one", [Layout(1, 8), Layout(1, 1, (("pp", 8), ("tp", 8)))], ids=str)
def test_seating_is_linear_in_the_workers(one: Layout) -> None:
    def cost(count: int) -> int:
        there, nodes = big(count)
        layout, fewer = (replace(one, dp_replicate=count // one.world - less) for less in (0, 1))
        holders = [Holding(worker, AT, cell_of(layout, rank)) for rank, worker in enumerate(there)]
        return calls(lambda: seat(there[8:], nodes, fewer, holders))

    assert cost(2048) <= 4.5 * cost(512)
