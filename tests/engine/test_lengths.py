"""Samples of skewed lengths: microbatches cut by length balance the workers, and keep the samples and the
promise of bits.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elastic.data.cursor import Cursor
from elastic.data.loader import Loader
from elastic.errors import DataError
from elastic.job import Job
from elastic.plan.batch import Deal
from elastic.train.checks import estimate
from elastic.train.checks.preflight import preflight
from elastic.train.session import lengths_of
from tests.support.segments import train_here
from tests.support.toys import small_job

STEPS = 2


class Skewed:
    """Samples that are runs of numbers, of log-normal lengths, up to ``most`` tokens; padded with -1 to the
    longest of the call.
    """

    def __init__(self, samples: int = 64, typical: float = 6.0, most: int = 48) -> None:
        draw = random.Random(7)
        self.sizes = [
            min(max(int(draw.lognormvariate(math.log(typical), 1.0)), 2), most) for _ in range(samples)
        ]

    def __len__(self) -> int:
        return len(self.sizes)

    def lengths(self, ids: tuple[int, ...]) -> list[int]:
        return [self.sizes[sample] for sample in ids]

    def read(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        longest = max(self.sizes[sample] for sample in ids)
        rows = [
            [(sample + 3 * place) % 29 if place < self.sizes[sample] else -1 for place in range(longest)]
            for sample in ids
        ]
        return {"tokens": torch.tensor(rows, dtype=torch.int64)}

    def fingerprint(self) -> str:
        return f"skewed-{self.sizes}"


def padded(dataset: Skewed, cursor: Cursor, microbatch: int, ranks: int, step: int) -> list[list[int]]:
    """Returns the tokens, with padding, that the loaders of all ranks read in ``step``, by round and rank."""
    deal, found = Deal(cursor.global_batch // microbatch, 1, (None,) * ranks), list[list[int]]()
    for rank in range(ranks):
        loader = Loader(dataset, cursor, microbatch, prefetch=0)
        found.append(
            [
                batch["tokens"].numel()
                for *_, batch in loader.microbatches(step, rank, deal)
                if batch is not None
            ]
        )
    return [list(each) for each in zip(*found, strict=True)]


@pytest.mark.fast
@pytest.mark.parametrize("ranks", [2, 4])
def test_b15_ranks_have_as_many_tokens_in_each_round(ranks: int) -> None:
    """B15: tokens of the largest rank, over the mean, in rounds of a corpus with log-normal lengths up to 8
    times the typical one.

    Ranks wait for each other in each round, so the rounds' largest are added.  The same steps have half the
    padded tokens.  The control is the same corpus dealt round-robin, as it is without the setting; it is
    worse with more ranks.
    """
    dataset, balance, tokens = Skewed(4096, 32.0, 256), dict[bool, float](), dict[bool, int]()
    for grouped in (True, False):
        cursor = Cursor(len(dataset), 512, 3, "permutation", dataset.lengths if grouped else None)
        rounds = [each for step in (1, 2, 3) for each in padded(dataset, cursor, 4, ranks, step)]
        tokens[grouped] = sum(map(sum, rounds))
        balance[grouped] = sum(map(max, rounds)) / (tokens[grouped] / ranks)
        by_rank = [sum(each) for each in zip(*rounds, strict=True)]
        assert not grouped or max(by_rank) / (sum(by_rank) / ranks) <= 1.1, "whole steps, too"
    assert balance[True] <= 1.1
    assert balance[False] > (1.5 if ranks == 4 else 1.25)
    assert tokens[True] < 0.6 * tokens[False]


@pytest.mark.fast
@given(
    st.lists(st.integers(1, 9), min_size=6, max_size=6),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 3]),
)
def test_no_other_order_has_less_padding_or_less_waiting(
    sizes: list[int], microbatch: int, ranks: int
) -> None:
    """Judged by all orders of six samples.  The control: of some lengths, the order as drawn is worse
    (below).
    """

    def cost(ids: tuple[int, ...]) -> tuple[int, int]:
        each = [max(sizes[sample] for sample in ids[at : at + microbatch]) for at in range(0, 6, microbatch)]
        return sum(each), sum(max(each[at : at + ranks]) for at in range(0, len(each), ranks))

    cursor = Cursor(6, 6, 1, "permutation", lambda ids: [sizes[sample] for sample in ids])
    padding, waiting = zip(*map(cost, itertools.permutations(range(6))), strict=True)
    found = cost(cursor.ids(1))
    assert found[0] == min(padding)
    if 6 // microbatch % ranks == 0:
        assert found[1] == min(waiting)


@pytest.mark.fast
def test_the_samples_of_a_step_stay_and_only_their_order_changes() -> None:
    """B15: each once in an epoch, those of one length as they are drawn, in any order of asking."""
    dataset = Skewed(60)
    plain, grouped = Cursor(60, 12, 5), Cursor(60, 12, 5, "permutation", dataset.lengths)
    assert Counter(sample for step in range(1, 11) for sample in grouped.ids(step)) == dict.fromkeys(
        range(60), 2
    )
    for step in (7, 1, 2, 3, 9, 8, 7, 1):
        drawn = plain.ids(step)
        assert (
            grouped.ids(step)
            == tuple(sorted(drawn, key=lambda sample: (-dataset.sizes[sample], drawn.index(sample))))
            != drawn
        )
        parts = [grouped.microbatch_ids(step, index, 4) for index in range(3)]
        assert tuple(itertools.chain(*parts)) == grouped.ids(step)
        assert grouped.idle_ids(step, 4) == parts[-1] and plain.idle_ids(step, 4) == plain.microbatch_ids(
            step, 0, 4
        )


def skewed_job(folder: Path, grouped: bool = True, **changes: Any) -> Job:
    return small_job(folder, data={"dataset": f"{__name__}:Skewed", "group_by_length": grouped}, **changes)


def test_b15_the_samples_of_a_step_are_those_without_the_setting(tmp_path: Path) -> None:
    """B15: the ledger has them in their order.  The bits are others, so that they are equal in
    ``test_covering.py`` says something.
    """
    one, other = (
        train_here(skewed_job(tmp_path / str(grouped), grouped), STEPS) for grouped in (True, False)
    )
    cursor = Cursor(64, 8, 0, "permutation", Skewed().lengths)
    assert [tuple(itertools.chain(*each.samples)) for each in one.outcomes] == [
        cursor.ids(step) for step in range(1, STEPS + 1)
    ]
    assert other.hash != one.hash
    assert [each.tokens for each in other.outcomes] == [each.tokens for each in one.outcomes], (
        "the same samples"
    )
    assert other.outcomes[0].loss == pytest.approx(one.outcomes[0].loss, rel=0.05)


class Wrong(Skewed):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def lengths(self, ids: tuple[int, ...]) -> list[int]:
        return {"few": [], "none": [None], "raises": 1 / 0 if self.how == "raises" else []}[self.how]  # type: ignore[return-value]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"dataset": "tests.support.toys:Sums"},
            (
                r"data\.group_by_length = true, and data\.dataset = "
                r".*Sums' has no lengths\(\); give it"
            ),
        ),
        (
            {"dataset": f"{__name__}:Wrong", "args": {"how": "few"}},
            r"lengths\(\) returned 0 numbers for 1 ids; it must return one number for each id",
        ),
        (
            {"dataset": f"{__name__}:Wrong", "args": {"how": "none"}},
            (r"failed with TypeError: .*; correct its lengths\(\), or leave"),
        ),
        (
            {"dataset": f"{__name__}:Wrong", "args": {"how": "raises"}},
            (r"failed with ZeroDivisionError: .*; correct its lengths\(\)"),
        ),
    ],
)
def test_a_dataset_that_tells_no_lengths_is_refused_before_a_worker_starts(
    tmp_path: Path, data: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        preflight(small_job(tmp_path, data={"group_by_length": True, **data}))


@pytest.mark.fast
def test_a_dataset_that_tells_lengths_passes(tmp_path: Path) -> None:
    """The control of the refusals above."""
    job = skewed_job(tmp_path)
    preflight(job)
    assert lengths_of(job, Skewed())((1, 0)) == Skewed().lengths((1, 0))


def test_auto_reckons_with_the_longest_samples(tmp_path: Path) -> None:
    """The first microbatch of a step has the longest.  The control: without the setting it is that of the
    first samples.
    """
    small = {"vocab": 29, "dim": 32, "layers": 1, "heads": 2}
    job = small_job(
        tmp_path,
        microbatch=4,
        global_batch=16,
        model_args=small,
        data={"dataset": f"{__name__}:Skewed", "group_by_length": True},
    )
    sizes = Skewed().sizes
    longest = estimate._longest(job)["tokens"]
    assert (longest >= 0).sum(dim=1).tolist() == sorted(sizes, reverse=True)[:4]
    grouped, plain = (
        job.replace(data=job.data.model_copy(update={"group_by_length": each})) for each in (True, False)
    )
    assert (
        (estimate._longest(plain)["tokens"] >= 0).sum(dim=1).tolist()
        == sizes[:4]
        != sorted(sizes, reverse=True)[:4]
    )
    assert (
        estimate.needs(grouped, ["none"])["none"].transient.alone
        > estimate.needs(plain, ["none"])["none"].transient.alone
    )
