"""The bookkeeping of saves, against a dumb twin of sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.control.run import Saves, Saving
from elastic.control.saves import survivors
from elastic.ids import Version, WorkerId

pytestmark = pytest.mark.fast

WORKERS = [WorkerId(f"w{number}") for number in range(1, 5)]
STEPS = st.integers(1, 3)
WORK = st.one_of(
    st.tuples(st.just("begin"), STEPS, st.sets(st.sampled_from(WORKERS), min_size=1)),
    st.tuples(st.just("report"), STEPS, st.sampled_from(WORKERS)),
    st.tuples(st.just("lose"), st.just(0), st.sampled_from(WORKERS)),
)


@given(st.lists(WORK, max_size=25))
def test_a_save_is_complete_when_all_its_writers_reported_and_gone_when_one_cannot(work: list[tuple[str, int, object]]) -> None:
    saves = Saves()
    missing: dict[int, set[object]] = {}
    for kind, step, what in work:
        version = Version(step, 1)
        if kind == "begin":
            assert isinstance(what, set)
            saves, missing[step] = saves.put(Saving(version, tuple(sorted(what)))), set(what)
        elif kind == "report" and (known := saves.find(version)):
            saves = saves.put(known.report(what))
            missing[step].discard(what)
        elif kind == "lose":
            saves = survivors(saves, [what])
            missing = {each: writers for each, writers in missing.items() if what not in writers}
        assert [each.version.step for each in saves.pending] == sorted(missing)
        assert {each.version.step for each in saves.pending if each.complete} == {each for each, writers in missing.items() if not writers}
