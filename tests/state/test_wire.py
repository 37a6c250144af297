"""A peer that does not know the run's secret is refused and named; a message arrives whole or not at all."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from elastic.errors import WireError
from elastic.state import wire
from elastic.state.wire import Listener, Wire
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.fast
SECRET = b"s" * 32


def echo(connection: Wire, head: dict[str, Any]) -> None:
    data = connection.receive(head["size"])
    connection.send({"size": head["size"]}, [data] if head["whole"] else [data[:-1]])
    if not head["whole"]:
        connection.close()


@pytest.fixture
def listener() -> Any:
    listener = Listener("127.0.0.1", SECRET, echo)
    yield listener
    listener.close()


def test_messages_and_bytes_come_back(listener: Listener) -> None:
    connection = Wire.connect(listener.address, SECRET)
    for size in (0, 1, 5_000_000):
        data = bytes(i % 251 for i in range(size))
        connection.send({"size": size, "whole": True}, [data])
        assert connection.head() == {"size": size} and bytes(connection.receive(size)) == data
    connection.send({"size": 10, "whole": False}, [bytes(10)])
    connection.head()
    with pytest.raises(WireError, match=r"closed the connection|gone"):
        connection.receive(10)
    connection.close()


def test_what_takes_long_is_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part takes more than four seconds, and some of it moves all the time; the deadline is three seconds
    in which nothing moves.
    """
    monkeypatch.setattr(wire, "SILENCE_S", 3.0)

    def slowly(connection: Wire, head: dict[str, Any]) -> None:
        for _ in range(head["parts"]):
            time.sleep(0.07)
            connection.receive(1 << 20)
        connection.send({})

    with (
        Listener("127.0.0.1", SECRET, slowly) as listener,
        contextlib.closing(Wire.connect(listener.address, SECRET)) as connection,
    ):
        began = time.monotonic()
        connection.send({"parts": 60}, [bytes(60 << 20)])
        assert connection.head() == {} and time.monotonic() - began > 4.0


def test_a_stranger_is_refused_and_named(listener: Listener, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WireError, match="did not accept this process as part of its run"):
        Wire.connect(listener.address, b"x" * 32)
    host, _, port = listener.address.rpartition(":")
    with socket.create_connection((host, int(port))) as plain:
        plain.recv(wire.NONCE)
        plain.sendall(b"GET / HTTP/1.1\r\nHost: somebody-who-lost-his-way-here\r\nAccept: everything\r\n\r\n")
        plain.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert plain.recv(1000) == b"", "it is told nothing"
    told = capfd.readouterr().out
    assert told.count("127.0.0.1 was refused at") == 2 and "does not know the secret" in told
    connection = Wire.connect(listener.address, SECRET)  # the others are served all the same
    connection.send({"size": 3, "whole": True}, [b"abc"])
    assert connection.head() == {"size": 3}
    connection.close()


def test_what_is_no_message_ends_the_conversation_and_nothing_else(listener: Listener) -> None:
    """A side that has lost count sends bytes where a head should be: this is a broken wire, not an error in
    the reader's code.
    """
    no_message = wire.LENGTH.pack(4) + b"\xff{]x"
    with contextlib.closing(Wire.connect(listener.address, SECRET)) as lost:
        lost.send_raw([no_message])
        with pytest.raises(WireError, match=r"closed the connection|gone"):
            lost.head()

    def babble(connection: Wire, head: dict[str, Any]) -> None:
        connection.send_raw([no_message])

    with (
        Listener("127.0.0.1", SECRET, babble) as babbler,
        contextlib.closing(Wire.connect(babbler.address, SECRET)) as reader,
    ):
        reader.send({})
        with pytest.raises(WireError, match="the head of a message is not JSON"):
            reader.head()


def test_an_impostor_does_not_learn_what_it_would_need() -> None:
    """It listens at the address, and does not know the secret: it refuses whoever connects."""
    with Listener("127.0.0.1", b"another" * 5, echo) as impostor, pytest.raises(WireError):
        Wire.connect(impostor.address, SECRET)


ANSWERS: dict[str, Callable[[bytes, bytes, bytes], bytes]] = {
    "zeros": lambda ours, theirs, proof: bytes(wire.NONCE),
    "their own proof": lambda ours, theirs, proof: proof,
    "the proof of a client": lambda ours, theirs, proof: hmac.digest(
        b"another" * 5, b"client" + ours + theirs, "sha256"
    ),
    "another secret": lambda ours, theirs, proof: hmac.digest(
        b"another" * 5, b"server" + ours + theirs, "sha256"
    ),
    "control": lambda ours, theirs, proof: hmac.digest(SECRET, b"server" + ours + theirs, "sha256"),
}
"""The answer of a server in plain sockets, computed from the nonces of both sides and the client's proof."""


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_server_that_welcomes_everybody_is_noticed(answer: str) -> None:
    """It is none of our listeners: it refuses nobody, and answers what it can.  The control knows the secret,
    and is told the message.
    """
    told: list[bytes] = []

    def welcome(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as heard:
            connection.sendall(ours := bytes(range(wire.NONCE)))
            theirs, proof = heard.read(wire.NONCE), heard.read(wire.NONCE)
            connection.sendall(ANSWERS[answer](ours, theirs, proof))
            told.append(heard.read())

    with socket.create_server(("127.0.0.1", 0)) as server:
        welcoming = threading.Thread(target=welcome, args=(server,), daemon=True)
        welcoming.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if answer == "control":
            with contextlib.closing(Wire.connect(address, SECRET)) as connection:
                connection.send({"what": "a copy"})
        else:
            with pytest.raises(WireError, match="does not know the secret of this run"):
                Wire.connect(address, SECRET)
        welcoming.join(PATIENCE_S)
    assert (b"a copy" in told[0]) == (answer == "control") and (answer == "control" or told[0] == b"")


def test_nobody_there_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(WireError, match="nobody answers"):
        Wire.connect(f"127.0.0.1:{port}", SECRET)


def test_silence_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SILENCE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(WireError):
        Wire.connect(f"127.0.0.1:{mute.getsockname()[1]}", SECRET)
