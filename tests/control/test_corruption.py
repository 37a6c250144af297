"""R16: replicas of the state that hold different bits are found before a manifest is written, and who is wrong
is named.
"""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from elastic.control.corruption import LIMIT, outvoted, refuted
from elastic.control.run import Failed, Finishing, Forming, Running, Stopped, Stopping, Vote, Waiting
from elastic.ids import NodeId, Version, WorkerId
from elastic.journal import codec
from elastic.plan.layout import LayoutRule
from elastic.plan.transfer import Holding
from elastic.protocol import events as ev
from elastic.protocol.actions import CommitManifest, Fence, Kill
from elastic.protocol.commit_record import SAVE_AND_PAUSE
from tests.control.play import Play, reformed, stepping

pytestmark = pytest.mark.fast
W1, W2, W3 = (WorkerId(f"w{number}") for number in (1, 2, 3))


def told(play: Play, step: int, **digests: str) -> str:
    """The keepers report the parts of the save of ``step``, with the digests of the copies."""
    version = Version(step, play.generation)
    said = [play.tell(ev.ShardSaved(WorkerId(worker), version, 0, each)) for worker, each in digests.items()]
    return said[-1]


def agreed(play: Play, step: int, *workers: str) -> None:
    """The save of ``step`` becomes a checkpoint."""
    told(play, step, **dict.fromkeys(workers, f"right {step}"))
    assert play.did(CommitManifest)
    play.tell(ev.Saved(Version(step, play.generation), "digest"))


def redone(play: Play, at: int, to: int, *survivors: str) -> None:
    """The survivors answer the fence with the newest state, go back to step ``at``, and step again up to
    ``to``.
    """
    newest = play.run.version
    for worker in survivors:
        play.answer(worker, newest)
    play.later(play.rules.fence_s)  # keepers that do not answer what they hold
    assert isinstance(play.run.state, Forming) and play.plan.version.step == at, play.run.state
    reformed(play)
    play.steps(at + 1, to)


def disputed(workers: int = 2, **digests: str) -> Play:
    """A run with a checkpoint of step 3 whose replicas then differ at step 6, while step 7 is made."""
    play = stepping(workers, save_every=3, copy_every=1)
    play.steps(1, 3)
    agreed(play, 3, *(f"w{number}" for number in range(1, workers + 1)))
    play.steps(4, 7)
    told(play, 6, **digests)
    return play


def test_r16_of_three_replicas_the_one_that_differs_is_replaced() -> None:
    """The save becomes no checkpoint, and nobody goes on from the newer state that the two others hold."""
    play = disputed(3, w1="a", w2="b", w3="a")
    said = "w2 held other bits after step 6 than the other replicas: the run goes back to step 3, the newest"
    assert said in play.last.reason and not play.did(CommitManifest) and play.last.durable
    assert play.did(Fence) and play.run.saves.pending == ()
    assert play.tell(ev.Saved(Version(6, 1), "late")).startswith("refused")
    for worker in (W1, W2):
        play.answer(worker, Version(7, 1))
    play.answer(W3, Version(7, 1))
    assert [action.workers for action in play.did(Kill)] == [(W2,)]
    play.later(play.rules.fence_s)
    assert (play.plan.members, play.plan.version, play.plan.tier) == ((W1, W3), Version(3, 1), "bucket")
    assert "abandons steps 4–7 of generation 1" in play.last.reason
    reformed(play)
    play.steps(4, 6)
    assert play.run.version == Version(6, 2) and play.run.history.trusted is None
    told(play, 6, w1="c", w3="c")
    assert play.did(CommitManifest) and play.run.history.dispute is None


@pytest.mark.parametrize("keeper", ["", "n1"])
def test_r16_state_after_the_last_agreed_step_counts_nowhere(keeper: str) -> None:
    """A world begins with no later step that a keeper lists or a member holds, but with an earlier one.  The
    control: without the dispute the newest counts.
    """
    for digest, begins in (("b", 3), ("a", 7)):
        play = disputed(2, w1="a", w2=digest)
        if digest == "a":
            play.broken("w1")
        held = {
            at: tuple(Holding(W1, Version(at, 1), play.shard("w1", Version(at, 1)).cell, keeper) for _ in "1")
            for at in (3, 7)
        }
        for worker, node in (("w1", "n1"), ("w2", "n2")):
            play.answer(worker, None if keeper else Version(7, 1))
            play.tell(ev.Kept(NodeId(node), 1, (*held[3], *held[7]) if keeper == node else ()))
        play.later(0.1)
        expected = Version(begins, 1), "host" if keeper else "live" if begins == 7 else "bucket"
        assert (play.plan.version, play.plan.tier) == expected


