"""``launch(job)`` trains a job and returns its result.  It checks all it can before any worker starts, then
watches the run.
"""

from __future__ import annotations

import secrets
import signal
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray

from actors import cluster, own_cluster
from actors.coordinator import Coordinator
from actors.ends import kill_all
from actors.living import (
    POLL_S,
    ask,
    attach,
    bucket_of_another,
    coordinator_here,
    joined_cluster_of,
    lives_at,
    name_of,
    note_deletion,
    reap,
    view_of,
    views,
)
from actors.notices.known_sources import check_sources
from actors.processes import life_of
from actors.result import Result
from actors.screen import screen_for
from actors.signals import Requests
from actors.submitted import check_place
from actors.terminal import lasting
from actors.users_code import pack
from actors.view import View
from elastic.code.imports import check_packages
from elastic.errors import STOPPED, JobError, PlatformGaveUp, Refused
from elastic.job import Job
from elastic.protocol.builds import Build
from elastic.report.goodput import ENDED
from elastic.report.story import Ending, Line, Sentence, Show, tell
from elastic.runs import code, data, restarts
from elastic.runs.begin import begin, begin_here, finished
from elastic.runs.branches import differing
from elastic.runs.forks import write_anew
from elastic.runs.resume import LATEST, StartPoint, start_of
from elastic.runs.run import Run
from elastic.runs.standing import Standing
from elastic.train.checks.bucket import check_bucket
from elastic.train.checks.early import check_early
from storage.errors import Exists

if TYPE_CHECKING:
    from elastic.train.checks.preflight import Checked

LEAVING_S = 2.0
"""Seconds for a coordinator whose run is over to end itself, once its drivers have seen the end."""
Look = Callable[[View], None]
"""A function that gets each answer of the coordinator, after its new lines were shown."""


class Shows(Protocol):
    """Shows a run to somebody."""

    def show(self, line: Line) -> None: ...

    def look(self, view: View) -> None: ...


def _nothing(_: Any) -> None:
    """Shows nothing."""


def launch(
    job: Job,
    *,
    address: str | None = None,
    local: bool = False,
    branch: bool = False,
    accept_code: bool = False,
    resume: str | int = LATEST,
    again: bool = False,
    show: Show | None = None,
    look: Look = _nothing,
) -> Result:
    """Trains ``job`` to its end.  ``local`` runs one worker in this process, without Ray.  ``show`` gets each
    line, and ``look`` each answer of the coordinator; without ``show`` lines are printed.

    If a run began with other settings, it goes on with those of ``job`` only with ``branch``, and only if its
    state and its place in the data fit; a run that has no save takes them in any case.  If its code was
    different, it goes on with the present code only with ``accept_code``.  ``resume`` is ``latest``; or a
    step of the run, from which a new branch goes on; or ``run@latest``, ``run@best`` or ``run@step``, a
    checkpoint of another run in the same bucket, from which a new run goes on.  ``again`` starts a run
    although it was restarted too often without a new step.

    Raises :class:`~elastic.errors.ElasticError` if the job cannot work.  Ctrl-C, SIGTERM, SIGHUP or SIGUSR1
    to the driver that started the run asks for a clean stop with a save; a second Ctrl-C or SIGTERM raises
    KeyboardInterrupt, and the run stops by itself.  An attached driver merely detaches, unless it is the last
    one.  With ``on_driver_exit = "detach"`` the first one merely detaches too.
    """
    own_cluster.drop()
    with Requests() as requests, nullcontext() if show else lasting():
        if show is None:
            screen = screen_for(job)
            show, look = screen.show, screen.look
        if not local:
            check_packages(Path.cwd())  # this folder comes first on the workers' path
            check_place("bucket", job.bucket)
        tell(show, write_anew(job := _settled(job)))
        begins = start_of(job, resume)
        asked = branch or begins.at is not None
        return _Command(begins, address, local, asked, accept_code, again, show, look, requests).train()


