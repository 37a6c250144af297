"""Finds this process's own sockets in ``/proc``, since gloo and NCCL do not tell which sockets they have
opened.

gloo has no abort, so its sockets are shut down.  NCCL has one, and it waits for two of NCCL's threads.  They
notice the abort as soon as somebody speaks to them, and otherwise twice a second (``ncclProxyService``,
``ncclProxyServiceUDS`` in NCCL's src/proxy.cc, 2.28).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator

Endpoint = tuple[str, int]
Service = Endpoint | bytes
"""A place where a thread listens: an address for TCP connections, or the name of a Unix socket."""

TCP_FAMILIES = (socket.AF_INET, socket.AF_INET6)
NCCL_NAME = b"nccl-socket-"
"""Part of the name of the Unix socket to which members of a communicator on one machine send descriptors of
their memory.

Source: NCCL's src/misc/ipcsocket.cc.
"""


def listening() -> set[Endpoint]:
    """Returns the addresses at which this process accepts TCP connections."""
    return {
        (_plain(sock.getsockname()[0]), sock.getsockname()[1])
        for sock in _all(socket.SOCK_STREAM)
        if sock.family in TCP_FAMILIES and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def shut_down(ports: Collection[int], peers: Collection[Endpoint]) -> int:
    """Ends all TCP connections that were accepted at one of our ``ports`` or made to one of ``peers``, and
    returns their number.
    """
    count = 0
    for sock in _all(socket.SOCK_STREAM):
        if sock.family in TCP_FAMILIES and _is_among(sock, ports, peers):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def services() -> set[Service]:
    """Returns all places where threads of this process listen: those of NCCL, of any of its communicators,
    and others.
    """
    names = (sock.getsockname() for sock in _all(socket.SOCK_DGRAM) if sock.family == socket.AF_UNIX)
    return {name for name in names if isinstance(name, bytes) and NCCL_NAME in name} | listening()


class Waking:
    """Speaks to NCCL's threads at ``services`` while their communicators are being aborted, so that they look
    for the abort's flag.

    It speaks to the threads at Unix sockets first.  They end as soon as they hear anything after the flag is
    set.  When all of them have ended, it calls the threads at TCP addresses; earlier, such a thread would
    wait for the caller's request and serve nobody.  It calls each twice, because the thread looks for the
    flag before it listens.  It does not hang up before the abort has ended, because NCCL would look up this
    machine's address by name to write a warning.

    Nothing blocks.  A thread that is not reached looks for the flag later by itself.
    """

    def __init__(self, services: Collection[Service]) -> None:
        self._names = {each for each in services if isinstance(each, bytes)}
        self._endpoints = (
            {each for each in services if not isinstance(each, bytes)} if self._names else set[Endpoint]()
        )
        self._callers = contextlib.ExitStack()

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            if self._names:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaker:
                    speaker.setblocking(False)
                    self._names = {name for name in self._names if _hears(speaker, name)}
            while self._endpoints and not self._names:
                host, port = self._endpoints.pop()
                for _ in range(2):
                    caller = self._callers.enter_context(
                        socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
                    )
                    caller.setblocking(False)
                    caller.connect_ex((host, port))

    def end(self) -> None:
        """Closes all connections."""
        self._callers.close()


def _hears(speaker: socket.socket, name: bytes) -> bool:
    try:
        speaker.sendto(b"\0", name)
    except ConnectionRefusedError:
        return False
    except OSError:  # its queue is full
        return True
    return True


def _is_among(sock: socket.socket, ports: Collection[int], peers: Collection[Endpoint]) -> bool:
    try:
        here, there = sock.getsockname(), sock.getpeername()
    except OSError:
        return False
    return here[1] in ports or (_plain(there[0]), there[1]) in peers


def _all(kind: socket.SocketKind) -> Iterator[socket.socket]:
    """Yields all sockets of one kind.  Each is a duplicate that is closed when the next one is asked for."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            twin = os.dup(int(name))
            blocking = os.get_blocking(twin)
        except OSError:
            continue
        try:
            sock = socket.socket(fileno=twin)
        except OSError:  # the descriptor was reused for something else meanwhile
            os.close(twin)
            continue
        with sock:
            if socket.getdefaulttimeout() is not None:
                os.set_blocking(twin, blocking)  # a default timeout has changed it, also for the original
            if sock.type & kind:
                yield sock


def _plain(address: str) -> str:
    """Returns an IPv4 address without the prefix that it has in an IPv6 socket (``::ffff:10.0.0.1``)."""
    return address.removeprefix("::ffff:")
