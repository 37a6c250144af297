"""No process of a run asks CUDA's driver before it knows its GPU: the command, the coordinator, keepers, and
processes that wait.

CUDA's driver reads ``CUDA_VISIBLE_DEVICES`` once, and Ray sets it when it gives a waiting process to a
worker.  torch 2.11 asks when its compiler is imported.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic.train.machine.gpus import NVML
from tests.support.commands import ROOT, Command, user_job
from tests.support.commands import user_package as package
from tests.support.driver import Note, noted, notes
from tests.support.warm import SOCKET, Warm

COMPILER = "torch._inductor.compile_fx"
ASKS = """
import torch
found = torch.cuda.is_available()  # as torch/_inductor/runtime/benchmarking.py of torch 2.11 does
"""
CONTROL = """
import os
import torch
ours = {name: os.environ.pop(name) for name in NVML}
torch.cuda.is_available()
os.environ.update(ours)
"""


def asked(folder: Path) -> list[Note]:
    """Trains on a cluster of its own whose waiting processes import what torch's compiler needs, a module
    that asks as torch's did, and the control.

    The command and all workers are forks of a process that has imported the former, and in which torch is
    noted, too.
    """
    package(folder, "driven")
    user_job(folder, "driven", steps=2, workers={"min": 1, "max": 1})
    (folder / "asks.py").write_text(ASKS)
    (folder / "control.py").write_text(CONTROL.replace("NVML", repr([*NVML])))
    environment = noted(folder)
    environment["PYTHONPATH"] = os.pathsep.join((environment["PYTHONPATH"], str(ROOT)))
    preloaded = {
        "RAY_preload_python_modules": ",".join(("torch", "pyarrow.parquet", COMPILER, "asks", "control"))
    }
    with Warm(folder, COMPILER, **environment, **NVML) as forks:
        line = ("train", "job.toml", "--address", "local")
        command = Command(folder, *line, warm=True, **environment, **preloaded, **{SOCKET: forks.path})
        assert command.wait() == 0, command.text
    return notes(folder)


@pytest.mark.full
def test_nobody_asks_the_driver_before_a_worker_has_its_gpu(tmp_path: Path) -> None:
    """Nobody may ask at all, since the job has no GPU.

    In the control torch asks the driver, as it does by itself without our settings: the processes that wait
    are noticed.
    """
    waiting, others = list[Note](), list[Note]()
    for note in asked(tmp_path):
        (waiting if "/control.py:" in note.stack else others).append(note)
    assert others == []
    assert {Path(note.program).name for note in waiting} == {"default_worker.py"}
    assert len({note.pid for note in waiting}) > 2, "the coordinator, the keeper and the worker"
