"""A process that asked CUDA's driver before it got a GPU is noticed: it computes on another one, and torch
does not say so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tests.support.driver import library

ZERO, ONE = (f"GPU-{byte * 4}-{byte * 2}-{byte * 2}-{byte * 2}-{byte * 6}" for byte in ("a0", "a1"))

WORKER = """
import os
from elastic.train.machine import gpus
if EARLY:
    gpus.device_uuid()
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
try:
    print(gpus.checked_uuid())
except gpus.WrongDevice as error:
    print(error)
"""


def told(folder: Path, *, early: bool, driver: bool = True) -> str:
    """Returns what a process says that gets GPU 1, and has asked the driver ``early`` or not."""
    environment = {"LD_LIBRARY_PATH": str(library(folder))} if driver else {}
    script = f"EARLY = {early}\n{WORKER}"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return ran.stdout.strip()


def test_a_process_that_asked_early_computes_on_the_gpu_of_another(tmp_path: Path) -> None:
    """The control is a process that asked late."""
    assert told(tmp_path, early=True).startswith(
        f"the worker computes on {ZERO}, but Ray gave it {ONE}; most probably an import initialised"
    )
    assert told(tmp_path, early=False) == ONE


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_without_a_driver_nothing_is_compared(tmp_path: Path) -> None:
    assert told(tmp_path, early=True, driver=False) == ""
