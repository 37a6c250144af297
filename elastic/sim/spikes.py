"""Models the corrupt samples of a job and the quarantine in its state, and judges what the coordinator knows
of the quarantine.

A step reads one of a few samples.  If the sample is corrupt, all members skip the step, or leave its
microbatch out of the step if the sample is noisy.  Either way the sample goes into quarantine, and the state
has it from then on.  A world that begins from an earlier version reads the sample again.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from elastic.ids import Version
from elastic.protocol.commit_record import Outcome, Spike
from elastic.protocol.events import StepDone
from elastic.protocol.spikes import Held, held_after, listed
from elastic.sim.truth import LOST, base_of, expanded
from elastic.sim.violation import Violation

if TYPE_CHECKING:
    from elastic.control.decision import Transition
    from elastic.control.run import RunState
    from elastic.protocol.member import Member
    from elastic.protocol.plan import Plan
    from elastic.sim.simulation import Simulation

SAMPLES = 5
"""Number of samples, so that each comes several times in a run of a few steps."""
CORRUPT = (0, 1, 1, 2)
"""Numbers of corrupt samples; a seed draws one of these."""


class SpikeTruth:
    """Follows the corrupt samples of one run.  ``held`` has, for each version, the quarantine in its
    state.
    """

    def __init__(self, sim: Simulation) -> None:
        self.sim, draw = sim, random.Random(f"spikes {sim.seed}")
        self.corrupt = frozenset(draw.sample(range(SAMPLES), draw.choice(CORRUPT)))
        self.noisy = frozenset(each for each in sorted(self.corrupt) if draw.random() < 1 / 3)
        self.held: dict[Version, tuple[Held, ...]] = {Version(0, 0): ()}
        self.reported: set[tuple[int, Version]] = set()
        """Pairs of an incarnation and a version: world rank 0 obeyed this coordinator when it reported the
        version's step.
        """
        self.heard: dict[int, set[tuple[int, int]]] = defaultdict(set)
        """The (step, generation) of each entry of the quarantine that a coordinator was told of, by its
        incarnation.
        """

    def seen(self, plan: Plan, outcome: Outcome) -> Outcome:
        """Returns the outcome of a step as the members of ``plan`` compute it from the state before the
        step.
        """
        before, step = self.held[base_of(plan, outcome.step)], outcome.step
        avoided = {each.sample for each in before}
        sample = next(each % SAMPLES for each in range(step, step + SAMPLES) if each % SAMPLES not in avoided)
        outcome = replace(outcome, samples=((sample,),))
        if sample in self.noisy:
            outcome = replace(outcome, most_loss=outcome.losses[0] - 1, quarantined=(sample,))
        elif sample in self.corrupt:
            outcome = replace(outcome, spike=Spike("loss", 9.0, 1.0, True), quarantined=(sample,))
        self.held[Version(step, outcome.generation)] = held_after(before, outcome, anywhere=True)
        self.sim.oracle.occasions["a spike is skipped"] += not outcome.applies
        self.sim.oracle.occasions["a microbatch is left out"] += len(outcome.left_out)
        return outcome

    def listed(self, outcome: Outcome, member: Member) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """Returns the quarantine in the state after ``outcome`` and its steps, as ``member``, world rank 0,
        reports them.
        """
        version = Version(outcome.step, outcome.generation)
        self.reported.add((member.incarnation, version))
        return listed(self.held[version] if member.lists() else ())

    def hears(self, transition: Transition) -> None:
        """Notes which entries of the quarantine the coordinator of ``transition`` was told of."""
        run = transition.run
        for each in transition.taken:
            if not isinstance(each, StepDone) or not run.history.contains(
                version := Version(each.outcome.step, each.generation)
            ):
                continue
            # this report, or an earlier one, told this coordinator the whole quarantine
            if (run.incarnation, version) in self.reported:
                by = expanded(run.history.lineage)
                self.heard[run.incarnation].update(
                    (each.step, by[each.step - 1]) for each in self.held[version]
                )
        self.sim.oracle.occasions["a quarantine that was lost is listed"] += (
            "that the journal had not recorded"
        ) in transition.reason

    def judge(self, run: RunState) -> None:
        """Checks the lineage of a run that has ended: no step reads a sample that was in quarantine before
        the step, and the coordinator knows the quarantine.

        It need not know an entry that no coordinator was told of.  If knowledge of an earlier coordinator was
        lost, it must know the entries that it was told of itself.
        """
        quarantine, put, applied, told = dict[int, int](), set[int](), set[int](), self.sim.oracle.told
        for step, generation in enumerate(expanded(run.history.lineage), 1):
            outcome = self.sim.worlds[generation].outcomes[step]
            (read,) = outcome.samples[0]
            if read in quarantine:
                raise Violation(
                    f"step {step} of generation {generation} reads sample {read}, in quarantine since step "
                    f"{quarantine[read]}"
                )
            quarantine |= dict.fromkeys(outcome.quarantined, step)
            put |= {step} if outcome.quarantined and (step, generation) in told else set()
            applied |= {step} if outcome.applies else set()
        known, occasions = dict(run.skips.quarantined), self.sim.oracle.occasions
        by = expanded(run.history.lineage)
        # something was lost, or the last world was formed only to save, without a step
        if any(occasions[each] for each in LOST) or by[-1:] != [run.generation]:
            put = {step for step in put if (step, by[step - 1]) in self.heard[run.incarnation]}
        if not known.items() <= quarantine.items() or not {
            each for each in quarantine.values() if each in put
        } <= {*known.values()}:
            raise Violation(f"the coordinator knows the quarantine {known}, and it is {quarantine}")
        if run.skips.total != (number := len({*known.values()} - applied)):
            raise Violation(
                f"the coordinator knows of {run.skips.total} skipped steps, and {number} of those that are "
                "known were skipped"
            )
