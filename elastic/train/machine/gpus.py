"""Names the GPU on which a process computes, and notices if a process would compute on a GPU that Ray has not
given it.

CUDA's driver reads ``CUDA_VISIBLE_DEVICES`` when a process first asks it anything, and never again; Ray sets
the variable when it gives a GPU to a process that has been waiting.  If an import has asked before that, the
process computes on the first GPU of its node, whichever GPU Ray gave it, and NCCL refuses the world
("Duplicate GPU detected").  ``torch.cuda.device_count`` reads the variable itself and does not show the
mistake; the UUID that the driver gives to device 0 does.  So the UUIDs of two processes are compared: this
one, and one that starts now.

This file imports the standard library only, since the new process runs it as a script.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from uuid import UUID

DRIVER = "libcuda.so.1"
ANSWER_S = 60.0
"""Seconds within which the new process must answer.  The driver takes one or two to begin on a node of eight
GPUs.
"""
NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Lets ``torch.cuda.is_available`` ask NVML and not the driver.  torch 2.11 calls it when its compiler is
imported (``torch/_inductor/runtime/benchmarking.py``); processes import the compiler while they wait for Ray
to give them a GPU.
"""
LAUNCHES = {
    # Behind a collective that hangs, the device's queue of launches fills up, and the next launch blocks
    # until somebody aborts.  torch's
    # own launcher of compiled kernels holds the GIL meanwhile (torch/csrc/inductor/static_launcher/cuda.cpp,
    # pytorch issue 109074), so
    # that the control thread cannot answer the fence without which nobody may abort; Triton's launcher lets
    # go of it.  An environment
    # variable, since what is set in torch._inductor.config counts for one thread only, and the backward pass
    # runs in another (2.13).  torch
    # reads it when its compiler is imported, so processes that wait with that done have it from Ray.
    "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0",
}


def device_uuid() -> str:
    """Returns the UUID of this process's device 0; "" if CUDA's driver finds none, or is not there."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return ""
    device, uuid = ctypes.c_int(), ctypes.create_string_buffer(16)
    asks = (
        (driver.cuInit, 0),
        (driver.cuDeviceGet, ctypes.byref(device), 0),
        (driver.cuDeviceGetUuid_v2, uuid, device),
    )
    return f"GPU-{UUID(bytes=uuid.raw)}" if not any(ask(*arguments) for ask, *arguments in asks) else ""


class WrongDevice(Exception):
    """This process does not compute on the GPU that Ray has given it."""


def checked_uuid() -> str:
    """Returns the UUID of this process's device 0, or "" as :func:`device_uuid`.  It makes no context on the
    device.

    Raises :class:`WrongDevice` if a new process gets another UUID.
    """
    from elastic.protocol.events import ASKED_EARLY

    new = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    here = device_uuid()  # meanwhile
    try:
        given = new.communicate(timeout=ANSWER_S)[0].strip()
    except subprocess.TimeoutExpired:
        new.kill()
        given = new.communicate()[0].strip()
    if not given and here:
        print(
            (
                "it could not be checked that this worker computes on the GPU that Ray gave it: a new "
                f"process did not find the device {here}"
            ),
            flush=True,
        )
    if given and here != given:
        raise WrongDevice(
            f"the worker computes on {here or 'no GPU'}, but Ray gave it {given}; {ASKED_EARLY}"
        )
    return here


if __name__ == "__main__":
    print(device_uuid())
