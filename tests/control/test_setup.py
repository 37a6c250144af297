"""Workers that cannot be in one world, as the library or their devices say, are replaced; the same world is not tried again and again."""

from __future__ import annotations

import pytest

from elastic.control.run import Failed, Forming
from elastic.ids import NodeId, Version, WorkerId
from elastic.protocol import events as ev
from elastic.protocol.actions import Kill, StartWorkers
from tests.control.play import CLASSES, Play, reformed, rules, started, stepping

pytestmark = pytest.mark.fast
REFUSES = "NCCL refuses to form a world as this process is set up (invalid usage)"
WORDS = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60"
SETUP = ("setup", f"Traceback ...\nDistBackendError: NCCL error\n{WORDS}", REFUSES)


def test_a_world_that_the_library_refuses_is_tried_once_more_with_new_processes() -> None:
    """The words are told with each worker; the second refusal ends the run, with the traceback.  Two deaths in the control do not."""
    play = started(2)
    play.here("w1", "w2")
    assert play.broken("w1", *SETUP) == f"w1 cannot go on (setup: {WORDS}): stop generation 1 of 2 workers"
    assert play.broken("w2", *SETUP) == f"w2 cannot go on (setup: {WORDS}), as w1 before it"
    play.answer("w1", None)
    play.answer("w2", None)
    assert {each for kill in play.did(Kill) for each in kill.workers} == {"w1", "w2"}
    play.tell(ev.Capacity(2))
    play.later(3)
    play.join("w3", "w4")
    assert isinstance(play.run.state, Forming) and play.plan.members == ("w3", "w4")
    play.here("w3", "w4")
    play.broken("w4", *SETUP)
    play.answer("w3", None)
    play.answer("w4", None)
    assert isinstance(play.run.state, Failed) and play.run.state.job_error.endswith(WORDS)
    assert play.run.state.reason == f"job error: {REFUSES} at step 1, again on w1, w2 and w4", "not after six generations"

    control = started(2)
    for _ in range(2):
        control.here(*control.plan.members)
        control.broken("w1")
        control.answer("w1", None)
        control.answer("w2", None)
    assert isinstance(control.run.state, Forming) and control.plan.members == ("w1", "w2")


@pytest.mark.parametrize("teller", ["w1", "w3"])
def test_members_that_have_trained_are_not_replaced_for_a_newcomer(teller: str) -> None:
    """NCCL tells all members of a version that differs.  The newcomer's node is refused, so it costs one pause, and the step is kept."""
    play = stepping(2)
    play.steps(1, 3)
    play.lose("w2")
    play.answer("w1", Version(3, 1))
    reformed(play)
    play.steps(4, 5)
    play.tell(ev.Capacity(1))
    play.later(3)
    play.tell(ev.KeeperUp(NodeId("n3")))
    play.tell(ev.Joined(WorkerId("w3"), NodeId("n3"), "cpu", CLASSES))
    play.later(3)
    play.answer("w1", Version(5, 2))
    assert play.plan.members == ("w1", "w3")
    play.here("w1", "w3")
    play.broken(teller, *SETUP)
    play.answer("w3", None)
    play.answer("w1", Version(5, 2))
    assert play.plan.members == ("w1",) and play.plan.version == Version(5, 2) and play.run.cluster.refused.keys() == {"n3"}
    assert play.run.history.failures == (), "it is no error of the job"
    assert WORDS in play.run.cluster.refused[NodeId("n3")].why


def of(worker: str, node: str, device: str) -> ev.Joined:
    return ev.Joined(WorkerId(worker), NodeId(node), "cpu", CLASSES, device=device)


def test_of_two_workers_on_one_gpu_the_newcomer_is_replaced() -> None:
    """The controls: the same device on another node (a driver may name parts of it alike), another device, and no device."""
    play = Play(rules(max_workers=5))
    play.tell(ev.KeeperUp(NodeId("n1")))
    play.tell(ev.KeeperUp(NodeId("n2")))
    play.tell(ev.Capacity(5))
    play.tell(of("w1", "n1", "GPU-a"))
    said = play.tell(of("w2", "n1", "GPU-a"))
    assert said.startswith("w2 on node n1 and w1 compute on one device (GPU-a), so w2 is replaced; a process keeps the GPUs that it saw")
    assert play.did(Kill) == [Kill((WorkerId("w2"),), "another worker has its device")] and play.run.workers.keys() == {"w1"}
    play.tell(ev.Capacity(1))
    assert not play.did(StartWorkers), "not at once"
    play.later(3)
    assert [each.workers for each in play.did(StartWorkers)] == [("w6",)]
    for joined in (of("w3", "n2", "GPU-a"), of("w4", "n1", "GPU-b"), of("w5", "n1", ""), of("w6", "n1", "")):
        play.tell(joined)
    assert play.run.workers.keys() == {"w1", "w3", "w4", "w5", "w6"}
