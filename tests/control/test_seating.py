"""The seats that the product chooses are compared with those of a simple function that tries every choice of
members.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.control import seating
from elastic.control.rules import Rules
from elastic.control.run import Cluster, Forming, History, Host, Members, RunState, Waiting, Worker
from elastic.control.seating import candidates, layout_of, make_plan
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import USES, Layout, LayoutRule
from elastic.plan.placement import cell_of
from elastic.plan.transfer import Holding
from elastic.protocol import events as ev
from storage.slices import Tensor
from tests.control.play import CLASSES, Play, but, reformed, rules
from tests.support.cells import cell, classes, shard_interval, shard_of

pytestmark = pytest.mark.fast

LINEAGE = ((1, 3), (2, 5))
VERSIONS = [Version(3, 1), Version(4, 2), Version(5, 2), Version(4, 1)]
"""The last one is off the lineage: abandoned."""
NODES = (NodeId("n1"), NodeId("n2"))
NODES = (NodeId("n1"), NodeId("n2"))
SHARDS = [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]


@st.composite
def runs(draw: st.DrawFn) -> RunState:
    names = [WorkerId(f"w{number}") for number in range(1, draw(st.integers(1, 5)) + 1)]
    slots = st.lists(st.tuples(st.sampled_from(VERSIONS), st.sampled_from(SHARDS)), max_size=2, unique=True)
    workers = {}
    for name in names:
        held = tuple(Holding(name, version, cell(*shard)) for version, shard in draw(slots))
        workers[name] = Worker(
            NodeId(f"n{draw(st.integers(1, 3))}"),
            "cpu",
            0.0,
            held,
            "broken" if draw(st.integers(0, 9)) == 0 else "",
        )
    return RunState(
        1,
        2,
        Waiting(0.0),
        Members(
            workers,
            classes=CLASSES,
            seats=tuple(draw(st.permutations(names))[: draw(st.integers(0, len(names)))]),
        ),
        Cluster(keepers=NODES, blamed=tuple(draw(st.lists(st.sampled_from(NODES), max_size=3)))),
        History(
            LINEAGE, tuple(draw(st.sampled_from([(), (Version(3, 1),), (Version(3, 1), Version(4, 2))])))
        ),
    )


ROWS = [tensor.shape[0] for tensor in CLASSES]


def newest_of(run: RunState, members: tuple[WorkerId, ...]) -> Version | None:
    """Returns the newest version on the lineage of which ``members`` together hold every row, or None."""
    for version in (Version(5, 2), Version(4, 2), Version(3, 1)):
        held = [
            each for member in members for each in run.workers[member].holdings if each.version == version
        ]
        intervals = [
            (length, shard_interval(length, *shard_of(each.cell))) for each in held for length in ROWS
        ]
        if held and all(
            any(n == length and a <= row < b for n, (a, b) in intervals)
            for length in ROWS
            for row in range(length)
        ):
            return version
    return None


RULES = st.builds(
    lambda low, shard, fit, most: rules(
        min_workers=low, max_workers=most, layout=LayoutRule(None, None, shard, "fit" if fit else "all")
    ),
    st.integers(1, 2),
    st.integers(1, 2),
    st.booleans(),
    st.integers(2, 5),
)


@given(runs(), RULES)
def test_the_plan_keeps_seats_and_gives_nothing_up(run: RunState, rules: Rules) -> None:
    plan = make_plan(run, rules)
    fit = tuple(worker for worker, known in run.workers.items() if not known.unfit)
    layout = layout_of(run, fit, rules)
    assert (plan is None) == (layout is None)
    if plan is None or layout is None:
        return
    assert (plan.generation, len(plan.members)) == (
        3,
        plan.layout.world,
    ) and plan.layout.world >= layout.world
    assert set(plan.members) <= set(fit) and len(set(plan.members)) == len(plan.members)
    if plan.layout.dp_shard == 1:  # every cell is the whole state: those that were members keep their order
        seated = [worker for worker in run.members.seats if worker in plan.members]
        assert [worker for worker in plan.members if worker in seated] == seated

    live, stored = newest_of(run, plan.members), run.history.saved[-1] if run.history.saved else None
    best = max((each for each in (live, stored) if each), default=Version(0, 0))
    assert plan.version == best
    assert plan.tier == ("init" if best == Version(0, 0) else "live" if best == live else "bucket")
    assert {each.worker for each in plan.holders} <= set(plan.members)
    assert all(
        each.version == plan.version and each in run.workers[each.worker].holdings for each in plan.holders
    )
    assert run.cluster.blamed.count(plan.store_node) == min(
        map(run.cluster.blamed.count, run.cluster.keepers)
    )


@given(runs(), RULES)
def test_who_is_left_out_is_not_missed_where_one_may_choose(run: RunState, rules: Rules) -> None:
    """The product leaves out one worker after the other; if only one has to go, its choice keeps the newest
    version where one can.
    """
    plan = make_plan(run, rules)
    fit = tuple(worker for worker, known in run.workers.items() if not known.unfit)
    if plan is None or len(fit) - len(plan.members) > 1:
        return
    possible = [newest_of(run, members) for members in combinations(fit, len(plan.members))]
    best = max((each for each in possible if each), default=None)
    if best == newest_of(run, fit):
        assert newest_of(run, plan.members) == best


def test_a_world_with_spares_looks_at_its_workers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven of 1,023 workers are left over.  Each beat asks whether the world can grow, and only a change of
    the workers is looked at.
    """
    looks = list[int]()
    real = seating.choose

    def counted(workers: int, *arguments: Any, **more: Any) -> Layout | None:
        looks.append(workers)
        return real(workers, *arguments, **more)

    monkeypatch.setattr(seating, "choose", counted)
    workers = {WorkerId(f"w{n}"): Worker(NodeId(f"n{n // 8}"), "cpu", 0.0) for n in range(1023)}
    run, by = (
        RunState(1, 2, Waiting(0.0), Members(workers)),
        rules(max_workers=1024, layout=LayoutRule(min_shard=8)),
    )
    for beat in range(5):
        there = candidates(run, by)
        assert layout_of(run, there, by) == Layout(127, 8)
        run = replace(run, watch=replace(run.watch, moved_at=float(beat)))
    assert looks == [1023]
    run = replace(
        run,
        members=replace(
            run.members, workers={**workers, WorkerId("new"): Worker(NodeId("n127"), "cpu", 0.0)}
        ),
    )
    assert layout_of(run, candidates(run, by), by) == Layout(128, 8)


