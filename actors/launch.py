"""``launch(job)``: from a job to its result.  Checks everything that can be checked before any worker starts, then watches."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import cluster
from actors.coordinator import Coordinator, View
from elastic.control.builds import Build
from elastic.errors import FINISHED, STOPPED, JobError, PlatformGaveUp
from elastic.imports import check_packages
from elastic.job import Job
from elastic.report.story import Line, Sentence

POLL_S = 0.1
OVER_S = 30.0
Show = Callable[[Line], None]


@dataclass(frozen=True)
class Result:
    """How a run ended.  ``state``: Finished, Stopped or Failed; the last two resume by the same command."""

    state: str
    reason: str
    step: int
    exit_code: int
    bucket: str
    name: str
    job_error: str = ""
    """The user's traceback, where the job is at fault."""


def launch(job: Job, *, address: str | None = None, local: bool = False, show: Show = lambda line: None) -> Result:
    """Train ``job`` to its end.  ``local``: one worker in this process, without Ray.

    Raises :class:`~elastic.errors.ElasticError` when the job cannot work as it is.  Ctrl-C asks for a clean stop with a save; a
    second one leaves the run to stop by itself.
    """
    from elastic.train.local import run_local
    from elastic.train.setup import preflight

    check_packages()
    checked = preflight(job)
    for sentence in checked.notes:
        show(Sentence(time.time(), sentence))
    if local:
        return _result(job, *run_local(job, show))
    cluster.connect(address)
    coordinator = attach(job.name)
    if coordinator is not None and _is_over(coordinator):
        reap(job.name)
        coordinator = None
    if coordinator is None:
        cluster.check_room(job.workers)
        coordinator = start(job, replace(checked.build, host=cluster.place(cluster.here())))
    try:
        view = watch(coordinator, show)
    finally:
        reap(job.name)
    return _result(job, view.state, view.reason, view.step, view.job_error)


def attach(name: str) -> Any | None:
    """The coordinator of the run, if one lives in this cluster."""
    try:
        return ray.get_actor(f"{name}/coordinator", namespace=cluster.NAMESPACE)
    except ValueError:
        return None


def _is_over(coordinator: Any) -> bool:
    """Of a run that ended, or is ending, while nobody watched."""
    try:
        return bool(ray.get(coordinator.view.remote()).over)
    except ray.exceptions.RayActorError:
        return True


def start(job: Job, reference: Build) -> Any:
    """A new coordinator: named, detached, without an accelerator.  ``reference``: what every worker must be made of."""
    search_path = [entry for entry in (os.getcwd(), *sys.path) if entry and os.path.isdir(entry)]
    coordinator = (
        ray.remote(concurrency_groups={"inbox": 1, "view": 4})(Coordinator)
        .options(
            name=f"{job.name}/coordinator",
            namespace=cluster.NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(cluster.here(), soft=True),  # where the job was checked
        )
        .remote(job, reference, search_path)
    )
    coordinator.run_loop.remote()
    return coordinator


def watch(coordinator: Any, show: Show) -> View:
    """Show the story until the run is over; Ctrl-C turns into a request to stop."""
    seen = 0
    while True:
        try:
            view: View = ray.get(coordinator.view.remote(seen, True))
            seen += len(view.lines)
            for line in view.lines:
                show(line)
            if view.over:
                return view
            time.sleep(POLL_S)
        except KeyboardInterrupt:
            coordinator.stop.remote("Ctrl-C")
        except ray.exceptions.RayActorError as error:
            why = str(error).strip().splitlines()[-1]
            raise PlatformGaveUp(f"the coordinator of the run is gone ({why}); the same command resumes it") from error


def reap(name: str) -> None:
    """End what is left of the run's actors on this cluster."""
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == cluster.NAMESPACE and entry["name"].startswith((f"{name}/", f"{name}-")):
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(entry["name"], namespace=cluster.NAMESPACE), no_restart=True)


def _result(job: Job, state: str, reason: str, step: int, job_error: str = "") -> Result:
    codes = {"Finished": FINISHED, "Stopped": STOPPED}
    failed = JobError.exit_code if job_error else PlatformGaveUp.exit_code
    return Result(state, reason, step, codes.get(state, failed), job.bucket, job.name, job_error)
