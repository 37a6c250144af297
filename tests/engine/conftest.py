from collections.abc import Iterator

import pytest

from elastic.plan.layout import Layout
from tests.support.ranks import Ranks
from tests.support.segments import Trained, train
from tests.support.toys import toy_job

STEPS = 6


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four processes, each importing torch once for all engine tests."""
    pool = Ranks(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def reference(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """``toy_job`` for so many steps, undisturbed, on one worker."""
    return train(ranks, toy_job(tmp_path_factory.mktemp("one")), Layout(1, 1), STEPS)
