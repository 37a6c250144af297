"""Attempts, pauses and deadlines, on a clock that the test moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from storage.errors import Unavailable
from storage.objects.remote import RemotePolicy, Retryable

pytestmark = pytest.mark.fast


class Clock:
    """A clock that ``sleep`` and the store move; ``pauses`` lists the seconds of each sleep."""

    def __init__(self) -> None:
        self.now, self.pauses = 1000.0, list[float]()

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def policy(clock: Clock) -> RemotePolicy:
    times = {"attempt_s": 10.0, "call_s": 100.0, "first_pause_s": 1.0, "longest_pause_s": 5.0}
    return RemotePolicy(6, **times, clock=lambda: clock.now, sleep=clock.sleep, draw=lambda: 1.0)


class Store:
    """Fails ``failures`` times; each answer takes ``lasting`` seconds."""

    def __init__(self, clock: Clock, failures: int, lasting: float = 0.0) -> None:
        self.clock, self.failures, self.lasting, self.given = clock, failures, lasting, list[float]()

    def __call__(self, seconds: float) -> str:
        self.given.append(seconds)
        self.clock.now += min(self.lasting, seconds)
        if len(self.given) <= self.failures:
            raise Retryable(f"503 number {len(self.given)}")
        return "done"


def test_pauses_double_up_to_the_longest(policy: RemotePolicy, clock: Clock) -> None:
    assert policy.call("s3://b/k", Store(clock, failures=5)) == "done"
    assert clock.pauses == [1, 2, 4, 5, 5]


def test_jitter_is_full(policy: RemotePolicy, clock: Clock) -> None:
    draws = iter([0.0, 0.5, 0.25])
    replace(policy, draw=lambda: next(draws)).call("s3://b/k", Store(clock, failures=3))
    assert clock.pauses == [0.0, 1.0, 1.0]


def test_when_attempts_are_spent_it_says_everything(policy: RemotePolicy, clock: Clock) -> None:
    with pytest.raises(
        Unavailable,
        match=(
            r"s3://b/k cannot .*: gave up after 6 attempts in 17\.0 s; the "
            r"last error: 503 number 6"
        ),
    ):
        policy.call("s3://b/k", Store(clock, failures=99))


def test_the_deadline_is_of_the_whole_call(policy: RemotePolicy, clock: Clock) -> None:
    """The store never answers: each attempt is cut at its own deadline, and the last one at that of the call."""
    silent = Store(clock, failures=99, lasting=1e9)
    with pytest.raises(Unavailable, match=r"gave up after 3 attempts in 25\.0 s"):
        replace(policy, call_s=25).call("s3://b/k", silent)
    assert silent.given == [10, 10, 2]


def test_a_pause_beyond_the_deadline_is_not_begun(policy: RemotePolicy, clock: Clock) -> None:
    with pytest.raises(Unavailable, match=r"gave up after 2 attempts in 1\.0 s"):
        replace(policy, call_s=3).call("s3://b/k", Store(clock, failures=99))
    assert clock.pauses == [1]


def test_moving_bytes_takes_time(policy: RemotePolicy, clock: Clock) -> None:
    store = Store(clock, failures=1)
    policy.call("s3://b/k", store, policy.transfer_s(50 * 2**20))
    assert store.given == [60, 60]


def test_what_is_not_transient_goes_through_at_once(policy: RemotePolicy, clock: Clock) -> None:
    def refuse(seconds: float) -> None:
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        policy.call("s3://b/k", refuse)
    assert clock.pauses == []
