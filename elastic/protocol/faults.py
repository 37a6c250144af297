"""The vocabulary of faults, shared by the simulator and by real chaos runs (``job.faults``,
``actors/chaos.py``).

A fault is a value.  It says what happens (``kind``), when (``at``, and perhaps only in a ``state`` or at a
``point`` of a worker's work), to which victim (``target``), for how long (``duration_s``) and how badly
(``amount``).  A schedule is a tuple of faults.  It is drawn from a seed, written by hand as JSON, or made of
a spot trace.  A schedule that breaks a promise is made smaller by leaving faults out.  The strings are part
of the job format and of recorded schedules.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, NamedTuple


class Kind(StrEnum):
    """The kinds of faults.  :data:`SPECS` has the victim, the duration and the amount of each."""

    # to a worker's process
    SIGKILL = "SIGKILL"
    SIGTERM = "SIGTERM"
    SIGSEGV = "SIGSEGV"
    SIGABRT = "SIGABRT"
    SIGSTOP = "SIGSTOP"
    """It stands still with its sockets open, so nobody is told.  After the duration it goes on (SIGCONT),
    perhaps as a zombie that was expelled meanwhile."""
    EXCEPTION = "exception"
    """The user's code or ours raises.  The process lives and reports it."""
    EXIT = "exit"
    DEVICE_ASSERT = "device_assert"
    """A kernel's assertion fails.  The process lives and reports it, and cannot use its accelerator any more.
    """
    HELD_GIL = "held_gil"
    """Its control thread answers nobody for the duration; signals still work."""
    MEMORY_HOG = "memory_hog"
    """It takes memory until the kernel kills it."""
    SLOW = "slow"
    """Its work takes ``amount`` times as long: late is not dead."""
    CLOCK_SKEW = "clock_skew"
    """Its clock, which counts its leases, runs ``amount`` too fast (0.02: two per cent), or too slow if
    negative.
    """
    # to a node
    NODE_KILL = "node_kill"
    """Power loss: its workers and its keeper are gone at once.  After the duration a new node joins in its
    place.
    """
    NODE_NOTICE = "node_notice"
    """The node is told that its machine is taken after the duration, and then it is gone like NODE_KILL (a new
    node joins in its place a little later).  With an ``amount`` above 0, up to 1, the notice is withdrawn
    after that share of the duration, and the node stays.
    """
    NODE_FREEZE = "node_freeze"
    """All its processes stand still, and go on after the duration as if nothing had happened."""
    NODE_ADD = "node_add"
    """A node joins."""
    NODE_MISFIT = "node_misfit"
    """A node joins that does not see the bucket as the same place."""
    PARTITION = "partition"
    """The node and the coordinator do not reach each other; its workers still reach their peers on other
    nodes.
    """
    PARTITION_TO = "partition_to"
    """The network is cut one way: nothing reaches the node, but its messages arrive."""
    PARTITION_FROM = "partition_from"
    """The network is cut one way: the node hears everything, but its messages are lost."""
    PEER_PARTITION = "peer_partition"
    """The node's workers reach no peer on another node; the coordinator still reaches the node."""
    KEEPER_KILL = "keeper_kill"
    STORE_LOSS = "store_loss"
    """The store of the forming generation, or else of the next one, cannot be reached, but its keeper lives.
    """
    # to all messages of control
    DELAY = "delay"
    """Each message takes up to ``amount`` seconds more, so that messages overtake each other."""
    LOSS = "loss"
    """A message is lost with probability ``amount``."""
    DUPLICATE = "duplicate"
    """A message comes twice, the second time late, with probability ``amount``."""
    KILL_LOST = "kill_lost"
    """A kill that the coordinator asks for does not happen, with probability ``amount``."""
    # to shared services
    BUCKET_DOWN = "bucket_down"
    """A call to the bucket fails with probability ``amount``; at 1 the bucket is down."""
    BUCKET_DAMAGE = "bucket_damage"
    """The newest checkpoint can no longer be read."""
    START_FAILURE = "start_failure"
    """A worker that is asked for does not start, with probability ``amount``."""
    DROUGHT = "drought"
    """The number of places for workers drops by ``target`` for the duration, as soon as they are free."""
    # to the coordinator
    COORDINATOR_KILL = "coordinator_kill"
    """It is gone, and is started again after the duration."""
    COORDINATOR_FREEZE = "coordinator_freeze"
    """It stands still, is taken for dead and replaced, and goes on after the duration, so that there are two
    coordinators.
    """
    COORDINATOR_CUT = "coordinator_cut"
    """It is cut off, taken for dead and replaced, but goes on acting: there are two coordinators at once.
    ``amount`` is the share of the nodes that are cut off together with it; with 0 it is cut off alone, and
    only from the cluster's head."""
    COORDINATOR_CLOCK = "coordinator_clock"
    """The clock of the next coordinator is ``amount`` seconds ahead of this one's."""
    DISK_LOSS = "disk_loss"
    """The next coordinator starts on another node and does not find the disk of this one."""


