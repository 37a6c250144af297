"""A proxy on loopback between a run and its bucket: a door that can be shut in the ways in which networks and
stores fail.

It does not change what passes, so signatures stay valid.  When it is shut, the connections that pass it are
cut, or stand still.
"""

from __future__ import annotations

import re
import select
import socket
import struct
import threading
from collections import Counter
from contextlib import suppress
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

from tests.support.processes import free_ports

HEAD = b"\r\n\r\n"
LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
SAYS = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    b"Content-Length: " + str(len(SLOW_DOWN)).encode() + b"\r\n\r\n"
)
POLL_S = 0.02


class Way(StrEnum):
    """The ways in which the bucket fails."""

    REFUSED = "refuses"
    """Nobody listens."""
    SILENT = "is silent"
    """The proxy accepts connections and answers nothing; what was on its way stands still."""
    BUSY = "says 503 SlowDown"
    CUT = "cuts connections"
    """Every second request arrives in part only; the others are carried out, and their answers are lost."""


class Server(Protocol):
    @property
    def environment(self) -> dict[str, str]: ...

    @property
    def endpoint(self) -> str: ...


class Door:
    """A door before ``server``.  It is a context manager; its ``endpoint`` and ``environment`` lead to the
    server through the door.
    """

    def __init__(self, server: Server) -> None:
        host, _, port = server.endpoint.removeprefix("http://").partition(":")
        self._server, self._behind = server, (host, int(port))
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # a port that we chose stays ours while nobody listens
        self._listener.bind(("127.0.0.1", *free_ports(1)))
        self._open = threading.Event()
        """Event that is set while requests may pass."""
        self._closed = threading.Event()
        self._way: Way | None = None
        self._shuts = 0
        self._threads = [threading.Thread(target=self._answer, name="door", daemon=True)]
        self.met: Counter[Way] = Counter()
        """Number of requests that found the door shut, by way.  A door that refuses connections sees none, so
        it counts its own.
        """
        self.open()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def environment(self) -> dict[str, str]:
        return self._server.environment | {"AWS_ENDPOINT_URL_S3": self.endpoint}

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def shut_for(self, way: Way, duration_s: float) -> None:
        """Shuts the door.  It opens again by itself."""
        self.shut(way)
        timer = threading.Timer(duration_s, self.open)
        timer.daemon = True
        timer.start()

    def shut(self, way: Way) -> None:
        self._way, self._shuts = way, self._shuts + 1
        self._open.clear()
        if way is Way.REFUSED:
            self._listener.shutdown(socket.SHUT_RDWR)
            try:
                socket.create_connection(self._listener.getsockname(), 1).close()
            except ConnectionRefusedError:
                self.met[way] += 1

    def open(self) -> None:
        if not self._open.is_set():
            self._way = None
            self._listener.listen(128)
            self._open.set()

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self.open()
        for each in self._threads:
            each.join(10)
        self._listener.close()

    # ---- connections

    def _answer(self) -> None:
        while not self._closed.is_set():
            if self._way is Way.REFUSED:
                self._open.wait(POLL_S)
                continue
            if select.select([self._listener], [], [], POLL_S)[0]:
                with suppress(OSError):  # shut meanwhile
                    client, _ = self._listener.accept()
                    thread = threading.Thread(
                        target=self._serve, args=(client,), name="door-connection", daemon=True
                    )
                    self._threads.append(thread)
                    thread.start()

    def _serve(self, client: socket.socket) -> None:
        """Serves one connection to its end."""
        server = socket.socket()
        try:
            server.connect(self._behind)
            self._pump(client, server)
        except OSError:
            _cut(client)
        finally:
            client.close()
            server.close()

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        other, shuts = {client: server, server: client}, self._shuts
        while not self._closed.is_set():
            ready, way = select.select([client, server], [], [], POLL_S)[0], self._way
            if self._open.is_set() and shuts == self._shuts:
                for each in ready:
                    if not (data := each.recv(1 << 16)):
                        return
                    other[each].sendall(data)
            elif way is Way.SILENT:
                while not self._open.wait(POLL_S) and client not in ready:
                    ready = select.select([client], [], [], POLL_S)[0]
                self.met[way] += client in ready
                self._open.wait()
                return _cut(client)
            elif way in (Way.BUSY, Way.CUT) and not ready:
                continue
            elif way is Way.BUSY and client in ready:
                return self._say_slow_down(client)
            elif way is Way.CUT and client in ready:
                return self._lose(client, server)
            else:  # an answer was on its way when the door was shut, or the door has been opened again since
                return _cut(client)

    def _lose(self, client: socket.socket, server: socket.socket) -> None:
        request = _request(client)
        self.met[Way.CUT] += 1
        if self.met[Way.CUT] % 2:
            server.sendall(request[: len(request) // 2])
        else:
            server.sendall(request)
            server.settimeout(10)
            server.recv(1)  # the answer has begun, so the request was carried out
        _cut(client)

    def _say_slow_down(self, client: socket.socket) -> None:
        _request(client)
        self.met[Way.BUSY] += 1
        client.sendall(SAYS + SLOW_DOWN)
        client.shutdown(socket.SHUT_WR)
        client.settimeout(1)
        # until the client hangs up: closing a socket with unread data would lose the answer
        while client.recv(1 << 16):
            pass


def _request(client: socket.socket) -> bytes:
    """Reads the whole request.  botocore may wait for "100 Continue" before it sends the body."""
    data = bytearray()
    client.settimeout(5)
    while HEAD not in data:
        data += _received(client)
    head = data.index(HEAD) + len(HEAD)
    if b"100-continue" in data[:head].lower():
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    found = LENGTH.search(data[:head])
    while len(data) < head + (int(found[1]) if found else 0):
        data += _received(client)
    return bytes(data)


def _received(client: socket.socket) -> bytes:
    data = client.recv(1 << 16)
    if not data:
        raise ConnectionResetError("the client closed the connection before its request was complete")
    return data


def _cut(client: socket.socket) -> None:
    """Ends the connection now, and throws away what was on its way."""
    with suppress(OSError):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
