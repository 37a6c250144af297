"""These tests check which nodes and workers may be members (R22, U8, U11): a node that differs is refused
once, by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.control import membership
from elastic.control.decision import Decision
from elastic.control.run import Failed, Forming, Running, Waiting
from elastic.control.seating import candidates
from elastic.ids import NodeId, Version, WorkerId
from elastic.journal.codec import changes, decode_run, encode
from elastic.protocol import events as ev
from elastic.protocol.actions import Kill, StartWorkers
from elastic.protocol.builds import Build, difference
from storage.slices import Tensor
from tests.control.play import CLASSES, Play, but, reformed, rules, stepping
from tests.support.cells import classes

pytestmark = pytest.mark.fast

REFERENCE = Build(
    "node aa (head, 10.0.0.1)", "0.1.0 (sources 11)", "3.11", "2.13.0", "2.60.0", "mine 22", "tokens-33"
)
THERE = replace(REFERENCE, host="b, 10.0.0.2")
CHECKED = "; the job was checked on node aa (head, 10.0.0.1)"
OLD, NEW = "cpu torch-2.11", "cpu torch-2.13"


def begun(slots: int = 2, **changes: Any) -> Play:
    """Workers are being started on nodes that are in order; the job was checked with ``REFERENCE``."""
    play = Play(rules(max_workers=2, **changes))
    play.run = but(play.run, "members", reference=REFERENCE)
    for number in (1, 2):
        play.tell(ev.NodeFound(NodeId(f"n{number}")))
        play.tell(ev.KeeperUp(NodeId(f"n{number}")))
    play.tell(ev.Capacity(slots))
    return play


def joins(
    play: Play,
    worker: str,
    node: str,
    kind: str = NEW,
    build: Build = THERE,
    state: tuple[Tensor, ...] = CLASSES,
) -> str:
    return play.tell(ev.Joined(WorkerId(worker), NodeId(node), kind, state, build))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            {"elastic": "0.1.0 (sources 12)"},
            "Elastic is 0.1.0 (sources 12) on this node and 0.1.0 (sources 11) on node aa (head, 10.0.0.1), ",
        ),
        (
            {"python": "3.12"},
            (
                "Python is 3.12 on this node and 3.11 on node aa (head, 10.0.0.1), where the job was checked; use "
                "one Python"
            ),
        ),
        ({"torch": "2.11.0"}, "torch is 2.11.0 on this node and 2.13.0 on node aa"),
        ({"ray": "2.59.0"}, "Ray is 2.59.0 on this node and 2.60.0 on node aa"),
        ({"code": "mine 23"}, "the code that the job names is mine 23 on this node and mine 22 on node aa"),
        ({"data": "tokens-34"}, "the data's fingerprint is tokens-34 on this node and tokens-33 on node aa"),
    ],
)
def test_whoever_is_made_of_something_else_is_named(other: dict[str, str], said: str) -> None:
    """U8, U11: the sentence names the node, what differs, both values and the fix; the worker is killed
    before any world forms.
    """
    play = begun()
    joins(play, "w1", "n1")
    reason = joins(play, "w2", "n2", build=replace(THERE, **other))
    sentence = reason.removeprefix("node n2 is refused: ")
    assert (
        sentence.startswith("w2 on node n2 (b, 10.0.0.2) cannot be a member: ")
        and said in sentence
        and "; " in sentence
    )
    assert Kill((WorkerId("w2"),), "its node is refused") in play.last.actions
    assert "w2" not in play.run.workers and list(play.run.cluster.refused) == ["n2"]


def test_what_nobody_names_is_not_compared() -> None:
    assert difference(Build(), REFERENCE, True) is None
    assert difference(REFERENCE, Build(), True) is None
    assert difference(THERE, REFERENCE, True) is None


def test_a_refused_node_gets_no_worker_again() -> None:
    """It costs one start and one sentence; the next worker is asked for elsewhere, and one that was on its
    way there is killed.
    """
    play = begun(min_workers=1)
    joins(play, "w1", "n1")
    joins(play, "w2", "n2", build=replace(THERE, code="mine 23"))
    assert isinstance(play.run.state, Forming), "the others go on without it"
    reformed(play)
    assert play.tell(ev.Capacity(1)) == "", "not at once"
    play.later(2.0)
    play.tell(ev.Capacity(1))
    assert play.did(StartWorkers) == [] and play.run.members.starting, "asked for by the tick before"
    (again,) = play.run.members.starting
    reason = joins(play, again, "n2")
    assert reason == "" and play.did(Kill) == [Kill((again,), "its node is refused")]
    play.later(2.0)
    play.tell(ev.Capacity(1))
    (last,) = play.run.members.starting
    assert last != again
    assert joins(play, last, "n1").startswith(f"{last} joined on node n1; grow")
    assert isinstance(play.plan.members, tuple) and play.run.cluster.refused.keys() == {"n2"}


def test_starts_avoid_refused_nodes() -> None:
    play = begun(slots=0)
    play.tell(ev.NodeRefused(NodeId("n2"), "node n2 sees another bucket"))
    play.later(2.0)
    play.tell(ev.Capacity(1))
    assert play.did(StartWorkers) == [StartWorkers((WorkerId("w1"),), (NodeId("n2"),))]


def test_a_run_whose_nodes_are_all_refused_fails_by_name() -> None:
    """U8: if no other worker can come, the run fails after 10 s, which gives others a moment, and not after
    ``wait_s``.
    """
    play = begun(min_workers=2)
    joins(play, "w1", "n1")
    joins(play, "w2", "n2", build=replace(THERE, ray="2.59.0"))
    play.tell(ev.Capacity(0))
    assert play.later(9.0) == "" and isinstance(play.run.state, Waiting)
    reason = play.later(1.0)
    assert reason.startswith(
        "no node has room for another worker that the run can use: 1 worker of at least 2; w2 on node "
        "n2 (b, 10.0.0.2) cannot be"
    )
    assert "Ray is 2.59.0 on this node" in reason and isinstance(play.run.state, Failed)


def test_a_new_coordinator_hears_of_room_before_it_gives_up() -> None:
    """The run has waited long enough already, but the coordinator that takes over does not know of the room
    that came meanwhile (simulated seed 284821).  The control: no room comes.
    """
    ends = list[type]()
    for slots in (1, 0):
        play = begun(min_workers=2)
        joins(play, "w1", "n1")
        joins(play, "w2", "n2", build=replace(THERE, ray="2.59.0"))
        play.tell(ev.Capacity(0))
        play.now += 60.0
        play.tell(ev.Recovered(2, ("w1",), ("n1", "n2")))
        play.later(9.0)
        assert isinstance(play.run.state, Waiting)
        play.tell(ev.Capacity(slots))
        play.later(1.0)
        ends.append(type(play.run.state))
    assert ends == [Waiting, Failed]


@pytest.mark.parametrize("faults", [(True, True), (True, False), (False,)], ids=str)
def test_a_run_that_no_node_can_do_ends_with_an_error_of_the_job(faults: tuple[bool, ...]) -> None:
    """If it is the job that asks for too much on each of them.  The controls: a node that is refused for
    another reason.
    """
    play = begun(min_workers=1)
    for number, fault in enumerate(faults, 1):
        said = play.tell(ev.NodeRefused(NodeId(f"n{number}"), f"n{number} lacks it", by_job=fault))
        refused = f"node n{number} is refused"
        assert said == (
            f"n{number} lacks it{CHECKED}; {refused}"
            if fault
            else (f"{refused}: n{number} lacks it{CHECKED}")
        ), "its own come first"
    for worker in [*play.run.members.starting]:
        assert play.tell(ev.StartFailed(worker, "its node is refused")) == (
            f"{worker} did not start (its node is refused)"
        )
    play.tell(ev.Capacity(0))
    play.later(11.0)
    assert isinstance(play.run.state, Failed)
    assert "n1 lacks it" in play.run.state.reason
    assert play.run.state.reason.startswith(
        "n1 lacks it" if all(faults) else "no node has room for another worker"
    ), "its own come first"
    assert play.run.state.job_error == (f"n1 lacks it{CHECKED}; n2 lacks it{CHECKED}" if all(faults) else "")


@pytest.mark.parametrize("by_job", [True, False])
def test_data_that_a_node_cannot_open_is_an_error_of_the_job(by_job: bool) -> None:
    """The control: a bucket that a node sees elsewhere is an error of the platform."""
    play = begun(min_workers=1)
    joins(play, "w1", "n1")
    play.tell(ev.NodeRefused(NodeId("n2"), "n2 has none", shared=True, by_job=by_job))
    assert isinstance(play.run.state, Failed) and play.run.state.job_error == (
        f"n2 has none{CHECKED}" if by_job else ""
    )


def test_a_run_that_has_begun_waits_for_better_nodes() -> None:
    """There is no room for a while, and one node is refused: that is no reason to end the run."""
    play = begun(min_workers=1, slots=1)
    joins(play, "w1", "n1")
    reformed(play)
    play.step(1)
    play.tell(ev.NodeRefused(NodeId("n2"), "node n2 sees another bucket"))
    play.lose("w1")
    play.tell(ev.Capacity(0))
    play.later(100.0)
    assert isinstance(play.run.state, Waiting)
    reason = play.later(200.0)
    assert reason == (
        "waited 300 s for workers: 0 workers of at least 1; node n2 sees another bucket; the job was "
        "checked on node aa (head, 10.0.0.1)"
    )


def test_room_that_is_there_is_used_before_a_run_fails() -> None:
    play = begun(min_workers=2)
    joins(play, "w1", "n1")
    joins(play, "w2", "n2", build=replace(THERE, ray="2.59.0"))
    play.later(2.0)
    play.tell(ev.Capacity(1))
    play.later(20.0)
    assert isinstance(play.run.state, Waiting) and play.run.members.starting
    assert "form generation 1 of w1 and w3" in joins(play, "w3", "n1")


# ---- the place that all share


def test_a_bucket_that_is_not_shared_ends_a_run_that_has_not_begun() -> None:
    """U11: the run ends even if enough workers could go on without that node."""
    play = begun(min_workers=1)
    joins(play, "w1", "n1")
    reason = play.tell(
        ev.NodeRefused(NodeId("n2"), "node n2 (b) does not see bucket = '/runs' as node n1 (a)", shared=True)
    )
    assert isinstance(play.run.state, Failed)
    assert reason == (
        "node n2 is refused: node n2 (b) does not see bucket = '/runs' as node n1 (a); the job was checked "
        "on node aa (head, 10.0.0.1); no step has run yet, so the run ends now"
    )
    assert play.run.state.reason in reason


def test_data_that_is_not_shared_ends_a_run_that_has_not_begun() -> None:
    play = begun(min_workers=1)
    joins(play, "w1", "n1", build=replace(THERE, data="other"))
    assert (
        isinstance(play.run.state, Failed)
        and "the data's fingerprint is other on this node" in play.run.state.reason
    )
    assert play.run.state.job_error and play.run.state.reason.startswith(play.run.state.job_error), (
        "who repeats the command changes nothing"
    )


def test_a_node_that_joins_later_is_refused_and_the_run_goes_on() -> None:
    """U11: nobody is started there, nobody is stopped."""
    play = stepping(2)
    play.tell(ev.NodeFound(NodeId("n3")))
    reason = play.tell(ev.NodeRefused(NodeId("n3"), "node n3 sees another bucket", shared=True))
    assert reason == "node n3 is refused: node n3 sees another bucket"
    assert isinstance(play.run.state, Running) and play.last.actions == ()
    assert play.tell(ev.NodeRefused(NodeId("n3"), "again")) == "", "said once"


def test_the_first_world_waits_until_every_node_was_looked_at() -> None:
    """Otherwise it would depend on timing whether a bucket that is not shared is found before anything runs."""
    play = Play(rules(max_workers=1))
    for node in ("n1", "n2"):
        play.tell(ev.NodeFound(NodeId(node)))
    play.tell(ev.Capacity(1))
    play.tell(ev.KeeperUp(NodeId("n1")))
    joins(play, "w1", "n1")
    assert isinstance(play.run.state, Waiting)
    play.tell(ev.KeeperUp(NodeId("n2")))
    assert isinstance(play.run.state, Forming)


def test_a_node_that_cannot_be_looked_at_is_not_waited_for_for_ever() -> None:
    play = Play(rules(max_workers=1, form_s=30.0))
    for node in ("n1", "n2"):
        play.tell(ev.NodeFound(NodeId(node)))
    play.tell(ev.Capacity(1))
    play.tell(ev.KeeperUp(NodeId("n1")))
    joins(play, "w1", "n1")
    assert play.later(29.0) == ""
    assert play.later(1.0).startswith("form generation 1 of w1")


def test_nobody_is_a_member_before_its_node_was_looked_at() -> None:
    play = stepping(1)
    play.rules = rules(max_workers=2)
    play.tell(ev.NodeFound(NodeId("n3")))
    play.tell(ev.Capacity(1))
    play.now += 5.0
    joins(play, "w2", "n3", kind="cpu", build=Build())
    assert isinstance(play.run.state, Running)
    assert "grow from 1×1 to 2×1" in play.tell(ev.KeeperUp(NodeId("n3")))


def test_a_worker_that_came_before_its_node_was_refused_goes_with_it() -> None:
    """Otherwise it would keep the place of another worker for ever."""
    play = stepping(1)
    play.rules = rules(max_workers=2)
    play.tell(ev.NodeFound(NodeId("n3")))
    play.tell(ev.Capacity(1))
    play.now += 5.0
    joins(play, "w2", "n3", kind="cpu", build=Build())
    play.tell(ev.NodeRefused(NodeId("n3"), "node n3 sees another bucket", shared=True))
    assert play.did(Kill) == [Kill((WorkerId("w2"),), "its node is refused")] and list(play.run.workers) == [
        "w1"
    ]


def test_a_keeper_that_is_started_again_unseats_nobody() -> None:
    play = stepping(2)
    play.tell(ev.KeeperLost(NodeId("n2"), "its process died"))
    play.tell(ev.NodeFound(NodeId("n2")))
    play.broken("w1")
    play.answer("w1", play.run.version)
    play.answer("w2", play.run.version)
    assert play.plan.members == ("w1", "w2")


def test_a_worker_that_could_not_start_does_not_stay() -> None:
    """Its actor would hold its CPUs for ever."""
    play = begun(slots=1)
    play.tell(ev.StartFailed(WorkerId("w1"), "CodeError: nothing there"))
    assert play.did(Kill) == [Kill((WorkerId("w1"),), "it did not start")]


# ---- kinds


def test_another_kind_is_refused_by_a_reproducible_run() -> None:
    """R22: it is refused even when it is the only kind left, because the bits would change."""
    play = begun()
    joins(play, "w1", "n1")
    play.later(2.0)
    assert isinstance(play.run.state, Forming)
    reason = joins(play, "w2", "n2", kind=OLD)
    assert reason == (
        "node n2 is refused: w2 on node n2 (b, 10.0.0.2) cannot be a member: it is cpu torch-2.11, "
        "but the run began on cpu torch-2.13, and only that kind gives equal bits; use machines of "
        "one kind, or set reproducible = false"
    )
    assert play.did(Kill) and list(play.run.workers) == ["w1"]
    play.lose("w1")
    assert isinstance(play.run.state, Waiting)


def test_the_first_world_is_of_the_kind_that_most_are_of() -> None:
    """R22: one odd machine that happens to be the first does not send all the others away."""
    play = begun(slots=3)
    play.rules = rules(max_workers=3)
    play.tell(ev.Capacity(1))
    joins(play, "w1", "n3", kind=OLD)
    joins(play, "w2", "n1")
    reason = joins(play, "w3", "n2")
    assert play.plan.members == ("w2", "w3") and play.run.members.kind == NEW
    assert "w1 on node n3 (b, 10.0.0.2) cannot be a member: it is cpu torch-2.11" in reason
    assert play.did(Kill) == [Kill((WorkerId("w1"),), "its node is refused")] and list(
        play.run.cluster.refused
    ) == ["n3"]


def test_two_kinds_and_too_few_of_each_fail_by_name() -> None:
    play = begun(min_workers=2)
    joins(play, "w1", "n1")
    joins(play, "w2", "n2", kind=OLD)
    reason = play.later(10.0)
    assert reason == (
        "no node has room for another worker that the run can use: 1 worker of at least 2; w2 on node "
        "n2 is cpu torch-2.11"
    )


def test_without_reproducible_any_kind_may_sit_and_the_steps_are_marked() -> None:
    """R22: the journal says which generations had mixed kinds, whose bits no other run can give."""
    play = begun(reproducible=False)
    before = play.run
    joins(play, "w1", "n1")
    reason = joins(play, "w2", "n2", kind=OLD, build=replace(THERE, torch="2.11.0"))
    assert play.plan.members == ("w1", "w2")
    assert reason.endswith(
        "several kinds (cpu torch-2.11 and cpu torch-2.13): its steps are marked as mixed, since their bits "
        "cannot be reproduced"
    )
    assert play.run.members.mixed == (1,) and changes(before, play.run)["members"]["~"]["mixed"] == {
        "at": 0,
        "cut": 0,
        "put": [1],
    }
    reformed(play)
    play.step(1)
    play.lose("w2")
    play.answer("w1", play.run.version)
    assert play.generation == 2 and play.run.members.mixed == (1,), "a world of one kind again"


def test_a_model_of_other_sizes_is_refused() -> None:
    play = stepping(1)
    play.rules = rules(max_workers=2)
    play.tell(ev.Capacity(1))
    reason = play.tell(ev.Joined(WorkerId("w2"), NodeId("n2"), "cpu", classes((9,))))
    assert reason.startswith(
        "node n2 is refused: w2 on node n2 cannot be a member: its model has other sizes than the "
        "models of other workers; "
    )
    assert play.did(Kill) and "w2" not in play.run.workers


def test_what_is_known_of_nodes_is_in_the_journal() -> None:
    play = begun()
    joins(play, "w1", "n1", build=replace(THERE, ray="2.59.0"))
    assert decode_run(encode(play.run)) == play.run
    assert play.run.cluster.nodes == {"n1": True, "n2": True} and play.run.members.reference == REFERENCE


def test_room_is_free_for_nobody_twice() -> None:
    """A worker that was asked for and is not placed yet will take room; a report of free room that is older
    does not count it.
    """
    play = Play(rules(max_workers=4))
    play.tell(ev.Capacity(2, ()))
    assert [action.workers for action in play.did(StartWorkers)] == [("w1", "w2")]
    for placed in ((), ("w1",), ("w1", "w2")):
        play.tell(ev.Capacity(2 - len(placed), tuple(WorkerId(each) for each in placed)))
        assert play.did(StartWorkers) == [] and list(play.run.members.starting) == ["w1", "w2"]
    play.tell(ev.Capacity(1, (WorkerId("w1"), WorkerId("w2"))))
    assert [action.workers for action in play.did(StartWorkers)] == [("w3",)], "more room, once a node came"
    play.join("w1", "w2", "w3")
    assert play.tell(ev.Capacity(0, ())) == "" and not play.run.members.starting


def test_who_becomes_unfit_is_no_candidate_within_the_same_decision() -> None:
    """A decision changes its dictionary of workers in place, while seating keeps what it has found by their
    identity.
    """
    play = stepping(3)
    decision = Decision(play.run, play.now, play.rules, play.now)
    membership.unfit(decision, WorkerId("w1"), "a test")
    assert candidates(decision.run, play.rules) == ("w2", "w3"), "the control"
    membership.unfit(decision, WorkerId("w2"), "a test")
    assert candidates(decision.run, play.rules) == ("w3",)


def test_form_s_does_not_limit_a_start_that_gets_further() -> None:
    """A worker may take memory for minutes, or compile; only one that stands still is killed.  The control:
    w2, which says nothing.
    """
    play = begun()
    assert list(play.run.members.starting) == ["w1", "w2"]
    play.later(8.0)
    assert play.tell(ev.Starting(WorkerId("w1"), "takes memory")) == ("w1 is still starting: it takes memory")
    assert play.later(22.0) == "w2 neither joined nor made progress for 30 s" and list(
        play.run.members.starting
    ) == ["w1"]
    for _ in range(5):
        assert play.tell(ev.Starting(WorkerId("w1"), "compiles")) == ""
        assert play.later(29.0) == "" and "w1" in play.run.members.starting
    assert (
        play.later(1.0) == "w1 neither joined nor made progress for 30 s; w1 compiles"
        and play.run.watch.starts == {}
    )
    assert play.did(Kill) == [Kill((WorkerId("w1"),), "it neither joined nor made progress for 30 s")]
    assert "is not being started" in str(
        play.tell(ev.Starting(WorkerId("w1"), "compiles")) or play.last.refusals
    )


def test_a_run_waits_longer_than_wait_s_for_workers_that_get_further() -> None:
    """Each of those that it waits for is limited by its own standing still.  The control: those asked for
    later prolong nothing.
    """
    play = begun(slots=1, wait_s=60.0)
    for _ in range(6):
        play.tell(ev.Starting(WorkerId("w1"), "takes memory"))
        assert play.later(20.0) == "" and isinstance(play.run.state, Waiting)
    play.tell(ev.StartFailed(WorkerId("w1"), "no room"))
    assert isinstance(play.run.state, Failed)

    late = begun(slots=0, wait_s=60.0)
    late.later(59.0)
    late.tell(ev.Capacity(1))
    late.tell(ev.Starting(WorkerId("w1"), "takes memory"))
    late.later(1.0)
    assert isinstance(late.run.state, Waiting), "it was asked for before"
    other = begun(slots=1, wait_s=60.0)
    other.later(31.0)
    other.tell(ev.Capacity(1))
    other.later(31.0)
    assert isinstance(other.run.state, Failed), "nobody has told anything"


def test_the_next_coordinator_gives_a_slow_start_its_time_anew() -> None:
    """It has heard of nobody yet.  The control: it does not wait longer than that."""
    play = begun(slots=1)
    play.tell(ev.Starting(WorkerId("w1"), "takes memory"))
    play.later(29.0)
    play.tell(ev.Recovered(play.run.incarnation + 1, (WorkerId("w1"),), (NodeId("n1"), NodeId("n2"))))
    play.later(29.0)
    assert "w1" in play.run.members.starting
    assert "w1 neither joined nor made progress for 30 s" in play.later(1.0)


def test_a_slow_start_is_no_sign_that_a_coordinator_got_anywhere() -> None:
    """Coordinators that die one after the other while a worker takes memory give up in the end.  The control:
    a worker that joins is one; and nobody remembers its start."""
    play = begun(slots=1)
    play.tell(ev.Recovered(play.run.incarnation + 1, (WorkerId("w1"),), (NodeId("n1"), NodeId("n2"))))
    play.tell(ev.Starting(WorkerId("w1"), "takes memory"))
    assert play.run.takeover.startups == 1 and list(play.run.watch.starts) == ["w1"]
    joins(play, "w1", "n1")
    assert play.run.takeover.startups == 0 and play.run.watch.starts == {}


def two_nodes(**changes: Any) -> Play:
    """Returns a run of w1 and w2 on n1, and w3 and w4 on n2, at step 4."""
    play = Play(rules(max_workers=4, **{"copy_every": 1, "buddy_every": 1, **changes}))
    play.tell(ev.Capacity(4 + changes.get("spares", 0)))
    for worker, node in (("w1", "n1"), ("w2", "n1"), ("w3", "n2"), ("w4", "n2")):
        play.tell(ev.KeeperUp(NodeId(node)))
        play.tell(ev.Joined(WorkerId(worker), NodeId(node), "cpu", CLASSES))
    reformed(play).steps(1, 4)
    return play


DEAD = ev.KeeperLost(NodeId("n2"), "its node died", with_its_node=True)


def test_a_dead_node_takes_all_its_workers_in_one_decision() -> None:
    """Whichever word of it comes first: nobody waits for a worker that is gone, and one world is formed."""
    for first in (DEAD, ev.Lost(WorkerId("w3"), "its node died", certain=False)):
        play = two_nodes()
        play.tell(first)
        play.tell(DEAD)
        assert play.pending == ("w1", "w2") and not {"w3", "w4"} & play.run.workers.keys()
        assert play.tell(DEAD).startswith("refused: ")
        play.answer("w1", Version(4, 1))
        play.answer("w2", Version(4, 1))
        assert (play.generation, play.plan.members) == (2, ("w1", "w2"))
        for worker in ("w3", "w4"):
            again = play.tell(ev.Lost(WorkerId(worker), "its node died", certain=False))
            assert again.startswith("refused: "), again
        assert isinstance(play.run.state, Forming) and play.generation == 2


def test_a_spare_on_a_dead_node_is_in_no_next_world() -> None:
    """Its own death may be heard seconds later: Ray asks again for a while whom it cannot reach."""
    play = two_nodes(spares=1)
    play.tell(ev.Joined(WorkerId("w5"), NodeId("n2"), "cpu", CLASSES))
    assert "w5" in play.run.workers
    assert play.tell(DEAD).startswith(
        "the keeper of node n2 is lost (its node died); w3, w4 and w5 are lost with it"
    )
    assert play.did(Kill) == [Kill((WorkerId("w3"), WorkerId("w4"), WorkerId("w5")), "its node died")]
    assert play.pending == ("w1", "w2")


def test_a_dead_node_without_a_keeper_leaves_no_notice() -> None:
    """Its workers tell that it is dead."""
    node = NodeId("n2")
    play = two_nodes()
    play.tell(ev.NodeDraining(node, play.now + 60.0, "aws"))
    play.tell(ev.KeeperLost(node, "its process died"))
    assert play.run.cluster.notices, "the machine lives, and is taken all the same"
    play.tell(DEAD)
    assert play.run.cluster.notices == {} and not {"w3", "w4"} & play.run.workers.keys()
