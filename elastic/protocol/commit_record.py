"""The commit of a step: every member puts one record into an all-gather, and all members conclude the same
outcome from the records.

A record is a vector of float64 with a fixed size (integers below 2**53 are exact).  It travels in one small
collective on any backend, and the accelerator can fill it in.  The collective completes nowhere unless every
member's gradients were complete: a member that has seen it knows that the step is committed.  An aborted
collective can look complete although it holds garbage.  So each record names its sender and carries a
checksum, and one wrong record means that there is no outcome.

    the named fields of a :class:`RecordHead`
    then for each of the member's rounds   [loss sum, token count, sample ids ...]
    then the checksum

The checksum is the wrapping 64-bit sum of the words before it.  Word i is its bit pattern times 2i + 1, so
that the order counts.  Before that, the upper half of the word is mixed into its lower half (exclusive or);
without it, two words that differ only in their sign could change places unnoticed.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan
from operator import itemgetter
from statistics import median_low
from typing import NamedTuple

from elastic.ids import Version
from elastic.plan.batch import Deal, deal_of, resized
from elastic.plan.layout import Layout
from elastic.plan.placement import counterparts, data_groups, data_ranks, reporters
from elastic.protocol.reruns import apart, compared

GO_ON, PAUSE, SAVE_AND_PAUSE, ENDS, HAND_OVER = 0, 1, 2, 3, 4
"""The requests that a member may make for the boundary after this step; the :func:`strongest` of all members'
requests counts.

HAND_OVER is a PAUSE at which each member's copy in host memory is complete before the member stops.  ENDS
makes this step the last one of the run, as the loop of a member asks (``ctx.stop()``).
"""
STRENGTH = (GO_ON, PAUSE, HAND_OVER, SAVE_AND_PAUSE, ENDS)
"""The requests from the weakest to the strongest.  Journals have their numbers."""
NO_SAVE, DUE, LAST = 0, 1, 2
"""The requests that a member may make to save the state after this step to the bucket.

NO_SAVE asks for no save, DUE for a save once there is room, LAST for a save whatever else is on its way.
"""

MAGIC = 20261124.0
"""First field of every record."""
LOWER = 2**32 - 1
"""Mask of the lower half of a 64-bit word."""


class Copied(NamedTuple):
    """A member's report of its copies when it prepares a step.

    ``copied_through`` and ``buddied_through`` are the newest steps with complete copies (-1: none); the least
    of all members counts. ``copy_every`` and ``buddy_every`` are the steps that it needs from one copy to the
    next (0: as planned); the greatest counts. ``save`` is NO_SAVE, DUE or LAST.  ``behind`` is 1 while this
    member has no room for a save: the save before is not in the bucket yet, or its newest copy is not
    complete.
    """

    copied_through: int = -1
    buddied_through: int = -1
    copy_every: int = 0
    buddy_every: int = 0
    save: int = NO_SAVE
    behind: int = 0


NO_COPIES = Copied()


@dataclass(frozen=True)
class Usage:
    """The time and the memory that a step took on a member, measured without waiting for the device.

    ``step_s`` is the time from the member's record of the step before to its record of this one; in the first
    step of a world, it counts from the beginning of the step.  For ``data_s`` of it the training thread
    waited for samples.  ``peak_bytes`` are the most bytes that torch had allocated on a GPU in that time, and
    ``reserved_bytes`` those that torch keeps there; both are 0 on a CPU.  ``forward_s`` is the mean
    time that the member's own work took in the forward pass of a microbatch (``engine/pace.py``); on a GPU
    it is that of passes up to the step before.  0 means that it was not measured.
    """

    step_s: float = 0.0
    data_s: float = 0.0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    forward_s: float = 0.0

    @property
    def data_wait(self) -> float:
        """The part of the step's time for which the training thread waited for samples."""
        return self.data_s / self.step_s if self.step_s else 0.0


NO_USAGE = Usage()
LATE = 1.5
"""A member is late if its forward pass took this multiple of the median time, or more: workers that differ
less cannot be told from noise.
"""
MATTERS = 0.05
"""Smallest share of a step that a member must cost the others to be late."""
MOST_LATE = 8
"""Number of late members that a commit names: the slowest."""


