"""Workers that cannot be in one world, as the library or their devices say, are replaced; the second time
their node is refused.
"""

from __future__ import annotations

import pytest

from elastic.control.run import Failed, Forming, Stopping, Worker
from elastic.ids import NodeId, Version, WorkerId
from elastic.protocol import events as ev
from elastic.protocol.actions import Kill, StartWorkers
from tests.control.play import CLASSES, Play, but, reformed, rules, started, stepping

pytestmark = pytest.mark.fast
REFUSES = "NCCL refuses to form a world as this process is set up (invalid usage)"
WORDS = "Duplicate GPU detected : rank {} and rank {} both on CUDA device 60"


def setup(mine: int = 1, other: int = 0) -> tuple[str, str, str]:
    return "setup", f"Traceback ...\nDistBackendError: NCCL error\n{WORDS.format(mine, other)}", REFUSES


def grown(play: Play, *nodes: str) -> Play:
    """Workers join a run that steps, one on each of ``nodes``, and the world that they form begins."""
    play.later(3)
    play.tell(ev.Capacity(len(nodes)))
    for worker, node in zip(
        sorted(play.run.members.starting, key=lambda each: int(each[1:])), nodes, strict=True
    ):
        play.tell(ev.KeeperUp(NodeId(node)))
        play.tell(ev.Joined(worker, NodeId(node), "cpu", CLASSES))
    play.later(3)
    for worker in play.pending:
        play.answer(worker, play.run.version)
    play.here(*play.plan.members)
    return play


def stopped(play: Play) -> None:
    """All members answer the fence."""
    for worker in play.pending:
        play.answer(worker, play.run.version if play.run.version.step else None)


def test_a_world_that_the_library_refuses_is_tried_once_more_with_new_processes() -> None:
    """The words are told once for each world, and the second refusal ends the run with them.  Two deaths in
    the control do not.
    """
    play = started(2)
    play.here("w1", "w2")
    words = WORDS.format(1, 0)
    said = f"w1 cannot go on (setup: {words}): stop generation 1 of 2 workers; w1 is replaced"
    assert play.broken("w1", *setup()) == said
    assert play.broken("w2", *setup(0, 1)) == "w2 cannot go on either; w2 is replaced"
    stopped(play)
    assert {each for kill in play.did(Kill) for each in kill.workers} == {"w1", "w2"}
    play.tell(ev.Capacity(2))
    play.later(3)
    play.join("w3", "w4")
    assert isinstance(play.run.state, Forming) and play.plan.members == ("w3", "w4")
    play.here("w3", "w4")
    play.broken("w3", *setup())
    play.broken("w4", *setup(0, 1))
    assert play.run.cluster.refused.keys() == {"n1", "n2"}
    stopped(play)
    play.tell(ev.Capacity(0))
    play.later(play.rules.refused_s + 1)
    assert isinstance(play.run.state, Failed) and play.generation == 2, "not after six generations"
    assert words in play.run.state.reason and play.run.state.job_error

    control = started(2)
    for _ in range(2):
        control.here(*control.plan.members)
        control.broken("w1")
        stopped(control)
    assert (
        isinstance(control.run.state, Forming)
        and control.plan.members == ("w1", "w2")
        and not control.run.cluster.replaced
    )


def test_one_node_that_is_set_up_in_another_way_does_not_end_a_run() -> None:
    """Only who says so is replaced, and then only its node is refused."""
    play = started(2)
    play.here("w1", "w2")
    play.broken("w2", *setup())
    stopped(play)
    reformed(play).step(1)
    grown(play, "n2")
    play.broken("w3", *setup())
    stopped(play)
    assert play.run.cluster.refused.keys() == {"n2"} and play.plan.members == ("w1",)


def survivor(members: int) -> Play:
    """Returns a run at step 4 whose members have died, all but w1."""
    play = stepping(members)
    play.steps(1, 3)
    for number in range(2, members + 1):
        play.lose(f"w{number}")
    play.answer("w1", Version(3, 1))
    reformed(play).step(4)
    return play


@pytest.mark.parametrize(("teller", "node"), [("w1", "n3"), ("w3", "n3"), ("w3", "n2")])
def test_members_that_have_trained_are_not_replaced_for_a_newcomer(teller: str, node: str) -> None:
    """NCCL tells all members of a version that differs; whoever tells it first, the newcomer goes, and the
    run trains on.

    Its node costs two pauses at most, also one where a member was before.  The run trains between them, so no
    commit ends the count.
    """
    play = survivor(2)
    for pause in (1, 2):
        grown(play, node)
        newcomer = play.plan.members[-1]
        play.broken("w1" if teller == "w1" else newcomer, *setup())
        stopped(play)
        assert play.plan.members == ("w1",) and not play.run.history.failures, "it is no failure of the job"
        assert play.run.cluster.refused.keys() == ({node} if pause == 2 else set())
        reformed(play)
        play.step(play.run.step + 1)
    assert play.run.step == 6


