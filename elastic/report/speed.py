"""Adds up steps, and tells how fast they were and how long they waited for data."""

from __future__ import annotations

from elastic.plan.copy_budget import amount
from elastic.protocol.commit_record import Outcome
from elastic.protocol.events import Work

LEAST_FLOPS = 1e9
"""Smallest number of operations per second that is reported for a device without a known peak.  Fewer are
those of a toy model, and say nothing.
"""
LEAST_MFU = 0.005
"""Smallest MFU that is reported.  The line of a step would round a smaller one to 0%."""


def noun_of(loss: str, *, by_sample: bool) -> str:
    """Returns the noun for what a step of a job with this ``loss`` counts: tokens, samples, or in general the
    terms of the loss.

    Only our own losses are known to count tokens.  ``by_sample`` is True if each sample has one term.
    """
    return "tokens" if loss.partition(".")[0] == "elastic" else "samples" if by_sample else "terms"


class Speed:
    """The sums over some steps, without the time between two worlds.

    ``noun`` is the word for what the steps count (:func:`noun_of`).
    """

    def __init__(self) -> None:
        self.noun = "tokens"
        self.steps, self.tokens, self.peak_bytes, self.took_s, self.waited_s = 0, 0, 0, 0.0, 0.0
        self.flops, self.causal_flops = 0.0, 0.0
        self.device_s, self.possible_flops = 0.0, 0.0
        """The seconds of all devices in steps whose work is known, and the operations that the devices could
        have done in these seconds.
        """

    def add(self, outcome: Outcome, work: Work | None) -> None:
        """Adds a step, unless its time was not measured."""
        usage = outcome.usage
        if not usage.step_s:
            return
        self.steps, self.tokens = self.steps + 1, self.tokens + sum(outcome.counts)
        self.took_s, self.waited_s = self.took_s + usage.step_s, self.waited_s + usage.data_s
        self.peak_bytes = max(self.peak_bytes, usage.peak_bytes)
        if work is not None:
            self.flops, self.causal_flops = self.flops + work.flops, self.causal_flops + work.causal_flops
            self.device_s += work.devices * usage.step_s
            self.possible_flops += work.devices * usage.step_s * work.peak_flops

    @property
    def mfu(self) -> float:
        """The model FLOPs utilisation (Chowdhery and others 2022, appendix B): the operations that were done
        divided by those that were possible.

        It is 0 if it is not known.
        """
        return self.flops / self.possible_flops if self.possible_flops else 0.0

    @property
    def causal_mfu(self) -> float:
        """The utilisation if only the half of attention that a causal mask leaves is counted."""
        return self.causal_flops / self.possible_flops if self.possible_flops else 0.0

    @property
    def summary(self) -> str:
        """The speed as a sentence, with the number of steps."""
        return f"{self.steps} {'steps' if self.steps > 1 else 'step'}: {self}" if self.steps else ""

    def __str__(self) -> str:
        """The speed as a sentence; "" if no step was measured."""
        if not self.took_s:
            return ""
        parts = [f"{self.tokens / self.took_s:,.0f} {self.noun}/s"]
        if self.flops and (self.possible_flops or self.flops / self.device_s >= LEAST_FLOPS):
            parts.append(f"{self.flops / self.device_s / 1e12:.3g} TFLOP/s a worker")
        if self.mfu >= LEAST_MFU:
            parts.append(
                f"MFU {self.mfu:.1%} ({self.causal_mfu:.1%} with the causal half of attention)"
                if self.causal_flops < self.flops
                else f"MFU {self.mfu:.1%} (attention is not counted)"
            )
        parts.append(f"{self.waited_s / self.took_s:.1%} of the time waiting for data")
        return ", ".join(
            [*parts, *([f"up to {amount(self.peak_bytes)} of a GPU"] if self.peak_bytes else [])]
        )