@dataclass(frozen=True)
class Late:
    """A member whose forward passes took far longer in a step than those of its peers: members of its kind that
    compute the same part of the model.
    """

    rank: int
    """Its world rank."""
    forward_s: float
    """The mean time of its forward passes in seconds."""
    usual_s: float
    """The low median of these times among its peers and itself."""


class RecordHead(NamedTuple):
    """The named fields at the beginning of every record.

    A new field needs a line here, its value in :func:`head_of`, its meaning in :func:`conclude`, and usually
    a field of :class:`Outcome`. Fields that the device fills in stand together from ``FROM_DEVICE``.
    """

    magic: float
    incarnation: float
    generation: float
    step: float
    world_rank: float
    boundary: float
    finite: float
    """The value is 1 if this member's norm is finite.  The device fills in this field, and those up to
    ``reran``.
    """
    squared_norm: float
    ran: float
    """A digest of the gradients of this member's first microbatch, in a step with reruns (``reruns.py``)."""
    reran: float
    """A digest of the gradients of the microbatch that this member has run again."""
    copied_through: float
    buddied_through: float
    copy_every: float
    buddy_every: float
    save: float
    behind: float
    step_s: float
    data_s: float
    peak_bytes: float
    reserved_bytes: float
    forward_s: float
    order: float
    """A digest of what this member has gathered and summed for single blocks since the last commit; 0 if the
    model gathers nothing.
    """
    kind: float
    """A digest of this member's kind: only the times of members of one kind are compared."""


HEADER = len(RecordHead._fields)
FROM_DEVICE = RecordHead._fields.index("finite")
"""The index of the first of the fields that the device fills in."""


def head_of(
    shape: CommitShape,
    world_rank: int,
    step: int,
    boundary: int,
    copied: Copied = NO_COPIES,
    usage: Usage = NO_USAGE,
    order: float = 0,
    kind: float = 0,
) -> RecordHead:
    """Returns the head of a member's record; the device fills in the rest."""
    return RecordHead(
        MAGIC,
        shape.incarnation,
        shape.generation,
        step,
        world_rank,
        boundary,
        0,
        0,
        0,
        0,
        *copied,
        usage.step_s,
        usage.data_s,
        usage.peak_bytes,
        usage.reserved_bytes,
        usage.forward_s,
        order,
        kind,
    )


@dataclass(frozen=True)
class Validated:
    """The loss on the samples that are held out: the sum over their terms, and the number of these."""

    loss: float
    count: int

    @property
    def mean(self) -> float:
        return self.loss / max(self.count, 1)


@dataclass(frozen=True)
class Score:
    """A version, and the loss that was found."""

    version: Version
    found: Validated
    held_out: str = ""
    """The name of the held-out samples (:class:`~elastic.protocol.builds.Build`): only scores over the same
    are compared.
    """


@dataclass(frozen=True)
class Spike:
    """A loss or a gradient norm far above those of the steps before (``spikes.py``)."""

    what: str
    """The number that is a spike: "loss" or "norm", or "microbatches" if too many of them have too large a
    loss.
    """
    z: float
    """Its distance from ``usual``, in robust standard deviations; for "microbatches", their number."""
    usual: float
    """The median of the steps before; for "microbatches", the largest mean loss that counts."""
    skipped: bool
    """True if the step changes no weights."""


def is_better(found: float, known: float | None, min_delta: float = 0.0) -> bool:
    """Returns whether a loss is smaller than ``known`` by more than ``min_delta``.  NaN is never better."""
    return not isnan(found) and (known is None or isnan(known) or found < known - min_delta)


def better_of(known: Score | None, score: Score, min_delta: float = 0.0) -> Score:
    """Returns ``score`` if there is no ``known`` one, or if its loss is better (:func:`is_better`); else
    ``known``.
    """
    return score if known is None or is_better(score.found.mean, known.found.mean, min_delta) else known


