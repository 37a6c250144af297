"""Trains part of a job in one world of real processes, without Ray.  Engine tests run it in
:class:`tests.support.ranks.Ranks`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from elastic.engine.optim.base import Hyper
from elastic.engine.world import World
from elastic.ids import NodeId, Version, WorkerId
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.plan.transfer import Holding
from elastic.protocol.commit_record import GO_ON, CommitShape, Outcome
from elastic.protocol.member import Member as Rules
from elastic.protocol.plan import Plan
from elastic.runs.run import Run
from elastic.state.shard import Shard
from elastic.train.alone.local import save_here
from elastic.train.apply_fence import ApplyFence
from elastic.train.gauges.counters import Counters
from elastic.train.heal import Healing, home_of
from elastic.train.model import State, build_model, tensors_of
from elastic.train.session import make_session, make_snapshots
from elastic.train.step import Session, Share, Step
from elastic.train.validation import validate
from storage.checkpoints import Checkpoints, ShardReceipt
from storage.objects import ObjectStore
from tests.support.ranks import Ranks
from tests.support.state_hash import state_hash

T = TypeVar("T")


@dataclass
class Part:
    """The result of one member for a segment.  ``hashes`` and ``rates`` have the hash of its shard and the
    learning rate, step by step.
    """

    outcomes: list[Outcome]
    receipt: Any
    hashes: list[str]
    rates: list[float]
    microbatches: int


@dataclass
class Member:
    """A worker in its world, healed and ready to step."""

    session: Session
    state: State
    fence: ApplyFence
    shape: CommitShape
    checkpoints: Checkpoints
    rates: list[float] = field(default_factory=list)
    """Learning rates that the optimizer was given, update by update."""

    def __post_init__(self) -> None:
        optimizer = self.state.optimizer
        update = optimizer.rule.update

        def recorded(parts: Any, grads: Any, hyper: Hyper) -> None:
            self.rates.append(hyper.lr)
            update(parts, grads, hyper)

        optimizer.rule = replace(optimizer.rule, update=recorded)

    def step(self, boundary: Callable[[], int] = lambda: GO_ON) -> Outcome:
        """Runs the next step.  Before the first one the member is told to go, and drops what it holds in
        older layouts.
        """
        with self.fence as rules:
            rules.go(self.shape.generation)
        step = self.state.shard.version.step
        validated = (
            validate(self.session, self.state, self.fence, step) if self.session.job.validates(step) else None
        )
        doing = Step(self.session, self.state, self.fence, self.shape, step + 1, boundary, validated)
        doing.run()
        return doing.commit()

    def save(self) -> ShardReceipt:
        return save_here(self.checkpoints, self.state)


def compute(session: Session, state: State, step: int) -> Share:
    """Runs forward and backward of the step, and no commit."""
    shape = CommitShape(
        1, state.world.generation, session.job.microbatches, session.job.microbatch_size, state.world.layout
    )
    doing = Step(session, state, ApplyFence(Rules(WorkerId("w"))), shape, step, lambda: GO_ON)
    doing.run()
    return doing._share


def shards(fence: ApplyFence) -> list[Shard]:
    """Returns all shards that the member holds."""
    with fence as rules:
        return list(rules.held.values())


def raw(value: torch.Tensor) -> bytes:
    """Returns the bytes of ``value``; numpy has no bfloat16."""
    return value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def shard_hash(shard: Shard) -> str:
    """Returns the sha256 of the bytes of all slices of the shard."""
    return hashlib.sha256(b"".join(raw(shard.values[key]) for key in sorted(shard.values))).hexdigest()


@contextmanager
def member(
    world: World,
    job: Job,
    version: Version,
    *,
    fence: ApplyFence | None = None,
    holders: Sequence[Holding] | None = None,
    prefetch: int = 2,
) -> Iterator[Member]:
    """Makes this process a member.  Version 0 is initialised; others come from the bucket, or from
    ``holders`` if given.
    """
    workers = tuple(WorkerId(f"w{rank}") for rank in range(world.size))
    worker = workers[world.rank]
    fence = fence or ApplyFence(Rules(worker))
    tier = "live" if holders is not None else "bucket" if version.step else "init"
    plan = Plan(1, world.generation, world.layout, workers, version, tier, tuple(holders or ()), NodeId("n"))
    checkpoints = Checkpoints(ObjectStore.open(job.bucket), job.name)
    with TemporaryDirectory() as folder:
        session = make_session(job, Counters(Path(folder) / "counters", create=True), prefetch=prefetch)
        if job.offloads:
            tensors = tensors_of(build_model(job, session.builder), session.rule)
            session.snapshots = make_snapshots(job, tensors, world.device, session.counters, session.faults)
        try:
            with fence as rules:
                rules.leave()
                assert rules.form(plan) and rules.enter(plan)
            state = State(job, session.builder, session.rule, world, version, home_of(session, plan, worker))
            healing = Healing(state, plan, worker, session)
            healing.finish(shards(fence), checkpoints)
            with fence as rules:
                rules.healed(0.0, Holding(worker, version, state.shard.cell), state.shard)
            healing.settle()
            shape = CommitShape(
                1,
                world.generation,
                job.microbatches,
                job.microbatch,
                world.layout,
                job.reduction.block,
                world.nodes,
                job.workers.rerun_every,
            )
            yield Member(session, state, fence, shape, checkpoints)
        finally:
            session.close()


def segment(world: World, job: Job, version: Version, last: int) -> Part:
    """Trains from ``version`` (in the bucket, or the initialisation) to step ``last``, then saves."""
    with member(world, job, version) as me:
        outcomes, hashes = [], []
        while me.state.shard.version.step < last:
            outcomes.append(me.step())
            hashes.append(shard_hash(me.state.shard))
        return Part(outcomes, me.save(), hashes, me.rates, me.session.counters["microbatches_run"])


def finish(
    job: Job,
    layout: Layout,
    receipts: Iterable[ShardReceipt],
    version: Version,
    lineage: tuple[tuple[int, int], ...] = (),
) -> str:
    """Writes the manifest of what the members saved, and returns the hash of the exported state."""
    run = Run.open(job)
    run.commit(version, tuple(receipts), (*lineage, (version.generation, version.step)), layout)
    folder = Path(job.bucket) / f"export-{version.step}"
    run.checkpoints.export(version, folder)
    return state_hash(sorted(folder.glob("*.safetensors")))


@dataclass
class Trained:
    """A trained segment: its state in the bucket as ``version``, and the hash of that state."""

    hash: str
    version: Version
    parts: list[Part]

    @property
    def outcomes(self) -> list[Outcome]:
        return self.parts[0].outcomes


def train(
    ranks: Ranks,
    job: Job,
    layout: Layout,
    last: int,
    version: Version = Version(0, 0),  # noqa: B008 (frozen)
    nodes: Sequence[str] = (),
    how: Callable[..., Part] = segment,
) -> Trained:
    """Trains a segment in one world of ``layout``, whose members are on ``nodes``.  ``how`` is called as
    :func:`segment` is.
    """
    return _trained(job, layout, ranks.run(layout, how, job, version, last, nodes=nodes), version)


def train_each(
    ranks: Ranks, jobs: Sequence[Job], layout: Layout, last: int, how: Callable[..., Part] = segment
) -> list[Trained]:
    """Trains several jobs from their initialisations, one after the other in one world of ``layout``."""
    found = ranks.run_each(layout, how, [(job, Version(0, 0), last) for job in jobs])
    return [_trained(job, layout, parts, Version(0, 0)) for job, parts in zip(jobs, found, strict=True)]


def train_here(
    job: Job,
    last: int,
    version: Version = Version(0, 0),  # noqa: B008 (frozen)
    how: Callable[..., Part] = segment,
) -> Trained:
    """Trains a segment with one worker, in this process."""
    return _trained(job, Layout(1, 1), [here(how, job, version, last)], version)


def here(function: Callable[..., T], *arguments: Any) -> T:
    """Runs a function as :meth:`Ranks.run` does, in a world of which this process is the only member."""
    world = World.alone(torch.device("cpu"))
    try:
        return function(world, *arguments)
    finally:
        world.close()


def _trained(job: Job, layout: Layout, parts: Sequence[Part], version: Version) -> Trained:
    end = Version(version.step + len(parts[0].outcomes), parts[0].outcomes[-1].generation)
    lineage = ((version.generation, version.step),) if version.step else ()
    return Trained(finish(job, layout, [part.receipt for part in parts], end, lineage), end, [*parts])
