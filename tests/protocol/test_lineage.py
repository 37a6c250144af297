"""The lineage is compared with a simple second implementation: a list with the generation of each step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.ids import Version
from elastic.protocol import lineage
from elastic.protocol.lineage import Lineage

pytestmark = pytest.mark.fast

TWINS = st.lists(st.integers(1, 6), max_size=12).map(sorted)
"""Generation of step 1, of step 2, ..."""


def pack(twin: list[int]) -> Lineage:
    result: Lineage = ()
    for step, generation in enumerate(twin, 1):
        result = lineage.extended(result, Version(step, generation))
    return result


def versions(twin: list[int]) -> list[Version]:
    return [Version(0, 0), *(Version(step, generation) for step, generation in enumerate(twin, 1))]


@given(TWINS)
def test_the_line_is_its_versions(twin: list[int]) -> None:
    packed = pack(twin)
    assert lineage.tip(packed) == versions(twin)[-1]
    everything = [Version(step, generation) for step in range(15) for generation in range(8)]
    assert [each for each in everything if lineage.contains(packed, each)] == sorted(versions(twin))
    assert len(packed) == len(set(twin))


@given(TWINS, st.data())
def test_cutting_keeps_what_is_before_and_names_what_is_after(twin: list[int], data: st.DataObject) -> None:
    version = data.draw(st.sampled_from(versions(twin)))
    packed = pack(twin)
    assert lineage.cut(packed, version) == pack(twin[: version.step])
    told = [
        (g, step) for g, first, last in lineage.abandoned(packed, version) for step in range(first, last + 1)
    ]
    assert told == [(generation, step) for step, generation in enumerate(twin, 1) if step > version.step]


@given(TWINS, st.integers(1, 5))
def test_a_jump_is_the_steps_in_between(twin: list[int], jump: int) -> None:
    """A report may be lost: the next one says that the steps before it were committed too."""
    generation = 7
    jumped = lineage.extended(pack(twin), Version(len(twin) + jump, generation))
    assert jumped == pack(twin + [generation] * jump)
