"""R6: a coordinator dies in any state, with any part of what it was told unrecorded; the next one goes on as
if nobody had died.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import pytest

from elastic.control.liveness import Watch
from elastic.control.run import (
    Finished,
    Finishing,
    Forming,
    Running,
    RunState,
    Saves,
    Stopped,
    Stopping,
    Waiting,
)
from elastic.ids import NodeId, Version, WorkerId
from elastic.journal import codec
from elastic.protocol import events as ev
from elastic.protocol.actions import CommitManifest, Exit, Fence, Form, Go, Kill, Pause, Settle, Upload
from elastic.protocol.commit_record import GO_ON
from tests.control.play import CLASSES, Play, reformed, rules, started, stepping

STEPPING, READY, HERE = "stepping", "ready", "here"


def folded(play: Play) -> Play:
    """Returns a run that is read from the journal alone."""
    text = json.dumps(codec.snapshot(play.run))
    again = Play(play.rules, codec.fold(json.loads(text), []))
    again.now = play.now
    return again


def take_over(play: Play, *gone: str) -> Play:
    """The coordinator dies; another one finds all workers except those ``gone``."""
    again = folded(play)
    again.now += 10.0
    alive = tuple(
        worker for worker in (*again.run.workers, *again.run.members.starting) if worker not in gone
    )
    again.tell(ev.Recovered(again.run.incarnation + 1, alive, again.run.cluster.keepers))
    return again


def standing(play: Play, worker: str, *said: ev.Event) -> list[ev.Event]:
    """Returns what a worker answers: where it stands, then ``said``, which it repeats."""
    plan = play.run.plan
    member = plan is not None and worker in plan.members
    steps = isinstance(play.run.state, Running | Finishing) or (
        isinstance(play.run.state, Stopping) and play.run.state.planned
    )
    return [ev.Attached(WorkerId(worker), plan if member else None, steps), *said]


def alike(run: RunState) -> RunState:
    """Returns ``run`` without what must differ: the incarnation, and times that count from the takeover."""
    state: Any = run.state
    if hasattr(state, "plan"):
        state = replace(state, plan=replace(state.plan, incarnation=0))
    if hasattr(state, "answers"):
        state = replace(state, answers=tuple(sorted(state.answers, key=lambda each: each.worker)))
    if hasattr(state, "deadline"):
        state = replace(state, deadline=0.0)
    if hasattr(state, "since"):
        state = replace(state, since=0.0)
    workers = {worker: replace(known, joined_at=0.0) for worker, known in run.workers.items()}
    settled = run.history.settled
    return replace(
        run,
        incarnation=0,
        state=state,
        members=replace(run.members, workers=workers),
        cluster=replace(run.cluster, slots=0),
        history=replace(
            run.history, settled=settled and replace(settled, members=tuple(sorted(settled.members)))
        ),
        saves=Saves(tuple(replace(each, ask_at=0.0, heard_at=0.0) for each in run.saves.pending)),
        takeover=replace(run.takeover, startups=0),
        watch=Watch(reform_s=run.watch.reform_s),
    )


@dataclass(frozen=True)
class Scene:
    """``said``: what happened while, or shortly before, the coordinator died; any part of it may be recorded."""

    state: type
    play: Callable[[], Play]
    said: Callable[[Play], Sequence[ev.Event]]


def facts(*makers: Callable[[Play], ev.Event]) -> Callable[[Play], list[ev.Event]]:
    return lambda play: [make(play) for make in makers]


def here(worker: str) -> Callable[[Play], ev.Event]:
    return lambda play: ev.Here(WorkerId(worker), play.generation)


def ready(worker: str) -> Callable[[Play], ev.Event]:
    return lambda play: ev.Ready(WorkerId(worker), play.generation)


def committed(step: int, boundary: int = GO_ON) -> Callable[[Play], ev.Event]:
    return lambda play: ev.StepDone(play.plan.members[0], play.generation, play.commit(step, boundary))


def fenced(worker: str, step: int, boundary: int = GO_ON) -> Callable[[Play], ev.Event]:
    def make(play: Play) -> ev.Event:
        held = (play.shard(worker, Version(step, play.generation)),)
        return ev.Fenced(WorkerId(worker), play.generation, held, None, (play.commit(step, boundary),))

    return make


def part(worker: str, step: int) -> Callable[[Play], ev.Event]:
    return lambda play: ev.ShardSaved(WorkerId(worker), Version(step, play.generation))


def at_step(step: int, workers: int = 2, **changes: Any) -> Play:
    play = stepping(workers, **changes)
    play.steps(1, step)
    return play


def waiting() -> Play:
    play = Play(rules(min_workers=2))
    play.tell(ev.Capacity(2))
    play.join("w1")
    return play


def pausing() -> Play:
    play = at_step(4)
    play.tell(ev.StopRequested("Ctrl-C"))
    return play


def broken() -> Play:
    play = at_step(4, workers=3)
    play.lose("w3")
    return play


def forming_again() -> Play:
    play = broken()
    play.answer("w1", Version(4, 1), saw=4)
    play.answer("w2", Version(3, 1), prepared=4)
    return play


SCENES = {
    "waiting": Scene(
        Waiting, waiting, facts(lambda play: ev.Joined(WorkerId("w2"), NodeId("n1"), "cpu", CLASSES))
    ),
    "forming": Scene(Forming, lambda: started(2), facts(here("w1"), here("w2"), ready("w1"), ready("w2"))),
    "forming again": Scene(Forming, forming_again, facts(here("w1"), here("w2"), ready("w2"), ready("w1"))),
    "running": Scene(Running, lambda: at_step(3), facts(committed(4), committed(5), committed(6))),
    "running, saving": Scene(
        Running, lambda: at_step(10), facts(part("w1", 10), part("w2", 10), committed(11))
    ),
    "pausing": Scene(
        Stopping, pausing, facts(committed(5, 2), fenced("w1", 5, 2), fenced("w2", 5, 2), part("w1", 5))
    ),
    "fenced": Scene(Stopping, broken, facts(fenced("w1", 4), fenced("w2", 4))),
    "finishing": Scene(Finishing, lambda: at_step(20, target_step=20), facts(part("w1", 20), part("w2", 20))),
}


@pytest.mark.parametrize("name", SCENES)
def test_fold_and_attach_equals_never_having_died(name: str) -> None:
    """R6: in each state, any part of what was said may be in the journal, because all of it is said again."""
    scene = SCENES[name]
    lived = scene.play()
    assert isinstance(lived.run.state, scene.state)
    said = scene.said(lived)
    for event in said:
        lived.tell(event)
    for size in range(len(said) + 1):
        for recorded in combinations(said, size):
            play = scene.play()
            for event in recorded:
                play.tell(event)
            generation = play.generation
            again = take_over(play)
            for worker in (*again.run.workers, *again.run.members.starting):
                for event in standing(
                    again, worker, *(each for each in said if getattr(each, "worker", "") == worker)
                ):
                    again.tell(event)
            assert alike(again.run) == alike(lived.run), [type(each).__name__ for each in recorded]
            assert again.run.incarnation == 2
            assert generation <= again.generation == lived.generation, (
                "no world ends because of a coordinator's death"
            )


@pytest.mark.parametrize("name", ["forming", "forming again", "pausing", "fenced"])
def test_whoever_does_not_answer_holds_nobody_up_for_ever(name: str) -> None:
    """Each subset of the workers is silent; the others go on without it, or the run waits for new ones."""
    members = SCENES[name].play().plan.members
    for size in range(1, len(members) + 1):
        for silent in combinations(members, size):
            again = take_over(SCENES[name].play())
            said = SCENES[name].said(again)
            loud = [worker for worker in again.run.workers if worker not in silent]
            for worker in loud:
                for event in standing(
                    again, worker, *(each for each in said if getattr(each, "worker", "") == worker)
                ):
                    again.tell(event)
            for _ in range(300):
                again.later(1.0)
                for fence in again.did(Fence):
                    for worker in set(fence.members) & set(loud):
                        again.answer(worker, again.run.version)
            assert not set(silent) & set(again.run.workers), (silent, again.run.state)
            assert again.run.plan is None or set(again.plan.members) <= set(loud)


@pytest.mark.parametrize("name", ["forming", "pausing", "fenced", "finishing"])
def test_without_the_answers_the_run_is_not_the_same(name: str) -> None:
    """The negative control: what was said to the dead coordinator is lost unless it is said again."""
    scene = SCENES[name]
    lived = scene.play()
    for event in scene.said(lived):
        lived.tell(event)
    assert alike(take_over(scene.play()).run) != alike(lived.run)


def test_what_was_decided_is_done_again() -> None:
    """Form, Go, Pause and Fence are sent again as the journal says; a member that has obeyed an order already
    passes it over.
    """
    assert isinstance(take_over(started(2)).did(Form)[0].plan.members, tuple)
    assert take_over(at_step(3)).deeds == ["Go"]
    again = take_over(pausing())
    assert again.deeds == ["Go", "Pause"] and again.did(Pause)[0].save
    assert take_over(broken()).did(Fence)[0].members == ("w1", "w2")


def test_a_settlement_is_said_again_before_the_next_plan() -> None:
    """A member that missed the settlement holds another version than the plan expects, and waits in the old
    generation.
    """
    play = forming_again()
    (decided,) = play.did(Settle)
    assert decided.outcome is not None and decided.outcome.step == 4
    again = take_over(play)
    assert again.deeds == ["Settle", "Form"]
    assert again.did(Settle) == [decided]
    reformed(again)
    assert again.generation == 2 and isinstance(again.run.state, Running)


def test_a_settlement_is_said_again_before_the_fence() -> None:
    """A member of the new generation is gone: the others answer what they hold once the old generation is
    settled.
    """
    again = take_over(forming_again(), "w2")
    assert again.deeds[:2] == ["Settle", "Fence"]
    assert again.did(Settle)[0].members == ("w1",) and again.did(Fence)[0].members == ("w1",)


def test_a_member_dies_with_the_coordinator() -> None:
    again = take_over(at_step(4, workers=3), "w2")
    assert isinstance(again.run.state, Stopping) and again.run.state.lost == ("w2",), (
        "its node's keeper lives, so it is certain"
    )
    again.answer("w1", Version(4, 1), saw=4)
    again.answer("w3", Version(4, 1))
    assert again.generation == 2 and again.plan.members == ("w1", "w3") and again.plan.incarnation == 2


def test_a_node_that_is_taken_for_dead_is_no_certain_end() -> None:
    again = folded(at_step(4, workers=3))
    again.tell(ev.Recovered(2, (WorkerId("w1"), WorkerId("w3")), (NodeId("n1"), NodeId("n3"))))
    assert (
        isinstance(again.run.state, Stopping)
        and again.run.state.expelled == ("w2",)
        and not again.run.state.lost
    )


def test_all_members_die_with_the_coordinator() -> None:
    """Their nodes live, so their deaths are certain and no lease is waited for."""
    again = take_over(at_step(10), "w1", "w2")
    assert isinstance(again.run.state, Waiting) and not again.run.workers


def test_a_keeper_dies_with_the_coordinator() -> None:
    play = started(2)
    again = folded(play)
    again.tell(ev.Recovered(2, tuple(again.run.workers), (NodeId("n2"),)))
    assert again.run.cluster.keepers == ("n2",)


def test_workers_that_were_asked_for_and_are_not_there_are_replaced_under_other_names() -> None:
    play = Play(rules(max_workers=2))
    play.tell(ev.Capacity(2))
    assert list(play.run.members.starting) == ["w1", "w2"]
    again = take_over(play, "w2")
    assert list(again.run.members.starting) == ["w1"]
    again.later(play.rules.grow_debounce_s)
    again.tell(ev.Capacity(1))
    assert list(again.run.members.starting) == ["w1", "w3"]


def test_workers_of_whom_the_journal_does_not_know_are_ended() -> None:
    """A decision that was not recorded started them, or one that was not performed sent them away.  Their
    names are not used again.
    """
    again = folded(at_step(3))
    again.tell(ev.Recovered(2, (WorkerId("w1"), WorkerId("w2"), WorkerId("w7")), again.run.cluster.keepers))
    assert again.did(Kill)[0].workers == ("w7",)
    assert again.run.members.next_worker == 8


def test_a_member_that_steps_proves_that_all_were_ready() -> None:
    """The order "go" is sent before it is durable, so the journal may end while the world still forms."""
    play = started(2)
    play.here("w1", "w2")
    again = take_over(play)
    again.tell(ev.Attached(WorkerId("w2"), again.plan, stepping=True))
    assert isinstance(again.run.state, Running)
    assert again.did(Go)[0].members == ("w1", "w2"), "the other one may not have heard it"
    again.steps(1, 3)
    assert again.run.step == 3


@pytest.mark.parametrize("scene", ["waiting", "running", "pausing", "fenced", "finishing"])
def test_a_member_of_a_later_generation_proves_that_the_journal_is_too_short(scene: str) -> None:
    """The greatest generation seen anywhere counts: it is fenced, and what its members hold says where the
    run stands.
    """
    again = take_over(SCENES[scene].play())
    plan = started(2).plan
    at = again.run.version
    later = replace(
        plan,
        generation=again.generation + 3,
        version=at,
        members=tuple(again.run.workers)[:2],
        lineage=again.run.history.lineage,
    )
    again.tell(ev.Attached(later.members[0], later, stepping=True))
    assert isinstance(again.run.state, Stopping) and again.generation == later.generation
    assert again.did(Fence)[0].generation == later.generation
    for worker in later.members:
        again.answer(worker, Version(at.step + 2, later.generation), saw=at.step + 2)
    assert again.run.history.lineage[-1] == (later.generation, at.step + 2), "what was committed there counts"
    if scene != "waiting" and again.run.plan is not None and not again.run.stop:
        assert again.generation == later.generation + 1 and again.plan.version == Version(
            at.step + 2, later.generation
        )


def test_a_journal_that_ends_before_the_members_joined() -> None:
    """Each worker says that it has joined before it says where it stands; w2 is heard before w1, and both
    answer the fence.
    """
    play = Play(rules(max_workers=2))
    play.tell(ev.Capacity(2))
    play.tell(ev.KeeperUp(NodeId("n1")))
    again = take_over(play)
    plan = replace(started(2).plan, store_node=NodeId("n1"))
    for worker in ("w2", "w1"):
        again.tell(ev.Joined(WorkerId(worker), NodeId("n1"), "cpu", CLASSES))
        again.tell(ev.Attached(WorkerId(worker), plan, stepping=True))
    assert isinstance(again.run.state, Stopping) and again.run.state.pending == plan.members
    for worker in ("w1", "w2"):
        again.answer(worker, Version(7, 1), saw=7)
    assert (
        again.generation == 2
        and again.plan.version == Version(7, 1)
        and set(again.plan.members) == {"w1", "w2"}
    )


def test_time_without_a_coordinator_is_nobodys_stall() -> None:
    play = at_step(3, stall_s=5.0)
    again = take_over(play)
    assert again.later(4.0) == ""
    assert isinstance(again.run.state, Running)
    again.later(2.0)
    assert isinstance(again.run.state, Stopping), "but after the take-over it counts again"


def test_deadlines_count_from_the_take_over() -> None:
    for play in (started(2), broken(), at_step(20, target_step=20)):
        again = take_over(play)
        assert again.run.state.deadline > again.now  # type: ignore[union-attr]


def test_leases_that_nobody_knows_of_are_waited_for() -> None:
    """The previous coordinator may have granted leases up to its last moment; if it was only cut off, it
    still acts for a while.
    """
    again = take_over(at_step(3))
    assert (
        again.run.watch.lease_until
        == again.now + again.rules.coordinator_lease_over_s + again.rules.lease_over_s
    )


def test_a_manifest_is_asked_for_again() -> None:
    """Keepers that are told again which saves are on their way report their saved shards once more."""
    play = at_step(10)
    play.tell(ev.ShardSaved(WorkerId("w1"), Version(10, 1)))
    play.tell(ev.ShardSaved(WorkerId("w2"), Version(10, 1)))
    assert play.did(CommitManifest)
    again = take_over(play)
    assert not again.did(CommitManifest)
    assert [save.version for save in again.did(Upload)[0].saves] == [Version(10, 1)]
    again.tell(ev.ShardSaved(WorkerId("w2"), Version(10, 1)))
    again.tell(ev.ShardSaved(WorkerId("w1"), Version(10, 1)))
    assert again.did(CommitManifest)
    again.tell(ev.Saved(Version(10, 1), "digest"))
    assert again.run.history.saved == (Version(10, 1),)


def test_an_incarnation_that_is_not_newer_is_refused() -> None:
    again = take_over(at_step(3))
    assert again.tell(ev.Recovered(2, (), ())).startswith("refused")
    assert list(again.run.workers) == ["w1", "w2"]


def test_a_run_that_was_over_lets_its_workers_leave() -> None:
    play = at_step(20, target_step=20)
    play.save(Version(20, 1), "w1", "w2")
    assert isinstance(play.run.state, Finished)
    again = take_over(play)
    assert again.did(Exit)[0].workers == ("w1", "w2")


def test_a_user_s_stop_outlives_the_coordinator() -> None:
    again = take_over(pausing())
    again.step(5, boundary=2)
    again.answer("w1", Version(5, 1))
    again.answer("w2", Version(5, 1))
    again.save(Version(5, 1), "w1", "w2")
    assert isinstance(again.run.state, Stopped)
