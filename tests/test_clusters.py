"""The clusters in ``examples/clusters`` are valid, as far as that can be checked without a cloud."""

from __future__ import annotations

import copy
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import botocore.session
import jsonschema
import pytest
import ray
import yaml
from botocore.validate import ParamValidator
from packaging.requirements import Requirement
from ray._private import ray_constants
from ray.autoscaler._private.util import prepare_config, validate_config

from actors import cluster
from elastic.errors import PlatformGaveUp
from elastic.job import Job

ROOT = Path(__file__).parents[1]
CLUSTERS = ROOT / "examples" / "clusters"
JOB = Job.load(CLUSTERS / "job.toml")


def read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text())
    return document


AWS, GCP, RAY_JOB, SKY = map(read, ("aws", "gcp", "kuberay", "skypilot"))
RAY_UP = {"aws": AWS, "gcp": GCP}
STEPS = ("setup_commands", "head_setup_commands", "head_start_ray_commands", "worker_start_ray_commands")
DRAIN_S = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"

QUANTITIES = {"cpu": str, "memory": str, "nvidia.com/gpu": str}
POD = {
    "spec": {
        "serviceAccountName": str,
        "terminationGracePeriodSeconds": int,
        "nodeSelector": dict,
        "tolerations": [{"key": str, "operator": ("Exists", "Equal"), "effect": ("NoSchedule", "NoExecute")}],
        "containers": [
            {
                "name": str,
                "image": str,
                "resources": {"requests": QUANTITIES, "limits": QUANTITIES},
                "env": [{"name": str, "value": str}],
                "volumeMounts": [{"name": str, "mountPath": str}],
            }
        ],
        "volumes": [{"name": str, "emptyDir": {"medium": str, "sizeLimit": str}}],
    }
}
RAY_JOB_FIELDS = {
    "apiVersion": ("ray.io/v1",),
    "kind": ("RayJob",),
    "metadata": {"generateName": str},
    "spec": {
        "entrypoint": str,
        "backoffLimit": int,
        "deletionStrategy": {
            "deletionRules": [
                {
                    "condition": {
                        "jobStatus": ("SUCCEEDED", "FAILED"),
                        "jobDeploymentStatus": ("Failed",),
                        "ttlSeconds": int,
                    },
                    "policy": ("DeleteCluster", "DeleteWorkers", "DeleteSelf", "DeleteNone"),
                }
            ]
        },
        "rayClusterSpec": {
            "rayVersion": str,
            "authOptions": {"mode": ("token", "disabled")},
            "gcsFaultToleranceOptions": {"backend": ("redis", "rocksdb"), "storage": {"size": str}},
            "headGroupSpec": {"rayStartParams": dict, "labels": dict, "template": POD},
            "workerGroupSpecs": [
                {
                    "groupName": str,
                    "replicas": int,
                    "minReplicas": int,
                    "maxReplicas": int,
                    "rayStartParams": dict,
                    "labels": dict,
                    "template": POD,
                }
            ],
        },
    },
}
"""The fields of the RayJob, and their types.  The source is the definition that KubeRay gives Kubernetes, which
has 1.4 MB: ``ray-operator/config/crd/bases/ray.io_rayjobs.yaml`` of v1.7.0.  A field that is not in this table
is looked up there.
"""
INSTANCE_FIELDS = {
    "machineType": str,
    "disks": [
        {
            "boot": bool,
            "autoDelete": bool,
            "type": ("PERSISTENT", "SCRATCH"),
            "initializeParams": {"diskSizeGb": str, "sourceImage": str},
        }
    ],
    "scheduling": {
        "provisioningModel": ("SPOT", "STANDARD"),
        "instanceTerminationAction": ("DELETE", "STOP"),
        "onHostMaintenance": ("TERMINATE", "MIGRATE"),
        "automaticRestart": bool,
        "preemptionNoticeDuration": {"seconds": str},
    },
    "serviceAccounts": [{"email": str, "scopes": [str]}],
}
"""The fields of an instance on GCP.  The source is ``Instance`` in the discovery document of ``compute`` v1,
revision 20261106, which google-api-python-client 2.202.0 brings.
"""
SKY_RESOURCES = {
    "infra": str,
    "accelerators": str,
    "use_spot": bool,
    "disk_size": int,
    "job_recovery": {"max_restarts_on_errors": int, "recover_on_exit_codes": [int]},
}
SKY_FIELDS = {
    "name": str,
    "workdir": str,
    "resources": {**SKY_RESOURCES, "any_of": [SKY_RESOURCES]},
    "envs": dict,
    "secrets": dict,
    "setup": str,
    "run": str,
}
"""The fields of a job of SkyPilot.  The source is ``get_task_schema`` and ``get_resources_schema`` in
``sky/utils/schemas.py`` of skypilot 0.14.1.
"""


