"""Planning of one member's moves: a Llama of 70 B on nodes of 8, whose world loses a node, takes one in, or is cut anew.

Each case plans for the member with most to do: one that stays, one that is new, one whose copy comes from keepers.  CPU seconds are those
of this process; ``peak_bytes`` is the largest memory that Python took meanwhile, measured in a second run.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path

from elastic.engine.optim.base import rule_of
from elastic.ids import NodeId, Version, WorkerId
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.plan.placement import cell_of
from elastic.plan.transfer import Holding, missing, moves
from elastic.protocol.plan import Plan
from elastic.state.sources.hosts import _turns
from elastic.train.model import build_model, builder_of, tensors_of
from storage.slices import Tensor

A_NODE = 8
AT = Version(4, 1)
LLAMA_70B = {"vocab": 128_256, "dim": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "hidden": 28_672}


@cache
def tensors() -> tuple[Tensor, ...]:
    """Returns the tensors of the state: parameters, two moments of each, scalars."""
    job = Job(name="scale", bucket=str(Path("/nowhere")), model_args=LLAMA_70B)
    return tensors_of(build_model(job, builder_of(job)), rule_of(job))


def workers(count: int, name: str = "w") -> list[WorkerId]:
    return [WorkerId(f"{name}{number}") for number in range(count)]


def homes(count: int) -> list[NodeId]:
    return [NodeId(f"node{number // A_NODE}") for number in range(count)]


def held(layout: Layout, names: list[WorkerId], *, kept: bool = False) -> list[Holding]:
    keepers = homes(len(names)) if kept else [NodeId("")] * len(names)
    return [Holding(name, AT, cell_of(layout, rank), keepers[rank]) for rank, name in enumerate(names)]


def cases(n: int) -> dict[str, Callable[[], int]]:
    """Returns, by name, functions that plan for one member and return the number of its moves."""
    nodes, names, shards = n // A_NODE, workers(n), Layout(n // A_NODE, A_NODE)
    other = Layout(n // 11, 11)
    with_new = [*names[:-A_NODE], *workers(A_NODE, "new")]

    def planned(before: list[Holding], after: Layout, members: list[WorkerId], of: WorkerId) -> int:
        return len(moves(tensors(), before, after, members, homes(len(members)), of=of))

    def from_hosts() -> int:
        """A world of which all workers died, and every node's keeper lives."""
        fresh, before = workers(n, "new"), held(Layout(1, n), names, kept=True)
        plan = Plan(1, 2, Layout(1, n), tuple(fresh), AT, "host", tuple(before), NodeId("node0"), nodes=tuple(homes(n)))
        found = moves(tensors(), before, plan.layout, plan.members, plan.nodes, of=fresh[3])
        return sum(len(ranges) for _, ranges in _turns(tensors(), plan, fresh[3], found))

    def from_bucket() -> int:
        left = held(Layout(1, n), names)[A_NODE:]
        found = moves(tensors(), left, Layout(1, n), with_new, homes(n), partly=True, of=with_new[-1])
        return len(found) + len(missing(tensors(), left, cell_of(Layout(1, n), 3)))

    return {
        "node_lost": lambda: planned(held(shards, names), Layout(nodes - 1, A_NODE), names[:-A_NODE], names[3]),
        "node_joins_stays": lambda: planned(held(shards, names)[:-A_NODE], shards, with_new, names[3]),
        "node_joins_new": lambda: planned(held(shards, names)[:-A_NODE], shards, with_new, with_new[-1]),
        "cut_anew": lambda: planned(held(shards, names), other, names[: other.world], names[3]),
        "one_replica_shrinks": lambda: planned(held(Layout(1, n), names), Layout(1, n - A_NODE), names[:-A_NODE], names[n // 2]),
        "from_hosts": from_hosts,
        "from_bucket": from_bucket,
    }


def measure(n: int) -> dict[str, float]:
    """Returns the figures of a world of ``n`` workers."""
    tensors()
    found: dict[str, float] = {}
    for name, plan in cases(n).items():
        began = time.process_time()
        moved = plan()
        found |= {f"{name}_cpu_s": time.process_time() - began, f"{name}_moves": moved}
    slowest = max(cases(n), key=lambda name: found[f"{name}_cpu_s"])
    tracemalloc.start()
    cases(n)[slowest]()
    return found | {"slowest_peak_bytes": tracemalloc.get_traced_memory()[1]}
