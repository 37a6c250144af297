"""Scripts of chaos runs: which faults strike whom and when, which worlds follow, and from which tier each of
them begins.

A run must not reach its end, nor a fault, before the newcomers it waits for are there.  So a script has
*gates*: steps whose data cannot be read before the world has been told to grow.  Everything waits for events:
no script knows how long anything takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from actors.view import View
from elastic.data.cursor import Cursor
from elastic.job import Job
from tests.support.chaos import ASK_S, Trial, Witness, alone, trial
from tests.support.room import Room
from tests.support.toys import toy_job

STEPS = 44
SAMPLES = 16 * STEPS
"""Number of samples: one epoch, so that each sample belongs to exactly one step."""
POINTS = ("forward", "backward", "before_commit", "before_update", "in_update", "save", "forming", "healing")
BETWEEN_WORLDS = ("forming", "healing")
FATAL = ("SIGKILL", "SIGSEGV", "exit")
LAYOUTS: Mapping[str, dict[str, Any]] = {
    "replicate": {},
    "shard": {"dp_replicate": 1},
    "2x2": {"min_shard": 2},
}
"""Settings of ``parallel``.  With "2x2" four workers are two replicas of two shards, fewer are one replica,
and a single one must wait.
"""
SAVE_EVERY, RARELY = {"replicate": 4, "shard": 1, "2x2": 1}, 4


@dataclass(frozen=True)
class Grow:
    """A gate: ``generation`` may not pass ``step`` before it is about to grow.

    Once the generation runs, the cluster gets room for ``room`` more workers.
    """

    generation: int
    step: int
    room: int = 0


@dataclass(frozen=True)
class Cramp:
    """A gate: ``generation`` may not pass ``step`` before others wait for the room that the next ``victims``
    leave.
    """

    generation: int
    step: int
    victims: int


@dataclass
class Script:
    """A script.  ``worlds`` and ``tiers`` have an entry for each generation to be formed, in order."""

    layout: str
    workers: int
    faults: list[dict[str, Any]] = field(default_factory=list)
    worlds: list[int] = field(default_factory=list)
    tiers: list[str] = field(default_factory=list)
    growth: list[Grow] = field(default_factory=list)
    cramps: list[Cramp] = field(default_factory=list)
    """Gates of this kind.  With any of them, the cluster has room for the first world only."""
    copies: bool = True
    """True if host memory holds what died with a worker; otherwise the bucket does."""

    @property
    def generation(self) -> int:
        """The generation of the latest world."""
        return len(self.worlds)

    def form(self, members: int, tier: str) -> None:
        self.worlds.append(members)
        self.tiers.append(tier)

    def fault(self, point: str, kind: str, rank: int, step: int = 0) -> None:
        """Adds a fault in the latest world."""
        self.faults.append(
            {"point": point, "kind": kind, "world_rank": rank, "step": step, "generation": self.generation}
        )

    def after(self, point: str, kind: str) -> str:
        """Returns the tier of the world that follows when a stepping member of the latest world meets this
        fault.

        A member that raised still holds its state, unless it was in the middle of an update.
        """
        members = self.worlds[-1]
        replicas = {"replicate": members, "shard": 1, "2x2": members // 2 if members == 4 else 1}[self.layout]
        kept = kind == "exception" and point != "in_update"
        return "live" if kept or replicas > 1 else self.far

    @property
    def far(self) -> str:
        """The tier from which a world begins when the only holder of a slice is gone."""
        return "host" if self.copies else "bucket"

    def gates(self, bucket: Path, global_batch: int = 16) -> dict[str, str]:
        """Returns the file that opens each gate, by a sample of the gate's step: an argument of the dataset."""
        cursor = Cursor(SAMPLES, global_batch, 0, "permutation")
        return {
            str(cursor.ids(each.step)[0]): str(gate(bucket, each)) for each in (*self.growth, *self.cramps)
        }

    def job(self, bucket: Path, name: str, **changes: Any) -> Job:
        values: dict[str, Any] = {
            "name": name,
            "steps": STEPS,
            "data": {
                "dataset": "tests.support.toys:Sums",
                "args": {"samples": SAMPLES, "gates": self.gates(bucket)},
            },
            "parallel": LAYOUTS[self.layout],
            "workers": {"min": 1, "max": self.workers},
            "checkpoint": {"save_every": RARELY if self.copies else SAVE_EVERY[self.layout]},
            "deadlines": {"grow_debounce_s": 30, "stall_s": 120},
            "faults": self.faults,
            "copies": {} if self.copies else {"copy_every": 0},
        }
        return toy_job(bucket, **(values | changes))


