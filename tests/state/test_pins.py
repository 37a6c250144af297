"""Slots have as much pinned memory as the world needs: who pins is a stand-in that notes what it was asked
for, the memory is real.

``tests/gpu/test_copies.py`` has the same with CUDA.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from elastic.plan.copy_budget import BUDDY_SLOTS
from elastic.state import node_memory, pins
from elastic.state.pins import Pins
from elastic.state.region import Region
from tests.support.patience import PATIENCE_S, until

MIB = 2**20
WHOLE, HALF = 8 * MIB, 4 * MIB
PLENTY = 2**40


class Driver:
    """Notes what is pinned, by its address, and refuses what CUDA refuses: memory that is pinned already."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.able = True
        self.then: Callable[[], object] = lambda: None
        """Called once more memory is pinned."""

    def register(self, memory: torch.Tensor) -> Callable[[], object] | str:
        place, size = memory.data_ptr(), len(memory)
        assert all(
            place + size <= other or other + length <= place for other, length in self.pinned.items()
        ), "pinned twice"
        if not self.able:
            return "the limit is reached"
        self.pinned[place] = size
        self.then()
        return lambda: self.pinned.pop(place)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The free memory of the node, which a test may set."""
    found = [PLENTY]
    for module in (node_memory, pins):
        monkeypatch.setattr(module, "free_memory", lambda: (found[0], "the node (MemAvailable)"))
    return found


def pinned_slots(driver: Driver) -> Pins:
    """Returns the pins of three slots for a state of which this worker has half; one worker alone would have
    all of it.
    """
    region = Region.create(3, WHOLE, 1)
    made = Pins(region, torch.frombuffer(region.memory, dtype=torch.uint8), driver.register)
    made.begin(3, HALF)
    until(lambda: made.usable() == 3)
    return made


def taken(region: Region) -> int:
    return os.fstat(region.descriptor).st_blocks * 512


def test_slots_follow_the_world_and_the_memory_of_the_node(free: list[int]) -> None:
    """N11: what a copy needs; what the next world needs too, while the node has room for one worker more; no
    more where it has none.
    """
    driver = Driver()
    made = pinned_slots(driver)

    def fit(size: int, foreseen: int) -> list[int]:
        assert [made.fit(slot, size, foreseen) for slot in range(3)] == [""] * 3
        assert sum(sorted(driver.pinned.values())[1:]) == sum(made.sizes()), "beside the headers and digests"
        assert taken(made.region) < sum(made.sizes()) + MIB, "no more memory than what is pinned"
        return made.sizes()

    assert made.sizes() == [HALF] * 3, "before the first world: what the world with the smallest parts needs"
    assert fit(HALF, 0) == [HALF] * 3
    assert fit(HALF, WHOLE) == [WHOLE] * 3, "room for the copies of the world that follows a loss"
    assert fit(HALF, 0) == [WHOLE] * 3, "it stays, because the node has memory enough"
    free[0] = 0
    assert fit(HALF, WHOLE) == [HALF] * 3, "a node without memory gets back what copies do not need"
    free[0] = node_memory.SPARE + WHOLE
    assert fit(WHOLE, 0) == [WHOLE] * 3, "what a copy needs is taken, if it is there"


def test_a_copy_for_which_there_is_no_memory_is_refused_and_costs_nothing(free: list[int]) -> None:
    driver = Driver()
    made = pinned_slots(driver)
    free[0] = node_memory.SPARE
    assert "4.19 MB more are needed" in made.fit(0, WHOLE, 0)
    assert made.sizes() == [HALF] * 3, "it keeps what it has until there is room"
    made.empty(1)
    assert made.sizes() == [HALF, 0, HALF] and taken(made.region) < 2 * HALF + MIB
    free[0] = PLENTY
    assert made.fit(0, WHOLE, 0) == "" and made.sizes() == [WHOLE, 0, HALF]


def test_what_is_foreseen_comes_piece_by_piece_and_nothing_is_pinned_anew(
    free: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernel launches wait while memory is pinned, so a slot grows beside the steps by small pieces; copies
    are cut at their borders.  The control: a slot that is used without cuts is pinned in one piece.
    """
    monkeypatch.setattr(pins, "PIECE", MIB)
    driver = Driver()
    made = pinned_slots(driver)
    before = set(driver.pinned.items())
    made.foresee(HALF, WHOLE)
    until(lambda: made.sizes() == [WHOLE] * 3)
    assert before <= driver.pinned.items(), "what was pinned stayed pinned"
    assert max(size for place, size in driver.pinned.items() - before) == MIB
    first, memory = made.region.data_at(1), torch.frombuffer(made.region.memory, dtype=torch.uint8)
    assert made.cuts(memory[first : first + HALF]) == [], "a copy of today goes over no border"
    assert made.cuts(memory[first + 1 : first + WHOLE]) == [HALF + n * MIB - 1 for n in range(4)]
    assert made.cuts(memory[first + HALF + 5 : first + HALF + MIB]) == [] == made.cuts(memory[:64])
    made.empty(2)
    assert made.fit(2, HALF) == ""
    driver.then = made.rest
    made.foresee(HALF, WHOLE)
    until(lambda: not any(thread.name == "pin" for thread in threading.enumerate()))
    assert made.sizes()[2] == HALF + MIB, "a world that heals waits for one piece at most"
    driver.then = lambda: None
    made.foresee(HALF, WHOLE)
    until(lambda: made.sizes() == [WHOLE] * 3)
    free[0] = 0
    assert made.fit(1, HALF) == "" and made.sizes() == [WHOLE, HALF, WHOLE], "a node in need gets it back"
    made.foresee(HALF, WHOLE)
    until(lambda: not any(thread.name == "pin" for thread in threading.enumerate()))
    assert made.sizes() == [WHOLE, HALF, WHOLE], "and keeps it"

    free[0] = PLENTY
    region, other = Region.create(3, WHOLE, 1), Driver()
    whole = Pins(region, torch.frombuffer(region.memory, dtype=torch.uint8), other.register, in_one=True)
    assert [whole.fit(0, HALF), whole.fit(0, HALF, WHOLE)] == ["", ""]
    memory = torch.frombuffer(region.memory, dtype=torch.uint8)
    assert whole.cuts(memory[region.data_at(0) :][:WHOLE]) == [] and WHOLE in other.pinned.values()


