"""N2: a node speaks for its workers, with one call for all; nothing is lost if its keeper stands still, dies,
or does not know them.

The small tests have the product's outbox, orders and keeper methods in real processes, with no run around
them.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import launch, living
from actors.keeper import GROUPS
from actors.processes import leave_nothing, make_log_folder
from actors.relay import Orders
from actors.users_code import UsersCode
from actors.worker import Worker
from elastic.ids import NodeId, WorkerId
from elastic.protocol.events import Here, NodeRefused, StartFailed
from elastic.report.ledger import ledger
from elastic.runs.run import Run
from tests.support.chaos import Story, act_by, assert_nothing_left, comes, formed, trial
from tests.support.hollow import HollowCoordinator
from tests.support.nodes import Node, joined
from tests.support.patience import PATIENCE_S, until
from tests.support.relay import FENCE_S, PATIENT_S, Desk, Forgetful, Gatherer, Speaker
from tests.support.room import Room
from tests.support.toys import LIGHT, toy_job

HOME, WORKERS = NodeId("home"), tuple(WorkerId(f"w{number}") for number in range(4))


class Counted:
    """A keeper's handle that notes the calls by which orders are passed on."""

    def __init__(self, keeper: Any) -> None:
        self.keeper, self.made = keeper, list[Any]()
        self.relay = self

    @property
    def calls(self) -> int:
        return len(self.made)

    def remote(self, *arguments: Any) -> Any:
        self.made.append(self.keeper.relay.remote(*arguments))
        return self.made[-1]


class Office:
    """A desk, a keeper, and four workers of one node, of whom the keeper follows those in ``known``.

    By default nobody gives up a keeper that is slow: if it was given up, messages would arrive twice.
    """

    def __init__(self, known: tuple[WorkerId, ...] = WORKERS, fence_s: float = PATIENT_S) -> None:
        self.desk = ray.remote(num_cpus=0)(Desk).remote()
        self.keeper = ray.remote(num_cpus=0, concurrency_groups=GROUPS)(Gatherer).remote(HOME, self.desk)
        speaker = ray.remote(num_cpus=0)(Speaker)
        self.workers = {worker: speaker.remote(worker, self.desk, fence_s) for worker in WORKERS}
        ray.get([self.keeper.follow.remote(worker, self.workers[worker]) for worker in known])
        ray.get([actor.speak_through.remote(self.keeper) for actor in self.workers.values()])
        self.pid = ray.get(self.keeper.pid.remote())
        self.counted = Counted(self.keeper)
        self.orders = Orders(1, self.workers, dict.fromkeys(WORKERS, HOME), {HOME: self.counted}, fence_s)
        self._begins = dict.fromkeys(WORKERS, 0)

    def anew(self) -> Office:
        """Forgets the orders so far."""
        self._begins = {worker: len(ray.get(actor.read.remote())) for worker, actor in self.workers.items()}
        return self

    def say(self, *numbers: int) -> None:
        ray.get([actor.say.remote(*numbers) for actor in self.workers.values()])

    def heard(self) -> dict[WorkerId, list[int]]:
        found = defaultdict[WorkerId, list[int]](list)
        for call in ray.get(self.desk.read.remote()):
            for event in call:
                found[event.worker].append(event.generation)
        return found

    def all_heard(self, *numbers: int) -> bool:
        heard = self.heard()
        return all({*numbers} <= {*heard[worker]} for worker in WORKERS)

    def calls(self) -> int:
        return len(ray.get(self.desk.read.remote()))

    def obeyed(self) -> dict[WorkerId, list[Any]]:
        return {
            worker: ray.get(actor.read.remote())[self._begins[worker] :]
            for worker, actor in self.workers.items()
        }

    def all_obeyed(self, *orders: Any) -> bool:
        return all(found == list(orders) for found in self.obeyed().values())

    def close(self) -> None:
        self.orders.close()
        for actor in (self.desk, self.keeper, *self.workers.values()):
            ray.kill(actor)


@pytest.fixture(scope="module")
def shared() -> Iterator[Office]:
    office = Office()
    yield office
    office.close()


@pytest.fixture
def office(shared: Office) -> Office:
    """An office in which nobody is killed."""
    return shared.anew()


def test_one_call_brings_what_all_workers_of_a_node_say_and_one_call_orders_all(office: Office) -> None:
    """N2: a node speaks, not a worker."""
    ray.get(office.desk.take.remote(0.1))  # so that messages gather, however the processes take turns
    for number in range(1, 12):
        office.say(number)
    until(lambda: len(office.heard()) == len(WORKERS), what="all were heard")
    until(
        lambda: all(found == list(range(1, 12)) for found in office.heard().values()),
        what="each in order, each once",
    )
    assert office.calls() <= 11 * len(WORKERS) / 2, "fewer calls than half the messages"
    office.orders.send(WORKERS, "fence", 7, False)
    office.orders.send(WORKERS, "settle", 7, None)
    until(
        lambda: office.all_obeyed((1, "fence", 7, False), (1, "settle", 7, None)),
        what=f"each once: {office.obeyed()}",
    )
    assert office.counted.calls == 2


