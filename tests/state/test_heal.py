"""Healing from live members between any two worlds: nothing moves that is there already, nothing is harmed,
the bits go on.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastic.engine.optim.adamw import ADAMW
from elastic.engine.optim.base import rule_of
from elastic.engine.world import World
from elastic.errors import FencedOff, ModelError, StateMissing
from elastic.ids import NodeId, Version, WorkerId
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.plan.transfer import Holding, moves
from elastic.protocol.plan import Plan
from elastic.state.shard import Shard
from elastic.train import heal
from elastic.train.blame import classify, touch
from elastic.train.gauges.counters import OPERATIONS
from elastic.train.heal import _exchange, nothing
from elastic.train.model import State, build_model, builder_of, tensors_of
from elastic.train.step import Session
from tests.support.carried import Begun, Healed, begin, go_on, holdings
from tests.support.ranks import Ranks
from tests.support.segments import finish, member, train_here
from tests.support.toys import Own, own, toy_job

BROKE_AT, STEPS = 2, 3


def small_job(bucket: Path, **changes: Any) -> Job:
    """Returns a toy job with four microbatches a step."""
    return toy_job(bucket, global_batch=4, microbatch=1, **changes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the hash of a run of ``small_job`` on one worker."""
    return train_here(small_job(tmp_path_factory.mktemp("one")), STEPS).hash


def first_world(ranks: Ranks, job: Job, layout: Layout, last: int = BROKE_AT) -> Version:
    """Makes ``last`` steps in ``layout`` and returns the version; the members keep the state, and the bucket
    has it for comparison.
    """
    begun: list[Begun] = ranks.run(layout, begin, job, last)
    finish(job, layout, [each.receipt for each in begun], begun[0].version)
    return begun[0].version


def ended(job: Job, layout: Layout, members: list[Healed]) -> str:
    """Returns the hash of the state at the end."""
    receipts = [each.receipt for each in members if each.receipt is not None]
    return finish(job, layout, receipts, members[0].version)


def assert_healed(members: list[Healed]) -> None:
    for each in members:
        assert each.wrong == []
        assert each.intact
        assert each.received == each.not_held == each.calls.bytes("recv")
    assert sum(each.calls.bytes("send") for each in members) == sum(each.received for each in members)


WORLDS = [
    (Layout(2, 2), (0, 1, 2, 3)),
    (Layout(1, 4), (1, 2, 3)),
    (Layout(2, 2), (0, 1, 2, 3)),
    (Layout(2, 2), (0, 2, 3)),
    (Layout(2, 1), (0, 1)),
    (Layout(1, 3), (0, 1)),
    (Layout(4, 1), (0, 1, 2)),
    (Layout(1, 3), (0, 1, 2)),
]
"""Worlds one after the other, and the members of the world before that are still there; the first one follows
on a world of 3×1.
"""


def test_any_world_heals_from_any_other(ranks: Ranks, tmp_path: Path) -> None:
    """Promise 4: every slice has the old state's bits, only the bytes that a member lacked are sent, and the
    hash is undisturbed.
    """
    job, old = small_job(tmp_path), Layout(3, 1)
    version = first_world(ranks, job, old, 1)
    for step, (new, left) in enumerate(WORLDS, 2):
        present = [i for i in left if i < min(old.world, new.world)]
        members: list[Healed] = ranks.run(new, go_on, job, holdings(old, version, present), step)
        assert_healed(members)
        assert all(each.received > 0 for i, each in enumerate(members) if i not in present)
        found, old, version = ended(job, new, members), new, members[0].version
    assert found == train_here(job.replace(name="alone"), 1 + len(WORLDS)).hash


def test_a_buffer_that_the_model_does_not_save_is_state_too(ranks: Ranks, tmp_path: Path) -> None:
    """Its memory holds nothing in a new world, so it must be filled; that no export contains it is another
    matter.
    """
    job = small_job(tmp_path, model="tests.support.toys:own", model_args={})
    constants = [
        tensor.name
        for tensor in tensors_of(build_model(job, builder_of(job)), ADAMW)
        if tensor.kind == "constant"
    ]
    assert constants == ["scale"]
    alone = train_here(job.replace(name="alone"), STEPS)
    version = first_world(ranks, job, Layout(1, 2))
    members: list[Healed] = ranks.run(
        Layout(1, 3), go_on, job, holdings(Layout(1, 2), version, range(2)), STEPS
    )
    assert_healed(members)
    assert ended(job, Layout(1, 3), members) == alone.hash


