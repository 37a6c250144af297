"""A worker strikes itself when chaos asks for it, at the point that was named, and nothing waits for a point
that never comes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.worker import Worker
from elastic.protocol.faults import OWN_KINDS, Kind
from elastic.train import own_faults
from elastic.train.own_faults import FaultOrder, Faults, InjectedError, Seat

pytestmark = pytest.mark.fast

SEAT = Seat(generation=2, rank=0)
HELD_S = 0.4


class Pair(torch.nn.Module):
    """A block that returns its input too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.linear(x)


class Model(torch.nn.Module):
    """A model whose blocks return tensors, or tuples if ``pairs``."""

    def __init__(self, pairs: bool) -> None:
        super().__init__()
        self.pairs = pairs
        self.layers = torch.nn.ModuleList(Pair() if pairs else torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[1] if self.pairs else layer(x)
        return x


def hooks(model: torch.nn.Module) -> int:
    return sum(len(each._forward_hooks) for each in model.modules())


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("point", own_faults.INSIDE)
def test_a_point_inside_the_model_is_reached_by_a_job_without_faults(point: str, pairs: bool) -> None:
    found, model = Faults(()), Model(pairs)
    found.aim(1, model, SEAT)
    model(torch.ones(2, 4)).sum().backward()
    found.ask(FaultOrder("exception", "before_commit"))
    found.aim(2, model, SEAT)
    assert not hooks(model), "a model in which nothing is to happen is left alone"
    found.ask(FaultOrder("exception", point))
    found.aim(3, model, SEAT)
    if point == "backward":
        loss = model(torch.ones(2, 4)).sum()
        with pytest.raises(InjectedError):
            loss.backward()
    else:
        with pytest.raises(InjectedError):
            model(torch.ones(2, 4))
    found.aim(4, model, SEAT)
    model(torch.ones(2, 4)).sum().backward()
    assert hooks(model) == 1
    assert [each.point for each in found.asked] == ["before_commit"]


def test_the_next_model_is_watched_too() -> None:
    found, model = Faults(()), Model(False)
    found.ask(FaultOrder("exception", "forward"))
    found.aim(1, Model(False), SEAT)
    found.aim(1, model, Seat(generation=3, rank=0))
    with pytest.raises(InjectedError):
        model(torch.ones(2, 4))


def test_nothing_waits_behind_a_fault_whose_point_does_not_come() -> None:
    found = Faults(())
    for point in ("save", "before_commit", "in_update"):
        found.ask(FaultOrder("exception", point))
    for point in ("in_update", "before_commit"):
        with pytest.raises(InjectedError):
            found.strike(point, 1, SEAT)
        found.strike(point, 1, SEAT)
    found.ask(FaultOrder("exception", ""))
    with pytest.raises(InjectedError):
        found.strike("healing", 1, SEAT)
    assert [each.point for each in found.asked] == ["save"]


def test_the_words_are_those_of_the_vocabulary() -> None:
    assert set(own_faults.KINDS) == {*OWN_KINDS, Kind.CLOCK_SKEW}


@pytest.mark.parametrize("kind", ["node_kill", "SIGUSR2", "earthquake"])
def test_what_a_worker_cannot_do_to_itself_is_said(kind: str) -> None:
    wrong = f"kind = '{kind}' is not a fault that a worker can perform itself; these are SIGKILL, "
    with pytest.raises(ValueError, match=wrong):
        own_faults.perform(kind)
    with pytest.raises(ValueError, match=wrong):
        Faults(()).ask(FaultOrder(kind, ""))


@pytest.fixture
def worker() -> Any:
    """Returns a worker that has joined, without its process."""
    made = Worker.__new__(Worker)
    made.trainer = SimpleNamespace(session=SimpleNamespace(faults=Faults(())))  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("kind", ["held_gil", "clock_skew", "memory_hog", "exception"])
def test_a_worker_waits_for_the_point_whatever_the_kind(worker: Any, kind: str) -> None:
    worker.suffer(kind, "before_update", 0.1, 0.02)
    assert worker.trainer.session.faults.asked == [(kind, "before_update", 0.1, 0.02)]


def test_what_befalls_the_whole_process_is_performed_with_its_figures(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", time.monotonic)  # given back at the end
    true, done = time.monotonic, []
    monkeypatch.setattr(own_faults, "hold_the_gil", done.append)
    found = Faults(())
    for duration_s in (0.5, 0.0):
        found.ask(FaultOrder("held_gil", "save", duration_s))
        found.strike("save", 1, SEAT)
    assert done == [0.5, own_faults.HELD_S]
    found.ask(FaultOrder("clock_skew", "", amount=100.0))
    found.strike("save", 1, SEAT)
    began, skewed = true(), time.monotonic()
    while true() < began + 0.01:
        pass
    assert time.monotonic() - skewed > 0.5
    assert not worker.trainer.session.faults.asked


def test_no_other_thread_runs_while_the_interpreter_is_held() -> None:
    """The control: while this thread only sleeps, the other one runs."""
    ran, over = [time.monotonic()], threading.Event()

    def note() -> None:
        while not over.wait(0.005):
            ran.append(time.monotonic())

    def longest_gap(wait: Callable[[float], None]) -> float:
        del ran[:-1]
        wait(HELD_S)
        time.sleep(0.05)
        return max(after - before for before, after in pairwise(list(ran)))

    noting = threading.Thread(target=note)
    noting.start()
    held, slept = longest_gap(own_faults.hold_the_gil), min(longest_gap(time.sleep) for _ in range(3))
    over.set()
    noting.join()
    assert held >= HELD_S > slept