def told_of(step: int, found: Validated) -> str:
    """Returns the sentence about the validation after ``step``."""
    return f"validation after step {step}: loss {found.mean:.6g} over {found.count} terms"


def out_of_patience(patience: int, min_delta: float, best: int, step: int) -> str:
    """Returns the sentence about a run that ends because no validation since that after step ``best`` was
    better by ``min_delta``.
    """
    by = f" by more than validation.min_delta = {min_delta:g}" if min_delta else ""
    return (
        f"validation.patience = {patience}: no validation is better{by} than the one after step "
        f"{best}, so step {step} is the last"
    )


@dataclass(frozen=True)
class Outcome:
    """The commit of one step, the same on every member.

    ``squared_norm`` is that of the summed gradient, before it is divided by ``tokens``.  ``losses`` and
    ``counts`` are sums by microbatch, in order.  ``samples`` are the ids that each microbatch read (the
    ledger).  Unless the step ``applies``, it changes nothing. ``copied_through`` is the newest step of this
    generation of which every member had a complete copy in host memory when it prepared this step (-1: none);
    ``buddied_through`` is the same for complete copies at buddies.  ``copy_every`` and ``buddy_every`` are
    the smallest numbers of steps from one copy to the next.  ``behind`` says that a member has no room for a
    save.  ``saves`` says that every member copies the state after this step and that this copy is a save.
    ``usage`` has the largest value of any member for each field, and ``usage_ranks`` the world rank of that
    member; without ranks nothing was measured.  Outcomes are equal whatever was measured. ``validated`` is
    the loss of the state before this step on held-out samples; None if that state was not to be validated.
    ``rescales`` says that the gradient is not finite and the scale of the loss becomes smaller, so that a
    later step may be finite. ``spike`` says that the step is a spike (``[spikes]``), and ``quarantined`` has
    the samples that no later step reads, because of it, because their loss is not finite, or because their
    microbatch is one of those ``left_out``.
    """

    step: int
    generation: int
    squared_norm: float
    losses: tuple[float, ...]
    counts: tuple[int, ...]
    samples: tuple[tuple[int, ...], ...]
    finite: bool
    boundary: int = GO_ON
    copied_through: int = -1
    buddied_through: int = -1
    behind: bool = False
    copy_every: int = 0
    buddy_every: int = 0
    saves: bool = False
    usage: Usage = field(default=NO_USAGE, compare=False)
    usage_ranks: tuple[int, ...] = field(default=(), compare=False)
    late: tuple[Late, ...] = field(default=(), compare=False)
    """The members that held up the others, the slowest first."""
    reran: tuple[tuple[int, int, int], ...] = ()
    """The microbatches that two members have run: their place in a model group, the microbatch, and the digest of
    its gradients on which both agree.
    """
    validated: Validated | None = None
    rescales: bool = False
    spike: Spike | None = None
    quarantined: tuple[int, ...] = ()
    most_loss: float | None = None
    """The largest mean loss of a microbatch that counts; None if no microbatch has a larger one.  The
    gradients of microbatches with a larger one were multiplied by 0.
    """
    warned_loss: float | None = None
    """The largest mean loss of a microbatch that would count if the run did more than warn; None if no
    microbatch has a larger one.  All microbatches count.
    """
    lr: float | None = field(default=None, compare=False)
    """The learning rate of the step, if a schedule of the user's says it; None if it can be computed from the
    job.
    """
    layers: tuple[tuple[str, float], ...] = field(default=(), compare=False)
    """The squared norm of the summed gradient of each layer, by name, in the order of the model.  It is empty
    in most steps (``[watch]``). If the step is not ``finite``, there is only the first layer of the backward
    pass that is not. Each member computes the norms itself, with the same bits if the job is reproducible.
    """

    @property
    def applies(self) -> bool:
        """True if the step changes weights: its gradient is finite, and it is no spike that is skipped."""
        return self.finite and not (self.spike is not None and self.spike.skipped)

    @cached_property
    def left_out(self) -> tuple[int, ...]:
        """The microbatches that do not count, in order."""
        return self._above(self.most_loss)

    @property
    def warned(self) -> tuple[int, ...]:
        """The microbatches that count, and would not if the run did more than warn, in order."""
        return self._above(self.warned_loss)

    def _above(self, most: float | None) -> tuple[int, ...]:
        if most is None:
            return ()
        each = enumerate(zip(self.losses, self.counts, strict=True))
        return tuple(index for index, (loss, count) in each if count and not loss <= most * count)

    @property
    def tokens(self) -> int:
        """The number of valid tokens, without those of the microbatches that are left out."""
        return sum(self.counts) - sum(self.counts[index] for index in self.left_out)

    @cached_property
    def loss(self) -> float:
        """The mean loss over :attr:`tokens`, added in microbatch order."""
        total, left_out = 0.0, frozenset(self.left_out)
        for index, part in enumerate(self.losses):
            if index not in left_out:
                total += part
        return total / max(self.tokens, 1)

    @property
    def norm(self) -> float:
        """The norm of the mean gradient, which is the norm that is clipped."""
        return float(self.squared_norm**0.5 / max(self.tokens, 1))

    @property
    def layer_norms(self) -> dict[str, float]:
        """The norm of the mean gradient of each layer that this commit tells."""
        return {name: float(square**0.5 / max(self.tokens, 1)) for name, square in self.layers}

    @property
    def waiting(self) -> int | None:
        """The world rank of the member that waited longest for data; None if nobody has measured it."""
        return self.usage_ranks[list(vars(NO_USAGE)).index("data_s")] if self.usage_ranks else None


