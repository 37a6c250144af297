"""Makes and ends process groups and meshes.  No other module does.

A world lives for one generation.  Its members meet in a store that a keeper hosts, under a prefix for the
generation, so they never meet anything of an older world.  ``abort`` frees a training thread that is stuck in
a collective whose peer is gone.  It may be called from another thread, but only after every member is fenced
or expelled: any other member could apply a commit that the abort broke.

* NCCL: all communicators are aborted at once, each from its own thread, and NCCL's service threads are woken
  so that they notice it.
* gloo has no abort.  A peer that dies frees only the members connected to it; others wait for members that
  live but no longer answer. So the sockets of the groups, and only these, are shut down: those bound to a
  port on which gloo listened here, and those connected to a port on which it listened elsewhere (each member
  publishes its ports through the store while the world forms).

This module is also the place for torch's own ``ProcessGroup.reconfigure`` (2.15).  Other modules know only
``World`` and its groups.  The functions below the line *how groups are made and left* make and end them.
``tests/architecture`` checks that no other module makes or leaves a group.

The groups of the next world are made and connected while the present one steps (:meth:`World.form` with
``ahead``).  torch has one default group, so a world becomes the present one when it is entered.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.engine import sockets, streams
from elastic.engine.pace import ForwardPace
from elastic.engine.sockets import Endpoint, Service, Waking
from elastic.errors import WorldBroken
from elastic.plan.layout import REPLICAS, SHARDS, Layout
from elastic.plan.placement import data_rank

LEAD = 8
"""Largest number of ``keep_up`` calls by which the host may be ahead of the device."""
TO_HOST = "to host"
"""Key of the staging buffer for ``to_host``."""
ROOM = 2**32
"""Free memory of the device in bytes, below which a world that forms gives back the memory that torch keeps:
NCCL needs memory too.
"""
WAKE_S = (0.005, 0.5)
"""Shortest and longest pause in seconds between two wakings of NCCL's threads in an abort.

The pause doubles each time.  NCCL's threads look by themselves every half second.
"""
LAUNCH_S = 0.1
"""Longest time in seconds for which an abort waits for :meth:`World.exchange`.  Queueing takes microseconds;
a first message to a peer that is gone waits for the abort itself.
"""
FLIGHT_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions of torch that dump its flight recorder: NCCL's if this torch has it, else that of the other
backends (torch 2.13).
"""


