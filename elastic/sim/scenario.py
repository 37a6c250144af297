"""Scenarios of the simulator: a small job, a small cluster, its faults.  Times are in virtual seconds; a step
takes about one second.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from elastic.control.rules import Rules
from elastic.ids import NodeId
from elastic.plan.layout import LayoutRule
from elastic.protocol.faults import RECORDED, SIMULATED_POINTS, STATES, Fault, Kind, Point, draw
from storage.slices import Tensor

ROWS = ((8,), (7, 3), (12, 5, 1))
"""Lengths of dimension 0 of a model's tensors, one tuple for each model.  They give even, uneven and empty
shards.
"""

LAYOUTS = (
    LayoutRule(None, None, 1, "all"),
    LayoutRule(None, None, 2, "all"),
    LayoutRule(None, None, 2, "fit"),
    LayoutRule(1, None, 1, "all"),
)


MODELS = (
    (("tp", 2),),
    (("cp", 2),),
    (("pp", 2),),
    (("pp", 2), ("tp", 2)),
)
"""Degrees of the axes that divide the model."""
DIVIDED_FROM = 200_000
"""The first seed that may divide the model.  The stories of smaller seeds are recorded."""
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
"""All axes; expert parallelism has no place of its own in a layout, and its degree divides the shards."""
MODEL = ("pp", "cp", "tp")
"""The axes that divide the model, in their order."""
TOGETHER = (*combinations(AXES, 2), *combinations(AXES, 3))
"""The axes of a job whose degrees are more than 1.  Consecutive seeds go through all of them."""
TOGETHER_FROM = 400_000
"""The first seed with the axes of :data:`TOGETHER`."""
NOTICED_FROM = 500_000
"""The first seed with notices that nodes will be taken."""
FLIPPED_FROM = 700_000
"""The first seed with bits that flip."""
LEMONS_FROM = 800_000
"""The first seed with nodes on which workers fail soon after their start."""
WRONG_FROM = 900_000
"""The first seed with workers that compute wrong gradients."""
LONGER = 16
"""Steps by which these runs are longer: a node may be taken 20 s after the notice."""
SLOW_FROM = 600_000
"""The first seed with workers that are slow for long, in runs that are longer once more."""
UNLIKE_ROWS = (*ROWS, (3, 8), (1, 5, 12), (2, 7, 3, 9))
"""Lengths like :data:`ROWS`, also of models whose last stage is the largest."""


WORKERS_LOT = (
    *(Kind.SIGKILL, Kind.SIGSTOP) * 4,
    *(Kind.EXCEPTION,) * 2,
    *(Kind.SIGTERM, Kind.SIGSEGV, Kind.SIGABRT, Kind.EXIT),
)
"""Faults of workers.  Each entry is equally likely."""
COMMON = (
    *WORKERS_LOT,
    *(Kind.NODE_KILL, Kind.KEEPER_KILL, Kind.PARTITION, Kind.LOSS, Kind.DELAY, Kind.DUPLICATE, Kind.KILL_LOST)
    * 2,
    *(Kind.BUCKET_DOWN, Kind.START_FAILURE, Kind.STORE_LOSS) * 2,
    *(Kind.COORDINATOR_KILL, Kind.COORDINATOR_FREEZE, Kind.COORDINATOR_CUT) * 2,
    *RECORDED,
)
"""Kinds from which a schedule is drawn.  Each entry is equally likely, and each kind but notices occurs at least
once.
"""
WITH_NOTICES = (*COMMON, *(Kind.NODE_NOTICE,) * 8)
"""Kinds from which a schedule with notices is drawn."""


@dataclass(frozen=True)
class Scenario:
    """One job on one cluster.  ``Scenario.drawn`` makes one from a seed; tests write their own."""

    rules: Rules
    faults: tuple[Fault, ...] = ()
    nodes: int = 3
    slots: int = 4
    """Number of workers that fit on the cluster, without zombies."""
    per_node: int = 0
    """Number of workers that fit on each node.  If it is not 0, it replaces ``slots``."""
    rows: tuple[int, ...] = (7, 3)
    stop_at_s: float | None = None
    """Time at which the user asks for a stop, and two seconds later once more."""
    resumes: bool = False
    """True if the same command is given again after a stop.  The new incarnation knows what the bucket
    has.
    """
    error_step: int | None = None
    """Step at which the user's code raises, on the worker that has the bad microbatch."""
    error_once: bool = True
    """True if the user's code raises only once, False if it raises each time."""
    ends_at: int | None = None
    """Step with which the user's loops end the run, if its commit comes while the loops run."""
    asks: bool = False
    """True if one loop asks for the end in the commit of ``ends_at``, False if all loops are left after this
    commit.
    """
    dry_step: int | None = None
    """Step whose samples never come, so that a worker that waits for them hangs."""
    least_shard: int = 1
    """The smallest shard degree at which a member fits its device."""
    rooms: tuple[float, ...] = ()
    """Room for copies on the nodes, in turn: the number of states of which all copies fit on a node.  If it
    is 0, or ``rooms`` is empty, workers report no room.
    """
    slow_starts: float = 0.0
    """Share of the workers whose start takes longer than ``form_s``.  Such a worker reports each part of its
    start.
    """
    misset: tuple[NodeId, ...] = ()
    """Nodes on which the communication library forms no world, because the processes there are set up
    wrongly.
    """
    measures: bool = False
    """True if commits tell the pace of members."""
    lemons: tuple[NodeId, ...] = ()
    """Nodes on which workers die or hang soon after their start.  With any, each node has room for ``per_node``
    workers of its own.
    """
    sour_s: float = 0.0
    """Time until which they do."""
    experts: int = 1
    """Degree of expert parallelism.  It must divide the number of shards of every world."""
    flips: tuple[tuple[float, int], ...] = ()
    """The times at which a bit flips in the state of a worker, each with the number of the worker among those
    that hold state.
    """
    rerun_every: int = 0
    """Number of steps from one in which members run a microbatch of another one to the next; 0: none is."""
    microbatches: int = 4
    """Number of microbatches in a step."""
    liars: tuple[tuple[NodeId, float], ...] = ()
    """Nodes on which workers compute wrong gradients, each with the share of the microbatches that are wrong."""
    patience_s: float = 150.0
    """Time in seconds after the end of the last fault within which every run must end."""

    @property
    def classes(self) -> tuple[Tensor, ...]:
        """The model's tensors, as a worker reports them."""
        count = len(self.rows)
        return tuple(
            Tensor(f"t{number}", "parameter", "F32", (length,), (0, 1), (number, count))
            for number, length in enumerate(self.rows)
        )

    def with_model(self, rng: random.Random) -> Scenario:
        """Returns the scenario with a job that also divides the model, and with workers for it."""
        rules, rule = self.rules, replace(self.rules.layout, model=rng.choice(MODELS))
        most = max(rules.max_workers, rule.min_parts) + rng.randint(0, rule.group)
        return replace(
            self,
            rules=replace(rules, layout=rule, max_workers=most),
            slots=self.slots + most - rules.max_workers,
        )

    def with_axes(self, seed: int) -> Scenario:
        """Returns the scenario with a job that has degrees of 2 or 3 along two or three axes, and with workers
        for it.  Half of these jobs have :func:`losses`, too.
        """
        rng, names = random.Random(f"axes {seed}"), TOGETHER[seed % len(TOGETHER)]
        wide = rng.choice(names) if rng.random() < 0.25 else ""
        degree = dict.fromkeys(AXES, 1) | dict.fromkeys(names, 2) | ({wide: 3} if wide else {})
        shards, experts = degree["dp_shard"], degree["ep"]
        while shards * degree["cp"] % experts:
            shards += 1
        free = experts == 1 and rng.random() < 0.5
        one = shards * math.prod(degree[name] for name in MODEL)
        replicas = degree["dp_replicate"] * (2 if one < 4 and rng.random() < 0.5 else 1)
        fixed = rng.choice((None, replicas))
        model = tuple((name, degree[name]) for name in MODEL if degree[name] > 1)
        rule = LayoutRule(fixed, None if free else shards, shards, rng.choice(("all", "fit")), model)
        least = one * (fixed or 1)
        high = one * replicas + rng.choice((0, 0, 1, rule.group))
        rooms = tuple(rng.choice((0.0, 0.3, 0.6, 1.0)) for _ in range(3)) if rng.random() < 0.3 else ()
        rules, spares = self.rules, rng.choice((0, 0, 1, 2))
        return replace(
            self,
            rules=replace(
                rules, layout=rule, min_workers=rng.choice((1, least)), max_workers=high, spares=spares
            ),
            slots=high + spares + rng.randint(0, 1),
            rows=rng.choice(UNLIKE_ROWS),
            rooms=rooms,
            experts=experts,
            faults=self.faults + (losses(rng) if rng.random() < 0.5 else ()),
        )

    def with_flips(self, seed: int) -> Scenario:
        """Returns the scenario with one to three bits that flip.  Steps are done again then, which takes time."""
        rng = random.Random(f"flips {seed}")
        flips = sorted(
            (round(rng.uniform(2.0, 30.0), 3), rng.randrange(8)) for _ in range(rng.choice((1, 1, 2, 3)))
        )
        return replace(self, flips=tuple(flips), patience_s=self.patience_s + 6.0 * self.rules.target_step)

    def with_lemons(self, seed: int) -> Scenario:
        """Returns the scenario with one lemon or two among two nodes or more; in half of them nothing else
        happens.
        """
        rng = random.Random(f"lemons {seed}")
        nodes = max(self.nodes, 2)
        lemons = rng.sample(range(1, nodes + 1), 2 if rng.random() < 0.3 else 1)
        rules = replace(
            self.rules,
            evicts=False,
            lemon_after=rng.choice((2, 3)),
            lemon_window_s=60.0,
            may_wait=True,
            lemon_cool_s=rng.choice((8.0, 40.0)),
        )
        return replace(
            self,
            rules=rules,
            nodes=nodes,
            per_node=rng.randint(1, 2) if rng.random() < 0.7 else self.rules.max_workers,
            measures=False,
            # what a notice excuses, and who is slow, is judged elsewhere
            faults=()
            if rng.random() < 0.5
            else tuple(each for each in self.faults if each.kind is not Kind.NODE_NOTICE),
            lemons=tuple(NodeId(f"n{number}") for number in sorted(lemons)),
            sour_s=rng.uniform(20.0, 60.0),
        )

    def with_liars(self, seed: int) -> Scenario:
        """Returns the scenario with reruns, and with one liar or two among three nodes or more; in half of them
        nothing else happens.
        """
        rng = random.Random(f"liars {seed}")
        nodes = max(self.nodes, 3)
        liars = rng.sample(range(1, nodes + 1), rng.choice((0, 1, 1, 1, 2)))
        return replace(
            self,
            nodes=nodes,
            slots=self.slots + 2,
            faults=() if rng.random() < 0.5 else self.faults,
            rerun_every=rng.randint(1, 3),
            microbatches=rng.choice((2, 4, 9)),
            liars=tuple((NodeId(f"n{each}"), rng.choice((1.0, 1.0, 0.5, 0.2))) for each in sorted(liars)),
            patience_s=self.patience_s + 6.0 * self.rules.target_step,
        )

    def room_of(self, node: NodeId) -> float:
        """Returns the room for copies on ``node``, in states, as its workers report it; 0 if they report
        none.
        """
        return self.rooms[int(node.removeprefix("n")) % len(self.rooms)] if self.rooms else 0.0

    @staticmethod
    def drawn(seed: int) -> Scenario:
        """Draws a scenario from a seed.

        One seed in twenty gives a scenario of :meth:`isolation`.  Of the others, one in ten has no faults.
        The rest have from a few to very many; half of these first let a world form and step.  Each schedule
        with faults also has a :func:`pair`, so that consecutive seeds go through all pairs of kinds.  From
        :data:`DIVIDED_FROM` on, one seed in ten divides the model, and from :data:`TOGETHER_FROM` on each job
        has two or three axes.  From :data:`NOTICED_FROM` on there are notices, and again one model in ten is
        divided.  From :data:`SLOW_FROM` on there are stragglers, too, from :data:`FLIPPED_FROM` on bits flip,
        from :data:`LEMONS_FROM` on there are lemons in their place, and from :data:`WRONG_FROM` on workers that
        compute wrong gradients.
        """
        if LEMONS_FROM > seed >= FLIPPED_FROM:
            return Scenario._noticed_or_divided(seed).with_flips(seed)
        if seed >= WRONG_FROM:
            return Scenario._noticed_or_divided(seed).with_liars(seed)
        return Scenario._noticed_or_divided(seed)

    @staticmethod
    def _noticed_or_divided(seed: int) -> Scenario:
        if NOTICED_FROM > seed >= TOGETHER_FROM:
            return Scenario._drawn(seed).with_axes(seed)
        axes, scenario = random.Random(f"axes {seed}"), Scenario._drawn(seed)
        if WRONG_FROM > seed >= LEMONS_FROM:
            return scenario.with_lemons(seed)
        return scenario.with_model(axes) if axes.random() < 0.1 and seed >= DIVIDED_FROM else scenario

    @staticmethod
    def _drawn(seed: int) -> Scenario:
        rng = random.Random(f"scenario {seed}")
        if rng.random() < 0.05:
            return Scenario.isolation(rng)
        severity, since_s = (
            rng.choice((0.0, 0.3, 0.3, 0.6, 0.6, 1.0, 1.0, 1.0, 1.5, 2.5)),
            rng.choice((0.0, 4.0)),
        )
        kinds, each = (WITH_NOTICES, tuple(Kind)) if seed >= NOTICED_FROM else (COMMON, RECORDED)
        faults = weather(rng, severity, rng.uniform(8.0, 30.0), since_s, kinds)
        if severity:
            faults += pair(rng, seed, since_s, each)
        if seed >= NOTICED_FROM:
            faults = noticed(seed, faults)
        if seed >= SLOW_FROM:
            faults = slowed(seed, faults)
        layout = rng.choice(LAYOUTS)
        low = max(rng.choice((1, 1, 2)), layout.min_shard)
        high = rng.randint(max(low, 2), 5)
        target_step = rng.randint(6, 14) + LONGER * ((seed >= NOTICED_FROM) + (seed >= SLOW_FROM))
        copies, room, early = (random.Random(f"{what} {seed}") for what in ("copies", "room", "ends"))
        rules = small_rules(low, high, layout, target_step, save_every=rng.choice((1, 3, 5, 50)))
        return Scenario(
            rules=replace(
                rules,
                spares=int(seed % 4 == 3),
                evicts=seed >= SLOW_FROM and seed % 3 > 0,
                copy_every=copies.choice((0, 1, 1, 2)),
                buddy_every=copies.choice((0, 0, 1, 3)),
            ),
            faults=tuple(sorted(faults, key=lambda fault: fault.at)),
            nodes=rng.randint(2, 4),
            slots=high + rng.randint(0, 1),
            rows=rng.choice(ROWS),
            stop_at_s=rng.uniform(0.0, 40.0) if rng.random() < 0.12 else None,
            resumes=rng.random() < 0.5,
            error_step=rng.randint(1, target_step) if rng.random() < 0.15 else None,
            error_once=rng.random() < 0.6,
            ends_at=early.randint(1, target_step) if early.random() < 0.1 else None,
            asks=early.random() < 0.5,
            measures=seed >= SLOW_FROM,
            slow_starts=0.4 if random.Random(f"slow starts {seed}").random() < 0.1 else 0.0,
            rooms=tuple(room.choice((0.0, 0.4, 0.6, 1.0, 1.5)) for _ in range(3))
            if room.random() < 0.15
            else (),
        )

    @staticmethod
    def isolation(rng: random.Random) -> Scenario:
        """Draws a scenario in which a world is cut off from its coordinator again and again, and no order to
        kill arrives.

        Only leases keep two worlds apart there.
        """
        cuts = draw(rng, rng.randint(1, 5), 40.0, (Kind.PARTITION,), doubles=0.0)
        skews = draw(rng, rng.randint(0, 3), 40.0, (Kind.CLOCK_SKEW,), doubles=0.0)
        return Scenario(
            rules=small_rules(1, 2, LAYOUTS[0], target_step=rng.randint(20, 30), save_every=5),
            faults=(
                Fault(0.0, Kind.KILL_LOST, duration_s=80.0, amount=1.0),
                *(replace(cut, target=-1) for cut in cuts),
                *skews,
            ),
            nodes=2,
            slots=3,
        )


