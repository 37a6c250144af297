"""Runs one world after another in the same processes.  Healing takes state from the memory of a process that
held it before.

Process i is worker ``w<i>`` and has world rank i in every world.  A process that is not among the holders
forgets its state, and joins as a newcomer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from elastic.engine.world import World
from elastic.ids import Version, WorkerId
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.plan.transfer import Holding
from elastic.protocol.commit_record import GO_ON
from elastic.protocol.member import Member as Rules
from elastic.runs.run import Run
from elastic.state.shard import Shard
from elastic.train.apply_fence import ApplyFence
from elastic.train.model import State
from storage.checkpoints import ShardReceipt
from storage.slices import WHOLE
from tests.support.cells import cell, shard_interval, shard_of, shard_slice
from tests.support.collectives import Calls, counting
from tests.support.ranks import Ranks
from tests.support.segments import Member, finish, member, raw, shard_hash, shards

CARRIED: list[ApplyFence] = []
"""The fence of this process in its last world, with the shards that the process holds; empty before the first
world.
"""


@dataclass
class Begun:
    """The end of the first world: its version, and what it saved for comparison."""

    version: Version
    receipt: ShardReceipt


@dataclass
class Healed:
    """The result of one member, for a later world."""

    received: int
    """Number of bytes received, by the worker's own counter."""
    calls: Calls
    """Collectives that it called while it healed."""
    not_held: int
    """Number of bytes of the new shard that this process did not hold before, counted row by row."""
    wrong: list[tuple[str, str]]
    """Names (kind, name) of slices that are not bitwise those of the checkpoint of the same version."""
    intact: bool
    """True if the shards held before were left as they were."""
    version: Version
    receipt: ShardReceipt | None


def holdings(layout: Layout, version: Version, workers: Sequence[int]) -> tuple[Holding, ...]:
    """Returns one holding for each of these processes, as members of a world of ``layout``."""
    return tuple(
        Holding(WorkerId(f"w{i}"), version, cell(layout.dp_shard, layout.coordinates(i)["dp_shard"]))
        for i in workers
    )


def begin(world: World, job: Job, last: int) -> Begun:
    """Trains from the initialisation to step ``last``, saves, and keeps the state."""
    with member(world, job, Version(0, 0)) as me:
        while me.state.shard.version.step < last:
            me.step()
        CARRIED[:] = [me.fence]
        return Begun(me.state.shard.version, me.save())


def fence_of(worker: WorkerId, holders: Sequence[Holding]) -> ApplyFence:
    """Returns the fence of this process in its last world if the worker is among the holders, else a new one."""
    return CARRIED.pop() if worker in {holding.worker for holding in holders} else ApplyFence(Rules(worker))


def go_on(world: World, job: Job, holders: Sequence[Holding], last: int, harmed: int | None = None) -> Healed:
    """Heals a world from ``holders`` and trains it to ``last``.  The process ``harmed`` has one bit of its
    held memory flipped.
    """
    fence = fence_of(WorkerId(f"w{world.rank}"), holders)
    if world.rank == harmed:
        flip_a_bit(shards(fence)[-1])
    held, before = shards(fence), [shard_hash(shard) for shard in shards(fence)]
    with counting() as calls, member(world, job, holders[0].version, fence=fence, holders=holders) as me:
        found = Healed(
            received=me.session.counters["healed_live_bytes"],
            calls=Calls(calls),
            not_held=bytes_not_held(me.state, held),
            wrong=differing(me),
            intact=before == [shard_hash(shard) for shard in held],
            version=me.state.shard.version,
            receipt=None,
        )
        while me.state.shard.version.step < last:
            me.step()
        if me.state.shard.version != found.version:
            found.version, found.receipt = me.state.shard.version, me.save()
        CARRIED[:] = [fence]
        return found


def hash_after_healing(ranks: Ranks, job: Job, last: int) -> str:
    """Begins in a world of 2×2, whose first member is lost after two steps; the others and a new one go on in
    1×4 to step ``last``.

    Asserts that what was healed is right, and that the new member received it.  Returns the hash of the state
    at the end.
    """
    old, new = Layout(2, 2), Layout(1, 4)
    begun: list[Begun] = ranks.run(old, begin, job, 2)
    finish(job, old, [each.receipt for each in begun], begun[0].version)
    members: list[Healed] = ranks.run(new, go_on, job, holdings(old, begun[0].version, [1, 2, 3]), last)
    assert all(each.wrong == [] for each in members) and members[0].received > 0
    return finish(
        job, new, [each.receipt for each in members if each.receipt is not None], members[0].version
    )


def flip_a_bit(shard: Shard) -> None:
    """Flips a bit in the last element of the first parameter of which this shard has a part."""
    value = next(
        value for (kind, _), value in sorted(shard.values.items()) if kind == "parameter" and value.numel()
    )
    value.view(torch.int32).view(-1)[-1] ^= 1


def differing(me: Member) -> list[tuple[str, str]]:
    """Returns (kind, name) of each slice of the shard that is not bitwise that of the bucket."""
    shard = me.state.shard
    wanted = {shard_slice(tensor, *shard_of(shard.cell)): tensor for tensor in me.state.tensors}
    reader = Run.open(me.session.job).checkpoints.open(shard.version)
    stored = dict(reader.read([part for part in wanted if part.count]))
    return [
        (t.kind, t.name)
        for part, t in wanted.items()
        if raw(shard.values[t.kind, t.name]) != stored.get(part, b"")
    ]


def bytes_not_held(state: State, held: Sequence[Shard]) -> int:
    """Returns the number of bytes that the transfer plan must bring to this member, computed from sets of
    rows.
    """
    total = 0
    for tensor in state.tensors:
        row_bytes = prod(tensor.shape[1:]) * state.shard.values[tensor.kind, tensor.name].element_size()
        if not tensor.shape or tensor.kind in WHOLE:
            total += 0 if held else prod(tensor.shape[:1]) * row_bytes
            continue
        rows = set(range(*shard_interval(tensor.shape[0], *shard_of(state.shard.cell))))
        for shard in held:
            rows -= set(range(*shard_interval(tensor.shape[0], *shard_of(shard.cell))))
        total += len(rows) * row_bytes
    return total


@dataclass
class Broken:
    """The result of one member of a world that broke in the middle of a step."""

    error: str
    untouched: bool
    """True if parameters and moments are bitwise those from before the step."""
    prepared: int | None
    version: Version
    receipt: ShardReceipt
    """Receipt of the state before the step."""


def broken(
    world: World, job: Job, culprit: int, boundary: Callable[[], int] | None, holders: Sequence[Holding] = ()
) -> Broken:
    """Runs a good step, then one in which ``culprit`` fails: in ``boundary``, or by a fault of the job.

    It begins with what ``holders`` hold, or with the initialisation.
    """
    fence = fence_of(WorkerId(f"w{world.rank}"), holders)
    with member(
        world, job, holders[0].version if holders else Version(0, 0), fence=fence, holders=holders or None
    ) as me:
        me.step()
        receipt, before, error = me.save(), shard_hash(me.state.shard), ""
        try:
            me.step(boundary if boundary is not None and world.rank == culprit else lambda: GO_ON)
        except Exception as found:  # whatever a collective or the injection raises
            error = type(found).__name__
            world.abort()
        CARRIED[:] = [me.fence]
        (shard,) = shards(me.fence)
        return Broken(error, before == shard_hash(shard), me.fence.member.prepared, shard.version, receipt)
