"""R3: a member that hangs is named and replaced, whatever it hangs in; one that is only late is not.

Nothing here ends by a timeout of a collective: those last a day.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import launch
from actors.perform import UNREACHED, ActorGroup
from actors.relay import Orders
from actors.view import View
from elastic.data.cursor import Cursor
from elastic.ids import NodeId
from elastic.job import Job
from elastic.protocol.events import KeeperLost
from elastic.report.story import Sentence
from elastic.runs.run import Run
from elastic.train.gauges.counters import OPERATIONS
from tests.support.chaos import (
    ASK_S,
    Trial,
    Witness,
    alone,
    assert_nothing_left,
    assert_survived,
    formed,
    trial,
)
from tests.support.patience import PATIENCE_S
from tests.support.room import Room
from tests.support.toys import LIGHT, toy_job
from tests.support.unhurried import Coordinator

STEPS, STEP = 24, 5
SAMPLES = 16 * STEPS
"""One epoch, so that each sample belongs to exactly one step."""
READ_S, SLOW_S, CRAWL_S = 0.04, 0.12, 2.0
"""Times in seconds of a read: one that is short, one that paces a run, and one that holds it up until a
newcomer has started.
"""


def job_of(bucket: Path, name: str, workers: int, pace_s: float = SLOW_S, **changes: Any) -> Job:
    """Returns a job whose steps take 2 × ``pace_s`` with two workers while there is no file ``hurry``: a
    newcomer takes seconds to start.

    Nobody who lives is silent for as long as the deadlines last, however busy the machine is.
    """
    values: dict[str, Any] = {
        "name": name,
        "steps": STEPS,
        "data": {
            "dataset": "tests.support.toys:Paced",
            "args": {"samples": SAMPLES, "pace_s": pace_s, "calm": str(bucket / "hurry")},
        },
        "workers": {"min": 1, "max": workers},
        "deadlines": {"grow_debounce_s": 30, "stall_s": 8, "fence_s": 8},
    }
    return toy_job(bucket, **(values | LIGHT | changes))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of the same job; only deadlines and pace differ."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "hurry").touch()
    return alone(job_of(folder, "local", 1))


def told(chaos: Trial) -> list[str]:
    return [line.text for line in chaos.lines if isinstance(line, Sentence)]


@pytest.mark.parametrize(
    ("point", "kind", "layout"),
    [
        ("before_commit", "SIGSTOP", {}),  # all others have entered the commit
        pytest.param("forward", "SIGSTOP", {}, marks=pytest.mark.full),
        pytest.param("backward", "held_gil", {}, marks=pytest.mark.full),
        pytest.param("before_commit", "held_gil", {}, marks=pytest.mark.full),
        pytest.param("in_update", "SIGSTOP", {}, marks=pytest.mark.full),
        pytest.param("backward", "SIGSTOP", {"dp_replicate": 1}, marks=pytest.mark.full),
    ],
)
def test_whoever_hangs_is_named_and_replaced(
    tmp_path: Path,
    undisturbed: Any,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    kind: str,
    layout: dict[str, int],
) -> None:
    """R3: three workers, one stands still; the two others stay the same processes, and a third comes.

    The run crawls from the hang until the newcomer is there, so that it does not end before.
    """
    monkeypatch.setattr(launch, "Coordinator", Coordinator)
    fault = {"point": point, "step": STEP, "world_rank": 1, "kind": kind}
    job = job_of(
        tmp_path,
        f"hang-{point}-{kind.lower()}",
        3,
        CRAWL_S,
        faults=[fault],
        parallel=layout,
        checkpoint={"save_every": 1 if layout else 100},
    )
    (hurry := tmp_path / "hurry").touch()

    def crawl(witness: Witness, view: View) -> bool:
        if whole := view.generation == 3:
            hurry.touch()
        elif view.step >= STEP - 1:
            hurry.unlink(missing_ok=True)
        return whole

    crawl.look_s = ASK_S  # type: ignore[attr-defined]
    chaos = trial(job, crawl)
    tier = "host" if layout else "live"
    assert_survived(chaos, undisturbed, worlds=(3, 2, 3), tiers=("init", tier, "live"))
    (victim,) = chaos.witness.killed()
    blamed = [text for text in told(chaos) if "no member moved for" in text]
    assert len(blamed) == 1, told(chaos)
    if kind == "SIGSTOP":
        assert (
            f"{victim.worker} has completed least (step {STEP - 1}, " in blamed[0]
            and "it is stopped" in blamed[0]
        )
    else:  # its counters are those of the others, which wait for it: only the fence tells
        assert [
            text
            for text in told(chaos)
            if f"expel {victim.worker}" in text or f"{victim.worker} did not answer" in text
        ], told(chaos)
    assert_said_where_it_stood(chaos, victim.worker, "perform (" if kind == "SIGSTOP" else "hold_the_gil (")


def assert_said_where_it_stood(chaos: Trial, worker: str, where: str) -> None:
    """Checks that the story names the file, and the file the function."""
    (said,) = [
        text
        for text in told(chaos)
        if text.startswith(f"{worker} hung; its log (with its stack, if py-spy could read it) is ")
    ]
    log = Path(said.removeprefix(f"{worker} hung; its log (with its stack, if py-spy could read it) is "))
    head, spied, *lines = log.read_text().splitlines()
    assert "killed by signal 9 (SIGKILL)" in head and spied == "# where its process stood, by py-spy:"
    assert [line for line in lines if where in line], lines


@pytest.mark.full
def test_nobody_is_blamed_where_nothing_happens(tmp_path: Path, undisturbed: Any) -> None:
    """The control: no fault, with the same short deadlines."""
    calm = trial(job_of(tmp_path, "calm", 2))
    assert_survived(calm, undisturbed, worlds=(2,), tiers=("init",))


LATE_STEPS, LATE_STEP, STEP_S = 16, 9, 0.8


def late(folder: Path, name: str, late_s: float) -> Trial:
    """Runs steps of ``STEP_S`` on two workers, of which one waits ``late_s`` for a sample; ``stall_s`` is 1
    s.
    """
    data = of_late(folder / f"{name}-mark", late_s, STEP_S / 2)
    return trial(job_of(folder, name, 2, steps=LATE_STEPS, data=data, deadlines={"stall_s": 1, "fence_s": 2}))


def of_late(mark: Path, late_s: float, read_s: float) -> dict[str, Any]:
    samples = 16 * LATE_STEPS
    sample = Cursor(samples, 16, 0, "permutation").microbatch_ids(LATE_STEP, 0, 2)[0]
    args = {"samples": samples, "read_s": read_s, "sample": sample, "late_s": late_s, "mark": str(mark)}
    return {"dataset": "tests.support.toys:Late", "args": args}


@pytest.mark.full
def test_late_is_not_dead_and_stopped_in_data_loading_is_not_waiting_for_it(tmp_path: Path) -> None:
    """R3: a worker waits two steps' time for a sample, so that nobody moves for longer than ``stall_s``;
    nobody is blamed.  The control:
    a worker whose data do not come at all is expelled, and not the worker that waits for it in a
    collective."""
    reference = alone(
        job_of(
            tmp_path / "alone", "alone", 1, steps=LATE_STEPS, data=of_late(tmp_path / "not-late", 0.0, 0.0)
        )
    )
    slow = late(tmp_path, "late", 2 * STEP_S)
    assert_survived(slow, reference, worlds=(2,), tiers=("init",))
    assert (tmp_path / "late-mark").exists() and not [
        text for text in told(slow) if "no member moved" in text
    ]

    stuck = late(tmp_path, "stuck", 600.0)
    assert (stuck.result.state, stuck.hash, stuck.losses) == ("Finished", reference.hash, reference.losses)
    (victim,) = stuck.witness.killed()
    (blamed,) = [text for text in told(stuck) if "no member moved" in text]
    assert (
        f"{victim.worker} has completed least (step {LATE_STEP - 1}, " in blamed and "it reads data" in blamed
    )
    (waiting,) = {"w1", "w2"} - {victim.worker}
    assert stuck.witness.seen[waiting].final["updates_applied"] == LATE_STEPS
    assert_nothing_left(stuck)


@pytest.mark.full
def test_whoever_cannot_leave_a_broken_world_is_replaced(tmp_path: Path) -> None:
    """R1, R3: one of three is killed; another one answers the fence, but its training thread never comes
    back, whatever is aborted.  The third waits for it no longer than two fences, and not until forming has
    failed; then it goes on alone, as there is no more room."""
    steps = LATE_STEPS
    reference = alone(
        job_of(tmp_path / "alone", "alone", 1, steps=steps, data=of_late(tmp_path / "none", 0.0, 0.0))
    )
    job = job_of(
        tmp_path,
        "stuck",
        3,
        steps=steps,
        data=of_late(tmp_path / "mark", 600.0, READ_S),
        deadlines={"grow_debounce_s": 30, "stall_s": 120, "fence_s": 2, "form_s": 100},
    )
    room = Room()

    def act(witness: Witness, view: View) -> bool:
        """Kills another worker once the late one has begun to wait."""
        if len(view.workers) == 3 and not queued:
            room.take(ray.cluster_resources()["CPU"] - 3)
            queued.extend(room.queue(1) for _ in range(2))
        mark = (tmp_path / "mark").read_text() if (tmp_path / "mark").exists() else ""
        late = next((worker for worker, seen in witness.seen.items() if str(seen.process.pid) == mark), "")
        if not late or OPERATIONS[witness.seen[late].counters["operation"]] != "reads data":
            return False
        stuck.append(late)
        killed.append(min(witness.seen.keys() - {late}))
        witness.seen[killed[0]].process.kill()
        return True

    queued: list[Any] = []
    stuck: list[str] = []
    killed: list[str] = []
    try:
        chaos = trial(job, act)
    finally:
        room.close()
    first = formed(Run.open(job).records())[0].members
    strike = {"point": "forward", "kind": "SIGKILL", "generation": 1}  # from outside
    victims = [{**strike, "world_rank": first.index(each)} for each in (*stuck, *killed)]
    chaos = replace(chaos, job=chaos.job.replace(faults=victims))
    assert_survived(chaos, reference, worlds=(3, 2, 1), tiers=("init", "live", "live"))
    (left,) = {"w1", "w2", "w3"} - {*stuck, *killed}
    blamed = f"{stuck[0]} did not take the plan within 4 s after the other workers: expel {stuck[0]}"
    assert [text for text in told(chaos) if blamed in text], told(chaos)
    assert chaos.witness.seen[left].final["updates_applied"] == steps
    assert_said_where_it_stood(chaos, stuck[0], "elastic/data/loader.py")


class Bystander:
    """An actor that somebody follows."""

    def lives(self) -> None:
        threading.Event().wait()


class Follower:
    """Stands in for the coordinator: Ray tells it, on Ray's own thread, that a keeper cannot be reached."""

    def loses(self, keeper: Any) -> str:
        told = queue.SimpleQueue[KeeperLost]()
        these = ActorGroup.__new__(ActorGroup)
        these._closing, these.keepers, these.post = False, {NodeId("away"): keeper}, told.put  # type: ignore[assignment]
        these.orders, these._looks = Orders(1, {}, {}, {}, 10.0), ThreadPoolExecutor(1)
        error = ray.exceptions.ActorUnavailableError("the connection broke", None)
        ray.put(None).future().add_done_callback(lambda _: these._keeper_lost(NodeId("away"), error))
        return told.get(timeout=PATIENCE_S).reason

    def answers(self) -> bool:
        return True


def test_a_keeper_out_of_reach_does_not_hang_the_coordinator() -> None:
    """Ray tells it on a thread that must not wait for Ray; it once waited there for the keeper's end, and
    nothing was answered again.
    """
    keeper = ray.remote(num_cpus=0)(Bystander).remote()
    follower = ray.remote(num_cpus=0, max_concurrency=2)(Follower).remote()
    living = keeper.lives.remote()
    try:
        assert ray.get(follower.loses.remote(keeper), timeout=PATIENCE_S) == UNREACHED
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(living, timeout=PATIENCE_S)
        assert ray.get(follower.answers.remote(), timeout=PATIENCE_S)
    finally:
        ray.kill(follower)
