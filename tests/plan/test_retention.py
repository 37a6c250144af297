"""L7: the rules of retention, against one that asks of each checkpoint whether a rule wants it."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.ids import Version
from elastic.plan.retention import Keep, StoredCheckpoint, reasons, victims, young

pytestmark = pytest.mark.fast
VERSIONS = st.builds(Version, st.integers(1, 12), st.integers(1, 3))
KEEPS = st.builds(Keep, st.sampled_from([0, 2, 3, 5]), st.integers(0, 4), st.booleans())
HOUR = 3600.0


def wanted(
    version: Version,
    saved: Collection[Version],
    keep: Keep,
    best: Version | None,
    needed: Collection[Version],
    fresh: Collection[Version],
) -> bool:
    """The slow rule: counts what stands between the version and what a rule asks for."""
    newer = [each for each in saved if each > version]
    older = [each for each in saved if each < version]
    if keep.last == 0 or len(newer) < keep.last or version in needed or version in fresh or not newer:
        return True
    if keep.best and (best is None or not any(each >= best for each in saved)):
        return True
    if keep.best and best is not None and version >= best and not any(each >= best for each in older):
        return True
    multiples = range(keep.every, 13, keep.every) if keep.every else ()
    return any(
        m <= version.step < m + keep.every and not any(m <= each.step for each in older) for m in multiples
    )


@given(st.data())
def test_l7_a_checkpoint_is_deleted_only_if_no_rule_keeps_it(data: st.DataObject) -> None:
    saved = data.draw(st.sets(VERSIONS, max_size=9))
    begun, spared, needed, fresh = (data.draw(st.sets(VERSIONS, max_size=4)) for _ in range(4))
    keep, best = data.draw(KEEPS), data.draw(st.none() | VERSIONS)
    abandoned = data.draw(st.sets(VERSIONS, max_size=4)) - saved
    found = [
        *(StoredCheckpoint(each, False) for each in saved | abandoned),
        *(StoredCheckpoint(each, True) for each in begun - saved - abandoned),
    ]
    kept = reasons(saved, keep, best, needed, fresh)
    assert set(kept) == {each for each in saved if wanted(each, saved, keep, best, needed, fresh)}
    gone = set(victims(found, kept, keep, {*spared, *needed}))
    newest = max(saved, default=Version(0, 0))
    assert gone == {
        each.version
        for each in found
        if each.version < newest
        and each.version not in kept
        and each.version not in spared | needed
        and (keep.last or each.version not in saved | abandoned)
    }
    assert not gone & {newest, *spared, *needed, *sorted(saved)[-max(keep.last, 1) :]}
    assert not {each for each in gone if each > newest}
    if not keep.last:
        assert not gone & (saved | abandoned), "the control: without a rule no checkpoint is deleted"


def test_the_rules_one_by_one() -> None:
    saved = [Version(step, 1) for step in range(100, 2100, 100)]
    steps = lambda keep, best=None, needed=(): [each.step for each in reasons(saved, keep, best, needed)]  # noqa: E731
    assert steps(Keep(last=3)) == [2000, 1900, 1800]
    assert steps(Keep(last=2, every=500)) == [2000, 1900, 1500, 1000, 500]
    assert steps(Keep(last=2, best=True), Version(700, 1)) == [2000, 1900, 700]
    assert steps(Keep(last=2, best=True), Version(701, 1)) == [2000, 1900, 800], (
        "the save was a few steps late"
    )
    assert len(steps(Keep(last=2, best=True))) == len(steps(Keep())) == 20, (
        "as long as the best is not known nothing is deleted"
    )
    assert steps(Keep(last=2), None, (Version(300, 1),)) == [2000, 1900, 300]
    named = reasons(saved, Keep(last=2, every=1000, best=True), Version(2000, 1), (Version(1000, 1),))
    assert named[Version(2000, 1)] == ("newest", "last", "every", "best") and named[Version(1000, 1)] == (
        "every",
        "branch",
    )


def test_l7_what_is_young_is_kept() -> None:
    """A save every ten minutes.  At an age of exactly an hour a checkpoint is no longer younger."""
    written = {Version(step, 1): 600.0 * step for step in range(1, 20)}
    found = young(written, written, Keep(last=2, younger_s=HOUR), now=600.0 * 19 + 1)
    assert sorted(each.step for each in found) == [14, 15, 16, 17, 18, 19]
    assert len(young(written, written, Keep(last=2, younger_s=HOUR), now=600.0 * 20)) == 5
    assert (
        young(written, written, Keep(last=2, younger_s=HOUR), now=1e9)
        == set()
        == young(written, written, Keep(last=2), now=0.0)
    )
    kept = reasons(written, Keep(last=2, younger_s=HOUR), None, (), found)
    assert [each.step for each in kept] == [19, 18, 17, 16, 15, 14] and kept[Version(14, 1)] == ("younger",)


def test_l7_a_clock_that_was_slow_or_fast_once_deletes_nothing_early() -> None:
    """Saves a minute apart: one was noted by a clock that stood at 1970, one by a clock of next year.  The
    latter counts as the save after it.
    """
    right = {Version(step, 1): 1e9 + 60.0 * step for step in range(1, 10)}
    wrong = right | {Version(6, 1): 0.0, Version(3, 1): 2e9}
    found = young(right, wrong, Keep(last=2, younger_s=330.0), now=1e9 + 60.0 * 9)
    assert sorted(each.step for each in found) == [3, 4, 5, 6, 7, 8, 9]
    found = young(right, wrong, Keep(last=2, younger_s=330.0), now=1e9 + 60.0 * 10)
    assert sorted(each.step for each in found) == [5, 6, 7, 8, 9], "neither is kept for ever"


def test_l7_a_node_whose_clock_is_slow_writes_all_newer_ones() -> None:
    """Saves ten minutes apart, all but the first by a clock that is 55 minutes slow: none goes before its
    time.
    """
    written = {Version(step, 1): 1e9 + 600.0 * step - (3300.0 if step else 0.0) for step in range(6)}
    found = young(written, written, Keep(last=2, younger_s=HOUR), now=1e9 + 3601.0)
    assert sorted(each.step for each in found) == [1, 2, 3, 4, 5]


@given(
    st.dictionaries(VERSIONS, st.none() | st.floats(-10.0, 10.0), max_size=8),
    st.floats(0.5, 5.0),
    st.floats(-10.0, 10.0),
)
def test_l7_wrong_and_unknown_times_keep_too_much_and_never_too_little(
    times: dict[Version, float | None], age: float, now: float
) -> None:
    """A version that is young by its own time stays, as do those after it, and right times keep nothing for
    longer.
    """
    known = {version: at for version, at in times.items() if at is not None and at <= now}
    keep = Keep(last=2, younger_s=age)
    found = young(times, {version: at for version, at in times.items() if at is not None}, keep, now)
    sure = {version for version, at in known.items() if now - at < age}
    assert found >= {each for each in times if any(each >= version for version in sure)}
    in_order = dict(zip(sorted(known), sorted(known.values()), strict=True))
    assert young(in_order, in_order, keep, now) == {
        version for version, at in in_order.items() if now - at < age
    }
    kept = reasons(times, keep, None, (), found)
    assert set(kept) >= set(sorted(times)[-2:]) | found
    assert set(kept) >= set(reasons(times, Keep(last=2), None, ())), "no other rule keeps less"


def test_what_is_kept_stays_kept_as_saves_are_added() -> None:
    """The rule is applied after each save to what it has left; it must leave the same as one look at all of
    them.
    """
    keep, left = Keep(last=3, every=400), list[Version]()
    for step in range(50, 5050, 50):
        left = sorted(reasons([*left, Version(step, 1)], keep, None, ()))
    assert left == sorted(reasons([Version(step, 1) for step in range(50, 5050, 50)], keep, None, ()))
    assert [each.step for each in left] == [*range(400, 5000, 400), 4900, 4950, 5000]