def test_a_worker_that_the_keeper_does_not_follow_gets_its_orders_directly() -> None:
    """A keeper whose coordinator does not answer says so.  The coordinator is dead for it only: what the
    worker then sends directly waits for the next one.
    """
    office, event = Office(known=WORKERS[:2]), Here(WORKERS[0], 1)
    office.orders.send(WORKERS, "go", 7)
    until(lambda: office.all_obeyed((1, "go", 7)), what=f"each once: {office.obeyed()}")
    assert ray.get(office.keeper.pass_on.remote((event,)), timeout=PATIENCE_S), "the control"
    ray.kill(office.desk)
    assert not ray.get(office.keeper.pass_on.remote((event,)), timeout=PATIENCE_S)
    office.close()


def test_a_keeper_that_stands_still_or_dies_loses_nothing() -> None:
    """While it stands still, what a worker says goes directly.  Once it has answered, it passes on again.
    Then it is killed.
    """
    office = Office(fence_s=FENCE_S)
    try:
        stand_still(office)
        return_to(office.anew())
        loses_nothing(office.anew(), signal.SIGKILL, 21)
    finally:
        if Path(f"/proc/{office.pid}").exists():
            os.kill(office.pid, signal.SIGCONT)
        office.close()


def loses_nothing(office: Office, fate: signal.Signals, number: int) -> None:
    """Checks that all is heard, messages with ``number`` and the two after it, and each order is obeyed,
    whatever the keeper's fate.
    """
    office.say(number)
    until(lambda: office.all_heard(number), what="all were heard")
    os.kill(office.pid, fate)
    office.say(number + 1, number + 2)
    office.orders.send(WORKERS, "fence", 7, False)
    until(lambda: office.all_heard(number, number + 1, number + 2), what=f"nothing is lost: {office.heard()}")
    until(lambda: office.all_obeyed((1, "fence", 7, False)), what=f"nothing is lost: {office.obeyed()}")
    office.orders.send(WORKERS, "settle", 7, None)
    until(
        lambda: all(found[-1][1] == "settle" for found in office.obeyed().values()),
        what="the next order, too",
    )


def stand_still(office: Office) -> None:
    loses_nothing(office, signal.SIGSTOP, 1)
    assert office.counted.calls == 1, "nobody waits for the same keeper again"
    os.kill(office.pid, signal.SIGCONT)
    until(
        lambda: all(len(found) == 3 for found in office.obeyed().values()),
        what="what it passes on late arrives a second time",
    )
    until(lambda: not office.orders._is_late(HOME), what="it has answered")
    office.orders.send(WORKERS, "go", 8)
    until(lambda: all(found[-1][1] == "go" for found in office.obeyed().values()), what="it passes on again")
    assert office.counted.calls == 2


def return_to(office: Office) -> None:
    """An outbox returns to a keeper that was late."""
    first, actor = WORKERS[0], office.workers[WORKERS[0]]
    until(lambda: ray.get(actor.all_answered.remote()), what="the keeper has answered what came before")
    directly = ray.get(actor.spoke_directly.remote())
    os.kill(office.pid, signal.SIGSTOP)
    for number in (11, 12):
        ray.get(actor.say.remote(number))
        until(lambda number=number: number in office.heard()[first], what="it goes directly")
    assert ray.get(actor.spoke_directly.remote()) == directly + 2, "the control"
    os.kill(office.pid, signal.SIGCONT)
    until(lambda: office.heard()[first].count(11) == 2, what="the late one arrives, too")
    until(lambda: ray.get(actor.all_answered.remote()), what="the worker knows it")
    ray.get(actor.be_patient.remote())
    ray.get(actor.say.remote(13))
    until(lambda: 13 in office.heard()[first], what="it is heard")
    assert ray.get(actor.spoke_directly.remote()) == directly + 2, "through the keeper"


def test_a_worker_that_cannot_start_is_heard_before_its_process_counts_as_gone(tmp_path: Path) -> None:
    desk = ray.remote(num_cpus=0, max_concurrency=2)(Desk).remote()
    ray.get(desk.take.remote(0.5))
    patience = {"fence_s": PATIENCE_S}  # it waits a tenth of that for the desk
    # Ray gives it no GPU, so it finds none
    job = toy_job(tmp_path, name="refused", workers={"gpus": 1}, deadlines=patience)
    run = f"refused-{os.getpid()}"
    make_log_folder(run)
    worker = ray.remote(num_cpus=0, num_gpus=0, concurrency_groups={"control": 1, "life": 1})(Worker).remote(
        job, run, WORKERS[0], desk, UsersCode([]), b"secret"
    )
    ray.get(worker.train.remote())
    said = [event for call in ray.get(desk.read.remote()) for event in call]
    ray.kill(worker)
    leave_nothing(run)
    assert [type(event) for event in said] == [NodeRefused, StartFailed]
    assert "workers.gpus = 1" in said[0].why and said[1].reason == "its node is refused", (
        "the reason is said once"
    )


