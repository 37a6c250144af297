"""The story of a long run takes a bounded room, and each reader gets each line once (N10)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.ids import WorkerId
from elastic.protocol.commit_record import Outcome, Usage
from elastic.protocol.events import Work
from elastic.report.story import LINES, Sentence, StepLine, Story

pytestmark = pytest.mark.fast


def test_a_story_keeps_its_newest_lines_and_repeats_none_to_a_reader_that_asks_for_what_follows() -> None:
    """A reader that asks often gets every line once; one that asks rarely lacks what was dropped meanwhile,
    and gets nothing twice.
    """
    story, often, rarely = Story(10), list[str](), list[str]()
    seen = late = 0
    for number in range(3 * LINES):
        story.say(0.0, f"{number}")
        if number % 700 == 0 or number == 3 * LINES - 1:
            seen, lines = story.since(seen)
            often += [line.text for line in lines]  # type: ignore[union-attr]
        if number in (LINES // 2, 3 * LINES - 1):
            late, lines = story.since(late)
            rarely += [line.text for line in lines]  # type: ignore[union-attr]
    assert len(story.lines) == LINES
    assert often == [f"{number}" for number in range(3 * LINES)]
    assert rarely == [f"{number}" for number in (*range(LINES // 2 + 1), *range(2 * LINES, 3 * LINES))]
    assert story.since(late) == (3 * LINES, [])
    assert len(story.since(0)[1]) == LINES


@pytest.mark.parametrize("queued", [True, False])
def test_steps_that_are_heard_all_at_once_have_no_rate_of_their_own(queued: bool) -> None:
    """After a takeover the steps that nobody had heard come within a millisecond.  The control: timed one by
    one they would seem to have millions of tokens a second.
    """
    story, known, members = (
        Story(10),
        Outcome(1, 1, 1.0, (1.0,), (1000,), ((0,),), True),
        (WorkerId("w1"), WorkerId("w2")),
    )
    for step in (1, 2, 3):
        story.step(100.0 + step / 1e4, replace(known, step=step), members, 0.1, queued=queued and step < 3)
    story.step(101.0003, replace(known, step=4), members, 0.1)
    story.step(103.0003, replace(known, step=5), members, 0.1, queued=True)
    story.step(103.0003, replace(known, step=6), members, 0.1)
    rates = [round(line.tokens_per_s) for line in story.lines if isinstance(line, StepLine)]
    assert rates[3:] == [1000, 1000, 1000], "two steps of the last two seconds"
    assert rates[:3] == ([0, 0, 0] if queued else [0, 10_000_000, 10_000_000])


def test_a_step_names_the_worker_that_waited_longest_for_data_and_the_memory_of_the_fullest_gpu() -> None:
    """Control: of a step of an older version, of which nothing was measured, the line says nothing."""
    story, known, members = (
        Story(10),
        Outcome(1, 1, 1.0, (1.0,), (1000,), ((0,),), True),
        (WorkerId("w1"), WorkerId("w2")),
    )
    story.step(1.0, replace(known, usage=Usage(2.0, 0.5, 70, 80), usage_ranks=(0, 1, 0, 0)), members, 0.1)
    story.step(2.0, known, members, 0.1)
    told = [
        (line.data_wait, line.waiting, line.peak_bytes) for line in story.lines if isinstance(line, StepLine)
    ]
    assert told == [(0.25, "w2", 70), (0.0, "", 0)]


def test_the_mfu_is_what_was_done_of_what_the_devices_could_have_done() -> None:
    """Two devices of 10 TFLOP/s could do 20e12 in the first step, of one second, and 80e12 in the second.
    Control: with an unknown peak there is no MFU, and steps that nobody has measured have no speed at all.
    """

    def told(*steps: tuple[float, Work | None]) -> tuple[list[tuple[float, float]], list[str]]:
        story = Story(10)
        for number, (took_s, work) in enumerate(steps, 1):
            outcome = Outcome(
                number,
                1,
                1.0,
                (1.0,),
                (1000,),
                ((0,),),
                True,
                usage=Usage(took_s, took_s / 4),
                usage_ranks=(0, 0, 0, 0),
            )
            story.step(float(number), outcome, (WorkerId("w1"), WorkerId("w2")), 0.1, work)
        story.say(9.0, story.speed.summary)
        lines = [(line.mfu, line.causal_mfu) for line in story.lines if isinstance(line, StepLine)]
        return lines, [line.text for line in story.lines if isinstance(line, Sentence)]

    work = Work(10e12, 5e12, 2, 10e12)
    assert told((1.0, work), (4.0, work)) == (
        [(0.5, 0.25), (0.125, 0.0625)],
        [
            "2 steps: 400 tokens/s, 2 TFLOP/s a worker, MFU 20.0% (10.0% with the causal half of "
            "attention), 25.0% of the time waiting for data"
        ],
    )
    assert told((1.0, replace(work, causal_flops=10e12)))[1] == [
        "1 step: 1,000 tokens/s, 5 TFLOP/s a worker, MFU 50.0% (attention is not counted), 25.0% of the "
        "time waiting for data"
    ]
    assert told((1.0, replace(work, peak_flops=0.0))) == (
        [(0.0, 0.0)],
        ["1 step: 1,000 tokens/s, 5 TFLOP/s a worker, 25.0% of the time waiting for data"],
    )
    assert told((0.0, work)) == ([(0.0, 0.0)], [])
    toy = replace(work, flops=1e6, causal_flops=1e6)
    assert told((1.0, replace(toy, peak_flops=0.0)))[1] == [
        "1 step: 1,000 tokens/s, 25.0% of the time waiting for data"
    ]
    assert told((1.0, toy))[1] == [
        "1 step: 1,000 tokens/s, 5e-07 TFLOP/s a worker, 25.0% of the time waiting for data"
    ]
    assert "MFU 0.5%" in told((1.0, replace(work, flops=0.1e12)))[1][0], "the control"
