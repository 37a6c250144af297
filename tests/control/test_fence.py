"""Fence first, abort second: these tests check when a world may be left, and what becomes of the step that
broke.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.control import stopping
from elastic.control.evolve import evolve
from elastic.control.run import Forming, Running, Stopping
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import LayoutRule
from elastic.protocol.actions import Fence, Form, Kill, Settle
from elastic.protocol.events import Capacity, Fenced, Joined, Lost, Renewed, StepDone
from elastic.protocol.member import Member
from tests.control.play import CLASSES, Play, outcome, reformed, stepping

pytestmark = pytest.mark.fast


def test_fence_is_answered_before_anything_is_aborted() -> None:
    play = stepping(3)
    play.steps(1, 4)
    assert play.lose("w2") == "w2 is lost (its process died): stop generation 1 of 3 workers"
    assert play.last.actions == (Fence(1, (WorkerId("w1"), WorkerId("w3"))),)
    assert play.answer("w1", Version(4, 1), prepared=5) == ""
    assert play.last.actions == ()
    play.answer("w3", Version(4, 1), prepared=5)
    assert play.deeds == ["Settle", "Form"]
    assert play.last.durable


def test_without_evidence_a_prepared_step_is_dropped() -> None:
    play = stepping(3)
    play.steps(1, 4)
    play.lose("w2")
    play.answer("w1", Version(4, 1), prepared=5)
    reason = play.answer("w3", Version(4, 1), prepared=5)
    assert reason == (
        "nobody saw step 5 committed: it is dropped; form generation 2 of w1 and w3 (2×1) at step 4 (live)"
    )
    assert play.did(Settle) == [Settle(1, (WorkerId("w1"), WorkerId("w3")), None)]


def test_evidence_of_one_applied_makes_all_prepared_apply() -> None:
    play = stepping(3)
    play.steps(1, 4)
    play.lose("w2")
    play.answer("w1", Version(4, 1), prepared=5)
    reason = play.answer("w3", Version(5, 1), saw=5)
    assert reason == (
        "step 5 was committed: it is applied by w1 too; form generation 2 of w1 and w3 (2×1) at step 5 (live)"
    )
    assert play.did(Settle) == [Settle(1, (WorkerId("w1"), WorkerId("w3")), outcome(5, 1))]
    assert {(each.worker, each.version) for each in play.plan.holders} == {
        ("w1", Version(5, 1)),
        ("w3", Version(5, 1)),
    }


def test_the_word_of_the_dead_is_evidence() -> None:
    """World rank 0 reported the commit and died; its report comes after the news of its death."""
    play = stepping(3)
    play.steps(1, 4)
    play.lose("w1")
    assert play.tell(StepDone(WorkerId("w1"), 1, outcome(5, 1))) == ""
    play.answer("w2", Version(4, 1), prepared=5)
    reason = play.answer("w3", Version(4, 1), prepared=5)
    assert reason.startswith("step 5 was committed: it is applied by w2 and w3 too")
    assert play.run.version == Version(5, 1)


def test_a_commit_that_was_seen_but_not_begun_to_be_applied_is_evidence() -> None:
    play = stepping(2)
    play.steps(1, 4)
    play.broken("w1")
    play.answer("w1", Version(4, 1), prepared=5, saw=5)
    play.answer("w2", Version(4, 1), prepared=5)
    assert play.did(Settle) == [Settle(1, (WorkerId("w1"), WorkerId("w2")), outcome(5, 1))]


def test_who_failed_while_applying_holds_nothing() -> None:
    play = stepping(2)
    play.steps(1, 4)
    play.broken("w2", "device", "Traceback", "a sticky error")
    play.answer("w2", None)
    play.answer("w1", Version(5, 1), saw=5)
    assert play.did(Kill) == [Kill((WorkerId("w2"),), "its process is unusable")]
    assert [(each.worker, each.version) for each in play.plan.holders] == [("w1", Version(5, 1))]
    assert play.plan.members == ("w1",)


def test_the_silent_are_expelled_and_their_word_counts_no_more() -> None:
    play = stepping(3)
    play.steps(1, 4)
    play.lose("w2")
    play.answer("w1", Version(4, 1), prepared=5)
    reason = play.later(5.0)
    assert reason.startswith(
        "no answer to the fence of generation 1 within 5 s: expel w3; nobody saw step 5 committed: it is "
        "dropped"
    )
    assert play.deeds == ["Kill", "Settle", "Form"]
    assert play.did(Settle) == [Settle(1, (WorkerId("w1"),), None)]
    before = play.run
    late = play.tell(StepDone(WorkerId("w3"), 1, outcome(5, 1)))
    assert late == "refused: StepDone of w3 is of generation 1, but the run is at generation 2"
    assert play.run == before and play.last.actions == ()


def test_an_expelled_member_is_not_heard_while_others_are_still_asked() -> None:
    """The hanging member is found by its counters and killed at once; nobody knows whether the kill took
    effect.
    """
    play = stepping(3)
    play.steps(1, 4)
    for _ in range(4):
        play.now += 7.0
        for node, worker, collective in (("n1", "w1", 1), ("n2", "w2", 0), ("n3", "w3", 1)):
            play.beat(node, (worker, 5, 1, collective))
    assert isinstance(play.run.state, Stopping) and play.run.state.expelled == ("w2",)
    assert play.tell(StepDone(WorkerId("w2"), 1, outcome(5, 1))) == (
        "refused: StepDone of w2, which is lost or expelled"
    )
    assert play.run.version == Version(4, 1)


def test_when_nobody_answers_the_leases_are_waited_for() -> None:
    """A partition: nobody is known to be out, so a commit of generation 1 is possible until every lease has
    run out.
    """
    play = stepping(2, lease_s=60.0)
    play.steps(1, 4)
    reason = play.later(25.0)
    assert reason.startswith("no member moved for 25.0 s; no member is blamed")
    assert play.later(6.0) == "no worker of generation 1 answers: ask again until their leases have run out"
    assert play.deeds == ["Fence"]
    assert play.later(31.0).startswith("no worker of generation 1 answers"), (
        "61 s: a member's clock may be a twentieth slower"
    )
    assert isinstance(play.run.state, Stopping) and play.run.workers
    reason = play.later(6.0)
    assert reason.startswith(
        "no answer to the fence of generation 1 within 5 s: expel w1 and w2; wait: 0 workers"
    )
    assert play.deeds == ["Kill"]


def test_a_node_that_is_only_taken_for_dead_is_no_certain_end() -> None:
    """R10: members behind a network cut may go on stepping; if nobody else can be asked, the coordinator
    waits for their leases to end.
    """
    play = stepping(2, lease_s=60.0)
    play.steps(1, 4)
    for worker in ("w1", "w2"):
        play.tell(Lost(WorkerId(worker), "its node died", certain=False))
    play.tell(Capacity(1))
    play.tell(Joined(WorkerId("w3"), NodeId("n1"), "cpu", CLASSES))
    play.later(60.0)
    assert isinstance(play.run.state, Stopping) and set(play.run.state.expelled) == {"w1", "w2"}
    play.later(3.0)
    assert play.deeds == ["Form"]


def test_a_node_that_is_taken_for_dead_delays_nobody_who_can_be_asked() -> None:
    """A commit needs all members, so the answer of one is enough."""
    play = stepping(2, lease_s=60.0)
    play.steps(1, 4)
    play.tell(Lost(WorkerId("w1"), "its node died", certain=False))
    play.answer("w2", Version(4, 1))
    assert play.deeds == ["Settle", "Form"]


def test_one_certain_end_is_enough_for_the_next_generation() -> None:
    """A commit needs all members: once one of generation 1 is fenced, the silent ones cannot commit, lease or
    not.
    """
    play = stepping(2)
    play.steps(1, 4)
    play.later(25.0)
    play.answer("w1", Version(4, 1), prepared=5)
    play.later(5.0)
    assert play.deeds == ["Kill", "Settle", "Form"]
    assert play.run.watch.lease_until == 0.0


def test_a_single_member_that_is_killed_must_be_seen_dead() -> None:
    """Otherwise its world, of which it is the only member, could go on committing beside the next one."""
    play = stepping(1)
    play.steps(1, 4)
    for _ in range(4):
        play.now += 7.0
        play.beat("n1", ("w1", 5, 1, 0))
    assert play.did(Kill) and isinstance(play.run.state, Stopping)
    assert play.later(10.0) == ""
    assert play.lose("w1").startswith("w1 has ended (its process died); wait:")


@pytest.mark.parametrize("known", ["lost", "answered"])
def test_nothing_waits_once_everybody_is_accounted_for(known: str) -> None:
    """Promise 5: no timeout is spent on learning what some process already knows."""
    play = stepping(2)
    play.steps(1, 4)
    play.lose("w1")
    play.lose("w2") if known == "lost" else play.answer("w2", Version(4, 1))
    assert not isinstance(play.run.state, Stopping)
    assert play.now == 0.0


def test_no_rollback_while_every_slice_is_held() -> None:
    """Layout 2×2 loses half of one replica; the other replica and the remaining half go on at the same step."""
    play = stepping(4, layout=LayoutRule(None, None, 2, "all"))
    play.steps(1, 6)
    assert str(play.plan.layout) == "2×2"
    play.lose("w1")
    for worker in ("w2", "w3", "w4"):
        play.answer(worker, Version(6, 1))
    assert play.last.reason == "form generation 2 of w3, w2 and w4 (1×3) at step 6 (live)", (
        "in the order of their rows"
    )
    assert play.run.version == Version(6, 1)


def test_a_lost_slice_is_taken_from_the_bucket_and_the_abandoned_steps_are_named() -> None:
    """Layout 1×3 loses a third of the state, so all go back to the newest version in the bucket; versions are
    never mixed.
    """
    play = stepping(3, layout=LayoutRule(1, None, 1, "all"), save_every=5)
    play.steps(1, 5)
    play.save(Version(5, 1), "w1", "w2", "w3")
    play.steps(6, 7)
    play.lose("w2")
    play.answer("w1", Version(7, 1))
    reason = play.answer("w3", Version(7, 1))
    assert reason == (
        "form generation 2 of w1 and w3 (1×2) at step 5 (bucket), abandons steps 6–7 of generation 1"
    )
    assert (play.plan.version, play.plan.tier, play.plan.holders) == (Version(5, 1), "bucket", ())
    assert play.run.history.lineage == ((1, 5),)


def test_a_step_done_again_is_another_version() -> None:
    play = stepping(3, layout=LayoutRule(1, None, 1, "all"), save_every=5)
    play.steps(1, 5)
    play.save(Version(5, 1), "w1", "w2", "w3")
    play.steps(6, 7)
    play.lose("w2")
    play.answer("w1", Version(7, 1))
    play.answer("w3", Version(7, 1))
    reformed(play)
    play.steps(6, 8)
    assert play.run.history.lineage == ((1, 5), (2, 8))
    play.lose("w3")
    play.answer("w1", Version(8, 2))
    assert "at step 5 (bucket), abandons steps 6–8 of generation 2" in play.last.reason


def test_words_of_older_generations_change_nothing() -> None:
    """Promise 3: whoever receives a message of another generation refuses it."""
    play = stepping(3)
    play.steps(1, 4)
    play.lose("w2")
    play.answer("w1", Version(4, 1))
    play.answer("w3", Version(4, 1))
    assert isinstance(play.run.state, Forming) and play.generation == 2
    before = play.run
    for event in (
        StepDone(WorkerId("w1"), 1, outcome(5, 1)),
        Fenced(WorkerId("w1"), 1, (), None, (outcome(5, 1),)),
        StepDone(WorkerId("w1"), 3, outcome(5, 3)),
    ):
        reason = play.tell(event)
        assert reason.startswith("refused: ") and "is of generation" in reason
        assert play.run is before and play.last.actions == ()


def test_a_second_answer_changes_nothing() -> None:
    play = stepping(3)
    play.lose("w2")
    play.answer("w1", Version(0, 0))
    before = play.run
    assert play.answer("w1", None) == "refused: w1 has answered already"
    assert play.run is before


def test_a_fenced_member_ends_the_generation_whoever_fenced_it() -> None:
    play = stepping(2)
    play.steps(1, 4)
    assert play.answer("w2", Version(4, 1)) == "w2 has left generation 1: stop generation 1 of 2 workers"
    assert isinstance(play.run.state, Stopping) and play.run.state.pending == ("w1",)


def test_no_lease_is_granted_on_a_generation_that_is_being_stopped_but_a_granted_one_counts() -> None:
    """The grant may be on its way while the fence is decided: the member may act on this lease, so the
    coordinator waits for its end.
    """
    play = stepping(2, lease_s=60.0)
    play.now = 10.0
    assert play.run.grants_lease(1) and not play.run.grants_lease(2)
    assert play.tell(Renewed(WorkerId("w1"), 1)) == "" and play.run.watch.lease_until == 73.0
    assert play.later(15.0).startswith("no member moved for 25.0 s")
    assert not play.run.grants_lease(1)
    play.tell(Renewed(WorkerId("w1"), 1))
    assert play.run.watch.lease_until == 88.0
    play.later(62.0)
    assert isinstance(play.run.state, Stopping), "nobody answered: the granted lease has a second to run"
    play.later(6.0)
    assert not isinstance(play.run.state, Stopping)


def test_generations_only_grow_and_each_is_formed_once() -> None:
    play, formed = stepping(3), [1]
    for step, lost in ((5, "w1"), (9, "w2")):
        play.steps(play.run.step + 1, step)
        play.lose(lost)
        for worker in play.pending:
            play.answer(worker, play.run.version)
        formed += [action.plan.generation for action in play.did(Form)]
        reformed(play)
    assert formed == [1, 2, 3]
    assert play.run.history.lineage == ((1, 5), (2, 9))


def test_an_answer_that_arrives_after_its_sender_died_is_evidence() -> None:
    """All members that prepared the commit which the dead member saw apply it; the state that it held is
    gone.
    """
    play = stepping(2)
    play.steps(1, 4)
    play.broken("w2")
    play.lose("w1")
    play.answer("w1", Version(5, 1), saw=5)
    assert play.run.step == 5 and "w1" not in play.run.workers
    play.answer("w2", Version(4, 1), prepared=5)
    assert play.did(Settle)[0].outcome == outcome(5, 1)


@pytest.mark.parametrize("heeds", [1, 2])
def test_an_answer_that_was_meant_for_an_earlier_coordinator_is_evidence_and_no_answer(heeds: int) -> None:
    """It may be older than the settlement that its worker has applied since, so what it holds says nothing;
    its commits are facts.  The control is an answer to the present coordinator."""
    play = stepping(3)
    play.steps(1, 4)
    play.lose("w2")
    play.run = evolve(play.run, incarnation=2)
    answer = Fenced(
        WorkerId("w1"), 1, (play.shard("w1", Version(5, 1)),), None, (outcome(5, 1),), heeds=heeds
    )
    play.tell(answer)
    assert play.run.step == 5
    assert play.pending == (("w1", "w3") if heeds == 1 else ("w3",))
    assert bool(play.run.workers[WorkerId("w1")].holdings) is (heeds == 2)
    play.tell(replace(answer, heeds=2))
    play.answer("w3", Version(5, 1))
    assert play.deeds == ["Settle", "Form"] and play.plan.version == Version(5, 1)


def test_an_answer_to_an_earlier_coordinator_stops_no_world() -> None:
    play = stepping(2)
    play.run = evolve(play.run, incarnation=2)
    play.tell(Fenced(WorkerId("w1"), 1, (), None, (outcome(1, 1),), heeds=1))
    assert isinstance(play.run.state, Running) and play.run.step == 1
    play.tell(Fenced(WorkerId("w1"), 1, (), None, (outcome(1, 1),), heeds=2))
    assert isinstance(play.run.state, Stopping), "the control"


# ---- N1: in a large world only some answers bring the commits


def brief(play: Play, worker: str, at: Version, prepared: int | None = None, saw: int | None = None) -> str:
    """The worker answers in brief: it only names the newest commit that it has seen."""
    seen = Version(saw, play.generation) if saw else None
    return play.tell(
        Fenced(WorkerId(worker), play.generation, (play.shard(worker, at),), prepared, (), seen, whole=False)
    )


def only_one_has_seen_a_commit() -> Play:
    """Brings three members to step 5: only w3 has seen its commit and lives, w1 has prepared it, and w2 is
    gone.
    """
    play = stepping(3)
    play.steps(1, 4)
    play.lose("w2")
    brief(play, "w1", Version(4, 1), prepared=5)
    brief(play, "w3", Version(5, 1), saw=5)
    return play


def test_n1_who_alone_has_seen_a_commit_is_asked_for_it() -> None:
    play = only_one_has_seen_a_commit()
    assert play.last.actions == (Fence(1, (WorkerId("w3"),), whole=True),) and play.pending == ("w3",)
    assert play.answer("w3", Version(5, 1), saw=5).startswith(
        "step 5 was committed: it is applied by w1 too; form generation 2"
    )


def test_n1_the_control_asks_nobody_and_loses_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(stopping, "_knows_more", lambda run, state: None)
    play = only_one_has_seen_a_commit()
    assert play.run.version == Version(4, 1) and isinstance(play.run.state, Forming)


def test_n1_who_dies_before_it_brings_the_commit_proves_nothing() -> None:
    """No other member has seen step 5, so it is dropped, as if the dead one had not answered at all."""
    play = only_one_has_seen_a_commit()
    assert play.lose("w3").startswith(
        "w3 is lost (its process died); nobody saw step 5 committed: it is dropped"
    )


def test_n1_nobody_is_asked_for_what_is_known() -> None:
    """World rank 0 has reported step 5, or another member has brought it."""
    play = stepping(3)
    play.steps(1, 5)
    play.lose("w2")
    brief(play, "w1", Version(4, 1), prepared=5, saw=4)
    brief(play, "w3", Version(5, 1), saw=5)
    assert play.deeds == ["Settle", "Form"]


@pytest.mark.parametrize(("members", "bring"), [(3, 3), (4, 2), (31, 3), (160, 2), (1024, 2)])
def test_n1_the_number_of_answers_that_bring_commits_is_bounded(members: int, bring: int) -> None:
    play = stepping(members, layout=LayoutRule(None, 1, 1, "all"))
    answers = []
    for name in play.plan.members:
        member = Member(name)
        assert member.form(play.plan) and member.enter(member.waiting or play.plan)
        member.outcomes.append(outcome(1, 1))
        answers.append(member.fence(1))
    assert sum(bool(each and each.outcomes) for each in answers) == bring
    assert {each.newest_seen for each in answers if each} == {Version(1, 1)}
    asked = member.fence(1, whole=True)
    assert asked is not None and asked.outcomes == (outcome(1, 1),) and asked.whole
