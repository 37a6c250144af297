"""This process's own sockets, found in ``/proc``: those that gloo and NCCL have opened and tell nobody of.

gloo has no abort: its sockets are shut down.  NCCL has one, but two of its threads that an abort waits for look for it only once somebody
speaks to them, or else twice a second (``ncclProxyService``, ``ncclProxyServiceUDS`` in NCCL's src/proxy.cc, 2.28).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator

Endpoint = tuple[str, int]
Service = Endpoint | bytes
"""Accepts TCP connections, or hears at a Unix socket of that name."""

TCP_FAMILIES = (socket.AF_INET, socket.AF_INET6)
NCCL_NAME = b"nccl-socket-"
"""In the name of the Unix socket to which the members of a communicator on one machine send descriptors of their memory (NCCL's
src/misc/ipcsocket.cc)."""


def listening() -> set[Endpoint]:
    """Where TCP connections are accepted."""
    return {
        (_plain(sock.getsockname()[0]), sock.getsockname()[1])
        for sock in _all(socket.SOCK_STREAM)
        if sock.family in TCP_FAMILIES and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def shut_down(ports: Collection[int], peers: Collection[Endpoint]) -> int:
    """End all TCP connections that were accepted at one of our ``ports``, or made to one of ``peers``; how many that were."""
    count = 0
    for sock in _all(socket.SOCK_STREAM):
        if sock.family in TCP_FAMILIES and _is_among(sock, ports, peers):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def services() -> set[Service]:
    """Where this process's threads listen, those of NCCL (of any of its communicators) and others."""
    names = (sock.getsockname() for sock in _all(socket.SOCK_DGRAM) if sock.family == socket.AF_UNIX)
    return {name for name in names if isinstance(name, bytes) and NCCL_NAME in name} | listening()


class Waking:
    """Speaks to NCCL's threads at ``services`` while their communicators are being aborted, so that they look for the abort's flag.

    First to those at Unix sockets, which end once the flag is set, as soon as they hear anything.  When all of them have, the others are
    called: before, they would wait for what a caller has to say, and serve nobody.  Each twice, since it looks before it listens; nobody
    hangs up before the abort has ended: NCCL would look this machine's address up by name, to complain.

    Nothing blocks; whoever is not reached looks later.
    """

    def __init__(self, services: Collection[Service]) -> None:
        self._names = {each for each in services if isinstance(each, bytes)}
        self._endpoints = {each for each in services if not isinstance(each, bytes)} if self._names else set[Endpoint]()
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
                    caller = self._callers.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
                    caller.setblocking(False)
                    caller.connect_ex((host, port))

    def end(self) -> None:
        """Hang up."""
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
    """Each duplicated for the moment it is looked at."""
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
        except OSError:  # what was a socket a moment ago is something else now
            os.close(twin)
            continue
        with sock:
            if socket.getdefaulttimeout() is not None:
                os.set_blocking(twin, blocking)  # that of the original too, which a default timeout has changed
            if sock.type & kind:
                yield sock


def _plain(address: str) -> str:
    """IPv4 addresses seen through an IPv6 socket look like ``::ffff:10.0.0.1``."""
    return address.removeprefix("::ffff:")
