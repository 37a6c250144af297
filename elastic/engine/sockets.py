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


def wake(endpoints: Collection[Endpoint]) -> None:
    """Speak to NCCL's threads, which listen at ``endpoints`` and at a Unix socket.  Never blocks; whoever is not reached looks later.

    Only while they are being aborted.  Until the abort's flag is set the first one waits for more than a connection, and serves nobody; a
    connection that is hung up on has it look this machine's address up by name, which takes long where no name service answers.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaker:
        speaker.setblocking(False)
        for name in {sock.getsockname() for sock in _all(socket.SOCK_DGRAM) if sock.family == socket.AF_UNIX}:
            if isinstance(name, bytes) and NCCL_NAME in name:
                with contextlib.suppress(OSError):
                    speaker.sendto(b"\0", name)
    for host, port in endpoints:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as caller:
            caller.setblocking(False)
            caller.connect_ex((host, port))


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
        except OSError:
            continue
        try:
            sock = socket.socket(fileno=twin)
        except OSError:  # what was a socket a moment ago is something else now
            os.close(twin)
            continue
        with sock:
            if sock.type & kind:
                yield sock


def _plain(address: str) -> str:
    """IPv4 addresses seen through an IPv6 socket look like ``::ffff:10.0.0.1``."""
    return address.removeprefix("::ffff:")