def test_the_plan_knows_nodes_and_what_the_state_pads() -> None:
    """N6, through the whole plan: workers join on two nodes in turn; and 16 rows are not cut into 17, which
    leaves one member empty.
    """
    workers = {WorkerId(f"w{n:02}"): Worker(NodeId(f"n{n % 2}"), "cpu", 0.0) for n in range(17)}
    run = RunState(1, 2, Waiting(0.0), Members(workers), Cluster(keepers=NODES))
    plan = make_plan(run, rules(max_workers=17, layout=LayoutRule(min_shard=8)))
    assert plan is not None and plan.nodes == ("n0",) * 8 + ("n1",) * 8
    known = Members(workers, classes=classes([16]), class_bytes=(100,))
    by = rules(max_workers=17, layout=LayoutRule(dp_replicate=1))
    capped, unknown = (
        make_plan(replace(run, members=each), by) for each in (known, replace(known, class_bytes=()))
    )
    assert capped is not None and unknown is not None
    assert (capped.layout, unknown.layout) == (Layout(1, 16), Layout(1, 17))


def joined(play: Play, worker: str, least: int) -> str:
    play.tell(ev.KeeperUp(NodeId("n1")))
    return play.tell(ev.Joined(WorkerId(worker), NodeId("n1"), "cpu", CLASSES, least_shard=least))


@pytest.mark.parametrize(("fixed", "becomes"), [(None, Layout(1, 2)), (1, Layout(2, 1))])
def test_the_state_is_cut_as_the_devices_need_it(fixed: int | None, becomes: Layout) -> None:
    """The job allows replicas; a worker's device has room for half of the state.  A degree that the job fixes
    is its own affair.
    """
    play = Play(rules(min_workers=1, layout=LayoutRule(None, fixed)))
    play.tell(ev.Capacity(2))
    said = joined(play, "w1", 2)
    assert ("the memory of its device requires that 2 or more workers share the state" in said) is (
        fixed is None
    )
    assert "must share" not in joined(play, "w2", 2)
    play.later(3.0)
    assert play.plan.layout == becomes


