"""Scenarios in which what is rare elsewhere happens often."""

from __future__ import annotations

import random
from dataclasses import replace

from elastic.ids import NodeId
from elastic.plan.layout import LayoutRule
from elastic.protocol.faults import Fault, Kind, Point, draw
from elastic.sim.scenario import (
    LEMONS_FROM,
    TOGETHER_FROM,
    WRONG_FROM,
    Scenario,
    slowed,
    small_rules,
    weather,
)

CALM = Scenario(rules=small_rules(2, 4, LayoutRule(None, None, 2, "all"), target_step=10, save_every=4))


def drawn(seed: int) -> Scenario:
    return Scenario.drawn(seed)


def poor(seed: int) -> Scenario:
    """The run may fail after two generations in a row without a commit."""
    scenario = Scenario.drawn(seed)
    return replace(scenario, rules=replace(scenario.rules, max_fruitless=1))


def storm(seed: int) -> Scenario:
    """Many faults, kills and saves that often fail, and a user who asks for a stop."""
    rng, scenario = random.Random(seed), Scenario.drawn(seed)
    hard = (
        Fault(0.0, Kind.KILL_LOST, duration_s=30.0, amount=0.8),
        Fault(0.0, Kind.BUCKET_DOWN, duration_s=30.0, amount=0.6),
    )
    return replace(
        scenario,
        rules=replace(scenario.rules, save_every=1),
        faults=(*hard, *weather(rng, 2.0, 30.0, 0.0)),
        stop_at_s=rng.uniform(1.0, 25.0) if rng.random() < 0.8 else None,
        error_step=rng.choice((None, 3)),
        error_once=False,
    )


def barren(seed: int) -> Scenario:
    """Hardly a start or a save succeeds, to the end."""
    bad = (
        Fault(0.0, Kind.START_FAILURE, duration_s=60.0, amount=0.8),
        Fault(0.0, Kind.BUCKET_DOWN, duration_s=60.0, amount=0.7),
    )
    return replace(CALM, faults=(*bad, *draw(seed, 5, 60.0, (Kind.SIGKILL,))))


def edge(seed: int) -> Scenario:
    """Members are stopped between commit and update, others die, no kill arrives: zombies that wake up and
    apply.
    """
    rng = random.Random(seed)
    stops = draw(rng, 8, 30.0, (Kind.SIGSTOP,), points=(Point.BEFORE_UPDATE,), doubles=0.0)
    deaths = draw(rng, 4, 30.0, (Kind.SIGKILL, Kind.SIGSTOP))
    wishes = (
        Fault(0.0, Kind.KILL_LOST, duration_s=30.0, amount=1.0),
        Fault(0.0, Kind.BUCKET_DOWN, duration_s=30.0, amount=0.5),
    )
    rules = replace(
        small_rules(1, 3, LayoutRule(None, None, 1, "all"), target_step=12, save_every=1), lease_s=30.0
    )
    return Scenario(rules=rules, faults=(*wishes, *stops, *deaths))


def axes(seed: int) -> Scenario:
    """Members also divide the model, so a world has whole model groups."""
    return Scenario.drawn(seed).with_model(random.Random(f"axes of {seed}"))


def together(seed: int) -> Scenario:
    """Each job has two or three axes, and many lose members that heal, and keepers."""
    return Scenario.drawn(TOGETHER_FROM + seed)


def spared(seed: int) -> Scenario:
    """Each of two nodes has two replicas, which divide the model, and a spare; members die, one after the
    other.
    """
    rules = small_rules(2, 8, LayoutRule(None, 1, 1, "all", (("tp", 2),)), target_step=20, save_every=4)
    deaths = draw(seed, 4, 24.0, (Kind.SIGKILL,), since_s=6.0, doubles=0.0)
    return Scenario(rules=replace(rules, spares=2), faults=deaths, nodes=2, slots=10)


