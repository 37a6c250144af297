"""Brings every slice of a new shard to the plan's version, from the nearest place that holds that slice.

All members compute with the same pure function who sends what to whom, so there are no requests: each pair of
members exchanges all its slices in a few messages.  A member copies the slices that it already holds from its
own memory.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

import torch
import torch.distributed as dist

from elastic.engine.world import World
from elastic.errors import StateMissing, WorldBroken
from elastic.ids import WorkerId
from elastic.plan.placement import cell_of, held
from elastic.plan.transfer import Move, missing, moves, reads_copies
from elastic.protocol.copy_schedule import Copy
from elastic.protocol.events import HEALS
from elastic.protocol.plan import Plan
from elastic.runs.branches import Branches, Origin
from elastic.state.digest import digests
from elastic.state.hosts import Access, read
from elastic.state.shard import DTYPES, Key, Shard, ShardHome, place_of
from elastic.state.staging import STREAMS, StagingStream
from elastic.state.streaming import in_groups, look_at
from elastic.train.gauges.counters import OPERATIONS
from elastic.train.initialise import initialise
from elastic.train.model import AS_IT_IS_THERE, BUFFERS, State, as_stored, begun_anew, misfit
from elastic.train.step import Session
from storage.background import in_background
from storage.checkpoints import Checkpoints, Reader
from storage.slices import AVERAGE, Slice, Tensor

WEIGHTS = ("parameter", *BUFFERS)
"""The kinds of tensors that a run with ``init`` takes from another run."""
MESSAGE = 2**28
"""Largest size of a message in bytes; sender and receiver each hold the message on their device, beside the
old and the new shard.
"""


def nothing() -> None:
    """Stands where a hook is expected and none is wanted; it does nothing."""


def nothing_cut(memory: torch.Tensor) -> Collection[int]:
    """Returns no place at which a copy of ``memory`` must be cut."""
    return ()


def home_of(session: Session, plan: Plan, worker: WorkerId, held: Iterable[Shard] = ()) -> ShardHome | None:
    """Returns the slot in which the worker's shard of a new world will live: if a slot holds that shard
    already, it is that slot.

    ``held`` are the shards that the worker holds until the new world is healed.  Returns None if the job does
    not offload its state.
    """
    if session.snapshots is None or not session.job.offloads:
        return None
    copy = Copy(plan.version, cell_of(plan.layout, plan.world_rank(worker)))
    return session.snapshots.home(copy, held, adopt=plan.tier != "init")


class Healing:
    """Heals one member's shard.  It begins without a group: threads read slices from keepers' copies while
    the members still connect.
    """

    def __init__(
        self,
        state: State,
        plan: Plan,
        worker: WorkerId,
        session: Session,
        leave_if_over: Callable[[], None] = nothing,
    ) -> None:
        """``leave_if_over()`` raises once the healing has become pointless."""
        self.state, self.plan, self.worker, self.session, self.leave_if_over = (
            state,
            plan,
            worker,
            session,
            leave_if_over,
        )
        if session.snapshots is not None:
            session.snapshots.rest()
        self.moves: tuple[Move, ...] = ()
        self._reading: Future[int] | None = None
        if plan.tier != "init":
            self.moves = moves(
                state.tensors,
                plan.holders,
                plan.layout,
                plan.members,
                plan.nodes,
                partly=plan.tier == "bucket",
                of=worker,
            )
        home = state.shard.home
        self._there = home is not None and home.whole
        """True if the shard is in its slot already: nothing is read or copied."""
        if reads_copies(self.moves, worker) and not self._there:
            # taken before any collective is launched: taking pinned memory would wait behind it
            snapshots = session.snapshots
            cuts = snapshots.cuts if snapshots is not None else nothing_cut
            streams = [StagingStream(state.world.device, i, cuts) for i in range(STREAMS)]
            self._reading = in_background(partial(self._read, streams), "copies")

    def _read(self, streams: list[StagingStream]) -> int:
        snapshots, state = self.session.snapshots, self.state
        access = Access(self.worker, self.session.secret, snapshots.region if snapshots else None)
        with contextlib.ExitStack() as open_:
            for staging_stream in streams:
                open_.enter_context(staging_stream)
            return read(
                state.shard,
                state.tensors,
                self.plan,
                access,
                self.moves,
                streams,
                partial(self._got_further, self.leave_if_over),
            )

    def finish(
        self, there: list[Shard], checkpoints: Checkpoints, hook: Callable[[], None] = nothing
    ) -> None:
        """Fills the rest of the shard.

        ``there`` has the shards that this worker still holds, of any version and layout.  ``hook`` is called
        between parts of the work.

        Raises :class:`WorldBroken` if a member is lost, :class:`CopyLost` if a keeper's copy cannot be read,
        :class:`StateMissing`, and the errors of the bucket.
        """
        counters = self.session.counters
        if self.plan.tier == "init":
            initialise(self.state, self.session.builder, counters, hook, self.leave_if_over)
        counters.at(HEALS)
        try:
            self._fill(there, checkpoints, partial(self._got_further, hook))
        finally:
            counters["collective"] = 0
            counters.at("forms")

    def _got_further(self, then: Callable[[], None]) -> None:
        """Lets the keeper see that this member does not stand still, then calls ``then``."""
        counters = self.session.counters
        if OPERATIONS[counters["operation"]] == HEALS:
            counters.got_further()
        then()

    def _fill(self, there: list[Shard], checkpoints: Checkpoints, hook: Callable[[], None]) -> None:
        state, plan, counters = self.state, self.plan, self.session.counters
        if plan.tier == "init":
            if state.job.init:
                counters["healed_bucket_bytes"] += weights_of(state, checkpoints, hook)
            state.begin_averages()
            return
        if self._there:
            state.read_the_rest()
        counters["healed_live_bytes"] += from_members(
            state, plan, self.worker, there, self.moves, hook, fill=not self._there
        )
        if self._reading is not None:
            counters["healed_host_bytes"] += self._reading.result()
        if plan.tier == "bucket" and not self._there:
            left = missing(state.tensors, plan.holders, state.shard.cell)
            counters["healed_bucket_bytes"] += from_bucket(state, plan, checkpoints, left, hook)

    def settle(self) -> None:
        """Turns the slot in which the shard lives into a copy of this version.  The caller is certain that no
        slice was torn.
        """
        state, snapshots = self.state, self.session.snapshots
        if snapshots is None or (home := state.shard.home) is None or self._there:
            return
        state.write_the_rest()
        with torch.no_grad():
            for key, value in home.values.items():
                home.sums[home.blocks[key]] = digests(value.to(state.world.device, non_blocking=True)).to(
                    home.sums.device
                )
                home.let_go(key)
        snapshots.moved_in(state.shard, self.plan.version)


@torch.no_grad()
def from_members(
    state: State,
    plan: Plan,
    worker: WorkerId,
    there: list[Shard],
    todo: Sequence[Move],
    hook: Callable[[], None] = nothing,
    *,
    fill: bool = True,
) -> int:
    """Exchanges with the other members the slices that ``todo`` takes from live memory; returns the bytes
    received.

    Slices that this worker itself holds are copied from ``there``.  Without ``fill`` the shard stays as it
    is.  Raises :class:`WorldBroken` if a member is lost, :class:`StateMissing` if this worker does not hold
    what the plan takes from it, and :class:`StateDamaged` if a slice that it sends is in a file that has
    changed.
    """
    tensors = {(tensor.kind, tensor.name): tensor for tensor in state.tensors}
    rank_of = {member: rank for rank, member in enumerate(plan.members)}
    sources, sound = [shard for shard in there if shard.version == plan.version], set[tuple[int, Key]]()
    outgoing: dict[int, list[torch.Tensor]] = defaultdict(list)
    incoming: dict[int, list[torch.Tensor]] = defaultdict(list)
    for move in todo:
        if move.keeper:
            continue
        tensor = tensors[move.slice.kind, move.slice.name]
        mine, theirs = move.source == worker, move.destination == worker
        if mine and theirs:
            if fill:
                state.shard.part(tensor, move.slice).copy_(_find(sources, tensor, move.slice, sound))
                for shard in (state.shard, *sources):
                    shard.let_go((tensor.kind, tensor.name))
        elif mine:
            outgoing[rank_of[move.destination]].append(_find(sources, tensor, move.slice, sound))
        elif theirs:
            part = state.shard.part(tensor, move.slice)
            incoming[rank_of[move.source]].append(part if fill else torch.empty_like(part))

    def between() -> None:
        for shard in (state.shard, *sources):
            shard.let_go()
        hook()

    received = _exchange(outgoing, incoming, state.world, between)
    state.shard.let_go()
    return received


def _find(sources: list[Shard], tensor: Tensor, wanted: Slice, sound: set[tuple[int, Key]]) -> torch.Tensor:
    """Returns the memory of ``wanted`` in the first of the shards that contains it.

    ``sound`` has the pairs of slot and tensor that were checked before.  Raises :class:`StateDamaged` if the
    tensor is in a file that has changed, and :class:`StateMissing` if no shard contains the slice.
    """
    for shard in sources:
        if place_of(tensor, shard.cell, wanted) is not None:
            key = tensor.kind, tensor.name
            if shard.home is not None and (shard.home.slot, key) not in sound:
                look_at(shard.home, key)
                sound.add((shard.home.slot, key))
            return shard.part(tensor, wanted)
    raise StateMissing(f"the plan takes {wanted} from this worker, which does not hold this slice")


def _exchange(
    outgoing: dict[int, list[torch.Tensor]],
    incoming: dict[int, list[torch.Tensor]],
    world: World,
    hook: Callable[[], None],
) -> int:
    """Exchanges messages in rounds, and returns the bytes received.  In a round, a member sends at most one
    message to each other member.

    Sender and receiver list the same slices in the same order.
    """
    sends, receives = (
        {rank: _messages(parts) for rank, parts in side.items()} for side in (outgoing, incoming)
    )
    rounds = max((len(messages) for messages in (*sends.values(), *receives.values())), default=1)
    received = 0
    for turn in range(rounds):
        if turn:
            hook()  # a member that was fenced meanwhile, and perhaps aborted, must launch nothing more
        sending, receiving = (
            {rank: each[turn] for rank, each in side.items() if turn < len(each)}
            for side in (sends, receives)
        )
        received += _exchange_at_once(sending, receiving, world, hook)
    return received


def _messages(parts: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns ``parts``, in their order, as messages of at most ``MESSAGE`` bytes, or of one row if a row is
    larger.

    The result depends on shapes alone, which sender and receiver both know.
    """
    pieces = (
        piece
        for part in parts
        for piece in (
            part.split(max(1, MESSAGE * len(part) // part.nbytes))
            if part.nbytes > MESSAGE and part.shape
            else (part,)
        )
    )
    return in_groups(pieces, lambda piece: piece.nbytes, MESSAGE)


def _exchange_at_once(
    outgoing: dict[int, list[torch.Tensor]],
    incoming: dict[int, list[torch.Tensor]],
    world: World,
    hook: Callable[[], None],
) -> int:
    device = world.device
    sends = {rank: torch.cat([_bytes(part).to(device) for part in parts]) for rank, parts in outgoing.items()}
    receives = {
        rank: torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8, device=device)
        for rank, parts in incoming.items()
    }
    operations = [dist.P2POp(dist.isend, buffer, rank) for rank, buffer in sorted(sends.items())]
    operations += [dist.P2POp(dist.irecv, buffer, rank) for rank, buffer in sorted(receives.items())]
    under_way = world.exchange(operations)
    hook()
    for work in under_way:
        try:
            work.wait()
        # gloo raises this class for a lost peer; only here is it certain that it is no error of ours
        except RuntimeError as error:
            raise WorldBroken("the connection to another member broke while slices were exchanged") from error
    # waits by polling: copies to the host synchronise, and would block behind a peer that died
    world.finish()
    for rank, buffer in receives.items():
        for part, raw in zip(
            incoming[rank], buffer.split([part.nbytes for part in incoming[rank]]), strict=True
        ):
            aligned = raw if raw.storage_offset() % part.element_size() == 0 and part.shape else raw.clone()
            part.copy_(aligned.view(part.dtype).view(part.shape))
    return sum(buffer.numel() for buffer in receives.values())


def _bytes(part: torch.Tensor) -> torch.Tensor:
    return part.detach().contiguous().flatten().view(torch.uint8)


@torch.no_grad()
def from_bucket(
    state: State,
    plan: Plan,
    checkpoints: Checkpoints,
    wanted: Sequence[Slice],
    hook: Callable[[], None] = nothing,
) -> int:
    """Reads the slices ``wanted`` of this member's shard from the checkpoint of the plan's version; returns
    the bytes read.

    Tensors that a branch begins anew (:func:`begun_anew`) may be missing in the checkpoint, or have another
    size there.

    Raises :class:`StateMissing` if other tensors of the checkpoint do not fit the model, ``Damaged``, which
    names the object, and other errors of the bucket.
    """
    reader = checkpoints.open(plan.version)
    stored = reader.tensors()
    anew = begun_anew(state.job, state.optimizer.rule, state.tensors)
    anew = {tensor for tensor in anew if as_stored(tensor) not in stored}
    if why := misfit(
        state.job, [tensor for tensor in state.tensors if tensor not in anew], stored, plan.version
    ):
        raise StateMissing(why)
    names = {(tensor.kind, tensor.name) for tensor in anew}
    read = _fill(state, reader, [part for part in wanted if (part.kind, part.name) not in names], hook)
    for tensor in anew:
        if tensor.kind != AVERAGE:
            state.shard.part(tensor, tensor.whole()).zero_()
    if any(tensor.kind == AVERAGE for tensor in anew):
        state.begin_averages()
    return read


@torch.no_grad()
def weights_of(state: State, checkpoints: Checkpoints, hook: Callable[[], None]) -> int:
    """Reads this member's part of the weights of ``init``, a checkpoint of another run; returns the bytes
    read.  Raises as :func:`from_bucket`.
    """
    origin = Origin.of(state.job.init)
    reader = Branches(checkpoints.store, origin.run).checkpoints().open(origin.version)
    weights = [tensor for tensor in state.tensors if tensor.kind in WEIGHTS]
    if why := misfit(state.job, weights, reader.tensors(), origin.version, AS_IT_IS_THERE):
        raise StateMissing(f"init = {state.job.init!r}: {why}")
    return _fill(
        state, reader, [box.slice for tensor in weights for box in held(tensor, state.shard.cell).boxes], hook
    )


def _fill(state: State, reader: Reader, wanted: Sequence[Slice], hook: Callable[[], None]) -> int:
    by_name = {(tensor.kind, tensor.name): tensor for tensor in state.tensors}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # it is never written to
        for part, raw in reader.read([part for part in wanted if part.count]):
            tensor = by_name[part.kind, part.name]
            value = torch.frombuffer(raw, dtype=DTYPES[tensor.dtype]).view(part.shape)
            state.shard.part(tensor, part).copy_(value)
            state.shard.let_go((tensor.kind, tensor.name))
            hook()
    return reader.bytes_read
