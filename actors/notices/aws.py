"""Notices of Amazon EC2, from its instance metadata service (IMDSv2).

========================================  ====================================================================
spot/instance-action                      a spot machine is taken at the time that it says, 2 minutes ahead
autoscaling/target-lifecycle-state        an auto-scaling group takes the machine: ``Terminated``, no time.
                                          The first address never says so
events/recommendations/rebalance          an advice: the machine is more likely to be taken, or nothing comes
========================================  ====================================================================

Each answers 404 until there is something to say, and 401 without a token.  In a container the answer to the
question for a token may not arrive, if the machine allows one hop only.
"""

from __future__ import annotations

import json
import time
from datetime import datetime

from actors.notices.metadata import TIMEOUT_S, MetadataAnswer, ask, endpoint, unreadable
from actors.notices.port import ADVICE_S, FirstSaid, Notice, NoticeSource
from elastic.config.sections import Notices

HOME = "http://169.254.169.254"
TOKEN_S = 21600
"""Seconds for which a token is asked: the longest that AWS gives."""
RENEW = 0.9
"""Part of a token's time after which it is renewed, so that no look meets its end."""
ACTIONS = ("terminate", "stop", "hibernate")


class Aws(NoticeSource):
    every_s = 5.0  # as AWS recommends

    def __init__(self, settings: Notices) -> None:
        self._grace_s, self._since = settings.grace_s, FirstSaid()
        self._service = endpoint("AWS_EC2_METADATA_SERVICE_ENDPOINT", HOME)
        self._token, self._renew_at = "", 0.0

    def look(self) -> Notice | None:
        if (answer := self._read("spot/instance-action")) is not None:
            return _taken(answer)
        state = self._read("autoscaling/target-lifecycle-state")
        since = self._since(state.text if state is not None else "")
        if state is not None and state.text == "Terminated":
            return Notice(since + self._grace_s, text="its auto-scaling group takes this machine")
        if (answer := self._read("events/recommendations/rebalance")) is not None:
            noticed_at = _seconds(answer, "noticeTime")
            return Notice(noticed_at + ADVICE_S, advice=True, text="rebalance recommendation")
        return None

    def _read(self, key: str) -> MetadataAnswer | None:
        """Returns what the service says about ``key``; None if it says nothing."""
        path = f"/latest/meta-data/{key}"
        if time.monotonic() >= self._renew_at:
            self._renew()
        for last in (False, True):
            headers, fine = {"X-aws-ec2-metadata-token": self._token}, (200, 404)
            answer = ask(
                self._service, path, headers, timeout_s=TIMEOUT_S, expected=fine if last else (*fine, 401)
            )
            if answer.status != 401:
                break
            self._renew()  # the token was not accepted any more
        return answer if answer.status == 200 else None

    def _renew(self) -> None:
        ttl = "X-aws-ec2-metadata-token-ttl-seconds"
        asked = {ttl: f"{TOKEN_S}"}
        answer = ask(self._service, "/latest/api/token", asked, method="PUT", timeout_s=TIMEOUT_S)
        lasts = answer.headers.get(ttl, "")
        if not answer.text.isprintable() or not answer.text or not lasts.isdecimal():
            raise unreadable(answer, "a token with its time")
        self._token, self._renew_at = answer.text, time.monotonic() + RENEW * int(lasts)


def _taken(answer: MetadataAnswer) -> Notice:
    at = _seconds(answer, "time")
    if (action := json.loads(answer.text).get("action")) not in ACTIONS:
        raise unreadable(answer, f"one of the actions {', '.join(ACTIONS)}")
    return Notice(at, text=f"spot interruption: {action}")


def _seconds(answer: MetadataAnswer, key: str) -> float:
    """Returns the time under ``key`` of a JSON object, as ``2026-11-30T17:11:44Z``, in Unix seconds."""
    try:
        at = datetime.fromisoformat(json.loads(answer.text)[key])
    except (ValueError, KeyError, TypeError):
        raise unreadable(answer, f"JSON with a time as {key!r}") from None
    if at.tzinfo is None:
        raise unreadable(answer, f"JSON with a time in UTC as {key!r}")
    return at.timestamp()