def isolation(seed: int) -> Scenario:
    """A world is cut off from its coordinator again and again: only leases keep two worlds apart."""
    return Scenario.isolation(random.Random(seed))


def interregnum(seed: int) -> Scenario:
    """Coordinators die, are followed and come back, and their disks are lost with them, while workers die
    too.
    """
    rng, scenario = random.Random(seed), Scenario.drawn(seed)
    kinds = (
        Kind.COORDINATOR_KILL,
        Kind.COORDINATOR_FREEZE,
        Kind.COORDINATOR_CUT,
        Kind.DISK_LOSS,
        Kind.COORDINATOR_CLOCK,
        Kind.SIGKILL,
    )
    return replace(
        scenario,
        faults=draw(rng, 10, 25.0, (*kinds, Kind.LOSS, Kind.SIGSTOP)),
        rules=replace(scenario.rules, save_every=2),
    )


def usurpers(seed: int) -> Scenario:
    """Coordinators stand still while workers die, and go on as if nothing had happened; the kills they ask
    for do not happen.
    """
    freezes = draw(seed, 5, 25.0, (Kind.COORDINATOR_FREEZE,), doubles=0.0)
    deaths = draw(seed, 10, 25.0, (Kind.SIGKILL,), doubles=0.0)
    return replace(
        interregnum(seed), faults=(Fault(0.0, Kind.KILL_LOST, duration_s=40.0, amount=1.0), *freezes, *deaths)
    )


def severed(seed: int) -> Scenario:
    """A coordinator is cut off together with all nodes that there are, or most, and so are its followers;
    workers die on both sides.
    """
    rng = random.Random(seed)
    cuts = draw(rng, rng.randint(1, 3), 30.0, (Kind.COORDINATOR_CUT,), doubles=0.0)
    cuts = tuple(
        replace(cut, amount=rng.choice((0.6, 1.0, 1.0)), duration_s=rng.uniform(4.0, 25.0)) for cut in cuts
    )
    deaths = draw(
        rng,
        12,
        45.0,
        (Kind.SIGKILL, Kind.SIGKILL, Kind.EXCEPTION, Kind.KEEPER_KILL, Kind.SIGSTOP),
        doubles=0.5,
    )
    scenario = Scenario.drawn(seed)
    rules = replace(
        scenario.rules,
        target_step=rng.randint(20, 40),
        save_every=rng.choice((2, 5, 50)),
        min_workers=1,
        max_fruitless=20,
    )
    return replace(scenario, faults=(*cuts, *deaths), rules=rules, stop_at_s=None, error_step=None)


def divided(seed: int) -> Scenario:
    """A coordinator is cut off with half of the nodes or fewer, keepers are made anew, and worlds break on
    both sides right then.
    """
    rng = random.Random(seed)
    at = rng.uniform(6.0, 12.0)
    cut = Fault(
        at, Kind.COORDINATOR_CUT, duration_s=rng.uniform(7.0, 14.0), amount=rng.choice((0.25, 0.34, 0.5))
    )
    deaths = tuple(Fault(at + rng.uniform(-0.5, 4.0), Kind.SIGKILL, rng.randrange(4)) for _ in range(4))
    keepers = tuple(
        Fault(at + rng.uniform(-1.5, 1.0), Kind.KEEPER_KILL, rng.randrange(4), 0.5)
        for _ in range(rng.randrange(3))
    )
    down = (Fault(at - 2.0, Kind.BUCKET_DOWN, duration_s=6.0, amount=rng.choice((0.0, 0.9))),)
    rules = small_rules(1, 4, LayoutRule(None, None, 1, "all"), target_step=25, save_every=50)
    return Scenario(
        rules=replace(rules, max_fruitless=20),
        faults=(*down, cut, *deaths, *keepers),
        nodes=rng.randint(2, 4),
        slots=5,
    )


