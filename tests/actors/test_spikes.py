"""Kills around skipped steps change nothing on a cluster: the same steps are skipped, and the same samples
read, as without Ray.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from actors.cli.run_commands import Absent
from elastic.plan.layout import Layout
from tests.support.chaos import alone, assert_nothing_left, trial
from tests.train.test_spikes import WINDOW, drawn_by, read, spiky


@pytest.mark.full
def test_g1_g3_on_a_cluster_with_kills_after_a_skipped_step(tmp_path: Path) -> None:
    """G1, G3: one document has no number for a loss, and another one has a spike.  A worker is killed between
    the commit and the update of the first one's step, and rank 0 in the next world's first step, so that
    another member or copies hand the memory on.  The weights are those of a run without Ray; both documents
    are read until their step, and no more.  The control: without the quarantine, the run ends with other
    weights.
    """
    first = WINDOW + 2  # the step that is skipped does not count for the window
    (_, strange), (_, high) = (drawn_by(tmp_path, step, Layout(1, 1), 0) for step in (3, first))
    gains = {strange: math.nan, high: 1e3}
    good, other = (
        alone(spiky(tmp_path / action, gains, spikes={"action": action})) for action in ("quarantine", "skip")
    )
    places = (("before_update", 3, 1), ("before_commit", 0, 0))
    faults = [
        {"point": point, "step": step, "world_rank": rank, "generation": by}
        for by, (point, step, rank) in enumerate(places, 1)
    ]
    chaos = trial(spiky(tmp_path / "chaos", gains, faults=faults, name="spiky"))
    assert chaos.result.state == "Finished" and len(chaos.witness.killed()) == len(faults)
    outcomes = [chaos.ledger[step] for step in sorted(chaos.ledger)]
    assert [each.step for each in outcomes if not each.applies] == [3, first]
    assert read(outcomes, strange) == [3] and read(outcomes, high)[-1] == first
    assert chaos.hash == good.hash != other.hash
    known = Absent.of(chaos.job).said
    assert (
        f"2 steps were skipped, because no finite gradient came or it was a spike: 3, {first}; 4 samples "
        "are in quarantine"
    ) in known
    assert_nothing_left(chaos)
