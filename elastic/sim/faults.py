"""The vocabulary of faults, shared by the simulator and by real chaos runs (``job.faults``, ``actors/chaos.py``).

A fault is a value: what happens (``kind``), when (``at``, and perhaps only in a ``state`` or at a ``point`` of a worker's work), to
which of those that are there (``target``), for how long and how badly.  A schedule is a tuple of them: drawn from a seed, written
by hand as JSON, or made of a spot trace; what breaks a promise can be made smaller by leaving some of them out.
The strings are part of the job format and of recorded schedules.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, NamedTuple


class Kind(StrEnum):
    """What happens; to what, and how much of it, says :data:`SPECS`."""

    # to a worker's process
    SIGKILL = "SIGKILL"
    SIGTERM = "SIGTERM"
    SIGSEGV = "SIGSEGV"
    SIGABRT = "SIGABRT"
    SIGSTOP = "SIGSTOP"
    """Stands still, sockets open: nobody is told.  With a duration it is thawed (SIGCONT): a zombie, if it was expelled meanwhile."""
    EXCEPTION = "exception"
    """The user's code raises, or ours: the process lives, and says so."""
    EXIT = "exit"
    DEVICE_ASSERT = "device_assert"
    """A kernel's assertion fails: the process lives and says so, and cannot use its accelerator any more."""
    HELD_GIL = "held_gil"
    """Its control thread answers nobody while the duration lasts; signals still work."""
    MEMORY_HOG = "memory_hog"
    """It takes memory until the kernel kills it."""
    SLOW = "slow"
    """Its work takes ``amount`` times as long: late is not dead."""
    CLOCK_SKEW = "clock_skew"
    """Its clock runs ``amount`` too fast (0.02: two per cent), or too slow where negative; leases are counted by it."""
    # to a node
    NODE_KILL = "node_kill"
    """Power loss: its workers and its keeper are gone at once.  After the duration a new node joins in its place."""
    NODE_FREEZE = "node_freeze"
    """All its processes stand still, and go on after the duration as if nothing had been."""
    NODE_ADD = "node_add"
    """A node joins."""
    NODE_MISFIT = "node_misfit"
    """A node joins that does not see the bucket as the same place."""
    PARTITION = "partition"
    """No word between the node and the coordinator; its workers still reach their peers on other nodes."""
    PARTITION_TO = "partition_to"
    """One way: nothing reaches the node, what it says is heard."""
    PARTITION_FROM = "partition_from"
    """One way: the node hears everything, what it says is lost."""
    PEER_PARTITION = "peer_partition"
    """The node's workers reach no peer on another node; control goes on."""
    KEEPER_KILL = "keeper_kill"
    STORE_LOSS = "store_loss"
    """The store of the present generation (of the next one where none is forming) cannot be reached, its keeper lives."""
    # to all messages of control
    DELAY = "delay"
    """Up to ``amount`` seconds more for each message, so that they overtake each other."""
    LOSS = "loss"
    """A message is lost with chance ``amount``."""
    DUPLICATE = "duplicate"
    """A message comes twice, the second time late, with chance ``amount``."""
    KILL_LOST = "kill_lost"
    """A kill that the coordinator asks for does not happen, with chance ``amount``."""
    # to the places that all depend on
    BUCKET_DOWN = "bucket_down"
    """A call to the bucket fails with chance ``amount``; 1: it is down."""
    BUCKET_DAMAGE = "bucket_damage"
    """The newest checkpoint can no longer be read."""
    START_FAILURE = "start_failure"
    """A worker that is asked for does not come up, with chance ``amount``."""
    DROUGHT = "drought"
    """``target`` of the workers' places are taken away for the duration, once they are free."""
    # to the coordinator
    COORDINATOR_KILL = "coordinator_kill"
    """It is gone; after the duration it is started again."""
    COORDINATOR_FREEZE = "coordinator_freeze"
    """It stands still, is taken for dead and replaced, and goes on after the duration: two coordinators."""
    COORDINATOR_CUT = "coordinator_cut"
    """As COORDINATOR_FREEZE, but it is cut off and acts on meanwhile: two coordinators at once.  ``amount``: the share of the nodes that
    are cut off together with it (0: it alone, and only from the cluster's head)."""
    COORDINATOR_CLOCK = "coordinator_clock"
    """The clock of the next coordinator is ``amount`` seconds ahead of this one's."""
    DISK_LOSS = "disk_loss"
    """The next coordinator does not find the disk of this one: it starts on another node."""