def relapsed(seed: int) -> Scenario:
    """A coordinator goes on, cut off with all nodes; its follower dies as the cut ends, and the next one
    finds what both have written.
    """
    rng = random.Random(seed)
    at = rng.uniform(6.0, 12.0)
    cut = Fault(at, Kind.COORDINATOR_CUT, duration_s=rng.uniform(7.3, 7.9), amount=1.0)
    deaths = tuple(Fault(at + rng.uniform(0.0, 2.0), Kind.SIGKILL, rng.randrange(4)) for _ in range(2))
    end = at + cut.duration_s - rng.uniform(0.0, 0.6)  # type: ignore[operator]
    ends = (Fault(end, Kind.DISK_LOSS), Fault(end, Kind.COORDINATOR_KILL, duration_s=rng.uniform(0.6, 1.2)))
    rules = small_rules(1, 3, LayoutRule(None, None, 1, "all"), target_step=25, save_every=50)
    return Scenario(rules=replace(rules, max_fruitless=20), faults=(cut, *deaths, *ends), nodes=3, slots=6)


def abandoned(seed: int) -> Scenario:
    """A coordinator goes on with the rest of its world, cut off together with all nodes; another one knows
    only the world before.
    """
    rng = random.Random(seed)
    at = rng.uniform(8.0, 14.0)
    cut = Fault(at, Kind.COORDINATOR_CUT, duration_s=rng.uniform(22.0, 30.0), amount=1.0)
    deaths = (
        Fault(at + rng.uniform(0.1, 1.0), Kind.SIGKILL, rng.randrange(3)),
        Fault(0.0, Kind.KILL_LOST, duration_s=80.0, amount=1.0),
    )
    rules = small_rules(1, 3, LayoutRule(None, None, 1, "all"), target_step=60, save_every=50)
    return Scenario(rules=rules, faults=(cut, *deaths), nodes=3, slots=5)


def forgetting(seed: int) -> Scenario:
    """Coordinators die with their disks, and all workers with them; often the keepers die once the next
    coordinator has read what they have of the journal: only what is in the bucket remains."""
    rng = random.Random(seed)
    blows = [rng.uniform(5.0, 40.0) for _ in range(5)]
    disks = (Fault(at - 0.01, Kind.DISK_LOSS) for at in blows)
    deaths = (Fault(at, Kind.COORDINATOR_KILL, duration_s=1.0) for at in blows)
    keepers = [
        Fault(at + 1.15, Kind.KEEPER_KILL, n, duration_s=2.0)
        for at in blows
        for n in range(2)
        if rng.random() < 0.8
    ]
    workers = (Fault(at + 0.1, Kind.SIGKILL, -1) for at in blows)
    rules = small_rules(1, 2, LayoutRule(None, None, 1, "all"), target_step=30, save_every=1)
    return Scenario(
        rules=replace(rules, max_fruitless=50), faults=(*disks, *deaths, *keepers, *workers), nodes=2, slots=3
    )


def unshipped(seed: int) -> Scenario:
    """Worlds come and go while the bucket is down; then their coordinator is cut off with all nodes, and
    another knows of none of them.
    """
    rng = random.Random(seed)
    at = rng.uniform(11.0, 14.0)
    down = Fault(rng.uniform(4.0, 6.0), Kind.BUCKET_DOWN, duration_s=at - 2.0, amount=0.9)
    deaths = (Fault(rng.uniform(5.0, at), Kind.SIGKILL, rng.randrange(4)) for _ in range(3))
    cuts = (
        Fault(at + 3.0 * n, Kind.COORDINATOR_CUT, duration_s=rng.uniform(7.0, 7.9), amount=1.0)
        for n in range(3)
    )
    rules = small_rules(1, 4, LayoutRule(None, None, 1, "all"), target_step=25, save_every=50)
    return Scenario(rules=rules, faults=(down, *deaths, *cuts), nodes=3, slots=5)


