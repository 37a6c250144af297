"""Finds the coordinator of a run that lives.

The newest claim in the bucket names its cluster.  If somebody has deleted the run's folder there is no claim, but the run trains on: then
the clusters that this process can reach without being told are asked, that of ``RAY_ADDRESS`` and those of this machine.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import ray

from actors import cluster, launch
from elastic.config.values import same_place
from elastic.errors import ClusterGone, JobError, PlatformGaveUp
from elastic.job import Job
from elastic.runs import branches
from elastic.runs.run import LOCAL, Run

ANSWER_S = 15.0
"""Seconds in which a coordinator must answer before it counts as one that may be dead."""


def connected(job: Job) -> bool:
    """Connects to the cluster that the run was on last, and tells whether that cluster answers."""
    owner = Run.find(job).owner()
    if owner is None:
        return _joined_unclaimed(job)
    return owner["address"] != LOCAL and cluster.reachable(owner["address"]) and _join(owner["address"])


def coordinator_of(job: Job) -> Any | None:
    """Returns the coordinator of the run, or None if the run is not found running."""
    return launch.attach(job.name) if connected(job) else None


def _join(address: str) -> bool:
    if not ray.is_initialized():
        cluster.check_here(address)
    cluster.connect(address)
    return cluster.joined(address)


def _joined_unclaimed(job: Job) -> bool:
    """Connects to the cluster on which the run lives without a claim, and tells whether there is one."""
    part_of_one = ray.is_initialized()
    for address in cluster.known():
        if not cluster.has_actor(address, launch.name_of(job.name)):
            continue
        with suppress(PlatformGaveUp, ClusterGone, ConnectionError, RuntimeError):  # it is ending, or somebody else's
            if _join(address) and _is_of(job, launch.attach(job.name)):
                return True
        if not part_of_one:
            ray.shutdown()
    return False


def _is_of(job: Job, coordinator: Any | None) -> bool:
    """Returns whether the coordinator is that of ``job``: another bucket may have a run of that name, too."""
    return coordinator is not None and same_place(launch.ask(coordinator, "settings", deadline_s=ANSWER_S)["bucket"], job.bucket)


def run_of(job: Job) -> Run:
    """Returns the run in order to read it.  Raises :class:`JobError` if the bucket has no such run and none is found running.

    If somebody has deleted the folder of a run that lives, the user is told so.
    """
    try:
        return Run.begun(job)
    except JobError:
        if coordinator_of(job) is None:
            raise
    note_deletion(job)
    return Run.find(job)


def note_deletion(job: Job) -> None:
    """Tells the user if somebody has deleted the folder of the run, which lives."""
    store = Run.find(job).store
    if branches.newest(store, job.name) is None:
        where = ray.get_runtime_context().gcs_address
        print(
            f"note: somebody has deleted {store.full_name(job.name)}, or its job.json, but {job.name} lives on the cluster at {where}; "
            f"what was deleted is lost, and its next save begins the folder anew: `elastic stop` stops it after a save, from which "
            f"`elastic train` goes on, and `elastic clean --force` ends it without one",
            file=sys.stderr,
        )
