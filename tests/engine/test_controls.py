"""Negative controls of the hash: the slightest thing that should change it does, injected around the product,
never through a switch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.data.cursor import Cursor
from elastic.engine.loss import next_token
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.runs.run import Run
from storage import slices
from tests.support.ranks import Ranks
from tests.support.segments import Trained, finish, train, train_here
from tests.support.toys import Sums, small_job

LAYOUT, STEPS = Layout(1, 2), 4
PLAIN = {
    "model_args": {"vocab": 29, "dim": 32, "layers": 2, "heads": 2, "dropout": 0.0},
    "global_batch": 16,
    "microbatch": 4,
}
"""The model has no dropout, so a sample's contribution does not depend on its place, and a swap changes only
the order of a sum.
"""


class Swapped(Sums):
    """Reads each of two samples where the other is asked for."""

    def __init__(self, pair: list[int], **args: Any) -> None:
        super().__init__(**args)
        self.other = dict(zip(pair, reversed(pair), strict=True))

    def read(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        return super().read(tuple(self.other.get(i, i) for i in ids))


class Marked(Sums):
    """Gives every microbatch the weight 1, except ``weight`` to the one that begins with the sample
    ``marked``.
    """

    def __init__(self, marked: int, weight: float, **args: Any) -> None:
        super().__init__(**args)
        self.marked, self.weight = marked, weight

    def read(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        return {
            **super().read(ids),
            "weight": torch.full((len(ids),), self.weight if ids[0] == self.marked else 1.0),
        }


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss, count = next_token(model, batch)
    return loss * batch["weight"][0], count


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Returns four undisturbed steps: one epoch, so that every sample is read once."""
    return train_here(small_job(tmp_path_factory.mktemp("honest"), **PLAIN), STEPS)


def dataset(name: str, **args: object) -> dict[str, object]:
    return {"data": {"dataset": f"tests.engine.test_controls:{name}", "args": args}}


def test_two_samples_of_a_step_swapped_between_microbatches(honest: Trained, tmp_path: Path) -> None:
    """Two samples of one step change places between their microbatches: only roundings differ, and the hash
    sees them.
    """
    ids = Cursor(64, 16, 0).ids(3)
    swapped = train_here(
        small_job(tmp_path / "swapped", **PLAIN, **dataset("Swapped", pair=[ids[1], ids[4]])), STEPS
    )
    assert swapped.hash != honest.hash
    assert swapped.outcomes[3].loss == pytest.approx(honest.outcomes[3].loss, rel=1e-4)
    control = train_here(small_job(tmp_path / "control", **PLAIN, **dataset("Swapped", pair=[0, 0])), STEPS)
    assert control.hash == honest.hash, "the wrapper itself changes nothing"


def test_the_weight_of_one_microbatch_dropped(honest: Trained, tmp_path: Path) -> None:
    first = Cursor(64, 16, 0).microbatch_ids(3, 2, 4)[0]

    def run(name: str, weight: float) -> str:
        job = small_job(
            tmp_path / name,
            loss="tests.engine.test_controls:weighted",
            **PLAIN,
            **dataset("Marked", marked=first, weight=weight),
        )
        return train_here(job, STEPS).hash

    assert run("dropped", 0.0) != honest.hash
    assert run("kept", 1.0) == honest.hash, "the wrapper itself changes nothing"


def forged(
    job: Job, new: Version, old: Version, stale: Callable[[slices.Tensor, slices.Slice], bool], bucket: Path
) -> Job:
    """Returns the job of a run whose checkpoint claims to be ``new``, but has the slices that are ``stale``
    from ``old``.
    """
    readers = {version: Run.open(job).checkpoints.open(version) for version in (new, old)}
    copy = job.replace(bucket=str(bucket))
    parts = []
    for row in readers[new].rows:
        ((_, data),) = readers[old if stale(row.tensor, row.slice) else new].read([row.slice])
        parts.append((row.tensor, row.slice, memoryview(data)))
    receipt = Run.open(copy).checkpoints.write_shard(new, "shard-00000-of-00001", parts)
    finish(copy, LAYOUT, [receipt], new)
    return copy


def one_moment_slice(tensor: slices.Tensor, part: slices.Slice) -> bool:
    return (tensor.kind, tensor.name) == ("moment.exp_avg", "layers.1.attention.wq.weight") and part.start[
        0
    ] == 0


def test_state_of_an_older_step_under_a_newer_name(ranks: Ranks, honest: Trained, tmp_path: Path) -> None:
    """Resuming with one stale moment slice, or with state s-1 that claims to be s, is noticed.  The control
    forges a true copy.
    """
    job = small_job(tmp_path / "true", **PLAIN)
    old = train(ranks, job, LAYOUT, 2)
    new = train(ranks, job, LAYOUT, 3, old.version)

    def resumed(name: str, stale: Callable[[slices.Tensor, slices.Slice], bool]) -> str:
        return train_here(
            forged(job, new.version, old.version, stale, tmp_path / name), STEPS, new.version
        ).hash

    assert resumed("copy", lambda tensor, part: False) == honest.hash
    assert resumed("stale", one_moment_slice) != honest.hash
    assert resumed("claimed", lambda tensor, part: True) != honest.hash
