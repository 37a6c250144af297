"""Finds the coordinator of a run that lives, and asks it.

The newest claim in the bucket names the cluster of the run.  If somebody has deleted the run's folder, there
is no claim, but the run trains on: then this process asks the clusters that it can find by itself, that of
``RAY_ADDRESS`` and those of this machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import ray

from actors import cluster, heads
from actors.processes import life_of
from actors.terminal import console
from actors.view import View
from elastic.config.values import same_place
from elastic.errors import ClusterGone, CoordinatorGone, JobError, PlatformGaveUp, Refused
from elastic.job import Job
from elastic.report.story import Show, tell
from elastic.runs.run import LOCAL, Run

ANSWER_S = 15.0
"""Seconds in which a coordinator must answer before it counts as one that may be dead."""
POLL_S = 0.1
"""Seconds between two questions for the view of a run that is followed."""
QUIET_S = 5.0
"""Seconds without an answer of the coordinator after which the user is told so, and seconds between two looks
for the cluster's head.
"""


def name_of(run: str) -> str:
    """Returns the name of the actor that is the coordinator of a run."""
    return f"{run}/coordinator"


def attach(name: str) -> Any | None:
    """Returns the coordinator of the run, or None if none lives in this cluster."""
    try:
        return ray.get_actor(name_of(name), namespace=cluster.NAMESPACE)
    except ValueError:
        return None


def lives_at(address: str, job: Job) -> bool:
    """Returns whether the cluster at ``address`` has a coordinator of the run's name, without joining that
    cluster.  Raises as :func:`heads.answers`.
    """
    return heads.has_actor(address, name_of(job.name), cluster.NAMESPACE)


def connected(job: Job) -> bool:
    """Connects to the cluster that the run was on last, and tells whether that cluster answers.  Raises as
    :func:`heads.answers`.
    """
    owner = Run.find(job).owner()
    if owner is not None and (owner["address"] == LOCAL or not heads.answers(owner["address"])):
        return False
    return joined_cluster_of(job, owner)


def joined_cluster_of(job: Job, owner: Mapping[str, Any] | None) -> bool:
    """Connects to the cluster of the run's newest claim ``owner``, whose head has answered; without a claim,
    to the cluster on which the run lives.

    Tells whether this process is part of that cluster now.
    """
    return _joined_unclaimed(job) if owner is None else _join(owner["address"])


def coordinator_of(job: Job) -> Any | None:
    """Returns the coordinator of the run, or None if the run is not found running."""
    return coordinator_here(job) if connected(job) else None


def coordinator_here(job: Job) -> Any | None:
    """Returns the coordinator of the run, or None if none lives in this cluster, which may have another run
    of that name.
    """
    coordinator = attach(job.name)
    return None if coordinator is None or bucket_of_another(job, coordinator) else coordinator


def _join(address: str) -> bool:
    """Joins the cluster at ``address``, whose head has answered, unless this process is part of a cluster.
    Tells whether this process is part of the cluster at ``address`` now.
    """
    cluster.connect(address, answered=True)
    return cluster.joined(address)


def _joined_unclaimed(job: Job) -> bool:
    """Connects to the cluster on which the run lives without a claim, and tells whether there is one."""
    part_of_one = ray.is_initialized()
    for address in cluster.known():
        # the cluster is ending, frozen, or somebody else's
        with suppress(PlatformGaveUp, ClusterGone, ConnectionError, RuntimeError):
            if not lives_at(address, job):
                continue
            if (
                _join(address)
                and (found := attach(job.name)) is not None
                and not bucket_of_another(job, found)
            ):
                return True
        if not part_of_one:
            ray.shutdown()
    return False


def bucket_of_another(job: Job, coordinator: Any) -> str:
    """Returns the bucket of the run that lives under the name of ``job``, if it is another run; otherwise, or
    without an answer, "".

    One bucket may be mounted under two paths.  The run is the same if the newest claim in the bucket of
    ``job`` names the life of the coordinator that was found.
    """
    try:
        bucket = str(ask(coordinator, "settings", deadline_s=ANSWER_S)["bucket"])
        if same_place(bucket, job.bucket) or (view := view_of(coordinator, ANSWER_S)) is None:
            return ""
    except (PlatformGaveUp, ClusterGone):
        return ""
    owner = Run.find(job).owner() or {}
    return bucket if view.token.rpartition("-")[2] != owner.get("life") else ""


def run_of(job: Job) -> Run:
    """Returns the run in order to read it.  Raises :class:`JobError` if the bucket has no such run and none
    is found running.

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
    run = Run.find(job)
    if run.there is None:
        where = ray.get_runtime_context().gcs_address
        note = (
            f"note: somebody has deleted {run.store.full_name(job.name)}, or its job.json, while "
            f"{job.name} runs on the cluster at {where}; the next save writes a new folder, but the "
            "deleted files are lost.  `elastic stop` ends the run after a save, and `elastic clean "
            "--force` ends it without a save"
        )
        print(console.pasteable(note), file=sys.stderr)


