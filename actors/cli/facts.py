"""Collects what the page of a run shows from its bucket."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import chain
from typing import Any

from elastic.config.values import HIDDEN, is_secret
from elastic.ids import Version
from elastic.plan.retention import Keep
from elastic.report.page.content import BranchRow, CheckpointRow, Facts
from elastic.report.page.series import Columns
from elastic.report.timeline import Timeline
from elastic.runs import alone, branches, owed, retention
from elastic.runs.metrics import origin_rows, rows_of
from elastic.runs.quarantine import held_in
from elastic.runs.run import Run
from storage import journal
from storage.errors import StorageError

LEARNT = ("step", "final", "loss", "norm", "lr", "tokens", "validation_loss", "validation_data")
"""The numbers that a fork's page shows of its origin's steps: what was learnt, and not when."""


def facts_of(run: Run, keep: Keep, now: float) -> Facts:
    """Returns what the bucket holds of the run; ``keep`` has the rules that keep checkpoints."""
    job, end = run.job, run.end()
    found = retention.look(run, keep, now=now)
    settings = branches.flat(run.branches.job())
    timeline = Timeline().read(journal.objects(run.store, job.name))
    return Facts(
        name=job.name,
        steps=job.steps,
        global_batch=job.global_batch if isinstance(job.global_batch, int) else 0,
        settings={
            name: HIDDEN if is_secret(name, value) else _text(value) for name, value in settings.items()
        },
        columns=Columns(
            chain(
                ({name: row[name] for name in LEARNT if name in row} for row in origin_rows(run)),
                rows_of(run),
            )
        ),
        timeline=timeline,
        checkpoints=_checkpoints(found),
        owed=owed.sentence(found.debts),
        branches=[_branch(each) for each in run.branches.every()],
        end="" if end is None else type(end).__name__,
        local=run.trained_alone,
        alone=() if timeline.life else alone.spans(run.store, job.name),
        quarantine=_quarantine(run, found.newest),
        read_at=now,
    )


def _quarantine(run: Run, newest: Version | None) -> int:
    """Returns the number of samples in quarantine in the newest checkpoint; 0 if it cannot be read, since a
    page can do without it.
    """
    with suppress(StorageError):
        return len(held_in(run.checkpoints.open(newest)) or ()) if newest is not None else 0
    return 0


def _checkpoints(found: retention.Look) -> list[CheckpointRow]:
    told = []
    for each in found.listed:
        files = each.manifest.files if each.manifest else ()
        layout = "×".join(str(degree) for degree in each.manifest.layout.values()) if each.manifest else ""
        state, kept = retention.state_of(each, found.newest), found.verdict.kept.get(each.version, ())
        told.append(CheckpointRow(each.version, sum(file.size for file in files), layout, state, kept))
    return told


def _branch(one: branches.Branch) -> BranchRow:
    shown = {name: pair for name, pair in one.changed.items() if not is_secret(name, pair)}
    changed = {name: (_text(before), _text(after)) for name, (before, after) in shown.items()}
    return BranchRow(one.number, one.step, one.at, changed)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
