"""The commands for a run that may live: status, attach, stop, clean, logs."""

from __future__ import annotations

import platform
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from actors import cluster, heads, launch, living
from actors.cli.parser import command
from actors.cli.prints import LogReading, Prints
from actors.living import ANSWER_S, bucket_of_another, connected, coordinator_of, note_deletion, run_of
from actors.logs import last_lines
from actors.processes import clear, end_on_sigterm, left_here, life_of, log_folder, nobodys
from actors.result import exit_code
from actors.screen import screen_for, show_result
from actors.terminal import say
from actors.view import View
from elastic.control.run import Ended, Failed, Finished
from elastic.errors import JobError, PlatformGaveUp
from elastic.job import Job
from elastic.runs import owed, skipped
from elastic.runs.resume import over_fits
from elastic.runs.run import LOCAL, Run

SHOWN_WARNINGS = 6
"""Largest number of warnings about gradients that a line names."""
FOLLOW_S = 0.5
"""Seconds from one look at the logs of living workers to the next."""
CLEAR_S = 30.0
"""Seconds that a node may take to end the processes of a run and remove what they left."""


@dataclass(frozen=True)
class Absent:
    """The information about a run that is not found running."""

    said: str
    """The sentence for the user."""
    over: bool
    """True if the run was begun and certainly does not run any more."""
    end: Ended | None = None
    """The way in which it ended, if its bucket says so."""

    @classmethod
    def of(cls, job: Job) -> Absent:
        """Returns what the bucket says about the run.  Raises :class:`JobError` if it has no such run."""
        run = Run.begun(job)
        if (owner := run.owner()) is None and (claim := run.latest_claim()):
            key = run.store.full_name(f"{job.name}/owner/{claim:06d}.json")
            what = f"{key} is damaged, so it is not known where {job.name} was started last"
            there = f"newest good checkpoint: {run.newest() or 'none'}"
            return cls(f"{what}; {there}; if the run has ended, `elastic train` goes on with it", over=False)
        if owner is None:
            return cls(f"{job.name} in {job.bucket} is starting, or ended before it had started", over=False)
        if (local := run.local_process()) is not None:
            by = f"by process {local.pid} of this machine"
            stops = f"(--local); stop it with Ctrl-C in its terminal, or `kill -INT {local.pid}`"
            said = f"is trained {by} {stops}" if local.trains else f"is being rolled back {by}"
            return cls(f"{job.name} {said}", over=False)
        end = run.end()
        elsewhere = "" if end is not None else run.local_elsewhere()
        over = (
            end is not None
            or cluster.joined(owner["address"])
            or (owner["address"] == LOCAL and not elsewhere)
        )
        stands = (
            "is not running"
            if over
            else (f"is not running, or its cluster, {owner['address']}, cannot be reached from here")
        )
        if not over and owner.get("host") == platform.node() and not heads.reachable(owner["address"]):
            stands = (
                f"has not said how it ended, and its cluster on this machine, {owner['address']}, is "
                "gone; `elastic train` goes on with the run"
            )
        if elsewhere:
            stands = (
                f"was started with --local {elsewhere}, and the bucket does not say that it has ended; "
                "if it still runs, end it there with Ctrl-C"
            )
        how = "" if end is None else f"; it ended as {type(end).__name__}"
        steps = "" if isinstance(end, Finished) else f", of {run.job.steps} steps"
        reason = "" if end is None else end.why if isinstance(end, Finished) else end.reason
        why = f" ({reason})" if reason else ""
        known = run.state()
        newest = max(known.history.saved, default=None)
        if over and end is None and not run.branched:
            again = "goes on from there" if newest is not None else "begins at step 0"
            how = (
                "; no end was recorded (it was killed, or its last save failed): the same command line "
                f"{again}"
            )
        rest = (
            run.passed_over(known),
            skipped.sentence(run, known.skips),
            over_fits(run),
            owed.sentence(owed.debts(run)),
        )
        more = "".join(f"; {told}" for told in rest if told)
        return cls(
            f"{job.name} {stands}; newest good checkpoint: {newest or 'none'}{steps}{how}{why}{more}",
            over,
            end,
        )


@command("status")
def status(job: Job, /, once: bool = False) -> None:
    """Shows where a run stands, and follows it.

    once: print it once, and do not follow

    Raises :class:`JobError` if the bucket has no such run.
    """
    coordinator = coordinator_of(job)
    if coordinator is None:
        say(Absent.of(job).said)
        return
    note_deletion(job)
    _watch(job, coordinator, once=once)
    if once and (said := over_fits(Run.find(job))):
        say(said)


@command("attach")
def attach(job: Job, /, quiet: bool = False, prints: str | None = None) -> int:
    """Follows a run from its start to its end; Ctrl-C leaves it running.

    quiet -q: print only errors, and how the run ended
    prints WORKERS: also show what these workers print, one or several such as w3,w5; `first` is one living
        worker, `all` is every worker (default: none)

    Raises :class:`PlatformGaveUp` if its bucket does not say how it ended, and :class:`JobError` if the
    bucket has no such run.
    """
    coordinator = coordinator_of(job)
    if coordinator is not None:
        note_deletion(job)
        result = launch.follow(job, coordinator, Prints(screen_for(job, quiet=quiet), prints))
        # the steps are those of the run, whatever the file says by now
        return show_result(result, Run.find(job).job)
    absent = Absent.of(job)
    if absent.end is None:
        raise PlatformGaveUp(absent.said)
    say(absent.said)
    return exit_code(
        type(absent.end).__name__, absent.end.job_error if isinstance(absent.end, Failed) else ""
    )


