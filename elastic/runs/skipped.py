"""The sentence about skipped steps, spikes and left-out microbatches of a run that does not train now, from
its rows and its newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import isfinite

from elastic.control.skips import Skips
from elastic.report.metrics import Row
from elastic.runs.metrics import rows_of
from elastic.runs.quarantine import held_in
from elastic.runs.run import LOCAL, Run

SHORT = ("step", "skipped", "spike", "left_out", "would_leave_out", "norm", "loss")
"""The numbers in the row of a step that this module reads."""


def sentence(run: Run, known: Skips) -> str:
    """Returns the sentence about skipped steps, spikes that were warned of, samples in quarantine and
    microbatches that were left out; "" if there is none.

    ``known`` are the skips that the journal knows.  One process alone (``--local``) writes no journal, so its
    rows are counted.
    """
    owner = run.owner()
    alone, leaves_out = owner is not None and owner["address"] == LOCAL, run.job.spikes.leaves_out
    rows = list(map(_short, rows_of(run))) if alone or leaves_out else []
    if alone:
        known = skips_in(rows, fp16=run.job.precision == "fp16")
        newest = run.newest()
        held = held_in(run.checkpoints.open(newest)) if newest is not None else None
        known = replace(known, quarantined=tuple((each.sample, each.step) for each in held or ()))
    counts = [number for row in rows if (number := int(row.get("left_out", 0)))]
    steps = f"{len(counts)} {'step' if len(counts) == 1 else 'steps'}"
    were = "microbatch was" if sum(counts) == 1 else "microbatches were"
    return "; ".join(
        filter(None, (known.summary, f"{sum(counts)} {were} left out of {steps}" if counts else ""))
    )


def skips_in(rows: Iterable[Row], *, fp16: bool) -> Skips:
    """Returns the skips of a run with these rows.

    A skipped step with a finite gradient is a spike.  With ``fp16``, a skipped step does not count if its
    gradient is not finite but its loss is: the run was looking for the scale of its loss.
    """
    found = Skips()
    for row in rows:
        step = int(row["step"])
        if row.get("skipped") == 1:
            spike = isfinite(row["norm"])
            if spike or not fp16 or not isfinite(row["loss"]):
                found = replace(
                    found.with_step(step), spikes=(*found.spikes, step) if spike else found.spikes
                )
            continue
        found = replace(found, warned=found.warned.with_step(step)) if row.get("spike") == 1 else found
        found = (
            replace(found, would_leave_out=found.would_leave_out.with_step(step))
            if row.get("would_leave_out")
            else found
        )
    return found


def _short(row: Row) -> Row:
    return {name: row[name] for name in SHORT if name in row}