@pytest.mark.parametrize(
    ("whole", "zero"), [((2, 2), 2), ((1, 2), 2), ((2, 3), None), ((2, 0), None), ((0, 0), None)]
)
def test_whole_weights_are_for_worlds_whose_members_all_have_room(
    whole: tuple[int, int], zero: int | None
) -> None:
    """Two members share the state.  One that asks for more shards, or has no room at all, decides for both.

    Alone, the worker that is left shares nothing, so there is nothing to gather.
    """
    play = Play(rules(min_workers=1))
    play.tell(ev.Capacity(2))
    play.tell(ev.KeeperUp(NodeId("n1")))
    for worker, least in zip(("w1", "w2"), whole, strict=True):
        play.tell(ev.Joined(WorkerId(worker), NodeId("n1"), "cpu", CLASSES, least_shard=2, least_whole=least))
    play.later(3.0)
    assert (play.plan.layout, play.plan.zero) == (Layout(1, 2), zero)
    roomy = {
        name: replace(each, least_shard=1, least_whole=1) for name, each in play.run.members.workers.items()
    }
    alone = make_plan(
        but(play.run, "members", workers={WorkerId("w1"): roomy[WorkerId("w1")]}), rules(min_workers=1)
    )
    assert alone is not None and (alone.layout, alone.zero) == (Layout(1, 1), None)


def test_a_world_that_does_not_fit_is_waited_for() -> None:
    """One worker is left of two, and its device is too small for the whole state.  The control: with room for
    it, it goes on alone.
    """
    for least, alone in ((2, False), (1, True)):
        play = Play(rules(min_workers=1, wait_s=300.0))
        play.tell(ev.Capacity(2))
        for worker in ("w1", "w2"):
            joined(play, worker, least)
        play.later(3.0)
        reformed(play)
        play.lose("w2")
        play.answer("w1", play.run.version)
        assert isinstance(play.run.state, Forming) is alone
        if not alone:
            assert "1 worker of at least 1, and the state fits the memory of 2 or more" in play.later(400.0)


def test_a_small_device_does_not_keep_the_others_from_training() -> None:
    """Three workers have room for the whole state; a fourth would need fifteen others.  It waits, before the
    first world and after a loss.

    The control: a device that needs four trains with them.
    """
    for least, members in ((16, 3), (4, 4)):
        play = Play(rules(min_workers=1, max_workers=4))
        play.tell(ev.Capacity(4))
        for worker, needs in (("w1", 1), ("w2", least), ("w3", 1), ("w4", 1)):
            joined(play, worker, needs)
        play.later(3.0)
        assert len(play.plan.members) == members and ("w2" in play.plan.members) is (least == 4)
        if least == 4:
            continue
        reformed(play)
        play.lose("w4")
        for worker in ("w1", "w3"):
            play.answer(worker, play.run.version)
        assert isinstance(play.run.state, Forming) and set(play.plan.members) == {"w1", "w3"}


@pytest.mark.parametrize(
    ("states", "workers", "rule", "becomes"),
    [
        (2.0, 2, LayoutRule(), "2×1"),
        (1.5, 2, LayoutRule(), "1×2"),
        (1.5, 4, LayoutRule(), "1×4"),  # with three shards one worker would be left over
        (0.1, 4, LayoutRule(), "1×4"),  # nothing is enough, and the most shards are the best
        (0.1, 4, LayoutRule(2), "2×2"),
        (1.5, 2, LayoutRule(None, 1), "2×1"),  # the job has chosen
        (0.0, 2, LayoutRule(), "2×1"),  # not known
    ],
)
def test_workers_share_the_state_where_their_node_has_no_room_for_more_copies(
    states: float, workers: int, rule: LayoutRule, becomes: str
) -> None:
    """It asks for shards only while so many workers are there: when some are lost, the rest need fewer."""
    play = Play(rules(min_workers=1, max_workers=4, layout=rule))
    play.tell(ev.Capacity(4))
    play.tell(ev.KeeperUp(NodeId("n1")))
    for number in range(workers):
        play.tell(ev.Joined(WorkerId(f"w{number + 1}"), NodeId("n1"), "cpu", CLASSES, states=states))
    play.later(3.0)
    assert str(play.plan.layout) == becomes


TP = (("tp", 2),)