@dataclass(frozen=True)
class CommitShape:
    """The numbers that fix the size of a record, the same for every member of a world."""

    incarnation: int
    generation: int
    microbatches: int
    """The number of microbatches in a step, usually once the batch has its final size."""
    microbatch: int
    layout: Layout
    block: int = 1
    """Number of microbatches that are added before anything else is: see ``plan/batch.py``."""
    nodes: tuple[str, ...] = ()
    """The node of each member, by world rank.  Empty: all are on one."""
    rerun_every: int = 0
    """Number of steps from one with reruns to the next; 0: none has."""

    def reruns(self, step: int) -> bool:
        """Returns whether each member runs a microbatch of another one in ``step``."""
        return self.rerun_every > 0 and step % self.rerun_every == 0 and self.apart > 0

    @cached_property
    def apart(self) -> int:
        """The distance from a data rank to the one whose microbatch it runs again."""
        return apart(data_ranks(self.layout), self.generation)

    def first_of(self, data_rank: int) -> int | None:
        """Returns the microbatch that a data rank runs first, or None if it idles in the first round."""
        return self.deal.microbatch_of(0, data_rank)

    def again_of(self, data_rank: int) -> int | None:
        """Returns the microbatch of another data rank that ``data_rank`` runs again, if that one has any."""
        return self.first_of((data_rank + self.apart) % data_ranks(self.layout))

    def of(self, microbatches: int) -> CommitShape:
        """Returns the shape of a step with another number of microbatches."""
        found: CommitShape = self if microbatches == self.microbatches else resized(self, microbatches)
        return found

    @cached_property
    def deal(self) -> Deal:
        return deal_of(self.microbatches, self.block, self.layout, self.nodes)

    @cached_property
    def speakers(self) -> tuple[tuple[int, ...], ...]:
        """The world ranks that know the losses of a round's microbatches, in the order of the microbatches,
        for each round.
        """
        known = reporters(self.layout)
        return tuple(tuple(known[rank] for unit in units for rank in unit.ranks) for units in self.deal.units)

    @property
    def world(self) -> int:
        """The number of members, each of which sends a record."""
        return self.layout.world

    @property
    def rounds(self) -> int:
        """The number of rounds; a record has the loss, the tokens and the samples of each."""
        return self.deal.rounds

    @property
    def fields(self) -> int:
        """Number of float64 in one record, checksum included."""
        return HEADER + self.rounds * (2 + self.microbatch) + 1


