"""R6: the coordinator is SIGKILLed, again and again, in every state.  Workers step on; the next coordinator
goes on where the journal ends.

No world ends because of it: the generation grows only where a worker is lost, no step is lost or committed
twice, the bits are the same.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from actors import cluster
from actors.living import attach
from actors.processes import log_folder
from actors.view import View
from elastic.control.takeover import MAX_DEATHS, UNREAD
from elastic.data.cursor import Cursor
from elastic.ids import WorkerId
from elastic.job import Job
from elastic.protocol.authority import DEPOSED
from elastic.protocol.events import StepDone
from elastic.report.story import Sentence
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from storage.journal import owners
from storage.journal.replicas import WRITER
from tests.support import warm
from tests.support.chaos import (
    Trial,
    Witness,
    assert_nothing_left,
    assert_survived,
    exported_hash,
    formed,
    samples,
    trial,
)
from tests.support.commands import Command, view_of
from tests.support.job_file import to_toml
from tests.support.kills import SAMPLES
from tests.support.kills import undisturbed as of_script
from tests.support.left import left_of
from tests.support.patience import PATIENCE_S
from tests.support.processes import Ended, Watched
from tests.support.toys import LIGHT, toy_job

STEPS = 44
GATE = 36
"""Step that no run passes before its coordinators have died as often as the test wants."""
AHEAD = 5
"""Number of steps that workers are to commit without a coordinator."""
LONG = pytest.mark.full
When = Callable[[View], bool]


def job_of(bucket: Path, name: str, gates: Mapping[int, str] = {GATE: "gate"}, **changes: Any) -> Job:
    """Returns a job with gates: steps that wait until a file of that name is in the bucket."""
    cursor = Cursor(SAMPLES, 16, 0, "permutation")
    files = {str(cursor.ids(step)[0]): str(bucket / file) for step, file in gates.items()}
    args = {"samples": SAMPLES, "read_s": 0.02, "gates": files}
    values: dict[str, Any] = {
        "name": name,
        "steps": STEPS,
        "data": {"dataset": "tests.support.toys:Sums", "args": args},
        "workers": {"min": 1, "max": 2},
        "checkpoint": {"save_every": 6},
        "deadlines": {"grow_debounce_s": 30, "stall_s": 120},
    }
    return toy_job(bucket, **(values | changes))


@dataclass
class Killer:
    """Kills the coordinator at the first look at which the next of ``whens`` is true.

    After the last of them, or when ``opens`` is true, it opens the gate.  ``frozen_s``: time in seconds for
    which Ray cannot start the next coordinator after the first death, or longer, until each worker has
    committed ``AHEAD`` steps.  ``disks_lost``: numbers, from 0, of the deaths in which the coordinator's disk
    is lost too.
    """

    bucket: Path
    whens: list[When]
    frozen_s: float = 0.0
    opens: When = lambda view: False
    disks_lost: tuple[int, ...] = ()
    ends: list[Ended] = field(default_factory=list)
    committed: int = 0
    """Number of steps committed between the first kill and the next coordinator's first moment, by the worker
    that committed least.
    """
    claimed: int = 0
    """Number of coordinators that had claimed the run by that moment."""
    _last: int = 0

    def __call__(self, witness: Witness, view: View) -> bool:
        self.look(witness, view)
        if len(self.ends) >= 3:
            (self.bucket / "early").touch()
        if not self.whens or self.opens(view):
            (self.bucket / "gate").touch()
        return not self.whens

    def look(self, witness: Witness, view: View) -> None:
        if view.pid != self._last and self.whens and self.whens[0](view):
            self.whens.pop(0)
            self._last = view.pid
            before, maker = self.steps(witness), Maker(view.pid) if self.frozen_s and not self.ends else None

            def ahead() -> int:
                return min(
                    (after - before[worker] for worker, after in self.steps(witness).items()), default=0
                )

            with Watched(view.pid) as coordinator:
                coordinator.kill()
                if len(self.ends) in self.disks_lost:
                    self.lose(view)
                if maker is not None:
                    maker.hold(self.frozen_s, lambda: ahead() >= AHEAD)
                    self.claimed = len(list((self.bucket / witness.job_name / "owner").iterdir()))
                    maker.let_go()
                self.ends.append(coordinator.wait(PATIENCE_S))
            self.committed = self.committed or ahead()

    def lose(self, view: View) -> None:
        for path in log_folder(view.token).glob(f"{WRITER}*"):
            shutil.rmtree(path)

    @staticmethod
    def steps(witness: Witness) -> dict[str, int]:
        """Returns the step that each worker's own counters show."""
        return {worker: seen.counters["step"] for worker, seen in witness.seen.items() if seen.ended is None}


