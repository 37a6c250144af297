"""GPUs over NCCL run the same job as CPUs over gloo, and give the same bits in every layout of GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic.models.llama import Llama
from elastic.plan.layout import Layout
from tests.support.ranks import Ranks
from tests.support.segments import Trained, train
from tests.support.toys import toy_job

GPUS = torch.cuda.device_count()
STEPS = 6
LAYOUTS = [
    layout
    for layout in (Layout(1, 1), Layout(1, 2), Layout(2, 1), Layout(1, 3), Layout(2, 2), Layout(1, 4))
    if layout.world <= GPUS
]

pytestmark = pytest.mark.skipif(not GPUS, reason="no GPU here")


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    pool = Ranks(GPUS, "cuda")
    yield pool
    pool.close()


def trained(pool: Ranks, folder: Path, layout: Layout, **changes: object) -> Trained:
    return train(pool, toy_job(folder / str(layout.world) / str(layout.dp_shard), **changes), layout, STEPS)


@pytest.mark.parametrize(("precision", "compiled"), [("fp32", False), ("bf16", False), ("bf16", True)])
def test_b17_the_same_config_runs_with_gloo_and_nccl(
    gpus: Ranks, tmp_path: Path, precision: str, compiled: bool
) -> None:
    """B17: one job, all its settings, on either; the losses are near, the ledgers equal; on GPUs every layout
    gives the same bits, also where the blocks are compiled."""
    changes = {
        "precision": precision,
        "compile": compiled,
        "model": "tests.gpu.test_nccl:Waves",
        "model_args": MODEL,
    }
    cpus = Ranks(1)
    try:
        gloo = trained(cpus, tmp_path / "gloo", Layout(1, 1), **(changes | {"compile": False}))
    finally:
        cpus.close()
    nccl = [trained(gpus, tmp_path / "nccl", layout, **changes) for layout in LAYOUTS]
    assert len({found.hash for found in nccl}) == 1
    for found in nccl:
        for ours, theirs in zip(found.outcomes, gloo.outcomes, strict=True):
            assert (ours.step, ours.samples, ours.tokens) == (theirs.step, theirs.samples, theirs.tokens)
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-3 if precision == "fp32" else 1e-2)


def test_the_library_sum_depends_on_the_layout(gpus: Ranks, tmp_path: Path) -> None:
    """Negative control; two addends commute, so it takes three."""
    if GPUS < 3:
        pytest.skip(f"it takes 3 GPUs; here are {GPUS}")
    one, three = (
        trained(gpus, tmp_path, layout, reproducible=False) for layout in (Layout(1, 1), Layout(1, 3))
    )
    assert one.hash != three.hash


MODEL = {"vocab": 29, "dim": 32, "layers": 4, "heads": 2}
"""The model has no dropout, because random numbers of CPUs and GPUs differ."""


class Waves(Llama):
    """A model whose first weights are no random numbers."""

    def init_weights(self) -> None:
        for number, parameter in enumerate(self.parameters()):
            places = torch.arange(parameter.numel(), dtype=torch.float32, device=parameter.device)
            waves = 0.05 * torch.sin(0.7 * places + number)
            parameter.copy_(
                torch.ones_like(parameter) if parameter.dim() < 2 else waves.view(parameter.shape)
            )
