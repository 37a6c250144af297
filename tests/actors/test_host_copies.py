"""R1, R2 where copies in host memory are not what they should be: nothing that is bent is taken for state.

Tests in which good copies heal: the kill matrix (``test_kill_points.py``: shards), nodes that die
(``test_nodes.py``), and storms.
"""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.launch import launch
from actors.view import View
from elastic.errors import WireError
from elastic.report.ledger import ledger
from elastic.report.story import Line, Sentence
from elastic.runs.run import Run
from elastic.state.region import ALIGNED, Region
from elastic.state.wire import Wire
from tests.support.chaos import Witness, assert_nothing_left, formed, samples, trial
from tests.support.commands import assert_no_actor_left
from tests.support.kills import Script
from tests.support.room import Room
from tests.support.toys import toy_job

STEP = 9


def bend(region: Region) -> int:
    """Flips a bit in every tensor of each slot.  Returns the number of slots that hold a copy."""
    copies = 0
    for slot in range(region.slots):
        for at in range(0, region.slot_bytes, ALIGNED):
            region.data(slot)[at] ^= 1
        copies += region.held(slot) is not None
    return copies


@pytest.mark.full  # tests/state/test_wire.py refuses strangers without a run
def test_strangers_are_refused_and_the_story_says_so(tmp_path: Path, script_reference: Any) -> None:
    """A keeper tells nothing to a client that lacks the run's secret or speaks another protocol; the run goes
    on undisturbed.
    """
    script, refused = Script("shard", 1), list[WireError]()

    def act(witness: Witness, view: View) -> bool:
        if view.state != "Running" or view.step < STEP:
            return False
        node = min(view.workers.values())
        address = ray.get(ray.get_actor(f"{view.token}/keeper-{node[:12]}").address.remote())
        for _ in range(3):
            with pytest.raises(WireError) as error:
                Wire.connect(address, b"x" * 32)
            refused.append(error.value)
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: somebody-who-lost-his-way\r\nAccept: everything\r\n\r\n")
        return True

    chaos = trial(script.job(tmp_path, "strangers", copies={"copy_every": 1, "buddy_every": 0}), act)
    assert (chaos.result.state, chaos.hash) == ("Finished", script_reference.hash)
    told = [line.text for line in chaos.lines if isinstance(line, Sentence) and "was refused at" in line.text]
    assert len(refused) == 3 and len(told) == 1 and "does not know the secret of this run" in told[0], told
    assert len(formed(Run.open(chaos.job).records())) == 1
    assert_nothing_left(chaos)


@pytest.mark.full
@pytest.mark.parametrize("bent", [True, False], ids=["bent", "whole"])
def test_copies_that_are_bent_are_not_taken(tmp_path: Path, script_reference: Any, bent: bool) -> None:
    """One of three shards is left only in the keeper's memory, where a bit has changed: the reader notices,
    the keeper drops the copy, and the next world begins from the bucket with the right bits.  The control
    does the same without the changed bit."""
    script, room, found = Script("shard", 3), Room(), list[int]()

    def act(witness: Witness, view: View) -> bool:
        """Freezes the victim, so that no copy follows, then kills it."""
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
    assert samples(ledger(Run.open(chaos.job).segments())) == samples(script_reference.ledger)
    assert [world.tier for world in worlds[1:3]] == (["host", "bucket"] if bent else ["host"]), worlds
    told = [
        line.text
        for line in chaos.lines
        if isinstance(line, Sentence) and "bytes do not match their digests" in line.text
    ]
    assert bool(told) == bent
    assert found[0] in (2, 3) if bent else found == [0], "three slots, of which one may be under way"
    host, bucket = chaos.witness.total("healed_host_bytes"), chaos.witness.total("healed_bucket_bytes")
    assert bucket > 0 if bent else host > 0 == bucket
    assert_nothing_left(chaos)


# tests/plan/test_copy_budget.py and tests/train/test_limits.py have the sentence, without a run
@pytest.mark.full
def test_copies_for_which_there_is_no_memory_end_the_run_before_it_begins(tmp_path: Path) -> None:
    """The model is too large for any machine, and nothing of it is built: the result and the story both say
    how much memory is missing and which setting gives it."""
    vast = {"vocab": 29, "dim": 2**20, "layers": 4, "heads": 2}
    lines = list[Line]()
    result = launch(toy_job(tmp_path, name="vast", model_args=vast, workers={"max": 1}), show=lines.append)
    assert (result.state, result.step, result.exit_code) == ("Failed", 0, 1), result
    refused = re.compile(
        r"w1 cannot start on node \w{8} .*: copies\.copy_every = auto: this worker's copies and saves take "
        r"at least \S+ TB "
        r"of memory \(7 slots\), "
        r"and the (node|container) \(\S.*\) leaves only \S+ [GT]B after .*; raise the limit by \S+ TB for "
        r"each worker "
        r"\(on Kubernetes resources\.limits\.memory"
    )
    assert refused.search(result.reason), result.reason
    assert any(refused.search(line.text) for line in lines if isinstance(line, Sentence))
    assert not formed(Run.open(toy_job(tmp_path, name="vast", model_args=vast)).records())
    assert_no_actor_left("vast")
