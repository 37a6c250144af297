"""Stragglers: names the workers that hold up all others, by the time of their own work.

Each commit tells the members that were late in its step (:class:`~elastic.protocol.commit_record.Late`): those
whose forward passes took ``LATE`` times the median of their peers, or longer, without any wait for others.
One such step proves nothing: a worker may compile, collect garbage, or share its cores with a save.  So a
worker is a straggler once it was late in ``ENOUGH`` of the last ``WINDOW`` measured steps, and until it was
late in none of them.  The median is right as long as most peers are; if all are slow alike, none is late.

What is known is a value, :class:`Stragglers`, and each commit that tells of a late member replaces it.  So a
coordinator that takes over goes on where the last one was.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from elastic.ids import WorkerId
from elastic.protocol.commit_record import Late, Outcome
from elastic.protocol.plan import Plan

WINDOW = 16
"""Number of newest measured steps of a worker that count."""
ENOUGH = 12
"""Number of these steps in which a straggler was late.  So it is named within 16 steps if it is always late."""


@dataclass(frozen=True)
class Lateness:
    """The last steps of a worker that was late in at least one of them, or is a straggler."""

    steps: int = 0
    """One bit for each step, the lowest for the newest: 1 if the worker was late."""
    forward_s: float = 0.0
    usual_s: float = 0.0
    """The time of its forward passes, and the median, in the step in which it was late by the least: one long
    pause does not count for more than another.
    """
    named: bool = False
    """True if it is a straggler."""

    @property
    def often(self) -> bool:
        return self.steps.bit_count() >= ENOUGH

    @property
    def factor(self) -> float:
        """The worker's time as a multiple of the median."""
        return self.forward_s / self.usual_s if self.usual_s else 0.0

    def after(self, late: Late | None) -> Lateness:
        """Returns the lateness after one more step, in which the worker was ``late``, or was not (None)."""
        steps = (self.steps << 1 | (late is not None)) & (1 << WINDOW) - 1
        if late is None or 0 < self.factor <= late.forward_s / late.usual_s:
            return replace(self, steps=steps)
        return replace(self, steps=steps, forward_s=late.forward_s, usual_s=late.usual_s)


@dataclass(frozen=True)
class Stragglers:
    """The workers that were late, and those that leave because of it (``evicting.py``)."""

    workers: dict[WorkerId, Lateness] = field(default_factory=dict)
    leaving: tuple[WorkerId, ...] = ()
    """The members that leave once the next world has connected, or at the next boundary."""
    free_from: int = 0
    """The step from which on another worker may be evicted."""
    kept: str = ""
    """The reason, as last said, for which a straggler is not evicted."""

    @property
    def named(self) -> tuple[WorkerId, ...]:
        """The stragglers that were late often enough up to now, the slowest first."""
        slow = [worker for worker, each in self.workers.items() if each.named and each.often]
        return tuple(sorted(slow, key=lambda worker: (-self.workers[worker].factor, worker)))

    def without(self, workers: Collection[WorkerId]) -> Stragglers:
        """Returns what is known without ``workers``, which are gone."""
        if not any(each in self.workers or each in self.leaving for each in workers):
            return self
        return replace(
            self,
            workers={worker: each for worker, each in self.workers.items() if worker not in workers},
            leaving=tuple(each for each in self.leaving if each not in workers),
        )


def judge(known: Stragglers, plan: Plan, outcome: Outcome) -> tuple[Stragglers, list[str]]:
    """Returns what is known after ``outcome``, a commit of the world of ``plan``, and a sentence for each
    worker that is a straggler now, or is none any more.
    """
    if not outcome.usage.forward_s or not (known.workers or outcome.late):
        return known, []
    late = {plan.members[each.rank]: each for each in outcome.late}
    workers, said = dict(known.workers), list[str]()
    for worker in sorted({*known.workers, *late} & plan.ranks.keys()):
        now = known.workers.get(worker, Lateness()).after(late.get(worker))
        if now.often and not now.named:
            now = replace(now, named=True)
            said.append(_named(worker, plan, now))
        if now.steps:
            workers[worker] = now
        else:
            del workers[worker]
            said += [f"{worker} is no longer slow: it was late in none of {WINDOW} steps"] * now.named
    return replace(known, workers=workers), said


def _named(worker: WorkerId, plan: Plan, late: Lateness) -> str:
    node = dict(zip(plan.members, plan.nodes, strict=False)).get(worker, "")
    where = f" on node {node[:8]}" if node else ""
    return (
        f"{worker}{where} is slow, and all others wait for it: in {late.steps.bit_count()} of {WINDOW} steps its "
        f"forward pass of a microbatch took {late.factor:.1f} times the median or longer, {late.forward_s:.3g} s "
        f"instead of {late.usual_s:.3g} s"
    )
