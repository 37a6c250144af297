"""The driver names the process that holds a GPU's memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from elastic.errors import NoRoomYet
from elastic.train.machine.gpus import device_uuid
from elastic.train.machine.tenants import check_free, tenants_of

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="it takes a GPU")

HELD = 2**33
HOLDER = f"import torch; held = torch.empty({HELD}, dtype=torch.uint8, device='cuda'); print('held', flush=True); input()"


def test_a_process_that_holds_memory_is_named() -> None:
    """The control: once the process has ended, the same memory is found free."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        total = torch.cuda.mem_get_info(0)[1]

        def free() -> int:
            return int(torch.cuda.mem_get_info(0)[0])

        with pytest.raises(NoRoomYet) as error:
            check_free(total - HELD // 2, free, lambda: tenants_of(device_uuid()), lambda _: None)
        print(error.value)
        assert "of memory free, and a worker needs" in str(error.value)
        held = {each.pid: each.held for each in tenants_of(device_uuid())}
        assert held.get(holder.pid, HELD) >= HELD, "where pids are those of this container"
        assert held, "the driver names it"
    finally:
        holder.communicate("\n")
    check_free(total - HELD // 2, free, lambda: tenants_of(device_uuid()))