def strongest(requests: Iterable[float]) -> int:
    """Returns the request for a boundary that counts if members make these ``requests``."""
    return max(map(int, frozenset(requests)), key=STRENGTH.index)


def is_saved(boundary: int, asked: int, behind: bool) -> bool:
    """Returns whether the state after a step becomes a save; ``asked`` is the greatest of what the members
    asked for.

    The last step and a stop are saved whatever else is on its way; any other save waits until every member
    has room for it.
    """
    return boundary == SAVE_AND_PAUSE or asked >= LAST or (asked == DUE and not behind)


class BadRecord(ValueError):
    """A gathered record differs from the one that its member sent, because the collective was aborted."""


def is_count(value: float) -> bool:
    """Returns whether ``value`` is a number of terms: a whole number, 0 or more."""
    return value.is_integer() and value >= 0


class BadCount(ValueError):
    """The loss of a microbatch returned a ``count`` that is no number of terms: not whole, negative, or not
    finite.
    """

    def __init__(self, index: int, count: float, samples: tuple[int, ...]) -> None:
        super().__init__(index, count, samples)
        self.index, self.count, self.samples = index, count, samples


class Unlike(ValueError):
    """Members of a data group have gathered and summed different blocks, or in different orders, so that
    weights or gradients mix parts of several blocks.
    """


def conclude(shape: CommitShape, step: int, gathered: bytes, validated: Validated | None = None) -> Outcome:
    """Returns the outcome of ``step`` from the records of all members in order of world rank (little-endian
    float64).

    ``validated`` is the loss on held-out samples of the state before the step, which all members know.

    Every member does this in every step for all members and microbatches, so it goes field by field, over all
    records at once.

    Raises :class:`BadRecord` if any of them is garbage, :class:`BadCount` if a count is no number of terms,
    :class:`Unlike` if the orders of a data group's members differ, and :class:`~elastic.protocol.reruns.Differ`
    if two members have computed different gradients from one microbatch.
    """
    size = shape.fields * 8
    if len(gathered) != size * shape.world:
        raise BadRecord(f"{len(gathered)} bytes of commit records instead of {size * shape.world}")
    if torn := torn_records(gathered, shape.world, shape.fields):
        raise BadRecord(f"the commit record of world rank {torn[0]} at step {step} has a wrong checksum")
    fields = shape.fields
    words = array("d", gathered)
    if sys.byteorder == "big":
        words.byteswap()
    heads = {name: words[field::fields].tolist() for field, name in enumerate(RecordHead._fields)}
    expected = dict(
        zip(
            RecordHead._fields,
            (MAGIC, float(shape.incarnation), float(shape.generation), float(step)),
            strict=False,
        )
    )
    if any(heads[name] != [each] * shape.world for name, each in expected.items()) or heads["world_rank"] != [
        *range(shape.world)
    ]:
        said = [*zip(*(heads[name] for name in (*expected, "world_rank")), strict=True)]
        rank = next(rank for rank, each in enumerate(said) if each != (*expected.values(), rank))
        raise BadRecord(
            f"the commit record of world rank {rank} says {said[rank][1:]} instead of "
            f"{(*expected.values(), float(rank))[1:]}"
        )
    order = heads["order"]
    if order.count(order[0]) != shape.world:  # stages of a pipeline differ rightly
        for ranks in data_groups(shape.layout):
            if any(order[rank] != order[ranks[0]] for rank in ranks):
                raise Unlike
    speakers = reporters(shape.layout)
    losses, counts, samples = list[float](), list[float](), list[tuple[int, ...]]()
    for round_, ranks in enumerate(shape.speakers):
        first, spoken = HEADER + round_ * (2 + shape.microbatch), itemgetter(*ranks, 0)
        told = [spoken(words[first + i :: fields].tolist())[:-1] for i in range(2 + shape.microbatch)]
        losses += told[0]
        counts += told[1]
        samples += zip(*(map(int, ids) for ids in told[2:]), strict=True)
    if not all(map(float.is_integer, counts)) or min(counts) < 0:
        index = next(index for index, count in enumerate(counts) if not is_count(count))
        raise BadCount(index, counts[index], samples[index])
    reran: tuple[tuple[int, int, int], ...] = ()
    if shape.rerun_every and shape.reruns(step):
        begun = [shape.first_of(rank) for rank in range(data_ranks(shape.layout))]
        reran = compared(step, counterparts(shape.layout), shape.apart, begun, heads["ran"], heads["reran"])
    boundary, behind = strongest(heads["boundary"]), max(heads["behind"]) > 0
    used = {name: heads[name] for name in vars(NO_USAGE)}
    most = {name: max(values) for name, values in used.items()}
    return Outcome(
        step=step,
        generation=shape.generation,
        squared_norm=heads["squared_norm"][speakers[0]],
        losses=tuple(losses),
        counts=tuple(map(int, counts)),
        samples=tuple(samples),
        finite=heads["finite"] == [1.0] * shape.world,
        boundary=boundary,
        copied_through=int(min(heads["copied_through"])),
        buddied_through=int(min(heads["buddied_through"])),
        behind=behind,
        copy_every=int(max(heads["copy_every"])),
        buddy_every=int(max(heads["buddy_every"])),
        saves=is_saved(boundary, int(max(heads["save"])), behind),
        usage=Usage(
            most["step_s"],
            most["data_s"],
            int(most["peak_bytes"]),
            int(most["reserved_bytes"]),
            most["forward_s"],
        ),
        usage_ranks=tuple(values.index(most[name]) for name, values in used.items()),
        late=late_among(
            heads["forward_s"], heads["kind"], shape.layout, MATTERS * most["step_s"] / shape.rounds
        ),
        validated=validated,
        reran=reran,
    )


