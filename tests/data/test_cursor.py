"""The cursor decides which samples make up a step."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable
from itertools import accumulate, count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.data.cursor import SAMPLINGS, Cursor, Draw, _hash, _key, permuted

pytestmark = pytest.mark.fast

sizes = st.integers(1, 60)


def dumb_stream(cursor: Cursor, positions: int) -> list[int]:
    """Returns the samples at the first ``positions``, written out epoch after epoch."""
    epochs = -(-positions // cursor.samples)
    return [
        cursor.at(epoch * cursor.samples + slot) for epoch in range(epochs) for slot in range(cursor.samples)
    ][:positions]


@pytest.mark.parametrize("count", [*range(1, 130), 255, 256, 257, 1000, 4099])
def test_an_epoch_is_a_permutation(count: int) -> None:
    assert sorted(permuted(slot, count, b"key") for slot in range(count)) == list(range(count))


def test_a_hash_is_that_of_the_library_however_often_it_is_asked() -> None:
    """The order of all data rests on it.  The control: another tweak gives another hash."""
    asked = [(key, tweak, value) for value in (0, 7, 2**40) for tweak in (0, 3) for key in (b"one", b"two")]
    for key, tweak, value in 2 * asked:
        judge = hashlib.blake2b(value.to_bytes(8, "little"), key=key, salt=bytes([tweak, 0]), digest_size=16)
        assert (
            _hash(key, tweak, value)
            == int.from_bytes(judge.digest(), "little")
            != _hash(key, tweak + 1, value)
        )


def test_seeking_far_costs_nothing() -> None:
    cursor = Cursor(samples=10**12, global_batch=4096, seed=0)
    ids = cursor.microbatch_ids(step=10**9, index=5, microbatch=8)
    assert len(set(ids)) == 8 and max(ids) > 10**11


@given(sizes, sizes, st.integers(1, 5))
def test_n_epochs_consume_every_sample_exactly_n_times(samples: int, global_batch: int, epochs: int) -> None:
    """A11, A2: the id histogram is flat whenever the steps end at the end of an epoch, and never differs by
    more than one.
    """
    cursor = Cursor(samples, global_batch, seed=3)
    steps = -(-epochs * samples // global_batch)
    consumed = [sample for step in range(1, steps + 1) for sample in cursor.ids(step)]
    assert Counter(consumed[: epochs * samples]) == dict.fromkeys(range(samples), epochs)
    histogram = Counter(consumed)
    assert max(histogram.values()) - min(histogram.values()) <= 1


@settings(max_examples=40)
@given(sizes, sizes, st.sampled_from(SAMPLINGS), st.randoms(use_true_random=False))
def test_ids_are_a_function_of_the_step(
    samples: int, global_batch: int, sampling: str, rng: random.Random
) -> None:
    """A2: asked in any order, by anybody, in whatever pieces, a step has the same samples: those of the
    stream written out.
    """
    stream = dumb_stream(Cursor(samples, global_batch, 7, sampling), 5 * global_batch)
    for step in rng.sample(range(1, 6), 5):
        cursor = Cursor(samples, global_batch, 7, sampling)
        expected = tuple(stream[(step - 1) * global_batch : step * global_batch])
        assert cursor.ids(step) == expected
        for microbatch in (size for size in range(1, global_batch + 1) if global_batch % size == 0):
            parts = [
                cursor.microbatch_ids(step, index, microbatch) for index in range(global_batch // microbatch)
            ]
            assert tuple(itertools.chain(*parts)) == expected


def test_epochs_and_seeds_differ() -> None:
    orders = [Cursor(1000, 1000, seed).ids(epoch) for seed in range(5) for epoch in range(1, 6)]
    assert len(set(orders)) == len(orders)
    alike = [sum(map(int.__eq__, a, b)) for a, b in itertools.combinations(orders, 2)]
    assert sum(alike) / len(alike) < 1.5, "two random orders agree in one place on average"


def test_ids_are_for_ever() -> None:
    """A run that is resumed with a later version of this code must go on with the same samples."""
    assert Cursor(1000, 8, seed=1).ids(1) == (152, 718, 116, 527, 579, 529, 965, 337)
    assert Cursor(1000, 8, seed=1).ids(126) == (147, 93, 206, 774, 14, 601, 467, 370)
    assert Cursor(1000, 8, seed=1, sampling="with_replacement").ids(1) == (
        469,
        253,
        782,
        288,
        138,
        43,
        194,
        960,
    )


# ---- randomness: chi-square, for fixed keys


def chi_square(found: Counter[object], cells: int) -> float:
    """Returns how far the counts are from equal, in standard deviations of a chi-square of ``cells`` - 1
    degrees of freedom.
    """
    expected = sum(found.values()) / cells
    value = sum((count - expected) ** 2 / expected for count in found.values()) + expected * (
        cells - len(found)
    )
    return (value - (cells - 1)) / (2 * (cells - 1)) ** 0.5


def orders(count: int, times: int, order: Callable[[int, bytes], int]) -> Counter[object]:
    return Counter(tuple(order(slot, b"%d" % key) for slot in range(count)) for key in range(times))


@pytest.mark.parametrize(("count", "possible"), [(2, 2), (3, 6), (4, 24), (5, 120)])
def test_all_orders_of_a_few_samples_are_equally_likely(count: int, possible: int) -> None:
    assert (
        chi_square(orders(count, 25 * possible, lambda slot, key: permuted(slot, count, key)), possible) < 4
    )


def test_a_mere_rotation_would_be_noticed() -> None:
    """Negative control of the test above."""
    rotated = orders(4, 600, lambda slot, key: (slot + permuted(0, 4, key)) % 4)
    assert chi_square(rotated, 24) > 40


@pytest.mark.parametrize("count", [7, 23, 101])
def test_every_sample_is_equally_likely_in_every_slot(count: int) -> None:
    for slot in (0, 1, count // 2, count - 1):
        found = Counter[object](permuted(slot, count, b"%d" % key) for key in range(20 * count))
        assert chi_square(found, count) < 4


def test_neighbours_come_from_everywhere() -> None:
    found = Counter[object]()
    for key in range(40):
        order = [permuted(slot, 31, b"%d" % key) for slot in range(31)]
        found.update((b - a) % 31 for a, b in itertools.pairwise(order))
    assert chi_square(found, 30) < 4


def test_with_replacement_draws_evenly_and_repeats() -> None:
    """A2: drawing with replacement gives every sample evenly, and repeats some early."""
    ids = [sample for step in range(1, 101) for sample in Cursor(50, 40, 0, "with_replacement").ids(step)]
    assert chi_square(Counter[object](ids), 50) < 4
    assert len(set(ids[:50])) < 45, "a permutation would show all 50 first"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"samples": 0, "global_batch": 1, "seed": 0},
            "samples = 0 and global_batch = 1 must both be at least 1",
        ),
        (
            {"samples": 1, "global_batch": 1, "seed": 0, "sampling": "stream"},
            "'stream' must be one of permutation, with_replacement",
        ),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Cursor(**settings)  # type: ignore[arg-type]


@settings(max_examples=40)
@given(st.integers(2, 60), st.integers(1, 30), st.sampled_from(SAMPLINGS), st.data())
def test_avoided_samples_are_replaced_from_their_step_on_and_nothing_else_moves(
    samples: int, batch: int, sampling: str, data: st.DataObject
) -> None:
    """The control is a cursor that avoids nothing: it reads every other position alike, and the avoided
    samples too.
    """
    avoided = data.draw(
        st.dictionaries(st.integers(0, samples - 1), st.integers(1, 12), min_size=1, max_size=samples - 1)
    )
    plain, cursor = (Cursor(samples, batch, 3, sampling) for _ in range(2))
    cursor.avoid(avoided)
    for step in range(1, 15):
        for before, after in zip(plain.ids(step), cursor.ids(step), strict=True):
            if step >= avoided.get(before, 99):
                assert step < avoided.get(after, 99) and 0 <= after < samples
            else:
                assert after == before
        assert cursor.ids(step) == cursor.microbatch_ids(step, 0, batch), "asked again, it says the same"


def mixture(sizes: tuple[int, ...]) -> Cursor:
    """The parts take turns with the weights 1, 2, 3, …, in steps of twelve samples."""
    weights = tuple(map(float, range(1, len(sizes) + 1)))
    return Cursor(sum(sizes), 12, 3, draws=[Draw(0, 3, "permutation", weights)], sizes=sizes)


@settings(max_examples=40)
@given(st.lists(st.integers(2, 30), min_size=2, max_size=4), st.data())
def test_g1_a_sample_of_a_mixture_is_replaced_from_its_own_part(
    lengths: list[int], data: st.DataObject
) -> None:
    """G1: so each part keeps its turns, in every step, whatever is avoided of it.  The control: samples that
    earlier versions put into quarantine are replaced as then, by the formula written once more, and the turns
    are others.
    """
    ends = [*accumulate(lengths)]
    of = {sample: part for part, end in enumerate(ends) for sample in range(end - lengths[part], end)}
    kept = {data.draw(st.integers(end - size, end - 1)) for size, end in zip(lengths, ends, strict=True)}
    avoided = {
        each: data.draw(st.integers(1, 6))
        for each in data.draw(st.sets(st.integers(0, ends[-1] - 1), min_size=1)) - kept
    }
    old = {each for each in avoided if data.draw(st.booleans())}
    plain, cursor, before = (mixture(tuple(lengths)) for _ in range(3))
    cursor.avoid(avoided)
    before.avoid(avoided, old)
    for step in range(1, 9):
        for place, (drawn, own, any_) in enumerate(
            zip(plain.ids(step), cursor.ids(step), before.ids(step), strict=True)
        ):
            if step < avoided.get(drawn, 99):
                assert own == any_ == drawn
                continue
            assert of[own] == of[drawn] and step < avoided.get(own, 99)
            if drawn not in old:
                assert any_ == own
                continue
            drafts = (
                _hash(_key(3, "instead", 12 * (step - 1) + place), 0, attempt) % ends[-1]
                for attempt in count()
            )
            assert any_ == next(each for each in drafts if step < avoided.get(each, 99))


def test_g1_the_shares_of_a_mixture_stay_exact_beside_a_quarantine() -> None:
    """G1: half of the smallest part is avoided, and each part still has its turns to the sample.  The
    control: replaced from the whole pool, the part loses nearly half of its turns.
    """
    turns = []
    for anywhere in ((), range(10)):
        cursor = mixture((20, 100, 300))
        cursor.avoid(dict.fromkeys(range(10), 1), anywhere)
        ids = [sample for step in range(1, 101) for sample in cursor.ids(step)]
        assert not set(ids) & {*range(10)}
        turns.append(
            [sum(low <= each < high for each in ids) for low, high in ((0, 20), (20, 120), (120, 420))]
        )
    assert turns[0] == [200, 400, 600] and turns[1][0] < 120


def test_replacements_differ_by_position_and_are_sorted_by_length_like_others() -> None:
    cursor = Cursor(100, 50, 0, lengths=lambda ids: [each % 7 for each in ids])
    before = cursor.ids(1)
    cursor.avoid(dict.fromkeys(before[:10], 1))
    after = cursor.ids(1)
    assert not set(before[:10]) & set(after) and [each % 7 for each in after] == sorted(
        (each % 7 for each in after), reverse=True
    )
    assert len(set(after) - set(before)) > 1
