"""The store in which a world meets listens at one address, and its values mean nothing to a process that is
no part of the run.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from elastic.engine.stores import host_store, join_store
from elastic.engine.world import World
from elastic.errors import WorldBroken
from elastic.plan.layout import Layout
from elastic.train.blame import classify
from tests.support.ranks import SECRET, Ranks

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"
"""Two addresses of this machine."""
WAIT_S = 20.0
ID = b"\x00what NCCL hands out: whoever has it may join\xff"


def answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=WAIT_S).close()
    except ConnectionRefusedError:
        return False
    return True


def test_the_store_listens_at_its_own_address_only() -> None:
    """The control is torch's own store, which listens at every address of the machine."""
    ours, theirs = host_store(HERE, WAIT_S), dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    assert [answers(address, ours.port) for address in (HERE, ELSEWHERE)] == [True, False]
    assert [answers(address, theirs.port) for address in (HERE, ELSEWHERE)] == [True, True]


def test_values_come_back_and_a_stranger_reads_none() -> None:
    """The control is a member without seal: its value lies open for whoever lists the keys."""
    hosted = host_store(HERE, WAIT_S)
    # kept, because torch keeps the C++ half only
    members = [join_store(HERE, hosted.port, SECRET, WAIT_S) for _ in range(2)]
    one, other = (dist.PrefixStore("g1", member) for member in members)
    stranger = dist.TCPStore(HERE, hosted.port, is_master=False, wait_for_workers=False)
    for value in (b"", ID, bytes(100_000)):
        one.set("id", value)
        assert other.get("id") == value
    one.set("id", ID)
    assert [key.lstrip("/") for key in stranger.list_keys()] == ["g1/id"], "the stranger did reach the store"
    assert ID not in stranger.get("g1/id") and len(stranger.get("g1/id")) > len(ID)
    stranger.set("open", ID)  # type: ignore[arg-type]
    assert stranger.get("open") == ID
    assert (
        one.add("count", 2) == 2
        and other.add("count", 1) == 3
        and other.check(["id"])
        and not other.check(["absent"])
    )


def test_what_a_stranger_writes_is_refused() -> None:
    hosted = host_store(HERE, WAIT_S)
    member, stranger = (
        join_store(HERE, hosted.port, SECRET, WAIT_S),
        dist.TCPStore(HERE, hosted.port, is_master=False, wait_for_workers=False),
    )
    member.set("key", "ours")
    member.set("other", "other")
    ours = stranger.get("key")
    for written in (ID, b"", stranger.get("other"), ours[:40], ours[:-1] + bytes([ours[-1] ^ 1])):
        stranger.set("key", written)  # type: ignore[arg-type]
        with pytest.raises(
            WorldBroken,
            match="'key' in the store of this world was written by a process that does not belong",
        ) as raised:
            member.get("key")
        assert classify(raised.value, lambda: None, forming=True)[0] == "peer"
    stranger.set("key", ours)  # type: ignore[arg-type]
    assert member.get("key") == b"ours", (
        "the control: what a member wrote under this key is its word, whoever brings it back"
    )


def test_a_member_that_waits_in_vain_is_told_for_what() -> None:
    hosted = host_store(HERE, WAIT_S)
    member = join_store(HERE, hosted.port, SECRET, WAIT_S)
    within = dist.PrefixStore("g1", member)
    within.set_timeout(timedelta(seconds=0.05))
    for waits in (lambda: within.get("absent"), lambda: within.wait(["absent"])):
        with pytest.raises(dist.DistError, match="g1/absent"):
            waits()


def meet(world: World, port: int, secret: bytes) -> str:
    """World rank 1 knows ``secret``; returns how forming the next world of two members ended."""
    world.close()
    store = join_store(HERE, port, SECRET if world.rank == 0 else secret, WAIT_S)
    try:
        formed = World.form(
            store, generation=7, layout=Layout(2, 1), rank=world.rank, device=world.device, form_s=WAIT_S
        )
        formed.connect(WAIT_S, WAIT_S)
    except WorldBroken as error:
        return str(error)
    formed.close()
    return "formed"


@pytest.mark.parametrize("secret", [SECRET, b"of another run"], ids=["a member", "a stranger"])
def test_no_world_forms_with_a_stranger(ranks: Ranks, secret: bytes) -> None:
    hosted = host_store(HERE, WAIT_S)
    found = ranks.run(Layout(2, 1), meet, hosted.port, secret)
    if secret == SECRET:
        assert found == ["formed", "formed"]
    else:
        assert all("does not belong to this run" in each for each in found), found
