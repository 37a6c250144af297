"""R11: the bucket fails for twenty seconds (the simulator's ``bucket_down``), while the run saves and a
worker dies.

The bucket is on a real S3 server, and every process of the run but the driver, which is this one, reaches it
through a door (``tests/support/door.py``) that is shut in one of four ways.  Nothing is lost or read that
does not count, and the bits are the same.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.chaos import Chaos
from actors.view import View
from elastic.data.cursor import Cursor
from elastic.job import Job
from elastic.protocol.faults import Fault, Kind
from elastic.report.story import Sentence
from elastic.runs.run import Run
from storage.objects import ObjectStore
from storage.objects.s3 import S3
from tests.support.buckets import allow, enter
from tests.support.chaos import Trial, Witness, alone, assert_survived, formed, trial
from tests.support.door import Door, Way
from tests.support.swift import Swift
from tests.support.toys import toy_job

pytestmark = pytest.mark.full
STEPS, GATE, DOWN_AT, OUTAGE_S, SAVE_EVERY = 40, 22, 9, 20.0, 4
SAMPLES = 16 * STEPS


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("folder")
    (folder / "gate").touch()
    return alone(job_of(str(folder), folder / "gate", "local"))


@pytest.fixture
def door(swift: Swift, aws_config: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    """Opens a door that is the only way to the server for the processes of the cluster."""
    enter(monkeypatch, swift)
    with Door(swift) as door:
        allow(aws_config, door)
        yield door
        aws_config.unlink()


def job_of(bucket: str, gate: Path, name: str, **changes: Any) -> Job:
    ids = Cursor(SAMPLES, 16, 0, "permutation").microbatch_ids(GATE, 0, 2)
    values: dict[str, Any] = {
        "name": name,
        "steps": STEPS,
        "data": {
            "dataset": "tests.support.toys:Sums",
            "args": {"samples": SAMPLES, "read_s": 0.02, "gates": {str(ids[0]): str(gate)}},
        },
        "workers": {"min": 1, "max": 2},
        "checkpoint": {"save_every": SAVE_EVERY},
        "deadlines": {"grow_debounce_s": 8, "stall_s": 40},
    }
    return toy_job(bucket, **(values | changes))


class Outage:
    """Shuts the door at step ``DOWN_AT``, a second before a worker is killed; when it is open again, the
    journal has arrived, and another worker joins, the run may pass the gate.

    ``shut_at``: the step at which it was shut; ``dark``: the view of the run when it was opened.
    """

    def __init__(self, job: Job, gate: Path, door: Door, way: Way) -> None:
        self.job, self.gate, self.door, self.way = job, gate, door, way
        self.store = ObjectStore.open(job.bucket)
        self.chaos: Chaos | None = None
        self.journal: list[str] = []
        self.shut_at = 0
        self.dark: View | None = None

    def __call__(self, witness: Witness, view: View) -> bool:
        if self.chaos is None and view.state == "Running" and view.step >= DOWN_AT and self.segments():
            self.chaos = Chaos(self.job, [Fault(1.0, Kind.SIGKILL, 1)])
            self.journal, self.shut_at = self.segments(), view.step
            self.door.shut_for(self.way, OUTAGE_S)
        if self.chaos is not None and self.chaos.pending:
            self.chaos.heed(view)
        elif self.chaos is not None and self.door.is_open:
            self.dark = self.dark or view
            joins = len(view.workers) == 2 and (view.state == "Stopping" or view.generation > 2)
            if joins and self.segments() != self.journal:
                self.gate.touch()
                return True
        return False

    def segments(self) -> list[str]:
        return self.store.list(f"{self.job.name}/journal/")


def told(chaos: Trial) -> list[str]:
    return [line.text for line in chaos.lines if isinstance(line, Sentence)]


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("layout", ["replicate", "shard"])
def test_a_worker_dies_while_the_bucket_fails(
    tmp_path: Path, swift_bucket: S3, door: Door, reference: Any, layout: str, way: Way
) -> None:
    """R11: replicas lose no step; shards wait for the bucket and go on from its newest checkpoint that
    counts.
    """
    gate = tmp_path / "gate"
    layouts: dict[str, dict[str, Any]] = {"replicate": {}, "shard": {"dp_replicate": 1}}
    job = job_of(
        f"{swift_bucket.url}/{uuid.uuid4().hex}",
        gate,
        f"outage-{way.name.lower()}",
        parallel=layouts[layout],
        copies={"copy_every": 0},
    )
    act = Outage(job, gate, door, way)
    chaos = trial(job, act)
    assert chaos.result.state == "Finished", (chaos.result, told(chaos))
    assert act.chaos is not None
    act.chaos.close()
    (kill,) = act.chaos.performed
    assert door.met[way] > 0
    assert act.dark is not None and act.dark.generation >= 2, (
        "the world was another one before the bucket came back"
    )
    worlds = formed(Run.open(job).records())
    # from outside
    struck = {"point": "forward", "kind": "SIGKILL", "world_rank": worlds[0].members.index(kill.victim)}
    # it asks again in a new world
    tier, lone = ("live", 1) if layout == "replicate" else ("bucket", max(len(worlds) - 2, 1))
    struck_at = worlds[1].step + worlds[1].redone
    assert_survived(
        replace(chaos, job=job.replace(faults=[struck])),
        reference,
        worlds=(2, *[1] * lone, 2),
        tiers=("init", *[tier] * lone, "live"),
        unsaved=struck_at - act.shut_at,
    )
    assert not [text for text in told(chaos) if "no member moved" in text], told(chaos)
    refused = [
        text for text in told(chaos) if "its world broke (peer: s3://" in text and "cannot be reached" in text
    ]
    assert len(refused) == lone - 1, (
        "a world that reads from the bucket forms again only where that refuses it for too long"
    )
    # what is whole counts, and what counts is whole
    run = Run.open(job)
    listed = run.checkpoints.versions()
    saved = run.state().history.saved
    assert STEPS in [version.step for version in saved]
    assert all(run.checkpoints.verify(version).good for version in saved)
    assert not [each for each in listed if each.damaged]
    assert worlds[1].tier == "live" or (worlds[1].step, 1) in [
        (version.step, version.generation) for version in saved
    ]


LAST_SAVE = (
    "its checkpoint is on the way",
    f"the checkpoint of step {STEPS} of generation 1 is in the bucket",
)


class AtTheEnd:
    """Shuts the door before the last step, and opens it when the run has waited for its last save for three
    times ``stop_s``.
    """

    def __init__(self, door: Door, gate: Path, stop_s: float) -> None:
        self.door, self.gate, self.waits_s = door, gate, 3 * stop_s
        self.opens_at: float | None = None

    def __call__(self, witness: Witness, view: View) -> bool:
        if self.door.is_open and view.state == "Running" and view.step >= GATE - 1:
            self.door.shut(Way.REFUSED)
            self.gate.touch()
        if self.opens_at is None and view.state == "Finishing":
            self.opens_at = time.monotonic() + self.waits_s
        if self.opens_at is None or time.monotonic() < self.opens_at:
            return False
        self.door.open()
        return True


def test_the_bucket_fails_at_the_last_step(
    tmp_path: Path, swift_bucket: S3, door: Door, reference: Any
) -> None:
    """R11: the world stays for longer than ``stop_s``, and is saved when the bucket is back: nothing is
    computed or formed again.
    """
    gate, stop_s = tmp_path / "gate", 5.0
    changes = {
        "checkpoint": {"save_every": STEPS},
        "deadlines": {"grow_debounce_s": 8, "stall_s": 40, "stop_s": stop_s},
    }
    job = job_of(f"{swift_bucket.url}/{uuid.uuid4().hex}", gate, "at-the-end", **changes)
    chaos = trial(job, AtTheEnd(door, gate, stop_s))
    assert_survived(chaos, reference, worlds=(2,), tiers=("init",))
    last, saved = (
        next(line.at for line in chaos.lines if isinstance(line, Sentence) and text in line.text)
        for text in LAST_SAVE
    )
    assert saved - last > 3 * stop_s
