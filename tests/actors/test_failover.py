"""R6: the coordinator is SIGKILLed, again and again, in every state.  Workers step on; the next one goes on where the journal ends.

No world ends because of it: the generation grows only where a worker is lost too, no step is lost or committed twice, and the bits are
those of the run that nothing happened to.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.coordinator import View
from elastic.data.cursor import Cursor
from elastic.job import Job
from elastic.runs import Run
from storage.journal import owners
from tests.support.chaos import Trial, Witness, assert_survived, trial
from tests.support.kills import SAMPLES
from tests.support.processes import Ended, Watched
from tests.support.toys import toy_job

STEPS = 60
GATE = 50
"""No run passes this step before its coordinators have died as often as they shall."""
LONG = pytest.mark.full
When = Callable[[View], bool]


def job_of(bucket: Path, name: str, **changes: Any) -> Job:
    ids = Cursor(SAMPLES, 16, 0, "permutation").microbatch_ids(GATE, 0, 2)
    data = {
        "dataset": "tests.support.toys:Sums",
        "args": {"samples": SAMPLES, "read_s": 0.02, "gates": {str(ids[0]): str(bucket / "gate")}},
    }
    values: dict[str, Any] = {
        "name": name,
        "steps": STEPS,
        "data": {"dataset": "tests.support.toys:Sums", "args": args},
        "workers": {"min": 1, "max": 2},
        "checkpoint": {"save_every": 6},
        "deadlines": {"grow_debounce_s": 8, "stall_s": 120},
    }
    return toy_job(bucket, **(values | changes))


@dataclass
class Killer:
    """Kills the coordinator at the first look at which the next of ``whens`` is so; then opens the gate.

    ``frozen_s``: keep Ray from making it again for so long.
    """

    bucket: Path
    whens: list[When]
    frozen_s: float = 0.0
    ends: list[Ended] = field(default_factory=list)
    committed: int = 0
    """By the worker that committed least, between the last kill and the next coordinator's first moment."""
    _last: int = 0

    def __call__(self, witness: Witness, view: View) -> bool:
        if view.pid != self._last and self.whens and self.whens[0](view):
            self.whens.pop(0)
            self._last = view.pid
            before = self.steps(witness)
            with Watched(view.pid) as coordinator:
                coordinator.kill()
                if self.frozen_s:
                    self._keep_away(witness, view)
                self.ends.append(coordinator.wait(10))
            self.committed = min(after - before[worker] for worker, after in self.steps(witness).items())
        if not self.whens:
            (self.bucket / "gate").touch()
        return not self.whens

    @staticmethod
    def steps(witness: Witness) -> dict[str, int]:
        """What each worker's own counters say."""
        return {worker: seen.counters["step"] for worker, seen in witness.seen.items() if seen.ended is None}

    def _keep_away(self, witness: Witness, view: View) -> None:
        """Stop every process in which Ray would make it again, from its first moment."""
        raylet = psutil.Process(view.pid).parent() or psutil.Process(os.getpid())
        known = {child.pid for child in raylet.children()} if "raylet" in raylet.name() else set[int]()
        raylets = [process for process in psutil.process_iter() if "raylet" in process.name()]
        known |= {child.pid for each in raylets for child in each.children()}
        stopped, end = set[int](), time.monotonic() + self.frozen_s
        while time.monotonic() < end:
            for child in {child.pid for each in raylets for child in each.children()} - known - stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGSTOP)
                stopped.add(child)
            for pid in known - stopped:  # one that was idle
                with contextlib.suppress(psutil.Error):
                    if pid != view.pid and "Coordinator" in "".join(psutil.Process(pid).cmdline()):
                        os.kill(pid, signal.SIGSTOP)
                        stopped.add(pid)
            time.sleep(0.002)
        self.claimed = len(list((self.bucket / witness.job_name / "owner").iterdir()))
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def running(step: int) -> When:
    return lambda view: view.state == "Running" and view.step >= step


def in_state(state: str, generation: int) -> When:
    return lambda view: (view.state, view.generation) == (state, generation)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    bucket = tmp_path_factory.mktemp("undisturbed")
    (bucket / "gate").touch()
    return trial(job_of(bucket, "undisturbed"))


def take_overs(job: Job) -> list[str]:
    """The state in which each coordinator but the first found the run, by the journal."""
    records = Run.open(job).records()
    states = ["Waiting", *(record["state"] for record in records)]
    return [states[number] for number, record in enumerate(records) if record["event"]["$"] == "Recovered"]


def assert_taken_over(chaos: Trial, killer: Killer, states: Sequence[str]) -> None:
    """As many coordinators as were killed, each by SIGKILL, each found the run in the state in which its predecessor died."""
    assert [end.signal for end in killer.ends] == [signal.SIGKILL] * len(states)
    assert take_overs(chaos.job) == list(states)
    claims = owners(Run.open(chaos.job).store, chaos.job.name)
    assert sorted(claims) == list(range(1, len(states) + 2)) and len({claim["life"] for claim in claims.values()}) == 1


@pytest.mark.must_run_in_ci
def test_workers_step_on_for_ten_seconds_without_a_coordinator(tmp_path: Path, undisturbed: Trial) -> None:
    """R6: its restart is held up on purpose; at least five commits on the workers' own counters meanwhile."""
    killer = Killer(tmp_path, [running(5)], frozen_s=10.0)
    chaos = trial(job_of(tmp_path, "ten-seconds"), killer)
    assert killer.claimed == 1, "nobody had taken over by then"
    assert killer.committed >= 5
    assert_taken_over(chaos, killer, ["Running"])
    assert_survived(chaos, undisturbed, worlds=(2,), tiers=("init",))


@pytest.mark.must_run_in_ci
def test_three_times_and_in_a_save_and_while_a_world_forms(tmp_path: Path, undisturbed: Trial) -> None:
    """R6, R8: while it runs, right after a save began, twice in a row; a worker dies, and the coordinator while the others form."""
    whens = [running(3), lambda view: view.step >= 12, running(13), in_state("Forming", 2), in_state("Forming", 3)]
    killer = Killer(tmp_path, whens)
    job = job_of(tmp_path, "again", faults=[{"point": "backward", "step": 20, "world_rank": 1}])
    chaos = trial(job, killer)
    assert_taken_over(chaos, killer, ["Running", "Running", "Running", "Forming", "Forming"])
    assert_survived(chaos, undisturbed, worlds=(2, 1, 2), tiers=("init", "live", "live"))
