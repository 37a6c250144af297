"""Free memory of a device: a worker that finds too little names who holds it, and does not join."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import pytest

from elastic.errors import NoRoomYet
from elastic.plan.memory_need import Need
from elastic.train.machine.tenants import (
    FREE_S,
    POLL_S,
    UNKNOWN,
    Tenant,
    check_free,
    planned,
    shortage,
    tenants_of,
)

pytestmark = pytest.mark.fast

GB = 10**9
NEED = Need(state=64 * GB, gradients=16 * GB, computing=0)


class Driver:
    """NVML as ctypes calls it: a GPU "GPU-1" with these (pid, bytes)."""

    def __init__(self, processes: Sequence[tuple[int, int]]) -> None:
        self.processes = processes

    def nvmlInit_v2(self) -> int:  # NVML's name
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # NVML's name
        return 0 if uuid == b"GPU-1" else 6

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, found: Any) -> int:
        places = ctypes.cast(count, ctypes.POINTER(ctypes.c_uint))
        room, places[0] = places[0], len(self.processes)
        if room < len(self.processes):
            return 7
        for number, (pid, used) in enumerate(self.processes):
            found[number].pid, found[number].used = pid, used
        return 0


def test_the_driver_names_the_processes_that_hold_most_first() -> None:
    driver = Driver([(7, 2 * GB), (8, UNKNOWN), (9, 5 * GB)])
    assert tenants_of("GPU-1", driver) == [Tenant(9, 5 * GB), Tenant(7, 2 * GB), Tenant(8, 0)]
    assert tenants_of("GPU-2", driver) == [] and tenants_of("GPU-1", Driver([])) == []
    assert tenants_of("GPU-1", object()) == [], "an old driver"


@pytest.mark.parametrize(
    ("memory", "most", "fixed", "gb"),
    [
        (80, 8, False, 64),
        (200, 8, False, 80),
        (80, 4, True, 32),
        (10, 2, False, 0),
        (100, 1, True, 80),
        (50, 1, True, 46),
    ],
)
def test_what_a_worker_plans_with(memory: int, most: int, fixed: bool, gb: int) -> None:
    """One member holds 80 GB; of two, each holds 40 GB, and twice its part of the state while it forms."""
    assert planned(NEED, memory * GB, most, fixed=fixed) == gb * GB


def test_memory_that_comes_free_is_waited_for() -> None:
    """The memory of a worker that has just died is given back seconds later."""
    free = iter([1, 1, 3])
    waits = list[float]()
    check_free(2, lambda: next(free), list, waits.append)
    assert waits == [POLL_S, POLL_S]


def test_who_holds_the_memory_is_named() -> None:
    waits = list[float]()
    others = [Tenant(os.getpid(), 3 * GB), Tenant(2**22 + 1, 60 * GB)]
    with pytest.raises(NoRoomYet) as error:
        check_free(64 * GB, lambda: 20 * GB, lambda: others, waits.append)
    assert sum(waits) == FREE_S
    assert str(error.value) == (
        "the device has 20 GB of memory free, and a worker needs 64 GB: it is held by process 4194305 with 60 GB; "
        "end what holds it, or set workers.device_gb to what is free"
    )


def test_the_sentence_for_many_and_for_nobody() -> None:
    assert "the driver names no process that holds it" in shortage(2, 1, [])
    many = shortage(2 * GB, GB, [Tenant(2**22 + n, 0) for n in range(1, 7)])
    assert "process 4194305, process 4194306, process 4194307, process 4194308 and 2 others" in many
    assert f"process {os.getpid()} (" in shortage(2, 1, [Tenant(os.getpid(), 0)])
