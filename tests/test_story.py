"""The story of a long run takes a bounded room, and each reader gets each line once (N10)."""

from __future__ import annotations

import pytest

from elastic.report.story import LINES, Story

pytestmark = pytest.mark.fast


def test_a_story_keeps_its_newest_lines_and_repeats_none_to_a_reader_that_asks_for_what_follows() -> None:
    """A reader that asks often gets every line once; one that asks rarely lacks what was dropped meanwhile, and gets nothing twice."""
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
