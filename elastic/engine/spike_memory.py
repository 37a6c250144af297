"""The memory of spikes: with what a step is compared, and which samples are in quarantine.

Both are small tensors of the state, whole on every member, so they are healed, copied, saved, resumed and
given up together with the weights.  Hence whether a step is skipped, and which samples it reads, are
functions of the state before it: a newcomer, a new world and a run that is resumed on another cluster decide
as the members would have that were lost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from elastic.config.sections import Spikes
from elastic.errors import DataError
from elastic.job import Job
from elastic.protocol import spikes
from elastic.protocol.commit_record import Outcome
from elastic.protocol.spikes import QUARANTINE, Held, SpikeRule
from storage.slices import Tensor

HISTORY, HEIGHTS = "spikes.history", "spikes.microbatches"
"""The tensors beside that of the quarantine (:data:`~elastic.protocol.spikes.QUARANTINE`).

A row of the history is (1, loss, norm) of a step, newest last.  A row of the microbatches, which are there
with ``microbatch_z``, is (1, height), newest last.  Rows of zeros stand for nothing.
"""
DTYPES = {"F64": torch.float64, "I64": torch.int64}
MOST = 10_000
"""Largest number of samples in quarantine.  A data set with more of them needs cleaning."""
NEWEST = 1024
"""Number of microbatches with which one is compared."""


def tensors_of(settings: Spikes) -> tuple[Tensor, ...]:
    """Returns the tensors that the section ``spikes`` of a job adds to the state."""
    if settings.off:
        return ()
    found = (
        Tensor(HISTORY, "scalar", "F64", (settings.window, 3)),
        Tensor(QUARANTINE, "scalar", "I64", (MOST, 2)),
    )
    return (*found, Tensor(HEIGHTS, "scalar", "F64", (NEWEST, 2))) if settings.microbatch_z else found


class _Known(NamedTuple):
    """The values in the tensors."""

    past: list[tuple[float, float]]
    heights: list[float]
    held: tuple[Held, ...]


class SpikeMemory:
    """The spikes of one job.  What is in the tensors is read at the first use, after they were healed."""

    def __init__(self, job: Job, tensors: Mapping[str, torch.Tensor]) -> None:
        """``tensors`` are those of the state, by name."""
        action = job.spikes.action
        self.rule = SpikeRule(
            job.spikes.window,
            job.spikes.z,
            action in ("skip", "quarantine"),
            action == "quarantine",
            job.spikes.microbatch_z,
        )
        self._tensors = {} if job.spikes.off else tensors
        self._weighted = bool(job.data.weights)
        self._known: _Known | None = None

    @property
    def held(self) -> tuple[Held, ...]:
        """The samples in quarantine, oldest first."""
        return self._read().held

    @property
    def quarantined(self) -> dict[int, int]:
        """The samples in quarantine, each with the first step that does not read it."""
        return {each.sample: each.step + 1 for each in self.held}

    @property
    def anywhere(self) -> frozenset[int]:
        """The samples in quarantine that are replaced by samples of any source; all others are by samples of
        their own.
        """
        return frozenset(each.sample for each in self.held if each.anywhere)

    def listed(self) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """Returns the samples in quarantine, as the coordinator is told of them
        (:func:`elastic.protocol.spikes.listed`).
        """
        return spikes.listed(self.held)

    def most_loss(self) -> float | None:
        """Returns the largest mean loss of a microbatch that counts in the next step, or would if the rule
        skipped spikes; None if each does.
        """
        if not self.rule.microbatch_z:
            return None
        known = self._read()
        return spikes.most_loss(known.past, known.heights, self.rule)

    def judged(self, outcome: Outcome, sizes: Sequence[int], most: float | None = None) -> Outcome:
        """Returns the outcome of a step, before it is applied, with the spike that it is.

        ``sizes`` are the numbers of samples of each source: of the parts of a mixture with weights, else of
        the one data set.  ``most`` is the :meth:`most_loss` by which the gradient was made.

        Raises :class:`DataError` if too many samples were in quarantine.
        """
        if not self._tensors:
            return outcome
        known = self._read()
        outcome = spikes.judged(known.past, outcome, self.rule, most)
        if outcome.quarantined:
            self._refuse_too_many(outcome, sizes)
        return outcome

    def _refuse_too_many(self, outcome: Outcome, sizes: Sequence[int]) -> None:
        ends = [*accumulate(sizes)]
        of_each = Counter(bisect_right(ends, sample) for sample in (*self.quarantined, *outcome.quarantined))
        counts = [(sum(of_each.values()), min(MOST, ends[-1] // 2), f"the {ends[-1]}")]
        if len(sizes) > 1:
            counts += [
                (of_each[part], size // 2, f"the {size} of data.args.parts[{part}]")
                for part, size in enumerate(sizes)
            ]
        for count, most, whole in counts:
            if count > most:
                raise DataError(
                    f"spikes.action = 'quarantine': after step {outcome.step} {count} samples would be "
                    f"in quarantine, but at most {most} of {whole} may be; clean the data, raise "
                    f"spikes.z = {self.rule.z:g}, or go on with --spikes.action skip --branch"
                )

    def after(self, outcome: Outcome) -> None:
        """Notes a step that is applied, or skipped."""
        if not self._tensors:
            return
        known = self._read()
        past, heights = spikes.after(known.past, outcome, self.rule), known.heights
        if past != known.past:
            self._tensors[HISTORY][-len(past) :] = torch.tensor(
                [(1.0, *each) for each in past], dtype=torch.float64
            )
        if self.rule.microbatch_z and (heights := spikes.heights_after(heights, known.past, outcome, NEWEST)):
            self._tensors[HEIGHTS][-len(heights) :] = torch.tensor(
                [(1.0, each) for each in heights], dtype=torch.float64
            )
        held = spikes.held_after(known.held, outcome, anywhere=not self._weighted)
        if new := [each.row for each in held[len(known.held) :]]:
            self._tensors[QUARANTINE][len(known.held) : len(held)] = torch.tensor(new, dtype=torch.int64)
        self._known = _Known(past, heights, held)

    def _read(self) -> _Known:
        if self._known is None:
            past = (
                [(loss, norm) for known, loss, norm in self._tensors[HISTORY].tolist() if known]
                if self._tensors
                else []
            )
            heights = (
                [height for known, height in self._tensors[HEIGHTS].tolist() if known]
                if HEIGHTS in self._tensors
                else []
            )
            rows = self._tensors[QUARANTINE] if self._tensors else torch.empty((0, 2), dtype=torch.int64)
            held = tuple(each for row in rows[rows[:, 1] != 0].tolist() if (each := Held.of(row)) is not None)
            self._known = _Known(past, heights, held)
        return self._known
