"""Two rules decide when a save is over for the worker that copied it, and when a part of a save can never be
uploaded.
"""

from __future__ import annotations

import pytest

from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.protocol.actions import Save
from elastic.protocol.uploads import Told, hopeless

pytestmark = pytest.mark.fast
W1, W2 = WorkerId("w1"), WorkerId("w2")
SAVE = Save(Version(6, 2), 2, Layout(1, 1), (W1,), (NodeId("n1"),))
BEFORE, AFTER = (
    Save(version, version.generation, Layout(1, 1), (W1,), (NodeId("n1"),))
    for version in (Version(4, 2), Version(5, 3))
)


@pytest.mark.parametrize(
    ("saves", "generation", "version", "over"),
    [
        ((SAVE,), 2, Version(6, 2), False),  # it is under way
        ((SAVE,), 3, Version(9, 3), False),  # also while a later world trains
        # the one before is, and the worker's only mark is that of its newest save
        ((BEFORE,), 2, Version(6, 2), False),
        ((BEFORE,), 3, Version(9, 3), False),
        ((AFTER,), 3, Version(9, 3), True),  # a later world's save, which may be waiting for the slot
        ((), 2, Version(5, 2), False),  # the coordinator does not know of the save yet
        ((), 2, Version(6, 2), True),
        ((), 3, Version(5, 2), True),  # its step was given up
        # an older generation had come further; nothing of generation 2 is known yet
        ((), 1, Version(7, 1), False),
    ],
)
def test_a_save_is_over_once_it_is_not_named_by_who_knows_its_commit(
    saves: tuple[Save, ...], generation: int, version: Version, over: bool
) -> None:
    assert Told((1, 1), saves, generation, version).is_over(W1, Version(6, 2)) is over
    assert Told((1, 1), saves, generation, version).is_over(W2, Version(6, 2)) is (over or bool(saves)), (
        "of whom no part is wanted"
    )


@pytest.mark.parametrize(
    ("generation", "ended", "failed", "why"),
    [
        (2, False, False, ""),
        (1, False, False, ""),  # the worker has not entered the world of the save yet
        (2, True, False, "the worker ended before its copy was complete"),
        (3, False, False, "the worker went on without a copy"),
        (2, False, True, "the copy failed"),
    ],
)
def test_a_part_is_hopeless_once_its_copy_can_never_be_complete(
    generation: int, ended: bool, failed: bool, why: str
) -> None:
    assert hopeless(SAVE, generation, ended=ended, failed=failed) == why
