"""Is the world moving, and if not, who holds it up?

Waiting members stand still too, so standing still proves nothing.  The culprit is the one that has *completed* least: all
others wait for it in a collective.  Keepers read each member's counters in shared memory and send them with their heartbeats, so
a process that hangs or is stopped is seen all the same.  Where several have completed equally little, which is so whenever they wait for
each other inside a backward pass, it is the one whose process the kernel calls stopped, or else the one that still reads data: nobody
else's collective is what it waits for.  Where that tells nothing either, the fence does: a stopped process does not answer it, and a
hanging one does not follow the next plan.

A node whose keeper falls silent is another thing: nobody can tell a dead one from one that is cut off, and its members cannot be asked
why.  A world that stands still is stopped because of it at once, and who is silent to the fence too is waited for no longer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from elastic.ids import NodeId, WorkerId
from elastic.protocol.events import STOPPED, Progress

TELLING = (STOPPED, "reads data")
"""Operations of which one member's explains why all others wait, the more certain first."""
EVIDENCE_S = 1.0
"""Two members that stood still within so long of each other did so at once: their keepers' beats are half a second apart."""


@dataclass(frozen=True)
class Seen:
    """A member's counters: what it has completed, when that was first seen, and when it was seen last."""

    completed: tuple[int, int, int]
    since: float
    heard_at: float
    operation: str = ""


@dataclass(frozen=True)
class Heard:
    """The beats of a keeper: ``since`` when it is heard without a gap, and when it was last."""

    since: float
    at: float


@dataclass(frozen=True)
class Watch:
    """What is known of a world's pace.  ``moved_at``: when any member was last seen to complete something."""

    moved_at: float = 0.0
    stepped_at: float = 0.0
    step_s: float = 0.0
    """Recent time of a step: half of it the last one's, a quarter the one's before, ..."""
    seen: dict[WorkerId, Seen] = field(default_factory=dict)
    beats: dict[NodeId, Heard] = field(default_factory=dict)
    """The keepers that were heard since they came up, and since this coordinator did."""
    lease_until: float = 0.0
    """When the last lease on the generation has run out: silent members have stopped of their own accord."""
    reform_s: float = 0.0
    """Recent time from a plan to ``Go``: half of it is the last one's."""


@dataclass(frozen=True)
class Stall:
    """Nobody moves.  ``culprit`` is None when it is not known who holds the others up."""

    culprit: WorkerId | None
    sentence: str


def observe(watch: Watch, progress: Iterable[Progress], now: float) -> Watch:
    """The counters of some members, as of now."""
    seen, moved_at = dict(watch.seen), watch.moved_at
    for report in progress:
        completed = (report.step, report.microbatch, report.collective)
        before = seen.get(report.worker)
        if before is None or completed > before.completed:
            seen[report.worker] = Seen(completed, now, now, report.operation)
            moved_at = now
        else:
            seen[report.worker] = replace(before, heard_at=now, operation=report.operation)
    return replace(watch, seen=seen, moved_at=moved_at)


def heard(watch: Watch, node: NodeId, now: float, silence_s: float) -> Watch:
    """A beat of its keeper."""
    before = watch.beats.get(node)
    since = before.since if before is not None and now - before.at <= silence_s / 2 else now
    return replace(watch, beats={**watch.beats, node: Heard(since, now)})


def forgotten(watch: Watch, node: NodeId) -> Watch:
    """Its keeper is gone, which is no silence."""
    return replace(watch, beats={each: beats for each, beats in watch.beats.items() if each != node})


def silent(watch: Watch, nodes: Iterable[NodeId], now: float, for_s: float, silence_s: float) -> tuple[NodeId, ...]:
    """Those of ``nodes`` of which nothing was heard for ``for_s``, while another was all the time: else it may be us who are deaf."""
    known = {node: watch.beats[node] for node in dict.fromkeys(nodes) if node in watch.beats}
    if not any(beats.since <= now - for_s and now - beats.at <= silence_s / 2 for beats in known.values()):
        return ()
    return tuple(node for node, beats in known.items() if now - beats.at >= for_s)


def silence(watch: Watch, nodes: tuple[NodeId, ...], now: float, silence_s: float) -> Stall | None:
    """Does the world stand still because a member's node is dead or cut off?  ``nodes``: of the members."""
    still_s, gone = now - watch.moved_at, silent(watch, nodes, now, silence_s, silence_s)
    if not gone or still_s < silence_s:
        return None
    heard_s = now - watch.beats[gone[0]].at
    return Stall(
        None, f"nothing was heard from node {gone[0][:8]} for {heard_s:.1f} s, though others are, and no member moved for {still_s:.1f} s"
    )


def stepped(watch: Watch, now: float) -> Watch:
    """The world committed a step."""
    step_s = now - watch.stepped_at
    return replace(watch, moved_at=now, stepped_at=now, step_s=(watch.step_s + step_s) / 2 if watch.step_s else step_s)


def patience_s(watch: Watch, stall_s: float) -> float:
    """How long nobody may move: three recent steps at least, so that slow is not taken for stuck."""
    return max(stall_s, 3 * watch.step_s)


def stall(watch: Watch, members: tuple[WorkerId, ...], now: float, stall_s: float) -> Stall | None:
    """Does the world stand still, and because of whom?  A member whose keeper is silent too is never blamed."""
    still_s = now - watch.moved_at
    if still_s < patience_s(watch, stall_s):
        return None
    still = f"no member moved for {still_s:.1f} s"
    unheard = [worker for worker in members if worker not in watch.seen or watch.seen[worker].heard_at <= watch.moved_at]
    if unheard:
        return Stall(None, f"{still}; nobody is blamed, for nothing was heard from the node of {unheard[0]}")
    return _blame(watch, members, still)


def _blame(watch: Watch, members: tuple[WorkerId, ...], still: str) -> Stall:
    seen = watch.seen
    least = min(seen[worker].completed for worker in members)
    behind = sorted((seen[worker].since, worker) for worker in members if seen[worker].completed == least)
    (first_s, first), (second_s, second) = behind[0], behind[1] if len(behind) > 1 else (float("inf"), "")
    told = [found[0] for words in TELLING if len(found := [worker for _, worker in behind if seen[worker].operation == words]) == 1]
    culprit = told[0] if told else first
    if not told and second_s - first_s < EVIDENCE_S:
        return Stall(None, f"{still}; nobody is blamed, for {first} and {second} have completed equally little")
    step, microbatch, collective = least
    at = f"; it {seen[culprit].operation}" if seen[culprit].operation else ""
    return Stall(culprit, f"{still}; {culprit} has completed least (step {step}, microbatch {microbatch}, collective {collective}){at}")