class Staging:
    """Pinned host memory by purpose, which is allocated once and used again.

    An allocation while a collective hangs would wait for the device, and would meanwhile hold what an abort
    from another thread needs.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def buffer(self, key: str, like: torch.Tensor) -> torch.Tensor:
        found = self._buffers.get(key)
        if found is None or (found.shape, found.dtype) != (like.shape, like.dtype):
            found = self._buffers[key] = torch.empty_like(like, device="cpu", pin_memory=True)
        return found


@dataclass
class World:
    """The process groups of one generation, seen from one member.  ``device.type`` "cuda" means NCCL, else
    gloo.
    """

    generation: int
    layout: Layout
    rank: int
    device: torch.device
    everyone: dist.ProcessGroup
    """The group of all members."""
    by_ranks: Mapping[tuple[int, ...], dist.ProcessGroup]
    """The groups of this member by the world ranks of their members."""
    store: dist.Store
    listening: frozenset[int]
    """Ports on which this member's groups accept connections (gloo)."""
    peers: frozenset[Endpoint]
    """Addresses at which the other members' groups accept connections (gloo)."""
    nodes: tuple[str, ...] = ()
    """The node of each member, by world rank.  Empty: all are on one."""
    services: frozenset[Service] = frozenset()
    """Places where threads of this member's communicators listen (NCCL)."""
    groups: tuple[dist.ProcessGroup, ...] = field(init=False)
    """All groups.  The group of all members is the first."""
    staging: Staging = field(default_factory=lambda: Staging())
    ahead: deque[torch.cuda.Event] = field(default_factory=lambda: deque())
    """Events of the last ``LEAD`` calls of ``keep_up``."""
    aborted: threading.Event = field(default_factory=threading.Event)
    """Set when ``abort`` begins.  From then on this world launches nothing by itself."""
    launching: threading.Lock = field(default_factory=threading.Lock)
    """Held while ``exchange`` queues its operations, and by an abort."""
    formed_ns: int = field(default_factory=time.time_ns)
    """Wall-clock time in nanoseconds at which this world formed."""
    kept: dist.Store | None = None
    """The store in which the members met.  torch keeps the C++ half of a store only, and part of ours is
    Python.
    """

    def __post_init__(self) -> None:
        self.groups = tuple(dict.fromkeys((self.everyone, *self.by_ranks.values())))

    @classmethod
    def form(
        cls,
        store: dist.Store,
        *,
        generation: int,
        layout: Layout,
        rank: int,
        device: torch.device,
        form_s: float,
        nodes: tuple[str, ...] = (),
        replicas: bool = True,
        met: Callable[[], None] = lambda: None,
        ahead: str = "",
    ) -> World:
        """Meets the other members in ``store`` and makes all groups.  Blocks until all are there, or raises
        after ``form_s``.

        No collective runs before ``connect``.  With ``replicas`` the members that hold the same shard get a
        group.  ``met`` is called after the group of all members is made and before the smaller ones are.
        ``ahead`` names an attempt to form this generation while an earlier world steps; then the caller
        enters it later.
        """
        name = f"g{generation}.{ahead}" if ahead else f"g{generation}"
        kept, store = store, dist.PrefixStore(name, store)
        store.set_timeout(datetime.timedelta(seconds=form_s))
        before = sockets.listening()
        made = Groups(name, store, rank, device, form_s)
        with contextlib.ExitStack() as undo:
            # after any failure this process must be able to form the next world
            undo.callback(made.forget)
            everyone = made.group(range(layout.world))
            met()
            groups = _smaller_groups(layout, rank, made.group, replicas=replicas)
            listening = sockets.listening() - before
            peers = (
                _exchange_endpoints(store, rank, layout.world, listening)
                if device.type == "cpu"
                else frozenset[Endpoint]()
            )
            world = cls(
                generation,
                layout,
                rank,
                device,
                everyone,
                groups,
                store,
                frozenset(p for _, p in listening),
                peers,
                nodes,
            )
            world.kept = kept
            if not ahead:
                world.enter()
            undo.pop_all()
        return world

    def enter(self) -> None:
        """Makes this world the present one of the process: collectives without a group are among its members."""
        dist.distributed_c10d._update_default_pg(self.everyone)

    @classmethod
    def alone(cls, device: torch.device, generation: int = 1) -> World:
        """Returns a world of one member in this process, which uses no network."""
        world = cls.form(
            dist.HashStore(), generation=generation, layout=Layout(), rank=0, device=device, form_s=60.0
        )
        world.connect(60.0, 3600.0)
        return world

    @classmethod
    def imagined(cls, layout: Layout, device: torch.device) -> World:
        """Returns rank 0 of a world without other members, for work that depends on shapes only.

        Its collectives end at once and their results mean nothing (torch's fake backend).
        """
        made = Groups("imagined", FakeStore(), 0, device, 60.0, backend="fake")
        everyone = made.group(range(layout.world))
        groups = _smaller_groups(layout, 0, made.group, replicas=False)
        world = cls(0, layout, 0, device, everyone, groups, FakeStore(), frozenset(), frozenset())
        world.enter()
        return world

    @cached_property
    def size(self) -> int:
        """The number of members."""
        return self.layout.world

    def along(self, axes: Collection[str]) -> dist.ProcessGroup:
        """Returns the group of the members that differ from this one along ``axes`` alone, in order of world
        rank.

        Raises KeyError if :meth:`form` made no group of these members.
        """
        return self.by_ranks[self.layout.along(axes, self.rank)]

    @cached_property
    def shard_group(self) -> dist.ProcessGroup:
        """The members that hold the rows of one part of the model together."""
        return self.along(SHARDS)

    @cached_property
    def replicate_group(self) -> dist.ProcessGroup:
        """The members that hold the same shard.  Raises KeyError if no such group was asked for."""
        return self.along(REPLICAS)

    @cached_property
    def data_group(self) -> dist.ProcessGroup:
        """The members that sum the gradients of the same parameters."""
        return self.by_ranks[self.data_members]

    @cached_property
    def stage_group(self) -> dist.ProcessGroup:
        """The members of one replica that hold parts of the same tensors."""
        return self.by_ranks[self.layout.stage_ranks(self.rank)]

    @cached_property
    def data_members(self) -> tuple[int, ...]:
        """The world ranks of the members that sum the gradients of the same parameters."""
        return self.layout.data_group(self.rank)

    @property
    def data_rank(self) -> int:
        """The number of this member's model group, among those that run microbatches."""
        return data_rank(self.layout, self.rank)

    @cached_property
    def pace(self) -> ForwardPace:
        """The time that this member's forward passes take."""
        return ForwardPace(self.device)

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """The 1-D mesh over which the state of one replica is split."""
        return DeviceMesh.from_group(self.shard_group, self.device.type)

    def connect(self, form_s: float, run_s: float) -> None:
        """Runs a tiny collective on every group, so that a backend that connects lazily does so now, within
        ``form_s``.

        ``run_s`` is the timeout of collectives afterwards.  It is a last resort, since ``abort`` deals with
        losses.  But an abort does not reach a thread in ``ncclCommInitRank``, which waits for every member.
        So the members meet in the store right before each of these calls: a member that waits there for a
        dead one is freed when the store ends.
        """
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            if free < ROOM:
                torch.cuda.empty_cache()
        before = sockets.services() if self.device.type == "cuda" else set[Service]()
        one = torch.ones((), dtype=torch.float64, device=self.device)  # the product is exact up to 2**53
        expected, until = 1, time.monotonic() + form_s
        for number, group in enumerate(self.groups):
            # in a smaller group of one there is nobody to wait for
            if group.size() > 1 or len(self.groups) == 1:
                self._meet(f"connects/{number}", until)
                dist.all_reduce(one, group=group)
                expected *= group.size()
                if self.device.type == "cuda":  # at once: a member may be lost before the next group is there
                    self.services = frozenset(sockets.services() - before)
                if self.aborted.is_set():  # before there was a communicator to abort
                    self.abort()
                    raise WorldBroken(f"generation {self.generation} was aborted while it connected")
        found = self.to_host(one, until, self.aborted.is_set).item()
        if found != expected:
            raise WorldBroken(
                f"the first all-reduces of generation {self.generation} gave {found} instead of {expected}"
            )
        for group in self.groups:
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=run_s), group)

    def _meet(self, where: str, until: float) -> None:
        """Waits for all members in the store.  Raises ``dist.DistError`` at ``until``, or as soon as the
        store is gone.

        The last member that comes says so in one key for all: if each waited for a key of each, the store
        would look at N² keys.
        """
        if self.store.add(where, 1) == self.size:
            self.store.set(f"{where}/all", "")
        self.store.wait([f"{where}/all"], datetime.timedelta(seconds=max(until - time.monotonic(), 0.001)))

    def exchange(self, operations: list[dist.P2POp]) -> list[dist.Work]:
        """Launches all ``operations`` at once.  If an abort prevents it, this thread can still launch in the
        next world.

        An abort frees the communicator, and NCCL must not end a group whose operations belong to it.  So
        nothing is queued after an abort has begun, and an abort waits until what is being queued is launched.
        Raises :class:`WorldBroken` after an abort.
        """
        with self.launching:
            self._refuse_if_aborted()
            try:
                return dist.batch_isend_irecv(operations) if operations else []
            except RuntimeError:
                # torch leaves NCCL's group open, and nothing that this thread launches later would begin
                if self.device.type == "cuda":
                    with contextlib.suppress(RuntimeError):
                        self.groups[0]._end_coalescing(self.device)
                raise

    def _refuse_if_aborted(self) -> None:
        if self.aborted.is_set():
            raise WorldBroken(f"generation {self.generation} is aborted")

    def all_to_all(
        self, mine: torch.Tensor, sent: Mapping[int, int], got: Mapping[int, int], size: int
    ) -> torch.Tensor:
        """Sends the first elements of the flat ``mine``, ``sent[rank] × size`` to each member of the data
        group, and returns what comes from each, flat.

        Both are in order of world rank.  Every member of the group must call it, but those that have nothing
        for each other exchange no message (NCCL), so no smaller group is needed for an exchange among few.
        """
        self._refuse_if_aborted()
        received, given = (
            [pieces.get(rank, 0) * size for rank in self.data_members] for pieces in (got, sent)
        )
        output = mine.new_empty(sum(received))
        dist.all_to_all_single(output, mine[: sum(given)], received, given, group=self.data_group)
        return output

    def begin_all_gather(
        self, output: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup | None = None
    ) -> Callable[[], None]:
        """Begins to fill ``output``, flat [members × n], with the ``mine`` [n] of each member of ``group``,
        or of each shard, and returns a call that waits for it.

        The wait is this thread's on a CPU.  On CUDA the collective is on the present stream, whose work waits
        for it by itself.  Both raise :class:`WorldBroken` after an abort, and the wait also if the collective
        fails.
        """
        self._refuse_if_aborted()
        work = all_gather(output, mine, group or self.shard_group, later=self.device.type == "cpu")

        def wait() -> None:
            try:
                if work is not None:
                    work.wait()
            except RuntimeError as error:
                why = "the connection to another member broke"  # gloo's own words follow in the log
                raise WorldBroken(f"a collective of generation {self.generation} failed: {why}") from error

        return wait

    def to_host(
        self,
        tensor: torch.Tensor,
        until: float = math.inf,
        given_up: Callable[[], bool] = lambda: False,
        key: str = TO_HOST,
    ) -> torch.Tensor:
        """Returns ``tensor`` in host memory, that of ``key``.

        On an accelerator this polls and never synchronises, because a collective whose peer died does not
        end.

        Raises :class:`WorldBroken` at ``until`` (``time.monotonic``), or as soon as ``given_up()``.
        """
        if tensor.device.type == "cpu":
            return tensor
        host = self.staging.buffer(key, tensor)
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        while not event.query():
            if given_up() or time.monotonic() > until:
                raise WorldBroken(f"a collective of generation {self.generation} did not end")
            time.sleep(streams.POLL_S)
        return host

    def reserve(self, key: str, like: torch.Tensor) -> None:
        """Allocates the host memory of a later ``to_device`` or ``to_host`` now, while no collective can
        hang: see :class:`Staging`.
        """
        if self.device.type != "cpu":
            self.staging.buffer(key, like)

    def to_device(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor`` on the device, without waiting for the device.  Each ``key`` may have one copy
        in flight.
        """
        if self.device.type == "cpu":
            return tensor
        host = self.staging.buffer(key, tensor)
        host.copy_(tensor)
        return host.to(self.device, non_blocking=True)

    def finish(self) -> None:
        """Waits, by polling, until the device has done all its work.  A collective that hangs ends when this
        world is aborted.

        Such a collective looks completed, with garbage as its result.  So the caller must ask afterwards
        whether this member was fenced.
        """
        if self.device.type == "cuda":
            streams.finish()

    def keep_up(self) -> None:
        """Waits, by polling, until the device is at most ``LEAD`` calls of this method behind.

        The reason is that an abort ends only after the device has done all that was launched.  The ordered
        reduction calls this for each block of a backward pass.  A forward pass is launched as a whole.
        """
        if self.device.type == "cuda":
            event = self.ahead.popleft() if len(self.ahead) == LEAD else torch.cuda.Event()
            streams.wait_for(event)  # a new event has nothing to wait for
            event.record()
            self.ahead.append(event)

    def abort(self) -> int:
        """Frees every thread of this process that is stuck in a collective, and returns the number of sockets
        shut down (gloo).

        Any thread may call it.  Known gap: FSDP2 launches collectives from torch's own threads, which know
        nothing of ``aborted``.  If one launches at the very moment of an abort, it uses a communicator that
        is being freed.

        A world of gloo that was connected ahead may take a port for its own on which another thread began to
        listen while it formed, and end the connections accepted there.  That hurts no world: worlds that form at
        the same time are attempts at one generation, of which one at most is used, and the next generation
        listens at ports that are opened later.  A server that the user's code starts at just that moment may
        lose connections.
        """
        self.aborted.set()
        alone = self.launching.acquire(timeout=LAUNCH_S)
        try:
            if self.device.type == "cuda":
                _abort_together(self.groups, self.services)
                return 0
            return sockets.shut_down(self.listening, self.peers)
        finally:
            if alone:
                self.launching.release()

    def in_flight(self) -> list[str]:
        """Returns the collectives that have begun here and not ended, by torch's flight recorder; none if it
        does not record.

        It asks the device which collectives have ended and never waits for it.  Collectives of earlier worlds
        are left out.
        """
        known = (getattr(torch._C._distributed_c10d, name, None) for name in FLIGHT_RECORDERS)
        dump = next((each for each in known if each is not None), None)
        entries = json.loads(dump()).get("entries", ()) if dump is not None else ()
        ours = [each for each in entries if not each["retired"] and each["time_created_ns"] >= self.formed_ns]
        return [
            f"{each['profiling_name']} #{each['collective_seq_id']} of {each['input_sizes']}" for each in ours
        ]

    def close(self) -> None:
        """Forgets the groups.  It may be called after ``abort``, or when no collective is under way."""
        _forget(self.groups, self.device)


# ---- how groups are made and left


class Groups:
    """Makes the groups of one world, each once.

    It calls the function behind ``init_process_group`` and ``new_group``, which leaves the default group as
    it is, and passes no ``device_id``: with one, torch splits groups off NCCL's world, and a split after an
    abort crashes the process (torch 2.11).
    """

    def __init__(
        self,
        name: str,
        store: dist.Store,
        rank: int,
        device: torch.device,
        form_s: float,
        *,
        backend: str = "",
    ) -> None:
        self.name, self.store, self.rank, self.device = name, store, rank, device
        self.backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        self.timeout = datetime.timedelta(seconds=form_s)
        self.made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def group(self, ranks: Iterable[int]) -> dist.ProcessGroup:
        """Returns the group of the members with these world ranks.  Each communicator costs time to make and
        to abort, so the same members have one.
        """
        members, c10d = tuple(ranks), dist.distributed_c10d
        if members not in self.made:
            # torch names a group in its own store by this name, which all its members must choose alike
            name = f"{self.name}:{hashlib.sha256(repr(members).encode()).hexdigest()[:16]}"
            made, _ = c10d._new_process_group_helper(  # no ranks: a group that torch knows as a default group
                len(members),
                members.index(self.rank),
                [],
                self.backend,
                self.store,
                name,  # type: ignore[arg-type] # some torch has a type of its own for names
                timeout=self.timeout,
            )
            self.made[members] = made
            c10d._world.pg_group_ranks[made] = {member: place for place, member in enumerate(members)}
        return self.made[members]

    def forget(self) -> None:
        """Forgets all that was made."""
        _forget(tuple(self.made.values()), self.device)


def _smaller_groups(
    layout: Layout, rank: int, group: Callable[[Iterable[int]], dist.ProcessGroup], *, replicas: bool
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Returns the groups of a member by their ranks: its shards, its replicas if they are asked for, those
    that sum gradients with it, its stage, and the members along each axis that has more of them.
    """
    asked = [layout.shard_ranks(rank), *([layout.replica_ranks(rank)] if replicas else [])]
    asked += [layout.data_group(rank), layout.stage_ranks(rank)]
    asked += [layout.along((name,), rank) for name, degree in layout.more if degree > 1]
    return {ranks: group(ranks) for ranks in dict.fromkeys(asked)}


def _forget(groups: Collection[dist.ProcessGroup], device: torch.device) -> None:
    """Forgets ``groups``, and no others.  On CUDA it only takes them out of torch's registries, because
    ``destroy_process_group`` may not return after an NCCL abort.
    """
    c10d = dist.distributed_c10d
    world = c10d._world
    if world.default_pg in groups:
        c10d._update_default_pg(None)
    for group in groups:
        if device.type == "cpu":
            group.shutdown()
        if (name := world.pg_names.pop(group, None)) is not None:
            torch._C._distributed_c10d._unregister_process_group(name)
        for registry in (
            world.pg_map,
            world.pg_group_ranks,
            world.pg_backend_config,
            world.pg_to_tag,
            world.pg_coalesce_state,
        ):
            registry.pop(group, None)
        for tagged in [*world.tags_to_pg.values()]:
            if group in tagged:
                tagged.remove(group)


def _abort_together(groups: Iterable[dist.ProcessGroup], services: Collection[Service]) -> None:
    """Aborts the NCCL communicators of all ``groups`` at the same time.

    Aborting one after the other would hang: ending a communicator frees device memory, which waits for the
    kernels of the other communicators, and these wait for a dead peer until they are aborted too.  torch's
    own grouping does not help, because it aborts each communicator from another thread.
    """
    threads = [threading.Thread(target=group.abort, daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    waking, (pause_s, longest_s) = Waking(services), WAKE_S
    for thread in threads:
        thread.join(pause_s)
        while thread.is_alive():
            waking.wake()
            pause_s = min(2 * pause_s, longest_s)
            thread.join(pause_s)
    waking.end()


# ---- collectives, and the endpoints of gloo


def all_gather(
    output: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup | None = None, *, later: bool = False
) -> dist.Work | None:
    """Fills ``output``, flat [members × n], with every member's ``mine`` [n] in order of rank.  torch 2.13
    renamed the call.

    ``later``: it returns at once, and ``output`` is filled when the result has been waited for.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(output, mine, group=group, async_op=later)
    return work


def reduce_scatter(output: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fills ``output`` [n] with this member's part of the sum of every member's flat ``mine`` [members × n].

    torch 2.13 renamed the call.
    """
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, mine, group=group)


def _exchange_endpoints(store: dist.Store, rank: int, world: int, mine: set[Endpoint]) -> frozenset[Endpoint]:
    """Returns the endpoints of the other members.  The last member that comes collects them all, so that each
    other one reads one key.
    """
    store.set(f"listening/{rank}", json.dumps(sorted(mine)))
    if store.add("listening", 1) == world:
        store.set(
            "listening/all",
            json.dumps([json.loads(store.get(f"listening/{other}")) for other in range(world)]),
        )
    everyone = json.loads(store.get("listening/all"))
    return frozenset(
        (address, port)
        for other, endpoints in enumerate(everyone)
        for address, port in endpoints
        if other != rank
    )
