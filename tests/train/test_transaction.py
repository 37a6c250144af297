"""A step is a transaction: all members apply it or none does; garbage is no commit; what was settled is what
the others applied.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from elastic.engine.world import World
from elastic.errors import FencedOff
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.plan.placement import data_rank, reporters
from elastic.plan.transfer import Holding
from elastic.protocol.commit_record import (
    DUE,
    HEADER,
    LAST,
    NO_COPIES,
    NO_SAVE,
    NO_USAGE,
    PAUSE,
    SAVE_AND_PAUSE,
    BadCount,
    BadRecord,
    CommitShape,
    Copied,
    Outcome,
    RecordHead,
    Unlike,
    Usage,
    conclude,
    head_of,
    is_saved,
    torn_records,
)
from elastic.train.apply_fence import ApplyFence
from elastic.train.own_faults import Faults
from elastic.train.record import blank_record, fill_record
from elastic.train.step import Share, update
from tests.support.calls import calls
from tests.support.carried import Broken, Healed, broken, go_on, holdings
from tests.support.ranks import Ranks
from tests.support.segments import finish, member, shard_hash, train_here
from tests.support.toy_axes import registered
from tests.support.toys import small_job

# ---- all or none


def refuse() -> int:
    """A boundary that fails: after the gradients are prepared, before the commit."""
    raise ZeroDivisionError


WIDE, SQUARE = Layout(1, 3), Layout(2, 2)
POINTS = ("forward", "backward", "before_commit", "boundary")


@pytest.mark.parametrize(
    "layouts",
    [(WIDE, SQUARE, SQUARE, WIDE), pytest.param((SQUARE, WIDE, WIDE, SQUARE), marks=pytest.mark.full)],
    ids=["default", "swapped"],
)
def test_a_member_that_fails_before_the_commit_leaves_all_untouched(
    ranks: Ranks, tmp_path: Path, layouts: tuple[Layout, ...]
) -> None:
    """Promise 2: world after world fails in its second step, each at another point.  Parameters and moments
    of all members are then as before that step, and the next world goes on from there, to the bits of a run
    that is never disturbed.
    """
    faults = [
        {
            "point": point,
            "step": number + 2,
            "world_rank": 1,
            "kind": "exception",
            "generation": ranks.generation + number + 1,
        }
        for number, point in enumerate(POINTS)
        if point != "boundary"
    ]
    job, held, lineage = small_job(tmp_path, faults=faults), tuple[Holding, ...](), list[tuple[int, int]]()
    for number, (point, layout) in enumerate(zip(POINTS, layouts, strict=True)):
        members: list[Broken] = ranks.run(
            layout, broken, job, 1, refuse if point == "boundary" else None, held
        )
        assert members[1].error == ("ZeroDivisionError" if point == "boundary" else "InjectedError"), (
            "the fault happened"
        )
        version = Version(number + 1, ranks.generation)
        for each in members:
            assert each.error and each.untouched and each.version == version
        assert (members[1].prepared == number + 2) == (point == "boundary")
        held = holdings(layout, version, range(3))
        finish(job, layout, [each.receipt for each in members], version, tuple(lineage))
        lineage.append((version.generation, version.step))
    steps = len(POINTS) + 1
    healed: list[Healed] = ranks.run(Layout(3, 1), go_on, job, held, steps)
    assert not any(each.wrong for each in healed)
    found = finish(
        job,
        Layout(3, 1),
        [each.receipt for each in healed if each.receipt],
        healed[0].version,
        tuple(lineage),
    )
    assert found == train_here(small_job(tmp_path / "alone"), steps).hash


# ---- settled


class FenceAt(Faults):
    """Fences this member at one point of one step, as a control thread does that is quicker than the training
    thread.
    """

    def __init__(self, fence: ApplyFence, point: str, step: int) -> None:
        super().__init__(())
        self.fence, self.at = fence, (point, step)

    def strike(self, point: str, step: int, world: World) -> None:
        if (point, step) == self.at:
            with self.fence as rules:
                rules.fence(world.generation)


@dataclass
class Settled:
    """The report of one member about step 2."""

    barred: bool
    untouched: bool
    prepared: int | None
    outcomes: list[Outcome]
    hash: str


def undisturbed(world: World, job: Job) -> str:
    with member(world, job, Version(0, 0)) as me:
        me.step()
        me.step()
        return shard_hash(me.state.shard)


def fenced_in_the_commit(world: World, job: Job, slow: int) -> Settled:
    """All see the commit of step 2, but ``slow`` is fenced before it applies the step; then another member
    tells it the outcome.
    """
    with member(world, job, Version(0, 0)) as me:
        me.step()
        before, barred = shard_hash(me.state.shard), False
        if world.rank == slow:
            me.session.faults = FenceAt(me.fence, "before_update", 2)
        try:
            me.step()
        except FencedOff:
            barred = True
        untouched, prepared = shard_hash(me.state.shard) == before, me.fence.member.prepared
        evidence: list[Outcome | None] = [None] * world.size
        torch.distributed.all_gather_object(evidence, me.fence.member.outcomes[-1])
        if barred:
            outcome = max((each for each in evidence if each is not None), key=lambda each: each.step)
            with me.fence.applying(outcome, settled=True):
                update(me.session, me.state, outcome)
        return Settled(
            barred, untouched, prepared, list(me.fence.member.outcomes), shard_hash(me.state.shard)
        )


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (Layout(3, 1), "adamw"),
        pytest.param(Layout(1, 3), "adamw", marks=pytest.mark.full),
        (Layout(1, 3), "muon"),
    ],
    ids=str,
)
def test_a_settled_outcome_is_applied_as_the_others_applied_it(
    ranks: Ranks, tmp_path: Path, layout: Layout, kind: str
) -> None:
    """Promise 2: a member that is fenced before its update applies nothing; the settled outcome then gives it
    the undisturbed bits.
    """
    job = small_job(tmp_path, optim={"lr": 1e-2, "kind": kind})
    members: list[Settled] = ranks.run(layout, fenced_in_the_commit, job, 1)
    assert [each.barred for each in members] == [False, True, False]
    assert [each.untouched for each in members] == [False, True, False]
    assert [each.prepared for each in members] == [None, 2, None]
    assert [each.hash for each in members] == ranks.run(layout, undisturbed, job)
    assert all(each.outcomes == members[0].outcomes for each in members)


# ---- garbage

SHAPE = CommitShape(incarnation=2, generation=5, microbatches=8, microbatch=2, layout=Layout(3))
SIZE = SHAPE.fields * 8


@cache
def gathered(
    step: int, asked: tuple[int, ...] = (0, 0, 0), copied: tuple[Copied, ...] = (NO_COPIES,) * 3
) -> bytes:
    """The records of all members, as ``commit`` gathers them."""
    draw = torch.Generator().manual_seed(step)
    norm = torch.rand((), generator=draw, dtype=torch.float64)
    records = []
    for rank in range(SHAPE.world):
        share = Share([], [], [])
        for round_ in range(SHAPE.rounds):
            index = SHAPE.deal.microbatch_of(round_, rank)
            share.losses.append(torch.rand((), generator=draw))
            share.counts.append(torch.tensor(32 - rank))
            share.samples.append(
                () if index is None else (step * 100 + 2 * index, step * 100 + 2 * index + 1)
            )
        records.append(
            fill_record(
                blank_record(SHAPE, head_of(SHAPE, rank, step, asked[rank], copied[rank]), share), share, norm
            )
        )
    return torch.cat(records).numpy().tobytes()


def never_another(garbage: bytes) -> None:
    """Asserts that ``garbage`` gives no outcome, or the true one."""
    try:
        found = conclude(SHAPE, 7, garbage)
    except BadRecord:
        assert garbage != gathered(7)
    else:
        assert found == conclude(SHAPE, 7, gathered(7))


def test_what_was_gathered_says_what_was_put_in() -> None:
    """Control: all eight microbatches, in order, from three members of which one idles in the last round."""
    outcome = conclude(SHAPE, 7, gathered(7))
    assert outcome.samples == tuple((700 + 2 * i, 701 + 2 * i) for i in range(8))
    assert outcome.counts == tuple(32 - i % 3 for i in range(8))
    assert (outcome.step, outcome.generation, outcome.finite) == (7, 5, True)
    assert conclude(SHAPE, 6, gathered(6)) != outcome


@pytest.mark.parametrize(("axis", "speakers"), [("tp", (0, 2)), ("pp", (2, 3))])
def test_losses_and_norm_come_from_the_members_that_report_them(axis: str, speakers: tuple[int, int]) -> None:
    """Two data ranks have two members each.  One of each pair reports, and the numbers of the other count for
    nothing.
    """
    with registered():
        shape = CommitShape(
            incarnation=2, generation=5, microbatches=4, microbatch=1, layout=Layout(2, 1, ((axis, 2),))
        )
        records = []
        for rank in range(shape.world):
            share = Share([], [], [])
            for round_ in range(shape.rounds):
                share.losses.append(torch.tensor(float(10 * rank + round_)))
                share.counts.append(torch.tensor(100 * rank + round_))
                share.samples.append((round_ * 2 + data_rank(shape.layout, rank),))
            records.append(
                fill_record(
                    blank_record(shape, head_of(shape, rank, 7, 0), share),
                    share,
                    torch.tensor(float(rank), dtype=torch.float64),
                )
            )
        outcome = conclude(shape, 7, torch.cat(records).numpy().tobytes())
    first, second = speakers
    assert outcome.losses == (10.0 * first, 10.0 * second, 10.0 * first + 1, 10.0 * second + 1)
    assert outcome.counts == (100 * first, 100 * second, 100 * first + 1, 100 * second + 1)
    assert outcome.samples == ((0,), (1,), (2,), (3,))
    assert outcome.squared_norm == float(first)


@pytest.mark.fast
def test_sums_of_several_dtypes_are_told_exactly() -> None:
    """A loss may give counts as integers in one microbatch and as float32, which would round them, in
    another; sums in float64 too.
    """
    counts = [
        torch.tensor(2**24 + 1 + index) if index % 3 else torch.tensor(7.0)
        for index in range(SHAPE.microbatches)
    ]
    losses = [
        torch.tensor(0.1 * (index + 1), dtype=(torch.float32, torch.float64)[index % 2])
        for index in range(SHAPE.microbatches)
    ]
    records = []
    for rank in range(SHAPE.world):
        mine = [SHAPE.deal.microbatch_of(round_, rank) or 0 for round_ in range(SHAPE.rounds)]
        share = Share(
            [losses[each] for each in mine],
            [counts[each] for each in mine],
            [(each, each + 1) for each in mine],
        )
        norm = torch.ones((), dtype=torch.float64)
        records.append(fill_record(blank_record(SHAPE, head_of(SHAPE, rank, 7, 0), share), share, norm))
    outcome = conclude(SHAPE, 7, torch.cat(records).numpy().tobytes())
    assert outcome.counts == tuple(int(each) for each in counts) and outcome.losses == tuple(
        float(each) for each in losses
    )


@pytest.mark.fast
@pytest.mark.parametrize("wrong", [4.5, -1.0, 0.3, math.nan, math.inf])
def test_a_count_that_is_no_number_of_terms_is_no_outcome(wrong: float) -> None:
    """The first such microbatch is named, whoever reports it.  The control: the idle round of a member may
    have any count.
    """
    counts = {index: 7.0 for index in range(SHAPE.microbatches)}

    def concluded() -> Outcome:
        records = []
        for rank in range(SHAPE.world):
            share = Share([torch.ones(())] * SHAPE.rounds, [], [])
            for round_ in range(SHAPE.rounds):
                index = SHAPE.deal.microbatch_of(round_, rank)
                share.counts.append(torch.tensor(wrong if index is None else counts[index]))
                share.samples.append(() if index is None else (index, index + 1))
            norm = torch.ones((), dtype=torch.float64)
            records.append(fill_record(blank_record(SHAPE, head_of(SHAPE, rank, 7, 0), share), share, norm))
        return conclude(SHAPE, 7, torch.cat(records).numpy().tobytes())

    assert concluded().counts == (7,) * SHAPE.microbatches
    counts[3] = counts[4] = wrong
    with pytest.raises(BadCount) as error:
        concluded()
    assert (error.value.index, error.value.samples) == (3, (3, 4)) and repr(error.value.count) == repr(
        float(torch.tensor(wrong))
    )


def test_what_one_member_asks_for_all_do() -> None:
    outcomes = [
        conclude(SHAPE, 7, gathered(7, asked)) for asked in ((0, 0, PAUSE), (SAVE_AND_PAUSE, 0, PAUSE))
    ]
    assert [(each.boundary, each.saves) for each in outcomes] == [(PAUSE, False), (SAVE_AND_PAUSE, True)]


def test_a_save_waits_for_who_has_no_room_and_the_last_one_for_nobody() -> None:
    """If one member remembers that a save is due, all make it."""

    def said(*saves: tuple[int, int]) -> tuple[bool, bool | None]:
        found = conclude(
            SHAPE, 7, gathered(7, copied=tuple(Copied(save=save, behind=behind) for save, behind in saves))
        )
        return found.behind, found.saves

    assert said((NO_SAVE, 0), (NO_SAVE, 0), (NO_SAVE, 0)) == (False, False)
    assert said((NO_SAVE, 0), (DUE, 0), (NO_SAVE, 0)) == (False, True)
    assert said((DUE, 0), (DUE, 0), (DUE, 1)) == (True, False)
    assert said((LAST, 0), (LAST, 0), (LAST, 1)) == (True, True)


def test_of_copies_the_slowest_member_decides() -> None:
    outcome = conclude(
        SHAPE, 7, gathered(7, copied=(Copied(5, 3, 1, 10), Copied(4, 3, 2, 0), Copied(5, -1, 0, 12)))
    )
    assert (outcome.copied_through, outcome.buddied_through, outcome.copy_every, outcome.buddy_every) == (
        4,
        -1,
        2,
        12,
    )


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("member", [0, 2])
def test_a_norm_that_is_not_finite_on_one_member_is_said_to_all(member: int, wrong: float) -> None:
    """Then no member applies the step.  Control: with finite norms the step is applied."""

    def finite(norms: list[float]) -> bool:
        records = []
        for rank, norm in enumerate(norms):
            share = Share(
                [torch.ones(())] * SHAPE.rounds, [torch.ones(())] * SHAPE.rounds, [(1, 2)] * SHAPE.rounds
            )
            records.append(
                fill_record(
                    blank_record(SHAPE, head_of(SHAPE, rank, 7, 0), share),
                    share,
                    torch.tensor(norm, dtype=torch.float64),
                )
            )
        return conclude(SHAPE, 7, torch.cat(records).numpy().tobytes()).finite

    assert finite([3.0, 3.0, 3.0])
    assert not finite([wrong if rank == member else 3.0 for rank in range(SHAPE.world)])


def torn_one_by_one(gathered: bytes, world: int, fields: int) -> list[int]:
    """Finds the torn records as the product does, but word by word."""
    found = []
    for rank in range(world):
        *words, told = struct.unpack_from(f"<{fields}Q", gathered, rank * fields * 8)
        if sum((2 * i + 1) * (word ^ word >> 32) for i, word in enumerate(words)) % 2**64 != told:
            found.append(rank)
    return found


words = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from((0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1)))


@given(st.integers(1, 5), st.lists(words, min_size=1, max_size=6), st.sets(st.integers(0, 4)), st.data())
def test_checksums_of_all_members_at_once_are_those_of_one_after_the_other(
    world: int, first: list[int], bent: set[int], data: st.DataObject
) -> None:
    records, fields = b"", len(first) + 1
    for rank in range(world):
        row = data.draw(st.lists(words, min_size=len(first), max_size=len(first)))
        right = sum((2 * i + 1) * (word ^ word >> 32) for i, word in enumerate(row)) % 2**64
        records += struct.pack(
            f"<{fields}Q", *row, right ^ (1 << data.draw(st.integers(0, 63))) if rank in bent else right
        )
    assert (
        torn_records(records, world, fields)
        == torn_one_by_one(records, world, fields)
        == sorted(bent & set(range(world)))
    )


def test_what_a_checksum_costs_does_not_grow_with_the_members() -> None:
    """The cost is counted in calls of Python functions.  The control: word by word, it grows."""

    def cost(check: Callable[[bytes, int, int], list[int]], world: int) -> int:
        records = bytes(8 * 21 * world)
        assert check(records, world, 21) == []
        return calls(lambda: check(records, world, 21))

    assert cost(torn_records, 1024) == cost(torn_records, 4)
    assert cost(torn_one_by_one, 1024) > 100 * cost(torn_one_by_one, 4)


def drawn_records(shape: CommitShape, seed: int, orders: Sequence[float] = ()) -> bytes:
    """Returns the records of a whole world, with other numbers in every field of every member, and right
    checksums.
    """
    draw, records = random.Random(seed), b""
    for rank in range(shape.world):
        copied = Copied(*(draw.randrange(-1, 9) for _ in range(4)), draw.randrange(3), draw.randrange(2))
        memory = draw.randrange(2**40), draw.randrange(2**40)
        usage = Usage(draw.random(), draw.random(), *memory, draw.random() * draw.choice((1, 1, 9)))
        order = orders[rank] if orders else 0
        head = head_of(shape, rank, 7, draw.randrange(3), copied, usage, order)._replace(
            finite=draw.random() < 0.9, squared_norm=draw.random()
        )
        rounds = [
            (draw.random(), *(draw.randrange(2**53) for _ in range(1 + shape.microbatch)))
            for _ in range(shape.rounds)
        ]
        record = struct.pack(f"<{shape.fields - 1}d", *head, *(each for round_ in rounds for each in round_))
        bits = struct.unpack(f"<{shape.fields - 1}Q", record)
        records += record + struct.pack(
            "<Q", sum((2 * i + 1) * (word ^ word >> 32) for i, word in enumerate(bits)) % 2**64
        )
    return records


def concluded_one_by_one(shape: CommitShape, step: int, gathered: bytes) -> Outcome:
    """Concludes the outcome as the product does, but member by member and microbatch by microbatch."""
    records = list(struct.iter_unpack(f"<{shape.fields}d", gathered))
    heads = [RecordHead(*record[:HEADER]) for record in records]
    speakers, size = reporters(shape.layout), 2 + shape.microbatch
    parts = {}
    for number, world_rank in enumerate(speakers):
        for round_ in range(shape.rounds):
            index = shape.deal.microbatch_of(round_, number)
            if index is not None:
                parts[index] = records[world_rank][HEADER + round_ * size :][:size]
    ordered = [parts[i] for i in range(shape.microbatches)]
    boundary, behind = max(int(head.boundary) for head in heads), any(head.behind > 0 for head in heads)
    most: dict[str, tuple[float, int]] = {}
    for name in vars(NO_USAGE):
        for rank, head in enumerate(heads):
            if name not in most or getattr(head, name) > most[name][0]:
                most[name] = (getattr(head, name), rank)
    return Outcome(
        step=step,
        generation=shape.generation,
        squared_norm=heads[speakers[0]].squared_norm,
        losses=tuple(part[0] for part in ordered),
        counts=tuple(int(part[1]) for part in ordered),
        samples=tuple(tuple(int(i) for i in part[2:]) for part in ordered),
        finite=all(head.finite == 1.0 for head in heads),
        boundary=boundary,
        copied_through=int(min(head.copied_through for head in heads)),
        buddied_through=int(min(head.buddied_through for head in heads)),
        behind=behind,
        copy_every=int(max(head.copy_every for head in heads)),
        buddy_every=int(max(head.buddy_every for head in heads)),
        saves=is_saved(boundary, int(max(head.save for head in heads)), behind),
        usage=Usage(**{name: type(getattr(NO_USAGE, name))(value) for name, (value, _) in most.items()}),
        usage_ranks=tuple(rank for _, rank in most.values()),
    )


# only every second member reports
@example(layout=Layout(2, 1, (("pp", 2),)), microbatches=5, microbatch=2, seed=0)
@example(layout=Layout(1, 1, (("pp", 2),)), microbatches=3, microbatch=1, seed=0)  # only one
@given(
    st.builds(Layout, st.integers(1, 4), st.integers(1, 3)),
    st.integers(1, 30),
    st.integers(1, 3),
    st.integers(0, 2**32),
)
def test_all_records_at_once_say_what_they_say_one_after_the_other(
    layout: Layout, microbatches: int, microbatch: int, seed: int
) -> None:
    with registered():
        shape = CommitShape(
            incarnation=2, generation=5, microbatches=microbatches, microbatch=microbatch, layout=layout
        )
        records = drawn_records(shape, seed)
        assert conclude(shape, 7, records) == concluded_one_by_one(shape, 7, records)


@pytest.mark.parametrize("orders", [(5.0, 5.0, 5.0), (5.0, 5.0, 6.0), (0.0, 5.0, 5.0)])
def test_members_that_ran_unlike_blocks_commit_nothing(orders: tuple[float, ...]) -> None:
    """C4: one digest of what they gathered and summed differs.  The control, the first one: they are alike."""
    shape = CommitShape(incarnation=2, generation=5, microbatches=3, microbatch=1, layout=Layout(1, 3))
    records = drawn_records(shape, 0, orders)
    if len({*orders}) == 1:
        assert conclude(shape, 7, records) == concluded_one_by_one(shape, 7, records)
        return
    with pytest.raises(Unlike):
        conclude(shape, 7, records)


@pytest.mark.parametrize(
    ("orders", "alike"),
    [((5.0, 5.0, 6.0, 6.0), True), ((5.0, 6.0, 6.0, 6.0), False), ((5.0, 5.0, 6.0, 5.0), False)],
)
def test_members_of_other_stages_begin_other_collectives(orders: tuple[float, ...], alike: bool) -> None:
    """Two replicas of two stages: each stage agrees with itself, and a difference within one is still found."""
    with registered():
        shape = CommitShape(
            incarnation=2,
            generation=5,
            microbatches=4,
            microbatch=1,
            layout=Layout(2, 1, (("pp", 2),)),
        )
        records = drawn_records(shape, 0, orders)
        if alike:
            assert conclude(shape, 7, records) == concluded_one_by_one(shape, 7, records)
        else:
            with pytest.raises(Unlike):
                conclude(shape, 7, records)


def test_what_concluding_costs_does_not_grow_with_the_members() -> None:
    """N9: it is counted in calls of functions, at four microbatches a member.  The control: one by one, it
    grows.
    """

    def cost(conclude: Callable[[CommitShape, int, bytes], Outcome], world: int) -> int:
        shape = CommitShape(
            incarnation=2, generation=5, microbatches=4 * world, microbatch=1, layout=Layout(world)
        )
        records = drawn_records(shape, 0)
        conclude(shape, 7, records)  # the members that report are found once for each layout
        return calls(lambda: conclude(shape, 7, records))

    assert cost(conclude, 512) < 1.1 * cost(conclude, 4)
    assert cost(concluded_one_by_one, 512) > 50 * cost(concluded_one_by_one, 4)


@example(0, 6, 8)  # 1.0 and -1.0: their difference is the highest bit alone
@given(st.integers(0, 2), st.integers(0, SHAPE.fields - 1), st.integers(0, SHAPE.fields - 1))
def test_words_in_another_order_are_a_bad_record(rank: int, one: int, other: int) -> None:
    words = [gathered(7)[at : at + 8] for at in range(0, 3 * SIZE, 8)]
    i, j = rank * SHAPE.fields + one, rank * SHAPE.fields + other
    words[i], words[j] = words[j], words[i]
    never_another(b"".join(words))
    if words[i] != words[j]:
        with pytest.raises(BadRecord):
            conclude(SHAPE, 7, b"".join(words))


@given(st.integers(0, 3 * SIZE - 1), st.integers(1, 255))
def test_any_byte_changed_is_a_bad_record(position: int, flips: int) -> None:
    data = bytearray(gathered(7))
    data[position] ^= flips
    with pytest.raises(BadRecord):
        conclude(SHAPE, 7, bytes(data))


@given(
    st.integers(0, 3 * SIZE), st.integers(0, 3 * SIZE), st.sampled_from(["zeros", "the step before", "ones"])
)
def test_a_part_that_never_arrived_is_never_another_outcome(a: int, b: int, instead: str) -> None:
    """An aborted collective leaves what the buffer held: nothing, or the records of an earlier step."""
    first, last = min(a, b), max(a, b)
    left = {"zeros": bytes(3 * SIZE), "ones": b"\xff" * 3 * SIZE, "the step before": gathered(6)}[instead]
    never_another(gathered(7)[:first] + left[first:last] + gathered(7)[last:])


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 0, 2), (2, 1, 0)])
def test_records_in_others_places_are_bad(order: tuple[int, ...]) -> None:
    data = gathered(7)
    with pytest.raises(BadRecord):
        conclude(SHAPE, 7, b"".join(data[rank * SIZE : (rank + 1) * SIZE] for rank in order))


@pytest.mark.parametrize("shape", [{"generation": 4}, {"incarnation": 1}])
def test_records_of_another_world_are_bad(shape: dict[str, int]) -> None:
    """Promise 3: records that carry other numbers than the world's are refused."""
    with pytest.raises(BadRecord):
        conclude(
            CommitShape(
                **(
                    {
                        "incarnation": 2,
                        "generation": 5,
                        "microbatches": 8,
                        "microbatch": 2,
                        "layout": Layout(3),
                    }
                    | shape
                )
            ),
            7,
            gathered(7),
        )
