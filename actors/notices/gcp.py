"""Notices of Google Compute Engine, from its metadata server.

========================================  ====================================================================
instance/preempted                        ``TRUE`` when a spot machine is taken.  The question waits for a
                                          change, so the answer comes at once
instance/maintenance-event                ``TERMINATE_ON_HOST_MAINTENANCE``.  A machine that is moved while it
                                          runs (``MIGRATE_ON_HOST_MAINTENANCE``) is not taken
========================================  ====================================================================

Neither says when: it is ``notices.grace_s`` after the first time that it is said, which is Google's 30 s.  Set
it to the ``preemptionNoticeDuration`` of machines that have one.
"""

from __future__ import annotations

from urllib.parse import quote

from actors.notices.metadata import TIMEOUT_S, MetadataAnswer, ask, endpoint, unreadable
from actors.notices.port import FirstSaid, Notice, NoticeSource
from elastic.config.sections import Notices

HOME = "metadata.google.internal"
WAIT_S = 10
"""Seconds for which the question about ``preempted`` waits for a change.  A maintenance, which is announced a
minute ahead or more, is seen as late.
"""
FLAVOR = {"Metadata-Flavor": "Google"}
MAINTENANCE = ("NONE", "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE")


class Gcp(NoticeSource):
    every_s = 1.0

    def __init__(self, settings: Notices) -> None:
        self._grace_s, self._since = settings.grace_s, FirstSaid()
        self._service = f"http://{endpoint('GCE_METADATA_HOST', HOME)}"
        self._etag = ""
        """The mark of the newest answer about ``preempted``."""

    def look(self) -> Notice | None:
        event = self._read("maintenance-event", 0)
        if event.text not in MAINTENANCE:
            raise unreadable(event, f"one of {', '.join(MAINTENANCE)}")
        ends = event.text == MAINTENANCE[2]
        preempted = self._read("preempted", 0 if ends else WAIT_S)
        self._etag = preempted.headers.get("ETag", "")
        if preempted.text not in ("TRUE", "FALSE"):
            self._etag = ""
            raise unreadable(preempted, "TRUE or FALSE")
        said = "preempted" if preempted.text == "TRUE" else "host maintenance" if ends else ""
        since = self._since(said)
        return Notice(since + self._grace_s, text=said) if said else None

    def _read(self, key: str, wait_s: int) -> MetadataAnswer:
        """Returns what the server says about ``key``: at once without an earlier answer, else after a change,
        or ``wait_s``.
        """
        path, timeout_s = f"/computeMetadata/v1/instance/{key}", TIMEOUT_S
        if wait_s and self._etag:
            path += f"?wait_for_change=true&last_etag={quote(self._etag, safe='')}&timeout_sec={wait_s}"
            timeout_s += wait_s
        answer = ask(self._service, path, FLAVOR, timeout_s=timeout_s)
        if answer.headers.get("Metadata-Flavor") != "Google":
            raise unreadable(answer, "from Google's metadata server, which has the header Metadata-Flavor")
        return answer
