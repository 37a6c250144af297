"""The only maker of process groups and meshes: form, abort, close.

A world lives for one generation.  Forming takes a store that no member hosts (its keeper does), under a prefix of the generation, so
that nothing of an older world can be met.  ``abort`` may be called from another thread, and only after every member is fenced
or expelled, since one that is not could apply a commit that the abort broke: it frees a training thread that is stuck in a collective
whose peer is gone.

* NCCL: all communicators are aborted at once, each from a thread of its own, and its service threads are woken to see it.
* gloo has no abort.  A peer that dies frees only those connected to it; the others wait on members that are alive but no longer
  answer.  So the sockets of the groups, and only these, are shut down: those bound to a port that gloo listened on here, or
  connected to one that it listened on elsewhere (each member publishes its own through the store while forming).

It is also the seam for torch's own ``ProcessGroup.reconfigure`` (2.15).  Everybody else knows ``World`` and its groups; what makes them
and ends them is below the line *how groups are made and left*, four functions, and a process that keeps its groups from one generation
to the next would replace these.  That nobody else makes or leaves a group is checked by ``tests/architecture``.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.engine import sockets, streams
from elastic.engine.sockets import Endpoint, Service, Waking
from elastic.errors import WorldBroken
from elastic.plan.layout import Layout
from elastic.plan.placement import data_rank, data_ranks

LEAD = 8
"""Calls of ``keep_up`` that the host may be ahead of the device."""
TO_HOST = "to host"
ROOM = 2**32
"""Bytes of the device: with less free a world that forms gives back what torch keeps, since NCCL takes memory of its own."""
WAKE_S = (0.005, 0.5)
"""From an abort's beginning until NCCL's threads are woken, and twice as long until the next time, up to what NCCL itself takes."""
FLIGHT_RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""That of NCCL, where this torch has it; else that of the other backends (torch 2.13)."""


