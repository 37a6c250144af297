"""The timeline of a run: what happened and when, and how its time was spent, from the journal alone.

The journal is read once, piece by piece, and only what a report shows is kept: a run of a month has a million
records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from elastic.ids import Version
from elastic.journal import codec
from elastic.plan.layout import Layout
from elastic.report.goodput import ENDED, Account
from elastic.report.metrics import version_of
from elastic.report.recoveries import Recovery, killed, recoveries

LOST, FORMED, COORDINATOR, SAVED, STARTED, BRANCH = (
    "lost",
    "formed",
    "coordinator",
    "saved",
    "started",
    "branch",
)
SKIPPED, LEFT_OUT = "skipped", "left out"
"""The kinds of moments.  The last three are not in the journal: branches and the rows of metrics have
them.
"""


@dataclass(frozen=True)
class Moment:
    """Something that happened at the wall-clock time ``at``, when ``step`` was the newest committed step."""

    at: float
    step: int
    kind: str
    text: str


@dataclass(frozen=True)
class WorldSpan:
    """One generation: its members, the source of its state, and the number of committed steps that it does
    again.
    """

    members: int
    layout: str
    tier: str
    step: int
    before: int
    """The number of members of the world before; 0 if there was none."""
    again: int
    first: bool
    """True if it is the first world since the run was started, or started again."""
    heal_bytes: int = 0


@dataclass(frozen=True)
class SaveSpan:
    """A save: the time from the commit of its step until its manifest was in the bucket, and the workers that
    wrote its parts.
    """

    took_s: float | None
    workers: tuple[str, ...]


@dataclass
class Timeline:
    """The moments, worlds, saves and states of a run.  It is filled by :meth:`read`, and empty without a
    journal.
    """

    began_at: float | None = None
    at: float = 0.0
    """The time of the newest record."""
    state: str = ""
    """The state after the newest record."""
    reason: str = ""
    """The newest reason in a record."""
    error: str = ""
    """The traceback of the user's code that ended the run; "" if none did."""
    reached: int = 0
    """The newest committed step."""
    life: int = 0
    """The number of times that the run was started."""
    moments: list[Moment] = field(default_factory=list)
    worlds: dict[int, WorldSpan] = field(default_factory=dict)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """The number of members from a time on; 0 while there is no world."""
    account: Account = field(default_factory=Account)
    """The account of the run's time."""
    saves: dict[Version, SaveSpan] = field(default_factory=dict)
    recoveries: list[Recovery] = field(default_factory=list)
    _incarnation: int = -1
    """The newest incarnation.  A coordinator that takes over while the workers go on begins no new life."""
    _formed: bool = False
    """True once there was a world since the run was started."""
    _lost: set[str] = field(default_factory=set)
    """Workers that were lost, each of which is noted once: a death may be seen before it is certain."""
    _members: set[str] = field(default_factory=set)
    """Members of the newest world that are not known to be lost."""
    _begun: dict[Version, float] = field(default_factory=dict)
    _wrote: dict[Version, dict[str, None]] = field(default_factory=dict)

    def read(self, segments: Iterable[codec.Segment]) -> Timeline:
        """Reads the objects of a journal, oldest first, and returns itself.  An object without a snapshot
        continues the one before it.
        """
        for _, records in groupby(self._noted(segments), lambda _: self.life):
            self.recoveries += recoveries(records)
        self.account.close()
        return self

    def size_at(self, generation: int) -> int:
        return self.worlds[generation].members if generation in self.worlds else 0

    def _noted(self, segments: Iterable[codec.Segment]) -> Iterator[Mapping[str, Any]]:
        """Yields each record after noting it, so that the journal is read only once."""
        for head, records in segments:
            if "run" in head:
                codec.checked((head, records))
                if head["run"]["incarnation"] > self._incarnation and records:
                    self.account.begins(records[0]["at"], head["run"])
                    self._starts(records[0]["at"], head["run"]["state"])
                self._incarnation = max(self._incarnation, head["run"]["incarnation"])
            elif not self.life:
                continue  # the snapshot before these records is gone
            for record in records:
                self.account.note(record)
                self._note(record)
                yield record

    def _starts(self, at: float, state: Mapping[str, Any]) -> None:
        """Notes the start of a coordinator that continues only from checkpoints, or the beginning of a
        journal whose oldest part is gone.
        """
        self.life += 1
        self._lost.clear()
        if self.began_at is None:
            self.began_at = self.at = at
        else:
            self.at = max(at, self.at)
            self.moments.append(Moment(at, self.reached, STARTED, "the run was started again"))
        self._members = {*state["plan"]["members"]} if state.get("plan") else set()
        self._resize(at, len(self._members))
        self.state, self._formed = state["$"], bool(self._members)

    def _resize(self, at: float, members: int) -> None:
        if not self.sizes or self.sizes[-1][1] != members:
            self.sizes.append((at, members))

    def _note(self, record: Mapping[str, Any]) -> None:
        at = record["at"]
        self.at = max(at, self.at)
        for commit in record.get("commits", ()):
            self._note_commit(at, commit)
        for told in codec.parts_of(record["event"]):
            self._note_event(record, told)
        for action in record["actions"]:
            self._note_action(at, action, record)
        if record["state"] != self.state and record["state"] in ("Waiting", *ENDED):
            self._resize(at, 0)
        self.state, self.reason = record["state"], record["reason"] or self.reason
        if self.state == "Failed":
            state = record["changed"].get("state")
            self.error = (state if isinstance(state, Mapping) else {}).get("job_error", "") or self.error

    def _note_commit(self, at: float, commit: Mapping[str, Any]) -> None:
        self.reached = max(self.reached, commit["step"])
        if commit.get("saves"):
            self._begun[version_of(commit)] = at

    def _note_event(self, record: Mapping[str, Any], told: Mapping[str, Any]) -> None:
        at, kind, goes_on = record["at"], told["$"], self.state not in (*ENDED, "Finishing")
        if kind == "Lost" and goes_on and told["worker"] not in self._lost:
            self._lost.add(told["worker"])
            self._members.discard(told["worker"])
            self._add(at, LOST, record["reason"] or f"{told['worker']} is lost ({told['reason']})")
        elif kind == "KeeperLost" and told.get("with_its_node"):
            self._lost |= (gone := killed(record))
            self._members -= gone
            self._add(at, LOST, record["reason"] or f"a node is lost ({told['reason']})")
        elif kind == "Recovered":
            self._incarnation = max(self._incarnation, told["incarnation"])
            self._add(at, COORDINATOR, record["reason"] or "another coordinator took over")
            for worker in sorted(self._members - {*told["workers"]}) if goes_on else ():
                self._add(at, LOST, f"{worker} is lost: coordinator {told['incarnation']} did not find it")
            self._members &= {*told["workers"]}
        elif kind == "Ready" and (world := self.worlds.get(told["generation"])) is not None:
            self.worlds[told["generation"]] = replace(
                world, heal_bytes=world.heal_bytes + told.get("heal_bytes", 0)
            )
        elif kind == "ShardSaved":
            self._wrote.setdefault(version_of(told["version"]), {})[told["worker"]] = None
        elif kind == "Saved":
            version = version_of(told["version"])
            began, wrote = self._begun.pop(version, None), self._wrote.pop(version, {})
            self.saves[version] = SaveSpan(None if began is None else at - began, tuple(wrote))
            self.moments.append(
                Moment(at, version.step, SAVED, f"the checkpoint of step {version.step} is in the bucket")
            )

    def _note_action(self, at: float, action: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        if action["$"] == "Form" and "plan" in action and action["plan"].get("generation") not in self.worlds:
            plan = action["plan"]
            self._members = {*plan["members"]}
            step, before = (
                plan["version"]["step"],
                next((each for _, each in reversed(self.sizes) if each), 0),
            )
            layout = str(codec.decode(Layout, plan["layout"]))
            again = max(self.reached - step, 0)
            self.worlds[plan["generation"]] = WorldSpan(
                len(plan["members"]), layout, plan["tier"], step, before, again, not self._formed
            )
            self._add(at, FORMED, record["reason"] or f"generation {plan['generation']} is formed")
            self.reached, self._formed = step, True
        elif action["$"] == "Go":
            self._resize(at, self.size_at(action["generation"]))

    def _add(self, at: float, kind: str, text: str) -> None:
        self.moments.append(Moment(at, self.reached, kind, text))
