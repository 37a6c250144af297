"""The moves that a member computes for itself are compared with a planner that goes through all members,
tensors, rows and holders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.ids import NodeId, Version, WorkerId
from elastic.plan import transfer
from elastic.plan.layout import Layout
from elastic.plan.transfer import Holding, Move, moves
from storage.slices import Slice, Tensor, nbytes
from tests.support.calls import calls
from tests.support.cells import cell, shard_of, shard_slice

pytestmark = pytest.mark.fast

AT = Version(4, 2)
WORKERS = [WorkerId(f"w{n}") for n in range(8)]
NODES = [NodeId("a"), NodeId("b"), NodeId("c")]
STATE = (
    *(
        Tensor(f"t{rows}", kind, "F32", (rows, 4))
        for rows in (0, 1, 5, 12, 31)
        for kind in ("parameter", "moment.exp_avg")
    ),
    Tensor("seen", "buffer", "I64", (3,)),
    Tensor("updates", "scalar", "F32", ()),
)
Sizes = tuple[list[Holding], Layout, list[WorkerId], list[NodeId]]


@pytest.fixture(autouse=True)
def _small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces above 40 bytes are shared out, so that tensors of a few rows show it."""
    monkeypatch.setattr(transfer, "SPLIT", 40)


def dumb(
    held: Sequence[Holding], layout: Layout, members: Sequence[WorkerId], nodes: Sequence[NodeId]
) -> list[Move]:
    """Plans for everybody: one destination and one piece after the other, looking at all holders of all rows."""
    found = []
    home = dict(zip(members, nodes, strict=True))
    for number, tensor in enumerate(sorted(STATE, key=lambda each: (-nbytes(each, each.whole()), each))):
        for rank, member in enumerate(members):
            part, turn = shard_slice(tensor, layout.dp_shard, rank % layout.dp_shard), number + rank
            if part.shape and not part.count:
                continue
            has = {each: shard_slice(tensor, *shard_of(each.cell)) for each in held}
            edges = sorted(
                {edge for each in (part, *has.values()) for edge in (*each.start[:1], *each.stop[:1])}
            )
            inside = (
                [(a, b) for a, b in pairwise(edges) if part.start[0] <= a and b <= part.stop[0]]
                if part.shape
                else [(0, 0)]
            )
            for low, high in inside:
                able = [
                    each
                    for each, its in has.items()
                    if not part.shape or (its.start[0] <= low and high <= its.stop[0])
                ]
                if not able:
                    continue
                by_node = nearest(able, member, home)
                total = sum(len(each) for each in by_node)
                size = (high - low) * nbytes(tensor, tensor.whole()) // tensor.shape[0] if part.shape else 0
                ways = max(1, min(total, ceil(size / 40), high - low))
                for way in range(ways):
                    at, there = turn + way, by_node[(turn + way) % len(by_node)]
                    worker, keeper = there[at // len(by_node) % len(there)]
                    first, last = low + (high - low) * way // ways, low + (high - low) * (way + 1) // ways
                    start, stop = (
                        ((first, *part.start[1:]), (last, *part.stop[1:])) if part.shape else ((), ())
                    )
                    found.append(Move(Slice(tensor.name, tensor.kind, start, stop), worker, member, keeper))
                turn += 1
    return found


def nearest(
    able: list[Holding], member: WorkerId, home: dict[WorkerId, NodeId]
) -> list[list[tuple[WorkerId, NodeId]]]:
    """Returns (worker, keeper) of the nearest holders, node by node, each in order of their names."""
    groups: dict[int, dict[str, set[tuple[WorkerId, NodeId]]]] = defaultdict(lambda: defaultdict(set))
    for each in able:
        place = each.keeper or home.get(each.worker, "")
        if each.keeper:
            distance = 1 if place == home[member] else 4
        else:
            distance = 0 if each.worker == member else 2 if place == home[member] else 3
        groups[distance][place].add((each.worker, each.keeper))
    best = groups[min(groups)]
    return [sorted(best[node]) for node in sorted(best)]


@st.composite
def worlds(draw: st.DrawFn) -> Sizes:
    """Draws holdings of one or two layouts, live or kept, some of them lost, and the members of another
    layout.
    """
    before = [
        Layout(draw(st.integers(1, 3)), draw(st.integers(1, 4))) for _ in range(draw(st.integers(1, 2)))
    ]
    held = []
    for layout in before:
        for rank in range(layout.world):
            keeper = draw(st.sampled_from([NodeId(""), NodeId(""), *NODES]))
            if draw(st.integers(0, 4)):
                held.append(
                    Holding(
                        draw(st.sampled_from(WORKERS)),
                        AT,
                        cell(layout.dp_shard, rank % layout.dp_shard),
                        keeper,
                    )
                )
    after = Layout(draw(st.integers(1, 3)), draw(st.integers(1, 2)))
    members = draw(st.permutations(WORKERS))[: after.world]
    return list(dict.fromkeys(held)), after, members, [draw(st.sampled_from(NODES)) for _ in members]


def disagreement(world: Sizes) -> str:
    """Returns where a member's own moves are not those that the dumb planner has for it, or two peers see
    different ones; "" if nowhere.
    """
    held, layout, members, nodes = world
    everything = dumb(held, layout, members, nodes)
    own = {
        who: moves(STATE, held, layout, members, nodes, partly=True, of=who)
        for who in (*members, *(each.worker for each in held))
    }
    for who, found in own.items():
        expected = tuple(
            move for move in everything if who == move.destination or (who == move.source and not move.keeper)
        )
        if found != expected:
            return f"{who} plans {found}, and the dumb planner has {expected}"
    for source in own:
        for destination in members:
            sent, received = (
                [m for m in own[who] if (m.source, m.destination, m.keeper) == (source, destination, "")]
                for who in (source, destination)
            )
            if sent != received:
                return f"{source} sends {sent}, and {destination} awaits {received}"
    return ""


@given(worlds())
def test_sender_and_receiver_plan_what_the_dumb_planner_does(world: Sizes) -> None:
    """N4: any layout into any."""
    assert disagreement(world) == ""


def test_a_source_that_is_one_turn_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    held = [Holding(worker, AT, cell(1, 0)) for worker in WORKERS[:3]]
    world = held, Layout(2, 2), [*WORKERS[2:6]], [NODES[0], NODES[1], NODES[0], NODES[2]]
    assert disagreement(world) == ""
    right = transfer._Takers.at
    monkeypatch.setattr(transfer._Takers, "at", lambda self, turn: right(self, turn + 1))
    assert "the dumb planner has" in disagreement(world)


def cost(workers: int, tensors: int) -> tuple[int, int]:
    """Returns how many functions one member of ``workers`` calls to plan a change from shards of 8 to shards
    of 10, and its moves.
    """
    state = [Tensor(f"t{n}", "parameter", "BF16", (8192, 2)) for n in range(tensors)]
    names = [WorkerId(f"w{n}") for n in range(workers)]
    homes = [NodeId(f"n{n // 8}") for n in range(workers)]
    held = [Holding(name, AT, cell(8, rank % 8)) for rank, name in enumerate(names)]
    layout, found = Layout(workers // 10, 10), list[Move]()
    count = calls(
        lambda: found.extend(
            moves(state, held, layout, names[: layout.world], homes[: layout.world], of=names[3])
        )
    )
    return count, len(found)


def test_what_one_more_tensor_costs_does_not_grow_with_the_members() -> None:
    """N4: the members themselves are looked at once.  A source that looked at all receivers for each tensor
    would do it every time.
    """
    (few, some), (many, more) = ([cost(workers, tensors) for tensors in (20, 60)] for workers in (160, 1600))
    assert many[1] <= few[1] and more[1] <= some[1], "there is not more to move"
    assert more[0] - many[0] <= 1.5 * (some[0] - few[0])
    assert many[0] <= 12 * few[0]