@dataclass
class _Command:
    """A command that trains: where it begins, what its options permit, and to whom it shows the run.
    ``branch`` means that it asks for a branch.
    """

    begins: StartPoint
    address: str | None
    local: bool
    branch: bool
    accept_code: bool
    again: bool
    show: Show
    look: Look
    requests: Requests

    def __post_init__(self) -> None:
        self.driver = uuid.uuid4().hex
        self.deadline_s = 2 * self.job.deadlines.lease_s
        """Seconds after which the workers of a coordinator that does not answer have ended themselves."""

    @property
    def job(self) -> Job:
        return self.begins.job

    def tell(self, *sentences: str) -> None:
        tell(self.show, *sentences)

    @property
    def may_branch(self) -> bool | None:
        """The argument ``branch`` of :meth:`Run.agree`: a run without a good checkpoint takes the job in any
        case.
        """
        return self.branch or None

    def train(self) -> Result:
        """Attaches to the run, or checks it, begins it and watches it to its end, or until this driver is
        told to leave.

        The checks take a while, so the run is looked at anew after them, and after the end of another life of
        the run.  If somebody else has begun it since that look, it is not started again.
        """
        standing = Standing.begun(self.job) if self.branch else Standing.find(self.job)
        # first, since a run may live although its folder is gone
        if (coordinator := None if self.address else self._at_its_cluster(standing)) is not None:
            self._refuse_change()
            self.requests.note()
            return self._attached(coordinator)
        done = None if self.branch else finished(standing.agree(self.job, branch=self.may_branch))
        if done is not None and (not self.local or done[1] < self.job.steps):
            return Result.of(self.job, "Finished", *done)
        objects = [] if self.local else pack(self.job)
        checked = self._checked(standing)
        self.tell(*checked.notes)
        if self.local:
            from elastic.train.alone.local import run_local

            here = partial(begin_here, self.begins, checked.sources, self.show, self.may_branch)
            return Result.of(self.job, *run_local(self.job, self.show, here, checked.build))
        standing = self._look_anew()
        standing.check_local()
        if (
            self.job.validation.patience
            and not self.branch
            and (done := finished(standing, checked.build.held_out)) is not None
        ):
            return Result.of(self.job, "Finished", *done)
        with self.requests.finishing(
            partial(self.tell, "interrupted; Ray is ended as soon as it has started, in up to 30 s")
        ):
            cluster.connect(self.address, self.job.workers, tell=self.tell)
        self.requests.note()
        if (coordinator := attach(self.job.name)) is not None:
            if bucket := bucket_of_another(self.job, coordinator):
                what = (
                    f"name = {self.job.name!r}: another run of this name, with bucket = {bucket}, "
                    "lives on this cluster"
                )
                raise JobError(f"{what}; choose another name")
            self._refuse_change()
        self._heed_the_driver()
        if coordinator is not None:
            if (lives := self._awaited(coordinator)) is None:
                return self._attached(coordinator)
            _await_gone(self.job.name, coordinator, lives)
            standing = self._look_anew()
        return self._watched(self._started(standing, checked, objects))

    def _look_anew(self) -> Standing:
        return Standing.look(self.job, branch=self.may_branch)

    def _at_its_cluster(self, standing: Standing) -> Any | None:
        """Joins the cluster on which the run lives, if this machine is a node of it, or it was started here:
        returns its coordinator.

        Otherwise, or if this process is part of a cluster already and does not train the run by itself
        (``local``), returns None.  A run that is ending there is waited for, because its cluster ends with
        it.  If somebody has deleted the run's folder, no claim says where it lives: then all clusters of this
        machine are asked. Raises :class:`PlatformGaveUp` if the run lives there and this process cannot join,
        and :class:`JobError` if it lives and this is a ``local`` command.
        """
        if not self.local and not cluster.begins_here():
            return None
        job, owner = self.job, standing.owner()
        if owner is not None and not lives_at(owner["address"], job):
            return None
        before, part_of_one = signal.getsignal(signal.SIGTERM), ray.is_initialized()
        elsewhere = part_of_one and owner is not None and not cluster.joined(owner["address"])
        try:
            coordinator = coordinator_here(job) if not elsewhere and joined_cluster_of(job, owner) else None
        except (PlatformGaveUp, ConnectionError, RuntimeError) as error:
            if owner is not None and lives_at(owner["address"], job):
                where = f"{job.name} lives on the cluster at {owner['address']}"
                fix = "if that is another run of this name, start this one here with `--address local`"
                gave_up = Refused if isinstance(error, Refused) else PlatformGaveUp
                raise gave_up(
                    f"{where}, which this process cannot join, so it does not start the run a second "
                    f"time: {error}; {fix}"
                ) from error
            coordinator = None  # something else answers there
        living = coordinator is not None and self._awaited(coordinator) is None
        if self.local and (living or elsewhere):
            address = owner["address"] if owner is not None else ray.get_runtime_context().gcs_address
            what = f"name = {job.name!r}: this run lives on the cluster at {address}"
            raise JobError(f"{what}; `elastic stop` ends it, or choose another name")
        if living:
            note_deletion(job)
            return coordinator
        if not part_of_one:
            ray.shutdown()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray has replaced it
        return None

    def _refuse_change(self) -> None:
        """Raises :class:`JobError` if this command changes the run, which lives on the cluster of this
        process.
        """
        if self.branch or self.accept_code:
            fix = "to change settings, end the run first with `elastic stop`"
            raise JobError(f"name = {self.job.name!r}: this run lives on this cluster; {fix}")

    def _checked(self, standing: Standing) -> Checked:
        """Checks the job as :func:`~elastic.train.checks.preflight.preflight` does, whose import of torch
        takes seconds.

        What needs no torch is checked before: this machine, if the workers will be here, the names of the
        job, and its bucket.  Then the cluster of this machine begins to start, if the run is to have one.
        """
        job, local = self.job, self.local
        here = not local and cluster.starts_here(self.address)
        if here:
            cluster.check_gpus(job.workers)
        check_early(job, here=local or here)
        check_sources(job.notices)
        said = check_bucket(job)
        if not local:
            cluster.begin_here(self.address, job.workers, self.tell)
        from elastic.train.checks.preflight import preflight

        how = {"local": local, "branch": self.branch, "accept_code": self.accept_code}
        checked = preflight(job, **how, start=self.begins, run=standing)
        return replace(checked, notes=[*said, *checked.notes])

    def _heed_the_driver(self) -> None:
        """Gives ``on_driver_exit`` a value that works on this cluster, and tells the user what it means."""
        if self.job.on_driver_exit == "stop":
            return
        setting = 'on_driver_exit = "detach"'
        if not cluster.own():
            return self.tell(
                f"{setting}: the run continues after this command has ended; `elastic stop` stops it"
            )
        fix = "start a cluster that stays with `ray start --head`"
        self.tell(f"{setting} has no effect on a cluster that ends with this process; {fix}")
        self.begins = replace(self.begins, job=self.job.replace(on_driver_exit="stop"))

    def _started(self, standing: Standing, checked: Checked, objects: Sequence[bytes]) -> Any:
        """Begins the run, unless somebody else has since its ``standing``, starts its coordinator and returns
        it.

        Raises :class:`~elastic.errors.NoProgress` if the run was restarted too often without a new step, and
        raises as :func:`~elastic.train.checks.microbatch.decided` and :func:`cluster.smallest_gpu`.
        """
        from elastic.train.checks.microbatch import decided
        from elastic.train.machine.device import limit_of

        restarts.check(standing, again=self.again or standing.branches_at(self.begins.at) is not None)
        workers = self.job.workers
        self.tell(cluster.check_room(workers))
        job, why = decided(
            self.job, lambda: limit_of(self.job) or (cluster.smallest_gpu(workers) if workers.gpus else 0)
        )
        self.tell(why)
        seen = standing.latest_claim()
        begins = replace(self.begins, job=job)
        claimed = begin(begins, self.show, self.may_branch, lambda run, _: claim(run, seen))
        run = Run.open(job)
        self.tell(code.note(run, checked.sources, time.time()))
        build = replace(checked.build, host=cluster.node_name(cluster.here()))
        return start(run, build, self.driver, claimed or seen, objects)

    def _attached(self, coordinator: Any) -> Result:
        """Tells the user that the run lives already, and in which settings it differs from the job, and
        watches it.
        """
        other = ""
        with suppress(PlatformGaveUp):
            settings = ask(coordinator, "settings", deadline_s=self.deadline_s)
            other = differing(Run.look(self.job).job, settings)
        settings = (
            (
                f" with other settings ({other}): those of this command take effect when the run is "
                "started again"
            )
            if other
            else ""
        )
        self.tell(f"attached to {self.job.name}, which runs on this cluster already{settings}")
        return self._watched(coordinator)

    def _watched(self, coordinator: Any) -> Result:
        """Watches a run to its end, or until this driver is told to leave."""
        lives = set[str]()

        def looked(view: View) -> None:
            lives.add(life_of(self.job.name, view.token))
            self.look(view)

        try:
            view = watch(coordinator, self.show, looked, self.driver, self.requests, self.deadline_s)
        except PlatformGaveUp:
            _end(self.job.name, coordinator, lives)
            raise
        if view.over:
            coordinator.leave.remote(self.driver)
            _await_gone(self.job.name, coordinator, lives)
        return _seen(self.job, view, self.requests)

    def _awaited(self, coordinator: Any) -> set[str] | None:
        """Waits for the last save of a run that has ended, or was asked to stop, and returns the lives of
        that run: the new life begins from that save.

        Returns None at once if the run goes on.
        """
        lives = set[str]()
        while (view := view_of(coordinator, self.deadline_s)) is not None:
            if not (view.over or view.stopping):
                return None
            if not (view.over or lives):
                self.tell(
                    f"{self.job.name} is stopping ({view.stopping}); this command waits, then resumes the run"
                )
            lives.add(life_of(self.job.name, view.token))
            if view.over:
                break
            time.sleep(POLL_S)
        return lives


