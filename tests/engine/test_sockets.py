"""NCCL's threads are spoken to in their order, and nobody else is; speaking never blocks."""

from __future__ import annotations

import os
import resource
import select
import socket
import time
from collections.abc import Iterator

import pytest

from elastic.engine import sockets
from elastic.engine.sockets import Waking

NAMES = (
    f"\0tmp/nccl-socket-0-{os.getpid():x}".encode().ljust(108, b"\0"),
    f"\0elastic-bystander-{os.getpid()}".encode(),
)


@pytest.fixture
def unix() -> Iterator[list[socket.socket]]:
    """Yields a socket that is named like one of NCCL's, and another one."""
    made = []
    for name in NAMES:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sock.bind(name)
        made.append(sock)
    yield made
    for sock in made:
        sock.close()


def spoken_to(listener: socket.socket, within_s: float = 1.0) -> bool:
    return bool(select.select([listener], [], [], within_s)[0])


def has(host: str, family: socket.AddressFamily) -> bool:
    try:
        socket.create_server((host, 0), family=family).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host, family", [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_the_one_at_the_unix_socket_is_spoken_to_and_when_it_is_gone_the_other_one_twice(
    unix: list[socket.socket], host: str, family: socket.AddressFamily
) -> None:
    if not has(host, family):
        pytest.skip(f"this machine has no {host}")
    nccl, _ = unix
    before = sockets.listening()
    with (
        socket.create_server((host, 0), family=family) as service,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        where = (host, service.getsockname()[1])
        assert sockets.listening() - before == {where, other.getsockname()}
        waking = Waking({where, NAMES[0]})
        waking.wake()
        assert spoken_to(nccl) and not spoken_to(service, 0.1), "before the flag is set it would serve nobody"
        nccl.close()
        waking.wake()
        waking.wake()
        callers = [service.accept()[0] for _ in range(2)]
        assert not spoken_to(service, 0.1), "nobody calls a third time"
        assert not any(spoken_to(caller, 0) for caller in callers), "nobody hangs up"
        waking.end()
        for caller in callers:
            with caller:
                assert caller.recv(1) == b""
        assert not spoken_to(other, 0)


def test_only_sockets_of_nccl_are_found_and_only_those_asked_for_are_spoken_to(
    unix: list[socket.socket],
) -> None:
    nccl, bystander = unix
    with socket.create_server(("127.0.0.1", 0)) as service:
        found = sockets.services()
        assert {NAMES[0], service.getsockname()} <= found and NAMES[1] not in found
        Waking({("127.0.0.1", 9)}).wake()
        assert not spoken_to(nccl, 0.1) and not spoken_to(bystander, 0), "a world's own only"
        waking = Waking({service.getsockname()})
        waking.wake()
        assert not spoken_to(service, 0.1), "nothing says that its flag is set"


def test_whoever_does_not_listen_any_more_or_does_not_answer_holds_up_nobody(
    unix: list[socket.socket],
) -> None:
    """Nobody reads from NCCL's socket, whose queue is full before the twentieth message.

    Who waited for that would wait without end, and who waited for a host that does not answer for the two
    minutes in which Linux asks it.
    """
    began = time.monotonic()
    waking = Waking({NAMES[0]})
    for _ in range(20):
        waking.wake()
    unix[0].close()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        gone = socket.create_server(("127.0.0.1", 0))
        waking = Waking({deaf.getsockname(), gone.getsockname(), ("192.0.2.1", 9), NAMES[0]})
        gone.close()
        waking.wake()
        waking.end()
    assert time.monotonic() - began < 60.0


def test_a_process_without_a_descriptor_to_spare_wakes_nobody_and_goes_on(unix: list[socket.socket]) -> None:
    """An abort depends on nothing that can fail here."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            socket.socket()
        Waking({("127.0.0.1", 9), NAMES[0]}).wake()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not spoken_to(unix[0], 0)


def test_what_is_no_socket_any_more_leaves_no_descriptor_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may get the descriptor's number between the two looks at it."""
    reading, writing = os.pipe()
    monkeypatch.setattr(os, "readlink", lambda path: "socket:[1]")
    before = len(os.listdir("/proc/self/fd"))
    sockets.listening()
    assert len(os.listdir("/proc/self/fd")) == before
    for end in (reading, writing):
        os.close(end)


def test_looking_changes_no_socket() -> None:
    """A default timeout makes every socket object non-blocking, and with it whoever shares its description."""
    with socket.create_server(("127.0.0.1", 0)) as blocking:
        socket.setdefaulttimeout(3)
        try:
            assert blocking.getsockname() in sockets.listening()
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(blocking.fileno())
