"""Wait, shrink or use a spare: a table, and a second opinion that adds up stretches of time."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.plan.wager import SHRINK, SPARE, TELLING, WAIT, Choice, Times, choose, pays, slower

pytestmark = pytest.mark.fast

TIMES = Times(reform_s=3.0, join_s=9.0, step_s=1.0)
STAY_S = 3600.0


@pytest.mark.parametrize(
    ("here", "spares", "coming", "coming_s", "ended", "stay_s", "what"),
    [
        (7, 0, 0, 0.0, True, STAY_S, SHRINK),  # nobody else is there
        (7, 1, 0, 0.0, True, STAY_S, SPARE),
        (7, 1, 0, 0.0, False, STAY_S, SPARE),
        (7, 1, 0, 0.0, False, 60.0, SHRINK),  # an eighth of a minute is less than the pauses
        (7, 0, 1, 2.0, True, STAY_S, WAIT),
        (7, 0, 1, 9.0, True, STAY_S, SHRINK),  # 3 s of pause and 9 s / 8 are less than 9 s
        (1, 0, 1, 5.0, True, STAY_S, WAIT),  # half of the work waits with the one that is left
        (7, 0, 1, 2.0, True, 60.0, SHRINK),  # who stays a minute is not waited for
        (7, 0, 1, 2.0, False, STAY_S, SHRINK),  # a world that steps never waits
        (0, 0, 1, 500.0, True, STAY_S, WAIT),  # nobody is left
        (6, 1, 1, 2.0, True, STAY_S, WAIT),
    ],
)
def test_the_table(
    here: int, spares: int, coming: int, coming_s: float, ended: bool, stay_s: float, what: str
) -> None:
    found = choose(TIMES, here, spares=spares, coming=coming, coming_s=coming_s, ended=ended, stay_s=stay_s)
    assert found.what == what, found


def test_the_reason_has_the_numbers_and_the_wait_a_limit() -> None:
    found = choose(TIMES, 7, coming=1, coming_s=2.0, ended=True, stay_s=STAY_S)
    assert found == Choice(
        WAIT,
        "expected cost in accelerator-seconds: 120 if the run waits for workers that are starting, 130 if the run "
        "goes on without newcomers",
        wait_s=2.0 + 16.25 - 15.0,
    )


@pytest.mark.parametrize(
    ("few", "many", "microbatches", "share"),
    [(4, 5, 0, 0.2), (4, 5, 9, 0.2), (4, 5, 16, 0.0), (4, 6, 16, 0.25), (5, 6, 64, 2 / 13), (3, 3, 64, 0.0)],
)
def test_rounds_tell_how_much_slower_few_workers_are(
    few: int, many: int, microbatches: int, share: float
) -> None:
    assert slower(few, many, microbatches) == pytest.approx(share)


def test_a_newcomer_that_shortens_no_step_stays_a_spare() -> None:
    assert choose(replace(TIMES, microbatches=16), 4, spares=1, stay_s=STAY_S).what == SHRINK
    assert choose(replace(TIMES, microbatches=16), 4, spares=2, stay_s=STAY_S).what == SPARE


SECONDS = st.floats(0.1, 500.0)


@given(
    st.builds(Times, SECONDS, SECONDS, SECONDS, st.integers(0, 100)),
    st.integers(0, 12),
    st.integers(1, 9),
    st.integers(1, 9),
    st.floats(1.0, 1e4),
)
def test_spares_pay_if_they_are_the_best_choice(
    times: Times, here: int, spares: int, hosts: int, stay_s: float
) -> None:
    best = choose(times, here, spares=spares, hosts=hosts, stay_s=stay_s).what
    assert pays(times, here, spares, hosts, stay_s) == (best == SPARE)


@given(
    st.builds(Times, SECONDS, SECONDS, SECONDS, st.integers(0, 100)),
    st.integers(1, 12),
    st.integers(0, 3),
    st.integers(0, 3),
    SECONDS,
    st.floats(1.0, 1e4),
    st.booleans(),
)
def test_no_other_choice_costs_less(
    times: Times, here: int, spares: int, coming: int, coming_s: float, stay_s: float, ended: bool
) -> None:
    full = here + spares + coming
    speeds = {
        count: 1 / ceil(times.microbatches / count) if times.microbatches >= TELLING * full else count
        for count in range(1, full + 1)
    }

    def cost(*stretches: tuple[float, int]) -> float:
        """Returns the accelerator-seconds lost in stretches, each with its seconds and the workers that step."""
        return sum(s * full * (1 - speeds.get(count, 0.0) / speeds[full]) for s, count in stretches)

    def both(pause_s: float, count: int) -> float:
        """Returns the lower cost of staying so few, and of growing when the others come."""
        stays = cost((pause_s, 0), (stay_s, count))
        grows = cost((pause_s, 0), (coming_s, count), (times.join_s, 0), (times.leave_s, 0))
        return min(stays, grows) if coming else stays

    costs = {SHRINK: both(times.reform_s if ended else 0.0, here)}
    if spares:
        costs[SPARE] = both(times.join_s + times.leave_s, here + spares)
    if coming and ended:
        costs[WAIT] = cost((coming_s + times.join_s + times.leave_s, 0))
    found = choose(times, here, spares=spares, coming=coming, coming_s=coming_s, stay_s=stay_s, ended=ended)
    assert costs[found.what] <= min(costs.values()) * (1 + 1e-9) + 1e-9
    if found.what == WAIT:
        others = min(each for what, each in costs.items() if what != WAIT)
        assert full * (found.wait_s - coming_s) == pytest.approx(others - costs[WAIT], rel=1e-6, abs=1e-6)
    else:
        assert found.wait_s == 0.0
