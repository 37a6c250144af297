"""Ray's own notice: the node is drained, by its autoscaler, by Kubernetes, or because its raylet got SIGTERM.

Ray itself lets a node that is drained live on, also after the deadline.
"""

from __future__ import annotations

from actors.notices.port import FirstSaid, Notice, NoticeSource
from elastic.config.sections import Notices


class Drain(NoticeSource):
    every_s = 2.0  # all keepers ask the one head

    def __init__(self, settings: Notices) -> None:
        import ray  # a driver that only reads the table of sources needs no Ray

        self._grace_s, self._since = settings.grace_s, FirstSaid()
        self._node = ray.get_runtime_context().get_node_id()

    def look(self) -> Notice | None:
        from ray._private.state import state

        deadline_ms = state.get_draining_nodes().get(self._node)
        since = self._since("" if deadline_ms is None else "drained")
        if deadline_ms is None:
            return None
        # 0 stands for no deadline
        return Notice(deadline_ms / 1000 or since + self._grace_s, text="Ray drains this node")
