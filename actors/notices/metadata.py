"""Asks the metadata service of a cloud, an HTTP server that only this machine reaches.

No proxy is asked, whatever the environment says: a proxy would ask the service of its own machine.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from actors.notices.port import Unreadable
from elastic.threads import later

TIMEOUT_S = 2.0
"""Seconds that a whole question may take, its answer included."""
LARGEST = 2**18
"""Largest size of an answer in bytes.  Azure's list of events is the longest answer, a few KB."""


@dataclass(frozen=True)
class MetadataAnswer:
    """An answer of a metadata service, and where it came from."""

    url: str
    status: int
    headers: Message
    text: str


def endpoint(variable: str, otherwise: str) -> str:
    """Returns the address that an environment variable of the cloud's own tools names, or ``otherwise``."""
    return os.environ.get(variable, "") or otherwise


def ask(
    service: str,
    path: str,
    headers: dict[str, str],
    *,
    method: str = "GET",
    body: str | None = None,
    timeout_s: float,
    expected: tuple[int, ...] = (200,),
) -> MetadataAnswer:
    """Returns the answer of ``service`` (``http://host:port``) for ``path``.

    Raises :class:`OSError` if the service does not answer within ``timeout_s``, or answers with another code
    than those ``expected``; :class:`Unreadable` if the answer is not HTTP, or too long.
    """
    parts = urlsplit(service)
    url, end = f"{service.rstrip('/')}{path}", time.monotonic() + timeout_s
    with closing(HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)) as connection:
        try:
            connection.connect()
            # the timeout of a socket is for one byte, and a server may send a byte now and then
            alarm = later(timeout_s, lambda: _cut(connection.sock))
            try:
                connection.request(method, f"{parts.path.rstrip('/')}{path}", body, headers)
                found = connection.getresponse()
                data = found.read(LARGEST + 1)
            finally:
                alarm.cancel()
        except (OSError, HTTPException) as error:
            late = isinstance(error, TimeoutError) or time.monotonic() >= end
            why = f"no answer within {timeout_s:g} s" if late else f"{type(error).__name__}: {error}"
            raise (OSError if late or isinstance(error, OSError) else Unreadable)(f"{url}: {why}") from None
    if time.monotonic() >= end:
        raise OSError(f"{url}: no answer within {timeout_s:g} s")
    if found.status not in expected:
        raise OSError(f"{url}: {method} was answered with {found.status} {found.reason}")
    if len(data) > LARGEST:
        raise Unreadable(f"{url}: the answer has more than {LARGEST} bytes")
    return MetadataAnswer(url, found.status, found.headers, data.decode("utf-8", "replace").strip())


def unreadable(answer: MetadataAnswer, wanted: str) -> Unreadable:
    """Returns the error for an answer that is not ``wanted``; the error shows its first letters."""
    return Unreadable(f"{answer.url}: the answer is not {wanted}, but {answer.text[:80]!r}")


def _cut(connection: Any) -> None:
    with suppress(OSError):  # it was just closed
        connection.shutdown(socket.SHUT_RDWR)
