"""R1, R11: somebody dies while a save is on its way to the bucket.  Saves are the keepers' work, and training
does not wait for them.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from elastic.data.cursor import Cursor
from elastic.ids import Version
from elastic.job import Job
from elastic.report.story import Sentence
from elastic.runs.run import Run
from elastic.state.region import Region
from tests.support.chaos import Seen, Story, act_by, alone, assert_nothing_left, comes, trial
from tests.support.patience import PATIENCE_S, until
from tests.support.processes import Watched
from tests.support.toys import LIGHT, toy_job

STEPS, SAVE_EVERY = 22, 6
FIRST, SECOND, THIRD, LAST = Version(6, 1), Version(12, 3), Version(18, 3), Version(STEPS, 3)
DIES = 10
"""Step in which a worker is killed."""
GATES = (5, DIES, 12, 16, 21)
"""Steps whose second microbatch is read once a file of that name is in the bucket.  A world of two workers has
one member that waits there, and one that does not read but waits for it.
"""


def gated(step: int) -> int:
    """Returns the sample that is the gate of ``step``."""
    return Cursor(16 * STEPS, 16, 0, "permutation").microbatch_ids(step, 1, LIGHT["microbatch"])[0]


def job_of(bucket: Path, name: str) -> Job:
    gates = {str(gated(step)): str(bucket / str(step)) for step in GATES}
    data = {"dataset": "tests.support.toys:Sums", "args": {"samples": 16 * STEPS, "gates": gates}}
    settings = {
        "steps": STEPS,
        "data": data,
        "workers": {"min": 1, "max": 2},
        "checkpoint": {"save_every": SAVE_EVERY},
    }
    # nobody moves at a gate
    patience = {"grow_debounce_s": 30, "stall_s": PATIENCE_S}
    return toy_job(bucket, name=name, **settings, deadlines=patience, **LIGHT)


def uploaders(bucket: Path) -> Iterator[int]:
    """Yields the pids of the uploader processes of the run in ``bucket``."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"elastic.state.uploader" in command and str(bucket).encode() in command:
            yield int(folder.name)


def parent_of(pid: int) -> str:
    """Returns the command line of its parent; "" if it is gone."""
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(psutil.Process(pid).ppid()).cmdline())
    return ""


def copied(seen: Seen, step: int) -> bool:
    """Returns True if the worker's copy of ``step`` is complete, in the memory that its keeper has open too."""
    region = Region.of_process(seen.process.pid, seen.counters["copies"])
    return any(copy is not None and copy.version.step == step for copy in region.all_held())


def waits_at(seen: Seen, step: int) -> bool:
    """Returns True if the worker has ended the step before and reads the sample that is the gate of
    ``step``.
    """
    reading = re.findall(r"\d+", seen.counters.reading)
    return seen.counters["step"] == step - 1 and str(gated(step)) in reading


def deaths(bucket: Path, job: Job) -> Story:
    """Stops the uploader (SIGSTOP) before each save begins; then somebody dies (SIGKILL) a few steps later,
    and the uploader goes on.

    So when that happens, no byte of the save is in the bucket.  The worker that dies is the one that waits at
    a gate: the other one is free to take the next plan, and waits there only once the next world runs.
    """

    def stopped(*but: int) -> int:
        """Stops the uploader of a keeper that lives: one that dies may have begun another one at its end."""
        (pid,) = until(
            lambda: [
                each for each in uploaders(bucket) if each not in but and "ray::Keeper" in parent_of(each)
            ]
        )
        os.kill(pid, signal.SIGSTOP)
        return pid

    def saved(version: Version) -> bool:
        return Run.look(job).newest() == version

    yield from comes(lambda _, view: view.state == "Running" and len(view.workers) == 2)
    first = stopped()
    (bucket / "5").touch()
    witness, _ = yield from comes(
        lambda witness, _: any(waits_at(each, DIES) for each in witness.seen.values())
    )
    assert not Run.look(job).checkpoints.versions()
    (victim,) = [each for each in witness.seen.values() if waits_at(each, DIES)]
    victim.process.kill()  # a worker
    yield from comes(lambda _, view: (view.state, view.generation) == ("Running", 2))
    os.kill(first, signal.SIGCONT)
    yield from comes(lambda _, view: view.generation > 2 or view.state == "Stopping")
    (bucket / str(DIES)).touch()
    yield from comes(lambda _, view: (view.state, view.generation) == ("Running", 3) and saved(FIRST))
    assert stopped() == first
    (bucket / "12").touch()
    _, view = yield from comes(lambda _, view: view.step >= SECOND.step + 2)
    with Watched(psutil.Process(first).ppid()) as keeper:
        # the keeper, and its uploader
        ray.kill(ray.get_actor(f"{view.token}/keeper-{min(view.workers.values())[:12]}"), no_restart=True)
        keeper.wait(PATIENCE_S)
    second = stopped(first)
    (bucket / "16").touch()
    yield from comes(lambda _, view: view.step >= THIRD.step + 2)
    os.kill(second, signal.SIGKILL)  # an uploader alone
    yield from comes(lambda *_: saved(THIRD))
    third = stopped(first, second)
    (bucket / "21").touch()
    witness, view = yield from comes(
        lambda witness, view: (
            view.state == "Finishing" and all(copied(witness.seen[each], STEPS) for each in view.workers)
        )
    )
    for worker in view.workers:  # all that there are
        witness.seen[worker].process.kill()
    until(lambda: not any(witness.seen[worker].process.running for worker in view.workers))
    os.kill(third, signal.SIGCONT)


@pytest.mark.must_run_in_ci
def test_who_dies_during_a_save_ends_it_only_if_its_keeper_dies(tmp_path: Path) -> None:
    """R1, R11: a worker that is killed does not end a save: nothing is written again, and the checkpoint is
    that of the first world.

    A keeper that is killed takes the save with it; the story says so, nobody waits for it, and the next one
    is made.  An uploader that is killed is replaced, and another one writes the save.  The last save needs no
    worker any more: the run finishes, and no world is formed again.
    """
    for gate in GATES:
        (tmp_path / "alone").mkdir(exist_ok=True)
        (tmp_path / "alone" / str(gate)).touch()
    reference = alone(job_of(tmp_path / "alone", "local"))
    job = job_of(tmp_path, "saves")
    chaos = trial(job, act_by(deaths(tmp_path, job)))
    assert chaos.result.state == "Finished", chaos.result
    assert (chaos.hash, chaos.losses) == (reference.hash, reference.losses)
    run = Run.open(job)
    assert run.state().history.saved == (FIRST, THIRD, LAST) and chaos.witness.generation == 3
    assert all(run.checkpoints.verify(version).good for version in (FIRST, THIRD, LAST))
    killed = {each.worker: each.final["step"] for each in chaos.witness.killed()}
    assert killed.keys() == {"w1", "w2", "w3"} and sorted(killed.values()) == [DIES - 1, STEPS, STEPS]
    manifest = run.checkpoints.manifest(FIRST)
    assert manifest.layout == {"dp_replicate": 2, "dp_shard": 1} and len(manifest.files) == 3, (
        "both parts, the dead worker's too"
    )
    said = "\n".join(line.text for line in chaos.lines if isinstance(line, Sentence))
    assert f"the checkpoint of {FIRST} failed" not in said and f"the checkpoint of {THIRD} failed" not in said
    assert (
        f"the checkpoint of {SECOND} failed (the keeper of node" in said
        and "the uploader of this keeper died" in said
    )
    assert_nothing_left(chaos)
    assert not list(uploaders(tmp_path))