def expelled(seed: int) -> Scenario:
    """A coordinator is cut off, so members that it expels live on; as the bucket was down, the next one has
    not read of this.
    """
    rng = random.Random(seed)
    at = rng.uniform(11.0, 14.0)
    down = Fault(rng.uniform(4.0, 7.0), Kind.BUCKET_DOWN, duration_s=at - 2.0, amount=0.9)
    deaths = tuple(Fault(rng.uniform(5.0, at + 3.0), Kind.SIGKILL, rng.randrange(4)) for _ in range(3))
    cuts = (
        Fault(at + 2.0 * n, Kind.COORDINATOR_CUT, duration_s=rng.uniform(7.0, 7.9), amount=1.0)
        for n in range(3)
    )
    rules = small_rules(2, 4, LayoutRule(None, None, 2, "all"), target_step=25, save_every=50)
    return Scenario(rules=rules, faults=(down, *deaths, *cuts), nodes=3, slots=5)


def left_out(seed: int) -> Scenario:
    """This is ``expelled`` with deaths placed so that only the member left out, of all alive, holds some
    shard.
    """
    rng = random.Random(seed)
    at = rng.uniform(12.0, 14.5)
    down = Fault(rng.uniform(5.1, 6.5), Kind.BUCKET_DOWN, duration_s=at - 2.0, amount=0.9)
    early = Fault(rng.uniform(6.6, 8.0), Kind.SIGKILL, rng.randrange(4))
    first = Fault(at + rng.uniform(0.2, 0.6), Kind.SIGKILL, rng.randrange(4))
    # it has answered its fence, and nobody says that it is dead
    second = Fault(at + rng.uniform(1.2, 2.8), Kind.SIGKILL, rng.randrange(3))
    cuts = (
        Fault(at + 2.0 * n, Kind.COORDINATOR_CUT, duration_s=rng.uniform(7.0, 7.9), amount=1.0)
        for n in range(3)
    )
    rules = small_rules(2, 4, LayoutRule(None, None, 2, "all"), target_step=25, save_every=50)
    return Scenario(rules=rules, faults=(down, early, first, second, *cuts), nodes=3, slots=5)


def relapsing(seed: int) -> Scenario:
    """Members die between commit and update, and others once the next world forms, which is fenced while some
    still leave the last.
    """
    rng = random.Random(seed)
    times = [rng.uniform(4.0, 40.0) for _ in range(10)]
    deaths = (Fault(at, Kind.SIGKILL, point=Point.BEFORE_UPDATE) for at in times)
    again = (Fault(at, Kind.SIGKILL, rng.randrange(4), state="Forming") for at in times for _ in range(2))
    rules = small_rules(2, 4, LayoutRule(None, None, 1, "all"), target_step=25, save_every=5)
    return Scenario(rules=replace(rules, max_fruitless=50), faults=(*deaths, *again), nodes=3, slots=8)


def widowed(seed: int) -> Scenario:
    """A keeper is lost, and a coordinator soon after, again and again while saves are on their way; then the
    run goes on undisturbed.
    """
    rng = random.Random(seed)
    blows = [rng.uniform(5.0, 10.0) + 12.0 * n for n in range(6)]
    keepers = (
        Fault(at, Kind.KEEPER_KILL, rng.randrange(3), duration_s=rng.uniform(0.5, 6.0)) for at in blows
    )
    nodes = (Fault(at + 3.0, Kind.NODE_KILL, rng.randrange(3), duration_s=5.0) for at in blows[::2])
    deaths = [
        Fault(at + rng.uniform(-0.5, 4.0), Kind.COORDINATOR_KILL, duration_s=rng.uniform(0.6, 3.0))
        for at in blows
        for _ in range(2)
    ]
    down = (Fault(at, Kind.BUCKET_DOWN, duration_s=6.0, amount=rng.choice((0.0, 0.7))) for at in blows)
    rules = small_rules(1, 3, LayoutRule(None, None, 1, "all"), target_step=200, save_every=3)
    return Scenario(
        rules=replace(rules, max_fruitless=50),
        faults=(*keepers, *nodes, *deaths, *down),
        nodes=3,
        slots=5,
        patience_s=400.0,
    )


