"""Names the processes that hold a GPU's memory, and finds out whether a worker's share of it is free.

What a worker plans with is the whole memory of its device (``device.py``).  Another process may hold some of it:
one that a run has left, a notebook, another user's.  A worker that finds too little would join, and run out of
memory in its first step, with all others.  So it looks before it takes any, and waits for a while: the kernel
gives back the memory of a worker that has just died only after seconds.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.errors import NoRoomYet
from elastic.plan.copy_budget import amount
from elastic.plan.memory_need import USABLE, Need, least_shard

NVML = "libnvidia-ml.so.1"
TOO_SMALL = 7
"""NVML's answer if there are more processes than places for them."""
MORE = 8
"""Places for processes that come between two questions."""
UNKNOWN = 2**64 - 1
"""NVML's number of bytes if it does not know it."""
FREE_S, POLL_S = 30.0, 0.5
"""Seconds for which a worker waits for memory of processes that have ended, and between two looks."""
SHOWN = 4
"""Largest number of processes that a sentence names."""


@dataclass(frozen=True)
class Tenant:
    """A process that holds memory of a GPU."""

    pid: int
    held: int
    """Number of bytes that it holds; 0 if that is not known."""


class _Process(ctypes.Structure):
    """``nvmlProcessInfo_t``, version 2."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def tenants_of(uuid: str, library: Any = None) -> list[Tenant]:
    """Returns the processes that compute on the GPU, those that hold most first; none if NVML does not say."""
    try:
        nvml = library if library is not None else ctypes.CDLL(NVML)
        asks = nvml.nvmlDeviceGetComputeRunningProcesses_v3
        handle, count = ctypes.c_void_p(), ctypes.c_uint(0)
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            return []
    except (OSError, AttributeError):
        return []
    if asks(handle, ctypes.byref(count), None) not in (0, TOO_SMALL):
        return []
    count = ctypes.c_uint(count.value + MORE)
    found = (_Process * count.value)()
    if asks(handle, ctypes.byref(count), found):
        return []
    tenants = (Tenant(each.pid, each.used if each.used != UNKNOWN else 0) for each in found[: count.value])
    return sorted(tenants, key=lambda each: (-each.held, each.pid))


def planned(need: Need, memory: int, most: int, *, fixed: bool) -> int:
    """Returns the bytes of a device with ``memory`` bytes that a member needs at the smallest degree at which it
    fits, or at ``most`` if the degree is ``fixed``; 0 if it fits at none, of which somebody else tells.
    """
    least = most if fixed else least_shard(need, memory, most)
    # the rest of the memory is planned for nothing, and this process's own context takes some of it
    return min(need.of_a_member(least), int(USABLE * memory)) if least else 0


def check_free(
    wanted: int,
    free: Callable[[], int],
    tenants: Callable[[], Sequence[Tenant]],
    wait: Callable[[float], object] = time.sleep,
) -> None:
    """Returns once ``wanted`` bytes of a device are free.

    Raises :class:`NoRoomYet`, which names who holds the memory, if they are not after ``FREE_S``.
    """
    for _ in range(int(FREE_S / POLL_S)):
        if free() >= wanted:
            return
        wait(POLL_S)
    if (left := free()) < wanted:
        raise NoRoomYet(shortage(wanted, left, [each for each in tenants() if each.pid != os.getpid()]))


def shortage(wanted: int, free: int, others: Sequence[Tenant]) -> str:
    """Returns the sentence about a device with too little free memory."""
    shown = [f"process {each.pid}{_name_of(each.pid)}{_holding(each.held)}" for each in others[:SHOWN]]
    more = f" and {len(others) - SHOWN} others" if len(others) > SHOWN else ""
    who = (
        f"it is held by {', '.join(shown)}{more}"
        if shown
        else "the driver names no process that holds it, perhaps because it is in another container"
    )
    return (
        f"the device has {amount(free)} of memory free, and a worker needs {amount(wanted)}: {who}; end what holds "
        "it, or set workers.device_gb to what is free"
    )


def _holding(held: int) -> str:
    return f" with {amount(held)}" if held else ""


def _name_of(pid: int) -> str:
    """Returns the name of a process in brackets, or "" if this machine or container does not know it."""
    try:
        return f" ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    except OSError:
        return ""
