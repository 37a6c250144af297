import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import state

from actors import cluster
from elastic.data.cursor import Cursor
from elastic.runs.run import Run
from tests.support import warm
from tests.support.budgets import ACTOR
from tests.support.chaos import Story, Trial, act_by, alone, comes, trial
from tests.support.clusters import TUNED
from tests.support.commands import ROOT
from tests.support.kills import undisturbed
from tests.support.toys import toy_job
from tests.support.warm import Warm


@pytest.fixture(scope="session", autouse=True)
def no_cluster_is_left() -> Iterator[None]:
    yield
    ray.shutdown()


@pytest.fixture(scope="module", autouse=True)
def local_cluster(no_cluster_is_left: None, forks: Warm, aws_config: Path) -> Iterator[None]:
    """Connects to one Ray cluster on this machine, for all of these tests and for drivers that they start in
    other folders.

    Its head notices a dead node early, by the settings in ``TUNED``.  A module that needs another cluster
    overrides this fixture and shuts both down; the next module starts a new one.  In a whole run such modules
    come last (``has_a_cluster`` in tests/conftest.py).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(warm.SOCKET, forks.path)
        patch.setattr(ray._private.ray_constants, "SETUP_WORKER_FILENAME", warm.__file__)
        warm.lean(patch.setattr)
        # what a node is allowed to use; nothing, until a test writes it
        patch.setenv("AWS_CONFIG_FILE", str(aws_config))
        for name, value in TUNED.items():
            patch.setenv(name, value)
        # of the cluster's processes; where Elastic is installed nobody needs it
        patch.setenv("PYTHONPATH", str(ROOT))
        cluster.connect("local")
        yield
        _count_actors()


_actors = set[str]()


def _count_actors() -> None:
    """Tells the budgets of the actors that the cluster has had, dead ones too."""
    for number, actor in state.actors().items() if ray.is_initialized() else ():
        if number not in _actors:
            _actors.add(number)
            sys.audit(ACTOR, actor["Name"])


@pytest.fixture(scope="session")
def script_reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result that every script of ``tests/support/kills.py`` must end with."""
    return undisturbed(tmp_path_factory.mktemp("reference"))


def epoch(folder: Path, steps: int) -> Any:
    """Returns the result of ``toy_job`` after ``steps`` (one epoch: each sample in exactly one step).
    ``job`` is the undisturbed job.
    """
    data = {"dataset": "tests.support.toys:Sums", "args": {"samples": 16 * steps}}
    job = toy_job(folder, name="local", steps=steps, data=data)
    return SimpleNamespace(job=job, **vars(alone(job)))


@pytest.fixture(scope="session")
def forty(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of a job that is long enough for one or two faults."""
    return epoch(tmp_path_factory.mktemp("forty"), 40)


@pytest.fixture(scope="session")
def sixty(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of a job for long tests."""
    return epoch(tmp_path_factory.mktemp("sixty"), 60)


STEPS, DIES, SAVE_EVERY = 8, 7, 2
"""Numbers of the run whose workers all die at once, in the step ``DIES``."""
DIED: dict[str, Any] = {
    "steps": STEPS,
    "parallel": {"dp_replicate": 1},
    "checkpoint": {"save_every": SAVE_EVERY},
    "data": {"dataset": "tests.support.toys:Sums", "args": {"samples": 16 * STEPS}},
    "model": "tests.engine.test_shared_weights:Sharing",
    "model_args": {"kind": "weight"},
    "microbatch": 4,
}


@pytest.fixture(scope="session")
def all_died(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """A run whose two workers are killed by SIGKILL in the step ``DIES``, when the step before is saved, and
    that keeps no copies.
    """
    bucket = tmp_path_factory.mktemp("all-died")
    gates = {str(Cursor(16 * STEPS, 16, 0, "permutation").ids(DIES)[0]): str(bucket / "gate")}
    data = {"dataset": "tests.support.toys:Sums", "args": {"samples": 16 * STEPS, "gates": gates}}
    job = toy_job(bucket, name="all-die", **DIED | {"data": data, "copies": {"copy_every": 0}})

    def kill_all() -> Story:
        yield from comes(lambda _, view: view.step == DIES - 1)
        witness, _ = yield from comes(
            lambda *_: (newest := Run.look(job).newest()) is not None and newest.step == DIES - 1
        )
        for each in witness.seen.values():
            os.kill(each.process.pid, signal.SIGSTOP)  # frozen first: none sees another die
        for each in witness.seen.values():
            each.process.kill()
        (bucket / "gate").touch()

    return trial(job, act_by(kill_all()))
