"""Planning of one member's moves: a Llama of 70 B on nodes of 8, whose world loses a node, takes one in, or
is cut anew.

Each case plans for the member with most to do: one that stays, one that is new, one whose copy comes from
keepers.  The cases of ``stages`` have pipeline stages and tensor groups of 8: a lost seat, half as many
stages, and the coverage of the state by one half of a world of each.  CPU seconds are those of this process;
``peak_bytes`` is the largest memory that Python took meanwhile, measured in a second run.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from elastic.engine.optim.base import rule_of
from elastic.ids import NodeId, Version, WorkerId
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.plan.placement import cell_of, classes_of, degrees_of
from elastic.plan.placement import held as held_at
from elastic.plan.transfer import Holding, covered, missing, moves
from elastic.protocol.plan import Plan
from elastic.state.hosts import _turns
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


def held(layout: Layout, names: list[WorkerId]) -> list[Holding]:
    return [Holding(name, AT, cell_of(layout, rank)) for rank, name in enumerate(names)]


def cases(n: int) -> dict[str, Callable[[], int]]:
    """Returns, by name, functions that plan for one member and return the number of its moves."""
    nodes, names, shards, one = n // A_NODE, workers(n), Layout(n // A_NODE, A_NODE), Layout(1, n)
    other = Layout(n // 11, 11)
    with_new = (*names[:-A_NODE], *workers(A_NODE, "new"))
    whole, cut, fresh = held(shards, names), held(one, names), workers(n, "new")
    kept = tuple(replace(each, keeper=node) for each, node in zip(cut, homes(n), strict=True))
    plan = Plan(1, 2, one, tuple(fresh), AT, "host", kept, NodeId("node0"), nodes=tuple(homes(n)))
    found = moves(tensors(), kept, one, fresh, homes(n), of=fresh[3])

    def stages(count: int) -> Layout:
        return Layout(1, n // 8 // count, (("pp", count), ("tp", 8)))

    staged = held(stages(8), names)
    classes = classes_of(tensors(), {*degrees_of(stages(8)), *degrees_of(stages(4))})

    def planned(
        before: list[Holding], after: Layout, members: Sequence[WorkerId], of: WorkerId
    ) -> Callable[[], int]:
        return lambda: len(moves(tensors(), before, after, members, homes(len(members)), of=of, partly=True))

    return {
        "node_lost": planned(whole, Layout(nodes - 1, A_NODE), names[:-A_NODE], names[3]),
        "node_joins_stays": planned(whole[:-A_NODE], shards, with_new, names[3]),
        "node_joins_new": planned(whole[:-A_NODE], shards, with_new, with_new[-1]),
        "cut_anew": planned(whole, other, names[: other.world], names[3]),
        "one_replica_shrinks": planned(cut, Layout(1, n - A_NODE), names[:-A_NODE], names[n // 2]),
        "from_hosts": planned(list(kept), one, fresh, fresh[3]),
        "from_hosts_ranges": lambda: sum(
            len(ranges) for _, ranges in _turns(tensors(), plan, fresh[3], found)
        ),
        "from_bucket": planned(cut[A_NODE:], one, with_new, with_new[-1]),
        "stages_seat_lost": planned(staged[1:], stages(8), [*with_new[-1:], *names[1:]], with_new[-1]),
        "stages_halved": planned(staged, stages(4), names, names[n // 2]),
        "stages_broken": lambda: covered(staged[: n // 2] + held(stages(4), names)[n // 2 :], classes),
        "from_bucket_missing": lambda: len(missing(tensors(), cut[A_NODE:], cell_of(one, 3))),
    }


def measure(n: int) -> dict[str, float]:
    """Returns the figures of a world of ``n`` workers."""
    found: dict[str, float] = {}
    plans = cases(n)
    for name, plan in plans.items():
        held_at.cache_clear()
        began = time.process_time()
        moved = plan()
        found |= {f"{name}_cpu_s": time.process_time() - began, f"{name}_moves": moved}
    slowest = max(plans, key=lambda name: found[f"{name}_cpu_s"])
    held_at.cache_clear()
    tracemalloc.start()
    plans[slowest]()
    return found | {"slowest_peak_bytes": tracemalloc.get_traced_memory()[1]}
