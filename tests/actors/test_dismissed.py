"""R9: a worker that the run has given up, and that nobody kills, does not stay."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.coordinator import Coordinator
from actors.keeper import GROUPS, Keeper
from actors.living import attach
from actors.logs import Logs
from actors.processes import clear, log_file, make_log_folder, remove_logs
from actors.relay import Outbox, answered
from actors.users_code import UsersCode
from actors.worker import Worker
from elastic.control.inbox import Inbox
from elastic.ids import NodeId, WorkerId
from elastic.protocol.events import Event, Lost
from elastic.protocol.member import Lease, Member
from elastic.threads import go_or_end
from elastic.train.apply_fence import ApplyFence
from elastic.train.gauges.counters import segment
from storage.objects import ObjectStore
from tests.support.chaos import Story, act_by, assert_nothing_left, comes, trial
from tests.support.patience import PATIENCE_S, until
from tests.support.relay import Gatherer
from tests.support.toys import LIGHT, toy_job

LEASE_S = 2.0
KNOWN = (WorkerId("w1"), WorkerId("w2"), WorkerId("w3"))
LEFT = 3
"""Exit code of a worker that leaves because the run goes on without it."""


def given_up(mistaken: list[WorkerId]) -> Story:
    """Two workers are given up by mistake, each when it is one of two; then the run is stopped.

    The coordinator is told that the first one has ended.  Of the second one the counters are removed, as a
    node does that is told to clean its shared memory, and another keeper looks for them.
    """
    while len(mistaken) < 2:
        _, view = yield from comes(
            lambda witness, view: (
                view.state == "Running"
                and len(view.workers) == 2
                and view.workers.keys() <= witness.seen.keys()
            )
        )
        worker = max(view.workers)
        if not mistaken:
            attach("given-up").post.remote(Lost(worker, "a mistake", certain=True))  # type: ignore[union-attr]
        else:
            segment(view.token, worker).unlink()
            ray.kill(ray.get_actor(f"{view.token}/keeper-{view.workers[worker][:12]}"))
        mistaken.append(worker)
        yield from comes(lambda witness, _, worker=worker: witness.seen[worker].ended is not None)  # type: ignore[misc]
    attach("given-up").stop.remote("they have ended")  # type: ignore[union-attr]


def test_a_worker_that_the_run_has_given_up_leaves_by_itself(tmp_path: Path) -> None:
    """R9: the coordinator takes a living worker for one that has ended, so it kills nobody.  The worker hears
    so when it asks for its lease, and ends itself.  One that cannot be followed is killed by its keeper.
    """
    mistaken = list[WorkerId]()
    # the driver gives a new coordinator two leases to answer, and machines are loaded
    deadlines = {"lease_s": 20, "grow_debounce_s": 0.5}
    data = {"dataset": "tests.support.toys:Sums", "args": {"samples": 1_600_000, "read_s": 0.1}}
    job = toy_job(
        tmp_path,
        name="given-up",
        steps=100_000,
        workers={"min": 1, "max": 2},
        deadlines=deadlines,
        data=data,
        **LIGHT,
    )
    chaos = trial(job, act_by(given_up(mistaken)), hash_it=False)
    assert chaos.result.state == "Stopped"
    told, unfollowed = (chaos.witness.seen[worker].ended for worker in mistaken)
    assert told is not None and told.exit_code == LEFT, "nobody killed it"
    assert unfollowed is not None and unfollowed.status is not None
    for worker, words in zip(
        mistaken, ("the run goes on without this worker", "could not be followed"), strict=True
    ):
        (log,) = Path(job.bucket).glob(f"given-up/logs/*/{worker}.log")
        assert words in log.read_text()
    assert_nothing_left(chaos)


class Desk:
    """Stands in for the coordinator: it grants every lease and hears every beat."""

    def renew(self, worker: WorkerId, generation: int) -> Lease:
        return Lease(True, 0, 1, False)

    def post(self, event: Event) -> None: ...

    def post_all(self, said: tuple[Event, ...]) -> None: ...

    def renew_all(self, asked: tuple[tuple[WorkerId, int], ...]) -> None: ...


class LoneWorker(Worker):
    """A worker that does nothing but keep its lease.  It gives up a coordinator that does not answer only
    after two ``PATIENCE_S``.
    """

    def __init__(self, desk: Any, lease_s: float = LEASE_S) -> None:
        self.worker, self.coordinator, self.outbox = WorkerId("w1"), desk, Outbox(desk, lease_s)
        self.job = SimpleNamespace(deadlines=SimpleNamespace(lease_s=lease_s))  # type: ignore[assignment]
        self.apply_fence, self._renew_now = ApplyFence(Member(self.worker, PATIENCE_S)), threading.Event()

    def begin(self) -> None:
        go_or_end(self._keep_lease, "lease")


class Called(Worker):
    """A worker that is called, and then does nothing.  If the call is late, as on a busy machine, so is the
    look whether there was one.
    """

    def __init__(self, *made_for: Any) -> None:
        self.called, self.looked = threading.Event(), threading.Event()
        super().__init__(*made_for)

    def train(self) -> None:
        self._begun = True
        self.called.set()

    def _leave_unused(self) -> None:
        assert self.called.wait(PATIENCE_S)
        super()._leave_unused()
        self.looked.set()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def stays(self) -> bool:
        """Returns True once it has looked whether it was called, and has not left."""
        return self.looked.wait(PATIENCE_S)


def test_a_worker_that_nobody_calls_leaves_by_itself(tmp_path: Path) -> None:
    """Its coordinator died between its start and the call, and the next one's order to kill it came before it
    was made.  The control: one that was called stays.
    """
    desk = ray.remote(num_cpus=0)(Desk).remote()
    job = toy_job(tmp_path, name="unused", deadlines={"lease_s": 1, "fence_s": 1})
    make_log_folder("unused-0001-abcdef")
    made = {}
    for kind in (Worker, Called):
        name = WorkerId(f"w{len(made)}")
        actor = ray.remote(num_cpus=0, concurrency_groups={"control": 1, "life": 1})(kind)
        made[kind] = actor.remote(job, "unused-0001-abcdef", name, desk, UsersCode([]), b"secret")
    ray.get(made[Called].train.remote(), timeout=PATIENCE_S)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(made[Worker].lives.remote(), timeout=PATIENCE_S)
    assert ray.get(made[Called].stays.remote(), timeout=2 * PATIENCE_S), "the control"
    assert "no coordinator has called this worker for 2 s" in log_file("unused-0001-abcdef", "w0").read_text()
    for actor in (desk, made[Called]):
        ray.kill(actor)
    clear("unused", {"abcdef"}, PATIENCE_S)


class LoneKeeper(Keeper):
    """A keeper that does nothing but beat, and is as patient."""

    def __init__(self, desk: Any) -> None:
        self.node, self.run, self.silence_s, self.late_s = NodeId("away"), "nobody", 2 * PATIENCE_S, 0.0
        self.workers, self.uploads, self._beats = {}, SimpleNamespace(uploading=tuple), desk.post  # type: ignore[assignment]
        self._closed = threading.Event()

    def begin(self) -> None:
        go_or_end(self._beat, "beat")

    def _end(self) -> None: ...


class OverAtOnce:
    """Stands in for the line to a coordinator whose run is over as soon as it hears that a worker is lost."""

    def __init__(self, logs: Logs) -> None:
        self.logs, self.heard = logs, list[Any]()

    def remote(self, event: Event) -> None:
        self.heard.append(event)
        self.logs.close()


def test_the_log_of_a_worker_that_cannot_be_followed_is_stored_although_the_run_is_over_at_once(
    tmp_path: Path,
) -> None:
    run, worker = f"unfollowed-0001-{os.getpid():06x}", WorkerId("w1")
    make_log_folder(run)
    log_file(run, worker).write_text("it began\n")
    one: Any = LoneKeeper.__new__(LoneKeeper)
    one.run, one.workers, one.logs = (
        run,
        {},
        Logs(ObjectStore.open(str(tmp_path)), "unfollowed/logs", run, NodeId("n1")),
    )
    one.coordinator = SimpleNamespace(post=OverAtOnce(one.logs))
    one._follow(worker, None)
    remove_logs(run)
    assert [event.worker for event in one.coordinator.post.heard] == [worker]
    stored = (tmp_path / "unfollowed/logs/w1.log").read_text()
    assert "could not be followed" in stored and "it began" in stored


class Beats:
    """Stands in for the line to the coordinator, and for the event that ends the keeper after twenty ticks.
    With ``prompt`` each beat is answered by the next tick.
    """

    def __init__(self, answers: Any, prompt: bool) -> None:
        self.answers, self.prompt, self.sent, self.ticks = answers, prompt, list[Any](), 0

    def remote(self, _: Event) -> Any:
        self.sent.append(self.answers.at_once.remote() if self.prompt else self.answers.never.remote())
        return self.sent[-1]

    def wait(self, _: float) -> bool:
        self.ticks += 1
        if self.sent and self.prompt:
            until(lambda: answered(self.sent[-1]), what="the beat is not answered")
        return self.ticks > 20


class Answers:
    """An actor whose answer comes at once, or never."""

    def at_once(self) -> None: ...

    def never(self) -> None:
        threading.Event().wait()


@pytest.mark.parametrize(("prompt", "beats"), [(True, 20), (False, 1)])
def test_a_keeper_beats_at_each_tick_unless_its_last_beat_is_not_answered(prompt: bool, beats: int) -> None:
    """A coordinator that does not keep up is given no more to do; one that does must hear of each node in
    time, or takes it for silent.
    """
    answers = ray.remote(num_cpus=0)(Answers).remote()
    one: Any = LoneKeeper.__new__(LoneKeeper)
    one.node, one.silence_s, one.late_s, one.workers = NodeId("n1"), 3600.0, 0.0, {}
    one.uploads, one._beats = SimpleNamespace(uploading=tuple), Beats(answers, prompt)
    one._closed = one._beats
    one._beat()
    assert len(one._beats.sent) == beats
    ray.kill(answers)


class LeaseDesk(Coordinator):
    """The coordinator's answers to questions for the lease, with no run around them: it knows the workers
    ``KNOWN`` alone.
    """

    def __init__(self) -> None:
        known = SimpleNamespace(
            workers=KNOWN, grants_lease=lambda generation: generation == 7, knows=KNOWN.__contains__
        )
        self.recorded, self.inbox, self.incarnation = known, Inbox(time.monotonic), 3  # type: ignore[assignment]
        self.replicas = SimpleNamespace(
            holds=True, safe=SimpleNamespace(generation=7, history=SimpleNamespace(recorded_step=5))
        )  # type: ignore[assignment]
        self.asked = Counter[tuple[WorkerId, str]]()

    def renew_all(self, asked: tuple[tuple[WorkerId, int], ...]) -> list[Lease]:
        answers = super().renew_all(asked)  # which asks ``renew`` for each
        self.asked.update((worker, "together") for worker, _ in asked)
        self.asked.subtract((worker, "directly") for worker, _ in asked)
        return answers

    def renew(self, worker: WorkerId, generation: int) -> Lease:
        self.asked[worker, "directly"] += 1
        return super().renew(worker, generation)

    def read(self) -> dict[tuple[WorkerId, str], int]:
        return +self.asked


class Leased(LoneWorker):
    """A worker whose keeper may be known, and that tells what it knows of its lease."""

    def __init__(self, worker: str, desk: Any, keeper: Any) -> None:
        super().__init__(desk, lease_s=8 * PATIENCE_S)  # it waits an eighth of that for its keeper
        self.worker, self.outbox.keeper = WorkerId(worker), keeper

    def heeds(self) -> int:
        return self.apply_fence.member.incarnation


def test_a_worker_asks_for_its_lease_through_its_keeper_if_it_can() -> None:
    """N2.  The controls: without a keeper, or with one that does not answer, the worker asks the coordinator
    itself.
    """
    desk = ray.remote(num_cpus=0, concurrency_groups={"inbox": 1, "view": 1})(LeaseDesk).remote()
    keeper, dead = (
        ray.remote(num_cpus=0, concurrency_groups=GROUPS)(Gatherer).remote(NodeId("n1"), desk)
        for _ in range(2)
    )
    # a worker is told of a keeper that has come up
    ray.get([keeper.pid.remote(), dead.pid.remote()], timeout=PATIENCE_S)
    ray.kill(dead)
    leased = ray.remote(num_cpus=0, concurrency_groups={"control": 1, **GROUPS})(Leased)
    known = [
        leased.remote(name, desk, through) for name, through in zip(KNOWN, (keeper, None, dead), strict=True)
    ]
    strangers = [
        leased.remote(f"stranger {number}", desk, through) for number, through in enumerate((keeper, None))
    ]
    ray.get([each.begin.remote() for each in (*known, *strangers)])
    until(
        lambda: ray.get([each.heeds.remote() for each in known]) == [3] * len(known),
        what="they have heard the answer",
    )
    for stranger in strangers:
        with pytest.raises(ray.exceptions.RayActorError):  # the run does not know it
            ray.get(stranger.lives.remote(), timeout=PATIENCE_S)
    asked = {each for each in ray.get(desk.read.remote()) if each[0] in KNOWN}
    assert asked == {("w1", "together"), ("w2", "directly"), ("w3", "directly")}
    for actor in (desk, keeper, *known):
        ray.kill(actor)


def test_who_hears_that_there_will_be_no_coordinator_leaves() -> None:
    """R9: on a node that stood still while its run ended, nobody is left who knows the workers.  The control:
    a living one keeps them.
    """
    desk = ray.remote(num_cpus=0)(Desk).remote()
    ray.get(desk.post.remote(None), timeout=PATIENCE_S)
    group = {"control": 1, **GROUPS}
    alone = [
        ray.remote(num_cpus=0, concurrency_groups=group)(kind).remote(desk)
        for kind in (LoneWorker, LoneKeeper)
    ]
    ray.get([each.begin.remote() for each in alone])
    lives = [each.lives.remote() for each in alone]
    assert ray.wait(lives, timeout=LEASE_S)[1] == lives, "the control"
    ray.kill(desk, no_restart=True)
    for life in lives:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(life, timeout=PATIENCE_S)
