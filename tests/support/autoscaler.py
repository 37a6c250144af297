"""A cloud for Ray's own autoscaler: its machines are raylets on this machine, started by ``ray start``.

Ray's fake cloud is not used: the wheel of Ray 2.60 lacks its ``example.yaml``, and
``ray.cluster_utils.AutoscalingCluster`` ends every Ray process of the machine (``ray stop --force``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)
from ray.autoscaler.tags import (
    NODE_KIND_WORKER,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

from tests.support import warm
from tests.support.clusters import Nodes
from tests.support.commands import ROOT

IDLE_MINUTES = 0.05


def growing(forks: warm.Warm, most: int) -> Nodes:
    """Returns a cluster whose head has no CPU to give, and whose autoscaler may start ``most`` nodes with one
    CPU each.
    """
    head, node = {"resources": {"CPU": 0}, "max_workers": 0}, {"resources": {"CPU": 1}, "max_workers": most}
    scales: dict[str, Any] = {
        "cluster_name": "growing",
        "max_workers": most,
        "idle_timeout_minutes": IDLE_MINUTES,
        "provider": {
            "type": "external",
            "module": f"{__name__}.Cloud",
            "head_node_id": FAKE_HEAD_NODE_ID,
            "launch_multiple": True,
            "disable_node_updaters": True,
        },
        "available_node_types": {
            FAKE_HEAD_NODE_TYPE: {**head, "node_config": {}},
            "spot": {**node, "node_config": {}, "min_workers": 0},
        },
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "initialization_commands": [],
    }
    for commands in ("setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray"):
        scales[f"{commands}_commands"] = []
    asked = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "PYTHONPATH": str(ROOT)}
    asked |= {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID}
    asked |= {"RAY_NODE_TYPE_NAME": FAKE_HEAD_NODE_TYPE}  # Ray gives such a head the id itself
    return Nodes(Path(sys.executable), forks=forks, jobs=False, scales=scales, **asked)


class Cloud(FakeMultiNodeProvider):
    """The cloud as the autoscaler sees it, in the autoscaler's process.  The file of a node's id has the pid
    of its ``ray start``.
    """

    def _next_hex_node_id(self) -> str:
        """Returns an id that differs from others in its first digits, which messages and names of keepers
        have.
        """
        self._next_node_id += 1
        return f"{self._next_node_id:08x}{'f' * 48}"

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        with self.lock:
            gone = [
                node
                for node, known in self._nodes.items()
                if "node" in known and known["node"].poll() is not None
            ]
            for node in gone:
                del self._nodes[node]
            return list(super().non_terminated_nodes(tag_filters))

    def _create_node_with_resources_and_labels(
        self, node_config: Any, tags: dict[str, str], count: int, resources: dict[str, float], labels: Any
    ) -> None:
        with self.lock:
            kind, node = tags[TAG_RAY_USER_NODE_TYPE], self._next_hex_node_id()
            address = next(word for word in sys.argv if word.startswith("--gcs-address=")).partition("=")[2]
            start = [sys.executable, warm.__file__, "node", "start", "--block", f"--address={address}"]
            start += ["--object-store-memory=80000000", "--include-log-monitor=false"]
            start += [f"--num-cpus={int(resources['CPU'])}"]
            has = {
                "RAY_OVERRIDE_NODE_ID_FOR_TESTING": node,
                "RAY_CLOUD_INSTANCE_ID": node,
                "RAY_NODE_TYPE_NAME": kind,
            }
            with open(Path.cwd() / f"output-{node[-5:]}", "wb") as output:
                process = subprocess.Popen(
                    start, env=os.environ | has, stdout=output, stderr=subprocess.STDOUT
                )
            Path(node).write_text(json.dumps(process.pid))
            own = {
                TAG_RAY_NODE_KIND: NODE_KIND_WORKER,
                TAG_RAY_USER_NODE_TYPE: kind,
                TAG_RAY_NODE_NAME: node,
                TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
            }
            self._nodes[node] = {"tags": own | tags, "node": process}

    def _terminate_node(self, node: dict[str, Any]) -> None:
        node["node"].terminate()
