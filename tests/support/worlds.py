"""Fixtures for tests in which processes form worlds or are forks of one, shared by all folders of tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.budgets import uncounted
from tests.support.warm import Warm

if TYPE_CHECKING:  # torch takes seconds to import, and most tests need none
    from tests.support.ranks import Ranks
    from tests.support.segments import Trained

STEPS = 4
"""Number of steps of the undisturbed run with which the others are compared."""


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """The process whose forks are the workers of Ray in the cluster of the tests, and the commands of the
    guide.
    """
    with uncounted():
        made = Warm(tmp_path_factory.mktemp("warm"))
    with made:
        yield made


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Starts four processes for all tests."""
    from tests.support.ranks import Ranks

    pool = Ranks(4)
    yield pool
    pool.close()


@pytest.fixture
def fresh_ranks() -> Iterator[Ranks]:
    """Starts two processes that have run nothing yet, for measures of what a process holds."""
    from tests.support.ranks import Ranks

    pool = Ranks(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains ``small_job`` for ``STEPS`` steps, undisturbed, on one worker."""
    from tests.support.segments import train_here
    from tests.support.toys import small_job

    return train_here(small_job(tmp_path_factory.mktemp("one")), STEPS)
