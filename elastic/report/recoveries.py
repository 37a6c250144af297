"""Splits the time of each recovery into phases, from the journal alone.

Each phase begins when the one before it ends:

    detect    from the fault until the coordinator knows of it (not in the journal, which has no faults)
    decide    until all members are fenced and the outcome is decided
    abort     until every member has left its groups and has the next plan
    form      until the process groups of the next generation exist
    heal      until every slice is at the plan's version
    go        until the members are told to step
    step      until the first commit of the new generation
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic.journal import codec


@dataclass
class Why:
    """The reason why a world ended: the first one that was given.  If it came from a member that only waited
    for a dead one, a death that is reported later replaces it.
    """

    text: str = ""
    waits: bool = False
    """True while ``text`` comes from a member that waits for a peer, which is not a cause."""

    def hear(self, record: Mapping[str, Any], *, ends: bool) -> None:
        """Reads the next record.  ``ends`` is True if the record ends a world."""
        told = codec.parts_of(record["event"])
        if ends and not self.text:
            self.text, self.waits = record["reason"], any(each.get("cause") == "peer" for each in told)
        elif self.waits and record["reason"] and any(each["$"] in ("Lost", "KeeperLost") for each in told):
            self.text, self.waits = record["reason"], False
        self.waits = self.waits and not any(each["$"] == "Form" for each in record["actions"])


@dataclass(frozen=True)
class Recovery:
    """One change of worlds.  All durations are in seconds; ``known_at`` and ``committed_at`` are wall-clock
    times.
    """

    generation: int
    reason: str
    planned: bool
    known_at: float
    decide_s: float
    abort_s: float
    form_s: float
    heal_s: float
    go_s: float
    step_s: float
    committed_at: float


def recoveries(records: Iterable[Mapping[str, Any]]) -> list[Recovery]:
    """Returns every change of worlds that reached a commit.  ``records`` are the journal's, in order."""
    found: list[Recovery] = []
    marks: dict[str, Any] = {}
    living: set[str] = set()
    for record in records:
        told = codec.parts_of(record["event"])
        lost = {each["worker"] for each in told if each["$"] == "Lost"}
        if any(each["$"] == "KeeperLost" and each.get("with_its_node") for each in told):
            lost |= killed(record)  # the workers of a dead node are lost with it
        _mark(marks, record, all_lost=bool(living) and living <= lost)
        living -= lost
        living = next(
            (set(each["plan"]["members"]) for each in record["actions"] if each["$"] == "Form"), living
        )
        if "committed" in marks:
            if "known" in marks and "formed" in marks:
                found.append(_recovery(marks))
            marks = {}
    return found


def killed(record: Mapping[str, Any]) -> set[str]:
    """Returns the workers that a record orders to kill."""
    return {worker for action in record["actions"] if action["$"] == "Kill" for worker in action["workers"]}


def _mark(marks: dict[str, Any], record: Mapping[str, Any], *, all_lost: bool) -> None:
    """Notes what ``record`` says of the present recovery.

    ``all_lost`` is True if the record's event took the last member, so that nobody is left to fence.
    """
    at, actions = record["at"], record["actions"]
    names = {action["$"]: action for action in actions}
    told = codec.parts_of(record["event"])
    kinds = {each["$"] for each in told}
    if "Recovered" in kinds:  # a new coordinator repeats all actions but a fence
        names = {name: action for name, action in names.items() if name == "Fence"}
    # the new world broke before its first commit: another recovery begins
    if ("Fence" in names or all_lost) and "go" in marks:
        marks.clear()
    ends = bool({"Fence", "Pause"} & names.keys()) or all_lost
    marks.setdefault("why", Why()).hear(record, ends=ends or "Form" in names)
    if ends and "known" not in marks:
        marks.update(known=at, planned="Pause" in names)
    if "Form" in names:
        marks.update(formed=at, generation=names["Form"]["plan"]["generation"], here=at, form=0.0, heal=0.0)
        marks.setdefault("known", at)
        marks.setdefault("planned", True)
    if "Here" in kinds:
        marks["here"] = at
    for ready in (each for each in told if each["$"] == "Ready"):
        marks["form"] = max(marks.get("form", 0.0), number(ready["form_s"]))
        marks["heal"] = max(marks.get("heal", 0.0), number(ready["heal_s"]))
    if "Go" in names:
        marks["go"] = at
    if "StepDone" in kinds and "go" in marks:
        marks["committed"] = at


def number(value: Any) -> float:
    """Returns a float as the journal writes it: exact, in hexadecimal."""
    return float.fromhex(value) if isinstance(value, str) else float(value)


def _recovery(marks: Mapping[str, Any]) -> Recovery:
    ready_s = marks["go"] - marks["here"]
    return Recovery(
        generation=marks["generation"],
        reason=marks["why"].text,
        planned=marks["planned"],
        known_at=marks["known"],
        decide_s=marks["formed"] - marks["known"],
        abort_s=marks["here"] - marks["formed"],
        form_s=marks["form"],
        heal_s=marks["heal"],
        go_s=max(ready_s - marks["form"] - marks["heal"], 0.0),
        step_s=marks["committed"] - marks["go"],
        committed_at=marks["committed"],
    )