@command("stop")
def stop(job: Job, /) -> None:
    """Stops a run after a save; `elastic train` goes on from there.

    Raises :class:`PlatformGaveUp` if its coordinator cannot be reached or does not answer, and
    :class:`JobError` if the bucket has no such run.
    """
    coordinator = coordinator_of(job)
    if coordinator is None:
        absent = Absent.of(job)
        if not absent.over:
            raise PlatformGaveUp(absent.said)
        say(absent.said)
        return
    note_deletion(job)
    driver = uuid.uuid4().hex  # with a driver that waits, the coordinator stays until it has told the end
    _watch(job, coordinator, once=False, driver=driver, stop="elastic stop")


def _watch(job: Job, coordinator: Any, once: bool, driver: str = "", stop: str = "") -> None:
    """Prints where the run stands and, unless ``once``, what happens to it until it is over.

    ``driver`` is the name under which the coordinator is told that somebody waits.  ``stop`` is the reason
    with which each coordinator of the run is told to stop it.  The run is over when its coordinator has gone.
    Raises :class:`PlatformGaveUp` if a coordinator is there and does not answer.
    """
    deadline_s, screen = 2 * job.deadlines.lease_s, screen_for(job)
    shown, asked = "", 0
    end_on_sigterm()  # Ray's own handler prints a stack
    try:
        for view in living.views(coordinator, screen.show, deadline_s, driver):
            if stop and asked != view.incarnation and not view.over:
                asked = view.incarnation
                living.ask(coordinator, "stop", stop, deadline_s=deadline_s)
            if (stands := _stands(view)) != shown:
                say(
                    f"{view.token}: {view.state}, step {view.step} of {view.steps}, "
                    f"{stands}{_copies(view)}{_speed(view)}; {view.reason}"
                )
            shown = stands
            for line in view.lines[-20:]:
                screen.show(line)
            screen.look(view)
            if view.over and driver:
                coordinator.leave.remote(driver)
            if once:
                return
    except PlatformGaveUp:
        if living.attach(job.name) is not None:
            raise
        say(f"{job.name} is not running any more; newest good checkpoint: {Run.find(job).newest() or 'none'}")


def _stands(view: View) -> str:
    """Returns the part of the status line that must change before the line is printed again."""
    workers = ", ".join(f"{worker}@{node[:6]}" for worker, node in sorted(view.workers.items()))
    open_ = "" if view.unprotected_since is None else f"; unprotected since step {view.unprotected_since}"
    alone = (
        ""
        if view.unbuddied_since is None
        else (f"; no copy on another node since step {view.unbuddied_since}")
    )
    more = f" and {len(view.warned) - SHOWN_WARNINGS} more" if len(view.warned) > SHOWN_WARNINGS else ""
    warned = f"; warned of: {', '.join(view.warned[:SHOWN_WARNINGS])}{more}" if view.warned else ""
    rest = "".join(f"; {each}" for each in (view.skipped, view.best, view.owed) if each)
    return (
        f"generation {view.generation}, incarnation {view.incarnation}; workers "
        f"{workers or 'none'}{open_}{alone}{warned}{rest}"
    )


def _copies(view: View) -> str:
    """Returns how often copies are made.  It varies with the step time, so no line is printed for its change
    alone, unlike for :func:`_stands`.
    """
    copies, buddies = (
        f"every {pace} steps" if pace > 1 else "every step" if pace else "none" for pace in view.paces
    )
    return f"; copies in host memory {copies}, on other nodes {buddies}" if any(view.paces) else ""


def _speed(view: View) -> str:
    return f"; {view.speed}" if view.speed else ""


