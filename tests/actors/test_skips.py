"""L3: on a cluster, with a kill between skipped steps, too many in a row end the run as the job's fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actors.cli.run_commands import Absent
from elastic.report.story import Sentence
from tests.support.chaos import alone, assert_nothing_left, trial
from tests.support.toys import LIGHT, toy_job


def test_l3_g3_on_a_cluster_with_a_kill_in_the_middle(tmp_path: Path) -> None:
    """L3, G3: from step 2 on no loss is a number; a worker is killed in step 4.  Each step is said once, and
    what is saved has the bits of a run without Ray that ends after step 1.  The control: that of one that
    ends after step 2 differs.
    """
    settings: dict[str, Any] = {"schedule": {"kind": "constant"}, **LIGHT}
    good, other = (alone(toy_job(tmp_path / str(steps), steps=steps, **settings)) for steps in (1, 2))
    fault = {"point": "before_commit", "step": 4, "world_rank": 1}
    job = toy_job(
        tmp_path,
        steps=60,
        loss="tests.train.test_skips:ever",
        watch={"max_skipped": 4},
        faults=[fault],
        **settings,
    )
    chaos = trial(job)
    assert (chaos.result.state, chaos.result.exit_code) == ("Failed", 1)
    assert (
        "; 4 steps were skipped in a row, 2–5, and watch.max_skipped is 4: the last good step is 1, and no"
    ) in chaos.result.reason
    assert len(chaos.witness.killed()) == 1, "the fault happened"
    said = " ".join(line.text for line in chaos.lines if isinstance(line, Sentence))
    assert [
        said.count(f"step {step} is skipped and changes no weights: no loss of its 4") for step in range(1, 6)
    ] == [0, 1, 1, 1, 1]
    assert [chaos.ledger[step].finite for step in range(1, 6)] == [True, False, False, False, False]
    assert chaos.hash == good.hash != other.hash
    assert f"{len(chaos.ledger) - 1} steps were skipped" in Absent.of(job).said
    assert_nothing_left(chaos)
