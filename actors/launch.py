"""``launch(job)`` trains a job and returns its result.  It checks all it can before any worker starts, then watches the run."""

from __future__ import annotations

import secrets
import signal
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray

from actors import cluster, own_cluster
from actors.begin import Show, begin, begin_here, claim, finished, note_code
from actors.coordinator import Coordinator
from actors.ends import kill_all
from actors.living import (
    Head,
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
)
from actors.objects import pack
from actors.processes import life_of
from actors.screen import screen_for
from actors.signals import Requests
from actors.submitted import check_place
from actors.terminal import lasting
from actors.view import View
from elastic.errors import FINISHED, STOPPED, JobError, PlatformGaveUp, Refused
from elastic.imports import check_packages
from elastic.job import Job
from elastic.protocol.builds import Build
from elastic.report.story import Ending, Line, Sentence
from elastic.report.timeline import ENDED
from elastic.runs import data, restarts
from elastic.runs.branches import flat, in_words
from elastic.runs.forks import write_anew
from elastic.runs.resume import LATEST, Start, start_of
from elastic.runs.run import Run
from elastic.train.bucket import check_bucket
from elastic.train.early import check_early
from storage.errors import Unavailable

if TYPE_CHECKING:
    from elastic.train.preflight import Checked

POLL_S = 0.1
LEAVING_S = 2.0
"""Seconds for a coordinator whose run is over to end itself, once its drivers have seen the end."""
STEPS = 100_000
"""Largest number of steps of which a result gives the losses."""
Look = Callable[[View], None]
"""A function that gets each answer of the coordinator, after its new lines were shown."""


class Shows(Protocol):
    """Shows a run to somebody."""

    def show(self, line: Line) -> None: ...

    def look(self, view: View) -> None: ...


def _nothing(_: Any) -> None:
    """Shows nothing."""


