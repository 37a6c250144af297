"""A worker whose process asked CUDA's driver too early is replaced before it joins, and the second time its
node gets no more workers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.report.story import Sentence
from tests.support.chaos import assert_nothing_left, trial
from tests.support.commands import ROOT
from tests.support.driver import library
from tests.support.nodes import Node, joined
from tests.support.toys import toy_job

EARLY = """
import ctypes, os
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
ctypes.CDLL("LIBRARY").cuInit(0)  # by its path: a fork searches where its first process was told to
del os.environ["CUDA_VISIBLE_DEVICES"]
"""


@pytest.mark.full
def test_a_worker_on_the_gpu_of_another_process_is_replaced(tmp_path: Path) -> None:
    """Ray gives each worker GPU 0, and the driver of its process saw only GPU 1.  The control is in
    train/test_gpus.py.
    """
    (tmp_path / "early.py").write_text(EARLY.replace("LIBRARY", str(library(tmp_path) / "libcuda.so.1")))
    early = {
        "RAY_preload_python_modules": "early",
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "LD_LIBRARY_PATH": str(tmp_path),
    }
    job = toy_job(
        tmp_path, name="wrong", workers={"min": 1, "max": 1, "gpus": 1}, deadlines={"grow_debounce_s": 0.1}
    )
    with joined(tmp_path, Node("gpu", 1, environment=early, gpus=1)):
        run = trial(job, hash_it=False)
    said = "\n".join(line.text for line in run.lines if isinstance(line, Sentence)) + run.result.reason
    where = (
        "the worker computes on GPU-a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1, but Ray gave it "
        "GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0"
    )
    assert f"w1 did not start ({where}" in said and f"w2 did not start ({where}" in said, said
    assert "w1 is replaced" in said and "is refused" in said and "start w3" not in said, said
    assert_nothing_left(run)
