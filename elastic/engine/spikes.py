"""The memory of spikes: with what a step is compared, and which samples are in quarantine.

Both are small tensors of the state, whole on every member, so they are healed, copied, saved, resumed and given up together with the
weights.  Hence whether a step is skipped, and which samples it reads, are functions of the state before it: a newcomer, a new world and a
run that is resumed on another cluster decide as the members would have that were lost.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elastic.errors import DataError
from elastic.job import Job
from elastic.protocol import spikes
from elastic.protocol.commit_record import Outcome
from elastic.protocol.spikes import SpikeRule
from storage.slices import Tensor

HISTORY, QUARANTINE = "spikes.history", "spikes.quarantine"
"""The tensors.

A row of the history is (1, loss, norm) of a step, newest last.  A row of the quarantine is (sample, first step that does not read it),
oldest first.  Rows of zeros stand for nothing.
"""
DTYPES = {"F64": torch.float64, "I64": torch.int64}
MOST = 10_000
"""Largest number of samples in quarantine.  A data set with more of them needs cleaning."""


def tensors_of(job: Job) -> tuple[Tensor, ...]:
    """Returns the tensors that the job adds to the state."""
    if job.spikes.action == "none":
        return ()
    return Tensor(HISTORY, "scalar", "F64", (job.spikes.window, 3)), Tensor(QUARANTINE, "scalar", "I64", (MOST, 2))


class Spikes:
    """The spikes of one job.  What is in the tensors is read at the first use, after they were healed."""

    def __init__(self, job: Job, tensors: Mapping[str, torch.Tensor]) -> None:
        """``tensors`` are those of the state, by name."""
        action = job.spikes.action
        self.rule = SpikeRule(job.spikes.window, job.spikes.z, action in ("skip", "quarantine"), action == "quarantine")
        self._tensors = tensors if action != "none" else {}
        self._known: tuple[list[tuple[float, float]], dict[int, int]] | None = None

    @property
    def quarantined(self) -> Mapping[int, int]:
        """The samples in quarantine, each with the first step that does not read it."""
        return self._read()[1]

    def judged(self, outcome: Outcome, samples: int) -> Outcome:
        """Returns the outcome of a step, before it is applied, with the spike that it is; the data set has so many ``samples``.

        Raises :class:`DataError` if too many samples were in quarantine.
        """
        if not self._tensors:
            return outcome
        past, quarantined = self._read()
        outcome, most = spikes.judged(past, outcome, self.rule), min(MOST, samples // 2)
        if outcome.quarantined and len(quarantined) + len(outcome.quarantined) > most:
            raise DataError(
                f"spikes.action = 'quarantine': with step {outcome.step} {len(quarantined) + len(outcome.quarantined)} samples would be in "
                f"quarantine, and at most {most} of the {samples} may be; clean the data, raise spikes.z = {self.rule.z:g}, or go on with "
                f"--spikes.action skip --branch"
            )
        return outcome

    def after(self, outcome: Outcome) -> None:
        """Notes a step that is applied, or skipped."""
        if not self._tensors:
            return
        before, quarantined = self._read()
        past = spikes.after(before, outcome, self.rule)
        if past != before:
            history = self._tensors[HISTORY]
            history[len(history) - len(past) :] = torch.tensor([(1.0, *each) for each in past], dtype=torch.float64)
        new = {sample: outcome.step + 1 for sample in outcome.quarantined if sample not in quarantined}
        if new:
            rows = self._tensors[QUARANTINE][len(quarantined) : len(quarantined) + len(new)]
            rows.copy_(torch.tensor([*new.items()], dtype=torch.int64))
        self._known = past, quarantined | new

    def _read(self) -> tuple[list[tuple[float, float]], dict[int, int]]:
        if self._known is None:
            past = [(loss, norm) for known, loss, norm in self._tensors[HISTORY].tolist() if known] if self._tensors else []
            rows = self._tensors[QUARANTINE] if self._tensors else torch.empty((0, 2), dtype=torch.int64)
            self._known = past, {sample: step for sample, step in rows[rows[:, 1] > 0].tolist()}
        return self._known
