"""A worker is one process with one accelerator or CPU slot.

Its training thread is the actor method ``train``.  The control methods run one after the other in a separate
concurrency group, and answer while the training thread computes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import ray

from actors import cluster
from actors.logs import EXAMINE_S
from actors.processes import POLL_S, compiled_folder, end_on_sigterm, entered, log_file, started
from actors.relay import Outbox, gone_for_good
from elastic.errors import DataError, JobError, NoRoomYet
from elastic.ids import NodeId, WorkerId
from elastic.job import Job
from elastic.plan.copy_budget import amount
from elastic.protocol.events import Event, Joined, NodeRefused, StartFailed, Starting
from elastic.protocol.member import Lease, Member
from elastic.runs.branches import Branches
from elastic.threads import go_or_end, later
from elastic.train.apply_fence import ApplyFence
from elastic.train.gauges.counters import Counters, segment
from elastic.train.machine.limits import no_segment, shared_memory
from storage.errors import Unavailable

if TYPE_CHECKING:
    from actors.users_code import UsersCode
    from elastic.train.loop import Trainer
    from elastic.train.step import Session

DISMISSED_S = EXAMINE_S + 2
"""Seconds after which a worker that the run has given up ends itself: its keeper has time to examine and kill
it before.
"""
BLOCK = 512
"""Bytes of a block in the ``st_blocks`` of a file."""
AT_ONCE = ("held_gil", "clock_skew", "memory_hog")
"""Faults that any thread of the process can perform, not only the training thread."""


class Worker:
    """The worker actor, made by ``actors/perform.py``.

    ``train`` is called once; when that call returns or fails, the process has ended.
    """

    def __init__(
        self,
        job: Job,
        run: str,
        worker: WorkerId,
        coordinator: Any,
        code: UsersCode,
        secret: bytes,
        peers: Sequence[str] = (),
        begins: bool = False,
    ) -> None:
        """``peers`` are the addresses of keepers that may have compiled code for this worker; ``begins`` is
        True if the run is new.
        """
        self.job, self.worker, self.coordinator, self.secret, self.peers, self.code = (
            job,
            worker,
            coordinator,
            secret,
            peers,
            code,
        )
        self.outbox = Outbox(coordinator, job.deadlines.fence_s)
        self._made_at, self._made_with_s = time.monotonic(), time.process_time()
        end_on_sigterm()
        sys.path[:0] = [entry for entry in code.search_path if entry not in sys.path]
        with entered(run, self._wait_for_keeper):
            _redirect_output(log_file(run, worker))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # see ``kept_from_children``
            # on SIGUSR1 it writes all stacks into its log, which shows where it hangs
            faulthandler.register(signal.SIGUSR1)
            if why := no_segment(shared_memory()):
                raise JobError(why)
            self.counters = Counters(segment(run, worker), create=True)
        self.counters["pid"], self.counters["started"] = os.getpid(), started(os.getpid())
        self.apply_fence = ApplyFence(Member(worker, job.deadlines.lease_s))
        self.trainer: Trainer | None = None
        self._joined: Joined | None = None
        self._begins, self._begun = begins, False
        self._does = [(self._made_at, "imports its libraries")]
        """The parts of its work until it joins, each with the time at which it began."""
        later(2 * job.deadlines.lease_s, self._leave_unused)
        self._renew_now = threading.Event()

    def train(self) -> None:
        """Runs the worker from its imports to the end of the run.  A second call returns at once: a
        coordinator that does not know whether ``train`` was called calls it again.
        """
        if self._begun:
            return
        self._begun = True
        go_or_end(self._tell_how_far, "start")
        from elastic.plan.placement import bytes_by_class, classes_of
        from elastic.train.loop import Trainer
        from elastic.train.machine import compilers, gpus
        from elastic.train.machine.device import (
            fitting_shard,
            fitting_whole,
            states_fitting,
            wait_for_memory,
        )
        from elastic.train.model import build_model, in_its_stage, tensors_of
        from elastic.train.session import build_of, kind_of, make_session, make_snapshots, prepare_process
        from elastic.train.warmup import choose_recompute
        from storage.objects import ObjectStore

        try:
            self.job = self.code.restore(self.job)
            if self.job.workers.gpus:
                self._enter("asks for its GPU")
            uuid = gpus.checked_uuid() if self.job.workers.gpus else ""
            device = prepare_process(self.job, ray.util.get_node_ip_address())
            self._enter("imports the job's code and opens its data")
            session = make_session(self.job, self.counters)
            self._enter("builds the model")
            model = build_model(self.job, session.builder)
            session.job, tensors = in_its_stage(self.job, model), tensors_of(model, session.rule)
            self._enter("looks for free memory of its device")
            wait_for_memory(session.job, tensors, device, uuid)
            degrees = self.job.layout_rule().degrees
            session.secret = self.secret
            least, states = fitting_shard(session.job, tensors, device), states_fitting(self.job, tensors)
            shared = ceil(cluster.workers_here(self.job.workers) / states)
            self._enter("takes memory for copies and saves")
            session.snapshots = make_snapshots(
                self.job, tensors, device, self.counters, session.faults, least, shared
            )
            build = replace(build_of(session, model), host=cluster.host())
        except gpus.WrongDevice as error:
            return self._start_failed(str(error), misset=cluster.here())
        # by the next start, the store may answer or the memory may be free, of this node or of another one
        except Unavailable as error:
            return self._start_failed(str(error))
        except NoRoomYet as error:
            return self._start_failed(str(error), node=cluster.here())
        except Exception as error:  # the process boundary: this node cannot do what the driver could
            traceback.print_exc()
            self._cannot_start(error)
            return
        checkpoints = Branches(ObjectStore.open(self.job.bucket), self.job.name).checkpoints()
        self.trainer = Trainer(session, self.apply_fence, device, checkpoints, self.report)
        kind = kind_of(device, self.job.attention)
        session.kind = crc32(kind.encode())
        compiled = compilers.place(self.job, build.code, kind, compiled_folder())
        try:
            self._compare(session, device)
            with compiled.kept(self.peers, self.secret) if compiled else contextlib.nullcontext():
                took = choose_recompute(session, tensors, device)
            self._enter("waits for its memory for copies and saves")
            session.snapshots.ready()
            go_or_end(self._keep_lease, "lease")
            least = fitting_shard(session.job, tensors, device, took)
        except JobError as error:
            return self._cannot_start(error)
        whole = fitting_whole(session.job, tensors, device, took)
        self._joined = Joined(
            self.worker,
            cluster.here(),
            kind,
            classes_of(tensors, degrees),
            build,
            bytes_by_class(tensors, degrees),
            least,
            states,
            whole,
            uuid,
        )
        self.report(self._joined)
        print(f"{self.worker}: joined {self._took()}", flush=True)
        self._end(self.trainer)

    def _compare(self, session: Session, device: Any) -> None:
        """Compares the engine with plain torch, if the run is a new one.  Raises :class:`ModelError`."""
        from elastic.train.checks.trial import compare_with_torch

        if self._begins:
            self._enter("compares with plain torch")
            print(compare_with_torch(session, device, self._enter), flush=True)
        self._enter("warms up")

    def _enter(self, doing: str) -> None:
        self._does.append((time.monotonic(), doing))

    def _took(self) -> str:
        """Returns the part of a sentence that tells how long this worker has taken until now, and how long
        each part of its work took.
        """
        ends, computed_s = (
            [at for at, _ in self._does[1:]] + [time.monotonic()],
            time.process_time() - self._made_with_s,
        )
        did = ", ".join(f"{doing} {end - at:.1f}" for (at, doing), end in zip(self._does, ends, strict=True))
        return (
            f"{ends[-1] - self._made_at:.3f} s after it was made, with {computed_s:.3f} s of processor "
            f"time; seconds of each part: {did}"
        )

    def _tell_how_far(self) -> None:
        """Tells the coordinator how far the start of this worker is, until it joins.  It looks four times in
        ``form_s``, and tells only what has changed.

        A slow machine provides memory at a gigabyte per second, so copies of a large model may take minutes.
        """
        told: object = None
        while self._joined is None:
            time.sleep(self.job.deadlines.form_s / 4)
            copies, compiler = self.counters["copies"], sys.modules.get("torch._dynamo.utils")
            graphs = sum(compiler.counters["inductor"].values()) if compiler is not None else 0
            seen = self._does[-1][1], os.fstat(copies).st_blocks if copies else 0, graphs
            if seen != told and self._joined is None:
                self.report(
                    Starting(
                        self.worker, f"{seen[0]}, {amount(seen[1] * BLOCK)} so far" if seen[1] else seen[0]
                    )
                )
            told = seen

    def _wait_for_keeper(self) -> None:
        """Waits for the node's keeper, which makes the run's folder.  Ends the process after two leases: the
        run may be over.
        """
        if time.monotonic() - self._made_at > 2 * self.job.deadlines.lease_s:
            print(
                f"{self.worker}: no keeper of the run has started on this node; this worker ends", flush=True
            )
            os._exit(3)
        time.sleep(POLL_S)

    def _leave_unused(self) -> None:
        """Ends the process if nobody has called ``train``: the order to kill this worker may have come before
        the process existed.
        """
        if not self._begun:
            print(
                f"{self.worker}: no coordinator has called this worker for "
                f"{2 * self.job.deadlines.lease_s:.0f} s; this worker ends",
                flush=True,
            )
            os._exit(3)

    def _cannot_start(self, error: Exception) -> None:
        """Refuses the node, because another start there would fail in the same way.

        An error of the data means that the data is not at a place that all nodes share.
        """
        node, by_job = cluster.here(), isinstance(error, JobError)
        why = (
            f"{self.worker} cannot start on {cluster.node_name(node)}: "
            f"{error if by_job else f'{type(error).__name__}: {error}'}"
        )
        self.report(NodeRefused(node, why, isinstance(error, DataError), by_job))
        self._start_failed("its node is refused")  # which says why, once for all workers of the node

    def _start_failed(self, why: str, misset: NodeId | None = None, node: NodeId | None = None) -> None:
        """Reports the reason before ``train`` returns: afterwards the coordinator counts the process as gone
        and asks for no reason.
        """
        self.report(StartFailed(self.worker, why, misset, node))
        self.outbox.flush()

    def _end(self, trainer: Trainer) -> None:
        """Runs the training to its end, then ends the process: with code 0, or 1 after an error.

        A detached actor would otherwise stay alive.
        """
        code = 1
        try:
            trainer.run()
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            self.outbox.flush()
            sys.stdout.flush()
            os._exit(code)

    def report(self, event: Event) -> None:
        self.outbox.put(event)

    def _keep_lease(self) -> None:
        """Renews the lease again and again.

        If the coordinator does not know this worker any more, or Ray says that no coordinator will come back,
        or no coordinator has answered for two leases, the worker ends itself: an order to kill it may have
        been lost.
        """
        lease_s = self.job.deadlines.lease_s
        with self.apply_fence as member:
            member.heard(time.monotonic())
        while True:
            asked_at, generation = time.monotonic(), self.apply_fence.member.generation
            answer = self._ask_keeper(generation, lease_s / 8) or self._ask_coordinator(
                generation, lease_s / 4
            )
            if answer is not None:
                with self.apply_fence as member:
                    if heeded := member.heed(answer.incarnation):
                        member.renewed(generation, asked_at, answer.granted, answer.recorded_step)
                if heeded and answer.dismissed:
                    print(f"{self.worker}: the run goes on without this worker; this worker ends", flush=True)
                    time.sleep(DISMISSED_S)
                    os._exit(3)
            if self.apply_fence.member.forsaken(time.monotonic()):  # without the lock: an update may hang
                print(
                    f"{self.worker}: no coordinator answered for {2 * lease_s:.0f} s; this worker ends",
                    flush=True,
                )
                os._exit(3)
            # all workers of a node ask at the same time
            self._renew_now.wait(lease_s / 4 - time.monotonic() % (lease_s / 4))
            self._renew_now.clear()

    def _ask_keeper(self, generation: int, timeout_s: float) -> Lease | None:
        """Asks for the lease through the keeper that the outbox uses; returns None without an answer."""
        with contextlib.suppress(ray.exceptions.RayError):
            if (keeper := self.outbox.keeper) is not None:
                return ray.get(keeper.renew.remote(self.worker, generation), timeout=timeout_s)  # type: ignore[no-any-return]
        return None

    def _ask_coordinator(self, generation: int, timeout_s: float) -> Lease | None:
        """Asks for the lease; returns None without an answer.  Ends the process if no coordinator will come
        back.
        """
        try:
            return ray.get(self.coordinator.renew.remote(self.worker, generation), timeout=timeout_s)  # type: ignore[no-any-return]
        except ray.exceptions.RayError as error:
            if gone_for_good(error):
                print(f"{self.worker}: the run is over; this worker ends", flush=True)
                os._exit(3)
        return None

    @property
    def _trainer(self) -> Trainer:
        if self.trainer is None:
            raise RuntimeError(f"{self.worker} has not joined yet")
        return self.trainer

    @ray.method(concurrency_group="life")  # type: ignore[untyped-decorator]
    def lives(self) -> None:
        """Never returns, so the caller learns at once when the worker dies.  Later calls wait in line, and
        their callers learn it too.
        """
        threading.Event().wait()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def speak_through(self, keeper: Any) -> None:
        """Lets ``keeper``, which follows this worker from now on, pass on the worker's messages."""
        self.outbox.through(keeper)

    # ---- control thread: the orders are methods of ``Trainer`` in ``elastic/train/loop.py``

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def obey(self, incarnation: int, order: str, *arguments: Any) -> None:
        """Follows an order of coordinator ``incarnation``, unless a later coordinator was heard."""
        with self.apply_fence as member:
            heeded, latest = member.heed(incarnation), member.incarnation
        if not heeded:
            print(
                (
                    f"{self.worker}: ignored the order {order!r} of coordinator {incarnation}: coordinator "
                    f"{latest} has taken over"
                ),
                flush=True,
            )
            return
        if order == "attach":
            self._attach()
        else:
            getattr(self._trainer, order)(*arguments)
        if order == "go":
            self._renew_now.set()

    def _attach(self) -> None:
        if self._joined is not None and self.trainer is not None:
            self.report(self._joined)
            self.trainer.attach()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def suffer(self, kind: str, point: str, duration_s: float, amount: float) -> None:
        """Performs a fault that chaos cannot cause from outside (``actors/chaos.py``), when the training
        thread next comes to ``point``.

        Without a point, it performs the fault at once if any thread can, otherwise when the training thread
        next comes to any point.
        """
        from elastic.train import own_faults

        if kind in AT_ONCE and not point:
            threading.Thread(target=own_faults.perform, args=(kind, duration_s, amount)).start()
        else:
            self._trainer.session.faults.ask(own_faults.FaultOrder(kind, point, duration_s, amount))


def _redirect_output(path: Path) -> None:
    """Sends the process's output to a file that its keeper can read after its death."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable(all_threads=False)  # a segmentation fault leaves a traceback there too
