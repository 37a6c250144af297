"""Spikes are judged by the plain formulas of the robust z-score, and blame no more of a step than makes it
one.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.protocol import spikes
from elastic.protocol.commit_record import Outcome, Spike
from elastic.protocol.spikes import (
    ENOUGH,
    LEAST,
    Held,
    SpikeRule,
    after,
    heights_after,
    judged,
    most_loss,
    robust_z,
)

pytestmark = pytest.mark.fast

RULE = SpikeRule(window=16, z=6.0, skips=True, quarantines=True)
WARN = replace(RULE, skips=False, quarantines=False)
EACH = replace(RULE, microbatch_z=6.0)
PAST = [(2.0 + 0.01 * (i % 5), 1.0 + 0.1 * (i % 3)) for i in range(16)]


def step(*losses: float, number: int = 20, norm: float = 1.0, finite: bool = True) -> Outcome:
    """Returns a commit of microbatches of 10 terms and two samples each, with these mean losses, and with the
    norm of the mean gradient.
    """
    counts, samples = (10,) * len(losses), tuple((2 * i, 2 * i + 1) for i in range(len(losses)))
    return Outcome(
        number,
        1,
        (norm * 10 * len(losses)) ** 2,
        tuple(10 * loss for loss in losses),
        counts,
        samples,
        finite,
    )


@pytest.mark.parametrize(
    ("row", "held"),
    [
        ((5, 4), Held(5, 3, applied=False, anywhere=True)),
        ((0, 1), Held(0, 0, applied=False, anywhere=True)),
        ((0, -4), Held(0, 3, applied=False, anywhere=False)),
        ((-1, 4), Held(0, 3, applied=True, anywhere=True)),
        ((-6, -4), Held(5, 3, applied=True, anywhere=False)),
    ],
)
def test_a_row_of_the_quarantine_is_read_as_it_was_written(row: tuple[int, int], held: Held) -> None:
    """The rows are written by hand, as checkpoints have them: the sample, or -1 less it, and the first step
    that does not read it.
    """
    assert Held.of(row) == held and held.row == row and Held.of((0, 0)) is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(-1e6, 1e6))
def test_the_score_is_that_of_numpy(past: list[float], value: float) -> None:
    middle = np.median(past)
    deviation = max(1.4826 * np.median(np.abs(np.array(past) - middle)), LEAST * abs(middle))
    if deviation:
        assert robust_z(value, past) == pytest.approx((value - middle) / deviation, rel=1e-12, abs=1e-12)


def test_wild_values_hide_no_spike_as_they_would_from_a_mean() -> None:
    past = [*np.linspace(1.9, 2.1, 13), 50.0, 60.0, 70.0]
    assert robust_z(3.0, past) > 6 > (3.0 - np.mean(past)) / np.std(past)
    assert (
        robust_z(2.0, [2.0] * 9) == 0
        and robust_z(1.0, [0.0] * 9) == math.inf
        and robust_z(-1.0, [0.0] * 9) == -math.inf
    )


def test_g1_a_spike_is_found_in_the_loss_or_the_norm_and_only_with_a_whole_window() -> None:
    found = judged(PAST, step(2.0, 2.0, 2.0, 9.0), RULE)
    assert found.spike is not None and (found.spike.what, found.spike.usual, found.spike.skipped) == (
        "loss",
        np.median([a for a, _ in PAST]),
        True,
    )
    assert not found.applies and found.quarantined == (6, 7)
    norm = judged(PAST, step(2.0, 2.0, norm=9.0), RULE)
    logs = np.log([each for _, each in PAST])
    z = (np.log(9.0) - np.median(logs)) / (1.4826 * np.median(np.abs(logs - np.median(logs))))
    assert norm.spike is not None and norm.spike.z == pytest.approx(z, rel=1e-12)
    assert norm.spike is not None and norm.spike.what == "norm" and norm.quarantined == (), (
        "no microbatch is known to cause it"
    )
    assert judged(PAST[1:], step(2.0, 9.0), RULE).spike is None, "the window is not full"
    assert (
        judged(PAST, step(2.02, 2.01), RULE) == step(2.02, 2.01)
        and judged(PAST, step(1.0, 1.0), RULE).spike is None
    ), "the controls"
    told = judged(PAST, step(2.0, 9.0), WARN)
    assert told.spike is not None and told.applies and told.quarantined == ()


@given(st.lists(st.floats(1.5, 20.0), min_size=1, max_size=7))
def test_g1_the_fewest_microbatches_are_blamed(losses: list[float]) -> None:
    """G1: compared with all subsets of the step; a step of which more than half is bad blames the model, and
    no sample.
    """
    before = [loss for loss, _ in PAST]
    found = judged(PAST, step(*losses), RULE)
    if robust_z(sum(losses) / len(losses), before) <= RULE.z:
        assert found.quarantined == ()
        return
    enough = [
        left_out
        for number in range(1, max(len(losses) // 2, 1) + 1)
        for left_out in combinations(range(len(losses)), number)
        if number == len(losses)
        or robust_z(float(np.mean([x for i, x in enumerate(losses) if i not in left_out])), before) <= RULE.z
    ]
    fewest = min(map(len, enough), default=0)
    assert len(found.quarantined) == 2 * fewest
    if enough:
        chosen = [sample // 2 for sample in found.quarantined[::2]]
        assert sorted(losses[i] for i in chosen) == sorted(losses)[-fewest:]


def test_a_loss_that_is_not_finite_needs_no_window() -> None:
    found = judged([], step(2.0, math.nan, 2.0, finite=False), RULE)
    assert found.quarantined == (2, 3) and found.spike is None and not found.applies
    assert judged([], step(math.nan, math.nan, 2.0, finite=False), RULE).quarantined == (), "it is the model"
    assert judged([], step(2.0, math.nan, finite=False), replace(RULE, quarantines=False)).quarantined == ()
    assert judged(PAST, step(2.0, 2.0, norm=math.nan, finite=False), RULE).quarantined == (), (
        "only the gradient is not finite"
    )


def test_g1_a_noisy_but_healthy_curve_has_no_spike() -> None:
    """G1, the clean run: a falling loss with noise, and norms with a heavy tail.  The control: one wild step
    in it is found.
    """
    draw = random.Random(3)

    def curve(wild: int) -> list[int]:
        rule, past, found = SpikeRule(128, 6.0, True), list[tuple[float, float]](), []
        for number in range(1, 3001):
            loss = 2 + 8 * math.exp(-number / 300) + draw.gauss(0, 0.05) + 4 * (number == wild)
            outcome = judged(past, step(loss, loss, number=number, norm=draw.lognormvariate(0, 0.25)), rule)
            past = after(past, outcome, rule)
            found += [number] if outcome.spike else []
        return found

    assert curve(0) == [] and curve(1700) == [1700]


def test_the_past_has_the_steps_that_were_applied() -> None:
    fine, skipped = step(2.0, 2.0), judged(PAST, step(9.0, 2.0), RULE)
    assert after(PAST, fine, RULE) == [*PAST[1:], (2.0, fine.norm)]
    assert after(PAST, skipped, RULE) == PAST == after(PAST, step(math.nan, 2.0, finite=False), RULE)
    told = judged(PAST, step(9.0, 2.0), WARN)
    assert (
        told.spike == Spike("loss", robust_z(5.5, [loss for loss, _ in PAST]), 2.02, False)
        and after(PAST, told, WARN)[-1][0] == 5.5
    )


@given(st.lists(st.floats(-1.0, 9.0), min_size=ENOUGH, max_size=ENOUGH + 20))
def test_the_largest_loss_that_counts_is_that_of_numpy(heights: list[float]) -> None:
    level, middle = np.median([loss for loss, _ in PAST[-8:]]), np.median(heights)
    deviation = max(1.4826 * np.median(np.abs(np.array(heights) - middle)), LEAST * abs(level + middle))
    assert most_loss(PAST, heights, EACH) == pytest.approx(level + middle + 6 * deviation, rel=1e-12)
    assert most_loss(PAST[1:], heights, EACH) is None is most_loss(PAST, heights[: ENOUGH - 1], EACH), (
        "the window; too few are known"
    )
    assert (
        most_loss(PAST, heights, RULE)
        is None
        is most_loss([(0.0, 1.0)] * 16, [0.0] * ENOUGH + [0.3] * (ENOUGH // 2), EACH)
    )


@pytest.mark.parametrize(("falls", "wide"), [(0.0, 0.3), (3.0, 0.1)], ids=["noisy", "learning"])
def test_g1_a_healthy_run_leaves_nothing_out_and_a_noisy_microbatch_is_found(
    falls: float, wide: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G1: normal losses about a level that stays or falls from 6 to 3, of one to eight microbatches a step,
    from a full window and no microbatch on.  One that is 12 deviations higher is found.  The controls: judged
    by the first few of them, some noisy ones are left out; judged by losses instead of their heights above
    the newest steps, the high one of the model that learns is not found.
    """

    def left_out(noisy: int = 0) -> int:
        found = 0
        for seed, size in product(range(6), (1, 2, 8)):
            draw, heights = random.Random(seed), list[float]()
            past = [(3.0 + falls + draw.gauss(0, wide), 1.0) for _ in range(16)]
            for number in range(120):
                level = 3.0 + falls * math.exp(-number / 40)
                outcome = step(
                    *(
                        level + draw.gauss(0, wide) + 12 * wide * (number == noisy and not index)
                        for index in range(size)
                    )
                )
                most = most_loss(past, heights, EACH)
                found += most is not None and any(loss > most * 10 for loss in outcome.losses)
                heights = heights_after(heights, past, judged(past, outcome, EACH, most), 1024)
                past = after(past, outcome, EACH)
        return found

    assert (left_out(), left_out(119)) == (0, 6 * 3)
    monkeypatch.setattr(spikes, "ENOUGH", 2)
    assert (left_out() > 0) == (falls == 0)
    monkeypatch.setattr(spikes, "ENOUGH", ENOUGH)
    monkeypatch.setattr(spikes, "_level", lambda past: 0.0)
    assert (left_out(119) < 6 * 3) == (falls > 0)


