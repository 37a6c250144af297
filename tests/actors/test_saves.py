"""R1, R11: somebody dies while a save is on its way to the bucket.  Saves are the keepers' work, and training does not wait for them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.view import View
from elastic.ids import Version
from elastic.job import Job
from elastic.report.story import Sentence
from elastic.runs.run import Run
from elastic.state.region import Region
from tests.support.chaos import Seen, Trial, Witness, alone, assert_nothing_left, trial
from tests.support.patience import PATIENCE_S
from tests.support.toys import toy_job

STEPS, SAVED, NEXT = 26, 10, 20
FIRST = Version(SAVED, 1)


def job_of(bucket: Path, name: str, read_s: float = 0.03, save_every: int = 10) -> Job:
    data = {"dataset": "tests.support.toys:Sums", "args": {"samples": 16 * STEPS, "read_s": read_s}}
    return toy_job(
        bucket,
        name=name,
        steps=STEPS,
        data=data,
        workers={"min": 1, "max": 2},
        checkpoint={"save_every": save_every},
        deadlines={"grow_debounce_s": 30},
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The undisturbed run: one process."""
    return alone(job_of(tmp_path_factory.mktemp("alone"), "local", read_s=0.0))


def uploaders(bucket: Path) -> Iterator[int]:
    """Yields the pids of the uploader processes of the run in ``bucket``."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"elastic.state.uploader" in command and str(bucket).encode() in command:
            yield int(folder.name)


class Strike:
    """Stops the uploader (SIGSTOP) before the first save begins.

    Two steps after that save it calls ``victim``, and once ``then`` is true it lets the uploader go on.
    """

    def __init__(self, bucket: Path, victim: Callable[[Witness, View, int], None], then: Callable[[View], bool]) -> None:
        self.bucket, self.victim, self.then = bucket, victim, then
        self.stopped = self.struck_at = 0

    def __call__(self, witness: Witness, view: View) -> bool:
        if not self.stopped and view.state == "Running" and len(view.workers) == 2 and (found := list(uploaders(self.bucket))):
            assert view.step < SAVED, "it was there from the start"
            (self.stopped,) = found
            os.kill(self.stopped, signal.SIGSTOP)
        elif self.stopped and not self.struck_at and view.step >= SAVED + 2:
            self.struck_at = view.step
            self.victim(witness, view, self.stopped)
        elif self.struck_at and self.then(view):
            if Path(f"/proc/{self.stopped}").exists():
                os.kill(self.stopped, signal.SIGCONT)
            return True
        return False


def said(chaos: Trial) -> str:
    return "\n".join(line.text for line in chaos.lines if isinstance(line, Sentence))


def assert_whole(chaos: Trial, reference: Any) -> None:
    """The run's end is the undisturbed one's, every checkpoint of its history is good, and nothing is left."""
    assert chaos.result.state == "Finished", chaos.result
    assert (chaos.hash, chaos.losses) == (reference.hash, reference.losses)
    run = Run.open(chaos.job)
    assert all(run.checkpoints.verify(version).good for version in run.standing(0, 0.0).history.saved)
    assert_nothing_left(chaos)
    assert not list(uploaders(Path(chaos.job.bucket)))


@pytest.mark.must_run_in_ci
def test_a_worker_that_is_killed_does_not_end_a_save(tmp_path: Path, reference: Any) -> None:
    """SIGKILL, while not a byte of the save is in the bucket: nothing is written again, the checkpoint is that of the first world."""

    def kill(witness: Witness, view: View, uploader: int) -> None:
        assert not Run.look(job).checkpoints.versions()
        witness.seen["w2"].process.kill(signal.SIGKILL)

    job = job_of(tmp_path, "worker")
    strike = Strike(tmp_path, kill, lambda view: view.state == "Running" and view.generation == 2)
    chaos = trial(job, strike)
    assert_whole(chaos, reference)
    (killed,) = chaos.witness.killed()
    assert killed.worker == "w2" and SAVED < killed.final["step"] < NEXT
    assert FIRST in Run.open(job).standing(0, 0.0).history.saved
    manifest = Run.open(job).checkpoints.manifest(FIRST)
    assert manifest.layout == {"dp_replicate": 2, "dp_shard": 1} and len(manifest.files) == 3, "both parts, the dead worker's too"
    assert "the checkpoint of step 10 of generation 1 failed" not in said(chaos)


@pytest.mark.full  # tests/state/test_uploads.py kills one without a run
def test_an_uploader_that_is_killed_is_replaced(tmp_path: Path, reference: Any) -> None:
    """SIGKILL, with the save in hand; another one writes it, and nobody else notices."""
    after = list[int]()

    def kill(witness: Witness, view: View, uploader: int) -> None:
        os.kill(uploader, signal.SIGKILL)
        until = time.monotonic() + PATIENCE_S
        while not (others := [each for each in uploaders(tmp_path) if each != uploader]):
            assert time.monotonic() < until
            time.sleep(0.01)
        after.extend(others)

    chaos = trial(job_of(tmp_path, "uploader"), Strike(tmp_path, kill, lambda view: True))
    assert_whole(chaos, reference)
    assert len(after) == 1 and chaos.witness.generation == 1
    assert FIRST in Run.open(chaos.job).standing(0, 0.0).history.saved
    assert "its uploader died" in said(chaos)


@pytest.mark.must_run_in_ci
def test_a_keeper_that_is_killed_takes_the_save_with_it_and_the_next_one_is_made(tmp_path: Path, reference: Any) -> None:
    """The keeper's uploader ends with it.  The story says that the save failed; nobody waits for it, and steps go on."""

    def kill(witness: Witness, view: View, uploader: int) -> None:
        node = min(view.workers.values())
        ray.kill(ray.get_actor(f"{view.token}/keeper-{node[:12]}"), no_restart=True)

    chaos = trial(job_of(tmp_path, "keeper"), Strike(tmp_path, kill, lambda view: True))
    assert_whole(chaos, reference)
    saved = Run.open(chaos.job).standing(0, 0.0).history.saved
    assert FIRST not in saved and any(SAVED < version.step < STEPS for version in saved), saved
    assert "the checkpoint of step 10 of generation 1 failed (the keeper of node" in said(chaos)
    assert chaos.witness.generation == 1


