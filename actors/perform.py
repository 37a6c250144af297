"""Performs actions: starts workers, opens stores, sends plans, fences, settles, kills, writes manifests.

Orders to one worker are sent in the order of the actions, through its node's keeper (``actors/relay.py``).
Work that waits for an answer (a store's address, the bucket) runs on a small pool and reports back as an
event, so that the coordinator never waits.
"""

from __future__ import annotations

import contextlib
import random
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, assert_never

import ray

from actors import cluster
from actors.ends import (
    NODE_DIED,
    UNREACHED,
    kill_all,
    leave_nothing_on,
    succeeded,
    wait_for_all,
    why_ended,
    why_not_made,
)
from actors.keeper import GROUPS, Keeper
from actors.logs import EXAMINE_S
from actors.relay import Orders
from actors.survivors import Left
from actors.users_code import UsersCode
from actors.worker import Worker
from elastic.control.run import RunState
from elastic.ids import NodeId, Version, WorkerId
from elastic.job import Job
from elastic.probe import COORDINATOR, Probe
from elastic.protocol.actions import (
    Action,
    CommitManifest,
    ConnectAhead,
    Exit,
    Fence,
    Form,
    Go,
    Kill,
    LetGo,
    ListCopies,
    Pair,
    Pause,
    Quarantine,
    Release,
    Retain,
    Save,
    Settle,
    StartWorkers,
    Upload,
)
from elastic.protocol.events import (
    ConnectedAhead,
    Event,
    KeeperLost,
    KeeperUp,
    Lost,
    NodeRefused,
    Saved,
    SaveFailed,
    StartFailed,
)
from elastic.protocol.plan import Plan
from elastic.runs.receipts import Parts
from elastic.runs.retention import Retention
from elastic.runs.run import Run
from elastic.threads import later
from storage.checkpoints import ShardReceipt
from storage.errors import Deposed, Full, StorageError, Unavailable

STORE_DEADLINE_S = 20
"""Seconds that a keeper may take to open a store, before it counts as lost."""
CONNECT_AHEAD = "connect_ahead"
"""The order of a worker that a ``ConnectAhead`` becomes."""
SHIP_S = 10.0
"""Seconds that the bucket may take for the journal, which comes before a manifest."""
PROBE_DEADLINE_S = 60
"""Seconds that a new keeper may take for each answer: whether it sees the bucket, and its address."""
MANY = 64
"""Number of receivers from which on a long message is put into Ray's object store once, instead of being sent
with each call.
"""
PEERS = 3
"""Number of keepers of which a new worker may ask for compiled code; the first one that has it is enough."""
REACHES, REACH_S = 20, 0.5
"""Number of times that an actor that cannot be reached is asked again before it counts as lost, and the
seconds between two attempts.
"""


