"""NCCL's threads are spoken to, and nobody else is; nothing of it blocks."""

from __future__ import annotations

import resource
import select
import socket
import time
from collections.abc import Iterator

import pytest

from elastic.engine import sockets

NAMES = (b"\0tmp/nccl-socket-0-a5c8d52e126675d9", b"\0elastic-bystander")


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


def spoken_to(*listeners: socket.socket) -> list[bool]:
    ready, _, _ = select.select(listeners, [], [], 1.0)
    return [each in ready for each in listeners]


@pytest.mark.parametrize("host, family", [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_both_threads_are_spoken_to_and_no_bystander(unix: list[socket.socket], host: str, family: socket.AddressFamily) -> None:
    before = sockets.listening()
    with socket.create_server((host, 0), family=family) as service:
        opened = sockets.listening() - before
        assert opened == {(host, service.getsockname()[1])}
        with socket.create_server(("127.0.0.1", 0)) as other:
            sockets.wake(opened)
            assert spoken_to(service, *unix, other) == [True, True, False, False]
        accepted, _ = service.accept()
        with accepted:
            assert accepted.recv(1) == b"", "and hung up on"


def test_whoever_does_not_listen_any_more_or_does_not_answer_holds_up_nobody() -> None:
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
    assert spoken_to(unix[0]) == [False]
