"""What is simulated: a small job, a small cluster, its faults.  Times are in virtual seconds, a step takes about one."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from elastic.control.rules import Rules
from elastic.plan.layout import LayoutRule
from elastic.sim.faults import STATES, Fault, Kind, Point, draw
from storage.slices import Tensor

ROWS = ((8,), (7, 3), (12, 5, 1))
"""Dim-0 lengths of the model's tensors: even, uneven and empty shards."""

LAYOUTS = (
    LayoutRule(dp_replicate=None, dp_shard=None, min_shard=1, use="all"),
    LayoutRule(dp_replicate=None, dp_shard=None, min_shard=2, use="all"),
    LayoutRule(dp_replicate=None, dp_shard=None, min_shard=2, use="fit"),
    LayoutRule(dp_replicate=1, dp_shard=None, min_shard=1, use="all"),
)


WORKERS_LOT = (
    *(Kind.SIGKILL, Kind.SIGSTOP) * 4,
    *(Kind.EXCEPTION,) * 2,
    *(Kind.SIGTERM, Kind.SIGSEGV, Kind.SIGABRT, Kind.EXIT),
)
"""What strikes workers, each as likely."""
COMMON = (
    *WORKERS_LOT,
    *(Kind.NODE_KILL, Kind.KEEPER_KILL, Kind.PARTITION, Kind.LOSS, Kind.DELAY, Kind.DUPLICATE, Kind.KILL_LOST) * 2,
    *(Kind.BUCKET_DOWN, Kind.START_FAILURE, Kind.STORE_LOSS) * 2,
    *(Kind.COORDINATOR_KILL, Kind.COORDINATOR_FREEZE, Kind.COORDINATOR_CUT) * 2,
    *tuple(Kind),
)
"""Every kind at least once: what a drawn schedule is drawn from."""


@dataclass(frozen=True)
class Scenario:
    """One job on one cluster.  ``Scenario.drawn`` makes one from a seed; tests write their own."""

    rules: Rules
    faults: tuple[Fault, ...] = ()
    nodes: int = 3
    slots: int = 4
    """Workers that fit; zombies do not count."""
    per_node: int = 0
    """If not 0, so many fit on each node instead."""
    rows: tuple[int, ...] = (7, 3)
    stop_at_s: float | None = None
    """When the user asks for a stop, and impatiently once more."""
    resumes: bool = False
    """Whether the same command is given again after a stop: a new incarnation, which knows what the bucket says."""
    error_step: int | None = None
    """Step at which the user's code raises, on whoever has the microbatch ..."""
    error_once: bool = True
    """... the first time only, or each time."""
    dry_step: int | None = None
    """Step whose samples never come: whoever reads them hangs."""
    patience_s: float = 150.0
    """Every run must have ended so long after its last fault did."""

    @property
    def classes(self) -> tuple[Tensor, ...]:
        """The model's tensors, as a worker tells of them."""
        return tuple(Tensor(f"t{number}", "parameter", "F32", (length,)) for number, length in enumerate(self.rows))

    @staticmethod
    def drawn(seed: int) -> Scenario:
        """One seed in ten is calm, the others from a drizzle to a storm; half of them let a world form and step first.

        In all others one fault comes upon another, so that the seeds go through all pairs of kinds.
        """
        rng = random.Random(f"scenario {seed}")
        if rng.random() < 0.05:
            return Scenario.isolation(rng)
        severity, since_s = rng.choice((0.0, 0.3, 0.3, 0.6, 0.6, 1.0, 1.0, 1.0, 1.5, 2.5)), rng.choice((0.0, 4.0))
        faults = weather(rng, severity, rng.uniform(8.0, 30.0), since_s)
        if severity:
            faults += pair(rng, seed, since_s)
        layout = rng.choice(LAYOUTS)
        low = max(rng.choice((1, 1, 2)), layout.min_shard)
        high = rng.randint(max(low, 2), 5)
        target_step = rng.randint(6, 14)
        copies = random.Random(f"copies {seed}")
        rules = small_rules(low, high, layout, target_step, save_every=rng.choice((1, 3, 5, 50)))
        return Scenario(
            rules=replace(
                rules, spares=int(seed % 4 == 3), copy_every=copies.choice((0, 1, 1, 2)), buddy_every=copies.choice((0, 0, 1, 3))
            ),
            faults=tuple(sorted(faults, key=lambda fault: fault.at)),
            nodes=rng.randint(2, 4),
            slots=high + rng.randint(0, 1),
            rows=rng.choice(ROWS),
            stop_at_s=rng.uniform(0.0, 40.0) if rng.random() < 0.12 else None,
            resumes=rng.random() < 0.5,
            error_step=rng.randint(1, target_step) if rng.random() < 0.15 else None,
            error_once=rng.random() < 0.6,
        )

    @staticmethod
    def isolation(rng: random.Random) -> Scenario:
        """A world is cut off from its coordinator again and again, and no kill arrives: only leases keep two worlds apart."""
        cuts = draw(rng, rng.randint(1, 5), 40.0, (Kind.PARTITION,), doubles=0.0)
        skews = draw(rng, rng.randint(0, 3), 40.0, (Kind.CLOCK_SKEW,), doubles=0.0)
        return Scenario(
            rules=small_rules(1, 2, LAYOUTS[0], target_step=rng.randint(20, 30), save_every=5),
            faults=(Fault(0.0, Kind.KILL_LOST, duration_s=80.0, amount=1.0), *(replace(cut, target=-1) for cut in cuts), *skews),
            nodes=2,
            slots=3,
        )


def weather(rng: random.Random, severity: float, span_s: float, since_s: float) -> tuple[Fault, ...]:
    """As many faults as are usual in the time, made worse or milder: half of them wherever a worker is, half at points of its work."""
    number = round(0.25 * severity * span_s * (0.5 + rng.random()))
    anywhere = draw(rng, number - number // 2, span_s, COMMON, since_s=since_s)
    at_points = draw(rng, number // 2, span_s, WORKERS_LOT, since_s=since_s, points=tuple(Point))
    return anywhere + at_points


def pair(rng: random.Random, seed: int, since_s: float) -> tuple[Fault, Fault]:
    """One fault close upon another: which two, the seed says, so that so many seeds one after the other cover all pairs."""
    kinds = tuple(Kind)
    first, second = (draw(rng, 1, 12.0, (kinds[n % len(kinds)],), since_s=since_s)[0] for n in (seed, seed // len(kinds)))
    state = rng.choice(STATES) if rng.random() < 0.3 else ""
    return first, replace(second, at=round(first.at + 0.8 * rng.random(), 3), state=state)


def small_rules(min_workers: int, max_workers: int, layout: LayoutRule, target_step: int, save_every: int) -> Rules:
    """Deadlines in the proportions of production, a step being a second."""
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
