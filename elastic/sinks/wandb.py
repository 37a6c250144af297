"""Weights & Biases, online or offline.

All that is ever written belongs to one W&B run: its id is that of the run in the bucket.  The rows of each
call are a session of their own.  The call returns when W&B has finished the session, and so has all its rows.
Between two saves W&B therefore shows the run as finished.

Offline, a session is made beside its place and moved there when it is whole, so that each step is there
exactly once:

    <folder>/<run>-<id>/000000000051-000000000100/wandb/offline-run-20261126_153744-<id>/

``wandb sync <folder>/<run>-<id>/*/wandb/offline-run-*`` sends them on, in order.

Online, W&B itself says with which step a resumed run goes on, and refuses earlier ones.  For another machine,
which does not have the folder, the bucket has a note of the last step.  One case remains, offline, with
folders on several machines: if a machine dies between the move and the note, two sessions hold the same
steps.  W&B refuses those of the second session when both are sent on in order.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import wandb

from elastic.report.metrics import Row
from elastic.sinks.port import EVENT, TrackedRun, shown

SINK = "wandb"
"""The name under which the bucket notes the last step."""
BEGUN = ".begun-"
"""The names of folders with sessions that are not whole yet begin with this."""


class Tracker:
    """Logs rows to a run of ``project``.  ``folder`` is a local one for W&B's own files; offline, all nodes
    should share it.

    The key of W&B is in the environment of the coordinator or in its home folder, as for any program;
    ``entity`` is the team.
    """

    def __init__(
        self,
        run: TrackedRun,
        folder: str,
        project: str = "elastic",
        entity: str = "",
        mode: Literal["online", "offline"] = "online",
    ) -> None:
        if mode not in ("online", "offline"):
            raise ValueError(f"mode = {mode!r} must be 'online' or 'offline'")
        self._run, self._mode = run, mode
        self._folder = Path(folder).expanduser().absolute() / f"{run.title}-{run.id}"
        self._about: dict[str, Any] = {
            "project": project,
            "entity": entity or None,
            "id": run.id,
            "name": run.title,
            "resume": "allow",
        }
        self._about |= {"config": dict(run.settings), "mode": mode, "reinit": "create_new"}
        for begun in self._folder.glob(f"{BEGUN}*"):  # left by sessions that died
            shutil.rmtree(begun, ignore_errors=True)

    def last(self) -> int:
        there = (
            [int(each.name.partition("-")[2]) for each in self._folder.glob("[0-9]*-[0-9]*")]
            if self._mode == "offline"
            else []
        )
        return max([*there, self._run.noted(SINK)])

    def write(self, rows: Sequence[Row]) -> None:
        first, last = int(rows[0]["step"]), int(rows[-1]["step"])
        begun = self._folder / f"{BEGUN}{uuid.uuid4().hex}"
        begun.mkdir(parents=True)
        try:
            self._log(rows, begun)
            if self._mode == "offline":
                begun.rename(self._folder / f"{first:012d}-{last:012d}")
        finally:
            shutil.rmtree(begun, ignore_errors=True)
        self._run.note(SINK, last)

    def _log(self, rows: Sequence[Row], folder: Path) -> None:
        settings = wandb.Settings(
            console="off",
            silent=True,
            symlink=False,
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,  # the coordinator's machine is of no interest
            x_disable_stats=True,
        )
        run = wandb.init(**self._about, dir=str(folder), settings=settings)
        try:
            for row in rows:
                if row["step"] >= run.starting_step:  # else a session that died before its note has sent it
                    words = {EVENT: row[EVENT]} if EVENT in row else {}
                    run.log({**shown(row), **words}, step=int(row["step"]))
        finally:
            run.finish()