class Staging:
    """Pinned host memory by purpose, allocated once and used again.

    Allocating it while a collective hangs would wait for the device, holding what an abort from another thread needs.
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
    """The process groups of one generation, seen from one member.  ``device.type`` "cuda" means NCCL, else gloo."""

    generation: int
    layout: Layout
    rank: int
    device: torch.device
    shard_group: dist.ProcessGroup
    """Those who hold one replica together."""
    replicate_group: dist.ProcessGroup | None
    """Those who hold the same shard, if such a group was asked for."""
    store: dist.Store
    listening: frozenset[int]
    """Ports that this member's groups accept connections on (gloo)."""
    peers: frozenset[Endpoint]
    """Where the other members' groups accept theirs (gloo)."""
    services: frozenset[Service] = frozenset()
    """Where threads of this member's communicators listen (NCCL)."""
    groups: tuple[dist.ProcessGroup, ...] = field(init=False)
    """All of them, that of all members first."""
    staging: Staging = field(default_factory=lambda: Staging())
    ahead: deque[torch.cuda.Event] = field(default_factory=lambda: deque())
    formed_ns: int = field(default_factory=time.time_ns)

    def __post_init__(self) -> None:
        everyone = dist.group.WORLD
        assert everyone is not None
        self.groups = tuple(dict.fromkeys(group for group in (everyone, self.shard_group, self.replicate_group) if group is not None))

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
        replicas: bool = True,
        met: Callable[[], None] = lambda: None,
    ) -> World:
        """Meet the other members in ``store`` and make all groups.  Blocks until all are there, or raises after ``form_s``.

        No collective runs before ``connect``.  ``replicas``: with a group of those who hold the same shard.  ``met`` is called
        between the group of all members and the smaller ones.
        """
        store = dist.PrefixStore(f"g{generation}", store)
        store.set_timeout(datetime.timedelta(seconds=form_s))
        before = sockets.listening()
        with contextlib.ExitStack() as undo:
            undo.callback(_forget_groups, device)  # whatever fails: this process must be able to form the next world
            _init_default_group(store, rank, layout.world, device, form_s)
            met()
            shard = _group(layout.ranks_along("dp_shard", rank), layout)
            replicate = _group(layout.ranks_along("dp_replicate", rank), layout) if replicas else None
            listening = sockets.listening() - before
            peers = _exchange_endpoints(store, rank, layout.world, listening) if device.type == "cpu" else frozenset[Endpoint]()
            world = cls(generation, layout, rank, device, shard, replicate, store, frozenset(p for _, p in listening), peers)
            undo.pop_all()
        return world

    @classmethod
    def alone(cls, device: torch.device, generation: int = 1) -> World:
        """A world of one, in this process, that reaches for no network."""
        world = cls.form(dist.HashStore(), generation=generation, layout=Layout(), rank=0, device=device, form_s=60.0)
        world.connect(60.0, 3600.0)
        return world

    @classmethod
    def imagined(cls, layout: Layout, device: torch.device) -> World:
        """Rank 0 of a world in which nobody else is: collectives end at once and bring nothing that means anything (torch's fake
        backend).  For what depends on shapes only."""
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world)
        return cls(0, layout, 0, device, _group(layout.ranks_along("dp_shard", 0), layout), None, FakeStore(), frozenset(), frozenset())

    @property
    def size(self) -> int:
        """The number of members."""
        return self.layout.world

    @property
    def data_rank(self) -> int:
        """The number of this member's model group, among those that run microbatches."""
        return data_rank(self.layout, self.rank)

    @property
    def data_ranks(self) -> int:
        """The number of model groups."""
        return data_ranks(self.layout)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The 1-D mesh over which the state of one replica is split."""
        return DeviceMesh.from_group(self.shard_group, self.device.type)

    def connect(self, form_s: float, run_s: float) -> None:
        """A tiny collective on every group: a backend that connects lazily does so now, within ``form_s``.

        ``run_s``: timeout of collectives afterwards; a last resort, since losses are dealt with by ``abort``.  That does not reach
        whoever sits in ``ncclCommInitRank``, which waits for every member.  So they meet in the store right before each, where one who
        waits for a member that has died comes free with the store.
        """
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            if free < ROOM:
                torch.cuda.empty_cache()
        before = sockets.services() if self.device.type == "cuda" else set[Service]()
        one, expected, until = torch.ones((), device=self.device), 1, time.monotonic() + form_s
        for number, group in enumerate(self.groups):
            if group.size() > 1 or len(self.groups) == 1:  # in the others nobody waits for anybody
                self._meet(f"connects/{number}", until)
                dist.all_reduce(one, group=group)
                expected *= group.size()
                if self.device.type == "cuda":  # at once: a member may be lost before the next group is there
                    self.services = frozenset(sockets.services() - before)
        found = self.to_host(one, until).item()
        if found != expected:
            raise WorldBroken(f"the first all-reduces of generation {self.generation} gave {found} instead of {expected}")
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=run_s), None)

    def _meet(self, where: str, until: float) -> None:
        """Wait for all members in the store.  Raises ``dist.DistError`` at ``until``, or once the store is gone."""
        self.store.set(f"{where}/{self.rank}", "")
        keys = [f"{where}/{rank}" for rank in range(self.size)]
        self.store.wait(keys, datetime.timedelta(seconds=max(until - time.monotonic(), 0.001)))

    def exchange(self, operations: list[dist.P2POp]) -> list[dist.Work]:
        """All of ``operations`` at once.  Whoever cannot launch them, since an abort was quicker, can launch in the next world."""
        try:
            return dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError:
            if self.device.type == "cuda":  # torch leaves NCCL's group open, and nothing that this thread launches would ever begin
                with contextlib.suppress(RuntimeError):
                    self.groups[0]._end_coalescing(self.device)
            raise

    def to_host(self, tensor: torch.Tensor, until: float = math.inf, given_up: Callable[[], bool] = lambda: False) -> torch.Tensor:
        """``tensor`` in host memory.  On an accelerator this polls and never synchronises: a collective whose peer died does not end.

        Raises :class:`WorldBroken` at ``until`` (``time.monotonic``), or as soon as ``given_up()``.
        """
        if tensor.device.type == "cpu":
            return tensor
        host = self.staging.buffer(TO_HOST, tensor)
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        while not event.query():
            if given_up() or time.monotonic() > until:
                raise WorldBroken(f"a collective of generation {self.generation} did not end")
            time.sleep(streams.POLL_S)
        return host

    def reserve(self, key: str, like: torch.Tensor) -> None:
        """Make the host memory of a later ``to_device`` or ``to_host`` now, while no collective can hang: see :class:`Staging`."""
        if self.device.type != "cpu":
            self.staging.buffer(key, like)

    def to_device(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` on the device, without waiting for what it is doing.  One copy in flight for each ``key``."""
        if self.device.type == "cpu":
            return tensor
        host = self.staging.buffer(key, tensor)
        host.copy_(tensor)
        return host.to(self.device, non_blocking=True)

    def finish(self) -> None:
        """Wait until the device has done all it was told, by polling: a collective that hangs ends when this world is aborted.

        It then looks completed, over garbage.  Who waited for one asks afterwards whether this member was fenced.
        """
        if self.device.type == "cuda":
            streams.finish()

    def keep_up(self) -> None:
        """Wait, by polling, until the device is at most ``LEAD`` calls of this behind: it has to do all that was launched before an abort
        ends.  Called for each block of a backward pass whose gradients are folded; a forward pass is launched whole.
        """
        if self.device.type == "cuda":
            event = self.ahead.popleft() if len(self.ahead) == LEAD else torch.cuda.Event()
            streams.wait_for(event)  # a new one has nothing to wait for
            event.record()
            self.ahead.append(event)

    def abort(self) -> int:
        """Free whoever is stuck in a collective here.  From any thread; returns the number of sockets shut down (gloo)."""
        if self.device.type == "cuda":
            _abort_together(self.groups, self.services)
            return 0
        return sockets.shut_down(self.listening, self.peers)

    def in_flight(self) -> list[str]:
        """Collectives that have begun here and not ended, as torch's flight recorder has them; none where it does not record.

        It asks the device for what has ended, and never waits for it.  What it says of worlds that were aborted is passed over.
        """
        known = (getattr(torch._C._distributed_c10d, name, None) for name in FLIGHT_RECORDERS)
        dump = next((each for each in known if each is not None), None)
        entries = json.loads(dump()).get("entries", ()) if dump is not None else ()
        ours = [each for each in entries if not each["retired"] and each["time_created_ns"] >= self.formed_ns]
        return [f"{each['profiling_name']} #{each['collective_seq_id']} of {each['input_sizes']}" for each in ours]

    def close(self) -> None:
        """Forget the groups.  After ``abort``, or when no collective is under way."""
        _forget_groups(self.device)


