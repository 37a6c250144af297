"""An S3 server that misbehaves on demand: moto, on loopback, behind a wrapper that can answer 503, cut, delay
and damage.

moto checks neither signatures nor digests, and asks whether an object is there before it writes; the wrapper
lets one request in at a time, so that a create-only write is atomic.  For a server that is right by itself
see ``swift.py``.
"""

from __future__ import annotations

import io
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

Environ = dict[str, Any]
Start = Callable[..., Any]
App = Callable[[Environ, Start], Iterable[bytes]]
Fault = Callable[[App, Environ, Start], Iterable[bytes]]


@dataclass
class Rule:
    pattern: str
    fault: Fault
    left: float


@dataclass
class Answer:
    """The answer that the server would have given."""

    status: str = ""
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""


class Unruly:
    """``with Unruly() as server:`` serves S3 at ``server.endpoint``.  ``requests`` lists what was asked, as
    ``PUT /bucket/key?query``.
    """

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import (
            DomainDispatcherApplication,
            MotoRequestHandler,
            create_backend_app,
        )
        from werkzeug.serving import make_server

        self.requests: list[str] = []
        self._rules: list[Rule] = []
        self._one = threading.Lock()
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._serve, threaded=True, request_handler=MotoRequestHandler
        )
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._thread = threading.Thread(target=self._server.serve_forever, name="unruly", daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a node that may use the server."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": "anybody",
            "AWS_SECRET_ACCESS_KEY": "anything",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def when(self, pattern: str, fault: Fault, times: float = 1) -> None:
        """Applies ``fault`` to the next ``times`` requests that match the regular expression."""
        self._rules.append(Rule(pattern, fault, times))

    def behave(self) -> None:
        self._rules.clear()
        self.requests.clear()

    def asked(self, pattern: str) -> int:
        return sum(re.search(pattern, request) is not None for request in self.requests)

    def __enter__(self) -> Unruly:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()

    def _serve(self, environ: Environ, start: Start) -> Iterable[bytes]:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}"
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        self.requests.append(request)
        for rule in self._rules:
            if rule.left > 0 and re.search(rule.pattern, request):
                rule.left -= 1
                return rule.fault(self._decent, environ, start)
        return self._decent(environ, start)

    def _decent(self, environ: Environ, start: Start) -> Iterable[bytes]:
        with self._one:
            return list(self._moto(environ, start))


# ---- faults


def says(status: str, code: str) -> Fault:
    """Answers with this status and does nothing."""

    def fault(app: App, environ: Environ, start: Start) -> Iterable[bytes]:
        text = f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>".encode()
        text = b"" if environ["REQUEST_METHOD"] == "HEAD" else text
        start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
        return [text]

    return fault


def reset(app: App, environ: Environ, start: Start) -> Iterable[bytes]:
    """Cuts the connection before anything is done."""
    _cut(environ)
    raise ConnectionResetError


def lost_answer(app: App, environ: Environ, start: Start) -> Iterable[bytes]:
    """Carries out the request, and cuts the connection before the answer."""
    list(app(environ, lambda *_: lambda _: None))
    _cut(environ)
    raise ConnectionResetError


def silent(until: threading.Event) -> Fault:
    """Says nothing until the test allows it, then cuts the connection."""

    def fault(app: App, environ: Environ, start: Start) -> Iterable[bytes]:
        until.wait(60)
        return reset(app, environ, start)

    return fault


def dripping(until: threading.Event) -> Fault:
    """Sends a byte of the answer every now and then, so that no socket times out."""

    def fault(app: App, environ: Environ, start: Start) -> Iterable[bytes]:
        answer = _answer(app, environ)
        start(answer.status, answer.headers)
        for byte in answer.body:
            yield bytes([byte])
            if until.wait(0.02):
                break
        _cut(environ)

    return fault


def truncated(app: App, environ: Environ, start: Start) -> Iterable[bytes]:
    """Sends half of the body, then ends the connection."""
    answer = _answer(app, environ)
    start(answer.status, answer.headers)
    yield answer.body[: len(answer.body) // 2]
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


def flipped(app: App, environ: Environ, start: Start) -> Iterable[bytes]:
    """Flips one bit of the data that is read."""
    answer = _answer(app, environ)
    start(answer.status, answer.headers)
    return [_flip(answer.body)]


def flipped_upload(app: App, environ: Environ, start: Start) -> Iterable[bytes]:
    """Flips one bit of the data that is written."""
    environ["wsgi.input"] = io.BytesIO(_flip(environ["wsgi.input"].read()))
    return app(environ, start)


def framed(app: App, environ: Environ, start: Start) -> Iterable[bytes]:
    """Saves the frame of a checksum trailer inside the object."""
    body = environ["wsgi.input"].read()
    body = b"%x\r\n%b\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n" % (len(body), body)
    environ["wsgi.input"], environ["CONTENT_LENGTH"] = io.BytesIO(body), str(len(body))
    return app(environ, start)


def without_mark(app: App, environ: Environ, start: Start) -> Iterable[bytes]:
    """Answers without the metadata of the object."""
    answer = _answer(app, environ)
    start(
        answer.status,
        [(name, value) for name, value in answer.headers if not name.lower().startswith("x-amz-meta-")],
    )
    return [answer.body]


def without(header: str) -> Fault:
    """Ignores the header ``HTTP_…``."""

    def fault(app: App, environ: Environ, start: Start) -> Iterable[bytes]:
        environ.pop(header, None)
        return app(environ, start)

    return fault


def _answer(app: App, environ: Environ) -> Answer:
    answer = Answer()

    def start(status: str, headers: list[tuple[str, str]], *_: object) -> Callable[[bytes], None]:
        answer.status, answer.headers = status, list(headers)
        return lambda _: None

    answer.body = b"".join(app(environ, start))
    return answer


def _flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else data


def _cut(environ: Environ) -> None:
    """Ends the connection now, and throws away what else the server had to send."""
    connection = environ["werkzeug.socket"]
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.shutdown(socket.SHUT_RDWR)