@command("clean")
def clean(job: Job, /, force: bool = False) -> int:
    """Removes what a dead run has left on its cluster: actors, shared memory, logs on the nodes.

    force: end a run that lives, without a save

    Raises :class:`PlatformGaveUp` if the run lives, unless ``force``.
    """
    lives = Run.find(job).lives()
    if not connected(job):
        if lives:
            _tell(
                clear(job.name, lives, CLEAR_S),
                "this machine (the run's cluster has ended, or this machine cannot reach it)",
            )
        else:
            say(_unclaimed(job))
        return 0
    coordinator, life = living.attach(job.name), ""
    if coordinator is not None and (bucket := bucket_of_another(job, coordinator)):
        say(f"another run named {job.name}, with bucket = {bucket}, lives on this cluster; it is left alone")
        coordinator = None
    elif coordinator is not None:
        life = _life_to_end(job.name, coordinator, force)
    if not (lives := lives | {life} - {""}):
        say(_unclaimed(job))
    ended = living.reap(job.name, lives)
    # such a coordinator is of this run, as are its workers
    if coordinator is not None and (life or ended):
        ended += living.reap(job.name, {""})
    elif coordinator is not None:
        say(
            f"a coordinator named {job.name} lives on this cluster, does not say which bucket it uses, "
            "and has no worker of this run; it is left alone"
        )
    _tell(ended, "the cluster")
    if cluster.grows():  # a run that lives soon tells its own request again
        cluster.request(job.workers, 0)
    tasks = {
        ray.remote(num_cpus=0, scheduling_strategy=cluster.only_on(node))(clear).remote(
            job.name, lives, CLEAR_S
        ): cluster.node_name(node)
        for node in cluster.nodes()
    }
    done, silent = ray.wait(list(tasks), num_returns=len(tasks), timeout=2 * CLEAR_S)
    for each in done:
        _tell(ray.get(each), tasks[each])
    for each in silent:
        say(f"{tasks[each]} did not answer, so nothing was removed there")
    return PlatformGaveUp.exit_code if silent else 0


def _unclaimed(job: Job) -> str:
    """Returns the sentence about a run without a claim: only a claim says what belongs to the run."""
    left = [str(each) for each in nobodys(job.name)]
    advice = (
        f"if no run named {job.name} lives, remove {', '.join(left)} by hand"
        if left
        else f"this machine has nothing left of a run named {job.name}"
    )
    return (
        f"{job.bucket} has no claim of {job.name}, so nothing is removed: correct the name or the bucket; "
        f"or, if somebody has deleted the run's folder: {advice}"
    )


def _life_to_end(name: str, coordinator: Any, force: bool) -> str:
    """Returns the life of the run, whose claim may be deleted, or "" if its coordinator does not tell.

    Raises :class:`PlatformGaveUp` if the run lives, unless ``force``.
    """
    fix = "`elastic stop` stops it with a save, --force ends it as it is"
    try:
        view = ray.get(coordinator.view.remote(10**9), timeout=ANSWER_S)
    except ray.exceptions.GetTimeoutError:
        if force:
            return ""
        raise PlatformGaveUp(
            f"{name} may live: its coordinator is there, but has not answered for {ANSWER_S:g} s; {fix}"
        ) from None
    except ray.exceptions.RayActorError:
        return ""
    if not view.over and not force:
        raise PlatformGaveUp(f"{name} lives ({view.state}, step {view.step} of {view.steps}); {fix}")
    return life_of(name, view.token)


def _tell(removed: list[str], where: str) -> None:
    for each in removed:
        say(f"removed {each}")
    if not removed:
        say(f"nothing to remove on {where}")


@command("logs")
def logs(job: Job, workers: Sequence[str] = (), /, follow: bool = False) -> int:
    """Prints the last lines of each worker, and how it ended.

    workers: the workers (default: every worker that has a log)
    follow -f: keep printing what living workers print, until the run is over

    Raises :class:`JobError` if the bucket has no such run, and :class:`PlatformGaveUp` if its coordinator
    does not answer.
    """
    run, said, prefix = run_of(job), False, f"{job.name}/logs/"
    stored = [f"{prefix}{found[0]}" for found in run.store.matching(prefix, r".+[.]log")]
    for key in stored:
        if not workers or Path(key).stem in workers:
            print(run.store.get(key).decode(errors="replace"))
            said = True
    coordinator, ends = coordinator_of(job), dict[str, int]()
    for path in left_here(job.name, run.lives()) if coordinator is None else ():
        key = f"{prefix}{path.parent.name.removeprefix(f'{job.name}-')}/{path.name}"
        if (not workers or path.stem in workers) and key not in stored:
            with open(path, "rb") as file:
                print(
                    "\n".join(
                        [
                            (
                                f"# {path.stem}: the bucket has no log of this worker; this is the end "
                                f"of its file {path}"
                            ),
                            *last_lines(file),
                            "",
                        ]
                    )
                )
            said = True
    while (
        coordinator is not None
        and (view := living.view_of(coordinator, 2 * job.deadlines.lease_s)) is not None
        and not view.over
    ):
        asked = {worker: node for worker, node in view.workers.items() if not workers or worker in workers}
        for worker, (end, text) in LogReading(view.token, asked, ends).wait(ANSWER_S).items():
            if text:
                head = "" if worker in ends and len(view.workers) == 1 else f"# {worker}, which lives\n"
                print(f"{head}{text}", end="", flush=True)
            ends[worker], said = end, True
        if not follow:
            break
        time.sleep(FOLLOW_S)
    if not said:
        if (owner := run.owner()) is not None and owner["address"] == LOCAL:
            raise JobError(
                f"{job.name} runs with --local, which stores no logs: see the terminal in which it "
                "was started"
            )
        of = f" of {', '.join(workers)}" if workers else ""
        say(
            f"no logs{of} in {job.bucket}/{prefix}, and no living worker{of} can be reached from this "
            f"machine; a killed run leaves its logs on its nodes: look for {log_folder(f'{job.name}-*')} on "
            "each node (this machine has none)"
        )
    return 0 if said else 1
