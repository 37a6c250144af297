"""Keepers' stores and workers' snapshots in one process, over a state of a few tensors, for tests of the
copies between them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.copy_budget import CopyRule
from elastic.plan.layout import Layout
from elastic.plan.transfer import Holding, moves
from elastic.protocol.commit_record import Outcome
from elastic.protocol.plan import Plan
from elastic.state.hosts import Access, read
from elastic.state.keeper_store import KeeperStore
from elastic.state.region import BLOCK, Region, frame
from elastic.state.shard import DTYPES, Shard
from elastic.state.snapshot import NEVER, Snapshots
from elastic.state.staging import STREAMS, StagingStream
from elastic.train.heal import nothing
from storage.slices import Tensor
from tests.support.cells import cell, shard_slice
from tests.support.patience import until

SECRET = b"k" * 32
AUTO = CopyRule(copies=True, buddies=True)
TENSORS = (
    Tensor("w", "parameter", "F32", (10, BLOCK // 8)),
    Tensor("w", "moment.exp_avg", "F32", (10, BLOCK // 8)),
    Tensor("b", "parameter", "BF16", (7, 3)),
    Tensor("few", "parameter", "F32", (2, 5)),
    Tensor("seen", "buffer", "I64", (4,)),
    Tensor("updates", "scalar", "F32", ()),
)
AT = Version(4, 2)


def truth(version: Version) -> dict[Tensor, torch.Tensor]:
    """Returns the whole state at ``version``; each version has other bits."""
    generator = torch.Generator().manual_seed(version.step * 1000 + version.generation)
    return {
        tensor: torch.randint(0, 10_000, tensor.shape, generator=generator).to(DTYPES[tensor.dtype])
        / (1 if tensor.dtype == "I64" else 7)
        for tensor in TENSORS
    }


def shard_of(version: Version, count: int, index: int) -> Shard:
    values = {}
    for tensor, value in truth(version).items():
        part = shard_slice(tensor, count, index)
        cut = value[part.start[0] : part.stop[0]] if tensor.shape else value
        values[tensor.kind, tensor.name] = cut.to(DTYPES[tensor.dtype]).clone()
    return Shard(version, cell(count, index), values)


def empty(version: Version, count: int, index: int) -> Shard:
    shard = shard_of(version, count, index)
    return Shard(
        version, cell(count, index), {key: torch.full_like(value, -1) for key, value in shard.values.items()}
    )


def equal(one: Shard, other: Shard) -> bool:
    return all(torch.equal(one.values[key], other.values[key]) for key in one.values)


def outcome(step: int, copied: int = -1, buddied: int = -1) -> Outcome:
    return Outcome(
        step, AT.generation, 1.0, (1.0,), (1,), ((0,),), True, copied_through=copied, buddied_through=buddied
    )


@dataclass
class Node:
    name: NodeId
    store: KeeperStore
    workers: dict[WorkerId, Snapshots]


@contextmanager
def cluster(
    layout: Layout, per_node: int, slots: int = 2, folder: str = ""
) -> Iterator[tuple[Plan, list[Node]]]:
    """Yields the plan of a world that begins at AT, and its nodes: ``per_node`` workers on each, whose
    regions its keeper holds.

    With ``folder`` all copies are in files there.
    """
    members = tuple(WorkerId(f"w{rank}") for rank in range(layout.world))
    nodes = [NodeId(f"node{rank // per_node}") for rank in range(layout.world)]
    plan = Plan(1, AT.generation, layout, members, AT, "init", (), nodes[0], tuple(nodes), copy_every=1)
    largest = frame(TENSORS, cell(1, 0))
    with ExitStack() as stack:
        found = {
            name: Node(name, KeeperStore(name, "127.0.0.1", SECRET, folder=folder), {})
            for name in dict.fromkeys(nodes)
        }
        for rank, member in enumerate(members):
            region = Region.create(slots, largest.bytes, largest.blocks, TENSORS, folder)
            node = found[nodes[rank]]
            node.workers[member] = Snapshots(region, TENSORS, torch.device("cpu"), AUTO)
            node.store.adopt(member, os.getpid(), region.descriptor)
        for node in found.values():
            stack.callback(node.store.close)
        yield plan, list(found.values())


def enter(plan: Plan, nodes: Sequence[Node]) -> None:
    """Every worker copies its shard of AT."""
    for node in nodes:
        for worker, snapshots in node.workers.items():
            rank = plan.world_rank(worker)
            snapshots.enter(
                plan, worker, shard_of(AT, plan.layout.dp_shard, plan.layout.coordinates(rank)["dp_shard"])
            )
            assert snapshots.settle()[:2] == (AT.step, NEVER)


def pair(nodes: Sequence[Node]) -> None:
    """Makes the first two nodes each other's buddies."""
    for one, other in ((0, 1), (1, 0)):
        nodes[one].store.pair(nodes[other].store.address)


def later(
    plan: Plan,
    layout: Layout,
    homes: Sequence[tuple[WorkerId, NodeId]],
    nodes: Sequence[Node],
    holders: Sequence[Holding],
) -> Plan:
    members, places = zip(*homes, strict=True)
    hosts = tuple((node.name, node.store.address) for node in nodes)
    new = replace(
        plan,
        generation=3,
        layout=layout,
        members=members,
        nodes=places,
        tier="host",
        holders=tuple(holders),
        hosts=hosts,
    )
    return replace(new, version=holders[0].version)


def heal(
    plan: Plan, worker: WorkerId, streams: int = STREAMS, hook: Callable[[], None] = nothing
) -> tuple[Shard, int]:
    index = plan.layout.coordinates(plan.world_rank(worker))["dp_shard"]
    shard = empty(plan.version, plan.layout.dp_shard, index)
    todo = moves(TENSORS, plan.holders, plan.layout, plan.members, plan.nodes)
    ways = [StagingStream(torch.device("cpu"), number) for number in range(streams)]
    return shard, read(shard, TENSORS, plan, Access(worker, SECRET), todo, ways, hook)


def await_buddied(copiers: Sequence[Snapshots], step: int) -> None:
    until(
        lambda: all(snapshots.settle()[:2] == (step, step) for snapshots in copiers),
        what=f"not all copies of step {step} are there",
    )
