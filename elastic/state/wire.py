"""Direct sockets between the processes of one run: who does not know the run's secret is told nothing.

Both sides prove that they know it (HMAC-SHA256 over both sides' nonces, RFC 2104) before anything else is said; the secret itself never
travels.  Then messages: the length of a JSON head, the head, and as many bytes after it as both know there must be.
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
from typing import Any, Self

from elastic.errors import WireError

NONCE = 32
SILENCE_S = 10.0
"""No byte for so long: the other side is dead, or as good as that."""
RETRY_S = 0.1
HEAD_LIMIT = 2**26
LENGTH = struct.Struct("<I")

Serve = Callable[["Wire", dict[str, Any]], None]
"""Answers one request on its wire."""


class Wire:
    """One connection, proven.  Not for several threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.settimeout(SILENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(cls, address: str, secret: bytes) -> Wire:
        """To the :class:`Listener` at "host:port".  Raises :class:`WireError`."""
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
            raise WireError(f"{address} did not take this process for one of its run: {error}") from error
        if not proven:
            wire.close()
            raise WireError(f"{address} does not know the secret of this run")
        return wire

    @classmethod
    def accept(cls, connection: socket.socket, secret: bytes) -> Wire:
        """Raises :class:`WireError` for a stranger."""
        wire, ours = cls(connection), secrets.token_bytes(NONCE)
        wire.send_raw([ours])
        theirs = bytes(wire.receive(NONCE))
        if not hmac.compare_digest(bytes(wire.receive(NONCE)), _proof(secret, b"client", ours, theirs)):
            raise WireError("it does not know the secret of this run")
        wire.send_raw([_proof(secret, b"server", ours, theirs)])
        return wire

    def send(self, head: dict[str, Any], parts: Iterable[bytes | memoryview] = ()) -> None:
        text = json.dumps(head).encode()
        self.send_raw([LENGTH.pack(len(text)) + text, *parts])

    def send_raw(self, parts: Iterable[bytes | memoryview]) -> None:
        try:
            for part in parts:
                left = memoryview(part).cast("B")
                while left:  # the timeout of ``sendall`` would be for all of it, however large, and not for silence
                    left = left[self._socket.send(left) :]
        except OSError as error:
            raise WireError(f"the other side is gone: {error}") from error

    def head(self) -> dict[str, Any]:
        """The next message, without the bytes that follow it.  Whatever else comes raises :class:`WireError`, as the end does."""
        (length,) = LENGTH.unpack(self.receive(LENGTH.size))
        if length > HEAD_LIMIT:
            raise WireError(f"a head of {length} bytes")
        try:
            found: dict[str, Any] = json.loads(bytes(self.receive(length)))
        except ValueError as error:
            raise WireError(f"no head: {error}") from error
        return found

    def receive(self, size: int) -> bytearray:
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return data

    def receive_into(self, data: memoryview) -> None:
        """Exactly as many bytes as ``data`` has."""
        done = 0
        try:
            while done < len(data):
                got = self._socket.recv_into(data[done:])
                if got == 0:
                    raise WireError("the other side hung up")
                done += got
        except OSError as error:
            raise WireError(f"the other side is gone: {error}") from error

    def close(self) -> None:
        self._socket.close()


class Listener:
    """Answers proven requests, each connection on a thread of its own, until it is closed."""

    def __init__(self, host: str, secret: bytes, serve: Serve, say: Callable[[str], None] = print) -> None:
        """``say``: that a stranger was refused."""
        self._secret, self._serve, self._say, self._closed = secret, serve, say, threading.Event()
        self._socket = socket.create_server((host, 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, (peer, *_) = self._socket.accept()
            except OSError:  # it was closed; or no descriptor was left, say, and others end
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
            except (WireError, OSError):  # the end of the conversation, or no memory for what is to be kept
                return

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # or the thread in ``accept`` would stay there
        self._socket.close()


def _proof(secret: bytes, side: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.new(secret, side + server + client, hashlib.sha256).digest()
