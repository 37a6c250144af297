"""Worlds end by abort, not by timeout: a stuck member comes free, nothing else is touched, and the same
processes go on at once.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from elastic.engine import sockets
from elastic.engine.world import World, _exchange_endpoints, all_gather
from elastic.errors import WorldBroken
from elastic.plan.layout import Layout
from elastic.train.blame import classify
from tests.support.patience import PATIENCE_S, until
from tests.support.processes import Watched, state
from tests.support.ranks import Ranks

FREED_S = 20.0
"""Seconds in which an abort must free a member, which takes 0.01 s on an idle machine; the collectives' own
timeout is 60 s.
"""


@pytest.fixture(scope="module")
def own() -> Iterator[Ranks]:
    """Yields processes for this module alone, because its tests kill some of them."""
    yield from started(5)


@pytest.fixture
def unharmed() -> Iterator[Ranks]:
    """Yields processes that no test before has killed."""
    yield from started(3)


def started(number: int) -> Iterator[Ranks]:
    """Yields ``number`` processes, and ends them."""
    pool = Ranks(number)
    yield pool
    for process in pool.processes:
        process.kill()
        process.join(10)


class Bystanders:
    """Sockets of this process that no world may touch: a pair, and a TCP connection to a server that listens
    here.
    """

    def __init__(self) -> None:
        server = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        self.server, self.pairs = server, [(client, accepted), socket.socketpair()]

    def alive(self) -> bool:
        with socket.create_connection(self.server.getsockname()):  # it still listens, too
            self.server.accept()[0].close()
        return all(_talk(a, b) and _talk(b, a) for a, b in self.pairs)

    def close(self) -> None:
        for each in (self.server, *(end for pair in self.pairs for end in pair)):
            each.close()


def _talk(one: socket.socket, other: socket.socket) -> bool:
    one.sendall(b"x")
    return other.recv(1) == b"x"


COLLECTIVES: dict[str, Callable[[World], object]] = {
    "all_reduce": lambda world: dist.all_reduce(torch.ones(1000)),
    "all_gather": lambda world: all_gather(torch.empty(world.size * 1000), torch.ones(1000)),
    "begun": lambda world: world.begin_all_gather(torch.empty(world.size * 1000), torch.ones(1000))(),
    "columns": lambda world: world.begin_all_gather(
        torch.empty(2000), torch.ones(1000), world.along(["tp"])
    )(),
    "all_to_all": lambda world: dist.all_to_all_single(
        torch.empty(world.size * 1000), torch.ones(world.size * 1000)
    ),
}


@dataclass
class Freed:
    """The observations of one survivor."""

    stuck: bool
    """Before the abort the collective had not ended."""
    free: bool
    """After the abort it had ended."""
    took_s: float
    error: str
    shut: int
    """Sockets that the abort shut down."""
    bystanders: bool
    store: bool
    hanging: list[str]
    """Collectives that torch's flight recorder showed as in flight, before the abort and in the next world.
    """
    next_sum: float
    """Result of an all-reduce of ones in the next world of the same processes."""


def survive(world: World, collective: str, victim: int, how: str, port: int) -> Freed | None:
    """World rank ``victim`` never comes to the collective; the others are stuck in it until they abort."""
    if world.rank == victim:
        suffer(how, port)
        return None
    bystanders, errors = Bystanders(), []

    def call() -> None:
        try:
            COLLECTIVES[collective](world)
        except (RuntimeError, WorldBroken) as error:
            errors.append(type(error).__name__)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    until(lambda: world.in_flight() or not thread.is_alive(), what="the collective does not begin")
    thread.join(0.3)
    stuck, hanging, began = thread.is_alive(), world.in_flight(), time.monotonic()
    shut = world.abort()
    thread.join(FREED_S)
    found = Freed(
        stuck,
        not thread.is_alive(),
        time.monotonic() - began,
        "".join(errors),
        shut,
        bystanders.alive(),
        False,
        hanging,
        0.0,
    )
    found.store = world.store.get("listening/0") is not None
    world.close()
    following = another(world, port, Layout(world.size - 1, 1))
    one = torch.ones(())
    dist.all_reduce(one)
    found.next_sum, found.bystanders = one.item(), found.bystanders and bystanders.alive()
    # its end may be recorded a moment later
    found.hanging += [each for each in following.in_flight() if "all_reduce" not in each]
    following.close()
    bystanders.close()
    return found


def suffer(how: str, port: int) -> None:
    """Makes this process absent (alive, but elsewhere), stopped, or dead."""
    match how:
        case "absent":
            store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            store.wait(["survivors are free"], timedelta(seconds=60))
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)


def another(world: World, port: int, layout: Layout) -> World:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    formed = World.form(
        store,
        generation=world.generation + 1,
        layout=layout,
        rank=world.rank,
        device=world.device,
        form_s=FREED_S,
    )
    formed.connect(FREED_S, 60)
    return formed


def assert_freed(found: Freed, *, stuck: bool = True) -> None:
    assert found.free and found.took_s < FREED_S
    assert found.stuck or not stuck, "the abort is what freed it"
    assert found.error, "a collective whose peer never came must not end well"
    assert found.bystanders and found.store
    assert found.next_sum == 2.0


def wait_for_the_dead(world: World, port: int) -> tuple[float, str, bool] | None:
    """World rank 1 dies before the next world is connected; returns how long rank 0 waits, the cause, and
    whether abort helps.

    The store has a key ``waits`` when rank 0 begins to wait, and ``waited`` once it has seen whether the
    abort helps.
    """
    world.close()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    formed = World.form(
        store,
        generation=world.generation + 1,
        layout=world.layout,
        rank=world.rank,
        device=world.device,
        form_s=FREED_S,
    )
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    store.set("waits", "")
    errors: list[str] = []

    def connect() -> None:
        try:
            formed.connect(3 * FREED_S, 60)
        except Exception as error:
            errors.append(classify(error, lambda: None)[0])

    began, thread = time.monotonic(), threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(0.5)
    formed.abort()
    thread.join(0.5)
    aborted = not thread.is_alive()
    # the other client waits
    dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).set("waited", "")
    thread.join(2 * FREED_S)
    formed.close()
    return time.monotonic() - began, "".join(errors), aborted


def test_who_waits_for_a_member_that_died_before_it_was_connected(own: Ranks) -> None:
    """No collective has begun, so no abort is needed, nor would it help (NCCL): the store ends, and whoever
    waits is free.
    """
    later = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own.start(Layout(2, 1), [0, 4], wait_for_the_dead, later.port)
    later.wait(["waits"], timedelta(seconds=PATIENCE_S))
    own.processes[4].join(PATIENCE_S)
    assert own.processes[4].exitcode == -signal.SIGKILL, "the fault happened"
    later.wait(["waited"], timedelta(seconds=PATIENCE_S))
    del later
    took_s, cause, aborted = own.answer(0)
    assert not aborted and 1.0 <= took_s < 2 * FREED_S and cause == "peer"


def survivors_of_an_absent(own: Ranks, layout: Layout, what: str, hanging: str) -> list[Freed]:
    """Returns what two members saw while a third one never took part in ``what``; they were freed from
    ``hanging``, the first after the collective of ``connect()``.
    """
    later = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own.start(layout, [0, 1, 2], survive, what, 2, "absent", later.port)
    found = [own.answer(0), own.answer(1)]
    later.set("survivors are free", "")
    assert own.answer(2) is None
    assert [each.hanging for each in found] == [[hanging]] * 2
    for each in found:
        assert_freed(each)
    return found


def test_a_member_that_never_comes(own: Ranks) -> None:
    """It is alive and its sockets are open: nothing but the abort frees the others."""
    for each in survivors_of_an_absent(own, Layout(3, 1), "all_to_all", "gloo:all_to_all #2 of [[3000]]"):
        assert each.shut > 0


def test_a_member_that_never_begins_a_gather_that_is_under_way(own: Ranks) -> None:
    """The others have begun it and wait for it; the abort frees them."""
    for each in survivors_of_an_absent(own, Layout(1, 3), "begun", "gloo:all_gather #2 of [[1000]]"):
        assert each.error == "WorldBroken"


def test_a_member_that_never_comes_to_a_gather_along_an_axis(own: Ranks) -> None:
    """Its mate waits in the group of that axis, which the abort knows as all others."""
    later = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own.start(Layout(2, 1, (("tp", 2),)), [1, 2, 3, 0], survive, "columns", 3, "absent", later.port)
    found = [own.answer(process) for process in (1, 2, 3)]
    later.set("survivors are free", "")
    assert own.answer(0) is None
    for each in found:
        assert each.free and each.took_s < FREED_S and each.bystanders and each.next_sum == 3.0
    assert [(each.stuck, each.error) for each in found] == [(False, ""), (False, ""), (True, "WorldBroken")]


def groups_along(world: World, asked: Sequence[tuple[str, ...]]) -> tuple[list[tuple[int, ...]], int]:
    """Returns the ranks of the group along each of ``asked``, and the number of groups that are smaller than
    the world and larger than a member.
    """
    found = []
    for axes in asked:
        group = world.along(axes)
        found.append(tuple(dist.get_process_group_ranks(group)))
        assert found[-1] == world.layout.along(axes, world.rank)
        assert (group is dist.group.WORLD) is (len(found[-1]) == world.size)
    return found, sum(1 < group.size() < world.size for group in world.groups)


@pytest.mark.parametrize(
    ("layout", "expected", "smaller"),
    [
        (Layout(2, 2), {("dp_shard", "cp"): (2, 3), ("dp_replicate",): (1, 3)}, 2),
        (Layout(2, 1, (("tp", 2),)), {("tp",): (2, 3), ("dp_replicate",): (1, 3)}, 2),
        (Layout(1, 2, (("cp", 2),)), {("cp",): (2, 3), ("dp_shard", "cp"): (0, 1, 2, 3)}, 1),
        (Layout(1, 1, (("cp", 2), ("tp", 2))), {("cp",): (1, 3), ("tp",): (2, 3)}, 2),
        (Layout(1, 1, (("tp", 4),)), {("tp",): (0, 1, 2, 3)}, 0),
    ],
    ids=lambda value: str(value) if isinstance(value, Layout) else "",
)
def test_the_members_along_axes_have_a_group(
    ranks: Ranks, layout: Layout, expected: dict[tuple[str, ...], tuple[int, ...]], smaller: int
) -> None:
    """Equal members have one group, and the whole world needs none of its own."""
    *_, (found, count) = ranks.run(layout, groups_along, [*expected])
    assert found == [*expected.values()] and count == smaller


def leave_it_under_way(world: World, port: int) -> tuple[list[str], float, str, float]:
    """World rank 1 never begins the gather that rank 0 has begun, and nobody waits for it.

    Returns what was in flight, how long it took to abort and to leave the world, the cause that a wait and
    another begin give, and a sum of the next world.
    """
    begun = world.begin_all_gather(torch.empty(2000), torch.ones(1000)) if world.rank == 0 else None
    until(
        lambda: not [each for each in world.in_flight() if "all_reduce" in each],
        what="the end of the first sum is not recorded",
    )
    hanging, causes = world.in_flight(), []
    world.store.set(f"has begun {world.rank}", "")
    world.store.wait(["has begun 0", "has begun 1"], timedelta(seconds=PATIENCE_S))
    began = time.monotonic()
    world.abort()
    world.close()
    took_s = time.monotonic() - began
    for call in (begun, lambda: world.begin_all_gather(torch.empty(2000), torch.ones(1000))):
        try:
            if call is not None:
                call()
        except Exception as error:
            causes.append(classify(error, lambda: None)[0])
    following = another(world, port, Layout(2, 1))
    one = torch.ones(())
    dist.all_reduce(one)
    following.close()
    return hanging, took_s, " ".join(causes), one.item()


def test_an_abort_waits_for_no_gather_that_is_under_way(own: Ranks) -> None:
    later = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own.start(Layout(1, 2), [0, 1], leave_it_under_way, later.port)
    (hanging, took_s, causes, total), (_, _, late, _) = own.answer(0), own.answer(1)
    assert hanging == ["gloo:all_gather #2 of [[1000]]"] and took_s < FREED_S and total == 2.0
    assert (causes, late) == ("peer peer", "peer")


def test_a_stopped_member(own: Ranks) -> None:
    """SIGSTOP: its kernel keeps the connections alive."""
    later = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own.start(Layout(3, 1), [0, 1, 2], survive, "all_gather", 2, "stopped", later.port)
    found = [own.answer(0), own.answer(1)]
    victim = own.processes[2].pid
    assert victim is not None and state(victim) == "T", "the fault happened"
    with Watched(victim) as watched:
        watched.kill()
        own.processes[2].join(PATIENCE_S)
        assert own.processes[2].exitcode == -signal.SIGKILL
    for each in found:
        assert_freed(each)


def test_a_killed_member(own: Ranks) -> None:
    """SIGKILL by itself frees the members that are connected to the victim; the abort frees all."""
    later = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own.start(Layout(3, 1), [0, 1, 3], survive, "all_reduce", 2, "killed", later.port)
    found = [own.answer(0), own.answer(1)]
    own.processes[3].join(PATIENCE_S)
    assert own.processes[3].exitcode == -signal.SIGKILL, "the fault happened"
    for each in found:
        assert_freed(each, stuck=False)


def meet_after_a_failure(world: World, first: int, second: int) -> float:
    """World rank 0 waits in vain for a world that never forms; returns a sum of the next world, whose other
    member knows nothing of it.
    """
    world.close()
    if world.rank == 0:
        store = dist.TCPStore("127.0.0.1", first, is_master=False, wait_for_workers=False)
        with pytest.raises(dist.DistError):
            World.form(
                store,
                generation=world.generation + 1,
                layout=Layout(2, 1),
                rank=0,
                device=world.device,
                form_s=0.2,
            )
    following = another(world, second, Layout(2, 1))
    one = torch.ones(())
    dist.all_reduce(one)
    following.close()
    return one.item()


def test_a_world_that_never_met_leaves_nothing_that_parts_its_members_from_newcomers(ranks: Ranks) -> None:
    """PyTorch numbers groups by attempts: if only some members had counted an attempt, the next world's
    members would wait under different names."""
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
    assert ranks.run(Layout(2, 1), meet_after_a_failure, *(store.port for store in stores)) == [2.0, 2.0]


class Counting:
    """A store in this process that counts the keys that are set, read and waited for."""

    def __init__(self) -> None:
        self.store, self.keys, self.lock = dist.HashStore(), 0, threading.Lock()

    def _count(self, number: int = 1) -> None:
        with self.lock:
            self.keys += number

    def set(self, key: str, value: str) -> None:
        self._count()
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self._count()
        self.store.wait([key], timedelta(seconds=PATIENCE_S))
        return self.store.get(key)

    def add(self, key: str, number: int) -> int:
        self._count()
        with self.lock:
            return self.store.add(key, number)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._count(len(keys))
        self.store.wait(keys, timeout)


@pytest.mark.parametrize("members", [4, 64])
def test_n3_the_members_meet_with_a_number_of_store_keys_that_grows_with_them(members: int) -> None:
    """N3: at most seven keys for each member, also for 64; one for each other member would be 64."""
    store, found = Counting(), dict[int, frozenset[tuple[str, int]]]()

    def meet(rank: int) -> None:
        world = SimpleNamespace(store=store, rank=rank, size=members)
        World._meet(world, "connects/0", time.monotonic() + PATIENCE_S)  # type: ignore[arg-type]
        found[rank] = _exchange_endpoints(store, rank, members, {("10.0.0.1", rank)})  # type: ignore[arg-type]

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(
        found[rank] == {("10.0.0.1", other) for other in range(members) if other != rank}
        for rank in range(members)
    )
    assert store.keys <= 7 * members


def test_n3_nobody_goes_on_before_the_last_member_has_come() -> None:
    store = Counting()
    world = SimpleNamespace(store=store, rank=0, size=2)
    with pytest.raises(dist.DistStoreError):
        World._meet(world, "connects/0", time.monotonic() + 0.1)  # type: ignore[arg-type]


def test_a_world_that_was_aborted_before_it_connected_does_not_connect() -> None:
    """An abort finds no communicator that is still being made: whoever makes it leaves when it is there, and
    trains in no aborted world.
    """
    world = World.form(
        dist.HashStore(), generation=1, layout=Layout(), rank=0, device=torch.device("cpu"), form_s=PATIENCE_S
    )
    try:
        world.abort()
        with pytest.raises(WorldBroken, match="generation 1 was aborted while it connected"):
            world.connect(PATIENCE_S, PATIENCE_S)
    finally:
        world.close()


def test_nothing_is_queued_after_an_abort_and_an_abort_waits_for_what_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL would end a group whose communicator is freed.  An exchange that itself waits for the abort is
    freed all the same.
    """
    world, order = World.alone(torch.device("cpu")), list[str]()
    aborts = threading.Thread(target=lambda: (world.abort(), order.append("aborted")))

    def queued(operations: list[dist.P2POp]) -> list[dist.Work]:
        aborts.start()
        assert world.aborted.wait(PATIENCE_S)
        order.append("queued")
        return []

    shut_down = sockets.shut_down
    monkeypatch.setattr(
        sockets, "shut_down", lambda *ports: (order.append("shut down"), shut_down(*ports))[1]
    )
    monkeypatch.setattr(dist, "batch_isend_irecv", queued)
    operations: list[dist.P2POp] = [None]  # type: ignore[list-item]  # only the double sees it
    try:
        world.exchange(operations)
        aborts.join(PATIENCE_S)
        assert order == ["queued", "shut down", "aborted"]
        with pytest.raises(WorldBroken, match="generation 1 is aborted"):
            world.exchange(operations)
        with pytest.raises(WorldBroken, match="generation 1 is aborted"):
            world.all_to_all(torch.ones(1), {0: 1}, {0: 1}, 1)
        assert order.count("queued") == 1
    finally:
        world.close()