class Maker:
    """The process that made the one in which ``coordinator`` runs, and makes the one in which it starts
    again.
    """

    def __init__(self, coordinator: int) -> None:
        parent = psutil.Process(coordinator).parent()
        assert parent is not None and warm.__file__ in parent.cmdline()
        self.process, self.stopped = parent, set[int]()
        self.busy = {child.pid for child in parent.children() if not self._idle(child)}

    def hold(self, seconds: float, enough: Callable[[], bool]) -> None:
        """Stops every process in which the coordinator could start again, from its first moment, until
        ``let_go``.

        Returns after ``seconds``, but not before ``enough()``, for which a busy machine may take longer.
        """
        began = time.monotonic()
        while time.monotonic() < began + seconds or (not enough() and time.monotonic() < began + PATIENCE_S):
            for pid in {child.pid for child in self.process.children()} - self.busy - self.stopped:
                self._signal(pid, signal.SIGSTOP)
                self.stopped.add(pid)
            time.sleep(0.005)

    def let_go(self) -> None:
        for pid in self.stopped:
            self._signal(pid, signal.SIGCONT)

    @staticmethod
    def _idle(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):  # it has ended since
            return "IDLE" in "".join(process.cmdline())
        return False

    @staticmethod
    def _signal(pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def running(step: int) -> When:
    return lambda view: view.state == "Running" and view.step >= step


def in_state(state: str, generation: int) -> When:
    return lambda view: (view.state, view.generation) == (state, generation)


@pytest.fixture
def undisturbed(script_reference: Any) -> Any:
    """The result of the same job; only gates and deadlines differ."""
    return script_reference


def take_overs(job: Job) -> list[str]:
    """Returns the state in which each coordinator but the first found the run, as the journal has it."""
    records = Run.open(job).records()
    states = ["Waiting", *(record["state"] for record in records)]
    return [states[number] for number, record in enumerate(records) if record["event"]["$"] == "Recovered"]


def assert_taken_over(chaos: Trial, killer: Killer, states: Sequence[str]) -> None:
    """Checks that every kill was a SIGKILL and led to one more coordinator, which found the run in the state
    in which its predecessor died."""
    assert [end.signal for end in killer.ends] == [signal.SIGKILL] * len(states)
    assert take_overs(chaos.job) == list(states)
    claims = owners(Run.open(chaos.job).store, chaos.job.name)
    assert (
        sorted(claims) == list(range(1, len(states) + 2))
        and len({claim["life"] for claim in claims.values()}) == 1
    )


class Zombie(Killer):
    """Gives orders in the name of the dead coordinator when the second one has taken over, and then opens the
    first gate.
    """

    answer: Any = None

    def __call__(self, witness: Witness, view: View) -> bool:
        if self.answer is None and self.ends and (view.incarnation, view.state) == (2, "Running"):
            self.order(view)
        return super().__call__(witness, view)

    def order(self, view: View) -> None:
        workers = [
            ray.get_actor(f"{view.token}/{worker}", namespace=cluster.NAMESPACE) for worker in view.workers
        ]
        heard = [
            each.__ray_call__.options(concurrency_group="control").remote(
                lambda worker: worker.apply_fence.member.incarnation
            )
            for each in workers
        ]
        if ray.get(heard) != [2, 2]:
            return
        for order in (("fence", 1), ("settle", 1, None), ("exit",), ("pause", 1, True)):
            ray.get([worker.obey.remote(1, *order) for worker in workers])
        (keeper,) = cluster.named(f"{view.token}/keeper-").values()
        for call, argument in ((keeper.open_store, 99), (keeper.kill, "w1"), (keeper.close_store, 1)):
            with pytest.raises(
                ray.exceptions.RayTaskError,
                match=r", which follows coordinator \d+: the journal of coordinator 1",
            ):
                ray.get(call.remote(1, argument))
        self.answer = ray.get(keeper.copy.remote(1, 0, 0, b""))
        (self.bucket / "zombie").touch()


@pytest.mark.must_run_in_ci
def test_five_times_and_in_a_save_and_while_worlds_form(tmp_path: Path) -> None:
    """R6, R8, R9: the coordinator dies while the run steps, right after a save began, again at once, and
    twice more while worlds form.

    The first time its disk is lost too, and the bucket has nothing of the world yet: the next one knows only
    what the keeper has.  Its restart is held up for five seconds on purpose; meanwhile the workers' own
    counters show at least five commits.  Then somebody gives orders in the name of the dead one: neither
    workers nor keepers heed them.  The worlds that form follow the death of a worker.
    """
    short: dict[str, Any] = {"steps": 24, **LIGHT}
    whens = [
        running(3),
        lambda view: view.step >= 12,
        running(13),
        in_state("Forming", 2),
        in_state("Forming", 3),
    ]
    killer = Zombie(tmp_path, whens, frozen_s=5.0, opens=in_state("Stopping", 2), disks_lost=(0,))
    gates = {12: "zombie", 16: "early", 20: "gate"}
    chaos = trial(
        job_of(
            tmp_path, "again", gates, faults=[{"point": "backward", "step": 18, "world_rank": 1}], **short
        ),
        killer,
    )
    assert killer.claimed == 1, "nobody had taken over by then"
    assert killer.committed >= AHEAD
    assert killer.answer == DEPOSED
    assert_taken_over(chaos, killer, ["Running", "Running", "Running", "Forming", "Forming"])
    assert_survived(
        chaos, of_script(tmp_path / "alone", **short), worlds=(2, 1, 2), tiers=("init", "live", "live")
    )


@LONG  # above, coordinators die while it runs and forms; the simulator kills them in every state
def test_while_it_stops_and_finishes_and_when_it_has_finished(tmp_path: Path) -> None:
    """R6, R21: a stop that was asked for is not forgotten; the same command goes on; the last save is not
    lost.
    """
    big = {"vocab": 29, "dim": 256, "layers": 4, "heads": 2, "dropout": 0.1}
    reference = job_of(tmp_path / "reference", "reference", model_args=big, steps=12)
    assert run_local(reference, lambda line: None)[0] == "Finished"
    job = job_of(tmp_path, "ends", model_args=big, steps=12)
    stopped = trial(job, Stopper(tmp_path, [lambda view: view.state == "Stopping"]), hash_it=False)
    assert stopped.result.state == "Stopped" and 2 <= stopped.result.step < 12
    assert take_overs(job) == ["Stopping"]
    newest = Run.open(job).newest()
    assert newest is not None and newest.step == stopped.result.step, "it was saved"
    assert_nothing_left(stopped)

    killer = Killer(tmp_path, [lambda view: view.state == "Finishing", lambda view: view.state == "Finished"])
    finished = trial(job, killer)
    assert [end.signal for end in killer.ends] == [signal.SIGKILL] * 2
    assert take_overs(job) == ["Stopping", "Finishing", "Finished"]
    assert (finished.result.state, finished.hash) == ("Finished", exported_hash(reference))
    assert [step for step, _ in samples(finished.ledger)] == list(range(1, 13))
    work = stopped.witness.total("microbatches_run") + finished.witness.total("microbatches_run")
    assert work == 12 * job.microbatches
    assert len(formed(Run.open(job).records())) == 2, "one world each time"
    assert_nothing_left(finished)


@LONG  # above, a coordinator dies in the same state, but while its keepers are there
def test_how_the_run_ended_is_known_when_its_keepers_have_left(tmp_path: Path) -> None:
    """Keepers that leave take with them what they and their nodes have of the journal."""
    killer = Killer(tmp_path, [lambda view: view.state == "Finished" and not log_folder(view.token).exists()])
    assert_taken_over(chaos := trial(job_of(tmp_path, "left", steps=8), killer), killer, ["Finished"])
    assert_nothing_left(chaos)


class Stopper(Killer):
    """Asks for a stop first."""

    asked = False

    def __call__(self, witness: Witness, view: View) -> bool:
        if not self.asked and view.step >= 2:
            self.asked = True
            ray.get(attach(witness.job_name).stop.remote("a test asks for it"))
        return super().__call__(witness, view)


class Poisoner:
    """Tells each coordinator something that it cannot handle."""

    told = 0

    def __call__(self, witness: Witness, view: View) -> bool:
        if view.incarnation == self.told + 1 and view.state == "Running" and view.step >= 3:
            self.told += 1
            poison: Any = StepDone(WorkerId("w1"), view.generation, None)  # type: ignore[arg-type]
            attach(witness.job_name).post.options(max_task_retries=0).remote(poison)
        return self.told == MAX_DEATHS


@LONG
def test_an_event_that_no_coordinator_can_handle_ends_the_run_after_a_save(
    tmp_path: Path, undisturbed: Any
) -> None:
    """Three tries; then workers save and stop, and the same command goes on from there."""
    (tmp_path / "gate").touch()
    job = job_of(
        tmp_path,
        "poison",
        data={"dataset": "tests.support.toys:Sums", "args": {"samples": SAMPLES, "read_s": 0.04}},
    )
    poisoned = trial(job, Poisoner(), hash_it=False)
    assert poisoned.result.state == "Failed" and poisoned.result.exit_code == 2, poisoned.result
    assert (
        "3 coordinators failed at the same event: StepDone: AttributeError at commits.py:"
        in poisoned.result.reason
    )
    newest = Run.open(job).newest()
    assert newest is not None and newest.step == poisoned.result.step < STEPS, "it was saved"
    assert len(owners(Run.open(job).store, job.name)) == MAX_DEATHS, (
        "the third one does not die, but gives up"
    )
    assert_nothing_left(poisoned)
    finished = trial(job)
    assert (finished.result.state, finished.hash) == ("Finished", undisturbed.hash)
    assert_nothing_left(finished)


class Amnesia(Killer):
    """Kills the keeper too, and deletes the journal in the bucket: nobody is left who knows of the world."""

    def lose(self, view: View) -> None:
        super().lose(view)
        # written if the workers took five seconds to start
        for path in self.bucket.glob("*/journal/**/*.jsonl.gz"):
            path.unlink()
        (keeper,) = cluster.named(f"{view.token}/keeper-").values()
        ray.kill(keeper, no_restart=True)


@LONG
def test_without_disk_and_keeper_the_world_is_another_one(tmp_path: Path, undisturbed: Any) -> None:
    """The negative control: without the keeper's copy the world is not kept.  The run ends well all the same,
    in another world.
    """
    killer = Amnesia(tmp_path, [running(3)], disks_lost=(0,))
    # leases run out before another world is begun
    deadlines = {"grow_debounce_s": 8, "stall_s": 120, "lease_s": 12}
    chaos = trial(job_of(tmp_path, "amnesia", deadlines=deadlines), killer)
    assert (chaos.result.state, chaos.hash) == ("Finished", undisturbed.hash)
    ended = {
        worker
        for worker, seen in chaos.witness.seen.items()
        if seen.ended is not None and seen.ended.status != 0
    }
    assert ended == {"w1", "w2"}, "nobody knows what they were for"
    assert not [line for line in chaos.lines if isinstance(line, Sentence) and "was not written" in line.text]
    (world,) = formed(Run.open(chaos.job).records())
    assert world.tier == "init", world
    assert min(world.generation, *(int(worker[1:]) for worker in world.members)) > UNREAD, (
        "numbers that nobody can have given to another"
    )
    assert chaos.witness.total("microbatches_run") > STEPS * chaos.job.microbatches
    assert_nothing_left(chaos)


class Patient(Killer):
    """Opens the gate once all kills are done and a newcomer is about to be taken in, or has been."""

    def __call__(self, witness: Witness, view: View) -> bool:
        self.look(witness, view)
        grows = (
            view.generation > 2
            or (view.generation == 2 and view.state == "Stopping")
            or self._replaced(witness)
        )
        if grows and not self.whens:
            (self.bucket / "gate").touch()
        return grows and not self.whens

    @staticmethod
    def _replaced(witness: Witness) -> bool:
        """Returns whether a newcomer is in the second world: no later one follows."""
        return any(
            seen.counters["generation"] == 2
            for worker, seen in witness.seen.items()
            if worker not in ("w1", "w2")
        )


def around_a_death(chaos: Trial) -> list[int]:
    """Returns the number of members of each world that formed around the death of one worker of two.

    On a fast machine the next worker is there before a world of one.
    """
    worlds = [len(each.members) for each in formed(Run.open(chaos.job).records())]
    assert worlds in ([2, 1, 2], [2, 2]), worlds
    return worlds


@LONG
def test_together_with_a_worker(tmp_path: Path, undisturbed: Any) -> None:
    """R6, R8: nobody is there to notice the death of the worker; the next coordinator finds it gone."""

    class Both(Patient):
        def __call__(self, witness: Witness, view: View) -> bool:
            if self.whens and self.whens[0](view) and "w2" in witness.seen:
                witness.seen["w2"].process.kill()
            return super().__call__(witness, view)

    killer = Both(tmp_path, [running(5)])
    chaos = trial(job_of(tmp_path, "together"), killer)
    assert [end.signal for end in killer.ends] == [signal.SIGKILL]
    assert [each.worker for each in chaos.witness.killed()] == ["w2"]
    assert (chaos.result.state, chaos.hash) == ("Finished", undisturbed.hash)
    assert samples(chaos.ledger) == samples(undisturbed.ledger)
    around_a_death(chaos)
    assert chaos.witness.total("healed_bucket_bytes") == 0
    assert_nothing_left(chaos)


@LONG
@pytest.mark.parametrize("seed", range(5))
def test_at_random_moments(tmp_path: Path, undisturbed: Any, seed: int) -> None:
    """R6: the coordinator dies eight times in one run, and a worker once."""
    rng = random.Random(seed)
    steps = sorted(rng.sample(range(2, GATE), 8))
    killer = Patient(tmp_path, [lambda view, step=step: view.step >= step for step in steps])  # type: ignore[misc]
    job = job_of(
        tmp_path,
        f"random-{seed}",
        faults=[{"point": "before_update", "step": rng.randrange(10, GATE - 1), "world_rank": 1}],
    )
    chaos = trial(job, killer)
    assert [end.signal for end in killer.ends] == [signal.SIGKILL] * 8
    worlds = around_a_death(chaos)
    assert_survived(chaos, undisturbed, worlds=worlds, tiers=["init", *["live"] * len(worlds[1:])])


@LONG
def test_without_any_coordinator_everybody_leaves(tmp_path: Path) -> None:
    """The driver and the coordinator are gone for good: workers and keepers leave after two leases.

    All that is left is the coordinator's local journal: no keeper can know that its coordinator does not only
    stand still.
    """
    (tmp_path / "gate").touch()
    job = job_of(tmp_path, "orphans", steps=10**6, deadlines={"lease_s": 4})
    (tmp_path / "job.toml").write_text(to_toml(job))
    command = Command(tmp_path, "train", "job.toml", "--address", ray.get_runtime_context().gcs_address)
    command.until(lambda: (view := view_of(job.name)) is not None and view.step >= 3)
    view = view_of(job.name)
    assert view is not None and len(cluster.named(f"{view.token}/")) == 3
    command.process.send_signal(signal.SIGKILL)
    assert command.process.wait(PATIENCE_S) == -signal.SIGKILL
    ray.kill(attach(job.name), no_restart=True)
    deadline = time.monotonic() + PATIENCE_S
    while cluster.named(f"{view.token}/"):
        assert time.monotonic() < deadline, cluster.named(f"{view.token}/")
        time.sleep(0.1)
    folder = log_folder(view.token)
    try:
        assert left_of(job.name) == [f"folder {folder}"]
        assert [path.name for path in folder.iterdir()] == ["journal-000001"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