class ActorGroup:
    """The actors of one run.  ``post`` puts an event into the coordinator's inbox and may be called from any
    thread.
    """

    def __init__(
        self,
        job: Job,
        run: Run,
        token: str,
        incarnation: int,
        coordinator: Any,
        code: UsersCode,
        secret: bytes,
        post: Callable[[Event], None],
    ) -> None:
        self.job, self.run, self.token, self.incarnation = job, run, token, incarnation
        self.coordinator, self.code, self.secret, self.post = coordinator, code, secret, post
        self.workers: dict[WorkerId, Any] = {}
        self.joined: dict[WorkerId, NodeId] = {}
        self.keepers: dict[NodeId, Any] = {}
        self._kept: set[NodeId] = set()
        """The nodes on which the run has or had a keeper, as far as this coordinator knows.  Files of the run
        may be there.
        """
        self._guests = defaultdict[NodeId, set[WorkerId]](set)
        """The workers of each node that have joined: ``joined`` the other way round."""
        self.orders = Orders(incarnation, self.workers, self.joined, self.keepers, job.deadlines.fence_s)
        self.parts = Parts()
        self._lives: set[Any] = set()
        """One call to each actor that is not known to have ended; the call ends when the actor ends."""
        self.ship: Callable[[float], bool] = lambda timeout_s: True
        """Writes the whole journal to the bucket and returns whether that succeeded."""
        self._committing: set[Version] = set()
        """The versions whose manifests are being written."""
        self._uploads = 0
        """Number of times that keepers were told which saves are on their way."""
        self._closing = False
        self.tell: Callable[[str], None] = lambda sentence: None
        """Adds a sentence to the run's story: something that was found out and decides nothing."""
        self.saved: Callable[[], None] = lambda: None
        """Called when a checkpoint is in the bucket."""
        self.probe = Probe(run.store, job.name, token)
        self.probe.leave(COORDINATOR)
        self.probe.remove_earlier()
        self._addresses: dict[NodeId, str] = {}
        """The addresses of keepers, of which some may be gone."""
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="perform")
        self._looks = ThreadPoolExecutor(4, thread_name_prefix="look")
        self._forms = ThreadPoolExecutor(2, thread_name_prefix="form")
        """Separate pools, so that forming never waits behind calls that wait for the bucket, nor manifests
        behind new keepers.
        """
        self._retention = Retention(run, incarnation, lambda sentence: self.tell(sentence))
        self._begins = run.newest() is None
        """True as long as the run has no checkpoint and no world has formed: workers that start meanwhile
        compare the engine with plain torch.
        """
        self._stores: dict[int, dict[NodeId, None]] = {}
        """The nodes that host a store of each generation that is not settled: more than one if another node
        than the first was chosen once the world was formed.
        """

    def perform(self, action: Action) -> None:
        match action:
            case StartWorkers(workers, avoid):
                for worker in workers:
                    self._start(worker, avoid)
            case Form(plan=plan):
                self._begins = False
                self._stores.setdefault(plan.generation, {})[plan.store_node] = None
                self._do(self._forms, self._form, plan, "form")
            case ConnectAhead(plan=plan):
                self._stores.setdefault(plan.generation, {})[plan.store_node] = None
                self._do(self._forms, self._form, plan, CONNECT_AHEAD)
            case Go(generation, members):
                self.orders.send(members, "go", generation)
            case Pause(generation, members, save, hand_over):
                self.orders.send(members, "pause", generation, save, hand_over)
            case Fence(generation, members, whole):
                self.orders.send(members, "fence", generation, whole)
            case Settle(generation, members, outcome):
                self.orders.send(members, "settle", generation, _once(outcome, members))
                homes = self._stores.pop(generation, None)
                # an earlier coordinator chose the node: every keeper is asked
                for keeper in list(self.keepers.values()) if homes is None else self._those(homes):
                    keeper.close_store.remote(self.incarnation, generation)
            case Kill(workers, _, examine):
                for worker in workers:
                    self._examine(worker) if examine else self._kill(worker)
            case Upload(keepers, saves, generation, version):
                self._uploads += 1
                for node in keepers:
                    self._upload(
                        node,
                        self._uploads,
                        tuple(save for save in saves if node in save.nodes),
                        generation,
                        version,
                    )
            case CommitManifest(version, lineage, by):
                if version not in self._committing:  # a manifest of many members takes its time
                    self._committing.add(version)
                    self._do(self._pool, self._commit, version, lineage, by)
            case Quarantine(version, reason):
                self._do(self._pool, self.run.checkpoints.quarantine, version, reason)
            case Retain():
                self._retention.ask(action)
            case ListCopies(generation, keepers):
                for keeper in self._those(keepers):
                    keeper.list_copies.remote(self.incarnation, generation)
            case Release(keepers, copied, buddied):
                for keeper in self._those(keepers):
                    keeper.release.remote(self.incarnation, copied, buddied)
            case Pair(_, buddies):
                for node, _, address in buddies:
                    for keeper in self._those((node,)):
                        keeper.pair.remote(self.incarnation, address)
            case LetGo(nodes):
                for keeper in self._those(nodes):
                    keeper.left_world.remote(self.incarnation)
            case Exit(workers):
                self.orders.send(workers, "exit")
            case _:
                assert_never(action)

    def _do(self, pool: ThreadPoolExecutor, work: Callable[..., object], *arguments: Any) -> None:
        """Runs ``work`` on the pool.  If it fails, the story says so: nobody asks for its result."""

        def done(future: Future[object]) -> None:
            error = None if future.cancelled() else future.exception()
            if isinstance(error, StorageError | OSError):
                self.tell(f"{work.__name__.strip('_')} failed: {error}")
            elif error is not None:
                self.tell(
                    f"{work.__name__} failed; this is a bug in "
                    f"Elastic\n{''.join(traceback.format_exception(error))}"
                )

        pool.submit(work, *arguments).add_done_callback(done)

    # ---- what another coordinator has left

    def adopt(self, left: Left, run: RunState) -> None:
        """Takes over the actors of an earlier coordinator; ``run`` says what is known of them.  New calls to
        these actors notice when they die.
        """
        self.workers.update(left.workers)
        self.keepers.update(left.keepers)
        self._kept |= {
            *left.keepers,
            *run.cluster.keepers,
            *run.copies.hosts,
            *(known.node for known in run.workers.values()),
        }
        self._addresses = {node: host.address for node, host in run.copies.hosts.items() if host.address}
        for worker, known in run.workers.items():
            if worker in left.workers:
                self.joined[worker] = known.node
                self._guests[known.node].add(worker)
        for worker, actor in left.workers.items():
            if worker in run.members.starting:
                actor.train.remote()
            self._when_done(actor.lives.remote(), actor, partial(self._ended, worker))
        for node in left.keepers:
            self._follow_keeper(node) if node in run.cluster.keepers else self._await_keeper(node)

    def attach(self, asked: tuple[Version, ...]) -> None:
        """Asks the workers where they stand; they answer with events.  There may be manifests of the versions
        in ``asked`` already.
        """
        self.orders.send(tuple(self.workers), "attach")
        for version in asked:
            self._do(self._pool, self._look_for, version)

    def _look_for(self, version: Version) -> bool:
        """Reports the manifest of ``version`` as written if there is one.  Returns whether there is."""
        with contextlib.suppress(Exception):
            self.post(Saved(version, self.run.checkpoints.manifest(version).digest))
            return True
        return False

    # ---- workers

    def _start(self, worker: WorkerId, avoid: tuple[NodeId, ...]) -> None:
        """Starts the worker as a detached actor: it survives the coordinator, and ``reap`` ends it."""
        actor = (
            ray.remote(concurrency_groups={"control": 1, "life": 1})(
                cluster.titled(Worker, f"{self.job.name}/{worker}")
            )
            .options(
                name=f"{self.token}/{worker}",
                lifetime="detached",
                max_restarts=0,
                num_cpus=self.job.workers.cpus,
                num_gpus=self.job.workers.gpus,
                scheduling_strategy="SPREAD",
                label_selector=cluster.selector_of(self.job.workers, avoid),
            )
            .remote(
                self.job,
                self.token,
                worker,
                self.coordinator,
                self.code,
                self.secret,
                self._peers(),
                self._begins,
            )
        )
        self.workers[worker] = actor
        self._when_done(actor.train.remote(), actor, lambda error: self._ended(worker, error))

    def _peers(self) -> list[str]:
        """Returns the addresses of a few keepers whose workers have joined, and so have compiled."""
        there = [
            self._addresses[node]
            for node in list(self.keepers)
            if node in self._addresses and self._guests.get(node)
        ]
        return random.sample(there, min(len(there), PEERS))

    def _ended(self, worker: WorkerId, error: BaseException | None) -> None:
        if isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed:
            if not self._closing:
                self._do(self._pool, self._not_made, worker, error)
            return
        reason, node = why_ended(error), self.joined.get(worker)
        if reason == NODE_DIED and node is not None:
            self.post(KeeperLost(node, NODE_DIED, with_its_node=True))  # it may have no keeper that tells
        lost = Lost(worker, reason, certain=reason not in (NODE_DIED, UNREACHED))
        if node is not None or not lost.certain or self._closing:
            self.post(lost)
        else:
            later(0, partial(self._lost_before_it_joined, lost))

    def _lost_before_it_joined(self, lost: Lost) -> None:
        """Reports the worker as lost, with its node if Ray says so: workers that joined have told theirs."""
        node = None
        with contextlib.suppress(ray.exceptions.RayError):
            actor = self.workers.get(lost.worker)
            node = cluster.node_of(actor) if actor is not None else None
        self.post(replace(lost, node=node))

    def _not_made(self, worker: WorkerId, error: BaseException) -> None:
        """Refuses the node: the process came up but the worker could not be made, and another start there
        would fail in the same way.
        """
        if (node := cluster.node_of(self.workers[worker])) is not None:
            self.post(
                NodeRefused(
                    node, f"{worker} cannot start on {cluster.node_name(node)}: {why_not_made(error)}"
                )
            )
        self.post(StartFailed(worker, why_not_made(error)))

    def on_their_way(self, run: RunState) -> dict[WorkerId, Any]:
        """Returns the actors of the workers that are being started."""
        return {worker: self.workers[worker] for worker in run.members.starting if worker in self.workers}

    def _when_done(
        self, ref: Any, actor: Any, then: Callable[[BaseException | None], None], again: int = REACHES
    ) -> None:
        """Calls ``then`` when ``ref``, a call that ends with ``actor``, is done.

        If the actor cannot be reached, Ray may not know yet that it is dead; so the actor is asked ``again``
        times.  ``then`` runs on Ray's own thread, where it must not wait for Ray: nothing would ever be
        answered again in this process.
        """

        def done(future: Future[Any]) -> None:
            error = future.exception()
            self._lives.discard(ref)
            if isinstance(error, ray.exceptions.ActorUnavailableError) and again and not self._closing:
                later(REACH_S, lambda: self._when_done(actor.lives.remote(), actor, then, again - 1))
            else:
                then(error)

        self._lives.add(ref)
        ref.future().add_done_callback(done)

    def welcome(self, worker: WorkerId, node: NodeId) -> None:
        """Notes that the worker has joined, and lets its node's keeper follow it."""
        self.joined[worker] = node
        self._guests[node].add(worker)
        for keeper in self._those((node,)):
            keeper.watch.remote(worker, self.workers.get(worker))

    def forget(self, worker: WorkerId) -> None:
        """Forgets a worker that the run does not know any more; a run of months has many."""
        self.workers.pop(worker, None)
        self._guests[self.joined.pop(worker, NodeId(""))].discard(worker)

    def _kill(self, worker: WorkerId) -> None:
        if worker in self.workers:
            ray.kill(self.workers[worker], no_restart=True)
        keeper = self.keepers.get(self.joined.get(worker, NodeId("")))
        if keeper is not None:
            keeper.kill.remote(self.incarnation, worker)

    def _examine(self, worker: WorkerId) -> None:
        """Lets the worker's keeper find out where it stands and kill it.  Kills it from here if the keeper
        has not done so in time.
        """
        keeper = self.keepers.get(self.joined.get(worker, NodeId("")))
        if keeper is None:
            return self._kill(worker)

        def done(future: Future[Any]) -> None:
            if future.exception() is None and (key := future.result()):
                self.tell(
                    f"{worker} hung; its log (with its stack, if py-spy could read it) is "
                    f"{self.job.bucket}/{key}"
                )

        keeper.examine.remote(self.incarnation, worker).future().add_done_callback(done)
        later(EXAMINE_S + 1, partial(self._kill, worker))

    def evaluate(self, worker: WorkerId, version: Version) -> None:
        """Orders a spare worker to validate a checkpoint.  Any thread may call it."""
        self.orders.send((worker,), "evaluate", version)

    def _upload(
        self, node: NodeId, number: int, saves: tuple[Save, ...], generation: int, version: Version
    ) -> None:
        """Tells the keeper of ``node`` its saves, again and again while the keeper cannot be reached, because
        no later call may come.

        A keeper ignores a list that is older than its newest one.  A keeper that stays out of reach soon
        counts as lost.
        """

        def done(future: Future[Any]) -> None:
            if isinstance(future.exception(), ray.exceptions.ActorUnavailableError) and not self._closing:
                later(REACH_S, partial(self._upload, node, number, saves, generation, version))

        for keeper in self._those((node,)):
            keeper.upload.remote(
                self.incarnation, number, saves, generation, version
            ).future().add_done_callback(done)

    def _form(self, plan: Plan, order: str) -> None:
        """Opens a store for the generation of ``plan`` at its keeper, and sends its members the plan with ``order``."""
        if plan.generation not in self._stores:  # it was settled while this thread waited for other stores
            return
        try:
            store = ray.get(
                self.keepers[plan.store_node].open_store.remote(self.incarnation, plan.generation),
                timeout=STORE_DEADLINE_S,
            )
        except (ray.exceptions.RayError, KeyError) as error:
            if (
                order == CONNECT_AHEAD
            ):  # the world connects in its pause, and the keeper shows then if it lives
                why = f"the keeper of node {plan.store_node[:8]} opened no store for it: {why_ended(error)}"
                refused = ConnectedAhead(plan.members[0], plan.generation, plan.ahead, plan.incarnation, why)
                return self.post(refused)
            self.post(
                KeeperLost(
                    plan.store_node,
                    f"its keeper opened no store for generation {plan.generation}: {why_ended(error)}",
                )
            )
            for keeper in self._those((plan.store_node,)):
                ray.kill(keeper, no_restart=True)  # otherwise the node would never get another keeper
            return
        self.orders.send(plan.members, order, _once(plan, plan.members), store)

    # ---- keepers

    def _those(self, nodes: Iterable[NodeId]) -> list[Any]:
        """Returns the keepers of ``nodes``, as far as they exist."""
        return [keeper for node in nodes if (keeper := self.keepers.get(node)) is not None]

    def keep(self, node: NodeId) -> None:
        """Starts a keeper on ``node``, which must have none, unless the run is over."""
        if self._closing:
            return
        actor = (
            ray.remote(concurrency_groups=GROUPS)(cluster.titled(Keeper, self.job.name))
            .options(
                name=f"{self.token}/keeper-{node[:12]}",
                lifetime="detached",
                max_restarts=0,
                num_cpus=0,
                max_concurrency=4,
                scheduling_strategy=cluster.only_on(node),
            )
            .remote(
                self.token,
                self.job.bucket,
                self.job.name,
                self.coordinator,
                self.incarnation,
                2 * self.job.deadlines.lease_s,
                self.secret,
                self.job.notices,
                self.code.search_path,
                self.job.offload_folder,
            )
        )
        self.keepers[node] = actor
        self._kept.add(node)
        self._await_keeper(node)

    def _await_keeper(self, node: NodeId) -> None:
        keeper = self.keepers[node]
        self._when_done(
            keeper.__ray_ready__.remote(), keeper, lambda error: self._keeper_ready(node, error), again=0
        )

    def _keeper_ready(self, node: NodeId, error: BaseException | None) -> None:
        if self._closing:
            return
        if error is None:
            self._do(self._looks, self._look, node)
        elif isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed:
            self._do(self._looks, self._refuse, node, f"cannot start a keeper: {why_not_made(error)}", False)
        else:
            self._keeper_lost(node, error)

    def _look(self, node: NodeId) -> None:
        """Finds out whether the node and this process see the bucket as the same place."""
        try:
            same = ray.get(
                self.keepers[node].sees_coordinator.remote(), timeout=PROBE_DEADLINE_S
            ) and self.probe.sees(node)
            address = ray.get(self.keepers[node].address.remote(), timeout=PROBE_DEADLINE_S)
        except ray.exceptions.RayTaskError as error:
            self._refuse(node, f"cannot use bucket = {self.job.bucket!r}: {error.cause}", True)
        except (ray.exceptions.RayError, StorageError) as error:  # it may succeed the next time
            ray.kill(self.keepers[node], no_restart=True)
            self._keeper_lost(node, error)
        else:
            if same:
                self._keeper_up(node, address)
            else:
                self._refuse(
                    node,
                    cluster.split(
                        self.job.bucket, cluster.node_name(cluster.here()), self.probe.key(COORDINATOR)
                    ),
                    True,
                )

    def _refuse(self, node: NodeId, why: str, shared: bool) -> None:
        """Refuses the node.

        Its keeper stays in ``keepers``: so the node gets no other keeper, and this keeper removes what
        workers have left there.
        """
        self.post(NodeRefused(node, f"{cluster.node_name(node)} {why}", shared))

    def _keeper_up(self, node: NodeId, address: str) -> None:
        self._addresses[node] = address
        self.post(KeeperUp(node, address, cluster.zone(node)))
        self._follow_keeper(node)

    def _follow_keeper(self, node: NodeId) -> None:
        keeper = self.keepers[node]
        for worker in tuple(self._guests[node]):
            keeper.watch.remote(worker, self.workers.get(worker))
        self._when_done(keeper.lives.remote(), keeper, lambda ended: self._keeper_lost(node, ended))

    def _keeper_lost(self, node: NodeId, error: BaseException | None) -> None:
        keeper, why = self.keepers.pop(node, None), why_ended(error)
        if not self._closing:
            self._do(self._looks, self.orders.lost, node)
        if why == UNREACHED and keeper is not None and not self._closing:
            later(0, partial(kill_all, [keeper]))  # otherwise the node could get no other keeper
        self.post(KeeperLost(node, why, with_its_node=why == NODE_DIED))

    # ---- the bucket

    def _commit(self, version: Version, lineage: tuple[tuple[int, int], ...], by: int) -> None:
        try:
            if not self.ship(SHIP_S):
                why = (
                    "the manifest is written only after the journal, which has the steps that made the "
                    "checkpoint"
                )
                raise Unavailable(f"the journal of {self.job.name}", why)
            written = self.parts.of(version, by or version.generation)
            digest = self.run.commit(
                version,
                [ShardReceipt.unpacked(shard.receipt) for shard in written],
                lineage,
                written[0].layout,
            )
        except Exception as error:  # any error: the coordinator must hear of it
            if not self._look_for(version):
                lasting = isinstance(error, StorageError | KeyError) and not isinstance(error, Unavailable)
                why, full = f"{type(error).__name__}: {error}", isinstance(error, Full)
                self.post(SaveFailed(version, why, by, again=not lasting, manifest=True, full=full))
        else:
            self.post(Saved(version, digest))
            self.saved()
        finally:
            self._committing.discard(version)

    # ---- the end

    def reap(self, grace_s: float) -> None:
        """Ends every process of the run, in good order if possible, and leaves nothing on any node."""
        self._closing = True
        self.orders.close()
        self._retention.close()
        for pool in (self._pool, self._looks, self._forms):
            pool.shutdown(wait=False, cancel_futures=True)
        until = time.monotonic() + 2 * grace_s
        unfollowed = [actor for worker, actor in self.workers.items() if worker not in self.joined]
        # before the keepers close: no keeper ends these workers, or removes what they have made
        kill_all(unfollowed)
        wait_for_all([actor.lives.remote() for actor in unfollowed], time.monotonic() + grace_s)
        closing = {node: keeper.close.remote(self.incarnation) for node, keeper in list(self.keepers.items())}
        wait_for_all(list(closing.values()), until)
        closed = {node for node, call in closing.items() if succeeded(call, unless=Deposed)}
        # this node has the coordinator's journal
        unclosed = ((self._kept | {cluster.here()}) & set(cluster.nodes())) - closed
        kill_all([*self.workers.values(), *self.keepers.values()])
        wait_for_all(list(self._lives.copy()), max(until, time.monotonic() + grace_s / 2))
        if left := leave_nothing_on(sorted(unclosed), self.token, time.monotonic() + grace_s):
            self.tell(
                f"the run may have left something on {', '.join(left)}, because its keeper there did not "
                "remove it; `elastic clean` removes it"
            )
        with contextlib.suppress(StorageError):
            # last, since a keeper that was being checked may have left its sign after it was closed
            self.probe.remove_all()


def _once(value: Any, receivers: tuple[WorkerId, ...]) -> Any:
    """Returns ``value``, or a reference to it if it has many receivers: a plan and the number of its
    receivers both grow with the world.
    """
    return ray.put(value) if value is not None and len(receivers) >= MANY else value