def weather(
    rng: random.Random, severity: float, span_s: float, since_s: float, kinds: Sequence[Kind] = COMMON
) -> tuple[Fault, ...]:
    """Draws faults for ``span_s`` seconds: on average one in four seconds, times ``severity``.  For half of
    them the points of a worker's work are drawn, too.
    """
    number = round(0.25 * severity * span_s * (0.5 + rng.random()))
    anywhere = draw(rng, number - number // 2, span_s, kinds, since_s=since_s)
    at_points = draw(rng, number // 2, span_s, WORKERS_LOT, since_s=since_s, points=SIMULATED_POINTS)
    return anywhere + at_points


def losses(rng: random.Random) -> tuple[Fault, ...]:
    """Draws the loss of a member, whose seat another worker takes, of a worker that heals, and of a keeper."""
    at = rng.uniform(4.0, 12.0)
    return (
        Fault(round(at, 3), Kind.SIGKILL, target=rng.randrange(8)),
        Fault(round(at + 0.5, 3), Kind.SIGKILL, point=Point.HEALING),
        Fault(
            round(at + rng.uniform(0.0, 4.0), 3),
            Kind.KEEPER_KILL,
            rng.randrange(4),
            round(rng.uniform(0.5, 4.0), 3),
        ),
    )


def noticed(seed: int, faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Draws one to three notices, for two seeds in five without any other of ``faults``: only undisturbed
    nodes must leave in time.
    """
    rng = random.Random(f"notices {seed}")
    others = faults if rng.random() < 0.6 else ()
    return others + draw(
        rng, rng.randint(1, 3), 16.0, (Kind.NODE_NOTICE,), since_s=rng.choice((0.0, 4.0)), doubles=0.5
    )


def slowed(seed: int, faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Draws one to three workers, or all, that are slow for long; for one seed in two without any of
    ``faults``: then no step may be done again.
    """
    rng = random.Random(f"slow {seed}")
    others = faults if rng.random() < 0.5 else ()
    return others + tuple(
        Fault(
            round(rng.uniform(2.0, 20.0), 3),
            Kind.SLOW,
            rng.choice((-1, 0, 1, 2, 3)),
            round(rng.uniform(10.0, 80.0), 3),
            round(rng.uniform(2.0, 3.0), 3),
        )
        for _ in range(rng.randint(1, 3))
    )


def pair(
    rng: random.Random, seed: int, since_s: float, kinds: Sequence[Kind] = RECORDED
) -> tuple[Fault, Fault]:
    """Draws two faults, the second shortly after the first.  ``seed`` decides their kinds, so that
    consecutive seeds cover all pairs.
    """
    first, second = (
        draw(rng, 1, 12.0, (kinds[n % len(kinds)],), since_s=since_s)[0] for n in (seed, seed // len(kinds))
    )
    state = rng.choice(STATES) if rng.random() < 0.3 else ""
    return first, replace(second, at=round(first.at + 0.8 * rng.random(), 3), state=state)


def small_rules(
    min_workers: int, max_workers: int, layout: LayoutRule, target_step: int, save_every: int
) -> Rules:
    """Returns rules for steps of one second, with deadlines in the proportions of production."""
    return Rules(
        min_workers=min_workers,
        max_workers=max_workers,
        layout=layout,
        target_step=target_step,
        save_every=save_every,
        form_s=12.0,
        fence_s=3.0,
        stall_s=6.0,
        silence_s=2.0,
        lease_s=12.0,
        wait_s=300.0,
        stop_s=10.0,
        max_fruitless=6,
        grow_debounce_s=2.0,
        reproducible=True,
    )