def undisturbed(folder: Path, **changes: Any) -> Any:
    """Runs the job of every script undisturbed, but for ``changes``: one worker in this process, without Ray."""
    data = {"dataset": "tests.support.toys:Sums", "args": {"samples": SAMPLES}}
    return alone(toy_job(folder, **({"name": "local", "steps": STEPS, "data": data} | changes)))


def gate(bucket: Path, at: Grow | Cramp) -> Path:
    """Returns the path of the file that opens the gate."""
    return bucket / f"gate-{at.step}"


class Director:
    """The function that a trial calls at every look.  It opens the gates, and gives and takes room."""

    look_s = ASK_S

    def __init__(self, script: Script, bucket: Path, room: Room) -> None:
        self.bucket, self.room = bucket, room
        self.growth, self.cramps = list(script.growth), list(script.cramps)
        self.reserved: list[tuple[int, Any]] = []
        """Pairs (CPUs, actor that holds them), each for several workers that come at once."""
        self.left: list[Any] = []
        """Processes that take, or wait for, the room that victims leave."""
        if script.cramps:
            wide = sorted(each.room for each in script.growth if each.room > 1)
            if (others := ray.cluster_resources()["CPU"] - script.workers - sum(wide)) > 0:
                self.room.take(others)
            self.reserved = [(cpus, self.room.take(cpus)) for cpus in wide]

    def __call__(self, witness: Witness, view: View) -> bool:
        for cramp in list(self.cramps):
            if (view.generation, view.state) == (cramp.generation, "Running"):
                self.left += [self.room.queue(1) for _ in range(cramp.victims)]
                self.cramps.remove(cramp)
                gate(self.bucket, cramp).touch()
        for growth in list(self.growth):
            self._attend(growth, view)
        return not self.growth and not self.cramps

    def _attend(self, growth: Grow, view: View) -> None:
        if view.generation == growth.generation and view.state in ("Running", "Waiting") and growth.room:
            wide = next((each for each in self.reserved if each[0] == growth.room), None)
            if wide is not None:
                self.reserved.remove(wide)
            self.room.free(wide[1] if wide is not None else self.left.pop(0))
            self.growth[self.growth.index(growth)] = growth = replace(growth, room=0)
        about_to = view.generation == growth.generation and view.state == "Stopping" and not growth.room
        if about_to or view.generation > growth.generation:
            gate(self.bucket, growth).touch()
            self.growth.remove(growth)


@contextmanager
def _room() -> Iterator[Room]:
    room = Room()
    try:
        yield room
    finally:
        room.close()


def perform(script: Script, bucket: Path, name: str, **changes: Any) -> Trial:
    """Runs the script's job to its end, with ``changes`` to its settings."""
    with _room() as room:
        return trial(script.job(bucket, name, **changes), Director(script, bucket, room))


def again_and_again(layout: str, point: str) -> Script:
    """Returns the script 3→2→3→2→3… (2×2: 4→3→4→3→4…).

    The full world loses one member after the other at ``point``, in each fatal way, and takes in a newcomer
    each time.  Then a member raises at ``point``.
    """
    full = 4 if layout == "2x2" else 3
    script = Script(layout, full)
    script.form(full, "init")
    step = 8
    if point in BETWEEN_WORLDS:  # only a world that follows another one can lose something at this point
        script.fault("forward", "SIGKILL", 1, step)
        script.form(full - 1, script.after("forward", "SIGKILL"))
    for kind in FATAL:
        if point not in BETWEEN_WORLDS:
            script.fault(point, kind, {"SIGKILL": 1, "SIGSEGV": 0, "exit": full - 1}[kind], step)
            script.form(full - 1, script.after(point, kind))
        script.growth.append(Grow(script.generation, step + 4))
        script.form(full, "live")
        if point in BETWEEN_WORLDS:
            # the newcomer holds nothing yet; any other member that dies may hold the only copy of a slice
            # survivors keep the cells in which most of their rows lie
            newcomer = {"2x2": 2, "shard": 1, "replicate": 2}[layout]
            rank = 0 if kind == "SIGSEGV" and (layout == "replicate" or point == "forming") else newcomer
            script.fault(point, kind, rank)
            script.form(full - 1, script.far if rank == 0 and layout != "replicate" else "live")
        step += 8
    if point in BETWEEN_WORLDS:
        script.growth.append(Grow(script.generation, step + 4))
        script.form(full, "live")
        script.fault(point, "exception", 1)
        script.form(full, "live")
    else:
        script.fault(point, "exception", 1, step)
        if point != "save":
            script.form(full, script.after(point, "exception"))
    return script


