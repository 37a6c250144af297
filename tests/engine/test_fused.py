"""F7: fused operations compute what the plain ones do, the loss always, and all else in jobs that
``compile``.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.models import llama
from tests.benchmarks.fused import Pair, pairs
from tests.support.segments import member
from tests.support.toys import small_job

SMALL = {"vocab": 29, "dim": 32, "layers": 1, "heads": 2}


class Ran(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that run one by one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[str(func)] += 1
        return func(*args, **(kwargs or {}))


def close(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(
        torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(found, expected, strict=True)
    )


@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch's compiler, about torch
@pytest.mark.parametrize("name", ["loss", "RMSNorm", "SwiGLU", pytest.param("block", marks=pytest.mark.full)])
def test_f7_a_fused_operation_is_the_plain_one(name: str) -> None:
    """F7: output and gradients to 1e-5 in float32.  The control: inputs that are a little larger are outside
    of that.

    What is compiled makes, by the compiler's own count, at most half as many kernels as the plain form runs
    operations, forward and back.
    """
    torch.compiler.reset()
    pair: Pair = pairs("tiny", "cpu", torch.float32)[name]
    with Ran() as plain:
        expected = pair.results(pair.plain)
    torch._inductor.metrics.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        found = pair.results(pair.fused)
    assert close(found, expected)
    assert name == "loss" or 0 < 2 * torch._inductor.metrics.generated_kernel_count <= plain.ran.total()
    with torch.no_grad():
        for each in pair.inputs:
            each.mul_(1.001)
    assert not close(pair.results(pair.fused), expected)


def losses(job: Job, steps: int = 3) -> tuple[list[float], int]:
    """Trains in this process.  Returns the losses, and how often the loss was fused."""
    calls, world = [], World.alone(torch.device("cpu"))
    genuine = llama.cross_entropy

    def fused(*args: Tensor) -> Tensor:
        calls.append(1)
        return genuine(*args)

    with pytest.MonkeyPatch.context() as patch, member(world, job, Version(0, 0)) as me:
        patch.setattr(llama, "cross_entropy", fused)
        found = [me.step().loss for _ in range(steps)]
    world.close()
    return found, len(calls)


def test_f7_the_loss_of_each_microbatch_is_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F7: to the losses that are not fused, as where they are scaled.  The control: another seed."""
    job = small_job(tmp_path, model_args=SMALL, global_batch=4)
    (fused, many), (other, _) = losses(job), losses(job.replace(seed=1))
    monkeypatch.setattr("elastic.engine.kernels.is_scaled", lambda precision: True)
    plain, none = losses(job)
    assert (many, none) == (3 * 2, 0)
    assert fused == pytest.approx(plain, rel=1e-5)
    assert other != pytest.approx(plain, rel=1e-5)


@pytest.mark.filterwarnings("default::DeprecationWarning")
# torch's own, while it compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.full  # compiles blocks
def test_f7_a_job_chooses_fused_blocks_by_compile(tmp_path: Path) -> None:
    """F7: the same losses to 1e-5."""
    (fused, _), (plain, _) = (
        losses(small_job(tmp_path, model_args=SMALL, compile=compiles)) for compiles in (True, False)
    )
    assert fused == pytest.approx(plain, rel=1e-5)
