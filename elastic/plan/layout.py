"""Layouts: the degrees of all axes, the place of a world rank in them, and the layout that n workers form.

Axes are ordered as in ``axes.py``: replicas are outside of shards, so that the shards of one replica, in one
pipeline stage, have neighbouring world ranks.

A :class:`LayoutRule` says which degrees may be used.  It fixes those of the axes that divide the model, so
a world has whole model groups, and replicas and shards are chosen for as many groups as the workers form.
The shard degree has a smallest value, because every worker that leaves makes the shards of the others larger,
and their memory is limited.  Below that value there is no layout: the run waits and does not run out of
memory.

Members of one replica exchange every weight in every step, so a replica should have its shards on one node.
A world over several nodes therefore leaves a few workers over as spares before it takes a shard degree that
fits no node: after the loss of one worker of 1,024, all replicas but one stay as they are.  Members of one
tensor group exchange activations in every layer, so a world leaves more workers over before one of these
groups lies over several nodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from elastic.plan.axes import AXES

REPLICAS = ("dp_replicate",)
SHARDS = tuple(name for name, axis in AXES.items() if "dp_shard" in (name, axis.into))
"""The axes along which members hold the same part of the state, and those whose members, counted as one
index, hold the parts into which rows are cut.
"""
STAGES = ("pp",)
"""The axes along which members hold other tensors, and not other parts of the same ones."""
USES = ("all", "fit")
"""Values of ``LayoutRule.use``."""
SPARED = 8
"""Fewer than one in ``SPARED`` workers may be left over.  It is a balance: a replica over several nodes slows
every step, and so does a worker that waits.  Of up to this many workers, nobody is left over.
"""
TORN = 3
"""Fewer than one in ``TORN`` workers may be left over so that every tensor group lies within a node.  Where
the network is ten times slower than the links of a node, a step takes, by estimate, half as long again with a
tensor group over two nodes, for all members: as if one in three of them were missing.
"""


@dataclass(frozen=True)
class Layout:
    """A layout gives each axis its degree.  ``more`` has (axis, degree) of the axes besides the two data
    axes.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    more: tuple[tuple[str, int], ...] = ()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Layout:
        """Returns the layout whose fields are ``value``, in which JSON has turned tuples into lists."""
        return cls(**{**value, "more": tuple((axis, degree) for axis, degree in value.get("more", ()))})

    @cached_property
    def degrees(self) -> tuple[tuple[str, int], ...]:
        """Pairs of (axis, degree) of every axis, the outermost first.  Raises ValueError for an axis that is
        not in the table.
        """
        known = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, **dict(self.more)}
        if unknown := known.keys() - AXES.keys():
            raise ValueError(
                f"a layout has the axes {', '.join(sorted(unknown))}, which plan/axes.py does not know"
            )
        return tuple((name, known[name]) for name in AXES if name in known)

    @cached_property
    def world(self) -> int:
        """The number of members."""
        return math.prod(degree for _, degree in self.degrees)

    def coordinates(self, world_rank: int) -> dict[str, int]:
        """Returns the index of a member along each axis."""
        found = {}
        for name, degree in reversed(self.degrees):
            world_rank, found[name] = divmod(world_rank, degree)
        return dict(reversed(found.items()))

    @property
    def replicas(self) -> int:
        """The number of replicas of the state."""
        return self.dp_replicate

    @cached_property
    def shards(self) -> int:
        """The number of parts into which the rows of one replica are cut: the product of the degrees that
        :data:`SHARDS` names.
        """
        return math.prod(degree for name, degree in self.degrees if name in SHARDS)

    def shard(self, world_rank: int) -> int:
        """Returns the number of the part of a member, among the :attr:`shards`."""
        index, found = self.coordinates(world_rank), 0
        for name, degree in self.degrees:
            if name in SHARDS:
                found = found * degree + index[name]
        return found

    def along(self, axes: Collection[str], world_rank: int) -> tuple[int, ...]:
        """Returns the world ranks that differ from ``world_rank`` along ``axes`` alone, ``world_rank`` among
        them, in order.
        """
        found, stride = [world_rank], 1
        for name, degree in reversed(self.degrees):
            if name in axes:
                first = world_rank // stride % degree * stride
                found = [rank - first + place * stride for place in range(degree) for rank in found]
            stride *= degree
        return tuple(found)

    def shard_ranks(self, world_rank: int) -> tuple[int, ...]:
        """Returns the members that hold one replica's rows together, in the order of their parts."""
        return self.along(SHARDS, world_rank)

    def expert_group(self, world_rank: int, experts: int) -> tuple[int, ...]:
        """Returns the members over which one replica's experts are spread, at the degree ``experts`` of
        expert parallelism: :meth:`shard_ranks` at equal distances.

        The degree cuts no state: where experts are stored as rows, the members between two of the group hold
        the other parts of the same experts.  Raises ValueError if it does not divide :attr:`shards`.
        """
        if wrong := uneven_experts(experts, self.shards):
            raise ValueError(wrong)
        distance = self.shards // experts
        return self.shard_ranks(world_rank)[self.shard(world_rank) % distance :: distance]

    def replica_ranks(self, world_rank: int) -> tuple[int, ...]:
        """Returns the members that hold the same part in other replicas."""
        return self.along(REPLICAS, world_rank)

    def stage_ranks(self, world_rank: int) -> tuple[int, ...]:
        """Returns the members of one replica that hold parts of the same tensors: those of a pipeline stage.

        The members of a shard are neighbours there, and the shards are in the order of their parts.
        """
        outside = (*REPLICAS, *STAGES)
        return self.along([name for name, _ in self.degrees if name not in outside], world_rank)

    def replica(self, number: int) -> tuple[int, ...]:
        """Returns the members of a replica."""
        first = self.along(REPLICAS, 0)[number]
        return self.along([name for name, _ in self.degrees if name not in REPLICAS], first)

    def data_group(self, world_rank: int) -> tuple[int, ...]:
        """Returns the members that compute the same part of the model, and so sum the gradients of the same
        parameters: all shards of all replicas, the first replica's first.
        """
        return self.along([name for name, axis in AXES.items() if not axis.cuts_model], world_rank)

    def __str__(self) -> str:
        return "×".join(
            [f"{self.dp_replicate}×{self.dp_shard}", *(f"{degree} {name}" for name, degree in self.more)]
        )


