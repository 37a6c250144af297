"""Corrupt samples of a simulated job, the memory of them that travels with the state, and the judgement of what the coordinator knows.

A step reads one of a few samples.  If that one is corrupt, the step is skipped by all members and the sample goes into quarantine, as the
state says from then on: a world that begins from an earlier version reads it again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from elastic.ids import Version
from elastic.protocol.commit_record import Outcome, Spike
from elastic.sim.truth import base_of, expanded
from elastic.sim.violation import Violation

if TYPE_CHECKING:
    from elastic.control.run import RunState
    from elastic.protocol.plan import Plan
    from elastic.sim.simulation import Simulation

SAMPLES = 5
"""Number of samples, so that each comes several times in a run of a few steps."""
CORRUPT = (0, 1, 1, 2)
"""Numbers of corrupt samples, from which a seed draws."""
LOST = ("a coordinator takes over without what was written last", "a superseded coordinator acts on")
"""The occasions on which a coordinator was told what its follower cannot know."""


class Spikes:
    """Follows the corrupt samples of one run.  ``held`` has the quarantine that the state of each version holds, by sample."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, draw = sim, random.Random(f"spikes {sim.seed}")
        self.corrupt = frozenset(draw.sample(range(SAMPLES), draw.choice(CORRUPT)))
        self.held: dict[Version, Mapping[int, int]] = {Version(0, 0): {}}

    def seen(self, plan: Plan, outcome: Outcome) -> Outcome:
        """Returns the outcome of a step as the members of ``plan`` conclude it from the state before the step."""
        before, step = self.held[base_of(plan, outcome.step)], outcome.step
        sample = next(each % SAMPLES for each in range(step, step + SAMPLES) if each % SAMPLES not in before)
        outcome = replace(outcome, samples=((sample,),))
        if sample in self.corrupt:
            outcome = replace(outcome, spike=Spike("loss", 9.0, 1.0, True), quarantined=(sample,))
        self.held[Version(step, outcome.generation)] = {**before, **dict.fromkeys(outcome.quarantined, step)}
        self.sim.oracle.occasions["a spike is skipped"] += not outcome.applies
        return outcome

    def judge(self, run: RunState) -> None:
        """Checks the lineage of a run that has ended: no step reads what was in quarantine before it, and the coordinator knows what is.

        It need not know what no coordinator was told, nor what was lost with an earlier one: then the state alone knows it.
        """
        quarantine, skipped, told = dict[int, int](), set[int](), self.sim.oracle.told
        for step, generation in enumerate(expanded(run.history.lineage), 1):
            outcome = self.sim.worlds[generation].outcomes[step]
            (read,) = outcome.samples[0]
            if read in quarantine:
                raise Violation(f"step {step} of generation {generation} reads sample {read}, in quarantine since step {quarantine[read]}")
            quarantine |= dict.fromkeys(outcome.quarantined, step)
            skipped |= set() if outcome.applies or (step, generation) not in told else {step}
        known, occasions = dict(run.skips.quarantined), self.sim.oracle.occasions
        if any(occasions[each] for each in LOST):
            skipped = set()
        if not known.items() <= quarantine.items() or not {each for each in quarantine.values() if each in skipped} <= {*known.values()}:
            raise Violation(f"the coordinator knows the quarantine {known}, and it is {quarantine}")
        if run.skips.total != len(known):
            raise Violation(f"the coordinator knows of {run.skips.total} skipped steps, and {len(known)} are known")