def outage(seed: int) -> Scenario:
    """The bucket is down from before the last step until long after it."""
    rng = random.Random(seed)
    down = Fault(
        rng.uniform(5.0, 9.0),
        Kind.BUCKET_DOWN,
        duration_s=rng.uniform(60.0, 120.0),
        amount=rng.choice((0.9, 1.0)),
    )
    rules = small_rules(
        1, 3, LayoutRule(None, None, 1, "all"), target_step=rng.randint(8, 14), save_every=rng.choice((4, 50))
    )
    deaths = draw(rng, rng.randrange(2), 30.0, (Kind.SIGKILL,))
    return Scenario(
        rules=replace(rules, copy_every=rng.choice((0, 1))), faults=(down, *deaths), nodes=3, slots=5
    )


def last_minute(seed: int) -> Scenario:
    """Nothing but saves is copied, the bucket is down until the last step is near, and members die in its
    commit.

    ``wait_s`` is shorter than a slow part takes, so a refusal alone does not keep the run waiting.
    """
    rng = random.Random(seed)
    rules = small_rules(1, 4, LayoutRule(None, None, 1, "all"), target_step=10, save_every=9)
    at = rng.uniform(10.0, 16.0)
    points = (Point.BEFORE_UPDATE, Point.IN_UPDATE, Point.BEFORE_COMMIT)
    deaths = (
        Fault(at + rng.uniform(0.0, 1.5), Kind.SIGKILL, rng.randrange(3), point=rng.choice(points))
        for _ in range(2)
    )
    down = Fault(at - 3.0, Kind.BUCKET_DOWN, duration_s=10.0, amount=1.0)
    return Scenario(
        rules=replace(rules, copy_every=0, buddy_every=0, wait_s=15.0),
        faults=(down, *deaths),
        nodes=3,
        slots=6,
    )


def laggard(seed: int) -> Scenario:
    """Every message comes twice, and steps are done again while no coordinator hears of them: reports of past
    generations arrive.
    """
    rng = random.Random(seed)
    twice = Fault(0.0, Kind.DUPLICATE, duration_s=80.0, amount=1.0)
    blows = [rng.uniform(5.0, 10.0) + 10.0 * n for n in range(7)]
    deaths = (Fault(at, Kind.SIGKILL, rng.randrange(3)) for at in blows)
    silence = (Fault(at + rng.uniform(2.5, 4.0), Kind.COORDINATOR_KILL, duration_s=4.0) for at in blows)
    rules = small_rules(2, 2, LayoutRule(None, None, 2, "all"), target_step=60, save_every=10)
    return Scenario(
        rules=replace(rules, max_fruitless=50, spares=1), faults=(twice, *deaths, *silence), nodes=3, slots=6
    )


def skewed(seed: int) -> Scenario:
    """Every member's clock is slow."""
    scenario = isolation(seed)
    skews = tuple(Fault(0.5 * n, Kind.CLOCK_SKEW, -1, amount=-0.04) for n in range(80))
    return replace(scenario, faults=(*scenario.faults, *skews))


def isolated_interregnum(seed: int) -> Scenario:
    """This is ``isolation``, and the coordinator also dies while the world is cut off."""
    scenario = isolation(seed)
    deaths = tuple(
        Fault(cut.at + 0.1, Kind.COORDINATOR_KILL, duration_s=1.0)
        for cut in scenario.faults
        if cut.kind is Kind.PARTITION
    )
    return replace(scenario, faults=(*scenario.faults, *deaths))


