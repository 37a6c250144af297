"""NCCL's threads are spoken to, and nobody else is; nothing of it blocks."""

from __future__ import annotations

import os
import resource
import select
import socket
import time
from collections.abc import Iterator

import pytest

from elastic.engine import sockets

NAMES = (f"\0tmp/nccl-socket-0-{os.getpid():x}".encode().ljust(108, b"\0"), f"\0elastic-bystander-{os.getpid()}".encode())


@pytest.fixture
def unix() -> Iterator[list[socket.socket]]:
    """As NCCL makes it, and another one."""
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
def test_both_threads_are_spoken_to_and_no_bystander(unix: list[socket.socket], host: str, family: socket.AddressFamily) -> None:
    if not has(host, family):
        pytest.skip(f"this machine has no {host}")
    before = sockets.listening()
    with socket.create_server((host, 0), family=family) as service:
        opened = sockets.listening() - before
        assert opened == {(host, service.getsockname()[1])}
        with socket.create_server(("127.0.0.1", 0)) as other:
            sockets.wake(opened)
            nccl, bystander = unix
            assert spoken_to(service) and spoken_to(nccl) and not spoken_to(bystander, 0) and not spoken_to(other, 0)
        accepted, _ = service.accept()
        with accepted:
            assert accepted.recv(1) == b"", "and hung up on"


def test_whoever_does_not_listen_any_more_or_does_not_answer_holds_up_nobody(unix: list[socket.socket]) -> None:
    """Nobody reads from ``unix``, whose queue is full before the twentieth time."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        gone = socket.create_server(("127.0.0.1", 0))
        endpoints = [deaf.getsockname(), gone.getsockname(), ("192.0.2.1", 9)]
        gone.close()
        began = time.monotonic()
        for _ in range(20):
            sockets.wake(endpoints)
        assert time.monotonic() - began < 1.0


def test_a_process_without_a_descriptor_to_spare_wakes_nobody_and_goes_on(unix: list[socket.socket]) -> None:
    """An abort depends on nothing that can fail here."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            socket.socket()
        sockets.wake([("127.0.0.1", 9)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not spoken_to(unix[0], 0)


def test_what_is_no_socket_any_more_leaves_no_descriptor_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the two looks at a descriptor somebody else may have got its number."""
    reading, writing = os.pipe()
    monkeypatch.setattr(os, "readlink", lambda path: "socket:[1]")
    before = len(os.listdir("/proc/self/fd"))
    sockets.listening()
    assert len(os.listdir("/proc/self/fd")) == before
    for end in (reading, writing):
        os.close(end)
