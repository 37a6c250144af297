"""Direct sockets between the processes of one run; a process that does not know the run's secret learns
nothing.

Both sides first prove that they know the secret (HMAC-SHA256 over both sides' nonces, RFC 2104); the secret
itself never travels.  Then they exchange messages: the length of a JSON head, the head, and after it as many
bytes as both sides expect.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Self

from elastic.errors import WireError
from elastic.threads import keep_going

NONCE = 32
SILENCE_S = 10.0
"""Seconds without a byte after which the other side counts as dead."""
RETRY_S = 0.1
"""Seconds after a failed ``accept`` until the next one."""
HEAD_LIMIT = 2**26
"""Largest head of a message in bytes: a larger length is garbage, for which no memory is taken."""
LENGTH = struct.Struct("<I")

Serve = Callable[["Wire", dict[str, Any]], None]
"""A function that answers one request on its wire."""


class Wire:
    """One proven connection, for one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.settimeout(SILENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(cls, address: str, secret: bytes) -> Wire:
        """Connects to the :class:`Listener` at "host:port".  Raises :class:`WireError`."""
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), timeout=SILENCE_S)
        except (OSError, ValueError) as error:
            raise WireError(f"nobody answers at {address}: {error}") from error
        wire = cls(connection)
        try:
            theirs, ours = bytes(wire.receive(NONCE)), secrets.token_bytes(NONCE)
            wire.send_raw([ours, _proof(secret, b"client", theirs, ours)])
            proven = hmac.compare_digest(bytes(wire.receive(NONCE)), _proof(secret, b"server", theirs, ours))
        except WireError as error:
            wire.close()
            raise WireError(f"{address} did not accept this process as part of its run: {error}") from error
        if not proven:
            wire.close()
            raise WireError(f"{address} does not know the secret of this run")
        return wire

    @classmethod
    def accept(cls, connection: socket.socket, secret: bytes) -> Wire:
        """Returns the wire of an accepted connection.  Raises :class:`WireError` if the other side does not
        know the secret.
        """
        wire, ours = cls(connection), secrets.token_bytes(NONCE)
        wire.send_raw([ours])
        theirs = bytes(wire.receive(NONCE))
        if not hmac.compare_digest(bytes(wire.receive(NONCE)), _proof(secret, b"client", ours, theirs)):
            raise WireError("it does not know the secret of this run")
        wire.send_raw([_proof(secret, b"server", ours, theirs)])
        return wire

    def send(self, head: dict[str, Any], parts: Iterable[bytes | memoryview] = ()) -> None:
        """Sends a message: ``head``, then the bytes of ``parts``.  Raises :class:`WireError`."""
        text = json.dumps(head).encode()
        self.send_raw(chain([LENGTH.pack(len(text)) + text], parts))

    def send_raw(self, parts: Iterable[bytes | memoryview]) -> None:
        """Sends the bytes of ``parts`` without a head.  Raises :class:`WireError`."""
        try:
            for part in parts:
                left = memoryview(part).cast("B")
                while left:  # not ``sendall``: its timeout limits the whole transfer, not a silence
                    left = left[self._socket.send(left) :]
        except OSError as error:
            raise WireError(f"the other process is gone: {error}") from error

    def head(self) -> dict[str, Any]:
        """Returns the head of the next message.  Raises :class:`WireError` if there is none, or if the
        connection has ended.
        """
        (length,) = LENGTH.unpack(self.receive(LENGTH.size))
        if length > HEAD_LIMIT:
            raise WireError(
                f"the message announces a head of {length} bytes, more than the {HEAD_LIMIT} that are allowed"
            )
        try:
            found: dict[str, Any] = json.loads(bytes(self.receive(length)))
        except ValueError as error:
            raise WireError(f"the head of a message is not JSON: {error}") from error
        return found

    def receive(self, size: int) -> bytearray:
        """Returns the next ``size`` bytes.  Raises :class:`WireError`."""
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return data

    def receive_into(self, data: memoryview) -> None:
        """Receives exactly as many bytes as ``data`` has.  Raises :class:`WireError`."""
        done = 0
        try:
            while done < len(data):
                got = self._socket.recv_into(data[done:])
                if got == 0:
                    raise WireError("the other process closed the connection")
                done += got
        except OSError as error:
            raise WireError(f"the other process is gone: {error}") from error

    def close(self) -> None:
        self._socket.close()


class Listener:
    """Answers the requests of proven connections, each on a thread of its own, until it is closed."""

    def __init__(self, host: str, secret: bytes, serve: Serve, say: Callable[[str], None] = print) -> None:
        """``say`` receives a sentence for each connection that is refused."""
        self._secret, self._serve, self._say, self._closed = secret, serve, say, threading.Event()
        self._socket = socket.create_server((host, 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        keep_going(self._accept, "listener", say)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, (peer, *_) = self._socket.accept()
            # the listener was closed; or an error that passes, such as no free descriptor
            except OSError:
                if self._closed.wait(RETRY_S):
                    return
                continue
            threading.Thread(target=self._answer, args=(connection, peer), name="wire", daemon=True).start()

    def _answer(self, connection: socket.socket, peer: str) -> None:
        with connection:
            try:
                wire = Wire.accept(connection, self._secret)
            except (WireError, OSError) as error:
                self._say(f"{peer} was refused at {self.address}: {error}")
                return
            try:
                while True:
                    self._serve(wire, wire.head())
            # the other side hung up, or there is no memory for the copy that it brings
            except (WireError, OSError):
                return

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # otherwise the thread would stay in ``accept``
        self._socket.close()


def _proof(secret: bytes, side: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.new(secret, side + server + client, hashlib.sha256).digest()