def _settled(job: Job) -> Job:
    """Returns the job with a number in place of ``global_batch = "all"``, for which the data is opened, and
    torch imported.
    """
    if job.global_batch != "all":
        return job
    from elastic.train.session import settled

    return settled(job)


def follow(job: Job, coordinator: Any, screen: Shows) -> Result:
    """Shows the story of a run from its start until the run ends or a signal comes.  The run does not notice
    the signal.
    """
    with Requests() as requests:
        requests.note()
        tell(screen.show, f"attached to {job.name}; Ctrl-C ends this command only, not the run")
        driver = uuid.uuid4().hex
        view = watch(
            coordinator, screen.show, screen.look, driver, requests, 2 * job.deadlines.lease_s, only=True
        )
    coordinator.leave.remote(driver, only=True)
    return _seen(job, view, requests)


def _seen(job: Job, view: View, requests: Requests) -> Result:
    """Returns the result of a run whose newest view is ``view``: its end, or the signal that asked this
    driver to leave.
    """
    if view.over:
        return Result.of(job, view.state, view.reason, view.step, view.job_error)
    return Result(
        view.state,
        f"{requests.asked}: this command ends, the run goes on",
        view.step,
        STOPPED,
        job.bucket,
        job.name,
    )


def claim(run: Run, seen: int) -> int:
    """Claims a run for the coordinator that is about to be started.  Raises :class:`Refused` if somebody has
    begun it meanwhile.
    """
    try:
        return run.claim(ray.get_runtime_context().gcs_address, node=cluster.here(), after=run.follows(seen))
    except Exists:
        what = f"{run.job.name} was started on the cluster at {run.home()} while this command was starting"
        raise Refused(f"{what}; `elastic status` shows it") from None