def copied(seen: Seen, step: int) -> bool:
    """Returns True if the worker's copy of ``step`` is complete, in the memory that its keeper has open too."""
    region = Region.of_process(seen.process.pid, seen.counters["copies"])
    return any(copy is not None and copy.version.step == step for copy in region.all_held())


@pytest.mark.must_run_in_ci
def test_the_last_save_needs_no_worker_any_more(tmp_path: Path, reference: Any) -> None:
    """All are killed (SIGKILL) once their copies of the last step are complete: the run finishes, and no world is formed again."""
    stopped, killed = list[int](), list[str]()

    def act(witness: Witness, view: View) -> bool:
        if not stopped and view.state == "Running" and len(view.workers) == 2:
            stopped.extend(uploaders(tmp_path))
            for each in stopped:
                os.kill(each, signal.SIGSTOP)
        if view.state != "Finishing" or not all(copied(witness.seen[worker], STEPS) for worker in view.workers):
            return False
        for worker in view.workers:
            witness.seen[worker].process.kill(signal.SIGKILL)
            killed.append(worker)
        until = time.monotonic() + PATIENCE_S
        while any(witness.seen[worker].process.running for worker in killed):
            assert time.monotonic() < until
            time.sleep(0.01)
        os.kill(stopped[0], signal.SIGCONT)
        return True

    chaos = trial(job_of(tmp_path, "last", save_every=1000), act)
    assert_whole(chaos, reference)
    assert sorted(each.worker for each in chaos.witness.killed()) == sorted(killed) == ["w1", "w2"]
    assert chaos.witness.generation == 1 and Run.open(chaos.job).standing(0, 0.0).history.saved == (Version(STEPS, 1),)
