"""The clusters in ``examples/clusters`` are valid, as far as that can be checked without a cloud."""

from __future__ import annotations

import copy
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from packaging.requirements import Requirement
from ray.autoscaler._private.util import prepare_config, validate_config

from elastic.job import Job

ROOT = Path(__file__).parents[1]
CLUSTERS = ROOT / "examples" / "clusters"
JOB = Job.load(CLUSTERS / "job.toml")
AWS: dict[str, Any] = yaml.safe_load((CLUSTERS / "aws.yaml").read_text())
RAY_JOB: dict[str, Any] = yaml.safe_load((CLUSTERS / "kuberay.yaml").read_text())


def test_a_ray_that_is_too_old_is_not_installed() -> None:
    """``actors/launch.py`` asks for a ``fallback_strategy``, which 2.51.0 was the first to have."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (versions,) = [need.specifier for need in map(Requirement, dependencies) if need.name == "ray"]
    assert "2.50.1" not in versions and "2.51.0" in versions and ray.__version__ in versions


def test_ray_accepts_the_cluster_on_aws() -> None:
    """The control: Ray refuses a word that it does not know."""
    validate_config(prepare_config(copy.deepcopy(AWS)))
    with pytest.raises(jsonschema.ValidationError, match="min_worker"):
        validate_config(prepare_config({**copy.deepcopy(AWS), "min_worker": 4}))


def test_the_workers_on_aws_are_spot_and_the_head_is_not() -> None:
    head, worker = (AWS["available_node_types"][name] for name in (AWS["head_node_type"], "worker"))
    assert "InstanceMarketOptions" not in head["node_config"]
    assert worker["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert worker["min_workers"] == worker["max_workers"] == AWS["max_workers"] == JOB.workers.max
    assert not AWS["provider"]["cache_stopped_nodes"], "a spot instance cannot be stopped"
    assert all("IamInstanceProfile" in node["node_config"] for node in (head, worker)), (
        "credentials are the node's own"
    )


@pytest.mark.parametrize("step", ["setup_commands", "head_start_ray_commands", "worker_start_ray_commands"])
def test_the_commands_are_a_shells(step: str) -> None:
    for command in AWS[step]:
        subprocess.run(["bash", "-n", "-c", command], check=True, capture_output=True)


def test_the_submitted_line_is_the_guides() -> None:
    (line,) = re.findall(r"^#   (ray job submit .*)$", (CLUSTERS / "aws.yaml").read_text(), re.MULTILINE)
    guide = (ROOT / "examples" / "guide" / "clusters.md").read_text()
    assert line == next(each for each in guide.splitlines() if each.startswith("ray job submit"))
    assert RAY_JOB["spec"]["entrypoint"].endswith(shlex.join(shlex.split(line)[-3:]))


def test_one_ray_everywhere() -> None:
    (on_aws,) = re.findall(r"ray\[default\]==([\d.]+)", " ".join(AWS["setup_commands"]))
    assert on_aws == RAY_JOB["spec"]["rayClusterSpec"]["rayVersion"]
    assert AWS["auth"] and RAY_JOB["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}


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
