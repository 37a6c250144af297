"""The lock between two threads: a fence comes before an update or after it, never within; what a lease or a
fence bars is not applied.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from elastic.errors import FencedOff
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.plan.transfer import Holding
from elastic.protocol.commit_record import Outcome
from elastic.protocol.events import Fenced
from elastic.protocol.member import Member
from elastic.protocol.plan import Plan
from elastic.state.shard import Shard
from elastic.train.apply_fence import ApplyFence
from elastic.train.own_faults import skew
from tests.support.cells import cell

pytestmark = pytest.mark.fast

GENERATION, STEP = 3, 8
BEFORE, AFTER = Version(STEP - 1, GENERATION), Version(STEP, GENERATION)
OUTCOME = Outcome(STEP, GENERATION, 1.0, (1.0,), (4,), ((0, 1),), True)
PATIENCE_S = 10.0


def plan(generation: int) -> Plan:
    workers = (WorkerId("w0"), WorkerId("w1"))
    return Plan(1, generation, Layout(1, 2), workers, BEFORE, "live", (), NodeId("n"))


def entered(found: ApplyFence, generation: int) -> bool:
    begun = plan(generation)
    with found as member:
        return member.form(begun) and member.enter(begun)


def stepping(*, prepared: bool = True, lease_s: float = 600.0) -> ApplyFence:
    """Returns the fence of a member that holds the state of the step before."""
    found = ApplyFence(Member(WorkerId("w1"), lease_s))
    assert entered(found, GENERATION)
    with found as member:
        member.healed(
            time.monotonic(), Holding(WorkerId("w1"), BEFORE, cell(2, 1)), Shard(BEFORE, cell(2, 1), {})
        )
        assert member.go(GENERATION)
        if prepared:
            member.prepare(STEP)
    return found


def fence(found: ApplyFence, generation: int = GENERATION) -> Fenced:
    with found as member:
        answer = member.fence(generation)
    assert answer is not None
    return answer


def versions(answer: Fenced) -> list[Version]:
    return [holding.version for holding in answer.held]


def assert_nothing_applied(found: ApplyFence) -> None:
    answer = fence(found)
    assert versions(answer) == [BEFORE] and answer.outcomes == ()


def test_an_update_without_a_fence_is_applied() -> None:
    """Control of the tests below."""
    found = stepping()
    with found.applying(OUTCOME):
        pass
    answer = fence(found)
    assert (versions(answer), answer.prepared, answer.outcomes) == ([AFTER], None, (OUTCOME,))
    (holding,) = answer.held
    assert (holding.worker, holding.cell) == ("w1", cell(2, 1))
    assert [memory.version for memory in found.member.held.values()] == [AFTER], "the shard says so, too"


@pytest.mark.parametrize("fenced", [GENERATION, GENERATION + 2])
def test_a_fence_before_the_commit_bars_it(fenced: int) -> None:
    """A fence of a later generation bars it too; its answer waits until the member leaves this one, and then
    tells what the member holds."""
    found, updates = stepping(), []
    with found as member:
        answer = member.fence(fenced)
    if fenced == GENERATION:
        assert answer is not None and (versions(answer), answer.prepared) == ([BEFORE], STEP)
    with pytest.raises(FencedOff) as caught, found.applying(OUTCOME):
        updates.append(1)
    assert not updates and not caught.value.lease
    if fenced == GENERATION:
        return assert_nothing_applied(found)
    assert answer is None
    with found as member:
        answer = member.leave()
    assert answer is not None and answer.generation == fenced
    assert (versions(answer), answer.prepared, answer.outcomes) == ([BEFORE], None, ())


def test_a_fence_of_an_older_generation_bars_nothing() -> None:
    found = stepping()
    with found as member:
        assert member.fence(GENERATION - 1) is None
    with found.applying(OUTCOME):
        pass
    assert versions(fence(found)) == [AFTER]


def test_a_late_fence_of_an_older_generation_lifts_none() -> None:
    found = stepping()
    fence(found)
    with found as member:
        member.fence(GENERATION - 1)
    with pytest.raises(FencedOff), found.applying(OUTCOME):
        raise AssertionError("an update that is barred")
    assert_nothing_applied(found)


def test_a_fence_before_the_gradients_are_complete_leaves_nothing_to_settle() -> None:
    """A fenced member prepares nothing more; otherwise others could commit a step that it said it cannot
    apply.
    """
    found = stepping(prepared=False)
    assert fence(found).prepared is None
    with pytest.raises(FencedOff), found as member:
        member.prepare(STEP)
    assert fence(found).prepared is None


def test_a_fenced_generation_cannot_be_entered() -> None:
    found = ApplyFence(Member(WorkerId("w1")))
    fence(found)
    assert not entered(found, GENERATION)
    assert entered(found, GENERATION + 1)


def test_a_lease_that_is_over_bars_the_update() -> None:
    found, updates = stepping(lease_s=-1.0), []
    with pytest.raises(FencedOff) as caught, found.applying(OUTCOME):
        updates.append(1)
    assert not updates and caught.value.lease
    assert_nothing_applied(found)


def test_what_the_coordinator_settled_is_applied_all_the_same() -> None:
    """The member is fenced and its lease is over, but neither bars an outcome that is known to be the
    world's.
    """
    found = stepping(lease_s=-1.0)
    fence(found)
    with found.applying(OUTCOME, settled=True):
        pass
    assert versions(fence(found)) == [AFTER]


def test_an_update_that_fails_leaves_nothing_held() -> None:
    """Half an update is no version, so the member holds nothing."""
    found = stepping()
    with pytest.raises(ZeroDivisionError), found.applying(OUTCOME):
        raise ZeroDivisionError
    answer = fence(found)
    assert answer.held == ()


@contextmanager
def update_under_way(found: ApplyFence) -> Iterator[threading.Event]:
    """Another thread is inside the update until the event is set."""
    inside, finish = threading.Event(), threading.Event()

    def update() -> None:
        with found.applying(OUTCOME):
            inside.set()
            assert finish.wait(PATIENCE_S)

    thread = threading.Thread(target=update)
    thread.start()
    try:
        assert inside.wait(PATIENCE_S)
        yield finish
    finally:
        finish.set()
        thread.join(PATIENCE_S)


def test_a_fence_waits_for_the_update_under_way_and_says_applied() -> None:
    found = stepping()
    answers: list[Fenced] = []
    with update_under_way(found) as finish:
        asking = threading.Thread(target=lambda: answers.append(fence(found)))
        asking.start()
        asking.join(0.2)
        assert asking.is_alive() and not answers, "no answer while half an update is done"
        finish.set()
        asking.join(PATIENCE_S)
    (answer,) = answers
    assert (versions(answer), answer.prepared, answer.outcomes) == ([AFTER], None, (OUTCOME,))


def test_outcomes_are_kept_until_they_are_acknowledged_and_the_newest_always() -> None:
    """R6: the next coordinator's journal may end before the commit that the one before has acknowledged."""
    found, later = stepping(), replace(OUTCOME, step=STEP + 1)
    for each in (OUTCOME, later):
        with found.applying(each):
            pass
    with found as member:
        member.renewed(GENERATION, 0.0, False, STEP - 1)
        # late: about steps that have been given up since, and done again
        member.renewed(GENERATION - 1, 0.0, False, STEP + 1)
    assert fence(found).outcomes == (OUTCOME, later)
    with found as member:
        member.renewed(GENERATION, 0.0, False, STEP + 1)
    assert fence(found).outcomes == (later,)


@pytest.mark.parametrize("amount", [1.0, 0.02, -0.02])
def test_a_clock_that_is_skewed_runs_so_much_too_fast(monkeypatch: pytest.MonkeyPatch, amount: float) -> None:
    """The fault ``clock_skew`` is compared with a clock that it does not touch, read before and after."""
    monkeypatch.setattr(time, "monotonic", time.monotonic)  # put back afterwards
    before = time.perf_counter()
    skew(amount)
    began, after = time.monotonic(), time.perf_counter()
    while (inner := time.perf_counter()) < after + 0.01:
        pass
    skewed, outer = time.monotonic() - began, time.perf_counter()
    assert (inner - after) * (1 + amount) <= skewed <= (outer - before) * (1 + amount)