def test_one_call_asks_for_the_leases_of_all_workers_of_a_node(office: Office) -> None:
    """Each worker gets its own answer.  The control: those that do not ask at the same time make a call each."""
    # one call at a time, so that questions gather, however the processes take turns
    ray.get(office.desk.take.remote(0.5))
    questions = [(worker, number) for number in range(3) for worker in WORKERS]
    answers = ray.get(
        [office.keeper.renew.remote(worker, number) for worker, number in questions], timeout=PATIENCE_S
    )
    assert answers == [f"{worker} may step in {number}" for worker, number in questions]
    together = ray.get(office.desk.read_asked.remote())
    assert sum(together) == len(questions) and len(together) <= len(questions) / 2, (
        f"fewer than half: {together}"
    )
    ray.get(office.desk.take.remote(0.0))
    for worker in WORKERS:
        assert ray.get(office.keeper.renew.remote(worker, 1), timeout=PATIENCE_S)
    assert ray.get(office.desk.read_asked.remote())[len(together) :] == [1] * len(WORKERS), "the control"


def test_what_a_keeper_takes_with_it_is_sent_again(office: Office) -> None:
    """It answers once it has sent an order, which may not have arrived when it dies.  The control: nobody
    else sends it.
    """
    forgetful = ray.remote(num_cpus=0, concurrency_groups=GROUPS)(Forgetful).remote(HOME, office.desk)
    counted = Counted(forgetful)
    keepers = {HOME: counted}
    orders = Orders(1, office.workers, dict.fromkeys(WORKERS, HOME), keepers, PATIENT_S)
    orders.send(WORKERS, "fence", 7, False)
    orders.send(WORKERS, "settle", 7, None)
    ray.get(counted.made, timeout=PATIENCE_S)
    assert counted.calls == 2 and not any(office.obeyed().values()), "the control"
    ray.kill(forgetful)
    del keepers[HOME]
    orders.lost(HOME)
    until(
        lambda: office.all_obeyed((1, "fence", 7, False), (1, "settle", 7, None)),
        what=f"each once: {office.obeyed()}",
    )
    orders.lost(HOME)
    orders.send(WORKERS, "go", 8)
    until(
        lambda: office.all_obeyed((1, "fence", 7, False), (1, "settle", 7, None), (1, "go", 8)),
        what=f"{office.obeyed()}",
    )
    orders.close()


def test_a_keeper_that_stands_still_while_a_worker_of_its_node_dies_costs_nobody_else(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """N2: the survivors there are fenced, and their answers arrive, although their keeper passes nothing on."""
    monkeypatch.setattr(launch, "Coordinator", HollowCoordinator)
    stopped: list[str] = []

    def hush() -> Story:
        yield from comes(
            lambda witness, view: view.state == "Running" and view.workers.keys() <= witness.seen.keys()
        )
        witness, view = yield from comes(lambda witness, view: view.step >= 5)
        away = sorted(worker for worker, node in view.workers.items() if node == nodes["away"])
        assert len(away) == 2, view.workers
        keeper = ray.get_actor(f"{view.token}/keeper-{nodes['away'][:12]}")
        pid, generation, step = (
            ray.get(keeper.__ray_call__.remote(lambda _: os.getpid())),
            view.generation,
            view.step,
        )
        os.kill(pid, signal.SIGSTOP)
        stopped.append(away[0])
        witness.seen[away[0]].process.kill()
        yield from comes(
            lambda _, view: view.state == "Running" and view.generation > generation and view.step >= step + 5
        )
        os.kill(pid, signal.SIGCONT)
        living.attach("hushed").stop.remote("enough was seen")  # type: ignore[union-attr]

    room = Room()
    with joined(tmp_path, Node("away", 2)) as nodes:
        room.take(ray.cluster_resources()["CPU"] - 3)
        job = toy_job(
            tmp_path,
            name="hushed",
            steps=10_000,
            workers={"min": 2, "max": 3},
            copies={"copy_every": 0},
            checkpoint={"save_every": 100_000},
            data={"dataset": "tests.support.toys:Sums", "args": {"samples": 1_280_000}},
            deadlines={"grow_debounce_s": 30, "fence_s": 30, "silence_s": 60, "stop_s": 5},
            **LIGHT,
        )
        try:
            chaos = trial(job, act_by(hush()), hash_it=False)
        finally:
            room.close()
    assert chaos.result.state == "Stopped" and stopped
    run = Run.open(job)
    records = run.records()
    killed = {
        worker
        for record in records
        for action in record["actions"]
        if action["$"] == "Kill"
        for worker in action["workers"]
    }
    worlds = formed(records)
    # one that is still starting when the run ends is killed rightly
    members = {worker for world in worlds for worker in world.members}
    assert not killed & members - {*stopped}, f"given up although alive: {killed}"
    assert len(worlds) >= 2
    steps = ledger(run.segments())
    assert sorted(steps) == list(range(1, max(steps) + 1))
    assert_nothing_left(chaos)
