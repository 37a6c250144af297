"""Models the pace of members, and judges what the run makes of slow ones.

Four rules must hold:

* A member that was late in most of its last steps is named, and nobody else is.
* Only a named member leaves because it is slow, and only if the job says so; a world can be formed without it,
  and the last one left long before.
* It is in no later world.
* If nothing else happens, no committed step is done again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from elastic.control.evicting import REST
from elastic.control.stragglers import ENOUGH, WINDOW
from elastic.ids import WorkerId
from elastic.protocol.actions import Action, Form
from elastic.protocol.commit_record import Outcome, Usage, late_among
from elastic.protocol.events import Event, Recovered, StepDone, parts
from elastic.protocol.faults import Kind
from elastic.protocol.plan import Plan
from elastic.sim.violation import Violation

if TYPE_CHECKING:
    from elastic.control.run import RunState
    from elastic.sim.simulation import Simulation
    from elastic.sim.worker import Worker

FORWARD_S = 0.2
"""Time in seconds of a forward pass of a member that is not slow."""
NOISE = 0.1
"""Largest share by which this time differs from step to step."""
PAUSE, LONGER = 0.08, 6.0
"""Share of the forward passes in which the process pauses, as for garbage, and the factor by which such a pass
is longer.
"""


class PaceOracle:
    """Measures the members of a simulated run, and judges decisions about slow ones."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.rng = sim, Random(f"pace {sim.seed}")
        self.late: dict[WorkerId, deque[bool]] = defaultdict(lambda: deque(maxlen=WINDOW))
        """The last steps of each member of which the acting coordinator was told: whether it was late."""
        self.evicted_at = -REST
        """The step at which the acting coordinator let a slow member leave last."""
        self.leaver: WorkerId | None = None
        faults = sim.scenario.faults
        self.only_slow = (
            sim.scenario.measures
            and sim.scenario.stop_at_s is None
            and not sim.scenario.flips
            and not sim.scenario.liars
            and all(fault.kind is Kind.SLOW for fault in faults)
        )
        """True if nothing but slow workers disturbs the run."""

    def measured(self, plan: Plan, members: Sequence[Worker], outcome: Outcome) -> Outcome:
        """Returns the outcome of a step with the pace of its members."""
        if not self.sim.scenario.measures:
            return outcome
        forward_s = [FORWARD_S * each.slowness_now * self._noise() for each in members]
        late = late_among(forward_s, [0.0] * len(members), plan.layout, 0.0)
        longest_s = max(forward_s)
        ranks = (0, 0, 0, 0, forward_s.index(longest_s))
        return replace(outcome, usage=Usage(1.0, forward_s=longest_s), usage_ranks=ranks, late=late)

    def _noise(self) -> float:
        paused = self.rng.random() < PAUSE
        return (LONGER if paused else 1.0) * self.rng.uniform(1.0 - NOISE, 1.0 + NOISE)

    # -- what the coordinator is told, and what it decides

    def note(self, before: RunState, event: Event, after: RunState) -> None:
        """Judges what the acting coordinator knows after ``event``."""
        if not self.sim.scenario.measures:
            return
        for each in parts(event):
            if isinstance(each, Recovered):
                self.late.clear()  # its predecessor may have known more
                self.evicted_at = -REST
        if after.history.last is not before.history.last and after.history.last is not None:
            self._count(before, event, after.history.last)
        elif after.history.last is None and before.history.last is not None:
            self.late.clear()  # steps are given up, perhaps one that this decision was first told of
        known, plan = after.stragglers, after.plan
        named = {worker for worker, each in known.workers.items() if each.named}
        for worker, late in self.late.items():
            there = worker in after.workers and plan is not None and worker in plan.ranks
            if sum(late) >= ENOUGH and there and worker not in named:
                raise Violation(f"{worker} was late in {sum(late)} of {len(late)} steps, and is not named")
        for worker in sorted(
            named - {each for each, known in before.stragglers.workers.items() if known.named}
        ):
            self.sim.oracle.occasions["a straggler is named"] += 1
            if len(late := self.late[worker]) == WINDOW and sum(late) < ENOUGH:
                raise Violation(f"{worker} is named, and was late in {sum(late)} of {WINDOW} steps")
        if known.leaving and not before.stragglers.leaving:
            self._judge_leaving(after, known.leaving)

    def _count(self, before: RunState, event: Event, outcome: Outcome) -> None:
        plan = before.plan
        told = any(isinstance(each, StepDone) and each.outcome == outcome for each in parts(event))
        if plan is None or outcome.generation != plan.generation or not told:
            self.late.clear()  # it was told of several steps at once, or of none
            return
        late = {each.rank for each in outcome.late}
        for rank, worker in enumerate(plan.members):
            self.late[worker].append(rank in late)

    def _judge_leaving(self, after: RunState, leaving: tuple[WorkerId, ...]) -> None:
        self.sim.oracle.occasions["a straggler leaves"] += 1
        (worker, *others), rules = leaving, self.sim.rules
        if not rules.evicts or others:
            raise Violation(f"{leaving} leave because they are slow, and the job says otherwise")
        if not (known := after.stragglers.workers.get(worker)) or not known.named:
            raise Violation(f"{worker} leaves because it is slow, and was not named")
        if after.step - self.evicted_at < REST:
            raise Violation(f"{worker} leaves {after.step - self.evicted_at} steps after another slow one")
        fit = [each for each, there in after.workers.items() if not there.unfit and each != worker]
        if len(fit) < rules.min_workers:
            raise Violation(f"{worker} leaves because it is slow, and {len(fit)} others are too few")
        self.evicted_at, self.leaver = after.step, worker

    def judge(self, action: Action) -> None:
        """Judges a new world, if nothing but slow workers happens."""
        if not self.only_slow or not isinstance(action, Form):
            return
        plan, oracle = action.plan, self.sim.oracle
        if plan == oracle.plan:  # a coordinator that took over repeats it
            return
        newest = max((version.step for version in oracle.parent if oracle.on_lineage(version)), default=0)
        if newest > plan.version.step:
            raise Violation(
                f"generation {plan.generation} begins from step {plan.version.step}, and step {newest} was "
                "committed: some were slow, and nothing else happened"
            )
        if self.leaver is not None:
            self.sim.oracle.occasions["a world goes on without a straggler"] += 1
            if self.leaver in plan.ranks:
                raise Violation(f"{self.leaver} leaves because it is slow, and is in the next world")
            self.leaver = None
