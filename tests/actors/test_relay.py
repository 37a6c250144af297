"""N2: a node speaks for its workers, with one call for all; nothing is lost if its keeper stands still, dies, or does not know them.

The small tests have the product's outbox, orders and keeper methods in real processes, with no run around them.
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
from actors.objects import UsersCode
from actors.processes import leave_nothing, make_log_folder
from actors.relay import Orders
from actors.view import View
from actors.worker import Worker
from elastic.ids import NodeId, WorkerId
from elastic.protocol.events import Here, NodeRefused, StartFailed
from elastic.report.ledger import ledger
from elastic.runs.run import Run
from tests.support.chaos import Witness, assert_nothing_left, formed, trial
from tests.support.hollow import HollowCoordinator
from tests.support.nodes import Node, joined
from tests.support.patience import PATIENCE_S, until
from tests.support.relay import FENCE_S, PATIENT_S, Desk, Forgetful, Gatherer, Speaker
from tests.support.toys import toy_job

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
        self.workers = {worker: ray.remote(num_cpus=0)(Speaker).remote(worker, self.desk, fence_s) for worker in WORKERS}
        ray.get([self.keeper.follow.remote(worker, self.workers[worker]) for worker in known])
        ray.get([actor.speak_through.remote(self.keeper) for actor in self.workers.values()])
        self.pid = ray.get(self.keeper.pid.remote())
        self.counted = Counted(self.keeper)
        self.orders = Orders(1, self.workers, dict.fromkeys(WORKERS, HOME), {HOME: self.counted}, fence_s)

    def say(self, *numbers: int) -> None:
        ray.get([actor.say.remote(*numbers) for actor in self.workers.values()])

    def heard(self) -> dict[WorkerId, list[int]]:
        found = defaultdict[WorkerId, list[int]](list)
        for call in ray.get(self.desk.read.remote()):
            for event in call:
                found[event.worker].append(event.generation)
        return found

    def calls(self) -> int:
        return len(ray.get(self.desk.read.remote()))

    def obeyed(self) -> dict[WorkerId, list[Any]]:
        return {worker: ray.get(actor.read.remote()) for worker, actor in self.workers.items()}

    def all_obeyed(self, *orders: Any) -> bool:
        return all(found == list(orders) for found in self.obeyed().values())


@pytest.fixture
def office(request: pytest.FixtureRequest) -> Iterator[Office]:
    office = Office(**getattr(request, "param", {}))
    yield office
    os.kill(office.pid, signal.SIGCONT) if Path(f"/proc/{office.pid}").exists() else None
    office.orders.close()
    for actor in (office.desk, office.keeper, *office.workers.values()):
        ray.kill(actor)


def test_one_call_brings_what_all_workers_of_a_node_say_and_one_call_orders_all(office: Office) -> None:
    """N2: a node speaks, not a worker."""
    ray.get(office.desk.take.remote(0.1))  # so that messages gather, however the processes take turns
    for number in range(1, 12):
        office.say(number)
    until(lambda: len(office.heard()) == len(WORKERS), what="all were heard")
    until(lambda: all(found == list(range(1, 12)) for found in office.heard().values()), what="each in order, each once")
    assert office.calls() <= 11 * len(WORKERS) / 2, "fewer calls than half the messages"
    office.orders.send(WORKERS, "fence", 7, False)
    office.orders.send(WORKERS, "settle", 7, None)
    until(lambda: office.all_obeyed((1, "fence", 7, False), (1, "settle", 7, None)), what=f"each once: {office.obeyed()}")
    assert office.counted.calls == 2


@pytest.mark.parametrize("office", [{"known": WORKERS[:2]}], indirect=True)
def test_a_worker_that_the_keeper_does_not_follow_gets_its_orders_directly(office: Office) -> None:
    office.orders.send(WORKERS, "go", 7)
    until(lambda: office.all_obeyed((1, "go", 7)), what=f"each once: {office.obeyed()}")


@pytest.mark.parametrize("office", [{"fence_s": FENCE_S}], indirect=True)
@pytest.mark.parametrize("fate", [signal.SIGSTOP, signal.SIGKILL])
def test_a_keeper_that_stands_still_or_dies_loses_nothing(office: Office, fate: signal.Signals) -> None:
    office.say(1)
    until(lambda: len(office.heard()) == len(WORKERS), what="all were heard")
    os.kill(office.pid, fate)
    office.say(2, 3)
    office.orders.send(WORKERS, "fence", 7, False)
    until(lambda: all({1, 2, 3} == set(found) for found in office.heard().values()), what=f"nothing is lost: {office.heard()}")
    until(lambda: office.all_obeyed((1, "fence", 7, False)), what=f"nothing is lost: {office.obeyed()}")
    office.orders.send(WORKERS, "settle", 7, None)
    until(lambda: all(found[-1][1] == "settle" for found in office.obeyed().values()), what="the next order, too")
    if fate == signal.SIGSTOP:
        assert office.counted.calls == 1, "nobody waits for the same keeper again"
        os.kill(office.pid, signal.SIGCONT)
        until(lambda: all(len(found) == 3 for found in office.obeyed().values()), what="what it passes on late arrives a second time")
        until(lambda: not office.orders._is_late(HOME), what="it has answered")
        office.orders.send(WORKERS, "go", 8)
        until(lambda: all(found[-1][1] == "go" for found in office.obeyed().values()), what="it passes on again")
        assert office.counted.calls == 2


def test_a_worker_that_cannot_start_is_heard_before_its_process_counts_as_gone(tmp_path: Path) -> None:
    desk = ray.remote(num_cpus=0, max_concurrency=2)(Desk).remote()
    ray.get(desk.take.remote(0.5))
    patience = {"fence_s": PATIENCE_S}  # it waits a tenth of that for the desk
    job = toy_job(tmp_path, name="refused", workers={"gpus": 1}, deadlines=patience)  # Ray gives it no GPU, so it finds none
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
    assert "workers.gpus = 1" in said[0].why and said[1].reason == "its node is refused", "the reason is said once"


def test_a_keeper_whose_coordinator_does_not_answer_says_so(office: Office) -> None:
    """The coordinator is dead for the keeper only: what the worker then sends directly waits for the next one."""
    event = Here(WORKERS[0], 1)
    assert ray.get(office.keeper.pass_on.remote((event,)), timeout=PATIENCE_S), "the control"
    ray.kill(office.desk)
    assert not ray.get(office.keeper.pass_on.remote((event,)), timeout=PATIENCE_S)


def test_one_call_asks_for_the_leases_of_all_workers_of_a_node(office: Office) -> None:
    """Each worker gets its own answer.  The control: those that do not ask at the same time make a call each."""
    ray.get(office.desk.take.remote(0.5))  # one call at a time, so that questions gather, however the processes take turns
    questions = [(worker, number) for number in range(3) for worker in WORKERS]
    answers = ray.get([office.keeper.renew.remote(worker, number) for worker, number in questions], timeout=PATIENCE_S)
    assert answers == [f"{worker} may step in {number}" for worker, number in questions]
    together = ray.get(office.desk.read_asked.remote())
    assert sum(together) == len(questions) and len(together) <= len(questions) / 2, f"fewer than half: {together}"
    ray.get(office.desk.take.remote(0.0))
    for worker in WORKERS:
        assert ray.get(office.keeper.renew.remote(worker, 1), timeout=PATIENCE_S)
    assert ray.get(office.desk.read_asked.remote())[len(together) :] == [1] * len(WORKERS), "the control"


@pytest.mark.parametrize("office", [{"fence_s": FENCE_S}], indirect=True)
def test_an_outbox_returns_to_a_keeper_that_was_late(office: Office) -> None:
    """While the keeper stands still, what a worker says goes directly.  Once it has answered, it passes on again."""
    first, actor = WORKERS[0], office.workers[WORKERS[0]]
    os.kill(office.pid, signal.SIGSTOP)
    for number in (1, 2):
        ray.get(actor.say.remote(number))
        until(lambda number=number: number in office.heard()[first], what="it goes directly")
    assert ray.get(actor.spoke_directly.remote()) == 2, "the control"
    os.kill(office.pid, signal.SIGCONT)
    until(lambda: office.heard()[first].count(1) == 2, what="the late one arrives, too")
    until(lambda: ray.get(actor.all_answered.remote()), what="the worker knows it")
    ray.get(actor.be_patient.remote())
    ray.get(actor.say.remote(3))
    until(lambda: 3 in office.heard()[first], what="it is heard")
    assert ray.get(actor.spoke_directly.remote()) == 2, "through the keeper"


def test_what_a_keeper_takes_with_it_is_sent_again(office: Office) -> None:
    """It answers once it has sent an order, which may not have arrived when it dies.  The control: nobody else sends it."""
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
    until(lambda: office.all_obeyed((1, "fence", 7, False), (1, "settle", 7, None)), what=f"each once: {office.obeyed()}")
    orders.lost(HOME)
    orders.send(WORKERS, "go", 8)
    until(lambda: office.all_obeyed((1, "fence", 7, False), (1, "settle", 7, None), (1, "go", 8)), what=f"{office.obeyed()}")
    orders.close()


def test_a_keeper_that_stands_still_while_a_worker_of_its_node_dies_costs_nobody_else(tmp_path: Path, monkeypatch: Any) -> None:
    """N2: the survivors there are fenced, and their answers arrive, although their keeper passes nothing on."""
    monkeypatch.setattr(launch, "Coordinator", HollowCoordinator)
    stopped: list[tuple[int, str, int, int]] = []

    def act(witness: Witness, view: View) -> bool:
        if view.state != "Running" or not view.workers.keys() <= witness.seen.keys():
            return False
        if not stopped and view.step >= 5:
            away = sorted(worker for worker, node in view.workers.items() if node == nodes["away"])
            if len(away) < 2:
                return False
            keeper = ray.get_actor(f"{view.token}/keeper-{nodes['away'][:12]}")
            pid = ray.get(keeper.__ray_call__.remote(lambda _: os.getpid()))
            os.kill(pid, signal.SIGSTOP)
            stopped.append((pid, away[0], view.generation, view.step))
            witness.seen[away[0]].process.kill()
        elif stopped and view.generation > stopped[0][2] and view.step >= stopped[0][3] + 5:
            os.kill(stopped[0][0], signal.SIGCONT)
            coordinator = living.attach(witness.job_name)
            assert coordinator is not None
            coordinator.stop.remote("enough was seen")
            return True
        return False

    with joined(tmp_path, Node("away", 4)) as nodes:
        job = toy_job(
            tmp_path,
            name="hushed",
            steps=10_000,
            workers={"min": 4, "max": 8},
            copies={"copy_every": 0},
            checkpoint={"save_every": 100_000},
            data={"dataset": "tests.support.toys:Sums", "args": {"samples": 1_280_000}},
            deadlines={"grow_debounce_s": 5, "fence_s": 30, "silence_s": 60, "stop_s": 5},
        )
        chaos = trial(job, act, hash_it=False)
    assert chaos.result.state == "Stopped" and stopped
    run = Run.open(job)
    records = run.records()
    killed = {worker for record in records for action in record["actions"] if action["$"] == "Kill" for worker in action["workers"]}
    worlds = formed(records)
    members = {worker for world in worlds for worker in world.members}  # one that is still starting when the run ends is killed rightly
    assert not killed & members - {stopped[0][1]}, f"given up although alive: {killed}"
    assert len(worlds) >= 2
    steps = ledger(run.segments())
    assert sorted(steps) == list(range(1, max(steps) + 1))
    assert_nothing_left(chaos)
