"""The metadata services of three clouds, emulated over HTTP on this machine, and what can go wrong with one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Answer = tuple[int, dict[str, str], str]


class Service:
    """One metadata service at ``url``.  Subclasses answer as their cloud does."""

    def __init__(self) -> None:
        self.asked = list[tuple[str, str]]()
        """Methods and paths of all questions."""
        self.broken = ""
        """The way in which it does not work.  "hangs": no answer; "drips": a byte now and then; "fails": 500;
        "wrong": nonsense.
        """
        self.changed = threading.Condition()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                service._handle(self)

            do_PUT = do_POST = do_GET

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads, self.server.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        with self.changed:
            self.broken = ""
            self.changed.notify_all()
        self.server.shutdown()
        self.server.server_close()

    def answer(self, method: str, path: str, headers: Any, body: str) -> Answer:
        raise NotImplementedError

    def nonsense(self, path: str) -> bool:
        """Returns whether the answer for ``path`` is nonsense while the service is "wrong"."""
        raise NotImplementedError

    def say(self, **values: Any) -> None:
        """Changes what the service says."""
        with self.changed:
            for name, value in values.items():
                setattr(self, name, value)
            self.changed.notify_all()

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        self.asked.append((handler.command, handler.path))
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0))).decode()
        if self.broken in ("hangs", "drips"):
            with self.changed:
                while self.broken and not self.changed.wait(0.05):
                    if self.broken == "drips":
                        try:
                            handler.wfile.write(b"H")
                        except OSError:
                            return
            return
        code, headers, text = self.answer(handler.command, handler.path, handler.headers, body)
        if self.broken == "fails":
            code, text = 500, "out of order"
        elif self.broken == "wrong" and self.nonsense(handler.path):
            code, text = 200, "<html>no such thing</html>"
        handler.send_response(code)
        for name, value in {"Content-Length": f"{len(text)}", **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(text.encode())


def utc(at: float) -> str:
    """Returns Unix seconds as AWS writes them."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class AwsService(Service):
    """IMDSv2: 401 without a living token, 404 without something to say."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = dict[str, float]()
        """The living tokens, with the monotonic time of their end."""
        self.ttl_s = 21600.0
        """The longest time of a token."""
        self.keys = dict[str, str]()
        """The words of the service, by key."""

    def nonsense(self, path: str) -> bool:
        return path.endswith("instance-action")

    def answer(self, method: str, path: str, headers: Any, body: str) -> Answer:
        if path == "/latest/api/token":
            ttl = headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if method != "PUT" or not ttl.isdecimal() or not 1 <= int(ttl) <= 21600:
                return 400, {}, ""
            lasts = min(float(ttl), self.ttl_s)
            token = f"token-{len(self.tokens)}=="
            self.tokens[token] = time.monotonic() + lasts
            return 200, {"X-aws-ec2-metadata-token-ttl-seconds": f"{lasts:.0f}"}, token
        if self.tokens.get(headers.get("X-aws-ec2-metadata-token", ""), 0.0) <= time.monotonic():
            return 401, {}, "<html>401 - Unauthorized</html>"
        text = self.keys.get(path.removeprefix("/latest/meta-data/"))
        return (404, {}, "<html>404 - Not Found</html>") if text is None else (200, {}, text)


class GcpService(Service):
    """Answers 403 without its header; a question may wait for a change."""

    def __init__(self) -> None:
        super().__init__()
        self.preempted, self.maintenance = "FALSE", "NONE"
        self.flavor = "Google"
        self.longest_s = 0.05
        """The longest time for which a question waits, whatever it asks for."""

    def nonsense(self, path: str) -> bool:
        return "preempted" in path

    def answer(self, method: str, path: str, headers: Any, body: str) -> Answer:
        if headers.get("Metadata-Flavor") != "Google":
            return 403, {}, "Missing Metadata-Flavor:Google header."
        parts = urlsplit(path)
        words = {name: values[0] for name, values in parse_qs(parts.query).items()}
        names = {"preempted": "preempted", "maintenance-event": "maintenance"}
        if (name := names.get(parts.path.removeprefix("/computeMetadata/v1/instance/"))) is None:
            return 404, {}, ""
        with self.changed:
            if words.get("wait_for_change") == "true":
                self.changed.wait_for(
                    lambda: self._etag(name) != words["last_etag"],
                    min(float(words["timeout_sec"]), self.longest_s),
                )
            return 200, {"Metadata-Flavor": self.flavor, "ETag": self._etag(name)}, getattr(self, name)

    def _etag(self, name: str) -> str:
        return f"{abs(hash(getattr(self, name))):016x}"


def event(at: float | None, kind: str = "Preempt", machines: tuple[str, ...] = ("vm_0",), **more: Any) -> Any:
    """Returns a scheduled event of Azure; one without a time has begun."""
    return {
        "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": [*machines],
        "EventStatus": "Started" if at is None else "Scheduled",
        "NotBefore": "" if at is None else formatdate(at, usegmt=True),
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    } | more


class AzureService(Service):
    """Answers 400 without its header."""

    def __init__(self) -> None:
        super().__init__()
        self.events = list[Any]()
        self.started = list[str]()
        """The ids of the events that were acknowledged."""

    def nonsense(self, path: str) -> bool:
        return "scheduledevents" in path

    def answer(self, method: str, path: str, headers: Any, body: str) -> Answer:
        parts = urlsplit(path)
        words = parse_qs(parts.query)
        if headers.get("Metadata") != "true" or "api-version" not in words:
            return 400, {}, '{"error": "Bad request. Required metadata header not specified"}'
        if parts.path == "/metadata/instance/compute/name" and words.get("format") == ["text"]:
            return 200, {}, "vm_0"
        if parts.path != "/metadata/scheduledevents":
            return 404, {}, ""
        if method == "POST":
            self.started += [each["EventId"] for each in json.loads(body)["StartRequests"]]
            return 200, {}, ""
        return 200, {}, json.dumps({"DocumentIncarnation": 2, "Events": self.events})


@contextmanager
def served(kind: Callable[[], Service]) -> Iterator[Any]:
    service = kind()
    try:
        yield service
    finally:
        service.close()