def late_among(
    forward_s: Sequence[float], kinds: Sequence[float], layout: Layout, least_s: float
) -> tuple[Late, ...]:
    """Returns the members that are late by more than ``least_s`` a microbatch, the slowest first, at most
    :data:`MOST_LATE`.

    ``forward_s`` and ``kinds`` are in order of world rank.
    """
    if not (most := max(forward_s)) or most < LATE * min(forward_s):  # the usual case, at the least cost
        return ()
    found = list[Late]()
    for ranks in data_groups(layout):
        for kind in {kinds[rank] for rank in ranks}:
            peers = [rank for rank in ranks if kinds[rank] == kind and forward_s[rank] > 0]
            usual_s = median_low([forward_s[rank] for rank in peers]) if peers else 0.0
            slow = [
                (-forward_s[rank], rank)
                for rank in peers
                if forward_s[rank] >= LATE * usual_s and forward_s[rank] - usual_s > least_s
            ]
            found += [Late(rank, forward_s[rank], usual_s) for _, rank in sorted(slow)[:MOST_LATE]]
    found.sort(key=lambda each: (each.usual_s / each.forward_s, each.rank))
    return tuple(found[:MOST_LATE])


def torn_records(gathered: bytes, world: int, fields: int) -> list[int]:
    """Returns the world ranks whose record has a wrong checksum.

    Every member computes it for all members in every step, so the records are added side by side in one long
    integer: each has 128 bits of it, and the sum of its words, with their factors, is shorter.  ``cast``
    moves words of 8 bytes, whatever the order of their bytes.
    """
    whole = int.from_bytes(gathered, "little")
    lower = int.from_bytes(b"\xff\xff\xff\xff\0\0\0\0" * (world * fields), "little")
    mixed = memoryview((whole ^ (whole >> 32 & lower)).to_bytes(len(gathered), "little")).cast("Q")
    sums, column = 0, bytearray(16 * world)
    words = memoryview(column).cast("Q")[::2]
    for i in range(fields - 1):
        words[:] = mixed[i::fields]
        sums += (2 * i + 1) * int.from_bytes(column, "little")
    found = memoryview(sums.to_bytes(16 * world, "little")).cast("Q")[::2].tolist()
    told = memoryview(gathered).cast("Q")[fields - 1 :: fields].tolist()
    return [rank for rank in range(world) if found[rank] != told[rank]]
