"""Liveness finds out whether the world moves, and if not, which member holds it up.

Waiting members stand still too, so standing still proves nothing.  The culprit is the member that has
*completed* least: all others wait for it in a collective.  Keepers read each member's counters in shared
memory and send them with their heartbeats, so even a process that hangs or is stopped is seen.  Several
members may have completed equally little; members that wait for each other inside a backward pass always
have.  Then the culprit is the one whose process the kernel calls stopped, or else the one that still reads
data: it is the only one that does not wait in a collective.  If that does not help either, the fence does: a
stopped process does not answer it, and a hanging one does not follow the next plan.

The last steps tell how long standing still is normal, and their time outlives the world.  Before the first
step of a run nothing is known, and the first microbatch may also compile, so a world of which all members are
heard may stand still five times as long.  Only a stopped process is blamed sooner.

A node whose keeper falls silent is another matter: a dead node looks the same as one that is cut off, and its
members cannot be asked.  A world that stands still because of it is stopped at once.  If the node does not
answer the fence either, the node is given up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from elastic.control.evolve import evolve
from elastic.ids import NodeId, WorkerId
from elastic.protocol.events import STOPPED, Progress

TELLING = (STOPPED, "reads data")
"""Operations of one member that explain why all others wait; the more certain one comes first."""
FIRST = 5
"""Factor of ``stall_s`` before the run has committed a step, while all members are heard: nobody knows how
long a microbatch takes.
"""
SHORTEST_S = 1e-6
"""A step counts as at least this many seconds, since 0 means that no step's time is known."""
EVIDENCE_S = 1.0
"""Members that stopped moving within this many seconds of each other count as simultaneous: keepers send a
beat every half second.
"""


@dataclass(frozen=True)
class Seen:
    """A member's counters, as its keeper last reported them."""

    completed: tuple[int, int, int]
    """The step, the microbatch and the collective that the member completed last."""
    since: float
    """The time at which these counters were first seen."""
    heard_at: float
    """The time of the last report."""
    operation: str = ""


@dataclass(frozen=True)
class Heard:
    """The beats of a keeper: they have come without a gap from ``since`` on, and the last one came at ``at``."""

    since: float
    at: float


@dataclass(frozen=True)
class Start:
    """The last report of a worker that is slow to start: its time ``at``, and in ``doing`` what the worker
    did then.
    """

    at: float
    doing: str


@dataclass(frozen=True)
class Watch:
    """A world's pace, and the times at which its members and keepers were last heard."""

    moved_at: float = 0.0
    """The time at which any member was last seen to complete something."""
    stepped_at: float = 0.0
    step_s: float = 0.0
    """Recent time of a step: one half is the last step's time, a quarter that of the step before, and so on.
    0 means that none is known.

    A new step counts as at most twice, and at least half, of the known time: it may have hung, or its report
    may have come late.
    """
    counters: dict[NodeId, dict[WorkerId, Seen]] = field(default_factory=dict)
    """The counters of the members on each node, so that a beat costs as much as its own members."""
    seen: dict[WorkerId, Seen] = field(default_factory=dict)
    """The counters of the members in journals of older versions, which did not group them by node."""
    beats: dict[NodeId, Heard] = field(default_factory=dict)
    """The keepers that were heard since they came up and since this coordinator began."""
    lease_until: float = 0.0
    """The time at which the last lease on the generation has run out; after it, silent members have stopped
    by themselves.
    """
    uploaded_at: float = 0.0
    """The time of the last beat that said that a part of a save is being written."""
    reform_s: float = 0.0
    """Recent time in seconds from a plan to ``Go`` of worlds without newcomers: an average in which the last one
    counts one half.
    """
    join_s: float = 0.0
    """Recent time from a plan to ``Go`` of worlds with newcomers: such an average, too."""
    start_s: float = 0.0
    """Recent time in seconds from asking for a worker until it has joined: such an average, too."""
    starts: dict[WorkerId, Start] = field(default_factory=dict)
    """The last report of each worker that is slow to start."""
    hand_over_s: float = 0.0
    """Recent time in seconds from a boundary until its copies are known to be complete, an average as above; 0
    means that nothing was handed over yet.
    """
    validate_s: float = 0.0
    """Recent time in seconds of a validation between two steps: an average in which the last one counts one
    half.  0 means that none is known.
    """


@dataclass(frozen=True)
class Stall:
    """Nobody moves.  ``culprit`` is the member that holds the others up, or None if it is not known."""

    culprit: WorkerId | None
    sentence: str


def observe(
    watch: Watch, node: NodeId, progress: Iterable[Progress], now: float
) -> tuple[dict[WorkerId, Seen], float]:
    """Returns the counters of the members on ``node`` after a report of them, and the time at which any
    member last moved.
    """
    seen, moved_at = dict(watch.counters.get(node, {})), watch.moved_at
    for report in progress:
        completed = (report.step, report.microbatch, report.collective)
        before = seen.get(report.worker)
        if before is None or completed > before.completed:
            seen[report.worker] = Seen(completed, now, now, report.operation)
            moved_at = now
        else:
            seen[report.worker] = Seen(before.completed, before.since, now, report.operation)
    return seen, moved_at


def seen_of(watch: Watch) -> dict[WorkerId, Seen]:
    """Returns the counters of all members."""
    return {worker: seen for each in (watch.seen, *watch.counters.values()) for worker, seen in each.items()}


def heard(watch: Watch, node: NodeId, now: float, silence_s: float) -> Heard:
    """Returns the beats of the node's keeper, with a new one at ``now``."""
    before = watch.beats.get(node)
    return Heard(before.since if before is not None and now - before.at <= silence_s / 2 else now, now)


