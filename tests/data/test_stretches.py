"""L4: the samples of a run whose branches change batch, seed, sampling and weights are those of one sequence,
walked by hand.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.data.cursor import SAMPLINGS, Cursor, _hash, _key, permuted
from elastic.errors import JobError
from elastic.plan.mixture import shares
from elastic.plan.stretches import Stretch, Stretches, batches, ended, followed

pytestmark = pytest.mark.fast

Branches = list[tuple[int, Stretch]]
"""The branches of a run: the step after which each begins, and what its job says of the samples."""
Told = tuple[Stretches, Branches]

seeds = st.integers(0, 2)
samplings = st.sampled_from(SAMPLINGS)


@st.composite
def rules(draw: st.DrawFn, parts: int = 0) -> Stretch:
    """Returns what a job says of its samples: a batch that may grow, an order, and perhaps weights."""
    some = st.lists(st.integers(0, 5).map(float), min_size=parts, max_size=parts)
    weights = tuple(draw(some.filter(lambda them: not parts or any(them))))
    if draw(st.booleans()):
        return Stretch(
            0, draw(st.integers(1, 30)), seed=draw(seeds), sampling=draw(samplings), weights=weights
        )
    start, increment, sizes = draw(st.integers(1, 10)), draw(st.integers(1, 10)), draw(st.integers(1, 4))
    ramp = (start + increment * sizes, start, increment, draw(st.integers(1, 300)))
    return Stretch(0, *ramp, seed=draw(seeds), sampling=draw(samplings), weights=weights)


@st.composite
def runs(draw: st.DrawFn, parts: int = 0) -> Told:
    """Returns the stretches of a run, as its branches leave them, and the branches: the step after which each
    begins, and its rule.

    A branch may go back to before another one, which then is no part of the run.
    """
    told = [(0, draw(rules(parts)))]
    stretches = followed((), told[0][1])
    for _ in range(draw(st.integers(0, 4))):
        step, rule = draw(st.integers(0, 10)), draw(rules(parts))
        stretches = followed(ended(stretches, step), rule)
        told = [each for each in told if each[0] < step] + [(step, rule)]
    return stretches, told


class Deck:
    """Draws the samples of one dataset by hand: an epoch is a list, from which samples are taken one after
    the other.
    """

    def __init__(self, samples: int, *tag: object) -> None:
        self.samples, self.tag, self.epoch, self.taken = samples, tag, -1, samples
        self.order: list[int] | None = []
        self.seed = -1

    def take(self, rule: Stretch) -> int:
        if self.taken == self.samples:
            self.epoch, self.taken, self.seed = self.epoch + 1, 0, rule.seed
            key = _key(rule.seed, *self.tag, self.epoch)
            whole = [permuted(slot, self.samples, key) for slot in range(self.samples)]
            self.order = whole if rule.sampling == "permutation" else None
        elif rule.seed != self.seed and self.order is not None:
            rest, key = self.order[self.taken :], _key(rule.seed, *self.tag, self.epoch, self.taken)
            self.order[self.taken :] = [rest[permuted(slot, len(rest), key)] for slot in range(len(rest))]
        self.seed = rule.seed
        at = self.epoch * self.samples + self.taken
        self.taken += 1
        if self.order is None:
            return _hash(_key(rule.seed, *self.tag, "draw"), 0, at) % self.samples
        return self.order[self.taken - 1]


def sizes_by_hand(told: Branches, steps: int) -> Iterator[tuple[Stretch, int]]:
    """Yields the rule and the batch of each step: which share of the ramp is being consumed?"""
    consumed = 0
    for step in range(1, steps + 1):
        rule = [rule for after, rule in told if after < step][-1]
        batch = rule.global_batch
        if rule.start:
            levels = (rule.global_batch - rule.start) // rule.increment
            batch = min(batch, rule.start + rule.increment * (consumed * levels // rule.samples))
        yield rule, batch
        consumed += batch


@settings(max_examples=40)
@given(runs(), st.integers(1, 60), st.randoms(use_true_random=False))
def test_l4_every_step_has_the_samples_that_are_drawn_by_hand(
    run: Told, samples: int, rng: random.Random
) -> None:
    """L4, A10, A2: asked in any order; and each permuted epoch has every sample once, whatever changed in its
    middle.
    """
    stretches, told = run
    deck, expected, epochs = Deck(samples), dict[int, tuple[int, ...]](), dict[int, list[int]]()
    for step, (rule, batch) in enumerate(sizes_by_hand(told, 15), 1):
        expected[step] = ()
        for _ in range(batch):
            expected[step] += (deck.take(rule),)
            if deck.order is not None:
                epochs.setdefault(deck.epoch, []).append(expected[step][-1])
    for step in rng.sample(range(1, 16), 15):
        assert Cursor.of(stretches, samples).ids(step) == expected[step]
    for ids in epochs.values():
        assert max(Counter(ids).values()) == 1 and (len(ids) == samples or ids is epochs[max(epochs)])


@settings(max_examples=40)
@given(runs(), st.integers(1, 60))
def test_l4_a_change_of_the_batch_alone_leaves_the_sequence_as_it_is(run: Told, samples: int) -> None:
    """L4, A10: the judge is a run without branches and with one sample a step."""
    stretches = tuple(replace(each, seed=7, sampling="permutation") for each in run[0])
    plain = Cursor(samples, 1, 7)
    stream = list(chain(*(Cursor.of(stretches, samples).ids(step) for step in range(1, 16))))
    assert stream == [plain.at(position) for position in range(len(stream))]


def test_a_batch_that_began_anew_would_be_noticed() -> None:
    """Negative control of the tests above: the position as it was before there were stretches, a product of
    step and batch.
    """
    stretches = followed(ended((Stretch(0, 4),), 3), Stretch(0, 8))
    now = [Cursor.of(stretches, 100).ids(step) for step in range(1, 9)]
    before = [(Cursor(100, 4, 0) if step < 4 else Cursor(100, 8, 0)).ids(step) for step in range(1, 9)]
    assert max(Counter(chain(*now)).values()) == 1, "3 × 4 + 5 × 8 samples of 100"
    skipped = set(chain(*now)) - set(chain(*before))
    assert now[:3] == before[:3] and skipped, "with the product 12 samples are left out"


def test_l4_another_seed_shuffles_the_rest_of_the_epoch_at_once() -> None:
    """L4: the part that was drawn stays as it was, and so does which samples are left.  The control: the same
    seed changes nothing.
    """
    old, same = (
        Cursor(100, 10, 1),
        Cursor.of(followed(ended((Stretch(0, 10, seed=1),), 4), Stretch(0, 10, seed=1)), 100),
    )
    new = Cursor.of(followed(ended((Stretch(0, 10, seed=1),), 4), Stretch(0, 10, seed=2)), 100)
    was, rest = (
        [list(chain(*(each.ids(step) for step in range(5, 11)))) for each in (old, new)][index]
        for index in (0, 1)
    )
    assert [old.ids(step) for step in range(1, 5)] == [new.ids(step) for step in range(1, 5)]
    assert sorted(was) == sorted(rest) and was != rest
    assert sum(map(int.__eq__, was, rest)) < 10
    assert new.ids(11) == Cursor(100, 10, 2).ids(11) != old.ids(11), "the next epoch is that of the new seed"
    assert [old.ids(step) for step in range(1, 20)] == [same.ids(step) for step in range(1, 20)]


# ---- mixtures


@st.composite
def mixed_runs(draw: st.DrawFn) -> tuple[list[int], Stretches, Branches]:
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    return sizes, *draw(runs(len(sizes)))


@settings(max_examples=40)
@given(mixed_runs())
def test_l4_parts_go_on_where_they_stand_whatever_the_weights(
    run: tuple[list[int], Stretches, Branches],
) -> None:
    """L4, A11: each part is drawn by hand, from its own deck; its share is exact to one sample from each
    change on.
    """
    sizes, stretches, told = run
    stretches = tuple(replace(each, sampling="permutation") for each in stretches)
    firsts, cursor = (
        [sum(sizes[:part]) for part in range(len(sizes))],
        Cursor.of(stretches, sum(sizes), None, sizes),
    )
    decks = [Deck(size, "part", part) for part, size in enumerate(sizes)]
    histogram, counts, wanted = Counter[int](), [0] * len(sizes), tuple[int, ...]()
    for step, (rule, batch) in enumerate(sizes_by_hand(told, 15), 1):
        ids = cursor.ids(step)
        assert len(ids) == batch
        for sample in ids:
            if shares(rule.weights) != wanted:
                counts, wanted = [0] * len(sizes), shares(rule.weights)
            part = max(part for part, first in enumerate(firsts) if first <= sample)
            assert sample == firsts[part] + decks[part].take(replace(rule, sampling="permutation"))
            counts[part] += 1
            histogram[sample] += 1
            exact = [Fraction(weight * sum(counts), sum(wanted)) for weight in wanted]
            assert all(abs(count - share) < 1 for count, share in zip(counts, exact, strict=True))
    for part, size in enumerate(sizes):
        epochs = [histogram[firsts[part] + sample] for sample in range(size)]
        assert max(epochs) - min(epochs) <= 1, "each sample of a part comes once in each of its epochs"


def test_parts_that_began_anew_would_be_noticed() -> None:
    """Negative control of the test above: with the weights of the second stretch from the beginning, samples
    of a part are repeated.
    """
    first, second = Stretch(0, 10, weights=(1.0, 1.0)), Stretch(0, 10, weights=(4.0, 1.0))
    went_on = Cursor.of(followed(ended((first,), 5), second), 200, None, (100, 100))
    anew = [*(Cursor.of((first,), 200, None, (100, 100)).ids(step) for step in range(1, 6))]
    anew += [Cursor.of((second,), 200, None, (100, 100)).ids(step) for step in range(1, 6)]
    assert max(Counter(chain(*(went_on.ids(step) for step in range(1, 11)))).values()) == 1
    assert max(Counter(chain(*anew)).values()) == 2


def test_ids_are_for_ever() -> None:
    """A run that is resumed with a later version of this code must go on with the same samples."""
    stretches = followed(ended((Stretch(0, 8, seed=1),), 4), Stretch(0, 8, seed=2))
    assert Cursor.of(stretches, 1000).ids(4) == Cursor(1000, 8, 1).ids(4)
    assert Cursor.of(stretches, 1000).ids(5) == (183, 959, 963, 216, 797, 339, 49, 451)
    assert Cursor.of((Stretch(0, 8, weights=(0.7, 0.2, 0.1)),), 60, None, (10, 20, 30)).ids(3) == (
        14,
        3,
        1,
        37,
        9,
        7,
        2,
        19,
    )


# ---- the chain of stretches


@given(runs())
def test_stretches_are_stored_and_read(run: Told) -> None:
    stretches, _ = run
    assert tuple(Stretch.from_json(each.to_json()) for each in stretches) == stretches
    assert [each.until for each in stretches[:-1]] == sorted(
        {each.until for each in stretches[:-1]} - {0}
    ) and not stretches[-1].until


@given(runs(), st.integers(0, 30))
def test_a_branch_that_changes_other_things_changes_no_stretch(run: Told, step: int) -> None:
    stretches, _ = run
    last = next(each for each in stretches if not each.until or each.until >= step)
    again = followed(ended(stretches, step), replace(last, until=0))
    if last is stretches[-1]:
        assert again == stretches or step == stretches[-2].until
    assert [batches(again).of(each) for each in range(1, step + 1)] == [
        batches(stretches).of(each) for each in range(1, step + 1)
    ]


def test_a_step_before_the_branch_that_cannot_be_cut_is_named() -> None:
    """A run falls back to before its branch only if the checkpoint there is damaged."""
    cursor = Cursor.of(followed(ended((Stretch(0, 6),), 5), Stretch(0, 8)), 100)
    assert (cursor.microbatches(5, 2), cursor.microbatches(6, 4)) == (3, 2)
    with pytest.raises(
        JobError,
        match=(
            r"microbatch = 4: step 5 is before this branch and is done again, and its 6 samples.*until "
            r"step 5"
        ),
    ):
        cursor.microbatches(5, 4)
