"""Seating by the coordinator: nodes of 8 whose workers joined in any order, then the loss of a worker, of a
node, and its return.

Replicas have at least 8 shards.  CPU seconds are those of one whole plan: layout, members, source.  ``moves``
counts the members that begin with another cell than they hold; ``spares`` those that are left over;
``across`` the replicas that lie over several nodes; ``broken`` the replicas that lost a member.
"""

from __future__ import annotations

import random
import time

from elastic.control.rules import Rules
from elastic.control.run import Cluster, History, Members, RunState, Waiting, Worker
from elastic.control.seating import make_plan
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import LayoutRule
from elastic.plan.placement import cell_of
from elastic.plan.transfer import Holding
from elastic.protocol.plan import Plan
from storage.slices import Tensor

A_NODE = 8
AT = Version(9, 1)
CLASSES = tuple(
    Tensor(f"of {rows}", "parameter", "F32", (rows, 8)) for rows in (8_192, 28_672, 1_024, 128_256)
)


def run_of(nodes: dict[WorkerId, NodeId], before: Plan | None) -> RunState:
    """Returns a run with these workers; those that were members of the plan ``before`` hold its cells at AT."""
    held = (
        {
            member: (Holding(member, AT, cell_of(before.layout, rank)),)
            for rank, member in enumerate(before.members)
        }
        if before
        else {}
    )
    workers = {worker: Worker(node, "gpu", 0.0, held.get(worker, ())) for worker, node in nodes.items()}
    seats = before.members if before else ()
    keepers = tuple(dict.fromkeys(nodes.values()))
    history = History(((1, 9),), ()) if before else History()
    return RunState(
        1, 1, Waiting(0.0), Members(workers, classes=CLASSES, seats=seats), Cluster(keepers=keepers), history
    )


def planned(nodes: dict[WorkerId, NodeId], before: Plan | None = None) -> tuple[Plan, float]:
    run, rules = run_of(nodes, before), Rules(1, 20_000, LayoutRule(min_shard=A_NODE), 100, 10)
    began = time.process_time()
    plan = make_plan(run, rules)
    took_s = time.process_time() - began
    assert plan is not None
    return plan, took_s


def measure(n: int) -> dict[str, float]:
    """Returns the figures of a world of ``n`` workers."""
    names = [WorkerId(f"w{number}") for number in range(n)]
    nodes = {worker: NodeId(f"node{number // A_NODE}") for number, worker in enumerate(names)}
    mixed = {worker: nodes[worker] for worker in random.Random(7).sample(names, n)}
    first, took_s = planned(mixed)
    found: dict[str, float] = {"first_cpu_s": took_s, "first_across": _across(first)}
    lost = {"worker": {names[3]}, "node": set(names[:A_NODE])}
    for what, gone in lost.items():
        left = {worker: node for worker, node in mixed.items() if worker not in gone}
        plan, took_s = planned(left, first)
        found |= {
            f"{what}_lost_cpu_s": took_s,
            f"{what}_lost_moves": _moved(first, plan),
            f"{what}_lost_across": _across(plan),
        }
        found |= {
            f"{what}_lost_spares": len(left) - len(plan.members),
            f"{what}_lost_broken": _broken(first, gone),
        }
        back = left | {WorkerId(f"new-{worker}"): mixed[worker] for worker in sorted(gone)}
        again, took_s = planned(back, first)
        found |= {f"{what}_back_cpu_s": took_s, f"{what}_back_moves": _moved(first, again)}
    return found


def _across(plan: Plan) -> int:
    size = plan.layout.dp_shard
    return sum(len(set(plan.nodes[at : at + size])) > 1 for at in range(0, len(plan.nodes), size))


def _broken(plan: Plan, gone: set[WorkerId]) -> int:
    return len({plan.world_rank(worker) // plan.layout.dp_shard for worker in gone})


def _moved(before: Plan, after: Plan) -> int:
    held = {member: cell_of(before.layout, rank) for rank, member in enumerate(before.members)}
    return sum(
        member in held and held[member] != cell_of(after.layout, rank)
        for rank, member in enumerate(after.members)
    )
