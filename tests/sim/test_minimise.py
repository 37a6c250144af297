"""A failing list of faults is made small in few runs; the runner, simulated or real, decides whether it still
fails.
"""

from __future__ import annotations

import random

import pytest

from elastic.protocol.faults import Fault, draw
from elastic.sim.minimise import minimised

pytestmark = pytest.mark.fast


def test_only_what_matters_is_left() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        faults = draw(seed, 40, 100.0)
        culprits = set(rng.sample(range(40), rng.randint(1, 4)))
        guilty = tuple(fault for number, fault in enumerate(faults) if number in culprits)
        runs: list[tuple[Fault, ...]] = []

        def fails(
            part: tuple[Fault, ...], guilty: tuple[Fault, ...] = guilty, runs: list[tuple[Fault, ...]] = runs
        ) -> bool:
            runs.append(part)
            return set(guilty) <= set(part)

        assert minimised(faults, fails) == guilty
        assert len(runs) < 200, "40 faults have 2**40 parts"


def test_where_every_part_fails_or_none_does() -> None:
    faults = draw(1, 9, 10.0)
    assert len(minimised(faults, lambda part: True)) == 1
    assert minimised(faults, lambda part: False) == faults
    assert minimised((), lambda part: True) == ()


def test_no_single_one_can_be_left_out() -> None:
    """The rule holds too if a failure takes any three faults."""
    faults = draw(3, 30, 10.0)

    def fails(part: tuple[Fault, ...]) -> bool:
        return len(part) >= 3

    left = minimised(faults, fails)
    assert fails(left) and not any(
        fails((*left[:number], *left[number + 1 :])) for number in range(len(left))
    )