def wrong(value: Any, fields: Any, at: str = "") -> list[str]:
    """Return where ``value`` has another field or type than ``fields``: names and their fields, a list of one
    kind, a tuple of words, or a type.
    """
    if isinstance(fields, dict) and isinstance(value, dict):
        return [
            each
            for name, inner in value.items()
            for each in (
                wrong(inner, fields[name], f"{at}/{name}") if name in fields else [f"{at}/{name} is unknown"]
            )
        ]
    if isinstance(fields, list) and isinstance(value, list):
        return [each for inner in value for each in wrong(inner, fields[0], at)]
    right = value in fields if isinstance(fields, tuple) else type(value) is fields
    return [] if right else [f"{at} is {value!r}"]


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy of ``document`` with ``value`` at ``path``."""
    whole = copy.deepcopy(document)
    *above, last = path.strip("/").split("/")
    inner: Any = whole
    for name in above:
        inner = inner[int(name) if name.isdigit() else name]
    inner[last] = value
    return whole


def test_a_ray_that_is_too_old_is_not_installed() -> None:
    """``actors/launch.py`` asks for a ``fallback_strategy``, which 2.51.0 was the first to have."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (versions,) = [need.specifier for need in map(Requirement, dependencies) if need.name == "ray"]
    assert "2.50.1" not in versions and "2.51.0" in versions and ray.__version__ in versions


@pytest.mark.parametrize("name", RAY_UP)
def test_ray_accepts_the_clusters_of_ray_up(name: str) -> None:
    """The schema is Ray's own.  The control: Ray refuses a word that it does not know."""
    validate_config(prepare_config(copy.deepcopy(RAY_UP[name])))
    with pytest.raises(jsonschema.ValidationError, match="min_worker"):
        validate_config(prepare_config({**copy.deepcopy(RAY_UP[name]), "min_worker": 4}))
    with pytest.raises(jsonschema.ValidationError, match="market"):
        validate_config(prepare_config(changed(RAY_UP[name], "/available_node_types/worker/market", "spot")))


def test_ec2_accepts_the_nodes_on_aws() -> None:
    """The schema is EC2's own description of ``RunInstances``, which botocore brings."""
    model = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances")

    def refused(node_config: dict[str, Any]) -> str:
        asked = {"MinCount": 1, "MaxCount": 1, **node_config}
        return str(ParamValidator().validate(asked, model.input_shape).generate_report())

    nodes = [node["node_config"] for node in AWS["available_node_types"].values()]
    assert [refused(node) for node in nodes] == ["", ""]
    wrongly = changed(nodes[1], "/MetadataOptions/HttpToken", "required")
    assert "Unknown parameter in MetadataOptions" in refused(wrongly), "the control"


