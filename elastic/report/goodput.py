"""Accounts for every second of a run, from the journal alone, and says which part of it was goodput.

:class:`Account` reads records one by one and puts each second into one bucket, so the buckets add up to the
time from the first record to the last.  Seconds that are not ``stepping`` are lost, and each lost second
belongs to one :class:`Incident`, or is the time of a validation.  So the costs of incidents add up to the
loss, too.

Three figures are said, of the whole run and of the time after its first committed step (:class:`Figures`):

    present   work done / work that the nodes present could have done.  With d data ranks a step takes
              ceil(M/d) rounds for its M microbatches, so a second in which they could step is worth 1/ceil(M/d)
              steps' samples, and a second in which they do is work done.  A node is present while a worker of it
              has joined.
    paid      the same of the nodes paid: a node is paid from the time at which the run found it until neither
              its keeper nor a worker is left.
    stepping  the time in steps that count / the time, as Google's ml-goodput-measurement has it: a shrunk
              world counts as fully productive.  The size of the world is told apart, as the mean part of the
              largest number of nodes that stepped, or was available.

A second is compared with what other nodes would have done in the same second, never with the steps of another
time of the run: where a round takes twice as long, because other programs need the machine, both sides lose
the same.  With the mean time of the steps with as many rounds in place of this, a replay whose first half had a
loaded machine came to 127 %.  So what slows the steps themselves does not show here, but in the time of a step.
ml-goodput-measurement drops steps below a second; here all count.

The journal has no faults.  What a fault interrupts is taken for one unfinished step, which is done again, as
long as a usual step; the rest is ``detect``, the time until the coordinator knew of the fault.  A step that
was committed, and then lost, counts once: committing it again is ``redone``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from statistics import median
from typing import Any, NamedTuple

from elastic.journal import codec, packed
from elastic.journal.deltas import patched
from elastic.plan.layout import Layout
from elastic.plan.placement import data_ranks
from elastic.report.recoveries import Why, number

STEPPING, REDONE, VALIDATION = "stepping", "redone", "validation"
DETECT, DECIDE, ABORT, REFORM, HEAL = "detect", "decide", "abort", "re-form", "heal"
SAVING, WAITING, STARTUP, AWAY = "save-blocked", "waiting", "start-up", "away"
BUCKETS: Mapping[str, str] = {
    STEPPING: "steps that count, from commit to commit",
    REDONE: "steps that were committed and lost, and unfinished steps, are done again",
    VALIDATION: "the loss on held-out samples is measured in line; what a step takes longer than usual",
    DETECT: "a fault has stopped the steps, and the coordinator does not know yet",
    DECIDE: "workers are fenced, and the outcome of the last step is decided",
    ABORT: "members leave their groups and take the next plan",
    REFORM: "process groups form, until the first step of the new world begins",
    HEAL: "members get the state that they lack",
    SAVING: "no step is due before a checkpoint is in the bucket",
    WAITING: "no world: too few nodes, or copies of the state are awaited",
    STARTUP: "processes start, and the first world of a start forms",
    AWAY: "nothing ran: stopped, failed or killed, until started again",
}
"""The buckets, with what goes on in each."""
PHASES = {
    "Running": STEPPING,
    "Pausing": STEPPING,
    "Stopping": DECIDE,
    "Saving": SAVING,
    "Finishing": SAVING,
}
"""The bucket of each phase that has only one.  A phase is a state of the run, but a stop is Pausing until the
boundary is committed, and Saving once all members have answered.
"""
ENDED = ("Finished", "Stopped", "Failed")
START, LOSS, JOIN, LEAVE, EVICTION, FAULT, STOP, END, VALIDATED = (
    "start",
    "loss",
    "join",
    "noticed leave",
    "eviction",
    "fault",
    "stop",
    "last save",
    "validation",
)
"""The kinds of incidents.  A world that leaves a node before its machine is taken is a noticed leave, also if
newcomers take the seats; one that leaves a straggler is an eviction.  A validation is no incident, but costs time as they do.
"""
USUAL = 30
"""Number of newest steps whose median is the usual time of a step."""


class Interval(NamedTuple):
    """A stretch of time in one bucket in which nothing else changes, either.

    ``generation``, ``members``, ``data_ranks`` and ``world_nodes`` (its nodes) are those of the newest world,
    also after it has ended; ``workers`` and ``nodes`` those present, ``paid`` the nodes paid.  ``steps`` and
    ``samples`` were committed for the first time; a step has ``microbatches``.  ``incident`` is the number of
    the incident that costs this time, or 0.  The first step of a run has an interval of its own.
    """

    begin: float
    end: float
    bucket: str = ""
    generation: int = 0
    members: int = 0
    data_ranks: int = 0
    world_nodes: int = 0
    workers: int = 0
    nodes: int = 0
    paid: int = 0
    microbatches: int = 0
    steps: int = 0
    samples: int = 0
    incident: int = 0


class Figures(NamedTuple):
    """The three parts that are goodput, each 0 if no step counts, and the mean parts of the largest number of
    nodes that stepped, or was present.
    """

    seconds: float
    samples: int
    present: float
    paid: float
    stepping: float
    stepping_nodes: float
    available_nodes: float


class Totals:
    """Sums over intervals, whose number does not matter: their memory is that of the sizes that there were."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.samples, self.peak, self.stepping_node_s, self.node_s, self.paid_node_s = 0, 0, 0.0, 0.0, 0.0
        self._done: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._present: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._paid: defaultdict[tuple[int, int], float] = defaultdict(float)
        """Seconds by the microbatches of a step and the number of data ranks: those that stepped, those of the
        nodes present, and those of the nodes paid.
        """
        self._samples_of: dict[int, tuple[int, int]] = {}
        """The samples and the number of steps that count, by microbatches."""

    def add(self, each: Interval) -> None:
        took, sized = each.end - each.begin, each.microbatches
        self.seconds[each.bucket] += took
        self.samples += each.samples
        self.peak = max(self.peak, each.nodes)
        self.node_s += took * each.nodes
        self.paid_node_s += took * each.paid
        if each.bucket in (STEPPING, REDONE):
            self.stepping_node_s += took * each.world_nodes
        if not each.members or not sized:
            return
        self._present[sized, each.workers * each.data_ranks // each.members] += took
        self._paid[sized, each.paid * each.data_ranks // each.world_nodes] += took
        if each.bucket == STEPPING:
            self._done[sized, each.data_ranks] += took
            samples, steps = self._samples_of.get(sized, (0, 0))
            self._samples_of[sized] = samples + each.samples, steps + each.steps

    @property
    def figures(self) -> Figures:
        all_s, stepping_s = sum(self.seconds.values()), self.seconds[STEPPING]
        done, present, paid = (self._worth(each) for each in (self._done, self._present, self._paid))
        most = all_s * self.peak
        return Figures(
            all_s,
            self.samples,
            done / present if present else 0.0,
            done / paid if paid else 0.0,
            stepping_s / all_s if all_s else 0.0,
            self.stepping_node_s / most if most else 0.0,
            self.node_s / most if most else 0.0,
        )

    def _worth(self, there: Mapping[tuple[int, int], float]) -> float:
        """Returns the work of these data ranks if they step all the time: the samples that they commit in all,
        if a round takes a second.
        """
        found = 0.0
        for (sized, ranks), seconds in there.items():
            samples, steps = self._samples_of.get(sized, (0, 0))
            if ranks and steps:
                found += seconds * samples / steps / -(-sized // ranks)
        return found


def of_fleet(
    intervals: Sequence[Interval], present: Sequence[tuple[float, int]], paid: Sequence[tuple[float, int]]
) -> Figures:
    """Returns the figures of the time after the first committed step, where somebody else knows the nodes.
    ``present`` and ``paid`` have their numbers from each time on.

    So a node counts as present until it goes, also while the run does not use it any more because it had
    notice, and a head without room for workers is not paid.
    """
    begun_at = next((each.end for each in intervals if each.steps), inf)
    times, sums = sorted(at for numbers in (present, paid) for at, _ in numbers), Totals()
    for each in intervals:
        if each.begin < begun_at:
            continue
        cuts = [at for at in times if each.begin < at < each.end]
        for begin, end in pairwise((each.begin, *cuts, each.end)):
            nodes, last = _at(present, begin), end == each.end  # the steps count where the interval ends
            sums.add(
                each._replace(
                    begin=begin,
                    end=end,
                    nodes=nodes,
                    workers=nodes * each.members // (each.world_nodes or 1),
                    paid=_at(paid, begin),
                    steps=each.steps if last else 0,
                    samples=each.samples if last else 0,
                )
            )
    return sums.figures


def _at(numbers: Sequence[tuple[float, int]], at: float) -> int:
    place = bisect_right(numbers, at, key=lambda each: each[0])
    return numbers[place - 1][1] if place else 0


@dataclass
class Incident:
    """Something that cost time: its kind, the reason in the journal, the generation that was begun after it
    (0: none), and its seconds by bucket.
    """

    number: int
    kind: str
    began_at: float
    reason: str = ""
    generation: int = 0
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    node_s: float = 0.0
    """The seconds of all nodes paid."""

    @property
    def lost_s(self) -> float:
        return sum(self.seconds.values())


Part = tuple[str, float, int, int]
"""A part of a span: its bucket, its seconds (``inf``: the rest), the steps that it commits for the first
time, and its incident.
"""


@dataclass
class _Span:
    """Time whose buckets are not known yet: pieces without a bucket, and later the parts into which they are
    cut.
    """

    at: float = 0.0
    pieces: list[Interval] = field(default_factory=list)
    parts: list[Part] | None = None

    @property
    def seconds(self) -> float:
        return self.pieces[-1].end - self.pieces[0].begin if self.pieces else 0.0


@dataclass
class _There:
    """The workers and nodes that are there.  A record tells only of what changes."""

    workers: dict[str, str] = field(default_factory=dict)
    """The node of each worker that has joined."""
    starting: set[str] = field(default_factory=set)
    """The workers that were asked for and have not joined yet."""
    present: Counter[str] = field(default_factory=Counter)
    """The number of workers that have joined, by node."""
    found: dict[str, bool] = field(default_factory=dict)
    """The nodes that were found, and whether the keeper of each has come up."""
    keepers: list[str] = field(default_factory=list)
    leaving: list[str] = field(default_factory=list)
    """The nodes that the run leaves because their machines will be taken."""
    evicted: list[str] = field(default_factory=list)
    """The members that leave at the next boundary because they are slow."""
    paid: int = 0
    """The number of nodes paid: those that were found, until they have neither a keeper nor a worker."""

    def change(self, run: Mapping[str, Any]) -> None:
        """Notes what a record changes of the run, or the run of a snapshot."""
        members, cluster = _fields(run.get("members")), _fields(run.get("cluster"))
        counts = False
        if "starting" in members:
            whole, put, gone = _entries(members["starting"])
            self.starting = {*(() if whole else self.starting), *put}.difference(gone)
        if "workers" in members:
            whole, put, gone = _entries(members["workers"])
            for worker in [*self.workers] if whole else gone:
                self.present[node := self.workers.pop(worker)] -= 1
                if not self.present[node]:
                    del self.present[node]
            for worker, value in put.items():
                if "$" in value:
                    self.workers[worker] = value["node"]
                    self.present[value["node"]] += 1
            counts = whole or bool(gone)
        if "nodes" in cluster:
            whole, nodes, gone = _entries(cluster["nodes"])
            found = {**({} if whole else self.found), **nodes}
            self.found, counts = {node: up for node, up in found.items() if node not in gone}, True
        if "keepers" in cluster:
            self.keepers, counts = patched(self.keepers, cluster["keepers"]), True
        if "leaving" in cluster:
            self.leaving = patched(self.leaving, cluster["leaving"])
        if "leaving" in (stragglers := _fields(run.get("stragglers"))):
            self.evicted = patched(self.evicted, stragglers["leaving"])
        if counts:
            there = {*self.keepers, *self.present}
            self.paid = sum(not up or node in there for node, up in self.found.items())


def _fields(change: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Returns the fields of a value that changed, or all fields of a whole value."""
    return {} if change is None else change if "$" in change else change["~"]


def _entries(change: Mapping[str, Any]) -> tuple[bool, Mapping[str, Any], Sequence[str]]:
    """Returns whether a change of a dictionary is all that there is from now on, the entries that it puts,
    and the keys that are gone.
    """
    if "~" in change:
        return False, change["~"], change.get("-", ())
    return True, change.get("=", change), ()


class Account:
    """The account of a run.  :meth:`begins` starts it, and each later life of the run; :meth:`note` takes
    every record, in order, and :meth:`close` ends it.

    If it does not ``keep`` intervals, its memory does not grow with the run, but for incidents.
    """

    def __init__(self, *, keep: bool = True) -> None:
        self.whole, self.since_first = Totals(), Totals()
        """The sums over the whole run, and over its time after the first committed step."""
        self.intervals: list[Interval] = []
        self.incidents: list[Incident] = []
        self.validations = Incident(0, VALIDATED, 0.0)
        """The time of validations, which belongs to no incident."""
        self._keep, self._at, self._phase, self._there = keep, 0.0, "", _There()
        self._spans, self._early, self._last = deque([_Span()]), list[Interval](), Interval(0.0, 0.0)
        self._here = self._last
        """An interval without time that has what is there now."""
        self._first = self._last
        """An interval without time in the first world, whose sizes stand in for those of the time before it."""
        self._pending: set[str] = set()
        """The members whose answer to a fence or a pause is awaited."""
        self._open = self._formed_by = self._redoes = 0
        """The incident that goes on, the one after which the newest world was formed, and the one that took
        the run back to an earlier step.
        """
        self._why, self._stops = Why(), False
        self._nodes: frozenset[str] = frozenset()
        """The nodes of the newest world."""
        self._first_world, self._fresh = True, False
        """True until a world of this life has committed, and until the newest world has."""
        self._reached = self._furthest = self._seen = 0
        """The newest step of the lineage, the greatest ever committed, and the greatest that members have
        answered to a fence or a pause.
        """
        self._interrupted: _Span | None = None
        self._arrived_at, self._form_s, self._heal_s = 0.0, 0.0, 0.0
        self._samples = 0
        """Samples of a step."""
        self._usual: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=USUAL))
        """The seconds of the newest steps, by rounds."""
        self._first_at = inf
        """The end of the first step that counts."""

    # ---- what is read

    def begins(self, at: float, run: Mapping[str, Any]) -> None:
        """Notes that the run begins, or begins again, in the state ``run`` of a snapshot."""
        again = bool(self._phase)
        self._incident(START, at, "the run was started again" if again else "")
        if again:
            self._ends(interrupts=True)
            self._there = _There()
            self._pass(at)
            self._close((AWAY, inf, 0, self._open))
        else:
            self._at = self._spans[-1].at = at
        self._goes_on_from(max((step for _, step in run["history"]["lineage"]), default=0))
        self._first_world, self._fresh, self._stops, self._there = True, False, False, _There()
        self._there.change(run)
        self._phase = "Away" if run["state"]["$"] in ENDED else run["state"]["$"]
        if plan := run["state"].get("plan"):
            self._first_world = self._phase == "Forming"
            self._take_up(plan)
        self._update()

    def note(self, record: Mapping[str, Any]) -> None:
        """Reads the next record."""
        told, state, waits = codec.parts_of(record["event"]), record["state"], self._waits
        self._pass(record["at"])
        if "commits" in record:
            self._commits(record["commits"])
        for change in (record.get("meanwhile", {}), record["changed"]):
            self._there.change(change)
        if told[0]["$"] == "StepDone" and state == self._phase == "Running":
            return self._update()  # nearly all records
        names = {each["$"]: each for each in record["actions"]}
        kinds = {each["$"] for each in told}
        self._why.hear(record, ends=False)
        if kinds & {"Lost", "KeeperLost"} and self._open and "Form" not in names:
            incident = self.incidents[self._open - 1]
            incident.kind = LOSS if incident.kind == FAULT else incident.kind
        self._stops = self._stops or "StopRequested" in kinds
        for each in told:
            self._hear(each, record["at"])
        if self._phase == state == "Waiting" and waits != self._waits:
            self._close((waits, inf, 0, self._open))
        self._steer(record, names, waits)
        self._update()

    def close(self) -> Account:
        """Ends the account at its newest record, and returns it."""
        self._ends(interrupts=False)
        for each in (*self._early, *([self._last] if self._last.bucket else [])):
            self._sum(each)
        self._last, self._early = Interval(self._at, self._at), []
        return self

    def spent(self, now: float) -> Mapping[str, float]:
        """Returns the seconds of each bucket until ``now``.  The newest ones may still move to another
        bucket.
        """
        found = defaultdict(float, self.whole.seconds)
        for each in (*self._early, self._last):
            found[each.bucket] += each.end - each.begin
        found[self._bucket] += sum(each.seconds for each in self._spans) + max(now - self._at, 0.0)
        return {name: found[name] for name in BUCKETS}

    @property
    def so_far(self) -> Figures:
        """The figures of the whole run until its newest record, while the account is not closed."""
        totals = deepcopy(self.whole)
        for each in (*self._early, self._last):
            totals.add(each)
        return totals.figures

    @property
    def lost(self) -> Sequence[Incident]:
        """The incidents that cost time, and the validations."""
        return [each for each in (*self.incidents, self.validations) if each.seconds]

    # ---- phases

    def _steer(self, record: Mapping[str, Any], names: Mapping[str, Any], waits: str) -> None:
        """Closes spans where the record ends a phase, and begins the next phase.  One record may pass several
        phases.
        """
        at, state = record["at"], record["state"]
        if self._phase == "Running" and "Pause" in names:
            leaves = not self._nodes.isdisjoint(self._there.leaving)
            planned = LEAVE if leaves else EVICTION if self._there.evicted else JOIN
            self._incident(STOP if self._stops else planned, at, record)
            self._phase, self._pending = "Pausing", {*names["Pause"]["members"]}
        ends = "Fence" in names or state not in ("Running", "Stopping", "Finishing")
        if self._phase in ("Running", "Pausing") and (
            ends or (self._phase, state) == ("Running", "Stopping")
        ):
            if self._phase == "Pausing" and "Fence" not in names:
                self._close((DECIDE, inf, 0, self._open))
            else:
                self._incident(FAULT, at, record)
                self._interrupted = self._spans[-1]
                self._spans.append(_Span(self._at))
            self._phase, self._pending = "Stopping", {*names.get("Fence", {}).get("members", ())}
        elif self._phase == "Forming" and "Go" in names:
            self._close(*self._forming())
            self._phase, self._fresh = "Running", True
        elif (self._phase == "Forming" and state != "Forming") or (
            self._phase in ("Forming", "Saving") and "Fence" in names
        ):
            self._close(*(self._forming() if self._phase == "Forming" else [(SAVING, inf, 0, self._open)]))
            noticed = _fields(record["changed"].get("state")).get("noticed")
            self._incident(LEAVE if noticed else FAULT, at, record)
            self._phase, self._pending = "Stopping", {*names.get("Fence", {}).get("members", ())}
        # a stop waits for its save; without one, the next world forms at once
        settled = self._phase == "Stopping" or (self._phase == "Pausing" and self._seen <= self._reached)
        if self._stops and settled and state == "Stopping" and not self._pending:
            self._close((DECIDE, inf, 0, self._open))
            self._phase = "Saving"
        if "Form" in names and (plan := names["Form"]["plan"])["generation"] > self._here.generation:
            forming = self._phase == "Forming"
            self._close(*(self._forming() if forming else [(waits or self._bucket, inf, 0, self._open)]))
            self._resolve(plan["version"]["step"])
            self._goes_on_from(plan["version"]["step"])
            self._take_up(plan)
            self._phase, self._arrived_at, self._form_s, self._heal_s = "Forming", at, 0.0, 0.0
            self._formed_by, incident = self._open, self.incidents[self._open - 1]
            incident.generation, incident.reason = plan["generation"], self._why.text or incident.reason
        elif state == "Waiting" and self._phase != "Waiting":
            self._close((self._bucket, inf, 0, self._open))
            self._phase = "Waiting"
        elif state == "Finishing" and self._phase != "Saving":
            self._incident(END, at, record)
            self._close((SAVING, inf, 0, self._open))
            self._phase = "Saving"
        if state in ENDED and self._phase != "Away":
            self._close((waits or self._bucket, inf, 0, self._open))
            self._resolve(self._reached)
            self._phase, self._there = "Away", _There()

    def _ends(self, *, interrupts: bool) -> None:
        """Closes all spans at the newest record.  ``interrupts`` is True if the run has died there."""
        if self._phase in ("Running", "Pausing"):
            broken = self._broken(self._spans[-1], max(self._reached, self._seen))
            self._close(*(broken if interrupts else [(STEPPING, inf, 0, 0)]))
        elif self._phase == "Forming":
            self._close(*self._forming())
        else:
            self._close((self._bucket, inf, 0, self._open))
        self._resolve(self._reached)

    def _incident(self, kind: str, at: float, told: Mapping[str, Any] | str) -> None:
        """Begins an incident.  ``told`` is its record, or a reason."""
        self._why = Why()
        if isinstance(told, str):
            self._why.text = told
        else:
            self._why.hear(told, ends=True)
            kinds = {each["$"] for each in codec.parts_of(told["event"])}
            kind = LOSS if kind == FAULT and kinds & {"Lost", "KeeperLost"} else kind
        self._open = len(self.incidents) + 1
        self.incidents.append(Incident(self._open, kind, at, self._why.text))

    def _goes_on_from(self, step: int) -> None:
        if step < max(self._reached, self._seen):
            self._redoes = self._open
        self._reached = self._seen = step
        self._furthest = max(self._furthest, step)

    def _take_up(self, plan: Mapping[str, Any]) -> None:
        self._nodes = frozenset(plan["nodes"])
        self._here = self._here._replace(
            generation=plan["generation"],
            members=len(plan["members"]),
            data_ranks=data_ranks(codec.decode(Layout, plan["layout"])),
            world_nodes=len(self._nodes) or 1,
        )
        self._first = self._first if self._first.members else self._here

    def _hear(self, told: Mapping[str, Any], at: float) -> None:
        kind = told["$"]
        if kind == "Fenced":
            self._pending.discard(told["worker"])
            self._seen = max(self._seen, (told["seen"] or {"step": 0})["step"])
        elif kind == "Lost" and told.get("certain", True):
            self._pending.discard(told["worker"])
        elif kind == "Here":
            self._arrived_at = at
        elif kind == "Ready":
            self._form_s = max(self._form_s, number(told["form_s"]))
            self._heal_s = max(self._heal_s, number(told["heal_s"]))

    def _commits(self, commits: Sequence[Mapping[str, Any]]) -> None:
        """Notes the commits of a record.  In a world that runs, they end the span of their steps."""
        newest = max(commits, key=lambda each: each["step"])
        step, count = newest["step"], newest["step"] - self._reached
        if self._phase not in ("Running", "Pausing"):
            self._seen = max(self._seen, step)
            return
        if count <= 0:
            return
        microbatches, self._samples = packed.sizes(newest[codec.PACKED])
        if microbatches != self._here.microbatches:
            self._here = self._here._replace(microbatches=microbatches)
        seconds, took, usual = self._spans[-1].seconds, number(newest["usage"]["step_s"]), self._usual_s
        own, before = seconds, (VALIDATION, 0)
        if self._fresh:
            own = min(seconds, count * (took or usual or inf))
            before = (STARTUP if self._first_world else REFORM, self._formed_by)
        elif newest.get("validated"):
            own = min(seconds, count * (usual or inf))
        else:
            self._usual[self._rounds].append(took or seconds / count)
        again = max(min(step, self._furthest) - self._reached, 0)
        self._close(
            (before[0], seconds - own, 0, before[1]),
            (REDONE, own * again / count if again < count else inf, 0, self._redoes),
            (STEPPING, inf, count - again, 0),
        )
        self._reached, self._furthest = step, max(self._furthest, step)
        self._fresh = self._first_world = False
        self._open = 0 if self._phase == "Running" else self._open

    @property
    def _rounds(self) -> int:
        return -(-self._here.microbatches // (self._here.data_ranks or 1))

    @property
    def _usual_s(self) -> float | None:
        """The usual seconds of a step of the newest world; None if they are not known."""
        newest = self._usual.get(self._rounds)
        return median(newest) if newest else None

    def _broken(self, span: _Span, step: int) -> list[Part]:
        """Returns the parts of a span in which a world was interrupted, after it had committed ``step``: the
        steps, the unfinished one, and the time until that was known.
        """
        usual, seconds, count = self._usual_s or inf, span.seconds, max(step - self._reached, 0)
        own = min(seconds, count * usual) if count else 0.0
        again = max(min(step, self._furthest) - self._reached, 0)
        self._furthest = max(self._furthest, self._reached + count)
        return [
            (REDONE, own * again / max(count, 1), 0, self._redoes),
            (STEPPING, own * (count - again) / max(count, 1), count - again, 0),
            (REDONE, min(seconds - own, usual), 0, self._open),
            (DETECT, inf, 0, self._open),
        ]

    def _resolve(self, step: int) -> None:
        """Tells the parts of the interrupted span apart, once ``step`` is known to be the last commit."""
        if self._interrupted is not None:
            self._interrupted.parts = self._broken(self._interrupted, max(step, self._seen))
            self._interrupted = None
            self._flush()

    def _forming(self) -> list[Part]:
        if self._first_world or not self._spans[-1].pieces:
            return [(STARTUP if self._first_world else REFORM, inf, 0, self._open)]
        abort_s = max(self._arrived_at - self._spans[-1].pieces[0].begin, 0.0)
        phases = ((ABORT, abort_s), (REFORM, self._form_s), (HEAL, self._heal_s), (REFORM, inf))
        return [(bucket, seconds, 0, self._open) for bucket, seconds in phases]

    @property
    def _waits(self) -> str:
        """The bucket of a run that waits; "" if it does not."""
        if self._phase != "Waiting":
            return ""
        starts = self._there.starting or (self._first_world and self._there.workers)
        return STARTUP if starts else WAITING

    @property
    def _bucket(self) -> str:
        """The bucket of the present time, as far as it is known."""
        if self._phase == "Forming":
            return STARTUP if self._first_world else REFORM
        return self._waits or PHASES.get(self._phase, AWAY)

    # ---- spans and intervals

    def _update(self) -> None:
        there = self._there
        self._here = self._here._replace(
            workers=len(there.workers), nodes=len(there.present), paid=there.paid
        )

    def _pass(self, at: float) -> None:
        """Lets the time go on to ``at``.  A clock that went back stands still."""
        if at > self._at:
            pieces = self._spans[-1].pieces
            if pieces and pieces[-1][2:] == self._here[2:]:
                pieces[-1] = pieces[-1]._replace(end=at)
            else:
                pieces.append(self._here._replace(begin=self._at, end=at))
            self._at = at

    def _close(self, *parts: Part) -> None:
        self._spans[-1].parts = [*parts]
        self._spans.append(_Span(self._at))
        self._flush()

    def _flush(self) -> None:
        """Cuts the spans whose parts are known into intervals, up to the first one whose parts are not."""
        while self._spans[0].parts is not None:
            self._cut(self._spans.popleft())

    def _cut(self, span: _Span) -> None:
        pieces, parts, at, place = span.pieces or [self._here], span.parts or [], span.at, 0
        for nth, (bucket, seconds, steps, incident) in enumerate(parts, 1):
            ends = pieces[-1].end if nth == len(parts) else min(at + seconds, pieces[-1].end)
            while at < ends or steps:
                while place < len(pieces) - 1 and pieces[place].end <= at:
                    place += 1
                until = max(min(ends, pieces[place].end), at)
                self._put(
                    pieces[place]._replace(
                        begin=at,
                        end=until,
                        bucket=bucket,
                        microbatches=self._here.microbatches,
                        steps=steps,
                        samples=steps * self._samples,
                        incident=incident,
                    )
                )
                at, steps = until, 0

    def _put(self, each: Interval) -> None:
        """Adds an interval to the one before if nothing else changes."""
        before = self._last
        splits = before.steps and self._first_at == inf  # the first step has an interval of its own
        if before[2:-3] == each[2:-3] and before.incident == each.incident and not splits:
            self._last = before._replace(
                end=each.end, steps=before.steps + each.steps, samples=before.samples + each.samples
            )
            return
        if before.bucket:
            self._take(before)
        self._last = each

    def _take(self, each: Interval) -> None:
        """Takes an interval that will not change.  The sizes of worlds and steps before the first ones are
        taken from those.
        """
        self._early.append(each)
        if self._here.microbatches:
            for early in self._early:
                sizes = early if early.members else self._first
                self._sum(
                    early._replace(
                        members=sizes.members,
                        data_ranks=sizes.data_ranks,
                        world_nodes=sizes.world_nodes,
                        microbatches=early.microbatches or self._here.microbatches,
                    )
                )
            self._early = []

    def _sum(self, each: Interval) -> None:
        self.whole.add(each)
        if self._first_at < inf:
            self.since_first.add(each)
        elif each.steps:
            self._first_at = each.end
        if each.bucket != STEPPING:
            incident = self.incidents[each.incident - 1] if each.incident else self.validations
            incident.seconds[each.bucket] += each.end - each.begin
            incident.node_s += (each.end - each.begin) * each.paid
        if self._keep:
            self.intervals.append(each)
