"""The costs of a run from its journal, as ``elastic simulate --costs`` reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from elastic.journal import codec
from elastic.protocol.commit_record import Outcome
from elastic.report.recoveries import Recovery, recoveries

DETECT_S = 1.4
"""Time in seconds from the loss of a machine until the coordinator knows of it.  No journal has it; this was
measured where a node was killed (``tests/benchmarks/RESULTS.md``, row a).
"""


def costs_of(segments: Iterable[codec.Segment], about: str = "") -> dict[str, Any]:
    """Returns the costs of the run whose journal has these segments: medians of its steps, its changes of
    worlds and its starts.  A cost that the run did not show is None.  Two are guessed then: newcomers join, and
    state comes from the bucket, as fast as a world that has lost members forms.

    Raises ValueError if the journal has no step whose time is known, or if axes divide the model.
    """
    records = list[Mapping[str, Any]]()
    layout: Mapping[str, Any] = {}
    for head, part in segments:
        layout = head.get("rules", {}).get("layout", layout) if isinstance(head, Mapping) else layout
        records += part
    if layout.get("model"):
        raise ValueError("axes divide its model, and a replay has one worker a machine with the whole model")
    rounds, microbatches = _rounds(records)
    if not rounds:
        raise ValueError("the journal has no step whose time is known, so the costs of a step are not known")
    changes = recoveries(records)
    grown = _grown(records, changes)
    left = [each for each in changes if each.generation not in grown]
    from_bucket = _tiers(records, "bucket")
    near = [each for each in left if each.generation not in from_bucket]
    reform_s = _median([each.abort_s + each.form_s + each.go_s for each in left or changes])
    heal_s = _median([each.heal_s for each in near])
    join_s = _median([_whole_s(each) for each in changes if each.generation in grown])
    whole_s = None if reform_s is None else reform_s + (heal_s or 0.0)
    bucket_s = _median([_whole_s(each) for each in changes if each.generation in from_bucket])
    return {
        "about": about,
        "microbatches": microbatches,
        "round_s": median(rounds),
        "reform_s": reform_s,
        "heal_s": heal_s,
        "join_s": whole_s if join_s is None else join_s,
        "bucket_s": whole_s if bucket_s is None else bucket_s,
        "detect_s": DETECT_S,
        "decide_s": _median([each.decide_s for each in changes if not each.planned]) or 0.0,
        "start_s": _median(_starts(records)),
        "layout": {name: each for name, each in layout.items() if name not in ("$", "model")},
    }


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def _whole_s(change: Recovery) -> float:
    return change.abort_s + change.form_s + change.heal_s + change.go_s


def _rounds(records: Iterable[Mapping[str, Any]]) -> tuple[list[float], int]:
    """Returns the time of a round in each step that was measured, and the microbatches of the last step.  The
    first step of a world is left out, since it may compile.
    """
    found, microbatches, workers, first = list[float](), 0, 0, True
    for record in records:
        for commit in record.get("commits", ()):
            outcome: Outcome = codec.decode(Outcome, commit)
            microbatches = len(outcome.losses)
            if outcome.usage.step_s and workers and not first:
                found.append(outcome.usage.step_s / -(-microbatches // workers))
            first = False
        for action in record["actions"]:
            if action["$"] == "Form":
                workers, first = len(action["plan"]["members"]), True
    return found, microbatches


def _forms(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [each["plan"] for record in records for each in record["actions"] if each["$"] == "Form"]


def _grown(records: Iterable[Mapping[str, Any]], changes: Iterable[Recovery]) -> set[int]:
    """Returns the generations of worlds that have taken in newcomers."""
    had, found = set[str](), set[int]()
    for plan in _forms(records):
        if had and set(plan["members"]) - had:
            found.add(plan["generation"])
        had |= set(plan["members"])
    return found & {each.generation for each in changes}


def _tiers(records: Iterable[Mapping[str, Any]], tier: str) -> set[int]:
    return {plan["generation"] for plan in _forms(records) if plan.get("tier") == tier}


def _starts(records: Iterable[Mapping[str, Any]]) -> list[float]:
    """Returns the time of each start of a worker: from the request until it has joined."""
    asked, found = dict[str, float](), list[float]()
    for record in records:
        for each in codec.parts_of(record["event"]):
            if each["$"] == "Joined" and each["worker"] in asked:
                found.append(record["at"] - asked.pop(each["worker"]))
        for action in record["actions"]:
            if action["$"] == "StartWorkers":
                asked |= dict.fromkeys(action["workers"], record["at"])
    return found
