"""Tells torch's compiler and Triton, by their environment variables, where to keep compiled code."""

from __future__ import annotations

import json
import os
import platform
import sys
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from elastic.job import Job
from elastic.state.compiled import Compiled

INDUCTOR_DIR, TRITON_DIR = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
CPU = Path("/proc/cpuinfo")
CPU_FIELDS = ("vendor_id", "model name", "flags", "CPU implementer", "CPU part", "Features")
"""Fields on which C++ code of torch's compiler depends: it is made for the CPU of its node, and may crash on
another CPU.
"""
SETTINGS = (
    "model",
    "model_args",
    "loss",
    "precision",
    "microbatch",
    "recompute",
    "activations",
    "numerics",
    "reproducible",
)
"""Settings on which the code of a model's blocks depends.  They only keep the folders of jobs apart.  Both
compilers find code by its content, so if a setting is missing here, two jobs merely share a folder.
"""


def place(job: Job, code: str, kind: str, root: Path) -> Compiled | None:
    """Lets this process keep compiled code below ``root``, and returns the folder for it.

    ``code`` is the digest of the user's code and ``kind`` the worker's kind.  Returns None if the job
    compiles nothing, or if the user has chosen a folder by ``TORCHINDUCTOR_CACHE_DIR``: that folder stays in
    use, and its code does not go to other nodes.
    """
    if not job.compile or os.environ.get(INDUCTOR_DIR, _usual()) != _usual():
        return None
    found = Compiled(root, compiled_key(job, code, kind), lambda sentence: print(sentence, flush=True))
    os.environ |= {INDUCTOR_DIR: str(found.folder), TRITON_DIR: str(found.folder / "triton")}
    return found


def _usual() -> str:
    """Returns the folder that torch's compiler uses by default.  When the compiler is imported, it sets
    ``TORCHINDUCTOR_CACHE_DIR`` to this folder.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


def compiled_key(job: Job, code: str, kind: str) -> str:
    """Returns a digest of all that compiled code depends on.  If two nodes have the same digest, the compiled
    code of one runs on the other.
    """
    settings = {name: getattr(job, name) for name in SETTINGS} | {"data": job.data.model_dump(mode="json")}
    machine = [platform.machine(), *platform.libc_ver(), *_cpu()]
    software = [sys.version, torch.__version__, str(torch.version.git_version), _triton()]
    return sha256(json.dumps([settings, code, kind, machine, software], sort_keys=True).encode()).hexdigest()[
        :32
    ]


def _cpu() -> list[str]:
    """Returns what the system tells of its first CPU."""
    first = CPU.read_text().partition("\n\n")[0].splitlines() if CPU.exists() else []
    return [line for line in first if line.partition(":")[0].strip() in CPU_FIELDS]


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""
