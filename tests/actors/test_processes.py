"""Processes of a run end when they are told to."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import pytest
import ray

from actors.processes import Process, end_on_sigterm, started, sweep
from elastic.train.counters import Counters, segment
from tests.support.processes import StillRunning, Watched


def test_a_later_process_of_the_same_number_is_not_taken_for_the_one_that_ended() -> None:
    """A keeper kills the processes that it follows.  The control: the process itself is found, by number and beginning."""
    own, began = os.getpid(), started(os.getpid())
    assert not Process(own, began).ended()
    with pytest.raises(ProcessLookupError, match="another one has its number"):
        Process(own, began - 1)
    child = subprocess.Popen(["true"])
    began = started(child.pid)
    child.wait()
    with pytest.raises(ProcessLookupError):
        Process(child.pid, began)
    with pytest.raises(ProcessLookupError):
        started(child.pid)


def test_counters_of_a_dead_process_are_removed_although_another_has_its_number() -> None:
    """The control: those of a living process stay, and those that do not say when it began."""
    for number, (pid, began) in enumerate([(os.getpid(), 0), (os.getpid(), started(os.getpid())), (os.getpid(), 1), (2**22 - 1, 1)]):
        counters = Counters(segment("swept-0001-abcdef", f"w{number}"), create=True)
        counters["pid"], counters["started"] = pid, began
        counters.close()
    sweep("swept")
    kept = [number for number in range(4) if segment("swept-0001-abcdef", f"w{number}").exists()]
    for number in kept:
        segment("swept-0001-abcdef", f"w{number}").unlink()
    assert kept == [0, 1]


class Busy:
    """An actor with a call that never ends, like that of a worker."""

    def __init__(self, ends: bool) -> None:
        self.begun = threading.Event()
        if ends:
            end_on_sigterm()

    def pid(self) -> int:
        return os.getpid()

    def trains(self) -> bool:
        return self.begun.wait(30)

    @ray.method(concurrency_group="life")
    def train(self) -> None:
        self.begun.set()
        threading.Event().wait()


@pytest.mark.parametrize("ends", [True, False], ids=["ours", "Ray's handler"])
def test_sigterm_ends_an_actor_that_is_busy(ends: bool) -> None:
    """The control is Ray's own handler: the process stays, and hears nothing any more."""
    actor = ray.remote(concurrency_groups={"life": 1})(Busy).options(num_cpus=0).remote(ends)
    with Watched(ray.get(actor.pid.remote())) as process:
        actor.train.remote()
        assert ray.get(actor.trains.remote())
        process.kill(signal.SIGTERM)
        if ends:
            assert process.wait(5).signal is signal.SIGTERM
            return
        with pytest.raises(StillRunning):
            process.wait(1)
        with pytest.raises(ray.exceptions.GetTimeoutError):
            ray.get(actor.pid.remote(), timeout=1)
    ray.kill(actor)