def test_g1_a_microbatch_is_left_out_where_the_step_is_no_spike() -> None:
    """G1: the step counts the others as if the one had not been there.  The controls: judged as a whole it is
    no spike; all losses are below the limit; and a step of which more than half is above it is skipped, with
    nobody to blame.
    """
    noisy = step(2.0, 2.0, 2.05, 2.4, 2.0, 2.0)
    assert judged(PAST, noisy, EACH) == noisy
    found = judged(PAST, noisy, EACH, 2.3)
    assert (found.left_out, found.spike, found.applies, found.quarantined) == ((3,), None, True, (6, 7))
    rest = replace(noisy, losses=(20.0, 20.0, 20.5, 20.0, 20.0), counts=(10,) * 5, samples=noisy.samples[1:])
    assert (found.loss, found.tokens, found.norm) == (rest.loss, rest.tokens, rest.norm)
    assert judged(PAST, noisy, replace(EACH, quarantines=False), 2.3) == replace(found, quarantined=())
    assert judged(PAST, noisy, EACH, 2.5) == noisy
    lost = judged(PAST, noisy, EACH, 1.9)
    assert (
        not lost.applies
        and lost.spike == Spike("microbatches", 6, 1.9, True)
        and lost.left_out == lost.quarantined == ()
    )
    single = judged(PAST, step(2.05), EACH, 2.03)
    assert not single.applies and single.quarantined == (0, 1), "the only microbatch is the one to blame"
    without_terms = replace(noisy, losses=(20.0, 20.0, 20.5, 0.5, 20.0, 20.0), counts=(10, 10, 10, 0, 10, 10))
    assert judged(PAST, without_terms, EACH, 2.3) == without_terms
    half = judged(PAST, step(2.05, 2.05, 2.0, 2.0), EACH, 2.03)
    assert half.left_out == (0, 1) and half.applies