def test_of_several_new_nodes_none_is_refused_for_what_an_old_member_says() -> None:
    """Nobody knows which of them it is.  All are replaced; a newcomer that says so answers for itself alone."""
    play = survivor(4)
    for round_ in (1, 2, 3):
        grown(play, "n7", "n8", "n9")
        play.broken("w1", *setup())
        stopped(play)
        assert play.plan.members == ("w1",) and not play.run.cluster.refused, round_
        reformed(play).step(play.run.step + 1)
    for new in (("n7", "n8", "n9"), ("n8",)):
        grown(play, *new)
        (bad,) = (worker for worker in play.plan.members if play.run.workers[worker].node == "n8")
        play.broken(bad, *setup())
        stopped(play)
        reformed(play).step(play.run.step + 1)
    assert play.run.cluster.refused.keys() == {"n8"} and len(play.plan.members) == 3


def test_after_a_death_nobody_is_blamed() -> None:
    play = started(2)
    play.here("w1", "w2")
    play.lose("w2")
    assert isinstance(play.run.state, Stopping)
    assert play.broken("w1", *setup()) == "w1 cannot go on either"
    assert not play.run.cluster.replaced and not play.run.workers[WorkerId("w1")].unfit


def test_after_deaths_old_members_do_not_end_the_run_either() -> None:
    play = stepping(4)
    play.steps(1, 3)
    play.broken("w1")
    stopped(play)
    for victim, teller in (("w4", "w1"), ("w3", "w2")):
        play.here(*play.plan.members)
        play.lose(victim)
        play.broken(teller, *setup())
        stopped(play)
    assert isinstance(play.run.state, Forming) and not play.run.history.failures


def test_survivors_that_a_library_refuses_are_tried_once_more() -> None:
    """All have formed worlds before, so none is replaced; the same refusal on the other one ends the run."""
    play = stepping(2)
    play.steps(1, 3)
    for worker in ("w1", "w2"):
        play.broken(worker)
        stopped(play)
        play.here("w1", "w2")
        play.broken(worker, *setup())
        stopped(play)
        if worker == "w1":
            reformed(play)
    assert isinstance(play.run.state, Failed) and REFUSES in play.run.state.reason


def test_the_words_of_a_library_are_told_once() -> None:
    """They differ in ports.  The first member says nothing of its library; the first that does is told, and
    ends the sentence.
    """
    play, words = started(3), "socketPollConnect: connect to 10.0.0.7<{}> failed"
    play.here("w1", "w2", "w3")
    assert play.broken("w1") == (
        "w1 waits, because its world broke (peer: connection closed): stop generation 1 of 3 workers"
    )
    said = play.broken("w2", "peer", f"it broke; the library says: {words.format(41)}", words.format(41))
    assert said == f"w2 waits, because its world broke (peer: it broke; the library says: {words.format(41)})"
    assert (
        play.broken("w3", "peer", f"it broke; the library says: {words.format(42)}", words.format(42))
        == "w3 waits meanwhile"
    )
    assert isinstance(play.run.state, Stopping)
    assert play.run.state.cause.endswith(f"; w2: its library says: {words.format(41)}")


def test_n3_what_is_said_of_a_world_that_does_not_form_is_linear() -> None:
    """Each member says it in other words, as with names of hosts.  Sentences and looks at members do not grow
    with those before.
    """
    lengths = {}
    for members in (20, 80):
        play = started(members)
        play.here(*play.plan.members)
        said = [
            play.broken(worker, "setup", f"no route to host-{chr(97 + i % 26) * (i + 1)}", REFUSES)
            for i, worker in enumerate(play.plan.members)
        ]
        lengths[members] = sum(len(each) for each in said[1:]) / members
        assert isinstance(play.run.state, Stopping) and len(play.run.state.cause) < 300
        assert len(play.run.cluster.replaced) == members, "each is on a node of its own"
    assert lengths[80] < 1.2 * lengths[20]


def of(worker: str, node: str, device: str) -> ev.Joined:
    return ev.Joined(WorkerId(worker), NodeId(node), "cpu", CLASSES, device=device)


