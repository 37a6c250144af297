"""R1: a worker whose process lives but cannot go on is replaced; the others go on in the processes they have.

No device is needed: loss functions (``tests/support/mischief.py``) imitate a lost device and a stuck abort.
Tests on devices:
``tests/gpu/test_device_lost.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.view import View
from elastic.config.sections import WorkerFault
from elastic.data.cursor import Cursor
from elastic.report.story import Sentence
from elastic.runs.run import Run
from tests.support.chaos import Trial, Witness, assert_survived, formed, trial
from tests.support.kills import SAMPLES, Cramp, Grow, Script, perform
from tests.support.mischief import STEP
from tests.support.room import Room

LOST = "cannot go on (device: CUDA error: device-side assert triggered)"
STUCK = "the abort before generation 2 has not ended in"


def struck_by(chaos: Trial, *faults: dict[str, Any]) -> Trial:
    """Returns ``chaos``, to be checked as if the job had asked for ``faults`` too."""
    known = (*chaos.job.faults, *(WorkerFault(**fault) for fault in faults))
    # some faults strike accelerators
    job = chaos.job.replace(workers=chaos.job.workers.model_copy(update={"gpus": 1}))
    return replace(chaos, job=job.model_copy(update={"faults": known}))


def members(chaos: Trial) -> list[tuple[str, ...]]:
    return [each.members for each in formed(Run.open(chaos.job).records())]


def sent_away(chaos: Trial) -> list[str]:
    """Returns the workers whose process the coordinator has ended because it is unusable."""
    did = [action for record in Run.open(chaos.job).records() for action in record["actions"]]
    return [
        worker
        for each in did
        if each["$"] == "Kill" and each["reason"] == "its process is unusable"
        for worker in each["workers"]
    ]


def told(chaos: Trial, words: str) -> list[str]:
    return [line.text for line in chaos.lines if isinstance(line, Sentence) and words in line.text]


def with_a_spare(script: Script, folder: Path, loss: str) -> Trial:
    """Runs the script with two members and a spare, which is there before ``STEP``; there is no room for a
    fourth worker.
    """
    room, gate = Room(), folder / "gate"
    sample = Cursor(SAMPLES, 16, 0, "permutation").microbatch_ids(STEP - 2, 0, 2)[0]
    data = {
        "dataset": "tests.support.toys:Sums",
        "args": {"samples": SAMPLES, "gates": {str(sample): str(gate)}},
    }

    def act(witness: Witness, view: View) -> bool:
        if len(view.workers) < 3 or len(witness.seen) < 3:
            return False
        room.queue(1)
        gate.touch()
        return True

    try:
        room.take(ray.cluster_resources()["CPU"] - 3)
        return trial(
            script.job(folder, "spare", data=data, workers={"min": 2, "max": 2, "spares": 1}, loss=loss), act
        )
    finally:
        room.close()


@pytest.mark.full
@pytest.mark.parametrize("spares", [1, 0])
def test_who_has_lost_its_device_is_replaced(tmp_path: Path, script_reference: Any, spares: int) -> None:
    """R1, R13: both shards are needed; that of the member without a device is in its keeper's memory.  The
    process of this member ends though no fault has killed it, another worker takes its seat, and the other
    member's process goes on.  With a spare this takes one more world, without a spare two."""
    script, loss = Script("shard", 2), "tests.support.mischief:device_lost"
    script.form(2, "init")
    if spares:
        script.form(2, "host")
        chaos = with_a_spare(script, tmp_path, loss)
    else:
        script.form(1, "host")
        script.growth.append(Grow(script.generation, STEP + 4))
        script.form(2, "live")
        chaos = perform(script, tmp_path, "lost", loss=loss)
    struck = struck_by(chaos, {"point": "forward", "kind": "device_assert", "step": STEP, "world_rank": 0})
    assert_survived(struck, script_reference, worlds=script.worlds, tiers=script.tiers)
    first, *_, last = members(chaos)
    assert sent_away(chaos) == [first[0]] and told(chaos, f"{first[0]} {LOST}")
    assert set(first) & set(last) == {first[1]} and len(chaos.witness.seen) == 3


