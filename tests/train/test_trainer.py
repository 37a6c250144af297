"""One worker's two threads, in one process: orders come at awkward moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from elastic.engine.world import World
from elastic.errors import FencedOff
from elastic.ids import NodeId, Version, WorkerId
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import PAUSE
from elastic.protocol.events import Attached, Broken, Fenced, Here, Ready, StepDone
from elastic.protocol.member import Member
from elastic.protocol.plan import Plan
from elastic.train.apply_fence import ApplyFence
from elastic.train.gauges.counters import Counters
from elastic.train.loop import Trainer
from elastic.train.orders import Enter
from elastic.train.own_faults import InjectedError
from elastic.train.session import make_session
from storage.checkpoints import Checkpoints
from storage.objects import ObjectStore
from tests.support.patience import PATIENCE_S
from tests.support.toys import Own, toy_job

TRAINERS: list[Trainer] = []


class Fencing(Own):
    """The coordinator's fence reaches the worker in the middle of its healing; here, the model's
    initialisation sends it.
    """

    def init_weights(self) -> None:
        super().init_weights()
        for trainer in TRAINERS:
            trainer.fence(1)


def fencing() -> Fencing:
    return Fencing()


@contextmanager
def trainer_of(job: Job, report: Callable[[Any], None]) -> Iterator[Trainer]:
    """Yields a worker that has been told to form generation 1, alone."""
    with TemporaryDirectory() as folder:
        session = make_session(job, Counters(Path(folder) / "counters", create=True), prefetch=0)
        worker, store = WorkerId("w1"), TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        checkpoints = Checkpoints(ObjectStore.open(job.bucket), job.name)
        fence = ApplyFence(Member(worker, job.deadlines.lease_s))
        trainer = Trainer(
            session, fence, torch.device("cpu"), checkpoints, lambda event, shard=None: report(event)
        )
        TRAINERS.append(trainer)
        assert fence.member.heed(1)
        trainer.form(
            Plan(1, 1, Layout(1, 1), (worker,), Version(0, 0), "init", (), NodeId("n")),
            ("127.0.0.1", store.port),
        )
        try:
            yield trainer
        finally:
            TRAINERS.remove(trainer)
            session.close()


def run_to_its_end(trainer: Trainer, events: list[Any]) -> None:
    """Runs ``trainer`` until it ends; if it does not, ``events``, what it reported, are shown."""
    running = Thread(target=trainer.run, daemon=True)
    running.start()
    running.join(PATIENCE_S)
    assert not running.is_alive(), events


@pytest.mark.parametrize(
    "model", ["tests.train.test_trainer:fencing", "tests.support.toys:own"], ids=["fenced", "control"]
)
def test_what_arrives_after_the_fence_is_not_held(tmp_path: Path, model: str) -> None:
    """An aborted receive can look complete although it left garbage.  The control, which is not fenced, holds
    its shard and says so.
    """
    events: list[Any] = []
    with trainer_of(toy_job(tmp_path, model=model, model_args={}), events.append) as trainer:
        trainer.exit()
        trainer.run()
    fenced = model.startswith("tests.train")
    assert sum(type(event) is Ready for event in events) == (0 if fenced else 1)
    assert len(trainer.apply_fence.member.held) == (0 if fenced else 1)


@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "control"])
def test_a_fence_between_two_slices_ends_the_healing(tmp_path: Path, fenced: bool) -> None:
    """A bucket or a keeper would bring all the others too, for nothing.  The check comes before a fault that
    is due there.
    """
    fault = {"point": "healing", "step": 1, "world_rank": 0, "kind": "exception"}
    with trainer_of(toy_job(tmp_path, faults=[fault]), lambda event: None) as trainer:
        with trainer.apply_fence as member:
            plan = member.waiting
            assert plan is not None and member.enter(plan)
        if fenced:
            trainer.fence(1)
        world = World.alone(torch.device("cpu"))
        try:
            with pytest.raises(FencedOff if fenced else InjectedError):
                trainer._half_way(plan, world)
        finally:
            world.close()


@pytest.mark.parametrize(
    ("taken_over", "said_again", "entered"), [(False, False, [1]), (True, False, []), (True, True, [1])]
)
def test_a_plan_that_was_not_entered_is_void_for_the_next_coordinator(
    tmp_path: Path, taken_over: bool, said_again: bool, entered: list[int]
) -> None:
    """It may not know the plan, and its own would wait behind it; if it does, it sends the plan again.  The
    control: no takeover.
    """
    events: list[Any] = []

    def report(event: Any) -> None:
        events.append(event)
        if isinstance(event, Ready):
            trainer.settle(1, None)

    with trainer_of(toy_job(tmp_path), report) as trainer:
        order = trainer.orders.get()
        trainer.orders.put(order)
        assert isinstance(order, Enter)
        with trainer.apply_fence as member:
            assert member.heed(2 if taken_over else 1)
        if taken_over:
            trainer.attach()
        if said_again:
            trainer.form(order.plan, order.store)
        trainer.exit()
        trainer.run()
    assert [event.generation for event in events if isinstance(event, Here)] == entered


@pytest.mark.parametrize("ends", [False, True])
def test_a_process_in_which_an_abort_does_not_end_is_of_no_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: bool
) -> None:
    """The process says so, long before the forming deadline, and is replaced.  The control: the abort ends
    while the next world forms.
    """
    monkeypatch.setattr("elastic.train.loop.ABORT_S", 0.2 if not ends else PATIENCE_S)
    events: list[Any] = []
    stuck = Event()
    with trainer_of(toy_job(tmp_path), events.append) as trainer:
        trainer._abort = Thread(target=stuck.wait, args=(0.5 if ends else None,), daemon=True)
        trainer._abort.start()
        trainer.exit()
        trainer.run()
    stuck.set()
    broken = [event for event in events if isinstance(event, Broken)]
    signature = (
        (
            f"the abort before generation {broken[0].generation} has not ended in {broken[0].worker} within "
            "0.2 s"
        )
        if broken
        else ""
    )
    assert [(event.cause, event.signature) for event in broken] == ([] if ends else [("device", signature)])
    assert sum(isinstance(event, Ready) for event in events) == ends


def test_a_settlement_that_overtakes_the_pause_is_obeyed(tmp_path: Path) -> None:
    """Another member died between this one's boundary commit and its report: the fence and the settlement
    come before the pause.
    """
    events: list[Any] = []

    def report(event: Any) -> None:
        events.append(event)
        if isinstance(event, Ready):
            trainer.pause(1, save=False)
            trainer.go(1)
        if isinstance(event, StepDone) and event.outcome.boundary == PAUSE:
            trainer.fence(1)
            trainer.settle(1, None)
            trainer.exit()

    with trainer_of(toy_job(tmp_path), report) as trainer:
        run_to_its_end(trainer, events)
    assert [held.version.step for held in trainer.apply_fence.member.held] == [1]


@pytest.mark.parametrize("left", [True, False])
def test_one_that_has_left_says_what_it_was_in_last(tmp_path: Path, left: bool) -> None:
    """The coordinator that asks may know nothing of that generation.  In the control, the worker is still in
    the generation, at the boundary."""
    events: list[Any] = []

    def report(event: Any) -> None:
        events.append(event)
        if isinstance(event, Ready):
            trainer.pause(1, save=False)
            trainer.go(1)
        if isinstance(event, Fenced) and not left:
            trainer.exit()
        elif isinstance(event, Fenced) and not trainer.apply_fence.member.leaving:
            trainer.settle(1, None)
            trainer.exit()

    with trainer_of(toy_job(tmp_path), report) as trainer:
        run_to_its_end(trainer, events)
        events.clear()
        trainer.attach()
    attached, *_, fenced = (event for event in events if isinstance(event, Attached | StepDone | Fenced))
    assert isinstance(attached, Attached) and attached.plan is not None
    assert (attached.plan.generation, attached.stepping) == (1, not left)
    assert isinstance(fenced, Fenced) and fenced.generation == 1
    assert [held.version for held in fenced.held] == [Version(1, 1)] and fenced.outcomes[-1].step == 1


def test_an_answer_to_the_next_coordinator_waits_for_a_settlement_under_way(tmp_path: Path) -> None:
    """Prepared steps may still be applied during a settlement, so only what is held after it is certain."""
    events: list[Any] = []
    while_leaving: list[Any] = []

    def report(event: Any) -> None:
        events.append(event)
        if isinstance(event, Here) and len(events) == 1:  # ``attach`` says it again
            trainer.settle(1, None)
            trainer.attach()
            while_leaving.extend(events)
            trainer.exit()

    with trainer_of(toy_job(tmp_path), report) as trainer:
        run_to_its_end(trainer, events)
    assert any(isinstance(event, Attached) for event in while_leaving) and not any(
        isinstance(event, Fenced) for event in while_leaving
    )
    assert isinstance(events[-1], Fenced) and events[-1].generation == 1
