"""Seats are compared with the best of all seatings, which a simple function finds by trying them one after
the other.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
    size = layout.world // layout.dp_replicate
    return [members[first : first + size] for first in range(0, layout.world, size)]


def within(members: Sequence[WorkerId], layout: Layout, nodes: Nodes) -> int:
    """Returns how many replicas lie within one node."""
    return sum(len({nodes[worker] for worker in each}) == 1 for each in replicas(members, layout))


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
    together = draw(st.integers(1, min(2, len(there))))
    shards = draw(st.integers(1, len(there) // together))
    replicas = draw(st.integers(1, len(there) // together // shards))
    layout = Layout(replicas, shards, (("together", together),) if together > 1 else ())
    cells = st.none() | st.integers(0, shards - 1).map(lambda index: cell(shards, index))
    return there, nodes, layout, {worker: found for worker in there if (found := draw(cells)) is not None}


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
    most = max(within(each, layout, nodes) for each in everything)
    if (found := within(members, layout, nodes)) != most:
        return f"{found} replicas lie within a node, {most} could"
    kept = max(stay(each, layout, holds) for each in everything if within(each, layout, nodes) == most)
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


def in_order(
    there: Sequence[WorkerId], nodes: Nodes, layout: Layout, holders: Sequence[Holding] = ()
) -> tuple[WorkerId, ...]:
    """Seats workers in the order in which they joined, as it was before."""
    return tuple(there[: layout.world])


def test_seats_in_the_order_of_joining_are_found_to_be_worse() -> None:
    """Negative control."""
    there = [WorkerId(f"w{number}") for number in range(4)]
    two = {worker: NodeId("ab"[number % 2]) for number, worker in enumerate(there)}
    assert worse(in_order, (there, two, Layout(2, 2), {})) == "0 replicas lie within a node, 2 could"
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


def test_seating_is_linear_in_the_workers() -> None:
    def cost(count: int) -> int:
        there, nodes = big(count)
        holders = [Holding(worker, AT, cell(8, number % 8)) for number, worker in enumerate(there)]
        return calls(lambda: seat(there[8:], nodes, Layout(count // 8 - 1, 8), holders))

    assert cost(2048) <= 4.5 * cost(512)