@pytest.mark.parametrize(
    ("document", "fields", "path", "value"),
    [
        (RAY_JOB, RAY_JOB_FIELDS, "/spec/deletionStrategy/deletionRules/0/policy", "DeleteWorker"),
        (RAY_JOB, RAY_JOB_FIELDS, "/spec/rayClusterSpec/gcsFaultToleranceOptions/claimSize", "1Gi"),
        (RAY_JOB, RAY_JOB_FIELDS, "/spec/rayClusterSpec/workerGroupSpecs/0/replicas", "4"),
        (SKY, SKY_FIELDS, "/resources/job_recovery/recover_on_exit_code", 2),
        (SKY, SKY_FIELDS, "/resources/use_spot", "true"),
    ],
    ids=lambda each: each if isinstance(each, str) and "/" in each else "",
)
def test_kuberay_and_skypilot_know_the_fields(
    document: dict[str, Any], fields: dict[str, Any], path: str, value: Any
) -> None:
    """The control: another field or type at ``path`` is found."""
    assert wrong(document, fields) == []
    (found,) = wrong(changed(document, path, value), fields)
    assert path.split("/")[-1] in found


def test_gcp_knows_the_fields_of_an_instance() -> None:
    nodes = [node["node_config"] for node in GCP["available_node_types"].values()]
    assert [wrong(node, INSTANCE_FIELDS) for node in nodes] == [[], []]
    assert wrong(changed(nodes[1], "/scheduling/preemptionNotice", "120s"), INSTANCE_FIELDS) == [
        "/scheduling/preemptionNotice is unknown"
    ], "the control"


@pytest.mark.parametrize("name", RAY_UP)
def test_as_many_workers_may_come_as_the_job_takes(name: str) -> None:
    config, worker = RAY_UP[name], RAY_UP[name]["available_node_types"]["worker"]
    assert worker["max_workers"] == config["max_workers"] == JOB.workers.max
    assert worker["min_workers"] == 0, "the run asks for them"


