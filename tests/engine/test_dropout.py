"""A8: the mask of a dropout belongs to the microbatch: whoever computes it, and how often, the mask is the
same.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from pathlib import Path

import numpy
import pytest
from torch import Tensor, nn

from elastic.engine import seeds
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from tests.support.ranks import Ranks
from tests.support.segments import here, member, train, train_here
from tests.support.toys import Own, small_job

MICROBATCHES, STEPS, LAYERS = 4, 2, 2
MODEL = {"vocab": 29, "dim": 16, "layers": LAYERS, "heads": 2, "dropout": 0.1}
Masks = dict[tuple[int, int], dict[str, list[str]]]
"""Hashes of the masks of each module, in the order in which they were drawn, by (step, microbatch)."""


def masks(world: World, job: Job, one_seed: bool = False) -> Masks:
    """Returns the masks that this member has drawn.  ``one_seed`` seeds each member alike, whatever it
    computes: the control.
    """
    found: Masks = defaultdict(lambda: defaultdict(list))
    with pytest.MonkeyPatch.context() as patch, member(world, job, Version(0, 0)) as me:
        if one_seed:
            patch.setattr(seeds, "microbatch_seed", lambda seed, *_: seed)

        def note(name: str, output: Tensor) -> None:
            at, microbatch, *_ = me.session.computing.removeprefix("step ").split(", ")
            if microbatch.startswith("microbatch"):
                place = int(at), int(microbatch.removeprefix("microbatch "))
                found[place][name].append(hashlib.sha256((output != 0).numpy().tobytes()).hexdigest())

        for name, module in me.state.model.named_modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(lambda _, args, output, name=name: note(name, output))
        for _ in range(STEPS):
            me.step()
    return {place: dict(of) for place, of in found.items()}


def joined(told: list[Masks]) -> Masks:
    """Returns the masks of all members; no two of them compute the same microbatch."""
    whole = {place: of for each in told for place, of in each.items()}
    assert len(whole) == sum(map(len, told)) == STEPS * MICROBATCHES
    assert all(each for each in told), "each member has computed something"
    return whole


def test_a8_masks_differ_between_members_and_not_between_layouts(ranks: Ranks, tmp_path: Path) -> None:
    """A8: also when a block is computed again, up to its last dropout, whose output the backward pass does
    not need.

    The last lines are the control.
    """
    jobs = [
        small_job(tmp_path / recompute, recompute=recompute, model_args=MODEL)
        for recompute in ("none", "block")
    ]
    shards = ranks.run_each(Layout(1, 2), masks, [(job,) for job in jobs])
    *replicas, alike = ranks.run_each(Layout(3, 1), masks, [*((job,) for job in jobs), (jobs[0], True)])
    for job, *others in zip(jobs, shards, replicas, strict=True):
        one = joined([here(masks, job)])
        assert [joined(each) for each in others] == [one, one]
        for of in one.values():
            assert len(of) == LAYERS, "a module for each of the layers"
            assert all(len(set(each[:2])) == 2 for each in of.values()), "a block draws two masks"
            assert all(each[2:] == (each[:1] if job.recompute == "block" else []) for each in of.values()), (
                "and the first one again"
            )
        firsts = [each[0] for of in one.values() for each in of.values()]
        assert len(set(firsts)) == len(firsts) == STEPS * MICROBATCHES * LAYERS
    assert len({each[0] for of in joined(alike).values() for each in of.values()}) == LAYERS


class Dropping(Own):
    """A model that leaves out layers by Python's random numbers, and scales by numpy's."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x) * (random.random() < 0.5) * numpy.random.uniform(0.5, 1.5)
        return self.head(x)


def test_a8_the_random_numbers_of_python_and_numpy_belong_to_the_microbatch_too(
    ranks: Ranks, tmp_path: Path
) -> None:
    """A8, promise 1: in another layout, and by processes that have drawn before.  The control: another seed."""
    job = small_job(tmp_path, model="tests.engine.test_dropout:Dropping", model_args={}, parallel={"zero": 2})
    one, other = (
        train_here(job.replace(bucket=str(tmp_path / str(seed)), seed=seed), 2).outcomes for seed in (0, 1)
    )
    two = train(ranks, job, Layout(1, 2), 2).outcomes
    assert [each.losses for each in one] == [each.losses for each in two] != [each.losses for each in other]