def step_beside(world: World, port: int, stays: bool) -> tuple[list[float], float, bool]:
    """Connects the next world on a thread while the present one makes collectives, then enters it, or drops it.

    Returns the sums of the present world, that of the next collective without a group, and whether bystanders
    are unharmed.
    """
    bystanders, ahead = Bystanders(), list[World]()

    def connect() -> None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        rank = (world.rank + 1) % world.size  # the members sit elsewhere
        formed = World.form(
            store,
            generation=world.generation + 1,
            layout=Layout(world.size, 1),
            rank=rank,
            device=world.device,
            form_s=FREED_S,
            ahead="1.1",
        )
        formed.connect(FREED_S, 60)
        ahead.append(formed)

    thread = threading.Thread(target=connect)
    thread.start()
    sums, busy = [], torch.ones(())
    while busy.item():  # until all have connected
        one, busy = torch.ones(()), torch.tensor(float(thread.is_alive()))
        dist.all_reduce(one)
        dist.all_reduce(busy)
        sums.append(one.item())
    (formed,) = ahead
    assert dist.group.WORLD is world.everyone and dist.get_rank() == world.rank
    gone, present = (world, formed) if stays else (formed, world)
    gone.abort()
    gone.close()
    if stays:
        formed.enter()
    one = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(one)
    shifted = dist.get_rank() == (world.rank + stays) % world.size
    present.close()
    harmless = bystanders.alive()
    bystanders.close()
    return sums, one.item(), harmless and shifted and not dist.is_initialized()


@pytest.mark.parametrize("stays", [True, False], ids=["taken", "dropped"])
def test_r24_a_world_is_connected_beside_the_collectives_of_another(unharmed: Ranks, stays: bool) -> None:
    """Each of the two can end and leaves the other one as it is."""
    later = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    unharmed.start(Layout(3, 1), [0, 1, 2], step_beside, later.port, stays)
    for process in (0, 1, 2):
        sums, last, right = unharmed.answer(process)
        assert set(sums) == {3.0} and last == 3.0 and right