def one_after_another(
    layout: str, workers: int, strikes: Sequence[tuple[str, str, int]], *, copies: bool = True
) -> Script:
    """Returns a script in which each of ``strikes`` (point, kind, world rank) hits the full world, which
    takes in a newcomer for each loss.
    """
    script = Script(layout, workers, copies=copies)
    script.form(workers, "init")
    for step, (point, kind, rank) in zip(range(8, STEPS, 8), strikes, strict=False):
        script.fault(point, kind, rank, step)
        if kind == "exception":
            script.form(workers, script.after(point, kind))
        else:
            script.form(workers - 1, script.after(point, kind))
            script.growth.append(Grow(script.generation, step + 4))
            script.form(workers, "live")
    return script


def down_and_up(layout: str, point: str, between: str, kind: str) -> Script:
    """Returns the script 4→3→1→2→4, in a cluster that never has room for more.

    Two die at ``point``; the next world breaks at ``between``; a newcomer comes, then two more.  Then one
    member of the full world dies at ``point``, and another one raises.  A single worker of "2x2" waits for
    the newcomer.
    """
    script = Script(layout, 4)
    script.form(4, "init")
    script.cramps.append(Cramp(script.generation, 4, victims=3))
    script.fault(point, "SIGKILL", 3, 8)
    script.form(3, script.after(point, "SIGKILL"))
    script.fault(point, "SIGSEGV", 0, 12)
    script.form(2, script.after(point, "SIGSEGV"))
    script.fault(between, kind, 1)
    # a world that never ran leaves at most a replica; its shards are of no use
    nothing_held = script.tiers[-1]
    if layout != "2x2":
        script.form(1, nothing_held)
    script.growth.append(Grow(script.generation, 16, room=1))
    script.form(2, nothing_held if layout == "2x2" else "live")
    script.fault(between, "exception", 1)
    script.form(2, script.tiers[-1])  # nobody has lost or received anything
    script.growth.append(Grow(script.generation, 20, room=2))
    script.form(4, "live")
    script.cramps.append(Cramp(script.generation, 23, victims=1))
    script.fault(point, "exit", 2, 24)
    script.form(3, script.after(point, "exit"))
    script.fault(point, "exception", 1, 28)
    if point != "save":
        script.form(3, script.after(point, "exception"))
    return script


def there_and_back(layout: str) -> Script:
    """Returns the script 4→3→2→4→1→3, in a cluster that never has room for more.

    Two die one after the other, two newcomers come, three die at once.
    """
    script = Script(layout, 4)
    script.form(4, "init")
    script.cramps.append(Cramp(script.generation, 4, victims=2))
    script.fault("forward", "SIGKILL", 3, 8)
    script.form(3, script.after("forward", "SIGKILL"))
    script.fault("before_update", "SIGSEGV", 0, 12)
    script.form(2, script.after("before_update", "SIGSEGV"))
    script.growth.append(Grow(script.generation, 16, room=2))
    script.form(4, "live")
    script.cramps.append(Cramp(script.generation, 20, victims=3))
    for rank in (0, 1, 3):
        script.fault("forward", "SIGKILL", rank, 24)
    script.form(1, script.after("forward", "SIGKILL"))
    script.growth.append(Grow(script.generation, 32, room=2))
    script.form(3, "live")
    return script


def down_again(script: Script) -> Script:
    """Extends a ``down_and_up`` of replicas by 3→2→1: the second of three dies between commit and update,
    then one of two in a save.
    """
    script.cramps.append(Cramp(script.generation, 31, victims=2))
    for point, step in (("before_update", 34), ("save", 36)):
        script.fault(point, "SIGKILL", 1, step)
        script.form(script.worlds[-1] - 1, script.after(point, "SIGKILL"))
    return script