def shards(seed: int, *, copy_every: int, kind: Kind, buddy_every: int = 0) -> Scenario:
    """Three workers with a third of the state each, and hardly a save; three deaths, far enough apart."""
    rules = small_rules(2, 3, LayoutRule(1, None, 2, "all"), target_step=24, save_every=50)
    faults = tuple(
        replace(fault, at=at)
        for at, fault in zip((9.0, 19.0, 29.0), draw(seed, 3, 1.0, (kind,), doubles=0.0), strict=True)
    )
    return Scenario(
        rules=replace(rules, copy_every=copy_every, buddy_every=buddy_every), faults=faults, nodes=4, slots=3
    )


def darkness(seed: int) -> Scenario:
    """Messages of the nodes are late, and then all workers die, so nobody is left who knows how far they
    came.
    """
    rng, scenario = random.Random(seed), shards(seed, copy_every=1, kind=Kind.SIGKILL)
    late = [
        Fault(10.0, kind, node, duration_s=2.5, amount=1.5)
        for node in range(3)
        for kind in (Kind.PARTITION_FROM, Kind.DELAY)
    ]
    deaths = [Fault(12.0 + 0.2 * rng.random(), Kind.SIGKILL, target) for target in range(8)]
    layout = rng.choice((LayoutRule(1, None, 2, "all"), LayoutRule(None, None, 1, "all")))
    return replace(
        scenario,
        rules=replace(scenario.rules, layout=layout),
        faults=tuple(sorted((*late, *deaths), key=lambda fault: fault.at)),
    )


def duel(seed: int) -> Scenario:
    """Two replicas, of which one dies again and again: perhaps with a copy of a step that the other has not
    seen committed.
    """
    rules = replace(
        small_rules(1, 2, LayoutRule(None, None, 1, "all"), target_step=40, save_every=50), copy_every=1
    )
    return Scenario(rules=rules, faults=draw(seed, 20, 60.0, (Kind.SIGKILL,), doubles=0.0), nodes=2, slots=2)


def noticed(seed: int) -> Scenario:
    """Nodes are taken with notice, some notices are withdrawn, and nothing else happens: only copies have the
    whole state.
    """
    rng = random.Random(f"noticed {seed}")
    rules = small_rules(1, 4, LayoutRule(1, None, 1, "all"), target_step=40, save_every=50)
    notices = tuple(
        replace(each, duration_s=10.0 + 0.5 * (each.duration_s or 0.0))
        for each in draw(rng, 3, 24.0, (Kind.NODE_NOTICE,), since_s=4.0, doubles=0.0)
    )
    return Scenario(
        rules=replace(rules, spares=seed % 2, copy_every=1, buddy_every=1), faults=notices, nodes=4, slots=5
    )


def noticed_by_another_clock(seed: int) -> Scenario:
    """The coordinator is another one from the beginning on, and its clock is up to 20 s ahead of the nodes'
    clocks or behind them.
    """
    scenario, amount = noticed(seed), random.Random(f"clock {seed}").uniform(5.0, 20.0)
    another = (
        Fault(0.2, Kind.COORDINATOR_CLOCK, amount=amount if seed % 2 else -amount),
        Fault(0.3, Kind.COORDINATOR_KILL, duration_s=0.5),
    )
    late = tuple(replace(each, at=each.at + 16.0) for each in scenario.faults)
    rules = replace(scenario.rules, target_step=60)
    return replace(scenario, rules=rules, faults=(*another, *late))


def noticed_and_stopped(seed: int) -> Scenario:
    """The user asks for a stop, perhaps while a node leaves, and gives the command again after it."""
    stop_at_s = random.Random(f"stopped {seed}").uniform(4.0, 30.0)
    return replace(noticed(seed), stop_at_s=stop_at_s, resumes=True)


def straggling(seed: int) -> Scenario:
    """Workers are slow for long, each alone or all of them, and nothing else happens: only copies have the whole
    state.
    """
    least = (1, 2, 4)[seed % 3]
    rules = small_rules(least, 4, LayoutRule(1, None, 1, "all"), target_step=70, save_every=50)
    rules = replace(rules, spares=seed % 2, copy_every=1, buddy_every=1, evicts=True)
    return Scenario(rules=rules, faults=slowed(seed, ()), nodes=4, slots=5, measures=True)