def test_of_two_workers_on_one_gpu_the_newcomer_is_replaced() -> None:
    """The second time the node gets no more workers.  The controls: the same device on another node, another
    device, and none.
    """
    play = Play(rules(max_workers=5))
    play.tell(ev.KeeperUp(NodeId("n1")))
    play.tell(ev.KeeperUp(NodeId("n2")))
    play.tell(ev.Capacity(5))
    play.tell(of("w1", "n1", "GPU-a"))
    said = play.tell(of("w2", "n1", "GPU-a"))
    assert said.startswith(
        "w2 on node n1 and w1 compute on one device (GPU-a); most probably an import initialised CUDA "
        "before Ray had set CUDA_VISIBLE_DEVICES"
    )
    assert said.endswith("; w2 is replaced")
    assert play.did(Kill) == [
        Kill((WorkerId("w2"),), "another worker has its device")
    ] and play.run.workers.keys() == {"w1"}
    for joined in (of("w3", "n2", "GPU-a"), of("w4", "n1", "GPU-b"), of("w5", "n1", "")):
        play.tell(joined)
    assert play.run.workers.keys() == {"w1", "w3", "w4", "w5"}
    play.tell(ev.Capacity(1))
    assert not play.did(StartWorkers), "not at once"
    play.later(3)
    assert [each.workers for each in play.did(StartWorkers)] == [("w6",)]
    play.tell(of("w6", "n1", "GPU-b"))
    assert play.run.cluster.refused.keys() == {"n1"} and play.run.workers.keys() == {"w1", "w3", "w4", "w5"}


def test_devices_are_looked_up_once_for_all_that_join_together() -> None:
    """The newcomer is replaced also if both join in one decision.  The devices of the workers that are there
    are read once, not by each of them.
    """
    play = Play(rules(max_workers=40))
    play.tell(ev.Capacity(40))
    play.tell(of("w1", "n1", "GPU-a"))
    joins = [of(f"w{number}", "n2", f"GPU-{number}") for number in range(2, 40)]
    read = 0

    class Watched(Worker):
        def __getattribute__(self, name: str) -> object:
            nonlocal read
            read += name == "device"
            return super().__getattribute__(name)

    there = play.run.workers[WorkerId("w1")]
    play.run = but(play.run, "members", workers={WorkerId("w1"): Watched(**vars(there))})
    play.tell(ev.Together((*joins, of("w40", "n1", "GPU-a"))))
    assert play.did(Kill) == [Kill((WorkerId("w40"),), "another worker has its device")]
    assert len(play.run.workers) == 39 and read <= 2


def test_workers_that_were_started_together_count_once() -> None:
    """All of a node of four computed on its first GPU: those that come for them have their GPUs, and the node
    keeps its workers.
    """
    play = Play(rules(max_workers=4))
    play.tell(ev.KeeperUp(NodeId("n1")))
    play.tell(ev.Capacity(4))
    for worker in ("w1", "w2", "w3"):
        play.tell(of(worker, "n1", "GPU-a"))
    play.tell(
        ev.StartFailed(WorkerId("w4"), "the worker computes on GPU-a, but Ray gave it GPU-d", NodeId("n1"))
    )
    assert not play.run.cluster.refused
    play.later(3)
    play.tell(ev.Capacity(3))
    for worker, device in (("w5", "GPU-b"), ("w6", "GPU-c"), ("w7", "GPU-d")):
        play.tell(of(worker, "n1", device))
    assert play.run.workers.keys() == {"w1", "w5", "w6", "w7"} and not play.run.cluster.refused


def test_a_process_on_the_wrong_gpu_is_replaced_and_then_its_node_is_refused() -> None:
    play = Play(rules(max_workers=2))
    play.tell(ev.KeeperUp(NodeId("n1")))
    for worker, refused in (("w1", False), ("w2", False), ("w3", True)):
        play.tell(ev.Capacity(1))
        play.later(3)
        misset = NodeId("n1") if worker != "w2" else None  # whatever else stopped it is not counted
        play.tell(
            ev.StartFailed(WorkerId(worker), "the worker computes on GPU-a, but Ray gave it GPU-b", misset)
        )
        assert bool(play.run.cluster.refused) == refused
    play.tell(ev.StartFailed(WorkerId("w90"), "never asked for", NodeId("n2")))
    play.tell(ev.StartFailed(WorkerId("w91"), "never asked for", NodeId("n2")))
    assert play.run.cluster.refused.keys() == {"n1"}