def test_r16_of_two_replicas_the_steps_done_again_tell_who_was_wrong() -> None:
    play = disputed(w1="a", w2="b")
    assert "the replicas w1 and w2 hold different bits after step 6, and nobody knows which are right" in (
        play.last.reason
    )
    redone(play, 3, 6, "w1", "w2")
    said = told(play, 6, w1="a", w2="a")
    assert play.did(CommitManifest), "the save is right, so it counts"
    assert "w2 held other bits after step 6 than the same steps gave when they were done again" in said
    assert isinstance(play.run.state, Stopping) and play.run.workers[W2].unfit
    assert not play.run.workers[W1].unfit and play.run.history.dispute is None
    play.tell(ev.Saved(Version(6, 2), "digest"))
    for worker in ("w1", "w2"):
        play.answer(worker, Version(6, 2))
    assert (play.plan.members, play.plan.version) == ((W1,), Version(6, 2)), "no step is lost for that"


def test_r16_a_replica_that_is_wrong_again_differs_from_itself() -> None:
    play = disputed(w1="a", w2="b")
    redone(play, 3, 6, "w1", "w2")
    said = told(play, 6, w1="a", w2="c")
    assert "w2 held other bits after step 6 than before, or than the other replicas: the run goes" in said
    assert play.run.workers[W2].unfit and not play.run.workers[W1].unfit
    assert play.run.history.trusted == 3


@pytest.mark.parametrize("again", ["c", "a later step"])
def test_r16_it_is_said_if_nobody_can_know_who_was_wrong(again: str) -> None:
    """Wrong weights had spread to the other replica before the save, or step 6 is not saved again."""
    play = disputed(w1="a", w2="b")
    redone(play, 3, 9, "w1", "w2")
    step = 6 if again == "c" else 9
    if step == 9:
        play.tell(ev.SaveFailed(Version(6, 2), "disk full"))
        play.steps(10, 12)
        step = 12
    said = told(play, step, w1="c", w2="c")
    assert f"agree again after step {step}; which of w1 and w2 was wrong after step 6 is not known" in said
    assert play.did(CommitManifest) and isinstance(play.run.state, Running)
    assert not any(known.unfit for known in play.run.workers.values())


def test_r16_the_second_time_on_one_node_the_node_is_refused() -> None:
    play = disputed(3, w1="a", w2="b", w3="a")
    assert play.run.cluster.refused == {} and play.run.cluster.replaced == ((NodeId("n2"), 1),)
    for worker in ("w1", "w2", "w3"):
        play.answer(worker, Version(7, 1))
    play.tell(ev.Capacity(1))
    play.tell(ev.Joined(WorkerId("w4"), NodeId("n2"), "cpu", play.run.members.classes))
    play.later(play.rules.fence_s)
    reformed(play)
    play.steps(4, 6)
    assert play.plan.members == (W1, W3, WorkerId("w4"))
    told(play, 6, w1="c", w3="c", w4="d")
    assert "not for the first time on that node" in play.run.cluster.refused[NodeId("n2")].why


def test_r16_replicas_that_never_agree_end_the_run() -> None:
    """The code is to blame more likely than a machine.  The control: an equal save counts anew."""
    for equal in (False, True):
        play = disputed(w1="a1", w2="b1")
        for times in range(2, LIMIT + 1):
            redone(play, 3, 6, "w1", "w2")
            if equal:
                agreed(play, 6, "w1", "w2")
                assert play.run.history.dispute is None
                break
            told(play, 6, w1=f"a{times}", w2=f"b{times}")
        if equal:
            continue
        for worker in ("w1", "w2"):
            play.answer(worker, Version(6, play.generation))
        assert isinstance(play.run.state, Failed)
        assert f"replicas of the state differed in {LIMIT} saves in a row, the last of step 6" in (
            play.run.state.reason
        )


def test_r16_what_is_compared() -> None:
    """Only members with equal cells are compared, only if the job asks for it, and only what is known."""
    shards = LayoutRule(1, 2, 2, "all")
    for changes, digests, differs in (
        ({}, ("a", "b"), True),
        ({"compare": False}, ("a", "b"), False),
        ({"layout": shards}, ("a", "b"), False),
        ({}, ("a", ""), False),
        ({}, ("", ""), False),
    ):
        play = stepping(2, save_every=3, **changes)
        play.steps(1, 3)
        told(play, 3, w1=digests[0], w2=digests[1])
        assert bool(play.did(CommitManifest)) is not differs
        assert isinstance(play.run.state, Stopping) is differs