def forgotten(watch: Watch, node: NodeId) -> Watch:
    """Returns the watch without ``node``: a keeper that is gone does not count as silent."""
    return replace(watch, beats={each: beats for each, beats in watch.beats.items() if each != node})


def silent(
    watch: Watch, nodes: Iterable[NodeId], now: float, for_s: float, silence_s: float
) -> tuple[NodeId, ...]:
    """Returns those of ``nodes`` that were silent for ``for_s``.

    It returns none unless another node was heard all the time; otherwise the coordinator itself may be cut
    off.
    """
    if all(now - beats.at < for_s for beats in watch.beats.values()):  # the usual case, at the least cost
        return ()
    known = {node: watch.beats[node] for node in dict.fromkeys(nodes) if node in watch.beats}
    if not any(beats.since <= now - for_s and now - beats.at <= silence_s / 2 for beats in known.values()):
        return ()
    return tuple(node for node, beats in known.items() if now - beats.at >= for_s)


def silence(watch: Watch, nodes: tuple[NodeId, ...], now: float, silence_s: float) -> Stall | None:
    """Returns a stall if no member moves and one of ``nodes``, the members' nodes, is silent; None otherwise."""
    still_s = now - watch.moved_at
    if still_s < silence_s or not (gone := silent(watch, nodes, now, silence_s, silence_s)):
        return None
    silent_for = f"nothing was heard from node {gone[0][:8]} for {now - watch.beats[gone[0]].at:.1f} s"
    return Stall(
        None, f"{silent_for}, though other nodes were heard, and no member moved for {still_s:.1f} s"
    )


def stepped(
    watch: Watch, now: float, *, whole: bool = True, validated: bool = False, own_s: float = 0.0
) -> Watch:
    """Returns the watch after the commit of a step; a step that is not ``whole`` was ended by a fence, and
    its time says nothing.

    If the state before the step was ``validated``, the time since the last commit is that of the step, which
    took ``own_s`` by itself (0: not measured), and that of the validation.
    """
    if not whole:
        return evolve(watch, moved_at=now, stepped_at=now)
    step_s, known_s, validate_s = now - watch.stepped_at, watch.step_s, watch.validate_s
    if validated and (own_s or known_s):
        took_s = max(step_s - (own_s or known_s), 0.0)
        step_s, validate_s = step_s - took_s, averaged(validate_s, took_s)
    step_s = max(step_s, SHORTEST_S)
    if known_s:
        step_s = (known_s + min(max(step_s, known_s / 2), 2 * known_s)) / 2
    return evolve(watch, moved_at=now, stepped_at=now, step_s=step_s, validate_s=validate_s)


def begun(watch: Watch, now: float) -> Watch:
    """Returns the watch when a world begins to step; it keeps the known time of a step."""
    return evolve(watch, moved_at=now, stepped_at=now, counters={}, seen={})


def averaged(known_s: float, took_s: float) -> float:
    """Returns an average in which the last time counts one half; 0 means that none is known."""
    return (known_s + took_s) / 2 if known_s else took_s


def patience_s(watch: Watch, stall_s: float) -> float:
    """Returns how many seconds the world may stand still: ``stall_s``, or three recent steps if those take
    longer.
    """
    return max(stall_s, 3 * watch.step_s)


def stall(
    watch: Watch,
    members: tuple[WorkerId, ...],
    now: float,
    stall_s: float,
    groups: Sequence[Sequence[int]] = (),
) -> Stall | None:
    """Returns a stall, with the culprit if it is known, or None if the world moves.  A member whose keeper is
    silent is never blamed.

    ``groups`` has the world ranks of each data group; without it, all members are one.
    """
    still_s = now - watch.moved_at
    if still_s < patience_s(watch, stall_s):
        return None
    seen, still = seen_of(watch), f"no member moved for {still_s:.1f} s"
    unheard = [worker for worker in members if worker not in seen or seen[worker].heard_at <= watch.moved_at]
    if unheard:
        return Stall(
            None, f"{still}; no member is blamed, because nothing was heard from the node of {unheard[0]}"
        )
    if (
        not watch.step_s
        and still_s < FIRST * stall_s
        and not any(seen[worker].operation == STOPPED for worker in members)
    ):
        return None
    found = [
        _blame(seen, [members[rank] for rank in ranks], still) for ranks in groups or (range(len(members)),)
    ]
    blamed = [each for each in found if each.culprit]
    if len(blamed) > 1:
        first, second = blamed[0].culprit, blamed[1].culprit
        return Stall(
            None,
            f"{still}; no member is blamed, because both {first} and {second} have completed less than the "
            "members that compute the same part of the model",
        )
    return (blamed or found)[0]


def _blame(seen: dict[WorkerId, Seen], members: Sequence[WorkerId], still: str) -> Stall:
    """Blames one of ``members``, a data group.  Members of other groups compute other parts of the model, and
    those of a pipeline have rightly completed more or less.
    """
    least = min(seen[worker].completed for worker in members)
    behind = sorted((seen[worker].since, worker) for worker in members if seen[worker].completed == least)
    (first_s, first), (second_s, second) = behind[0], behind[1] if len(behind) > 1 else (float("inf"), "")
    told = [
        found[0]
        for words in TELLING
        if len(found := [worker for _, worker in behind if seen[worker].operation == words]) == 1
    ]
    culprit = told[0] if told else first
    if not told and second_s - first_s < EVIDENCE_S:
        return Stall(
            None,
            f"{still}; no member is blamed, because {first} and {second} have completed equally little",
        )
    step, microbatch, collective = least
    at = f"; it {seen[culprit].operation}" if seen[culprit].operation else ""
    return Stall(
        culprit,
        (
            f"{still}; {culprit} has completed least (step {step}, microbatch {microbatch}, collective "
            f"{collective}){at}"
        ),
    )