class ClusterHead:
    """The head of the cluster that this process has joined."""

    def __init__(self, show: Show = lambda _: None) -> None:
        self._show, self._address = show, ray.get_runtime_context().gcs_address
        self._looked_at, self._missed_at = time.monotonic(), 0.0
        self.heard = False
        """True once the coordinator has answered: before that, it may only be starting."""

    def say(self, sentence: str) -> None:
        tell(self._show, sentence)

    def look(self, *, last: bool = False) -> None:
        """Looks for the head now and then.  Raises :class:`ClusterGone` if it has been out of reach for
        nearly ``cluster.HEAD_S``.

        ``last`` looks now, and does not wait for the head to come back.
        """
        now = time.monotonic()
        if now - self._looked_at < QUIET_S and not last:
            return
        if now - self._looked_at > 4 * QUIET_S:  # this process stood still
            self._missed_at = 0.0
        self._looked_at = now
        if heads.reachable(self._address):
            self._missed_at = 0.0
        elif last or (self._missed_at and now - self._missed_at > 0.75 * cluster.HEAD_S - QUIET_S):
            raise ClusterGone(
                f"the head of the cluster at {self._address} is gone; give the same command on another "
                "cluster to resume the run"
            )
        elif not self._missed_at:
            self._missed_at = now
            self.say(
                f"the head of the cluster at {self._address} does not answer; if it stays silent, the "
                f"cluster ends in {cluster.HEAD_S:g} s"
            )


def ask(
    coordinator: Any, question: str, *arguments: Any, deadline_s: float, head: ClusterHead | None = None
) -> Any:
    """Returns the coordinator's answer.  If its process dies, Ray restarts it and asks again, for
    ``deadline_s`` in all.

    Raises :class:`PlatformGaveUp` if no answer comes in time, :class:`ClusterGone` if the cluster cannot be
    reached, and :class:`CoordinatorGone` if there is no coordinator any more.
    """
    call, asked_at = getattr(coordinator, question).remote(*arguments), time.monotonic()
    head = head or ClusterHead()
    while not ray.wait([call], timeout=max(0.0, min(QUIET_S, asked_at + deadline_s - time.monotonic())))[0]:
        head.look(last=time.monotonic() - asked_at >= deadline_s)
        if time.monotonic() - asked_at >= deadline_s:
            raise PlatformGaveUp(
                f"the coordinator of the run has not answered for {deadline_s:g} s; give the same "
                "command again to resume the run"
            )
        if head.heard and time.monotonic() - asked_at < 2 * QUIET_S:
            head.say("the coordinator does not answer; if it has died, a new one takes over")
    try:
        answer = ray.get(call)
    except ray.exceptions.RayActorError as error:
        why = str(error).strip().splitlines()[-1]
        if getattr(error, "actor_init_failed", False) and (said := why.partition(f"{Refused.__name__}: ")[2]):
            raise Refused(said) from error
        raise CoordinatorGone(
            f"the coordinator of the run is gone ({why}); give the same command again to resume the run"
        ) from error
    head.heard = True
    head.look()  # the coordinator of a dead head answers, too, until Ray ends it
    return answer


def views(
    coordinator: Any, show: Show, deadline_s: float, driver: str = "", *, only: bool = False
) -> Iterator[View]:
    """Yields the coordinator's views until the run is over, each with the lines of the story since the view
    before.

    The questions are those of the driver ``driver``, which with ``only`` merely watches.  ``show`` gets a
    sentence if nobody answers.  A coordinator that takes over begins a story of its own.  Raises as
    :func:`ask`.
    """
    seen, incarnation, head = 0, 0, ClusterHead(show)
    while True:
        view: View = ask(
            coordinator, "view", seen, driver, incarnation, only, deadline_s=deadline_s, head=head
        )
        yield view
        if view.over:
            return
        seen, incarnation = view.told, view.incarnation
        time.sleep(POLL_S)


def view_of(coordinator: Any, deadline_s: float) -> View | None:
    """Returns the coordinator's view, or None if the coordinator is gone.

    Raises :class:`PlatformGaveUp` if the coordinator exists and does not answer.
    """
    try:
        view: View = ask(coordinator, "view", 10**9, deadline_s=deadline_s)
    except CoordinatorGone:
        return None
    return view


def reap(name: str, lives: Collection[str] | None = None) -> list[str]:
    """Ends the actors of the run that are left on this cluster, and returns their names.

    If ``lives`` is given, it ends only the actors of these lives; a coordinator, whose name has no life, then
    counts as one of the life "".
    """
    found = []
    for entry in ray.util.list_named_actors(all_namespaces=True):
        token, slash, _ = entry["name"].partition("/")
        if (
            entry["namespace"] != cluster.NAMESPACE
            or not slash
            or not (token == name or life_of(name, token))
        ):
            continue
        if lives is None or life_of(name, token) in lives:
            with suppress(ValueError):
                ray.kill(ray.get_actor(entry["name"], namespace=cluster.NAMESPACE), no_restart=True)
                found.append(f"actor {entry['name']}")
    return found