@dataclass(frozen=True)
class LayoutRule:
    """A rule says which layouts are allowed.  A degree of None is chosen by :func:`choose`.

    With ``use`` "all" the shard degree becomes larger if that uses workers that would be left over, except a
    few (:data:`SPARED`). With "fit" it stays the smallest, and those workers become spares.  ``model`` has
    (axis, degree) of the axes that divide the model, in the order of ``axes.py``; their degrees are fixed.
    Raises ValueError, which names the setting as the job file does, if no number of workers can meet the
    rule.
    """

    dp_replicate: int | None = None
    dp_shard: int | None = None
    min_shard: int = 1
    use: str = "all"
    model: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        data = [(name, getattr(self, name)) for name in ("dp_replicate", "dp_shard", "min_shard")]
        for name, degree in (*data, *self.model):
            if degree is not None and degree < 1:
                raise ValueError(f"parallel.{name} = {degree} must be at least 1")
        if self.use not in USES:
            raise ValueError(f"parallel.use = {self.use!r} must be one of {', '.join(USES)}")
        if self.dp_shard is not None and self.dp_shard < self.min_shard:
            raise ValueError(
                f"parallel.dp_shard = {self.dp_shard} is less than parallel.min_shard = {self.min_shard}; "
                f'set dp_shard = {self.min_shard} or "auto", or lower min_shard'
            )

    @property
    def replicas(self) -> int | None:
        """The number of replicas, if the rule fixes it."""
        return self.dp_replicate

    @property
    def shards(self) -> int | None:
        """The shard degree, if the rule fixes it."""
        return self.dp_shard

    @property
    def degrees(self) -> tuple[tuple[str, int | None], ...]:
        """Pairs of (axis, degree) of the axes that layouts may have; None stands for any degree.  Tensors
        that these cut alike are of one class for the whole run.
        """
        data = ((name, None) for name in (*REPLICAS, "dp_shard"))
        return (*data, *((name, degree) for name, degree in self.model if degree > 1))

    @cached_property
    def group(self) -> int:
        """The number of workers of a model group."""
        return math.prod(degree for _, degree in self.model)

    @property
    def min_parts(self) -> int:
        """The smallest number of parts into which the state is cut: one for each member of a replica."""
        return self.min_shard * self.group

    def most_parts(self, workers: int) -> int:
        """Returns the number of members of a replica if ``workers`` form as few replicas as the rule allows,
        with any shard degree.
        """
        return workers // self.group // (self.replicas or 1) * self.group

    def at_least(self, parts: int) -> LayoutRule:
        """Returns the rule without layouts whose replicas have fewer than ``parts`` members, unless it fixes
        the shard degree.
        """
        if self.dp_shard is not None or parts <= self.min_parts:
            return self
        return replace(self, min_shard=-(-parts // self.group))

    def check(self, min_workers: int, max_workers: int) -> None:
        """Raises ValueError if no number of workers from min to max forms a world of at least ``min_workers``
        members.
        """
        worlds = [
            layout.world
            for _, layout in layouts_by_size(self, max_workers, min_workers)
            if layout is not None
        ]
        if any(world >= min_workers for world in worlds):
            return
        enough = self._smallest(max(min_workers, max_workers + 1))
        fixes = [f"workers.max = {enough}"] if enough else []
        fixes += [f"workers.min = {max(worlds)}"] if worlds else []
        fixes += ["smaller degrees"] if not worlds else []
        raise ValueError(
            f"{self} allows no world of {min_workers} or more members with workers.min = {min_workers} and "
            f"workers.max = {max_workers}; set {' or '.join(fixes)}"
        )

    def _smallest(self, workers: int) -> int | None:
        """Returns the smallest number, from ``workers`` up, that forms a world of at least ``workers``
        members, or None.
        """
        period = (self.dp_replicate or 1) * (self.dp_shard or self.min_shard) * self.group
        for n in range(workers, workers + period + 1):
            layout = choose(n, self, least=workers)
            if layout is not None and layout.world >= workers:
                return n
        return None

    def __str__(self) -> str:
        settings = [f"dp_replicate = {self.dp_replicate or 'auto'}", f"dp_shard = {self.dp_shard or 'auto'}"]
        floor = [f"min_shard = {self.min_shard}"] if self.dp_shard is None else []
        model = [f"{name} = {degree}" for name, degree in self.model]
        return f"parallel ({', '.join(settings + floor + model)})"


def uneven_experts(experts: int, shards: int) -> str:
    """Returns a sentence that refuses a degree of expert parallelism; "" if it divides the ``shards``."""
    if shards % experts == 0:
        return ""
    *fewer, last = (degree for degree in range(1, shards + 1) if shards % degree == 0)
    fits = f"{', '.join(map(str, fewer))} or {last}" if fewer else "1"
    return (
        f"parallel.ep = {experts} does not divide parallel.dp_shard × parallel.cp = {shards}; set parallel.ep "
        f"to {fits}"
    )


Test = Callable[[int], bool]


def _any(shards: int) -> bool:
    return True


def choose(
    workers: int, rule: LayoutRule, nodes: Sequence[int] = (), *, least: int = 1, fits: Test = _any
) -> Layout | None:
    """Returns the layout that ``workers`` form; None means that they wait.

    ``nodes`` has the number of workers on each node; without it, each worker counts as a node.
    ``fits(shards)`` says whether the rows may be cut into so many parts.  Of the layouts whose number of
    parts is allowed, and that use all model groups but a few and at least ``least`` workers, the first of
    these is taken:

    1. every replica lies within one node: most members, then the smallest shard degree;
    2. every replica has whole nodes: most replicas, then most members;
    3. any: most replicas, then most members.

    If there is none, it is the layout with most members, and of these the one with the smallest shard degree:
    workers that wait cost more than padding.  Degrees that the rule fixes are as it says.

    If tensor groups would then lie over nodes, the choice is made again among as many model groups as have
    all tensor groups within nodes.  The second choice is taken if it has at least ``least`` members, and
    leaves few workers over (:data:`TORN`).
    """
    sizes, tensor = Counter(nodes or [1] * workers), dict(rule.model).get("tp", 1)
    anywhere = _of_groups(workers // rule.group, rule, sizes, least, fits)
    whole = sum(count * (size // tensor) for size, count in sizes.items()) * tensor // rule.group
    if anywhere is None or anywhere.world <= whole * rule.group:
        return anywhere
    within = _of_groups(whole, rule, sizes, least, fits)
    if within is None or within.world < least or (anywhere.world - within.world) * TORN >= anywhere.world:
        return anywhere
    return within


def _of_groups(groups: int, rule: LayoutRule, sizes: Counter[int], least: int, fits: Test) -> Layout | None:
    """Returns the layout of as many model groups; ``sizes`` has the number of nodes by their number of
    workers.
    """
    cut = math.prod(degree for name, degree in rule.model if name in SHARDS)
    found = _choose(groups, rule, sizes, -(-least // rule.group), lambda shards: fits(shards * cut))
    return replace(found, more=rule.model) if found is not None else None


def _choose(groups: int, rule: LayoutRule, sizes: Counter[int], least: int, fits: Test) -> Layout | None:
    """Returns the layout with one member for each model group, of which at least ``least`` are used."""
    lowest, replicas = rule.dp_shard or rule.min_shard, rule.dp_replicate
    if groups < lowest * (replicas or 1):
        return None
    if rule.dp_shard is not None or rule.use == "fit":
        return Layout(replicas or groups // lowest, lowest)

    def enough(used: int) -> bool:
        return used >= least and (groups - used) * SPARED < groups

    if replicas is not None:
        most = groups // replicas
        return Layout(
            replicas, next((d for d in range(most, lowest - 1, -1) if enough(replicas * d) and fits(d)), most)
        )
    return (
        _within_nodes(groups, rule, sizes, enough, fits)
        or _of_whole_nodes(groups, rule, sizes, enough, fits)
        or _most_replicas(range(lowest, groups + 1), groups, enough, fits)
        or max(
            (Layout(groups // d, d) for d in range(lowest, groups + 1)),
            key=lambda layout: (layout.world, -layout.dp_shard),
        )
    )


def _within_nodes(
    groups: int, rule: LayoutRule, sizes: Counter[int], enough: Test, fits: Test
) -> Layout | None:
    """Applies rule 1 of :func:`choose`."""
    best: Layout | None = None
    for shards in range(rule.min_shard, max(sizes) // rule.group + 1):
        room = sum(count * (size // (shards * rule.group)) for size, count in sizes.items())
        layout = Layout(min(groups // shards, room), shards)
        if enough(layout.world) and (best is None or layout.world > best.world) and fits(shards):
            best = layout
    return best


def _of_whole_nodes(
    groups: int, rule: LayoutRule, sizes: Counter[int], enough: Test, fits: Test
) -> Layout | None:
    """Applies rule 2 of :func:`choose`, with nodes of the usual size and larger ones."""
    usual = max(sizes, key=lambda size: (sizes[size], size))
    room = usual * sum(count for size, count in sizes.items() if size >= usual)
    step = usual // math.gcd(usual, rule.group)
    return (
        _most_replicas(
            range(-(-rule.min_shard // step) * step, groups + 1, step),
            min(groups, room // rule.group),
            enough,
            fits,
        )
        if usual > 1
        else None
    )


def _most_replicas(degrees: range, groups: int, enough: Test, fits: Test) -> Layout | None:
    """Returns the layout with most replicas, then with most members, whose shard degree is one of
    ``degrees``.
    """
    smallest = next(
        (shards for shards in degrees if enough(groups // shards * shards) and fits(shards)), None
    )
    if smallest is None:
        return None
    replicas = groups // smallest
    return Layout(
        replicas,
        max(shards for shards in degrees if smallest <= shards <= groups // replicas and fits(shards)),
    )


def layouts_by_size(rule: LayoutRule, n_max: int, least: int = 1) -> tuple[tuple[int, Layout | None], ...]:
    """Returns (n, the layout that n workers form) for n = 1 … n_max; nothing is known of their nodes."""
    return tuple((n, choose(n, rule, least=least)) for n in range(1, n_max + 1))


def after_a_loss(layout: Layout, nodes: Sequence[str], rule: LayoutRule, min_workers: int) -> Layout | None:
    """Returns the layout that follows ``layout`` if the node with most members is lost, or one worker where
    there is only one node.

    ``nodes[i]`` is the node of world rank i.  The result is None if too few workers are left then.
    """
    sizes = sorted(Counter(nodes).values())
    sizes = sizes[:-1] if len(sizes) > 1 else [sizes[0] - 1]
    left = sum(sizes)
    return choose(left, rule, sizes, least=min_workers) if left >= min_workers else None
