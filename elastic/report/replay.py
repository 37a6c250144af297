"""Tells what happened and why, from the journal alone, and checks whether this version would decide the same.

A journal is a sequence of segments, each a snapshot and the records after it (``storage/journal``).  ``tell``
shows the time, event, edge, actions and reason of each record.  ``differences`` calls ``advance`` for each
record with the state before it, the recorded time and the recorded rules.  States and actions must be the
same, so each journal that is kept is a regression test of every decision in it.  Reasons are compared only if
the same version wrote the journal, because other versions may word them differently.

Beats, ticks, renewals and capacities are recorded only if they led to an action; the next record has the
other changes that they made.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from elastic.control.machine import advance
from elastic.control.rules import Rules
from elastic.journal import codec
from elastic.journal.codec import Segment
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import Outcome
from elastic.protocol.events import Said, Work
from elastic.report.speed import Speed

Json = Mapping[str, Any]

SHOWN_MEMBERS = 8
"""Largest number of members that a line names."""
OF_WORKERS = frozenset(each.__name__ for each in get_args(Said))
"""The events of which many are decided together that workers say; nodes say the others."""


@dataclass(frozen=True)
class Mismatch:
    """A difference: record ``n`` has ``recorded``, and this version decides ``decided``.  ``what`` is
    "state", "actions" or "reason".
    """

    n: int
    what: str
    recorded: str
    decided: str

    def __str__(self) -> str:
        return (
            f"record {self.n}: {self.what} {self.recorded or 'nothing'}; this version: "
            f"{self.decided or 'nothing'}"
        )


# ---- what happened


def tell(segments: Iterable[Segment], *, layers: bool = False) -> Iterator[str]:
    """Yields a line for each record.  Commits in a row, with no other event, action or reason between them,
    share one line.

    With ``layers``, a line follows for each commit that has norms of layers.
    """
    before, state, commits, incarnation = 0.0, "", list[Json](), None
    for snapshot, records in map(codec.checked, segments):
        state = state or snapshot["run"]["state"]["$"]
        # a coordinator that takes over begins with the snapshot of an earlier incarnation
        if incarnation is not None and snapshot["run"]["incarnation"] > incarnation:
            if commits:
                yield from _commits(commits, before, layers)
                before, commits = commits[-1]["at"], []
            step = codec.decode_run(snapshot["run"]).step
            yield (
                f"{'':>31}the run is started again (owner {snapshot['run']['incarnation']}) and goes on "
                f"from step {step}"
            )
            state = snapshot["run"]["state"]["$"]
        incarnation = codec.incarnation_after((snapshot, records))
        for record in records:
            if (
                record["event"]["$"] == "StepDone"
                and not record["actions"]
                and not record["reason"]
                and record["state"] == state
            ):
                commits.append(record)
                continue
            if commits:
                yield from _commits(commits, before, layers)
                before, commits = commits[-1]["at"], []
            yield _line(record, state, before or record["at"])
            yield from _norms([record]) if layers else ()
            before, state = record["at"], record["state"]
    if commits:
        yield from _commits(commits, before, layers)


def _commits(records: Sequence[Json], before: float, layers: bool) -> Iterator[str]:
    first, last = records[0], records[-1]
    steps = [each["event"]["outcome"]["step"] for each in (first, last)]
    said = f"commit of step {steps[0]}" if len(records) == 1 else f"commits of steps {steps[0]} to {steps[1]}"
    yield f"{_head(first, before or first['at'])}  {said}{_speed(records)}"
    yield from _norms(records) if layers else ()


def _norms(records: Sequence[Json]) -> Iterator[str]:
    """Yields a line for each commit in ``records`` that has norms of layers."""
    for each in (each for record in records for each in record.get("commits", ()) if each.get("layers")):
        outcome = codec.decode(Outcome, each)
        norms = ", ".join(f"{name} {norm:.3g}" for name, norm in outcome.layer_norms.items())
        yield f"{'':>31}norms of step {outcome.step}: {norms}"


def _speed(records: Sequence[Json]) -> str:
    """Returns the speed of the steps that ``records`` report; "" if no step was measured."""
    speed = Speed()
    for record in records:
        work = codec.decode(Work, record["event"]["work"]) if record["event"].get("work") else None
        for each in record.get("commits", ()):
            speed.add(codec.decode(Outcome, each), work)
    return f": {speed}" if speed.steps else ""


def _line(record: Json, state: str, before: float) -> str:
    edge = f"  [{state} → {record['state']}]" if state != record["state"] else ""
    done = "".join(f"\n{'':>31}do {action_line(each)}" for each in record["actions"])
    why = f"\n{'':>31}{record['reason']}" if record["reason"] else ""
    return f"{_head(record, before)}  {event_line(record['event'])}{edge}{why}{done}"


def _head(record: Json, before: float) -> str:
    at = record["at"]
    clock = time.strftime("%H:%M:%S", time.localtime(at)) + f"{at % 1:.3f}"[1:]
    return f"{record['n']:>6} {clock} {f'+{at - before:.3f}':>9}s"


def event_line(event: Json) -> str:
    """Returns an event as text, without the data that it carries."""
    if event["$"] == "Together":
        kinds = Counter(each["$"] for each in event["events"])
        return ", ".join(
            f"{kind} of {number} {'workers' if kind in OF_WORKERS else 'nodes'}"
            for kind, number in kinds.items()
        )
    told = {
        name: value
        for name, value in event.items()
        if name in ("worker", "node", "generation", "step", "cause", "reason", "why")
    }
    if "outcome" in event:
        told["step"] = event["outcome"]["step"]
    if event.get("version"):
        told["version"] = f"{event['version']['step']}@g{event['version']['generation']}"
    if event["$"] == "Fenced":
        told["holds"] = (
            ", ".join(f"{each['version']['step']}@g{each['version']['generation']}" for each in event["held"])
            or "nothing"
        )
        told["prepared"] = event["prepared"]
    return " ".join([event["$"], *(f"{name}={_short(value)}" for name, value in told.items())])


def action_line(action: Json) -> str:
    """Returns an action as text, with the members that it addresses."""
    match action["$"]:
        case "Form":
            plan = action["plan"]
            layout, version = plan["layout"], plan["version"]
            return (
                f"Form generation {plan['generation']} of {_members(plan['members'])} as "
                f"{codec.decode(Layout, layout)} at step {version['step']}@g{version['generation']} from "
                f"{plan['tier']}"
            )
        case "Settle":
            outcome = action["outcome"]
            said = f"step {outcome['step']} was committed" if outcome else "nothing more was committed"
            return f"Settle generation {action['generation']} for {_members(action['members'])}: {said}"
        case name:
            members = action.get("members") or action.get("workers")
            told = {
                key: value
                for key, value in action.items()
                if key in ("generation", "save", "reason", "avoid") and value != []
            }
            if "version" in action:
                told["version"] = f"{action['version']['step']}@g{action['version']['generation']}"
            return " ".join(
                [
                    name,
                    *([_members(members)] if members else []),
                    *(f"{key}={_short(value)}" for key, value in told.items()),
                ]
            )


def _members(members: Sequence[str]) -> str:
    more = f" and {len(members) - SHOWN_MEMBERS} more" if len(members) > SHOWN_MEMBERS else ""
    return ",".join(members[:SHOWN_MEMBERS]) + more


def _short(value: Any) -> str:
    lines = str(value).strip().splitlines() or [""]
    return lines[-1]


# ---- deciding again


def differences(segments: Sequence[Segment], code: str, rules: Rules | None = None) -> Iterator[Mismatch]:
    """Yields each difference between a record and the decision of this version, which is called ``code``.

    ``rules`` are for segments without rules of their own.  Raises :class:`ValueError` if there are no rules,
    and :class:`~elastic.journal.codec.UnknownFormat` if this version cannot read the journal.
    """
    for snapshot, records in map(codec.checked, segments):
        recorded = snapshot.get("rules")
        by = codec.decode(Rules, recorded) if recorded else rules
        if by is None:
            raise ValueError(
                "the journal does not contain the rules of its decisions: name the job file instead "
                "of the journal"
            )
        yield from _of_segment(snapshot, records, by, sentences=bool(recorded) and snapshot["code"] == code)


def _of_segment(
    snapshot: Json, records: Sequence[Json], rules: Rules, *, sentences: bool
) -> Iterator[Mismatch]:
    """Yields the differences of one segment.  Reasons are compared only with ``sentences``."""
    for record in records:
        record = codec.written_out(record, snapshot["run"])
        before = codec.before(snapshot["run"], record)
        heard_until = record.get("heard", record["at"])
        decided = advance(
            codec.decode_run(before), codec.decode_event(record["event"]), record["at"], rules, heard_until
        )
        state = type(decided.run.state).__name__
        if state != record["state"]:
            yield Mismatch(record["n"], "state", record["state"], state)
        ours = _in_the_words_of(record["actions"], codec.encode(decided.actions))
        if ours != record["actions"]:
            wanted, ours = ("; ".join(map(action_line, each)) for each in (record["actions"], ours))
            yield Mismatch(record["n"], "actions", wanted, ours)
        if sentences and decided.reason != record["reason"]:
            yield Mismatch(record["n"], "reason", repr(record["reason"]), repr(decided.reason))
        snapshot = codec.after(snapshot, record)


def _in_the_words_of(recorded: Any, ours: Any) -> Any:
    """Returns ``ours`` without the fields that did not exist yet when ``recorded`` was written."""
    if isinstance(recorded, dict) and isinstance(ours, dict) and recorded.get("$") == ours.get("$"):
        return {
            name: _in_the_words_of(recorded[name], each) for name, each in ours.items() if name in recorded
        }
    if isinstance(recorded, list) and isinstance(ours, list) and len(recorded) == len(ours):
        return [_in_the_words_of(*pair) for pair in zip(recorded, ours, strict=True)]
    return ours