def test_r16_in_every_state() -> None:
    """While the run waits or stops, finishes, or a next world forms, the state is given up all the same."""
    play = stepping(2, save_every=3)
    play.steps(1, 3)
    agreed(play, 3, "w1", "w2")
    play.steps(4, 6)
    play.broken("w1")
    play.answer("w1", Version(6, 1))
    told(play, 6, w1="a", w2="b")
    assert isinstance(play.run.state, Stopping)
    play.answer("w2", Version(6, 1))
    assert isinstance(play.run.state, Forming) and play.plan.version == Version(3, 1)

    play = stepping(2, save_every=3)
    play.steps(1, 6)
    play.broken("w1")
    for worker in ("w1", "w2"):
        play.answer(worker, Version(6, 1))
    assert isinstance(play.run.state, Forming) and play.plan.version == Version(6, 1)
    told_of(play, Version(6, 1), w1="a", w2="b")
    assert isinstance(play.run.state, Stopping)
    for worker in ("w1", "w2"):
        play.answer(worker, Version(6, 1))
    assert isinstance(play.run.state, Forming) and play.plan.version == Version(0, 0)

    play = stepping(2, save_every=3, target_step=6)
    play.steps(1, 3)
    agreed(play, 3, "w1", "w2")
    play.steps(4, 6)
    assert isinstance(play.run.state, Finishing)
    told(play, 6, w1="a", w2="b")
    redone(play, 3, 6, "w1", "w2")
    assert isinstance(play.run.state, Finishing)
    told(play, 6, w1="a", w2="a")
    play.tell(ev.Saved(Version(6, 2), "digest"))
    assert play.last.reason.endswith("finished at step 6")

    play = stepping(3, save_every=3, min_workers=3)
    play.steps(1, 3)
    for worker in ("w1", "w2", "w3"):
        play.lose(worker)
    assert isinstance(play.run.state, Waiting | Stopping)
    told_of(play, Version(3, 1), w1="a", w2="b", w3="a")
    assert play.run.history.trusted == 0 and play.run.saves.pending == ()


def told_of(play: Play, version: Version, **digests: str) -> None:
    for worker, each in digests.items():
        play.tell(ev.ShardSaved(WorkerId(worker), version, 0, each))


def test_r16_what_a_world_saves_that_has_not_heard_of_it_does_not_count() -> None:
    """Its replicas may agree on state that comes of wrong gradients.  The control: without the dispute it
    counts.
    """
    for digest, counts in (("b", False), ("a", True)):
        play = stepping(3, save_every=3)
        play.steps(1, 5)
        play.tell(ev.StopRequested("Ctrl-C"))
        play.step(6)
        told(play, 6, w1="a", w2=digest, w3="a")
        assert isinstance(play.run.state, Stopping) and play.run.state.planned is counts
        play.steps(7, 9)
        told(play, 9, w1="c", w2="c", w3="c")
        assert bool(play.did(CommitManifest)) is counts


def test_r16_a_run_that_is_asked_to_stop_stops_without_the_save() -> None:
    play = stepping(2, save_every=3)
    play.steps(1, 3)
    agreed(play, 3, "w1", "w2")
    play.tell(ev.StopRequested("Ctrl-C"))
    play.step(4, SAVE_AND_PAUSE)
    for worker in ("w1", "w2"):
        play.answer(worker, Version(4, 1))
    told(play, 4, w1="a", w2="b")
    assert isinstance(play.run.state, Stopped)
    assert play.last.reason.endswith("resumes from step 3; steps 4–4 are not saved")


def test_the_votes() -> None:
    """The right ones are counted by hand."""

    def votes(*digests: str, cell: str = "x") -> list[Vote]:
        named = enumerate(digests, 1)
        return [Vote(WorkerId(f"w{n}"), NodeId(f"n{n}"), cell, each) for n, each in named]

    def who(found: tuple[Vote, ...]) -> list[str]:
        return [vote.worker for vote in found]

    assert who(outvoted(votes("a", "b"))) == who(outvoted(votes("a", "b", "c"))) == []
    assert who(outvoted(votes("a", "b", "a", "b"))) == []
    assert who(outvoted(votes("a", "b", "a", "c"))) == ["w2", "w4"]
    assert who(outvoted(votes("a", "c"), votes("a", "b"))) == ["w2"]
    assert who(outvoted(votes("a", "c"), votes("a", "b", cell="y"))) == []
    assert who(outvoted(votes("c", "d"), votes("a", "b"))) == []
    assert who(outvoted([*votes("a", "a"), *votes("b", "c", cell="y")])) == []
    assert who(refuted(votes("a", "a"), votes("a", "b"))) == ["w2"]
    assert who(refuted(votes("c", "c"), votes("a", "b"))) == []
    assert who(refuted(votes("a", "a", cell="y"), votes("a", "b"))) == []


def test_a_dispute_outlives_its_coordinator() -> None:
    """The journal has it, and writes nothing of it in other runs."""
    play = disputed(w1="a", w2="b")
    there = json.loads(json.dumps(codec.snapshot(play.run)))
    assert codec.decode_run(there["run"]) == play.run
    assert play.run.history.dispute is not None and len(play.run.history.dispute.votes) == 2
    quiet = codec.encode(stepping(2).run.history)
    assert not {"trusted", "dispute"} & quiet.keys()
    event = ev.ShardSaved(W1, Version(3, 1), 0, "a")
    assert codec.decode_event(codec.encode(event)) == event


def test_no_run_goes_back_further_each_time() -> None:
    """The steps that are trusted never become fewer."""
    play = disputed(w1="a1", w2="b1")
    trusted = [play.run.history.trusted]
    redone(play, 3, 6, "w1", "w2")
    told(play, 6, w1="a2", w2="b2")
    trusted.append(play.run.history.trusted)
    assert all(one == other == 3 for one, other in pairwise(trusted))
