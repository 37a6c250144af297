"""The costs of a run from its journal, as ``elastic simulate --costs`` reads them.

Costs are means, not medians: a replay adds them up, so a change of worlds that took long must count.  What a
change of worlds costs is what :mod:`elastic.report.goodput` says of its incident.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from statistics import mean, median
from typing import Any

from elastic.journal import codec
from elastic.protocol.commit_record import Outcome
from elastic.report.goodput import ABORT, DECIDE, FAULT, HEAL, LOSS, REFORM, START, Incident
from elastic.report.recoveries import recoveries
from elastic.report.timeline import Timeline

DETECT_S = 1.4
"""Time in seconds from the loss of a machine until the coordinator knows of it, where the times of the losses
are not known, which no journal has.  This was measured where a node was killed
(``tests/benchmarks/RESULTS.md``, row a).
"""


def costs_of(
    segments: Iterable[codec.Segment], about: str = "", lost_at: Sequence[float] = ()
) -> dict[str, Any]:
    """Returns the costs of the run whose journal has these segments: means of its steps and of its changes of
    worlds, and its starts.  A cost that the run did not show is None.  Some are guessed then, and named after
    ``about``: newcomers join, and state comes from the bucket, as fast as a world that has lost members forms; a
    loss is noticed after :data:`DETECT_S`, and decided at once.  ``lost_at`` has the times at which machines were
    lost, if somebody knows them.

    Raises ValueError if the journal has no step whose time is known, or if axes divide the model.
    """
    read, records = list(segments), list[Mapping[str, Any]]()
    layout: Mapping[str, Any] = {}
    for head, part in read:
        layout = head.get("rules", {}).get("layout", layout) if isinstance(head, Mapping) else layout
        records += part
    if layout.get("model"):
        raise ValueError("axes divide its model, and a replay has one worker a machine with the whole model")
    took_s, rounds, microbatches = _rounds(records)
    if not rounds:
        raise ValueError("the journal has no step whose time is known, so the costs of a step are not known")
    changes = [each for each in Timeline().read(read).account.incidents if each.generation]
    losses = [each for each in changes if each.kind in (LOSS, FAULT)]
    plans = _forms(records)
    grown = _grown(plans)
    from_bucket = {plan["generation"] for plan in plans if plan.get("tier") == "bucket"}
    # in the incident of a start, all that its first world takes is start-up
    begun = {each.generation for each in changes if each.kind == START}
    changes = [each for each in changes if each.generation not in begun]
    near = [each for each in changes if each.generation not in grown | from_bucket]
    formed = recoveries(records)
    first = [each.abort_s + each.form_s + each.go_s for each in formed[:1]]
    reform_s = _mean([_formed_s(each) for each in near] or first)
    heal_s = _mean([each.seconds[HEAL] for each in near])
    whole_s = None if reform_s is None else reform_s + (heal_s or 0.0)
    join_s = _mean([_whole_s(each) for each in changes if each.generation in grown])
    resumed_s = [
        each.abort_s + each.form_s + each.heal_s + each.go_s
        for each in formed
        if each.generation in begun & from_bucket
    ]
    bucket_s = _mean([*resumed_s, *(_whole_s(each) for each in changes if each.generation in from_bucket)])
    detect_s = _mean(_detected_s(losses, lost_at))
    decide_s = _mean([each.seconds[DECIDE] for each in losses])
    starts_s = _starts(records)
    guesses = {"join_s": join_s, "bucket_s": bucket_s, "detect_s": detect_s, "decide_s": decide_s}
    guessed = ", ".join(name for name, cost in guesses.items() if cost is None)
    return {
        "about": about + (f"; guessed: {guessed}" if guessed else ""),
        "microbatches": microbatches,
        "round_s": took_s / rounds,
        "reform_s": reform_s,
        "heal_s": heal_s,
        "join_s": whole_s if join_s is None else join_s,
        "bucket_s": whole_s if bucket_s is None else bucket_s,
        "detect_s": DETECT_S if detect_s is None else detect_s,
        "decide_s": decide_s or 0.0,
        "start_s": median(starts_s) if starts_s else None,
        "starts_s": starts_s,
        "layout": {name: each for name, each in layout.items() if name not in ("$", "model")},
    }


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def _detected_s(losses: Sequence[Incident], lost_at: Sequence[float]) -> list[float]:
    """Returns, for each incident that follows the loss of a machine, the time from the last one that was lost
    since the incident before.
    """
    found, before = list[float](), -inf
    for each in losses:
        those = [at for at in lost_at if before < at <= each.began_at]
        found += [each.began_at - max(those)] if those else []
        before = each.began_at
    return found


def _formed_s(change: Incident) -> float:
    """Returns the time from the end of a world until the next one steps, without what its parts of the state
    take.  A loss has to be decided first, which is a cost of its own.
    """
    decide_s = 0.0 if change.kind in (LOSS, FAULT) else change.seconds[DECIDE]
    return decide_s + change.seconds[ABORT] + change.seconds[REFORM]


def _whole_s(change: Incident) -> float:
    return _formed_s(change) + change.seconds[HEAL]


def _rounds(records: Iterable[Mapping[str, Any]]) -> tuple[float, int, int]:
    """Returns the time of all steps that were measured, their rounds, and the microbatches of the last step.
    The first step of a world is left out, since it may compile.
    """
    took_s, rounds, microbatches, workers, first = 0.0, 0, 0, 0, True
    for record in records:
        for commit in record.get("commits", ()):
            outcome: Outcome = codec.decode(Outcome, commit)
            microbatches = len(outcome.losses)
            if outcome.usage.step_s and workers and not first:
                took_s += outcome.usage.step_s
                rounds += -(-microbatches // workers)
            first = False
        for action in record["actions"]:
            if action["$"] == "Form":
                workers, first = len(action["plan"]["members"]), True
    return took_s, rounds, microbatches


def _forms(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [each["plan"] for record in records for each in record["actions"] if each["$"] == "Form"]


def _grown(plans: Iterable[Mapping[str, Any]]) -> set[int]:
    """Returns the generations of worlds that have taken in newcomers."""
    had, found = set[str](), set[int]()
    for plan in plans:
        if had and set(plan["members"]) - had:
            found.add(plan["generation"])
        had |= set(plan["members"])
    return found


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
