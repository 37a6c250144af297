"""The commands for a run that was started before: status, attach, stop, clean, logs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import cluster, launch
from actors.coordinator import View
from actors.processes import clear
from actors.terminal import say, show, show_result
from elastic.control.run import Ended, Failed, Stopped
from elastic.errors import PlatformGaveUp
from elastic.job import Job
from elastic.runs import Run
from storage.objects import ObjectStore

ANSWER_S = 15.0
"""For a coordinator that may be dead to say that it is not."""
CLEAR_S = 30.0


def _connected(job: Job) -> bool:
    """To the cluster that the run was on last, if it is there."""
    owner = Run.look(job).owner()
    if owner is None or owner["address"] == "local" or not cluster.reachable(owner["address"]):
        return False
    if not ray.is_initialized():
        cluster.check_here(owner["address"])
    cluster.connect(owner["address"])
    return True


def coordinator_of(job: Job) -> Any | None:
    """Of the run, if it runs."""
    return launch.attach(job.name) if _connected(job) else None


@dataclass(frozen=True)
class Absent:
    """A run that does not run, as far as is seen from here."""

    said: str
    over: bool
    """It has run, and certainly does no more."""
    end: Ended | None = None
    """Where its bucket says how it ended."""

    @classmethod
    def of(cls, job: Job) -> Absent:
        run = Run.look(job)
        if (owner := run.owner()) is None:
            return cls(f"{job.name} has never run in {job.bucket}", over=False)
        end = run.end()
        over = end is not None or ray.is_initialized() or owner["address"] == "local"
        unless = "" if over else f", or its cluster, {owner['address']}, cannot be reached from here"
        how = "" if end is None else f"; it ended as {type(end).__name__}"
        why = f" ({end.reason})" if isinstance(end, Stopped | Failed) else ""
        return cls(f"{job.name} is not running{unless}; newest good checkpoint: {run.newest() or 'none'}{how}{why}", over, end)


def status(job: Job, once: bool) -> int:
    coordinator = coordinator_of(job)
    if coordinator is not None:
        return _watch(job, coordinator, once=once)
    say(Absent.of(job).said)
    return 0


def attach(job: Job, line: str) -> int:
    """The run's story from its start to its end, and the exit code that `elastic train` has; Ctrl-C leaves the run as it is.

    Of a run that is over, the code with which it ended.  Raises :class:`PlatformGaveUp` where its bucket does not say that.
    """
    coordinator = coordinator_of(job)
    if coordinator is not None:
        return show_result(launch.follow(job, coordinator, show), job, line)
    absent = Absent.of(job)
    if absent.end is None:
        raise PlatformGaveUp(absent.said)
    say(absent.said)
    return launch.exit_code(type(absent.end).__name__, absent.end.job_error if isinstance(absent.end, Failed) else "")


def stop(job: Job) -> int:
    """Raises :class:`PlatformGaveUp` where there was never a run, or its coordinator cannot be reached or does not answer."""
    coordinator = coordinator_of(job)
    if coordinator is None:
        absent = Absent.of(job)
        if not absent.over:
            raise PlatformGaveUp(absent.said)
        say(absent.said)
        return 0
    driver = uuid.uuid4().hex  # one that waits: the coordinator stays until it has told the end
    return _watch(job, coordinator, once=False, driver=driver, stop="elastic stop")


def _watch(job: Job, coordinator: Any, once: bool, driver: str = "", stop: str = "") -> int:
    """Where the run stands, and what happens to it until it is over.  ``stop``: each coordinator that it has is told to stop it.

    Raises :class:`PlatformGaveUp` where one that is there does not answer; that it has gone is the end.
    """
    deadline_s = 2 * job.deadlines.lease_s
    seen, incarnation, shown = 0, 0, ""
    try:
        while True:
            view = launch.ask(coordinator, "view", seen, driver, incarnation, deadline_s=deadline_s)
            if view.incarnation != incarnation:
                seen, incarnation = 0, view.incarnation
                if stop and not view.over:
                    launch.ask(coordinator, "stop", stop, deadline_s=deadline_s)
            if (stands := _stands(view)) != shown:
                say(f"{view.token}: {view.state}, step {view.step} of {view.steps}, {stands}{_copies(view)}; {view.reason}")
            shown = stands
            for line in view.lines[-20:]:
                show(line)
            seen += len(view.lines)
            if view.over and driver:
                coordinator.leave.remote(driver)
            if once or view.over:
                return 0
            time.sleep(0.2)
    except PlatformGaveUp:
        if launch.attach(job.name) is not None:
            raise
        say(f"{job.name} is not running any more; newest good checkpoint: {Run.look(job).newest() or 'none'}")
        return 0


def _stands(view: View) -> str:
    """What is said again when it changes."""
    workers = ", ".join(f"{worker}@{node[:6]}" for worker, node in sorted(view.workers.items()))
    open_ = "" if view.unprotected_since is None else f"; unprotected since step {view.unprotected_since}"
    alone = "" if view.unbuddied_since is None else f"; no copy on another node since step {view.unbuddied_since}"
    return f"generation {view.generation}, incarnation {view.incarnation}; workers {workers or 'none'}{open_}{alone}"


def _copies(view: View) -> str:
    """How often: that wanders as steps take longer or less long."""
    copies, buddies = (f"every {pace} steps" if pace > 1 else "every step" if pace else "none" for pace in view.paces)
    return f"; copies in host memory {copies}, on other nodes {buddies}" if any(view.paces) else ""


def clean(job: Job, force: bool) -> int:
    """End and remove what a dead run has left: its actors, their segments and logs on every node.  What is in the bucket stays.

    Raises :class:`PlatformGaveUp` for a run that lives, unless ``force``.
    """
    if not _connected(job):
        removed = clear(job.name, CLEAR_S)
        _tell(removed, "this machine, for the run's cluster cannot be reached")
        return 0
    if not force:
        _refuse_a_living_run(job.name)
    _tell(launch.reap(job.name), "the cluster")
    tasks = {
        ray.remote(num_cpus=0)(clear)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(job.name, CLEAR_S): cluster.place(node)
        for node in cluster.nodes()
    }
    done, silent = ray.wait(list(tasks), num_returns=len(tasks), timeout=2 * CLEAR_S)
    for each in done:
        _tell(ray.get(each), tasks[each])
    for each in silent:
        say(f"{tasks[each]} did not answer: what is there stays")
    return PlatformGaveUp.exit_code if silent else 0


def _refuse_a_living_run(name: str) -> None:
    coordinator = launch.attach(name)
    if coordinator is None:
        return
    fix = "`elastic stop` stops it with a save, --force ends it as it is"
    try:
        view = ray.get(coordinator.view.remote(10**9), timeout=ANSWER_S)
    except ray.exceptions.GetTimeoutError:
        raise PlatformGaveUp(f"{name} may live: its coordinator is there and has not answered for {ANSWER_S:g} s; {fix}") from None
    except ray.exceptions.RayActorError:
        return
    if not view.over:
        raise PlatformGaveUp(f"{name} lives ({view.state}, step {view.step} of {view.steps}); {fix}")


def _tell(removed: list[str], where: str) -> None:
    for each in removed:
        say(f"removed {each}")
    if not removed:
        say(f"nothing to remove on {where}")


def logs(job: Job, workers: Collection[str]) -> int:
    """Of all ``workers``, or of every one that has a log."""
    store = ObjectStore.open(job.bucket)
    prefix = f"{job.name}/logs/"
    keys = [key for key in store.list(prefix) if not workers or Path(key).stem in workers]
    if not keys:
        of = f" of {', '.join(workers)}" if workers else ""
        say(f"no logs{of} in {job.bucket}/{prefix}: they are kept when a worker ends")
        return 1
    for key in keys:
        print(store.get(key).decode(errors="replace"))
    return 0
