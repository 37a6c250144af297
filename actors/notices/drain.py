"""Ray's own notice: a node is drained, by its autoscaler, by Kubernetes, or because its raylet got SIGTERM.

Ray's head knows all of them, so the coordinator asks it once for the whole cluster.  Ray itself lets a node
that is drained live on, also after the deadline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from actors.notices.port import ClusterSource, FirstSaid, Notice
from elastic.config.sections import Notices
from elastic.ids import NodeId

ANSWER_S = 5.0
"""Seconds in which Ray's head must answer."""


class Drain(ClusterSource):
    every_s = 2.0

    def __init__(self, settings: Notices) -> None:
        self._grace_s, self._since = settings.grace_s, defaultdict[str, FirstSaid](FirstSaid)

    def look(self) -> Mapping[NodeId, Notice]:
        # a driver that only reads the table of sources needs no Ray
        from ray._private.worker import global_worker
        from ray.exceptions import RayError

        try:
            draining = global_worker.gcs_client.get_draining_nodes(timeout=ANSWER_S)
        except RayError as error:
            raise OSError(f"Ray's head does not say which nodes it drains: {error}") from None
        for node in self._since.keys() - draining.keys():
            del self._since[node]
        # 0 stands for no deadline
        return {
            NodeId(node): Notice(
                deadline_ms / 1000 or self._since[node]("drained") + self._grace_s,
                text="Ray drains this node",
            )
            for node, deadline_ms in draining.items()
        }