@dataclass(frozen=True)
class Result:
    """The end of a run.  ``state`` is Finished, Stopped or Failed; the last two can be resumed by the same command.

    Any other state means that this driver was told to leave while the run goes on; the same command attaches to it again.
    """

    state: str
    reason: str
    step: int
    exit_code: int
    bucket: str
    name: str
    job_error: str = ""
    """The user's traceback, if the job is at fault."""

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step of the run by step, at most of the last :data:`STEPS`.  They are read from the bucket."""
        return self._column("loss")

    @property
    def validations(self) -> dict[int, float]:
        """The mean loss on the held-out samples, by the step after which it was measured; of as many steps."""
        return self._column("validation_loss")

    def _column(self, name: str) -> dict[int, float]:
        from elastic.runs.metrics import rows_of

        rows = deque(rows_of(Run.find(Job(name=self.name, bucket=self.bucket))), STEPS)
        return {int(row["step"]): row[name] for row in rows if name in row}


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
    """Trains ``job`` to its end.  ``local`` runs one worker in this process, without Ray.  ``show`` gets each line, and ``look`` each
    answer of the coordinator; without ``show`` lines are printed.

    A run that began with other settings goes on with these if ``branch`` says so, unless its state or its place in the data does not fit.
    A run that has no save takes them without a word.  A run whose code was other goes on with that of now if ``accept_code`` says so.
    ``resume`` is ``latest``; or a step of the run, from which a new branch goes on; or ``run@latest``, ``run@best`` or ``run@step``, a
    checkpoint of another run in the same bucket, from which a new run goes on.  ``again`` starts one that was restarted in vain too often.

    Raises :class:`~elastic.errors.ElasticError` if the job cannot work.  Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 to the driver that started the
    run asks for a clean stop with a save; a second Ctrl-C or SIGTERM raises KeyboardInterrupt, and the run stops by itself.  An attached
    driver merely detaches, unless it is the last one.  With ``on_driver_exit = "detach"`` the first one merely detaches too.
    """
    own_cluster.drop()
    with Requests() as requests, nullcontext() if show else lasting():
        if show is None:
            screen = screen_for(job)
            show, look = screen.show, screen.look
        if not local:
            check_packages(Path.cwd())  # this folder comes first on the workers' path
            check_place("bucket", job.bucket)
        _tell(show, write_anew(job := _settled(job)))
        job = (start := start_of(job, resume)).job
        if asked := branch or start.at is not None:
            Run.begun(job)
        if (coordinator := None if address else _at_its_cluster(job, show, local=local)) is not None:  # its folder may be gone
            _refuse_change(job, asked or accept_code)
            requests.note()
            return _attached(job, coordinator, requests, show, look)
        if not asked and (done := finished(job)) is not None and (not local or done[1] < job.steps):
            return _result(job, "Finished", *done)
        objects = [] if local else pack(job)
        checked = _checked(job, address, show, local=local, branch=asked, accept_code=accept_code, start=start)
        branch = asked or Run.find(job).unsaved
        _tell(show, *checked.notes)
        if local:
            from elastic.train.local import run_local

            return _result(job, *run_local(job, show, partial(begin_here, start, checked, show, branch), checked.build))
        run = Run.look(job, branch=branch)
        run.check_local()
        if job.validation.patience and not asked and (done := finished(job, checked.build.held_out)) is not None:
            return _result(job, "Finished", *done)
        seen = run.latest_claim()
        _connect(job, address, requests, show)
        if _lives_here(job):
            _refuse_change(job, asked or accept_code)
            branch = asked
        return _follow(replace(start, job=_heeding_the_driver(job, show)), checked, objects, requests, show, look, seen, again, branch)


def _checked(job: Job, address: str | None, show: Show, *, local: bool, **how: Any) -> Checked:
    """Checks the job as :func:`~elastic.train.preflight.preflight` does, whose import of torch takes seconds.

    What needs no torch is checked before: this machine, if the workers will be here, the names of the job, and its bucket.  Then the
    cluster of this machine begins to start, if the run is to have one.
    """
    here = not local and cluster.starts_here(address)
    if here:
        cluster.check_gpus(job.workers)
    check_early(job, here=local or here)
    said = check_bucket(job)
    if not local:
        cluster.begin_here(address, job.workers, partial(_tell, show))
    from elastic.train.preflight import preflight

    checked = preflight(job, local=local, **how)
    return replace(checked, notes=[*said, *checked.notes])


def _settled(job: Job) -> Job:
    """Returns the job with a number in place of ``global_batch = "all"``, for which the data is opened, and torch imported."""
    if job.global_batch != "all":
        return job
    from elastic.train.session import settled

    return settled(job)


def _connect(job: Job, address: str | None, requests: Requests, show: Show) -> None:
    """Joins the cluster at ``address``, or starts one.  From then on ``requests`` notes the first signal."""
    tell = partial(_tell, show)
    with requests.finishing(partial(tell, "interrupted; Ray is ended as soon as it has started, in up to 30 s")):
        cluster.connect(address, job.workers, tell=tell)
    requests.note()


def _tell(show: Show, *sentences: str) -> None:
    for sentence in filter(None, sentences):
        show(Sentence(time.time(), sentence))


def _lives_here(job: Job) -> bool:
    """Returns whether the run lives on the cluster of this process.  Raises :class:`JobError` if another run of its name does."""
    if (coordinator := attach(job.name)) is None:
        return False
    if bucket := bucket_of_another(job, coordinator):
        raise JobError(f"name = {job.name!r}: another run of this name, in {bucket}, lives on this cluster; choose another name")
    return True


def _refuse_change(job: Job, changes: bool) -> None:
    """Raises :class:`JobError` if this command ``changes`` the run, which lives on the cluster of this process."""
    if changes:
        raise JobError(f"name = {job.name!r}: this run lives on this cluster; end it with `elastic stop`, and then it can change")


def _at_its_cluster(job: Job, show: Show, *, local: bool) -> Any | None:
    """Joins the cluster on which the run lives, if this machine is a node of it, or it was started here: returns the run's coordinator.

    Otherwise, or if this process is part of a cluster already and does not train the run by itself (``local``), returns None.  A run that
    is ending there is waited for, because its cluster ends with it.  If somebody has deleted the run's folder, no claim says where it
    lives: then all clusters of this machine are asked.
    Raises :class:`PlatformGaveUp` if the run lives there and this process cannot join, and :class:`JobError` if it lives and is ``local``.
    """
    if not local and not cluster.begins_here():
        return None
    try:
        owner = Run.find(job).owner()
    except Unavailable:
        return None  # the checks of the job tell of the bucket
    if owner is not None and not lives_at(owner["address"], job):
        return None
    before, deadline_s, part_of_one = signal.getsignal(signal.SIGTERM), 2 * job.deadlines.lease_s, ray.is_initialized()
    elsewhere = part_of_one and owner is not None and not cluster.joined(owner["address"])
    try:
        coordinator = coordinator_here(job) if not elsewhere and joined_cluster_of(job, owner) else None
    except (PlatformGaveUp, ConnectionError, RuntimeError) as error:
        if owner is not None and lives_at(owner["address"], job):
            where = f"{job.name} lives on the cluster at {owner['address']}"
            fix = "if that is another run of this name, `--address local` begins this one here"
            gave_up = Refused if isinstance(error, Refused) else PlatformGaveUp
            raise gave_up(f"{where}, which this process cannot join, so it does not begin it a second time: {error}; {fix}") from error
        coordinator = None  # something else answers there
    living = coordinator is not None and not _is_ending(coordinator, deadline_s)
    if local and (living or elsewhere):
        address = owner["address"] if owner is not None else ray.get_runtime_context().gcs_address
        raise JobError(f"name = {job.name!r}: this run lives on the cluster at {address}; `elastic stop` ends it, or choose another name")
    if living:
        note_deletion(job)
        return coordinator
    if coordinator is not None:
        show(Sentence(time.time(), f"{job.name} is stopping; this command goes on from there"))
    while coordinator is not None and (view := view_of(coordinator, deadline_s)) is not None and not view.over:
        time.sleep(POLL_S)
    if not part_of_one:
        ray.shutdown()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray has replaced it
    return None


def _heeding_the_driver(job: Job, show: Show) -> Job:
    """Returns ``job`` with a value of ``on_driver_exit`` that works on this cluster, and tells the user what it means."""
    if job.on_driver_exit == "stop":
        return job
    setting = 'on_driver_exit = "detach"'
    if cluster.own():
        show(
            Sentence(
                time.time(),
                f"{setting} has no effect on a cluster that ends with this process; start a lasting one with `ray start --head`",
            )
        )
        return job.replace(on_driver_exit="stop")
    show(Sentence(time.time(), f"{setting}: the run continues after this command has ended; `elastic stop` stops it"))
    return job


def _follow(
    begins: Start,
    checked: Checked,
    objects: Sequence[bytes],
    requests: Requests,
    show: Show,
    look: Look,
    seen: int,
    again: bool,
    branch: bool,
) -> Result:
    """Attaches to the run, or starts it, and watches it to its end or until this driver is told to leave.

    ``seen`` is the run's newest incarnation that this driver has seen: it does not start the run if somebody else has begun it since.
    Raises :class:`~elastic.errors.NoProgress` if it was started in vain too often, unless ``again``.
    """
    job = begins.job
    driver = uuid.uuid4().hex
    coordinator, deadline_s = attach(job.name), 2 * job.deadlines.lease_s  # by then the workers have ended themselves
    if coordinator is not None and _is_ending(coordinator, deadline_s):
        _await_end(job.name, coordinator, show, deadline_s)
        coordinator, seen = None, Run.look(job, branch=branch).latest_claim()
    if coordinator is None:
        run = Run.look(job, branch=branch)
        restarts.check(run, again=again or (branch and run.branches_at(begins.at) is not None))
        cluster.check_room(job.workers)
        job = _with_microbatch(job, show)
        seen = begin(replace(begins, job=job), show, branch, lambda run, _: claim(run, seen)) or seen
        note_code(Run.open(job), checked, show)
        coordinator = start(job, replace(checked.build, host=cluster.place(cluster.here())), driver, seen, objects)
        return _watched(job, coordinator, requests, show, look, driver)
    return _attached(job, coordinator, requests, show, look)


def _attached(job: Job, coordinator: Any, requests: Requests, show: Show, look: Look) -> Result:
    """Tells the user that the run lives already, and watches it as :func:`_watched` does."""
    other = _not_ours(job, coordinator, 2 * job.deadlines.lease_s)
    show(Sentence(time.time(), f"attached to {job.name}, which runs on this cluster already{other}"))
    return _watched(job, coordinator, requests, show, look, uuid.uuid4().hex)


def _watched(job: Job, coordinator: Any, requests: Requests, show: Show, look: Look, driver: str) -> Result:
    """Watches a run to its end, or until this driver is told to leave."""
    lives = set[str]()

    def looked(view: View) -> None:
        lives.add(life_of(job.name, view.token))
        look(view)

    try:
        view = watch(coordinator, show, looked, driver, requests, 2 * job.deadlines.lease_s)
    except PlatformGaveUp:
        _end(job.name, coordinator, lives)
        raise
    if view.over:
        coordinator.leave.remote(driver)
        _await_gone(job.name, coordinator, lives)
        return _result(job, view.state, view.reason, view.step, view.job_error)
    return _left(job, view, requests)


def _with_microbatch(job: Job, show: Show) -> Job:
    """Returns ``job`` with a number in place of ``microbatch = "auto"``, and tells the user why.

    Raises as :func:`~elastic.train.microbatch.decided` and :func:`cluster.smallest_gpu`.
    """
    from elastic.train.machine.device import limit_of
    from elastic.train.microbatch import decided

    job, why = decided(job, lambda: limit_of(job) or (cluster.smallest_gpu(job.workers) if job.workers.gpus else 0))
    if why:
        show(Sentence(time.time(), why))
    return job


def _not_ours(job: Job, coordinator: Any, deadline_s: float) -> str:
    """Returns the part of a sentence that names the settings in which a run that lives differs from ``job``; "" if it does not answer."""
    try:
        found = flat(ask(coordinator, "settings", deadline_s=deadline_s))
    except PlatformGaveUp:
        return ""
    ours = flat(Run.look(job).job.model_dump(mode="json", exclude={"on_driver_exit"}))
    other = in_words({name: (found[name], ours[name]) for name in ours if name in found and found[name] != ours[name]})
    return f" with settings of its own, which stay until it is started again ({other})" if other else ""


def follow(job: Job, coordinator: Any, screen: Shows) -> Result:
    """Shows the story of a run from its start until the run ends or a signal comes.  The run does not notice the signal."""
    with Requests() as requests:
        requests.note()
        screen.show(Sentence(time.time(), f"attached to {job.name}; Ctrl-C leaves it as it is"))
        driver = uuid.uuid4().hex
        view = watch(coordinator, screen.show, screen.look, driver, requests, 2 * job.deadlines.lease_s, only=True)
    coordinator.leave.remote(driver, only=True)
    return _result(job, view.state, view.reason, view.step, view.job_error) if view.over else _left(job, view, requests)


def _left(job: Job, view: View, requests: Requests) -> Result:
    reason = f"{requests.asked}: this command leaves, the run goes on"
    return Result(view.state, reason, view.step, STOPPED, job.bucket, job.name)


def _is_ending(coordinator: Any, deadline_s: float) -> bool:
    """Returns whether the run has ended, or was asked to stop, before this driver came."""
    view = view_of(coordinator, deadline_s)
    return view is None or view.over or bool(view.stopping)


def _await_end(name: str, coordinator: Any, show: Show, deadline_s: float) -> None:
    """Waits until a stopping run has made its last save, from which the new run begins."""
    said, lives = False, set[str]()
    while (view := view_of(coordinator, deadline_s)) is not None:
        lives.add(life_of(name, view.token))
        if view.over:
            break
        if not said:
            show(Sentence(time.time(), f"{name} is stopping ({view.stopping}); this command goes on from there"))
        said = True
        time.sleep(POLL_S)
    _await_gone(name, coordinator, lives)


def start(job: Job, reference: Build, driver: str, seen: int, objects: Sequence[bytes] = ()) -> Any:
    """Starts a coordinator: named, detached, without an accelerator.  From now on the folder in the bucket belongs to the run.

    ``reference`` is the build that every worker must match.  ``driver`` is the driver that starts it, if nobody has claimed the run since
    incarnation ``seen``.  ``objects`` are those of the job (:func:`~actors.objects.pack`).  Raises as :func:`elastic.runs.data.bind`.
    """
    run = Run.open(job)
    data.bind(run, reference.data, int(reference.samples))
    job = run.job
    coordinator = (
        ray.remote(concurrency_groups={"inbox": 1, "view": 4})(cluster.titled(Coordinator, job.name))
        .options(
            name=name_of(job.name),
            namespace=cluster.NAMESPACE,
            get_if_exists=True,  # two drivers that start at the same time get the same coordinator, and the first of them owns the run
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=-1,  # a call to a dead coordinator waits for the next one
            num_cpus=0,
            label_selector=cluster.on_this_node(),
            fallback_strategy=cluster.elsewhere(),
        )
        .remote(job, reference, cluster.search_path(), driver, seen, uuid.uuid4().hex[:6], secrets.token_bytes(32), *objects)
    )
    return coordinator


def watch(coordinator: Any, show: Show, look: Look, driver: str, requests: Requests, deadline_s: float, *, only: bool = False) -> View:
    """Shows the story until the run is over, or until this driver is told to leave and the run does not stop because of it.

    ``only`` means that this driver merely watches.  A coordinator that takes over begins a story of its own; the request to leave is
    repeated to it, since the dead coordinator may have lost it.
    """
    seen, told, incarnation, head = 0, False, 0, Head(show)
    while True:
        view: View = ask(coordinator, "view", seen, driver, incarnation, only, deadline_s=deadline_s, head=head)
        if view.incarnation != incarnation:
            seen, told, incarnation = 0, False, view.incarnation
        seen = view.told
        for line in lines_of(view):
            show(line)
        look(view)
        if view.over:
            return view
        if requests.asked and not told:
            told = not only and ask(coordinator, "leave", driver, requests.asked, deadline_s=deadline_s)
            if not told:
                return view
            head.say(f"{requests.asked}: the run stops after a save; a second one ends this command at once")
        time.sleep(POLL_S)


def lines_of(view: View) -> list[Line]:
    """Returns the lines to show.  The sentence of the end, which is the reason of the :class:`Result`, is an :class:`Ending`."""
    ends = view.state in ENDED
    return [Ending(line.at, line.text) if ends and type(line) is Sentence and line.text == view.reason else line for line in view.lines]


def _await_gone(name: str, coordinator: Any, lives: Collection[str]) -> None:
    """Waits until nothing is left of a run that is over.  Its coordinator ends itself once the last driver has seen the end."""
    deadline = time.monotonic() + LEAVING_S
    while attach(name) == coordinator and time.monotonic() < deadline:
        time.sleep(POLL_S)
    _end(name, coordinator, lives)


def _end(name: str, coordinator: Any, lives: Collection[str]) -> None:
    """Ends a coordinator, and what its ``lives`` have left on this cluster; but nothing of a run of that name that was begun since."""
    kill_all([coordinator])
    reap(name, lives)


def _result(job: Job, state: str, reason: str, step: int, job_error: str = "") -> Result:
    return Result(state, reason, step, exit_code(state, job_error), job.bucket, job.name, job_error)


def exit_code(state: str, job_error: str = "") -> int:
    """Returns the exit code of a run that ended in ``state``."""
    codes = {"Finished": FINISHED, "Stopped": STOPPED}
    return codes.get(state, JobError.exit_code if job_error else PlatformGaveUp.exit_code)