def flipped(seed: int) -> Scenario:
    """Two to four replicas, in whose states bits flip; for one seed in two a worker dies, too."""
    rng = random.Random(f"flipped {seed}")
    rules = small_rules(
        1, rng.randint(2, 4), LayoutRule(None, 1, 1, "all"), target_step=20, save_every=rng.choice((1, 3))
    )
    flips = sorted((rng.uniform(4.0, 20.0), rng.randrange(8)) for _ in range(rng.randint(1, 2)))
    faults = draw(rng, seed % 2, 20.0, (Kind.SIGKILL, Kind.COORDINATOR_KILL), since_s=6.0)
    return Scenario(
        replace(rules, copy_every=seed % 3 % 2),
        faults,
        nodes=4,
        slots=5,
        flips=tuple(flips),
        patience_s=400.0,
    )


def lying(seed: int) -> Scenario:
    """Two to five replicas, one or two of which compute wrong gradients on one node, and nothing else happens."""
    rng = random.Random(f"lying {seed}")
    rules = small_rules(
        1, rng.randint(2, 5), LayoutRule(None, 1, 1, "all"), target_step=16, save_every=rng.choice((1, 5))
    )
    return Scenario(
        replace(rules, copy_every=seed % 2),
        nodes=4,
        slots=7,
        rerun_every=rng.randint(1, 3),
        microbatches=rng.choice((2, 4, 9)),
        liars=((NodeId(f"n{rng.randint(1, 4)}"), rng.choice((1.0, 1.0, 0.5))),),
        patience_s=300.0,
    )


def wrong(seed: int) -> Scenario:
    """Gradients are wrong, and whatever else may happen does."""
    return Scenario.drawn(WRONG_FROM + seed)


def lemons(seed: int) -> Scenario:
    """Workers die or hang on one node or two, again and again."""
    return Scenario.drawn(LEMONS_FROM + seed)


ALL = {
    each.__name__: each
    for each in (
        drawn,
        axes,
        together,
        spared,
        poor,
        storm,
        barren,
        edge,
        isolation,
        interregnum,
        usurpers,
        severed,
        divided,
        relapsed,
        abandoned,
        forgetting,
        unshipped,
        expelled,
        left_out,
        relapsing,
        widowed,
        outage,
        last_minute,
        laggard,
        skewed,
        isolated_interregnum,
        flipped,
        lying,
        wrong,
        darkness,
        duel,
        noticed,
        noticed_by_another_clock,
        noticed_and_stopped,
        straggling,
        lemons,
    )
}

SEEDS, FEW = range(230), range(125)
LONG = (
    "severed",
    "divided",
    "relapsed",
    "abandoned",
    "forgetting",
    "unshipped",
    "expelled",
    "left_out",
    "widowed",
)
"""Scenarios of which the seeds ``FEW`` are enough."""


def seeds_of(scenario: str) -> range:
    """Returns the seeds with which a mutant is tried in turn, and which the unbroken rules must pass."""
    return FEW if scenario in LONG else SEEDS


def flapping(seed: int, stay_s: float) -> Scenario:
    """One of two machines goes after ``stay_s``, and is back two seconds later, twenty times."""
    rules = small_rules(1, 2, LayoutRule(None, None, 1, "all"), target_step=150, save_every=50)
    faults = (Fault(20.0 + n * (stay_s + 2.0), Kind.NODE_KILL, 1, duration_s=2.0) for n in range(20))
    return Scenario(
        rules=replace(rules, max_fruitless=50),
        faults=tuple(faults),
        nodes=2,
        slots=2,
        per_node=1,
        patience_s=300.0 + seed,
    )