def test_what_is_foreseen_takes_nothing_from_a_slot_that_holds_a_copy(free: list[int]) -> None:
    """A slot of a world that grew may still hold a copy of the smaller world, which was larger: giving back its
    end would lose that copy.  The control: a slot that gets the next copy gives it back.
    """
    made = pinned_slots(Driver())
    made.region.memory[made.region.data_at(0) + HALF - 1] = 7
    free[0] = 0
    made.foresee(HALF // 2, WHOLE)
    until(lambda: not any(thread.name == "pin" for thread in threading.enumerate()))
    assert made.sizes() == [HALF] * 3 and made.region.memory[made.region.data_at(0) + HALF - 1] == 7
    assert made.fit(0, HALF // 2, WHOLE) == ""
    assert (
        made.sizes() == [HALF // 2, HALF, HALF] and made.region.memory[made.region.data_at(0) + HALF - 1] == 0
    )


def test_the_first_copies_do_not_wait_for_later_slots(free: list[int]) -> None:
    """Memory comes at gigabytes a second, so that of later slots comes beside the first steps.  The control:
    another slot is waited for.
    """
    driver, third, go_on = Driver(), threading.Event(), threading.Event()

    def register(memory: torch.Tensor) -> Callable[[], object] | str:
        if len(driver.pinned) == 3:  # the headers, and two slots
            third.set()
            assert go_on.wait(PATIENCE_S)
        return driver.register(memory)

    region = Region.create(3, WHOLE, 1)
    made = Pins(region, torch.frombuffer(region.memory, dtype=torch.uint8), register)
    made.begin(3, HALF)
    made.ready()
    assert third.wait(PATIENCE_S)
    assert (
        [made.fit(slot, HALF, 0) for slot in (0, 1)] == ["", ""]
        and made.sizes() == [HALF, HALF, 0]
        and made.usable() == 2
    )
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(made.fit, 2, HALF, 0)
        with pytest.raises(TimeoutError):
            later.result(0.2)
        go_on.set()
        assert later.result(PATIENCE_S) == ""
    until(lambda: made.usable() == 3)
    assert made.sizes() == [HALF] * 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_slot_whose_pinning_fails_is_waited_for_by_nobody(free: list[int]) -> None:
    """A copy that needs it tries again, and says what is wrong."""

    def register(memory: torch.Tensor) -> Callable[[], object] | str:
        if threading.current_thread().name == "pin":
            raise RuntimeError("no thread is left")
        return driver.register(memory)

    driver, region = Driver(), Region.create(3, WHOLE, 1)
    made = Pins(region, torch.frombuffer(region.memory, dtype=torch.uint8), register)
    made.begin(3, HALF)
    until(lambda: not any(thread.name == "pin" for thread in threading.enumerate()))
    assert made.sizes() == [0, 0, 0] and made.fit(1, HALF, 0) == "" and made.sizes() == [0, HALF, 0]


def test_what_is_foreseen_is_left_where_it_does_not_fit(free: list[int]) -> None:
    """The first two slots leave room for one worker more, a third one would not."""
    made = pinned_slots(Driver())
    for slot in range(3):
        free[0] = node_memory.SPARE + (3 + BUDDY_SLOTS) * HALF + (2 - slot) * HALF
        made.fit(slot, HALF, WHOLE)
    assert made.sizes() == [WHOLE, WHOLE, HALF]


@pytest.mark.parametrize("room", [0.0, 1.5, 4.0, 9.0, 20.0, 40.0])
def test_the_workers_of_a_node_agree_and_come_to_rest(
    free: list[int], monkeypatch: pytest.MonkeyPatch, room: float
) -> None:
    """Six workers, whose commits make them look at the same moment.  The node has ``room`` halves more than
    they need now.

    No slot is pinned anew once all have had their say, and room for one worker more is left, unless there
    never was as much.
    """
    workers = [pinned_slots(Driver()) for _ in range(6)]
    node = sum(sum(each.sizes()) for each in workers) + int(room * HALF) + node_memory.SPARE
    for module in (node_memory, pins):
        monkeypatch.setattr(
            module, "free_memory", lambda: (node - sum(taken(each.region) for each in workers), "the node")
        )
    history = []
    for _ in range(4):
        with ThreadPoolExecutor(len(workers)) as pool:
            for slot in range(3):
                assert set(pool.map(lambda each: each.fit(slot, HALF, WHOLE), workers)) == {""}  # noqa: B023
        history.append([each.sizes() for each in workers])
    assert history[1] == history[2] == history[3], "nothing is pinned again and again"
    left = node - sum(taken(each.region) for each in workers) - node_memory.SPARE
    assert left >= min(room, 3 + BUDDY_SLOTS) * HALF - MIB
    assert (sum(map(sum, history[-1])) > 18 * HALF) == (room > 3 + BUDDY_SLOTS), (
        "headroom is taken where there is room for it"
    )


def test_what_cannot_be_pinned_is_used_all_the_same(
    free: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not count as pinned, and that is told once.  The control: a piece that is pinned later."""
    driver = Driver()
    driver.able = False
    made = pinned_slots(driver)
    assert made.sizes() == [0] * 3 and driver.pinned == {}
    driver.able = True
    assert made.fit(0, WHOLE, 0) == "" and made.sizes() == [WHOLE - HALF, 0, 0]
    first, memory = made.region.data_at(0), torch.frombuffer(made.region.memory, dtype=torch.uint8)
    room = memory[first : first + WHOLE]
    assert made.cuts(room) == [HALF], "the border counts all the same"
    assert [made.pinned(each) for each in (room[HALF - 1 : HALF], room[HALF:])] == [False, True]
    until(lambda: not any(thread.name == "pin" for thread in threading.enumerate()))
    told = capsys.readouterr().out
    assert told.count("could not be pinned") == 1 and "the limit is reached" in told
    assert "host copies: 0.00 GiB pinned" in told


class Runtime:
    """Stands in for CUDA's runtime, in which a call that fails leaves its error to the thread's next launch
    until somebody asks for it.
    """

    def __init__(self) -> None:
        self.refuses = 0
        self.last = 0

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
        self.last = self.refuses or self.last
        return self.refuses

    def cudaHostUnregister(self, place: int) -> int:
        return self.cudaHostRegister(place, 0, 0)


def test_a_call_that_fails_leaves_no_error_to_the_next_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """``tests/gpu/test_copies.py`` has the same with CUDA.  An error that another call has left stays, for
    whoever made that call.
    """
    cuda, memory = Runtime(), torch.zeros(8, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(pins, "forget_error", lambda: setattr(cuda, "last", 0))
    cuda.last = 700
    end = pins.register(memory)
    assert not isinstance(end, str) and cuda.last == 700
    cuda.refuses = 712
    assert pins.register(memory) == "cudaHostRegister returned 712" and cuda.last == 0
    end()
    assert cuda.last == 0


def test_nothing_stays_pinned_behind_a_worker() -> None:
    driver = Driver()
    made = pinned_slots(driver)
    assert len(driver.pinned) == 4
    del made
    gc.collect()
    assert driver.pinned == {}
