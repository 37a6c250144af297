"""N1: messages of many workers that wait in line are decided together, as if they had come one after the
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.control.inbox import AT_ONCE, BEATS, MANY, Inbox
from elastic.control.machine import advance
from elastic.control.run import Forming, RunState
from elastic.ids import NodeId, Version, WorkerId
from elastic.journal import codec
from elastic.protocol import events as ev
from elastic.protocol.actions import Action
from elastic.report.recoveries import recoveries
from elastic.report.replay import tell
from tests.control.play import CLASSES, Play, stepping

WORKERS = 12


def answers(play: Play) -> list[ev.Said]:
    """Loses a member in step 5, which one of the others has seen; returns what the others answer to the
    fence.
    """
    play.steps(1, 4)
    outcome = play.commit(5)
    play.lose("w2")
    found = list[ev.Said]()
    for number in (n for n in range(1, WORKERS + 1) if n != 2):
        version = Version(5 if number == 7 else 4, 1)
        seen = (outcome,) if number in (7, 9) else ()
        prepared = None if number == 7 else 5
        found.append(
            ev.Fenced(WorkerId(f"w{number}"), 1, (play.shard(f"w{number}", version),), prepared, seen)
        )
    return found


def told(run: RunState, events: Sequence[ev.Event], play: Play) -> tuple[RunState, list[Action]]:
    actions = list[Action]()
    for event in events:
        done = advance(run, event, play.now, play.rules)
        run = done.run
        actions += done.actions
    return run, actions


@given(st.permutations(range(WORKERS - 1)), st.sets(st.integers(1, WORKERS - 2)))
def test_answers_to_a_fence_count_the_same_together_as_one_by_one(
    order: Sequence[int], cuts: set[int]
) -> None:
    play = stepping(WORKERS)
    each = answers(play)
    each = [each[i] for i in order]
    edges = [0, *sorted(cuts), len(each)]
    grouped = [ev.Together(tuple(each[a:b])) for a, b in pairwise(edges)]
    one_by_one, together = told(play.run, each, play), told(play.run, grouped, play)
    assert together == one_by_one
    assert isinstance(together[0].state, Forming) and together[0].step == 5, (
        "the commit that two have seen counts"
    )


def test_whoever_is_refused_does_not_take_the_others_along() -> None:
    play = stepping(3)
    play.lose("w3")
    there, stranger = play.shard("w1", Version(0, 0)), ev.Here(WorkerId("w9"), 1)
    answer = ev.Fenced(WorkerId("w1"), 1, (there,), None)
    done = advance(play.run, ev.Together((stranger, answer, answer)), play.now, play.rules)
    assert done.taken == (answer,)
    assert not done.reason.startswith("refused")
    alone = advance(play.run, ev.Together((stranger, stranger)), play.now, play.rules)
    assert alone.run is play.run and alone.taken == () and alone.reason.count("refused: ") == 2


def test_a_record_of_many_answers_has_each_commit_once_and_says_the_same_to_a_reader() -> None:
    play = stepping(WORKERS)
    event, before = ev.Together(tuple(answers(play))), play.run
    done = advance(before, event, play.now, play.rules)
    record = codec.record(1, play.now, event, before, done)
    assert [each["step"] for each in record["commits"]] == [5], "although two members have brought it"
    assert codec.fold(codec.snapshot(before), [record]) == done.run
    again = codec.decode_event(codec.written_out(record, codec.encode(before))["event"])
    assert advance(before, again, play.now, play.rules).run == done.run
    (line,) = tell([(codec.snapshot(before), [record])])
    assert f"Fenced of {WORKERS - 1} workers" in line


def test_the_record_of_many_costs_less_than_a_record_for_each() -> None:
    play = stepping(WORKERS)
    each, run, single = answers(play), play.run, 0
    together = ev.Together(tuple(each))
    whole = len(str(codec.record(1, 0.0, together, run, advance(run, together, play.now, play.rules))))
    for number, event in enumerate(each):
        done = advance(run, event, play.now, play.rules)
        single += len(str(codec.record(number, 0.0, event, run, done)))
        run = done.run
    assert whole < single


def test_a_recovery_is_timed_by_what_was_said_together() -> None:
    play, records = stepping(2), list[codec.Json]()

    def tell_all(*events: ev.Event) -> None:
        for event in events:
            before, done = play.run, advance(play.run, event, play.now, play.rules)
            records.append(codec.record(len(records), play.now, event, before, done))
            play.run = done.run

    play.steps(1, 2)
    tell_all(ev.Broken(WorkerId("w1"), 1, 3, "peer", "closed"))
    held = [ev.Fenced(WorkerId(f"w{n}"), 1, (play.shard(f"w{n}", Version(2, 1)),), 3) for n in (1, 2)]
    tell_all(ev.Together(tuple(held)))
    play.now += 1.0
    ready = [ev.Ready(WorkerId(f"w{n}"), 2, float(n), 0.25) for n in (1, 2)]
    tell_all(ev.Together((*(ev.Here(each.worker, 2) for each in ready), *ready)))
    tell_all(ev.StepDone(WorkerId("w1"), 2, play.commit(3)))
    (found,) = recoveries(records)
    assert (found.form_s, found.heal_s, found.abort_s) == (2.0, 0.25, 1.0)


@pytest.mark.parametrize("waiting", [MANY - 1, MANY, AT_ONCE + 3])
def test_the_inbox_takes_together_what_many_workers_have_said(waiting: int) -> None:
    inbox, said = Inbox(lambda: 0.0), [ev.Here(WorkerId(f"w{n}"), 1) for n in range(waiting)]
    for event in (*said, ev.Tick(), *said):
        inbox.put(event)
    taken = list[ev.Event]()
    while not inbox.empty():
        taken.append((inbox.take(0.0) or (ev.Tick(9.0), None))[0])
    assert [each for event in taken for each in ev.parts(event)] == [*said, ev.Tick(), *said], (
        "nothing is lost or overtaken"
    )
    sizes = [len(ev.parts(event)) for event in taken]
    whole = {MANY - 1: [1] * (MANY - 1), MANY: [MANY], AT_ONCE + 3: [AT_ONCE, 1, 1, 1]}[waiting]
    assert sizes == [*whole, 1, *whole]


@given(st.lists(st.sampled_from(["beat", "notice", "tick"]), max_size=400))
def test_nothing_in_line_is_lost_and_only_beats_and_messages_overtake_each_other(kinds: list[str]) -> None:
    """The arrival of the oldest event that was not read yet is known: deadlines count from it."""
    made = {
        "beat": lambda n: ev.Beat(NodeId(f"n{n}"), ()),
        "notice": lambda n: ev.NodeDraining(NodeId(f"n{n}"), 120.0, "aws"),
        "tick": lambda n: ev.Tick(float(n)),
    }
    now = [0.0]
    inbox, put = Inbox(lambda: now[0], many=2), list[ev.Event]()
    for number, kind in enumerate(kinds):
        now[0] = float(number)
        put.append(made[kind](number))
        inbox.put(put[-1])
    taken = list[ev.Event]()
    while not inbox.empty():
        taken += ev.parts((inbox.take(0.0) or (ev.Tick(9.0), None))[0])
        left = [each for each in put if each not in taken]
        assert inbox.heard_until()[1] == (put.index(left[0]) if left else now[0])
    assert sorted(map(put.index, taken)) == list(range(len(put)))
    for kind in ("beat", "notice"):  # each sort has kept its order, before and after whatever else came
        rest = [each for each in taken if isinstance(each, type(made[kind](0)) | ev.Tick)]
        assert rest == [each for each in put if each in rest]


def test_notices_that_come_between_beats_are_decided_in_batches() -> None:
    """Notices of 320 machines of 1,280 come while the keepers of all others send their beats; no two notices follow
    each other in line.
    """
    inbox = Inbox(lambda: 0.0)
    for number in range(320):
        inbox.put(ev.NodeDraining(NodeId(f"n{number}"), 120.0, "aws"))
        inbox.put_all(ev.Beat(NodeId(f"m{number}-{beat}"), ()) for beat in range(4))
    sizes = list[tuple[type, int]]()
    while not inbox.empty():
        taken = ev.parts((inbox.take(0.0) or (ev.Tick(), None))[0])
        sizes.append((type(taken[0]), len(taken)))
    assert sum(size for kind, size in sizes if kind is ev.NodeDraining) == 320
    assert len([size for kind, size in sizes if kind is ev.NodeDraining]) <= 4 and len(sizes) < 20


def test_what_is_reported_with_a_receipt_is_taken_alone() -> None:
    inbox = Inbox(lambda: 0.0, many=2)
    for _ in range(3):
        inbox.put(ev.Beat(NodeId("n1"), ()))
        inbox.put(ev.ShardSaved(WorkerId("w1"), Version(1, 1)), "receipt")
    taken = [inbox.take(0.0) for _ in range(6)]
    assert (
        taken
        == [(ev.Beat(NodeId("n1"), ()), None), (ev.ShardSaved(WorkerId("w1"), Version(1, 1)), "receipt")] * 3
    )


def test_workers_that_join_together_are_all_in_the_first_world() -> None:
    play = Play()
    play.tell(ev.Capacity(2))
    nodes = [NodeId("n1"), NodeId("n2")]
    for node in nodes:
        play.tell(ev.KeeperUp(node))
    starting = list(play.run.members.starting)
    play.tell(
        ev.Together(
            tuple(
                ev.Joined(worker, node, "cpu", CLASSES) for worker, node in zip(starting, nodes, strict=True)
            )
        )
    )
    assert list(play.run.workers) == starting


def test_n2_beats_count_the_same_together_as_one_by_one_and_need_no_record() -> None:
    """Together they cost one decision, and are taken with beats alone.  The control: a beat that is missing
    is seen.
    """
    play = stepping(WORKERS)
    beats = [
        ev.Beat(node, (ev.Progress(worker, 1, 1, 2, 3),), number % 2 == 0)
        for number, (worker, node) in enumerate(homes(play))
    ]
    one_by_one, grouped = told(play.run, beats, play), told(play.run, [ev.Together(tuple(beats))], play)
    assert grouped == one_by_one and len(grouped[0].watch.counters) == len({node for _, node in homes(play)})
    assert told(play.run, beats[1:], play) != one_by_one
    done = advance(play.run, ev.Together(tuple(beats)), play.now, play.rules)
    assert not codec.worth_recording(ev.Together(tuple(beats)), play.run, done)
    inbox, many = Inbox(lambda: 0.0, many=2), BEATS // WORKERS + 1
    inbox.put_all([*beats * many, ev.Here(WorkerId("w1"), 1), ev.Here(WorkerId("w2"), 1), *beats])
    assert [len(ev.parts((inbox.take(0.0) or (ev.Tick(), None))[0])) for _ in range(2)] == [
        len(beats) * (many + 1),
        2,
    ]
    assert inbox.empty()


def homes(play: Play) -> list[tuple[WorkerId, NodeId]]:
    return [(worker, known.node) for worker, known in play.run.workers.items()]
