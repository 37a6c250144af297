"""A checkpoint of a Llama of 70 B, written by n members: its manifest, and one member that heals from it.

The tensors have the names and the number of those of 70 B with two moments (2,169), and one row for each
member.  Receipts, index, manifest and the healing member's file are the product's; of the other members only
the receipts exist, since a reader must not touch their files.
"""

from __future__ import annotations

import sys
import threading
import time
import tracemalloc
from itertools import count

from storage.checkpoints import Checkpoints, ShardReceipt
from storage.documents import File
from storage.objects import Data, ObjectStore
from storage.slices import Slice, Tensor, Version
from tests.support.stores import Forwarding

V = Version(1000, 3)
KINDS = ("parameter", "moment.exp_avg", "moment.exp_avg_sq")
LAYER = (
    "attention.wq",
    "attention.wk",
    "attention.wv",
    "attention.wo",
    "mlp.gate",
    "mlp.up",
    "mlp.down",
    "norm_1",
    "norm_2",
)
WIDTHS = (1, 1, 1, 1, 2, 2, 3, 4, 4)
"""Stand for the different shapes of a layer's tensors."""
SHARE = 5
"""The member that heals has this share of the world before it."""
_numbers = count()


class Counting(Forwarding):
    """A store that counts requests and bytes, and believes that each file of a receipt is there."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.believed: dict[str, int] = {}
        self.requests = self.bytes = 0

    def size(self, key: str) -> int:
        self.requests += 1
        name = key.rpartition("/")[2]
        return self.believed[name] if name in self.believed else super().size(key)

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        raw = super().get(key, start, stop)
        self.requests, self.bytes = self.requests + 1, self.bytes + len(raw)
        return raw

    def put_if_absent(self, key: str, data: Data) -> None:
        self.requests += 1
        super().put_if_absent(key, data)


def tensors_of(rows: int, layers: int = 80) -> list[Tensor]:
    """Returns the tensors of a model of so many layers, each with ``rows`` rows."""
    names = [
        (f"layers.{layer}.{name}", width)
        for layer in range(layers)
        for name, width in zip(LAYER, WIDTHS, strict=True)
    ]
    names += [("embed.weight", 1), ("norm", 4), ("head.weight", 1)]
    return [Tensor(name, kind, "F32", (rows, width)) for name, width in names for kind in KINDS]


def parts_of(tensors: list[Tensor], rank: int) -> list[Slice]:
    return [Slice(tensor.name, tensor.kind, (rank, 0), (rank + 1, tensor.shape[1])) for tensor in tensors]


def saved(n: int, layers: int = 80) -> tuple[Checkpoints, Counting, list[Tensor], list[bytes]]:
    """Returns a checkpoint of n members that lacks only its manifest, its store, its tensors, and the packed
    receipts.
    """
    store = Counting(ObjectStore.open(f"memory://manifests-{next(_numbers)}"))
    checkpoints, tensors, healing = Checkpoints(store, "run"), tensors_of(n, layers), n // SHARE
    parts = [
        (tensor, part, memoryview(bytes(4 * part.count)))
        for tensor, part in zip(tensors, parts_of(tensors, healing), strict=True)
    ]
    real, receipts = checkpoints.write_shard(V, _name(healing), parts, state=tensors), []
    for rank in range(n):
        name = f"{_name(rank)}.safetensors"
        cuts = [
            {"tensors": cut.tensors, "start": (rank, 0), "stop": (rank + 1, cut.stop[1])} for cut in real.cuts
        ]
        file, header = (
            File(name, real.file.size, real.file.blake3),
            File(name, real.header.size, real.header.blake3),
        )
        store.believed[name] = file.size
        receipts.append(
            ShardReceipt(
                V, file, header, tuple(type(real.cuts[0])(**cut) for cut in cuts), real.state
            ).packed()
        )  # type: ignore[arg-type]
    return checkpoints, store, tensors, receipts


def _name(rank: int) -> str:
    return f"shard-{rank:05d}"


def commit(checkpoints: Checkpoints, receipts: list[bytes]) -> None:
    """Writes the manifest as a coordinator does."""
    checkpoints.commit(V, [ShardReceipt.unpacked(receipt) for receipt in receipts], {})


def longest_pause_s(call: threading.Thread) -> float:
    """Runs ``call`` and returns the longest time for which this thread, which wants to run every millisecond,
    did not.

    It counts the processor's time of this process, so other processes of the machine do not matter.
    """
    longest, before = 0.0, time.process_time()
    call.start()
    while call.is_alive():
        time.sleep(0.001)
        longest, before = max(longest, time.process_time() - before), time.process_time()
    return longest


def measure(n: int) -> dict[str, float]:
    checkpoints, store, tensors, receipts = saved(n)
    began = time.process_time()
    pause_s = longest_pause_s(threading.Thread(target=commit, args=(checkpoints, receipts)))
    commit_s, requests = time.process_time() - began, store.requests
    index_bytes, manifest = (
        checkpoints.manifest(V).index.size,
        store.get(f"{checkpoints.folder(V)}/MANIFEST.json"),
    )

    store.requests = store.bytes = 0
    began = time.process_time()
    found = list(checkpoints.open(V).read(parts_of(tensors, n // SHARE)))
    heal_s = time.process_time() - began
    assert len(found) == len(tensors)
    heal_requests, heal_bytes = store.requests, store.bytes

    tracemalloc.start()
    commit(checkpoints, receipts)
    _, commit_peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "slices": float(n * len(tensors)),
        "receipts_bytes": float(sum(map(len, receipts))),
        "commit_cpu_s": commit_s,
        "commit_peak_bytes": float(commit_peak),
        "loop_held_s": pause_s,
        "commit_requests": float(requests),
        "index_bytes": float(index_bytes),
        "manifest_bytes": float(len(manifest)),
        "heal_cpu_s": heal_s,
        "heal_bytes": float(heal_bytes),
        "heal_requests": float(heal_requests),
    }


if __name__ == "__main__":
    print(measure(int(sys.argv[1])))
