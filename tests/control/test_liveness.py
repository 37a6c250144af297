"""These tests find the member that holds up the others: a late member is not dead, and one that waits for
another is not to blame.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.control import liveness
from elastic.control.liveness import FIRST, Watch, patience_s, seen_of, stall, stepped
from elastic.control.run import Running, Stopping
from elastic.ids import NodeId, Version, WorkerId
from elastic.protocol.events import Beat, Progress, StopRequested, Tick
from tests.control.play import Play, but, reformed, stepping

pytestmark = pytest.mark.fast
W1, W2, W3 = WorkerId("w1"), WorkerId("w2"), WorkerId("w3")
ALL = (W1, W2, W3)
N1 = NodeId("n1")
STEPPING = Watch(step_s=1.0)
"""A world that has stepped before, so that ``stall_s`` counts."""


def observe(watch: Watch, node: NodeId, progress: list[Progress], now: float) -> Watch:
    seen, moved_at = liveness.observe(watch, node, progress, now)
    return replace(watch, counters={**watch.counters, node: seen}, moved_at=moved_at)


def watched(*beats: tuple[float, dict[WorkerId, tuple[int, int, int]]]) -> Watch:
    watch = STEPPING
    for now, done in beats:
        watch = observe(
            watch, N1, [Progress(worker, 1, *completed) for worker, completed in done.items()], now
        )
    return watch


def test_who_has_completed_least_is_the_culprit_for_all_others_wait_for_it() -> None:
    done = {W1: (5, 2, 1), W2: (5, 2, 0), W3: (5, 2, 1)}
    watch = watched((1.0, done), (10.0, done))
    assert stall(watch, ALL, 20.0, 20.0) is None
    stalled = stall(watch, ALL, 21.0, 20.0)
    assert stalled is not None and stalled.culprit == W2
    assert stalled.sentence == (
        "no member moved for 20.0 s; w2 has completed least (step 5, microbatch 2, collective 0)"
    )


STAGES = ((0, 2), (1, 3))
"""World ranks of the data groups of two replicas of two stages."""
W4 = WorkerId("w4")


@pytest.mark.parametrize(
    ("done", "culprit"),
    [
        # the last stage of a pipeline has completed more than the first, whoever of its members hangs
        ({W1: (5, 1, 0), W2: (5, 2, 0), W3: (5, 1, 0), W4: (5, 3, 0)}, W2),
        ({W1: (5, 1, 0), W2: (5, 2, 0), W3: (5, 2, 0), W4: (5, 2, 0)}, W1),
        # each of two stages has one that is behind: the fence will tell which of them does not answer
        ({W1: (5, 1, 0), W2: (5, 2, 0), W3: (5, 2, 0), W4: (5, 3, 0)}, None),
    ],
)
def test_members_are_compared_with_those_that_compute_the_same_part_of_the_model(
    done: dict[WorkerId, tuple[int, int, int]], culprit: WorkerId | None
) -> None:
    started = dict.fromkeys(done, (5, 0, 0))
    watch, members = watched((0.5, started), (1.0, done), (10.0, done)), (*ALL, W4)
    stalled = stall(watch, members, 31.0, 20.0, STAGES)
    assert stalled is not None and stalled.culprit == culprit
    if culprit is None:
        assert stalled.sentence.endswith(
            "no member is blamed, because both w1 and w2 have completed less than the members that compute "
            "the same part of the model"
        )


def test_without_their_groups_the_first_stage_is_blamed_for_the_last() -> None:
    """The control of the test above."""
    done = {W1: (5, 1, 0), W2: (5, 2, 0), W3: (5, 2, 0), W4: (5, 3, 0)}
    stalled = stall(watched((1.0, done), (10.0, done)), (*ALL, W4), 31.0, 20.0)
    assert stalled is not None and stalled.culprit == W1


def test_among_equals_the_one_that_has_stood_still_longest() -> None:
    before, after = (
        {W1: (5, 1, 0), W2: (5, 2, 0), W3: (5, 1, 0)},
        {W1: (5, 2, 0), W2: (5, 2, 0), W3: (5, 2, 0)},
    )
    stalled = stall(watched((1.0, before), (2.0, after), (9.0, after)), ALL, 30.0, 20.0)
    assert stalled is not None and stalled.culprit == W2


def at(operations: dict[WorkerId, str]) -> Watch:
    """All members have completed the same and were heard twice; ``operations`` says what each one does."""
    watch = STEPPING
    for now in (1.0, 9.0):
        watch = observe(
            watch,
            N1,
            [Progress(worker, 1, 5, 2, 0, operation) for worker, operation in operations.items()],
            now,
        )
    return watch


@pytest.mark.parametrize("operation", ["is stopped", "reads data"])
def test_r3_among_equals_the_one_that_waits_for_nobody(operation: str) -> None:
    """R3: a member that is stopped, or reads data, is told apart from those that wait for it inside their
    backward pass.
    """
    stalled = stall(at({W1: "computes", W2: operation, W3: "computes"}), ALL, 30.0, 20.0)
    assert stalled is not None and stalled.culprit == W2
    assert stalled.sentence.endswith(
        f"w2 has completed least (step 5, microbatch 2, collective 0); it {operation}"
    )


def test_r3_a_stopped_process_tells_more_than_one_that_reads() -> None:
    stalled = stall(at({W1: "reads data", W2: "computes", W3: "is stopped"}), ALL, 30.0, 20.0)
    assert stalled is not None and stalled.culprit == W3


def test_r3_two_that_read_data_are_not_told_apart() -> None:
    """A store that is slow for several members is nobody's fault; and a member that reads, but has completed
    more, is not to blame.
    """
    stalled = stall(at({W1: "reads data", W2: "reads data", W3: "computes"}), ALL, 30.0, 20.0)
    assert stalled is not None and stalled.culprit is None
    ahead = [
        Progress(W1, 1, 5, 2, 0, "computes"),
        Progress(W2, 1, 5, 3, 0, "reads data"),
        Progress(W3, 1, 5, 3, 0, "computes"),
    ]
    stalled = stall(observe(observe(STEPPING, N1, ahead, 1.0), N1, ahead, 9.0), ALL, 30.0, 20.0)
    assert stalled is not None and stalled.culprit == W1


def test_two_beats_that_are_half_a_second_apart_prove_nothing() -> None:
    """Keepers of different nodes beat at different times: the member that was read first need not be the one
    that stood still first.
    """
    watch = observe(STEPPING, N1, [Progress(W1, 1, 5, 2, 0)], 1.0)
    for now in (1.5, 9.0):
        watch = observe(watch, N1, [Progress(worker, 1, 5, 2, 0) for worker in ALL], now)
    stalled = stall(watch, ALL, 30.0, 20.0)
    assert stalled is not None and stalled.culprit is None


def test_nobody_is_blamed_by_lot() -> None:
    done = {W1: (5, 2, 0), W2: (5, 2, 0), W3: (5, 3, 0)}
    stalled = stall(watched((1.0, done), (9.0, done)), ALL, 30.0, 20.0)
    assert stalled is not None and stalled.culprit is None
    assert "no member is blamed, because w1 and w2 have completed equally little" in stalled.sentence


@pytest.mark.parametrize(
    "last_heard", [{}, {W1: (5, 2, 1), W2: (5, 2, 0)}], ids=["never", "not since the world stands still"]
)
def test_nobody_is_blamed_while_a_node_is_silent(last_heard: dict[WorkerId, tuple[int, int, int]]) -> None:
    first = {W1: (5, 2, 1), W2: (5, 2, 0), W3: (4, 2, 1)}
    stalled = stall(watched((1.0, first), (5.0, last_heard)), ALL, 30.0, 20.0)
    assert stalled is not None and stalled.culprit is None
    assert "no member is blamed, because nothing was heard from the node of" in stalled.sentence


def test_late_is_not_stuck() -> None:
    """Steps of 30 s: three of them without a sign of life are a stall, two are not."""
    watch = Watch(moved_at=0.0, stepped_at=0.0)
    for number in range(1, 6):
        watch = stepped(watch, 30.0 * number)
    assert patience_s(watch, 20.0) == 90.0
    assert stall(watch, ALL, 150.0 + 60.0, 20.0) is None
    assert stall(watch, ALL, 150.0 + 90.0, 20.0) is not None


def test_the_step_time_follows_the_run() -> None:
    watch = stepped(stepped(Watch(), 100.0), 110.0)
    assert watch.step_s == 75.0, "one step counts as at least half of what is known"
    for number in range(1, 20):
        watch = stepped(watch, 110.0 + 10.0 * number)
    assert watch.step_s == pytest.approx(10.0, rel=1e-3)


def test_a_step_that_hung_does_not_teach_patience() -> None:
    """A step that takes 60 s among steps of one second counts as two seconds, and one that a fence ended not
    at all.
    """
    watch = stepped(stepped(Watch(), 1.0), 61.0)
    assert watch.step_s == 1.5
    assert stepped(watch, 200.0, whole=False).step_s == 1.5


def test_an_older_word_does_not_move_anybody_back() -> None:
    watch = watched((1.0, {W1: (5, 2, 1)}), (2.0, {W1: (5, 1, 0)}))
    assert seen_of(watch)[W1].completed == (5, 2, 1) and watch.moved_at == 1.0


# ---- N12: the first step, and what outlives a world


SLOW_S = 100.0
"""Seconds of one microbatch, five times ``stall_s``."""


def microbatch(play: Play, number: int, operation: str = "computes") -> None:
    """The members compute one microbatch.  Their keepers beat every second."""
    homes = list(zip(play.plan.members, play.plan.nodes, strict=True))
    for _ in range(int(SLOW_S)):
        play.now += 1.0
        for member, node in homes:
            play.tell(
                Beat(node, (Progress(member, play.generation, play.run.step + 1, number, 0, operation),))
            )
    play.tell(Tick())


def test_n12_microbatches_that_take_longer_than_stall_s_cost_no_world_and_no_worker() -> None:
    """Neither in the first step, of which no time is known, nor in the first step of each later world."""
    play = stepping(3)
    for step, worker in enumerate(("w2", "w3", ""), 1):
        for number in range(2):
            microbatch(play, number)
        assert isinstance(play.run.state, Running) and play.generation == step
        play.step(step)
        if worker:
            play.lose(worker)
            for each in play.pending:
                play.answer(each, Version(step, step))
            reformed(play)
    assert [edge for edge in play.edges if edge[1] is Stopping] == [(Running, Stopping)] * 2
    assert tuple(play.run.workers) == (W1,)


def test_n12_the_control_forgets_the_step_time_at_go() -> None:
    """Negative control: a world that begins without the time of the steps before is stopped in its first
    microbatch.
    """
    play = stepping(3)
    for number in range(2):
        microbatch(play, number)
    play.step(1)
    play.run = but(play.run, "watch", step_s=1.0)
    microbatch(play, 0)
    assert not isinstance(play.run.state, Running)


def test_a_stopped_process_is_blamed_in_the_first_step_too() -> None:
    play = stepping(3)
    for _ in range(22):
        play.now += 1.0
        for number, worker in enumerate(ALL, 1):
            doing = "is stopped" if worker == W2 else "computes"
            play.tell(Beat(NodeId(f"n{number}"), (Progress(worker, 1, 1, 0, 0, doing),)))
    state = play.run.state
    assert isinstance(state, Stopping) and state.expelled == (W2,)


def test_a_hang_in_the_first_step_is_found_all_the_same() -> None:
    play = stepping(3)
    for _ in range(FIRST * 20 + 1):
        play.now += 1.0
        for number, worker in enumerate(ALL, 1):
            play.beat(f"n{number}", (worker, 1, 0, 0 if worker == W2 else 1))
    state = play.run.state
    assert isinstance(state, Stopping) and state.expelled == (W2,)


# ---- in the machine


def stuck(play: Play, **collective: int) -> None:
    """Four rounds of beats, 7 s apart, show no progress."""
    for _ in range(4):
        play.now += 7.0
        for number, worker in enumerate(("w1", "w2", "w3"), 1):
            play.beat(f"n{number}", (worker, play.run.step + 1, 1, collective.get(worker, 1)))


def test_a_hanging_member_is_expelled_and_the_others_fenced() -> None:
    play = stepping(3)
    play.steps(1, 2)
    stuck(play, w2=0)
    state = play.run.state
    assert isinstance(state, Stopping) and state.expelled == (W2,) and state.pending == (W1, W3)
    assert "w2 has completed least (step 3, microbatch 1, collective 0): expel w2" in state.cause


def test_a_tie_is_left_to_the_fence() -> None:
    play = stepping(3)
    play.steps(1, 2)
    stuck(play)
    assert (
        isinstance(play.run.state, Stopping)
        and play.run.state.expelled == ()
        and len(play.run.state.pending) == 3
    )


def test_a_slow_member_is_not_touched() -> None:
    play = stepping(3)
    for step in range(1, 9):
        play.now += 15.0 if step % 2 else 7.0
        for number, worker in enumerate(("w1", "w2", "w3"), 1):
            play.beat(f"n{number}", (worker, step, 1, 0 if worker == "w2" else 1))
        play.step(step)
    assert isinstance(play.run.state, Running)


def test_a_member_that_hangs_before_the_agreed_boundary_makes_the_stop_unplanned() -> None:
    play = stepping(3)
    play.steps(1, 2)
    play.tell(StopRequested("Ctrl-C"))
    assert isinstance(play.run.state, Stopping) and play.run.state.planned
    seen: list[str] = []
    for _ in range(4):
        play.now += 7.0
        for number, worker in enumerate(("w1", "w2", "w3"), 1):
            play.beat(f"n{number}", (worker, 3, 1, 0 if worker == "w3" else 1))
            seen += play.deeds
    state = play.run.state
    assert isinstance(state, Stopping) and not state.planned
    assert (state.expelled, state.pending) == ((W3,), (W1, W2))
    assert seen == ["Kill", "Fence"]


def test_progress_of_another_generation_is_no_progress() -> None:
    play = stepping(3)
    moved_at = play.run.watch.moved_at
    play.now = 10.0
    play.tell(Beat(NodeId("n1"), (Progress(W1, 7, 9, 9, 9), Progress(WorkerId("w9"), 1, 9, 9, 9))))
    assert play.run.watch.moved_at == moved_at and play.last.actions == ()
