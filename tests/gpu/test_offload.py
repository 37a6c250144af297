"""State streams through a GPU between pinned slots: the bits as if it lived there, a few groups at a time,
both ways at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from elastic.ids import Version
from elastic.plan.layout import Layout
from elastic.protocol.copy_schedule import Copy
from elastic.state import streaming
from elastic.state.digest import digests
from elastic.state.region import Region, frame
from elastic.state.shard import Shard, ShardHome
from elastic.state.snapshot import Snapshots
from elastic.state.streaming import GROUPS, groups_of, put, through
from storage.slices import Tensor
from tests.state.nodes import AUTO
from tests.support.cells import cell
from tests.support.ranks import Ranks
from tests.support.segments import train
from tests.support.toys import toy_job

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

SIZE = 2**26
TENSORS = tuple(Tensor(f"w{number}", "parameter", "F32", (SIZE // 4096, 1024)) for number in range(12))


@pytest.fixture(params=["memory", "files"])
def homes(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ShardHome, ShardHome]:
    """Returns two slots, pinned if they are in memory, of which the first has numbers; each of its tensors is
    a group.
    """
    whole, version, folder = (
        frame(TENSORS, cell(1, 0)),
        Version(1, 1),
        str(tmp_path) if request.param == "files" else "",
    )
    snapshots = Snapshots(
        Region.create(4, whole.bytes, whole.blocks, TENSORS, folder), TENSORS, torch.device("cuda"), AUTO
    )
    snapshots.ready()
    one = snapshots.home(Copy(version, cell(1, 0)), [], adopt=False)
    for number, (key, value) in enumerate(one.values.items()):
        put(one, key, (torch.arange(value.numel()).view(value.shape) + number).to(value.dtype))
    return one, snapshots.next_home(Shard(version, cell(1, 0), {}, one))


def double(one: ShardHome, other: ShardHome) -> None:
    for values in through(
        torch.device("cuda", 0), one, other, groups_of([{key: value} for key, value in one.values.items()], 1)
    ):
        for value in values.values():
            value.mul_(2)


def test_the_next_slot_has_the_results_and_the_device_a_few_groups(
    homes: tuple[ShardHome, ShardHome],
) -> None:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    double(*homes)
    one, other = homes
    for number, (key, value) in enumerate(one.values.items()):
        assert torch.equal(value, torch.arange(value.numel()).view(value.shape).float() + number), (
            "the slot that is read stays"
        )
        assert torch.equal(other.values[key], value * 2) and torch.equal(
            other.sums[other.blocks[key]], digests(value * 2)
        )
    assert torch.cuda.memory_allocated() == before
    assert 2 * SIZE <= torch.cuda.max_memory_allocated() - before < (GROUPS + 0.5) * SIZE


@pytest.mark.parametrize("homes", ["memory"], indirect=True)
@pytest.mark.parametrize("apart", [True, False], ids=["streams", "control"])
def test_one_group_comes_while_another_goes(
    homes: tuple[ShardHome, ShardHome], monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """F3: the trace has copies to the device during copies from it; if both use one stream it has none."""
    double(*homes)
    if not apart:
        monkeypatch.setattr(streaming, "stream", lambda purpose, device: torch.cuda.current_stream(device))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        double(*homes)
    copies: dict[str, list[tuple[float, float]]] = {"HtoD": [], "DtoH": []}
    for event in trace.events() or ():
        for way, found in copies.items():
            if "Memcpy" in event.name and way in event.name:
                found.append((event.time_range.start, event.time_range.end))
    together = [(a, b) for a, b in copies["HtoD"] for c, d in copies["DtoH"] if min(b, d) - max(a, c) > 100]
    began = min((a for a, _ in copies["HtoD"]), default=0.0)
    print(
        {
            way: [(round(a - began), round(b - began)) for a, b in found if b - a > 100]
            for way, found in copies.items()
        },
        "microseconds",
    )
    assert len(copies["HtoD"]) >= len(TENSORS) <= len(copies["DtoH"])
    assert bool(together) == apart


@pytest.mark.parametrize("medium", ["memory", "files"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16"},
        {"optim": {"lr": 1e-2, "kind": "muon"}},
        {"optim": {"lr": 1e-2, "moments": "bf16"}},
    ],
    ids=str,
)
def test_the_bits_are_those_of_state_on_the_device(
    tmp_path: Path, changes: dict[str, Any], medium: str
) -> None:
    """F3; the control: another seed gives other bits."""
    gpu, settings = Ranks(1, "cuda"), {"parallel": {"zero": 2}, **changes}
    offloaded: dict[str, Any] = {"offload": "optimizer"} | (
        {"offload_folder": str(tmp_path)} if medium == "files" else {}
    )
    try:
        resident = train(gpu, toy_job(tmp_path / "resident", **settings), Layout(1, 1), 4)
        assert (
            train(gpu, toy_job(tmp_path / "offloaded", **offloaded, **settings), Layout(1, 1), 4).hash
            == resident.hash
        )
        other = train(gpu, toy_job(tmp_path / "other", seed=1, **offloaded, **settings), Layout(1, 1), 4)
        assert other.hash != resident.hash
    finally:
        gpu.close()
