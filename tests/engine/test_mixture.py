"""Training on a mixture whose weights a branch changes: the parts get their shares, and the bits do not
depend on the layout.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.runs.run import Run
from tests.support.ranks import Ranks
from tests.support.segments import Trained, train, train_here
from tests.support.toys import small_job

MODEL = {"vocab": 29, "dim": 16, "layers": 1, "heads": 2, "dropout": 0.1}
SIZES = (48, 32, 80)
FIRST, SECOND, BRANCH, LAST = [5, 3, 2], [1, 1, 2], 6, 12


def mixed(folder: Path, weights: list[int], **changes: Any) -> Job:
    parts = [{"dataset": "tests.support.toys:Sums", "args": {"samples": samples}} for samples in SIZES]
    data = {"dataset": "elastic.data.mixture:Mixture", "args": {"parts": parts}, "weights": weights}
    return small_job(
        folder,
        **{"steps": LAST, "data": data, "model_args": MODEL, "global_batch": 16, "microbatch": 8, **changes},
    )


def by_part(*trained: Trained) -> list[Counter[int]]:
    """Returns how often each sample of each part was trained on, by the ledger."""
    found = [Counter[int](dict.fromkeys(range(size), 0)) for size in SIZES]
    for sample in chain(*(ids for each in trained for outcome in each.outcomes for ids in outcome.samples)):
        part = next(part for part in range(3) if sample < sum(SIZES[: part + 1]))
        found[part][sample - sum(SIZES[:part])] += 1
    return found


def test_l4_weights_are_changed_by_a_branch(ranks: Ranks, tmp_path: Path) -> None:
    """L4, A11: each part goes on in its own epoch; two layouts, with a reshape at the branch, have the bits
    of one member.

    The control: with the old weights to the end the bits and the shares are others.
    """

    def run(folder: Path, weights: list[int], *, alone: bool = True) -> tuple[Trained, Trained]:
        old = mixed(folder, FIRST)
        begun = train_here(old, BRANCH) if alone else train(ranks, old, Layout(2, 1), BRANCH)
        new = mixed(folder, weights, global_batch=32)
        assert "branch 2 of toy goes on from step 6: " in Run.look(new, branch=True).branch(0.0)
        new = Run.look(new).job
        return begun, train_here(new, LAST, begun.version) if alone else train(
            ranks, new, Layout(1, 3), LAST, begun.version
        )

    begun, went_on = run(tmp_path / "alone", SECOND)
    counts = [sum(each.values()) for each in by_part(begun)]
    assert [abs(count - 96 * weight / 10) < 1 for count, weight in zip(counts, FIRST, strict=True)] == [
        True
    ] * 3
    more = [sum(each.values()) - count for each, count in zip(by_part(begun, went_on), counts, strict=True)]
    assert more == [192 // 4, 192 // 4, 192 // 2], "32 samples of 6 steps are whole periods"
    for size, each in zip(SIZES, by_part(begun, went_on), strict=True):
        least = sum(each.values()) // size
        assert set(each.values()) <= {least, least + 1}, "no sample of an epoch is left out or repeated"
    assert run(tmp_path / "ranks", SECOND, alone=False)[1].hash == went_on.hash
    stayed = run(tmp_path / "stayed", FIRST)
    shares = [sum(each.values()) for each in by_part(*stayed)]
    assert stayed[1].hash != went_on.hash
    assert [abs(count - 288 * weight / 10) < 1 for count, weight in zip(shares, FIRST, strict=True)] == [
        True
    ] * 3
