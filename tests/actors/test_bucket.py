"""H3: a run straight from ``s3://``, on a real server, with the endpoint and the credentials of the node and
of nothing else.
"""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import ray

from actors.living import attach
from actors.view import View
from elastic.data.cursor import Cursor
from elastic.data.prepare import prepare
from elastic.job import Job
from elastic.report.ledger import ledger
from elastic.runs.run import Run
from storage.objects.s3 import S3
from tests.data.texts import write_texts
from tests.support.buckets import allow
from tests.support.chaos import ASK_S, Witness, alone, assert_nothing_left, assert_survived, trial
from tests.support.room import Room
from tests.support.swift import SECRET, Swift
from tests.support.toys import LIGHT, toy_job

STEPS, SAVE_EVERY, DOWN_AT, STEPS_WITHOUT, GATE = 16, 3, 5, 5, 14
SAMPLES = 16 * STEPS


def job_of(
    bucket: str | Path, name: str, args: Mapping[str, Any] = MappingProxyType({}), **changes: Any
) -> Job:
    data = {"dataset": "tests.support.toys:Sums", "args": {"samples": SAMPLES, **args}}
    return toy_job(
        bucket, name=name, steps=STEPS, data=data, checkpoint={"save_every": SAVE_EVERY}, **LIGHT | changes
    )


@pytest.fixture
def bucket(swift: Swift, swift_bucket: S3, aws_config: Path) -> Iterator[str]:
    """A place on the real server, which every process of this node may use by the node's own settings."""
    allow(aws_config, swift)
    yield f"{swift_bucket.url}/{uuid.uuid4().hex}"
    aws_config.unlink()
    swift.start()  # if the test failed while the server was down


@pytest.fixture
def reference(tmp_path: Path) -> Any:
    """The undisturbed run, of the same samples: one process, a folder."""
    return alone(job_of(tmp_path / "folder", "local"))


class Outage:
    """Kills every server of the store by SIGKILL, lets the run take ``STEPS_WITHOUT`` steps, starts the
    servers again, and stops the run.

    It opens the gate only then, so that the run does not end before.
    """

    look_s = ASK_S

    def __init__(self, swift: Swift, gate: Path) -> None:
        self.swift, self.gate, self.down_at, self.ends = swift, gate, 0, list[int | None]()

    def __call__(self, witness: Witness, view: View) -> bool:
        if view.state != "Running" or view.step < DOWN_AT:
            return False
        if not self.down_at:
            self.swift.kill()
            self.ends = [process.returncode for process in self.swift.processes.values()]
            self.down_at = view.step
        elif view.step >= self.down_at + STEPS_WITHOUT:
            self.swift.start()
            coordinator = attach(witness.job_name)
            assert coordinator is not None
            ray.get(coordinator.stop.remote("as the test wants it"))
            self.gate.touch()
            return True
        return False


@pytest.mark.must_run_in_ci
def test_killed_stopped_and_resumed_from_s3(
    tmp_path: Path, swift: Swift, bucket: str, reference: Any
) -> None:
    """H3, R11: one of two replicas is SIGKILLed while it saves to the bucket; the store itself is killed, and
    training goes on without; the run is stopped, and resumed straight from ``s3://``: the same bits.
    """
    gated = Cursor(SAMPLES, 16, 0, "permutation").microbatch_ids(GATE, 0, 4)[0]
    args = {"read_s": 0.02, "gates": {str(gated): str(tmp_path / "gate")}}
    fault = {"point": "save", "step": SAVE_EVERY, "world_rank": 1}
    patience = {"grow_debounce_s": 30}  # the first world has both workers
    job = job_of(bucket, "s3", args, workers={"min": 1, "max": 2}, faults=[fault], deadlines=patience)
    outage = Outage(swift, tmp_path / "gate")
    first = trial(job, outage)
    assert first.result.state == "Stopped", first.result
    assert outage.ends == [-signal.SIGKILL] * 4
    assert first.hash != reference.hash  # the negative control: another step has another hash
    stopped_at = first.result.step
    assert DOWN_AT + STEPS_WITHOUT <= stopped_at < STEPS
    assert job.bucket.startswith("s3://") and SECRET not in job.to_json()
    # 1: the fault happened, inside the run, as the kernel reports it; 4: the survivor is the same process
    (killed,) = [
        seen for seen in first.witness.killed() if seen.final["generation"] < first.witness.generation
    ]
    assert 0 < killed.final["step"] < DOWN_AT
    (survivor,) = [
        seen for seen in first.witness.seen.values() if seen.worker in ("w1", "w2") and seen is not killed
    ]
    assert survivor.final["generation"] >= 2 and survivor.final["updates_applied"] == stopped_at
    # 5: whoever was healed was healed live; only the resumed run reads its state from the bucket
    assert first.witness.total("healed_bucket_bytes") == 0
    assert_nothing_left(first)

    second = trial(job)
    assert second.result.state == "Finished", second.result
    assert second.witness.total("healed_bucket_bytes") > 0
    # 2: the bits
    assert second.hash == reference.hash
    assert second.losses == reference.losses
    # 3: the work: nothing but the step in flight was done twice
    assert sorted(ledger(Run.open(job).segments())) == list(range(1, STEPS + 1))
    work = first.witness.total("microbatches_run") + second.witness.total("microbatches_run")
    assert STEPS * job.microbatches <= work + job.microbatches and work <= (STEPS + 2) * job.microbatches
    assert second.witness.total("microbatches_run") <= (STEPS - stopped_at + 1) * job.microbatches
    # 6: nothing is left, and nothing is damaged
    assert_nothing_left(second)
    run = Run.open(job)
    assert all(run.checkpoints.verify(version).good for version in run.state().history.saved)


@pytest.mark.full  # in tests/data shards are read from a real server, without a run
def test_samples_come_from_token_shards_in_the_bucket(tmp_path: Path, bucket: str) -> None:
    """Data by ranges from the real server, checkpoints to it, one of two replicas is killed: the bits are
    those of a local folder.
    """
    texts = write_texts(tmp_path / "text", {"a.txt": "It was the best of times. " * 240})
    prepare(texts, str(tmp_path / "tokens"))
    prepare(texts, f"{bucket}/tokens")
    common = {
        "model_args": {"vocab": 257, "dim": 16, "layers": 2, "heads": 2},
        "steps": 24,
        "checkpoint": {"save_every": 6},
    }
    later = {"deadlines": {"grow_debounce_s": 30}}  # the first world has both workers

    def reads(path: str | Path) -> dict[str, Any]:
        return {"dataset": "elastic.data.tokens:TokenDataset", "args": {"path": str(path), "seq_len": 16}}

    expected = alone(toy_job(tmp_path / "folder", name="local", data=reads(tmp_path / "tokens"), **common))
    fault, room = {"point": "backward", "step": 20, "world_rank": 1}, Room()
    job = toy_job(
        bucket,
        name="tokens",
        data=reads(f"{bucket}/tokens"),
        faults=[fault],
        workers={"min": 1, "max": 2},
        **later,
        **common,
    )

    def act(witness: Witness, view: View) -> bool:
        if len(view.workers) < 2:
            return False
        room.queue(1)  # it takes the room of the worker that dies
        return True

    with closing(room):
        room.take(ray.cluster_resources()["CPU"] - 2)
        chaos = trial(job, act)
    assert_survived(chaos, expected, worlds=(2, 1), tiers=("init", "live"))