class Spec(NamedTuple):
    """Of a kind.  ``victim``: worker, node, coordinator, or all.  ``own``: a worker can do it to itself at an exact point (``job.faults``).
    ``fatal``: the worker's process is gone.  ``lasts_s``, ``amount``: from and to what :func:`draw` gives it; None: done at once, knows no
    more or less.
    """

    victim: str
    lasts_s: tuple[float, float] | None = None
    amount: tuple[float, float] | None = None
    own: bool = False
    fatal: bool = False


SPECS: Mapping[Kind, Spec] = {
    Kind.SIGKILL: Spec("worker", own=True, fatal=True),
    Kind.SIGTERM: Spec("worker", own=True, fatal=True),
    Kind.SIGSEGV: Spec("worker", own=True, fatal=True),
    Kind.SIGABRT: Spec("worker", own=True, fatal=True),
    Kind.SIGSTOP: Spec("worker", lasts_s=(1.0, 25.0), own=True),
    Kind.EXCEPTION: Spec("worker", own=True),
    Kind.EXIT: Spec("worker", own=True, fatal=True),
    Kind.HELD_GIL: Spec("worker", lasts_s=(1.0, 15.0), own=True),
    Kind.MEMORY_HOG: Spec("worker", own=True, fatal=True),
    Kind.DEVICE_ASSERT: Spec("worker", own=True),
    Kind.SLOW: Spec("worker", lasts_s=(5.0, 20.0), amount=(1.5, 3.0)),
    Kind.CLOCK_SKEW: Spec("worker", amount=(-0.02, 0.02)),
    Kind.NODE_KILL: Spec("node", lasts_s=(1.0, 5.0)),
    Kind.NODE_FREEZE: Spec("node", lasts_s=(1.0, 25.0)),
    Kind.NODE_ADD: Spec("node"),
    Kind.NODE_MISFIT: Spec("node"),
    Kind.PARTITION: Spec("node", lasts_s=(2.0, 25.0)),
    Kind.PARTITION_TO: Spec("node", lasts_s=(2.0, 25.0)),
    Kind.PARTITION_FROM: Spec("node", lasts_s=(2.0, 25.0)),
    Kind.PEER_PARTITION: Spec("node", lasts_s=(2.0, 15.0)),
    Kind.KEEPER_KILL: Spec("node", lasts_s=(1.0, 6.0)),
    Kind.STORE_LOSS: Spec("node", lasts_s=(5.0, 20.0)),
    Kind.DELAY: Spec("all", lasts_s=(5.0, 20.0), amount=(0.2, 3.0)),
    Kind.LOSS: Spec("all", lasts_s=(5.0, 20.0), amount=(0.02, 0.3)),
    Kind.DUPLICATE: Spec("all", lasts_s=(5.0, 20.0), amount=(0.05, 0.5)),
    Kind.KILL_LOST: Spec("all", lasts_s=(5.0, 30.0), amount=(0.5, 1.0)),
    Kind.BUCKET_DOWN: Spec("all", lasts_s=(2.0, 15.0), amount=(0.3, 1.2)),
    Kind.BUCKET_DAMAGE: Spec("all"),
    Kind.START_FAILURE: Spec("all", lasts_s=(2.0, 15.0), amount=(0.3, 1.0)),
    Kind.DROUGHT: Spec("all", lasts_s=(5.0, 15.0)),
    Kind.COORDINATOR_KILL: Spec("coordinator", lasts_s=(0.5, 8.0)),
    Kind.COORDINATOR_FREEZE: Spec("coordinator", lasts_s=(2.0, 12.0)),
    Kind.COORDINATOR_CUT: Spec("coordinator", lasts_s=(2.0, 12.0), amount=(0.0, 1.0)),
    Kind.COORDINATOR_CLOCK: Spec("coordinator", amount=(-20.0, 20.0)),
    Kind.DISK_LOSS: Spec("coordinator"),
}
"""Every kind; all groups of kinds follow from it."""

VICTIM: Mapping[Kind, str] = {kind: spec.victim for kind, spec in SPECS.items()}
SHARED_KINDS = tuple(kind for kind, victim in VICTIM.items() if victim == "all")
OWN_KINDS = tuple(kind for kind, spec in SPECS.items() if spec.own)
FATAL = frozenset(kind for kind, spec in SPECS.items() if spec.fatal)
LASTING: Mapping[Kind, tuple[float, float]] = {kind: spec.lasts_s for kind, spec in SPECS.items() if spec.lasts_s is not None}
AMOUNTS: Mapping[Kind, tuple[float, float]] = {kind: spec.amount for kind, spec in SPECS.items() if spec.amount is not None}