@pytest.mark.full
def test_who_has_lost_a_call_is_not_replaced(tmp_path: Path, script_reference: Any) -> None:
    """The control: the same error at the same place, but the device answers when asked.  The process is the
    same in the next world.
    """
    script = Script("shard", 2)
    script.form(2, "init")
    script.form(2, "live")
    chaos = perform(script, tmp_path, "error", loss="tests.support.mischief:device_error")
    struck = struck_by(chaos, {"point": "forward", "kind": "exception", "step": STEP, "world_rank": 0})
    assert_survived(
        struck,
        script_reference,
        worlds=script.worlds,
        tiers=script.tiers,
        said={"job": "AcceleratorError at "},
    )
    first, last = members(chaos)
    assert set(first) == set(last) and len(chaos.witness.seen) == 2
    assert sent_away(chaos) == [] == told(chaos, LOST)


def killed_beside(folder: Path, loss: str, then: Sequence[tuple[int, str]]) -> tuple[Script, Trial]:
    """Runs three workers, of which world rank 1 dies, and the abort of world rank 0 takes long.

    ``then``: (members, tier) of the worlds that follow before a newcomer comes, each of one worker less.
    """
    script = Script("shard", 3)
    script.form(3, "init")
    script.cramps.append(Cramp(script.generation, STEP - 2, victims=len(then)))
    script.fault("backward", "SIGKILL", 1, STEP)
    for world in then:
        script.form(*world)
    script.growth.append(Grow(script.generation, STEP + 4, room=1))
    script.form(then[-1][0] + 1, "live")
    return script, perform(script, folder, "abort", loss=loss)


@pytest.mark.full
def test_who_cannot_abort_is_replaced(tmp_path: Path, script_reference: Any) -> None:
    """R1: the stuck worker joins the next world and reports there, before anything begins, that it cannot
    take part.  The third member, which waits for it, goes on alone and takes in a newcomer.  Both shards that
    are gone come from host memory."""
    script, chaos = killed_beside(tmp_path, "tests.support.mischief:stuck_abort", [(2, "host"), (1, "host")])
    first, second, third, last = members(chaos)
    struck = struck_by(
        chaos,
        {"point": "forming", "kind": "device_assert", "generation": 2, "world_rank": second.index(first[0])},
    )
    assert_survived(
        struck, script_reference, worlds=script.worlds, tiers=script.tiers, said={"device": STUCK}
    )
    assert (
        sent_away(chaos) == [first[0]]
        and len(told(chaos, f"{first[0]} cannot go on (device: {STUCK} {first[0]} within 1 s)")) == 1
    )
    assert set(second) == {first[0], first[2]} and third == (first[2],)
    assert set(first) & set(last) == {first[2]} and len(chaos.witness.seen) == 4
    assert "generation 1 aborted in" not in log_of(chaos, first[0]) and "generation 1 aborted in" in log_of(
        chaos, first[2]
    )


@pytest.mark.full
def test_who_is_late_with_an_abort_is_not_replaced(tmp_path: Path, script_reference: Any) -> None:
    """The control: the abort ends, as late as it is given up above.  Two of the three workers go on in their
    processes.
    """
    script, chaos = killed_beside(tmp_path, "tests.support.mischief:late_abort", [(2, "host")])
    assert_survived(chaos, script_reference, worlds=script.worlds, tiers=script.tiers)
    first, second, last = members(chaos)
    assert set(second) == {first[0], first[2]} < set(last)
    assert sent_away(chaos) == [] == told(chaos, STUCK)
    assert "generation 1 aborted in 1." in log_of(chaos, first[0])


def log_of(chaos: Trial, worker: str) -> str:
    (path,) = Path(chaos.job.bucket).glob(f"{chaos.job.name}/logs/*/{worker}.log")
    return path.read_text()
