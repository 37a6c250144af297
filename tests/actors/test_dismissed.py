"""R9: a worker that the run has given up, and that nobody kills, does not stay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from actors.launch import attach
from elastic.ids import WorkerId
from elastic.protocol.events import Lost
from tests.support.chaos import assert_nothing_left, trial
from tests.support.toys import toy_job

LEFT = 3
"""Exit code of a worker that leaves because the run goes on without it."""


def test_a_worker_that_the_run_has_given_up_leaves_by_itself(tmp_path: Path) -> None:
    """The coordinator is told by mistake that a living worker has ended, so it kills nobody.  The worker hears so when it asks for its
    lease, and ends itself.
    """
    mistaken = list[str]()

    def act(witness: Any, view: Any) -> bool:
        """Returns True once the worker that was given up has ended."""
        if not mistaken and view.step >= 3 and len(view.workers) == 2:
            mistaken.append(max(view.workers))
            attach("given-up").post.remote(Lost(WorkerId(mistaken[0]), "a mistake", certain=True))  # type: ignore[union-attr]
        elif mistaken and witness.seen[mistaken[0]].ended is not None:
            attach("given-up").stop.remote("it has ended")  # type: ignore[union-attr]
            return True
        return False

    job = toy_job(tmp_path, name="given-up", steps=100_000, workers={"min": 1, "max": 2}, deadlines={"lease_s": 8, "grow_debounce_s": 0.5})
    chaos = trial(job, act, hash_it=False)
    assert chaos.result.state == "Stopped"
    ended = chaos.witness.seen[mistaken[0]].ended
    assert ended is not None and ended.status is not None and os.waitstatus_to_exitcode(ended.status) == LEFT, "nobody killed it"
    (log,) = Path(job.bucket).glob(f"given-up/logs/*/{mistaken[0]}.log")
    assert "the run goes on without this worker" in log.read_text()
    assert_nothing_left(chaos)
