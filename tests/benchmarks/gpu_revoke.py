"""``python -m tests.benchmarks.gpu_revoke [--times 3] [--pinned GB]`` compares two ways to leave a broken
NCCL world.

Two processes, with a GPU each, form a world.  The second one stands still or is killed while the first one
waits for it in a collective. The first one then leaves the world, either as the product does
(``World.abort``) or by ``ncclCommRevoke``, which stops a communicator's operations and does not destroy it.
The result says how long the call took, and after how long the device had nothing left to do.
"""

from __future__ import annotations

import argparse
import json
import statistics

from tests.gpu.pair import first_of_two

SCRIPT = """
import ctypes, json, os, re, signal, sys, threading, time
import torch
import torch.distributed as dist
from elastic.engine.world import World
from elastic.plan.layout import Layout

rank, port, how, ends, pinned_gb = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
world = World.form(store, generation=1, layout=Layout(1, 2), rank=rank, device=torch.device("cuda", 0), form_s=120.0)
world.connect(120.0, 3600.0)
dist.all_reduce(torch.ones(1 << 20, device="cuda"))
torch.cuda.synchronize()
if rank == 1:
    memory = [torch.ones(1 << 28, dtype=torch.int32).pin_memory() for _ in range(pinned_gb)]
    store.set("gone", "")
    if ends == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def pointers():
    found = []
    for group in world.groups:
        backend = group._get_backend(torch.device("cuda"))
        found.append(backend._comm_ptr())
    return found


def library():
    with open("/proc/self/maps") as maps:
        path = next(line.split()[-1] for line in maps if re.search(r"libnccl\\.so", line))
    return ctypes.CDLL(path)


if how == "revoke":
    nccl, known = library(), pointers()
    nccl.ncclCommRevoke.argtypes = [ctypes.c_void_p, ctypes.c_int]
store.get("gone")
time.sleep(0.1)  # until somebody would have noticed
dist.all_reduce(torch.ones(1 << 20, device="cuda"))
done = torch.cuda.Event()
done.record()
time.sleep(0.2)
assert not done.query(), "the collective ended without its peer"
began = time.monotonic()
if how == "revoke":
    codes = [0] * len(known)

    def revoke(number):
        codes[number] = nccl.ncclCommRevoke(known[number], 0)

    threads = [threading.Thread(target=revoke, args=(number,), daemon=True) for number in range(len(known))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    returned_s = time.monotonic() - began
else:
    codes = []
    threading.Thread(target=world.abort, daemon=True).start() if how == "beside" else world.abort()
    returned_s = time.monotonic() - began
while not done.query():
    if time.monotonic() - began > 60.0:
        break
    time.sleep(0.001)
idle_s = time.monotonic() - began
print(json.dumps({"returned_s": returned_s, "idle_s": idle_s, "codes": codes, "idle": done.query()}), flush=True)
os._exit(0)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument(
        "--pinned", type=int, default=8, help="GB of pinned memory that the process has which ends"
    )
    known = parser.parse_args()
    for ends in ("stops", "dies"):
        for how in ("abort", "revoke"):
            found = []
            for _ in range(known.times):
                try:
                    out, _ = first_of_two(SCRIPT, how, ends, str(known.pinned), environment={})
                except AssertionError as error:
                    print(how, ends, "failed:", str(error)[-600:], flush=True)
                    break
                found.append(json.loads(out.strip().splitlines()[-1]))
            medians = {
                key: round(statistics.median(each[key] for each in found), 3)
                for key in ("returned_s", "idle_s")
                if found
            }
            print(json.dumps({"how": how, "peer": ends, **medians, "runs": found}), flush=True)


if __name__ == "__main__":
    main()
