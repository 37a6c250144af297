"""The run as Prometheus sees it: numbers that Ray exports on every node's metrics port, each with the run as
its tag.

Prometheus stores the value at each time that it asks, so a repeated step appears again; ``elastic metrics``
has each step once.  ``examples/grafana/elastic.json`` draws these numbers.  Ray puts ``ray_`` before each
name, and ``_total`` after the name of a counter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge

from elastic.control import copy_inventory
from elastic.control.run import RunState
from elastic.journal import codec
from elastic.protocol.events import Event, Lost, parts
from elastic.report.goodput import Account
from elastic.report.story import StepLine

OF_A_STEP = {
    "elastic_loss": "The loss of the newest committed step",
    "elastic_gradient_norm": "The norm of its gradient",
    "elastic_learning_rate": "Its learning rate",
    "elastic_tokens_per_second": "Tokens a second since the step before, recoveries included",
    "elastic_mfu_ratio": "The model FLOPs utilisation of its work; 0 if it is not known",
    "elastic_data_wait_ratio": "The largest part of it for which a worker waited for data",
    "elastic_gpu_peak_bytes": "The most bytes that it had allocated on one GPU; 0 on CPUs",
    "elastic_members": "The number of workers that computed it",
}
"""Numbers of the newest step, with their meaning."""
OF_THE_RUN = {
    "elastic_step": "The newest committed step",
    "elastic_target_step": "The step at which the run is finished",
    "elastic_generation": "The number of worlds so far: whenever workers are lost or join, there is one more",
    "elastic_workers": "The number of workers, members and spares",
    "elastic_saved_step": "The step of the newest good checkpoint in the bucket; 0 without one",
    "elastic_unprotected": (
        "1 while copies in host memory are overdue, so that a lost worker could cost all steps since the "
        "newest checkpoint"
    ),
    "elastic_skipped_steps": (
        "The number of steps that were skipped: their gradient was not finite, or they were spikes"
    ),
    "elastic_validation_loss": "The newest loss on held-out samples; absent without validation",
    "elastic_goodput_ratio": (
        "The samples committed since this coordinator began, as a part of those that the nodes present could "
        "have committed"
    ),
}
"""Numbers of the run as it is now."""
OF_TIME = {
    "elastic_spent_seconds": "The seconds since this coordinator began, by bucket: elastic/report/goodput.py"
}
"""Numbers of each bucket of time, with the bucket as a second tag."""
COUNTED = {"elastic_lost_workers": "Workers that were lost, since this coordinator began"}
"""Numbers that only grow; a new coordinator begins them at 0, as Prometheus expects of counters."""


class Exported:
    """The exported numbers of one run."""

    def __init__(self, run: str) -> None:
        self._gauges = {
            name: Gauge(name, text, ("run",)) for name, text in {**OF_A_STEP, **OF_THE_RUN}.items()
        }
        self._of_time = {name: Gauge(name, text, ("run", "bucket")) for name, text in OF_TIME.items()}
        self._account, self._lock = Account(keep=False), threading.Lock()
        """The account of the time since this coordinator began; several threads use it."""
        self._counters = {name: Counter(name, text, ("run",)) for name, text in COUNTED.items()}
        for each in (*self._gauges.values(), *self._of_time.values(), *self._counters.values()):
            each.set_default_tags({"run": run})

    def begins(self, at: float, state: RunState) -> None:
        """Notes the state from which this coordinator goes on."""
        with self._lock:
            self._account.begins(at, codec.snapshot(state)["run"])

    def record(self, record: Mapping[str, Any]) -> None:
        """Notes a record of the journal."""
        with self._lock:
            self._account.note(record)

    def event(self, event: Event) -> None:
        for each in parts(event):
            if isinstance(each, Lost):
                self._counters["elastic_lost_workers"].inc()

    def step(self, line: StepLine) -> None:
        self._gauges["elastic_step"].set(line.step)
        values = (
            line.loss,
            line.norm,
            line.lr,
            line.tokens_per_s,
            line.mfu,
            line.data_wait,
            line.peak_bytes,
            line.world,
        )
        for name, value in zip(OF_A_STEP, values, strict=True):
            self._gauges[name].set(value)

    def run(self, state: RunState, steps: int, now: float) -> None:
        for name, value in _of(state, steps):
            self._gauges[name].set(value)
        with self._lock:
            figures, spent = self._account.so_far, self._account.spent(now)
        self._gauges["elastic_goodput_ratio"].set(figures.present)
        for bucket, seconds in spent.items():
            self._of_time["elastic_spent_seconds"].set(seconds, {"bucket": bucket})


def _of(state: RunState, steps: int) -> Iterator[tuple[str, float]]:
    yield "elastic_step", state.version.step
    yield "elastic_target_step", steps
    yield "elastic_generation", state.generation
    yield "elastic_workers", len(state.workers)
    yield "elastic_saved_step", max((version.step for version in state.history.saved), default=0)
    yield "elastic_unprotected", int(copy_inventory.unprotected_since(state) is not None)
    yield "elastic_skipped_steps", state.skips.total
    if state.history.validated is not None:
        yield "elastic_validation_loss", state.history.validated.found.mean
