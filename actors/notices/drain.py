"""Ray's own notice: the node is drained, by its autoscaler, by Kubernetes, or because its raylet got SIGTERM.

Ray itself lets a node that is drained live on, also after the deadline.
"""

from __future__ import annotations

from actors.notices.port import FirstSaid, Notice, NoticeSource
from elastic.config.sections import Notices

ANSWER_S = 5.0
"""Seconds in which Ray's head must answer."""


class Drain(NoticeSource):
    every_s = 2.0  # all keepers ask the one head

    def __init__(self, settings: Notices) -> None:
        import ray  # a driver that only reads the table of sources needs no Ray

        self._grace_s, self._since = settings.grace_s, FirstSaid()
        self._node = ray.get_runtime_context().get_node_id()

    def look(self) -> Notice | None:
        from ray._private.worker import global_worker
        from ray.exceptions import RayError

        try:
            draining = global_worker.gcs_client.get_draining_nodes(timeout=ANSWER_S)
        except RayError as error:
            raise OSError(f"Ray's head does not say which nodes it drains: {error}") from None
        deadline_ms = draining.get(self._node)
        since = self._since("" if deadline_ms is None else "drained")
        if deadline_ms is None:
            return None
        # 0 stands for no deadline
        return Notice(deadline_ms / 1000 or since + self._grace_s, text="Ray drains this node")