@pytest.mark.parametrize(
    ("least", "becomes"), [(1, Layout(2, 1, TP)), (2, Layout(2, 1, TP)), (3, Layout(1, 2, TP))]
)
def test_the_members_of_a_model_group_share_the_state(least: int, becomes: Layout) -> None:
    """A device has room for a half or a third of the state: two members of a tensor group have a half each."""
    play = Play(rules(max_workers=5, layout=LayoutRule(model=TP)))
    play.tell(ev.Capacity(5))
    said = joined(play, "w1", least)
    assert (f"requires that {least} or more workers share the state" in said) is (least > 2)
    said = [joined(play, f"w{number}", least) for number in range(2, 6)][-1]
    assert f"({becomes})" in said and play.plan.layout == becomes


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (3, "3 workers of at least 1, but 3 workers are too few for any layout (at least 4)"),
        (4, "form generation 1 of w1, w2, w3 and w4 (1×1×2 pp×2 tp)"),
    ],
)
def test_fewer_workers_than_a_model_group_wait(count: int, said: str) -> None:
    play = Play(rules(max_workers=4, layout=LayoutRule(model=(("pp", 2), ("tp", 2)))))
    play.tell(ev.Capacity(count))
    last = [joined(play, f"w{number + 1}", 1) for number in range(count)][-1]
    assert said in (last if count > 3 else play.later(400.0))


@pytest.mark.parametrize("replicas", [None, 1])
def test_n4_a_large_world_of_all_axes_is_planned_in_a_second(replicas: int | None) -> None:
    """A world of 1,024 workers on nodes of 8 loses a node; another one has its copies, and a new one joins."""
    more = (("pp", 8), ("tp", 8))
    by = rules(max_workers=2_000, layout=LayoutRule(replicas, model=more))
    names = [WorkerId(f"w{number}") for number in range(1_032)]
    nodes = {name: NodeId(f"n{number // 8}") for number, name in enumerate(names)}
    layout = Layout(replicas or 16, 16 if replicas else 1, more)
    held = {
        name: Holding(name, Version(5, 2), cell_of(layout, rank)) for rank, name in enumerate(names[:1_024])
    }
    blocks = [
        Tensor(f"b{number}", "parameter", "F32", (4_096, 64), (0, 8), (number, 8)) for number in range(8)
    ]
    workers = {name: Worker(nodes[name], "gpu", 0.0, (held[name],)) for name in names[8:1_024]}
    workers |= {name: Worker(nodes[name], "gpu", 0.0) for name in names[1_024:]}
    copies = tuple(replace(held[name], keeper=NodeId("n1")) for name in names[:8])
    run = RunState(
        1,
        2,
        Waiting(0.0),
        Members(workers, classes=tuple(blocks), seats=tuple(names[:1_024])),
        Cluster(keepers=tuple(dict.fromkeys(nodes.values()))[1:]),
        History(LINEAGE, ()),
    )
    run = but(run, "copies", hosts={NodeId("n1"): Host(kept=copies)}, asked=2)
    began = time.process_time()
    plan = make_plan(run, by)
    assert time.process_time() - began < 1.0
    assert plan is not None and (plan.layout, plan.version.step) == (layout, 5)
    assert all(len(set(plan.nodes[at : at + 8])) == 1 for at in range(0, 1_024, 8))
    cells = {member: cell_of(layout, rank) for rank, member in enumerate(plan.members)}
    assert all(cells[name] == held[name].cell for name in names[8:1_024])


@given(runs(), RULES, st.integers(1, 4))
def test_no_layout_has_fewer_shards_than_a_device_needs(run: RunState, limits: Rules, least: int) -> None:
    there = candidates(run, limits)
    needed = but(
        run,
        "members",
        workers={name: replace(worker, least_shard=least) for name, worker in run.members.workers.items()},
    )
    found = layout_of(needed, there, limits)
    assert found is None or found.dp_shard >= least
    assert found == layout_of(run, there, replace(limits, layout=limits.layout.at_least(least)))


@pytest.mark.parametrize("stays", [True, False], ids=["", "control"])
def test_a_smaller_layout_that_would_lose_steps_is_not_chosen(stays: bool) -> None:
    """Three shards are needed only for w4, a spare, which is lost; then a world of two that leaves out the
    third would lose five steps.  In the control the third is lost, too, and so are the steps."""
    play, members = crowded((7, 3), (9.0, 9.0, 9.0, 0.4), "n1 n2 n3 n4")
    assert str(play.plan.layout) == "1×3" and "w4" not in members
    play.lose("w4")
    if stays:
        play.broken(members[0], "job", "ValueError: flaky", "ValueError at user.py:7")
    else:
        play.lose(members[0])
    for member in members if stays else members[1:]:
        play.answer(member, Version(5, 1))
    found = (str(play.plan.layout), play.plan.version, play.plan.tier)
    assert found == (("1×3", Version(5, 1), "live") if stays else ("1×2", Version(0, 0), "init"))


