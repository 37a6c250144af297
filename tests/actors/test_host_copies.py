"""R1, R2 where copies in host memory are not what they should be: nothing that is bent is taken for state.

That they heal is shown by the kill matrix (``test_kill_points.py``: shards), by nodes that die (``test_nodes.py``) and by storms.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.coordinator import View
from elastic.copies.region import ALIGNED, Region
from elastic.report.ledger import ledger
from elastic.report.story import Sentence
from elastic.runs import Run
from tests.support.chaos import Witness, assert_nothing_left, formed, samples, trial
from tests.support.kills import Script
from tests.support.room import Room

STEP = 9


def bend(region: Region) -> int:
    """A bit in every tensor of each slot; how many hold a copy."""
    copies = 0
    for slot in range(region.slots):
        for at in range(0, region.slot_bytes, ALIGNED):
            region.data(slot)[at] ^= 1
        copies += region.held(slot) is not None
    return copies


@pytest.mark.full
@pytest.mark.parametrize("bent", [True, False], ids=["bent", "whole"])
def test_copies_that_are_bent_are_not_taken(tmp_path: Path, script_reference: Any, bent: bool) -> None:
    """Of three shards one is left only in the keeper's memory, where a bit has changed: who reads it notices, the keeper forgets it, and
    the next world begins from the bucket, with the right bits.  The control is the same without the bit."""
    script, room, found = Script("shard", 3), Room(), list[int]()

    def act(witness: Witness, view: View) -> bool:
        """Frozen, so that no copy follows, then killed."""
        if view.state != "Running" or view.step < STEP or len(witness.seen) < 3:
            return False
        room.queue(1)  # nobody takes the victim's place
        victim = witness.seen[max(view.workers)]
        victim.process.kill(signal.SIGSTOP)
        region = Region.of_process(victim.process.pid, victim.counters["copies"])
        found.append(bend(region) if bent else 0)
        victim.process.kill()
        return True

    try:
        room.take(ray.cluster_resources()["CPU"] - 3)
        chaos = trial(script.job(tmp_path, "bent", copies={"copy_every": 1, "buddy_every": 0}), act)
    finally:
        room.close()
    worlds = formed(Run.open(chaos.job).records())
    assert (chaos.result.state, chaos.hash) == ("Finished", script_reference.hash)
    assert samples(ledger(Run.open(chaos.job).records())) == samples(script_reference.ledger)
    assert [world.tier for world in worlds[1:3]] == (["host", "bucket"] if bent else ["host"]), worlds
    told = [line.text for line in chaos.lines if isinstance(line, Sentence) and "digests differ" in line.text]
    assert bool(told) == bent
    assert found[0] in (1, 2) if bent else found == [0], "two slots, of which one may be under way"
    host, bucket = chaos.witness.total("healed_host_bytes"), chaos.witness.total("healed_bucket_bytes")
    assert bucket > 0 if bent else host > 0 == bucket
    assert_nothing_left(chaos)