def test_the_workers_on_aws_are_spot_and_the_head_is_not() -> None:
    head, worker = (AWS["available_node_types"][name] for name in (AWS["head_node_type"], "worker"))
    assert "InstanceMarketOptions" not in head["node_config"]
    assert worker["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert not AWS["provider"]["cache_stopped_nodes"], "a spot instance cannot be stopped"
    for node in (head, worker):
        assert "IamInstanceProfile" in node["node_config"], "credentials are the node's own"
        assert node["node_config"]["MetadataOptions"] == {
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 2,
        }


def test_the_workers_on_gcp_are_spot_and_the_head_is_not() -> None:
    head, worker = (GCP["available_node_types"][name] for name in (GCP["head_node_type"], "worker"))
    assert "scheduling" not in head["node_config"]
    assert worker["node_config"]["scheduling"]["provisioningModel"] == "SPOT"
    assert worker["node_config"]["serviceAccounts"], "credentials are the node's own"
    assert worker["resources"]["GPU"] == JOB.workers.gpus


def test_the_labels_say_which_nodes_are_spot() -> None:
    """Elastic reads the label that Ray defines, to keep its coordinator off spot nodes."""
    assert cluster.MARKET == ray._raylet.RAY_NODE_MARKET_TYPE_KEY
    nodes = [GCP["available_node_types"], AWS["available_node_types"]]
    spec = RAY_JOB["spec"]["rayClusterSpec"]
    pairs = [(each["head"], each["worker"]) for each in nodes]
    for head, worker in [*pairs, (spec["headGroupSpec"], *spec["workerGroupSpecs"])]:
        assert head["labels"] == {cluster.MARKET: "on-demand"}
        assert worker["labels"] == {cluster.MARKET: "spot"}


@pytest.mark.parametrize("name", RAY_UP)
def test_every_node_of_ray_up_asks_for_a_token(name: str) -> None:
    assert RAY_UP[name]["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    for role in ("head", "worker"):
        assert "RAY_AUTH_MODE=token" in RAY_UP[name][f"{role}_start_ray_commands"][-1]


def understood(commands: list[str]) -> bool:
    """Return whether the shell understands the commands, which it does not run."""
    return not subprocess.run(["bash", "-n", "-c", "\n".join(commands)], capture_output=True).returncode


def test_the_commands_are_a_shells() -> None:
    for config in RAY_UP.values():
        assert understood([line for step in STEPS for line in config.get(step, [])])
    assert understood([SKY["setup"], SKY["run"]])
    assert not understood(["echo 'on"]), "the control"


def test_the_submitted_line_is_the_guides() -> None:
    (line,) = re.findall(r"^#   (ray job submit .*)$", (CLUSTERS / "aws.yaml").read_text(), re.MULTILINE)
    guide = (ROOT / "examples" / "guide" / "clusters.md").read_text()
    assert line == next(each for each in guide.splitlines() if each.startswith("ray job submit"))
    assert RAY_JOB["spec"]["entrypoint"].endswith(shlex.join(shlex.split(line)[-3:]))


def test_one_ray_everywhere() -> None:
    lines = [*AWS["setup_commands"], *GCP["setup_commands"], SKY["setup"]]
    versions = re.findall(r"ray\[default\]==([\d.]+)", " ".join(lines))
    assert versions == 3 * [RAY_JOB["spec"]["rayClusterSpec"]["rayVersion"]]
    assert len(set(re.findall(r"torch==([\d.]+)", " ".join(lines)))) == 1
    assert RAY_JOB["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}


def test_what_the_run_relies_on_in_kubernetes() -> None:
    assert (RAY_JOB["apiVersion"], RAY_JOB["kind"]) == ("ray.io/v1", "RayJob")
    spec = RAY_JOB["spec"]["rayClusterSpec"]
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", "strings, as KubeRay wants them"
    (group,) = spec["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == JOB.workers.max
    head, worker = (each["template"]["spec"] for each in (spec["headGroupSpec"], group))
    assert [container["name"] for each in (head, worker) for container in each["containers"]] == [
        "ray-head",
        "ray-worker",
    ]
    assert head["containers"][0]["image"] == worker["containers"][0]["image"], "one build everywhere"
    assert worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == str(JOB.workers.gpus)
    assert int(worker["containers"][0]["resources"]["requests"]["cpu"]) >= JOB.workers.cpus
    assert head["serviceAccountName"] == worker["serviceAccountName"]
    assert worker["nodeSelector"] != head["nodeSelector"]
    (mount,), (volume,) = worker["containers"][0]["volumeMounts"], worker["volumes"]
    assert mount["name"] == volume["name"] and mount["mountPath"] == "/dev/shm"
    assert all(isinstance(each["value"], str) for each in head["containers"][0]["env"])


def test_a_pod_that_is_deleted_has_time_to_drain() -> None:
    """Ray waits for less time than Kubernetes gives, and reads the variable that says how long."""
    (group,) = RAY_JOB["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    (drain_s,) = [each["value"] for each in pod["containers"][0]["env"] if each["name"] == DRAIN_S]
    assert hasattr(ray_constants, DRAIN_S)
    assert 0 < float(drain_s) < pod["terminationGracePeriodSeconds"]


def test_a_ray_job_that_is_over_gives_its_gpus_back() -> None:
    """KubeRay refuses rules beside ``shutdownAfterJobFinishes``."""
    assert "shutdownAfterJobFinishes" not in RAY_JOB["spec"]
    rules = RAY_JOB["spec"]["deletionStrategy"]["deletionRules"]
    at_once = [rule["condition"] for rule in rules if not rule["condition"].get("ttlSeconds")]
    assert at_once == [{"jobStatus": "SUCCEEDED"}, {"jobDeploymentStatus": "Failed"}]


def test_skypilot_gives_the_same_line_again() -> None:
    """It does so after a lost machine, and where the platform gave up; its machine has the job's GPUs."""
    assert SKY["run"].splitlines()[-1] == "elastic train job.toml --address local"
    assert SKY["resources"]["use_spot"]
    assert SKY["resources"]["accelerators"].split(":")[1] == str(JOB.workers.max * JOB.workers.gpus)
    assert SKY["resources"]["job_recovery"]["recover_on_exit_codes"] == [PlatformGaveUp.exit_code]
    assert set(SKY["secrets"].values()) == {None}, "no key is in the file"
