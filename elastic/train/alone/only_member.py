"""A worker that is the only member of its world, in a process without a coordinator."""

from __future__ import annotations

from elastic.ids import WorkerId
from elastic.plan.transfer import Holding
from elastic.protocol.plan import Plan
from elastic.state.shard import Shard
from elastic.train.apply_fence import ApplyFence

WORKER = WorkerId("local")


def go(fence: ApplyFence, plan: Plan, shard: Shard) -> None:
    """Brings the only member to the point to which a coordinator's orders would bring it."""
    with fence as member:
        member.form(plan)
        member.enter(plan)
        member.healed(0.0, Holding(WORKER, shard.version, shard.cell), shard)
        member.go(plan.generation)
