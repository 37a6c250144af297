"""A filter for Swift's proxy, which makes create-only writes of one object wait for each other.

Swift decides ``If-None-Match: *`` when a PUT begins (its object server looks once, before it receives the
body), so several overlapping PUTs are all told that they won.  There is one proxy, which is one process, so a
lock for each key is enough.  Below a folder ``UNCHANGED`` the server is as it comes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from eventlet.semaphore import Semaphore

from tests.support.swift import UNCHANGED

App = Callable[..., Iterable[bytes]]


def filter_factory(settings: dict[str, str], **more: str) -> Callable[[App], App]:
    """The factory that ``paste.filter_factory`` names."""
    locks: defaultdict[str, Any] = defaultdict(Semaphore)

    def around(app: App) -> App:
        def once(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            asks = "HTTP_IF_NONE_MATCH" in environ and environ["REQUEST_METHOD"] in ("PUT", "POST")
            if not asks or f"/{UNCHANGED}/" in environ["PATH_INFO"]:
                return app(environ, start)
            with locks[environ["PATH_INFO"]]:
                # the completion of a multipart upload does its work while its answer is read
                return list(app(environ, start))

        return once

    return around