@pytest.mark.parametrize(
    ("gone", "expected"),
    [(4, ("1×4", Version(5, 1), "live")), (3, ("1×3", Version(0, 0), "init"))],
    ids=["", "control"],
)
def test_a_wider_layout_is_chosen_if_only_that_loses_nothing(
    gone: int, expected: tuple[str, Version, str]
) -> None:
    """Eight rows in five shards leave the last one empty, so the other four hold every row.  Without its
    worker three shards are enough for the room for copies, but a world of three would lose five steps.  In
    the control one with rows is lost, and so are the steps."""
    play, members = crowded((8,), (1.0, 1.0, 1.0, 0.4, 0.4), "n1 n1 n1 n2 n2")
    assert str(play.plan.layout) == "1×5"
    play.lose(members[gone])
    for member in members[:gone] + members[gone + 1 :]:
        play.answer(member, Version(5, 1))
    assert (str(play.plan.layout), play.plan.version, play.plan.tier) == expected


@pytest.mark.parametrize(("kept", "at", "tier"), [((1,), 5, "host"), ((), 0, "init")], ids=["", "control"])
def test_a_holder_is_left_out_whose_shard_a_keeper_has(kept: tuple[int, ...], at: int, tier: str) -> None:
    """Each of five workers holds a shard that no other has, and a world has room for four.  In the control
    there is no copy, and five steps are lost.
    """
    workers = {
        (name := WorkerId(f"w{n}")): Worker(NODES[0], "cpu", 0.0, (Holding(name, Version(5, 2), cell(5, n)),))
        for n in range(5)
    }
    copies = tuple(
        replace(workers[name].holdings[0], keeper=NODES[0]) for n, name in enumerate(workers) if n in kept
    )
    members = Members(workers, classes=classes((10,)), seats=tuple(workers))
    run = RunState(1, 2, Waiting(0.0), members, Cluster(keepers=NODES), History(LINEAGE))
    run = but(run, "copies", hosts={NODES[0]: Host(kept=copies)}, asked=2)
    plan = make_plan(run, rules(max_workers=4, layout=LayoutRule(1, None, 1, "all")))
    assert plan is not None and (len(plan.members), plan.version.step, plan.tier) == (4, at, tier)
    assert not kept or "w1" not in plan.members


def crowded(
    rows: tuple[int, ...], states: tuple[float, ...], nodes: str
) -> tuple[Play, tuple[WorkerId, ...]]:
    """Returns a run of workers on ``nodes`` after five steps, and its members; it has the fewest shards for
    which there is room.
    """
    play = Play(rules(min_workers=2, max_workers=len(states), layout=LayoutRule(None, None, 2, "fit")))
    play.tell(ev.Capacity(len(states)))
    for node in dict.fromkeys(nodes.split()):
        play.tell(ev.KeeperUp(NodeId(node)))
    for number, (room, node) in enumerate(zip(states, nodes.split(), strict=True), 1):
        play.tell(ev.Joined(WorkerId(f"w{number}"), NodeId(node), "cpu", classes(rows), states=room))
    members = reformed(play).plan.members
    play.steps(1, 5)
    return play, members


def test_no_plan_loses_steps_if_all_holders_may_be_members() -> None:
    """Every small world whose rule leaves both degrees free: all that are there may form one replica,
    whatever shard degree each needs.
    """
    worlds = 0
    for number, twice, shards, use, least in product(
        range(2, 6), range(2), (1, 2), USES, product((1, 2, 3), repeat=2)
    ):
        cut, by = number - twice, rules(max_workers=number, layout=LayoutRule(None, None, shards, use))
        workers = {
            WorkerId(f"w{n}"): Worker(NODES[n % 2], "cpu", 0.0, least_shard=(1, 1, 1, *least)[-1 - n])
            for n in range(number)
        }
        held = {name: (Holding(name, Version(5, 2), cell(cut, n % cut)),) for n, name in enumerate(workers)}
        workers = {name: replace(each, holdings=held[name]) for name, each in workers.items()}
        run = RunState(
            1, 2, Waiting(0.0), Members(workers, classes=CLASSES), Cluster(keepers=NODES), History(LINEAGE)
        )
        plan, layout = make_plan(run, by), layout_of(run, tuple(workers), by)
        if plan is None or layout is None:
            continue
        assert plan.layout.world >= layout.world and all(
            workers[each].least_shard <= plan.layout.dp_shard for each in plan.members
        )
        if max(least) <= number:
            assert (plan.version, plan.tier) == (Version(5, 2), "live"), (number, cut, by.layout, least)
            worlds += plan.layout != layout
    assert worlds > 10