def start(run: Run, reference: Build, driver: str, seen: int, objects: Sequence[bytes] = ()) -> Any:
    """Starts a coordinator: named, detached, without an accelerator.

    ``reference`` is the build that every worker must match.  ``driver`` starts it, and ``seen`` is the newest
    incarnation that it has seen; if another command has claimed the run since, the coordinator does not
    start.  ``objects`` are those of the job (:func:`~actors.users_code.pack`).  Raises as
    :func:`elastic.runs.data.bind`.
    """
    data.bind(run, reference.data, int(reference.samples))
    job = run.job
    return (
        ray.remote(concurrency_groups={"inbox": 1, "view": 4})(cluster.titled(Coordinator, job.name))
        .options(
            name=name_of(job.name),
            namespace=cluster.NAMESPACE,
            # two drivers that start at the same time get the same coordinator, and the first of them owns the
            # run
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=-1,  # a call to a dead coordinator waits for the next one
            num_cpus=0,
            label_selector=cluster.on_this_node(),
            fallback_strategy=cluster.elsewhere(),
        )
        .remote(
            job,
            reference,
            cluster.search_path(),
            driver,
            seen,
            uuid.uuid4().hex[:6],
            secrets.token_bytes(32),
            *objects,
        )
    )


def watch(
    coordinator: Any,
    show: Show,
    look: Look,
    driver: str,
    requests: Requests,
    deadline_s: float,
    *,
    only: bool = False,
) -> View:
    """Shows the story until the run is over, or until this driver is told to leave and the run does not stop
    because of it.

    ``only`` means that this driver merely watches.  A coordinator that takes over begins a story of its own;
    the request to leave is repeated to it, since the dead coordinator may have lost it.
    """
    told = 0  # the incarnation that knows the request
    for view in views(coordinator, show, deadline_s, driver, only=only):
        for line in lines_of(view):
            show(line)
        look(view)
        if requests.asked and told != view.incarnation and not view.over:
            if only or not ask(coordinator, "leave", driver, requests.asked, deadline_s=deadline_s):
                break
            told = view.incarnation
            tell(
                show,
                f"{requests.asked}: the run stops after a save; press Ctrl-C again to end this command at once",
            )
    return view


def lines_of(view: View) -> list[Line]:
    """Returns the lines to show.  The sentence of the end, which is the reason of the :class:`Result`, is an
    :class:`Ending`.
    """
    ends = view.state in ENDED
    return [
        Ending(line.at, line.text) if ends and type(line) is Sentence and line.text == view.reason else line
        for line in view.lines
    ]


def _await_gone(name: str, coordinator: Any, lives: Collection[str]) -> None:
    """Waits until nothing is left of a run that is over.  Its coordinator ends itself once the last driver
    has seen the end.
    """
    deadline = time.monotonic() + LEAVING_S
    while attach(name) == coordinator and time.monotonic() < deadline:
        time.sleep(POLL_S)
    _end(name, coordinator, lives)


def _end(name: str, coordinator: Any, lives: Collection[str]) -> None:
    """Ends a coordinator, and what its ``lives`` have left on this cluster; but nothing of a run of that name
    that was begun since.
    """
    kill_all([coordinator])
    reap(name, lives)
