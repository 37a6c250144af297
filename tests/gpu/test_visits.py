"""Weights in pinned memory visit a GPU: how many bytes are there, and what comes while what runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from elastic.engine.parameters import visits
from elastic.engine.parameters.visits import Visits, absent
from elastic.engine.parameters.whole import Whole
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from tests.support.ranks import Ranks
from tests.support.segments import member, train
from tests.support.toys import toy_job

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

LAYERS, DIM, ROWS = 6, 4096, 4096
CUDA = torch.device("cuda")
LARGE = {"vocab": 64, "dim": 512, "layers": 6, "heads": 8}


@pytest.fixture
def gpu() -> Iterator[Ranks]:
    pool = Ranks(1, "cuda")
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16", "compile": True},
        {"precision": "bf16", "recompute": "block", "activations": "offload"},
        {"precision": "bf16", "recompute": "sqrt"},
        {"precision": "bf16", "recompute": "selective"},
    ],
    ids=str,
)
def test_the_bits_are_those_of_weights_on_the_device(
    gpu: Ranks, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """F3; the control: another seed gives other bits."""
    settings, offload = {"parallel": {"zero": 2}, **changes}, {"offload": "weights"}
    resident = train(gpu, toy_job(tmp_path / "resident", **settings), Layout(1, 1), 4)
    found = train(gpu, toy_job(tmp_path / "visiting", **offload, **settings), Layout(1, 1), 4)
    assert found.hash == resident.hash
    assert [each.loss for each in found.outcomes] == [each.loss for each in resident.outcomes]
    assert (
        train(gpu, toy_job(tmp_path / "other", seed=1, **offload, **settings), Layout(1, 1), 4).hash
        != resident.hash
    )


def allocated(world: World, job: Job) -> tuple[list[int], list[int]]:
    """Runs three steps.  Returns the bytes of the device before each step, and the most in the last one's
    forward and backward passes.
    """
    at, most = list[int](), list[int]()
    with pytest.MonkeyPatch.context() as patch, member(world, job, Version(0, 0), prefetch=0) as me:
        begin, end = Whole.begin_round, Whole.end_round

        def begins(self: Whole, number: int, *, last: bool) -> None:
            if number == 0:
                world.finish()
                at.append(torch.cuda.memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            begin(self, number, last=last)

        def ends(self: Whole) -> None:
            end(self)
            most.append(torch.cuda.max_memory_allocated() - at[-1])

        patch.setattr(Whole, "begin_round", begins)
        patch.setattr(Whole, "end_round", ends)
        for _ in range(3):
            me.step()
    return at, most


def test_f3_the_device_has_no_weights_between_steps(gpu: Ranks, tmp_path: Path) -> None:
    """F3, C6: the device has fewer bytes between steps by all weights in bf16, and at most by all but two
    blocks within one.

    The control has the optimizer's state alone on the host.
    """
    settings: dict[str, Any] = {
        "precision": "bf16",
        "parallel": {"zero": 2},
        "recompute": "block",
        "model_args": LARGE,
    }
    found: dict[str, tuple[list[int], list[int]]] = {
        offload: gpu.run(Layout(1, 1), allocated, toy_job(tmp_path / offload, offload=offload, **settings))[0]
        for offload in ("optimizer", "weights")
    }
    block = 2 * (4 * LARGE["dim"] ** 2)  # at least: attention alone
    between = found["optimizer"][0][-1] - found["weights"][0][-1]
    print(found, "bytes")
    assert between > LAYERS * block, "all blocks and more"
    most = {offload: before[-1] + max(within) for offload, (before, within) in found.items()}
    assert most["optimizer"] - most["weights"] > (LAYERS - 3) * block


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / DIM**0.5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(x @ self.weight)
        return x


def visitor() -> tuple[nn.Module, Visits]:
    """Returns blocks whose weights are in pinned memory, and these."""
    blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
    values = [parameter.detach() for parameter in blocks.parameters()]
    held = Visits(blocks, [str(n) for n in range(LAYERS)], CUDA)
    for block in blocks:
        block.weight = nn.Parameter(absent((DIM, DIM), torch.float32, CUDA))
    for host, value in zip(held.hold(blocks, dict(blocks.named_parameters())).values(), values, strict=True):
        assert host.is_pinned()
        host.copy_(value)
    return blocks, held


def passes(blocks: nn.Module, held: Visits, x: Tensor, *, backward: bool = True) -> None:
    with torch.set_grad_enabled(backward):
        held.begin()
        loss = blocks(x).sum()
    held.turn()
    if backward:
        loss.backward()
    held.end(last=True)


@pytest.mark.parametrize("drops", [True, False], ids=["dropped", "control"])
def test_f3_two_blocks_are_on_the_device_and_none_between_passes(
    monkeypatch: pytest.MonkeyPatch, drops: bool
) -> None:
    """F3: torch's allocator gives out the memory of two blocks at most, and has it back after the passes.

    In the control blocks keep their weights until the end.
    """
    (blocks, held), x, size = visitor(), torch.randn(8, DIM, device=CUDA), 4 * DIM**2
    passes(blocks, held, x)
    if not drops:
        monkeypatch.setattr(Visits, "_may_leave", lambda *_: False)
    for backward in (False, True):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        passes(blocks, held, x, backward=backward)
        most = (torch.cuda.max_memory_allocated() - before) / size
        assert torch.cuda.memory_allocated() == before
        gradients = 3 if backward else 0  # of one weight: two addends and their sum
        assert 2 <= most < 2.5 + gradients if drops else most >= LAYERS


@pytest.mark.parametrize("apart", [True, False], ids=["streams", "control"])
def test_c6_f3_weights_come_while_blocks_run(monkeypatch: pytest.MonkeyPatch, apart: bool) -> None:
    """C6, F3: the trace has copies to the device during products, in both passes; if both use one stream it
    has none.
    """
    (blocks, held), x = visitor(), torch.randn(ROWS, DIM, device=CUDA)
    if not apart:
        monkeypatch.setattr(visits, "stream", lambda purpose, device: torch.cuda.current_stream(device))
    passes(blocks, held, x)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        passes(blocks, held, x)
        torch.cuda.synchronize()
    events = [each for each in trace.events() or () if each.device_type == DeviceType.CUDA]
    spans = [(each.name, each.time_range.start, each.time_range.end) for each in events]
    copies = [(a, b) for name, a, b in spans if "Memcpy HtoD" in name and b - a > 100]
    kernels = [(a, b) for name, a, b in spans if "Mem" not in name]
    together = [(a, b) for a, b in copies if any(min(b, d) - max(a, c) > 100 for c, d in kernels)]
    print(len(copies), "copies, of which", len(together), "during kernels")
    assert len(copies) >= 2 * LAYERS - 1
    assert len(together) >= LAYERS if apart else not together
