"""These tests check how kernels are launched, and what must stay outside of compiled code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from elastic.config.sections import WorkerFault
from elastic.engine.optim.base import rule_of
from elastic.engine.parameters.fsdp import FSDP_STREAMS
from elastic.engine.world import World
from elastic.ids import Version
from elastic.plan.layout import Layout
from elastic.train.machine.gpus import LAUNCHES
from elastic.train.model import State, builder_of
from elastic.train.own_faults import FaultOrder, Faults, InjectedError
from tests.support.commands import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.toys import toy_job

ASK = """
import os, threading
from elastic.train.session import prepare_process
from tests.support.toys import toy_job

control = os.fork() == 0  # nothing has imported the compiler's settings yet
if not control:
    os.wait()
    prepare_process(toy_job("/nowhere"))
from torch._inductor import config
asked = threading.Thread(target=lambda: print(config.use_static_cuda_launcher, flush=True))
asked.start(), asked.join()
"""


def test_no_thread_launches_compiled_kernels_with_the_gil_held() -> None:
    """The setting also holds in threads that the process makes later, such as autograd's.  If the control, a
    process that is not prepared, fails, torch has changed its default.
    """
    # a local run of another test has set them here
    fresh = {name: value for name, value in os.environ.items() if name not in LAUNCHES}
    ran = subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=ROOT,
        env=fresh,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert ran.stdout.split() == ["True", "False"], "the control, and a worker"


WAITS = """
from actors import own_cluster

own_cluster.set_variables()
import torch._inductor.compile_fx  # as the guide says for clusters that are there before a run
from torch._inductor import config
print(config.use_static_cuda_launcher)
"""


@pytest.mark.full
def test_nor_does_a_process_that_ray_has_prepared() -> None:
    """The setting is read as the compiler is imported, which such a process does before it knows of any job."""
    fresh = {name: value for name, value in os.environ.items() if name not in LAUNCHES}
    ran = subprocess.run(
        [sys.executable, "-c", WAITS],
        cwd=ROOT,
        env=fresh,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert ran.stdout.split() == ["False"]
    guide = (ROOT / "examples" / "guide" / "clusters.md").read_text(encoding="utf-8")
    assert all(f" {name}={value} " in guide for name, value in LAUNCHES.items()), (
        "for nodes that somebody starts"
    )


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Twice(torch.nn.Module):
    """A model with blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at what is no leaf
@pytest.mark.parametrize("by", ["the job", "chaos"])
@pytest.mark.parametrize("point", ["forward", "backward"])
def test_faults_lie_outside_of_what_is_compiled(point: str, by: str) -> None:
    """Steps go by without compiling again, and the fault comes when it is due, also one that nobody knew of
    when the model was made.
    """
    compiled = []

    def backend(graph: Any, _inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model, world = Twice(), cast(World, _Seat())
    for layer in model.layers:
        layer.compile(fullgraph=True, backend=backend)
    faults = Faults((WorkerFault(point=point, step=6, kind="exception"),) if by == "the job" else ())
    for step in range(1, 6):
        faults.aim(step, model, world)
        model(torch.ones(2, 4)).sum().backward()
    if by == "chaos":
        faults.ask(FaultOrder("exception", point))
    faults.aim(6, model, world)
    with pytest.raises(InjectedError):
        model(torch.ones(2, 4)).sum().backward()
    faults.aim(7, model, world)
    model(torch.ones(2, 4)).sum().backward()
    assert len(compiled) == 2  # one for a block whose input needs no gradient, one for all others


class _Seat:
    """A world reduced to what a fault asks of it."""

    rank, generation = 0, 1


def test_the_streams_that_are_kept_are_all_that_fsdp_has(tmp_path: Path) -> None:
    """The streams are known by their private names, which a later torch may change."""
    job, world = toy_job(tmp_path), World.imagined(Layout(1, 2), torch.device("cpu"))
    try:
        wrapped = State(job, builder_of(job), rule_of(job), world, Version(0, 0)).model._get_fsdp_state()  # type: ignore[operator]
        wrapped._lazy_init()
        assert {name for name in vars(wrapped._comm_ctx) if name.endswith("_stream")} == set(FSDP_STREAMS)
    finally:
        world.close()