def sharing() -> nn.Module:
    model = own()
    model.head.register_buffer("table", model.scale, persistent=False)
    return model


def test_a_buffer_of_several_modules_stays_one(tmp_path: Path) -> None:
    """The buffer has one name, and filling it fills it for all modules."""
    job = toy_job(tmp_path, model="tests.state.test_heal:sharing", model_args={})
    world = World.alone(torch.device("cpu"))
    try:
        model = State(job, builder_of(job), rule_of(job), world, Version(0, 0)).model
    finally:
        world.close()
    assert [name for name, _ in model.named_buffers()] == ["scale"]
    assert model.scale.data_ptr() == model.head.table.data_ptr()


def complex_numbers() -> nn.Module:
    model = own()
    model.register_buffer("turns", torch.ones(4, dtype=torch.complex64), persistent=False)
    return model


def test_what_no_checkpoint_can_hold_is_refused(tmp_path: Path) -> None:
    job = toy_job(tmp_path, model="tests.state.test_heal:complex_numbers", model_args={})
    with pytest.raises(
        ModelError,
        match=(
            r"'turns' of 'tests\.state\.test_heal:complex_numbers' is "
            r"torch\.complex64, .*view_as_real"
        ),
    ):
        build_model(job, builder_of(job))


def empty() -> nn.Module:
    model = own()
    model.nothing = nn.Parameter(torch.ones(1, 0))
    return model


def test_a_parameter_without_elements_is_refused(tmp_path: Path) -> None:
    job = toy_job(tmp_path, model="tests.state.test_heal:empty", model_args={})
    with pytest.raises(
        ModelError,
        match=(
            r"'nothing' of 'tests\.state\.test_heal:empty' has no elements \(shape \[1, "
            r"0\]\); correct model_a"
        ),
    ):
        build_model(job, builder_of(job))


class Normalising(Own):
    """A model with a running mean that depends on the microbatches computed here, and that is not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(29, track_running_stats=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.norm(super().forward(tokens).transpose(1, 2)).transpose(1, 2)
        return logits


class Rebinding(Own):
    """A model whose forward puts another tensor in the place of a buffer."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        self.scale = self.scale * 0.9
        return logits


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
@pytest.mark.parametrize(
    ("model", "refused"), [("Normalising", "norm.running_mean"), ("Rebinding", "scale"), ("own", "")]
)
def test_a_buffer_that_forward_changes_is_refused(tmp_path: Path, model: str, refused: str) -> None:
    """Another layout would give the buffer another value.  The control, ``own``, changes none; BatchNorm is
    in ``test_batch_norm.py``.
    """
    job = toy_job(tmp_path, model=f"tests.state.test_heal:{model}", model_args={})
    world = World.alone(torch.device("cpu"))
    try:
        with (
            member(world, job, Version(0, 0)) as me,
            pytest.raises(ModelError) if refused else nullcontext() as error,
        ):
            me.step()
    finally:
        world.close()
    if error is not None:
        assert re.search(rf"changed the buffer '({refused})' of .*BatchNorm", str(error.value))


def half_healed(world: World) -> tuple[str, str] | None:
    """World rank 0 waits for a slice; the other one's sockets close instead."""
    if world.rank:
        world.abort()
        return None
    try:
        _exchange({}, {1: [torch.empty(1000)]}, world, nothing)
    except Exception as error:
        return classify(error, partial(touch, world.device))
    raise AssertionError("nothing was sent, and something arrived")


def test_who_is_left_while_slices_are_exchanged_blames_its_peer(ranks: Ranks) -> None:
    """R8, R20: it does not blame the job, which would end at the second such error."""
    assert ranks.run(Layout(2, 1), half_healed) == [("peer", ""), None]


