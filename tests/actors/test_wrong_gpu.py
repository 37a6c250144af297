"""A worker whose process asked CUDA's driver too early is replaced before it joins, and the second time its node gets no more workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.clusters import TUNED
from tests.support.commands import FORK, MARK, ROOT, user_job
from tests.support.commands import user_package as package
from tests.support.driver import library
from tests.support.patience import PATIENCE_S

EARLY = """
import ctypes, os
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
ctypes.CDLL("LIBRARY").cuInit(0)  # by its path: a fork searches where its first process was told to
del os.environ["CUDA_VISIBLE_DEVICES"]
"""
TRAINS = """
import ray
from actors import cluster
from actors.launch import launch
from elastic import Job
ray.init("local", num_cpus=2, num_gpus=1, include_dashboard=False, namespace=cluster.NAMESPACE, log_to_driver=False)
launch(Job.load("job.toml"), show=print)
"""


def test_a_worker_on_the_gpu_of_another_process_is_replaced(tmp_path: Path) -> None:
    """Ray gives each worker GPU 0, and the driver of its process saw only GPU 1.  The control is in train/test_gpus.py."""
    package(tmp_path, "wrong")
    user_job(tmp_path, "wrong", workers={"min": 1, "max": 1, "gpus": 1}, deadlines={"grow_debounce_s": 0.1})
    (tmp_path / "early.py").write_text(EARLY.replace("LIBRARY", str(library(tmp_path) / "libcuda.so.1")))
    (tmp_path / "trains.py").write_text(TRAINS)
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | TUNED
    ours |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", MARK: str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, FORK, "trains.py", "train"],
        cwd=tmp_path,
        env=ours | {"RAY_preload_python_modules": "early"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    said = ran.stdout + ran.stderr
    where = "it computes on GPU-a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1, and Ray gave it GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0"
    assert f"w1 did not start ({where}" in said and f"w2 did not start ({where}" in said, said
    assert "w1 is replaced" in said and "is refused" in said and "start w3" not in said, said