class Spec(NamedTuple):
    """The properties of one kind.

    ``victim`` is "worker", "node", "coordinator" or "all".  ``lasts_s`` and ``amount`` are the ranges from
    which :func:`draw` takes the duration and the amount; None means that the kind has none.  ``own`` is True
    if a worker can do it to itself at an exact point (``job.faults``).  ``fatal`` is True if it ends the
    worker's process.
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
    Kind.NODE_NOTICE: Spec("node", lasts_s=(0.5, 20.0), amount=(-2.0, 1.0)),
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
"""All kinds with their properties.  The groups of kinds below follow from it."""

RECORDED = tuple(kind for kind in Kind if kind is not Kind.NODE_NOTICE)
"""The kinds from which a schedule is drawn unless others are named.  A younger kind is not among them: it would
change the schedule of every seed that is recorded.
"""
VICTIM: Mapping[Kind, str] = {kind: spec.victim for kind, spec in SPECS.items()}
SHARED_KINDS = tuple(kind for kind, victim in VICTIM.items() if victim == "all")
OWN_KINDS = tuple(kind for kind, spec in SPECS.items() if spec.own)
FATAL = frozenset(kind for kind, spec in SPECS.items() if spec.fatal)
LASTING: Mapping[Kind, tuple[float, float]] = {
    kind: spec.lasts_s for kind, spec in SPECS.items() if spec.lasts_s is not None
}
AMOUNTS: Mapping[Kind, tuple[float, float]] = {
    kind: spec.amount for kind, spec in SPECS.items() if spec.amount is not None
}


class Point(StrEnum):
    """A point in a worker's work."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BEFORE_COMMIT = "before_commit"
    """The gradients are complete, and the record is not contributed yet."""
    BEFORE_UPDATE = "before_update"
    """The commit was seen, and nothing is applied yet."""
    IN_UPDATE = "in_update"
    """Parts of the state are new and parts are old, so a worker that fails here holds nothing."""
    SAVE = "save"
    FORMING = "forming"
    """The plan has arrived, and the groups do not exist yet."""
    HEALING = "healing"
    VALIDATION = "validation"
    """A microbatch of held-out samples is about to be computed, before the step that the fault names."""


SIMULATED_POINTS = tuple(point for point in Point if point is not Point.VALIDATION)
"""The points that a simulated worker passes: nothing of the protocol depends on a validation."""
DELICATE_POINTS = frozenset({Point.BEFORE_UPDATE, Point.IN_UPDATE})
"""Points at which members may differ in what they have applied."""

STATES = ("Waiting", "Forming", "Running", "Stopping", "Finishing")
"""States for which a fault may wait before it strikes."""


@dataclass(frozen=True)
class Fault:
    """One entry of a schedule.

    ``at`` is in seconds since the run began.  With a ``state`` the fault strikes at the first moment from
    then on at which the run is in that state, and with a ``point`` when a worker passes that point of its
    work; if that never happens, it does not strike.

    ``target`` is the number of the victim among the living ones in order of their names, modulo their count.
    So a schedule means something on every cluster, also if parts of it are left out.  -1 means all of them,
    or all nodes of the present world if the victim is a node.  ``duration_s`` None means for good.
    """

    at: float
    kind: Kind
    target: int = 0
    duration_s: float | None = None
    amount: float = 0.0
    state: str = ""
    point: Point | None = None

    def __str__(self) -> str:
        number = {"all": "", "coordinator": ""}.get(
            VICTIM[self.kind], f" of {VICTIM[self.kind]} {self.target}"
        )
        parts = [f"{self.at:.2f} s: {self.kind}{number}"]
        parts += [f"at {self.point}"] if self.point else []
        parts += [f"while {self.state}"] if self.state else []
        parts += [f"amount {self.amount:g}"] if self.amount else []
        parts += [f"for {self.duration_s:.2f} s"] if self.duration_s is not None else []
        return " ".join(parts)


def to_json(faults: Iterable[Fault]) -> str:
    """Returns a schedule as JSON, one line for each fault, without fields that have their default value."""
    lines = [
        json.dumps({f.name: v for f in fields(Fault) if (v := getattr(each, f.name)) != f.default})
        for each in faults
    ]
    return "[" + ",\n ".join(lines) + "]\n"


def from_json(text: str) -> tuple[Fault, ...]:
    """Returns the schedule in ``text``.  Raises ValueError for text that is none, and for an unknown kind, point,
    state or field.
    """
    entries = json.loads(text)
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise ValueError("a schedule is a JSON list of faults, each an object with the fields at and kind")
    return tuple(_fault(each) for each in entries)


def _fault(entry: dict[str, Any]) -> Fault:
    known = {field.name for field in fields(Fault)}
    if missing := [name for name in ("at", "kind") if name not in entry]:
        raise ValueError(f"a fault has no {missing[0]}: {json.dumps(entry)}")
    if isinstance(entry["at"], bool) or not isinstance(entry["at"], int | float):
        raise ValueError(f"at = {entry['at']!r} must be a number of seconds")
    if unknown := sorted(entry.keys() - known):
        raise ValueError(f"a fault has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    values = {
        **entry,
        "kind": Kind(entry["kind"]),
        "point": Point(entry["point"]) if entry.get("point") else None,
    }
    if entry.get("state", "") not in ("", *STATES):
        raise ValueError(f"state = {entry['state']!r} must be one of {', '.join(STATES)}")
    return Fault(**values)


def draw(
    seed: int | random.Random,
    number: int,
    span_s: float,
    kinds: Sequence[Kind] = RECORDED,
    *,
    since_s: float = 0.0,
    doubles: float = 0.25,
    states: Sequence[str] = STATES,
    points: Sequence[Point] = (),
    for_good: float = 0.2,
) -> tuple[Fault, ...]:
    """Returns a schedule of ``number`` faults between ``since_s`` and ``since_s + span_s``, the same for the
    same arguments.

    Each entry of ``kinds`` is equally likely.  ``doubles`` is the share of faults that come shortly after
    another one, half of them in one of ``states``: faults have common causes, and strike while the last one
    is being dealt with.  ``points`` are the points at which a fault of ``OWN_KINDS`` may strike, delicate
    ones three times as likely; without points it strikes wherever the worker is.  ``for_good`` is the share
    of stopped workers that never go on.
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
