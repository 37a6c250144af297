"""Requests to the autoscaler: when they are made, lowered, repeated and taken back.  ``test_autoscaler.py``
has a real one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from actors import cluster
from actors.demand import AGAIN_S, Demand
from elastic.config.sections import Workers
from elastic.control.run import Announced, Cluster, Finished, Members, RunState, Waiting, Worker
from elastic.ids import NodeId, WorkerId
from tests.support.toys import toy_job

N1 = NodeId("n1")


@pytest.fixture(scope="module", autouse=True)
def local_cluster() -> Iterator[None]:
    """No cluster."""
    return iter([None])


class Scaled:
    """The coordinator's side of one run, and an autoscaler that can have ``most`` workers."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, most: int = 100) -> None:
        job = toy_job(folder, workers={"min": 1, "max": 15, "spares": 1})
        self.run, self.most, self.asked = (
            RunState(1, 0, Waiting(0.0)),
            most,
            list[tuple[int, tuple[NodeId, ...]]](),
        )
        self.demand, self.answers = Demand(job, job.rules(), lambda: self.run, print), True
        patch.setattr(cluster, "grows", lambda: True)
        patch.setattr(cluster, "request", self._request)
        patch.setattr(
            cluster, "refused_request", lambda: self.asked[-1][0] if self.asked[-1][0] > self.most else 0
        )

    def _request(self, workers: Workers, number: int, avoid: tuple[NodeId, ...] = ()) -> None:
        if not self.answers:
            raise ray.exceptions.RayError("the head is gone")
        self.asked.append((number, avoid))

    def looks(self, *times: float) -> list[int]:
        """Returns the numbers of workers that were asked for at these ``times``."""
        before = len(self.asked)
        for now in times:
            self.demand._look(now)
        return [number for number, _ in self.asked[before:]]

    def joined(self, number: int) -> None:
        workers = {WorkerId(f"w{i}"): Worker(N1, "cpu", 0.0) for i in range(number)}
        self.run = replace(self.run, members=Members(workers))


def test_it_is_told_once_and_again_after_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = Scaled(tmp_path, monkeypatch)
    assert scaled.looks(0, 2, 4, AGAIN_S - 1) == [16]
    assert scaled.looks(AGAIN_S, AGAIN_S + 2) == [16]


def test_what_cannot_be_had_is_halved_towards_the_workers_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled = Scaled(tmp_path, monkeypatch, most=7)
    assert scaled.looks(0, 2, 4, 6) == [16, 8, 4]
    scaled.joined(4)
    assert scaled.looks(60, 62, 64, 66) == [16, 10, 7]
    scaled.joined(7)
    assert scaled.looks(120, 122, 124, 126, 128, 130) == [16, 11, 9, 8, 7]


def test_a_notice_and_the_end_change_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = Scaled(tmp_path, monkeypatch)
    scaled.looks(0)
    scaled.run = replace(scaled.run, cluster=Cluster(notices={N1: (Announced("aws", 9.0),)}))
    assert scaled.looks(2, 4) == [16] and scaled.asked[-1] == (16, (N1,))
    scaled.run = replace(scaled.run, stop="somebody asked")
    assert scaled.looks(6, 8) == [0]
    scaled.run = replace(scaled.run, stop="", state=Finished())
    assert scaled.looks(10) == []


def test_a_head_that_does_not_answer_is_told_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = Scaled(tmp_path, monkeypatch)
    scaled.answers = False
    with pytest.raises(ray.exceptions.RayError):
        scaled.looks(0)
    scaled.answers = True
    assert scaled.looks(2, 4) == [16]


def test_nothing_is_told_after_it_was_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = Scaled(tmp_path, monkeypatch)
    scaled.looks(0)
    scaled.demand.take_back().join(10)
    assert scaled.looks(AGAIN_S, 2 * AGAIN_S) == [] and [number for number, _ in scaled.asked] == [16, 0]
