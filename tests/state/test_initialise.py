"""Every member initialises its own slices, and in every layout they are what plain torch makes of the model
on one device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic.engine.world import World
from elastic.errors import ModelError
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.plan.placement import held
from elastic.train.model import BUFFERS
from tests.support.initialised import Odd, plain
from tests.support.ranks import Ranks
from tests.support.segments import member
from tests.support.toys import Own, toy_job

SEED = 5
Pieces = dict[str, list[tuple[tuple[slice, ...], torch.Tensor]]]


class Chance(Own):
    """Its values differ from process to process."""

    def init_weights(self) -> None:
        super().init_weights()
        nn.init.constant_(self.mix.weight, os.getpid())


def chance() -> Chance:
    return Chance()


def small() -> Odd:
    return Odd(vocab=70)


def pieces(world: World, job: Job) -> tuple[Pieces, Pieces]:
    """Returns, by name, this member's boxes of parameters and buffers with their values, and those of the
    moments.
    """
    found: tuple[Pieces, Pieces] = ({}, {})
    with member(world, job, Version(0, 0)) as me:
        assert me.session.counters["collective"] == 0, (
            "the time of the newest operation must not count as a collective"
        )
        for tensor in me.state.tensors:
            for box in held(tensor, me.state.shard.cell).boxes:
                place = tuple(slice(a, b) for a, b in zip(box.slice.start, box.slice.stop, strict=True))
                values = found[0 if tensor.kind in ("parameter", *BUFFERS) else 1].setdefault(tensor.name, [])
                values.append((place, me.state.shard.part(tensor, box.slice).clone()))
    return found


def refused(world: World, job: Job) -> str:
    try:
        pieces(world, job)
    except ModelError as error:
        return str(error)
    return ""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Lets the judge use one thread, as the members do: with more of them, factorisations of matrices on a
    CPU round differently.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.close()


def job_of(folder: Path, model: str, **settings: Any) -> Job:
    return toy_job(folder, model=f"tests.state.test_initialise:{model}", model_args={}, seed=SEED, **settings)


@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(1, 2), Layout(1, 3), Layout(2, 2)], ids=str)
def test_the_slices_are_those_of_plain_torch(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    """N5: the members initialise, each for itself, and keep their slices."""
    want, other = plain(small, SEED), plain(small, SEED + 1)
    members, wrong = ranks.run(layout, pieces, job_of(tmp_path, "small")), 0
    for name in want:
        covered = torch.zeros_like(want[name], dtype=torch.int64)
        for found, _ in members:
            for place, value in found.get(name, []):
                assert torch.equal(value, want[name][place]), name
                covered[place] += 1
                wrong += not torch.equal(value, other[name][place])
        assert (covered > 0).all(), name
    assert wrong, "negative control: a seed off by one"
    assert not any(value.any() for _, moments in members for each in moments.values() for _, value in each)


def test_values_that_differ_between_workers_are_refused_or_taken_from_the_first(
    ranks: Ranks, tmp_path: Path
) -> None:
    """A reproducible run cannot have them.  Any other run begins with the values of one worker, as it always
    did.
    """
    said = ranks.run(Layout(2, 1), refused, job_of(tmp_path, "chance"))
    assert all(
        "gives 'mix.weight' other values on some workers than on the first worker (and 0 more)" in each
        for each in said
    ), said
    (first, _), (second, _) = ranks.run(
        Layout(2, 1), pieces, job_of(tmp_path, "chance", reproducible=False, name="free")
    )
    assert torch.equal(first["mix.weight"][0][1], second["mix.weight"][0][1])