# ---- how groups are made and left


def _init_default_group(store: dist.Store, rank: int, world: int, device: torch.device, form_s: float) -> None:
    """Without ``device_id``: with it groups are split off NCCL's world, and a split after an abort crashes the process (torch 2.11)."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=form_s))


def _group(ranks: Sequence[int], layout: Layout) -> dist.ProcessGroup:
    """The group of all serves an axis that is the whole world: each further communicator costs time to make and to abort."""
    whole = dist.group.WORLD
    if len(ranks) == layout.world and whole is not None:
        return whole
    return dist.new_group(list(ranks), use_local_synchronization=True)


def _forget_groups(device: torch.device) -> None:
    """Leave no group behind.  ``destroy_process_group`` may not return after an NCCL abort, so there the registries are emptied."""
    c10d = dist.distributed_c10d
    world = c10d._world
    if not dist.is_initialized():
        world.group_count = 0  # an attempt that failed has counted, and its number is part of the name that the next members meet under
        return
    if device.type == "cpu":
        dist.destroy_process_group()
        return
    c10d._update_default_pg(None)
    for registry in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag, world.tags_to_pg):
        registry.clear()
    world.pg_coalesce_state.clear()
    c10d._unregister_all_process_groups()
    world.group_count = 0


def _abort_together(groups: Iterable[dist.ProcessGroup], services: Collection[Service]) -> None:
    """Abort the NCCL communicators of all ``groups`` at the same time.

    One after the other would hang: ending a communicator frees device memory, which waits for the kernels of the others, which wait
    for a dead peer until they are aborted too (torch's own grouping does not help, for it aborts from another thread each).
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


# ---- what collectives need


def all_gather(output: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """``output`` flat [members × n] from everyone's ``mine`` [n], in order of rank.  torch 2.13 renamed the call."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, mine, group=group)


def reduce_scatter(output: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """``output`` [n]: this member's part of the sum of everyone's flat ``mine`` [members × n].  torch 2.13 renamed the call."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(output, mine, group=group)


def _exchange_endpoints(store: dist.Store, rank: int, world: int, mine: set[Endpoint]) -> frozenset[Endpoint]:
    store.set(f"listening/{rank}", json.dumps(sorted(mine)))
    others = (json.loads(store.get(f"listening/{other}")) for other in range(world) if other != rank)
    return frozenset((address, port) for endpoints in others for address, port in endpoints)
