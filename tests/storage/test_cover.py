"""Interval arithmetic on slices is compared with simple functions that look at every element."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.checkpoints.cover import check_exact_cover, describe
from storage.checkpoints.index import Index, TensorGroup
from storage.errors import Incomplete
from storage.slices import Slice, Tensor

pytestmark = pytest.mark.fast
SIZES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Slice:
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return Slice("w", "parameter", tuple(a for a, _ in ends), tuple(b for _, b in ends))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Slice]:
    """Draws the parts of a whole tensor that is cut in two up to six times."""
    parts = [Tensor("w", "parameter", "F32", shape).whole()]
    for _ in range(draw(st.integers(0, 6))):
        part = parts.pop(draw(st.integers(0, len(parts) - 1)))
        if not shape:
            parts.append(part)
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(part.start[dim], part.stop[dim]))
        middle_stop = (*part.stop[:dim], at, *part.stop[dim + 1 :])
        middle_start = (*part.start[:dim], at, *part.start[dim + 1 :])
        parts += [
            Slice("w", "parameter", part.start, middle_stop),
            Slice("w", "parameter", middle_start, part.stop),
        ]
    return parts


def elements(part: Slice) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(a, b) for a, b in zip(part.start, part.stop, strict=True))))


@given(
    SIZES.flatmap(lambda shape: st.tuples(st.just(shape), tilings(shape), boxes(shape), st.integers(0, 9)))
)
def test_covering_finds_each_wanted_element_once(
    case: tuple[tuple[int, ...], list[Slice], Slice, int],
) -> None:
    shape, stored, wanted, dropped = case
    kept = [part for number, part in enumerate(stored) if number != dropped]
    there = {index for part in kept for index in elements(part)}
    group = TensorGroup(
        (Tensor("w", "parameter", "F32", shape),),
        tuple((f"file {n}", (part.start, part.stop)) for n, part in enumerate(kept)),
    )
    index = Index((group,), {})
    if there >= set(elements(wanted)):
        parts = [(held, part) for _, held, part in index.covering(wanted)]
        assert Counter(index for _, part in parts for index in elements(part)) == Counter(elements(wanted))
        assert all(set(elements(part)) <= set(elements(held)) for held, part in parts)
    else:
        with pytest.raises(Incomplete, match="parameter/w"):
            index.covering(wanted)


@given(
    SIZES.flatmap(
        lambda shape: st.tuples(st.just(shape), st.one_of(tilings(shape), st.lists(boxes(shape), max_size=5)))
    )
)
def test_exact_cover_is_each_element_once(case: tuple[tuple[int, ...], list[Slice]]) -> None:
    shape, parts = case
    tensor = Tensor("w", "parameter", "F32", shape)
    counted = Counter(index for part in parts for index in elements(part))
    if not parts or counted == Counter(elements(tensor.whole())):
        check_exact_cover([(tensor, part) for part in parts])
    else:
        with pytest.raises(Incomplete, match="parameter/w"):
            check_exact_cover([(tensor, part) for part in parts])


def test_what_is_wrong_is_named() -> None:
    tensor = Tensor("w", "parameter", "F32", (4, 2))
    low, high = Slice("w", "parameter", (0, 0), (2, 2)), Slice("w", "parameter", (2, 0), (4, 2))
    for pieces, problem in [
        ([(tensor, low)], "4 of 8 elements"),
        ([(tensor, low), (tensor, high), (tensor, low)], "w@0,0-2,2 is stored twice"),
        ([(tensor, low), (Tensor("w", "parameter", "F32", (4, 3)), high)], "describe it differently"),
        ([(tensor, low), (Tensor("w", "parameter", "BF16", (4, 2)), high)], "describe it differently"),
        ([(tensor, Slice("w", "parameter", (0, 0), (5, 2)))], "outside"),
        ([(tensor, Slice("v", "parameter", (0, 0), (4, 2)))], "outside"),
    ]:
        with pytest.raises(Incomplete, match=problem):
            check_exact_cover(pieces)
    check_exact_cover([(tensor, high), (tensor, low)])


def test_description() -> None:
    assert describe(Slice("a.b", "moment.exp_avg", (0, 16), (8, 32))) == "moment.exp_avg/a.b@0,16-8,32"
    assert describe(Tensor("updates", "scalar", "F32", ()).whole()) == "scalar/updates"
