"""Whole weights over NCCL: a trace shows that they come, and that their gradients go, while blocks compute;
the host waits for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from elastic.engine.parameters import gathers, whole
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.train.gauges.profiler import Profiler
from storage.objects import ObjectStore
from tests.support.ranks import Ranks
from tests.support.segments import compute, member
from tests.support.toys import toy_job

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

LAYERS, PAIR = 6, Layout(1, 2)
LARGE: dict[str, Any] = {
    # 134 MB of bf16 a block
    "model_args": {"vocab": 29, "dim": 2048, "layers": LAYERS, "heads": 16, "hidden": 8192},
    "data": {"dataset": "tests.support.toys:Sums", "args": {"seq_len": 8192}},
    # blocks take the device longer than the host: with 2,048 tokens nothing is launched yet when weights have
    # come
    "microbatch": 2,
    "global_batch": 8,
    "precision": "bf16",
    "copies": {"copy_every": 0},
    "workers": {"gpus": 1},
    "reproducible": False,
    "parallel": {"zero": 2},
}


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    pool = Ranks(2, "cuda")
    yield pool
    pool.close()


class Kernel(NamedTuple):
    name: str
    stream: int
    start: float
    end: float


@contextmanager
def streams(apart: bool) -> Iterator[None]:
    """Unless ``apart``, all is on one stream."""
    with pytest.MonkeyPatch.context() as patch:
        if not apart:
            for module in (gathers, whole):
                patch.setattr(module, "stream", lambda _purpose, device: torch.cuda.current_stream(device))
        yield


def traced(world: World, job: Job, apart: bool) -> tuple[list[Kernel], list[float]]:
    """Returns the kernels of a step's rounds, and the losses of the steps before."""
    with streams(apart), member(world, job, Version(0, 0), prefetch=0) as me:
        losses = [me.step().loss for _ in range(3)]
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            compute(me.session, me.state, 4)
            world.finish()
    found = [
        each
        for each in trace.events() or ()
        if each.device_type == DeviceType.CUDA and "Mem" not in each.name
    ]
    return [
        Kernel(each.name, each.device_resource_id, each.time_range.start, each.time_range.end)
        for each in found
    ], losses


def overlapped(kernels: Sequence[Kernel], name: str) -> list[float]:
    """Returns the part of each collective of this name during which kernels of another stream run that are no
    collectives.
    """
    collectives = [each for each in kernels if each.name.startswith("ncclDevKernel") and name in each.name]
    others = [each for each in kernels if "nccl" not in each.name]
    parts = []
    for each in collectives:
        spans = sorted(
            (max(o.start, each.start), min(o.end, each.end)) for o in others if o.stream != each.stream
        )
        covered, until = 0.0, each.start
        for start, end in spans:
            covered += max(0.0, end - max(start, until))
            until = max(until, end)
        parts.append(covered / (each.end - each.start))
    return parts


def busy(kernels: Sequence[Kernel]) -> float:
    """Returns the part of the time in which the device computes."""
    computing = [each for each in kernels if "nccl" not in each.name]
    return sum(each.end - each.start for each in computing) / (
        max(each.end for each in kernels) - min(each.start for each in kernels)
    )


def test_b12_b13_weights_come_and_gradients_go_while_blocks_compute(gpus: Ranks, tmp_path: Path) -> None:
    """B12, B13, C6: the last gathers of a forward pass are hidden, and so are most sums of gradients; a trace
    on one stream shows neither.

    The device has nothing to do when the step begins, so the first blocks wait for the host, and their
    weights come before anything runs. The losses are the same: two addends commute.
    """
    kernels, losses = gpus.run(PAIR, traced, toy_job(tmp_path / "apart", **LARGE), True)[0]
    come, go = overlapped(kernels, "AllGather"), overlapped(kernels, "ReduceScatter")
    print(
        f"overlapped: {sum(come) / len(come):.2f} of the time of gathers, {sum(go) / len(go):.2f} of that "
        f"of sums; busy {busy(kernels):.2f}"
    )
    assert busy(kernels) > 0.9, "else the host is measured"
    rounds = 2
    assert len(come) == LAYERS + 1 and min(come[-3:]) > 0.9
    assert len(go) == rounds * (LAYERS + 1) and sum(part > 0 for part in go) >= rounds * (LAYERS - 1)
    assert sum(go) / len(go) > 0.5, "B13 says so"
    control, same = gpus.run(PAIR, traced, toy_job(tmp_path / "control", **LARGE), False)[0]
    assert not any(overlapped(control, "AllGather")) and not any(overlapped(control, "ReduceScatter"))
    assert losses == same and len(set(losses)) == len(losses)


def told(world: World, job: Job, apart: bool) -> list[str]:
    """Returns what is said of a profile of the second and third step."""
    said: list[str] = []
    profiler = Profiler(job, ObjectStore.open(job.bucket), said.append)
    with streams(apart), member(world, job, Version(0, 0), prefetch=0) as me:
        for step in (1, 2, 3):
            with profiler.watch(step, world):
                me.step()
    profiler.close()
    return said


def test_b13_a_profile_says_how_much_was_hidden(gpus: Ranks, tmp_path: Path) -> None:
    """B13: some of the time of collectives in two steps; some of them wait for the other member.  The
    control: on one stream, nothing.
    """
    (said,), nothing = gpus.run(PAIR, told, toy_job(tmp_path / "apart", profile="2-3", **LARGE), True)
    found = [
        int(part)
        for part in re.findall(r"collectives took \S+ ms, (\d+)% of it hidden under computing", said)
    ]
    print(said)
    assert len(found) == 2 and nothing == []
    assert min(found) > 0
    (control,), _ = gpus.run(PAIR, told, toy_job(tmp_path / "control", profile="2-3", **LARGE), False)
    assert re.findall(r"collectives took \S+ ms, (\d+)% of it hidden under computing", control) == ["0", "0"]


def waits(world: World, job: Job, ends: bool) -> str:
    """Returns the error of the first call by which the host waits for the device, from the gathers to the end
    of a forward pass.
    """
    with member(world, job, Version(0, 0), prefetch=0) as me:
        me.step()
        parameters, tokens = me.state.parameters, torch.zeros(1, 64, dtype=torch.int64, device=world.device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            parameters.begin_round(0, last=True)
            out = me.state.model(tokens)
            parameters.end_forward()
            if ends:
                out.sum().item()
        except RuntimeError as error:
            return str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            world.finish()
    return ""


def test_the_host_waits_for_no_gather(gpus: Ranks, tmp_path: Path) -> None:
    """The control asks for a value at the end."""
    assert gpus.run(PAIR, waits, toy_job(tmp_path / "none", **LARGE), False) == ["", ""]
    assert all(
        "synchronizing" in error
        for error in gpus.run(PAIR, waits, toy_job(tmp_path / "control", **LARGE), True)
    )