class Point(StrEnum):
    """Where in its work a worker is."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BEFORE_COMMIT = "before_commit"
    """Gradients complete, record not yet contributed."""
    BEFORE_UPDATE = "before_update"
    """The commit was seen, nothing applied yet."""
    IN_UPDATE = "in_update"
    """Parts of the state are new, parts are old: whoever fails here holds nothing."""
    SAVE = "save"
    FORMING = "forming"
    """The plan has arrived, the groups are not up."""
    HEALING = "healing"


DELICATE_POINTS = frozenset({Point.BEFORE_UPDATE, Point.IN_UPDATE})
"""Where members may differ in what they have applied."""

STATES = ("Waiting", "Forming", "Running", "Stopping", "Finishing")
"""In which a fault may wait to strike."""


@dataclass(frozen=True)
class Fault:
    """One entry of a schedule.  ``at``: seconds since the run began.  Where ``state`` or ``point`` is given, it strikes at the first such
    occasion from then on, if there is one: the run is in that state, a worker passes that point of its work.

    ``target``: the n-th of the living victims in order of their names, modulo their number; so a schedule means something on every
    cluster, also with parts of it left out.  -1: all of them (all nodes of the present world, where the victim is a node).
    ``duration_s``: None is for good.
    """

    at: float
    kind: Kind
    target: int = 0
    duration_s: float | None = None
    amount: float = 0.0
    state: str = ""
    point: Point | None = None

    def __str__(self) -> str:
        number = {"all": "", "coordinator": ""}.get(VICTIM[self.kind], f" of {VICTIM[self.kind]} {self.target}")
        parts = [f"{self.at:.2f} s: {self.kind}{number}"]
        parts += [f"at {self.point}"] if self.point else []
        parts += [f"while {self.state}"] if self.state else []
        parts += [f"amount {self.amount:g}"] if self.amount else []
        parts += [f"for {self.duration_s:.2f} s"] if self.duration_s is not None else []
        return " ".join(parts)


def to_json(faults: Iterable[Fault]) -> str:
    """One line a fault, without what has its default value."""
    lines = [json.dumps({f.name: v for f in fields(Fault) if (v := getattr(each, f.name)) != f.default}) for each in faults]
    return "[" + ",\n ".join(lines) + "]\n"


def from_json(text: str) -> tuple[Fault, ...]:
    """Raises ValueError for a kind, point, state or field that is not in the vocabulary."""
    return tuple(_fault(each) for each in json.loads(text))


def _fault(entry: dict[str, Any]) -> Fault:
    known = {field.name for field in fields(Fault)}
    if unknown := sorted(entry.keys() - known):
        raise ValueError(f"a fault has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    values = {**entry, "kind": Kind(entry["kind"]), "point": Point(entry["point"]) if entry.get("point") else None}
    if entry.get("state", "") not in ("", *STATES):
        raise ValueError(f"state = {entry['state']!r} must be one of {', '.join(STATES)}")
    return Fault(**values)


def draw(
    seed: int | random.Random,
    number: int,
    span_s: float,
    kinds: Sequence[Kind] = tuple(Kind),
    *,
    since_s: float = 0.0,
    doubles: float = 0.25,
    states: Sequence[str] = STATES,
    points: Sequence[Point] = (),
    for_good: float = 0.2,
) -> tuple[Fault, ...]:
    """A schedule of ``number`` faults between ``since_s`` and ``since_s + span_s``, the same for the same arguments.

    ``kinds``: each entry as likely.  ``doubles``: the share of faults that come close upon another one, half of them in one of
    ``states``: faults have common causes, and strike while the last one is being dealt with.  ``points``: where a fault of
    ``OWN_KINDS`` may strike, delicate ones three times as likely; none: wherever the worker is.  ``for_good``: the share of stopped
    workers that are never thawed.
    """
    rng = seed if isinstance(seed, random.Random) else random.Random(seed)
    weights = [3 if point in DELICATE_POINTS else 1 for point in points]
    faults: list[Fault] = []
    for _ in range(number):
        at, state, point = since_s + span_s * rng.random(), "", None
        kind = rng.choice(kinds)
        if faults and rng.random() < doubles:
            at = min(rng.choice(faults).at + rng.expovariate(2.0), since_s + span_s)
            state = rng.choice(states) if rng.random() < 0.5 else ""
        if points and kind in OWN_KINDS and not state:
            point = rng.choices(points, weights)[0]
        shortest, longest = LASTING.get(kind, (0.0, 0.0))
        lasts = longest and not (kind is Kind.SIGSTOP and rng.random() < for_good)
        amount = rng.uniform(*AMOUNTS[kind]) if kind in AMOUNTS else 0.0
        duration_s = round(rng.uniform(shortest, longest), 3) if lasts else None
        faults.append(Fault(round(at, 3), kind, rng.randrange(8), duration_s, round(amount, 3), state, point))
    return tuple(sorted(faults, key=lambda each: each.at))