@pytest.mark.parametrize(
    "there", [(BROKE_AT + 1, BROKE_AT), (BROKE_AT + 1,), ()], ids=["both", "another version", "none"]
)
def test_only_the_version_of_the_plan_is_taken(tmp_path: Path, there: tuple[int, ...]) -> None:
    """A worker may still hold another version in the same layout, as one that applied a step which is
    dropped.
    """
    job, worker = small_job(tmp_path), WorkerId("w0")
    world = World.alone(torch.device("cpu"))
    try:
        with member(world, job, Version(0, 0), prefetch=0) as me:
            state, version = me.state, Version(BROKE_AT, 1)
            cell, wanted = (
                state.shard.cell,
                {key: torch.full_like(value, BROKE_AT) for key, value in state.shard.values.items()},
            )
            held = [
                Shard(
                    Version(step, 1), cell, {key: torch.full_like(each, step) for key, each in wanted.items()}
                )
                for step in there
            ]
            plan = Plan(
                1, 2, Layout(1, 1), (worker,), version, "live", (Holding(worker, version, cell),), NodeId("n")
            )
            todo = moves(state.tensors, plan.holders, plan.layout, plan.members, plan.nodes)
            if BROKE_AT not in there:
                with pytest.raises(StateMissing, match="which does not hold this slice"):
                    heal.from_members(state, plan, worker, held, todo)
                return
            heal.from_members(state, plan, worker, held, todo)
            assert all(torch.equal(state.shard.values[key], value) for key, value in wanted.items())
    finally:
        world.close()


def test_half_way_comes_for_those_too_who_exchange_nothing() -> None:
    """A fault or a fence may have to act on such a member at that point."""
    world, times = World.alone(torch.device("cpu")), list[int]()
    try:
        assert _exchange({}, {}, world, lambda: times.append(1)) == 0 and times == [1]
    finally:
        world.close()


def fenced_between_two_rounds(world: World) -> tuple[int, str]:
    """Returns how often world rank 0 launched operations, and why it left; it does not wait for a member out
    of reach.
    """
    launched, hooks = [], []
    launch = world.exchange

    def exchange(operations: list[dist.P2POp]) -> list[dist.Work]:
        launched.append(len(operations))
        return launch(operations)

    def hook() -> None:
        hooks.append(1)
        if len(hooks) == 2 and world.rank == 0:
            raise FencedOff("fenced")

    world.exchange = exchange  # type: ignore[method-assign]
    part = [torch.ones(20)]
    try:
        _exchange(*(({1: part}, {}) if world.rank == 0 else ({}, {0: part})), world, hook)
    except Exception as error:
        return len(launched), type(error).__name__
    return len(launched), ""


def test_who_is_fenced_between_two_messages_launches_no_more(ranks: Ranks) -> None:
    """R8: a launch after the abort would leave NCCL unable to form the next world."""

    assert ranks.run(Layout(2, 1), small, fenced_between_two_rounds)[0] == (1, "FencedOff")


def small(world: World, function: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heal, "MESSAGE", 40)
        if world.rank == 1:
            threading.Timer(3, world.abort).start()  # nobody sends it the second message
        return function(world)


def test_parts_of_several_widths_in_one_message(ranks: Ranks) -> None:
    """A part of three bytes comes before parts of two-byte and eight-byte numbers."""
    assert ranks.run(Layout(2, 1), of_several_widths) == [True, True]


def of_several_widths(world: World) -> bool:
    sent = [
        torch.tensor([True, False, True]),
        torch.ones(3, dtype=torch.bfloat16),
        torch.linspace(0, 1, 5, dtype=torch.float64),
        torch.tensor(7),
    ]
    found = [torch.zeros_like(part) for part in sent]
    _exchange(*(({1: sent}, {}) if world.rank == 0 else ({}, {0: found})), world, nothing)
    return world.rank == 0 or all(torch.equal(one, other) for one, other in zip(sent, found, strict=True))


def test_a_message_holds_whole_rows_in_order() -> None:
    """A message has at most ``MESSAGE`` bytes, or one row; small parts share a message, and nothing is left
    out.
    """
    parts = [
        torch.arange(6.0),
        torch.tensor(1.0),
        torch.arange(200.0).view(4, 50),
        torch.empty(0),
        torch.arange(3.0),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heal, "MESSAGE", 64)
        messages = heal._messages(parts)
    assert [[piece.numel() for piece in message] for message in messages] == [
        [6, 1],
        [50],
        [50],
        [50],
        [50],
        [0, 3],
    ]
    flat = torch.cat([piece.flatten() for message in messages for piece in message])
    assert torch.equal(flat, torch.cat([part.flatten() for part in parts]))
    assert all(
        piece.untyped_storage().data_ptr() in {part.untyped_storage().data_ptr() for part in parts}
        for m in messages
        for piece in m
    )