def test_a_rule_that_only_warns_says_what_it_would_leave_out_and_counts_all() -> None:
    """The judge is the same rule that skips.  The controls: all losses are below the limit; the step is not
    finite; and it is a spike.
    """
    rule = replace(WARN, microbatch_z=6.0)
    noisy = step(2.0, 2.0, 2.05, 2.4, 2.0, 2.0)
    for limit, expected in ((2.3, (3,)), (1.9, tuple(range(6))), (2.5, ())):
        found, skips = judged(PAST, noisy, rule, limit), judged(PAST, noisy, EACH, limit)
        assert found.warned == expected and (len(expected) > 3 or expected == skips.left_out)
        assert replace(found, warned_loss=None) == noisy and (found == noisy) == (not expected)
        assert (found.loss, found.norm, found.tokens, found.applies) == (
            noisy.loss,
            noisy.norm,
            noisy.tokens,
            True,
        )
    lost = step(2.0, math.nan, finite=False)
    assert judged(PAST, lost, rule, 1.0) == lost
    spike = judged(PAST, step(2.0, 2.0, 2.0, 9.0), rule, 2.3)
    assert spike.warned == (3,) and spike.spike is not None and not spike.spike.skipped and spike.applies
    low, skips = (
        heights_after([], PAST, judged(PAST, noisy, rule, 2.3), 9),
        heights_after([], PAST, judged(PAST, noisy, EACH, 2.3), 9),
    )
    assert low == skips and len(low) == 5, "later microbatches are judged by what a run that skips would know"


def test_g1_what_remains_of_a_step_is_judged_as_a_whole() -> None:
    found = judged(PAST, step(9.0, 4.0, 2.0, 2.0, 2.0, 2.0), EACH, 5.0)
    assert (
        found.left_out == (0,)
        and found.spike is not None
        and found.spike.what == "loss"
        and not found.applies
    )
    assert found.quarantined == (0, 1, 2, 3)
    strange = judged(PAST, step(math.nan, 2.0, 2.0), EACH, 5.0)
    assert strange.left_out == (0,) and strange.applies and strange.quarantined == (0, 1), (
        "its gradient was finite all the same"
    )
    assert judged(PAST, step(math.nan, 2.0, 2.0, finite=False), EACH, 5.0).left_out == ()


def test_the_newest_microbatches_that_counted_are_remembered() -> None:
    level = float(np.median([loss for loss, _ in PAST[-8:]]))
    fine = judged(PAST, step(2.0, 2.1, 2.4), EACH, 2.3)
    assert heights_after([1.0, 1.5], PAST, fine, 3) == [1.5, 2.0 - level, 2.1 - level]
    assert heights_after([1.0], PAST, replace(fine, counts=(10, 0, 10)), 3) == [1.0, 2.0 - level]
    assert (
        heights_after([1.0], PAST, step(2.0, finite=False), 3)
        == [1.0]
        == heights_after([1.0], PAST, judged(PAST, step(9.0), EACH), 3)
    )
    assert heights_after([], [], fine, 3) == [], "nothing is before it"
