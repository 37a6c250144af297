"""The journal of a recovery takes the same number of bytes per member, however many members there are.

In format 2, each answer to a fence repeated all answers before it with the commits that they had brought: 128
workers with 1,024 samples a step and two commits that were not acknowledged made 150 MB.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from functools import reduce
from typing import Any

import pytest

from elastic.control.decision import Transition
from elastic.control.run import Forming, Running, RunState, Stopping
from elastic.ids import NodeId, Version, WorkerId
from elastic.journal import codec
from elastic.plan.layout import LayoutRule
from elastic.protocol import events as ev
from elastic.protocol.commit_record import Outcome
from elastic.report.replay import differences
from tests.control.play import Play, rules, stepping
from tests.support.cells import classes

pytestmark = pytest.mark.fast

REPLICAS = LayoutRule(None, 1, 1, "all")
Record = Callable[[int, float, ev.Event, RunState, Transition], dict[str, Any]]


def commit(step: int, samples: int) -> Outcome:
    """A step of ``samples`` samples, 16 in each microbatch."""
    parts = samples // 16
    ids = tuple(tuple(range(16 * part, 16 * part + 16)) for part in range(parts))
    return Outcome(step, 1, 1.5, tuple(0.1 * (part + 1) for part in range(parts)), (16,) * parts, ids, True)


def whole_fields(
    number: int, at: float, event: ev.Event, before: RunState, transition: Transition
) -> dict[str, Any]:
    """The control: a record that holds each value that changed whole, and the event with all that it said."""
    after = transition.run
    changed = {
        each.name: getattr(after, each.name)
        for each in fields(after)
        if getattr(after, each.name) != getattr(before, each.name)
    }
    return {
        "n": number,
        "at": at,
        "event": codec.encode(event),
        "changed": {name: codec.encode(value) for name, value in changed.items()},
        "actions": codec.encode(transition.actions),
        "reason": transition.reason,
    }


class Recorded(Play):
    """Adds up how long the records are, by the kind of their events."""

    def __init__(self, play: Play, record: Record = codec.record) -> None:
        super().__init__(play.rules, play.run)
        self.record, self.sizes = record, dict[str, int]()
        self.begun = codec.snapshot(play.run)
        self.records: list[dict[str, Any]] = []

    def tell(self, event: ev.Event) -> str:
        before = self.run
        reason = super().tell(event)
        line = json.dumps(
            self.record(len(self.records), self.now, event, before, self.last), separators=(",", ":")
        )
        self.records.append(json.loads(line))
        self.sizes[type(event).__name__] = self.sizes.get(type(event).__name__, 0) + len(line)
        return reason


def recovery(workers: int, samples: int = 64, record: Record = codec.record) -> Recorded:
    """A member dies; each of the others brings the same two commits of which nobody knew, and the next world
    forms, steps and saves.
    """
    play = Recorded(stepping(workers, layout=REPLICAS, save_every=5), record)
    members = play.plan.members
    play.lose(members[0])
    for worker in members[1:]:
        held = (play.shard(worker, Version(4, 1)),)
        play.tell(ev.Fenced(worker, 1, held, 5, (commit(3, samples), commit(4, samples))))
    assert isinstance(play.run.state, Forming) and play.run.step == 4
    play.here(*play.plan.members)
    play.ready(*play.plan.members)
    assert isinstance(play.run.state, Running)
    play.step(5)
    play.save(Version(5, 2), *play.plan.members)
    assert play.run.history.saved == (Version(5, 2),)
    return play


def unread(workers: int, record: Record = codec.record, early: int = 0) -> Recorded:
    """A coordinator takes over that has not read of the latest generation; each member that answers it brings
    that generation's plan.

    ``early`` workers were left out of that generation, and bring the plan of the one before.
    """
    play = Recorded(stepping(workers, layout=REPLICAS), record)
    members = play.plan.members
    play.tell(ev.Recovered(2, members, play.run.cluster.keepers, whole=False))
    left = members[len(members) - early :] if early else ()
    later = replace(
        play.plan,
        generation=2,
        members=members[: len(members) - early],
        nodes=play.plan.nodes[: len(members) - early],
    )
    for worker in members:
        play.tell(
            ev.Attached(worker, replace(later, generation=1, members=members) if worker in left else later)
        )
    for worker in later.members:
        play.tell(ev.Fenced(worker, 2, (), 0, ()))
    for worker in members:  # once more: workers that had answered are asked again
        play.tell(
            ev.Attached(worker, replace(later, generation=1, members=members) if worker in left else later)
        )
    assert isinstance(play.run.state, Stopping) and play.run.generation == 2
    return play


def attached(workers: int, record: Record) -> dict[str, float]:
    """Returns the bytes of the records of attached workers: all in the unread generation, and with half of
    them left out of it.
    """
    left_out = unread(workers, record, workers // 2).sizes["Attached"]
    return {"Attached": unread(workers, record).sizes["Attached"], "Left out": left_out}


def grown(record: Record) -> dict[str, float]:
    """Returns the growth of the bytes per member, by kind of event: the larger ratio of 32 to 8 members and
    of 128 to 32.
    """
    found = {
        number: recovery(number, record=record).sizes | attached(number, record) for number in (8, 32, 128)
    }
    per_member = {
        number: {kind: size / number for kind, size in sizes.items()} for number, sizes in found.items()
    }
    kinds = ("Fenced", "Here", "Ready", "ShardSaved", "Attached", "Left out")
    return {
        kind: max(per_member[32][kind] / per_member[8][kind], per_member[128][kind] / per_member[32][kind])
        for kind in kinds
    }


def test_what_each_member_says_costs_the_same_however_many_there_are() -> None:
    assert max(grown(codec.record).values()) < 1.2


def test_records_of_whole_values_are_found_out() -> None:
    """Negative control."""
    assert min(grown(whole_fields).values()) > 2


def test_a_commit_is_written_once() -> None:
    """The first answer that brings a commit writes it out; the history and the settlement refer to it by step
    and generation.
    """
    play = recovery(8)
    brought = [each["step"] for record in play.records for each in record.get("commits", ())]
    assert brought == [3, 4, 5]
    text = json.dumps(play.records)
    assert text.count('"samples"') == 3 and text.count('"Commit"') > 3
    assert codec.fold(play.begun, play.records) == play.run
    again = [codec.written_out(play.records[1], play.begun["run"]), play.records[2]]
    assert [each["step"] for each in again[0]["event"]["outcomes"]] == [3, 4] and again[1]["event"][
        "outcomes"
    ] == []
    assert again[1]["event"]["seen"] == codec.encode(Version(4, 1)), "what each member had seen is not lost"


@pytest.mark.parametrize("early", [0, 2])
def test_a_plan_is_written_where_it_begins(early: int) -> None:
    """Only the first record that brings a plan writes it out; later records refer to its generation, and a
    reader finds it.
    """
    play = unread(6, early=early)
    brought = [record["event"]["plan"] for record in play.records if record["event"]["$"] == "Attached"]
    named = [plan.get("members") for plan in brought]
    assert len(named) > 8 and named[0] == list(play.plan.members) and not any(named[1:])
    assert len([plan for plan in brought if plan["$"] == "PlanOf"]) >= 6
    assert codec.fold(play.begun, play.records) == play.run
    segment = {**play.begun, "rules": codec.encode(play.rules)}
    assert list(differences([(segment, play.records)], "")) == [], (
        "from what is written it is decided as it was"
    )


@pytest.mark.parametrize("at_once", [False, True])
def test_the_classes_of_tensors_are_written_once(at_once: bool) -> None:
    """The first worker's are in what its record changes, all others that join with the same have none of
    their own.  A worker with other classes is refused, also when the journal is read, and its record has
    them.
    """
    sizes = (44, 12)
    workers = [
        ev.Joined(
            WorkerId(f"w{number}"), NodeId("n1"), "cpu", classes((7, 2 + number // 4)), class_bytes=sizes
        )
        for number in (1, 2, 3, 4)
    ]
    play = Recorded(Play(rules(max_workers=4)))
    play.tell(ev.KeeperUp(NodeId("n1")))
    play.tell(ev.Capacity(4))
    for event in (ev.Together(tuple(workers)),) if at_once else workers:
        play.tell(event)
    assert list(play.run.members.workers) == ["w1", "w2", "w3"]
    told = [part for record in play.records[2:] for part in codec.parts_of(record["event"])]
    assert [name in part for part in told for name in codec.CLASSES] == 6 * [False] + 2 * [True]
    assert codec.fold(play.begun, play.records) == play.run
    known, again = reduce(codec.after, play.records[:2], play.begun), list[codec.Json]()
    for record in play.records[2:]:
        again += codec.parts_of(codec.written_out(record, known["run"])["event"])
        known = codec.after(known, record)
    assert list(map(codec.decode_event, again)) == workers
    segment = {**play.begun, "rules": codec.encode(play.rules)}
    assert list(differences([(segment, play.records)], "")) == []


def test_a_plan_that_is_nowhere_is_refused() -> None:
    play = unread(4)
    bent = json.loads(
        json.dumps(play.records).replace('"PlanOf", "generation": 2', '"PlanOf", "generation": 3')
    )
    with pytest.raises(
        codec.UnknownFormat, match="refers to the plan of generation 3, which it does not hold"
    ):
        codec.fold(play.begun, bent)


def test_a_fence_of_128_workers_is_short() -> None:
    """Each step has 1,024 samples, and two steps were not acknowledged."""
    play = recovery(128, samples=1024)
    assert play.sizes["Fenced"] < 1e6
    assert codec.fold(play.begun, play.records) == play.run


def test_a_commit_that_is_nowhere_is_refused() -> None:
    """A record whose commits were taken out says which one it lacks."""
    play = recovery(4)
    bent = [{name: each for name, each in record.items() if name != "commits"} for record in play.records]
    with pytest.raises(
        codec.UnknownFormat, match="refers to the commit of step 3 of generation 1, which it does not hold"
    ):
        codec.fold(play.begun, bent)


def test_a_commit_that_others_brought_before_still_counts_as_seen() -> None:
    """A repeated commit changes nothing and is not written again; folding the records still gives the same
    run.
    """
    play = Recorded(stepping(3, layout=REPLICAS))
    play.steps(1, 3)
    play.lose("w3")
    for worker, saw in (("w1", 3), ("w2", 2)):
        play.tell(ev.Fenced(WorkerId(worker), 1, (play.shard(worker, Version(2, 1)),), 3, (commit(saw, 16),)))
    assert codec.fold(play.begun, play.records) == play.run