def test_what_several_hold_is_sent_by_all_of_them(ranks: Ranks, tmp_path: Path) -> None:
    """Layout 3×1 becomes 4×1: a newcomer takes a third of the state from each replica, give or take one
    tensor.
    """
    job = small_job(tmp_path)
    version = first_world(ranks, job, Layout(3, 1), 1)
    members: list[Healed] = ranks.run(Layout(4, 1), go_on, job, holdings(Layout(3, 1), version, range(3)), 1)
    assert_healed(members)
    sent = [each.calls.bytes("send") for each in members]
    largest = max(4 * tensor.whole().count for tensor in tensors_of(build_model(job, builder_of(job)), ADAMW))
    assert [each.received for each in members[:3]] == [0, 0, 0] and sent[3] == 0
    assert max(sent[:3]) - min(sent[:3]) <= largest < sum(sent) / 10


def in_small_messages(world: World, *arguments: Any) -> Healed:
    """Calls ``go_on`` with messages so small that an exchange takes many rounds and tensors are cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heal, "MESSAGE", 2000)
        return go_on(world, *arguments)


def test_a_world_that_broke_while_it_healed(ranks: Ranks, undisturbed: str, tmp_path: Path) -> None:
    """Layout 1×3 becomes 2×2, which makes no step, and then 1×4; shards of both older layouts are held, and
    each serves.

    The staged bytes are bounded for any size of a shard: many messages bring what one does.
    """
    job = small_job(tmp_path)
    version = first_world(ranks, job, Layout(1, 3))
    first = holdings(Layout(1, 3), version, range(3))
    assert_healed(ranks.run(Layout(2, 2), in_small_messages, job, first, BROKE_AT))
    both = (*first, *holdings(Layout(2, 2), version, range(4)))
    members: list[Healed] = ranks.run(Layout(1, 4), go_on, job, both, STEPS)
    assert_healed(members)
    assert ended(job, Layout(1, 4), members) == undisturbed


def test_one_bit_wrong_in_what_is_held(ranks: Ranks, undisturbed: str, tmp_path: Path) -> None:
    """Negative control: the comparison names the tensor, and the hash at the end is another."""
    job = small_job(tmp_path)
    version = first_world(ranks, job, Layout(1, 2))
    members: list[Healed] = ranks.run(
        Layout(2, 1), go_on, job, holdings(Layout(1, 2), version, range(2)), STEPS, 1
    )
    assert [len(each.wrong) for each in members] == [1, 1] and members[0].wrong == members[1].wrong
    assert ended(job, Layout(2, 1), members) != undisturbed


def seen_on_the_way(
    world: World, job: Job, version: Version
) -> tuple[list[tuple[str, int]], tuple[str, int]]:
    """Heals from the bucket, or initialises.  Returns the operation and the progress that a keeper would see
    at each piece, and after.
    """
    seen, plain = list[tuple[str, int]](), heal.Healing._got_further

    def now(session: Session) -> tuple[str, int]:
        return OPERATIONS[session.counters["operation"]], session.counters["collective"]

    def noted(self: heal.Healing, then: Callable[[], None]) -> None:
        plain(self, then)
        seen.append(now(self.session))

    heal.Healing._got_further = noted  # type: ignore[method-assign]
    try:
        with member(world, job, version) as me:
            return seen, now(me.session)
    finally:
        heal.Healing._got_further = plain  # type: ignore[method-assign]


def test_a_member_that_heals_is_seen_to_get_further(ranks: Ranks, tmp_path: Path) -> None:
    """Piece by piece, so the world gets more time as long as its bucket brings something.  The control: who
    initialises does not heal.
    """
    job = small_job(tmp_path)
    version = first_world(ranks, job, Layout(1, 2), 1)
    (healed, after), *_ = ranks.run(Layout(1, 1), seen_on_the_way, job, version)
    assert len(healed) > 20 and {operation for operation, _ in healed} == {"heals"} and after == ("forms", 0)
    times = [time_ms for _, time_ms in healed]
    assert times == sorted(times) and times[0] > 0
    ((begun, after),) = ranks.run(Layout(1, 1), seen_on_the_way, job, Version(0, 0))
    assert begun == [] and after == ("forms", 0)
