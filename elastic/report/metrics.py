"""The numbers of committed steps by name: one flat row for each step, to be drawn or stored.

:class:`Rows` collects them from the journal, which has all of them.  A row is *final* once a good checkpoint
is at its step or after it: a run never falls back behind its newest good checkpoint, so the step is not done
again.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from elastic.ids import Version
from elastic.journal import codec
from elastic.protocol.commit_record import Outcome, Validated
from elastic.protocol.events import Evaluated, StepDone, Work
from elastic.protocol.lineage import Lineage, contains
from elastic.report.best import number_of
from elastic.report.recoveries import Why
from elastic.report.speed import Speed

Row = dict[str, Any]
"""The numbers of one step by name.  A number that is not known is left out.

The first step of a new world also has an "event", the sentence that says why the world was formed.  It is the
only text in a row.
"""

VALIDATION = ("validation_loss", "validation_terms", "validation_data")
"""The names of the numbers of a validation."""
COLUMNS = (
    "step",
    "final",
    "generation",
    "time",
    "loss",
    "norm",
    "lr",
    "tokens",
    "skipped",
    "spike",
    "left_out",
    "would_leave_out",
    "quarantined",
    "world",
    *VALIDATION,
    "step_s",
    "tokens_per_s",
    "data_wait",
    "mfu",
    "causal_mfu",
    "peak_bytes",
    "reserved_bytes",
    "forward_s",
    "late",
    "copied_through",
    "buddied_through",
    "event",
)
"""The names in the order of a table.  Norms of layers, such as "norm/layers.3", follow."""


def metrics(outcome: Outcome) -> Row:
    """Returns the loss, the norm, the tokens and, if the commit has them, the norms of the layers: {"loss":
    .., "norm/layers.3": ..}.
    """
    layers = {f"norm/{name}": norm for name, norm in outcome.layer_norms.items()}
    return {"loss": outcome.loss, "norm": outcome.norm, "tokens": float(outcome.tokens), **layers}


def row_of(
    at: float,
    outcome: Outcome,
    lr: float,
    work: Work | None = None,
    world: int = 0,
    *,
    leaves_out: bool = False,
) -> Row:
    """Returns the row of a step.  ``at`` is its wall-clock time, ``world`` the number of members (0: not
    known).

    ``leaves_out`` is True if the job leaves out microbatches (``spikes.microbatch_z``); the row then has
    their number, even 0.
    """
    usage, speed = outcome.usage, Speed()
    speed.add(outcome, work)
    row = {
        "step": outcome.step,
        "generation": outcome.generation,
        "time": at,
        "skipped": int(not outcome.applies),
    }
    row |= {} if math.isnan(lr) else {"lr": lr}
    row |= metrics(outcome) | {"tokens": outcome.tokens}
    known = {
        "world": world,
        "step_s": usage.step_s,
        "peak_bytes": usage.peak_bytes,
        "reserved_bytes": usage.reserved_bytes,
        "forward_s": usage.forward_s,
        "late": len(outcome.late),
    }
    known |= (
        {"tokens_per_s": sum(outcome.counts) / usage.step_s, "data_wait": usage.data_wait}
        if usage.step_s
        else {}
    )
    known |= {"mfu": speed.mfu, "causal_mfu": speed.causal_mfu}
    row |= {name: value for name, value in known.items() if value or (name == "data_wait")}
    row |= {"left_out": len(outcome.left_out)} if outcome.left_out or leaves_out else {}
    row |= {"spike": 1} if outcome.spike else {}
    row |= {"would_leave_out": len(outcome.warned)} if outcome.warned else {}
    row |= {"quarantined": len(outcome.quarantined)} if outcome.quarantined else {}
    copied = {"copied_through": outcome.copied_through, "buddied_through": outcome.buddied_through}
    return row | {name: step for name, step in copied.items() if step >= 0}


def with_validation(row: Row, found: Validated | None, held_out: str = "") -> Row:
    """Returns ``row`` with the numbers of ``found``, the validation after its step.  ``held_out`` names the
    validation's samples.
    """
    return row if found is None else row | numbers_of(found.mean, found.count, held_out)


def numbers_of(mean: float, terms: int, held_out: str) -> Row:
    """Returns the numbers of a validation.  ``held_out`` names its samples; it is "" if nobody noted the
    name.
    """
    data = number_of(held_out)
    return {"validation_loss": mean, "validation_terms": terms} | ({"validation_data": data} if data else {})


def version_of(row: Mapping[str, Any]) -> Version:
    """Returns the version that a row, or a commit in a journal, names."""
    return Version(int(row["step"]), int(row["generation"]))


class Rows:
    """The rows of a run, from the segments of its journal, which are read piece by piece, in order.

    ``lr`` returns the learning rate of a version, given the rate that its commit reports, if any.
    ``leaves_out`` returns whether the version's job leaves out microbatches.
    """

    def __init__(
        self, lr: Callable[[Version, float | None], float], leaves_out: Callable[[Version], bool]
    ) -> None:
        self._lr, self._leaves_out = lr, leaves_out
        self._history: dict[str, Any] = {"lineage": [], "saved": [], "untold": []}
        """Fields of the run's history after the last record that was read."""
        self._rows: dict[Version, Row] = {}
        self._validated: dict[tuple[int, Version], tuple[Validated, str]] = {}
        """The validation after a step and the name of its samples, by the step and the version whose report
        has the validation.
        """
        self._held_out = ""
        """The name of the held-out samples, as the snapshot of the records that are being read has it."""
        self._worlds: dict[int, int] = {}
        """The number of members, by generation."""
        self._why = Why()
        """The reason why the newest world was stopped, until the next world has committed a step."""
        self._events: dict[int, str] = {}
        """The reason for a new world, by its generation, until it has committed a step."""

    def read(self, snapshot: Mapping[str, Any] | None, records: Sequence[Mapping[str, Any]]) -> None:
        """Reads records in today's format.  They follow ``snapshot``, or, if it is None, the records that
        were read last.
        """
        if snapshot is not None:
            self._history = {name: snapshot["run"]["history"].get(name, []) for name in self._history}
            self._note_plan(snapshot["run"]["state"].get("plan"))
            self._held_out = snapshot["run"]["members"].get("reference", {}).get("held_out", "")
        self._history = {
            name: codec.field_after(({"run": {"history": self._history}}, records), "history", name)
            for name in self._history
        }
        for record in records:
            for action in record["actions"]:
                self._note_plan(action.get("plan"))
            self._note_event(record)
            self._note_commits(record)

    @property
    def lineage(self) -> Lineage:
        lineage: Lineage = codec.decode(Lineage, self._history["lineage"])
        return lineage

    @property
    def saved(self) -> int:
        """The step of the newest good checkpoint; 0 without one."""
        return max((each["step"] for each in self._history["saved"]), default=0)

    @property
    def told(self) -> int:
        """The step up to which every commit is known.  Later commits may be missing that only a dead
        coordinator was told of.
        """
        untold, reached = (
            self._history["untold"],
            max((step for _, step in self._history["lineage"]), default=0),
        )
        return min(untold) - 1 if untold else reached

    def surviving(self, lineage: Lineage | None = None) -> list[Row]:
        """Returns the rows of ``lineage`` (the surviving one if None), in order, each step once."""
        lineage = self.lineage if lineage is None else lineage
        versions = sorted(version for version in self._rows if contains(lineage, version))
        found = {version.step: self._rows[version] for version in versions}
        for (step, by), validated in self._validated.items():
            if step in found and contains(lineage, by):
                found[step] = with_validation(found[step], *validated)
        return [found[step] for step in sorted(found)]

    def forget(self, step: int) -> None:
        """Forgets all rows up to ``step``, because they are stored elsewhere."""
        self._rows = {version: row for version, row in self._rows.items() if version.step > step}
        self._validated = {of: found for of, found in self._validated.items() if of[0] > step}

    def _note_plan(self, plan: Mapping[str, Any] | None) -> None:
        if plan and "members" in plan:
            self._worlds[plan["generation"]] = len(plan["members"])

    def _note_event(self, record: Mapping[str, Any]) -> None:
        actions = {each["$"]: each for each in record["actions"]}
        self._why.hear(record, ends=bool(actions.keys() & {"Fence", "Pause"}))
        if "Form" in actions and (generation := actions["Form"]["plan"]["generation"]) > 1:
            self._events[generation] = self._why.text or record["reason"]

    def _note_commits(self, record: Mapping[str, Any]) -> None:
        done = {
            each["worker"]: each for each in codec.parts_of(record["event"]) if each["$"] == StepDone.__name__
        }
        own = {
            version_of(each["outcome"]): codec.decode(tuple[tuple[str, float], ...], each["metrics"])
            for each in done.values()
            if each.get("metrics")
        }
        work = next((codec.decode(Work, each["work"]) for each in done.values() if each.get("work")), None)
        for commit in record.get("commits", ()):
            outcome: Outcome = codec.decode(Outcome, commit)
            version, world = (
                Version(outcome.step, outcome.generation),
                self._worlds.get(outcome.generation, 0),
            )
            if version not in self._rows:
                event = (
                    {"event": self._events.pop(outcome.generation)}
                    if outcome.generation in self._events
                    else {}
                )
                row = row_of(
                    record["at"],
                    outcome,
                    self._lr(version, outcome.lr),
                    work,
                    world,
                    leaves_out=self._leaves_out(version),
                )
                self._rows[version] = row | event | dict(own.get(version, ()))
                self._why = Why()
            if outcome.validated is not None:
                self._validated[outcome.step - 1, version] = outcome.validated, self._held_out
        if (
            record["event"]["$"] == Evaluated.__name__
            and record["reason"]
            and not record["reason"].startswith("refused")
        ):
            evaluated = codec.decode(Evaluated, record["event"])
            self._validated[evaluated.version.step, evaluated.version] = evaluated.found, self._held_out
        for each in done.values():
            if each.get("validated"):  # after the last step of the run; no commit follows
                last = version_of(each["outcome"])
                self._validated[last.step, last] = codec.decode(Validated, each["validated"]), self._held_out


# ---- as text


def json_line(row: Mapping[str, Any]) -> str:
    """Returns a row as a line of JSON, with the names in order.  JSON has no numbers that are not finite;
    null stands for them.
    """
    return json.dumps(
        {name: row[name] if name == "event" or math.isfinite(row[name]) else None for name in in_order(row)}
    )


def row_from(line: str) -> Row:
    """Returns the row from which :func:`json_line` made ``line``; NaN stands for a number that was not
    finite.
    """
    return {name: math.nan if value is None else value for name, value in json.loads(line).items()}


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows as CSV, with a column for each name that any row has.  Without rows it is a header of
    all ``COLUMNS``.
    """
    text = io.StringIO()
    names = {name for row in rows for name in row} if rows else COLUMNS
    writer = csv.DictWriter(text, in_order(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def in_order(names: Iterable[str]) -> list[str]:
    """Returns names in the order of a table."""
    there = list(names) if isinstance(names, Mapping) else sorted(names)
    return [*(name for name in COLUMNS if name in there), *(name for name in there if name not in COLUMNS)]
